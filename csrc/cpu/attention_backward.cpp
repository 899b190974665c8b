// Attention, backward, in one pass of five products over the tiles (Dao, "FlashAttention-2", 2023, algorithm 2): with
// dO the gradient of the output,
//
//   dV_j = sum_i P_ij dO_i,  dP_ij = dO_i . v_j,  dS_ij = P_ij (dP_ij - delta_i),  delta_i = dO_i . out_i - grad_lse_i,
//   dQ_i = scale sum_j dS_ij k_j,  dK_j = scale sum_i dS_ij q_i,  grad_mask_ij = dS_ij;
//
// with dropout, P in dV and dP become P kept / (1 - p) and dP kept / (1 - p).
//
// A task has one key head and one range of keys, and keeps the gradients of these keys; its queries' gradients are
// complete where there is one range, else they are partial and added up in order. The number of ranges depends on the
// shape alone.
#include "attention_tile.h"
#include "kernels.h"

namespace fastattn {
namespace {

constexpr int kPanels = 128;  // of queries: sums over more are made of sums over so many

template <class T>
struct Backward {
  using Unit = typename UnitOf<T>::Unit;
  static constexpr bool kPairs = kElements<Unit> == 2, kColumns = !kTiles<Unit>;

  const Attention& a;
  const AttentionGradients& g;
  MaskSummary mask;
  int depth, value_depth;             // units of a row of keys and of values that are summed over
  int units, value_units;             // the same, rounded up to vectors
  int width, value_width;             // elements in such rows, rounded up to vectors
  bool key_in_place, value_in_place;  // rows are read where they lie
  int64_t splits, range;              // of keys: a multiple of kBlock
  bool few;                           // elements of a row are lanes, not queries
  float* partial;                     // (splits, batch, heads, queries, width), where splits > 1

  // A row is a query of one of the heads that share a key head.
  struct FewRows {
    float *query, *grad, *query_grad;    // (rows, width), (rows, value_width), (rows, width)
    float* query_total;                  // (rows, width), of the stretches of keys that are done
    float *reference, *inverse, *delta;  // (rows)
    float *probability, *grad_score;     // (rows, kBlock)
  };

  struct Scratch {
    Unit *query_rows, *query, *grad_rows, *grad;  // a panel of queries and of dO: (kPanel, units) and (units, kPanel)
    Unit *query_right, *grad_right;               // as second factors of a sum over queries
    float *query_grad, *query_total, *reference, *inverse, *delta;
    float *score, *grad_score;                               // a tile, (kBlock, kPanel)
    Unit *probability_left, *grad_left, *grad_score_right;   // P and dS as first factors, dS as second factor
    uint8_t* packed;                                         // which blocks of keys are not read where they lie
    Unit *key_rows, *value_rows, *key_left, *pairs;          // key_left: as first factors of a sum over keys
    float *key_grad, *value_grad, *key_total, *value_total;  // totals: of the stretches of queries that are done
    MaskBuffers mask;
    FewRows few;
  };

  Backward(const Attention& problem, const AttentionGradients& gradients, Arena* arena)
      : a(problem), g(gradients), mask(problem, arena) {
    depth = terms_of<Unit>(a.depth);
    value_depth = terms_of<Unit>(a.value_depth);
    units = (int)round_up(depth, kLanes);
    value_units = (int)round_up(value_depth, kLanes);
    width = (int)round_up(a.depth, kLanes);
    value_width = (int)round_up(a.value_depth, kLanes);
    key_in_place = UnitOf<T>::in_memory && depth * kElements<Unit> == a.depth;
    value_in_place = UnitOf<T>::in_memory && value_depth * kElements<Unit> == a.value_depth;
    // Half as many keys as forward, since there is more than twice as much to do with each.
    splits = smaller(smaller(kTasks / greater(a.batch * a.key_heads, (int64_t)1), (int64_t)8), 2 * a.keys / kSplitKeys);
    splits = greater(splits, (int64_t)1);
    range = round_up(divide_up(a.keys, splits), kBlock);
    few = a.queries <= kFewQueries && a.threshold == 0 && !g.mask_grad;
    partial = arena->take<float>(splits > 1 ? splits * a.batch * a.heads * a.queries * width : 0);
  }

  int64_t tasks() const { return a.batch * a.key_heads * splits; }
  int64_t mask_tasks() const {
    return g.mask_grad ? a.mask.batches * a.mask.heads * (a.mask.rows == 1 ? 1 : mask.panels) : 0;
  }

  // Whether a key's gradients may be sums over more than one stretch of queries.
  bool has_long_sums() const { return group_of(a) * divide_up(a.queries, kPanel) > kPanels; }

  Scratch take_scratch(Arena* arena) const {
    if (few) {
      const int64_t rows = group_of(a) * a.queries;
      Scratch s = {};
      s.few = {arena->take<float>(rows * width), arena->take<float>(rows * value_width),
               arena->take<float>(rows * width), arena->take<float>(range > kStretch ? rows * width : 0),
               arena->take<float>(rows),         arena->take<float>(rows),
               arena->take<float>(rows),         arena->take<float>(rows * kBlock),
               arena->take<float>(rows * kBlock)};
      return s;
    }
    const bool long_sums = has_long_sums();
    // Keys that the window or the mask hides from all queries are replaced by 0, wherever they lie.
    const bool hidden = a.mask.data || window_hides_keys(a);
    Scratch s = {arena->take<Unit>(kPanel * units),
                 arena->take<Unit>(kPanel * units),
                 arena->take<Unit>(kPanel * value_units),
                 arena->take<Unit>(kPanel * value_units),
                 arena->take<Unit>(kPairs ? kPanel / 2 * width : 0),
                 arena->take<Unit>(kPairs ? kPanel / 2 * value_width : 0),
                 arena->take<float>(kPanel * width),
                 arena->take<float>(range > kStretch ? kPanel * width : 0),
                 arena->take<float>(kPanel),
                 arena->take<float>(kPanel),
                 arena->take<float>(kPanel),
                 arena->take<float>(kPanel * kBlock),
                 arena->take<float>(kPanel * kBlock),
                 arena->take<Unit>(kPairs ? kPanel / 2 * kBlock : 0),
                 arena->take<Unit>(kPairs ? kPanel / 2 * kBlock : 0),
                 arena->take<Unit>(kPairs ? kPanel / 2 * kBlock : 0),
                 arena->take<uint8_t>(range / kBlock),
                 arena->take<Unit>(key_in_place && !hidden ? 0 : range * units),
                 arena->take<Unit>(value_in_place && !hidden ? 0 : range * value_units),
                 arena->take<Unit>(kPairs ? range / 2 * width : 0),
                 arena->take<Unit>(kTiles<Unit> ? kBlock / 2 * width : 0),
                 arena->take<float>(range * width),
                 arena->take<float>(range * value_width),
                 arena->take<float>(long_sums ? range * width : 0),
                 arena->take<float>(long_sums ? range * value_width : 0),
                 MaskBuffers(a, arena),
                 {}};
    if constexpr (!kPairs) {
      s.query_right = s.query_rows;
      s.grad_right = s.grad_rows;
      s.probability_left = s.score;
      s.grad_left = s.grad_score_right = s.grad_score;
    }
    return s;
  }

  // ---- a block of keys ----

  struct Keys {
    Matrix key, value, left;
  };

  template <class Row>
  void pack_rows(const Row* from, int64_t stride, int count, int length, const uint8_t* seen, Unit* to,
                 int64_t row) const {
    for (int j = 0; j < count; ++j) {
      if (!seen || seen[j])
        pack_row(from + j * stride, length, to + j * row, row);
      else
        clear_row(to + j * row, row);
    }
  }

  void pack_keys(const Sequence& s, int64_t key_head, int64_t first_head, int64_t end_head, int64_t key, int count,
                 int64_t slot, const Scratch& scratch) const {
    const T* k = row_pointer<T>(a.key, s.index, key_head, s.first_key + key);
    const T* v = row_pointer<T>(a.value, s.index, key_head, s.first_key + key);
    const uint8_t* seen = mask.seen_keys(a, s, first_head, end_head, key, count, scratch.mask.visible);
    scratch.packed[slot / kBlock] = seen != nullptr;
    if (!key_in_place || seen) pack_rows(k, a.key.row, count, a.depth, seen, scratch.key_rows + slot * units, units);
    if (!value_in_place || seen)
      pack_rows(v, a.value.row, count, a.value_depth, seen, scratch.value_rows + slot * value_units, value_units);
    if constexpr (kPairs)
      pack_left(k, a.key.row, count, a.depth, scratch.key_left + slot / 2 * width, width, seen, scratch.pairs);
  }

  Keys find_keys(const Sequence& s, int64_t key_head, int64_t key, int64_t slot, const Scratch& scratch) const {
    const bool packed = scratch.packed[slot / kBlock];
    Keys keys;
    keys.key = {(const char*)row_pointer<T>(a.key, s.index, key_head, s.first_key + key),
                a.key.row * (int64_t)sizeof(T)};
    keys.value = {(const char*)row_pointer<T>(a.value, s.index, key_head, s.first_key + key),
                  a.value.row * (int64_t)sizeof(T)};
    if (packed || !key_in_place) keys.key = {(const char*)(scratch.key_rows + slot * units), units * 4};
    if (packed || !value_in_place)
      keys.value = {(const char*)(scratch.value_rows + slot * value_units), value_units * 4};
    keys.left = keys.key;
    if constexpr (kPairs)
      keys.left = {(const char*)(scratch.key_left + slot / 2 * width), (kColumns ? width : kBlock / 2) * 4};
    return keys;
  }

  // ---- a panel of queries ----

  float dot(const T* grad, const T* out) const {
    vf total = {};
    int d = 0;
    for (; d + kLanes <= a.value_depth; d += kLanes) total = fma(load(grad + d), load(out + d), total);
    if (d < a.value_depth) total = fma(load(grad + d, a.value_depth - d), load(out + d, a.value_depth - d), total);
    return sum(total);
  }

  void start(const Sequence& s, int64_t head, int64_t query, const Scratch& scratch) const {
    const int count = (int)smaller((int64_t)kPanel, s.queries - query), padded = (int)round_up(count, kLanes);
    for (int i = 0; i < padded; ++i) {
      scratch.reference[i] = scratch.inverse[i] = scratch.delta[i] = 0;
      Unit *query_row = scratch.query_rows + i * units, *grad_row = scratch.grad_rows + i * value_units;
      const int64_t row = row_offset(a, s, head, query + i);
      // A query that sees nothing has no gradient, whatever it and dO hold.
      const bool present = i < count && a.sum[row] != 0;
      scratch.mask.present[i] = present;
      if (!present) {
        clear_row(query_row, units);
        clear_row(grad_row, value_units);
        continue;
      }
      const T* grad = row_pointer<T>(g.out_grad, s.index, head, s.first_query + query + i);
      const T* out = row_pointer<T>(a.out, s.index, head, s.first_query + query + i);
      pack_row(row_pointer<T>(a.query, s.index, head, s.first_query + query + i), a.depth, query_row, units);
      pack_row(grad, a.value_depth, grad_row, value_units);
      scratch.reference[i] = a.reference[row];
      scratch.inverse[i] = 1 / a.sum[row];
      scratch.delta[i] = dot(grad, out) - (g.lse_grad ? g.lse_grad[row] : 0.0f);
    }
    transpose(scratch.query_rows, units, padded, units, scratch.query, kPanel);
    transpose(scratch.grad_rows, value_units, padded, value_units, scratch.grad, kPanel);
    if constexpr (kPairs) {
      const uint8_t* present = scratch.mask.present;
      pack_pairs(row_pointer<T>(a.query, s.index, head, s.first_query + query), a.query.row, count, a.depth,
                 scratch.query_right, width, present);
      pack_pairs(row_pointer<T>(g.out_grad, s.index, head, s.first_query + query), g.out_grad.row, count, a.value_depth,
                 scratch.grad_right, value_width, present);
      const int pairs = units_of<Unit>(count), rest = terms_of<Unit>(count) - pairs;
      clear_row(scratch.query_right + pairs * width, rest * width);
      clear_row(scratch.grad_right + pairs * value_width, rest * value_width);
    }
  }

  // ---- a tile ----

  // Two keys and a vector of queries at a time: use(key, vector, P, dS, P and dS of the next key, if there is one).
  template <bool dropout, class Use>
  FASTATTN_INLINE void gradients(const Tile& t, const Scratch& scratch, const Use& use) const {
    for (int v = 0; v < t.vectors; ++v) {
      const vf reference = load(scratch.reference + v * kLanes), inverse = load(scratch.inverse + v * kLanes);
      const vf delta = load(scratch.delta + v * kLanes);
      vf p[2], ds[2];
      const auto one = [&](int j, int which) {
        const int at = j * kPanel + v * kLanes;
        const vf whole = exp2((load(scratch.score + at) - reference) * kLog2e) * inverse;
        vf dp = load(scratch.grad_score + at);
        p[which] = whole;
        if constexpr (dropout) {
          const uint32_t kept = (uint32_t)(scratch.mask.kept[j] >> (v * kLanes)) & first_lanes(kLanes);
          p[which] = keep_bits(kept, whole);
          dp = keep_bits(kept, dp);
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
                               const Use& use) const {
    product<Unit, false, Start::zero>(t.vectors, t.keys, depth, keys.key.data, keys.key.stride, scratch.query, kPanel,
                                      scratch.score, kPanel, nullptr, a.scale);
    product<Unit, false, Start::zero>(t.vectors, t.keys, value_depth, keys.value.data, keys.value.stride, scratch.grad,
                                      kPanel, scratch.grad_score, kPanel, nullptr,
                                      a.threshold ? dropout_scale(a.threshold) : 1.0f);
    if (!t.whole(a)) mask_scores(a, s, head, t, scratch.mask, scratch.score);
    if (a.threshold) {
      draw_dropout(a, s, head, t, scratch.mask.kept);
      gradients<true>(t, scratch, use);
    } else {
      gradients<false>(t, scratch, use);
    }
  }

  // C (rows, width) += A (rows, depth) B (depth, width), for any width.
  void add_product(int rows, int terms, const Unit* left, int64_t stride, const Unit* right, int columns,
                   float* c) const {
    for (int n = 0; n < columns; n += kPanel) {
      const int vectors = smaller(columns - n, kPanel) / kLanes;
      product<Unit, false, Start::keep>(vectors, rows, terms, (const char*)left, stride, right + n, columns, c + n,
                                        columns, nullptr, 1.0f);
    }
  }

  void step(const Sequence& s, int64_t head, const Tile& t, const Keys& keys, int64_t slot,
            const Scratch& scratch) const {
    compute(s, head, t, keys, scratch, [&](int j, int v, vf p0, vf ds0, vf p1, vf ds1, bool both) {
      const int at = j * kPanel + v * kLanes;
      if constexpr (kPairs) {
        store((bfloat16*)scratch.probability_left + at, p0);
        store((bfloat16*)scratch.grad_left + at, ds0);
        store_unit(scratch.grad_score_right + j / 2 * kPanel + v * kLanes, make_pairs(ds0, ds1, Unit{}));
        if (!both) return;
        store((bfloat16*)scratch.probability_left + at + kPanel, p1);
        store((bfloat16*)scratch.grad_left + at + kPanel, ds1);
      } else {
        store(scratch.score + at, p0);
        store(scratch.grad_score + at, ds0);
        if (!both) return;
        store(scratch.score + at + kPanel, p1);
        store(scratch.grad_score + at + kPanel, ds1);
      }
    });
    const int queries = terms_of<Unit>(t.queries), count = terms_of<Unit>(t.keys);
    const int64_t stride = kPanel * (int64_t)sizeof(Unit) / kElements<Unit>;
    if constexpr (kTiles<Unit>) {
      for (int j = units_of<Unit>(t.keys); j < count; ++j) clear_row(scratch.grad_score_right + j * kPanel, kPanel);
      for (int j = 0; t.vectors % 2 && j < t.keys; ++j) {  // two vectors of queries at a time are summed over
        const int at = j * kPanel + t.vectors * kLanes;
        store((bfloat16*)scratch.probability_left + at, vf{});
        store((bfloat16*)scratch.grad_left + at, vf{});
      }
    }
    add_product(t.keys, queries, scratch.probability_left, stride, scratch.grad_right, value_width,
                scratch.value_grad + slot * value_width);
    add_product(t.keys, queries, scratch.grad_left, stride, scratch.query_right, width,
                scratch.key_grad + slot * width);
    product<Unit, kColumns, Start::keep>(t.vectors, kColumns ? a.depth : width, count, keys.left.data, keys.left.stride,
                                         scratch.grad_score_right, kPanel, scratch.query_grad, kPanel, nullptr, 1.0f);
  }

  // total += sum, sum = 0; the first time there is no total yet.
  void end_stretch(bool first, int64_t count, float* sum, float* total) const {
    for (int64_t i = 0; i < count; i += kLanes) {
      store(total + i, first ? load(sum + i) : load(total + i) + load(sum + i));
      store(sum + i, vf{});
    }
  }

  // Whether a stretch ends with the block at `key`, and there are more to come.
  static bool is_end_of_stretch(int64_t key, int64_t first, int64_t end) {
    return (key + kBlock - first) % kStretch == 0 && key + kBlock < end;
  }

  // ---- results ----

  FASTATTN_INLINE void write_row(const float* from, float factor, int length, T* to) const {
    for (int d = 0; d < length; d += kLanes) {
      const vf x = load(from + d) * factor;
      if (d + kLanes <= length)
        store(to + d, x);
      else
        store(to + d, x, length - d);
    }
  }

  float* partial_row(int64_t split, const Sequence& s, int64_t head, int64_t query) const {
    return partial + (((split * a.batch + s.index) * a.heads + head) * a.queries + query) * width;
  }

  void finish(const Sequence& s, int64_t head, int64_t query, int64_t split, const float* query_grad,
              const Scratch& scratch) const {
    const int count = (int)smaller((int64_t)kPanel, s.queries - query);
    float* rows = scratch.score;
    for (int d = 0; d < width; d += kBlock) {  // as many columns as there is room for
      const int columns = smaller(width - d, kBlock);
      transpose(query_grad + d * kPanel, kPanel, columns, (int)round_up(count, kLanes), rows, kBlock);
      for (int i = 0; i < count; ++i) {
        if (splits > 1)
          memcpy(partial_row(split, s, head, query + i) + d, rows + i * kBlock, (size_t)columns * sizeof(float));
        else
          write_row(rows + i * kBlock, a.scale, smaller(a.depth - d, columns),
                    row_pointer<T>(g.query_grad, s.index, head, s.first_query + query + i) + d);
      }
    }
  }

  void task(int64_t index, const Scratch& scratch) const {
    const int64_t split = index % splits, key_head = index / splits % a.key_heads, group = group_of(a);
    const Sequence s = find_sequence(a, index / splits / a.key_heads);
    const int64_t begin = split * range, end = smaller(begin + range, s.keys), stored = smaller(begin + range, s.rows);
    for (int64_t key = begin; key < end; key += kBlock)
      pack_keys(s, key_head, key_head * group, (key_head + 1) * group, key, (int)smaller((int64_t)kBlock, end - key),
                key - begin, scratch);
    const int64_t rows = greater(stored - begin, (int64_t)0);
    clear_row(scratch.key_grad, rows * width);
    clear_row(scratch.value_grad, rows * value_width);
    int64_t panels = 0, stretches = 0;
    const auto end_panels = [&] {
      end_stretch(stretches == 0, rows * width, scratch.key_grad, scratch.key_total);
      end_stretch(stretches == 0, rows * value_width, scratch.value_grad, scratch.value_total);
      ++stretches;
    };
    for (int64_t head = key_head * group; head < (key_head + 1) * group; ++head)
      for (int64_t query = 0; query < s.queries; query += kPanel) {
        const int count = (int)smaller((int64_t)kPanel, s.queries - query);
        for (int d = 0; d < width; ++d)
          memset(scratch.query_grad + d * kPanel, 0, (size_t)round_up(count, kLanes) * sizeof(float));
        const int64_t first = greater(begin_of_keys(a, s, query) / kBlock * kBlock, begin);
        const int64_t last = smaller(end_of_keys(a, s, query + count - 1), end);
        bool started = false, several = false;
        for (int64_t key = first; key < last; key += kBlock) {
          const Tile t(a, s, mask, head, query, key);
          if (t.empty()) continue;
          if (!started) start(s, head, query, scratch);
          started = true;
          step(s, head, t, find_keys(s, key_head, key, key - begin, scratch), key - begin, scratch);
          if (!is_end_of_stretch(key, first, last)) continue;
          end_stretch(!several, width * kPanel, scratch.query_grad, scratch.query_total);
          several = true;
        }
        if (several) end_stretch(false, width * kPanel, scratch.query_grad, scratch.query_total);
        finish(s, head, query, split, several ? scratch.query_total : scratch.query_grad, scratch);
        if (++panels % kPanels == 0 && has_long_sums()) end_panels();
      }
    if (stretches > 0) end_panels();
    const float* key_grad = stretches > 0 ? scratch.key_total : scratch.key_grad;
    const float* value_grad = stretches > 0 ? scratch.value_total : scratch.value_grad;
    for (int64_t j = 0; j < rows; ++j) {
      write_row(key_grad + j * width, a.scale, a.depth,
                row_pointer<T>(g.key_grad, s.index, key_head, s.first_key + begin + j));
      write_row(value_grad + j * value_width, a.threshold ? dropout_scale(a.threshold) : 1.0f, a.value_depth,
                row_pointer<T>(g.value_grad, s.index, key_head, s.first_key + begin + j));
    }
  }

  // ---- few queries ----

  void few_start(const Sequence& s, int64_t head, int64_t query, int r, const FewRows& few) const {
    const int64_t row = row_offset(a, s, head, query);
    clear_row(few.query_grad + r * width, width);
    clear_row(few.query + r * width, width);
    clear_row(few.grad + r * value_width, value_width);
    few.inverse[r] = 0;
    if (a.sum[row] == 0) return;  // it sees nothing and has no gradient, whatever it and dO hold
    const T* grad = row_pointer<T>(g.out_grad, s.index, head, s.first_query + query);
    pack_row(row_pointer<T>(a.query, s.index, head, s.first_query + query), a.depth, few.query + r * width, width);
    pack_row(grad, a.value_depth, few.grad + r * value_width, value_width);
    few.reference[r] = a.reference[row];
    few.inverse[r] = 1 / a.sum[row];
    few.delta[r] =
        dot(grad, row_pointer<T>(a.out, s.index, head, s.first_query + query)) - (g.lse_grad ? g.lse_grad[row] : 0.0f);
  }

  // Products of row r with the keys [key, key + keys) and with their values to P and dS.
  void few_gradients(const Sequence& s, int64_t head, int64_t query, int64_t key, int keys, int r,
                     const FewRows& few) const {
    float *probability = few.probability + r * kBlock, *grad_score = few.grad_score + r * kBlock;
    mask_row(a, s, head, query, key, keys, probability);
    for (int j = 0; j < kBlock; j += kLanes) {
      const uint32_t valid = few.inverse[r] == 0 ? 0 : first_lanes(smaller(kLanes, greater(keys - j, 0)));
      const vf p = keep_bits(valid, exp2((load(probability + j) - few.reference[r]) * kLog2e) * splat(few.inverse[r]));
      const vf ds = p * (load(grad_score + j) - few.delta[r]);
      store(probability + j, p);
      store(grad_score + j, select(p == vf{}, vf{}, ds));  // a hidden value may be anything
    }
  }

  template <int vectors>
  FASTATTN_INLINE void few_write_vectors(int rows, const float* weight, const float* row, int64_t row_width,
                                         float factor, int count, int length, T* to, int64_t stride) const {
    const int last = length - (vectors - 1) * kLanes;
    for (int j = 0; j < count; ++j, to += stride) {
      vf total[vectors] = {};
      for (int r = 0; r < rows; ++r) {
        const float w = weight[r * kBlock + j];
        if (w == 0) continue;
#pragma GCC unroll 4
        for (int n = 0; n < vectors; ++n) total[n] = fma(load(row + r * row_width + n * kLanes), splat(w), total[n]);
      }
#pragma GCC unroll 4
      for (int n = 0; n < vectors; ++n) {
        if (n + 1 < vectors || last >= kLanes)
          store(to + n * kLanes, total[n] * factor);
        else
          store(to + n * kLanes, total[n] * factor, last);
      }
    }
  }

  // The gradients of `count` keys or values: factor sum_r weight_rj row_r.
  void few_write(int rows, const float* weight, const float* row, int64_t row_width, float factor, int count,
                 int length, T* to, int64_t stride) const {
    for (int d = 0; d < length; d += 4 * kLanes) {
      const int rest = smaller(length - d, 4 * kLanes);
      switch ((rest + kLanes - 1) / kLanes) {
        case 1: few_write_vectors<1>(rows, weight, row + d, row_width, factor, count, rest, to + d, stride); break;
        case 2: few_write_vectors<2>(rows, weight, row + d, row_width, factor, count, rest, to + d, stride); break;
        case 3: few_write_vectors<3>(rows, weight, row + d, row_width, factor, count, rest, to + d, stride); break;
        default: few_write_vectors<4>(rows, weight, row + d, row_width, factor, count, rest, to + d, stride);
      }
    }
  }

  void few_task(int64_t index, const Scratch& scratch) const {
    const int64_t split = index % splits, key_head = index / splits % a.key_heads, group = group_of(a);
    const Sequence s = find_sequence(a, index / splits / a.key_heads);
    const int64_t begin = split * range, end = smaller(begin + range, s.keys), stored = smaller(begin + range, s.rows);
    const FewRows& few = scratch.few;
    const int rows = (int)(group * s.queries);
    const auto head = [&](int r) { return key_head * group + r / s.queries; };
    const auto query = [&](int r) { return r % s.queries; };
    const int64_t first_seen = begin_of_keys(a, s, 0), end_seen = smaller(end, end_of_keys(a, s, s.queries - 1));
    bool several = false;
    for (int r = 0; r < rows; ++r) few_start(s, head(r), query(r), r, few);
    for (int64_t key = begin; key < stored; key += kBlock) {
      const int64_t last = key + kBlock > first_seen ? smaller(key + kBlock, end_seen) : key;
      const int keys = (int)greater(last - key, (int64_t)0), count = (int)smaller((int64_t)kBlock, stored - key);
      const T* k = row_pointer<T>(a.key, s.index, key_head, s.first_key + key);
      const T* v = row_pointer<T>(a.value, s.index, key_head, s.first_key + key);
      const int ahead = rows_ahead(key, end_seen);
      row_products(rows, few.query, width, k, a.key.row, keys, a.depth, a.scale, ahead, few.probability);
      row_products(rows, few.grad, value_width, v, a.value.row, keys, a.value_depth, 1.0f, ahead, few.grad_score);
      for (int r = 0; r < rows; ++r) few_gradients(s, head(r), query(r), key, keys, r, few);
      add_rows(rows, few.grad_score, k, a.key.row, keys, a.depth, nullptr, 0, few.query_grad, width);
      if (is_end_of_stretch(key, begin, stored)) {
        end_stretch(!several, rows * width, few.query_grad, few.query_total);
        several = true;
      }
      few_write(rows, few.grad_score, few.query, width, a.scale, count, a.depth,
                row_pointer<T>(g.key_grad, s.index, key_head, s.first_key + key), g.key_grad.row);
      few_write(rows, few.probability, few.grad, value_width, 1.0f, count, a.value_depth,
                row_pointer<T>(g.value_grad, s.index, key_head, s.first_key + key), g.value_grad.row);
    }
    if (several) end_stretch(false, rows * width, few.query_grad, few.query_total);
    for (int r = 0; r < rows; ++r) {
      const float* total = (several ? few.query_total : few.query_grad) + r * width;
      if (splits > 1)
        memcpy(partial_row(split, s, head(r), query(r)), total, (size_t)width * sizeof(float));
      else
        write_row(total, a.scale, a.depth, row_pointer<T>(g.query_grad, s.index, head(r), s.first_query + query(r)));
    }
  }

  // ---- parts ----

  void add_partial(int64_t index) const {
    const Sequence s = find_sequence(a, index / a.queries / a.heads);
    const int64_t head = index / a.queries % a.heads, query = index % a.queries;
    if (query >= s.queries) return;
    float* total = partial_row(0, s, head, query);
    for (int64_t split = 1; split < splits; ++split) {
      const float* part = partial_row(split, s, head, query);
      for (int d = 0; d < width; d += kLanes) store(total + d, load(total + d) + load(part + d));
    }
    write_row(total, a.scale, a.depth, row_pointer<T>(g.query_grad, s.index, head, s.first_query + query));
  }

  // ---- the mask's gradient: a task owns a part of it and goes over everything that it was broadcast to ----

  float* take_mask_grad(Arena* arena) const { return arena->take<float>(round_up(a.mask.columns, kBlock) * kPanel); }

  void mask_task(int64_t index, const Scratch& scratch, float* sums) const {
    const AttentionMask& m = a.mask;
    const int64_t panels = m.rows == 1 ? 1 : mask.panels, panel = index % panels;
    const int64_t mask_head = index / panels % m.heads, mask_batch = index / panels / m.heads, group = group_of(a);
    clear_row(sums, round_up(m.columns, kBlock) * kPanel);
    for (int64_t batch = m.batches == 1 ? 0 : mask_batch; batch < (m.batches == 1 ? a.batch : mask_batch + 1); ++batch)
      for (int64_t head = m.heads == 1 ? 0 : mask_head; head < (m.heads == 1 ? a.heads : mask_head + 1); ++head) {
        const Sequence s = find_sequence(a, batch);
        const int64_t key_head = head / group;
        const int64_t first = m.rows == 1 ? 0 : panel * kPanel, last = m.rows == 1 ? s.queries : first + 1;
        for (int64_t query = first; query < last; query += kPanel) {
          start(s, head, query, scratch);
          for (int64_t key = 0; key < s.keys; key += kBlock) {
            const Tile t(a, s, mask, head, query, key);
            if (t.empty()) continue;
            pack_keys(s, key_head, key_head * group, (key_head + 1) * group, key, t.keys, 0, scratch);
            compute(s, head, t, find_keys(s, key_head, key, 0, scratch), scratch,
                    [&](int j, int v, vf, vf ds0, vf, vf ds1, bool both) {
                      float* at = sums + (m.columns == 1 ? 0 : key + j) * kPanel + v * kLanes;
                      store(at, load(at) + ds0);
                      if (m.columns > 1) at += kPanel;
                      if (both) store(at, load(at) + ds1);
                    });
          }
        }
      }
    const int64_t row = panel * kPanel, rows = m.rows == 1 ? 1 : smaller((int64_t)kPanel, m.rows - row);
    with_mask_type(m.dtype, [&](auto type) {
      decltype(type)* to =
          (decltype(type)*)g.mask_grad + ((mask_batch * m.heads + mask_head) * m.rows + row) * m.columns;
      for (int64_t key = 0; key < m.columns; key += kBlock) {
        const int count = (int)smaller((int64_t)kBlock, m.columns - key);
        const float* block = sums + key * kPanel;
        if (m.rows == 1) {
          for (int j = 0; j < count; ++j) {
            vf total = {};
            for (int v = 0; v < kPanelVectors; ++v) total += load(block + j * kPanel + v * kLanes);
            store_scalar(to + key + j, sum(total));
          }
          continue;
        }
        float* lines = scratch.mask.rows;
        transpose(block, kPanel, kBlock, kPanel, lines, kBlock);
        for (int i = 0; i < rows; ++i)
          for (int j = 0; j < count; j += kLanes) {
            const vf x = load(lines + i * kBlock + j);
            if (j + kLanes <= count)
              store(to + i * m.columns + key + j, x);
            else
              store(to + i * m.columns + key + j, x, count - j);
          }
      }
    });
  }
};

template <class T>
int64_t measure(const Attention& a, const AttentionGradients& g, const Parallel& parallel) {
  Arena arena = {0};
  const Backward<T> backward(a, g, &arena);
  const int64_t tasks = greater(backward.tasks(), backward.mask_tasks());
  const int64_t workers = smaller((int64_t)useful_workers(a, parallel, 5), tasks);
  for (int64_t worker = 0; worker < workers; ++worker) {
    backward.take_scratch(&arena);
    if (g.mask_grad) backward.take_mask_grad(&arena);
  }
  return (int64_t)arena.at;
}

template <class T>
void run(const Attention& a, const AttentionGradients& g, const Parallel& parallel, char* workspace) {
  Arena arena = {(uintptr_t)workspace};
  const Backward<T> backward(a, g, &arena);
  const int workers = useful_workers(a, parallel, 5);
  if (!backward.few) backward.mask.read(a, parallel, workers);
  Arena here = arena;
  backward.take_scratch(&here);
  if (g.mask_grad) backward.take_mask_grad(&here);
  const uintptr_t size = here.at - arena.at;
  parallel_for_ranges(parallel, workers, backward.tasks(), [&](int64_t index, int worker) {
    Arena own = {arena.at + (uintptr_t)worker * size};
    const auto scratch = backward.take_scratch(&own);
    if (backward.few) return backward.few_task(index, scratch);
    with_tiles<kTiles<typename UnitOf<T>::Unit>>([&] { backward.task(index, scratch); });
  });
  if (backward.splits > 1)
    parallel_for_ranges(parallel, workers, a.batch * a.heads * a.queries,
                        [&](int64_t index, int) { backward.add_partial(index); });
  if (g.mask_grad)
    parallel_for(parallel, workers, backward.mask_tasks(), [&](int64_t index, int worker) {
      Arena own = {arena.at + (uintptr_t)worker * size};
      const auto scratch = backward.take_scratch(&own);
      float* sums = backward.take_mask_grad(&own);
      with_tiles<kTiles<typename UnitOf<T>::Unit>>([&] { backward.mask_task(index, scratch, sums); });
    });
}

int64_t measure_any(const Attention& a, const AttentionGradients& g, const Parallel& parallel) {
  switch (a.dtype) {
    case Dtype::float32: return measure<float>(a, g, parallel);
    case Dtype::bfloat16: return measure<bfloat16>(a, g, parallel);
    default: return measure<float16>(a, g, parallel);
  }
}

void run_any(const Attention& a, const AttentionGradients& g, const Parallel& parallel, char* workspace) {
  switch (a.dtype) {
    case Dtype::float32: return run<float>(a, g, parallel, workspace);
    case Dtype::bfloat16: return run<bfloat16>(a, g, parallel, workspace);
    default: return run<float16>(a, g, parallel, workspace);
  }
}

}  // namespace

extern const AttentionBackwardKernels FASTATTN_TABLE(attention_backward);
const AttentionBackwardKernels FASTATTN_TABLE(attention_backward) = {&measure_any, &run_any};

}  // namespace fastattn
