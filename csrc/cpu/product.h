// Microkernels of attention's products: C (rows, columns) = A (rows, depth) B (depth, columns) + beta C.
//
//   for each group of kMicroRows rows (on AMX 32): C of the group stays in registers;
//     for each unit of depth: load B as vectors, broadcast the elements of A from where they lie, multiply and add;
//     write C.
//
// Queries are lanes, so softmax works on whole vectors with one query per lane. B is a panel, (head_dim, query), or a
// tile, (key, query). The products and how A is read:
//
//   scores: S (key, query) = K (key, head_dim) Q' (head_dim, query), by rows.
//   output: O' (head_dim, query) += V' (head_dim, key) P (key, query), by columns.
//   dV: dV (key, head_dim) += P (key, query) dO (query, head_dim), by rows.
//
// C is float32. A and B consist of units: a unit is a float32. With bfloat16 dot-product instructions it is a pair of
// bfloat16, neighbours along depth. AMX loads A only by rows and needs a depth of whole tiles. So operands that other
// instruction sets read by columns are packed transposed, and both operands are padded with zeros.
#pragma once
#include "amx.h"
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

struct Pair {
  bfloat16 even, odd;
};

// Call f(Unit{}) with the unit that elements of a dtype are computed in.
template <class F>
FASTATTN_INLINE auto with_unit([[maybe_unused]] Dtype dtype, const F& f) {
#if defined(__AVX512BF16__)
  if (dtype == Dtype::bfloat16) return f(Pair{});
#endif
  return f(float{});
}

// Whether products of these units run on AMX.
template <class Unit>
constexpr bool kUsesAmx = false;
#if defined(__AMX_BF16__)
template <>
constexpr bool kUsesAmx<Pair> = true;
#endif

// Whether the kernels compiled for AMX leave products of these units to those of avx512_bf16, whose tile sizes suit
// vectors.
#if defined(__AMX_BF16__)
template <class Unit>
constexpr bool kLeftToVectors = !kUsesAmx<Unit>;
#else
template <class Unit>
constexpr bool kLeftToVectors = false;
#endif

// Elements in a unit.
template <class Unit>
constexpr int kElements = 1;
template <>
constexpr int kElements<Pair> = 2;

// Whether rows of a dtype in memory are rows of the units that it is computed in.
template <class Unit>
constexpr bool in_memory(Dtype dtype) {
  return size_of(dtype) * kElements<Unit> == (int64_t)sizeof(Unit);
}

// Units that hold this many elements.
template <class Unit>
constexpr int units_of(int elements) {
  return (int)ceil_div(elements, kElements<Unit>);
}

// Depth of a product over this many elements, in units; AMX pads to whole tiles with zeros.
template <class Unit>
constexpr int depth_of(int elements) {
  return kUsesAmx<Unit> ? (int)round_up(units_of<Unit>(elements), kLanes) : units_of<Unit>(elements);
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

// Return c plus, or minus, the two numbers of each lane.
FASTATTN_INLINE vf add_pairs(vf pairs, vf c, Pair) {
  return multiply_add(pairs, (vf)splat_bits(0x3f803f80), c, Pair{});
}
FASTATTN_INLINE vf subtract_pairs(vf pairs, vf c, Pair) {
  return multiply_add(pairs, (vf)splat_bits(0xbf80bf80), c, Pair{});
}

// Round the two numbers of each lane to a pair.
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

FASTATTN_INLINE void store_unit(Pair* p, vf x) { memcpy((void*)p, &x, sizeof x); }

// beta of C = A B + beta C: 0, a factor per column, or 1. On vectors A B is accumulated from 0 before C is added
// (blocked summation). Let the rounding error of one sum grow with the square root of its length. Then the total error
// grows with sqrt(depth) + sqrt(tiles), not with sqrt(depth * tiles).
enum class Beta { zero, vector, one };

// Rows in memory; the stride is in bytes.
struct Matrix {
  const char* data;
  int64_t stride;

  template <class Element>
  Matrix(const Element* data, int64_t stride) : data((const char*)data), stride(stride * (int64_t)sizeof(Element)) {}
};

// C = A B + beta C. The stride of B and C is in units.
template <class Unit>
struct Product {
  int rows, depth;
  Matrix a;
  const Unit* b;
  float* c;
  int64_t stride;
  const float* beta = nullptr;  // (columns), for Beta::vector

  FASTATTN_INLINE void advance(int count, int64_t a_step) {
    rows -= count;
    a.data += count * a_step;
    c += count * stride;
  }
};

template <Beta beta, class Unit>
FASTATTN_INLINE void epilogue(const Product<Unit>& p, vf sum, int m, int n) {
  float* c = p.c + m * p.stride + n * kLanes;
  if constexpr (beta == Beta::zero) store(c, sum);
  if constexpr (beta == Beta::vector) store(c, fma(load(c), load(p.beta + n * kLanes), sum));
  if constexpr (beta == Beta::one) store(c, load(c) + sum);
}

// Compute M rows x N vectors of C in registers. A(m, k) is at byte m * stride + 4 k; by columns at k * stride + 4 m.
template <int M, int N, bool by_columns, Beta beta, class Unit>
FASTATTN_INLINE void microkernel(const Product<Unit>& p) {
  vf sum[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sum[m][n] = vf{};
  const char* row[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) row[m] = p.a.data + (by_columns ? m * 4 : m * p.a.stride);
  const Unit* b = p.b;
  for (int k = 0; k < p.depth; ++k) {
    vf right[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) right[n] = load_unit(b + n * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const vf left = broadcast(by_columns ? row[0] + m * 4 : row[m] + (int64_t)k * 4, Unit{});
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sum[m][n] = multiply_add(left, right[n], sum[m][n], Unit{});
    }
    if constexpr (by_columns) row[0] += p.a.stride;
    b += p.stride;
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) epilogue<beta>(p, sum[m][n], m, n);
}

// Compute M x N AMX tiles of C, which accumulate in place: the rounding of bfloat16 operands dominates the float32
// summation error of a chunk.
template <int M, int N, bool clear>
FASTATTN_INLINE void amx_microkernel(const Product<Pair>& p) {
  const int64_t bytes = p.stride * (int64_t)sizeof(Pair);
  float *right = p.c + kLanes, *below = p.c + kLanes * p.stride;
  if constexpr (clear) {
    clear_tile<0>();
    if constexpr (N > 1) clear_tile<1>();
    if constexpr (M > 1) clear_tile<2>();
    if constexpr (M > 1 && N > 1) clear_tile<3>();
  } else {
    load_tile<0>(p.c, bytes);
    if constexpr (N > 1) load_tile<1>(right, bytes);
    if constexpr (M > 1) load_tile<2>(below, bytes);
    if constexpr (M > 1 && N > 1) load_tile<3>(below + kLanes, bytes);
  }
  for (int k = 0; k < p.depth; k += kLanes) {
    const char* a = p.a.data + k * (int64_t)sizeof(Pair);
    const Pair* b = p.b + k * p.stride;
    load_tile<4>(a, p.a.stride);
    load_tile<6>(b, bytes);
    multiply_tiles<0, 4, 6>();
    if constexpr (N > 1) {
      load_tile<7>(b + kLanes, bytes);
      multiply_tiles<1, 4, 7>();
    }
    if constexpr (M > 1) {
      load_tile<5>(a + kLanes * p.a.stride, p.a.stride);
      multiply_tiles<2, 5, 6>();
    }
    if constexpr (M > 1 && N > 1) multiply_tiles<3, 5, 7>();
  }
  store_tile<0>(p.c, bytes);
  if constexpr (N > 1) store_tile<1>(right, bytes);
  if constexpr (M > 1) store_tile<2>(below, bytes);
  if constexpr (M > 1 && N > 1) store_tile<3>(below + kLanes, bytes);
}

// Multiply C by beta.
inline void rescale(const Product<Pair>& p, int vectors) {
  for (int n = 0; n < vectors; ++n) {
    const vf factor = load(p.beta + n * kLanes);
    float* c = p.c + n * kLanes;
    for (int m = 0; m < p.rows; ++m, c += p.stride) store(c, load(c) * factor);
  }
}

// Compute M rows of AMX tiles in all columns, so that A stays in the cache.
template <int M, bool clear>
FASTATTN_INLINE void amx_rows(Product<Pair> p, int vectors) {
  constexpr int kTwo = 2 * kLanes;
  for (; vectors >= 2; vectors -= 2, p.b += kTwo, p.c += kTwo) amx_microkernel<M, 2, clear>(p);
  if (vectors > 0) amx_microkernel<M, 1, clear>(p);
}

template <bool clear>
__attribute__((noinline)) void amx_product(Product<Pair> p, int vectors) {
  constexpr int kTwo = 2 * kLanes;
  for (; p.rows >= kTwo; p.advance(kTwo, p.a.stride)) amx_rows<2, clear>(p, vectors);
  for (; p.rows > 0; p.advance(kLanes, p.a.stride)) {
    const int count = min(p.rows, kLanes);
    if (count < kLanes) shape_tiles(count);  // rows beyond the last are not accessed; their memory may not exist
    amx_rows<1, clear>(p, vectors);
    if (count < kLanes) shape_tiles(kLanes);
  }
}

template <int N, bool by_columns, Beta beta, class Unit>
__attribute__((noinline)) void vector_product(Product<Unit> p) {
  const int64_t step = by_columns ? 4 : p.a.stride;
  for (; p.rows >= kMicroRows; p.advance(kMicroRows, step)) microkernel<kMicroRows, N, by_columns, beta>(p);
  if (kMicroRows > 4 && p.rows >= 4) {
    microkernel<4, N, by_columns, beta>(p);
    p.advance(4, step);
  }
  if (p.rows >= 2) {
    microkernel<2, N, by_columns, beta>(p);
    p.advance(2, step);
  }
  if (p.rows >= 1) microkernel<1, N, by_columns, beta>(p);
}

// Compute a product of `vectors` vectors of columns, at most kPanelVectors.
template <bool by_columns, Beta beta, class Unit>
FASTATTN_INLINE void multiply(int vectors, const Product<Unit>& p) {
  if constexpr (kUsesAmx<Unit>) {
    static_assert(!by_columns, "AMX loads A by rows");
    if constexpr (beta == Beta::vector) rescale(p, vectors);
    amx_product<beta == Beta::zero>(p, vectors);
  } else if (vectors == 1) {
    vector_product<1, by_columns, beta>(p);
  } else if (vectors == 2) {
    vector_product<2, by_columns, beta>(p);
  } else if constexpr (kPanelVectors > 2) {
    vectors == 3 ? vector_product<3, by_columns, beta>(p) : vector_product<4, by_columns, beta>(p);
  }
}

}  // namespace
}  // namespace fastattn
