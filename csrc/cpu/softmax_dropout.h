// dropout(softmax(scale * input + mask)) over the last dimension, and its backward pass.
#pragma once
#include <stdint.h>

#include "../common/parallel.h"
#include "../common/philox.h"
#include "../common/types.h"

namespace fastattn {

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
