// Parts of the backward pass's kernels: delta, sums over chunks, and the gradients of queries.
//
//   delta = rowsum(dO * (O + residual)) - dLSE, or rowsum(P * dP) - dLSE if a block has all keys (short rows);
//   for each chunk of keys of a task, in order: add dQ of the chunk to the task's total;
//   after the task's last chunk: write dQ, or store it as the split's partial dQ;
//   for each query, if the keys are split: dQ is the sum of its partial dQ, in the order of the splits.
//
// The dS of a query add up to its dLSE, so for any row c
//
//   dQ = scale sum_j dS_j k_j = scale (sum_j dS_j (k_j - c) + dLSE c) = scale (sum_j dS_j k_j + (dLSE - sum_j dS_j) c).
//
// In the last form, with c near the mean of the keys, the rounding errors of delta and dS do not multiply that mean. It
// may be much larger than the keys' deviations, which are all that the gradient depends on.
#pragma once
#include "attention_rows.h"
#include "mask.h"
#include "tasks.h"

namespace fastattn {
namespace {

// A sum of dS_j k_j, and what is missing in it: a factor of `mean`.
struct Sums {
  const float *sum, *mean;  // both in whole vectors
  float missing;

  vf at(int64_t d) const { return fma(load(mean + d), splat(missing), load(sum + d)); }
};

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

inline float grad_lse_of(const AttentionBackward& a, const Sequence& s, int64_t head, int64_t query) {
  return a.grad_lse ? a.grad_lse[stats_offset(a, s, head, query)] : 0.0f;
}

static_assert(kWholeRow <= kBlockN, "a short row fits into one block of keys");

// Return rowsum(dO * O) - dLSE of a query, where O is the result before it was rounded. Of a short row return only
// -dLSE, to which the kernel adds rowsum(P * dP).
inline float delta_of(const AttentionBackward& a, const Sequence& s, int64_t head, int64_t query) {
  if (has_short_rows(a)) return -grad_lse_of(a, s, head, query);
  return rows_of(a).delta(query_rows(a, a.grad_out, s, head, query).data, query_rows(a, a.out, s, head, query).data,
                          query_rows(a, a.residual, s, head, query).data, a.value_head_dim) -
         grad_lse_of(a, s, head, query);
}

// Return rowsum(P * dP) / rowsum(P) from the numerator and from rowsum(P) - 1, which is the error of P's normalisation,
// or -1 for a row that sees nothing. What all dP of a row have in common would multiply that error.
FASTATTN_INLINE vf whole_delta(vf weighted, vf excess) {
  return weighted - weighted * (excess / max(excess + splat(1.0f), splat(0.5f)));
}

constexpr int kMeanKeys = 64;  // the mean of so few keys is near enough to that of all

// Compute the mean of the first kMeanKeys keys that some query sees, 0 where it is not finite. It is the same for all
// splits. `seen` is memory for (kBlockN), `mean` for (head_dim) in whole vectors.
inline void mean_of_keys(const AttentionBackward& a, const BlockMask& mask, const Sequence& s, int64_t kv_head,
                         uint8_t* seen, float* mean) {
  const int64_t group = group_of(a), end = s.end(s.seqlen_q - 1);
  const char* row[kMeanKeys];
  int keys = 0;
  for (int64_t key = s.begin(0) / kBlockN * kBlockN; key < end && keys < kMeanKeys; key += kBlockN) {
    const int count = (int)min(kBlockN, end - key);
    const uint8_t* visible = mask.visible_keys(a, s, kv_head * group, (kv_head + 1) * group, key, count, seen);
    for (int j = 0; j < count && keys < kMeanKeys; ++j) {
      if (!visible || visible[j]) row[keys++] = key_rows(a, a.key, s, kv_head, key + j).data;
    }
  }
  rows_of(a).mean(row, keys, a.head_dim, mean);
}

// The gradients of the queries, and the splits of the keys.
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
  void put(const Sequence& s, int64_t head, int64_t query, int64_t split, Sums from, int first, int columns) const {
    if (splits.count > 1) {
      float* to = partial_row(split, s, head, query) + first;
      for (int d = 0; d < columns; d += kLanes) store(to + d, from.at(d));
    } else {
      write(s, head, query, from, first, min(a.head_dim - first, columns));
    }
  }

  void add_splits(const Parallel& parallel, int workers) const {
    if (splits.count == 1) return;
    for_each_query(a, parallel, workers, [&](const Sequence& s, int64_t head, int64_t query) {
      float* total = partial_row(0, s, head, query);
      for (int64_t split = 1; split < splits.count; ++split) {
        const float* part = partial_row(split, s, head, query);
        for (int d = 0; d < width; d += kLanes) store(total + d, load(total + d) + load(part + d));
      }
      write(s, head, query, {total, total, 0}, 0, a.head_dim);
    });
  }

  // A query that sees nothing gets 0, because its sum may hold NaN from keys that other queries see.
  void write(const Sequence& s, int64_t head, int64_t query, Sums from, int first, int columns) const {
    char* to = query_rows(a, a.grad_query, s, head, query).data + first * size_of(a.dtype);
    if (a.row_sum[stats_offset(a, s, head, query)] == 0) return clear_row(to, columns * size_of(a.dtype));
    rows_of(a).write_gradient(from.sum, from.mean, from.missing, a.scale, columns, to);
  }

  float* partial_row(int64_t split, const Sequence& s, int64_t head, int64_t query) const {
    return partial + Splits::row(a, split, s, head, query) * width;
  }
};

}  // namespace
}  // namespace fastattn
