// A vector of float32 for every instruction set, in the vector extensions of GCC and Clang.
//
// The kernels are compiled once per instruction set. Everything here has internal linkage, and this file includes only
// C headers. So the linker cannot share a function compiled for a wide set with code that must run everywhere.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
// GCC's immintrin.h initialises its "undefined" vectors with themselves. Without these pragmas GCC warns about that.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#include <immintrin.h>
#endif
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "../common/types.h"

#if defined(__AVX512F__)
#define FASTATTN_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define FASTATTN_VECTOR_BYTES 32
#else
#define FASTATTN_VECTOR_BYTES 16
#endif

#define FASTATTN_INLINE inline __attribute__((always_inline))

namespace fastattn {
namespace {

constexpr int kLanes = FASTATTN_VECTOR_BYTES / 4;

typedef float vf __attribute__((vector_size(FASTATTN_VECTOR_BYTES)));
typedef int32_t vi __attribute__((vector_size(FASTATTN_VECTOR_BYTES)));       // Masks: 0 or -1 per lane.
typedef uint32_t vu __attribute__((vector_size(FASTATTN_VECTOR_BYTES)));      // Bits: arithmetic wraps.
typedef uint16_t vh __attribute__((vector_size(FASTATTN_VECTOR_BYTES / 2)));  // kLanes 16-bit lanes.
typedef uint8_t vb __attribute__((vector_size(FASTATTN_VECTOR_BYTES / 4)));   // kLanes bytes.

FASTATTN_INLINE vf splat(float x) { return x - vf{}; }
FASTATTN_INLINE vu splat_bits(uint32_t x) { return x + vu{}; }
FASTATTN_INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }
FASTATTN_INLINE vf select(vi mask, vf a, vf b) { return mask ? a : b; }
FASTATTN_INLINE vu select(vi mask, vu a, vu b) { return mask ? a : b; }

// Return x rounded to float32. The barrier keeps the compiler from contracting x, a product, with a later addition.
FASTATTN_INLINE vf rounded(vf x) {
#if defined(__aarch64__)
  __asm__("" : "+w"(x));
#else
  __asm__("" : "+v"(x));
#endif
  return x;
}

// Return the maximum per lane. If a is NaN, the result is b, as with maxps.
FASTATTN_INLINE vf max(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
  return (vf)_mm_max_ps((__m128)a, (__m128)b);
#else
  return a > b ? a : b;
#endif
}

#if defined(__AVX512F__)
FASTATTN_INLINE float sum(vf x) { return _mm512_reduce_add_ps((__m512)x); }
FASTATTN_INLINE float max(vf x) { return _mm512_reduce_max_ps((__m512)x); }
#else
template <class F>
FASTATTN_INLINE float reduce(vf x, const F& combine) {
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) x[i] = combine(x[i], x[i + half]);
  return x[0];
}

FASTATTN_INLINE float sum(vf x) {
  return reduce(x, [](float a, float b) { return a + b; });
}

FASTATTN_INLINE float max(vf x) {
  return reduce(x, [](float a, float b) { return a > b ? a : b; });
}
#endif

// ---- lanes as bits: bit i of a word stands for lane i ----

#if !defined(__AVX512F__)
FASTATTN_INLINE vu lane_bits() {
  vu bits = {};
  for (int i = 0; i < kLanes; ++i) bits[i] = 1u << i;
  return bits;
}
#endif

FASTATTN_INLINE vf select_bits(uint32_t bits, vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_mask_mov_ps((__m512)b, (__mmask16)bits, (__m512)a);
#else
  return select((splat_bits(bits) & lane_bits()) != 0, a, b);
#endif
}

// Return x in the lanes whose bit is set, 0 in the others.
FASTATTN_INLINE vf keep_bits(uint32_t bits, vf x) {
#if defined(__AVX512F__)
  return (vf)_mm512_maskz_mov_ps((__mmask16)bits, (__m512)x);
#else
  return (vf)((vu)((splat_bits(bits) & lane_bits()) != 0) & (vu)x);
#endif
}

FASTATTN_INLINE uint32_t first_lanes(int n) { return (1u << n) - 1; }

// ---- 16-bit floating point ----

FASTATTN_INLINE vu widen(vh x) {
#if defined(__AVX512F__)
  return (vu)_mm512_cvtepu16_epi32((__m256i)x);
#elif defined(__AVX2__)
  return (vu)_mm256_cvtepu16_epi32((__m128i)x);
#else
  return __builtin_convertvector(x, vu);
#endif
}

FASTATTN_INLINE vh narrow(vu x) {
#if defined(__AVX512F__)
  return (vh)_mm512_cvtepi32_epi16((__m512i)x);
#elif defined(__AVX2__)
  return (vh)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
#else
  return __builtin_convertvector(x, vh);
#endif
}

FASTATTN_INLINE vf to_float(vh x, bfloat16) { return (vf)(widen(x) << 16); }

// Round to nearest, ties to even; NaN stays NaN.
FASTATTN_INLINE vh from_float(vf x, bfloat16) {
#if defined(__AVX512BF16__)
  return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
  const vu bits = (vu)x;
  const vu rounded = bits + 0x7fff + (bits >> 16 & 1);
  return narrow(select(x == x, rounded, bits | 0x400000) >> 16);
#endif
}

FASTATTN_INLINE vf to_float(vh x, float16) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps((__m256i)x);
#elif defined(__AVX2__)
  return (vf)_mm256_cvtph_ps((__m128i)x);
#elif defined(__aarch64__)
  return (vf)vcvt_f32_f16(vreinterpret_f16_u16((uint16x4_t)x));
#else
  // A multiplication rebiases the exponent, which is correct for subnormal numbers too.
  const vu bits = widen(x), magnitude = (bits & 0x7fff) << 13;
  const vu finite = (vu)((vf)magnitude * splat(0x1p112f));
  return (vf)(select(magnitude >= splat_bits(0x7c00u << 13), magnitude | 0x7f800000, finite) | (bits & 0x8000) << 16);
#endif
}

FASTATTN_INLINE vh from_float(vf x, float16) {
#if defined(__AVX512F__)
  return (vh)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return (vh)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__aarch64__)
  return (vh)vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x));
#else
  const vu magnitude = (vu)x & 0x7fffffff;
  const vu normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  const vu subnormal = (vu)((vf)magnitude + splat(0.5f)) - 0x3f000000;  // the addition rounds at the half's last bit
  vu half = select(magnitude < splat_bits(113u << 23), subnormal, normal);
  half = select(magnitude >= splat_bits(0x477ff000), splat_bits(0x7c00), half);  // 65520 and above
  half = select(magnitude > splat_bits(0x7f800000), splat_bits(0x7e00), half);
  return narrow(half | ((vu)x >> 16 & 0x8000));
#endif
}

template <class T>
FASTATTN_INLINE vf rounded_to(vf x, T type) {
  return to_float(from_float(x, type), type);
}
FASTATTN_INLINE vf rounded_to(vf x, float) { return x; }

// ---- memory ----

FASTATTN_INLINE vf load(const float* p) {
  vf x;
  memcpy(&x, p, sizeof x);
  return x;
}

FASTATTN_INLINE void store(float* p, vf x) { memcpy(p, &x, sizeof x); }

template <class T>  // bfloat16 or float16
FASTATTN_INLINE vf load(const T* p) {
  vh x;
  memcpy(&x, p, sizeof x);
  return to_float(x, T{});
}

template <class T>
FASTATTN_INLINE void store(T* p, vf x) {
  const vh h = from_float(x, T{});
  memcpy(p, &h, sizeof h);
}

// Store without caching. p must be a multiple of the stored size. finish_stream() is the fence.
FASTATTN_INLINE void stream(float* p, vf x) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, (__m512)x);
#elif defined(__AVX2__)
  _mm256_stream_ps(p, (__m256)x);
#elif defined(__SSE2__)
  _mm_stream_ps(p, (__m128)x);
#else
  store(p, x);
#endif
}

template <class T>
FASTATTN_INLINE void stream(T* p, vf x) {
#if defined(__AVX512F__)
  _mm256_stream_si256((__m256i*)p, (__m256i)from_float(x, T{}));
#elif defined(__AVX2__)
  _mm_stream_si128((__m128i*)p, (__m128i)from_float(x, T{}));
#else
  store(p, x);
#endif
}

FASTATTN_INLINE void finish_stream() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// The loads and stores of a part of a vector, which is rare. With AVX2 they are not calls, because a call in the last
// step of a loop makes GCC keep the loop's constants on the stack. Workaround (QEMU 7.2): it reads whole vectors in
// masked loads, so the loads are in pieces of 4, 2 and 1 elements.
#if defined(__AVX2__) && !defined(__AVX512F__)
FASTATTN_INLINE __m256i lanes_below(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

FASTATTN_INLINE vf load_part(const float* p, int n) {
  const float* rest = p + (n & 4);
  uint64_t pair = 0;
  uint32_t last = 0;
  if (n & 2) memcpy(&pair, rest, 8);
  if (n & 1) memcpy(&last, rest + (n & 2), 4);
  const __m128i four = n & 2 ? _mm_set_epi64x(last, (int64_t)pair) : _mm_cvtsi32_si128((int)last);
  return (vf)(n & 4 ? _mm256_set_m128i(four, _mm_loadu_si128((const __m128i*)p)) : _mm256_zextsi128_si256(four));
}

FASTATTN_INLINE void store_part(float* p, vf x, int n) { _mm256_maskstore_ps(p, lanes_below(n), (__m256)x); }

template <class T>
FASTATTN_INLINE vf load_part(const T* p, int n) {
  const T* rest = p + (n & 4);
  uint32_t pair = 0;
  uint64_t last = 0, four = 0;
  if (n & 2) memcpy(&pair, rest, 4);
  if (n & 1) last = rest[n & 2].bits;
  last = last << 16 * (n & 2) | pair;
  if (n & 4) memcpy(&four, p, 8);
  return to_float((vh)(n & 4 ? _mm_set_epi64x((int64_t)last, (int64_t)four) : _mm_cvtsi64_si128((int64_t)last)), T{});
}

// A mask has 32 bits per lane, so pairs are stored, and the last element alone.
template <class T>
FASTATTN_INLINE void store_part(T* p, vf x, int n) {
  const vh h = from_float(x, T{});
  _mm_maskstore_epi32((int*)p, _mm256_castsi256_si128(lanes_below(n / 2)), (__m128i)h);
  if (n % 2) memcpy(p + n - 1, (const uint16_t*)&h + n - 1, sizeof *p);
}
#elif !defined(__AVX512F__)
__attribute__((noinline)) inline vf load_part(const float* p, int n) {
  vf x = {};
  memcpy(&x, p, (size_t)n * sizeof *p);
  return x;
}

__attribute__((noinline)) inline void store_part(float* p, vf x, int n) { memcpy(p, &x, (size_t)n * sizeof *p); }

template <class T>
__attribute__((noinline)) vf load_part(const T* p, int n) {
  vh x = {};
  memcpy(&x, p, (size_t)n * sizeof *p);
  return to_float(x, T{});
}

template <class T>
__attribute__((noinline)) void store_part(T* p, vf x, int n) {
  const vh h = from_float(x, T{});
  memcpy(p, &h, (size_t)n * sizeof *p);
}
#endif

// Load or store the first n lanes, 0 <= n <= kLanes. The other lanes read as 0; their memory is not accessed.
FASTATTN_INLINE vf load(const float* p, int n) {
  if (n == kLanes) return load(p);
#if defined(__AVX512F__)
  return (vf)_mm512_maskz_loadu_ps((__mmask16)first_lanes(n), p);
#else
  return load_part(p, n);
#endif
}

FASTATTN_INLINE void store(float* p, vf x, int n) {
  if (n == kLanes) return store(p, x);
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, (__mmask16)first_lanes(n), (__m512)x);
#else
  store_part(p, x, n);
#endif
}

template <class T>
FASTATTN_INLINE vf load(const T* p, int n) {
  if (n == kLanes) return load(p);
#if defined(__AVX512F__)
  return to_float((vh)_mm256_maskz_loadu_epi16((__mmask16)first_lanes(n), p), T{});
#else
  return load_part(p, n);
#endif
}

template <class T>
FASTATTN_INLINE void store(T* p, vf x, int n) {
  if (n == kLanes) return store(p, x);
#if defined(__AVX512F__)
  _mm256_mask_storeu_epi16(p, (__mmask16)first_lanes(n), (__m256i)from_float(x, T{}));
#else
  store_part(p, x, n);
#endif
}

// Call body(j, n) for the vectors of the columns [begin, end), n lanes from column j. n is kLanes, except for the last.
template <class Body>
FASTATTN_INLINE void for_each_vector(int64_t begin, int64_t end, const Body& body) {
  int64_t j = begin;
  for (; j + kLanes <= end; j += kLanes) body(j, kLanes);
  if (j < end) body(j, (int)(end - j));
}

template <class Body>
FASTATTN_INLINE void for_each_vector(int64_t columns, const Body& body) {
  for_each_vector(0, columns, body);
}

// Load n bytes as a mask: -1 for bytes that are not 0.
FASTATTN_INLINE vi load_nonzero(const uint8_t* p, int n) {
  vb x = {};
  memcpy(&x, p, (size_t)n);
  return __builtin_convertvector(x, vu) != 0;
}

// Call f(T{}) with the floating-point type T that a dtype names.
template <class F>
FASTATTN_INLINE auto with_type(Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::bfloat16: return f(bfloat16{});
    case Dtype::float16: return f(float16{});
    default: return f(float{});
  }
}

// ---- the exponential: 0 from a point below the normal range down to -inf; NaN stays NaN ----

// Return p * 2^n for an integer n in [-127, 127], given as the bits of 1.5 * 2^23 + n. The result is 0 at n = -127.
FASTATTN_INLINE vf scale_by_power(vf p, vf shifted) { return p * (vf)(((vu)shifted + 127) << 23); }

constexpr float kLog2e = 1.44269504f;
constexpr float kShift = 0x1.8p23f;  // adding it rounds to an integer and leaves that in the low bits

// Return 2^x for x <= 127. The relative error is below 1.7e-7 (minimax polynomial of degree 5 on [-1/2, 1/2]). 2^0 is
// exactly 1, because online softmax rescales by it while the maximum stays, and must not drift.
FASTATTN_INLINE vf exp2(vf x) {
#if defined(__AVX512F__)
  // Mask instead of clamping: a subnormal result, or an underflow to 0, takes a microcode assist of 100 cycles on
  // Intel.
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, (__m512)splat(-126.0f), _CMP_NLT_UQ);
  const vf n = (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  x = max(splat(-127.0f), x);
  const vf shifted = x + kShift, n = shifted - kShift;
#endif
  const vf f = x - n;
  vf p = splat(0x1.5bba14p-10f);
  p = fma(p, f, splat(0x1.3cea88p-7f));
  p = fma(p, f, splat(0x1.c6b752p-5f));
  p = fma(p, f, splat(0x1.ebf9bcp-3f));
  p = fma(p, f, splat(0x1.62e42ap-1f));
  p = fma(p, f, splat(1.0f));
#if defined(__AVX512F__)
  return (vf)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)n);
#else
  return scale_by_power(p, shifted);
#endif
}

}  // namespace
}  // namespace fastattn
