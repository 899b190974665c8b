// The dropout formula (common/philox.h) for warps, which use every value of a Philox call.
#pragma once
#include <cuda_runtime.h>

#include "../common/philox.h"
#include "vector.h"

namespace fastattn::cuda {
namespace {

// Return the keep bits of the eight elements from `column` in matrix z. Bits 0 to 7 are of row i, bits 8 to 15 of row
// i + 8; i / 8 is even. All lanes of a warp call this together, each with 8 columns of its own. Lane l has quarter
// l % 4 of a tile of 32 columns. Each of the four lanes of a tile computes two of its eight calls and shuffles the
// bits.
__device__ inline uint32_t keep_pair(Seed seed, int threshold, int64_t z, int64_t i, int64_t column) {
  const int quarter = (int)(column / kVector % 4);
  uint32_t mine = 0;  // bits 2 v and 2 v + 1 are for value v of the two calls
  for (int call = 0; call < 2; ++call) {
    uint32_t word[4] = {(uint32_t)(column / 32 * 8 + 2 * quarter + call), (uint32_t)(i / 16 * 8 + i % 8), (uint32_t)z,
                        seed.offset};
    philox(word, seed.key0, seed.key1);
    for (int v = 0; v < 8; ++v) {
      const int value = (int)(word[v / 2] >> (v % 2 * 16) & 0xffff);
      mine |= (uint32_t)(value >= threshold) << (2 * v + call);
    }
  }
  uint32_t keep = 0;
  for (int step = 0; step < 4; ++step) {
    const uint32_t bits = __shfl_xor_sync(kAllLanes, mine, step);
    const int calls = 2 * (quarter ^ step);  // the first of the two calls that these bits come from
    keep |= (bits >> (2 * quarter) & 3) << calls | (bits >> (2 * (quarter + 4)) & 3) << (calls + kVector);
  }
  return keep;
}

// Scale kept elements and set the others to 0, in place. The lowest bits of `keep` are for these elements.
__device__ inline void drop(float (&x)[kVector], uint32_t keep, float scale) {
  for (int e = 0; e < kVector; ++e) x[e] = keep >> e & 1 ? x[e] * scale : 0.0f;
}

}  // namespace
}  // namespace fastattn::cuda
