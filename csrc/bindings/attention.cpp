// Attention, dense, forward, as torch ops.
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

// Run a whole public call, without checks in Python. Return the result, and with `keep` the arguments of
// `attention_backward` that follow the gradients. For a call that is not plain, return no results: undefined tensors
// are None in Python. The public function then takes the usual path, which raises the errors.
template <bool keep>
Returned<keep, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, std::optional<Tensor>, std::optional<Tensor>,
         std::optional<Tensor>, double, int64_t, int64_t, bool, int64_t, bool>
attention_fast(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& attn_mask,
               const std::optional<Tensor>& key_lengths, const std::optional<Tensor>& seed, double dropout_p,
               bool is_causal, std::optional<double> scale, bool enable_gqa, int64_t window_left,
               int64_t window_right) {
  int64_t threshold;
  const Device device = device_of(query);
  if (!are_plain(query, key, value, 4, enable_gqa) || !is_plain_dropout(dropout_p, seed, device, &threshold)) return {};
  const int64_t batch = query.size(0), heads = query.size(1), queries = query.size(2), keys = key.size(2);
  if (key.size(0) != batch || value.size(0) != batch || value.size(2) != keys) return {};
  if (!is_plain_mask(attn_mask, device, {batch, heads, queries, keys})) return {};
  if (key_lengths && !is_plain_integers(*key_lengths, device, batch)) return {};
  const int64_t* lengths = data_of<int64_t>(key_lengths);
  if constexpr (Backend::kReadsOffsets)
    if (lengths && std::any_of(lengths, lengths + batch, [&](int64_t n) { return n < 0 || n > keys; })) return {};
  double factor = scale.value_or(1 / sqrt((double)query.size(3)));
  if (!is_plain_scale(&factor) || !is_plain_window(&window_left, &window_right, queries, keys, is_causal)) return {};

  const Backend backend(query);
  const Tensor q = with_dense_columns(query), k = with_dense_columns(key), v = with_dense_columns(value);
  Attention a = {};
  set_operands(a, q, k, v, std::nullopt, factor, window_left, window_right, false, threshold);
  a.mask = mask_of(attn_mask);
  a.key_lengths = lengths;
  if (!backend.serves(a, keep)) return {};
  const std::optional<Tensor> own_seed = seed_of(seed, device, threshold, keep);
  set_dropout(a, own_seed, threshold);
  const Tensor out = empty_heads(query, a.value_head_dim, backend.device);
  a.out = heads_of(out);
  if constexpr (keep) {
    auto [stats, residual] = kept_results(backend, a, out, {2, batch, heads, queries});
    backend.run(a);
    const bool keep_residual = a.residual.data != nullptr;
    const std::optional<Tensor> mask = kept_mask(attn_mask, device), lengths_copy = copy_of(key_lengths, device);
    return {out,          out,      stats,  residual,    query,        key,   value,     mask,
            lengths_copy, own_seed, factor, window_left, window_right, false, threshold, keep_residual};
  } else {
    backend.run(a);
    return {out};
  }
}

// Run attention_fast with the schema's defaults for other arguments.
Tensor attention_fast_usual(const Tensor& query, const Tensor& key, const Tensor& value, bool is_causal) {
  return std::get<0>(attention_fast<false>(query, key, value, {}, {}, {}, 0, is_causal, {}, false, -1, -1));
}

FASTATTN_OPERATION(attention)
FASTATTN_OPERATION(attention_fast_usual)
FASTATTN_FAST_PATH(attention)

}  // namespace
}  // namespace fastattn
