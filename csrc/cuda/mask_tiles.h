// The tiles of keys that tiles of queries visit, and the reverse: an interval by the lengths and the window, a list
// under a mask.
//
// The mask is (B, H, rows, Lk), with 1 instead of sizes that it broadcasts. Lists are int32.
// - By queries, (B, H, tiles of queries, 2 + tiles of keys): the number of partial tiles, of all tiles, then the tiles,
//   the partial ones first.
// - By keys, (B, H, tiles of keys, 1 + tiles of queries): the number of tiles, then the tiles, ascending, as
//   2 tile + (1 if partial).
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

enum Cover : uint8_t { kNone = 0, kSome = 1, kAll = 2 };  // kAll: Every pair is visible, and nothing is added.

// The lists and what they are made from. Null pointers without a mask.
struct MaskTiles {
  bool by_keys;
  int* lists;
  uint8_t *cover, *seen;
  int rows, keys;              // of a tile
  int tiles_q, tiles_k;        // tiles of queries and of keys
  int batches, heads, mask_q;  // of `cover` and `seen`: sizes, and tiles of the mask's rows
  int list_batches, seqlen_k;

  // Set the sizes for this problem, and the pointers into a workspace. Return the bytes of the workspace.
  int64_t set(const Attention& a, int tile_rows, int tile_keys, bool are_by_keys, void* workspace) {
    by_keys = are_by_keys, rows = tile_rows, keys = tile_keys;
    tiles_q = (int)ceil_div(a.seqlen_q, rows), tiles_k = (int)ceil_div(a.seqlen_k, keys);
    batches = (int)a.mask.batches, heads = (int)a.mask.heads, mask_q = (int)ceil_div(a.mask.rows, rows);
    list_batches = a.key_lengths ? (int)a.batch : batches, seqlen_k = (int)a.seqlen_k;
    const int64_t entries = (int64_t)list_batches * heads * owners() * pitch(), planes = (int64_t)batches * heads;
    lists = (int*)workspace;
    cover = (uint8_t*)(lists + entries);
    seen = cover + planes * mask_q * tiles_k;
    return 4 * entries + planes * mask_q * (tiles_k + a.seqlen_k);
  }

  // Number of tiles per head that have a list, and entries of each list.
  FASTATTN_HOST_DEVICE int owners() const { return by_keys ? tiles_k : tiles_q; }
  FASTATTN_HOST_DEVICE int pitch() const { return by_keys ? 1 + tiles_q : 2 + tiles_k; }

  __device__ int64_t plane(int batch, int head, int tile_q) const {
    const int b = batches == 1 ? 0 : batch, h = heads == 1 ? 0 : head, q = mask_q == 1 ? 0 : tile_q;
    return ((int64_t)b * heads + h) * mask_q + q;
  }
  __device__ const int* list(int batch, int head, int tile) const {
    const int b = list_batches == 1 ? 0 : batch, h = heads == 1 ? 0 : head;
    return lists + (((int64_t)b * heads + h) * owners() + tile) * pitch();
  }
  // The covers of a tile of queries, by tile of keys.
  __device__ const uint8_t* covers(int batch, int head, int tile_q) const {
    return cover + plane(batch, head, tile_q) * tiles_k;
  }
  // Whether some query of the tile sees a key, by key.
  __device__ const uint8_t* seen_keys(int batch, int head, int tile_q) const {
    return seen + plane(batch, head, tile_q) * seqlen_k;
  }
};

// Start the kernels that make the lists.
void list_mask_tiles(const Attention&, const MaskTiles&, cudaStream_t);

}  // namespace fastattn::cuda
