// Intel's matrix extensions (AMX): tile registers of 16 rows of 64 bytes, and the product C += A B. C is 16 x 16
// float32. A is 16 x 32 bfloat16, in rows of pairs; B is 32 x 16 bfloat16, in pairs of rows.
//
// This is inline assembly because the compilers' intrinsics do not declare the memory that they read.
#pragma once
#include "simd.h"

namespace fastattn {
namespace {

struct alignas(64) TileShapes {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes[16];  // bytes per row of each tile
  uint8_t rows[16];
};
static_assert(sizeof(TileShapes) == 64, "what the instruction reads");

// Configure and clear the tiles. Tiles 0 to 3 accumulate C and 4 and 5 hold A, all with `rows` rows; 6 and 7 hold B.
FASTATTN_INLINE void shape_tiles(int rows) {
  TileShapes shapes = {};
  shapes.palette = 1;
  for (int i = 0; i < 8; ++i) {
    shapes.bytes[i] = 64;
    shapes.rows[i] = i < 6 ? (uint8_t)rows : 16;
  }
  __asm__ volatile("ldtilecfg %0" ::"m"(shapes));
}

// Call work(). If the tiles are `used`, this thread's tiles are configured for 16 rows before it and released after it.
template <bool used, class Work>
FASTATTN_INLINE void with_tiles(const Work& work) {
  if constexpr (used) shape_tiles(16);
  work();
  if constexpr (used) __asm__ volatile("tilerelease");
}

template <int tile>
FASTATTN_INLINE void clear_tile() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(tile));
}

template <int tile>
FASTATTN_INLINE void load_tile(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile) : "memory");
}

template <int tile>
FASTATTN_INLINE void store_tile(void* to, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(tile) : "memory");
}

template <int sum, int left, int right>
FASTATTN_INLINE void multiply_tiles() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(left), "i"(right));
}

}  // namespace
}  // namespace fastattn
