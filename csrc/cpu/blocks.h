// Tile sizes of attention on the CPU, and the allocator of a workspace.
//
// Glossary of attention's kernels (attention.cpp, attention_backward.cpp, tile.h, mask.h):
// - unit: a float32, or a pair of bfloat16 that are neighbours along a product's depth (product.h).
// - panel: kBlockM consecutive queries of one head, transposed to (head_dim, query); the last one is shorter.
// - block: kBlockN consecutive keys, the first at a multiple of kBlockN. In row operations: 16 rows (rows.h).
// - tile: the scores of one panel and one block, stored as (kBlockN, kBlockM), float32. An AMX tile is a register.
//   A dropout tile is 16 rows by 32 columns (dropout_mask.h).
// - chunk: the tiles whose results share one float32 accumulator: at most kChunk keys; in dK and dV at most
//   kChunkPanels panels. The results of chunks are merged in order.
// - split: one of num_splits parts of the keys, each in tasks of its own; their results are merged in order.
// - range: the number of keys per split, a multiple of kBlockN. In softmax_dropout.cpp: a row's visible columns.
// - slot: the place of a key in a split's packed buffers, that is its index minus the split's first key.
// - task: the work of one index of parallel_for. It writes its own part of the results, so no two tasks share one.
// - worker: a thread of one parallel_for. It runs one task at a time in its own scratch memory.
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
constexpr int kChunk = 32 * 96;     // Keys per chunk. Blocked summation bounds the rounding error of long rows.
constexpr int kTasks = 16;          // Tasks that splitting the keys aims at. Splits depend only on the shape.
constexpr int kSplitKeys = 4 * 96;  // Minimum keys per split.
constexpr int kWord = 64;           // Bits per column of a mask tile.
static_assert(kChunk % kBlockN == 0, "a chunk is whole tiles");
static_assert(kBlockM % kLanes == 0 && kBlockM <= kPanelVectors * kLanes, "a panel is what a product takes");
static_assert(kBlockN <= 255, "BlockMask counts keys in bytes");
static_assert(kBlockM % kTileRows == 0 && kBlockM <= kWord && kBlockN % kTileColumns == 0, "dropout's tiles");

constexpr float kInfinity = __builtin_inff(), kLowest = -3.4028234663852886e38f;

// Bump allocator of 64-byte aligned arrays in a workspace. If it starts at 0, it measures the workspace.
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
