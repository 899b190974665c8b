// The gradient of a float mask of attention: dS, summed over the dimensions in which the mask is broadcast.
//
//   for each task, in parallel: a panel of kBlockM rows of the mask, or its row if it has only one:
//     for each sequence, query head and panel of queries that the task's panel is broadcast to, ascending: pack Q, dO;
//       for each block of kBlockN keys, ascending: pack K and V; dS as in tile_gradients.h;
//         sums (columns, query) += dS, in one row if the mask has only one column;
//     write the panel's part of the gradient.
//
// Few queries (few_queries.h), whose scores the forward pass sums in another order than those of tiles:
//
//   for each task, in parallel: the mask's heads that share a key/value head, or its head if it has only one:
//     for each sequence and key/value head that they are broadcast to, ascending: pack the rows of Q and dO;
//       for each block of kBlockN keys, ascending: dS as in few_queries_backward.h; sums (query, columns) += dS;
//     write the heads' part of the gradient.
//
// The gradient is (batches, heads, rows, columns) of the mask, each 1 where the mask is broadcast, in the mask's dtype.
#pragma once
#include "few_queries_backward.h"
#include "tile_gradients.h"

namespace fastattn {
namespace {

template <class UnitOfDtype>
struct MaskGradient {
  using Unit = UnitOfDtype;

  const AttentionBackward& a;
  const BlockMask& mask;
  const TileGradients<Unit> tiles = {a, mask};

  struct Scratch {
    typename TileGradients<Unit>::Scratch tile;
    float* sums;  // (columns, kBlockM), whole blocks of columns.
  };

  int64_t tasks() const { return a.mask.batches * a.mask.heads * mask.panels; }

  int64_t sum_count() const { return round_up(a.mask.columns, kBlockN) * kBlockM; }

  Scratch take_scratch(Arena* arena) const {
    Scratch s;
    s.tile = tiles.take_scratch(kBlockN, arena);
    arena->take(sum_count(), &s.sums);
    return s;
  }

  void run_task(int64_t index, const Scratch& scratch) const {
    const Mask& m = a.mask;
    const int64_t panel = index % mask.panels, mask_head = index / mask.panels % m.heads,
                  mask_batch = index / mask.panels / m.heads;
    clear_row(scratch.sums, sum_count());
    for (int64_t batch = m.batches == 1 ? 0 : mask_batch; batch < (m.batches == 1 ? a.batch : mask_batch + 1); ++batch)
      for (int64_t head = m.heads == 1 ? 0 : mask_head; head < (m.heads == 1 ? a.num_heads : mask_head + 1); ++head) {
        const Sequence s = find_sequence(a, batch);
        const int64_t first = m.rows == 1 ? 0 : panel * kBlockM, end = m.rows == 1 ? s.seqlen_q : first + 1;
        for (int64_t query = first; query < end; query += kBlockM) add_panel(s, head, query, scratch);
      }
    const int64_t row = panel * kBlockM;
    with_type(m.dtype, [&](auto type) {
      write(scratch, row,
            (decltype(type)*)a.grad_mask + ((mask_batch * m.heads + mask_head) * m.rows + row) * m.columns);
    });
  }

  // Add dS of a panel of queries and all keys.
  void add_panel(const Sequence& s, int64_t head, int64_t query, const Scratch& scratch) const {
    const int64_t kv_head = head / group_of(a);
    Prefetcher none = {};
    tiles.pack_queries(s, head, query, scratch.tile);
    clear_row(scratch.tile.missing, kBlockM);
    for (int64_t key = 0; key < s.length(); key += kBlockN) {
      const Tile t(a, s, mask, head, query, key);
      if (t.empty()) continue;
      tiles.pack_keys(s, kv_head, key, t.keys, 0, scratch.tile);
      tiles.compute(s, head, t, tiles.find_keys(s, kv_head, key, 0, scratch.tile), scratch.tile, &none,
                    [&](int j, int v, vf, vf ds0, vf, vf ds1, bool both, vf missing) {
                      float* at = scratch.sums + (a.mask.columns == 1 ? 0 : key + j) * kBlockM + v * kLanes;
                      store(at, load(at) + ds0);
                      if (a.mask.columns > 1) at += kBlockM;
                      if (both) store(at, load(at) + ds1);
                      return missing;
                    });
    }
  }

  // Write the gradient of a panel, whose first row is `row`.
  template <class Value>
  void write(const Scratch& scratch, int64_t row, Value* to) const {
    const Mask& m = a.mask;
    for (int64_t key = 0; key < m.columns; key += kBlockN, to += kBlockN) {
      const int count = (int)min(kBlockN, m.columns - key);
      const float* sums = scratch.sums + key * kBlockM;
      if (m.rows == 1) {
        for (int j = 0; j < count; ++j) {
          vf total = {};
          for (int v = 0; v < kBlockM / kLanes; ++v) total += load(sums + j * kBlockM + v * kLanes);
          store(to + j, splat(sum(total)), 1);
        }
        continue;
      }
      float* lines = scratch.tile.mask.rows;
      transpose(sums, kBlockM, kBlockN, kBlockM, lines, kBlockN);
      for (int i = 0; i < min(kBlockM, m.rows - row); ++i)
        for_each_vector(count,
                        [&](int64_t j, int n) { store(to + i * m.columns + j, load(lines + i * kBlockN + j), n); });
    }
  }
};

struct FewQueriesMaskGradient {
  using Unit = float;

  const FewQueriesBackward& kernel;
  const AttentionBackward& a = kernel.a;
  const int64_t heads = a.mask.heads == 1 ? 1 : group_of(a);  // Heads of the mask per task.
  const int64_t columns = round_up(a.mask.columns, kBlockN);  // Columns per row of sums.

  struct Scratch {
    FewQueriesBackward::Scratch rows;
    float* sums;  // (heads, queries, columns)
  };

  int64_t tasks() const { return a.mask.batches * (a.mask.heads / max(heads, 1)); }

  // A mask of one row has a gradient even if there are no queries.
  int64_t sum_count() const { return heads * max(a.seqlen_q, 1) * columns; }

  Scratch take_scratch(Arena* arena) const {
    Scratch s;
    s.rows = kernel.take_scratch(arena);
    arena->take(sum_count(), &s.sums);
    return s;
  }

  void run_task(int64_t index, const Scratch& scratch) const {
    const Mask& m = a.mask;
    const int64_t mask_batch = index * heads / m.heads, mask_head = index * heads % m.heads;
    const int64_t first_batch = m.batches == 1 ? 0 : mask_batch, first_head = m.heads == 1 ? 0 : mask_head / heads;
    clear_row(scratch.sums, sum_count());
    for (int64_t batch = first_batch; batch < (m.batches == 1 ? a.batch : first_batch + 1); ++batch)
      for (int64_t kv_head = first_head; kv_head < (m.heads == 1 ? a.num_kv_heads : first_head + 1); ++kv_head)
        add_rows_of(find_sequence(a, batch), kv_head, scratch);
    with_type(m.dtype, [&](auto type) {
      write(scratch.sums, (decltype(type)*)a.grad_mask + (mask_batch * m.heads + mask_head) * m.rows * m.columns);
    });
  }

  // Add dS of the queries of the heads that share a key/value head, and all keys.
  void add_rows_of(const Sequence& s, int64_t kv_head, const Scratch& scratch) const {
    const QueryRows rows(a, s, kv_head);
    for (int r = 0; r < rows.count; ++r) kernel.pack_query(s, rows.head(r), rows.query(r), r, 0, scratch.rows);
    const int64_t end = s.end(s.seqlen_q - 1);
    for (int64_t key = s.begin(0) / kBlockN * kBlockN; key < end; key += kBlockN) {
      kernel.compute(s, kv_head, rows, key, (int)min(kBlockN, end - key), rows_ahead(key, end), scratch.rows);
      for (int r = 0; r < rows.count; ++r)
        add_row(scratch.rows.grad_score + r * kBlockN, kBlockN,
                scratch.sums + r % (heads * a.seqlen_q) * columns + (a.mask.columns == 1 ? 0 : key));
    }
  }

  static void add_row(const float* row, int64_t count, float* to) {
    for (int64_t j = 0; j < count; j += kLanes) store(to + j, load(to + j) + load(row + j));
  }

  // Write the gradient of the heads. A row that all queries share, or the only column, is the sum of theirs.
  template <class Value>
  void write(float* sums, Value* to) const {
    const Mask& m = a.mask;
    for (int64_t head = 0; head < heads; ++head, sums += a.seqlen_q * columns)
      for (int64_t i = 0; i < m.rows; ++i, to += m.columns) {
        float* row = sums + i * columns;
        for (int64_t query = 1; m.rows == 1 && query < a.seqlen_q; ++query)
          add_row(row + query * columns, columns, row);
        if (m.columns == 1) {
          vf total = {};
          for (int j = 0; j < kBlockN; j += kLanes) total += load(row + j);
          row[0] = sum(total);
        }
        for_each_vector(m.columns, [&](int64_t j, int n) { store(to + j, load(row + j), n); });
      }
  }
};

}  // namespace
}  // namespace fastattn
