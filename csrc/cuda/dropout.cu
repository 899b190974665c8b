// Dropout and its mask.
//
//   drop_rows, for each warp: a pair of rows i and i + 8 of one matrix, and kColumns = 256 columns:
//     each lane loads 8 columns of both rows; the lanes of a dropout tile draw the keep bits together (keep_pair);
//     each lane stores keep ? input * scale : 0, or for the mask keep.
//
// input and out are (outer, inner, rows, columns), in one 16-bit type or float32, with dense columns. The mask is bool,
// one byte per element.
#include "../common/dropout.h"

#include "kernels.h"
#include "launch.h"
#include "rows.h"

namespace fastattn::cuda {
namespace {

constexpr int kColumns = kWarp * kVector;

__device__ void store_bits(uint8_t* row, bool wide, int64_t column, int64_t columns, uint32_t keep) {
  uint8_t values[kVector];
  for (int e = 0; e < kVector; ++e) values[e] = keep >> e & 1;
  if (wide) {
    uint2 words;
    memcpy(&words, values, sizeof words);
    if (column < columns) *(uint2*)(row + column) = words;
  } else {
    for (int e = 0; e < kVector; ++e)
      if (column + e < columns) row[column + e] = values[e];
  }
}

// Drop or draw the mask: a warp takes kColumns columns of a pair of rows.
__global__ void __launch_bounds__(kWarps* kWarp) drop_rows(const Dropout p, bool wide) {
  const int64_t chunks = ceil_div(p.columns, kColumns), pairs = p.outer * p.inner * pairs_of(p.rows);
  const int64_t unit = (int64_t)blockIdx.x * kWarps + threadIdx.x / kWarp;
  if (unit >= pairs * chunks) return;
  const Quotient place = divide(unit, chunks);
  const RowPair pair(place.quotient, p.rows);
  const Quotient matrix = divide(pair.matrix, p.inner);
  const int64_t column = place.remainder * kColumns + threadIdx.x % kWarp * kVector;
  const auto offset = [&](int64_t outer, int64_t inner, int64_t row, int half) {
    return matrix.quotient * outer + matrix.remainder * inner + (pair.first + 8 * half) * row;
  };
  float x[2][kVector];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (p.input && half < pair.count)
      load(p.input, p.dtype, offset(p.input_outer, p.input_inner, p.input_row, half), wide, column, p.columns, x[half]);
  const uint32_t keep = keep_pair(make_seed(p.seed), p.threshold, pair.matrix, pair.first, column);
  const float scale = dropout_scale(p.threshold);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half >= pair.count) break;
    const int64_t to = offset(p.out_outer, p.out_inner, p.out_row, half);
    if (p.input) {
      drop(x[half], keep >> (half * kVector), scale);
      store(p.out, p.dtype, to, wide, column, p.columns, x[half]);
    } else {
      store_bits((uint8_t*)p.out + to, wide, column, p.columns, keep >> (half * kVector));
    }
  }
}

}  // namespace

template <>
void run(const Dropout& p, cudaStream_t stream) {
  const bool wide = is_wide(p.out, p.dtype, p.columns, p.out_outer, p.out_inner, p.out_row) &&
                    (!p.input || is_wide(p.input, p.dtype, p.columns, p.input_outer, p.input_inner, p.input_row));
  const int64_t warps = p.outer * p.inner * pairs_of(p.rows) * ceil_div(p.columns, kColumns);
  launch(drop_rows, ceil_div(warps, kWarps), kWarps * kWarp, stream, p, wide);
}

}  // namespace fastattn::cuda
