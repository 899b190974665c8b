// dropout(softmax(scale * input + mask)) over the last dimension, and its backward pass.
#pragma once
#include <stdint.h>

#include "../common/parallel.h"
#include "../common/philox.h"
#include "../common/softmax_dropout.h"

namespace fastattn {

struct SoftmaxDropout {
  Scores scores;
  Seed seed;
  int threshold;
  void* out;        // contiguous, input's dtype
  float* stats;     // (2, batch, heads, rows): each row's maximum m, or 0 if it sees nothing, and its sum of exp(s - m)
  char* workspace;  // workspace() bytes
};

// With P = exp(s - m) / sum and dP = dropout(grad_out): grad_s = P * (dP - sum_j P dP), grad_input = scale * grad_s,
// grad_mask = grad_s summed over the dimensions that the mask broadcasts.
struct SoftmaxDropoutBackward {
  Scores scores;
  Seed seed;
  int threshold;
  const void* grad_out;  // input's dtype
  int64_t grad_batch, grad_head, grad_row;
  const float* stats;
  void* grad_input;  // contiguous, input's dtype
  void* grad_mask;   // contiguous, the mask's dtype; or null
  bool full[4];      // whether the mask has all of each dimension, else it has size 1
  char* workspace;
};

struct SoftmaxDropoutKernels {
  void (*forward)(const SoftmaxDropout&, const Parallel&);
  void (*backward)(const SoftmaxDropoutBackward&, const Parallel&);
  int64_t (*forward_workspace)(const SoftmaxDropout&, const Parallel&);
  int64_t (*backward_workspace)(const SoftmaxDropoutBackward&, const Parallel&);
};

}  // namespace fastattn
