// LayerNorm, of an input and of residual + dropout(input), as torch ops.
#include "../common/layer_norm.h"
#include FASTATTN_BACKEND

namespace fastattn {

FASTATTN_KERNEL(LayerNorm, layer_norm)
FASTATTN_KERNEL(LayerNormBackward, layer_norm_backward)

namespace {

// A tensor as rows at one stride: the last dimension, and all others folded into one. It is a copy if they do not fold.
struct Rows {
  Tensor tensor;
  const void* data;
  Dtype dtype;
  int64_t stride = 0;

  Rows(const Tensor& source, const char* name)
      : tensor(folds(source) ? source : dense(source)), data(address_of(tensor)), dtype(dtype_of(source, name)) {
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

// Set (matrices, rows, columns) as the dropout formula counts them; a 1-D tensor is one row. Without dropout all rows
// are in one matrix.
template <class Problem>
void set_shape(Problem& problem, Sizes sizes, bool one_matrix) {
  const int64_t dims = (int64_t)sizes.size();
  problem.columns = sizes[dims - 1];
  problem.rows = dims >= 2 ? sizes[dims - 2] : 1;
  problem.matrices = 1;
  for (int64_t d = 0; d < dims - 2; ++d) (one_matrix ? problem.rows : problem.matrices) *= sizes[d];
}

inline Dtype dtype_or_float32(const std::optional<Tensor>& tensor, const char* name) {
  return tensor ? dtype_of(*tensor, name) : Dtype::float32;
}

// Return (out, sum, mean, rstd). The sum is empty unless keep_sum.
std::tuple<Tensor, Tensor, Tensor, Tensor> run_layer_norm(const Tensor& input, const Tensor* residual,
                                                          const std::optional<Tensor>& weight,
                                                          const std::optional<Tensor>& bias,
                                                          const std::optional<Tensor>& seed, int64_t threshold,
                                                          double eps, bool keep_sum,
                                                          std::optional<ScalarType> out_dtype) {
  const Backend backend(input);
  const Sizes sizes = input.sizes(), outer(sizes.data(), sizes.size() - 1);
  const Rows x(input, "input");
  const std::optional<Tensor> w = dense(weight), b = dense(bias);
  LayerNorm problem = {};
  set_shape(problem, sizes, !residual);
  problem.input = x.data, problem.input_dtype = problem.dtype = x.dtype, problem.input_row = x.stride;
  std::optional<Rows> r;
  if (residual) {
    r.emplace(*residual, "residual");
    problem.residual = r->data, problem.residual_dtype = r->dtype, problem.residual_row = r->stride;
    if (r->dtype != x.dtype) problem.dtype = Dtype::float32;
  }
  const int64_t none = 0;
  const Tensor sum = empty(keep_sum ? sizes : Sizes(&none, 1), problem.dtype, backend.device);
  problem.sum = keep_sum ? sum.mutable_data_ptr() : nullptr;
  problem.out_dtype = out_dtype ? dtype_from(*out_dtype) : problem.dtype;
  STD_TORCH_CHECK(problem.out_dtype == problem.dtype || (keep_sum && problem.dtype == Dtype::float32),
                  "fastattn: out_dtype must be the sum's, or a 16-bit one of a float32 sum that is kept");
  const Tensor out = empty(sizes, problem.out_dtype, backend.device);
  const Tensor mean = empty(outer, Dtype::float32, backend.device), rstd = empty(outer, Dtype::float32, backend.device);
  problem.weight = data_of<void>(w), problem.weight_dtype = dtype_or_float32(w, "weight");
  problem.bias = data_of<void>(b), problem.bias_dtype = dtype_or_float32(b, "bias");
  problem.out = out.mutable_data_ptr();
  problem.mean = mean.mutable_data_ptr<float>(), problem.rstd = rstd.mutable_data_ptr<float>();
  problem.eps = (float)eps;
  set_dropout(problem, seed, threshold);
  backend.run(problem);
  return {out, sum, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& input, const std::optional<Tensor>& weight,
                                              const std::optional<Tensor>& bias, double eps) {
  auto [out, sum, mean, rstd] = run_layer_norm(input, nullptr, weight, bias, std::nullopt, 0, eps, false, std::nullopt);
  return {out, mean, rstd};
}

// Whether weight or bias is plain: absent, or (columns).
inline bool is_plain_parameter(const std::optional<Tensor>& tensor, Device device, int64_t columns) {
  Dtype dtype;
  return !tensor || (is_plain(*tensor, device, &dtype) && tensor->dim() == 1 && tensor->size(0) == columns);
}

// Run a whole public call, as attention_fast does.
template <bool keep>
Returned<keep, Tensor, Tensor, Tensor, std::optional<Tensor>> layer_norm_fast(const Tensor& input,
                                                                              const std::optional<Tensor>& weight,
                                                                              const std::optional<Tensor>& bias,
                                                                              int64_t columns, double eps) {
  Dtype dtype;
  const Device device = device_of(input);
  if (!is_plain(input, device, &dtype) || input.dim() == 0 || input.size(-1) != columns) return {};
  if (!is_plain_parameter(weight, device, columns) || !is_plain_parameter(bias, device, columns)) return {};
  auto [out, mean, rstd] = layer_norm(input, weight, bias, eps);
  if constexpr (keep)
    return {out, input, mean, rstd, weight};
  else
    return {out};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> dropout_add_layer_norm(const Tensor& input, const Tensor& residual,
                                                                  const std::optional<Tensor>& weight,
                                                                  const std::optional<Tensor>& bias,
                                                                  const std::optional<Tensor>& seed, int64_t threshold,
                                                                  double eps, bool keep_sum,
                                                                  std::optional<ScalarType> out_dtype) {
  return run_layer_norm(input, &residual, weight, bias, seed, threshold, eps, keep_sum, out_dtype);
}

// Whether the normalised sum can have this dtype: the sum's, or a 16-bit one if the sum has float32.
inline bool is_plain_out_dtype(const std::optional<ScalarType>& out_dtype, Dtype sum) {
  if (!out_dtype) return true;
  const bool is_half = *out_dtype == ScalarType::BFloat16 || *out_dtype == ScalarType::Half;
  return (is_half || *out_dtype == ScalarType::Float) && (dtype_from(*out_dtype) == sum || sum == Dtype::float32);
}

// Run a whole public call, as attention_fast does. The second result is the sum, with prenorm.
template <bool keep>
std::conditional_t<
    keep, std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, std::optional<Tensor>, std::optional<Tensor>, int64_t>,
    std::tuple<Tensor, Tensor>>
dropout_add_layer_norm_fast(const Tensor& input, const Tensor& residual, const std::optional<Tensor>& weight,
                            const std::optional<Tensor>& bias, const std::optional<Tensor>& seed, double dropout_p,
                            double eps, bool prenorm, std::optional<ScalarType> out_dtype) {
  Dtype dtype, residual_dtype;
  int64_t threshold;
  const Device device = device_of(input);
  if (!is_plain(input, device, &dtype) || !is_plain(residual, device, &residual_dtype) || input.dim() == 0) return {};
  if (!have_one_shape(input, residual) || !is_plain_dropout(dropout_p, seed, device, &threshold)) return {};
  const int64_t columns = input.size(-1);
  if (!is_plain_parameter(weight, device, columns) || !is_plain_parameter(bias, device, columns)) return {};
  const Dtype sum_dtype = dtype == residual_dtype ? dtype : Dtype::float32;
  if (!is_plain_out_dtype(out_dtype, sum_dtype)) return {};
  const bool keep_sum = keep || prenorm || (out_dtype && dtype_from(*out_dtype) != sum_dtype);
  const std::optional<Tensor> own_seed = seed_of(seed, device, threshold, keep);
  auto [out, sum, mean, rstd] =
      run_layer_norm(input, &residual, weight, bias, own_seed, threshold, eps, keep_sum, out_dtype);
  const Tensor returned = prenorm ? sum : Tensor();
  if constexpr (keep)
    return {out, returned, sum, mean, rstd, weight, own_seed, threshold};
  else
    return {out, returned};
}

// Return a parameter's gradient (columns), uninitialised, in the dtype given. Without a dtype it is empty.
inline Tensor parameter_grad(const std::optional<ScalarType>& dtype, int64_t columns, Device device) {
  return empty({dtype ? columns : 0}, dtype ? dtype_from(*dtype) : Dtype::float32, device);
}

// Return (grad_input, grad_x, grad_weight, grad_bias). x is the input, or the sum of a fused forward pass. grad_input
// is undefined unless input_dtype is given.
std::tuple<Tensor, Tensor, Tensor, Tensor> run_layer_norm_backward(
    const Tensor& grad_out, const std::optional<Tensor>& grad_sum, const Tensor& x, const Tensor& mean,
    const Tensor& rstd, const std::optional<Tensor>& weight, const std::optional<Tensor>& seed, int64_t threshold,
    const std::optional<ScalarType>& input_dtype, const std::optional<ScalarType>& weight_grad_dtype,
    const std::optional<ScalarType>& bias_grad_dtype) {
  const Backend backend(x);
  const Rows dy(grad_out, "grad_out"), normalised(x, "input");
  if (normalised.dtype != Dtype::float32) check_dtype(grad_out, "grad_out", normalised.dtype);
  const std::optional<Tensor> w = dense(weight);
  LayerNormBackward problem = {};
  set_shape(problem, x.sizes(), !input_dtype);
  problem.grad_out = dy.data, problem.grad_out_dtype = dy.dtype, problem.grad_out_row = dy.stride;
  problem.x = normalised.data, problem.x_row = normalised.stride;
  problem.dtype = problem.input_dtype = normalised.dtype;
  std::optional<Rows> more;
  if (grad_sum) {
    check_dtype(*grad_sum, "grad_sum", normalised.dtype);
    more.emplace(*grad_sum, "grad_sum");
    problem.grad_sum = more->data, problem.grad_sum_row = more->stride;
  }
  problem.mean = mean.const_data_ptr<float>(), problem.rstd = rstd.const_data_ptr<float>();
  problem.weight = data_of<void>(w), problem.weight_dtype = dtype_or_float32(w, "weight");
  const Tensor grad_x = empty(x.sizes(), problem.dtype, backend.device);
  problem.grad_x = grad_x.mutable_data_ptr();
  Tensor grad_input;
  if (input_dtype) {
    problem.input_dtype = dtype_from(*input_dtype);
    grad_input = empty(x.sizes(), problem.input_dtype, backend.device);
    problem.grad_input = grad_input.mutable_data_ptr();
  }
  const Tensor grad_weight = parameter_grad(weight_grad_dtype, problem.columns, backend.device);
  const Tensor grad_bias = parameter_grad(bias_grad_dtype, problem.columns, backend.device);
  problem.grad_weight = weight_grad_dtype ? grad_weight.mutable_data_ptr() : nullptr;
  problem.grad_bias = bias_grad_dtype ? grad_bias.mutable_data_ptr() : nullptr;
  problem.grad_weight_dtype = dtype_of(grad_weight, "weight"), problem.grad_bias_dtype = dtype_of(grad_bias, "bias");
  set_dropout(problem, seed, threshold);
  backend.run(problem);
  return {grad_input, grad_x, grad_weight, grad_bias};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad_out, const Tensor& input, const Tensor& mean,
                                                       const Tensor& rstd, const std::optional<Tensor>& weight,
                                                       std::optional<ScalarType> weight_grad_dtype,
                                                       std::optional<ScalarType> bias_grad_dtype) {
  auto [grad_input, grad_x, grad_weight, grad_bias] =
      run_layer_norm_backward(grad_out, std::nullopt, input, mean, rstd, weight, std::nullopt, 0, std::nullopt,
                              weight_grad_dtype, bias_grad_dtype);
  return {grad_x, grad_weight, grad_bias};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> dropout_add_layer_norm_backward(
    const Tensor& grad_out, const std::optional<Tensor>& grad_sum, const Tensor& sum, const Tensor& mean,
    const Tensor& rstd, const std::optional<Tensor>& weight, const std::optional<Tensor>& seed, int64_t threshold,
    ScalarType input_dtype, std::optional<ScalarType> weight_grad_dtype, std::optional<ScalarType> bias_grad_dtype) {
  return run_layer_norm_backward(grad_out, grad_sum, sum, mean, rstd, weight, seed, threshold, input_dtype,
                                 weight_grad_dtype, bias_grad_dtype);
}

FASTATTN_OPERATION(layer_norm)
FASTATTN_FAST_PATH(layer_norm)
FASTATTN_OPERATION(layer_norm_backward)
FASTATTN_OPERATION(dropout_add_layer_norm)
FASTATTN_FAST_PATH(dropout_add_layer_norm)
FASTATTN_OPERATION(dropout_add_layer_norm_backward)

}  // namespace
}  // namespace fastattn
