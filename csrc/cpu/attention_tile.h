// What the attention kernels are made of: panels of queries, tiles of scores, products, packing and masks.
//
// Queries are lanes. A panel holds up to kPanel queries transposed, (depth, query), so that every product has a panel
// or a tile as its second factor, read as vectors, and broadcasts elements of its first factor, read where it lies:
//
//   scores        S(key, query)    = K(key, depth) Q'(depth, query)         rows of K
//   output        O(depth, query) += V'(depth, key) P(key, query)           columns of V
//   grad of value dV(key, depth)  += P(key, query) dO(query, depth)         rows of P
//
// Softmax then works on whole vectors with one query in each lane. The unit of a product is a float32, or, with
// bfloat16 instructions, a pair of bfloat16 that are neighbours in the dimension summed over. Matrix instructions have
// their first factor by rows alone, so that what is read by columns otherwise is packed transposed, and sum over whole
// vectors of units, so that both factors end with zeros.
#pragma once
#include "amx.h"
#include "attention.h"
#include "dropout_mask.h"
#include "simd.h"

namespace fastattn {
namespace {

#if defined(__AVX512F__)
constexpr int kPanelVectors = 4, kMicroRows = 6;
#elif defined(__AVX2__)
constexpr int kPanelVectors = 2, kMicroRows = 6;
#elif defined(__aarch64__)
constexpr int kPanelVectors = 4, kMicroRows = 6;
#else
constexpr int kPanelVectors = 4, kMicroRows = 3;
#endif
constexpr int kPanel = kPanelVectors * kLanes;  // queries: a multiple of 16, as dropout's tiles are
constexpr int kBlock = 96;                      // keys: a multiple of 32 likewise
constexpr int kStretch = 32 * kBlock;           // keys: sums over more are made of sums over so many
constexpr int kTasks = 16;                      // so many keep the threads busy; their number is the shape's alone
constexpr int kSplitKeys = 4 * kBlock;          // worth a task of their own where the queries make few
constexpr int kWord = 64;                       // bits in a column of a mask tile
static_assert(kPanel % kTileRows == 0 && kPanel <= kWord && kBlock % kTileColumns == 0, "dropout's tiles");

constexpr float kInfinity = __builtin_inff(), kLowest = -3.4028234663852886e38f;

template <class A>
FASTATTN_INLINE A smaller(A a, A b) {
  return a < b ? a : b;
}

template <class A>
FASTATTN_INLINE A greater(A a, A b) {
  return a > b ? a : b;
}

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

// Hands out 64-byte aligned pieces of a workspace, or, started at 0, measures it.
struct Arena {
  uintptr_t at;

  template <class A>
  A* take(int64_t count) {
    const uintptr_t piece = at;
    at += (uintptr_t)round_up(count * (int64_t)sizeof(A), 64);
    return (A*)piece;
  }
};

// ---- units ----

struct Pair {
  bfloat16 even, odd;
};

FASTATTN_INLINE void store_unit(Pair* p, vf x) { memcpy((void*)p, &x, sizeof x); }

// What elements of type T are computed in, and whether they are units where they lie.
template <class T>
struct UnitOf {
  typedef float Unit;
  static constexpr bool in_memory = false;
};

template <>
struct UnitOf<float> {
  typedef float Unit;
  static constexpr bool in_memory = true;
};

#if defined(__AVX512BF16__)
template <>
struct UnitOf<bfloat16> {
  typedef Pair Unit;
  static constexpr bool in_memory = true;
};
#endif

// Whether products of these units are made by matrix instructions.
template <class Unit>
constexpr bool kTiles = false;
#if defined(__AMX_BF16__)
template <>
constexpr bool kTiles<Pair> = true;
#endif

// Elements in a unit.
template <class Unit>
constexpr int kElements = 1;
template <>
constexpr int kElements<Pair> = 2;

// How many units hold so many elements.
template <class Unit>
constexpr int units_of(int elements) {
  return (int)divide_up(elements, kElements<Unit>);
}

// How many units a product sums over for so many elements.
template <class Unit>
constexpr int terms_of(int elements) {
  return kTiles<Unit> ? (int)round_up(units_of<Unit>(elements), kLanes) : units_of<Unit>(elements);
}

FASTATTN_INLINE vf broadcast(const char* p, float) {
  float x;
  memcpy(&x, p, sizeof x);
  return splat(x);
}

FASTATTN_INLINE vf broadcast(const char* p, Pair) {
  uint32_t x;
  memcpy(&x, p, sizeof x);
  return (vf)splat_bits(x);
}

FASTATTN_INLINE vf multiply_add(vf a, vf b, vf c, float) { return fma(a, b, c); }

#if defined(__AVX512BF16__)
FASTATTN_INLINE vf multiply_add(vf a, vf b, vf c, Pair) {
  return (vf)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
}

// Each lane: a pair of both lanes, rounded.
FASTATTN_INLINE vf make_pairs(vf even, vf odd, Pair) {
  static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  return (vf)_mm512_permutexvar_epi16(_mm512_loadu_si512(order), both);
}
#endif

FASTATTN_INLINE vf load_unit(const float* p) { return load(p); }

FASTATTN_INLINE vf load_unit(const Pair* p) {
  vf x;
  memcpy(&x, p, sizeof x);
  return x;
}

// ---- products ----

// What the product is added to: 0, factor * C, C. It is summed from 0 all the same: the rounding of a sum over all keys
// then grows with the square roots of a tile and of the number of tiles, not of their product.
enum class Start { zero, factor, keep };

template <Start start>
FASTATTN_INLINE void add_sum(vf sum, int n, float* c, const float* factor, float scale) {
  c += n * kLanes;
  if constexpr (start == Start::zero) store(c, sum * scale);
  if constexpr (start == Start::factor) store(c, fma(load(c), load(factor + n * kLanes), sum));
  if constexpr (start == Start::keep) store(c, load(c) + sum);
}

// M x N vectors of C. The first factor's element (m, k) is at a + m * stride + 4 k, or at a + k * stride + 4 m.
template <class Unit, int M, int N, bool columns, Start start>
FASTATTN_INLINE void micro_product(int depth, const char* a, int64_t stride, const Unit* b, int64_t b_stride, float* c,
                                   int64_t c_stride, const float* factor, float scale) {
  vf sum[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sum[m][n] = vf{};
  const char* row[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) row[m] = a + (columns ? m * 4 : m * stride);
  const int64_t step = columns ? stride : 4;
  for (int k = 0; k < depth; ++k) {
    vf right[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) right[n] = load_unit(b + n * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const vf left = broadcast(columns ? row[0] + m * 4 : row[m] + (int64_t)k * 4, Unit{});
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sum[m][n] = multiply_add(left, right[n], sum[m][n], Unit{});
    }
    if constexpr (columns) row[0] += step;
    b += b_stride;
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) add_sum<start>(sum[m][n], n, c + m * c_stride, factor, scale);
}

// M x N tiles of C, which have `rows` rows in all: 16 M, or fewer where M = 1 and the registers have as many.
template <int M, int N, Start start>
FASTATTN_INLINE void tile_product(int rows, int depth, const char* a, int64_t stride, const Pair* b, int64_t b_stride,
                                  float* c, int64_t c_stride, const float* factor, float scale) {
  constexpr int64_t kPairBytes = sizeof(Pair), kRowBytes = N * kLanes * sizeof(float);
  alignas(64) float sum[M * kLanes][N * kLanes];
  clear_tile<0>();
  if constexpr (N > 1) clear_tile<1>();
  if constexpr (M > 1) clear_tile<2>();
  if constexpr (M > 1 && N > 1) clear_tile<3>();
  for (int k = 0; k < depth; k += kLanes) {
    load_tile<4>(a + k * kPairBytes, stride);
    load_tile<6>(b + k * b_stride, b_stride * kPairBytes);
    multiply_tiles<0, 4, 6>();
    if constexpr (N > 1) {
      load_tile<7>(b + k * b_stride + kLanes, b_stride * kPairBytes);
      multiply_tiles<1, 4, 7>();
    }
    if constexpr (M > 1) {
      load_tile<5>(a + kLanes * stride + k * kPairBytes, stride);
      multiply_tiles<2, 5, 6>();
    }
    if constexpr (M > 1 && N > 1) multiply_tiles<3, 5, 7>();
  }
  store_tile<0>(sum[0], kRowBytes);
  if constexpr (N > 1) store_tile<1>(sum[0] + kLanes, kRowBytes);
  if constexpr (M > 1) store_tile<2>(sum[kLanes], kRowBytes);
  if constexpr (M > 1 && N > 1) store_tile<3>(sum[kLanes] + kLanes, kRowBytes);
  for (int m = 0; m < rows; ++m, c += c_stride)
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) add_sum<start>(load(sum[m] + n * kLanes), n, c, factor, scale);
}

// M rows of tiles, of all columns: what is read of the first factor stays in cache.
template <int M, Start start>
FASTATTN_INLINE void tile_row_product(int vectors, int rows, int depth, const char* a, int64_t stride, const Pair* b,
                                      int64_t b_stride, float* c, int64_t c_stride, const float* factor, float scale) {
  constexpr int kTwo = 2 * kLanes;
  for (; vectors >= 2; vectors -= 2, b += kTwo, c += kTwo) {
    tile_product<M, 2, start>(rows, depth, a, stride, b, b_stride, c, c_stride, factor, scale);
    if constexpr (start == Start::factor) factor += kTwo;
  }
  if (vectors > 0) tile_product<M, 1, start>(rows, depth, a, stride, b, b_stride, c, c_stride, factor, scale);
}

template <Start start>
__attribute__((noinline)) void product_tiles(int vectors, int rows, int depth, const char* a, int64_t stride,
                                             const Pair* b, int64_t b_stride, float* c, int64_t c_stride,
                                             const float* factor, float scale) {
  constexpr int kTwo = 2 * kLanes;
  for (; rows >= kTwo; rows -= kTwo, a += kTwo * stride, c += kTwo * c_stride)
    tile_row_product<2, start>(vectors, kTwo, depth, a, stride, b, b_stride, c, c_stride, factor, scale);
  for (; rows > 0; rows -= kLanes, a += kLanes * stride, c += kLanes * c_stride) {
    const int count = smaller(rows, kLanes);
    if (count < kLanes) shape_tiles(count);  // rows beyond the last are not read: there may be no memory
    tile_row_product<1, start>(vectors, count, depth, a, stride, b, b_stride, c, c_stride, factor, scale);
    if (count < kLanes) shape_tiles(kLanes);
  }
}

template <class Unit, int N, bool columns, Start start>
__attribute__((noinline)) void product_vectors(int rows, int depth, const char* a, int64_t stride, const Unit* b,
                                               int64_t b_stride, float* c, int64_t c_stride, const float* factor,
                                               float scale) {
  const int64_t step = columns ? 4 : stride;
  const auto advance = [&](int count) {
    a += count * step;
    c += count * c_stride;
    rows -= count;
  };
  for (; rows >= kMicroRows; advance(kMicroRows))
    micro_product<Unit, kMicroRows, N, columns, start>(depth, a, stride, b, b_stride, c, c_stride, factor, scale);
  if (kMicroRows > 4 && rows >= 4) {
    micro_product<Unit, 4, N, columns, start>(depth, a, stride, b, b_stride, c, c_stride, factor, scale);
    advance(4);
  }
  if (rows >= 2) {
    micro_product<Unit, 2, N, columns, start>(depth, a, stride, b, b_stride, c, c_stride, factor, scale);
    advance(2);
  }
  if (rows >= 1) micro_product<Unit, 1, N, columns, start>(depth, a, stride, b, b_stride, c, c_stride, factor, scale);
}

template <class Unit, bool columns, Start start>
FASTATTN_INLINE void product(int vectors, int rows, int depth, const char* a, int64_t stride, const Unit* b,
                             int64_t b_stride, float* c, int64_t c_stride, const float* factor, float scale) {
  if constexpr (kTiles<Unit>) {
    static_assert(!columns, "a first factor is read by rows");
    product_tiles<start>(vectors, rows, depth, a, stride, b, b_stride, c, c_stride, factor, scale);
  } else {
    switch (vectors) {
      case 1:
        return product_vectors<Unit, 1, columns, start>(rows, depth, a, stride, b, b_stride, c, c_stride, factor,
                                                        scale);
      case 2:
        return product_vectors<Unit, 2, columns, start>(rows, depth, a, stride, b, b_stride, c, c_stride, factor,
                                                        scale);
      case 3:
        if constexpr (kPanelVectors > 2)
          return product_vectors<Unit, 3, columns, start>(rows, depth, a, stride, b, b_stride, c, c_stride, factor,
                                                          scale);
        return;
      case 4:
        if constexpr (kPanelVectors > 2)
          return product_vectors<Unit, 4, columns, start>(rows, depth, a, stride, b, b_stride, c, c_stride, factor,
                                                          scale);
        return;
    }
  }
}

// ---- packing ----

// Half of the lanes of each, alternating.
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

// As many vectors as there are lanes in each.
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

// to (columns, rows) = from (rows, columns), in 4-byte elements; both counts are multiples of kLanes.
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

// One row as units, zero from `length` to the stride of the target, which is a multiple of kLanes units.
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

// Heads of a matrix as a product reads them: with a stride in bytes.
struct Matrix {
  const char* data;
  int64_t stride;
};

// Rows 2 i and 2 i + 1 as row i of pairs. Rows beyond `rows`, and those not `seen` (null: all are), count as zero.
FASTATTN_INLINE void pack_pairs(const bfloat16* from, int64_t stride, int rows, int length, Pair* to, int64_t width,
                                const uint8_t* seen) {
  for (int row = 0; row < rows; row += 2, to += width) {
    const bool even = !seen || seen[row], odd = row + 1 < rows && (!seen || seen[row + 1]);
    const bfloat16 *first = from + row * stride, *second = odd ? first + stride : first;
    for (int i = 0; i < (int)width; i += kLanes) {
      const int n = smaller(kLanes, greater(length - i, 0));
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

// The same of a block of keys as a product over them reads its first factor: transposed, for matrix instructions, and
// with zeros to the end of its last vector of pairs. `buffer` has room for the block.
inline void pack_left(const bfloat16* from, int64_t stride, int keys, int length, Pair* to, int width,
                      const uint8_t* seen, Pair* buffer) {
  if constexpr (!kTiles<Pair>) return pack_pairs(from, stride, keys, length, to, width, seen);
  const int pairs = units_of<Pair>(keys), terms = terms_of<Pair>(keys);
  pack_pairs(from, stride, keys, length, buffer, width, seen);
  clear_row(buffer + pairs * width, (terms - pairs) * width);
  transpose(buffer, width, terms, width, to, kBlock / 2);
}

// ---- few queries: elements of a row in the lanes, nothing packed ----

constexpr int kFewQueries = kLanes < 16 ? 6 : 8;  // so many leave most of a panel empty
constexpr int kSharing = kLanes < 16 ? 2 : 4;     // rows that share, in registers, what is read of keys and values

// A cache is read once, faster than the processor's own prefetching follows: rows are fetched a block ahead.
template <class T>
FASTATTN_INLINE void fetch_row(const T* row, int length) {
  for (int64_t byte = 0; byte < length * (int64_t)sizeof(T); byte += 64)
    __builtin_prefetch((const char*)row + byte, 0, 2);
}

// How many of the keys from `first` have one a block ahead of them.
FASTATTN_INLINE int rows_ahead(int64_t first, int64_t end) {
  return (int)smaller(greater(end - first - kBlock, (int64_t)0), (int64_t)kBlock);
}

// n elements of R rows and C others: x[r * C + j] += row_r other_j.
template <int R, int C, class T>
FASTATTN_INLINE void add_products(const float* row, int64_t width, const T* const* other, int d, int n, vf* x) {
  vf left[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) left[r] = load(row + r * width + d);
#pragma GCC unroll 16
  for (int j = 0; j < C; ++j) {
    const vf right = n == kLanes ? load(other[j] + d) : load(other[j] + d, n);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) x[r * C + j] = fma(right, left[r], x[r * C + j]);
  }
}

// Lane r * C + j: row_r . from_j, where j = count - 1 stands for all j beyond it.
template <int R, int C, class T>
FASTATTN_INLINE vf products_of_rows(const float* row, int64_t width, const T* from, int64_t stride, int count,
                                    int length) {
  vf x[kLanes];
  const T* other[C];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) x[i] = vf{};
#pragma GCC unroll 16
  for (int j = 0; j < C; ++j) other[j] = from + smaller(j, count - 1) * stride;
  int d = 0;
  for (; d + kLanes <= length; d += kLanes) add_products<R, C>(row, width, other, d, kLanes, x);
  if (d < length) add_products<R, C>(row, width, other, d, length - d, x);
  // Halves the number of vectors and doubles that of the sums in each, in their order at the end.
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2)
#pragma GCC unroll 8
    for (int j = 0; j < half; ++j) {
      vf low, high;
      interleave(x[j], x[j + half], &low, &high);
      x[j] = low + high;
    }
  return x[0];
}

// product (rows, kBlock): scale row_r . from_j for `count` others, then anything up to the end of a vector. `row`
// (rows, width) has whole vectors, padded with 0. `ahead` of the others have one a block ahead, which is fetched.
template <int R = kSharing, class T>
void row_products(int rows, const float* row, int64_t width, const T* from, int64_t stride, int count, int length,
                  float scale, int ahead, float* product) {
  constexpr int C = kLanes / R;
  for (; rows >= R; rows -= R, row += R * width, product += R * kBlock, ahead = 0)
    for (int first = 0; first < count; first += C) {
      const int rest = count - first;
      const T* others = from + first * stride;
      for (int j = 0; j < smaller(ahead - first, C); ++j) fetch_row(others + (j + kBlock) * stride, length);
      if constexpr (R == 1) {
        const vf x = rest > C / 2 ? products_of_rows<1, C>(row, width, others, stride, rest, length)
                     : rest > 1   ? products_of_rows<1, C / 2>(row, width, others, stride, rest, length)
                                  : products_of_rows<1, 1>(row, width, others, stride, rest, length);
        store(product + first, x * scale);
      } else {
        float x[kLanes];
        store(x, products_of_rows<R, C>(row, width, others, stride, rest, length) * scale);
#pragma GCC unroll 4
        for (int i = 0; i < R; ++i) memcpy(product + i * kBlock + first, x + i * C, C * sizeof(float));
      }
    }
  if constexpr (R > 1) row_products<R / 2>(rows, row, width, from, stride, count, length, scale, ahead, product);
}

FASTATTN_INLINE bool has_zero(const float* x, int n) {
  vf zeros = {};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) zeros = select(load(x + i) == vf{}, splat(1.0f), zeros);
  for (; i < n; ++i) zeros[0] = x[i] == 0 ? 1 : zeros[0];
  return max(zeros) != 0;
}

// R rows and so many vectors of them: sum_r = factor_r sum_r + sum_j weight_rj from_j.
template <int R, int vectors, class T>
FASTATTN_INLINE void add_row_vectors(const float* weight, const T* from, int64_t stride, int count, int length,
                                     const float* factor, int ahead, float* sum, int64_t width) {
  constexpr int kSums = R * vectors < 8 ? 2 : 1;  // each its own, so that additions need not wait for each other
  const int last = length - (vectors - 1) * kLanes;
  vf x[kSums][R][vectors];
#pragma GCC unroll 2
  for (int i = 0; i < kSums; ++i)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int n = 0; n < vectors; ++n) x[i][r][n] = vf{};
  const auto add = [&](int j, int i) {
    if (j < ahead) fetch_row(from + (j + kBlock) * stride, length);
    if (R == 1 && weight[j] == 0) return;
    const T* other = from + j * stride;
    vf right[vectors];
#pragma GCC unroll 4
    for (int n = 0; n < vectors; ++n)
      right[n] = n + 1 < vectors || last >= kLanes ? load(other + n * kLanes) : load(other + n * kLanes, last);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int n = 0; n < vectors; ++n) x[i][r][n] = fma(right[n], splat(weight[r * kBlock + j]), x[i][r][n]);
  };
  int j = 0;
  for (; j + kSums <= count; j += kSums)
#pragma GCC unroll 2
    for (int i = 0; i < kSums; ++i) add(j + i, i);
  if (j < count) add(j, 0);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < vectors; ++n) {
      float* to = sum + r * width + n * kLanes;
      const vf total = kSums > 1 ? x[0][r][n] + x[kSums - 1][r][n] : x[0][r][n];
      store(to, factor ? fma(load(to), splat(factor[r]), total) : load(to) + total);
    }
}

// sum_r = factor_r sum_r + sum_j weight_rj from_j, for weight (rows, kBlock), factors of 1 where null, and sum (rows,
// width) of whole vectors; what has a weight of 0 adds nothing, whatever it is. `ahead` as above.
template <int R = kSharing, class T>
void add_rows(int rows, const float* weight, const T* from, int64_t stride, int count, int length, const float* factor,
              int ahead, float* sum, int64_t width) {
  for (; rows >= R; rows -= R, weight += R * kBlock, factor += factor ? R : 0, sum += R * width, ahead = 0) {
    bool hidden = false;
    for (int r = 0; R > 1 && r < R; ++r) hidden |= has_zero(weight + r * kBlock, count);
    if (hidden) {
      add_rows<1>(R, weight, from, stride, count, length, factor, ahead, sum, width);
      continue;
    }
    for (int d = 0; d < length; d += 4 * kLanes) {
      const int rest = smaller(length - d, 4 * kLanes);
      const T* part = from + d;
      switch ((rest + kLanes - 1) / kLanes) {
        case 1: add_row_vectors<R, 1>(weight, part, stride, count, rest, factor, ahead, sum + d, width); break;
        case 2: add_row_vectors<R, 2>(weight, part, stride, count, rest, factor, ahead, sum + d, width); break;
        case 3: add_row_vectors<R, 3>(weight, part, stride, count, rest, factor, ahead, sum + d, width); break;
        default: add_row_vectors<R, 4>(weight, part, stride, count, rest, factor, ahead, sum + d, width);
      }
    }
  }
  if constexpr (R > 1) add_rows<R / 2>(rows, weight, from, stride, count, length, factor, ahead, sum, width);
}

// ---- which keys which queries see ----

struct Sequence {
  int64_t index, first_query, first_key, queries, keys, diagonal;
  int64_t rows;  // in memory: keys, and those beyond the sequence's length
};

FASTATTN_INLINE Sequence find_sequence(const Attention& a, int64_t index) {
  Sequence s = {index, 0, 0, a.queries, a.keys, 0, a.keys};
  if (a.query_start) {
    s.first_query = a.query_start[index];
    s.queries = a.query_start[index + 1] - s.first_query;
    s.first_key = a.key_start[index];
    s.keys = a.key_start[index + 1] - s.first_key;
  }
  s.rows = s.keys;
  if (a.key_lengths) s.keys = smaller(s.keys, a.key_lengths[index]);
  if (a.lower_right) s.diagonal = s.keys - s.queries;
  return s;
}

template <class T>
FASTATTN_INLINE T* row_pointer(const Heads& heads, int64_t batch, int64_t head, int64_t row) {
  return (T*)heads.data + batch * heads.batch + head * heads.head + row * heads.row;
}

FASTATTN_INLINE int64_t row_offset(const Attention& a, const Sequence& s, int64_t head, int64_t query) {
  return s.index * a.row_batch + head * a.row_head + (s.first_query + query) * a.row_query;
}

// The keys [begin, end) that query i sees but for the mask.
FASTATTN_INLINE int64_t begin_of_keys(const Attention& a, const Sequence& s, int64_t i) {
  if (a.window_left < 0) return 0;
  return smaller(greater(i + s.diagonal - a.window_left, (int64_t)0), s.keys);
}

FASTATTN_INLINE int64_t end_of_keys(const Attention& a, const Sequence& s, int64_t i) {
  if (a.window_right < 0) return s.keys;
  return smaller(greater(i + s.diagonal + a.window_right + 1, (int64_t)0), s.keys);
}

// Whether some key may lie beyond the windows of all queries. Packed sequences are lower-right.
FASTATTN_INLINE bool window_hides_keys(const Attention& a) {
  return a.window_left >= 0 || (a.window_right >= 0 && !a.lower_right && a.keys > a.queries + a.window_right);
}

enum class Cover : uint8_t { nothing, some, all };

// What the mask hides, found by reading it once: whole tiles, and keys that no query of the head sees.
struct MaskSummary {
  int64_t panels, blocks, keys;
  Cover* cover;     // (mask.batches * mask.heads, panels, blocks)
  uint8_t* seen;    // (mask.batches * mask.heads, keys): some query sees the key
  uint8_t* unseen;  // (mask.batches * mask.heads, blocks): some key of the block is seen by no query

  MaskSummary(const Attention& a, Arena* arena) {
    const bool none = a.mask.data == nullptr;
    const int64_t masks = none ? 0 : a.mask.batches * a.mask.heads;
    panels = none || a.mask.rows == 1 ? 1 : divide_up(a.queries, kPanel);
    keys = a.keys;
    blocks = divide_up(keys, kBlock);
    cover = arena->take<Cover>(masks * panels * blocks);
    seen = arena->take<uint8_t>(masks * keys);
    unseen = arena->take<uint8_t>(masks * blocks);
  }

  static int64_t index(const AttentionMask& m, int64_t batch, int64_t head) {
    return (m.batches == 1 ? 0 : batch) * m.heads + (m.heads == 1 ? 0 : head);
  }

  Cover tile(const AttentionMask& m, int64_t batch, int64_t head, int64_t query, int64_t key) const {
    return cover[(index(m, batch, head) * panels + (panels == 1 ? 0 : query / kPanel)) * blocks + key / kBlock];
  }

  // Which keys of a block some query of the heads sees as far as the window goes, and as far as the mask: 1 or 0 each,
  // in `buffer`; null where all are.
  const uint8_t* seen_keys(const Attention& a, const Sequence& s, int64_t first_head, int64_t end_head, int64_t key,
                           int count, uint8_t* buffer) const {
    const int64_t begin = begin_of_keys(a, s, 0) - key, end = end_of_keys(a, s, s.queries - 1) - key;
    bool all = begin <= 0 && count <= end;
    if (a.mask.data) {
      bool some_unseen = true;
      for (int64_t head = first_head; head < end_head; ++head)
        some_unseen &= unseen[index(a.mask, s.index, head) * blocks + key / kBlock];
      all &= !some_unseen;
    }
    if (all) return nullptr;
    for (int j = 0; j < count; ++j) {
      buffer[j] = a.mask.data == nullptr;
      for (int64_t head = first_head; a.mask.data && head < end_head; ++head)
        buffer[j] |= seen[index(a.mask, s.index, head) * keys + key + j];
      if (j < begin || j >= end) buffer[j] = 0;
    }
    return buffer;
  }

  void read(const Attention& a, const Parallel& parallel, int workers) const;
};

template <class F>
FASTATTN_INLINE void with_mask_type(Dtype dtype, const F& f) {
  if (dtype == Dtype::float32) return f(float{});
  if (dtype == Dtype::bfloat16) return f(bfloat16{});
  f(float16{});
}

FASTATTN_INLINE int64_t mask_offset(const AttentionMask& m, int64_t batch, int64_t head, int64_t row, int64_t column) {
  return batch * m.batch + head * m.head + row * m.row + column * m.column;
}

// n values of a row of a mask of floats.
FASTATTN_INLINE void load_mask_row(const AttentionMask& m, int64_t offset, int n, float* to) {
  with_mask_type(m.dtype, [&](auto type) {
    const decltype(type)* from = (const decltype(type)*)m.data + offset;
    if (m.column != 1) {
      for (int i = 0; i < n; ++i) to[i] = load_scalar(from + i * m.column);
      return;
    }
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i));
    if (i < n) store(to + i, load(from + i, n - i), n - i);
  });
}

// The same row as bytes, 1 where the key may be seen; `buffer` has room for kBlock.
FASTATTN_INLINE const uint8_t* visible_row(const AttentionMask& m, int64_t offset, int n, uint8_t* buffer) {
  if (m.dtype == Dtype::boolean) {
    const uint8_t* from = (const uint8_t*)m.data + offset;
    if (m.column == 1) return from;
    for (int i = 0; i < n; ++i) buffer[i] = from[i * m.column];
    return buffer;
  }
  float value[kBlock];
  load_mask_row(m, offset, n, value);
  for (int i = 0; i < n; ++i) buffer[i] = value[i] != -kInfinity;
  return buffer;
}

void MaskSummary::read(const Attention& a, const Parallel& parallel, int workers) const {
  const AttentionMask& m = a.mask;
  if (!m.data) return;
  parallel_for(parallel, workers, m.batches * m.heads, [&](int64_t index, int) {
    memset(seen + index * keys, 0, (size_t)keys);
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t key = block * kBlock;
      const int n = (int)smaller((int64_t)kBlock, keys - key);
      uint8_t* columns = seen + index * keys + key;
      for (int64_t panel = 0; panel < panels; ++panel) {
        uint8_t any = 0, all = 1;
        const int64_t end = smaller(m.rows, (panel + 1) * kPanel);
        for (int64_t row = panel * kPanel; row < end; ++row) {
          uint8_t buffer[kBlock];
          const uint8_t* visible =
              visible_row(m, mask_offset(m, index / m.heads, index % m.heads, row, key), n, buffer);
          for (int i = 0; i < n; ++i) {
            any |= visible[i];
            all &= visible[i];
            columns[i] |= visible[i];
          }
        }
        cover[(index * panels + panel) * blocks + block] = any == 0   ? Cover::nothing
                                                           : all == 0 ? Cover::some
                                                                      : Cover::all;
      }
      unseen[index * blocks + block] = memchr(columns, 0, (size_t)n) != nullptr;
    }
  });
}

// ---- tiles ----

// The keys [key, key + keys) and the queries [query, query + queries) of a sequence.
struct Tile {
  int64_t query, key;
  int queries, keys, vectors;
  Cover window, mask;  // how much of it each lets be seen

  Tile(const Attention& a, const Sequence& s, const MaskSummary& summary, int64_t head, int64_t first_query,
       int64_t first_key)
      : query(first_query), key(first_key) {
    queries = (int)smaller((int64_t)kPanel, s.queries - query);
    vectors = (queries + kLanes - 1) / kLanes;
    const int64_t last = query + queries - 1, end = key + kBlock;
    keys = (int)greater(smaller(end, end_of_keys(a, s, last)) - key, (int64_t)0);
    window = mask = Cover::nothing;
    if (keys <= 0 || end <= begin_of_keys(a, s, query)) return;
    const bool whole = begin_of_keys(a, s, last) <= key && key + keys <= end_of_keys(a, s, query);
    window = whole ? Cover::all : Cover::some;
    mask = a.mask.data ? summary.tile(a.mask, s.index, head, query, key) : Cover::all;
  }

  bool empty() const { return window == Cover::nothing || mask == Cover::nothing; }

  // Nothing is to be done to the scores.
  bool whole(const Attention& a) const {
    return window == Cover::all && mask == Cover::all && (!a.mask.data || a.mask.dtype == Dtype::boolean);
  }
};

// Bit i of word k becomes bit k of word i.
FASTATTN_INLINE void transpose_bits(uint64_t word[kWord]) {
  uint64_t low = 0xffffffffu;
  for (int width = kWord / 2; width > 0; width /= 2, low ^= low << width)
    for (int base = 0; base < kWord; base += 2 * width)
      for (int k = base; k < base + width; ++k) {
        const uint64_t swap = (word[k] >> width ^ word[k + width]) & low;
        word[k] ^= swap << width;
        word[k + width] ^= swap;
      }
}

FASTATTN_INLINE uint64_t pack_bits(const uint8_t* byte, int n) {
  uint64_t bits = 0;
  int i = 0;
  for (; i + 8 <= n; i += 8) {
    uint64_t eight;
    memcpy(&eight, byte + i, 8);
    bits |= (eight * 0x0102040810204080u >> 56) << i;
  }
  for (; i < n; ++i) bits |= (uint64_t)byte[i] << i;
  return bits;
}

// Buffers of one worker for masks and dropout of a tile.
struct MaskBuffers {
  uint64_t* seen;         // (kBlock): bit i of word j: query i of the panel sees key j
  uint64_t* kept;         // (kBlock): dropout keeps it
  uint8_t* visible;       // (kBlock): some query sees key j
  uint8_t* present;       // (kPanel): query i sees some key
  float *rows, *columns;  // (kPanel, kBlock) and (kBlock, kPanel): a mask of floats, and transposed

  MaskBuffers() = default;

  MaskBuffers(const Attention& a, Arena* arena) {
    const bool floats = a.mask.data && a.mask.dtype != Dtype::boolean && a.mask.rows > 1;
    seen = arena->take<uint64_t>(kBlock);
    kept = arena->take<uint64_t>(kBlock);
    visible = arena->take<uint8_t>(kBlock);
    present = arena->take<uint8_t>(kPanel);
    rows = arena->take<float>(floats ? kPanel * kBlock : 0);
    columns = arena->take<float>(floats ? kPanel * kBlock : kBlock);
  }
};

// Adds a mask of floats to the scores, and writes -inf where a query does not see the key.
inline void mask_scores(const Attention& a, const Sequence& s, int64_t head, const Tile& t, const MaskBuffers& buffers,
                        float* score) {
  uint64_t* seen = buffers.seen;
  // Lanes beyond the queries see nothing: what a mask adds to them is arbitrary.
  const uint64_t present = ~(uint64_t)0 >> (kWord - t.queries);
  for (int j = 0; j < t.keys; ++j) {
    seen[j] = present;
    if (t.window == Cover::all) continue;
    const int64_t offset = t.key + j - s.diagonal - t.query;  // query i is offset - i keys away from the diagonal
    const int64_t first = a.window_right < 0 ? 0 : greater(offset - a.window_right, (int64_t)0);
    const int64_t last = a.window_left < 0 ? kWord - 1 : smaller(offset + a.window_left, (int64_t)kWord - 1);
    seen[j] = first > last ? 0 : present & ~(uint64_t)0 >> (kWord - 1 - last) & ~(uint64_t)0 << first;
  }
  const AttentionMask& m = a.mask;
  const bool masked = m.data && (t.mask == Cover::some || m.dtype != Dtype::boolean);
  const bool floats = masked && m.dtype != Dtype::boolean;
  if (masked && m.rows == 1) {
    const int64_t offset = mask_offset(m, s.index, head, 0, t.key);
    uint8_t buffer[kBlock];
    const uint8_t* visible = visible_row(m, offset, t.keys, buffer);
    for (int j = 0; j < t.keys; ++j)
      if (!visible[j]) seen[j] = 0;
    if (floats) load_mask_row(m, offset, t.keys, buffers.columns);
  } else if (floats) {
    for (int i = 0; i < t.queries; ++i)
      load_mask_row(m, mask_offset(m, s.index, head, t.query + i, t.key), t.keys, buffers.rows + i * kBlock);
    transpose(buffers.rows, kBlock, t.vectors * kLanes, (int)round_up(t.keys, kLanes), buffers.columns, kPanel);
  } else if (masked) {
    for (int part = 0; part < t.keys; part += kWord) {
      const int n = smaller(kWord, t.keys - part);
      uint64_t word[kWord];
      for (int i = 0; i < kWord; ++i) {
        word[i] = 0;
        if (i >= t.queries) continue;
        uint8_t buffer[kBlock];
        word[i] = pack_bits(visible_row(m, mask_offset(m, s.index, head, t.query + i, t.key + part), n, buffer), n);
      }
      transpose_bits(word);
      for (int j = 0; j < n; ++j) seen[part + j] &= word[j];
    }
  }
  for (int j = 0; j < t.keys; ++j)
    for (int v = 0; v < t.vectors; ++v) {
      float* at = score + j * kPanel + v * kLanes;
      vf x = load(at);
      uint32_t bits = (uint32_t)(seen[j] >> (v * kLanes)) & first_lanes(kLanes);
      if (floats) {
        const vf value = m.rows == 1 ? splat(buffers.columns[j]) : load(buffers.columns + j * kPanel + v * kLanes);
        x = select(value == splat(-kInfinity), value, max(splat(kLowest), x + value));
      }
      store(at, select_bits(bits, x, splat(-kInfinity)));
    }
}

// The same for one query and the keys [key, key + keys).
inline void mask_row(const Attention& a, const Sequence& s, int64_t head, int64_t query, int64_t key, int keys,
                     float* score) {
  const AttentionMask& m = a.mask;
  const int64_t offset = mask_offset(m, s.index, head, query, key);
  if (m.data && m.dtype == Dtype::boolean) {
    uint8_t buffer[kBlock];
    const uint8_t* visible = visible_row(m, offset, keys, buffer);
    for (int j = 0; j < keys; ++j) score[j] = visible[j] ? score[j] : -kInfinity;
  } else if (m.data) {
    float value[kBlock];
    load_mask_row(m, offset, keys, value);
    for (int j = 0; j < keys; ++j)
      score[j] = value[j] == -kInfinity ? -kInfinity : kLowest > score[j] + value[j] ? kLowest : score[j] + value[j];
  }
  const int first = (int)greater(smaller(begin_of_keys(a, s, query) - key, (int64_t)keys), (int64_t)0);
  const int last = (int)greater(smaller(end_of_keys(a, s, query) - key, (int64_t)keys), (int64_t)0);
  for (int j = 0; j < first; ++j) score[j] = -kInfinity;
  for (int j = last; j < keys; ++j) score[j] = -kInfinity;
}

// kept[j], bit i: dropout keeps query i, key j of the tile.
inline void draw_dropout(const Attention& a, const Sequence& s, int64_t head, const Tile& t, uint64_t* kept) {
  const uint32_t z = (uint32_t)(s.index * a.heads + head);
  for (int column = 0; column < t.keys; column += kTileColumns) {
    const int n = smaller(kTileColumns, t.keys - column);
    for (int j = 0; j < n; ++j) kept[column + j] = 0;
    for (int row = 0; row < t.queries; row += kTileRows) {
      uint32_t keep[kTileColumns];
      keep_tile_columns(a.seed, a.threshold, z, (t.query + row) / kTileRows, (t.key + column) / kTileColumns, n, keep);
      for (int j = 0; j < n; ++j) kept[column + j] |= (uint64_t)keep[j] << row;
    }
  }
}

// How many query heads share a key head; there may be no heads at all.
FASTATTN_INLINE int64_t group_of(const Attention& a) { return a.heads / greater(a.key_heads, (int64_t)1); }

// A second thread is worth waking for some 20 us of work; a (batch, head) is some, however short its rows are.
FASTATTN_INLINE int useful_workers(const Attention& a, const Parallel& parallel, int products) {
  const double pairs = (double)a.queries * a.keys;
  const double work = a.batch * a.heads * (0.5 * pairs * (a.depth + a.value_depth) * products + 2000);
  return (int)smaller((double)parallel.threads, 1 + work / 500000);
}

}  // namespace
}  // namespace fastattn
