// dropout(softmax(scale * input + mask)) over the last dimension, forward and backward.
#pragma once
#include "operands.h"
#include "visibility.h"

namespace fastattn {

// s = scale * input + mask for an input of shape (batch, heads, rows, columns); -inf where row i does not see column j.
struct Scores {
  Heads input;
  Dtype dtype;
  Mask mask;
  const int64_t* key_lengths;  // (batch,) or null
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
  const int64_t* seed;  // (key, offset)
  int threshold;        // 0: no dropout
  void* out;            // contiguous, input's dtype
  float* stats;         // (2, batch, heads, rows): row_max, 0 of a row that sees nothing, and row_sum
};

// With P = exp(s - row_max) / row_sum and dP = dropout(grad_out): grad_s = P * (dP - sum_j P dP),
// grad_input = scale * grad_s, grad_mask = grad_s summed over the dimensions that the mask broadcasts.
struct SoftmaxDropoutBackward {
  Scores scores;
  const int64_t* seed;
  int threshold;
  Heads grad_out;  // input's dtype
  const float* stats;
  void* grad_input;  // contiguous, input's dtype
  void* grad_mask;   // contiguous, or null: on the CPU with the mask's sizes, on CUDA with those of the scores
  Dtype grad_mask_dtype;
};

}  // namespace fastattn
