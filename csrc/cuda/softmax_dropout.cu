// Softmax-dropout, forward and backward.
//
//   normalise, for each team (rows.h): a pair of rows i and i + 8: for each of the two rows:
//     for each piece of the row: row_max and row_sum, by online softmax over pieces;  for each piece: out.
//   differentiate, for each team: a pair of rows: for each of the two rows:
//     for each piece: P, dP and the sum of P dP;  for each piece: grad_mask and grad_input.
//
// input, out, grad_out and grad_input are (batch, heads, rows, columns), in one dtype. The statistics are (2, batch,
// heads, rows), float32. The mask is broadcastable to the scores; grad_mask has the shape of the scores.
#include "../common/softmax_dropout.h"

#include "kernels.h"
#include "launch.h"
#include "rows.h"

namespace fastattn::cuda {
namespace {

// The place of a row, and the columns [begin, end) that it sees. The mask may hide more of them.
struct Row {
  int64_t input, mask, index, begin, end;  // input and mask are offsets in elements; index counts all rows

  __device__ Row(const Scores& s, const RowPair& pair, int half) {
    const Quotient matrix = divide(pair.matrix, s.heads);
    const int64_t batch = matrix.quotient, head = matrix.remainder, i = pair.first + 8 * half;
    const Visibility<int64_t> visibility = visibility_of(s, batch);
    input = row_offset(s.input, batch, head, i);
    mask = mask_offset(s.mask, batch, head, i, 0);
    index = pair.matrix * s.rows + i;
    begin = visibility.begin(i);
    end = visibility.end(i);
  }

  // Whether one of the eight columns from `column` on may be visible. If not, they are not loaded.
  __device__ bool sees(int64_t column) const { return column < end && column + kVector > begin; }
};

// Whether 128-bit accesses are aligned: in all operands except the mask, and in the mask.
struct Wide {
  bool rows, mask;
};

Wide with_mask(bool rows, const Scores& s) {
  const Mask& m = s.mask;
  return {rows, m.column == 1 && is_wide(m.data, m.dtype, s.columns, m.batch, m.head, m.row)};
}

// Read eight columns of a mask of type T, vectorised or one by one.
template <class T>
__device__ void read_elements(const Scores& s, const Row& row, bool wide, int64_t column, float (&x)[kVector]) {
  const T* mask = (const T*)s.mask.data + row.mask;
  if (wide) return load_as(mask, true, column, s.columns, x);
  mask += column * s.mask.column;  // one pointer is incremented, because eight 64-bit addresses take too many registers
  for (int e = 0; e < kVector; ++e, mask += s.mask.column) x[e] = column + e < s.columns ? to_float(*mask) : 0.0f;
}

// Read the mask's summands for the scores of eight columns. -inf hides a column, whatever its score.
__device__ void read_mask(const Scores& s, const Row& row, bool wide, int64_t column, float (&added)[kVector]) {
  switch (s.mask.dtype) {
    case Dtype::float32: return read_elements<float>(s, row, wide, column, added);
    case Dtype::bfloat16: return read_elements<bfloat16>(s, row, wide, column, added);
    case Dtype::float16: return read_elements<float16>(s, row, wide, column, added);
    case Dtype::boolean:
      read_elements<uint8_t>(s, row, wide, column, added);
      for (int e = 0; e < kVector; ++e) added[e] = added[e] != 0 ? 0.0f : -INFINITY;
  }
}

// Read the scores of eight columns. They are -inf for columns that are not visible or beyond the row's end.
__device__ void read_scores(const Scores& s, const Row& row, Wide wide, int64_t column, float (&x)[kVector]) {
  if (!row.sees(column)) {
    for (int e = 0; e < kVector; ++e) x[e] = -INFINITY;
    return;
  }
  load(s.input.data, s.dtype, row.input, wide.rows, column, s.columns, x);
  float added[kVector] = {};
  if (s.mask.data) read_mask(s, row, wide.mask, column, added);
  for (int e = 0; e < kVector; ++e) {
    const bool visible = column + e >= row.begin && column + e < row.end && added[e] != -INFINITY;
    x[e] = visible ? x[e] * s.scale + added[e] : -INFINITY;
  }
}

// Return a row maximum that exponentials can be relative to: 0 if nothing is visible.
__device__ float finite(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

template <Span kSpan>
__global__ void __launch_bounds__(max_threads(kSpan), min_blocks(kSpan)) normalise(const SoftmaxDropout p, Wide wide) {
  const Team<kSpan> team;
  const Scores& s = p.scores;
  const int64_t matrices = s.batch * s.heads, pieces = team.pieces(s.columns);
  if (team.index >= matrices * pairs_of(s.rows)) return;
  const RowPair pair(team.index, s.rows);
  float x[kFragments][kVector];
  uint32_t keep[kFragments];

  if (kSpan != Span::pieces) draw(p, team, pair, 0, keep);
#pragma unroll 1
  for (int half = 0; half < pair.count; ++half) {
    const Row row(s, pair, half);
    const auto read = [&](int64_t piece) {
#pragma unroll
      for (int f = 0; f < kFragments; ++f) read_scores(s, row, wide, team.column(piece, f), x[f]);
    };

    // Compute x = exp(x - row_max) and return the sum.
    const auto exponentiate = [&](float row_max) {
      float sum = 0;
#pragma unroll
      for (int f = 0; f < kFragments; ++f)
        for (int e = 0; e < kVector; ++e) {
          x[f][e] = expf(x[f][e] - row_max);
          sum += x[f][e];
        }
      return sum;
    };

    float maximum = -INFINITY, sum = 0;  // this thread's, over pieces by online softmax
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const float before = maximum;
      read(piece);
#pragma unroll
      for (int f = 0; f < kFragments; ++f)
        for (int e = 0; e < kVector; ++e) maximum = fmaxf(maximum, x[f][e]);
      const float row_max = finite(maximum);
      if (kSpan == Span::pieces) sum = sum * expf(before - row_max) + exponentiate(row_max);
    }
    const float row_max = finite(team.max(maximum));
    sum = team.sum(kSpan == Span::pieces ? sum * expf(maximum - row_max) : exponentiate(row_max));
    if (team.thread == 0) {
      p.stats[row.index] = row_max;
      p.stats[matrices * s.rows + row.index] = sum;
    }
    const float inverse = 1.0f / (sum == 0.0f ? 1.0f : sum);
    for (int64_t piece = 0; piece < pieces; ++piece) {
      if (kSpan == Span::pieces) read(piece), draw(p, team, pair, piece, keep), exponentiate(row_max);
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        for (int e = 0; e < kVector; ++e) x[f][e] *= inverse;
        if (p.threshold > 0) drop(x[f], keep[f] >> (half * kVector), dropout_scale(p.threshold));
        store(p.out, s.dtype, row.index * s.columns, wide.rows, team.column(piece, f), s.columns, x[f]);
      }
    }
  }
}

template <Span kSpan>
__global__ void __launch_bounds__(max_threads(kSpan), min_blocks(kSpan))
    differentiate(const SoftmaxDropoutBackward p, Wide wide) {
  const Team<kSpan> team;
  const Scores& s = p.scores;
  const int64_t matrices = s.batch * s.heads, pieces = team.pieces(s.columns);
  if (team.index >= matrices * pairs_of(s.rows)) return;
  const RowPair pair(team.index, s.rows);
  const Quotient matrix = divide(pair.matrix, s.heads);
  float weight[kFragments][kVector], grad[kFragments][kVector];
  uint32_t keep[kFragments];

  if (kSpan != Span::pieces) draw(p, team, pair, 0, keep);
#pragma unroll 1
  for (int half = 0; half < pair.count; ++half) {
    const Row row(s, pair, half);
    const float row_max = p.stats[row.index], sum = p.stats[matrices * s.rows + row.index];
    const float inverse = 1.0f / (sum == 0.0f ? 1.0f : sum);
    const int64_t grad_row = row_offset(p.grad_out, matrix.quotient, matrix.remainder, pair.first + 8 * half);
    // Read P and dP. dP is 0 wherever P is, because the dP of a hidden key may be NaN.
    const auto read = [&](int64_t piece) {
      if (kSpan == Span::pieces) draw(p, team, pair, piece, keep);
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        const int64_t column = team.column(piece, f);
        read_scores(s, row, wide, column, weight[f]);
        for (int e = 0; e < kVector; ++e) grad[f][e] = 0;
        if (row.sees(column)) load(p.grad_out.data, s.dtype, grad_row, wide.rows, column, s.columns, grad[f]);
        if (p.threshold > 0) drop(grad[f], keep[f] >> (half * kVector), dropout_scale(p.threshold));
        for (int e = 0; e < kVector; ++e) {
          weight[f][e] = expf(weight[f][e] - row_max) * inverse;
          if (weight[f][e] == 0.0f) grad[f][e] = 0;
        }
      }
    };

    float product = 0;
    for (int64_t piece = 0; piece < pieces; ++piece) {
      read(piece);
#pragma unroll
      for (int f = 0; f < kFragments; ++f)
        for (int e = 0; e < kVector; ++e) product += weight[f][e] * grad[f][e];
    }
    product = team.sum(product);
    for (int64_t piece = 0; piece < pieces; ++piece) {
      if (kSpan == Span::pieces) read(piece);
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        const int64_t column = team.column(piece, f), to = row.index * s.columns;
        for (int e = 0; e < kVector; ++e) grad[f][e] = weight[f][e] * (grad[f][e] - product);
        if (p.grad_mask) store(p.grad_mask, p.grad_mask_dtype, to, wide.rows, column, s.columns, grad[f]);
        for (int e = 0; e < kVector; ++e) grad[f][e] *= s.scale;
        store(p.grad_input, s.dtype, to, wide.rows, column, s.columns, grad[f]);
      }
    }
  }
}

int64_t blocks_of(const Scores& s, const Spread& spread) {
  return ceil_div(s.batch * s.heads * pairs_of(s.rows), spread.teams);
}

}  // namespace

template <>
void run(const SoftmaxDropout& p, cudaStream_t stream) {
  const Scores& s = p.scores;
  const bool wide = is_wide(s.input, s.dtype, s.columns) && is_wide(p.out, s.dtype, s.columns);
  const Spread spread(s.columns);
  const auto kernel = spread.pick(&normalise<Span::warp>, &normalise<Span::block>, &normalise<Span::pieces>);
  launch(kernel, blocks_of(s, spread), spread.threads, stream, p, with_mask(wide, s));
}

template <>
void run(const SoftmaxDropoutBackward& p, cudaStream_t stream) {
  const Scores& s = p.scores;
  const bool wide = is_wide(s.input, s.dtype, s.columns) && is_wide(p.grad_out, s.dtype, s.columns) &&
                    is_wide(p.grad_input, s.dtype, s.columns) && is_wide(p.grad_mask, p.grad_mask_dtype, s.columns);
  const Spread spread(s.columns);
  const auto kernel =
      spread.pick(&differentiate<Span::warp>, &differentiate<Span::block>, &differentiate<Span::pieces>);
  launch(kernel, blocks_of(s, spread), spread.threads, stream, p, with_mask(wide, s));
}

}  // namespace fastattn::cuda
