// Attention, dense, forward, as torch ops.
#include <float.h>
#include <math.h>

#include "attention.h"

namespace fastattn {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                                     const std::optional<Tensor>& attn_mask,
                                                     const std::optional<Tensor>& key_lengths,
                                                     const std::optional<Tensor>& seed, double scale,
                                                     int64_t window_left, int64_t window_right, bool lower_right,
                                                     int64_t threshold, bool keep_residual) {
  const Backend backend(query);
  const Tensor q = with_dense_columns(query), k = with_dense_columns(key), v = with_dense_columns(value);
  Attention a = {};
  set_operands(a, q, k, v, seed, scale, window_left, window_right, lower_right, threshold);
  a.mask = mask_of(attn_mask);
  a.key_lengths = data_of<int64_t>(key_lengths);
  const Tensor out = empty_heads(query, a.value_head_dim, backend.device);
  const Tensor residual =
      keep_residual ? empty_heads(query, a.value_head_dim, backend.device) : empty({0}, a.dtype, backend.device);
  return run_attention(backend, a, out, residual, {2, a.batch, a.num_heads, a.seqlen_q});
}

// Run a whole public call, without checks in Python, gradient or statistics. For a call that is not plain, return an
// undefined tensor, which is None in Python. The public function then takes the usual path, which raises the errors.
Tensor attention_fast(const Tensor& query, const Tensor& key, const Tensor& value,
                      const std::optional<Tensor>& attn_mask, double dropout_p, bool is_causal,
                      std::optional<double> scale, bool enable_gqa) {
  constexpr int64_t kMaxHeadDim = 256;
  Dtype dtype, key_dtype, value_dtype;
  if (attn_mask || dropout_p != 0 || enable_gqa || !is_plain(query, &dtype) || !is_plain(key, &key_dtype) ||
      !is_plain(value, &value_dtype) || key_dtype != dtype || value_dtype != dtype)
    return Tensor();
  if (query.dim() != 4 || key.dim() != 4 || value.dim() != 4) return Tensor();
  if (!has_dense_columns(query) || !has_dense_columns(key) || !has_dense_columns(value)) return Tensor();
  const Sizes q = query.sizes(), k = key.sizes(), v = value.sizes();
  if (k[0] != q[0] || v[0] != q[0] || k[1] != q[1] || v[1] != q[1] || v[2] != k[2] || k[3] != q[3]) return Tensor();
  if (q[3] < 1 || q[3] > kMaxHeadDim || v[3] < 1 || v[3] > kMaxHeadDim) return Tensor();
  double factor = scale.value_or(1 / sqrt((double)q[3]));
  if (!(fabs(factor) <= FLT_MAX)) return Tensor();
  if (fabs(factor) < FLT_MIN) factor = 0;

  const Backend backend(query);
  Attention a = {};
  set_operands(a, query, key, value, std::nullopt, factor, q[2], is_causal ? 0 : k[2], false, 0);
  const Tensor out = empty_heads(query, a.value_head_dim, backend.device);
  a.out = heads_of(out);
  backend.run(a);
  return out;
}

FASTATTN_OPERATION(attention)
FASTATTN_OPERATION(attention_fast)

}  // namespace
}  // namespace fastattn
