// Code that the bindings of attention share: dense and packed, forward and backward.
#pragma once
#include "../common/attention.h"
#include FASTATTN_BACKEND

namespace fastattn {

FASTATTN_KERNEL(Attention, attention)
FASTATTN_KERNEL(AttentionBackward, attention_backward)

namespace {

// Return an empty tensor (batch, heads, length, size) whose dimensions have the order in memory of those of `like`.
// memory_order in fastattn/backends/common.py does the same.
inline Tensor empty_heads(const Tensor& like, int64_t size, Device device) {
  const Sizes given = like.sizes(), like_strides = like.strides();
  const int64_t sizes[4] = {given[0], given[1], given[2], size};
  int order[4] = {0, 1, 2, 3};
  if (has_dense_columns(like) && like_strides[0] != 0 && like_strides[1] != 0 && like_strides[2] != 0)
    for (int i = 1; i < 3; ++i)
      for (int j = i; j > 0 && like_strides[order[j - 1]] < like_strides[order[j]]; --j) {
        const int inner = order[j - 1];
        order[j - 1] = order[j], order[j] = inner;
      }
  int64_t strides[4], stride = 1;
  for (int i = 3; i >= 0; --i) {
    strides[order[i]] = stride;
    stride *= max(sizes[order[i]], 1);
  }
  return empty_strided(Sizes(sizes, 4), Sizes(strides, 4), dtype_of(like, "like"), device);
}

// Set the operands, which have dense columns. set_packed corrects the batch and the lengths of packed sequences.
inline void set_operands(Attention& a, const Tensor& query, const Tensor& key, const Tensor& value,
                         const std::optional<Tensor>& seed, double scale, int64_t window_left, int64_t window_right,
                         bool lower_right, int64_t threshold) {
  const Sizes q = query.sizes(), k = key.sizes(), v = value.sizes();
  const int row = q.size() == 3 ? 0 : 2;
  a.dtype = dtype_of(query, "query");
  a.batch = q[0], a.num_heads = q[1], a.num_kv_heads = k[1];
  STD_TORCH_CHECK(v[1] == k[1] && (k[1] ? q[1] % k[1] == 0 : q[1] == 0), "attention: ", q[1], ", ", k[1], " and ", v[1],
                  " heads of query, key and value");
  a.seqlen_q = a.rows_q = q[row], a.seqlen_k = a.rows_k = k[row];
  a.head_dim = (int)q[q.size() - 1], a.value_head_dim = (int)v[v.size() - 1];
  a.query = heads_of(query), a.key = heads_of(key), a.value = heads_of(value);
  a.scale = (float)scale;
  a.window_left = window_left, a.window_right = window_right;
  a.lower_right = lower_right;
  set_dropout(a, seed, threshold);
  a.rows = query.numel() / max(a.head_dim, 1);
}

// Check offsets against their bound, because the bounds determine the sizes of the kernels' buffers. Python checks only
// values that it can read, and it can read none while a call is compiled or exported.
inline void check_offsets(const Tensor& offsets, const char* name, int64_t total, int64_t longest, const char* bound) {
  const int64_t *at = (const int64_t*)address_of(offsets), count = offsets.numel();
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
  a.cu_seq_q = (const int64_t*)address_of(cu_seq_q), a.cu_seq_k = (const int64_t*)address_of(cu_seq_k);
  a.key_lengths = data_of<int64_t>(seqused_k);
}

inline void set_stats(Attention& a, const Tensor& stats) {
  a.row_max = (float*)writable(stats);
  a.row_sum = a.row_max + stats.stride(0);
}

// Run the forward pass. `stats_sizes` is 2, followed by the sizes of the LSE. `residual` is like `out`, or empty.
inline std::tuple<Tensor, Tensor, Tensor, Tensor> run_attention(const Backend& backend, Attention& a, const Tensor& out,
                                                                const Tensor& residual,
                                                                std::initializer_list<int64_t> stats_sizes) {
  const Tensor stats = empty(stats_sizes, Dtype::float32, backend.device);
  const Tensor lse = empty(Sizes(stats_sizes.begin() + 1, stats_sizes.size() - 1), Dtype::float32, backend.device);
  a.out = heads_of(out);
  if (residual.dim() > 1) a.residual = heads_of(residual);
  a.lse = lse.mutable_data_ptr<float>();
  set_stats(a, stats);
  backend.run(a);
  return {out, lse, stats, residual};
}

// Whether operands are plain: 4-D, or 3-D of packed sequences, of one dtype, with sizes that fit each other.
inline bool are_plain(const Tensor& query, const Tensor& key, const Tensor& value, int64_t dims, bool enable_gqa) {
  constexpr int64_t kMaxHeadDim = 256;
  Dtype dtype, key_dtype, value_dtype;
  const Device device = device_of(query);
  if (!is_plain(query, device, &dtype) || !is_plain(key, device, &key_dtype) || !is_plain(value, device, &value_dtype))
    return false;
  if (key_dtype != dtype || value_dtype != dtype) return false;
  if (query.dim() != dims || key.dim() != dims || value.dim() != dims) return false;
  const int64_t heads = query.size(1), kv_heads = key.size(1), head_dim = query.size(-1), value_dim = value.size(-1);
  if (key.size(-1) != head_dim || value.size(1) != kv_heads) return false;
  if (heads != kv_heads && !(enable_gqa && kv_heads > 0 && heads % kv_heads == 0)) return false;
  return head_dim >= 1 && head_dim <= kMaxHeadDim && value_dim >= 1 && value_dim <= kMaxHeadDim;
}

// Allocate what the backward pass of a fast path reads, beside the result. Return (stats, residual).
inline std::tuple<Tensor, Tensor> kept_results(const Backend& backend, Attention& a, const Tensor& out,
                                               std::initializer_list<int64_t> stats_sizes) {
  const Tensor stats = empty(stats_sizes, Dtype::float32, backend.device);
  set_stats(a, stats);
  if (a.dtype == Dtype::float32 || !backend.reads_residual(a)) return {stats, empty({0}, a.dtype, backend.device)};
  const Tensor residual = empty_strided(out.sizes(), out.strides(), a.dtype, backend.device);
  a.residual = heads_of(residual);
  return {stats, residual};
}

// Run the backward pass into the gradients.
template <class Problem>  // a template, so that a library without the kernel compiles
void run_attention_backward(const Backend& backend, Problem& a, const Tensor& grad_out,
                            const std::optional<Tensor>& grad_lse, const Tensor& out, const Tensor& stats,
                            const Tensor& residual, const Tensor& grad_query, const Tensor& grad_key,
                            const Tensor& grad_value) {
  const Tensor dout = Backend::loadable(grad_out), o = with_dense_columns(out), rest = with_dense_columns(residual);
  const Tensor rows = dense(stats);
  const std::optional<Tensor> dlse = dense(grad_lse);
  a.out = heads_of(o);
  if (rest.dim() > 1) a.residual = heads_of(rest);
  set_stats(a, rows);
  a.grad_out = heads_of(dout);
  a.grad_lse = data_of<float>(dlse);
  a.grad_query = heads_of(grad_query), a.grad_key = heads_of(grad_key), a.grad_value = heads_of(grad_value);
  backend.run(a);
}

}  // namespace
}  // namespace fastattn
