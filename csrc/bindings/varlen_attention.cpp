// Attention over packed sequences, forward, as torch ops.
#include "attention.h"

namespace fastattn {
namespace {

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

// Whether `used` names no more keys than each sequence has.
inline bool are_plain_lengths(const std::optional<Tensor>& used, const Tensor& offsets, Device device) {
  if (!used) return true;
  const int64_t count = offsets.size(0) - 1;
  if (!is_plain_integers(*used, device, count)) return false;
  if constexpr (!Backend::kReadsOffsets) return true;
  const int64_t *n = data_of<int64_t>(used), *at = (const int64_t*)address_of(offsets);
  for (int64_t s = 0; s < count; ++s)
    if (n[s] < 0 || n[s] > at[s + 1] - at[s]) return false;
  return true;
}

// Run a whole public call, as attention_fast does. Wrong offsets raise an error, after which the public function raises
// its own.
template <bool keep>
Returned<keep, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, std::optional<Tensor>,
         std::optional<Tensor>, int64_t, int64_t, double, int64_t, int64_t, int64_t, bool>
varlen_attention_fast(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cu_seq_q,
                      const Tensor& cu_seq_k, const std::optional<Tensor>& seqused_k, const std::optional<Tensor>& seed,
                      int64_t max_q, int64_t max_k, double dropout_p, bool is_causal, std::optional<double> scale,
                      bool enable_gqa, int64_t window_left, int64_t window_right) {
  int64_t threshold;
  const Device device = device_of(query);
  if (!are_plain(query, key, value, 3, enable_gqa) || !is_plain_dropout(dropout_p, seed, device, &threshold)) return {};
  if (key.size(0) != value.size(0) || cu_seq_q.dim() != 1 || cu_seq_q.size(0) < 1) return {};
  const int64_t offsets = cu_seq_q.size(0);
  if (!is_plain_integers(cu_seq_q, device, offsets) || !is_plain_integers(cu_seq_k, device, offsets)) return {};
  double factor = scale.value_or(1 / sqrt((double)query.size(2)));
  if (max_q < 0 || max_k < 0 || !is_plain_scale(&factor) || !are_plain_lengths(seqused_k, cu_seq_k, device) ||
      !is_plain_window(&window_left, &window_right, max_k, max_q, is_causal))
    return {};

  const Backend backend(query);
  const Tensor q = with_dense_columns(query), k = with_dense_columns(key), v = with_dense_columns(value);
  Attention a = {};
  set_operands(a, q, k, v, std::nullopt, factor, window_left, window_right, true, threshold);
  set_packed(a, cu_seq_q, cu_seq_k, seqused_k, max_q, max_k);
  if (!backend.serves(a, keep)) return {};
  const std::optional<Tensor> own_seed = seed_of(seed, device, threshold, keep);  // after the checks, which may raise
  set_dropout(a, own_seed, threshold);
  const int64_t tokens = query.size(0), heads = query.size(1);
  const Tensor out = empty({tokens, heads, a.value_head_dim}, a.dtype, backend.device);
  a.out = heads_of(out);
  if constexpr (keep) {
    auto [stats, residual] = kept_results(backend, a, out, {2, tokens, heads});
    backend.run(a);
    const bool keep_residual = a.residual.data != nullptr;
    const Tensor offsets_q = copy_of(cu_seq_q, device);
    const Tensor offsets_k = a.cu_seq_k == a.cu_seq_q ? offsets_q : copy_of(cu_seq_k, device);
    const std::optional<Tensor> used = copy_of(seqused_k, device);
    return {out,  out,      stats, residual, query,  key,         value,        offsets_q, offsets_k,
            used, own_seed, max_q, max_k,    factor, window_left, window_right, threshold, keep_residual};
  } else {
    backend.run(a);
    return {out};
  }
}

FASTATTN_OPERATION(varlen_attention)
FASTATTN_FAST_PATH(varlen_attention)

}  // namespace
}  // namespace fastattn
