// Values of attention's mask.
#pragma once
#include <cuda_runtime.h>

#include "../common/operands.h"
#include "vector.h"

namespace fastattn::cuda {
namespace {

constexpr float kInfinity = __builtin_inff(), kLowest = -3.4028234663852886e38f;

// Return the summand of a score from an element of the mask. -inf hides the key.
__device__ inline float mask_value(Dtype dtype, const void* data, int64_t index = 0) {
  switch (dtype) {
    case Dtype::float32: return ((const float*)data)[index];
    case Dtype::bfloat16: return to_float(((const bfloat16*)data)[index]);
    case Dtype::float16: return to_float(((const float16*)data)[index]);
    case Dtype::boolean: break;
  }
  return ((const uint8_t*)data)[index] ? 0.0f : -kInfinity;
}

__device__ inline float mask_value(const Mask& mask, int64_t index) { return mask_value(mask.dtype, mask.data, index); }

}  // namespace
}  // namespace fastattn::cuda
