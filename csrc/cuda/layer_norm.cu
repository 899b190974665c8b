// LayerNorm and residual + dropout(input) + LayerNorm, forward and backward.
//
//   normalise, for each team (rows.h): a pair of rows i and i + 8: for each of the two rows:
//     for each piece of the row: x = residual + dropout(input), and its sum;  then the variance around the mean;
//     for each piece: out = (x - mean) * rstd * weight + bias.
//   differentiate, for each team: every team.count-th pair of rows: for each of the two rows:
//     for each piece: the sums of g and g * xhat, and the block's sums for grad_weight and grad_bias;
//     for each piece: grad_x, and grad_input through dropout.
//   add_rows computes the sums for grad_weight and grad_bias if rows are in pieces; add_groups adds up the groups.
//
// input, residual, sum, out and their gradients are (matrices * rows, columns), in 16-bit types or float32. mean and
// rstd are (matrices * rows), float32; weight and bias are (columns).
#include "kernels.h"

#include "launch.h"
#include "rows.h"

namespace fastattn::cuda {
namespace {

// Maximum groups of rows. The parameters' gradients are summed within groups, then over the groups.
constexpr int kMaxGroups = 512;

// A thread's running mean, relative to its first element, and its sum of squared deviations. Pieces are merged one by
// one (Chan, Golub and LeVeque), which is accurate for large means and for means that differ between pieces.
struct Deviations {
  float origin, mean = 0, squares = 0, count = 0;

  __device__ void add(const float (&x)[kFragments][kVector], const int (&elements)[kFragments]) {
    if (count == 0) origin = x[0][0];
    float sum = 0, more = 0, number = 0;
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      number += (float)elements[f];
      for (int e = 0; e < kVector; ++e) sum += e < elements[f] ? x[f][e] - origin : 0.0f;
    }
    if (number == 0) return;
    const float own = sum / number, apart = own - mean;
#pragma unroll
    for (int f = 0; f < kFragments; ++f)
      for (int e = 0; e < kVector; ++e) {
        const float deviation = e < elements[f] ? x[f][e] - origin - own : 0.0f;
        more += deviation * deviation;
      }
    const float share = number / (count + number);
    squares += more + apart * apart * count * share;
    mean += apart * share;
    count += number;
  }
};

template <Span kSpan>
__global__ void __launch_bounds__(max_threads(kSpan), min_blocks(kSpan)) normalise(const LayerNorm p, bool wide) {
  const Team<kSpan> team;
  if (team.index >= p.matrices * pairs_of(p.rows)) return;
  const RowPair pair(team.index, p.rows);
  const int64_t pieces = team.pieces(p.columns);
  const float scale = dropout_scale(p.threshold);
  float x[kFragments][kVector];
  uint32_t keep[kFragments];

  if (kSpan != Span::pieces) draw(p, team, pair, 0, keep);
#pragma unroll 1
  for (int half = 0; half < pair.count; ++half) {
    const int64_t row = pair.matrix * p.rows + pair.first + 8 * half;
    // Compute x = residual + dropout(input), rounded as stored for the backward pass. x is 0 beyond the row's end.
    const auto read = [&](int64_t piece) {
      if (kSpan == Span::pieces) draw(p, team, pair, piece, keep);
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        const int64_t column = team.column(piece, f);
        load(p.input, p.input_dtype, row * p.input_row, wide, column, p.columns, x[f]);
        if (p.threshold > 0) drop(x[f], keep[f] >> (half * kVector), scale);
        if (!p.residual) continue;
        float residual[kVector];
        load(p.residual, p.residual_dtype, row * p.residual_row, wide, column, p.columns, residual);
        for (int e = 0; e < kVector; ++e) x[f][e] = rounded(x[f][e] + residual[e], p.dtype);
      }
    };

    float sum = 0;
    int elements[kFragments];
    Deviations thread;
    for (int64_t piece = 0; piece < pieces; ++piece) {
      read(piece);
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        elements[f] = elements_at(team.column(piece, f), p.columns);
        for (int e = 0; e < kVector; ++e) sum += x[f][e];
      }
      if (kSpan == Span::pieces) thread.add(x, elements);
    }
    // The mean with a rounding error, which the sum of the centred values corrects.
    const float center = team.sum(sum) / (float)p.columns;
    float moments[2] = {};
    if (kSpan == Span::pieces) {
      const float centred = thread.origin - center + thread.mean;
      moments[0] = thread.count * centred;
      moments[1] = thread.squares + thread.count * centred * centred;
    } else {
#pragma unroll
      for (int f = 0; f < kFragments; ++f)
        for (int e = 0; e < kVector; ++e) {
          const float centred = e < elements[f] ? x[f][e] - center : 0.0f;
          moments[0] += centred;
          moments[1] += centred * centred;
        }
    }
    team.reduce(moments, Sum());
    const float rest = moments[0] / (float)p.columns;
    const float corrected = moments[1] / (float)p.columns - rest * rest;
    const float rstd = rstd_of(corrected < 0 ? 0 : corrected, p.eps);  // fmaxf would turn NaN into 0
    if (team.thread == 0) p.mean[row] = center + rest, p.rstd[row] = rstd;

    for (int64_t piece = 0; piece < pieces; ++piece) {
      if (kSpan == Span::pieces) read(piece);
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        const int64_t column = team.column(piece, f), to = row * p.columns;
        if (p.sum) store(p.sum, p.dtype, to, wide, column, p.columns, x[f]);
        float parameter[kVector];
        for (int e = 0; e < kVector; ++e) x[f][e] = (x[f][e] - center - rest) * rstd;
        if (p.weight) {
          load(p.weight, p.weight_dtype, 0, wide, column, p.columns, parameter);
          for (int e = 0; e < kVector; ++e) x[f][e] *= parameter[e];
        }
        if (p.bias) {
          load(p.bias, p.bias_dtype, 0, wide, column, p.columns, parameter);
          for (int e = 0; e < kVector; ++e) x[f][e] += parameter[e];
        }
        store(p.out, p.out_dtype, to, wide, column, p.columns, x[f]);
      }
    }
  }
}

// Compute the gradients of rows, in a grid-stride loop over pairs of rows. A block is a group: its sums of grad_out *
// xhat and of grad_out over its rows go to workspace (2, blocks, columns), float32. The sums double the register
// pressure, so add_rows computes them if rows are in pieces.
template <Span kSpan>
__global__ void __launch_bounds__(max_threads(kSpan), kSpan == Span::warp ? 3 : 1)
    differentiate(const LayerNormBackward p, float* workspace, bool wide) {
  const Team<kSpan> team;
  const int64_t pieces = team.pieces(p.columns), pairs = p.matrices * pairs_of(p.rows);
  const bool parameters = kSpan != Span::pieces && (p.grad_weight || p.grad_bias);
  const float scale = dropout_scale(p.threshold);
  const int64_t sums[2] = {blockIdx.x * p.columns, ((int64_t)gridDim.x + blockIdx.x) * p.columns};
  float xhat[kFragments][kVector], grad[kFragments][kVector];
  float total[2][kFragments][kVector] = {};

#pragma unroll 1
  for (int64_t index = team.index; index < pairs; index += team.count) {
    const RowPair pair(index, p.rows);
#pragma unroll 1
    for (int half = 0; half < pair.count; ++half) {
      const int64_t row = pair.matrix * p.rows + pair.first + 8 * half;
      const float mean = p.mean[row], rstd = p.rstd[row];
      // Read xhat and grad, both 0 beyond the row's end. There (0 - mean) * rstd may be infinite, and 0 times that NaN.
      const auto read = [&](int64_t piece) {
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
          const int64_t column = team.column(piece, f);
          load(p.x, p.dtype, row * p.x_row, wide, column, p.columns, xhat[f]);
          load(p.grad_out, p.grad_out_dtype, row * p.grad_out_row, wide, column, p.columns, grad[f]);
          for (int e = 0; e < kVector; ++e) xhat[f][e] = column + e < p.columns ? (xhat[f][e] - mean) * rstd : 0.0f;
        }
      };
      const auto weigh = [&](int64_t piece) {
        if (!p.weight) return;
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
          float weight[kVector];
          load(p.weight, p.weight_dtype, 0, wide, team.column(piece, f), p.columns, weight);
          for (int e = 0; e < kVector; ++e) grad[f][e] *= weight[e];
        }
      };
      const auto accumulate = [&] {
#pragma unroll
        for (int f = 0; f < kFragments; ++f)
          for (int e = 0; e < kVector; ++e) {
            total[0][f][e] += grad[f][e] * xhat[f][e];
            total[1][f][e] += grad[f][e];
          }
      };

      float means[2] = {};
      for (int64_t piece = 0; piece < pieces; ++piece) {
        read(piece);
        if (parameters) accumulate();
        weigh(piece);
#pragma unroll
        for (int f = 0; f < kFragments; ++f)
          for (int e = 0; e < kVector; ++e) {
            means[0] += grad[f][e];
            means[1] += grad[f][e] * xhat[f][e];
          }
      }
      team.reduce(means, Sum());
      for (int n = 0; n < 2; ++n) means[n] /= (float)p.columns;

      for (int64_t piece = 0; piece < pieces; ++piece) {
        if (kSpan == Span::pieces) read(piece), weigh(piece);
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
          const int64_t column = team.column(piece, f), to = row * p.columns;
          for (int e = 0; e < kVector; ++e) grad[f][e] = rstd * (grad[f][e] - means[0] - xhat[f][e] * means[1]);
          if (p.grad_sum) {
            float more[kVector];
            load(p.grad_sum, p.dtype, row * p.grad_sum_row, wide, column, p.columns, more);
            for (int e = 0; e < kVector; ++e) grad[f][e] += more[e];
          }
          store(p.grad_x, p.dtype, to, wide, column, p.columns, grad[f]);
          if (!p.grad_input) continue;
          if (p.threshold > 0) {
            const uint32_t keep = keep_pair(make_seed(p.seed), p.threshold, pair.matrix, pair.first, column);
            drop(grad[f], keep >> (half * kVector), scale);
          }
          store(p.grad_input, p.input_dtype, to, wide, column, p.columns, grad[f]);
        }
      }
    }
  }

  if (!parameters) return;
  if (kSpan == Span::warp) {  // one warp after another, so that the order of the sums is fixed
    __shared__ float shared[2][kWarp * kHeld];
    for (int warp = 0; warp < kWarps; ++warp) {
      if ((int)threadIdx.x / kWarp == warp)
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int f = 0; f < kFragments; ++f)
            for (int e = 0; e < kVector; ++e) {
              float& sum = shared[n][team.column(0, f) + e];
              sum = (warp ? sum : 0.0f) + total[n][f][e];
            }
      __syncthreads();
    }
    for (int n = 0; n < 2; ++n)
      for (int64_t column = threadIdx.x; column < p.columns; column += blockDim.x)
        workspace[sums[n] + column] = shared[n][column];
  } else {
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int f = 0; f < kFragments; ++f)
        store(workspace, Dtype::float32, sums[n], wide, team.column(0, f), p.columns, total[n][f]);
  }
}

// Compute the parameters' sums for rows in pieces. A thread has eight columns of a group, which is every groups-th row.
__global__ void __launch_bounds__(kMaxThreads)
    add_rows(const LayerNormBackward p, float* workspace, int64_t groups, bool wide) {
  const int64_t group = blockIdx.x % groups, column = (blockIdx.x / groups * blockDim.x + threadIdx.x) * kVector;
  float total[2][kVector] = {};
  for (int64_t row = group; row < p.matrices * p.rows; row += groups) {
    const float mean = p.mean[row], rstd = p.rstd[row];
    float x[kVector], grad[kVector];
    load(p.x, p.dtype, row * p.x_row, wide, column, p.columns, x);
    load(p.grad_out, p.grad_out_dtype, row * p.grad_out_row, wide, column, p.columns, grad);
    for (int e = 0; e < kVector; ++e) {
      total[0][e] += grad[e] * ((x[e] - mean) * rstd);
      total[1][e] += grad[e];
    }
  }
  for (int n = 0; n < 2; ++n)
    store(workspace, Dtype::float32, (n * groups + group) * p.columns, wide, column, p.columns, total[n]);
}

// Add up the groups. Block 2 c has kWarp columns from c * kWarp on of the weight's gradient, block 2 c + 1 of the
// bias's.
__global__ void __launch_bounds__(kWarp* kWarp)
    add_groups(const LayerNormBackward p, const float* workspace, int64_t groups) {
  const int n = (int)(blockIdx.x % 2), lane = (int)threadIdx.x % kWarp, warp = (int)threadIdx.x / kWarp;
  const int warps = (int)blockDim.x / kWarp;
  void* out = n == 0 ? p.grad_weight : p.grad_bias;
  if (!out) return;
  const int64_t column = blockIdx.x / 2 * kWarp + lane;
  __shared__ float sums[kWarp][kWarp];
  float sum = 0;
  if (column < p.columns)
    for (int64_t group = warp; group < groups; group += warps)
      sum += workspace[(n * groups + group) * p.columns + column];
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || column >= p.columns) return;
  for (int other = 1; other < warps; ++other) sum += sums[other][lane];
  switch (n == 0 ? p.grad_weight_dtype : p.grad_bias_dtype) {
    case Dtype::bfloat16: ((bfloat16*)out)[column] = from_float<bfloat16>(sum); break;
    case Dtype::float16: ((float16*)out)[column] = from_float<float16>(sum); break;
    default: ((float*)out)[column] = sum;
  }
}

int64_t groups_of(const LayerNormBackward& p) {
  const int64_t blocks = ceil_div(p.matrices * pairs_of(p.rows), Spread(p.columns).teams);
  return blocks < kMaxGroups ? blocks : kMaxGroups;
}

}  // namespace

template <>
void run(const LayerNorm& p, cudaStream_t stream) {
  const bool wide = is_wide(p.input, p.input_dtype, p.columns, p.input_row) &&
                    is_wide(p.residual, p.residual_dtype, p.columns, p.residual_row) &&
                    is_wide(p.weight, p.weight_dtype, p.columns) && is_wide(p.bias, p.bias_dtype, p.columns) &&
                    is_wide(p.sum, p.dtype, p.columns) && is_wide(p.out, p.out_dtype, p.columns);
  const Spread spread(p.columns);
  const auto kernel = spread.pick(&normalise<Span::warp>, &normalise<Span::block>, &normalise<Span::pieces>);
  launch(kernel, ceil_div(p.matrices * pairs_of(p.rows), spread.teams), spread.threads, stream, p, wide);
}

int64_t workspace(const LayerNormBackward& p) {
  return p.grad_weight || p.grad_bias ? 2 * groups_of(p) * p.columns : 0;
}

void run(const LayerNormBackward& p, float* workspace, cudaStream_t stream) {
  const bool wide = is_wide(p.grad_out, p.grad_out_dtype, p.columns, p.grad_out_row) &&
                    is_wide(p.x, p.dtype, p.columns, p.x_row) &&
                    is_wide(p.grad_sum, p.dtype, p.columns, p.grad_sum_row) &&
                    is_wide(p.weight, p.weight_dtype, p.columns) && is_wide(p.grad_x, p.dtype, p.columns) &&
                    is_wide(p.grad_input, p.input_dtype, p.columns) && is_wide(workspace, Dtype::float32, p.columns);
  const Spread spread(p.columns);
  const int64_t groups = groups_of(p);
  const auto kernel =
      spread.pick(&differentiate<Span::warp>, &differentiate<Span::block>, &differentiate<Span::pieces>);
  launch(kernel, groups, spread.threads, stream, p, workspace, wide);
  if (!p.grad_weight && !p.grad_bias) return;
  if (spread.span == Span::pieces)
    launch(add_rows, groups * ceil_div(p.columns, kMaxThreads * kVector), kMaxThreads, stream, p, workspace, groups,
           wide);
  const int warps = groups < 1 ? 1 : groups < kWarp ? (int)groups : kWarp;
  launch(add_groups, 2 * ceil_div(p.columns, kWarp), warps * kWarp, stream, p, workspace, groups);
}

}  // namespace fastattn::cuda
