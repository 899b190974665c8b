// Common parts of the test kernels of attention.
#pragma once
#include "../../common/philox.h"
#include "../../cuda/hopper.h"

namespace fastattn::cuda {
namespace {

constexpr int kStages = 2;
constexpr float kLog2e = 1.4426950408889634f;

// The stage of a ring of buffers, and the parity of the phase in which it is full.
struct Stage {
  int index = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++index == kStages) index = 0, parity ^= 1;
  }
};

// Load rows of matrix z, columns of 64 elements each as rows of 128 bytes.
template <int D>
__device__ __forceinline__ void load_columns(uint32_t to, const CUtensorMap& map, uint32_t full, int rows, int first,
                                             int z) {
#pragma unroll
  for (int c = 0; c < D / 64; ++c) load_tile(to + c * rows * 128, map, full, c * 64, first, z, 0);
}

// Keep a value in a register, where the compiler would compute it again.
__device__ __forceinline__ void keep(uint32_t& x) { asm volatile("" : "+r"(x)); }

// Philox's keys by round.
struct RoundKeys {
  uint32_t key0[kPhiloxRounds], key1[kPhiloxRounds], offset;

  __device__ __forceinline__ explicit RoundKeys(Seed seed) : offset(seed.offset) {
#pragma unroll
    for (int round = 0; round < kPhiloxRounds; ++round) {
      keep(key0[round] = seed.key0 + (uint32_t)round * kPhiloxKey0);
      keep(key1[round] = seed.key1 + (uint32_t)round * kPhiloxKey1);
    }
  }
};

__device__ __forceinline__ void philox(uint32_t (&counter)[4], const RoundKeys& keys) {
#pragma unroll
  for (int round = 0; round < kPhiloxRounds; ++round) philox_round(counter, keys.key0[round], keys.key1[round]);
}

}  // namespace
}  // namespace fastattn::cuda
