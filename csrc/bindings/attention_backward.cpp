// Attention, dense, backward, as a torch op.
#include "attention.h"

namespace fastattn {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad_out, const std::optional<Tensor>& grad_lse, const Tensor& out, const Tensor& stats,
    const Tensor& residual, const Tensor& query, const Tensor& key, const Tensor& value,
    const std::optional<Tensor>& attn_mask, const std::optional<Tensor>& key_lengths, const std::optional<Tensor>& seed,
    double scale, int64_t window_left, int64_t window_right, bool lower_right, int64_t threshold, bool,
    bool mask_grad) {
  const Backend backend(query);
  const Tensor q = with_dense_columns(query), k = with_dense_columns(key), v = with_dense_columns(value);
  AttentionBackward a = {};
  set_operands(a, q, k, v, seed, scale, window_left, window_right, lower_right, threshold);
  a.mask = mask_of(attn_mask);
  a.key_lengths = data_of<int64_t>(key_lengths);
  const Tensor grad_query = empty_heads(query, a.head_dim, backend.device);
  const Tensor grad_key = empty_heads(key, a.head_dim, backend.device);
  const Tensor grad_value = empty_heads(value, a.value_head_dim, backend.device);
  Tensor grad_mask;
  if (mask_grad) {
    set_all_elements(a.mask, *attn_mask);
    grad_mask = empty(attn_mask->sizes(), a.mask.dtype, backend.device);
    a.grad_mask = grad_mask.mutable_data_ptr();
  } else {
    grad_mask = empty({0}, a.dtype, backend.device);
  }
  run_attention_backward(backend, a, grad_out, grad_lse, out, stats, residual, grad_query, grad_key, grad_value);
  return {grad_query, grad_key, grad_value, grad_mask};
}

FASTATTN_OPERATION(attention_backward)

}  // namespace
}  // namespace fastattn
