// Softmax-dropout as torch ops.
#include "../common/softmax_dropout.h"
#include FASTATTN_BACKEND

namespace fastattn {

FASTATTN_KERNEL(SoftmaxDropout, softmax_dropout)
FASTATTN_KERNEL(SoftmaxDropoutBackward, softmax_dropout_backward)

namespace {

// Return the scores. `input` has dense columns.
inline Scores scores_of(const Tensor& input, const std::optional<Tensor>& attn_mask,
                        const std::optional<Tensor>& key_lengths, double scale, int64_t window_left,
                        int64_t window_right, bool lower_right) {
  Scores scores = {};
  const Sizes sizes = input.sizes();
  scores.input = heads_of(input);
  scores.dtype = dtype_of(input, "input");
  scores.mask = mask_of(attn_mask);
  scores.batch = sizes[0], scores.heads = sizes[1], scores.rows = sizes[2], scores.columns = sizes[3];
  scores.key_lengths = data_of<int64_t>(key_lengths);
  scores.scale = (float)scale;
  scores.window_left = window_left, scores.window_right = window_right;
  scores.lower_right = lower_right;
  return scores;
}

std::tuple<Tensor, Tensor> softmax_dropout(const Tensor& input, const std::optional<Tensor>& attn_mask,
                                           const std::optional<Tensor>& key_lengths, const std::optional<Tensor>& seed,
                                           double scale, int64_t window_left, int64_t window_right, bool lower_right,
                                           int64_t threshold) {
  const Backend backend(input);
  const Tensor x = with_dense_columns(input);
  SoftmaxDropout problem = {};
  problem.scores = scores_of(x, attn_mask, key_lengths, scale, window_left, window_right, lower_right);
  const Tensor out = empty(x.sizes(), problem.scores.dtype, backend.device);
  const Tensor stats = empty({2, x.size(0), x.size(1), x.size(2)}, Dtype::float32, backend.device);
  set_dropout(problem, seed, threshold);
  problem.out = out.mutable_data_ptr();
  problem.stats = stats.mutable_data_ptr<float>();
  backend.run(problem);
  return {out, stats};
}

// Run a whole public call of 4-D scores, as attention_fast does.
template <bool keep>
Returned<keep, Tensor, Tensor, std::optional<Tensor>, std::optional<Tensor>, std::optional<Tensor>, double, int64_t,
         int64_t, bool, int64_t>
softmax_dropout_fast(const Tensor& input, const std::optional<Tensor>& attn_mask, const std::optional<Tensor>&,
                     const std::optional<Tensor>& seed, double dropout_p, bool is_causal, double scale) {
  Dtype dtype;
  int64_t threshold;
  const Device device = device_of(input);
  if (!is_plain(input, device, &dtype) || input.dim() != 4 || !is_plain_dropout(dropout_p, seed, device, &threshold))
    return {};
  const Sizes sizes = input.sizes();
  if (!is_plain_mask(attn_mask, device, {sizes[0], sizes[1], sizes[2], sizes[3]}) || !is_plain_scale(&scale)) return {};
  const int64_t left = sizes[2], right = is_causal ? 0 : sizes[3];
  const std::optional<Tensor> own_seed = seed_of(seed, device, threshold, keep);
  auto [out, stats] = softmax_dropout(input, attn_mask, std::nullopt, own_seed, scale, left, right, false, threshold);
  if constexpr (keep)
    return {out,   stats, input,    kept_mask(attn_mask, device), std::nullopt, own_seed, scale, left,
            right, false, threshold};
  else
    return {out};
}

std::tuple<Tensor, Tensor> softmax_dropout_backward(const Tensor& grad_out, const Tensor& stats, const Tensor& input,
                                                    const std::optional<Tensor>& attn_mask,
                                                    const std::optional<Tensor>& key_lengths,
                                                    const std::optional<Tensor>& seed, double scale,
                                                    int64_t window_left, int64_t window_right, bool lower_right,
                                                    int64_t threshold, bool mask_grad) {
  const Backend backend(input);
  const Tensor x = with_dense_columns(input), dy = with_dense_columns(grad_out);
  SoftmaxDropoutBackward problem = {};
  problem.scores = scores_of(x, attn_mask, key_lengths, scale, window_left, window_right, lower_right);
  check_dtype(grad_out, "grad_out", problem.scores.dtype);
  const Tensor grad_input = empty(x.sizes(), problem.scores.dtype, backend.device);
  set_dropout(problem, seed, threshold);
  problem.grad_out = heads_of(dy);
  problem.stats = stats.const_data_ptr<float>();
  problem.grad_input = grad_input.mutable_data_ptr();
  if (!mask_grad) {
    backend.run(problem);
    return {grad_input, empty({0}, problem.scores.dtype, backend.device)};
  }

  // If the kernel does not reduce over broadcast dimensions, torch sums the float32 gradient of all scores.
  std::vector<int64_t> broadcast;
  for (int64_t d = 0; d < 4; ++d)
    if (attn_mask->size(d) != x.size(d)) broadcast.push_back(d);
  set_all_elements(problem.scores.mask, *attn_mask);
  const bool torch_sums = !Backend::kSumsMaskGrad && !broadcast.empty();
  problem.grad_mask_dtype = torch_sums ? Dtype::float32 : problem.scores.mask.dtype;
  const Tensor grad_mask = empty(torch_sums ? x.sizes() : attn_mask->sizes(), problem.grad_mask_dtype, backend.device);
  problem.grad_mask = grad_mask.mutable_data_ptr();
  backend.run(problem);
  if (!torch_sums) return {grad_input, grad_mask};
  const Tensor sum = torch::stable::sum(grad_mask, Sizes(broadcast.data(), broadcast.size()), true);
  return {grad_input, torch::stable::to(sum, attn_mask->scalar_type())};
}

FASTATTN_OPERATION(softmax_dropout)
FASTATTN_FAST_PATH(softmax_dropout)
FASTATTN_OPERATION(softmax_dropout_backward)

}  // namespace
}  // namespace fastattn
