// Dropout: backends/triton/dropout.py.
#include "launcher.h"

namespace fastattn::triton {
namespace {

// Python's Matrices: null strides for contiguous ones.
auto matrices_of(const Dropout& p, const void* data, int64_t outer, int64_t inner, int64_t row) {
  using Stride = std::optional<int64_t>;
  const bool contiguous = (p.rows == 1 || row == p.columns) && (p.inner == 1 || inner == p.rows * p.columns) &&
                          (p.outer == 1 || outer == p.inner * p.rows * p.columns);
  const Stride strides[] = {outer, inner, row};
  const Stride none;
  return contiguous ? named("Matrices", Pointer{data, p.dtype}, none, none, none, None())
                    : named("Matrices", Pointer{data, p.dtype}, strides[0], strides[1], strides[2], None());
}

}  // namespace

void run(const Dropout& p, Place place) {
  const int64_t matrices = p.outer * p.inner, slots = row_slots(p.rows, true);
  if (matrices * p.rows * p.columns == 0) return;
  if (!p.input || p.threshold == 0) throw NotServed("fastattn: a mask, or a copy");
  int64_t bits = p.columns | address(p.input) | address(p.out);
  if (p.rows > 1) bits |= p.input_row | p.out_row;
  if (p.inner > 1) bits |= p.input_inner | p.out_inner;
  if (p.outer > 1) bits |= p.input_outer | p.out_outer;
  Kernel kernel("dropout", place, {padded(p.columns), bits % 16 == 0, fits_int32(matrices * slots)});
  const int64_t blocks = cdiv(p.columns, kernel.block_n());
  kernel.start(cdiv(matrices * slots, kernel.block_m()) * blocks, 1,
               matrices_of(p, p.input, p.input_outer, p.input_inner, p.input_row),
               matrices_of(p, p.out, p.out_outer, p.out_inner, p.out_row), drop_of(p.seed, p.threshold),
               matrices * p.rows, p.columns, p.rows, p.inner, slots, blocks);
}

}  // namespace fastattn::triton
