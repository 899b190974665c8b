// The conversions of bfloat16 that csrc/cuda uses (see cuda_runtime.h).
#pragma once
#include <math.h>
#include <string.h>

struct __nv_bfloat16_raw {
  unsigned short x;
};

struct __nv_bfloat16 {
  __nv_bfloat16() = default;
  __nv_bfloat16(__nv_bfloat16_raw raw) : bits(raw.x) {}
  operator __nv_bfloat16_raw() const { return {bits}; }
  unsigned short bits;
};

inline float __bfloat162float(__nv_bfloat16 x) {
  const unsigned word = (unsigned)x.bits << 16;
  float value;
  memcpy(&value, &word, sizeof value);
  return value;
}

inline __nv_bfloat16 __float2bfloat16_rn(float x) {  // to nearest, ties to even
  unsigned word;
  memcpy(&word, &x, sizeof word);
  if (isnan(x)) return __nv_bfloat16_raw{0x7fff};
  return __nv_bfloat16_raw{(unsigned short)((word + 0x7fff + (word >> 16 & 1)) >> 16)};
}
