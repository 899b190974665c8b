// Dropout and its mask.
//
//   for each task, in parallel: for each piece of 16 rows and up to kChunk columns of one matrix:
//     draw the keep bits of the piece;
//     for each row; for each vector: out = keep ? input * scale : 0, or for the mask: out = keep.
//
// input and out are (outer, inner, rows, columns), in one 16-bit type or float32, with dense columns. The mask is bool,
// one byte per element. A task has as many pieces as make kElementsPerTask elements, at least one.
#include "../common/dropout.h"
#include "kernels.h"
#include "rows.h"

namespace fastattn {
namespace {

constexpr int kChunkTiles = 64;
constexpr int kChunk = kChunkTiles * kTileColumns;

FASTATTN_INLINE void expand(uint8_t* out, int64_t n, const uint32_t* keep) {
  for (int64_t j = 0; j < n; ++j) out[j] = keep[j / 32] >> j % 32 & 1;
}

// Call row(outer, inner, row, column, n, keep) for pieces of n columns of every row, so that threads share long rows.
template <class Row>
void for_each_piece(const Dropout& p, const Parallel& parallel, const Row& row) {
  const int64_t blocks = ceil_div(p.rows, kTileRows), chunks = ceil_div(p.columns, kChunk);
  const int64_t matrices = p.outer * p.inner;
  const Seed seed = make_seed(p.seed);
  const int64_t units = matrices * blocks * chunks;
  const int64_t unit_elements = min(p.rows, kTileRows) * min(p.columns, kChunk);
  const int64_t units_per_task = max(1, kElementsPerTask / max(1, unit_elements));
  parallel_for(parallel, useful_workers(parallel, matrices * p.rows * p.columns), ceil_div(units, units_per_task),
               [&](int64_t task, int) {
                 const int64_t end = min(units, (task + 1) * units_per_task);
                 for (int64_t unit = task * units_per_task; unit < end; ++unit) {
                   const int64_t z = unit / (blocks * chunks), first = unit / chunks % blocks * kTileRows;
                   const int64_t column = unit % chunks * kChunk;
                   const RowBlock block = {z, first, (int)min(kTileRows, p.rows - first), 0, 8};
                   const int n = (int)min(kChunk, p.columns - column);
                   uint32_t keep[kTileRows][kChunkTiles];
                   keep_block(seed, p.threshold, block, column / kTileColumns, ceil_div(column + n, kTileColumns),
                              keep[0], kChunkTiles);
                   for (int r = 0; r < block.rows; ++r) row(z / p.inner, z % p.inner, first + r, column, n, keep[r]);
                 }
                 finish_stream();
               });
}

template <class T>
void dropout_of(const Dropout& p, const Parallel& parallel) {
  const float scale = dropout_scale(p.threshold);
  const int64_t elements = p.outer * p.inner * p.rows * p.columns;
  for_each_piece(p, parallel, [&](int64_t o, int64_t i, int64_t row, int64_t column, int n, const uint32_t* keep) {
    const T* input = (const T*)p.input + o * p.input_outer + i * p.input_inner + row * p.input_row + column;
    const OutputRow<T> out(p.out, o * p.out_outer + i * p.out_inner + row * p.out_row + column, elements);
    for_each_vector(n, [&](int64_t j, int lanes) {
      out.put(j, keep_bits(keep[j / 32] >> j % 32, load_ahead(input + j, lanes) * scale), lanes);
    });
  });
}

void dropout_mask(const Dropout& p, const Parallel& parallel) {
  for_each_piece(p, parallel, [&](int64_t o, int64_t i, int64_t row, int64_t column, int n, const uint32_t* keep) {
    expand((uint8_t*)p.out + o * p.out_outer + i * p.out_inner + row * p.out_row + column, n, keep);
  });
}

int64_t workspace(const Dropout&, const Parallel&) { return 0; }

void run(const Dropout& p, const Parallel& parallel, char*) {
  if (!p.input) return dropout_mask(p, parallel);
  with_type(p.dtype, [&](auto type) { dropout_of<decltype(type)>(p, parallel); });
}

}  // namespace

FASTATTN_EXPORT(Kernel<Dropout>, dropout) = {&workspace, &run};

}  // namespace fastattn
