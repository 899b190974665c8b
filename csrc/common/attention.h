// Attention's operands, as the kernels of every device see them.
#pragma once
#include <stdint.h>

#include "types.h"

namespace fastattn {

// (batch, head, row, column) in memory: strides in elements, columns are dense.
struct Heads {
  void* data;
  int64_t batch, head, row;
};

struct AttentionMask {
  void* data;  // null: no mask
  Dtype dtype;
  int64_t batches, heads, rows, columns;  // 1 where the mask is broadcast
  int64_t batch, head, row, column;       // strides in elements, 0 where the mask is broadcast
};

}  // namespace fastattn
