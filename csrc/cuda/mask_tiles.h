// The tiles of keys that tiles of queries visit: an interval by the lengths and the window, a list under a mask.
//
// The mask is (B, H, rows, Lk), with 1 instead of sizes that it broadcasts. Lists are (B, H, tiles of queries, 2 +
// tiles of keys), int32: the number of partial tiles, of all tiles, then the tiles, the partial ones first.
#pragma once
#include <cuda_runtime.h>

#include "../common/attention.h"

namespace fastattn::cuda {
namespace {

// The interval of tiles of keys that a tile of queries sees through the lengths and the window, [begin, end). All pairs
// of the tiles [full_begin, full_end) are visible.
struct Interval {
  int begin, full_begin, full_end, end;

  // For the queries `first` to `last`.
  __device__ __forceinline__ Interval(const Visibility<int>& v, int first, int last, int keys) {
    const auto first_key = [&](int i) { return max(i + v.diagonal - v.window_left, 0); };
    const auto end_key = [&](int i) { return max(min(i + v.diagonal + v.window_right + 1, v.length), 0); };
    begin = min(first_key(first), v.length) / keys;
    end = max(begin, (end_key(last) + keys - 1) / keys);
    full_begin = min(max((first_key(last) + keys - 1) / keys, begin), end);
    full_end = min(max(end_key(first) / keys, full_begin), end);
  }
};

}  // namespace

// The lists and what they are made from. Null pointers without a mask.
struct MaskTiles {
  int* lists;
  uint8_t *cover, *seen;
  int rows, keys;              // of a tile
  int tiles_q, tiles_k;        // tiles of queries, which own the lists, and of keys
  int batches, heads, mask_q;  // of `cover` and `seen`: sizes, and tiles of the mask's rows
  int list_batches, seqlen_k;

  // Set the sizes for this problem, and the pointers into a workspace. Return the bytes of the workspace.
  int64_t set(const Attention& a, int tile_rows, int tile_keys, void* workspace) {
    rows = tile_rows, keys = tile_keys;
    tiles_q = (int)ceil_div(a.seqlen_q, rows), tiles_k = (int)ceil_div(a.seqlen_k, keys);
    batches = (int)a.mask.batches, heads = (int)a.mask.heads, mask_q = (int)ceil_div(a.mask.rows, rows);
    list_batches = a.key_lengths ? (int)a.batch : batches, seqlen_k = (int)a.seqlen_k;
    const int64_t entries = (int64_t)list_batches * heads * tiles_q * (2 + tiles_k), planes = (int64_t)batches * heads;
    lists = (int*)workspace;
    cover = (uint8_t*)(lists + entries);
    seen = cover + planes * mask_q * tiles_k;
    return 4 * entries + planes * mask_q * (tiles_k + a.seqlen_k);
  }

  __device__ int64_t plane(int batch, int head, int tile_q) const {
    const int b = batches == 1 ? 0 : batch, h = heads == 1 ? 0 : head, q = mask_q == 1 ? 0 : tile_q;
    return ((int64_t)b * heads + h) * mask_q + q;
  }
  __device__ const int* list(int batch, int head, int tile_q) const {
    const int b = list_batches == 1 ? 0 : batch, h = heads == 1 ? 0 : head;
    return lists + (((int64_t)b * heads + h) * tiles_q + tile_q) * (2 + tiles_k);
  }
  // Whether some query of the tile sees a key, by key.
  __device__ const uint8_t* seen_keys(int batch, int head, int tile_q) const {
    return seen + plane(batch, head, tile_q) * seqlen_k;
  }
};

// Start the kernels that make the lists.
void list_mask_tiles(const Attention&, const MaskTiles&, cudaStream_t);

}  // namespace fastattn::cuda
