// LayerNorm and residual + dropout(input) + LayerNorm, forward and backward, one row at a time.
//
//   forward: for each block of 16 rows, or a part of it, in parallel: for each row:
//     sum = residual + dropout(input), if there is a residual;
//     for each part of 512 columns: add up the mean;  for each part again: add up the variance;
//     for each vector: out = (sum - mean) * rstd * weight + bias.
//   backward: for each chunk of blocks, in parallel: for each row:
//     for each part: add up mean(g) and mean(g xhat), and add to the grad_weight and grad_bias of a group of rows;
//     for each vector: grad_x, and grad_input through dropout.
//     after each group: add its grad_weight and grad_bias to the chunk's.
//   for each 1024 columns, in parallel: add up the chunks' grad_weight and grad_bias, in order.
//
// input, residual, sum, out and their gradients are (matrices * rows, columns), in 16-bit types or float32. mean and
// rstd are (matrices * rows), float32; weight and bias (columns), converted to float32.
#include <math.h>

#include "../common/layer_norm.h"
#include "kernels.h"
#include "rows.h"

namespace fastattn {
namespace {

constexpr int kChunkTiles = 256;
constexpr int kChunk = kChunkTiles * kTileColumns;

// The keep bits of a block of rows for kChunk columns, which are all columns of most problems.
struct KeepChunk {
  uint32_t bits[kTileRows][kChunkTiles];
  int64_t loaded = -1;

  template <class Problem>
  FASTATTN_INLINE void load(const Problem& p, const RowBlock& block, int64_t column) {
    if (p.threshold == 0 || loaded == column) return;
    keep_block(make_seed(p.seed), p.threshold, block, column / kTileColumns,
               ceil_div(min(p.columns, column + kChunk), kTileColumns), bits[0], kChunkTiles);
    loaded = column;
  }
};

// ---- forward ----

// Run the second and third pass over x, the row in its dtype or in float32. Squares of centred values stay accurate if
// the mean is large. The sum of the centred values corrects the rounding error of the mean.
template <class X, class T>
void normalize_around(const LayerNorm& p, const X* x, float about, int64_t row, const OutputRow<T>& out) {
  const int64_t columns = p.columns;
  double left = 0, squares = 0;
  for_each_part(columns, [&](int64_t begin, int64_t end) {
    vf left_parts[4] = {}, square_parts[4] = {};
    int64_t j = begin;
    for (; j + 4 * kLanes <= end; j += 4 * kLanes)
      for (int k = 0; k < 4; ++k) {
        const vf d = load(x + j + k * kLanes) - about;
        left_parts[k] += d;
        square_parts[k] = fma(d, d, square_parts[k]);
      }
    for (; j < end; j += kLanes) {
      const int n = (int)min(kLanes, end - j);
      const vf d = keep_bits(first_lanes(n), load(x + j, n) - about);
      left_parts[0] += d;
      square_parts[0] = fma(d, d, square_parts[0]);
    }
    left += sum((left_parts[0] + left_parts[1]) + (left_parts[2] + left_parts[3]));
    squares += sum((square_parts[0] + square_parts[1]) + (square_parts[2] + square_parts[3]));
  });
  const float rest = (float)(left / (double)columns), center = about + rest;
  const float square = (float)(squares / (double)columns);
  const float corrected = square - rest * rest, variance = corrected < 0 ? 0 : corrected;  // NaN stays
  const float scale = rstd_of(variance, p.eps);
  p.mean[row] = center, p.rstd[row] = scale;

  const float *weight = (const float*)p.weight, *bias = (const float*)p.bias;
  if (weight && bias)
    for_each_vector(columns, [&](int64_t j, int n) {
      const vf xhat = (load(x + j, n) - center) * scale;
      out.put(j, fma(xhat, load(weight + j, n), load(bias + j, n)), n);
    });
  else
    for_each_vector(columns, [&](int64_t j, int n) {
      vf y = (load(x + j, n) - center) * scale;
      if (weight) y *= load(weight + j, n);
      if (bias) y += load(bias + j, n);
      out.put(j, y, n);
    });
}

constexpr int64_t kConverted = 4096;

// The sums with the residual are kept, or are in the place of the output until their row is normalised.
template <class Sum>
Sum* sum_row(const LayerNorm& p, int64_t row) {
  return (Sum*)(p.sum ? p.sum : p.out) + row * p.columns;
}

// Run the first pass, for the mean, then the others. 16-bit rows that fit the L1 cache are kept in float32 for them.
template <class T, class Out>
void normalize_row(const LayerNorm& p, int64_t row) {
  const T* x = p.residual ? sum_row<T>(p, row) : (const T*)p.input + row * p.input_row;
  float converted[kConverted];
  const bool convert = sizeof(T) < sizeof(float) && p.columns <= kConverted;
  double total = 0;
  for_each_part(p.columns, [&](int64_t begin, int64_t end) {
    vf parts[4] = {};
    const auto add = [&](vf& part, int64_t j, int n) {
      const vf v = load_ahead(x + j, n);
      if (convert) store(converted + j, v, n);
      part += v;
    };
    int64_t j = begin;
    for (; j + 4 * kLanes <= end; j += 4 * kLanes)
      for (int k = 0; k < 4; ++k) add(parts[k], j + k * kLanes, kLanes);
    for (; j < end; j += kLanes) add(parts[0], j, (int)min(kLanes, end - j));
    total += sum((parts[0] + parts[1]) + (parts[2] + parts[3]));
  });
  const float about = (float)(total / (double)p.columns);
  const bool in_place = (const void*)x == (const Out*)p.out + row * p.columns;  // a streaming store would evict x
  const OutputRow<Out> out(p.out, row * p.columns, in_place ? 0 : p.matrices * p.rows * p.columns);
  if (convert)
    normalize_around(p, converted, about, row, out);
  else
    normalize_around(p, x, about, row, out);
}

// Call f(Out{}) with the type of the output, or of its gradient: T, or if the sum T is float32, any type.
template <class T, class F>
void with_output_type(Dtype dtype, const F& f) {
  if constexpr (sizeof(T) == sizeof(float))
    with_type(dtype, f);
  else
    f(T{});
}

// Compute sum = residual + dropout(input) in `count` columns of a row. `keep` is null without dropout.
template <class Input, class Residual, class Sum>
void add_row(const LayerNorm& p, int64_t row, int64_t column, int64_t count, const uint32_t* keep) {
  const Input* input = (const Input*)p.input + row * p.input_row + column;
  const Residual* residual = (const Residual*)p.residual + row * p.residual_row + column;
  Sum* sum = sum_row<Sum>(p, row) + column;
  const float scale = dropout_scale(p.threshold);
  for_each_vector(count, [&](int64_t j, int n) {
    vf x = load_ahead(input + j, n);
    if (keep) x = keep_bits(keep[j / 32] >> j % 32, x * scale);
    store(sum + j, load_ahead(residual + j, n) + x, n);
  });
}

using NormalizeRow = decltype(&normalize_row<float, float>);
using AddRow = decltype(&add_row<float, float, float>);

void normalize(const LayerNorm& p, NormalizeRow normalize_row, const Parallel& parallel) {
  for_each_block(p.matrices, p.rows, p.columns, parallel, [&](const RowBlock& block, int) {
    for (int r = 0; r < block.rows; ++r)
      if (block.has(r)) normalize_row(p, block.z * p.rows + block.first + r);
  });
}

void add_and_normalize(const LayerNorm& p, AddRow add_row, NormalizeRow normalize_row, const Parallel& parallel) {
  for_each_block(p.matrices, p.rows, p.columns, parallel, [&](const RowBlock& block, int) {
    const int64_t first = block.z * p.rows + block.first;
    KeepChunk keep;
    for (int64_t column = 0; column < p.columns; column += kChunk) {
      const int64_t n = min(kChunk, p.columns - column);
      keep.load(p, block, column);
      for (int r = 0; r < block.rows; ++r) {
        if (!block.has(r)) continue;
        add_row(p, first + r, column, n, p.threshold > 0 ? keep.bits[r] : nullptr);
        if (column + n == p.columns) normalize_row(p, first + r);
      }
    }
  });
}

// The promoted type of A and B, as torch promotes: float32, unless both are the same 16-bit type.
template <class A, class B>
struct Promoted {
  typedef float type;
};
template <class A>
struct Promoted<A, A> {
  typedef A type;
};

int64_t parameter_bytes(const void* values, Dtype dtype, int64_t columns) {
  return values && dtype != Dtype::float32 ? round_up(columns * 4, 64) : 0;
}

// Return a weight or bias as float32. Other dtypes are converted into the workspace, whose pointer is advanced.
const float* as_float32(const void* values, Dtype dtype, int64_t columns, char** workspace) {
  const int64_t bytes = parameter_bytes(values, dtype, columns);
  if (bytes == 0) return (const float*)values;
  float* converted = (float*)*workspace;
  *workspace += bytes;
  with_type(dtype, [&](auto type) {
    const auto* from = (const decltype(type)*)values;
    for_each_vector(columns, [&](int64_t j, int n) { store(converted + j, load(from + j, n), n); });
  });
  return converted;
}

int64_t forward_workspace(const LayerNorm& p, const Parallel&) {
  return parameter_bytes(p.weight, p.weight_dtype, p.columns) + parameter_bytes(p.bias, p.bias_dtype, p.columns);
}

void forward(const LayerNorm& problem, const Parallel& parallel, char* workspace) {
  LayerNorm p = problem;
  p.weight = as_float32(problem.weight, problem.weight_dtype, p.columns, &workspace);
  p.bias = as_float32(problem.bias, problem.bias_dtype, p.columns, &workspace);
  with_type(p.input_dtype, [&](auto input) {
    using Input = decltype(input);
    if (!p.residual) return normalize(p, &normalize_row<Input, Input>, parallel);
    with_type(p.residual_dtype, [&](auto residual) {
      using Sum = typename Promoted<Input, decltype(residual)>::type;
      with_output_type<Sum>(p.out_dtype, [&](auto out) {
        add_and_normalize(p, &add_row<Input, decltype(residual), Sum>, &normalize_row<Sum, decltype(out)>, parallel);
      });
    });
  });
}

// ---- backward ----

// Rows are summed in a fixed number of chunks of row blocks, which are then added in order. So the result does not
// depend on the number of threads. Within a chunk, about kGroupRows rows are summed at a time, and the chunks are added
// kGroupChunks at a time: a single sum of all rows would lose digits with their number.
constexpr int64_t kMaxChunks = 64, kMinChunkElements = 16384, kFewBlocks = 8;
constexpr int64_t kGroupRows = 32, kGroupChunks = 8;

struct Chunks {
  int64_t blocks_per_matrix, parts, part_lines, per_chunk, count;  // a part is part_lines lines of a block (rows.h)

  explicit Chunks(const LayerNormBackward& p) : blocks_per_matrix(ceil_div(p.rows, kTileRows)) {
    const int64_t blocks = p.matrices * blocks_per_matrix;
    const int64_t block_elements = max(1, min(p.rows, kTileRows) * p.columns);
    // Few blocks of wide rows are split, so that all threads have work.
    int64_t splits = 1;
    while (splits < 8 && blocks * splits < kFewBlocks && block_elements / splits > 16 * kMinChunkElements) splits *= 2;
    part_lines = 8 / splits;
    parts = blocks * splits;
    per_chunk = max(1, max(ceil_div(parts, kMaxChunks), kMinChunkElements / block_elements));
    count = ceil_div(parts, per_chunk);
  }
};

// Compute the gradients of one row. Interleaved loads of several rows would defeat the hardware prefetcher.
template <class T, class Input, class Grad>
void backward_row(const LayerNormBackward& p, const RowBlock& block, int r, KeepChunk& keep, float* weight_sum,
                  float* bias_sum) {
  const int64_t row = block.z * p.rows + block.first + r, elements = p.matrices * p.rows * p.columns;
  const float *weight = (const float*)p.weight, mean = p.mean[row], rstd = p.rstd[row];
  const Grad* dy = (const Grad*)p.grad_out + row * p.grad_out_row;
  const T* x = (const T*)p.x + row * p.x_row;
  double g_total = 0, gx_total = 0;
  for_each_part(p.columns, [&](int64_t begin, int64_t end) {
    vf g_part = {}, gx_part = {};
    for_each_vector(begin, end, [&](int64_t j, int n) {
      // Lanes beyond the row hold -mean here, which rstd may turn into -inf: they are cleared before.
      const vf grad = load_ahead(dy + j, n), centred = load_ahead(x + j, n) - mean;
      const vf xhat = (n == kLanes ? centred : keep_bits(first_lanes(n), centred)) * rstd;
      const vf g = weight ? grad * load(weight + j, n) : grad;
      g_part += g;
      gx_part = fma(g, xhat, gx_part);
      if (weight_sum) store(weight_sum + j, fma(grad, xhat, load(weight_sum + j, n)), n);
      if (bias_sum) store(bias_sum + j, load(bias_sum + j, n) + grad, n);
    });
    g_total += sum(g_part);
    gx_total += sum(gx_part);
  });
  const float g_mean = (float)(g_total / (double)p.columns), gx_mean = (float)(gx_total / (double)p.columns);

  const float kept_scale = dropout_scale(p.threshold);
  const bool drop = p.threshold > 0, through_dropout = p.grad_input;
  const OutputRow<T> grad_x(p.grad_x, row * p.columns, elements);
  const OutputRow<Input> grad_input(p.grad_input, row * p.columns, elements);
  const T* grad_sum = p.grad_sum ? (const T*)p.grad_sum + row * p.grad_sum_row : nullptr;
  for (int64_t column = 0; column < p.columns; column += kChunk) {
    keep.load(p, block, column);
    const uint32_t* bits = keep.bits[r];
    for_each_vector(min(kChunk, p.columns - column), [&](int64_t k, int n) {
      const int64_t j = column + k;
      vf g = load(dy + j, n);
      if (weight) g *= load(weight + j, n);
      const vf xhat = (load(x + j, n) - mean) * rstd;
      vf dx = (g - g_mean - xhat * gx_mean) * rstd;
      if (grad_sum) dx += load_ahead(grad_sum + j, n);
      grad_x.put(j, dx, n);
      if (!through_dropout) return;
      if (drop) dx = keep_bits(bits[k / 32] >> k % 32, dx * kept_scale);
      grad_input.put(j, dx, n);
    });
  }
}

void from_float32(const float* values, Dtype dtype, int64_t count, void* out, int64_t first) {
  with_type(dtype, [&](auto type) {
    auto* to = (decltype(type)*)out + first;
    for_each_vector(count, [&](int64_t j, int n) { store(to + j, load(values + j, n), n); });
  });
}

inline void add_to(float* total, int64_t count, const float* sums) {
  for_each_vector(count, [&](int64_t j, int n) { store(total + j, load(total + j, n) + load(sums + j, n), n); });
}

using BackwardRow = decltype(&backward_row<float, float, float>);

// Compute all gradients, those of a row by `backward_row`.
// workspace: (chunks + workers, up to 2, columns), float32: a row of grad_weight and one of grad_bias, if wanted.
void backward_of(const LayerNormBackward& p, BackwardRow backward_row, const Parallel& parallel, float* workspace) {
  const Chunks chunks(p);
  const int64_t weight_row = p.grad_weight ? p.columns : 0, bias_row = p.grad_bias ? p.columns : 0;
  const int64_t chunk_row = weight_row + bias_row;
  const int workers = useful_workers(parallel, p.matrices * p.rows * p.columns);
  parallel_for(parallel, workers, chunks.count, [&](int64_t chunk, int worker) {
    float *total = workspace + chunk * chunk_row, *group = workspace + (chunks.count + worker) * chunk_row;
    float* sums = total;  // of this group: the first one's are the beginning of the total
    if (chunk_row) memset(sums, 0, (size_t)chunk_row * sizeof(float));
    int64_t group_rows = 0;
    const int64_t end = min(chunks.parts, (chunk + 1) * chunks.per_chunk), splits = 8 / chunks.part_lines;
    for (int64_t i = chunk * chunks.per_chunk; i < end; ++i) {
      RowBlock block;
      block.z = i / splits / chunks.blocks_per_matrix;
      block.first = i / splits % chunks.blocks_per_matrix * kTileRows;
      block.rows = (int)min(kTileRows, p.rows - block.first);
      block.line_begin = (int)(i % splits * chunks.part_lines);
      block.line_end = block.line_begin + (int)chunks.part_lines;
      KeepChunk keep;
      for (int r = 0; r < block.rows; ++r)
        if (block.has(r)) {
          RowBlock line = block;
          if (p.columns > kChunk)
            line.line_begin = r % 8, line.line_end = r % 8 + 1;  // later rows cannot reuse the bits
          backward_row(p, line, r, keep, weight_row ? sums : nullptr, bias_row ? sums + weight_row : nullptr);
          ++group_rows;
        }
      if (chunk_row && i + 1 < end && group_rows >= kGroupRows) {
        if (sums != total) add_to(total, chunk_row, sums);
        sums = group, group_rows = 0;
        memset(sums, 0, (size_t)chunk_row * sizeof(float));
      }
    }
    if (sums != total) add_to(total, chunk_row, sums);
    finish_stream();
  });

  constexpr int64_t kColumns = 1024;
  if (chunk_row)
    parallel_for(parallel, (int)min(parallel.threads, chunks.count * chunk_row / kElementsPerWorker),
                 ceil_div(p.columns, kColumns), [&](int64_t part, int) {
                   const int64_t first = part * kColumns, count = min(kColumns, p.columns - first);
                   float total[kColumns], group[kColumns];
                   const int64_t offset[2] = {0, weight_row};
                   for (int k = weight_row ? 0 : 1; k < (bias_row ? 2 : 1); ++k) {
                     memset(total, 0, sizeof total);
                     for (int64_t chunk = 0; chunk < chunks.count;) {
                       memset(group, 0, sizeof group);
                       for (const int64_t end = min(chunks.count, chunk + kGroupChunks); chunk < end; ++chunk)
                         add_to(group, count, workspace + chunk * chunk_row + offset[k] + first);
                       add_to(total, count, group);
                     }
                     if (k == 0)
                       from_float32(total, p.grad_weight_dtype, count, p.grad_weight, first);
                     else
                       from_float32(total, p.grad_bias_dtype, count, p.grad_bias, first);
                   }
                 });
}

int64_t sum_bytes(const LayerNormBackward& p, const Parallel& parallel) {
  const int64_t rows = Chunks(p).count + useful_workers(parallel, p.matrices * p.rows * p.columns);
  return round_up(rows * p.columns * ((p.grad_weight != nullptr) + (p.grad_bias != nullptr)) * 4, 64);
}

int64_t backward_workspace(const LayerNormBackward& p, const Parallel& parallel) {
  return sum_bytes(p, parallel) + parameter_bytes(p.weight, p.weight_dtype, p.columns);
}

void backward(const LayerNormBackward& problem, const Parallel& parallel, char* workspace) {
  LayerNormBackward p = problem;
  char* converted = workspace + sum_bytes(p, parallel);
  p.weight = as_float32(problem.weight, problem.weight_dtype, p.columns, &converted);
  BackwardRow row = nullptr;
  with_type(p.dtype, [&](auto type) {
    with_type(p.input_dtype, [&](auto input) {
      with_output_type<decltype(type)>(
          p.grad_out_dtype, [&](auto grad) { row = &backward_row<decltype(type), decltype(input), decltype(grad)>; });
    });
  });
  backward_of(p, row, parallel, (float*)workspace);
}

}  // namespace

FASTATTN_EXPORT(Kernel<LayerNorm>, layer_norm) = {&forward_workspace, &forward};
FASTATTN_EXPORT(Kernel<LayerNormBackward>, layer_norm_backward) = {&backward_workspace, &backward};

}  // namespace fastattn
