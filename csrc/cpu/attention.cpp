// Attention, forward: online softmax over tiles (Milakov and Gimelshein, "Online normalizer calculation for softmax",
// 2018; Dao et al., "FlashAttention", 2022).
//
//   for each task, in parallel: a sequence, a query head, task_queries consecutive queries (at most 128, on AMX 256;
//   the last queries first), a split of the keys:
//     for each chunk of kChunk keys of the split, ascending:
//       for each block of kBlockN keys of the chunk, ascending: pack its K and V once;
//         for each panel of kBlockM queries of the task, the last one first:
//           S (key, query) = K Q';  P (key, query) = exp(S - row_max);  O' (Ev, query) = rescale O' + V' P;
//       merge O' into the chunks before, or write the output after the last chunk (results.h).
//   for each query, if the keys are split: merge the splits' results in their order.
//
// query (B, Hq, Lq, E), key (B, Hk, Lk, E), value (B, Hk, Lk, Ev) and out (B, Hq, Lq, Ev) have one dtype, which only
// the functions of attention_rows.h know. Their strides are arbitrary, except that columns are dense. LSE, row_max and
// row_sum are (B, Hq, Lq), float32. A task owns the rows of S of its queries, in the columns of its split. Few queries
// have a kernel of their own (few_queries_forward.h). blocks.h defines panel, block, tile, chunk and split.
#if defined(__AMX_BF16__)
// AMX reads and writes its sums once per tile, which takes as long as the product of 64 keys. So a tile has more keys
// here, and fewer queries: its scores take half of the first-level cache.
#define FASTATTN_BLOCK_M 32
#define FASTATTN_BLOCK_N 192
#endif
#include "few_queries_forward.h"
#include "kernels.h"
#include "prefetch.h"
#include "results.h"
#include "tasks.h"
#include "tile.h"

namespace fastattn {
namespace {

// Maximum panels per task. They share the packed keys and values.
constexpr int kTaskPanels = (kUsesAmx<Pair> ? 256 : 128) / kBlockM;

// Minimum tasks per worker. Tasks are halved, down to one panel, until there are that many. Fewer on AMX, where every
// task repacks V.
constexpr int kTasksEach = kUsesAmx<Pair> ? 4 : 8;

template <class Unit>
struct Forward;

template <class Unit>
void run(const Attention& a, const Parallel& parallel, char* workspace) {
  Arena arena = {(uintptr_t)workspace};
  const int workers = useful_workers(a, parallel, 2);
  if (FewQueriesForward::serves<Unit>(a)) {
    const FewQueriesForward forward(a, &arena);
    run_tasks(forward, parallel, workers, arena);
    forward.results.merge_splits(parallel, 1);
  } else {
    const Forward<Unit> forward(a, workers, &arena);
    forward.mask.read(a, parallel, workers);
    run_tasks(forward, parallel, workers, arena);
    forward.results.merge_splits(parallel, workers);
  }
}

template <class Unit>
int64_t workspace(const Attention& a, const Parallel& parallel) {
  Arena arena = {0};
  const int workers = useful_workers(a, parallel, 2);
  if (FewQueriesForward::serves<Unit>(a))
    take_scratch(FewQueriesForward(a, &arena), workers, &arena);
  else
    take_scratch(Forward<Unit>(a, workers, &arena), workers, &arena);
  return (int64_t)arena.at;
}

template <class UnitOfDtype>
struct Forward {
  using Unit = UnitOfDtype;
  static constexpr bool kPairs = kElements<Unit> == 2, kByColumns = !kUsesAmx<Unit>;

  const Attention& a;
  const BlockMask mask;
  const Results results;
  int64_t task_queries, tasks_per_head;  // Queries per task; tasks per head and split.
  const int depth = depth_of<Unit>(a.head_dim),
            width = (int)round_up(depth, kLanes);       // Units of head_dim; whole vectors.
  const int value_width = (int)results.partials.width;  // Elements per row of values, in whole vectors.
  // Whether keys are read where they lie, without packing.
  const bool key_in_place = in_memory<Unit>(a.dtype) && depth * kElements<Unit> == a.head_dim;

  struct Panel {
    Unit* query;                     // (width, kBlockM)
    float *out, *row_max, *row_sum;  // (value_width, kBlockM), (kBlockM), (kBlockM)
    // (kBlockM): sums of the weights that dropout keeps, exact and as the product with V has rounded them.
    float *kept_sum, *rounded_sum;
  };

  struct Scratch {
    Unit *rows, *key, *value, *pairs;  // packed
    float *score, *rescale, *out;      // (kBlockN, kBlockM), (kBlockM), (kBlockM, value_width)
    MaskBuffers mask;
    Panel panel[kTaskPanels];
    Partials totals;  // one row per query of the task
  };

  Forward(const Attention& a, int workers, Arena* arena)
      : a(a), mask(a, arena), results(a, a.batch * a.num_heads * ceil_div(a.seqlen_q, kBlockM), arena) {
    // A panel's result does not depend on the other panels of its task, so panels per task may depend on the workers.
    task_queries = kTaskPanels * kBlockM;
    const int64_t heads = a.batch * a.num_heads * results.splits.count;
    while (task_queries > kBlockM && heads * ceil_div(a.seqlen_q, task_queries) < kTasksEach * workers)
      task_queries /= 2;
    tasks_per_head = ceil_div(a.seqlen_q, task_queries);
  }

  int64_t tasks() const { return a.batch * a.num_heads * tasks_per_head * results.splits.count; }

  Scratch take_scratch(Arena* arena) const {
    Scratch s;
    arena->take(kBlockN * kBlockM, &s.score);
    arena->take(kBlockM * width, &s.rows);
    arena->take(key_in_place ? 0 : kBlockN * width, &s.key);
    arena->take(kBlockN * value_width, &s.value);
    arena->take(kUsesAmx<Unit> ? kBlockN / 2 * value_width : 0, &s.pairs);
    arena->take(kBlockM, &s.rescale);
    arena->take(kBlockM * value_width, &s.out);
    s.mask = MaskBuffers(a, arena);
    for (Panel& panel : s.panel) {
      arena->take(kBlockM * width, &panel.query);
      arena->take(kBlockM * value_width, &panel.out);
      arena->take(kBlockM, &panel.row_max, &panel.row_sum);
      arena->take(kPairs ? kBlockM : 0, &panel.kept_sum, &panel.rounded_sum);
    }
    s.totals = results.take_totals(kTaskPanels * kBlockM, arena);
    return s;
  }

  void run_task(int64_t index, const Scratch& scratch) const {
    Prefetcher next = prefetcher_of(index + 1);
    const Splits& splits = results.splits;
    const int64_t split = index % splits.count, of_all_heads = index / splits.count;
    const int64_t head = of_all_heads / tasks_per_head % a.num_heads, kv_head = head / group_of(a);
    const Sequence s = find_sequence(a, of_all_heads / tasks_per_head / a.num_heads);
    // The last queries come first, because with a causal mask they see the most keys.
    const int64_t first = (tasks_per_head - 1 - of_all_heads % tasks_per_head) * task_queries;
    const int panels = (int)ceil_div(min(task_queries, s.seqlen_q - first), kBlockM);
    if (panels <= 0) return;
    for (int p = 0; p < panels; ++p) pack_query(s, head, first + p * kBlockM, scratch, scratch.panel[p]);
    const int64_t last = min(s.seqlen_q, first + task_queries) - 1;
    const int64_t begin = max(s.begin(first) / kBlockN * kBlockN, split * splits.keys);
    const int64_t end = min(s.end(last), (split + 1) * splits.keys);
    bool last_chunk = false;
    for (int64_t chunk = begin, next_chunk; !last_chunk; chunk = next_chunk) {
      next_chunk = round_up(chunk + 1, kChunk);  // chunk boundaries do not depend on the task's first key
      last_chunk = next_chunk >= end;
      bool started[kTaskPanels] = {};
      for (int p = 0; p < panels; ++p) clear_stats(scratch.panel[p]);
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
          add_tile(s, head, t, packed_key, packed_value, scratch, scratch.panel[p], !started[p], &next);
          started[p] = true;
        }
      }
      for (int p = 0; p < panels; ++p)
        finish_panel(s, head, first + p * kBlockM, split, chunk == begin, last_chunk, p * kBlockM, scratch,
                     scratch.panel[p]);
    }
  }

  // Return the operands and results of a task, to prefetch them. There are none if there are splits or long tasks.
  Prefetcher prefetcher_of(int64_t index) const {
    Prefetcher next;
    if (index >= tasks() || tasks_per_head > 1 || results.splits.count > 1 || !Prefetcher::serves(a)) return next;
    const int64_t head = index % a.num_heads, kv_head = head / group_of(a);
    const Sequence s = find_sequence(a, index / a.num_heads);
    if (s.seqlen_q <= 0 || s.length() <= 0) return next;
    next.add(a, query_rows(a, a.out, s, head, 0), s.seqlen_q, a.value_head_dim);
    next.add(a, query_rows(a, a.residual, s, head, 0), s.seqlen_q, a.value_head_dim);
    next.add(a, key_rows(a, a.value, s, kv_head, 0), s.length(), a.value_head_dim);
    next.add(a, key_rows(a, a.key, s, kv_head, 0), s.length(), a.head_dim);
    next.add(a, query_rows(a, a.query, s, head, 0), s.seqlen_q, a.head_dim);
    return next;
  }

  void pack_query(const Sequence& s, int64_t head, int64_t query, const Scratch& scratch, const Panel& panel) const {
    const int count = (int)min(kBlockM, s.seqlen_q - query), padded = (int)round_up(count, kLanes);
    const Rows from = query_rows(a, a.query, s, head, query);
    if (key_in_place && count == padded && depth == width && from.stride % kElements<Unit> == 0)
      return transpose((const Unit*)from.data, from.stride / kElements<Unit>, padded, width, panel.query, kBlockM);
    pack(a, from, count, a.head_dim, scratch.rows, width, nullptr);
    clear_row(scratch.rows + count * width, (padded - count) * width);
    transpose(scratch.rows, width, padded, width, panel.query, kBlockM);
  }

  // Clear the statistics. The accumulator needs no clearing, because the first tile overwrites it.
  void clear_stats(const Panel& panel) const {
    clear_row(panel.row_sum, kBlockM);
    if constexpr (kPairs) {
      clear_row(panel.kept_sum, kBlockM);
      clear_row(panel.rounded_sum, kBlockM);
    }
    for (int i = 0; i < kBlockM; ++i) panel.row_max[i] = -kInfinity;
  }

  Matrix pack_key(const Sequence& s, int64_t head, int64_t key, int keys, const Scratch& scratch) const {
    const Rows from = key_rows(a, a.key, s, head, key);
    if (key_in_place) return in_place(a, from);
    pack(a, from, keys, a.head_dim, scratch.key, width, nullptr);
    return {scratch.key, width};
  }

  // Pack V. Keys that no query sees get values of 0, because theirs may be NaN, and 0 * NaN is NaN.
  Matrix pack_value(const Sequence& s, int64_t head, int64_t kv_head, int64_t key, int keys,
                    const Scratch& scratch) const {
    const Rows from = key_rows(a, a.value, s, kv_head, key);
    const uint8_t* visible = mask.visible_keys(a, s, head, head + 1, key, keys, scratch.mask.keys);
    if constexpr (kPairs) {
      pack_left(from, keys, a.value_head_dim, scratch.value, value_width, visible, scratch.pairs);
      if (!kByColumns) return {scratch.value, kBlockN / 2};
    } else {
      if (in_memory<Unit>(a.dtype) && !visible) return in_place(a, from);
      pack(a, from, keys, a.value_head_dim, scratch.value, value_width, visible);
    }
    return {scratch.value, value_width};
  }

  void add_tile(const Sequence& s, int64_t head, const Tile& t, Matrix key, Matrix value, const Scratch& scratch,
                const Panel& panel, bool first, Prefetcher* next) const {
    // S (key, query) = K Q'.
    multiply<false, Beta::zero>(t.vectors, Product<Unit>{t.keys, depth, key, panel.query, scratch.score, kBlockM},
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
    // O' (Ev, query) = rescale O' + V' P.
    const int rows = kByColumns ? a.value_head_dim : value_width, keys = depth_of<Unit>(t.keys);
    const Product<Unit> p = {rows, keys, value, (const Unit*)scratch.score, panel.out, kBlockM, scratch.rescale};
    if (first)
      multiply<kByColumns, Beta::zero>(t.vectors, p, next);
    else
      multiply<kByColumns, Beta::vector>(t.vectors, p, next);
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
      vf sum[2] = {}, kept_sum = {}, rounded_sum = {};
      const auto probability = [&](int key, vf* total) {
        const vf p = exp2((load(score + key * kBlockM) - row_max) * kLog2e);
        *total += p;
        if constexpr (!dropout) return p;
        const vf weight = keep_bits((uint32_t)(kept[key] >> (v * kLanes)) & first_lanes(kLanes), p);
        if constexpr (kPairs) kept_sum += weight;
        return weight;
      };
      const auto put = [&](int key, vf even, vf odd, bool both) {
        if constexpr (kPairs) {
          const vf pairs = make_pairs(even, odd, Unit{});
          rounded_sum = add_pairs(pairs, rounded_sum, Unit{});
          store(score + key / 2 * kBlockM, pairs);
        } else {
          store(score + key * kBlockM, even);
          if (both) store(score + (key + 1) * kBlockM, odd);
        }
      };
      for (j = 0; j + 2 <= t.keys; j += 2) {
        const vf even = probability(j, &sum[0]), odd = probability(j + 1, &sum[1]);
        put(j, even, odd, true);
      }
      if (j < t.keys) put(j, probability(j, &sum[0]), vf{}, false);
      for (int k = units_of<Unit>(t.keys); k < depth_of<Unit>(t.keys); ++k) store(score + k * kBlockM, vf{});
      const auto add = [&](float* total, vf added) { store(total, fma(load(total), rescale, added)); };
      add(panel.row_sum + v * kLanes, sum[0] + sum[1]);
      if constexpr (kPairs) add(panel.rounded_sum + v * kLanes, rounded_sum);
      if constexpr (kPairs && dropout) add(panel.kept_sum + v * kLanes, kept_sum);
    }
  }

  // Return the factors of a vector of queries by which the exact weights add up to more than the rounded ones that have
  // multiplied V. They make the result exact for a constant V, whatever is added to V, and the backward pass relies on
  // that: there dP - delta cancels such a constant.
  FASTATTN_INLINE vf correction(const Panel& panel, int query) const {
    if constexpr (!kPairs) return splat(1.0f);
    const vf exact = load((a.threshold ? panel.kept_sum : panel.row_sum) + query);
    const vf rounded_sum = load(panel.rounded_sum + query);
    return select(rounded_sum == vf{}, splat(1.0f), exact / rounded_sum);
  }

  void finish_panel(const Sequence& s, int64_t head, int64_t query, int64_t split, bool first, bool last, int64_t row,
                    const Scratch& scratch, const Panel& panel) const {
    const int count = (int)min(kBlockM, s.seqlen_q - query);
    if (first && last && results.splits.count == 1) return write_panel(s, head, query, count, scratch, panel);
    for (int first_query = 0; kPairs && first_query < count; first_query += kLanes) {
      const vf factor = correction(panel, first_query);
      for (int d = 0; d < value_width; ++d) {
        float* x = panel.out + d * kBlockM + first_query;
        store(x, load(x) * factor);
      }
    }
    transpose(panel.out, kBlockM, value_width, (int)round_up(count, kLanes), scratch.out, value_width);
    for (int i = 0; i < count; ++i)
      results.put(s, head, query + i, split, first, last, scratch.totals, row + i,
                  {scratch.out + i * value_width, panel.row_max[i], panel.row_sum[i]});
  }

  void write_panel(const Sequence& s, int64_t head, int64_t query, int count, const Scratch& scratch,
                   const Panel& panel) const {
    float* factor = scratch.rescale;
    for (int first = 0; first < count; first += kLanes)
      store(factor + first, correction(panel, first) * dropout_scale(a.threshold) / load(panel.row_sum + first));
    rows_of(a).write_panel(panel.out, kBlockM, panel.row_sum, factor, count, a.value_head_dim,
                           query_rows(a, a.out, s, head, query), query_rows(a, a.residual, s, head, query));
    for (int i = 0; i < count; ++i) results.write_stats(s, head, query + i, panel.row_max[i], panel.row_sum[i]);
  }
};

}  // namespace

FASTATTN_EXPORT_PRODUCTS(Attention, attention);

}  // namespace fastattn
