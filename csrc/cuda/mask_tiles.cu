// The lists of tiles that a mask leaves.
//
//   cover_tiles, for each warp: a tile of the mask, `rows` queries x `keys` keys: reads it; writes its cover and `seen`
//   list_tiles, for each thread: a tile of queries of a head: for each tile of keys: appends it to the list
//   list_query_tiles, for each thread: a tile of keys of a head: for each tile of queries: appends it to the list
//
// cover (B, H, tiles of rows, tiles of keys) and seen (B, H, tiles of rows, Lk) have a byte per element, and 1 instead
// of sizes that the mask broadcasts.
#include "mask_tiles.h"

#include "attention_mask.h"
#include "launch.h"
#include "rows.h"

namespace fastattn::cuda {
namespace {

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

// The place in a head's tiles of a thread that makes a list, and who sees whom there.
struct Owner {
  int tile, head, batch;
  Visibility<int> visibility;

  __device__ __forceinline__ Owner(const Attention& a, const MaskTiles& t, int64_t index)
      : tile((int)(index % t.owners())),
        head((int)(index / t.owners() % t.heads)),
        batch((int)(index / t.owners() / t.heads)),
        visibility(a.key_lengths ? a.key_lengths[batch] : a.seqlen_k, a.seqlen_q, a.lower_right, a.window_left,
                   a.window_right) {}

  // The tiles of keys that a tile of queries sees.
  __device__ __forceinline__ Interval seen_by(const Attention& a, const MaskTiles& t, int tile_q) const {
    return Interval(visibility, tile_q * t.rows, (int)min((tile_q + 1) * t.rows, a.seqlen_q) - 1, t.keys);
  }
};

__global__ void __launch_bounds__(kWarp* kWarps) list_tiles(const Attention a, const MaskTiles t, int64_t count) {
  const int64_t index = (int64_t)blockIdx.x * (kWarp * kWarps) + threadIdx.x;
  if (index >= count) return;
  const Owner own(a, t, index);
  const Interval seen = own.seen_by(a, t, own.tile);
  const uint8_t* cover = t.covers(own.batch, own.head, own.tile);
  int* list = t.lists + index * t.pitch();
  int found = 0;
  for (const bool wants_full : {false, true}) {
    for (int tile = seen.begin; tile < seen.end; ++tile) {
      const bool is_full = cover[tile] == kAll && seen.full_begin <= tile && tile < seen.full_end;
      if (cover[tile] != kNone && is_full == wants_full) list[2 + found++] = tile;
    }
    list[wants_full] = found;
  }
}

__global__ void __launch_bounds__(kWarp* kWarps) list_query_tiles(const Attention a, const MaskTiles t, int64_t count) {
  const int64_t index = (int64_t)blockIdx.x * (kWarp * kWarps) + threadIdx.x;
  if (index >= count) return;
  const Owner own(a, t, index);
  int* list = t.lists + index * t.pitch();
  int found = 0;
  for (int tile = 0; tile < t.tiles_q; ++tile) {
    const Interval seen = own.seen_by(a, t, tile);
    const uint8_t cover = t.covers(own.batch, own.head, tile)[own.tile];
    if (own.tile < seen.begin || own.tile >= seen.end || cover == kNone) continue;
    const bool is_full =
        cover == kAll && seen.full_begin <= own.tile && own.tile < seen.full_end && (tile + 1) * t.rows <= a.seqlen_q;
    list[1 + found++] = 2 * tile + !is_full;
  }
  list[0] = found;
}

}  // namespace

void list_mask_tiles(const Attention& a, const MaskTiles& t, cudaStream_t stream) {
  const int64_t covers = (int64_t)t.batches * t.heads * t.mask_q * t.tiles_k;
  const int64_t lists = (int64_t)t.list_batches * t.heads * t.owners();
  launch(cover_tiles, ceil_div(covers, kWarps), kWarp * kWarps, stream, a.mask, t, covers);
  launch(t.by_keys ? list_query_tiles : list_tiles, ceil_div(lists, kWarp * kWarps), kWarp * kWarps, stream, a, t,
         lists);
}

}  // namespace fastattn::cuda
