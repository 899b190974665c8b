// dropout(softmax(scale * input + mask)) over the last dimension, and its backward pass.
#pragma once
#include <stdint.h>

#include "../common/types.h"
#include "stream.h"

namespace fastattn::cuda {

// scale * input + mask for an input of shape (batch, heads, rows, columns); -inf where row i does not see column j.
struct Scores {
  const void* input;
  Dtype dtype;
  int64_t input_batch, input_head, input_row;  // strides in elements; columns are dense
  const void* mask;                            // null: none
  Dtype mask_dtype;
  int64_t mask_batch, mask_head, mask_row, mask_column;  // strides, 0 where the mask broadcasts
  const int64_t* key_lengths;                            // (batch,) or null
  int64_t batch, heads, rows, columns;
  float scale;
  int64_t window_left, window_right;  // -window_left <= j - i - diagonal <= window_right, -1: unbounded
  bool lower_right;                   // diagonal = length - rows, else 0
};

struct SoftmaxDropout {
  Scores scores;
  const int64_t* seed;  // (key, offset); null: no dropout
  int threshold;
  void* out;     // contiguous, input's dtype
  float* stats;  // (2, batch, heads, rows): each row's maximum m, or 0 if it sees nothing, and its sum of exp(s - m)
};

// With P = exp(s - m) / sum and dP = dropout(grad_out): grad_s = P * (dP - sum_j P dP), grad_input = scale * grad_s.
struct SoftmaxDropoutBackward {
  Scores scores;
  const int64_t* seed;
  int threshold;
  const void* grad_out;  // input's dtype
  int64_t grad_batch, grad_head, grad_row;
  const float* stats;
  void* grad_input;         // contiguous, input's dtype
  void* grad_scores;        // contiguous, or null: grad_s, for the mask's gradient
  Dtype grad_scores_dtype;  // float32 where the mask broadcasts, since it is summed then
};

void softmax_dropout(const SoftmaxDropout&, cudaStream_t);
void softmax_dropout_backward(const SoftmaxDropoutBackward&, cudaStream_t);

}  // namespace fastattn::cuda
