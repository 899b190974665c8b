// Parts that Hopper's kernels of attention share: their choice by a problem's head sizes and options, rings of buffers,
// loads of tiles, stores of rows, and dropout's random words.
#pragma once
#include <utility>

#include "../common/attention.h"
#include "../common/philox.h"
#include "attention_mask.h"
#include "hopper.h"

namespace fastattn::cuda {
namespace {

constexpr float kLog2e = 1.4426950408889634f;

// The code of a kernel. `general` adds a mask, takes any scale, and has dropout for calls with a threshold.
enum class Kind { plain, dropout, general };

// Call use(shape) with the kernel's shape for this problem, Shape<type, head size, kind>. Few shapes have a general
// kernel, which takes long to compile.
template <template <class, int, Kind> class Shape, class T, int D, class Use>
auto with_kind(const Attention& a, const Use& use) {
  constexpr int kWide = D <= 64 ? 64 : D <= 128 ? 128 : 256;
  constexpr float kHuge = -kLowest / 1.5f;  // A greater scale times log2(e) is infinite.
  if (a.mask.data || a.scale <= 0 || a.scale > kHuge) return use(Shape<T, kWide, Kind::general>());
  if (a.threshold) return use(Shape<T, D, Kind::dropout>());
  return use(Shape<T, D, Kind::plain>());
}

template <template <class, int, Kind> class Shape, class T, class Use>
auto with_head_dim(const Attention& a, const Use& use) {
  const int size = max(a.head_dim, a.value_head_dim);
  if (size <= 64) return with_kind<Shape, T, 64>(a, use);
  if (size <= 96) return with_kind<Shape, T, 96>(a, use);
  if (size <= 128) return with_kind<Shape, T, 128>(a, use);
  if (size <= 192) return with_kind<Shape, T, 192>(a, use);
  return with_kind<Shape, T, 256>(a, use);
}

template <template <class, int, Kind> class Shape, class Use>
auto with_shape(const Attention& a, const Use& use) {
  return a.dtype == Dtype::bfloat16 ? with_head_dim<Shape, bfloat16>(a, use) : with_head_dim<Shape, float16>(a, use);
}

// A sequence of a batch.
struct Sequence {
  int first_query, first_key;  // its rows within packed operands, else 0
  int seqlen_q, seqlen_k;
  Visibility<int> visibility;

  __device__ __forceinline__ Sequence(const Attention& a, int batch)
      : first_query(a.cu_seq_q ? (int)a.cu_seq_q[batch] : 0),
        first_key(a.cu_seq_k ? (int)a.cu_seq_k[batch] : 0),
        seqlen_q(a.cu_seq_q ? (int)a.cu_seq_q[batch + 1] - first_query : (int)a.seqlen_q),
        seqlen_k(a.cu_seq_k ? (int)a.cu_seq_k[batch + 1] - first_key : (int)a.seqlen_k),
        visibility(a.key_lengths ? a.key_lengths[batch] : seqlen_k, seqlen_q, a.lower_right, a.window_left,
                   a.window_right) {}
};

// Whether TMA can load an operand's rows: addresses and strides are multiples of 16 bytes, no dimension is expanded.
inline bool is_addressed(const Heads& heads, int head_dim, int64_t rows, int64_t num_heads, int64_t batch) {
  int64_t bits = (int64_t)heads.data / 2 | head_dim;  // in elements
  for (const auto& [size, stride] : {std::pair(rows, heads.row), {num_heads, heads.head}, {batch, heads.batch}}) {
    if (size > 1 && stride <= 0) return false;
    if (size > 1) bits |= stride;
  }
  return bits % 8 == 0;
}

// Return the map of an operand, for boxes of so many (columns, rows). Without elements it is never read, and the map is
// of `other`.
inline CUtensorMap map_of(const Heads& heads, std::pair<int, int> box, Swizzle swizzle, int columns, int64_t rows,
                          int64_t num_heads, int64_t batch, const void* other) {
  const bool is_empty = rows == 0 || num_heads == 0 || batch == 0;
  const uint64_t sizes[4] = {(uint64_t)columns, (uint64_t)max(rows, 1), (uint64_t)max(num_heads, 1),
                             (uint64_t)max(batch, 1)};
  uint64_t strides[3] = {(uint64_t)heads.row * 2, (uint64_t)heads.head * 2, (uint64_t)heads.batch * 2};
  for (int d = 0; d < 3; ++d)  // A dimension of size 1 may have any stride in the tensor, which the map does not take.
    if (sizes[d + 1] == 1) strides[d] = d ? strides[d - 1] * sizes[d] : sizes[0] * 2;
  return tensor_map(is_empty ? other : heads.data, sizes, strides, {(uint32_t)box.first, (uint32_t)box.second, 1, 1},
                    swizzle);
}

// The stage of a ring of buffers, and the parity of the phase in which it is full.
template <int kStages>
struct Stage {
  int index = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++index == kStages) index = 0, parity ^= 1;
  }
};

// Load rows of head z of batch w. Every kColumns columns form rows of their own in shared memory, 2 kColumns bytes
// wide.
template <int D, int kColumns = 64>
__device__ __forceinline__ void load_columns(uint32_t to, const CUtensorMap& map, uint32_t full, int rows, int first,
                                             int z, int w = 0) {
#pragma unroll
  for (int c = 0; c < D / kColumns; ++c) load_tile(to + c * rows * 2 * kColumns, map, full, c * kColumns, first, z, w);
}

// Store row lane / 4 + 8 r of a warp's 16 rows, with result(i) for the i-th sum of a thread. The four lanes of a row
// exchange pairs of columns, so that each stores 16 bytes. All lanes of the warp call this together.
template <int D, class T, class Result>
__device__ __forceinline__ void store_row(T* out, int columns, bool is_inside, int r, const Result& result) {
  const int own = (int)threadIdx.x % 4;
#pragma unroll
  for (int g = 0; g < D / 32; ++g) {
    uint32_t four[4];  // pairs of columns 32 g + 8 c + 2 own, then 32 g + 8 own + 2 c
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int i = (4 * g + c) * 4 + 2 * r;
      four[c] = pack(result(i), result(i + 1), T());
    }
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (c & bit) continue;
        const bool is_upper = own & bit;
        const uint32_t other = __shfl_xor_sync(kAllLanes, is_upper ? four[c] : four[c + bit], bit);
        (is_upper ? four[c] : four[c + bit]) = other;
      }
    const int column = 32 * g + 8 * own;
    if (is_inside && column < columns) *(uint4*)(out + column) = {four[0], four[1], four[2], four[3]};
  }
}

// Set hidden scores to -inf, in a general kernel after adding the mask. S[i] is in row r = i / 2 % 2 of a thread, in
// column i / 4 * 8 + i % 2. A row's columns [begin, end) are visible through the lengths and the window. `values` are a
// row's elements of the mask from column 0 on, `step` bytes apart.
template <bool kIsGeneral, int N>
__device__ __forceinline__ void hide_scores(float (&S)[N], const int (&begin)[2], const int (&end)[2], const Mask& mask,
                                            const char* const (&values)[2], int64_t step) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int column = i / 4 * 8 + i % 2, r = i / 2 % 2;
    bool is_visible = begin[r] <= column && column < end[r];
    if (kIsGeneral && mask.data) {
      const float value = is_visible ? mask_value(mask.dtype, values[r] + column * step) : -kInfinity;
      S[i] += value;
      S[i] = S[i] < kLowest ? kLowest : S[i];  // A finite mask value does not hide a key.
      is_visible = value != -kInfinity;
    }
    S[i] = is_visible ? S[i] : -kInfinity;
  }
}

// Keep a value in a register, where the compiler would compute it again.
__device__ __forceinline__ void keep(uint32_t& x) { asm volatile("" : "+r"(x)); }

// Philox's keys by round.
struct RoundKeys {
  uint32_t key0[kPhiloxRounds], key1[kPhiloxRounds], offset;

  __device__ __forceinline__ void set(Seed seed) {
    offset = seed.offset;
#pragma unroll
    for (int round = 0; round < kPhiloxRounds; ++round) {
      keep(key0[round] = seed.key0 + (uint32_t)round * kPhiloxKey0);
      keep(key1[round] = seed.key1 + (uint32_t)round * kPhiloxKey1);
    }
  }

  // Replace a counter by its random words.
  __device__ __forceinline__ void draw(uint32_t (&counter)[4]) const {
#pragma unroll
    for (int round = 0; round < kPhiloxRounds; ++round) philox_round(counter, key0[round], key1[round]);
  }
};

}  // namespace
}  // namespace fastattn::cuda
