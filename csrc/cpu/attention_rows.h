// Functions of rows of attention's operands and results, which lie in memory in the operands' dtype.
//
// Kernels compute in units (product.h) and are compiled once per unit. Only these functions know the dtype. They are
// compiled once per instruction set and dtype, in attention_rows.cpp. A call takes a row, or those of a panel or block.
#pragma once
#include "few_queries.h"
#include "kernels.h"

namespace fastattn {

// Here `row`, `sum`, `weight`, `product` and `mean` are float32, and their rows are padded to whole vectors.
struct RowFunctions {
  // Copy `count` rows as float32 (pack_rows in pack.h).
  void (*pack)(Rows from, int count, int length, float* to, int64_t width, const uint8_t* visible);
  // The products of few queries (few_queries.h).
  void (*row_products)(int rows, const float* row, int64_t width, Rows from, int count, int length, float scale,
                       int block, int ahead, float* product);
  void (*add_rows)(int rows, const float* weight, Rows from, int count, int length, const float* factor, int block,
                   int ahead, float* sum, int64_t width);
  void (*write_keys)(int rows, const float* weight, const float* row, int64_t width, float factor, int block, int count,
                     int length, Rows to);
  // Write an output, out * factor, and what rounding takes away from it into `residual`, unless its data are null. A
  // row whose row_sum is 0 sees nothing and becomes 0.
  void (*write_output)(const float* out, float row_sum, float factor, int length, Rows to, Rows residual);
  // Write the outputs of a panel likewise. `out` is (length, stride), `row_sum` and `factor` are (count).
  void (*write_panel)(const float* out, int stride, const float* row_sum, const float* factor, int count, int length,
                      Rows to, Rows residual);
  // Write a gradient: (sum + missing * mean) * factor. A null mean is 0.
  void (*write_gradient)(const float* sum, const float* mean, float missing, float factor, int length, void* to);
  // Return the sum of grad * (out + residual). A null residual is 0.
  float (*delta)(const void* grad, const void* out, const void* residual, int length);
  // Compute the mean of rows, 0 where it is not finite.
  void (*mean)(const char* const* row, int count, int length, float* mean);
};

// The functions of every floating-point dtype, in the order of Dtype.
struct RowTable {
  RowFunctions of[3];
};

extern const RowTable FASTATTN_CONCATENATE(attention_rows, FASTATTN_ISA);

namespace {

FASTATTN_INLINE const RowFunctions& rows_of(const Attention& a) {
  return FASTATTN_CONCATENATE(attention_rows, FASTATTN_ISA).of[(int)a.dtype];
}

// Return rows that are rows of units in memory as a matrix.
FASTATTN_INLINE Matrix in_place(const Attention& a, Rows rows) { return {rows.data, rows.stride * size_of(a.dtype)}; }

// Copy rows of an operand as units (pack.h).
FASTATTN_INLINE void pack(const Attention& a, Rows from, int count, int length, float* to, int64_t width,
                          const uint8_t* visible) {
  rows_of(a).pack(from, count, length, to, width, visible);
}
FASTATTN_INLINE void pack(const Attention&, Rows from, int count, int length, Pair* to, int64_t width,
                          const uint8_t* visible) {
  pack_rows((const bfloat16*)from.data, from.stride, count, length, to, width, visible);
}

}  // namespace
}  // namespace fastattn
