// Row operations go over a stack of matrices in pairs of rows, i and i + 8, which share the dropout formula's calls.
#pragma once
#include <cuda_runtime.h>
#include <stdint.h>

#include "dropout_mask.h"
#include "vector.h"

namespace fastattn::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = 4;  // in a block whose warps have rows of their own

__host__ __device__ inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Quotient {
  int64_t quotient, remainder;
};

// In 32 bits where that is enough: a tenth of the instructions.
__device__ inline Quotient divide(int64_t a, int64_t b) {
  if ((a | b) >> 32 == 0) return {(uint32_t)a / (uint32_t)b, (uint32_t)a % (uint32_t)b};
  return {a / b, a % b};
}

__host__ __device__ inline int64_t pairs_of(int64_t rows) {
  const int64_t rest = rows % 16;
  return rows / 16 * 8 + (rest < 8 ? rest : 8);
}

// Rows `first` and, where count is 2, first + 8 of a matrix.
struct RowPair {
  int64_t matrix, first;
  int count;

  __device__ RowPair(int64_t index, int64_t rows) {
    const Quotient place = divide(index, pairs_of(rows));
    matrix = place.quotient;
    first = place.remainder / 8 * 16 + place.remainder % 8;
    count = first + 8 < rows ? 2 : 1;
  }
};

}  // namespace
}  // namespace fastattn::cuda
