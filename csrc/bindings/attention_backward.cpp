// Attention's backward pass, and attention over packed sequences, as torch ops.
#include "attention.h"

namespace fastattn {

FASTATTN_KERNEL(AttentionBackward, attention_backward)

namespace {

// Runs the backward pass into the gradients.
void run_attention_backward(const Backend& backend, AttentionBackward& a, const Tensor& grad_out,
                            const std::optional<Tensor>& grad_lse, const Tensor& out, const Tensor& stats,
                            const Tensor& grad_query, const Tensor& grad_key, const Tensor& grad_value) {
  const Tensor dout = with_dense_columns(grad_out), o = with_dense_columns(out);
  const Tensor rows = torch::stable::contiguous(stats);
  const std::optional<Tensor> dlse = contiguous(grad_lse);
  a.out = heads_of(o);
  set_stats(a, rows);
  a.grad_out = heads_of(dout);
  a.grad_lse = data_of<float>(dlse);
  a.grad_query = heads_of(grad_query), a.grad_key = heads_of(grad_key), a.grad_value = heads_of(grad_value);
  backend.run(a);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad_out, const std::optional<Tensor>& grad_lse, const Tensor& out, const Tensor& stats,
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& attn_mask,
    const std::optional<Tensor>& key_lengths, const std::optional<Tensor>& seed, double scale, int64_t window_left,
    int64_t window_right, bool lower_right, int64_t threshold, bool mask_grad) {
  const Backend backend(query);
  const Tensor q = with_dense_columns(query), k = with_dense_columns(key), v = with_dense_columns(value);
  AttentionBackward a = {};
  set_operands(a, q, k, v, seed, scale, window_left, window_right, lower_right, threshold);
  a.mask = mask_of(attn_mask);
  a.key_lengths = data_of<int64_t>(key_lengths);
  const Tensor grad_query = empty_heads(query, a.seqlen_q, a.head_dim, backend.device);
  const Tensor grad_key = empty_heads(key, a.seqlen_k, a.head_dim, backend.device);
  const Tensor grad_value = empty_heads(value, a.seqlen_k, a.value_head_dim, backend.device);
  Tensor grad_mask;
  if (mask_grad) {
    set_all_elements(a.mask, *attn_mask);
    grad_mask = empty(attn_mask->sizes(), a.mask.dtype, backend.device);
    a.grad_mask = grad_mask.mutable_data_ptr();
  } else {
    grad_mask = empty({0}, a.dtype, backend.device);
  }
  run_attention_backward(backend, a, grad_out, grad_lse, out, stats, grad_query, grad_key, grad_value);
  return {grad_query, grad_key, grad_value, grad_mask};
}

inline void set_packed(Attention& a, const Tensor& cu_seq_q, const Tensor& cu_seq_k,
                       const std::optional<Tensor>& seqused_k, int64_t max_q, int64_t max_k) {
  a.batch = cu_seq_q.numel() - 1;
  a.seqlen_q = max_q, a.seqlen_k = max_k;
  a.cu_seq_q = cu_seq_q.const_data_ptr<int64_t>(), a.cu_seq_k = cu_seq_k.const_data_ptr<int64_t>();
  a.key_lengths = data_of<int64_t>(seqused_k);
}

std::tuple<Tensor, Tensor, Tensor> varlen_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                                    const Tensor& cu_seq_q, const Tensor& cu_seq_k,
                                                    const std::optional<Tensor>& seqused_k,
                                                    const std::optional<Tensor>& seed, int64_t max_q, int64_t max_k,
                                                    double scale, int64_t window_left, int64_t window_right,
                                                    int64_t threshold) {
  const Backend backend(query);
  const Tensor q = with_dense_columns(query), k = with_dense_columns(key), v = with_dense_columns(value);
  Attention a = {};
  set_operands(a, q, k, v, seed, scale, window_left, window_right, true, threshold);
  set_packed(a, cu_seq_q, cu_seq_k, seqused_k, max_q, max_k);
  const Tensor out = empty({query.size(0), a.num_heads, a.value_head_dim}, a.dtype, backend.device);
  return run_attention(backend, a, out, {2, query.size(0), a.num_heads});
}

std::tuple<Tensor, Tensor, Tensor> varlen_attention_backward(
    const Tensor& grad_out, const std::optional<Tensor>& grad_lse, const Tensor& out, const Tensor& stats,
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cu_seq_q, const Tensor& cu_seq_k,
    const std::optional<Tensor>& seqused_k, const std::optional<Tensor>& seed, int64_t max_q, int64_t max_k,
    double scale, int64_t window_left, int64_t window_right, int64_t threshold) {
  const Backend backend(query);
  const Tensor q = with_dense_columns(query), k = with_dense_columns(key), v = with_dense_columns(value);
  AttentionBackward a = {};
  set_operands(a, q, k, v, seed, scale, window_left, window_right, true, threshold);
  set_packed(a, cu_seq_q, cu_seq_k, seqused_k, max_q, max_k);
  const Tensor grad_query = empty(query.sizes(), a.dtype, backend.device);
  const Tensor grad_key = empty(key.sizes(), a.dtype, backend.device);
  const Tensor grad_value = empty(value.sizes(), a.dtype, backend.device);
  run_attention_backward(backend, a, grad_out, grad_lse, out, stats, grad_query, grad_key, grad_value);
  return {grad_query, grad_key, grad_value};
}

FASTATTN_OPERATION(attention_backward)
FASTATTN_OPERATION(varlen_attention)
FASTATTN_OPERATION(varlen_attention_backward)

}  // namespace
}  // namespace fastattn
