// The lists of tiles of keys that a mask leaves.
//
//   cover_tiles, for each warp: a tile of the mask, `rows` queries x `keys` keys: reads it; writes its cover and `seen`
//   list_tiles, for each thread: a tile of queries of a head: for each tile of keys: appends it to the list
//
// cover (B, H, tiles of rows, tiles of keys) and seen (B, H, tiles of rows, Lk) have a byte per element, and 1 instead
// of sizes that the mask broadcasts.
#include "mask_tiles.h"

#include "attention_mask.h"
#include "launch.h"
#include "rows.h"

namespace fastattn::cuda {
namespace {

enum Cover : uint8_t { kNone = 0, kSome = 1, kAll = 2 };  // kAll: Every pair is visible, and nothing is added.

__global__ void __launch_bounds__(kWarp* kWarps) cover_tiles(const Mask mask, const MaskTiles t, int64_t count) {
  const int64_t index = (int64_t)blockIdx.x * kWarps + threadIdx.x / kWarp;
  if (index >= count) return;
  const int lane = (int)threadIdx.x % kWarp, tile_k = (int)(index % t.tiles_k);
  const int64_t own = index / t.tiles_k, plane = own / t.mask_q;
  const int first = (int)(own % t.mask_q) * t.rows, last = (int)min(first + t.rows, mask.rows);
  const int end = min((tile_k + 1) * t.keys, t.seqlen_k);
  bool is_some = false, is_full = true;
  for (int j = tile_k * t.keys + lane; j < end; j += kWarp) {
    bool is_seen = false;
    const int64_t column = mask_offset(mask, plane / t.heads, plane % t.heads, 0, j);
    for (int i = first; i < last; ++i) {
      const float value = mask_value(mask, column + i * mask.row);
      is_seen |= value != -kInfinity;
      is_full &= value == 0;
    }
    t.seen[own * t.seqlen_k + j] = is_seen;
    is_some |= is_seen;
  }
  const unsigned some = __reduce_or_sync(kAllLanes, is_some), rest = __reduce_or_sync(kAllLanes, !is_full);
  if (lane == 0) t.cover[index] = some ? (rest ? kSome : kAll) : kNone;
}

__global__ void __launch_bounds__(kWarp* kWarps) list_tiles(const Attention a, const MaskTiles t, int64_t count) {
  const int64_t index = (int64_t)blockIdx.x * (kWarp * kWarps) + threadIdx.x;
  if (index >= count) return;
  const int tile_q = (int)(index % t.tiles_q), head = (int)(index / t.tiles_q % t.heads);
  const int batch = (int)(index / t.tiles_q / t.heads);
  const Visibility<int> visibility(a.key_lengths ? a.key_lengths[batch] : a.seqlen_k, a.seqlen_q, a.lower_right,
                                   a.window_left, a.window_right);
  const int first = tile_q * t.rows, last = (int)min(first + t.rows, a.seqlen_q) - 1;
  const Interval seen(visibility, first, last, t.keys);
  const uint8_t* cover = t.cover + t.plane(batch, head, tile_q) * t.tiles_k;
  int* list = t.lists + index * (2 + t.tiles_k);
  int found = 0;
  for (const bool wants_full : {false, true}) {
    for (int tile = seen.begin; tile < seen.end; ++tile) {
      const bool is_full = cover[tile] == kAll && seen.full_begin <= tile && tile < seen.full_end;
      if (cover[tile] != kNone && is_full == wants_full) list[2 + found++] = tile;
    }
    list[wants_full] = found;
  }
}

}  // namespace

void list_mask_tiles(const Attention& a, const MaskTiles& t, cudaStream_t stream) {
  const int64_t covers = (int64_t)t.batches * t.heads * t.mask_q * t.tiles_k;
  const int64_t lists = (int64_t)t.list_batches * t.heads * t.tiles_q;
  launch(cover_tiles, ceil_div(covers, kWarps), kWarp * kWarps, stream, a.mask, t, covers);
  launch(list_tiles, ceil_div(lists, kWarp * kWarps), kWarp * kWarps, stream, a, t, lists);
}

}  // namespace fastattn::cuda
