// The dropout formula (common/philox.h), vectorised: the keep bits of a dropout tile, 16 rows by 32 columns.
#pragma once
#include "../common/philox.h"
#include "simd.h"

namespace fastattn {
namespace {

typedef uint64_t vq __attribute__((vector_size(FASTATTN_VECTOR_BYTES)));  // a call's word in the low half of each lane
constexpr int kPhiloxLanes = FASTATTN_VECTOR_BYTES / 8;
constexpr int kTileRows = 16, kTileColumns = 32;

// Return the 64-bit products of the low 32 bits of the lanes.
FASTATTN_INLINE vq multiply_low(vq a, vq b) {
#if defined(__AVX512F__)
  return (vq)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (vq)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (vq)_mm_mul_epu32((__m128i)a, (__m128i)b);
#elif defined(__ARM_NEON)
  return (vq)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)b));
#else
  return (a & 0xffffffff) * (b & 0xffffffff);
#endif
}

// Apply philox() in every lane. The high halves of the words are arbitrary afterwards.
FASTATTN_INLINE void philox(vq word[4], uint32_t key0, uint32_t key1) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const vq p0 = multiply_low(word[0], kPhiloxMultiplier0 + vq{});
    const vq p1 = multiply_low(word[2], kPhiloxMultiplier1 + vq{});
    word[0] = (p1 >> 32) ^ word[1] ^ (uint64_t)key0;
    word[1] = p1;
    word[2] = (p0 >> 32) ^ word[3] ^ (uint64_t)key1;
    word[3] = p0;
    key0 += kPhiloxKey0;
    key1 += kPhiloxKey1;
  }
}

// Return bits: bit 8 q + lane says that value q of the four 16-bit values in (low, high) is at least the threshold.
#if defined(__AVX512BW__)
FASTATTN_INLINE uint32_t compare_values(const vq* low, const vq* high, int threshold) {
  static const uint16_t order[32] = {0,  4,  8,  12, 16, 20, 24, 28, 1,  5,  9,  13, 17, 21, 25, 29,
                                     32, 36, 40, 44, 48, 52, 56, 60, 33, 37, 41, 45, 49, 53, 57, 61};
  const __m512i value = _mm512_permutex2var_epi16((__m512i)*low, _mm512_loadu_si512(order), (__m512i)*high);
  return _mm512_cmpge_epu16_mask(value, _mm512_set1_epi16((short)threshold));
}
#else
FASTATTN_INLINE uint32_t compare_values(const vq* low, const vq* high, int threshold) {
  typedef uint16_t values __attribute__((vector_size(FASTATTN_VECTOR_BYTES)));
  vq kept = {};
  for (int group = 0; group < 8 / kPhiloxLanes; ++group) {
    vq bit = {};
    for (int lane = 0; lane < kPhiloxLanes; ++lane) bit[lane] = 0x0001000100010001u << (group * kPhiloxLanes + lane);
    const vq value = (low[group] & 0xffffffff) | high[group] << 32;
    kept |= (vq)((values)value >= (uint16_t)threshold) & bit;
  }
  uint64_t bits = 0;
  for (int lane = 0; lane < kPhiloxLanes; ++lane) bits |= kept[lane];
  bits = (bits | bits >> 8) & 0x0000ffff0000ffff;
  return (uint32_t)(bits | bits >> 16);
}
#endif

// Compute keep[r], whose bit c says that row 16 * row_block + r, column 32 * column_block + c of matrix z is kept.
// Only rows r with line_begin <= r % 8 < line_end are written. Rows r and r + 8 share their Philox calls.
FASTATTN_INLINE void keep_tile(Seed seed, int threshold, uint32_t z, int64_t row_block, int64_t column_block,
                               int line_begin, int line_end, uint32_t keep[kTileRows]) {
  if (threshold >= kDropoutLevels) {
    for (int row = 0; row < kTileRows; ++row) keep[row] = 0;
    return;
  }
  constexpr int kGroups = 8 / kPhiloxLanes;
  vq lane_index = {};
  for (int lane = 0; lane < kPhiloxLanes; ++lane) lane_index[lane] = (uint64_t)lane;
  for (int line = line_begin; line < line_end && line < 8; ++line) {
    vq word[4][kGroups];
    for (int group = 0; group < kGroups; ++group) {
      vq counter[4] = {lane_index + (uint64_t)(column_block * 8 + group * kPhiloxLanes),
                       (uint64_t)(row_block * 8 + line) + vq{}, (uint64_t)z + vq{}, (uint64_t)seed.offset + vq{}};
      philox(counter, seed.key0, seed.key1);
      for (int k = 0; k < 4; ++k) word[k][group] = counter[k];
    }
    keep[line] = compare_values(word[0], word[1], threshold);
    keep[line + 8] = compare_values(word[2], word[3], threshold);
  }
}

// Compute the same tile by columns: bit r of keep[c]. Only columns c with c % 8 < column_count are written.
FASTATTN_INLINE void keep_tile_columns(Seed seed, int threshold, uint32_t z, int64_t row_block, int64_t column_block,
                                       int column_count, uint32_t keep[kTileColumns]) {
  if (threshold >= kDropoutLevels) {
    for (int column = 0; column < kTileColumns; ++column) keep[column] = 0;
    return;
  }
  constexpr int kGroups = 8 / kPhiloxLanes;
  vq lane_index = {};
  for (int lane = 0; lane < kPhiloxLanes; ++lane) lane_index[lane] = (uint64_t)lane;
  for (int line = 0; line < column_count && line < 8; ++line) {
    vq word[4][kGroups];
    for (int group = 0; group < kGroups; ++group) {
      vq counter[4] = {(uint64_t)(column_block * 8 + line) + vq{},
                       lane_index + (uint64_t)(row_block * 8 + group * kPhiloxLanes), (uint64_t)z + vq{},
                       (uint64_t)seed.offset + vq{}};
      philox(counter, seed.key0, seed.key1);
      for (int k = 0; k < 4; ++k) word[k][group] = counter[k];
    }
    const uint32_t upper = compare_values(word[0], word[1], threshold),
                   lower = compare_values(word[2], word[3], threshold);
    for (int part = 0; part < 4; ++part)
      keep[8 * part + line] = (upper >> (8 * part) & 0xff) | (lower >> (8 * part) & 0xff) << 8;
  }
}

}  // namespace
}  // namespace fastattn
