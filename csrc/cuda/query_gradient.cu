// The kernels by query of attention's backward pass for Hopper, before and after its main kernel.
//
//   prepare_rows, for each tile of queries of a head: for each query:
//     delta = rowsum(dO (O + residual)) - dLSE; the values by which P is computed again;
//   finish, for each tile of queries of a head: k = the mean of some keys that it sees; for each query:
//     dQ = scale (sum dS K + (dLSE - sum dS) k).
//
// sum dS is dLSE in exact arithmetic. That of the rounded dS is not, so what keys have in common would remain in dQ.
// query, key, out, residual, dO and dQ have dtype T; O and residual are (B, Hq, Lq, Ev). query_gradient.h has the rest.
#include "query_gradient.h"

#include "hopper_attention.h"
#include "launch.h"

namespace fastattn::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxHeadDim = 256;

// A block's tile of queries.
struct Tile {
  int batch, head, number;
  Sequence sequence;
  int first;  // its first query
  int place;  // in the buffers

  __device__ __forceinline__ explicit Tile(const QueryGradient& p)
      : batch((int)blockIdx.x / p.tiles_q / (int)p.num_heads),
        head((int)blockIdx.x / p.tiles_q % (int)p.num_heads),
        number((int)blockIdx.x % p.tiles_q),
        sequence(p, batch),
        first(number * kQueries),
        place(head * p.places + p.first_place(batch) + number) {}
};

// Return the place of a query in the statistics.
__device__ __forceinline__ int64_t statistic(const QueryGradient& p, const Tile& tile, int row) {
  if (p.cu_seq_q) return (tile.sequence.first_query + row) * p.num_heads + tile.head;
  return (tile.batch * p.num_heads + tile.head) * p.seqlen_q + row;
}

// `lanes` lanes have the columns of a row.
__global__ void __launch_bounds__(kThreads) prepare(const QueryGradient p, int lanes, bool is_wide) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.ticket = 0;
  if (p.blocks() == 0) return;
  const Tile tile(p);
  if (tile.first >= tile.sequence.seqlen_q) return;
  if (threadIdx.x == 0) p.turns[tile.place] = 0;
  const int column = (int)threadIdx.x % lanes * kVector;
  float* const values = p.row_values + (int64_t)tile.place * p.values() * kQueries;
  for (int r = (int)threadIdx.x / lanes; r < kQueries; r += kThreads / lanes) {
    const int row = tile.first + r;
    const bool is_inside = row < tile.sequence.seqlen_q;
    const auto load_row = [&](const Heads& heads, float (&x)[kVector]) {
      const int64_t at = row_offset(heads, p.cu_seq_q ? 0 : tile.batch, tile.head, tile.sequence.first_query + row);
      load(heads.data, p.dtype, at, is_wide, column, is_inside ? p.value_head_dim : 0, x);
    };
    float grad[kVector], out[kVector], rest[kVector] = {};
    load_row(p.grad_out, grad);
    load_row(p.out, out);
    if (p.residual.data) load_row(p.residual, rest);
    float delta = 0;
    for (int e = 0; e < kVector; ++e) delta += grad[e] * (out[e] + rest[e]);
    for (int step = 1; step < lanes; step *= 2) delta += __shfl_xor_sync(kAllLanes, delta, step);
    if (column > 0) continue;
    const int64_t at = is_inside ? statistic(p, tile, row) : 0;
    const float row_sum = is_inside ? p.row_sum[at] : 0.0f, row_max = is_inside ? p.row_max[at] : 0.0f;
    if (is_inside && p.grad_lse) delta -= p.grad_lse[at];
    const float shift = p.is_general ? row_max : fmaf(row_max, kLog2e, log2f(row_sum));
    values[r] = row_sum == 0 ? INFINITY : shift;  // The row sees nothing.
    values[kQueries + r] = row_sum == 0 ? 0.0f : delta / p.fold;
    if (p.is_general) values[2 * kQueries + r] = row_sum == 0 ? 0.0f : 1 / row_sum;
  }
}

// Write the mean of up to `keys` keys that the tile sees to `mean`, one column after the other.
template <class T>
__device__ __forceinline__ void average_keys(const QueryGradient& p, const Tile& tile, float* mean, float* parts) {
  const Visibility<int>& visibility = tile.sequence.visibility;
  const int last = min(tile.first + kQueries, tile.sequence.seqlen_q) - 1, end = visibility.end(last);
  int begin = visibility.begin(tile.first);
  const uint8_t* seen = nullptr;
  if (p.mask.data) {
    const uint8_t* covers = p.mask_tiles.covers(tile.batch, tile.head, tile.number);
    int number = begin / p.keys;
    while (number * p.keys < end && covers[number] == kNone) ++number;
    begin = max(begin, number * p.keys);
    seen = p.mask_tiles.seen_keys(tile.batch, tile.head, tile.number);
  }
  // Each thread has a pair of columns of some of the keys.
  const int pairs = p.columns / 2, groups = kThreads / pairs;
  const int pair = (int)threadIdx.x % pairs, group = (int)threadIdx.x / pairs;
  const int kv_head = tile.head / p.group;
  float low = 0, high = 0;
  int count = 0;
  for (int j = begin; j < min(begin + p.keys, end); ++j) {
    if (seen && !seen[j]) continue;
    if (count++ % groups != group || 2 * pair >= p.head_dim) continue;
    const int64_t at = row_offset(p.key, p.cu_seq_q ? 0 : tile.batch, kv_head, tile.sequence.first_key + j);
    const T* const key = (const T*)p.key.data + at + 2 * pair;
    low += to_float(key[0]), high += to_float(key[1]);
  }
  if (group < groups) parts[group * p.columns + 2 * pair] = low, parts[group * p.columns + 2 * pair + 1] = high;
  __syncthreads();
  for (int c = (int)threadIdx.x; c < p.columns; c += kThreads) {
    float sum = 0;
    for (int g = 0; g < groups; ++g) sum += parts[g * p.columns + c];
    sum /= (float)max(count, 1);
    mean[c] = fabsf(sum) < INFINITY ? sum : 0.0f;
  }
  __syncthreads();
}

// Half of the block has the first half of dQ. A thread has the sums of a product's thread, 32 columns at a time.
template <class T>
__global__ void __launch_bounds__(kThreads) finish(const QueryGradient p) {
  __shared__ float mean[kMaxHeadDim], parts[2 * kThreads];
  const Tile tile(p);
  if (tile.first >= tile.sequence.seqlen_q) return;
  average_keys<T>(p, tile, mean, parts);
  const int half = (int)threadIdx.x / kWarpgroup, t = (int)threadIdx.x % kWarpgroup, lane = t % 32;
  const float* const of_tile = p.sums + (int64_t)tile.place * p.sums_of_tile();
  const float* const rounded[2] = {of_tile + kQueries * p.upper, of_tile + kQueries * (p.columns + 1)};
  const float* const from = half ? rounded[0] + kQueries : of_tile;
  const int first = half ? p.upper : 0, count = half ? p.columns - p.upper : p.upper;
  const int in_tile = t / 32 * 16 + lane / 4;
  bool is_inside[2], is_seeing[2];
  float excess[2];  // dLSE - sum dS
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = tile.first + in_tile + 8 * r;
    is_inside[r] = row < tile.sequence.seqlen_q;
    const int64_t at = is_inside[r] ? statistic(p, tile, row) : 0;
    is_seeing[r] = is_inside[r] && p.row_sum[at] != 0;
    const float dlse = is_inside[r] && p.grad_lse ? p.grad_lse[at] / p.fold : 0.0f;
    excess[r] = dlse - (rounded[0][in_tile + 8 * r] + rounded[1][in_tile + 8 * r]);
  }
  for (int c = 0; c < count; c += 32) {
    alignas(16) float sums[16];
#pragma unroll
    for (int g = 0; g < 4; ++g) *(float4*)&sums[4 * g] = *(const float4*)(from + ((c / 8 + g) * kWarpgroup + t) * 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto result = [&](int i) {
        const int column = first + c + i / 4 * 8 + lane % 4 * 2 + i % 2;
        return is_seeing[r] ? fmaf(excess[r], mean[column], sums[i]) * p.scale * p.fold : 0.0f;
      };
      const int row = tile.sequence.first_query + tile.first + in_tile + 8 * r;
      T* const out = (T*)p.grad_query.data + row_offset(p.grad_query, p.cu_seq_q ? 0 : tile.batch, tile.head, row);
      store_row<32>(out + first + c, p.head_dim - first - c, is_inside[r], r, result);
    }
  }
}

}  // namespace

void prepare_rows(const QueryGradient& p, cudaStream_t stream) {
  bool is_wide = true;
  for (const Heads& heads : {p.grad_out, p.out, p.residual})
    is_wide = is_wide && fastattn::cuda::is_wide(heads, p.dtype, p.value_head_dim);
  const int lanes = p.value_head_dim <= 64 ? 8 : p.value_head_dim <= 128 ? 16 : 32;
  launch(prepare, max(p.blocks(), 1), kThreads, stream, p, lanes, is_wide);
}

void finish_query_gradient(const QueryGradient& p, cudaStream_t stream) {
  launch(p.dtype == Dtype::bfloat16 ? finish<bfloat16> : finish<float16>, p.blocks(), kThreads, stream, p);
}

}  // namespace fastattn::cuda
