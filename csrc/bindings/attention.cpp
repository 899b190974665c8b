// Attention, dense and forward, as a torch op.
#include "attention.h"

namespace fastattn {
namespace {

std::tuple<Tensor, Tensor, Tensor> attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                             const std::optional<Tensor>& attn_mask,
                                             const std::optional<Tensor>& key_lengths,
                                             const std::optional<Tensor>& seed, double scale, int64_t window_left,
                                             int64_t window_right, bool lower_right, int64_t threshold) {
  const Backend backend(query);
  const Tensor q = with_dense_columns(query), k = with_dense_columns(key), v = with_dense_columns(value);
  Attention a = {};
  set_operands(a, q, k, v, seed, scale, window_left, window_right, lower_right, threshold);
  a.mask = mask_of(attn_mask);
  a.key_lengths = data_of<int64_t>(key_lengths);
  const Tensor out = empty_heads(query, a.seqlen_q, a.value_head_dim, backend.device);
  return run_attention(backend, a, out, {2, a.batch, a.num_heads, a.seqlen_q});
}

FASTATTN_OPERATION(attention)

}  // namespace
}  // namespace fastattn
