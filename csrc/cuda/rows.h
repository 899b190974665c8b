// Row operations: loops over a stack of matrices in pairs of rows, i and i + 8. The four lanes at a tile of the dropout
// formula compute two of its calls each and exchange the bits. So each call serves all of its eight elements.
//
// A row of up to 512 columns belongs to a warp, one of up to 4096 columns to a block. Both hold the row in registers
// and read it once. A longer row belongs to a block that reads it in pieces: for its statistics and again for the
// result. The dtype of an operand is a switch around the loads of eight neighbouring elements. So kernels are compiled
// for few shapes, and for all dtypes at once.
#pragma once
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>

#include "dropout_mask.h"
#include "vector.h"

namespace fastattn::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = 4;         // Warps per block, if each warp has a row of its own.
constexpr int kMaxThreads = 256;  // Maximum threads per block, if a block has one row.
constexpr int kFragments = 2;     // Vectors of a row that a thread holds.
constexpr int kHeld = kFragments * kVector;

struct Quotient {
  int64_t quotient, remainder;
};

// Divide, in 32 bits if they suffice, which takes a tenth of the instructions.
__device__ inline Quotient divide(int64_t a, int64_t b) {
  if ((a | b) >> 32 == 0) return {(uint32_t)a / (uint32_t)b, (uint32_t)a % (uint32_t)b};
  return {a / b, a % b};
}

__host__ __device__ inline int64_t pairs_of(int64_t rows) {
  const int64_t rest = rows % 16;
  return rows / 16 * 8 + (rest < 8 ? rest : 8);
}

// Row `first` of a matrix and, if count is 2, row first + 8.
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

// The owner of a row: a warp; a block; or a block whose registers cannot hold the row, so that it reads it twice.
enum class Span { warp, block, pieces };

// The shape of a launch for rows of so many columns.
struct Spread {
  Span span;
  int threads;  // threads per block
  int teams;    // teams per block

  explicit Spread(int64_t columns) {
    span = columns <= kWarp * kHeld ? Span::warp : columns <= kMaxThreads * kHeld ? Span::block : Span::pieces;
    threads = span == Span::warp    ? kWarps * kWarp
              : span == Span::block ? (int)ceil_div(columns, kWarp * kHeld) * kWarp
                                    : kMaxThreads;
    teams = span == Span::warp ? kWarps : 1;
  }

  template <class Kernel>
  Kernel pick(Kernel warp, Kernel block, Kernel pieces) const {
    return span == Span::warp ? warp : span == Span::block ? block : pieces;
  }
};

constexpr int max_threads(Span span) { return span == Span::warp ? kWarps * kWarp : kMaxThreads; }

// Minimum blocks per multiprocessor: this leaves 128 registers per thread, so that enough loads are in flight.
constexpr int min_blocks(Span span) { return 512 / max_threads(span); }

struct Sum {
  static constexpr float kNone = 0;
  __device__ float operator()(float a, float b) const { return a + b; }
};

struct Max {
  static constexpr float kNone = -INFINITY;
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

template <class Operation>
__device__ inline float reduce_warp(float x, Operation operation) {
  for (int step = kWarp / 2; step > 0; step /= 2) x = operation(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

// The threads that work together on one row.
template <Span kSpan>
struct Team {
  int64_t index, count;  // This team's index and the number of teams.
  int thread, threads;   // This thread's index in the team and the number of its threads.

  __device__ Team() {
    const bool warp = kSpan == Span::warp;
    index = warp ? (int64_t)blockIdx.x * kWarps + threadIdx.x / kWarp : blockIdx.x;
    count = warp ? (int64_t)gridDim.x * kWarps : gridDim.x;
    thread = warp ? threadIdx.x % kWarp : threadIdx.x;
    threads = warp ? kWarp : blockDim.x;
  }

  __device__ int64_t pieces(int64_t columns) const {
    return kSpan == Span::pieces ? ceil_div(columns, (int64_t)threads * kHeld) : 1;
  }

  // Return the first column of one of this thread's vectors. Neighbouring lanes have neighbouring vectors.
  __device__ int64_t column(int64_t piece, int fragment) const {
    return ((piece * kFragments + fragment) * threads + thread) * kVector;
  }

  // Reduce each x[n] over the team. All threads get the result.
  template <int N, class Operation>
  __device__ void reduce(float (&x)[N], Operation operation) const {
    for (int n = 0; n < N; ++n) x[n] = reduce_warp(x[n], operation);
    if (kSpan == Span::warp || threads == kWarp) return;
    __shared__ float parts[N][kMaxThreads / kWarp];
    const int lane = thread % kWarp;
    __syncthreads();
    if (lane == 0)
      for (int n = 0; n < N; ++n) parts[n][thread / kWarp] = x[n];
    __syncthreads();
    for (int n = 0; n < N; ++n)
      x[n] = reduce_warp(lane < threads / kWarp ? parts[n][lane] : Operation::kNone, operation);
  }

  __device__ float sum(float x) const {
    float value[1] = {x};
    reduce(value, Sum());
    return value[0];
  }

  __device__ float max(float x) const {
    float value[1] = {x};
    reduce(value, Max());
    return value[0];
  }
};

// Draw the bits of keep_pair for this thread's vectors of a piece of a pair of rows. Without dropout do nothing.
template <class Problem, Span kSpan>
__device__ inline void draw(const Problem& p, const Team<kSpan>& team, const RowPair& pair, int64_t piece,
                            uint32_t (&keep)[kFragments]) {
  if (p.threshold == 0) return;
  for (int f = 0; f < kFragments; ++f)
    keep[f] = keep_pair(make_seed(p.seed), p.threshold, pair.matrix, pair.first, team.column(piece, f));
}

// Return how many of the eight elements from `column` on a row has.
__device__ inline int elements_at(int64_t column, int64_t columns) {
  const int64_t left = columns - column;
  return left < 0 ? 0 : left < kVector ? (int)left : kVector;
}

}  // namespace
}  // namespace fastattn::cuda
