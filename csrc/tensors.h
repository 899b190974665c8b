// What the bindings of every library need of torch's tensors, through the stable ABI.
#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <sys/mman.h>

#include <optional>

#include "common/attention.h"
#include "common/softmax_dropout.h"
#include "common/types.h"

namespace fastattn {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

// Told apart by torch's own numbers: a ScalarType would be looked up at each call.
inline bool is_dtype(const Tensor& tensor, Dtype* dtype) {
  int32_t number;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &number));
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

inline void check_dtype(const Tensor& tensor, const char* name, const Tensor& like) {
  int32_t number, expected;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &number));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &expected));
  STD_TORCH_CHECK(number == expected, name, " has dtype ", torch::headeronly::toString(tensor.scalar_type()),
                  ", expected ", torch::headeronly::toString(like.scalar_type()));
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

// Fresh memory costs a page fault for every 4 KiB, more than the kernels' own work on it; huge pages cost 512 times
// fewer.
inline void prefer_huge_pages(const Tensor& tensor, int64_t bytes) {
  constexpr int64_t kWorthwhile = 4 << 20;
  constexpr uintptr_t kPage = 4096;
  if (bytes < kWorthwhile) return;
  const uintptr_t first = (uintptr_t)tensor.mutable_data_ptr();
  const uintptr_t begin = (first + kPage - 1) & ~(kPage - 1), end = (first + (uintptr_t)bytes) & ~(kPage - 1);
  madvise((void*)begin, end - begin, MADV_HUGEPAGE);  // a hint: kernels without huge pages refuse it
}

struct Device {
  int32_t type = aoti_torch_device_type_cpu(), index = 0;
};

inline Device device_of(const Tensor& tensor) {
  Device device;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device.type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &device.index));
  return device;
}

// Not through the dispatcher, which costs as much as a small operation.
inline Tensor empty_strided(Sizes sizes, Sizes strides, Dtype dtype, Device device = {}) {
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided((int64_t)sizes.size(), sizes.data(), strides.data(),
                                                         shim_dtype(dtype), device.type, device.index, &handle));
  const Tensor tensor(handle);
  if (device.type == aoti_torch_device_type_cpu())
    prefer_huge_pages(tensor, tensor.numel() * (dtype == Dtype::float32 ? 4 : dtype == Dtype::boolean ? 1 : 2));
  return tensor;
}

constexpr int kMaxDims = 64;  // torch's own limit

inline Tensor empty(Sizes sizes, Dtype dtype, Device device = {}) {
  int64_t strides[kMaxDims], stride = 1;
  for (int64_t d = (int64_t)sizes.size() - 1; d >= 0; --d) {
    strides[d] = stride;
    stride *= sizes[d] > 1 ? sizes[d] : 1;
  }
  return empty_strided(sizes, Sizes(strides, sizes.size()), dtype, device);
}

// A tensor as a stack of matrices: the last two dimensions, and all others folded into two.
struct Matrices {
  int64_t outer = 1, inner = 1, rows = 1, columns = 1;
  int64_t outer_stride = 0, inner_stride = 0, row_stride = 0;

  // False where the columns are not dense or the other dimensions do not fold.
  bool describe(const Tensor& tensor) {
    const Sizes sizes = tensor.sizes(), strides = tensor.strides();
    const int64_t dims = (int64_t)sizes.size();
    if (tensor.numel() == 0) {  // whatever its strides are, which no copy would change
      outer = 0;
      return true;
    }
    if (dims >= 1) {
      columns = sizes[dims - 1];
      if (columns > 1 && strides[dims - 1] != 1) return false;
    }
    if (dims >= 2) {
      rows = sizes[dims - 2];
      row_stride = strides[dims - 2];
    }
    int64_t folded = 0;
    for (int64_t d = dims - 3; d >= 0; --d) {
      if (sizes[d] == 1) continue;
      if (folded == 0) {
        inner = sizes[d];
        inner_stride = strides[d];
        folded = 1;
      } else if (folded == 1 && strides[d] == inner * inner_stride) {
        inner *= sizes[d];
      } else if (folded == 1) {
        outer = sizes[d];
        outer_stride = strides[d];
        folded = 2;
      } else if (strides[d] == outer * outer_stride) {
        outer *= sizes[d];
      } else {
        return false;
      }
    }
    return true;
  }
};

// A tensor as rows at one stride: the last dimension, and all others folded into one; a copy where they do not fold.
struct Rows {
  Tensor tensor;
  const void* data;
  Dtype dtype;
  int64_t stride = 0;

  Rows(const Tensor& source, const char* name)
      : tensor(folds(source) ? source : torch::stable::contiguous(source)),
        data(tensor.const_data_ptr()),
        dtype(dtype_of(source, name)) {
    const Sizes sizes = tensor.sizes(), strides = tensor.strides();
    for (int64_t d = (int64_t)sizes.size() - 2; d >= 0; --d)
      if (sizes[d] > 1) {
        stride = strides[d];
        break;
      }
  }

 private:
  static bool folds(const Tensor& tensor) {
    const Sizes sizes = tensor.sizes(), strides = tensor.strides();
    const int64_t last = (int64_t)sizes.size() - 1;
    if (sizes[last] > 1 && strides[last] != 1) return false;
    int64_t expected = -1;
    for (int64_t d = last - 1; d >= 0; --d) {
      if (sizes[d] == 1) continue;
      if (expected >= 0 && strides[d] != expected) return false;
      expected = strides[d] * sizes[d];
    }
    return true;
  }
};

inline Tensor nothing(Dtype dtype, Device device = {}) {
  const int64_t size = 0;
  return empty(Sizes(&size, 1), dtype, device);
}

// A parameter's gradient, uninitialised, in the dtype that is asked for; without one nothing.
inline Tensor parameter_grad(const std::optional<ScalarType>& dtype, int64_t columns, Device device = {}) {
  const int64_t size = dtype ? columns : 0;
  return empty(Sizes(&size, 1), dtype ? dtype_from(*dtype) : Dtype::float32, device);
}

inline Sizes without_last(Sizes sizes) { return Sizes(sizes.data(), sizes.size() - 1); }

// (matrices, rows, columns) as the dropout formula counts them: a 1-D tensor is one row.
template <class Problem>
inline void set_shape(Problem& problem, Sizes sizes) {
  const int64_t dims = (int64_t)sizes.size();
  problem.columns = sizes[dims - 1];
  problem.rows = dims >= 2 ? sizes[dims - 2] : 1;
  problem.matrices = 1;
  for (int64_t d = 0; d < dims - 2; ++d) problem.matrices *= sizes[d];
}

// Whether the elements fill a block of memory without gaps or overlaps, in whatever order of dimensions.
inline bool is_dense(const Tensor& tensor) {
  const Sizes sizes = tensor.sizes(), strides = tensor.strides();
  int64_t filled = 1;
  for (bool found = true; found;) {
    found = false;
    for (size_t d = 0; d < sizes.size(); ++d)
      if (sizes[d] > 1 && strides[d] == filled) {
        filled *= sizes[d];
        found = true;
        break;
      }
  }
  return filled == tensor.numel();
}

// An elementwise problem's input (null: none) and output.
template <class Problem>
void set_matrices(Problem& problem, const Matrices& in, const Matrices& out, const Tensor* input,
                  const Tensor& output) {
  problem.input = input ? input->const_data_ptr() : nullptr;
  problem.out = output.mutable_data_ptr();
  problem.dtype = dtype_of(output, "input");
  problem.outer = in.outer, problem.inner = in.inner, problem.rows = in.rows, problem.columns = in.columns;
  problem.input_outer = in.outer_stride, problem.input_inner = in.inner_stride, problem.input_row = in.row_stride;
  problem.out_outer = out.outer_stride, problem.out_inner = out.inner_stride, problem.out_row = out.row_stride;
}

// The result of run(input's matrices, the result's, input, result), which has the strides of a dense input.
template <class Run>
Tensor map_matrices(const Tensor& input, Device device, const Run& run) {
  const Dtype dtype = dtype_of(input, "input");
  const bool same_order = !input.is_contiguous() && is_dense(input);
  Matrices in;
  if (!in.describe(input)) {
    const Tensor out = map_matrices(torch::stable::contiguous(input), device, run);
    if (!same_order) return out;
    Tensor reordered = empty_strided(input.sizes(), input.strides(), dtype, device);
    return torch::stable::copy_(reordered, out);
  }
  const Tensor out =
      same_order ? empty_strided(input.sizes(), input.strides(), dtype, device) : empty(input.sizes(), dtype, device);
  Matrices to = in;
  if (!same_order) {
    to.row_stride = in.columns;
    to.inner_stride = in.rows * in.columns;
    to.outer_stride = in.inner * to.inner_stride;
  }
  run(in, to, input, out);
  return out;
}

inline bool has_dense_columns(const Tensor& tensor) {
  const Sizes sizes = tensor.sizes(), strides = tensor.strides();
  const size_t last = sizes.size() - 1;
  return strides[last] == 1 || sizes[last] == 1;
}

inline Tensor with_dense_columns(const Tensor& tensor) {
  return has_dense_columns(tensor) ? tensor : torch::stable::contiguous(tensor);
}

// (batch, heads, length, size): heads lie inside positions where they do so in `like`, otherwise contiguous.
inline Tensor empty_heads(const Tensor& like, int64_t length, int64_t size, Device device = {}) {
  const Sizes like_sizes = like.sizes(), like_strides = like.strides();
  const int64_t batch = like_sizes[0], heads = like_sizes[1];
  const int64_t sizes[4] = {batch, heads, length, size};
  const bool inside = like_strides[1] > 0 && like_strides[1] < like_strides[2];  // expanded heads lie nowhere
  const int64_t strides[4] = {heads * length * size, inside ? size : length * size, inside ? heads * size : size, 1};
  return empty_strided(Sizes(sizes, 4), Sizes(strides, 4), dtype_of(like, "like"), device);
}

inline int64_t broadcast_stride(const Tensor& mask, int64_t dim) { return mask.size(dim) > 1 ? mask.stride(dim) : 0; }

inline std::optional<Tensor> contiguous(const std::optional<Tensor>& tensor) {
  if (!tensor || tensor->is_contiguous()) return tensor;
  return torch::stable::contiguous(*tensor);
}

// `input` has dense columns; `lengths` is contiguous.
inline void set_scores(Scores& scores, const Tensor& input, const std::optional<Tensor>& attn_mask,
                       const std::optional<Tensor>& lengths, double scale, int64_t window_left, int64_t window_right,
                       bool lower_right) {
  scores.input = input.const_data_ptr();
  scores.dtype = dtype_of(input, "input");
  const Sizes strides = input.strides(), sizes = input.sizes();
  scores.input_batch = strides[0], scores.input_head = strides[1], scores.input_row = strides[2];
  scores.batch = sizes[0], scores.heads = sizes[1], scores.rows = sizes[2], scores.columns = sizes[3];
  if (attn_mask) {
    scores.mask = attn_mask->const_data_ptr();
    scores.mask_dtype = dtype_of(*attn_mask, "attn_mask");
    scores.mask_batch = broadcast_stride(*attn_mask, 0), scores.mask_head = broadcast_stride(*attn_mask, 1);
    scores.mask_row = broadcast_stride(*attn_mask, 2), scores.mask_column = broadcast_stride(*attn_mask, 3);
  }
  if (lengths) scores.key_lengths = lengths->const_data_ptr<int64_t>();
  scores.scale = (float)scale;
  scores.window_left = window_left, scores.window_right = window_right;
  scores.lower_right = lower_right;
}

// (batch, heads, rows, columns), or (rows, heads, columns) of packed sequences.
inline Heads heads_of(const Tensor& tensor) {
  void* data = const_cast<void*>(tensor.const_data_ptr());
  const Sizes strides = tensor.strides();
  if (strides.size() == 3) return {data, 0, strides[1], strides[0]};
  return {data, strides[0], strides[1], strides[2]};
}

inline AttentionMask mask_of(const std::optional<Tensor>& tensor) {
  AttentionMask mask = {};
  if (!tensor) return mask;
  mask.data = const_cast<void*>(tensor->const_data_ptr());
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

}  // namespace
}  // namespace fastattn
