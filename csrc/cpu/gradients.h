// What the backward pass's kernels share: delta, sums over chunks, and the gradients of queries.
//
//   for each chunk of keys of a task, in order: add dQ of the chunk to the task's total;
//   after the task's last chunk: write dQ, or store it as the split's partial dQ;
//   for each query, if the keys are split: dQ is the sum of its partial dQ, in the order of the splits.
#pragma once
#include "tasks.h"

namespace fastattn {
namespace {

// Compute out = sum * factor.
template <class T>
FASTATTN_INLINE void write_gradient(const float* sum, float factor, int length, T* out) {
  for_each_vector(length, [&](int64_t d, int lanes) { store(out + d, load(sum + d) * factor, lanes); });
}

// End a chunk: total += sum, then sum = 0. The first chunk overwrites the total.
inline void end_chunk(bool first, int64_t count, float* sum, float* total) {
  for (int64_t i = 0; i < count; i += kLanes) {
    store(total + i, first ? load(sum + i) : load(total + i) + load(sum + i));
    store(sum + i, vf{});
  }
}

// Whether a chunk of the keys [begin, end) ends with the block at `key` and another one follows.
inline bool is_end_of_chunk(int64_t key, int64_t begin, int64_t end) {
  return (key + kBlockN - begin) % kChunk == 0 && key + kBlockN < end;
}

// Return rowsum(dO * O) - dLSE of a query.
template <class T>
float delta_of(const AttentionBackward& a, const Sequence& s, int64_t head, int64_t query) {
  const T* grad = query_row<T>(a.grad_out, s, head, query);
  const T* out = query_row<T>(a.out, s, head, query);
  vf total = {};
  for_each_vector(a.value_head_dim,
                  [&](int64_t d, int lanes) { total = fma(load(grad + d, lanes), load(out + d, lanes), total); });
  return sum(total) - (a.grad_lse ? a.grad_lse[stats_offset(a, s, head, query)] : 0.0f);
}

// The gradients of the queries, and the splits of the keys.
template <class T>
struct QueryGradients {
  const AttentionBackward& a;
  const Splits splits;
  const int width;  // Elements per row, rounded up to whole vectors.
  float* partial;   // (rows of all splits, width), if the keys are split.

  // There are half of the forward pass's keys per split, because a key takes more than twice the arithmetic.
  QueryGradients(const AttentionBackward& a, Arena* arena)
      : a(a),
        splits(a, min(min(kTasks / max(a.batch * a.num_kv_heads, 1), 8), 2 * a.seqlen_k / kSplitKeys)),
        width((int)round_up(a.head_dim, kLanes)) {
    arena->take(splits.rows(a) * width, &partial);
  }

  // Put `columns` columns of a split's gradient, from `first` on. There are at most `width`.
  void put(const Sequence& s, int64_t head, int64_t query, int64_t split, const float* from, int first,
           int columns) const {
    if (splits.count > 1)
      memcpy(partial_row(split, s, head, query) + first, from, (size_t)columns * sizeof(float));
    else
      write(s, head, query, from, first, min(a.head_dim - first, columns));
  }

  void add_splits(const Parallel& parallel, int workers) const {
    if (splits.count == 1) return;
    for_each_query(a, parallel, workers, [&](const Sequence& s, int64_t head, int64_t query) {
      float* total = partial_row(0, s, head, query);
      for (int64_t split = 1; split < splits.count; ++split) {
        const float* part = partial_row(split, s, head, query);
        for (int d = 0; d < width; d += kLanes) store(total + d, load(total + d) + load(part + d));
      }
      write(s, head, query, total, 0, a.head_dim);
    });
  }

  // A query that sees nothing gets 0, because its sum may hold NaN from keys that other queries see.
  void write(const Sequence& s, int64_t head, int64_t query, const float* from, int first, int columns) const {
    T* to = query_row<T>(a.grad_query, s, head, query) + first;
    if (a.row_sum[stats_offset(a, s, head, query)] != 0) return write_gradient(from, a.scale, columns, to);
    for_each_vector(columns, [&](int64_t d, int lanes) { store(to + d, vf{}, lanes); });
  }

  float* partial_row(int64_t split, const Sequence& s, int64_t head, int64_t query) const {
    return partial + Splits::row(a, split, s, head, query) * width;
  }
};

}  // namespace
}  // namespace fastattn
