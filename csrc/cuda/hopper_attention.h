// Parts that Hopper's kernels of attention share: rings of buffers, loads of tiles, and dropout's random words.
#pragma once
#include "../common/philox.h"
#include "hopper.h"

namespace fastattn::cuda {
namespace {

constexpr float kLog2e = 1.4426950408889634f;

// The stage of a ring of buffers, and the parity of the phase in which it is full.
template <int kStages>
struct Stage {
  int index = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++index == kStages) index = 0, parity ^= 1;
  }
};

// Load rows of head z of batch w. Every kColumns columns form rows of their own in shared memory, 2 kColumns bytes
// wide.
template <int D, int kColumns = 64>
__device__ __forceinline__ void load_columns(uint32_t to, const CUtensorMap& map, uint32_t full, int rows, int first,
                                             int z, int w = 0) {
#pragma unroll
  for (int c = 0; c < D / kColumns; ++c) load_tile(to + c * rows * 2 * kColumns, map, full, c * kColumns, first, z, w);
}

// Keep a value in a register, where the compiler would compute it again.
__device__ __forceinline__ void keep(uint32_t& x) { asm volatile("" : "+r"(x)); }

// Philox's keys by round.
struct RoundKeys {
  uint32_t key0[kPhiloxRounds], key1[kPhiloxRounds], offset;

  __device__ __forceinline__ void set(Seed seed) {
    offset = seed.offset;
#pragma unroll
    for (int round = 0; round < kPhiloxRounds; ++round) {
      keep(key0[round] = seed.key0 + (uint32_t)round * kPhiloxKey0);
      keep(key1[round] = seed.key1 + (uint32_t)round * kPhiloxKey1);
    }
  }

  // Replace a counter by its random words.
  __device__ __forceinline__ void draw(uint32_t (&counter)[4]) const {
#pragma unroll
    for (int round = 0; round < kPhiloxRounds; ++round) philox_round(counter, key0[round], key1[round]);
  }
};

}  // namespace
}  // namespace fastattn::cuda
