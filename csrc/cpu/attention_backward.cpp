// Attention, backward: one pass of five products over the tiles (Dao, "FlashAttention-2", 2023, algorithm 2).
//
//   for each task, in parallel: a sequence, a key/value head, a split of the keys: pack K and V of the split;
//     for each query head that shares the key/value head, ascending:
//       for each panel of kBlockM queries, ascending: pack Q and dO;
//         for each block of kBlockN keys that the panel sees, ascending:
//           S (key, query) = K Q';  dP = V dO';  P = exp(S - row_max) / row_sum;  dS = P (dP - delta);
//           dV (key, Ev) += P dO;  dK (key, E) += dS Q;  dQ' (E, query) += K' dS;
//         write dQ of the panel, or store it as the split's partial dQ.
//     write dK and dV of the split.
//   for each query, if the keys are split: dQ is the sum of its partial dQ, in the order of the splits.
//
// query, key, value, out and their gradients have dtype T and the shapes of attention.cpp; the statistics of the
// forward pass are (B, Hq, Lq), float32. With dropout at rate p, P in dV and dP are multiplied by kept / (1 - p). The
// number of splits depends only on the shape. The mask's gradient has tasks of its own (mask_task). See blocks.h for
// the words.
#include "../common/attention.h"
#include "few_queries.h"
#include "kernels.h"
#include "prefetch.h"
#include "tile.h"

namespace fastattn {
namespace {

constexpr int kChunkPanels = 128;  // Panels per chunk of dK and dV. Blocked summation bounds the rounding error.

template <class T>
struct Backward {
  using Unit = typename UnitOf<T>::Unit;
  static constexpr bool kPairs = kElements<Unit> == 2, kColumns = !kUsesAmx<Unit>;

  const AttentionBackward& a;
  BlockMask mask;
  int depth, value_depth;             // Units along head_dim and value_head_dim, the depths of products.
  int units, value_units;             // The depths, rounded up to whole vectors.
  int width, value_width;             // Elements per row of keys and of values, rounded up to whole vectors.
  bool key_in_place, value_in_place;  // Rows are read where they lie, without packing.
  int64_t num_splits, range;          // Range: keys per split, a multiple of kBlockN.
  bool few;                           // Few queries: vectorised along head_dim (few_queries.h).
  float* partial;                     // If num_splits > 1: (num_splits, batch, num_heads, seqlen_q, width).

  // One row per query of each head that shares the key/value head.
  struct FewRows {
    float *query, *grad, *grad_query;  // (rows, width), (rows, value_width), (rows, width)
    float* query_total;                // (rows, width), sum of the chunks of keys so far
    float *row_max, *inv_sum, *delta;  // (rows)
    float *probability, *grad_score;   // (rows, kBlockN)
  };

  struct Scratch {
    Unit *query_rows, *query, *grad_rows, *grad;  // Panel of Q and of dO: (kBlockM, units) and (units, kBlockM).
    Unit *query_right, *grad_right;               // Q and dO as B of a product over queries.
    float *grad_query, *query_total, *row_max, *inv_sum, *delta;
    float *score, *grad_score;                               // (kBlockN, kBlockM).
    Unit *probability_left, *grad_left, *grad_score_right;   // P and dS as A of a product, dS as B.
    uint8_t* packed;                                         // (range / kBlockN): 1 if the block of keys is packed.
    Unit *key_rows, *value_rows, *key_left, *pairs;          // key_left: K as A of a product over keys.
    float *grad_key, *grad_value, *key_total, *value_total;  // Totals: sums of the chunks of queries so far.
    MaskBuffers mask;
    FewRows few;
  };

  Backward(const AttentionBackward& problem, Arena* arena) : a(problem), mask(problem, arena) {
    depth = depth_of<Unit>(a.head_dim);
    value_depth = depth_of<Unit>(a.value_head_dim);
    units = (int)round_up(depth, kLanes);
    value_units = (int)round_up(value_depth, kLanes);
    width = (int)round_up(a.head_dim, kLanes);
    value_width = (int)round_up(a.value_head_dim, kLanes);
    key_in_place = UnitOf<T>::in_memory && depth * kElements<Unit> == a.head_dim;
    value_in_place = UnitOf<T>::in_memory && value_depth * kElements<Unit> == a.value_head_dim;
    // Half of forward's keys per split, because a key takes more than twice the arithmetic.
    num_splits = min(min(kTasks / max(a.batch * a.num_kv_heads, 1), 8), 2 * a.seqlen_k / kSplitKeys);
    num_splits = max(num_splits, 1);
    range = round_up(ceil_div(a.seqlen_k, num_splits), kBlockN);
    few = a.seqlen_q <= kFewQueries && a.threshold == 0 && !a.grad_mask;
    partial = arena->take<float>(num_splits > 1 ? num_splits * a.batch * a.num_heads * a.seqlen_q * width : 0);
  }

  int64_t tasks() const { return a.batch * a.num_kv_heads * num_splits; }
  int64_t mask_tasks() const {
    return a.grad_mask ? a.mask.batches * a.mask.heads * (a.mask.rows == 1 ? 1 : mask.panels) : 0;
  }

  // Whether the gradients of a key may take more than one chunk of panels.
  bool has_long_sums() const { return group_of(a) * ceil_div(a.seqlen_q, kBlockM) > kChunkPanels; }

  // Whether the window may hide some key from all queries. Its left side can do so only with a lower-right diagonal.
  bool window_hides_keys() const {
    return a.lower_right ? a.window_left < a.seqlen_k : a.seqlen_q + a.window_right < a.seqlen_k;
  }

  Scratch take_scratch(Arena* arena) const {
    Scratch s = {};
    if (few) {
      const int64_t rows = group_of(a) * a.seqlen_q;
      s.few.query = arena->take<float>(rows * width);
      s.few.grad = arena->take<float>(rows * value_width);
      s.few.grad_query = arena->take<float>(rows * width);
      s.few.query_total = arena->take<float>(range > kChunk ? rows * width : 0);
      s.few.row_max = arena->take<float>(rows);
      s.few.inv_sum = arena->take<float>(rows);
      s.few.delta = arena->take<float>(rows);
      s.few.probability = arena->take<float>(rows * kBlockN);
      s.few.grad_score = arena->take<float>(rows * kBlockN);
      return s;
    }
    s.query_rows = s.query_right = arena->take<Unit>(kBlockM * units);
    s.query = arena->take<Unit>(kBlockM * units);
    s.grad_rows = s.grad_right = arena->take<Unit>(kBlockM * value_units);
    s.grad = arena->take<Unit>(kBlockM * value_units);
    s.grad_query = arena->take<float>(kBlockM * width);
    s.query_total = arena->take<float>(range > kChunk ? kBlockM * width : 0);
    s.row_max = arena->take<float>(kBlockM);
    s.inv_sum = arena->take<float>(kBlockM);
    s.delta = arena->take<float>(kBlockM);
    s.score = arena->take<float>(kBlockM * kBlockN);
    s.grad_score = arena->take<float>(kBlockM * kBlockN);
    s.probability_left = (Unit*)s.score;
    s.grad_left = s.grad_score_right = (Unit*)s.grad_score;
    if constexpr (kPairs) {
      s.query_right = arena->take<Unit>(kBlockM / 2 * width);
      s.grad_right = arena->take<Unit>(kBlockM / 2 * value_width);
      s.probability_left = arena->take<Unit>(kBlockM / 2 * kBlockN);
      s.grad_left = arena->take<Unit>(kBlockM / 2 * kBlockN);
      s.grad_score_right = arena->take<Unit>(kBlockM / 2 * kBlockN);
    }
    // Keys that no query sees are packed as zeros.
    const bool hidden = a.mask.data || window_hides_keys(), long_sums = has_long_sums();
    s.packed = arena->take<uint8_t>(range / kBlockN);
    s.key_rows = arena->take<Unit>(key_in_place && !hidden ? 0 : range * units);
    s.value_rows = arena->take<Unit>(value_in_place && !hidden ? 0 : range * value_units);
    s.key_left = arena->take<Unit>(kPairs ? range / 2 * width : 0);
    s.pairs = arena->take<Unit>(kUsesAmx<Unit> ? kBlockN / 2 * width : 0);
    s.grad_key = arena->take<float>(range * width);
    s.grad_value = arena->take<float>(range * value_width);
    s.key_total = arena->take<float>(long_sums ? range * width : 0);
    s.value_total = arena->take<float>(long_sums ? range * value_width : 0);
    s.mask = MaskBuffers(a, arena);
    return s;
  }

  struct Keys {
    Matrix key, value, left;
  };

  template <class Row>
  void pack_rows(const Row* from, int64_t stride, int count, int length, const uint8_t* visible, Unit* to,
                 int64_t row) const {
    for (int j = 0; j < count; ++j) {
      if (!visible || visible[j])
        pack_row(from + j * stride, length, to + j * row, row);
      else
        clear_row(to + j * row, row);
    }
  }

  void pack_keys(const Sequence& s, int64_t kv_head, int64_t first_head, int64_t end_head, int64_t key, int count,
                 int64_t slot, const Scratch& scratch) const {
    const T* k = row_pointer<T>(a.key, s.index, kv_head, s.first_key + key);
    const T* v = row_pointer<T>(a.value, s.index, kv_head, s.first_key + key);
    const uint8_t* visible = mask.visible_keys(a, s, first_head, end_head, key, count, scratch.mask.keys);
    scratch.packed[slot / kBlockN] = visible != nullptr;
    if (!key_in_place || visible)
      pack_rows(k, a.key.row, count, a.head_dim, visible, scratch.key_rows + slot * units, units);
    if (!value_in_place || visible)
      pack_rows(v, a.value.row, count, a.value_head_dim, visible, scratch.value_rows + slot * value_units, value_units);
    if constexpr (kPairs)
      pack_left(k, a.key.row, count, a.head_dim, scratch.key_left + slot / 2 * width, width, visible, scratch.pairs);
  }

  Keys find_keys(const Sequence& s, int64_t kv_head, int64_t key, int64_t slot, const Scratch& scratch) const {
    const bool packed = scratch.packed[slot / kBlockN];
    Keys keys;
    keys.key = {(const char*)row_pointer<T>(a.key, s.index, kv_head, s.first_key + key),
                a.key.row * (int64_t)sizeof(T)};
    keys.value = {(const char*)row_pointer<T>(a.value, s.index, kv_head, s.first_key + key),
                  a.value.row * (int64_t)sizeof(T)};
    if (packed || !key_in_place) keys.key = {(const char*)(scratch.key_rows + slot * units), units * 4};
    if (packed || !value_in_place)
      keys.value = {(const char*)(scratch.value_rows + slot * value_units), value_units * 4};
    keys.left = keys.key;
    if constexpr (kPairs)
      keys.left = {(const char*)(scratch.key_left + slot / 2 * width), (kColumns ? width : kBlockN / 2) * 4};
    return keys;
  }

  float dot(const T* grad, const T* out) const {
    vf total = {};
    for_each_vector(a.value_head_dim,
                    [&](int64_t d, int lanes) { total = fma(load(grad + d, lanes), load(out + d, lanes), total); });
    return sum(total);
  }

  void start(const Sequence& s, int64_t head, int64_t query, const Scratch& scratch) const {
    const int count = (int)min(kBlockM, s.seqlen_q - query), padded = (int)round_up(count, kLanes);
    for (int i = 0; i < padded; ++i) {
      scratch.row_max[i] = scratch.inv_sum[i] = scratch.delta[i] = 0;
      Unit *query_row = scratch.query_rows + i * units, *grad_row = scratch.grad_rows + i * value_units;
      const int64_t row = stats_offset(a, s, head, query + i);
      // A query that sees nothing has no gradient. It and its dO may hold NaN.
      const bool present = i < count && a.row_sum[row] != 0;
      scratch.mask.queries[i] = present;
      if (!present) {
        clear_row(query_row, units);
        clear_row(grad_row, value_units);
        continue;
      }
      const T* grad = row_pointer<T>(a.grad_out, s.index, head, s.first_query + query + i);
      const T* out = row_pointer<T>(a.out, s.index, head, s.first_query + query + i);
      pack_row(row_pointer<T>(a.query, s.index, head, s.first_query + query + i), a.head_dim, query_row, units);
      pack_row(grad, a.value_head_dim, grad_row, value_units);
      scratch.row_max[i] = a.row_max[row];
      scratch.inv_sum[i] = 1 / a.row_sum[row];
      scratch.delta[i] = dot(grad, out) - (a.grad_lse ? a.grad_lse[row] : 0.0f);
    }
    transpose(scratch.query_rows, units, padded, units, scratch.query, kBlockM);
    transpose(scratch.grad_rows, value_units, padded, value_units, scratch.grad, kBlockM);
    if constexpr (kPairs) {
      const uint8_t* visible = scratch.mask.queries;
      pack_pairs(row_pointer<T>(a.query, s.index, head, s.first_query + query), a.query.row, count, a.head_dim,
                 scratch.query_right, width, visible);
      pack_pairs(row_pointer<T>(a.grad_out, s.index, head, s.first_query + query), a.grad_out.row, count,
                 a.value_head_dim, scratch.grad_right, value_width, visible);
      const int pairs = units_of<Unit>(count), rest = depth_of<Unit>(count) - pairs;
      clear_row(scratch.query_right + pairs * width, rest * width);
      clear_row(scratch.grad_right + pairs * value_width, rest * value_width);
    }
  }

  // Call use(key, vector, P, dS, next key's P, next key's dS, has_next) for every two keys and every vector of queries.
  template <bool dropout, class Use>
  FASTATTN_INLINE void gradients(const Tile& t, float scale, const Scratch& scratch, const Use& use) const {
    for (int v = 0; v < t.vectors; ++v) {
      const vf row_max = load(scratch.row_max + v * kLanes), inv_sum = load(scratch.inv_sum + v * kLanes);
      const vf delta = load(scratch.delta + v * kLanes);
      vf p[2], ds[2];
      const auto one = [&](int j, int which) {
        const int at = j * kBlockM + v * kLanes;
        const vf score = rounded(load(scratch.score + at) * scale);
        const vf whole = exp2((score - row_max) * kLog2e) * inv_sum;
        vf dp = load(scratch.grad_score + at);
        p[which] = whole;
        if constexpr (dropout) {
          const uint32_t kept = (uint32_t)(scratch.mask.kept[j] >> (v * kLanes)) & first_lanes(kLanes);
          p[which] = keep_bits(kept, whole);
          dp = keep_bits(kept, dp * dropout_scale(a.threshold));
        }
        ds[which] = whole * (dp - delta);
      };
      int j = 0;
      for (; j + 2 <= t.keys; j += 2) {
        one(j, 0);
        one(j + 1, 1);
        use(j, v, p[0], ds[0], p[1], ds[1], true);
      }
      if (j < t.keys) {
        one(j, 0);
        use(j, v, p[0], ds[0], vf{}, vf{}, false);
      }
    }
  }

  template <class Use>
  FASTATTN_INLINE void compute(const Sequence& s, int64_t head, const Tile& t, const Keys& keys, const Scratch& scratch,
                               Prefetcher* next, const Use& use) const {
    Product<Unit> p = {.rows = t.keys,
                       .depth = depth,
                       .a = keys.key,
                       .b = scratch.query,
                       .b_stride = kBlockM,
                       .c = scratch.score,
                       .c_stride = kBlockM};
    multiply<false, Beta::zero>(t.vectors, p, next);
    p.depth = value_depth, p.a = keys.value, p.b = scratch.grad, p.c = scratch.grad_score;
    multiply<false, Beta::zero>(t.vectors, p, next);
    const bool full = t.full(a);
    if (!full) mask_scores(a, s, head, t, scratch.mask, scratch.score);
    const float scale = full ? a.scale : 1.0f;
    if (a.threshold) {
      draw_dropout(a, s, head, t, scratch.mask.kept);
      gradients<true>(t, scale, scratch, use);
    } else {
      gradients<false>(t, scale, scratch, use);
    }
  }

  // Compute C (rows, columns) += A (rows, depth) B (depth, columns), for any number of columns.
  void accumulate(int rows, int depth, Matrix left, const Unit* right, int columns, float* c, Prefetcher* next) const {
    for (int n = 0; n < columns; n += kBlockM)
      multiply<false, Beta::one>(min(columns - n, kBlockM) / kLanes,
                                 Product<Unit>{.rows = rows,
                                               .depth = depth,
                                               .a = left,
                                               .b = right + n,
                                               .b_stride = columns,
                                               .c = c + n,
                                               .c_stride = columns},
                                 next);
  }

  void step(const Sequence& s, int64_t head, const Tile& t, const Keys& keys, int64_t slot, const Scratch& scratch,
            bool first, Prefetcher* next) const {
    compute(s, head, t, keys, scratch, next, [&](int j, int v, vf p0, vf ds0, vf p1, vf ds1, bool both) {
      const int at = j * kBlockM + v * kLanes;
      if constexpr (kPairs) {
        store((bfloat16*)scratch.probability_left + at, p0);
        store((bfloat16*)scratch.grad_left + at, ds0);
        store_unit(scratch.grad_score_right + j / 2 * kBlockM + v * kLanes, make_pairs(ds0, ds1, Unit{}));
        if (!both) return;
        store((bfloat16*)scratch.probability_left + at + kBlockM, p1);
        store((bfloat16*)scratch.grad_left + at + kBlockM, ds1);
      } else {
        store(scratch.score + at, p0);
        store(scratch.grad_score + at, ds0);
        if (!both) return;
        store(scratch.score + at + kBlockM, p1);
        store(scratch.grad_score + at + kBlockM, ds1);
      }
    });
    const int queries = depth_of<Unit>(t.queries), count = depth_of<Unit>(t.keys);
    const int64_t stride = kBlockM * (int64_t)sizeof(Unit) / kElements<Unit>;
    if constexpr (kUsesAmx<Unit>) {
      for (int j = units_of<Unit>(t.keys); j < count; ++j) clear_row(scratch.grad_score_right + j * kBlockM, kBlockM);
      for (int j = 0; t.vectors % 2 && j < t.keys; ++j) {  // an AMX tile is two vectors of queries deep
        const int at = j * kBlockM + t.vectors * kLanes;
        store((bfloat16*)scratch.probability_left + at, vf{});
        store((bfloat16*)scratch.grad_left + at, vf{});
      }
    }
    accumulate(t.keys, queries, {(const char*)scratch.probability_left, stride}, scratch.grad_right, value_width,
               scratch.grad_value + slot * value_width, next);
    accumulate(t.keys, queries, {(const char*)scratch.grad_left, stride}, scratch.query_right, width,
               scratch.grad_key + slot * width, next);
    const Product<Unit> p = {.rows = kColumns ? a.head_dim : width,
                             .depth = count,
                             .a = keys.left,
                             .b = scratch.grad_score_right,
                             .b_stride = kBlockM,
                             .c = scratch.grad_query,
                             .c_stride = kBlockM};
    if (first)
      multiply<kColumns, Beta::zero>(t.vectors, p, next);
    else
      multiply<kColumns, Beta::one>(t.vectors, p, next);
  }

  // End a chunk: total += sum, then sum = 0. The first chunk overwrites the total.
  void end_chunk(bool first, int64_t count, float* sum, float* total) const {
    for (int64_t i = 0; i < count; i += kLanes) {
      store(total + i, first ? load(sum + i) : load(total + i) + load(sum + i));
      store(sum + i, vf{});
    }
  }

  // Whether a chunk of keys ends with the block at `key` and another one follows.
  static bool is_end_of_chunk(int64_t key, int64_t first, int64_t end) {
    return (key + kBlockN - first) % kChunk == 0 && key + kBlockN < end;
  }

  FASTATTN_INLINE void write_row(const float* from, float factor, int length, T* to) const {
    for_each_vector(length, [&](int64_t d, int lanes) { store(to + d, load(from + d) * factor, lanes); });
  }

  // Write the columns from `first` of a query's gradient. A query that sees nothing gets 0, because its sum may hold
  // NaN from keys that other queries see.
  void write_query(const Sequence& s, int64_t head, int64_t query, const float* from, int first, int columns) const {
    T* to = row_pointer<T>(a.grad_query, s.index, head, s.first_query + query) + first;
    if (a.row_sum[stats_offset(a, s, head, query)] != 0) return write_row(from, a.scale, columns, to);
    for_each_vector(columns, [&](int64_t d, int lanes) { store(to + d, vf{}, lanes); });
  }

  float* partial_row(int64_t split, const Sequence& s, int64_t head, int64_t query) const {
    return partial + (((split * a.batch + s.index) * a.num_heads + head) * a.seqlen_q + query) * width;
  }

  void finish(const Sequence& s, int64_t head, int64_t query, int64_t split, const float* grad_query,
              const Scratch& scratch) const {
    const int count = (int)min(kBlockM, s.seqlen_q - query);
    float* rows = scratch.score;
    for (int d = 0; d < width; d += kBlockN) {  // `rows` holds kBlockN columns
      const int columns = min(width - d, kBlockN);
      transpose(grad_query + d * kBlockM, kBlockM, columns, (int)round_up(count, kLanes), rows, kBlockN);
      for (int i = 0; i < count; ++i) {
        if (num_splits > 1)
          memcpy(partial_row(split, s, head, query + i) + d, rows + i * kBlockN, (size_t)columns * sizeof(float));
        else
          write_query(s, head, query + i, rows + i * kBlockN, d, min(a.head_dim - d, columns));
      }
    }
  }

  // Return the operands and results of task `index`, for its first query head, to prefetch them. There are none if
  // there are splits or long tasks.
  Prefetcher ahead(int64_t index) const {
    Prefetcher next;
    if (index >= tasks() || num_splits > 1 || !Prefetcher::serves<T>(a)) return next;
    const int64_t kv_head = index % a.num_kv_heads, head = kv_head * group_of(a);
    const Sequence s = find_sequence(a, index / a.num_kv_heads);
    if (s.seqlen_q <= 0 || s.length() <= 0) return next;
    next.add<T>(a.grad_value, s.index, kv_head, s.first_key, s.length(), a.value_head_dim);
    next.add<T>(a.grad_key, s.index, kv_head, s.first_key, s.length(), a.head_dim);
    next.add<T>(a.grad_query, s.index, head, s.first_query, s.seqlen_q, a.head_dim);
    next.add<T>(a.value, s.index, kv_head, s.first_key, s.length(), a.value_head_dim);
    next.add<T>(a.key, s.index, kv_head, s.first_key, s.length(), a.head_dim);
    next.add<T>(a.out, s.index, head, s.first_query, s.seqlen_q, a.value_head_dim);
    next.add<T>(a.grad_out, s.index, head, s.first_query, s.seqlen_q, a.value_head_dim);
    next.add<T>(a.query, s.index, head, s.first_query, s.seqlen_q, a.head_dim);
    return next;
  }

  void task(int64_t index, const Scratch& scratch) const {
    Prefetcher next = ahead(index + 1);
    const int64_t split = index % num_splits, kv_head = index / num_splits % a.num_kv_heads, group = group_of(a);
    const Sequence s = find_sequence(a, index / num_splits / a.num_kv_heads);
    const int64_t begin = split * range, end = min(begin + range, s.length()), stored = min(begin + range, s.seqlen_k);
    for (int64_t key = begin; key < end; key += kBlockN)
      pack_keys(s, kv_head, kv_head * group, (kv_head + 1) * group, key, (int)min(kBlockN, end - key), key - begin,
                scratch);
    const int64_t rows = max(stored - begin, 0);
    clear_row(scratch.grad_key, rows * width);
    clear_row(scratch.grad_value, rows * value_width);
    int64_t panels = 0, chunks = 0;
    const auto end_panels = [&] {
      end_chunk(chunks == 0, rows * width, scratch.grad_key, scratch.key_total);
      end_chunk(chunks == 0, rows * value_width, scratch.grad_value, scratch.value_total);
      ++chunks;
    };
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head)
      for (int64_t query = 0; query < s.seqlen_q; query += kBlockM) {
        const int count = (int)min(kBlockM, s.seqlen_q - query);
        const int64_t first = max(s.begin(query) / kBlockN * kBlockN, begin);
        const int64_t last = min(s.end(query + count - 1), end);
        bool started = false, several = false;
        for (int64_t key = first; key < last; key += kBlockN) {
          const Tile t(a, s, mask, head, query, key);
          if (t.empty()) continue;
          if (!started) start(s, head, query, scratch);
          step(s, head, t, find_keys(s, kv_head, key, key - begin, scratch), key - begin, scratch, !started, &next);
          started = true;
          if (!is_end_of_chunk(key, first, last)) continue;
          end_chunk(!several, width * kBlockM, scratch.grad_query, scratch.query_total);
          several = true;
        }
        if (!started) clear_row(scratch.grad_query, width * kBlockM);
        if (several) end_chunk(false, width * kBlockM, scratch.grad_query, scratch.query_total);
        finish(s, head, query, split, several ? scratch.query_total : scratch.grad_query, scratch);
        if (++panels % kChunkPanels == 0 && has_long_sums()) end_panels();
      }
    if (chunks > 0) end_panels();
    const float* grad_key = chunks > 0 ? scratch.key_total : scratch.grad_key;
    const float* grad_value = chunks > 0 ? scratch.value_total : scratch.grad_value;
    for (int64_t j = 0; j < rows; ++j) {
      write_row(grad_key + j * width, a.scale, a.head_dim,
                row_pointer<T>(a.grad_key, s.index, kv_head, s.first_key + begin + j));
      write_row(grad_value + j * value_width, a.threshold ? dropout_scale(a.threshold) : 1.0f, a.value_head_dim,
                row_pointer<T>(a.grad_value, s.index, kv_head, s.first_key + begin + j));
    }
  }

  void few_start(const Sequence& s, int64_t head, int64_t query, int r, const FewRows& few) const {
    const int64_t row = stats_offset(a, s, head, query);
    clear_row(few.grad_query + r * width, width);
    clear_row(few.query + r * width, width);
    clear_row(few.grad + r * value_width, value_width);
    few.inv_sum[r] = 0;
    if (a.row_sum[row] == 0) return;  // the query sees nothing; it and its dO may hold NaN
    const T* grad = row_pointer<T>(a.grad_out, s.index, head, s.first_query + query);
    pack_row(row_pointer<T>(a.query, s.index, head, s.first_query + query), a.head_dim, few.query + r * width, width);
    pack_row(grad, a.value_head_dim, few.grad + r * value_width, value_width);
    few.row_max[r] = a.row_max[row];
    few.inv_sum[r] = 1 / a.row_sum[row];
    few.delta[r] =
        dot(grad, row_pointer<T>(a.out, s.index, head, s.first_query + query)) - (a.grad_lse ? a.grad_lse[row] : 0.0f);
  }

  // Replace the scores and dP of row r and the keys [key, key + keys) by P and dS, in place.
  void few_gradients(const Sequence& s, int64_t head, int64_t query, int64_t key, int keys, int r,
                     const FewRows& few) const {
    float *probability = few.probability + r * kBlockN, *grad_score = few.grad_score + r * kBlockN;
    mask_row(a, s, head, query, key, keys, probability);
    for (int j = 0; j < kBlockN; j += kLanes) {
      const uint32_t valid = few.inv_sum[r] == 0 ? 0 : first_lanes(min(kLanes, max(keys - j, 0)));
      const vf p = keep_bits(valid, exp2((load(probability + j) - few.row_max[r]) * kLog2e) * splat(few.inv_sum[r]));
      const vf ds = p * (load(grad_score + j) - few.delta[r]);
      store(probability + j, p);
      store(grad_score + j, select(p == vf{}, vf{}, ds));  // hidden values may hold NaN
    }
  }

  template <int vectors>
  FASTATTN_INLINE void few_write_vectors(int rows, const float* weight, const float* row, int64_t row_width,
                                         float factor, int count, int length, T* to, int64_t stride) const {
    const int last = length - (vectors - 1) * kLanes;
    for (int j = 0; j < count; ++j, to += stride) {
      vf total[vectors] = {};
      for (int r = 0; r < rows; ++r) {
        const float w = weight[r * kBlockN + j];
        if (w == 0) continue;
#pragma GCC unroll 4
        for (int n = 0; n < vectors; ++n) total[n] = fma(load(row + r * row_width + n * kLanes), splat(w), total[n]);
      }
#pragma GCC unroll 4
      for (int n = 0; n < vectors; ++n)
        store(to + n * kLanes, total[n] * factor, n + 1 < vectors ? kLanes : min(last, kLanes));
    }
  }

  // Write the gradients of `count` keys or values: factor * sum_r weight_rj row_r.
  void few_write(int rows, const float* weight, const float* row, int64_t row_width, float factor, int count,
                 int length, T* to, int64_t stride) const {
    for (int d = 0; d < length; d += 4 * kLanes) {
      const int rest = min(length - d, 4 * kLanes);
      switch ((rest + kLanes - 1) / kLanes) {
        case 1: few_write_vectors<1>(rows, weight, row + d, row_width, factor, count, rest, to + d, stride); break;
        case 2: few_write_vectors<2>(rows, weight, row + d, row_width, factor, count, rest, to + d, stride); break;
        case 3: few_write_vectors<3>(rows, weight, row + d, row_width, factor, count, rest, to + d, stride); break;
        default: few_write_vectors<4>(rows, weight, row + d, row_width, factor, count, rest, to + d, stride);
      }
    }
  }

  void few_task(int64_t index, const Scratch& scratch) const {
    const int64_t split = index % num_splits, kv_head = index / num_splits % a.num_kv_heads, group = group_of(a);
    const Sequence s = find_sequence(a, index / num_splits / a.num_kv_heads);
    const int64_t begin = split * range, end = min(begin + range, s.length()), stored = min(begin + range, s.seqlen_k);
    const FewRows& few = scratch.few;
    const int rows = (int)(group * s.seqlen_q);
    const auto head = [&](int r) { return kv_head * group + r / s.seqlen_q; };
    const auto query = [&](int r) { return r % s.seqlen_q; };
    const int64_t first_visible = s.begin(0), end_visible = min(end, s.end(s.seqlen_q - 1));
    bool several = false;
    for (int r = 0; r < rows; ++r) few_start(s, head(r), query(r), r, few);
    for (int64_t key = begin; key < stored; key += kBlockN) {
      const int64_t last = key + kBlockN > first_visible ? min(key + kBlockN, end_visible) : key;
      const int keys = (int)max(last - key, 0), count = (int)min(kBlockN, stored - key);
      const T* k = row_pointer<T>(a.key, s.index, kv_head, s.first_key + key);
      const T* v = row_pointer<T>(a.value, s.index, kv_head, s.first_key + key);
      const int ahead = rows_ahead(key, end_visible);
      row_products(rows, few.query, width, k, a.key.row, keys, a.head_dim, a.scale, ahead, few.probability);
      row_products(rows, few.grad, value_width, v, a.value.row, keys, a.value_head_dim, 1.0f, ahead, few.grad_score);
      for (int r = 0; r < rows; ++r) few_gradients(s, head(r), query(r), key, keys, r, few);
      add_rows(rows, few.grad_score, k, a.key.row, keys, a.head_dim, nullptr, 0, few.grad_query, width);
      if (is_end_of_chunk(key, begin, stored)) {
        end_chunk(!several, rows * width, few.grad_query, few.query_total);
        several = true;
      }
      few_write(rows, few.grad_score, few.query, width, a.scale, count, a.head_dim,
                row_pointer<T>(a.grad_key, s.index, kv_head, s.first_key + key), a.grad_key.row);
      few_write(rows, few.probability, few.grad, value_width, 1.0f, count, a.value_head_dim,
                row_pointer<T>(a.grad_value, s.index, kv_head, s.first_key + key), a.grad_value.row);
    }
    if (several) end_chunk(false, rows * width, few.grad_query, few.query_total);
    for (int r = 0; r < rows; ++r) {
      const float* total = (several ? few.query_total : few.grad_query) + r * width;
      if (num_splits > 1)
        memcpy(partial_row(split, s, head(r), query(r)), total, (size_t)width * sizeof(float));
      else
        write_query(s, head(r), query(r), total, 0, a.head_dim);
    }
  }

  void add_splits(int64_t index) const {
    const Sequence s = find_sequence(a, index / a.seqlen_q / a.num_heads);
    const int64_t head = index / a.seqlen_q % a.num_heads, query = index % a.seqlen_q;
    if (query >= s.seqlen_q) return;
    float* total = partial_row(0, s, head, query);
    for (int64_t split = 1; split < num_splits; ++split) {
      const float* part = partial_row(split, s, head, query);
      for (int d = 0; d < width; d += kLanes) store(total + d, load(total + d) + load(part + d));
    }
    write_query(s, head, query, total, 0, a.head_dim);
  }

  // The mask's gradient: a task owns one panel of it (one row if the mask has one) and visits all scores that the panel
  // is broadcast to.

  float* take_mask_sums(Arena* arena) const { return arena->take<float>(round_up(a.mask.columns, kBlockN) * kBlockM); }

  void mask_task(int64_t index, const Scratch& scratch, float* sums) const {
    const Mask& m = a.mask;
    const int64_t panels = m.rows == 1 ? 1 : mask.panels, panel = index % panels;
    const int64_t mask_head = index / panels % m.heads, mask_batch = index / panels / m.heads, group = group_of(a);
    clear_row(sums, round_up(m.columns, kBlockN) * kBlockM);
    Prefetcher none;
    for (int64_t batch = m.batches == 1 ? 0 : mask_batch; batch < (m.batches == 1 ? a.batch : mask_batch + 1); ++batch)
      for (int64_t head = m.heads == 1 ? 0 : mask_head; head < (m.heads == 1 ? a.num_heads : mask_head + 1); ++head) {
        const Sequence s = find_sequence(a, batch);
        const int64_t kv_head = head / group;
        const int64_t first = m.rows == 1 ? 0 : panel * kBlockM, last = m.rows == 1 ? s.seqlen_q : first + 1;
        for (int64_t query = first; query < last; query += kBlockM) {
          start(s, head, query, scratch);
          for (int64_t key = 0; key < s.length(); key += kBlockN) {
            const Tile t(a, s, mask, head, query, key);
            if (t.empty()) continue;
            pack_keys(s, kv_head, kv_head * group, (kv_head + 1) * group, key, t.keys, 0, scratch);
            compute(s, head, t, find_keys(s, kv_head, key, 0, scratch), scratch, &none,
                    [&](int j, int v, vf, vf ds0, vf, vf ds1, bool both) {
                      float* at = sums + (m.columns == 1 ? 0 : key + j) * kBlockM + v * kLanes;
                      store(at, load(at) + ds0);
                      if (m.columns > 1) at += kBlockM;
                      if (both) store(at, load(at) + ds1);
                    });
          }
        }
      }
    const int64_t row = panel * kBlockM, rows = m.rows == 1 ? 1 : min(kBlockM, m.rows - row);
    with_type(m.dtype, [&](auto type) {
      decltype(type)* to =
          (decltype(type)*)a.grad_mask + ((mask_batch * m.heads + mask_head) * m.rows + row) * m.columns;
      for (int64_t key = 0; key < m.columns; key += kBlockN) {
        const int count = (int)min(kBlockN, m.columns - key);
        const float* block = sums + key * kBlockM;
        if (m.rows == 1) {
          for (int j = 0; j < count; ++j) {
            vf total = {};
            for (int v = 0; v < kBlockM / kLanes; ++v) total += load(block + j * kBlockM + v * kLanes);
            store(to + key + j, splat(sum(total)), 1);
          }
          continue;
        }
        float* lines = scratch.mask.rows;
        transpose(block, kBlockM, kBlockN, kBlockM, lines, kBlockN);
        for (int i = 0; i < rows; ++i)
          for_each_vector(
              count, [&](int64_t j, int n) { store(to + i * m.columns + key + j, load(lines + i * kBlockN + j), n); });
      }
    });
  }
};

template <class T>
int64_t workspace(const AttentionBackward& a, const Parallel& parallel) {
  Arena arena = {0};
  const Backward<T> backward(a, &arena);
  const int64_t workers = min(useful_workers(a, parallel, 5), max(backward.tasks(), backward.mask_tasks()));
  for (int64_t worker = 0; worker < workers; ++worker) {
    backward.take_scratch(&arena);
    if (a.grad_mask) backward.take_mask_sums(&arena);
  }
  return (int64_t)arena.at;
}

template <class T>
void run(const AttentionBackward& a, const Parallel& parallel, char* workspace) {
  Arena arena = {(uintptr_t)workspace};
  const Backward<T> backward(a, &arena);
  const int workers = useful_workers(a, parallel, 5);
  if (!backward.few) backward.mask.read(a, parallel, workers);
  Arena here = arena;
  backward.take_scratch(&here);
  if (a.grad_mask) backward.take_mask_sums(&here);
  const uintptr_t size = here.at - arena.at;
  parallel_for(parallel, workers, backward.tasks(), [&](int64_t index, int worker) {
    Arena own = {arena.at + (uintptr_t)worker * size};
    const auto scratch = backward.take_scratch(&own);
    if (backward.few) return backward.few_task(index, scratch);
    with_tiles<kUsesAmx<typename UnitOf<T>::Unit>>([&] { backward.task(index, scratch); });
  });
  if (backward.num_splits > 1)
    parallel_for(parallel, workers, a.batch * a.num_heads * a.seqlen_q,
                 [&](int64_t index, int) { backward.add_splits(index); });
  if (a.grad_mask)
    parallel_for(parallel, workers, backward.mask_tasks(), [&](int64_t index, int worker) {
      Arena own = {arena.at + (uintptr_t)worker * size};
      const auto scratch = backward.take_scratch(&own);
      float* sums = backward.take_mask_sums(&own);
      with_tiles<kUsesAmx<typename UnitOf<T>::Unit>>([&] { backward.mask_task(index, scratch, sums); });
    });
}

}  // namespace

FASTATTN_EXPORT_PRODUCTS(AttentionBackward, attention_backward);

}  // namespace fastattn
