// Products of 16-bit elements on tensor cores.
#pragma once
#include <cuda_runtime.h>
#include <stdint.h>

#include "../common/types.h"

#ifdef FASTATTN_EMULATED
#include <emulated_mma.h>
#define FASTATTN_MMA(c, a, b0, b1, type) emulation::mma_16x8x16(c, a, b0, b1, sizeof(type) == sizeof("bf16"))
#else
#define FASTATTN_MMA(c, a, b0, b1, type)                                              \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                 \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                       \
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1))
#endif

namespace fastattn::cuda {
namespace {

// Compute C (16 x 8, float32) += A (16 x 16) B (16 x 8) by a warp. Lane 4g + c has these elements:
// c = C(g, 2c), C(g, 2c + 1), C(g + 8, 2c), C(g + 8, 2c + 1);
// a = A(g, 2c), A(g + 8, 2c), A(g, 2c + 8), A(g + 8, 2c + 8); b = B(2c, g), B(2c + 8, g).
// Each word of a and b also has the next element along the inner dimension, in its high half.
__device__ inline void mma_16x8x16(float (&c)[4], uint4 a, uint32_t b0, uint32_t b1, bfloat16) {
  FASTATTN_MMA(c, a, b0, b1, "bf16");
}

__device__ inline void mma_16x8x16(float (&c)[4], uint4 a, uint32_t b0, uint32_t b1, float16) {
  FASTATTN_MMA(c, a, b0, b1, "f16");
}

}  // namespace
}  // namespace fastattn::cuda
