// Tile sizes of attention on the CPU, and the allocator of a workspace.
//
// Glossary of csrc/cpu. In attention's kernels:
// - a, s, t: the problem (Attention), a sequence of it (Sequence), a tile (Tile).
// - unit: a float32, or a pair of bfloat16 that are neighbours along a product's depth (product.h).
// - panel: kBlockM consecutive queries of one head, transposed to (head_dim, query); the last one is shorter.
// - block: kBlockN consecutive keys, the first at a multiple of kBlockN.
// - tile: the scores of one panel and one block, stored as (kBlockN, kBlockM), float32. An AMX tile is a register.
//   A dropout tile is 16 rows by 32 columns (dropout_mask.h).
// - chunk: the tiles whose results share one float32 accumulator: at most kChunk keys; in dK and dV at most
//   kChunkPanels panels. The results of chunks are merged in order.
// - split: one of the parts of the keys that have tasks of their own; their results are merged in order (tasks.h).
// - task: the work of one index of parallel_for. It writes its own part of the results, so no two tasks share one.
// - worker: a thread of one parallel_for. It runs one task at a time in its own scratch memory.
// - few queries: so few that they would leave most of a panel empty. Their kernels multiply rows (few_queries.h).
#pragma once
#include "dropout_mask.h"
#include "product.h"

namespace fastattn {
namespace {

// Queries and keys per tile: multiples of 16 and of 32. A kernel may define its own before it includes this file.
#if defined(FASTATTN_BLOCK_M)
constexpr int kBlockM = FASTATTN_BLOCK_M, kBlockN = FASTATTN_BLOCK_N;
#else
constexpr int kBlockM = kPanelVectors * kLanes, kBlockN = 96;
#endif
constexpr int kChunk = 32 * 96;  // Keys per chunk. Blocked summation bounds the rounding error of long rows.
constexpr int kWord = 64;        // Bits per column of a mask tile.
static_assert(kChunk % kBlockN == 0, "a chunk is whole tiles");
static_assert(kBlockM % kLanes == 0 && kBlockM <= kPanelVectors * kLanes, "a panel is what a product takes");
static_assert(kBlockN <= 255, "BlockMask counts keys in bytes");
static_assert(kBlockM % kTileRows == 0 && kBlockM <= kWord && kBlockN % kTileColumns == 0, "dropout's tiles");

constexpr float kInfinity = __builtin_inff(), kLowest = -3.4028234663852886e38f;

// Bump allocator of 64-byte aligned arrays in a workspace. If it starts at 0, it measures the workspace.
struct Arena {
  uintptr_t at;

  // Take arrays of `count` elements each.
  template <class... Element>
  void take(int64_t count, Element**... arrays) {
    const auto take_one = [&](int64_t bytes) {
      const uintptr_t array = at;
      at += (uintptr_t)round_up(bytes, 64);
      return array;
    };
    ((*arrays = (Element*)take_one(count * (int64_t)sizeof(Element))), ...);
  }
};

}  // namespace
}  // namespace fastattn
