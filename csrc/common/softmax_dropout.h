// dropout(softmax(scale * input + mask)) over the last dimension, forward and backward.
#pragma once
#include "operands.h"
#include "visibility.h"

namespace fastattn {

// s = scale * input + mask for an input of shape (batch, heads, rows, columns). s is -inf if row i does not see column
// j.
struct Scores {
  Heads input;
  Dtype dtype;
  Mask mask;
  const int64_t* key_lengths;  // (batch,) or null for all columns
  int64_t batch, heads, rows, columns;
  float scale;
  int64_t window_left, window_right;
  bool lower_right;
};

namespace {

FASTATTN_HOST_DEVICE inline Visibility<int64_t> visibility_of(const Scores& s, int64_t b) {
  return Visibility<int64_t>(s.key_lengths ? s.key_lengths[b] : s.columns, s.rows, s.lower_right, s.window_left,
                             s.window_right);
}

}  // namespace

struct SoftmaxDropout {
  Scores scores;
  const int64_t* seed;  // (2,): key, offset.
  int threshold;        // Dropout rate times 65536; 0: no dropout.
  void* out;            // Contiguous, in input's dtype.
  float* stats;         // (2, batch, heads, rows): row_max, which is 0 for a row that sees nothing, and row_sum.
};

// The gradients, with P = exp(s - row_max) / row_sum and dP = dropout(grad_out): grad_s = P * (dP - sum_j P dP) and
// grad_input = scale * grad_s. grad_mask is grad_s, summed over the dimensions that the mask broadcasts.
struct SoftmaxDropoutBackward {
  Scores scores;
  const int64_t* seed;
  int threshold;
  Heads grad_out;  // in input's dtype
  const float* stats;
  void* grad_input;  // Contiguous, in input's dtype.
  void* grad_mask;   // Contiguous or null. It has the mask's sizes on the CPU, the scores' sizes on CUDA.
  Dtype grad_mask_dtype;
};

}  // namespace fastattn
