// Scaled-dot-product attention, forward and backward, over dense batches and over packed sequences.
//
//   s_ij = scale q_i . k_j + mask_ij,  P_ij = exp(s_ij - m_i) / sum_i,  out_i = sum_j P_ij v_j
//
// over the keys j that query i sees, by mask, j < length and -window_left <= j - i - diagonal <= window_right (-1: no
// bound).
#pragma once
#include <stdint.h>

#include "../common/attention.h"
#include "../common/parallel.h"
#include "../common/philox.h"
#include "../common/types.h"

namespace fastattn {

struct Attention {
  Dtype dtype;
  int64_t batch, heads, key_heads, queries, keys;  // of packed sequences: the greatest number of queries, of keys
  int depth, value_depth;
  Heads query, key, value, out;
  const int64_t *query_start, *key_start;  // packed sequences: batch + 1 offsets into the rows; null where dense
  const int64_t* key_lengths;              // valid keys of each sequence; null: all
  AttentionMask mask;
  float scale;
  int64_t window_left, window_right;
  bool lower_right;  // the diagonal is length - queries; otherwise 0
  Seed seed;
  int threshold;                 // 0: no dropout
  float *lse, *reference, *sum;  // (batch, head, query) with these strides; m_i and sum_i; or null
  int64_t row_batch, row_head, row_query;
};

struct AttentionGradients {
  Heads out_grad;
  const float* lse_grad;  // laid out as lse; null: zero
  Heads query_grad, key_grad, value_grad;
  void* mask_grad;  // contiguous (batches, heads, rows, columns) of the mask, in its dtype; null: unwanted
};

// The workspace is 64-byte aligned and has as many bytes as the function beside the kernel says.
struct AttentionKernels {
  int64_t (*workspace)(const Attention&, const Parallel&);
  void (*forward)(const Attention&, const Parallel&, char* workspace);
};

struct AttentionBackwardKernels {
  int64_t (*workspace)(const Attention&, const AttentionGradients&, const Parallel&);
  void (*backward)(const Attention&, const AttentionGradients&, const Parallel&, char* workspace);
};

}  // namespace fastattn
