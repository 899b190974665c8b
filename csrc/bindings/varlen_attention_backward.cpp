// Attention over packed sequences, backward, as a torch op.
#include "attention.h"

namespace fastattn {
namespace {

std::tuple<Tensor, Tensor, Tensor> varlen_attention_backward(
    const Tensor& grad_out, const std::optional<Tensor>& grad_lse, const Tensor& out, const Tensor& stats,
    const Tensor& residual, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cu_seq_q,
    const Tensor& cu_seq_k, const std::optional<Tensor>& seqused_k, const std::optional<Tensor>& seed, int64_t max_q,
    int64_t max_k, double scale, int64_t window_left, int64_t window_right, int64_t threshold, bool) {
  const Backend backend(query);
  const Tensor q = with_dense_columns(query), k = with_dense_columns(key), v = with_dense_columns(value);
  AttentionBackward a = {};
  set_operands(a, q, k, v, seed, scale, window_left, window_right, true, threshold);
  set_packed(a, cu_seq_q, cu_seq_k, seqused_k, max_q, max_k);
  const Tensor grad_query = empty(query.sizes(), a.dtype, backend.device);
  const Tensor grad_key = empty(key.sizes(), a.dtype, backend.device);
  const Tensor grad_value = empty(value.sizes(), a.dtype, backend.device);
  run_attention_backward(backend, a, grad_out, grad_lse, out, stats, residual, grad_query, grad_key, grad_value);
  return {grad_query, grad_key, grad_value};
}

FASTATTN_OPERATION(varlen_attention_backward)

}  // namespace
}  // namespace fastattn
