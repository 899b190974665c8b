// Element types as the kernels see them: raw bits, converted on load and store.
#pragma once
#include <stdint.h>

namespace fastattn {

enum class Dtype : int32_t { float32, bfloat16, float16, boolean };

struct bfloat16 {
  uint16_t bits;
};

struct float16 {
  uint16_t bits;
};

}  // namespace fastattn
