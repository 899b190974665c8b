// Each block takes the queries that share a key head and one part of the keys, which are thus read once; a second
// launch merges the parts ("Flash-Decoding", Dao, Haziza, Massa and Sizov 2023).
#include "attention.h"

#include "attention_tile.h"
#include "launch.h"
#include "rows.h"

namespace fastattn::cuda {
namespace {

constexpr int kMostSplits = kThreads;  // merge has a thread for each
constexpr int kLeastKeys = 128;        // of a part: two tiles a warp
constexpr float kLog2e = 1.4426950408889634f, kInfinity = __builtin_inff(), kLowest = -3.4028234663852886e38f;

// Results over parts of the keys, before they are divided by the sum: (split, batch, head, query), of which `out` has
// `pitch` columns.
struct Parts {
  float *out, *point, *sum;
  int splits, pitch;
};

// Of the rows (batch, head, query), counted through.
struct Row {
  int64_t batch, head, query;

  __device__ Row(const Attention& a, int index) {
    const unsigned queries = (unsigned)a.queries, heads = (unsigned)a.heads, all = (unsigned)index / queries;
    batch = all / heads, head = all % heads, query = (unsigned)index % queries;
  }
  __device__ int64_t offset(const Heads& heads) const {
    return batch * heads.batch + head * heads.head + query * heads.row;
  }
};

template <class A>
__host__ __device__ A smaller(A a, A b) {
  return a < b ? a : b;
}

template <class A>
__host__ __device__ A greater(A a, A b) {
  return a > b ? a : b;
}

__device__ float exponential(float x) { return exp2f(x * kLog2e); }

__device__ float4 multiply_add(float factor, float4 x, float4 sum) {
  return {fmaf(factor, x.x, sum.x), fmaf(factor, x.y, sum.y), fmaf(factor, x.z, sum.z), fmaf(factor, x.w, sum.w)};
}

// What the mask adds to a score; -inf hides the key.
__device__ float mask_value(const AttentionMask& mask, int64_t at) {
  switch (mask.dtype) {
    case Dtype::float32: return ((const float*)mask.data)[at];
    case Dtype::bfloat16: return to_float(((const bfloat16*)mask.data)[at]);
    case Dtype::float16: return to_float(((const float16*)mask.data)[at]);
    case Dtype::boolean: break;
  }
  return ((const uint8_t*)mask.data)[at] ? 0.0f : -kInfinity;
}

// Four columns of the result; the first thread of a row writes its statistics too.
template <class T>
__device__ void store_row(const Attention& a, int row, int column, float4 x, float point, float total) {
  T* out = (T*)a.out.data + Row(a, row).offset(a.out);
  const float columns[4] = {x.x, x.y, x.z, x.w};
  for (int n = 0; n < 4; ++n)
    if (column + n < a.value_depth) out[column + n] = from_float<T>(total == 0 ? 0.0f : columns[n] / total);
  if (column > 0) return;
  a.reference[row] = point;
  a.sum[row] = total;
  a.lse[row] = total == 0 ? -kInfinity : point + logf(total);
}

template <class Tile>
__global__ void __launch_bounds__(kThreads, Tile::kBlocks) attend(const Attention a, const Parts parts, int row_tiles) {
  using T = typename Tile::Element;
  constexpr int kRows = Tile::kRows, kOwnRows = Tile::kOwnRows, kOwnKeys = Tile::kOwnKeys;
  constexpr int kColumns = Tile::kWidth / 4, kStep = kTileKeys * kWarps;
  __shared__ typename Tile::Shared shared;
  __shared__ float warp_point[kWarps][kRows], warp_sum[kWarps][kRows], share[kWarps][kRows];
  __shared__ float row_point[kRows], row_sum[kRows];
  __shared__ float4 merged[kRows][kColumns + 1];
  const int warp = (int)threadIdx.x / 32;

  unsigned block = blockIdx.x;
  const int in_group = (int)(block % (unsigned)row_tiles) * kRows;  // the first of this block's rows
  block /= (unsigned)row_tiles;
  const int split = (int)(block % (unsigned)parts.splits);
  block /= (unsigned)parts.splits;
  const unsigned batch = block / (unsigned)a.key_heads, key_head = block % (unsigned)a.key_heads;
  const int group = (int)(a.heads / a.key_heads * a.queries);  // rows that share a key head
  const int first_row = (int)block * group + in_group;
  const int count = smaller(group - in_group, kRows);

  const int length = (int)(a.key_lengths ? a.key_lengths[batch] : a.keys);
  const int diagonal = a.lower_right ? length - (int)a.queries : 0;
  const int left = (int)a.window_left, right = (int)a.window_right;

  Tile tile;
  tile.start(
      [&](int in_tile) -> const T* {
        return in_tile < count ? (const T*)a.query.data + Row(a, first_row + in_tile).offset(a.query) : nullptr;
      },
      a.depth, shared);
  int middle[kOwnRows];  // of the window
  int64_t mask_row[kOwnRows];
  float point[kOwnRows], sum[kOwnRows];
  for (int r = 0; r < kOwnRows; ++r) {
    const Row row(a, first_row + tile.row(r));
    middle[r] = tile.row(r) < count ? (int)row.query + diagonal : -2 * (int)kMostKeys;
    mask_row[r] = row.batch * a.mask.batch + row.head * a.mask.head + row.query * a.mask.row;
    point[r] = -kInfinity, sum[r] = 0;
  }

  // This block's part of the keys that any query sees.
  const int begin = greater(diagonal - left, 0);
  const int visible = greater(smaller((int)a.queries + diagonal + right, length) - begin, 0);
  const int part = (int)ceil_div(visible, parts.splits * kStep) * kStep;
  const int from = begin + split * part, until = smaller(from + part, begin + visible);

  for (int first = from + warp * kTileKeys; first < until; first += kStep) {
    float bias[kOwnRows][kOwnKeys];  // -inf: hidden
    uint32_t seen = 0;
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
#pragma unroll
      for (int k = 0; k < kOwnKeys; ++k) {
        const int j = first + tile.key(k);
        float& x = bias[r][k];
        x = middle[r] - left <= j && j <= middle[r] + right && j < length ? 0.0f : -kInfinity;
        if (a.mask.data && x == 0) x = mask_value(a.mask, mask_row[r] + j * a.mask.column);
        seen |= (uint32_t)(x != -kInfinity) << tile.key(k);
      }
    }
    seen = __reduce_or_sync(kAllLanes, seen);
    if (seen == 0) continue;

    const typename Tile::Keys operands = {
        (const T*)a.key.data + (batch * a.key.batch + key_head * a.key.head + first * a.key.row),
        (const T*)a.value.data + (batch * a.value.batch + key_head * a.value.head + first * a.value.row),
        a.key.row,
        a.value.row,
        a.depth,
        a.value_depth,
        seen};
    float score[kOwnRows][kOwnKeys], factor[kOwnRows];
    tile.load(operands);
    tile.scores(operands, shared, score);
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
      float raised = point[r];
#pragma unroll
      for (int k = 0; k < kOwnKeys; ++k) {
        float& x = score[r][k];
        x *= a.scale;
        if (a.mask.data) {
          x += bias[r][k];
          x = x < kLowest ? kLowest : x;  // a finite mask hides nothing
        }
        x = bias[r][k] == -kInfinity ? -kInfinity : x;
        raised = fmaxf(raised, x);
      }
#pragma unroll
      for (int other = Tile::kLastLane; other >= Tile::kNextLane; other /= 2)
        raised = fmaxf(raised, __shfl_xor_sync(kAllLanes, raised, other));
      const float zero = raised == -kInfinity ? 0.0f : raised;  // a row that has seen nothing so far
      factor[r] = exponential(point[r] - zero);
      point[r] = raised;
      sum[r] *= factor[r];
#pragma unroll
      for (int k = 0; k < kOwnKeys; ++k) {
        score[r][k] = exponential(score[r][k] - zero);
        sum[r] += score[r][k];
      }
    }
    tile.accumulate(operands, shared, score, factor);
  }

  // The warps' parts of the keys become one, in order.
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
#pragma unroll
    for (int other = Tile::kLastLane; other >= Tile::kNextLane; other /= 2)
      sum[r] += __shfl_xor_sync(kAllLanes, sum[r], other);
    if (tile.key(0) == 0) {
      warp_point[warp][tile.row(r)] = point[r];
      warp_sum[warp][tile.row(r)] = sum[r];
    }
  }
  __syncthreads();
  if (threadIdx.x < kRows) {
    const int n = (int)threadIdx.x;
    float highest = -kInfinity, total = 0;
    for (int w = 0; w < kWarps; ++w) highest = fmaxf(highest, warp_point[w][n]);
    highest = highest == -kInfinity ? 0.0f : highest;
    for (int w = 0; w < kWarps; ++w) {
      share[w][n] = exponential(warp_point[w][n] - highest);
      total += warp_sum[w][n] * share[w][n];
    }
    row_point[n] = highest;
    row_sum[n] = total;
  }
  for (int w = 0; w < kWarps; ++w) {
    __syncthreads();
    if (w != warp) continue;
    tile.results([&](int n, int column, float4 x) {
      if (n >= count) return;
      float4& whole = merged[n][column / 4];
      if (w == 0) whole = {};
      if (share[w][n] != 0) whole = multiply_add(share[w][n], x, whole);  // of hidden keys x may hold anything
    });
  }
  __syncthreads();
  for (int n = (int)threadIdx.x; n < kRows * kColumns; n += kThreads) {
    const int in_tile = n / kColumns, column = n % kColumns;
    if (in_tile >= count || 4 * column >= a.value_depth) continue;
    const int row = first_row + in_tile;
    if (parts.splits == 1) {
      store_row<T>(a, row, 4 * column, merged[in_tile][column], row_point[in_tile], row_sum[in_tile]);
      continue;
    }
    const int64_t at = split * (a.batch * a.heads * a.queries) + row;
    *(float4*)(parts.out + (at * parts.pitch + 4 * column)) = merged[in_tile][column];
    if (column == 0) parts.point[at] = row_point[in_tile], parts.sum[at] = row_sum[in_tile];
  }
}

// One row from its parts: weights exp(its reference point - the highest).
template <class T>
__global__ void __launch_bounds__(kThreads) merge(const Attention a, const Parts parts) {
  __shared__ float of_warp[kWarps], weight[kMostSplits];
  __shared__ float4 of_group[kThreads];
  const int thread = (int)threadIdx.x;
  const int64_t rows = a.batch * a.heads * a.queries;
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
  const float part_sum = thread < parts.splits ? parts.sum[thread * rows + row] : 0.0f;
  const float part_point = part_sum == 0 ? -kInfinity : parts.point[thread * rows + row];
  const float highest = reduce(part_point, [](float x, float y) { return fmaxf(x, y); });
  const float point = highest == -kInfinity ? 0.0f : highest;
  weight[thread] = exponential(part_point - point);
  const float total = reduce(part_sum * weight[thread], [](float x, float y) { return x + y; });

  // Four columns a thread, and as many parts at a time as the block then has threads for.
  const int columns = parts.pitch / 4, groups = kThreads / columns, column = thread % columns, group = thread / columns;
  float4 sum = {};
  if (group < groups)
#pragma unroll 4
    for (int split = group; split < parts.splits; split += groups)
      if (weight[split] != 0)
        sum = multiply_add(weight[split],
                           *(const float4*)(parts.out + ((split * rows + row) * parts.pitch + 4 * column)), sum);
  of_group[thread] = sum;
  __syncthreads();
  if (group > 0) return;
  for (int n = 1; n < groups; ++n) sum = multiply_add(1.0f, of_group[n * columns + column], sum);
  store_row<T>(a, row, 4 * column, sum, point, total);
}

int64_t row_tiles(const Attention& a) {
  return ceil_div(a.heads / a.key_heads * a.queries, a.dtype == Dtype::float32 ? 8 : 16);
}

int64_t pitch(const Attention& a) { return ceil_div(a.value_depth, 4) * 4; }

// Whether every row begins at a multiple of 16 bytes and is one long.
bool is_aligned(const Attention& a) {
  const auto fits = [&](const Heads& heads, int depth) {
    return ((int64_t)heads.data | (heads.batch | heads.head | heads.row | depth) * size_of(a.dtype)) % 16 == 0;
  };
  return fits(a.query, a.depth) && fits(a.key, a.depth) && fits(a.value, a.value_depth);
}

template <class Tile>
void run(const Attention& a, const Parts& parts, cudaStream_t stream) {
  const int64_t tiles = row_tiles(a);
  launch(attend<Tile>, a.batch * a.key_heads * parts.splits * tiles, kThreads, stream, a, parts, (int)tiles);
  if (parts.splits > 1)
    launch(merge<typename Tile::Element>, a.batch * a.heads * a.queries, kThreads, stream, a, parts);
}

template <class T, int kSize>
void run_sized(const Attention& a, const Parts& parts, cudaStream_t stream) {
  if constexpr (sizeof(T) == sizeof(float))
    is_aligned(a) ? run<FmaTile<kSize, true>>(a, parts, stream) : run<FmaTile<kSize, false>>(a, parts, stream);
  else
    is_aligned(a) ? run<TensorTile<T, kSize, true>>(a, parts, stream)
                  : run<TensorTile<T, kSize, false>>(a, parts, stream);
}

template <class T>
void run_typed(const Attention& a, const Parts& parts, cudaStream_t stream) {
  const int size = greater(a.depth, a.value_depth);
  if (size <= 64)
    run_sized<T, 64>(a, parts, stream);
  else if (size <= 128)
    run_sized<T, 128>(a, parts, stream);
  else
    run_sized<T, 256>(a, parts, stream);
}

}  // namespace

int attention_splits(const Attention& a, int device) {
  int multiprocessors = 0;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  // A multiprocessor needs some 64 KiB on their way to it; a block has 256 bytes a column.
  const int64_t blocks = a.batch * a.key_heads * row_tiles(a);
  const int64_t resident = multiprocessors * (256 / greater(greater(a.depth, a.value_depth), 64));
  const int64_t window = a.window_left + a.window_right + a.queries;
  const int64_t useful = smaller(resident / greater<int64_t>(blocks, 1), smaller(a.keys, window) / kLeastKeys);
  return (int)smaller<int64_t>(greater<int64_t>(useful, 1), kMostSplits);
}

int64_t attention_workspace(const Attention& a, int splits) {
  return splits == 1 ? 0 : splits * (a.batch * a.heads * a.queries) * (pitch(a) + 2);
}

void attention(const Attention& a, int splits, float* workspace, cudaStream_t stream) {
  const int64_t rows = splits * (a.batch * a.heads * a.queries);
  float* point = workspace + rows * pitch(a);
  const Parts parts = {workspace, point, point + rows, splits, (int)pitch(a)};
  switch (a.dtype) {
    case Dtype::float32: return run_typed<float>(a, parts, stream);
    case Dtype::bfloat16: return run_typed<bfloat16>(a, parts, stream);
    case Dtype::float16: return run_typed<float16>(a, parts, stream);
    case Dtype::boolean: return;
  }
}

}  // namespace fastattn::cuda
