// Operands of shape (batch, head, row, column) as the kernels see them. Strides are in elements.
#pragma once
#include "types.h"

namespace fastattn {

struct Heads {  // columns are dense
  void* data;
  int64_t batch, head, row;
};

struct Mask {
  void* data;  // null if there is no mask
  Dtype dtype;
  int64_t batches, heads, rows, columns;  // Sizes; 1 in broadcast dimensions.
  int64_t batch, head, row, column;       // Strides; 0 in broadcast dimensions.
};

namespace {

FASTATTN_HOST_DEVICE inline int64_t row_offset(const Heads& heads, int64_t batch, int64_t head, int64_t row) {
  return batch * heads.batch + head * heads.head + row * heads.row;
}

FASTATTN_HOST_DEVICE inline int64_t mask_offset(const Mask& m, int64_t batch, int64_t head, int64_t row,
                                                int64_t column) {
  return batch * m.batch + head * m.head + row * m.row + column * m.column;
}

}  // namespace
}  // namespace fastattn
