// Attention, dense and over packed sequences, as torch ops.
#pragma once
#include "../common/attention.h"
#include "tensors.h"

namespace fastattn {
namespace {

// (batch, heads, length, size): heads lie inside positions where they do so in `like`, otherwise contiguous.
inline Tensor empty_heads(const Tensor& like, int64_t length, int64_t size, Device device) {
  const Sizes like_sizes = like.sizes(), like_strides = like.strides();
  const int64_t batch = like_sizes[0], heads = like_sizes[1];
  const int64_t sizes[4] = {batch, heads, length, size};
  const bool inside = like_strides[1] > 0 && like_strides[1] < like_strides[2];  // expanded heads lie nowhere
  const int64_t strides[4] = {heads * length * size, inside ? size : length * size, inside ? heads * size : size, 1};
  return empty_strided(Sizes(sizes, 4), Sizes(strides, 4), dtype_of(like, "like"), device);
}

// Operands with dense columns. Of packed ones the batch and the lengths of sequences follow from other arguments.
inline void set_operands(Attention& a, const Tensor& query, const Tensor& key, const Tensor& value,
                         const std::optional<Tensor>& seed, double scale, int64_t window_left, int64_t window_right,
                         bool lower_right, int64_t threshold) {
  const Sizes q = query.sizes(), k = key.sizes(), v = value.sizes();
  const int row = q.size() == 3 ? 0 : 2;
  a.dtype = dtype_of(query, "query");
  a.batch = q[0], a.num_heads = q[1], a.num_kv_heads = k[1];
  a.seqlen_q = q[row], a.seqlen_k = k[row];
  a.head_dim = (int)q[q.size() - 1], a.value_head_dim = (int)v[v.size() - 1];
  a.query = heads_of(query), a.key = heads_of(key), a.value = heads_of(value);
  a.scale = (float)scale;
  a.window_left = window_left, a.window_right = window_right;
  a.lower_right = lower_right;
  set_dropout(a, seed, threshold);
}

inline void set_packed(Attention& a, const Tensor& cu_seq_q, const Tensor& cu_seq_k,
                       const std::optional<Tensor>& seqused_k, int64_t max_q, int64_t max_k) {
  a.batch = cu_seq_q.numel() - 1;
  a.seqlen_q = max_q, a.seqlen_k = max_k;
  a.cu_seq_q = cu_seq_q.const_data_ptr<int64_t>(), a.cu_seq_k = cu_seq_k.const_data_ptr<int64_t>();
  a.key_lengths = data_of<int64_t>(seqused_k);
}

inline void set_stats(Attention& a, const Tensor& stats) {
  a.row_max = (float*)writable(stats);
  a.row_sum = a.row_max + stats.stride(0);
}

// Runs the forward pass. stats_sizes: 2, then the sizes of the LSE.
template <class Backend>
std::tuple<Tensor, Tensor, Tensor> run_attention(const Backend& backend, Attention& a, const Tensor& out,
                                                 std::initializer_list<int64_t> stats_sizes) {
  const Tensor stats = empty(stats_sizes, Dtype::float32, backend.device);
  const Tensor lse = empty(Sizes(stats_sizes.begin() + 1, stats_sizes.size() - 1), Dtype::float32, backend.device);
  a.out = heads_of(out);
  a.lse = lse.mutable_data_ptr<float>();
  set_stats(a, stats);
  backend.run(a);
  return {out, lse, stats};
}

template <class Backend>
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

template <class Backend>
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

// Runs the backward pass into the gradients.
template <class Backend>
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

template <class Backend>
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

template <class Backend>
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

}  // namespace
}  // namespace fastattn
