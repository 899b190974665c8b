// Dropout as torch ops.
#include "../common/dropout.h"
#include FASTATTN_BACKEND

namespace fastattn {

FASTATTN_KERNEL(Dropout, dropout)

namespace {

// A tensor as a stack of matrices: the last two dimensions, and all other dimensions folded into two.
struct Matrices {
  int64_t outer = 1, inner = 1, rows = 1, columns = 1;
  int64_t outer_stride = 0, inner_stride = 0, row_stride = 0;

  // Describe the tensor. Return false if the columns are not dense or the other dimensions do not fold.
  bool describe(const Tensor& tensor) {
    const Sizes sizes = tensor.sizes(), strides = tensor.strides();
    const int64_t dims = (int64_t)sizes.size();
    if (tensor.numel() == 0) {  // with any strides, because a copy would not change them
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

// Whether the elements fill a block of memory without gaps or overlaps, in any order of dimensions.
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

// Run the kernel. `input` is null for only the mask.
void run_dropout(const Backend& backend, const Matrices& in, const Matrices& to, const Tensor* input, const Tensor& out,
                 const Tensor& seed, int64_t threshold) {
  Dropout problem;
  problem.input = input ? address_of(*input) : nullptr;
  problem.out = out.mutable_data_ptr();
  problem.dtype = dtype_of(out, "input");
  problem.outer = in.outer, problem.inner = in.inner, problem.rows = in.rows, problem.columns = in.columns;
  problem.input_outer = in.outer_stride, problem.input_inner = in.inner_stride, problem.input_row = in.row_stride;
  problem.out_outer = to.outer_stride, problem.out_inner = to.inner_stride, problem.out_row = to.row_stride;
  set_dropout(problem, seed, threshold);
  backend.run(problem);
}

// Return dropout(input). The output has the input's strides if the input is dense.
Tensor dropout(const Tensor& input, const Tensor& seed, int64_t threshold) {
  const Backend backend(input);
  const Dtype dtype = dtype_of(input, "input");
  const bool same_order = !input.is_contiguous() && is_dense(input);
  Matrices in;
  if (!in.describe(input)) {
    const Tensor out = dropout(dense(input), seed, threshold);
    if (!same_order) return out;
    Tensor reordered = empty_strided(input.sizes(), input.strides(), dtype, backend.device);
    return torch::stable::copy_(reordered, out);
  }
  const Tensor out = same_order ? empty_strided(input.sizes(), input.strides(), dtype, backend.device)
                                : empty(input.sizes(), dtype, backend.device);
  Matrices to = in;
  if (!same_order) {
    to.row_stride = in.columns;
    to.inner_stride = in.rows * in.columns;
    to.outer_stride = in.inner * to.inner_stride;
  }
  run_dropout(backend, in, to, &input, out, seed, threshold);
  return out;
}

// Run a whole public call that drops elements, as attention_fast does.
template <bool keep>
Returned<keep, Tensor, int64_t> dropout_fast(const Tensor& input, const std::optional<Tensor>& seed, double dropout_p) {
  Dtype dtype;
  int64_t threshold;
  const Device device = device_of(input);
  if (!is_plain(input, device, &dtype) || !is_plain_dropout(dropout_p, seed, device, &threshold) || threshold == 0)
    return {};
  input.sizes();  // raises for a nested tensor, before a seed is drawn
  const Tensor own_seed = *seed_of(seed, device, threshold, keep), out = dropout(input, own_seed, threshold);
  if constexpr (keep)
    return {out, own_seed, threshold};
  else
    return {out};
}

Tensor dropout_mask(std::vector<int64_t> shape, const Tensor& seed, int64_t threshold) {
  const Backend backend(seed);
  const Tensor out = empty(Sizes(shape.data(), shape.size()), Dtype::boolean, backend.device);
  Matrices to;
  to.describe(out);
  run_dropout(backend, to, to, nullptr, out, seed, threshold);
  return out;
}

FASTATTN_OPERATION(dropout)
FASTATTN_FAST_PATH(dropout)
FASTATTN_OPERATION(dropout_mask)

}  // namespace
}  // namespace fastattn
