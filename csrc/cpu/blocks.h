// Tile sizes of attention, and the workspace.
#pragma once
#include "dropout_mask.h"
#include "product.h"

namespace fastattn {
namespace {

// Queries and keys of a tile, multiples of 16 and 32. A kernel may name its own before it includes this.
#if defined(FASTATTN_BLOCK_M)
constexpr int kBlockM = FASTATTN_BLOCK_M, kBlockN = FASTATTN_BLOCK_N;
#else
constexpr int kBlockM = kPanelVectors * kLanes, kBlockN = 96;
#endif
constexpr int kChunk = 32 * 96;     // keys: blocked summation bounds the rounding error of longer rows
constexpr int kTasks = 16;          // to make by splits of the keys, whose number depends on the shape alone
constexpr int kSplitKeys = 4 * 96;  // at least, of a split where queries alone make too few tasks
constexpr int kWord = 64;           // bits of a column of a mask tile
static_assert(kChunk % kBlockN == 0, "a chunk is whole tiles");
static_assert(kBlockM % kLanes == 0 && kBlockM <= kPanelVectors * kLanes, "a panel is what a product takes");
static_assert(kBlockN <= 255, "BlockMask counts keys in bytes");
static_assert(kBlockM % kTileRows == 0 && kBlockM <= kWord && kBlockN % kTileColumns == 0, "dropout's tiles");

constexpr float kInfinity = __builtin_inff(), kLowest = -3.4028234663852886e38f;

// Bump allocator of 64-byte aligned arrays in a workspace; started at 0, it measures one.
struct Arena {
  uintptr_t at;

  template <class A>
  A* take(int64_t count) {
    const uintptr_t array = at;
    at += (uintptr_t)round_up(count * (int64_t)sizeof(A), 64);
    return (A*)array;
  }
};

}  // namespace
}  // namespace fastattn
