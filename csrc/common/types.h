// Element types as the kernels see them: raw bits, converted on load and store.
#pragma once
#include "arithmetic.h"

namespace fastattn {

enum class Dtype : int32_t { float32, bfloat16, float16, boolean };

struct bfloat16 {
  uint16_t bits;
};

struct float16 {
  uint16_t bits;
};

namespace {

FASTATTN_HOST_DEVICE constexpr int64_t size_of(Dtype dtype) {
  return dtype == Dtype::float32 ? 4 : dtype == Dtype::boolean ? 1 : 2;
}

}  // namespace
}  // namespace fastattn
