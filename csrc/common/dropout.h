// Dropout of a stack of matrices, or only its mask. The backward pass applies the same kernel to the gradient.
#pragma once
#include "types.h"

namespace fastattn {

struct Dropout {
  const void* input;  // (outer, inner, rows, columns), matrix z = outer_index * inner + inner_index; null for the mask.
  void* out;          // In input's dtype, or boolean: true for kept elements.
  Dtype dtype;        // The dtype of out.
  int64_t outer, inner, rows, columns;
  int64_t input_outer, input_inner, input_row;  // strides in elements; columns are dense
  int64_t out_outer, out_inner, out_row;
  const int64_t* seed;  // (2,): key, offset
  int threshold;
};

}  // namespace fastattn
