// Dropout by formula: Philox4x32 with 7 rounds (Salmon et al., `Parallel Random Numbers: As Easy as 1, 2, 3`, SC 2011).
//
// The element at row i, column j of matrix z belongs to the call with this counter:
//   ((j / 32) * 8 + j % 8,  (i / 16) * 8 + i % 8,  z,  offset).
// The four words of the result hold eight 16-bit values, low half first. The element has value number
// 4 * ((i / 8) % 2) + (j / 8) % 4. It is kept if value >= threshold, and then scaled by 65536 / (65536 - threshold).
#pragma once
#include "arithmetic.h"

namespace fastattn {

struct Seed {
  uint32_t key0, key1, offset;
};

namespace {

constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u, kPhiloxMultiplier1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxKey0 = 0x9E3779B9u, kPhiloxKey1 = 0xBB67AE85u;
constexpr int kPhiloxRounds = 7;
constexpr int kDropoutLevels = 65536;

// Return the seed for the public seed tensor: (2,) int64, key and offset in two's complement.
FASTATTN_HOST_DEVICE inline Seed make_seed(const int64_t* key_offset) {
  const uint64_t key = (uint64_t)key_offset[0];
  return {(uint32_t)key, (uint32_t)(key >> 32), (uint32_t)(uint64_t)key_offset[1]};
}

FASTATTN_HOST_DEVICE inline void philox_round(uint32_t counter[4], uint32_t key0, uint32_t key1) {
  const uint64_t p0 = (uint64_t)kPhiloxMultiplier0 * counter[0], p1 = (uint64_t)kPhiloxMultiplier1 * counter[2];
  counter[0] = (uint32_t)(p1 >> 32) ^ counter[1] ^ key0;
  counter[1] = (uint32_t)p1;
  counter[2] = (uint32_t)(p0 >> 32) ^ counter[3] ^ key1;
  counter[3] = (uint32_t)p0;
}

FASTATTN_HOST_DEVICE inline void philox(uint32_t counter[4], uint32_t key0, uint32_t key1) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    philox_round(counter, key0, key1);
    key0 += kPhiloxKey0;
    key1 += kPhiloxKey1;
  }
}

// Whether one element is kept.
FASTATTN_HOST_DEVICE inline bool philox_keep(Seed seed, uint32_t z, int64_t i, int64_t j, int threshold) {
  uint32_t counter[4] = {(uint32_t)(j / 32 * 8 + j % 8), (uint32_t)(i / 16 * 8 + i % 8), z, seed.offset};
  philox(counter, seed.key0, seed.key1);
  const int value = (int)(4 * (i / 8 % 2) + j / 8 % 4);
  return (int)(counter[value / 2] >> (value % 2 * 16) & 0xffff) >= threshold;
}

FASTATTN_HOST_DEVICE inline float dropout_scale(int threshold) {
  return threshold < kDropoutLevels ? (float)kDropoutLevels / (float)(kDropoutLevels - threshold) : 0.0f;
}

}  // namespace
}  // namespace fastattn
