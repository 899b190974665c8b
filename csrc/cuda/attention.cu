// Attention of few queries to many keys, forward, for decoding with a cache of keys and values. Reading the keys and
// values once bounds its time ("Flash-Decoding", Dao, Haziza, Massa and Sizov 2023).
//
//   attend, for each block of threads: a sequence, a key/value head, a split of the keys, up to Tile::kRows rows:
//     for each warp: for every kWarps-th tile of kTileKeys = 16 keys of the split, ascending:
//       S (rows, keys) = Q K';  P = exp(S - row_max);  O (rows, Ev) = rescale O + P V;
//     merge the warps' O in order; write the output, or the split's part if there are several splits.
//   merge, for each block of threads: one row: merge its splits.
//
// query (B, Hq, Lq, E), key (B, Hk, Lk, E), value (B, Hk, Lk, Ev) and out (B, Hq, Lq, Ev) have dtype T. LSE, row_max
// and row_sum are (B, Hq, Lq), float32. A row is one query of one head; rows that share a key/value head are
// neighbours. A block of threads (a CUDA block) owns 8 rows of S in float32, 16 in 16-bit types, in the columns of its
// split.
#include "attention_mask.h"
#include "attention_tile.h"
#include "kernels.h"
#include "launch.h"
#include "rows.h"

namespace fastattn::cuda {
namespace {

constexpr int kMaxSplits = kThreads;  // One thread per split in merge.
constexpr int kMinKeys = 128;         // Minimum keys per split: two tiles per warp.
constexpr float kLog2e = 1.4426950408889634f;

// Unnormalised results over splits of the keys: (count, batch, num_heads, seqlen_q) rows, float32. `out` has `pitch`
// columns per row.
struct Splits {
  float *out, *row_max, *row_sum;
  int count, pitch;
};

// The position of a flat index into (batch, num_heads, seqlen_q).
struct Row {
  int64_t batch, head, query;

  __device__ Row(const Attention& a, int index) {
    const unsigned queries = (unsigned)a.seqlen_q, heads = (unsigned)a.num_heads, all = (unsigned)index / queries;
    batch = all / heads, head = all % heads, query = (unsigned)index % queries;
  }
  __device__ int64_t offset(const Heads& heads) const { return row_offset(heads, batch, head, query); }
};

__device__ float exponential(float x) { return exp2f(x * kLog2e); }

__device__ float4 multiply_add(float factor, float4 x, float4 sum) {
  return {fmaf(factor, x.x, sum.x), fmaf(factor, x.y, sum.y), fmaf(factor, x.z, sum.z), fmaf(factor, x.w, sum.w)};
}

// Store four columns of the result. The first thread of a row stores its statistics too, if they are wanted.
template <class T>
__device__ void store_row(const Attention& a, int row, int column, float4 x, float row_max, float row_sum) {
  T* out = (T*)a.out.data + Row(a, row).offset(a.out);
  const float columns[4] = {x.x, x.y, x.z, x.w};
  for (int n = 0; n < 4; ++n)
    if (column + n < a.value_head_dim) out[column + n] = from_float<T>(row_sum == 0 ? 0.0f : columns[n] / row_sum);
  if (column > 0 || !a.lse) return;
  a.row_max[row] = row_max;
  a.row_sum[row] = row_sum;
  a.lse[row] = row_sum == 0 ? -kInfinity : row_max + logf(row_sum);
}

template <class Tile>
__global__ void __launch_bounds__(kThreads, Tile::kBlocks)
    attend(const Attention a, const Splits splits, int row_tiles) {
  using T = typename Tile::Element;
  constexpr int kRows = Tile::kRows, kOwnRows = Tile::kOwnRows, kOwnKeys = Tile::kOwnKeys;
  constexpr int kColumns = Tile::kWidth / 4, kStep = kTileKeys * kWarps;
  __shared__ typename Tile::Shared shared;
  __shared__ float warp_max[kWarps][kRows], warp_sum[kWarps][kRows], warp_scale[kWarps][kRows];
  __shared__ float row_max[kRows], row_sum[kRows];
  __shared__ float4 merged[kRows][kColumns + 1];
  const int warp = (int)threadIdx.x / 32;

  unsigned block = blockIdx.x;
  const int in_group = (int)(block % (unsigned)row_tiles) * kRows;  // this block's first row within the group
  block /= (unsigned)row_tiles;
  const int split = (int)(block % (unsigned)splits.count);
  block /= (unsigned)splits.count;
  const unsigned batch = block / (unsigned)a.num_kv_heads, kv_head = block % (unsigned)a.num_kv_heads;
  const int group = (int)(a.num_heads / a.num_kv_heads * a.seqlen_q);  // rows that share a key/value head
  const int first_row = (int)block * group + in_group;
  const int count = min(group - in_group, kRows);

  const int64_t length = a.key_lengths ? a.key_lengths[batch] : a.seqlen_k;
  const Visibility<int> visibility(length, a.seqlen_q, a.lower_right, a.window_left, a.window_right);

  Tile tile;
  tile.start(
      [&](int in_tile) -> const T* {
        return in_tile < count ? (const T*)a.query.data + Row(a, first_row + in_tile).offset(a.query) : nullptr;
      },
      a.head_dim, shared);
  int center[kOwnRows];  // The key on the diagonal. Out-of-range rows get a key that no window can reach.
  int64_t mask_row[kOwnRows];
  float own_max[kOwnRows], own_sum[kOwnRows];
  for (int r = 0; r < kOwnRows; ++r) {
    const Row row(a, first_row + tile.row(r));
    center[r] = tile.row(r) < count ? (int)row.query + visibility.diagonal : -2 * (int)kMaxKeys;
    mask_row[r] = mask_offset(a.mask, row.batch, row.head, row.query, 0);
    own_max[r] = -kInfinity, own_sum[r] = 0;
  }

  // The keys of this block's split, among those that any query sees through the window.
  const int begin = visibility.begin(0), end = visibility.end((int)a.seqlen_q - 1);
  const int share = (int)ceil_div(end - begin, splits.count * kStep) * kStep;
  const int from = begin + split * share, until = min(from + share, end);

  for (int first = from + warp * kTileKeys; first < until; first += kStep) {
    float bias[kOwnRows][kOwnKeys];  // -inf for hidden keys
    uint32_t visible = 0;
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
#pragma unroll
      for (int k = 0; k < kOwnKeys; ++k) {
        const int j = first + tile.key(k);
        float& x = bias[r][k];
        x = visibility.is_visible(center[r], j) ? 0.0f : -kInfinity;
        if (a.mask.data && x == 0) x = mask_value(a.mask, mask_row[r] + j * a.mask.column);
        visible |= (uint32_t)(x != -kInfinity) << tile.key(k);
      }
    }
    visible = __reduce_or_sync(kAllLanes, visible);
    if (visible == 0) continue;

    const typename Tile::Keys operands = {
        (const T*)a.key.data + (batch * a.key.batch + kv_head * a.key.head + first * a.key.row),
        (const T*)a.value.data + (batch * a.value.batch + kv_head * a.value.head + first * a.value.row),
        a.key.row,
        a.value.row,
        a.head_dim,
        a.value_head_dim,
        visible};
    float score[kOwnRows][kOwnKeys], rescale[kOwnRows];
    tile.load(operands);
    tile.scores(operands, shared, score);
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
      float new_max = own_max[r];
#pragma unroll
      for (int k = 0; k < kOwnKeys; ++k) {
        float& x = score[r][k];
        x *= a.scale;
        if (a.mask.data) {
          x += bias[r][k];
          x = x < kLowest ? kLowest : x;  // a finite mask value does not hide a key
        }
        x = bias[r][k] == -kInfinity ? -kInfinity : x;
        new_max = fmaxf(new_max, x);
      }
#pragma unroll
      for (int other = Tile::kLastLane; other >= Tile::kNextLane; other /= 2)
        new_max = fmaxf(new_max, __shfl_xor_sync(kAllLanes, new_max, other));
      const float finite_max = new_max == -kInfinity ? 0.0f : new_max;  // 0 for a row that has seen no key yet
      rescale[r] = exponential(own_max[r] - finite_max);
      own_max[r] = new_max;
      own_sum[r] *= rescale[r];
#pragma unroll
      for (int k = 0; k < kOwnKeys; ++k) {
        score[r][k] = exponential(score[r][k] - finite_max);
        own_sum[r] += score[r][k];
      }
    }
    tile.accumulate(operands, shared, score, rescale);
  }

  // Merge the warps' results, in order.
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
#pragma unroll
    for (int other = Tile::kLastLane; other >= Tile::kNextLane; other /= 2)
      own_sum[r] += __shfl_xor_sync(kAllLanes, own_sum[r], other);
    if (tile.key(0) == 0) {
      warp_max[warp][tile.row(r)] = own_max[r];
      warp_sum[warp][tile.row(r)] = own_sum[r];
    }
  }
  __syncthreads();
  if (threadIdx.x < kRows) {
    const int n = (int)threadIdx.x;
    float highest = -kInfinity, total = 0;
    for (int w = 0; w < kWarps; ++w) highest = fmaxf(highest, warp_max[w][n]);
    highest = highest == -kInfinity ? 0.0f : highest;
    for (int w = 0; w < kWarps; ++w) {
      warp_scale[w][n] = exponential(warp_max[w][n] - highest);
      total += warp_sum[w][n] * warp_scale[w][n];
    }
    row_max[n] = highest;
    row_sum[n] = total;
  }
  for (int w = 0; w < kWarps; ++w) {
    __syncthreads();
    if (w != warp) continue;
    tile.results([&](int n, int column, float4 x) {
      if (n >= count) return;
      float4& whole = merged[n][column / 4];
      if (w == 0) whole = {};
      if (warp_scale[w][n] != 0) whole = multiply_add(warp_scale[w][n], x, whole);  // with a scale of 0, x may be NaN
    });
  }
  __syncthreads();
  for (int n = (int)threadIdx.x; n < kRows * kColumns; n += kThreads) {
    const int in_tile = n / kColumns, column = n % kColumns;
    if (in_tile >= count || 4 * column >= a.value_head_dim) continue;
    const int row = first_row + in_tile;
    if (splits.count == 1) {
      store_row<T>(a, row, 4 * column, merged[in_tile][column], row_max[in_tile], row_sum[in_tile]);
      continue;
    }
    const int64_t at = split * (a.batch * a.num_heads * a.seqlen_q) + row;
    *(float4*)(splits.out + (at * splits.pitch + 4 * column)) = merged[in_tile][column];
    if (column == 0) splits.row_max[at] = row_max[in_tile], splits.row_sum[at] = row_sum[in_tile];
  }
}

// Merge the splits of one row, weighted by exp(row_max - highest row_max).
template <class T>
__global__ void __launch_bounds__(kThreads) merge(const Attention a, const Splits splits) {
  __shared__ float of_warp[kWarps], weight[kMaxSplits];
  __shared__ float4 of_group[kThreads];
  const int thread = (int)threadIdx.x;
  const int64_t rows = a.batch * a.num_heads * a.seqlen_q;
  const int row = (int)blockIdx.x;

  const auto reduce = [&](float x, const auto& combine) {
    for (int other = 16; other > 0; other /= 2) x = combine(x, __shfl_xor_sync(kAllLanes, x, other));
    __syncthreads();
    if (thread % 32 == 0) of_warp[thread / 32] = x;
    __syncthreads();
    x = of_warp[0];
    for (int w = 1; w < kWarps; ++w) x = combine(x, of_warp[w]);
    return x;
  };
  const float split_sum = thread < splits.count ? splits.row_sum[thread * rows + row] : 0.0f;
  const float split_max = split_sum == 0 ? -kInfinity : splits.row_max[thread * rows + row];
  const float highest = reduce(split_max, [](float x, float y) { return fmaxf(x, y); });
  const float row_max = highest == -kInfinity ? 0.0f : highest;
  weight[thread] = exponential(split_max - row_max);
  const float row_sum = reduce(split_sum * weight[thread], [](float x, float y) { return x + y; });

  // Each thread sums four columns. The block handles as many splits at a time as it has threads for.
  const int columns = splits.pitch / 4, groups = kThreads / columns, column = thread % columns,
            group = thread / columns;
  float4 sum = {};
  if (group < groups)
#pragma unroll 4
    for (int split = group; split < splits.count; split += groups)
      if (weight[split] != 0)
        sum = multiply_add(weight[split],
                           *(const float4*)(splits.out + ((split * rows + row) * splits.pitch + 4 * column)), sum);
  of_group[thread] = sum;
  __syncthreads();
  if (group > 0) return;
  for (int n = 1; n < groups; ++n) sum = multiply_add(1.0f, of_group[n * columns + column], sum);
  store_row<T>(a, row, 4 * column, sum, row_max, row_sum);
}

int64_t row_tiles(const Attention& a) {
  return ceil_div(a.num_heads / a.num_kv_heads * a.seqlen_q, a.dtype == Dtype::float32 ? 8 : 16);
}

int64_t pitch(const Attention& a) { return ceil_div(a.value_head_dim, 4) * 4; }

// Whether every row of the operands begins at a multiple of 16 bytes and its length is such a multiple.
bool is_aligned(const Attention& a) {
  const auto fits = [&](const Heads& heads, int head_dim) {
    const int64_t strides = heads.batch | heads.head | heads.row | head_dim;
    return ((int64_t)heads.data | strides * size_of(a.dtype)) % 16 == 0;
  };
  return fits(a.query, a.head_dim) && fits(a.key, a.head_dim) && fits(a.value, a.value_head_dim);
}

template <class Tile>
void launch_tile(const Attention& a, const Splits& splits, cudaStream_t stream) {
  const int64_t tiles = row_tiles(a);
  launch(attend<Tile>, a.batch * a.num_kv_heads * splits.count * tiles, kThreads, stream, a, splits, (int)tiles);
  if (splits.count > 1)
    launch(merge<typename Tile::Element>, a.batch * a.num_heads * a.seqlen_q, kThreads, stream, a, splits);
}

template <class T, int kSize>
void launch_sized(const Attention& a, const Splits& splits, cudaStream_t stream) {
  if constexpr (sizeof(T) == sizeof(float))
    is_aligned(a) ? launch_tile<FmaTile<kSize, true>>(a, splits, stream)
                  : launch_tile<FmaTile<kSize, false>>(a, splits, stream);
  else
    is_aligned(a) ? launch_tile<TensorTile<T, kSize, true>>(a, splits, stream)
                  : launch_tile<TensorTile<T, kSize, false>>(a, splits, stream);
}

template <class T>
void launch_typed(const Attention& a, const Splits& splits, cudaStream_t stream) {
  const int size = max(a.head_dim, a.value_head_dim);
  if (size <= 64)
    launch_sized<T, 64>(a, splits, stream);
  else if (size <= 128)
    launch_sized<T, 128>(a, splits, stream);
  else
    launch_sized<T, 256>(a, splits, stream);
}

}  // namespace

int multiprocessors_of(int device) {
  int count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

int num_splits_of(const Attention& a, int device) {
  // A multiprocessor needs some 64 KiB in flight. A block has 256 bytes per column in flight.
  const int64_t blocks = a.batch * a.num_kv_heads * row_tiles(a);
  const int64_t resident = multiprocessors_of(device) * (256 / max(max(a.head_dim, a.value_head_dim), 64));
  const int64_t window = a.window_left + a.window_right + a.seqlen_q;
  const int64_t useful = min(resident / max(blocks, 1), min(a.seqlen_k, window) / kMinKeys);
  return (int)min(max(useful, 1), kMaxSplits);
}

int64_t workspace(const Attention& a, int num_splits) {
  return num_splits == 1 ? 0 : num_splits * (a.batch * a.num_heads * a.seqlen_q) * (pitch(a) + 2);
}

void run(const Attention& a, int num_splits, float* workspace, cudaStream_t stream) {
  const int64_t rows = num_splits * (a.batch * a.num_heads * a.seqlen_q);
  Splits splits;
  splits.out = workspace, splits.row_max = workspace + rows * pitch(a), splits.row_sum = splits.row_max + rows;
  splits.count = num_splits, splits.pitch = (int)pitch(a);
  switch (a.dtype) {
    case Dtype::float32: return launch_typed<float>(a, splits, stream);
    case Dtype::bfloat16: return launch_typed<bfloat16>(a, splits, stream);
    case Dtype::float16: return launch_typed<float16>(a, splits, stream);
    case Dtype::boolean: return;
  }
}

}  // namespace fastattn::cuda
