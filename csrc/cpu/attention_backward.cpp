// Attention, backward: one pass of five products over the tiles (Dao, "FlashAttention-2", 2023, algorithm 2).
//
//   for each task, in parallel: a sequence, a key/value head, a split of the keys: pack K and V of the split;
//     for each query head that shares the key/value head, ascending:
//       for each panel of kBlockM queries, ascending: pack Q and dO;
//         for each block of kBlockN keys that the panel sees, ascending:
//           S (key, query) = K Q';  dP = V dO';  P = exp(S - row_max) / row_sum;  dS = P (dP - delta);
//           dV (key, Ev) += P dO;  dK (key, E) += dS Q;  dQ' (E, query) += K' dS;
//         dQ' += c (dLSE - sum of dS), c near the mean of the keys;
//         write dQ of the panel, or store it as the split's partial dQ (gradients.h).
//     write dK and dV of the split.
//   for each query, if the keys are split: dQ is the sum of its partial dQ, in the order of the splits.
//
// query, key, value, out and their gradients have one dtype (attention_rows.h) and the shapes of attention.cpp; the
// statistics of the forward pass are (B, Hq, Lq), float32. tile_gradients.h computes P and dS. Few queries have a
// kernel of their own (few_queries_backward.h), and so has the mask's gradient (mask_gradient.h). See blocks.h for the
// words.
#include "few_queries_backward.h"
#include "kernels.h"
#include "mask_gradient.h"

namespace fastattn {
namespace {

constexpr int kChunkPanels = 128;  // Panels per chunk of dK and dV. Blocked summation bounds the rounding error.

template <class Unit>
struct Backward;

// Call use(kernel, kernel of the mask's gradient). Both sum scores in the order of the forward pass's kernel.
template <class Unit, class Use>
void with_kernels(const AttentionBackward& a, const BlockMask& mask, const QueryGradients& query_gradients,
                  const Use& use) {
  if (FewQueriesBackward::serves(a)) {
    const FewQueriesBackward kernel{a, mask, query_gradients};
    use(kernel, FewQueriesMaskGradient{kernel});
  } else {
    use(Backward<Unit>{a, mask, query_gradients}, MaskGradient<Unit>{a, mask});
  }
}

template <class Unit>
void run(const AttentionBackward& a, const Parallel& parallel, char* workspace) {
  Arena arena = {(uintptr_t)workspace};
  const int workers = useful_workers(a, parallel, 5);
  const QueryGradients query_gradients(a, &arena);
  const BlockMask mask(a, &arena);
  mask.read(a, parallel, workers);
  with_kernels<Unit>(a, mask, query_gradients, [&](const auto& kernel, const auto& of_mask) {
    run_tasks(kernel, parallel, workers, arena);
    if (a.grad_mask) run_tasks(of_mask, parallel, workers, arena);
  });
  query_gradients.add_splits(parallel, workers);
}

template <class Unit>
int64_t workspace(const AttentionBackward& a, const Parallel& parallel) {
  Arena arena = {0};
  const int workers = useful_workers(a, parallel, 5);
  const QueryGradients query_gradients(a, &arena);
  const BlockMask mask(a, &arena);
  Arena again = arena;  // the mask's gradient uses the same memory afterwards
  with_kernels<Unit>(a, mask, query_gradients, [&](const auto& kernel, const auto& of_mask) {
    take_scratch(kernel, workers, &arena);
    if (a.grad_mask) take_scratch(of_mask, workers, &again);
  });
  return (int64_t)max(arena.at, again.at);
}

template <class UnitOfDtype>
struct Backward {
  using Unit = UnitOfDtype;
  static constexpr bool kPairs = kElements<Unit> == 2, kByColumns = !kUsesAmx<Unit>;

  const AttentionBackward& a;
  const BlockMask& mask;
  const QueryGradients& query_gradients;
  const TileGradients<Unit> tiles = {a, mask};
  const Splits& splits = query_gradients.splits;
  // Elements per row of keys and of values, rounded up to whole vectors.
  const int width = query_gradients.width, value_width = (int)round_up(a.value_head_dim, kLanes);

  struct Scratch {
    typename TileGradients<Unit>::Scratch tile;
    Unit *query_right, *grad_right;                         // Panel of Q and of dO as B of a product over queries.
    Unit *probability_left, *grad_left, *grad_score_right;  // P and dS as A of a product, dS as B.
    float *grad_query, *query_total;                        // (width, kBlockM). Totals: sums of the chunks so far.
    float *grad_key, *grad_value;                           // (keys, width), (keys, value_width).
    float *key_total, *value_total;
    float* mean;             // (width), near the mean of the keys
    Unit *key_left, *pairs;  // key_left: K as A of a product over keys.
  };

  int64_t tasks() const { return a.batch * a.num_kv_heads * splits.count; }

  // Whether the gradients of a key may take more than one chunk of panels.
  bool has_long_sums() const { return group_of(a) * ceil_div(a.seqlen_q, kBlockM) > kChunkPanels; }

  Scratch take_scratch(Arena* arena) const {
    Scratch s;
    s.tile = tiles.take_scratch(splits.keys, arena);
    s.query_right = s.tile.query_rows;
    s.grad_right = s.tile.grad_rows;
    s.probability_left = (Unit*)s.tile.score;
    s.grad_left = s.grad_score_right = (Unit*)s.tile.grad_score;
    if constexpr (kPairs) {
      arena->take(kBlockM / 2 * width, &s.query_right);
      arena->take(kBlockM / 2 * value_width, &s.grad_right);
      arena->take(kBlockM / 2 * kBlockN, &s.probability_left, &s.grad_left, &s.grad_score_right);
    }
    arena->take(width, &s.mean);
    arena->take(kBlockM * width, &s.grad_query);
    arena->take(splits.keys > kChunk ? kBlockM * width : 0, &s.query_total);
    arena->take(splits.keys * width, &s.grad_key);
    arena->take(splits.keys * value_width, &s.grad_value);
    arena->take(has_long_sums() ? splits.keys * width : 0, &s.key_total);
    arena->take(has_long_sums() ? splits.keys * value_width : 0, &s.value_total);
    arena->take(kPairs ? splits.keys / 2 * width : 0, &s.key_left);
    arena->take(kUsesAmx<Unit> ? kBlockN / 2 * width : 0, &s.pairs);
    return s;
  }

  void run_task(int64_t index, const Scratch& scratch) const {
    Prefetcher next = prefetcher_of(index + 1);
    const int64_t split = index % splits.count, kv_head = index / splits.count % a.num_kv_heads, group = group_of(a);
    const Sequence s = find_sequence(a, index / splits.count / a.num_kv_heads);
    const int64_t begin = split * splits.keys, end = min(begin + splits.keys, s.length());
    const int64_t rows = max(min(begin + splits.keys, s.seqlen_k) - begin, 0);
    mean_of_keys(a, mask, s, kv_head, scratch.tile.mask.keys, scratch.mean);
    for (int64_t key = begin; key < end; key += kBlockN) pack_keys(s, kv_head, key, end, key - begin, scratch);
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
        add_panel(s, head, query, split, begin, end, scratch, &next);
        if (++panels % kChunkPanels == 0 && has_long_sums()) end_panels();
      }
    if (chunks > 0) end_panels();
    const float* grad_key = chunks > 0 ? scratch.key_total : scratch.grad_key;
    const float* grad_value = chunks > 0 ? scratch.value_total : scratch.grad_value;
    const RowFunctions& of = rows_of(a);
    for (int64_t j = 0; j < rows; ++j) {
      of.write_gradient(grad_key + j * width, nullptr, 0, a.scale, a.head_dim,
                        key_rows(a, a.grad_key, s, kv_head, begin + j).data);
      of.write_gradient(grad_value + j * value_width, nullptr, 0, dropout_scale(a.threshold), a.value_head_dim,
                        key_rows(a, a.grad_value, s, kv_head, begin + j).data);
    }
  }

  // Return the operands and results of a task, for its first query head, to prefetch them. There are none if there are
  // splits or long tasks.
  Prefetcher prefetcher_of(int64_t index) const {
    Prefetcher next;
    if (index >= tasks() || splits.count > 1 || !Prefetcher::serves(a)) return next;
    const int64_t kv_head = index % a.num_kv_heads, head = kv_head * group_of(a);
    const Sequence s = find_sequence(a, index / a.num_kv_heads);
    if (s.seqlen_q <= 0 || s.length() <= 0) return next;
    next.add(a, key_rows(a, a.grad_value, s, kv_head, 0), s.length(), a.value_head_dim);
    next.add(a, key_rows(a, a.grad_key, s, kv_head, 0), s.length(), a.head_dim);
    next.add(a, query_rows(a, a.grad_query, s, head, 0), s.seqlen_q, a.head_dim);
    next.add(a, key_rows(a, a.value, s, kv_head, 0), s.length(), a.value_head_dim);
    next.add(a, key_rows(a, a.key, s, kv_head, 0), s.length(), a.head_dim);
    if (!has_short_rows(a)) {
      next.add(a, query_rows(a, a.out, s, head, 0), s.seqlen_q, a.value_head_dim);
      next.add(a, query_rows(a, a.residual, s, head, 0), s.seqlen_q, a.value_head_dim);
    }
    next.add(a, query_rows(a, a.grad_out, s, head, 0), s.seqlen_q, a.value_head_dim);
    next.add(a, query_rows(a, a.query, s, head, 0), s.seqlen_q, a.head_dim);
    return next;
  }

  // Pack a block of keys, of those before `end`, into the rows from `row` on.
  void pack_keys(const Sequence& s, int64_t kv_head, int64_t key, int64_t end, int64_t row,
                 const Scratch& scratch) const {
    const int count = (int)min(kBlockN, end - key);
    const uint8_t* visible = tiles.pack_keys(s, kv_head, key, count, row, scratch.tile);
    if constexpr (kPairs)
      pack_left(key_rows(a, a.key, s, kv_head, key), count, a.head_dim, scratch.key_left + row / 2 * width, width,
                visible, scratch.pairs);
  }

  // Add the gradients of a panel of queries and the keys [begin, end) of a split, and put dQ.
  void add_panel(const Sequence& s, int64_t head, int64_t query, int64_t split, int64_t begin, int64_t end,
                 const Scratch& scratch, Prefetcher* next) const {
    const int count = (int)min(kBlockM, s.seqlen_q - query);
    const int64_t first = max(s.begin(query) / kBlockN * kBlockN, begin);
    const int64_t last = min(s.end(query + count - 1), end);
    clear_row(scratch.tile.missing, kBlockM);
    for (int i = 0; a.grad_lse && split == 0 && i < count; ++i) {
      const int64_t row = stats_offset(a, s, head, query + i);
      if (a.row_sum[row] != 0) scratch.tile.missing[i] = a.grad_lse[row];
    }
    bool started = false, several = false;
    for (int64_t key = first; key < last; key += kBlockN) {
      const Tile t(a, s, mask, head, query, key);
      if (t.empty()) continue;
      if (!started) pack_queries(s, head, query, count, scratch);
      add_tile(s, head, t, key - begin, scratch, !started, next);
      started = true;
      if (!is_end_of_chunk(key, first, last)) continue;
      end_chunk(!several, width * kBlockM, scratch.grad_query, scratch.query_total);
      several = true;
    }
    if (!started) clear_row(scratch.grad_query, width * kBlockM);
    if (several) end_chunk(false, width * kBlockM, scratch.grad_query, scratch.query_total);
    put_panel(s, head, query, count, split, several ? scratch.query_total : scratch.grad_query, scratch);
  }

  void pack_queries(const Sequence& s, int64_t head, int64_t query, int count, const Scratch& scratch) const {
    tiles.pack_queries(s, head, query, scratch.tile);
    if constexpr (kPairs) {
      const uint8_t* visible = scratch.tile.mask.queries;
      pack_pairs(query_rows(a, a.query, s, head, query), count, a.head_dim, scratch.query_right, width, visible);
      pack_pairs(query_rows(a, a.grad_out, s, head, query), count, a.value_head_dim, scratch.grad_right, value_width,
                 visible);
      const int pairs = units_of<Unit>(count), rest = depth_of<Unit>(count) - pairs;
      clear_row(scratch.query_right + pairs * width, rest * width);
      clear_row(scratch.grad_right + pairs * value_width, rest * value_width);
    }
  }

  // Add the gradients of a tile. `row` is the place of its first key in the split.
  void add_tile(const Sequence& s, int64_t head, const Tile& t, int64_t row, const Scratch& scratch, bool first,
                Prefetcher* next) const {
    const auto keys = tiles.find_keys(s, head / group_of(a), t.key, row, scratch.tile);
    const auto use = [&](int j, int v, vf p0, vf ds0, vf p1, vf ds1, bool both, vf missing) {
      const int at = j * kBlockM + v * kLanes;
      if constexpr (kPairs) {
        const vf pairs = make_pairs(ds0, ds1, Unit{});
        store((bfloat16*)scratch.probability_left + at, p0);
        store((bfloat16*)scratch.grad_left + at, ds0);
        store_unit(scratch.grad_score_right + j / 2 * kBlockM + v * kLanes, pairs);
        if (both) store((bfloat16*)scratch.probability_left + at + kBlockM, p1);
        if (both) store((bfloat16*)scratch.grad_left + at + kBlockM, ds1);
        return subtract_pairs(pairs, missing, Unit{});
      } else {
        store(scratch.tile.score + at, p0);
        store(scratch.tile.grad_score + at, ds0);
        if (both) store(scratch.tile.score + at + kBlockM, p1);
        if (both) store(scratch.tile.grad_score + at + kBlockM, ds1);
        return missing - ds0 - ds1;
      }
    };
    tiles.compute(s, head, t, keys, scratch.tile, next, use);
    const int queries = depth_of<Unit>(t.queries), count = depth_of<Unit>(t.keys);
    if constexpr (kUsesAmx<Unit>) {
      for (int j = units_of<Unit>(t.keys); j < count; ++j) clear_row(scratch.grad_score_right + j * kBlockM, kBlockM);
      for (int j = 0; t.vectors % 2 && j < t.keys; ++j) {  // an AMX tile is two vectors of queries deep
        const int at = j * kBlockM + t.vectors * kLanes;
        store((bfloat16*)scratch.probability_left + at, vf{});
        store((bfloat16*)scratch.grad_left + at, vf{});
      }
    }
    accumulate(t.keys, queries, {scratch.probability_left, kBlockM / kElements<Unit>}, scratch.grad_right, value_width,
               scratch.grad_value + row * value_width, next);
    accumulate(t.keys, queries, {scratch.grad_left, kBlockM / kElements<Unit>}, scratch.query_right, width,
               scratch.grad_key + row * width, next);
    // dQ' (E, query) += K' dS.
    const Matrix key_left =
        kPairs ? Matrix(scratch.key_left + row / 2 * width, kByColumns ? width : kBlockN / 2) : keys.key;
    const Product<Unit> p = {
        kByColumns ? a.head_dim : width, count, key_left, scratch.grad_score_right, scratch.grad_query, kBlockM};
    if (first)
      multiply<kByColumns, Beta::zero>(t.vectors, p, next);
    else
      multiply<kByColumns, Beta::one>(t.vectors, p, next);
  }

  // Compute C (rows, columns) += A (rows, depth) B (depth, columns), for any number of columns.
  void accumulate(int rows, int depth, Matrix left, const Unit* right, int columns, float* c, Prefetcher* next) const {
    for (int n = 0; n < columns; n += kBlockM)
      multiply<false, Beta::one>(min(columns - n, kBlockM) / kLanes,
                                 Product<Unit>{rows, depth, left, right + n, c + n, columns}, next);
  }

  // Put dQ of a panel.
  void put_panel(const Sequence& s, int64_t head, int64_t query, int count, int64_t split, const float* grad_query,
                 const Scratch& scratch) const {
    float* rows = scratch.tile.score;  // (kBlockM, kBlockN)
    for (int d = 0; d < width; d += kBlockN) {
      const int columns = min(width - d, kBlockN);
      transpose(grad_query + d * kBlockM, kBlockM, columns, (int)round_up(count, kLanes), rows, kBlockN);
      for (int i = 0; i < count; ++i)
        query_gradients.put(s, head, query + i, split, {rows + i * kBlockN, scratch.mean + d, scratch.tile.missing[i]},
                            d, columns);
    }
  }
};

}  // namespace

FASTATTN_EXPORT_PRODUCTS(AttentionBackward, attention_backward);

}  // namespace fastattn
