// LayerNorm over the last dimension, alone or of residual + dropout(input) in one pass, and the backward passes.
#pragma once
#include <math.h>

#include "types.h"

namespace fastattn {

// Rows are numbered through all matrices; what has no stride of its own is contiguous.
struct LayerNorm {
  const void* input;  // (matrices * rows, columns)
  Dtype input_dtype;
  int64_t input_row;     // stride in elements; columns are dense
  const void* residual;  // null: normalise the input itself
  Dtype residual_dtype;
  int64_t residual_row;
  const void *weight, *bias;  // (columns,) or null
  Dtype weight_dtype, bias_dtype;
  void* sum;  // residual + dropout(input), where there is a residual
  void* out;
  Dtype dtype;         // of sum; input's where there is no residual
  Dtype out_dtype;     // dtype, or a 16-bit one beside a sum in float32
  float *mean, *rstd;  // (matrices * rows,)
  int64_t matrices, rows, columns;
  float eps;
  const int64_t* seed;  // (key, offset)
  int threshold;        // 0: no dropout
};

namespace {

// 1 / sqrt(variance + eps), or NaN if the variance, or its sum with a finite eps, overflows. An rstd of 0 would make
// the row look healthy.
FASTATTN_HOST_DEVICE inline float rstd_of(float variance, float eps) {
  const float radicand = variance + eps;
  const bool overflowed = radicand == INFINITY && (variance == INFINITY || eps < INFINITY);
  return overflowed ? NAN : 1.0f / sqrtf(radicand);
}

}  // namespace

// For y = LN(x) * weight + bias with xhat = (x - mean) * rstd and g = grad_out * weight:
//   grad_x = rstd * (g - mean(g) - xhat * mean(g * xhat)), grad_weight = sum grad_out * xhat, grad_bias = sum grad_out
struct LayerNormBackward {
  const void *grad_out, *x;  // x: the input, or the sum
  Dtype grad_out_dtype;      // dtype, or a 16-bit one beside float32
  Dtype dtype;               // of x, grad_sum, grad_x
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
