// Attention of few queries to many keys, forward: what decoding with a key-value cache runs on.
//
//   s_ij = scale q_i . k_j + mask_ij,  P_ij = exp(s_ij - m_i) / sum_i,  out_i = sum_j P_ij v_j
//
// over the keys j that query i sees, by mask, j < length and -window_left <= j - i - diagonal <= window_right. The time
// that it takes to read the keys and values once is its bound.
#pragma once
#include "../common/attention.h"
#include "stream.h"

namespace fastattn::cuda {

struct Attention {
  Dtype dtype;
  int64_t batch, heads, key_heads, queries, keys;
  int depth, value_depth;
  Heads query, key, value, out;
  const int64_t* key_lengths;  // valid keys of each sequence, within [0, keys]; null: all
  AttentionMask mask;
  float scale;
  int64_t window_left, window_right;  // at most queries + keys, which is no bound
  bool lower_right;                   // the diagonal is length - queries; otherwise 0
  float *lse, *reference, *sum;       // contiguous (batch, head, query); m_i and sum_i
};

constexpr int64_t kMostKeys = 1 << 29;  // counted in 32 bits; more would not fit into a device's memory

// Into how many parts the keys are split so that all of the device works.
int attention_splits(const Attention&, int device);
// The floats of workspace, 16-byte aligned, that the parts take.
int64_t attention_workspace(const Attention&, int splits);
void attention(const Attention&, int splits, float* workspace, cudaStream_t);

}  // namespace fastattn::cuda
