// dropout(softmax(scale * input + mask)) over the last dimension, and its backward pass.
#pragma once
#include <stdint.h>

#include "../common/softmax_dropout.h"
#include "stream.h"

namespace fastattn::cuda {

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
