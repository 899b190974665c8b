// Row operations: loops over a stack of matrices in blocks of 16 rows, the height of the dropout formula's tile.
#pragma once
#include "../common/parallel.h"
#include "dropout_mask.h"

namespace fastattn {
namespace {

constexpr int64_t kElementsPerWorker = 16384;  // with fewer, a second thread costs more than it saves
constexpr int64_t kElementsPerTask = 8192;
constexpr int64_t kStreamedBytes = 8 << 20;
constexpr uintptr_t kPrefetchDistance = 4096;

inline int useful_workers(const Parallel& parallel, int64_t elements) {
  return (int)max(1, min(parallel.threads, elements / kElementsPerWorker));
}

// Prefetch one page ahead of p, where later rows are. The hardware prefetcher stops at each page, so memory would idle
// while a row's other passes hit the caches. An address beyond the operand does no harm.
FASTATTN_INLINE void prefetch_ahead(const void* p) {
  __builtin_prefetch((const void*)((uintptr_t)p + kPrefetchDistance));
}

// Load n elements as load() does, and prefetch. It serves the first pass over an operand.
template <class T>
FASTATTN_INLINE vf load_ahead(const T* p, int n) {
  prefetch_ahead(p);
  return load(p, n);
}

// Call body(begin, end) for parts of [0, columns). Callers sum each part in float32 and the parts in float64. This
// blocked summation bounds the rounding error of a long row.
template <class Body>
FASTATTN_INLINE void for_each_part(int64_t columns, const Body& body) {
  constexpr int64_t kPart = 512;
  for (int64_t begin = 0; begin < columns; begin += kPart) body(begin, min(columns, begin + kPart));
}

// A row of an output. It is written with non-temporal stores if the output would evict everything else from the caches.
template <class T>
struct OutputRow {
  T* data;
  bool streamed;

  FASTATTN_INLINE OutputRow(void* first, int64_t offset, int64_t elements_in_all)
      : data((T*)first + offset),
        streamed(elements_in_all * (int64_t)sizeof(T) >= kStreamedBytes &&
                 (uintptr_t)data % FASTATTN_VECTOR_BYTES == 0) {}

  FASTATTN_INLINE void put(int64_t j, vf x, int n) const {
    if (n == kLanes && streamed)
      stream(data + j, x);
    else
      store(data + j, x, n);
  }
};

// Rows first .. first + rows - 1 of matrix z, or a part of them: the lines [line_begin, line_end). Line l is rows
// first + l and first + l + 8, which share their Philox calls.
struct RowBlock {
  int64_t z, first;
  int rows;
  int line_begin, line_end;

  bool has(int row) const { return row < rows && row % 8 >= line_begin && row % 8 < line_end; }
};

// Call body(block, worker) so that every row of every matrix is in exactly one block or part of a block.
template <class Body>
void for_each_block(int64_t matrices, int64_t rows, int64_t columns, const Parallel& parallel, const Body& body) {
  const int64_t blocks = ceil_div(rows, kTileRows);
  const int64_t block_elements = min(rows, kTileRows) * columns;
  // If rows are narrow, a task has several blocks. If they are wide, a block is divided among 2, 4 or 8 tasks.
  int64_t splits = 1;
  while (splits < 8 && block_elements / splits > kElementsPerTask) splits *= 2;
  const int64_t lines = 8 / splits, units = matrices * blocks * splits;
  const int64_t units_per_task = max(1, kElementsPerTask / max(1, block_elements));
  parallel_for(parallel, useful_workers(parallel, matrices * rows * columns), ceil_div(units, units_per_task),
               [&](int64_t task, int worker) {
                 const int64_t end = min(units, (task + 1) * units_per_task);
                 for (int64_t unit = task * units_per_task; unit < end; ++unit) {
                   const int64_t block = unit / splits;
                   RowBlock part;
                   part.z = block / blocks;
                   part.first = block % blocks * kTileRows;
                   part.rows = (int)min(kTileRows, rows - part.first);
                   part.line_begin = (int)(unit % splits * lines);
                   part.line_end = part.line_begin + (int)lines;
                   if (part.line_begin < part.rows) body(part, worker);
                 }
                 finish_stream();
               });
}

// Compute keep[row * stride + tile - tile_begin], the keep bits of the block's rows for tiles [tile_begin, tile_end).
// It is not inlined, because the callers are templates: each combination of dtypes would compile Philox again.
__attribute__((noinline)) void keep_block(Seed seed, int threshold, const RowBlock& block, int64_t tile_begin,
                                          int64_t tile_end, uint32_t* keep, int64_t stride) {
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    uint32_t bits[kTileRows];
    keep_tile(seed, threshold, (uint32_t)block.z, block.first / kTileRows, tile, block.line_begin,
              (int)min(block.line_end, block.rows), bits);
    for (int row = 0; row < block.rows; ++row)
      if (block.has(row)) keep[row * stride + tile - tile_begin] = bits[row];
  }
}

}  // namespace
}  // namespace fastattn
