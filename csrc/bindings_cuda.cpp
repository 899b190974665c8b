// The operations of the `cuda` backend as torch ops. Of this library the only file that sees torch; stable ABI.
#include <torch/csrc/stable/accelerator.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "cuda/attention.h"
#include "cuda/dropout.h"
#include "cuda/layer_norm.h"
#include "cuda/softmax_dropout.h"
#include "tensors.h"

// torch declares it where it is built with CUDA itself; libtorch_cuda has it.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace {

using namespace fastattn;
using namespace fastattn::cuda;

// The device of an operand, made the current one while this lives, and its current stream.
struct Place {
  Device device;
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream;

  explicit Place(const Tensor& operand) : device(device_of(operand)), guard(device.index) {
    void* current;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device.index, &current));
    stream = (cudaStream_t)current;
  }
};

const void* data_of(const std::optional<Tensor>& tensor) { return tensor ? tensor->const_data_ptr() : nullptr; }

Dtype dtype_or(const std::optional<Tensor>& tensor, const char* name, Dtype otherwise) {
  return tensor ? dtype_of(*tensor, name) : otherwise;
}

// The dropout of a problem, whose seed stays in the device's memory. Without a seed nothing is dropped.
struct SeedNumbers {
  std::optional<Tensor> tensor;

  template <class Problem>
  SeedNumbers(Problem& problem, const std::optional<Tensor>& seed, int64_t threshold) : tensor(contiguous(seed)) {
    problem.threshold = (int)threshold;
    problem.seed = tensor ? tensor->const_data_ptr<int64_t>() : nullptr;
  }
};

std::string contract() { return FASTATTN_CONTRACT; }

// ---- dropout ----

void run_dropout(const Place& place, const Matrices& in, const Matrices& to, const Tensor* input, const Tensor& out,
                 const Tensor& seed, int64_t threshold) {
  Dropout problem;
  set_matrices(problem, in, to, input, out);
  const SeedNumbers numbers(problem, seed, threshold);
  cuda::dropout(problem, place.stream);
}

Tensor dropout(const Tensor& input, const Tensor& seed, int64_t threshold) {
  const Place place(input);
  return map_matrices(input, place.device,
                      [&](const Matrices& in, const Matrices& to, const Tensor& x, const Tensor& out) {
                        run_dropout(place, in, to, &x, out, seed, threshold);
                      });
}

Tensor dropout_mask(std::vector<int64_t> shape, const Tensor& seed, int64_t threshold) {
  const Place place(seed);
  const Tensor out = empty(Sizes(shape.data(), shape.size()), Dtype::boolean, place.device);
  Matrices to;
  to.describe(out);
  run_dropout(place, to, to, nullptr, out, seed, threshold);
  return out;
}

// ---- layer_norm ----

// Fills in everything but the dropout, and runs. Returns (out, mean, rstd).
std::tuple<Tensor, Tensor, Tensor> run_layer_norm(const Place& place, LayerNorm& problem, const Tensor& input,
                                                  const std::optional<Tensor>& weight,
                                                  const std::optional<Tensor>& bias, double eps) {
  const Sizes sizes = input.sizes();
  const Rows x(input, "input");
  const std::optional<Tensor> w = contiguous(weight), b = contiguous(bias);
  const Tensor out = empty(sizes, problem.dtype, place.device);
  const Tensor mean = empty(without_last(sizes), Dtype::float32, place.device);
  const Tensor rstd = empty(without_last(sizes), Dtype::float32, place.device);
  problem.input = x.data, problem.input_dtype = x.dtype, problem.input_row = x.stride;
  problem.weight = data_of(w), problem.weight_dtype = dtype_or(w, "weight", Dtype::float32);
  problem.bias = data_of(b), problem.bias_dtype = dtype_or(b, "bias", Dtype::float32);
  problem.out = out.mutable_data_ptr();
  problem.mean = mean.mutable_data_ptr<float>(), problem.rstd = rstd.mutable_data_ptr<float>();
  problem.eps = (float)eps;
  cuda::layer_norm(problem, place.stream);
  return {out, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& input, const std::optional<Tensor>& weight,
                                              const std::optional<Tensor>& bias, double eps) {
  const Place place(input);
  LayerNorm problem = {};
  set_shape(problem, input.sizes());
  problem.rows *= problem.matrices, problem.matrices = 1;
  problem.dtype = dtype_of(input, "input");
  return run_layer_norm(place, problem, input, weight, bias, eps);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> dropout_add_layer_norm(const Tensor& input, const Tensor& residual,
                                                                  const std::optional<Tensor>& weight,
                                                                  const std::optional<Tensor>& bias,
                                                                  const std::optional<Tensor>& seed, int64_t threshold,
                                                                  double eps) {
  const Place place(input);
  const Rows r(residual, "residual");
  const Dtype dtype = dtype_of(input, "input");
  LayerNorm problem = {};
  set_shape(problem, input.sizes());
  problem.residual = r.data, problem.residual_dtype = r.dtype, problem.residual_row = r.stride;
  problem.dtype = r.dtype == dtype ? dtype : Dtype::float32;
  const Tensor sum = empty(input.sizes(), problem.dtype, place.device);
  problem.sum = sum.mutable_data_ptr();
  const SeedNumbers numbers(problem, seed, threshold);
  auto [out, mean, rstd] = run_layer_norm(place, problem, input, weight, bias, eps);
  return {out, sum, mean, rstd};
}

// Fills in everything but the shape, the dropout and its grad_input, and runs. Returns (grad_x, grad_weight,
// grad_bias).
std::tuple<Tensor, Tensor, Tensor> run_layer_norm_backward(
    const Place& place, LayerNormBackward& problem, const Tensor& grad_out, const std::optional<Tensor>& grad_sum,
    const Tensor& x, const Tensor& mean, const Tensor& rstd, const std::optional<Tensor>& weight,
    const std::optional<ScalarType>& weight_grad, const std::optional<ScalarType>& bias_grad) {
  check_dtype(grad_out, "grad_out", x);
  const Rows dy(grad_out, "grad_out"), normalized(x, "input");
  std::optional<Rows> more;
  if (grad_sum) {
    check_dtype(*grad_sum, "grad_sum", x);
    more.emplace(*grad_sum, "grad_sum");
    problem.grad_sum = more->data, problem.grad_sum_row = more->stride;
  }
  const std::optional<Tensor> w = contiguous(weight);
  const Tensor grad_x = empty(x.sizes(), normalized.dtype, place.device);
  const Tensor grad_weight = parameter_grad(weight_grad, problem.columns, place.device);
  const Tensor grad_bias = parameter_grad(bias_grad, problem.columns, place.device);
  problem.grad_out = dy.data, problem.grad_out_row = dy.stride;
  problem.x = normalized.data, problem.x_row = normalized.stride, problem.dtype = normalized.dtype;
  problem.mean = mean.const_data_ptr<float>(), problem.rstd = rstd.const_data_ptr<float>();
  problem.weight = data_of(w), problem.weight_dtype = dtype_or(w, "weight", Dtype::float32);
  problem.grad_x = grad_x.mutable_data_ptr();
  problem.grad_weight = weight_grad ? grad_weight.mutable_data_ptr() : nullptr;
  problem.grad_bias = bias_grad ? grad_bias.mutable_data_ptr() : nullptr;
  problem.grad_weight_dtype = dtype_of(grad_weight, "weight"), problem.grad_bias_dtype = dtype_of(grad_bias, "bias");
  const int64_t floats = layer_norm_workspace(problem);
  const Tensor workspace = empty(Sizes(&floats, 1), Dtype::float32, place.device);
  problem.workspace = workspace.mutable_data_ptr<float>();
  cuda::layer_norm_backward(problem, place.stream);
  return {grad_x, grad_weight, grad_bias};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad_out, const Tensor& input, const Tensor& mean,
                                                       const Tensor& rstd, const std::optional<Tensor>& weight,
                                                       std::optional<ScalarType> weight_grad,
                                                       std::optional<ScalarType> bias_grad) {
  const Place place(input);
  LayerNormBackward problem = {};
  set_shape(problem, input.sizes());
  problem.rows *= problem.matrices, problem.matrices = 1;
  return run_layer_norm_backward(place, problem, grad_out, std::nullopt, input, mean, rstd, weight, weight_grad,
                                 bias_grad);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> dropout_add_layer_norm_backward(
    const Tensor& grad_out, const std::optional<Tensor>& grad_sum, const Tensor& sum, const Tensor& mean,
    const Tensor& rstd, const std::optional<Tensor>& weight, const std::optional<Tensor>& seed, int64_t threshold,
    ScalarType input_dtype, std::optional<ScalarType> weight_grad, std::optional<ScalarType> bias_grad) {
  const Place place(sum);
  LayerNormBackward problem = {};
  set_shape(problem, sum.sizes());
  problem.input_dtype = dtype_from(input_dtype);
  const Tensor grad_input = empty(sum.sizes(), problem.input_dtype, place.device);
  problem.grad_input = grad_input.mutable_data_ptr();
  const SeedNumbers numbers(problem, seed, threshold);
  auto [grad_sum_total, grad_weight, grad_bias] =
      run_layer_norm_backward(place, problem, grad_out, grad_sum, sum, mean, rstd, weight, weight_grad, bias_grad);
  return {grad_input, grad_sum_total, grad_weight, grad_bias};
}

// ---- softmax_dropout ----

std::tuple<Tensor, Tensor> softmax_dropout(const Tensor& input, const std::optional<Tensor>& attn_mask,
                                           const std::optional<Tensor>& key_lengths, const std::optional<Tensor>& seed,
                                           double scale, int64_t window_left, int64_t window_right, bool lower_right,
                                           int64_t threshold) {
  const Place place(input);
  const Tensor x = with_dense_columns(input);
  const std::optional<Tensor> lengths = contiguous(key_lengths);
  const int64_t stats_sizes[4] = {2, x.size(0), x.size(1), x.size(2)};
  const Tensor out = empty(x.sizes(), dtype_of(x, "input"), place.device);
  Tensor stats = empty(Sizes(stats_sizes, 4), Dtype::float32, place.device);
  if (x.size(3) == 0) torch::stable::zero_(stats);
  SoftmaxDropout problem = {};
  set_scores(problem.scores, x, attn_mask, lengths, scale, window_left, window_right, lower_right);
  const SeedNumbers numbers(problem, seed, threshold);
  problem.out = out.mutable_data_ptr();
  problem.stats = stats.mutable_data_ptr<float>();
  cuda::softmax_dropout(problem, place.stream);
  return {out, stats};
}

// The gradient of the scores, summed over the dimensions that the mask broadcasts.
Tensor mask_gradient(const Tensor& grad_scores, const Tensor& mask) {
  std::vector<int64_t> broadcast;
  for (int64_t d = 0; d < 4; ++d)
    if (mask.size(d) != grad_scores.size(d)) broadcast.push_back(d);
  if (broadcast.empty()) return grad_scores;
  const Tensor sum = torch::stable::sum(grad_scores, Sizes(broadcast.data(), broadcast.size()), true);
  return torch::stable::to(sum, mask.scalar_type());
}

std::tuple<Tensor, Tensor> softmax_dropout_backward(const Tensor& grad_out, const Tensor& stats, const Tensor& input,
                                                    const std::optional<Tensor>& attn_mask,
                                                    const std::optional<Tensor>& key_lengths,
                                                    const std::optional<Tensor>& seed, double scale,
                                                    int64_t window_left, int64_t window_right, bool lower_right,
                                                    int64_t threshold, bool mask_grad) {
  check_dtype(grad_out, "grad_out", input);
  const Place place(input);
  const Tensor x = with_dense_columns(input), dy = with_dense_columns(grad_out);
  const std::optional<Tensor> lengths = contiguous(key_lengths);
  const Dtype dtype = dtype_of(x, "input");
  const Tensor grad_input = empty(x.sizes(), dtype, place.device);
  SoftmaxDropoutBackward problem = {};
  set_scores(problem.scores, x, attn_mask, lengths, scale, window_left, window_right, lower_right);
  const SeedNumbers numbers(problem, seed, threshold);
  problem.grad_out = dy.const_data_ptr();
  problem.grad_batch = dy.stride(0), problem.grad_head = dy.stride(1), problem.grad_row = dy.stride(2);
  problem.stats = stats.const_data_ptr<float>();
  problem.grad_input = grad_input.mutable_data_ptr();
  Tensor grad_mask = nothing(dtype, place.device);
  if (mask_grad && attn_mask) {
    bool full = true;
    for (int64_t d = 0; d < 4; ++d) full = full && attn_mask->size(d) == x.size(d);
    problem.grad_scores_dtype = full ? dtype_of(*attn_mask, "attn_mask") : Dtype::float32;
    grad_mask = empty(x.sizes(), problem.grad_scores_dtype, place.device);
    problem.grad_scores = grad_mask.mutable_data_ptr();
  }
  cuda::softmax_dropout_backward(problem, place.stream);
  if (mask_grad && attn_mask) grad_mask = mask_gradient(grad_mask, *attn_mask);
  return {grad_input, grad_mask};
}

// ---- attention ----

std::tuple<Tensor, Tensor, Tensor> attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                             std::optional<Tensor> attn_mask, std::optional<Tensor> key_lengths,
                                             std::optional<Tensor> seed, double scale, int64_t window_left,
                                             int64_t window_right, bool lower_right, int64_t threshold) {
  const Place place(query);
  const Tensor q = with_dense_columns(query), k = with_dense_columns(key), v = with_dense_columns(value);
  Attention a = {};
  a.dtype = dtype_of(query, "query");
  a.batch = q.size(0), a.heads = q.size(1), a.key_heads = k.size(1), a.queries = q.size(2), a.keys = k.size(2);
  STD_TORCH_CHECK(threshold == 0 && !seed, "attention: this backend has no dropout");
  STD_TORCH_CHECK(a.keys <= kMostKeys && a.batch * a.heads * a.queries <= INT32_MAX, "attention: at most ", kMostKeys,
                  " keys and 2**31 - 1 rows of queries");
  a.depth = (int)q.size(3), a.value_depth = (int)v.size(3);
  a.query = heads_of(q), a.key = heads_of(k), a.value = heads_of(v);
  const Tensor lengths = key_lengths ? torch::stable::contiguous(*key_lengths) : Tensor();
  if (key_lengths) a.key_lengths = lengths.const_data_ptr<int64_t>();
  a.mask = mask_of(attn_mask);
  a.scale = (float)scale;
  a.window_left = window_left, a.window_right = window_right;
  a.lower_right = lower_right;
  const int64_t rows[4] = {2, a.batch, a.heads, a.queries};
  const Tensor out = empty_heads(query, a.queries, a.value_depth, place.device);
  const Tensor lse = empty(Sizes(rows + 1, 3), Dtype::float32, place.device);
  const Tensor stats = empty(Sizes(rows, 4), Dtype::float32, place.device);
  a.out = heads_of(out);
  a.lse = lse.mutable_data_ptr<float>();
  a.reference = stats.mutable_data_ptr<float>(), a.sum = a.reference + lse.numel();
  if (lse.numel() == 0) return {out, lse, stats};
  const int splits = attention_splits(a, place.device.index);
  const int64_t floats = attention_workspace(a, splits);
  const Tensor workspace = empty(Sizes(&floats, 1), Dtype::float32, place.device);
  cuda::attention(a, splits, workspace.mutable_data_ptr<float>(), place.stream);
  return {out, lse, stats};
}

}  // namespace

STABLE_TORCH_LIBRARY(fastattn_cuda, m) { m.def("contract() -> str"); }

STABLE_TORCH_LIBRARY_IMPL(fastattn_cuda, CompositeExplicitAutograd, m) {
  m.impl("contract", TORCH_BOX(&contract));
  m.impl("softmax_dropout", TORCH_BOX(&::softmax_dropout));
  m.impl("softmax_dropout_backward", TORCH_BOX(&::softmax_dropout_backward));
  m.impl("layer_norm", TORCH_BOX(&::layer_norm));
  m.impl("layer_norm_backward", TORCH_BOX(&::layer_norm_backward));
  m.impl("dropout_add_layer_norm", TORCH_BOX(&::dropout_add_layer_norm));
  m.impl("dropout_add_layer_norm_backward", TORCH_BOX(&::dropout_add_layer_norm_backward));
  m.impl("attention", TORCH_BOX(&::attention));
  m.impl("dropout", TORCH_BOX(&::dropout));
  m.impl("dropout_mask", TORCH_BOX(&::dropout_mask));
}
