// LayerNorm and its backward pass: backends/triton/layer_norm.py.
#include "launcher.h"

namespace fastattn::triton {
namespace {

constexpr int64_t kMaxPrograms = 512;  // MAX_PROGRAMS in Python

Kernel kernel_of(const LayerNormBackward& p, Place place) {
  const int64_t bits = p.columns | address(p.grad_out) | address(p.grad_sum) | address(p.x) | address(p.weight) |
                       p.grad_out_row | p.grad_sum_row | p.x_row;
  return Kernel("layer_norm.backward", place, {padded(p.columns), bits % 16 == 0, fits_int32(p.matrices * p.rows)});
}

int64_t programs_of(const LayerNormBackward& p, const Kernel& kernel) {
  const int64_t blocks = cdiv(p.matrices * p.rows, kernel.block_m());
  return blocks < kMaxPrograms ? blocks : kMaxPrograms;
}

}  // namespace

void run(const LayerNorm& p, Place place) {
  const int64_t rows = p.matrices * p.rows;
  if (p.columns == 0) throw NotServed("fastattn: no columns");  // an empty operand has no address
  const int64_t bits = p.columns | address(p.input) | address(p.residual) | address(p.weight) | address(p.bias) |
                       p.input_row | p.residual_row;
  Kernel kernel("layer_norm.forward", place, {padded(p.columns), bits % 16 == 0, fits_int32(rows)});
  kernel.start(cdiv(rows, kernel.block_m()), 1, Pointer{p.input, p.input_dtype}, Pointer{p.residual, p.residual_dtype},
               Pointer{p.weight, p.weight_dtype}, Pointer{p.bias, p.bias_dtype}, drop_of(p.seed, p.threshold),
               Pointer{p.out, p.out_dtype}, Pointer{p.sum, p.dtype}, p.mean, p.rstd, rows, p.columns, p.rows,
               p.input_row, p.residual_row, p.eps);
}

void run(const LayerNormBackward& p, Place place, const Allocate& allocate) {
  if (p.matrices * p.rows * p.columns == 0) throw NotServed("fastattn: Python writes the gradients of no rows");
  Kernel kernel = kernel_of(p, place);
  const int64_t programs = programs_of(p, kernel);
  // The sums of each program for the gradients of weight and bias: (2, programs, columns).
  float* partial = allocate(p.grad_weight || p.grad_bias ? 2 * programs * p.columns : 0);
  kernel.start(programs, 1, Pointer{p.grad_out, p.grad_out_dtype}, Pointer{p.grad_sum, p.dtype}, Pointer{p.x, p.dtype},
               p.mean, p.rstd, Pointer{p.weight, p.weight_dtype}, drop_of(p.seed, p.threshold),
               Pointer{p.grad_input, p.input_dtype}, Pointer{p.grad_x, p.dtype}, partial, p.matrices * p.rows,
               p.columns, p.rows, p.grad_out_row, p.grad_sum_row, p.x_row);
  if (!partial) return;
  Kernel reduce("layer_norm.reduce", place, {});
  reduce.start(cdiv(p.columns, reduce.block_n()), 2, partial, Pointer{p.grad_weight, p.grad_weight_dtype},
               Pointer{p.grad_bias, p.grad_bias_dtype}, programs, p.columns);
}

}  // namespace fastattn::triton
