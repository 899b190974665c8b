// Packing of operands: rows of units padded with zeros, transposed panels, and interleaved pairs of rows.
#pragma once
#include "product.h"
#include "sequence.h"

namespace fastattn {
namespace {

// Interleave the lanes of a and b: the lower halves into `low`, the upper halves into `high`.
FASTATTN_INLINE void interleave(vf a, vf b, vf* low, vf* high) {
#if defined(__AVX512F__)
  const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  *low = (vf)_mm512_permutex2var_ps((__m512)a, first, (__m512)b);
  *high = (vf)_mm512_permutex2var_ps((__m512)a, second, (__m512)b);
#elif defined(__AVX2__)
  const __m256 even = _mm256_unpacklo_ps((__m256)a, (__m256)b), odd = _mm256_unpackhi_ps((__m256)a, (__m256)b);
  *low = (vf)_mm256_permute2f128_ps(even, odd, 0x20);
  *high = (vf)_mm256_permute2f128_ps(even, odd, 0x31);
#elif defined(__SSE2__)
  *low = (vf)_mm_unpacklo_ps((__m128)a, (__m128)b);
  *high = (vf)_mm_unpackhi_ps((__m128)a, (__m128)b);
#elif defined(__ARM_NEON)
  *low = (vf)vzip1q_f32((float32x4_t)a, (float32x4_t)b);
  *high = (vf)vzip2q_f32((float32x4_t)a, (float32x4_t)b);
#else
  *low = vf{a[0], b[0], a[1], b[1]};
  *high = vf{a[2], b[2], a[3], b[3]};
#endif
}

// Transpose a square of kLanes x kLanes in registers.
FASTATTN_INLINE void transpose(vf (&x)[kLanes]) {
  vf y[kLanes];
#pragma GCC unroll 4
  for (int width = 1; width < kLanes; width *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) interleave(x[i], x[i + kLanes / 2], &y[2 * i], &y[2 * i + 1]);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) x[i] = y[i];
  }
}

// Transpose from (rows, columns) to (columns, rows), in units. Both counts are multiples of kLanes.
template <class Unit>
void transpose(const Unit* from, int64_t from_stride, int rows, int columns, Unit* to, int64_t to_stride) {
  for (int row = 0; row < rows; row += kLanes)
    for (int column = 0; column < columns; column += kLanes) {
      vf x[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) x[i] = load_unit(from + (row + i) * from_stride + column);
      transpose(x);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) memcpy(to + (column + i) * to_stride + row, &x[i], sizeof x[i]);
    }
}

// Copy one row as units, padded with zeros to `width` units, a multiple of kLanes.
template <class T>
FASTATTN_INLINE void pack_row(const T* from, int length, float* to, int64_t width) {
  int i = 0;
  for (; i + kLanes <= length; i += kLanes) store(to + i, load(from + i));
  if (i < length) store(to + i, load(from + i, length - i)), i += kLanes;
  for (; i < width; i += kLanes) store(to + i, vf{});
}

FASTATTN_INLINE void pack_row(const bfloat16* from, int length, Pair* to, int64_t width) {
  memcpy(to, from, (size_t)length * sizeof *from);
  memset((bfloat16*)to + length, 0, (size_t)width * sizeof *to - (size_t)length * sizeof *from);
}

template <class Unit>
FASTATTN_INLINE void clear_row(Unit* to, int64_t width) {
  memset((void*)to, 0, (size_t)width * sizeof *to);
}

// Copy rows as units. Rows that are not visible become 0; a null `visible` means that all are.
template <class T, class Unit>
FASTATTN_INLINE void pack_rows(const T* from, int64_t stride, int rows, int length, Unit* to, int64_t width,
                               const uint8_t* visible) {
  for (int i = 0; i < rows; ++i, from += stride, to += width) {
    if (!visible || visible[i])
      pack_row(from, length, to, width);
    else
      clear_row(to, width);
  }
}

// Pack rows 2 i and 2 i + 1 as row i of pairs. Rows beyond `rows` become 0, and rows that are not visible.
FASTATTN_INLINE void pack_pairs(Rows from, int rows, int length, Pair* to, int64_t width, const uint8_t* visible) {
  for (int row = 0; row < rows; row += 2, to += width) {
    const bool even = !visible || visible[row], odd = row + 1 < rows && (!visible || visible[row + 1]);
    const bfloat16* first = (const bfloat16*)from.data + row * from.stride;
    const bfloat16* second = odd ? first + from.stride : first;
    for (int i = 0; i < (int)width; i += kLanes) {
      const int n = min(kLanes, max(length - i, 0));
      vu low = {}, high = {};
      if (n == kLanes) {
        if (even) low = (vu)load(first + i);
        if (odd) high = (vu)load(second + i);
      } else if (n > 0) {
        if (even) low = (vu)load(first + i, n);
        if (odd) high = (vu)load(second + i, n);
      }
      const vu pair = low >> 16 | high;
      memcpy((void*)(to + i), &pair, sizeof pair);
    }
  }
}

// Pack a block of keys as A of a product over keys: as pairs of rows. For AMX the pairs are also transposed and padded
// with zeros to whole tiles; `buffer` holds them before that.
inline void pack_left(Rows from, int keys, int length, Pair* to, int width, const uint8_t* visible, Pair* buffer) {
  if constexpr (!kUsesAmx<Pair>) return pack_pairs(from, keys, length, to, width, visible);
  const int pairs = units_of<Pair>(keys), depth = depth_of<Pair>(keys);
  pack_pairs(from, keys, length, buffer, width, visible);
  clear_row(buffer + pairs * width, (depth - pairs) * width);
  transpose(buffer, width, depth, width, to, kBlockN / 2);
}

}  // namespace
}  // namespace fastattn
