// Softmax-dropout's operands, as the kernels of every device see them.
#pragma once
#include <stdint.h>

#include "types.h"

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

}  // namespace fastattn
