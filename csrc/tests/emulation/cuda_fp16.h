// The conversions of half precision that csrc/cuda uses (see cuda_runtime.h).
#pragma once
#include <string.h>

struct __half_raw {
  unsigned short x;
};

struct __half {
  __half() = default;
  __half(__half_raw raw) { memcpy(&value, &raw, sizeof value); }
  explicit __half(_Float16 number) : value(number) {}
  operator __half_raw() const {
    __half_raw raw;
    memcpy(&raw, &value, sizeof raw);
    return raw;
  }
  _Float16 value;
};

inline float __half2float(__half x) { return (float)x.value; }
inline __half __float2half_rn(float x) { return __half((_Float16)x); }
