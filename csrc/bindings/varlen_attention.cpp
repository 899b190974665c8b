// Attention over packed sequences, forward and backward, as torch ops.
#include <algorithm>

#include "attention.h"

namespace fastattn {
namespace {

// Check offsets against their bound, because the bounds determine the sizes of the kernels' buffers. Python checks only
// values that it can read, and it can read none while a call is compiled or exported.
inline void check_offsets(const Tensor& offsets, const char* name, int64_t total, int64_t longest, const char* bound) {
  const int64_t *at = offsets.const_data_ptr<int64_t>(), count = offsets.numel();
  STD_TORCH_CHECK(at[0] == 0 && at[count - 1] == total, "varlen_attn: ", name, " must rise from 0 to ", total,
                  ", got from ", at[0], " to ", at[count - 1]);
  for (int64_t s = 1; s < count; ++s) {
    const int64_t length = at[s] - at[s - 1];
    STD_TORCH_CHECK(length >= 0, "varlen_attn: ", name, " must rise, got ", at[s], " after ", at[s - 1]);
    STD_TORCH_CHECK(length <= longest, "varlen_attn: ", bound, " must be at least the longest sequence, got ", longest,
                    " and a sequence of ", length);
  }
}

// Set the packed sequences. A bound above the sum of all lengths is reduced to it, because no sequence is longer.
inline void set_packed(Attention& a, const Tensor& cu_seq_q, const Tensor& cu_seq_k,
                       const std::optional<Tensor>& seqused_k, int64_t max_q, int64_t max_k) {
  a.batch = cu_seq_q.numel() - 1;
  if constexpr (Backend::kReadsOffsets) {
    check_offsets(cu_seq_q, "cu_seq_q", a.seqlen_q, max_q, "max_q");
    check_offsets(cu_seq_k, "cu_seq_k", a.seqlen_k, max_k, "max_k");
  }
  a.seqlen_q = std::min(max_q, a.seqlen_q), a.seqlen_k = std::min(max_k, a.seqlen_k);
  a.window_left = std::min(a.window_left, a.seqlen_k), a.window_right = std::min(a.window_right, a.seqlen_q);
  a.cu_seq_q = cu_seq_q.const_data_ptr<int64_t>(), a.cu_seq_k = cu_seq_k.const_data_ptr<int64_t>();
  a.key_lengths = data_of<int64_t>(seqused_k);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> varlen_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cu_seq_q, const Tensor& cu_seq_k,
    const std::optional<Tensor>& seqused_k, const std::optional<Tensor>& seed, int64_t max_q, int64_t max_k,
    double scale, int64_t window_left, int64_t window_right, int64_t threshold, bool keep_residual) {
  const Backend backend(query);
  const Tensor q = with_dense_columns(query), k = with_dense_columns(key), v = with_dense_columns(value);
  Attention a = {};
  set_operands(a, q, k, v, seed, scale, window_left, window_right, true, threshold);
  set_packed(a, cu_seq_q, cu_seq_k, seqused_k, max_q, max_k);
  const Tensor out = empty({query.size(0), a.num_heads, a.value_head_dim}, a.dtype, backend.device);
  const Tensor residual =
      keep_residual ? empty(out.sizes(), a.dtype, backend.device) : empty({0}, a.dtype, backend.device);
  return run_attention(backend, a, out, residual, {2, query.size(0), a.num_heads});
}

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

FASTATTN_OPERATION(varlen_attention)
FASTATTN_OPERATION(varlen_attention_backward)

}  // namespace
}  // namespace fastattn
