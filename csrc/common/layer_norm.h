// LayerNorm over the last dimension, of the input or of residual + dropout(input) in one pass, and the backward passes.
#pragma once
#include <math.h>

#include "types.h"

namespace fastattn {

// Rows are numbered through all matrices. Operands without a stride member are contiguous.
struct LayerNorm {
  const void* input;  // (matrices * rows, columns)
  Dtype input_dtype;
  int64_t input_row;     // stride in elements; columns are dense
  const void* residual;  // null to normalise the input itself
  Dtype residual_dtype;
  int64_t residual_row;
  const void *weight, *bias;  // (columns,) or null
  Dtype weight_dtype, bias_dtype;
  void* sum;  // residual + dropout(input) if there is a residual
  void* out;
  Dtype dtype;         // The dtype of sum; the input's if there is no residual.
  Dtype out_dtype;     // Equal to dtype, or a 16-bit one if the sum is float32.
  float *mean, *rstd;  // (matrices * rows,).
  int64_t matrices, rows, columns;
  float eps;
  const int64_t* seed;  // (2,): key, offset.
  int threshold;        // Dropout rate times 65536; 0: no dropout.
};

namespace {

// Return 1 / sqrt(variance + eps), or NaN if the variance, or its sum with a finite eps, overflows. An rstd of 0 would
// make the row look healthy.
FASTATTN_HOST_DEVICE inline float rstd_of(float variance, float eps) {
  const float radicand = variance + eps;
  const bool overflowed = radicand == INFINITY && (variance == INFINITY || eps < INFINITY);
  return overflowed ? NAN : 1.0f / sqrtf(radicand);
}

}  // namespace

// The gradients for y = xhat * weight + bias, with xhat = (x - mean) * rstd and g = grad_out * weight:
//   grad_x = rstd * (g - mean(g) - xhat * mean(g * xhat)), grad_weight = sum grad_out * xhat, grad_bias = sum grad_out
struct LayerNormBackward {
  const void *grad_out, *x;  // x is the input or the sum.
  Dtype grad_out_dtype;      // Equal to dtype, or a 16-bit one if dtype is float32.
  Dtype dtype;               // The dtype of x, grad_sum and grad_x.
  int64_t grad_out_row, x_row;
  const void* grad_sum;  // added to grad_x, or null
  int64_t grad_sum_row;
  const float *mean, *rstd;
  const void* weight;  // or null
  Dtype weight_dtype;
  void* grad_x;
  void* grad_input;  // grad_x through dropout, or null
  Dtype input_dtype;
  void *grad_weight, *grad_bias;  // or null
  Dtype grad_weight_dtype, grad_bias_dtype;
  int64_t matrices, rows, columns;
  const int64_t* seed;
  int threshold;
};

}  // namespace fastattn
