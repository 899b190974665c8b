// The matrix instruction of csrc/cuda/mma.h, for a warp of emulated threads.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace emulation {

inline float number(uint32_t bits, bool is_bfloat16) {
  const unsigned short half = (unsigned short)bits;
  return is_bfloat16 ? __bfloat162float(__nv_bfloat16_raw{half}) : __half2float(__half_raw{half});
}

// A lane's elements of A and B.
struct Fragment {
  uint32_t a[4], b[2];
};

// Return the running warp's fragments, by lane.
Fragment* fragments();

// Compute C += A B. Each lane shows its elements of A and B to the others.
inline void mma_16x8x16(float (&c)[4], uint4 a, uint32_t b0, uint32_t b1, bool is_bfloat16) {
  const unsigned lane = emulation::lane(), row = lane / 4, column = lane % 4 * 2;
  Fragment* const warp = fragments();
  __syncwarp();  // all lanes have read the elements of the instruction before
  warp[lane] = {{a.x, a.y, a.z, a.w}, {b0, b1}};
  __syncwarp();
  for (unsigned i = 0; i < 4; ++i) {
    float sum = 0;
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned pair = k % 8 / 2, half = k % 2 * 16, upper = k / 8;
      const uint32_t of_a = warp[row * 4 + pair].a[i / 2 + 2 * upper];
      const uint32_t of_b = warp[(column + i % 2) * 4 + pair].b[upper];
      sum += number(of_a >> half, is_bfloat16) * number(of_b >> half, is_bfloat16);
    }
    c[i] += sum;
  }
}

}  // namespace emulation
