// Attention of few queries, backward (few_queries.h).
//
//   for each task, in parallel: a sequence, a key/value head, a split of the keys: pack the rows of Q and dO in
//   float32;
//     for each block of kBlockN keys of the split, ascending:
//       S (rows, keys) = Q K';  dP = dO V';  P = exp(S - row_max) / row_sum;  dS = P (dP - delta);
//       dQ (rows, E) += dS K;  dK (keys, E) = dS' Q;  dV (keys, Ev) = P' dO;  write dK and dV of the block;
//     dQ += (dLSE - sum of dS) c, c near the mean of the keys;
//     write dQ, or store it as the split's partial dQ (gradients.h).
//
// A task has all queries of the heads that share the key/value head, so dK and dV need no sum over tasks.
#pragma once
#include "gradients.h"
#include "mask.h"

namespace fastattn {
namespace {

struct FewQueriesBackward {
  using Unit = float;

  const AttentionBackward& a;
  const BlockMask& mask;
  const QueryGradients& query_gradients;
  // Elements per row of keys and of values, rounded up to whole vectors.
  const int width = query_gradients.width, value_width = (int)round_up(a.value_head_dim, kLanes);

  // One row per query of each head that shares the key/value head.
  struct Scratch {
    float *query, *grad, *grad_query;  // (rows, width), (rows, value_width), (rows, width)
    float* query_total;                // (rows, width), sum of the chunks of keys so far
    float *row_max, *inv_sum, *delta;  // (rows)
    float *missing, *mean;             // (rows), (width): dLSE minus all dS, and a row near the mean of the keys
    float *probability, *grad_score;   // (rows, kBlockN)
    uint8_t* seen;                     // (kBlockN)
  };

  static bool serves(const AttentionBackward& a) { return a.seqlen_q <= kFewQueries && a.threshold == 0; }

  int64_t tasks() const { return a.batch * a.num_kv_heads * query_gradients.splits.count; }

  Scratch take_scratch(Arena* arena) const {
    const int64_t rows = group_of(a) * a.seqlen_q;
    Scratch s;
    arena->take(rows * width, &s.query, &s.grad_query);
    arena->take(rows * value_width, &s.grad);
    arena->take(query_gradients.splits.keys > kChunk ? rows * width : 0, &s.query_total);
    arena->take(rows, &s.row_max, &s.inv_sum, &s.delta, &s.missing);
    arena->take(width, &s.mean);
    arena->take(kBlockN, &s.seen);
    arena->take(rows * kBlockN, &s.probability, &s.grad_score);
    return s;
  }

  void run_task(int64_t index, const Scratch& scratch) const {
    const Splits& splits = query_gradients.splits;
    const int64_t split = index % splits.count, kv_head = index / splits.count % a.num_kv_heads;
    const Sequence s = find_sequence(a, index / splits.count / a.num_kv_heads);
    const int64_t begin = split * splits.keys, end = min(begin + splits.keys, s.length());
    const int64_t stored = min(begin + splits.keys, s.seqlen_k);
    const int64_t first_visible = s.begin(0), end_visible = min(end, s.end(s.seqlen_q - 1));
    const QueryRows rows(a, s, kv_head);
    const RowFunctions& of = rows_of(a);
    for (int r = 0; r < rows.count; ++r) pack_query(s, rows.head(r), rows.query(r), r, split, scratch);
    mean_of_keys(a, mask, s, kv_head, scratch.seen, scratch.mean);
    bool several = false;
    for (int64_t key = begin; key < stored; key += kBlockN) {
      const int64_t last = key + kBlockN > first_visible ? min(key + kBlockN, end_visible) : key;
      const int keys = (int)max(last - key, 0), count = (int)min(kBlockN, stored - key);
      compute(s, kv_head, rows, key, keys, rows_ahead(key, end_visible), scratch);
      of.add_rows(rows.count, scratch.grad_score, key_rows(a, a.key, s, kv_head, key), keys, a.head_dim, nullptr,
                  kBlockN, 0, scratch.grad_query, width);
      if (is_end_of_chunk(key, begin, stored)) {
        end_chunk(!several, rows.count * width, scratch.grad_query, scratch.query_total);
        several = true;
      }
      of.write_keys(rows.count, scratch.grad_score, scratch.query, width, a.scale, kBlockN, count, a.head_dim,
                    key_rows(a, a.grad_key, s, kv_head, key));
      of.write_keys(rows.count, scratch.probability, scratch.grad, value_width, 1.0f, kBlockN, count, a.value_head_dim,
                    key_rows(a, a.grad_value, s, kv_head, key));
    }
    if (several) end_chunk(false, rows.count * width, scratch.grad_query, scratch.query_total);
    const float* total = several ? scratch.query_total : scratch.grad_query;
    for (int r = 0; r < rows.count; ++r)
      query_gradients.put(s, rows.head(r), rows.query(r), split, {total + r * width, scratch.mean, scratch.missing[r]},
                          0, width);
  }

  void pack_query(const Sequence& s, int64_t head, int64_t query, int r, int64_t split, const Scratch& scratch) const {
    const int64_t row = stats_offset(a, s, head, query);
    clear_row(scratch.grad_query + r * width, width);
    clear_row(scratch.query + r * width, width);
    clear_row(scratch.grad + r * value_width, value_width);
    scratch.inv_sum[r] = scratch.missing[r] = 0;
    if (a.row_sum[row] == 0) return;  // the query sees nothing; it and its dO may hold NaN
    pack(a, query_rows(a, a.query, s, head, query), 1, a.head_dim, scratch.query + r * width, width, nullptr);
    pack(a, query_rows(a, a.grad_out, s, head, query), 1, a.value_head_dim, scratch.grad + r * value_width, value_width,
         nullptr);
    scratch.row_max[r] = a.row_max[row];
    scratch.inv_sum[r] = 1 / a.row_sum[row];
    scratch.delta[r] = delta_of(a, s, head, query);
    scratch.missing[r] = split == 0 ? grad_lse_of(a, s, head, query) : 0;
  }

  // Compute P and dS of the rows and the keys [key, key + keys), a block. `ahead` is that of row_products.
  void compute(const Sequence& s, int64_t kv_head, const QueryRows& rows, int64_t key, int keys, int ahead,
               const Scratch& scratch) const {
    rows_of(a).row_products(rows.count, scratch.query, width, key_rows(a, a.key, s, kv_head, key), keys, a.head_dim,
                            a.scale, kBlockN, ahead, scratch.probability);
    rows_of(a).row_products(rows.count, scratch.grad, value_width, key_rows(a, a.value, s, kv_head, key), keys,
                            a.value_head_dim, 1.0f, kBlockN, ahead, scratch.grad_score);
    for (int r = 0; r < rows.count; ++r) differentiate(s, rows.head(r), rows.query(r), key, keys, r, scratch);
  }

  // Replace the scores and dP of row r and the keys [key, key + keys) by P and dS, in place.
  void differentiate(const Sequence& s, int64_t head, int64_t query, int64_t key, int keys, int r,
                     const Scratch& scratch) const {
    float *probability = scratch.probability + r * kBlockN, *grad_score = scratch.grad_score + r * kBlockN;
    mask_row(a, s, head, query, key, keys, probability);
    const float inv_sum = scratch.inv_sum[r];
    vf weighted = {}, excess = splat(-1.0f / kLanes), total = {};
    for (int j = 0; j < kBlockN; j += kLanes) {
      const uint32_t valid = inv_sum == 0 ? 0 : first_lanes(min(kLanes, max(keys - j, 0)));
      const vf p = keep_bits(valid, exp2((load(probability + j) - scratch.row_max[r]) * kLog2e) * splat(inv_sum));
      const vf dp = select(p == vf{}, vf{}, load(grad_score + j));  // hidden values may hold NaN
      store(probability + j, p);
      store(grad_score + j, dp);
      weighted = fma(p, dp, weighted);
      excess += p;
    }
    const float delta =
        scratch.delta[r] + (has_short_rows(a) ? whole_delta(splat(sum(weighted)), splat(sum(excess)))[0] : 0);
    for (int j = 0; j < kBlockN; j += kLanes) {
      const vf p = load(probability + j), ds = select(p == vf{}, vf{}, p * (load(grad_score + j) - delta));
      store(grad_score + j, ds);
      total += ds;
    }
    scratch.missing[r] -= sum(total);
  }
};

}  // namespace
}  // namespace fastattn
