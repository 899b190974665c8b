// A warp's tile of keys and its products with up to kRows rows of queries, in registers.
//
// Memory bandwidth bounds the kernel, so the arithmetic must take less time than the loads. Memory feeds a
// multiprocessor of an H200 10 elements of 16 bits per cycle. Each element takes one FMA per row. So 16 rows take 160
// FMAs per cycle: more than its 128 FMA lanes, but a tenth of its tensor cores. In float32 memory feeds 5 elements, and
// 8 rows take 40 FMA lanes.
//
// The mapping of a lane's fragments to keys, rows and columns is free as long as A and B agree. So each lane loads 16
// bytes of keys or of values at a time and uses them without a shuffle.
#pragma once
#include "mma.h"
#include "rows.h"

namespace fastattn::cuda {
namespace {

constexpr int kThreads = kWarp * kWarps;
constexpr int kTileKeys = 16;

// The type of a lane's vectorised load of 16 bytes.
template <class T>
struct LineOf {
  using Line = uint4;
};
template <>
struct LineOf<float> {
  using Line = float4;
};
template <class T>
using Line = typename LineOf<T>::Line;

// Load a row's elements from `column` on. Elements beyond `size` are 0; so are all elements of a row not wanted.
template <class T, bool kAligned>
__device__ inline Line<T> load_line(const T* row, int column, int size, bool wanted) {
  constexpr int kCount = sizeof(Line<T>) / sizeof(T);
  Line<T> line = {};
  if (kAligned) {
    if (wanted && column < size) line = *(const Line<T>*)(row + column);
  } else {
    T elements[kCount] = {};
    for (int e = 0; e < kCount; ++e)
      if (wanted && column + e < size) elements[e] = row[column + e];
    memcpy(&line, elements, sizeof line);
  }
  return line;
}

// The keys and values of a tile. Keys that are not `visible` to any row may hold NaN and are loaded as 0.
template <class T, int kSize, bool kAligned>
struct Operands {
  static constexpr int kLoads = kTileKeys * kSize * (int)sizeof(T) / (16 * 32);  // Loads of keys per lane.
  static constexpr bool kHeld = kLoads <= 8;  // All loads of keys and values are in flight at once.
  static constexpr int kAtOnce = kHeld ? kLoads : sizeof(T) == 4 ? 8 : 4;  // Loads in flight that registers allow.
  const T *key, *value;                                                    // The tile's first key and value.
  int64_t key_row, value_row;
  int head_dim, value_head_dim;
  uint32_t visible;

  __device__ Line<T> load_key(int j, int column) const {
    return load_line<T, kAligned>(key + j * key_row, column, head_dim, visible >> j & 1);
  }
  __device__ Line<T> load_value(int j, int column) const {
    const bool wanted = visible >> j & 1;
    return load_line<T, kAligned>(value + j * value_row, column, value_head_dim, wanted);
  }
};

// A tile in bfloat16 or float16, on tensor cores. C is 16 rows x 8 keys. Lane 4g + c has its rows g and g + 8 and keys
// 2c and 2c + 1. The product with the values needs the same elements of the weights in this lane, as A.
template <class T, int kSize, bool kAligned>
struct TensorTile {
  using Element = T;
  using Keys = Operands<T, kSize, kAligned>;
  static constexpr int kWidth = kSize, kRows = 16, kOwnRows = 2, kOwnKeys = 4;
  static constexpr int kNextLane = 1, kLastLane = 2;
  static constexpr int kBlocks = kSize == 64 && kAligned ? 4 : 2;  // minimum resident blocks per multiprocessor
  struct Shared {
    uint4 query[kSize / 32][2][32];  // A of two instructions, per lane
  };

  int g, c;
  uint4 keys[Keys::kHeld ? Keys::kLoads : 1], values[Keys::kHeld ? Keys::kLoads : 1];
  float out[kSize / 64][8][4];  // out[block][n]: C for columns 64 block + 8 g' + n, g' = 0 to 7

  __device__ int row(int r) const { return g + 8 * r; }
  __device__ int key(int k) const { return 2 * c + k % 2 + k / 2 * 8; }

  template <class Row>
  __device__ void start(const Row& query_row, int head_dim, Shared& shared) {
    g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    for (int q = threadIdx.x / 32; q < kSize / 32; q += kWarps) {
      const T *upper = query_row(row(0)), *lower = query_row(row(1));
      const uint4 x = load_line<T, kAligned>(upper, 32 * q + 8 * c, head_dim, upper);
      const uint4 y = load_line<T, kAligned>(lower, 32 * q + 8 * c, head_dim, lower);
      shared.query[q][0][threadIdx.x % 32] = {x.x, y.x, x.y, y.y};
      shared.query[q][1][threadIdx.x % 32] = {x.z, y.z, x.w, y.w};
    }
    __syncthreads();
    for (auto& block : out)
      for (auto& column : block)
        for (float& x : column) x = 0;
  }

  __device__ uint4 load_key(const Keys& o, int n) const { return o.load_key(g + n % 2 * 8, n / 2 * 32 + 8 * c); }
  __device__ uint4 load_value(const Keys& o, int n) const { return o.load_value(key(n % 4), n / 4 * 64 + 8 * g); }

  __device__ void load(const Keys& o) {
    if constexpr (Keys::kHeld) {
#pragma unroll
      for (int n = 0; n < Keys::kLoads; ++n) keys[n] = load_key(o, n);
#pragma unroll
      for (int n = 0; n < Keys::kLoads; ++n) values[n] = load_value(o, n);
    }
  }

  __device__ void scores(const Keys& o, const Shared& shared, float (&score)[kOwnRows][kOwnKeys]) const {
    float product[2][4] = {};
#pragma unroll Keys::kAtOnce
    for (int n = 0; n < Keys::kLoads; ++n) {
      const uint4 k = Keys::kHeld ? keys[n] : load_key(o, n);
      const uint4(&query)[2][32] = shared.query[n / 2];
      mma_16x8x16(product[n % 2], query[0][4 * g + c], k.x, k.y, T{});
      mma_16x8x16(product[n % 2], query[1][4 * g + c], k.z, k.w, T{});
    }
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r)
      for (int k = 0; k < kOwnKeys; ++k) score[r][k] = product[k / 2][2 * r + k % 2];
  }

  __device__ void accumulate(const Keys& o, Shared&, const float (&weight)[kOwnRows][kOwnKeys],
                             const float (&rescale)[kOwnRows]) {
    const auto both = [&](int r, int k) {
      return from_float<T>(weight[r][k]).bits | (uint32_t)from_float<T>(weight[r][k + 1]).bits << 16;
    };
    const uint4 weights = {both(0, 0), both(1, 0), both(0, 2), both(1, 2)};
#pragma unroll
    for (int block = 0; block < kSize / 64; ++block) {
      uint32_t words[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint4 v = Keys::kHeld ? values[4 * block + k] : load_value(o, 4 * block + k);
        words[k][0] = v.x, words[k][1] = v.y, words[k][2] = v.z, words[k][3] = v.w;
      }
#pragma unroll
      for (int column = 0; column < 8; ++column) {
        const auto pair = [&](int k) {  // the column's values of keys k and k + 1
          const uint32_t first = words[k][column / 2], second = words[k + 1][column / 2];
          return column % 2 ? first >> 16 | (second & 0xffff0000u) : (first & 0xffffu) | second << 16;
        };
        float (&x)[4] = out[block][column];
        x[0] *= rescale[0], x[1] *= rescale[0], x[2] *= rescale[1], x[3] *= rescale[1];
        mma_16x8x16(x, weights, pair(0), pair(2), T{});
      }
    }
  }

  // Call put(row, column, four neighbouring columns) for all results of this lane.
  template <class Put>
  __device__ void results(const Put& put) {
#pragma unroll
    for (int block = 0; block < kSize / 64; ++block)
      for (int r = 0; r < 2; ++r)
        for (int half = 0; half < 2; ++half)
          for (int n = 0; n < 8; n += 4) {
            const float (&x)[8][4] = out[block];
            const int at = 2 * r + half;
            put(row(r), 64 * block + 16 * c + 8 * half + n, float4{x[n][at], x[n + 1][at], x[n + 2][at], x[n + 3][at]});
          }
  }
};

// A tile in float32, on FMA units. Lane 4g + c loads 4 of each 16 columns of keys g and g + 8. Four lanes reduce and
// scatter their sums for all rows. The weights go through shared memory to the lanes that load the values' columns.
template <int kSize, bool kAligned>
struct FmaTile {
  using Element = float;
  using Keys = Operands<float, kSize, kAligned>;
  static constexpr int kWidth = kSize, kRows = 8, kOwnRows = 2, kOwnKeys = 2, kNextLane = 4, kLastLane = 16;
  static constexpr int kBlocks = 2;
  static constexpr int kLanes = kSize < 128 ? kSize / 4 : 32;  // lanes per row of the values
  static constexpr int kChunks = kSize / (4 * kLanes), kKeysAtOnce = 32 / kLanes;
  struct Shared {
    float4 query[kRows][kSize / 4];
    float weight[kWarps][kTileKeys][kRows], rescale[kWarps][kRows];
  };

  int lane, g, c;
  float4 keys[Keys::kHeld ? Keys::kLoads : 1], values[Keys::kHeld ? Keys::kLoads : 1];
  float out[kRows][kChunks][4];

  __device__ int row(int r) const { return 2 * c + r; }
  __device__ int key(int k) const { return g + 8 * k; }

  template <class Row>
  __device__ void start(const Row& query_row, int head_dim, Shared& shared) {
    lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    for (int n = threadIdx.x; n < kRows * kSize / 4; n += kThreads) {
      const float* from = query_row(n / (kSize / 4));
      shared.query[n / (kSize / 4)][n % (kSize / 4)] =
          load_line<float, kAligned>(from, n % (kSize / 4) * 4, head_dim, from);
    }
    __syncthreads();
#pragma unroll
    for (auto& of_row : out)
      for (auto& chunk : of_row)
        for (float& x : chunk) x = 0;
  }

  __device__ float4 load_key(const Keys& o, int n) const { return o.load_key(g + n % 2 * 8, n / 2 * 16 + 4 * c); }
  __device__ int value_key(int n) const { return n / kChunks * kKeysAtOnce + lane / kLanes; }
  __device__ int column(int chunk) const { return (chunk * kLanes + lane % kLanes) * 4; }
  __device__ float4 load_value(const Keys& o, int n) const { return o.load_value(value_key(n), column(n % kChunks)); }

  __device__ void load(const Keys& o) {
    if constexpr (Keys::kHeld) {
#pragma unroll
      for (int n = 0; n < Keys::kLoads; ++n) keys[n] = load_key(o, n);
#pragma unroll
      for (int n = 0; n < Keys::kLoads; ++n) values[n] = load_value(o, n);
    }
  }

  __device__ void scores(const Keys& o, const Shared& shared, float (&score)[kOwnRows][kOwnKeys]) const {
    float part[2][kRows] = {};
#pragma unroll Keys::kAtOnce
    for (int n = 0; n < Keys::kLoads; ++n) {
      const float4 k = Keys::kHeld ? keys[n] : load_key(o, n);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float4 q = shared.query[r][n / 2 * 4 + c];
        float& sum = part[n % 2][r];
        sum = fmaf(q.x, k.x, fmaf(q.y, k.y, fmaf(q.z, k.z, fmaf(q.w, k.w, sum))));
      }
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float half[4];
#pragma unroll
      for (int r = 0; r < 4; ++r)
        half[r] =
            (c & 2 ? part[k][r + 4] : part[k][r]) + __shfl_xor_sync(kAllLanes, c & 2 ? part[k][r] : part[k][r + 4], 2);
#pragma unroll
      for (int r = 0; r < 2; ++r)
        score[r][k] = (c & 1 ? half[r + 2] : half[r]) + __shfl_xor_sync(kAllLanes, c & 1 ? half[r] : half[r + 2], 1);
    }
  }

  __device__ void accumulate(const Keys& o, Shared& shared, const float (&weight)[kOwnRows][kOwnKeys],
                             const float (&rescale)[kOwnRows]) {
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
      for (int k = 0; k < kOwnKeys; ++k) shared.weight[warp][key(k)][row(r)] = weight[r][k];
      if (g == 0) shared.rescale[warp][row(r)] = rescale[r];
    }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      for (auto& chunk : out[r])
        for (float& x : chunk) x *= shared.rescale[warp][r];
#pragma unroll Keys::kAtOnce
    for (int n = 0; n < Keys::kLoads; ++n) {
      const float4 v = Keys::kHeld ? values[n] : load_value(o, n);
      const float* weights = shared.weight[warp][value_key(n)];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float (&x)[4] = out[r][n % kChunks];
        const float w = weights[r];
        x[0] = fmaf(w, v.x, x[0]), x[1] = fmaf(w, v.y, x[1]), x[2] = fmaf(w, v.z, x[2]), x[3] = fmaf(w, v.w, x[3]);
      }
    }
    __syncwarp();
  }

  template <class Put>
  __device__ void results(const Put& put) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        float (&x)[4] = out[r][chunk];
        if (kKeysAtOnce == 2)
          for (float& y : x) y += __shfl_xor_sync(kAllLanes, y, 16);
        if (lane < kLanes) put(r, column(chunk), float4{x[0], x[1], x[2], x[3]});
      }
  }
};

}  // namespace
}  // namespace fastattn::cuda
