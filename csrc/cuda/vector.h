// Vectorised loads and stores of eight neighbouring elements of a row, converted from and to float32.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>

#include "../common/operands.h"

namespace fastattn::cuda {
namespace {

constexpr int kVector = 8;  // 16 bytes of a 16-bit type
constexpr unsigned kAllLanes = 0xffffffff;

__device__ inline float to_float(uint8_t x) { return x != 0 ? 1.0f : 0.0f; }
__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bfloat16 x) { return __bfloat162float(__nv_bfloat16_raw{x.bits}); }
__device__ inline float to_float(float16 x) { return __half2float(__half_raw{x.bits}); }

template <class T>
__device__ inline T from_float(float x);
template <>
__device__ inline float from_float(float x) {
  return x;
}
template <>
__device__ inline bfloat16 from_float(float x) {
  return {__nv_bfloat16_raw(__float2bfloat16_rn(x)).x};
}
template <>
__device__ inline float16 from_float(float x) {
  return {__half_raw(__float2half_rn(x)).x};
}

// Round x as a store to `dtype` would.
__device__ inline float rounded(float x, Dtype dtype) {
  switch (dtype) {
    case Dtype::bfloat16: return to_float(from_float<bfloat16>(x));
    case Dtype::float16: return to_float(from_float<float16>(x));
    default: return x;
  }
}

// Whether vector accesses are aligned: rows and the vectors in them begin at multiples of 16 bytes, 8 in boolean
// operands. A kernel gets `wide` only if this holds for all of its operands.
inline bool is_wide(const void* data, Dtype dtype, int64_t columns, int64_t outer = 0, int64_t inner = 0,
                    int64_t row = 0) {
  const int64_t alignment = dtype == Dtype::boolean ? 8 : 16, size = size_of(dtype);
  return columns % kVector == 0 && (int64_t)((uintptr_t)data % (uintptr_t)alignment) == 0 &&
         outer * size % alignment == 0 && inner * size % alignment == 0 && row * size % alignment == 0;
}

inline bool is_wide(const Heads& heads, Dtype dtype, int64_t columns) {
  return is_wide(heads.data, dtype, columns, heads.batch, heads.head, heads.row);
}

template <class T>
__device__ inline void load_as(const T* row, bool wide, int64_t column, int64_t columns, float (&x)[kVector]) {
  if (wide) {
    using Word = std::conditional_t<sizeof(T) == 1, uint2, uint4>;
    constexpr int kWords = sizeof(T) * kVector / sizeof(Word);
    Word words[kWords] = {};
    T values[kVector];
    if (column < columns)
      for (int w = 0; w < kWords; ++w) words[w] = ((const Word*)(row + column))[w];
    memcpy(values, words, sizeof values);
    for (int e = 0; e < kVector; ++e) x[e] = to_float(values[e]);
  } else {
    for (int e = 0; e < kVector; ++e) x[e] = column + e < columns ? to_float(row[column + e]) : 0.0f;
  }
}

template <class T>
__device__ inline void store_as(T* row, bool wide, int64_t column, int64_t columns, const float (&x)[kVector]) {
  T values[kVector];
  for (int e = 0; e < kVector; ++e) values[e] = from_float<T>(x[e]);
  if (wide) {
    constexpr int kWords = sizeof(T) * kVector / sizeof(uint4);
    uint4 words[kWords];
    memcpy(words, values, sizeof words);
    if (column < columns)
      for (int w = 0; w < kWords; ++w)
        __stwb((uint4*)(row + column) + w, words[w]);  // the compiler never splits it into narrower stores
  } else {
    for (int e = 0; e < kVector; ++e)
      if (column + e < columns) row[column + e] = values[e];
  }
}

// Load elements column .. column + 7 of the row that begins `offset` elements into `data`. Elements from `columns` on
// are 0.
__device__ inline void load(const void* data, Dtype dtype, int64_t offset, bool wide, int64_t column, int64_t columns,
                            float (&x)[kVector]) {
  switch (dtype) {
    case Dtype::float32: return load_as((const float*)data + offset, wide, column, columns, x);
    case Dtype::bfloat16: return load_as((const bfloat16*)data + offset, wide, column, columns, x);
    case Dtype::float16: return load_as((const float16*)data + offset, wide, column, columns, x);
    case Dtype::boolean: return;
  }
}

// Store elements column .. column + 7 of the row that begins `offset` elements into `data`, rounded. Elements from
// `columns` on are not stored.
__device__ inline void store(void* data, Dtype dtype, int64_t offset, bool wide, int64_t column, int64_t columns,
                             const float (&x)[kVector]) {
  switch (dtype) {
    case Dtype::float32: return store_as((float*)data + offset, wide, column, columns, x);
    case Dtype::bfloat16: return store_as((bfloat16*)data + offset, wide, column, columns, x);
    case Dtype::float16: return store_as((float16*)data + offset, wide, column, columns, x);
    case Dtype::boolean: return;
  }
}

}  // namespace
}  // namespace fastattn::cuda
