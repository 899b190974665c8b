// Access to torch's tensors through the stable ABI, for the bindings of every library.
#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <float.h>
#include <math.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "../common/operands.h"

namespace fastattn {

inline std::string& operation_names() {
  static std::string names;
  return names;
}

// Registers the function of this name as an operation of the library. Python defines its schema.
#define FASTATTN_OPERATION(name)                                                      \
  STABLE_TORCH_LIBRARY_IMPL(FASTATTN_LIBRARY, CompositeExplicitAutograd, m) {         \
    m.impl(#name, TORCH_BOX(&name));                                                  \
    operation_names() += (operation_names().empty() ? "" : ",") + std::string(#name); \
  }

// Registers a fast path: a template over whether to return what the backward pass reads. `NAME_fast` returns the
// results, `NAME_fast_saving` that too.
#define FASTATTN_FAST_PATH(name)                                                                                  \
  STABLE_TORCH_LIBRARY_IMPL(FASTATTN_LIBRARY, CompositeExplicitAutograd, m) {                                     \
    m.impl(#name "_fast", TORCH_BOX(&Unpacked<&name##_fast<false>>::call));                                       \
    m.impl(#name "_fast_saving", TORCH_BOX(&name##_fast<true>));                                                  \
    operation_names() += std::string(operation_names().empty() ? "" : ",") + #name "_fast," #name "_fast_saving"; \
  }

// A function that returns what `function` returns, but not in a tuple of one.
template <auto function>
struct Unpacked;

template <class... Results, class... Arguments, std::tuple<Results...> (*function)(Arguments...)>
struct Unpacked<function> {
  static auto call(Arguments... arguments) {
    if constexpr (sizeof...(Results) == 1)
      return std::get<0>(function(arguments...));
    else
      return function(arguments...);
  }
};

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// What a fast path returns: the result, and with `keep` what the backward pass reads of the call.
template <bool keep, class... Kept>
using Returned = std::conditional_t<keep, std::tuple<Tensor, Kept...>, std::tuple<Tensor>>;

using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

// Whether the kernels have this dtype. It compares torch's numbers, because a ScalarType takes a look-up per call.
inline bool is_dtype(const Tensor& tensor, Dtype* dtype) {
  int32_t number;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &number));
  if (number == aoti_torch_dtype_float32())
    *dtype = Dtype::float32;
  else if (number == aoti_torch_dtype_bfloat16())
    *dtype = Dtype::bfloat16;
  else if (number == aoti_torch_dtype_float16())
    *dtype = Dtype::float16;
  else if (number == aoti_torch_dtype_bool())
    *dtype = Dtype::boolean;
  else
    return false;
  return true;
}

inline Dtype dtype_of(const Tensor& tensor, const char* name) {
  Dtype dtype;
  STD_TORCH_CHECK(is_dtype(tensor, &dtype), name, " has dtype ", torch::headeronly::toString(tensor.scalar_type()),
                  ", expected float32, bfloat16 or float16");
  return dtype;
}

inline void check_dtype(const Tensor& tensor, const char* name, Dtype expected) {
  Dtype dtype;
  STD_TORCH_CHECK(is_dtype(tensor, &dtype) && dtype == expected, name, " has dtype ",
                  torch::headeronly::toString(tensor.scalar_type()), ", not that of the other operands");
}

inline Dtype dtype_from(ScalarType type) {
  return type == ScalarType::Float ? Dtype::float32 : type == ScalarType::BFloat16 ? Dtype::bfloat16 : Dtype::float16;
}

inline int32_t shim_dtype(Dtype dtype) {
  switch (dtype) {
    case Dtype::float32: return aoti_torch_dtype_float32();
    case Dtype::bfloat16: return aoti_torch_dtype_bfloat16();
    case Dtype::float16: return aoti_torch_dtype_float16();
    case Dtype::boolean: break;
  }
  return aoti_torch_dtype_bool();
}

// Request huge pages. A page fault per 4 KiB of fresh memory costs more than the kernels' work on it. Huge pages have
// 512 times fewer faults.
inline void prefer_huge_pages(const Tensor& tensor, int64_t bytes) {
  constexpr int64_t kWorthwhile = 4 << 20;
  constexpr uintptr_t kPage = 4096;
  if (bytes < kWorthwhile) return;
  const uintptr_t first = (uintptr_t)tensor.mutable_data_ptr();
  const uintptr_t begin = (first + kPage - 1) & ~(kPage - 1), end = (first + (uintptr_t)bytes) & ~(kPage - 1);
  madvise((void*)begin, end - begin, MADV_HUGEPAGE);  // a hint, which Linux kernels without huge pages refuse
}

struct Device {
  int32_t type = aoti_torch_device_type_cpu(), index = 0;
};

inline Device device_of(const Tensor& tensor) {
  Device device;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device.type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &device.index));
  return device;
}

inline std::string shape_of(Sizes sizes) {
  std::string shape;
  for (const int64_t size : sizes) shape += (shape.empty() ? "(" : ", ") + std::to_string(size);
  return shape + ")";
}

// Return the address of a tensor's first element. A tensor whose storage was freed has none, unless it is empty.
inline const void* address_of(const Tensor& tensor) {
  const void* address = tensor.const_data_ptr();
  STD_TORCH_CHECK(address || tensor.numel() == 0, "fastattn: the storage of a tensor of shape ",
                  shape_of(tensor.sizes()), " was freed; the call needs its data");
  return address;
}

// Return an empty tensor, without the dispatcher, which costs as much as a small operation. The error is worded here,
// because the stable ABI does not pass torch's message.
inline Tensor empty_strided(Sizes sizes, Sizes strides, Dtype dtype, Device device) {
  AtenTensorHandle handle;
  const AOTITorchError error = aoti_torch_empty_strided((int64_t)sizes.size(), sizes.data(), strides.data(),
                                                        shim_dtype(dtype), device.type, device.index, &handle);
  STD_TORCH_CHECK(error == AOTI_TORCH_SUCCESS, "fastattn: out of memory, for a tensor of shape ", shape_of(sizes));
  const Tensor tensor(handle);
  if (device.type == aoti_torch_device_type_cpu()) prefer_huge_pages(tensor, tensor.numel() * size_of(dtype));
  return tensor;
}

constexpr int kMaxDims = 64;  // torch's own limit

inline Tensor empty(Sizes sizes, Dtype dtype, Device device) {
  int64_t strides[kMaxDims], stride = 1;
  for (int64_t d = (int64_t)sizes.size() - 1; d >= 0; --d) {
    strides[d] = stride;
    stride *= max(sizes[d], 1);
  }
  return empty_strided(sizes, Sizes(strides, sizes.size()), dtype, device);
}

inline Tensor empty(std::initializer_list<int64_t> sizes, Dtype dtype, Device device) {
  return empty(Sizes(sizes.begin(), sizes.size()), dtype, device);
}

inline bool has_dense_columns(const Tensor& tensor) {
  const Sizes sizes = tensor.sizes(), strides = tensor.strides();
  const size_t last = sizes.size() - 1;
  return strides[last] == 1 || sizes[last] == 1;
}

inline bool have_one_shape(const Tensor& a, const Tensor& b) {
  const Sizes sizes = a.sizes(), others = b.sizes();
  return std::equal(sizes.begin(), sizes.end(), others.begin(), others.end());
}

// The checks of the fast paths (fastattn/ops/register.py), which chose the library by the device of the first operand.

// Whether the tensor is strided, on this device.
inline bool is_strided_on(const Tensor& tensor, Device device) {
  int32_t layout;
  if (!tensor.defined()) return false;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(tensor.get(), &layout));
  if (layout != aoti_torch_layout_strided()) return false;
  const Device own = device_of(tensor);
  return own.type == device.type && (own.index == device.index || own.type == aoti_torch_device_type_cpu());
}

// Whether the kernels have the tensor's dtype, a floating-point one.
inline bool is_plain(const Tensor& tensor, Device device, Dtype* dtype) {
  return is_strided_on(tensor, device) && is_dtype(tensor, dtype) && *dtype != Dtype::boolean;
}

// Whether it holds `count` contiguous int64, as seeds, lengths and offsets do.
inline bool is_plain_integers(const Tensor& tensor, Device device, int64_t count) {
  int32_t number;
  if (!is_strided_on(tensor, device) || tensor.dim() != 1 || tensor.size(0) != count || !tensor.is_contiguous())
    return false;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &number));
  return number == aoti_torch_dtype_int64();
}

// Whether a mask is bool or floating-point, and each of its four sizes is 1 or the one given.
inline bool is_plain_mask(const std::optional<Tensor>& mask, Device device, std::initializer_list<int64_t> sizes) {
  Dtype dtype;
  if (!mask) return true;
  if (!is_strided_on(*mask, device) || !is_dtype(*mask, &dtype) || mask->dim() != 4) return false;
  for (int d = 0; d < 4; ++d)
    if (mask->size(d) != 1 && mask->size(d) != sizes.begin()[d]) return false;
  return true;
}

// Whether dropout's arguments are plain; sets the threshold, below which elements are dropped.
inline bool is_plain_dropout(double dropout_p, const std::optional<Tensor>& seed, Device device, int64_t* threshold) {
  if (!(dropout_p >= 0 && dropout_p <= 1) || (seed && !is_plain_integers(*seed, device, 2))) return false;
  *threshold = (int64_t)(dropout_p * 65536 + 0.5);
  return true;
}

inline Tensor view_of(const Tensor& tensor, Sizes sizes, const int64_t* strides) {
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_as_strided(tensor.get(), sizes.data(), strides, &handle));
  return Tensor(handle);
}

// Return a copy for the backward pass, of what the caller may change before.
inline Tensor copy_of(const Tensor& tensor, Device device) {
  AtenTensorHandle handle;
  if (device.type != aoti_torch_device_type_cpu() || !tensor.is_contiguous()) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_clone(tensor.get(), &handle));
    return Tensor(handle);
  }
  int32_t dtype;
  const Sizes sizes = tensor.sizes();
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided((int64_t)sizes.size(), sizes.data(), tensor.strides().data(), dtype,
                                                  device.type, device.index, &handle));
  Tensor copy(handle);
  memcpy(copy.mutable_data_ptr(), address_of(tensor), (size_t)tensor.numel() * tensor.element_size());
  return copy;
}

inline std::optional<Tensor> copy_of(const std::optional<Tensor>& tensor, Device device) {
  return tensor ? copy_of(*tensor, device) : tensor;
}

// Return the mask that a backward pass reads: a copy if it is bool, whose expanded dimensions (stride 0) stay expanded.
// torch too saves a float mask as it is.
inline std::optional<Tensor> kept_mask(const std::optional<Tensor>& mask, Device device) {
  if (!mask || dtype_of(*mask, "attn_mask") != Dtype::boolean) return mask;
  int64_t stored[4], expanded[4];
  for (int d = 0; d < 4; ++d) stored[d] = mask->stride(d) == 0 ? std::min(mask->size(d), (int64_t)1) : mask->size(d);
  if (std::equal(stored, stored + 4, mask->sizes().begin())) return copy_of(*mask, device);
  const Tensor copy = copy_of(view_of(*mask, Sizes(stored, 4), mask->strides().data()), device);
  for (int d = 0; d < 4; ++d) expanded[d] = mask->stride(d) == 0 ? 0 : copy.stride(d);
  return view_of(copy, mask->sizes(), expanded);
}

// Return the seed of a plain call that drops elements: the caller's, or one drawn from the default generator of the
// device. With `keep` it is a copy, because the caller may change the seed before the backward pass.
inline std::optional<Tensor> seed_of(const std::optional<Tensor>& seed, Device device, int64_t threshold, bool keep) {
  if (threshold == 0) return std::nullopt;
  if (seed) return keep ? copy_of(*seed, device) : seed;
  const int64_t size = 2, stride = 1;
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(1, &size, &stride, aoti_torch_dtype_int64(), device.type, device.index, &handle));
  const Tensor own(handle);
  using torch::stable::detail::from;
  StableIValue stack[] = {from(own), from(INT64_MIN), from(std::optional<int64_t>(INT64_MAX)), from(std::nullopt)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::random_", "from", stack, TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// Whether the scale is finite in float32; flushes it to 0 below float32's least normal number.
inline bool is_plain_scale(double* scale) {
  if (!(fabs(*scale) <= FLT_MAX)) return false;
  if (fabs(*scale) < FLT_MIN) *scale = 0;
  return true;
}

// Whether the sides of a window are -1 or more; limits them to `left` and `right`, the positions that exist. -1 has no
// bound, so it reaches to the last one.
inline bool is_plain_window(int64_t* window_left, int64_t* window_right, int64_t left, int64_t right, bool is_causal) {
  if (*window_left < -1 || *window_right < -1) return false;
  *window_left = *window_left < 0 ? left : std::min(*window_left, left);
  *window_right = is_causal ? 0 : *window_right < 0 ? right : std::min(*window_right, right);
  return true;
}

inline Tensor dense(const Tensor& tensor) {
  if (tensor.is_contiguous()) return tensor;
  std::optional<Tensor> copy;
  try {
    copy = torch::stable::contiguous(tensor);
  } catch (const std::exception&) {
  }
  STD_TORCH_CHECK(copy, "fastattn: out of memory, for a dense copy of shape ", shape_of(tensor.sizes()));
  return *copy;
}

inline Tensor with_dense_columns(const Tensor& tensor) { return has_dense_columns(tensor) ? tensor : dense(tensor); }

inline std::optional<Tensor> dense(const std::optional<Tensor>& tensor) { return tensor ? dense(*tensor) : tensor; }

template <class T>
const T* data_of(const std::optional<Tensor>& tensor) {
  return tensor ? (const T*)address_of(*tensor) : nullptr;
}

inline void* writable(const Tensor& tensor) { return const_cast<void*>(address_of(tensor)); }

// Return the operand of a tensor (batch, heads, rows, columns), or (rows, heads, columns) for packed sequences.
inline Heads heads_of(const Tensor& tensor) {
  const Sizes strides = tensor.strides();
  if (strides.size() == 3) return {writable(tensor), 0, strides[1], strides[0]};
  return {writable(tensor), strides[0], strides[1], strides[2]};
}

inline Mask mask_of(const std::optional<Tensor>& tensor) {
  Mask mask = {};
  if (!tensor) return mask;
  mask.data = writable(*tensor);
  mask.dtype = dtype_of(*tensor, "attn_mask");
  const auto dimension = [&](int d, int64_t* size, int64_t* stride) {
    *stride = tensor->size(d) == 1 ? 0 : tensor->stride(d);
    *size = *stride == 0 ? 1 : tensor->size(d);
  };
  dimension(0, &mask.batches, &mask.batch);
  dimension(1, &mask.heads, &mask.head);
  dimension(2, &mask.rows, &mask.row);
  dimension(3, &mask.columns, &mask.column);
  return mask;
}

// Give a mask its full sizes, for its gradient, which has an element for every element of the mask, also expanded ones.
inline void set_all_elements(Mask& mask, const Tensor& tensor) {
  mask.batches = tensor.size(0), mask.heads = tensor.size(1), mask.rows = tensor.size(2), mask.columns = tensor.size(3);
}

template <class Problem>
void set_dropout(Problem& problem, const std::optional<Tensor>& seed, int64_t threshold) {
  problem.threshold = (int)threshold;
  problem.seed = data_of<int64_t>(seed);
}

}  // namespace
}  // namespace fastattn
