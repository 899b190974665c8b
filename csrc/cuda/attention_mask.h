// Values of attention's mask.
#pragma once
#include <cuda_runtime.h>

#include "../common/operands.h"
#include "vector.h"

namespace fastattn::cuda {
namespace {

constexpr float kInfinity = __builtin_inff(), kLowest = -3.4028234663852886e38f;

// Return the summand of a score from the mask's element at an address. -inf hides the key.
__device__ inline float mask_value(Dtype dtype, const void* at) {
  switch (dtype) {
    case Dtype::float32: return *(const float*)at;
    case Dtype::bfloat16: return to_float(*(const bfloat16*)at);
    case Dtype::float16: return to_float(*(const float16*)at);
    case Dtype::boolean: break;
  }
  return *(const uint8_t*)at ? 0.0f : -kInfinity;
}

__device__ inline float mask_value(const Mask& mask, int64_t index) {
  return mask_value(mask.dtype, (const char*)mask.data + index * size_of(mask.dtype));
}

}  // namespace
}  // namespace fastattn::cuda
