// Attention, forward: online softmax over tiles (Milakov and Gimelshein, "Online normalizer calculation for softmax",
// 2018; Dao et al., "FlashAttention", 2022).
//
//   for each task, in parallel: a sequence, a query head, task_queries consecutive queries (at most 128, on AMX 256;
//   the last queries first), a split of the keys:
//     for each chunk of kChunk keys of the split, ascending:
//       for each block of kBlockN keys of the chunk, ascending: pack its K and V once;
//         for each panel of kBlockM queries of the task, the last one first:
//           S (key, query) = K Q';  P (key, query) = exp(S - row_max);  O' (Ev, query) = rescale O' + V' P;
//       merge O' into the chunks before, or write the output after the last chunk.
//   for each query, if the keys are split: merge the splits' results in their order.
//
// query (B, Hq, Lq, E), key (B, Hk, Lk, E), value (B, Hk, Lk, Ev) and out (B, Hq, Lq, Ev) have dtype T. Their strides
// are arbitrary, except that columns are dense. LSE, row_max and row_sum are (B, Hq, Lq), float32. A task owns the rows
// of S of its queries, in the columns of its split. Few queries take few_task instead (few_queries.h). Its task has all
// queries of the heads that share a key/value head, and one split. blocks.h defines panel, block, tile, chunk and
// split.
#if defined(__AMX_BF16__)
// AMX reads and writes its sums once per tile, which takes as long as the product of 64 keys. So a tile has more keys
// here, and fewer queries: its scores take half of the first-level cache.
#define FASTATTN_BLOCK_M 32
#define FASTATTN_BLOCK_N 192
#endif
#include <math.h>

#include "../common/attention.h"
#include "few_queries.h"
#include "kernels.h"
#include "prefetch.h"
#include "tile.h"

namespace fastattn {
namespace {

// Maximum panels per task. They share the packed keys and values.
constexpr int kTaskPanels = (kUsesAmx<Pair> ? 256 : 128) / kBlockM;

// Minimum tasks per worker. Tasks are halved, down to one panel, until there are that many. Fewer on AMX, where every
// task repacks V.
constexpr int kTasksEach = kUsesAmx<Pair> ? 4 : 8;

// Unnormalised results over a part of the keys, merged later.
struct Partial {
  float *out, *row_max, *row_sum;  // (rows, value_width), (rows), (rows)
};

template <class T>
struct Forward {
  using Unit = typename UnitOf<T>::Unit;
  static constexpr bool kPairs = kElements<Unit> == 2, kColumns = !kUsesAmx<Unit>;

  const Attention& a;
  BlockMask mask;
  int64_t task_queries;       // Queries per task.
  int64_t blocks, tasks;      // Tasks per head and split; tasks per split.
  int64_t num_splits, range;  // Range: keys per split, a multiple of kBlockN.
  int depth, width;           // Units of head_dim; the same, rounded up to whole vectors.
  int value_width;            // Elements per row of values, rounded up to whole vectors.
  bool in_place;              // Rows of keys are read where they lie, without packing.
  bool few;                   // Few queries: vectorised along head_dim (few_queries.h).
  Partial partials;           // If num_splits > 1: (num_splits, batch, num_heads, seqlen_q) rows.

  struct Panel {
    Unit* query;                     // (width, kBlockM)
    float *out, *row_max, *row_sum;  // (value_width, kBlockM), (kBlockM), (kBlockM)
  };

  struct FewRows {
    int width;                           // elements per row of queries
    float *query, *score, *out;          // (rows, width), (rows, kBlockN), (rows, value_width)
    float *row_max, *rescale, *row_sum;  // (rows)
  };

  struct Scratch {
    Unit *rows, *key, *value, *pairs;  // packed
    float *score, *rescale, *out;      // (kBlockN, kBlockM), (kBlockM), (kBlockM, value_width)
    MaskBuffers mask;
    Panel panel[kTaskPanels];
    FewRows few;
    Partial total;  // running sum over chunks of keys, one row per query of the task; empty if there is one chunk
  };

  Forward(const Attention& problem, int workers, Arena* arena) : a(problem), mask(problem, arena) {
    const bool fills_tiles = kUsesAmx<Unit> && a.seqlen_k >= 2 * kLanes;  // panels then win with fewer queries
    few = a.seqlen_q <= (fills_tiles ? kFewQueries / 2 : kFewQueries) && a.threshold == 0;
    const int64_t heads = a.batch * (few ? a.num_kv_heads : a.num_heads);
    const int64_t panels = heads * (few ? 1 : ceil_div(a.seqlen_q, kBlockM));
    // If there are few tasks and many keys, the keys are split and their results merged in order.
    num_splits = min(kTasks / max(panels, 1), a.seqlen_k / kSplitKeys);
    range = max(round_up(ceil_div(a.seqlen_k, max(num_splits, 1)), kBlockN), kBlockN);
    num_splits = max(ceil_div(a.seqlen_k, range), 1);
    // A panel's result does not depend on the other panels of its task, so panels per task may depend on the workers.
    task_queries = kTaskPanels * kBlockM;
    while (task_queries > kBlockM && heads * ceil_div(a.seqlen_q, task_queries) * num_splits < kTasksEach * workers)
      task_queries /= 2;
    blocks = few ? 1 : ceil_div(a.seqlen_q, task_queries);
    tasks = heads * blocks;
    depth = depth_of<Unit>(a.head_dim);
    width = (int)round_up(depth, kLanes);
    value_width = (int)round_up(a.value_head_dim, kLanes);
    in_place = UnitOf<T>::in_memory && depth * kElements<Unit> == a.head_dim;
    const int64_t rows = num_splits > 1 ? num_splits * a.batch * a.num_heads * a.seqlen_q : 0;
    partials = take_partial(rows, arena);
  }

  Partial take_partial(int64_t rows, Arena* arena) const {
    return {arena->take<float>(rows * value_width), arena->take<float>(rows), arena->take<float>(rows)};
  }

  Scratch take_scratch(Arena* arena) const {
    Scratch s = {};
    if (few) {
      const int64_t rows = group_of(a) * a.seqlen_q, columns = round_up(a.head_dim, kLanes);
      s.few.width = (int)columns;
      s.few.query = arena->take<float>(rows * columns);
      s.few.score = arena->take<float>(rows * kBlockN);
      s.few.out = arena->take<float>(rows * value_width);
      s.few.row_max = arena->take<float>(rows);
      s.few.rescale = arena->take<float>(rows);
      s.few.row_sum = arena->take<float>(rows);
      s.total = take_partial(a.seqlen_k > kChunk ? rows : 0, arena);
      return s;
    }
    s.score = arena->take<float>(kBlockN * kBlockM);
    s.rows = arena->take<Unit>(kBlockM * width);
    s.key = arena->take<Unit>(in_place ? 0 : kBlockN * width);
    s.value = arena->take<Unit>(kBlockN * value_width);
    s.pairs = arena->take<Unit>(kUsesAmx<Unit> ? kBlockN / 2 * value_width : 0);
    s.rescale = arena->take<float>(kBlockM);
    s.out = arena->take<float>(kBlockM * value_width);
    s.mask = MaskBuffers(a, arena);
    for (Panel& p : s.panel) {
      p.query = arena->take<Unit>(kBlockM * width);
      p.out = arena->take<float>(kBlockM * value_width);
      p.row_max = arena->take<float>(kBlockM);
      p.row_sum = arena->take<float>(kBlockM);
    }
    s.total = take_partial(a.seqlen_k > kChunk ? kTaskPanels * kBlockM : 0, arena);
    return s;
  }

  void start(const Sequence& s, int64_t head, int64_t query, const Scratch& scratch, const Panel& panel) const {
    const int count = (int)min(kBlockM, s.seqlen_q - query), padded = (int)round_up(count, kLanes);
    const T* from = row_pointer<T>(a.query, s.index, head, s.first_query + query);
    const int64_t stride = a.query.row * (int64_t)sizeof(T);
    if (in_place && count == padded && depth == width && stride % (int64_t)sizeof(Unit) == 0)
      return transpose((const Unit*)from, stride / (int64_t)sizeof(Unit), padded, width, panel.query, kBlockM);
    for (int i = 0; i < padded; ++i) {
      Unit* row = scratch.rows + i * width;
      if (i < count)
        pack_row(from + i * a.query.row, a.head_dim, row, width);
      else
        clear_row(row, width);
    }
    transpose(scratch.rows, width, padded, width, panel.query, kBlockM);
  }

  // Clear the statistics. The accumulator needs no clearing, because the first tile overwrites it.
  void clear(const Panel& panel) const {
    clear_row(panel.row_sum, kBlockM);
    for (int i = 0; i < kBlockM; ++i) panel.row_max[i] = -kInfinity;
  }

  Matrix pack_key(const Sequence& s, int64_t head, int64_t key, int keys, const Scratch& scratch) const {
    const T* from = row_pointer<T>(a.key, s.index, head, s.first_key + key);
    if (in_place) return {(const char*)from, a.key.row * (int64_t)sizeof(T)};
    for (int j = 0; j < keys; ++j) pack_row(from + j * a.key.row, a.head_dim, scratch.key + j * width, width);
    return {(const char*)scratch.key, width * 4};
  }

  // Pack V. Keys that no query sees get values of 0, because theirs may be NaN, and 0 * NaN is NaN.
  Matrix pack_value(const Sequence& s, int64_t head, int64_t kv_head, int64_t key, int keys,
                    const Scratch& scratch) const {
    const T* from = row_pointer<T>(a.value, s.index, kv_head, s.first_key + key);
    const uint8_t* visible = mask.visible_keys(a, s, head, head + 1, key, keys, scratch.mask.keys);
    if constexpr (kPairs) {
      pack_left(from, a.value.row, keys, a.value_head_dim, scratch.value, value_width, visible, scratch.pairs);
      if (!kColumns) return {(const char*)scratch.value, kBlockN / 2 * sizeof(Unit)};
    } else {
      if (UnitOf<T>::in_memory && !visible) return {(const char*)from, a.value.row * (int64_t)sizeof(T)};
      for (int j = 0; j < keys; ++j) {
        if (!visible || visible[j])
          pack_row(from + j * a.value.row, a.value_head_dim, scratch.value + j * value_width, value_width);
        else
          clear_row(scratch.value + j * value_width, value_width);
      }
    }
    return {(const char*)scratch.value, value_width * 4};
  }

  // Online softmax in place: products times `scale` are scores, and these become exp(score - row_max), as units.
  // scratch.rescale is exp(old row_max - new row_max).
  template <bool dropout>
  FASTATTN_INLINE void softmax(const Tile& t, float scale, const Scratch& scratch, const Panel& panel) const {
    const uint64_t* kept = scratch.mask.kept;
    for (int v = 0; v < t.vectors; ++v) {
      float* score = scratch.score + v * kLanes;
      const vf old_max = load(panel.row_max + v * kLanes);
      const auto scaled = [&](int key) {
        const vf x = load(score + key * kBlockM) * scale;
        store(score + key * kBlockM, x);
        return x;
      };
      vf top[4] = {old_max, old_max, old_max, old_max};
      int j = 0;
      for (; j + 4 <= t.keys; j += 4)
        for (int i = 0; i < 4; ++i) top[i] = max(scaled(j + i), top[i]);
      for (; j < t.keys; ++j) top[0] = max(scaled(j), top[0]);
      top[0] = max(max(top[0], top[1]), max(top[2], top[3]));
      store(panel.row_max + v * kLanes, top[0]);
      // row_max is finite also for a query that has seen no key yet.
      const vf row_max = select(top[0] == splat(-kInfinity), vf{}, top[0]);
      const vf rescale = exp2((old_max - row_max) * kLog2e);
      store(scratch.rescale + v * kLanes, rescale);
      vf sum[2] = {};
      const auto probability = [&](int key, vf* total) {
        const vf p = exp2((load(score + key * kBlockM) - row_max) * kLog2e);
        *total += p;
        return dropout ? keep_bits((uint32_t)(kept[key] >> (v * kLanes)) & first_lanes(kLanes), p) : p;
      };
      for (j = 0; j + 2 <= t.keys; j += 2) {
        const vf even = probability(j, &sum[0]), odd = probability(j + 1, &sum[1]);
        if constexpr (kPairs) {
          store(score + j / 2 * kBlockM, make_pairs(even, odd, Unit{}));
        } else {
          store(score + j * kBlockM, even);
          store(score + (j + 1) * kBlockM, odd);
        }
      }
      if (j < t.keys) {
        const vf last = probability(j, &sum[0]);
        if constexpr (kPairs)
          store(score + j / 2 * kBlockM, make_pairs(last, vf{}, Unit{}));
        else
          store(score + j * kBlockM, last);
      }
      for (int k = units_of<Unit>(t.keys); k < depth_of<Unit>(t.keys); ++k) store(score + k * kBlockM, vf{});
      store(panel.row_sum + v * kLanes, fma(load(panel.row_sum + v * kLanes), rescale, sum[0] + sum[1]));
    }
  }

  // Return the operands and results of task `index`, to prefetch them. There are none if there are splits or long
  // tasks.
  Prefetcher ahead(int64_t index) const {
    Prefetcher next;
    if (index >= tasks || blocks > 1 || num_splits > 1 || !Prefetcher::serves<T>(a)) return next;
    const int64_t head = index % a.num_heads, kv_head = head / group_of(a);
    const Sequence s = find_sequence(a, index / a.num_heads);
    if (s.seqlen_q <= 0 || s.length() <= 0) return next;
    next.add<T>(a.out, s.index, head, s.first_query, s.seqlen_q, a.value_head_dim);
    next.add<T>(a.value, s.index, kv_head, s.first_key, s.length(), a.value_head_dim);
    next.add<T>(a.key, s.index, kv_head, s.first_key, s.length(), a.head_dim);
    next.add<T>(a.query, s.index, head, s.first_query, s.seqlen_q, a.head_dim);
    return next;
  }

  void step(const Sequence& s, int64_t head, const Tile& t, Matrix key, Matrix value, const Scratch& scratch,
            const Panel& panel, bool first, Prefetcher* next) const {
    multiply<false, Beta::zero>(t.vectors,
                                Product<Unit>{.rows = t.keys,
                                              .depth = depth,
                                              .a = key,
                                              .b = panel.query,
                                              .b_stride = kBlockM,
                                              .c = scratch.score,
                                              .c_stride = kBlockM},
                                next);
    const bool full = t.full(a);
    if (!full) mask_scores(a, s, head, t, scratch.mask, scratch.score);
    const float scale = full ? a.scale : 1.0f;
    if (a.threshold) {
      draw_dropout(a, s, head, t, scratch.mask.kept);
      softmax<true>(t, scale, scratch, panel);
    } else {
      softmax<false>(t, scale, scratch, panel);
    }
    const Product<Unit> p = {.rows = kColumns ? a.value_head_dim : value_width,
                             .depth = depth_of<Unit>(t.keys),
                             .a = value,
                             .b = (const Unit*)scratch.score,
                             .b_stride = kBlockM,
                             .c = panel.out,
                             .c_stride = kBlockM,
                             .beta = scratch.rescale};
    if (first)
      multiply<kColumns, Beta::zero>(t.vectors, p, next);
    else
      multiply<kColumns, Beta::vector>(t.vectors, p, next);
  }

  void write_stats(int64_t row, float row_max, float row_sum) const {
    if (!a.lse) return;
    a.lse[row] = row_sum == 0 ? -kInfinity : row_max + logf(row_sum);
    a.row_max[row] = row_sum == 0 ? 0 : row_max;
    a.row_sum[row] = row_sum;
  }

  // Return out * factor, or 0 for a row that sees nothing, whose accumulator may hold NaN.
  static vf normalised(vf out, vf row_sum, vf factor) { return select(row_sum == vf{}, vf{}, out * factor); }

  void write(const Sequence& s, int64_t head, int64_t query, const float* out, float row_max, float row_sum) const {
    T* to = row_pointer<T>(a.out, s.index, head, s.first_query + query);
    const vf factor = splat(dropout_scale(a.threshold) / row_sum);
    for_each_vector(a.value_head_dim, [&](int64_t d, int lanes) {
      store(to + d, normalised(load(out + d), splat(row_sum), factor), lanes);
    });
    write_stats(stats_offset(a, s, head, query), row_max, row_sum);
  }

  void write(const Sequence& s, int64_t head, int64_t query, int count, const Panel& panel) const {
    for (int first = 0; first < count; first += kLanes) {
      const vf row_sum = load(panel.row_sum + first), factor = dropout_scale(a.threshold) / row_sum;
      T* to = row_pointer<T>(a.out, s.index, head, s.first_query + query + first);
      for (int d = 0; d < a.value_head_dim; d += kLanes, to += kLanes) {
        vf x[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i)
          x[i] = normalised(load(panel.out + (d + i) * kBlockM + first), row_sum, factor);
        transpose(x);
        if (first + kLanes <= count && d + kLanes <= a.value_head_dim) {
#pragma GCC unroll 16
          for (int i = 0; i < kLanes; ++i) store(to + i * a.out.row, x[i]);
          continue;
        }
        for (int i = 0; i < min(kLanes, count - first); ++i)
          store(to + i * a.out.row, x[i], min(kLanes, a.value_head_dim - d));
      }
    }
    for (int i = 0; i < count; ++i)
      write_stats(stats_offset(a, s, head, query + i), panel.row_max[i], panel.row_sum[i]);
  }

  // Merge a partial result into row `row`; the first one is copied. A row that has seen nothing has row_sum 0 and
  // arbitrary accumulators.
  void merge(const Partial& total, int64_t row, bool first, const float* out, float row_max, float row_sum) const {
    float* to = total.out + row * value_width;
    if (first || total.row_sum[row] == 0) {
      memcpy(to, out, (size_t)value_width * sizeof(float));
      total.row_max[row] = row_max;
      total.row_sum[row] = row_sum;
    } else if (row_sum != 0) {
      const float new_max = fmaxf(total.row_max[row], row_max);
      const float rescale = expf(total.row_max[row] - new_max), factor = expf(row_max - new_max);
      for (int i = 0; i < value_width; i += kLanes)
        store(to + i, fma(load(to + i), splat(rescale), load(out + i) * factor));
      total.row_max[row] = new_max;
      total.row_sum[row] = total.row_sum[row] * rescale + row_sum * factor;
    }
  }

  int64_t partial_row(const Sequence& s, int64_t split, int64_t head, int64_t query) const {
    return ((split * a.batch + s.index) * a.num_heads + head) * a.seqlen_q + query;
  }

  // Store the result of a chunk of keys for row `row` of the task.
  void put(const Sequence& s, int64_t head, int64_t query, int64_t split, bool first, bool last, const Partial& total,
           int64_t row, const float* out, float row_max, float row_sum) const {
    if (!first || !last) {
      merge(total, row, first, out, row_max, row_sum);
      out = total.out + row * value_width, row_max = total.row_max[row], row_sum = total.row_sum[row];
    }
    if (!last) return;
    if (num_splits == 1) return write(s, head, query, out, row_max, row_sum);
    merge(partials, partial_row(s, split, head, query), true, out, row_max, row_sum);
  }

  void finish(const Sequence& s, int64_t head, int64_t query, int64_t split, bool first, bool last, int64_t row,
              const Scratch& scratch, const Panel& panel) const {
    const int count = (int)min(kBlockM, s.seqlen_q - query);
    if (first && last && num_splits == 1) return write(s, head, query, count, panel);
    transpose(panel.out, kBlockM, value_width, (int)round_up(count, kLanes), scratch.out, value_width);
    for (int i = 0; i < count; ++i)
      put(s, head, query + i, split, first, last, scratch.total, row + i, scratch.out + i * value_width,
          panel.row_max[i], panel.row_sum[i]);
  }

  void task(int64_t index, const Scratch& scratch) const {
    Prefetcher next = ahead(index + 1);
    const int64_t split = index % num_splits,
                  block = blocks - 1 - index / num_splits % blocks;  // with a causal mask the longest task first
    const int64_t head = index / num_splits / blocks % a.num_heads, kv_head = head / group_of(a);
    const Sequence s = find_sequence(a, index / num_splits / blocks / a.num_heads);
    const int64_t first = block * task_queries;
    const int panels = (int)ceil_div(min(task_queries, s.seqlen_q - first), kBlockM);
    if (panels <= 0) return;
    for (int p = 0; p < panels; ++p) start(s, head, first + p * kBlockM, scratch, scratch.panel[p]);
    const int64_t last = min(s.seqlen_q, first + task_queries) - 1;
    const int64_t begin = max(s.begin(first) / kBlockN * kBlockN, split * range);
    const int64_t end = min(s.end(last), (split + 1) * range);
    bool last_chunk = false;
    for (int64_t chunk = begin, next_chunk; !last_chunk; chunk = next_chunk) {
      next_chunk = round_up(chunk + 1, kChunk);  // chunk boundaries do not depend on the task's first key
      last_chunk = next_chunk >= end;
      bool started[kTaskPanels] = {};
      for (int p = 0; p < panels; ++p) clear(scratch.panel[p]);
      for (int64_t key = chunk; key < min(end, next_chunk); key += kBlockN) {
        int keys = 0;
        for (int p = 0; p < panels; ++p) {
          const Tile t(a, s, mask, head, first + p * kBlockM, key);
          if (!t.empty()) keys = max(keys, t.keys);
        }
        if (keys == 0) continue;
        const Matrix packed_key = pack_key(s, kv_head, key, keys, scratch);
        Matrix packed_value = pack_value(s, head, kv_head, key, keys, scratch);
        for (int p = panels - 1; p >= 0; --p) {  // with a causal mask, each panel sees fewer keys than the one before
          const Tile t(a, s, mask, head, first + p * kBlockM, key);
          if (t.empty()) continue;
          // The last unit of a product's depth may reach beyond the panel's keys, whose values may be NaN.
          if (kPairs && t.keys != keys && (t.keys > keys || depth_of<Unit>(t.keys) * kElements<Unit> != t.keys)) {
            keys = t.keys;
            packed_value = pack_value(s, head, kv_head, key, keys, scratch);
          }
          step(s, head, t, packed_key, packed_value, scratch, scratch.panel[p], !started[p], &next);
          started[p] = true;
        }
      }
      for (int p = 0; p < panels; ++p)
        finish(s, head, first + p * kBlockM, split, chunk == begin, last_chunk, p * kBlockM, scratch, scratch.panel[p]);
    }
  }

  // Apply online softmax to row r and the keys [key, key + keys).
  void few_softmax(const Sequence& s, int64_t head, int64_t query, int64_t key, int keys, int r,
                   const FewRows& few) const {
    float* score = few.score + r * kBlockN;
    mask_row(a, s, head, query, key, keys, score);
    const float old_max = few.row_max[r];
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
    few.rescale[r] = exp2((splat(old_max) - row_max) * kLog2e)[0];
    few.row_max[r] = new_max;
    few.row_sum[r] = few.row_sum[r] * few.rescale[r] + sum(total);
  }

  // Run a task with all queries of the heads that share a key/value head. It reads each block of keys once.
  void few_task(int64_t index, const Scratch& scratch) const {
    const int64_t split = index % num_splits, kv_head = index / num_splits % a.num_kv_heads, group = group_of(a);
    const Sequence s = find_sequence(a, index / num_splits / a.num_kv_heads);
    const FewRows& few = scratch.few;
    const int rows = (int)(group * s.seqlen_q);
    for (int r = 0; r < rows; ++r) {
      const int64_t head = kv_head * group + r / s.seqlen_q, query = r % s.seqlen_q;
      pack_row(row_pointer<T>(a.query, s.index, head, s.first_query + query), a.head_dim, few.query + r * few.width,
               few.width);
    }
    const int64_t begin = split * range, end = min(begin + range, s.length());
    const int64_t first = s.begin(0), last = min(end, s.end(s.seqlen_q - 1));
    bool last_chunk = false;
    for (int64_t chunk = begin; !last_chunk; chunk += kChunk) {
      last_chunk = chunk + kChunk >= end;
      for (int r = 0; r < rows; ++r) {
        clear_row(few.out + r * value_width, value_width);
        few.row_max[r] = -kInfinity;
        few.row_sum[r] = 0;
      }
      for (int64_t block = chunk; block < min(last, chunk + kChunk); block += kBlockN) {
        if (block + kBlockN <= first) continue;
        const int64_t key = max(block, first);
        const int keys = (int)(min(block + kBlockN, last) - key), ahead = rows_ahead(key, last);
        row_products(rows, few.query, few.width, row_pointer<T>(a.key, s.index, kv_head, s.first_key + key), a.key.row,
                     keys, a.head_dim, a.scale, ahead, few.score);
        for (int r = 0; r < rows; ++r)
          few_softmax(s, kv_head * group + r / s.seqlen_q, r % s.seqlen_q, key, keys, r, few);
        add_rows(rows, few.score, row_pointer<T>(a.value, s.index, kv_head, s.first_key + key), a.value.row, keys,
                 a.value_head_dim, few.rescale, ahead, few.out, value_width);
      }
      for (int r = 0; r < rows; ++r)
        put(s, kv_head * group + r / s.seqlen_q, r % s.seqlen_q, split, chunk == begin, last_chunk, scratch.total, r,
            few.out + r * value_width, few.row_max[r], few.row_sum[r]);
    }
  }

  // Merge the splits of a row into the first one, in order.
  void merge_splits(int64_t index) const {
    const Sequence s = find_sequence(a, index / a.seqlen_q / a.num_heads);
    const int64_t head = index / a.seqlen_q % a.num_heads, query = index % a.seqlen_q;
    if (query >= s.seqlen_q) return;
    const int64_t total = partial_row(s, 0, head, query);
    for (int64_t split = 1; split < num_splits; ++split) {
      const int64_t row = partial_row(s, split, head, query);
      merge(partials, total, false, partials.out + row * value_width, partials.row_max[row], partials.row_sum[row]);
    }
    write(s, head, query, partials.out + total * value_width, partials.row_max[total], partials.row_sum[total]);
  }
};

template <class T>
int64_t workspace(const Attention& a, const Parallel& parallel) {
  Arena arena = {0};
  const int useful = useful_workers(a, parallel, 2);
  const Forward<T> forward(a, useful, &arena);
  const int64_t workers = min(useful, forward.tasks * forward.num_splits);
  for (int64_t worker = 0; worker < workers; ++worker) forward.take_scratch(&arena);
  return (int64_t)arena.at;
}

template <class T>
void run(const Attention& a, const Parallel& parallel, char* workspace) {
  Arena arena = {(uintptr_t)workspace};
  const int workers = useful_workers(a, parallel, 2);
  const Forward<T> forward(a, workers, &arena);
  if (!forward.few) forward.mask.read(a, parallel, workers);
  Arena here = arena;
  forward.take_scratch(&here);
  const uintptr_t size = here.at - arena.at;
  parallel_for(parallel, workers, forward.tasks * forward.num_splits, [&](int64_t index, int worker) {
    Arena own = {arena.at + (uintptr_t)worker * size};
    const auto scratch = forward.take_scratch(&own);
    if (forward.few) return forward.few_task(index, scratch);
    with_tiles<kUsesAmx<typename UnitOf<T>::Unit>>([&] { forward.task(index, scratch); });
  });
  if (forward.num_splits > 1)
    parallel_for(parallel, forward.few ? 1 : workers, a.batch * a.num_heads * a.seqlen_q,
                 [&](int64_t index, int) { forward.merge_splits(index); });
}

}  // namespace

FASTATTN_EXPORT_PRODUCTS(Attention, attention);

}  // namespace fastattn
