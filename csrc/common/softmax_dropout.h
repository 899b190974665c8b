// dropout(softmax(scale * input + mask)) over the last dimension, forward and backward.
#pragma once
#include "types.h"
#include "visibility.h"

namespace fastattn {

// s = scale * input + mask for an input of shape (batch, heads, rows, columns); -inf where row i does not see column j.
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
  int64_t window_left, window_right;
  bool lower_right;
};

namespace {

FASTATTN_HOST_DEVICE inline Visibility visibility_of(const Scores& s, int64_t b) {
  return Visibility(s.key_lengths ? s.key_lengths[b] : s.columns, s.rows, s.lower_right, s.window_left, s.window_right);
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
  const void* grad_out;  // input's dtype
  int64_t grad_batch, grad_head, grad_row;
  const float* stats;
  void* grad_input;  // contiguous, input's dtype
  void* grad_mask;   // contiguous; or null
  Dtype grad_mask_dtype;
  bool grad_mask_full[4];  // which dimensions it has; the others have size 1. The CUDA kernel needs all
};

}  // namespace fastattn
