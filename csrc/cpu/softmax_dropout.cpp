// Softmax-dropout, forward and backward, one row at a time.
//
//   forward: for each block of 16 rows, or a part of it, in parallel: draw the keep bits; for each row:
//     for each vector of visible columns: row_max;  again: row_sum and exp(score - row_max);  again: out.
//   backward: for each block, in parallel: draw the keep bits; for each row:
//     for each vector of visible columns: P and sum_j P dP;  again: grad_input, and grad_score into the mask's sums.
//   backward with the mask's gradient: a task is one split of one group of mask rows and visits the blocks of scores
//   that the group is broadcast to; then the splits are added in order.
//
// input, out, grad_out and grad_input are (batch, heads, rows, columns), in one dtype. The statistics are (2, batch,
// heads, rows), float32. Mask and its gradient are broadcastable to the scores.
#include <math.h>

#include "../common/softmax_dropout.h"
#include "kernels.h"
#include "rows.h"

namespace fastattn {
namespace {

// ---- scores ----

// The columns [begin, end) of a row that the lengths and the window leave visible. The mask may hide more.
struct Range {
  int64_t begin, end;
};

inline Range visible(const Scores& s, int64_t b, int64_t i) {
  const Visibility<int64_t> visibility = visibility_of(s, b);
  const Range range = {visibility.begin(i), visibility.end(i)};
  return range.begin < range.end ? range : Range{0, 0};
}

constexpr int64_t align_down(int64_t j) { return j / kLanes * kLanes; }
constexpr int64_t align_up(int64_t j) { return ceil_div(j, kLanes) * kLanes; }

// Call body(j, n) for the vectors that cover the range. n lanes lie within the row.
template <class Body>
FASTATTN_INLINE void for_each_vector(Range range, int64_t columns, const Body& body) {
  const int64_t whole = min(align_up(range.end), align_down(columns));
  int64_t j = align_down(range.begin);
  for (; j < whole; j += kLanes) body(j, kLanes);
  if (j < range.end) body(j, (int)(columns - j));
}

// Return the sum over a row of the vectors that body(j, n) returns, called as by for_each_vector.
template <class Body>
FASTATTN_INLINE float sum_vectors(Range range, int64_t columns, const Body& body) {
  const int64_t first = align_down(range.begin);
  double total = 0;
  for_each_part(range.end - first, [&](int64_t begin, int64_t end) {
    vf part = {};
    for_each_vector(Range{first + begin, first + end}, columns, [&](int64_t j, int n) { part += body(j, n); });
    total += sum(part);
  });
  return (float)total;
}

FASTATTN_INLINE vf apply_mask(vf s, const uint8_t* mask, int n) {
  return select(load_nonzero(mask, n), s, splat(-INFINITY));
}

template <class M>
FASTATTN_INLINE vf apply_mask(vf s, const M* mask, int n) {
  const vf added = load(mask, n);
  return select(added == splat(-INFINITY), added, s + added);  // masked scores may be NaN
}

template <class M>
void mask_row(const Scores& scores, int64_t b, int64_t h, int64_t i, Range range, float* buffer) {
  const M* mask = (const M*)scores.mask.data + mask_offset(scores.mask, b, h, i, 0);
  const int64_t stride = scores.mask.column;
  if (stride == 1)
    return for_each_vector(range, scores.columns, [&](int64_t j, int n) {
      prefetch_ahead(mask + j);
      store(buffer + j, apply_mask(load(buffer + j), mask + j, n));
    });
  for_each_vector(range, scores.columns, [&](int64_t j, int n) {
    M lane[kLanes] = {};
    for (int k = 0; k < n; ++k) lane[k] = mask[(j + k) * stride];
    store(buffer + j, apply_mask(load(buffer + j), lane, kLanes));
  });
}

// Compute buffer[j], the score of column j, for the vectors that cover the range. Lanes outside the range get -inf.
template <class T>
void score_row(const Scores& scores, int64_t b, int64_t h, int64_t i, Range range, float* buffer) {
  const T* input = (const T*)scores.input.data + row_offset(scores.input, b, h, i);
  for_each_vector(range, scores.columns,
                  [&](int64_t j, int n) { store(buffer + j, load_ahead(input + j, n) * scores.scale); });
  if (scores.mask.data && scores.mask.dtype == Dtype::boolean)
    mask_row<uint8_t>(scores, b, h, i, range, buffer);
  else if (scores.mask.data)
    with_type(scores.mask.dtype, [&](auto type) { mask_row<decltype(type)>(scores, b, h, i, range, buffer); });
  for (int64_t j = align_down(range.begin); j < range.begin; ++j) buffer[j] = -INFINITY;
  for (int64_t j = range.end; j < align_up(range.end); ++j) buffer[j] = -INFINITY;
}

// Call body(score), where score(j, n) returns the scores from column j on. n lanes lie within the row; lanes outside
// the range are -inf. Each call of score recomputes them from the input. With a mask or a partial row, they are
// computed into the buffer first. `body` may overwrite the buffer vector by vector.
template <class T, class Body>
FASTATTN_INLINE void with_scores(const Scores& scores, int64_t b, int64_t h, int64_t i, Range range, float* buffer,
                                 const Body& body) {
  if (scores.mask.data || range.begin > 0 || range.end < scores.columns) {
    score_row<T>(scores, b, h, i, range, buffer);
    return body([&](int64_t j, int) { return load(buffer + j); });
  }
  const T* input = (const T*)scores.input.data + row_offset(scores.input, b, h, i);
  body([&](int64_t j, int n) {
    // Round before row_max is subtracted, because an exact product may differ from a large row_max by hundreds.
    const vf score = rounded(load_ahead(input + j, n) * scores.scale);
    return n == kLanes ? score : select_bits(first_lanes(n), score, splat(-INFINITY));
  });
}

template <class T>
FASTATTN_INLINE void zero_outside(T* row, Range range, int64_t columns) {
  const int64_t begin = align_down(range.begin), end = min(columns, align_up(range.end));
  memset(row, 0, (size_t)begin * sizeof(T));
  memset(row + end, 0, (size_t)(columns - end) * sizeof(T));
}

// A worker's part of the workspace: one row of float32 and the keep bits of a block.
struct Scratch {
  float* row;
  uint32_t* keep;
  int64_t tiles;

  static int64_t row_bytes(int64_t columns) { return round_up(columns * 4, 64); }
  static int64_t bytes(int64_t columns, int threshold) {
    const int64_t keep_bytes = threshold > 0 ? ceil_div(columns, kTileColumns) * kTileRows * 4 : 0;
    return row_bytes(columns) + round_up(keep_bytes, 64);
  }
  Scratch(char* workspace, int worker, int64_t columns, int threshold)
      : row((float*)(workspace + worker * bytes(columns, threshold))),
        keep((uint32_t*)((char*)row + row_bytes(columns))),
        tiles(ceil_div(columns, kTileColumns)) {}
};

// Compute the keep bits of the columns that some row of the block sees.
FASTATTN_INLINE void fill_keep(const Scores& scores, const int64_t* seed, int threshold, const RowBlock& block,
                               int64_t b, const Scratch& scratch) {
  if (threshold == 0) return;
  int64_t begin = scores.columns, end = 0;
  for (int r = 0; r < block.rows; ++r) {
    const Range range = visible(scores, b, block.first + r);
    if (!block.has(r) || range.end == 0) continue;
    begin = min(begin, range.begin);
    end = max(end, range.end);
  }
  const int64_t tile = begin / kTileColumns;
  keep_block(make_seed(seed), threshold, block, tile, ceil_div(end, kTileColumns), scratch.keep + tile, scratch.tiles);
}

// ---- forward ----

template <class T>
void forward_row(const SoftmaxDropout& p, int64_t b, int64_t h, int64_t i, const uint32_t* keep, float* buffer) {
  const Scores& scores = p.scores;
  const Range range = visible(scores, b, i);
  float row_max, row_sum;
  with_scores<T>(scores, b, h, i, range, buffer, [&](const auto& score) {
    vf maxima = splat(-INFINITY);
    for_each_vector(range, scores.columns, [&](int64_t j, int n) { maxima = max(score(j, n), maxima); });
    row_max = max(maxima);
    if (row_max == -INFINITY) row_max = 0.0f;
    row_sum = sum_vectors(range, scores.columns, [&](int64_t j, int n) {
      const vf e = exp2((score(j, n) - row_max) * kLog2e);
      store(buffer + j, e);
      return e;
    });
  });
  const int64_t row = (b * scores.heads + h) * scores.rows + i;
  p.stats[row] = row_max, p.stats[scores.batch * scores.heads * scores.rows + row] = row_sum;

  const OutputRow<T> out(p.out, row * scores.columns, scores.batch * scores.heads * scores.rows * scores.columns);
  const float factor = (row_sum == 0.0f ? 0.0f : 1.0f / row_sum) * dropout_scale(p.threshold);
  zero_outside(out.data, range, scores.columns);
  for_each_vector(range, scores.columns, [&](int64_t j, int n) {
    vf probability = load(buffer + j) * factor;
    if (keep) probability = keep_bits(keep[j / 32] >> j % 32, probability);
    out.put(j, probability, n);
  });
}

template <class T>
void forward_of(const SoftmaxDropout& p, const Parallel& parallel, char* workspace) {
  const Scores& s = p.scores;
  for_each_block(s.batch * s.heads, s.rows, s.columns, parallel, [&](const RowBlock& block, int worker) {
    const Scratch scratch(workspace, worker, s.columns, p.threshold);
    const int64_t b = block.z / s.heads, h = block.z % s.heads;
    fill_keep(s, p.seed, p.threshold, block, b, scratch);
    for (int r = 0; r < block.rows; ++r)
      if (block.has(r))
        forward_row<T>(p, b, h, block.first + r, p.threshold > 0 ? scratch.keep + r * scratch.tiles : nullptr,
                       scratch.row);
  });
}

// ---- backward ----

// Compute the gradient of one row. `mask_sum`, (columns) float32 or null, is increased by grad_s.
template <class T>
void backward_row(const SoftmaxDropoutBackward& p, int64_t b, int64_t h, int64_t i, const uint32_t* keep, float* buffer,
                  float* mask_sum) {
  const Scores& scores = p.scores;
  const Range range = visible(scores, b, i);
  const int64_t row = (b * scores.heads + h) * scores.rows + i;
  const float row_max = p.stats[row], row_sum = p.stats[scores.batch * scores.heads * scores.rows + row];
  const float inv_sum = row_sum == 0.0f ? 0.0f : 1.0f / row_sum, kept_scale = dropout_scale(p.threshold);
  const T* grad_out = (const T*)p.grad_out.data + row_offset(p.grad_out, b, h, i);
  const auto grad_probability = [&](int64_t j, int n, vf probability) {
    vf grad = load_ahead(grad_out + j, n) * kept_scale;
    if (keep) grad = keep_bits(keep[j / 32] >> j % 32, grad);
    return select(probability == vf{}, vf{}, grad);  // the gradient of a masked score may be NaN
  };

  float dot;
  with_scores<T>(scores, b, h, i, range, buffer, [&](const auto& score) {
    dot = sum_vectors(range, scores.columns, [&](int64_t j, int n) {
      const vf probability = exp2((score(j, n) - row_max) * kLog2e) * inv_sum;
      store(buffer + j, probability);
      return probability * grad_probability(j, n, probability);
    });
  });

  const OutputRow<T> grad_input(p.grad_input, row * scores.columns,
                                scores.batch * scores.heads * scores.rows * scores.columns);
  zero_outside(grad_input.data, range, scores.columns);
  for_each_vector(range, scores.columns, [&](int64_t j, int n) {
    const vf probability = load(buffer + j);
    const vf grad_score = probability * (grad_probability(j, n, probability) - dot);
    grad_input.put(j, grad_score * scores.scale, n);
    if (mask_sum) store(mask_sum + j, load(mask_sum + j) + grad_score);
  });
}

template <class T>
void backward_block(const SoftmaxDropoutBackward& p, const RowBlock& block, const Scratch& scratch, float* mask_sum,
                    int64_t mask_sum_row) {
  const Scores& s = p.scores;
  const int64_t b = block.z / s.heads, h = block.z % s.heads;
  fill_keep(s, p.seed, p.threshold, block, b, scratch);
  for (int r = 0; r < block.rows; ++r)
    if (block.has(r))
      backward_row<T>(p, b, h, block.first + r, p.threshold > 0 ? scratch.keep + r * scratch.tiles : nullptr,
                      scratch.row, mask_sum ? mask_sum + r * mask_sum_row : nullptr);
}

// The groups of the mask's gradient. A group is a block of mask rows, or one row if the mask has no row dimension. Its
// items are the blocks of scores that it is broadcast to. A fixed number of splits sums them; splits are added in
// order.
struct MaskGroups {
  bool full[4];                 // Dimensions of the scores that the mask has.
  int64_t groups[3], items[3];  // Along batch, heads and blocks of rows. One of the two is 1.
  int64_t group_count, item_count, splits, items_per_split;
  int64_t mask_rows;   // Maximum mask rows per group.
  int64_t row_floats;  // Columns, rounded up to whole vectors of any instruction set.

  explicit MaskGroups(const SoftmaxDropoutBackward& p) {
    const Scores& s = p.scores;
    full[0] = s.mask.batches == s.batch, full[1] = s.mask.heads == s.heads;
    full[2] = s.mask.rows == s.rows, full[3] = s.mask.columns == s.columns;
    const int64_t sizes[3] = {s.batch, s.heads, ceil_div(s.rows, kTileRows)};
    group_count = item_count = 1;
    for (int d = 0; d < 3; ++d) {
      groups[d] = full[d] ? sizes[d] : 1;
      items[d] = full[d] ? 1 : sizes[d];
      group_count *= groups[d];
      item_count *= items[d];
    }
    constexpr int64_t kTasks = 32;
    splits = max(1, min(kTasks / max(1, group_count), item_count / 4));
    items_per_split = ceil_div(item_count, splits);
    mask_rows = full[2] ? kTileRows : 1;
    items_per_sum = full[2] ? 64 : 64 / kTileRows;
    row_floats = Scratch::row_bytes(s.columns) / 4;
  }
  int64_t items_per_sum;  // Items in one sum: 64 rows per mask row, which bounds its rounding error.
  int64_t group_floats() const { return mask_rows * row_floats; }
  int64_t sums(int workers) const { return splits > 1 ? group_count * splits : workers; }
  int64_t workspace_bytes(int workers) const { return (sums(workers) + workers) * group_floats() * 4; }
};

template <class M>
void store_mask_row(const float* values, bool full, int64_t columns, M* out) {
  if (full) {
    for_each_vector(columns, [&](int64_t j, int n) { store(out + j, load(values + j, n), n); });
  } else {
    store(out, splat(sum_vectors({0, columns}, columns, [&](int64_t j, int n) { return load(values + j, n); })), 1);
  }
}

inline void add_to(float* total, int64_t count, const float* sum) {
  for (int64_t j = 0; j < count; j += kLanes) store(total + j, load(total + j) + load(sum + j));
}

// Store the rows of a group.
void write_mask_rows(const SoftmaxDropoutBackward& p, const MaskGroups& g, int64_t group, const float* sums) {
  const int64_t first = g.full[2] ? group % g.groups[2] * kTileRows : 0, all_rows = g.full[2] ? p.scores.rows : 1;
  const int64_t row_size = g.full[3] ? p.scores.columns : 1;
  for (int64_t r = 0; r < min(g.mask_rows, all_rows - first); ++r) {
    const float* values = sums + r * g.row_floats;
    const int64_t at = (group / g.groups[2] * all_rows + first + r) * row_size;
    with_type(p.grad_mask_dtype, [&](auto type) {
      store_mask_row(values, g.full[3], p.scores.columns, (decltype(type)*)p.grad_mask + at);
    });
  }
}

int useful_workers(const Parallel& parallel, const Scores& s) {
  return useful_workers(parallel, s.batch * s.heads * s.rows * s.columns);
}

template <class T>
void backward_with_mask(const SoftmaxDropoutBackward& p, const Parallel& parallel, char* workspace) {
  const Scores& s = p.scores;
  const MaskGroups g(p);
  const int workers = useful_workers(parallel, s);
  float* sums = (float*)(workspace + workers * Scratch::bytes(s.columns, p.threshold));

  parallel_for(parallel, workers, g.group_count * g.splits, [&](int64_t task, int worker) {
    const int64_t group = task / g.splits, split = task % g.splits;
    float *total = sums + (g.splits > 1 ? task : worker) * g.group_floats(), *sum = total;
    memset(sum, 0, (size_t)g.group_floats() * sizeof(float));
    const int64_t begin = split * g.items_per_split, end = min(g.item_count, begin + g.items_per_split);
    for (int64_t item = begin; item < end; ++item) {
      if (item > begin && (item - begin) % g.items_per_sum == 0) {
        if (sum != total) add_to(total, g.group_floats(), sum);
        sum = sums + (g.sums(workers) + worker) * g.group_floats();
        memset(sum, 0, (size_t)g.group_floats() * sizeof(float));
      }
      const int64_t b = group / (g.groups[1] * g.groups[2]) + item / (g.items[1] * g.items[2]);
      const int64_t h = group / g.groups[2] % g.groups[1] + item / g.items[2] % g.items[1];
      const int64_t first = (group % g.groups[2] + item % g.items[2]) * kTileRows;
      const RowBlock block = {b * s.heads + h, first, (int)min(kTileRows, s.rows - first), 0, 8};
      backward_block<T>(p, block, Scratch(workspace, worker, s.columns, p.threshold), sum,
                        g.full[2] ? g.row_floats : 0);
    }
    if (sum != total) add_to(total, g.group_floats(), sum);
    if (g.splits == 1) write_mask_rows(p, g, group, total);
    finish_stream();
  });
  if (g.splits > 1)
    parallel_for(parallel, workers, g.group_count, [&](int64_t group, int) {
      float* total = sums + group * g.splits * g.group_floats();
      for (int64_t split = 1; split < g.splits; ++split)
        add_to(total, g.group_floats(), total + split * g.group_floats());
      write_mask_rows(p, g, group, total);
    });
}

template <class T>
void backward_of(const SoftmaxDropoutBackward& p, const Parallel& parallel, char* workspace) {
  const Scores& s = p.scores;
  if (p.grad_mask) return backward_with_mask<T>(p, parallel, workspace);
  for_each_block(s.batch * s.heads, s.rows, s.columns, parallel, [&](const RowBlock& block, int worker) {
    backward_block<T>(p, block, Scratch(workspace, worker, s.columns, p.threshold), nullptr, 0);
  });
}

void forward(const SoftmaxDropout& p, const Parallel& parallel, char* workspace) {
  with_type(p.scores.dtype, [&](auto type) { forward_of<decltype(type)>(p, parallel, workspace); });
}

void backward(const SoftmaxDropoutBackward& p, const Parallel& parallel, char* workspace) {
  with_type(p.scores.dtype, [&](auto type) { backward_of<decltype(type)>(p, parallel, workspace); });
}

int64_t forward_workspace(const SoftmaxDropout& p, const Parallel& parallel) {
  return useful_workers(parallel, p.scores) * Scratch::bytes(p.scores.columns, p.threshold);
}

int64_t backward_workspace(const SoftmaxDropoutBackward& p, const Parallel& parallel) {
  const int workers = useful_workers(parallel, p.scores);
  return workers * Scratch::bytes(p.scores.columns, p.threshold) +
         (p.grad_mask ? MaskGroups(p).workspace_bytes(workers) : 0);
}

}  // namespace

FASTATTN_EXPORT(Kernel<SoftmaxDropout>, softmax_dropout) = {&forward_workspace, &forward};
FASTATTN_EXPORT(Kernel<SoftmaxDropoutBackward>, softmax_dropout_backward) = {&backward_workspace, &backward};

}  // namespace fastattn
