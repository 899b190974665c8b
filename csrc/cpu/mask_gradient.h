// The gradient of a float mask of attention: dS, summed over the dimensions in which the mask is broadcast.
//
//   for each task, in parallel: a panel of kBlockM rows of the mask, or its row if it has only one:
//     for each sequence, query head and panel of queries that the task's panel is broadcast to, ascending: pack Q, dO;
//       for each block of kBlockN keys, ascending: pack K and V; dS as in tile_gradients.h;
//         sums (columns, query) += dS, in one row if the mask has only one column;
//     write the panel's part of the gradient.
//
// The gradient is (batches, heads, rows, columns) of the mask, each 1 where the mask is broadcast, in the mask's dtype.
#pragma once
#include "tile_gradients.h"

namespace fastattn {
namespace {

template <class T>
struct MaskGradient {
  using Unit = typename UnitOf<T>::Unit;

  const AttentionBackward& a;
  const BlockMask& mask;
  const TileGradients<T> tiles = {a, mask};

  struct Scratch {
    typename TileGradients<T>::Scratch tile;
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

}  // namespace
}  // namespace fastattn
