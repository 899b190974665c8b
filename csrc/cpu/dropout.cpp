// See dropout.h. A task is 16 rows by kChunk columns: the rows share their Philox calls.
#include "dropout_mask.h"
#include "kernels.h"

namespace fastattn {
namespace {

constexpr int kChunk = 2048;
constexpr int kChunkTiles = kChunk / kTileColumns;
constexpr int64_t kElementsPerWorker = 32768;

// out[0, n) = input scaled where kept, else 0.
template <class T>
FASTATTN_INLINE void drop(const T* input, T* out, int64_t n, const uint32_t* keep, float scale) {
  int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes)
    store(out + j, keep_bits(keep[j / 32] >> j % 32, load(input + j) * scale));
  if (j < n) store(out + j, keep_bits(keep[j / 32] >> j % 32, load(input + j, (int)(n - j)) * scale), (int)(n - j));
}

FASTATTN_INLINE void expand(uint8_t* out, int64_t n, const uint32_t* keep) {
  for (int64_t j = 0; j < n; ++j) out[j] = keep[j / 32] >> j % 32 & 1;
}

template <class Row>
void for_each_row(const Dropout& problem, const Parallel& parallel, const Row& row) {
  const int64_t row_blocks = (problem.rows + kTileRows - 1) / kTileRows;
  const int64_t chunks = (problem.columns + kChunk - 1) / kChunk;
  const int64_t elements = problem.outer * problem.inner * problem.rows * problem.columns;
  const int workers = (int)(elements / kElementsPerWorker < 1024 ? elements / kElementsPerWorker : 1024);
  parallel_for(parallel, workers, problem.outer * problem.inner * row_blocks * chunks, [&](int64_t task, int) {
    const int64_t z = task / (row_blocks * chunks), row_block = task / chunks % row_blocks, chunk = task % chunks;
    const int64_t first_row = row_block * kTileRows, first_column = chunk * kChunk;
    const int rows = (int)(problem.rows - first_row < kTileRows ? problem.rows - first_row : kTileRows);
    const int columns = (int)(problem.columns - first_column < kChunk ? problem.columns - first_column : kChunk);
    uint32_t keep[kTileRows][kChunkTiles];
    for (int tile = 0; tile * kTileColumns < columns; ++tile) {
      uint32_t bits[kTileRows];
      keep_tile(problem.seed, problem.threshold, (uint32_t)z, row_block, chunk * kChunkTiles + tile, rows, bits);
      for (int r = 0; r < rows; ++r) keep[r][tile] = bits[r];
    }
    for (int r = 0; r < rows; ++r)
      row(z / problem.inner, z % problem.inner, first_row + r, first_column, columns, keep[r]);
  });
}

template <class T>
void dropout_rows(const Dropout& p, const Parallel& parallel) {
  const float scale = dropout_scale(p.threshold);
  for_each_row(p, parallel, [&](int64_t o, int64_t i, int64_t row, int64_t column, int n, const uint32_t* keep) {
    drop((const T*)p.input + o * p.input_outer + i * p.input_inner + row * p.input_row + column,
         (T*)p.out + o * p.out_outer + i * p.out_inner + row * p.out_row + column, n, keep, scale);
  });
}

void dropout_any(const Dropout& problem, const Parallel& parallel) {
  switch (problem.dtype) {
    case Dtype::float32: return dropout_rows<float>(problem, parallel);
    case Dtype::bfloat16: return dropout_rows<bfloat16>(problem, parallel);
    case Dtype::float16: return dropout_rows<float16>(problem, parallel);
    case Dtype::boolean: return;
  }
}

void dropout_mask(const Dropout& p, const Parallel& parallel) {
  for_each_row(p, parallel, [&](int64_t o, int64_t i, int64_t row, int64_t column, int n, const uint32_t* keep) {
    expand((uint8_t*)p.out + o * p.out_outer + i * p.out_inner + row * p.out_row + column, n, keep);
  });
}

}  // namespace

extern const DropoutKernels FASTATTN_TABLE(dropout);
const DropoutKernels FASTATTN_TABLE(dropout) = {&dropout_any, &dropout_mask};

}  // namespace fastattn
