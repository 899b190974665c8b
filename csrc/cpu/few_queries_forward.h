// Attention of few queries, forward, as in decoding (few_queries.h).
//
//   for each task, in parallel: a sequence, a key/value head, a split of the keys: pack the rows of Q in float32;
//     for each chunk of kChunk keys of the split, ascending:
//       for each block of kBlockN keys of the chunk, ascending:
//         S (rows, keys) = Q K';  P = exp(S - row_max);  O (rows, Ev) = rescale O + P V;
//       merge O into the chunks before, or write the output after the last chunk (results.h).
//
// A task owns the rows of S of all queries of the heads that share the key/value head, in the columns of its split. It
// reads each block of keys once.
#pragma once
#include "mask.h"
#include "results.h"

namespace fastattn {
namespace {

struct FewQueriesForward {
  using Unit = float;

  const Attention& a;
  const Results results;
  int width;  // Elements per row of queries, rounded up to whole vectors.

  struct Scratch {
    float *query, *score, *out;          // (rows, width), (rows, kBlockN), (rows, value_width)
    float *row_max, *rescale, *row_sum;  // (rows)
    Partials totals;
  };

  // Whether this kernel is faster than that of tiles. AMX wins with fewer queries, if the keys fill its tiles.
  template <class TileUnit>
  static bool serves(const Attention& a) {
    const bool fills_tiles = kUsesAmx<TileUnit> && a.seqlen_k >= 2 * kLanes;
    return a.seqlen_q <= (fills_tiles ? kFewQueries / 2 : kFewQueries) && a.threshold == 0;
  }

  FewQueriesForward(const Attention& a, Arena* arena)
      : a(a), results(a, a.batch * a.num_kv_heads, arena), width((int)round_up(a.head_dim, kLanes)) {}

  int64_t tasks() const { return a.batch * a.num_kv_heads * results.splits.count; }

  Scratch take_scratch(Arena* arena) const {
    const int64_t rows = group_of(a) * a.seqlen_q;
    Scratch s;
    arena->take(rows * width, &s.query);
    arena->take(rows * kBlockN, &s.score);
    arena->take(rows * results.partials.width, &s.out);
    arena->take(rows, &s.row_max, &s.rescale, &s.row_sum);
    s.totals = results.take_totals(rows, arena);
    return s;
  }

  void run_task(int64_t index, const Scratch& scratch) const {
    const int64_t split = index % results.splits.count, kv_head = index / results.splits.count % a.num_kv_heads;
    const Sequence s = find_sequence(a, index / results.splits.count / a.num_kv_heads);
    const QueryRows rows(a, s, kv_head);
    for (int r = 0; r < rows.count; ++r)
      pack(a, query_rows(a, a.query, s, rows.head(r), rows.query(r)), 1, a.head_dim, scratch.query + r * width, width,
           nullptr);
    const int64_t begin = split * results.splits.keys, end = min(begin + results.splits.keys, s.length());
    const int64_t first_visible = s.begin(0), end_visible = min(end, s.end(s.seqlen_q - 1));
    const int64_t value_width = results.partials.width;
    bool last_chunk = false;
    for (int64_t chunk = begin; !last_chunk; chunk += kChunk) {
      last_chunk = chunk + kChunk >= end;
      clear_row(scratch.out, rows.count * value_width);
      for (int r = 0; r < rows.count; ++r) scratch.row_max[r] = -kInfinity, scratch.row_sum[r] = 0;
      for (int64_t block = chunk; block < min(end_visible, chunk + kChunk); block += kBlockN) {
        if (block + kBlockN <= first_visible) continue;
        const int64_t key = max(block, first_visible);
        const int keys = (int)(min(block + kBlockN, end_visible) - key), ahead = rows_ahead(key, end_visible);
        rows_of(a).row_products(rows.count, scratch.query, width, key_rows(a, a.key, s, kv_head, key), keys, a.head_dim,
                                a.scale, kBlockN, ahead, scratch.score);
        for (int r = 0; r < rows.count; ++r) softmax(s, rows.head(r), rows.query(r), key, keys, r, scratch);
        rows_of(a).add_rows(rows.count, scratch.score, key_rows(a, a.value, s, kv_head, key), keys, a.value_head_dim,
                            scratch.rescale, kBlockN, ahead, scratch.out, value_width);
      }
      for (int r = 0; r < rows.count; ++r)
        results.put(s, rows.head(r), rows.query(r), split, chunk == begin, last_chunk, scratch.totals, r,
                    {scratch.out + r * value_width, scratch.row_max[r], scratch.row_sum[r]});
    }
  }

  // Apply online softmax to row r and the keys [key, key + keys).
  void softmax(const Sequence& s, int64_t head, int64_t query, int64_t key, int keys, int r,
               const Scratch& scratch) const {
    float* score = scratch.score + r * kBlockN;
    mask_row(a, s, head, query, key, keys, score);
    const float old_max = scratch.row_max[r];
    vf top = splat(old_max);
    for (int j = 0; j < keys; j += kLanes)
      top = max(select_bits(first_lanes(min(kLanes, keys - j)), load(score + j), splat(-kInfinity)), top);
    const float new_max = max(top), row_max = new_max == -kInfinity ? 0.0f : new_max;
    vf total = {};
    for (int j = 0; j < keys; j += kLanes) {
      vf p = exp2((load(score + j) - row_max) * kLog2e);
      p = keep_bits(first_lanes(min(kLanes, keys - j)), p);
      store(score + j, p);
      total += p;
    }
    scratch.rescale[r] = exp2((splat(old_max) - row_max) * kLog2e)[0];
    scratch.row_max[r] = new_max;
    scratch.row_sum[r] = scratch.row_sum[r] * scratch.rescale[r] + sum(total);
  }
};

}  // namespace
}  // namespace fastattn
