// Scaled-dot-product attention over dense batches and over packed sequences, forward and backward.
//
//   s_ij = scale q_i . k_j + mask_ij,  P_ij = exp(s_ij - row_max_i) / row_sum_i,  out_i = sum_j P_ij v_j.
//
// The sums are over the keys j that query i sees through the lengths, the window (visibility.h) and the mask.
#pragma once
#include "operands.h"
#include "visibility.h"

namespace fastattn {

struct Attention {
  Dtype dtype;
  int64_t batch, num_heads, num_kv_heads;
  int64_t seqlen_q, seqlen_k;  // per sequence; for packed sequences bounds of the longest
  int64_t rows_q, rows_k;      // per head: seqlen_q and seqlen_k, or all tokens of packed sequences
  int head_dim, value_head_dim;
  Heads query, key, value, out;
  Heads residual;  // of out's type: the result before it was rounded, minus out; its data are null if unwanted or 0
  const int64_t *cu_seq_q, *cu_seq_k;  // (batch + 1,), offsets into the rows of packed sequences; null if dense
  const int64_t* key_lengths;          // (batch,), within [0, keys of the sequence]; null for all keys
  Mask mask;
  float scale;
  int64_t rows;  // queries of all sequences and heads
  int64_t window_left, window_right;
  bool lower_right;
  const int64_t* seed;             // (2,): key, offset.
  int threshold;                   // Dropout rate times 65536; 0: no dropout.
  float *lse, *row_max, *row_sum;  // Contiguous (batch, head, query), packed (query, head); all null if unwanted.
};

// The gradients, with dO the gradient of the output:
//   dV_j = sum_i P_ij dO_i,  dP_ij = dO_i . v_j,
//   delta_i = sum_j P_ij dP_ij - grad_lse_i = dO_i . (out_i + residual_i) - grad_lse_i,
//   dS_ij = P_ij (dP_ij - delta_i),
//   dQ_i = scale sum_j dS_ij k_j,  dK_j = scale sum_i dS_ij q_i,  grad_mask_ij = dS_ij.
struct AttentionBackward : Attention {
  Heads grad_out;
  const float* grad_lse;  // in the layout of lse; null for zero
  Heads grad_query, grad_key, grad_value;
  void* grad_mask;  // contiguous (batches, heads, rows, columns) of the mask, in its dtype; null if unwanted
};

}  // namespace fastattn
