// The gradients of a tile's scores, from a packed panel of queries and a packed block of keys:
//
//   S (key, query) = K Q';  dP = V dO';  P = exp(S - row_max) / row_sum;  dS = P (dP - delta).
//
// All are (kBlockN, kBlockM), float32. With dropout at rate p, P in dV and dP are multiplied by kept / (1 - p). If the
// block has all keys (short rows), P replaces S in a first pass, which adds sum_j P dP to delta.
#pragma once
#include "gradients.h"
#include "prefetch.h"
#include "tile.h"

namespace fastattn {
namespace {

template <class Unit>
struct TileGradients {
  const AttentionBackward& a;
  const BlockMask& mask;
  // Units along head_dim and value_head_dim, the depths of products; the same, rounded up to whole vectors.
  const int depth = depth_of<Unit>(a.head_dim), value_depth = depth_of<Unit>(a.value_head_dim);
  const int units = (int)round_up(depth, kLanes), value_units = (int)round_up(value_depth, kLanes);
  // Whether rows are read where they lie, without packing.
  const bool key_in_place = in_memory<Unit>(a.dtype) && depth * kElements<Unit> == a.head_dim;
  const bool value_in_place = in_memory<Unit>(a.dtype) && value_depth * kElements<Unit> == a.value_head_dim;

  struct Scratch {
    Unit *query_rows, *query, *grad_rows, *grad;  // Panel of Q and of dO: (kBlockM, units) and (units, kBlockM).
    float *row_max, *inv_sum, *delta;             // (kBlockM).
    float* missing;               // (kBlockM): dLSE, minus all dS as they were multiplied (gradients.h).
    float *score, *grad_score;    // (kBlockN, kBlockM).
    Unit *key_rows, *value_rows;  // (keys, units), (keys, value_units).
    uint8_t* packed;              // (keys / kBlockN): 1 if the rows of the block are packed.
    MaskBuffers mask;
  };

  struct Keys {
    Matrix key, value;
  };

  // Take memory for a panel of queries and for `keys` keys, whole blocks.
  Scratch take_scratch(int64_t keys, Arena* arena) const {
    Scratch s;
    arena->take(kBlockM * units, &s.query_rows, &s.query);
    arena->take(kBlockM * value_units, &s.grad_rows, &s.grad);
    arena->take(kBlockM, &s.row_max, &s.inv_sum, &s.delta, &s.missing);
    arena->take(kBlockM * kBlockN, &s.score, &s.grad_score);
    // Keys that no query sees are packed as zeros. With an upper-left diagonal only the window's right side hides any.
    const bool hidden =
        a.mask.data || (a.lower_right ? a.window_left < a.seqlen_k : a.seqlen_q + a.window_right < a.seqlen_k);
    arena->take(key_in_place && !hidden ? 0 : keys * units, &s.key_rows);
    arena->take(value_in_place && !hidden ? 0 : keys * value_units, &s.value_rows);
    arena->take(keys / kBlockN, &s.packed);
    s.mask = MaskBuffers(a, arena);
    return s;
  }

  // Pack a panel of Q and dO, which begins at `query`, and its statistics. A query that sees nothing has no gradient,
  // and its Q and dO may hold NaN. Then the panel and scratch.mask.queries have 0.
  void pack_queries(const Sequence& s, int64_t head, int64_t query, const Scratch& scratch) const {
    const int count = (int)min(kBlockM, s.seqlen_q - query), padded = (int)round_up(count, kLanes);
    uint8_t* present = scratch.mask.queries;
    for (int i = 0; i < padded; ++i) {
      scratch.row_max[i] = scratch.inv_sum[i] = scratch.delta[i] = 0;
      const int64_t row = stats_offset(a, s, head, query + i);
      present[i] = i < count && a.row_sum[row] != 0;
      if (!present[i]) continue;
      scratch.row_max[i] = a.row_max[row];
      scratch.inv_sum[i] = 1 / a.row_sum[row];
      scratch.delta[i] = delta_of(a, s, head, query + i);
    }
    pack(a, query_rows(a, a.query, s, head, query), padded, a.head_dim, scratch.query_rows, units, present);
    pack(a, query_rows(a, a.grad_out, s, head, query), padded, a.value_head_dim, scratch.grad_rows, value_units,
         present);
    transpose(scratch.query_rows, units, padded, units, scratch.query, kBlockM);
    transpose(scratch.grad_rows, value_units, padded, value_units, scratch.grad, kBlockM);
  }

  // Pack the rows of `count` keys from `key` on into the scratch memory from its row `row` on, if they cannot stay in
  // place. Return which keys some query sees, or null if all are seen (mask.h).
  const uint8_t* pack_keys(const Sequence& s, int64_t kv_head, int64_t key, int count, int64_t row,
                           const Scratch& scratch) const {
    const int64_t group = group_of(a);
    const uint8_t* visible =
        mask.visible_keys(a, s, kv_head * group, (kv_head + 1) * group, key, count, scratch.mask.keys);
    scratch.packed[row / kBlockN] = visible != nullptr;
    if (!key_in_place || visible)
      pack(a, key_rows(a, a.key, s, kv_head, key), count, a.head_dim, scratch.key_rows + row * units, units, visible);
    if (!value_in_place || visible)
      pack(a, key_rows(a, a.value, s, kv_head, key), count, a.value_head_dim, scratch.value_rows + row * value_units,
           value_units, visible);
    return visible;
  }

  // Return the rows of a block of keys, which pack_keys has packed from row `row` on or left in place.
  Keys find_keys(const Sequence& s, int64_t kv_head, int64_t key, int64_t row, const Scratch& scratch) const {
    const bool packed = scratch.packed[row / kBlockN];
    const bool key_packed = packed || !key_in_place, value_packed = packed || !value_in_place;
    return {
        key_packed ? Matrix(scratch.key_rows + row * units, units) : in_place(a, key_rows(a, a.key, s, kv_head, key)),
        value_packed ? Matrix(scratch.value_rows + row * value_units, value_units)
                     : in_place(a, key_rows(a, a.value, s, kv_head, key))};
  }

  // Compute P and dS of a tile and pass them on, as gradients() says.
  template <class Use>
  FASTATTN_INLINE void compute(const Sequence& s, int64_t head, const Tile& t, const Keys& keys, const Scratch& scratch,
                               Prefetcher* next, const Use& use) const {
    Product<Unit> p = {t.keys, depth, keys.key, scratch.query, scratch.score, kBlockM};
    multiply<false, Beta::zero>(t.vectors, p, next);
    p.depth = value_depth, p.a = keys.value, p.b = scratch.grad, p.c = scratch.grad_score;
    multiply<false, Beta::zero>(t.vectors, p, next);
    const bool full = t.full(a);
    if (!full) mask_scores(a, s, head, t, scratch.mask, scratch.score);
    const float scale = full ? a.scale : 1.0f;
    if (a.threshold) {
      draw_dropout(a, s, head, t, scratch.mask.kept);
      has_short_rows(a) ? gradients<true, true>(t, scale, scratch, use)
                        : gradients<true, false>(t, scale, scratch, use);
    } else if (has_short_rows(a)) {
      gradients<false, true>(t, scale, scratch, use);
    } else {
      gradients<false, false>(t, scale, scratch, use);
    }
  }

  // Call use(key, vector, P, dS, next key's P, next key's dS, has_next, missing) for every two keys and every vector of
  // queries. It returns `missing` less the dS.
  template <bool dropout, bool is_short, class Use>
  FASTATTN_INLINE void gradients(const Tile& t, float scale, const Scratch& scratch, const Use& use) const {
    const vf kept_scale = splat(dropout_scale(a.threshold));
    for (int v = 0; v < t.vectors; ++v) {
      const vf row_max = load(scratch.row_max + v * kLanes), inv_sum = load(scratch.inv_sum + v * kLanes);
      vf delta = load(scratch.delta + v * kLanes), missing = load(scratch.missing + v * kLanes);
      vf p[2], ds[2];
      const auto kept = [&](int j) { return (uint32_t)(scratch.mask.kept[j] >> (v * kLanes)) & first_lanes(kLanes); };
      const auto probability = [&](float* at) {
        return exp2((rounded(load(at) * scale) - row_max) * kLog2e) * inv_sum;
      };
      const auto grad_probability = [&](int j) {
        const vf dp = load(scratch.grad_score + j * kBlockM + v * kLanes);
        return dropout ? keep_bits(kept(j), dp * kept_scale) : dp;
      };
      if constexpr (is_short) {
        vf weighted[2] = {}, excess[2] = {splat(-0.5f), splat(-0.5f)};
        const auto add = [&](int j, int i) {
          float* at = scratch.score + j * kBlockM + v * kLanes;
          const vf whole = probability(at);
          store(at, whole);
          excess[i] += whole;
          weighted[i] = fma(whole, grad_probability(j), weighted[i]);
        };
        int j = 0;
        for (; j + 2 <= t.keys; j += 2)
          for (int i = 0; i < 2; ++i) add(j + i, i);
        if (j < t.keys) add(j, 0);
        delta += whole_delta(weighted[0] + weighted[1], excess[0] + excess[1]);
      }
      const auto one = [&](int j, int which) {
        float* at = scratch.score + j * kBlockM + v * kLanes;
        const vf whole = is_short ? load(at) : probability(at);
        p[which] = dropout ? keep_bits(kept(j), whole) : whole;
        ds[which] = whole * (grad_probability(j) - delta);
      };
      int j = 0;
      for (; j + 2 <= t.keys; j += 2) {
        one(j, 0);
        one(j + 1, 1);
        missing = use(j, v, p[0], ds[0], p[1], ds[1], true, missing);
      }
      if (j < t.keys) {
        one(j, 0);
        missing = use(j, v, p[0], ds[0], vf{}, vf{}, false, missing);
      }
      store(scratch.missing + v * kLanes, missing);
    }
  }
};

}  // namespace
}  // namespace fastattn
