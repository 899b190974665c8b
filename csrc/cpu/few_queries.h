// Products of few queries, as in decoding: vectorised along head_dim, without packing.
//
//   row_products, the scores: for each kRowsAtOnce rows; for each group of keys; for each vector of head_dim:
//     product (rows, block) = scale * query (rows, width) . key (keys, head_dim).
//   add_rows, the output: for each kRowsAtOnce rows; for each four vectors of columns; for each key:
//     sum (rows, width) = factor * sum + weight (rows, block) value (keys, columns).
//   write_keys, dK and dV: for each four vectors of columns; for each key; for each row:
//     to (keys, columns) = factor * weight (rows, block)' row (rows, width).
//
// A row is one query of one head that shares the key/value head, so rows = group * seqlen_q. Rows, weights and sums are
// float32; keys and values have dtype T and stay where they lie. A call serves at most one block of keys. `block` is
// the kernel's kBlockN. attention_rows.cpp compiles the products for every dtype.
#pragma once
#include "pack.h"
#include "sequence.h"

namespace fastattn {
namespace {

constexpr int kFewQueries = kLanes < 16 ? 6 : 8;  // Most queries per head. They would leave most of a panel empty.
constexpr int kRowsAtOnce = kLanes < 16 ? 2 : 4;  // Register blocking: rows that share each load of keys and values.

// The rows of a task: the queries of the first head that shares the key/value head, those of the next one, and so on.
struct QueryRows {
  int64_t first_head, seqlen_q;
  int count;

  QueryRows(const Attention& a, const Sequence& s, int64_t kv_head)
      : first_head(kv_head * group_of(a)), seqlen_q(s.seqlen_q), count((int)(group_of(a) * s.seqlen_q)) {}

  int64_t head(int r) const { return first_head + r / seqlen_q; }
  int64_t query(int r) const { return r % seqlen_q; }
};

// Prefetch a row, which callers do one block of keys ahead. A cache of keys and values is read once, faster than the
// hardware prefetcher follows.
template <class T>
FASTATTN_INLINE void prefetch_row(const T* row, int length) {
  for (int64_t byte = 0; byte < length * (int64_t)sizeof(T); byte += 64)
    __builtin_prefetch((const char*)row + byte, 0, 2);
}

// Return how many keys of the block from `first` have a key one block ahead to prefetch.
FASTATTN_INLINE int rows_ahead(int64_t first, int64_t end) { return (int)min(max(end - first - kBlockN, 0), kBlockN); }

// Add x[r * C + j] += row_r other_j lane by lane, for n elements of R rows and C others.
template <int R, int C, class T>
FASTATTN_INLINE void add_products(const float* row, int64_t width, const T* const* other, int d, int n, vf* x) {
  vf left[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) left[r] = load(row + r * width + d);
#pragma GCC unroll 16
  for (int j = 0; j < C; ++j) {
    const vf right = load(other[j] + d, n);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) x[r * C + j] = fma(right, left[r], x[r * C + j]);
  }
}

// Return dot products: lane r * C + j has row_r . from_j. Lanes with j >= count repeat j = count - 1.
template <int R, int C, class T>
FASTATTN_INLINE vf products_of_rows(const float* row, int64_t width, const T* from, int64_t stride, int count,
                                    int length) {
  vf x[kLanes];
  const T* other[C];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) x[i] = vf{};
#pragma GCC unroll 16
  for (int j = 0; j < C; ++j) other[j] = from + min(j, count - 1) * stride;
  int d = 0;
  for (; d + kLanes <= length; d += kLanes) add_products<R, C>(row, width, other, d, kLanes, x);
  if (d < length) add_products<R, C>(row, width, other, d, length - d, x);
  // Transpose and add: each step halves the number of vectors and doubles the sums per vector.
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2)
#pragma GCC unroll 8
    for (int j = 0; j < half; ++j) {
      vf low, high;
      interleave(x[j], x[j + half], &low, &high);
      x[j] = low + high;
    }
  return x[0];
}

// Compute product (rows, block) = scale * row_r . from_j for j < count. The rest of the last vector is arbitrary.
// `row` (rows, width) is padded with zeros to whole vectors. For j < ahead, from_(j + block) is prefetched.
template <int R = kRowsAtOnce, class T>
void row_products(int rows, const float* row, int64_t width, const T* from, int64_t stride, int count, int length,
                  float scale, int block, int ahead, float* product) {
  constexpr int C = kLanes / R;
  for (; rows >= R; rows -= R, row += R * width, product += R * block, ahead = 0)
    for (int first = 0; first < count; first += C) {
      const int rest = count - first;
      const T* others = from + first * stride;
      for (int j = 0; j < min(ahead - first, C); ++j) prefetch_row(others + (j + block) * stride, length);
      if constexpr (R == 1) {
        const vf x = rest > C / 2 ? products_of_rows<1, C>(row, width, others, stride, rest, length)
                     : rest > 1   ? products_of_rows<1, C / 2>(row, width, others, stride, rest, length)
                                  : products_of_rows<1, 1>(row, width, others, stride, rest, length);
        store(product + first, x * scale);
      } else {
        float x[kLanes];
        store(x, products_of_rows<R, C>(row, width, others, stride, rest, length) * scale);
#pragma GCC unroll 4
        for (int i = 0; i < R; ++i) memcpy(product + i * block + first, x + i * C, C * sizeof(float));
      }
    }
  if constexpr (R > 1) row_products<R / 2>(rows, row, width, from, stride, count, length, scale, block, ahead, product);
}

FASTATTN_INLINE bool has_zero(const float* x, int n) {
  vf zeros = {};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) zeros = select(load(x + i) == vf{}, splat(1.0f), zeros);
  for (; i < n; ++i) zeros[0] = x[i] == 0 ? 1 : zeros[0];
  return max(zeros) != 0;
}

// Compute sum_r = factor_r sum_r + sum_j weight_rj from_j for R rows of `vectors` vectors.
template <int R, int vectors, class T>
FASTATTN_INLINE void add_row_vectors(const float* weight, const T* from, int64_t stride, int count, int length,
                                     const float* factor, int block, int ahead, float* sum, int64_t width) {
  constexpr int kSums = R * vectors < 8 ? 2 : 1;  // independent chains, which hide the latency of FMA
  const int last = length - (vectors - 1) * kLanes;
  vf x[kSums][R][vectors];
#pragma GCC unroll 2
  for (int i = 0; i < kSums; ++i)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int n = 0; n < vectors; ++n) x[i][r][n] = vf{};
  const auto add = [&](int j, int i) {
    if (j < ahead) prefetch_row(from + (j + block) * stride, length);
    if (R == 1 && weight[j] == 0) return;
    const T* other = from + j * stride;
    vf right[vectors];
#pragma GCC unroll 4
    for (int n = 0; n < vectors; ++n) right[n] = load(other + n * kLanes, n + 1 < vectors ? kLanes : min(last, kLanes));
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int n = 0; n < vectors; ++n) x[i][r][n] = fma(right[n], splat(weight[r * block + j]), x[i][r][n]);
  };
  int j = 0;
  for (; j + kSums <= count; j += kSums)
#pragma GCC unroll 2
    for (int i = 0; i < kSums; ++i) add(j + i, i);
  if (j < count) add(j, 0);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < vectors; ++n) {
      float* to = sum + r * width + n * kLanes;
      const vf total = kSums > 1 ? x[0][r][n] + x[kSums - 1][r][n] : x[0][r][n];
      store(to, factor ? fma(load(to), splat(factor[r]), total) : load(to) + total);
    }
}

// Compute sum_r = factor_r sum_r + sum_j weight_rj from_j. `weight` is (rows, block), `factor` (rows) or null for 1,
// `sum` (rows, width) in whole vectors. A weight of 0 skips its row, which may hold NaN. For j < ahead, from_(j +
// block) is prefetched.
template <int R = kRowsAtOnce, class T>
void add_rows(int rows, const float* weight, const T* from, int64_t stride, int count, int length, const float* factor,
              int block, int ahead, float* sum, int64_t width) {
  for (; rows >= R; rows -= R, weight += R * block, factor += factor ? R : 0, sum += R * width, ahead = 0) {
    bool hidden = false;
    for (int r = 0; R > 1 && r < R; ++r) hidden |= has_zero(weight + r * block, count);
    if (hidden) {
      add_rows<1>(R, weight, from, stride, count, length, factor, block, ahead, sum, width);
      continue;
    }
    for (int d = 0; d < length; d += 4 * kLanes) {
      const int rest = min(length - d, 4 * kLanes);
      const T* part = from + d;
      switch ((rest + kLanes - 1) / kLanes) {
        case 1: add_row_vectors<R, 1>(weight, part, stride, count, rest, factor, block, ahead, sum + d, width); break;
        case 2: add_row_vectors<R, 2>(weight, part, stride, count, rest, factor, block, ahead, sum + d, width); break;
        case 3: add_row_vectors<R, 3>(weight, part, stride, count, rest, factor, block, ahead, sum + d, width); break;
        default: add_row_vectors<R, 4>(weight, part, stride, count, rest, factor, block, ahead, sum + d, width);
      }
    }
  }
  if constexpr (R > 1) add_rows<R / 2>(rows, weight, from, stride, count, length, factor, block, ahead, sum, width);
}

// Compute to_j = factor * sum_r weight_rj row_r, where to_j has `vectors` vectors.
template <int vectors, class T>
FASTATTN_INLINE void write_key_vectors(int rows, const float* weight, const float* row, int64_t width, float factor,
                                       int block, int count, int length, T* to, int64_t stride) {
  const int last = length - (vectors - 1) * kLanes;
  for (int j = 0; j < count; ++j, to += stride) {
    vf total[vectors] = {};
    for (int r = 0; r < rows; ++r) {
      const float w = weight[r * block + j];
      if (w == 0) continue;
#pragma GCC unroll 4
      for (int n = 0; n < vectors; ++n) total[n] = fma(load(row + r * width + n * kLanes), splat(w), total[n]);
    }
#pragma GCC unroll 4
    for (int n = 0; n < vectors; ++n)
      store(to + n * kLanes, total[n] * factor, n + 1 < vectors ? kLanes : min(last, kLanes));
  }
}

// Write `count` gradients of keys or values: to_j = factor * sum_r weight_rj row_r. `weight` is (rows, block), `row`
// (rows, width) in whole vectors.
template <class T>
void write_keys(int rows, const float* weight, const float* row, int64_t width, float factor, int block, int count,
                int length, T* to, int64_t stride) {
  for (int d = 0; d < length; d += 4 * kLanes, row += 4 * kLanes, to += 4 * kLanes) {
    const int rest = min(length - d, 4 * kLanes);
    switch ((rest + kLanes - 1) / kLanes) {
      case 1: write_key_vectors<1>(rows, weight, row, width, factor, block, count, rest, to, stride); break;
      case 2: write_key_vectors<2>(rows, weight, row, width, factor, block, count, rest, to, stride); break;
      case 3: write_key_vectors<3>(rows, weight, row, width, factor, block, count, rest, to, stride); break;
      default: write_key_vectors<4>(rows, weight, row, width, factor, block, count, rest, to, stride);
    }
  }
}

}  // namespace
}  // namespace fastattn
