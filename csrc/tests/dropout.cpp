#include <math.h>

#include "../common/dropout.h"
#include "harness.h"

namespace fastattn {
FASTATTN_KERNEL(Dropout, dropout)
}  // namespace fastattn

namespace fastattn::testing {

void test_dropout(int cases) {
  Random random = {1};
  for (int c = 0; c < cases; ++c) {
    Dropout p = {};
    p.dtype = any_float(random);
    const bool large = c % 50 == 0, one_row = c % 100 == 50;
    p.outer = random.between(large ? 1 : 0, 3), p.inner = random.between(1, 3);
    p.rows = one_row ? 1 : random.between(large ? 200 : 0, large ? 230 : 40);
    p.columns = one_row ? random.between(200000, 210000) : random.between(large ? 300 : 0, large ? 500 : 90);
    p.threshold = random.pick({0, 1, 6554, 32768, 65535, 65536});
    const std::vector<int64_t> seed = {(int64_t)random.next(), (int64_t)random.next()};
    p.seed = seed.data();
    p.out_row = p.columns, p.out_inner = p.rows * p.columns, p.out_outer = p.inner * p.out_inner;
    begin_case("dropout", p.dtype, p.outer, p.inner, p.rows, p.columns, "threshold", p.threshold, "case", c);

    Operand input(random, p.dtype, p.outer, p.inner, p.rows, p.columns, random.chance(30));
    p.input = input.buffer->data, p.input_outer = input.batch, p.input_inner = input.head, p.input_row = input.row;
    std::vector<double> kept, want;
    for (int64_t z = 0; z < p.outer * p.inner; ++z)
      for (int64_t row = 0; row < p.rows; ++row)
        for (int64_t column = 0; column < p.columns; ++column) {
          kept.push_back(philox_keep(make_seed(seed.data()), (uint32_t)z, row, column, p.threshold));
          want.push_back(input(z / p.inner, z % p.inner, row, column) * kept.back() * kept_scale(p.threshold));
        }
    Buffer out(p.dtype, (int64_t)want.size(), random.chance(50));
    Buffer mask(Dtype::boolean, out.count, random.chance(50));
    p.out = out.data;
    run_kernel(p, {&out});
    // The scale's relative rounding error in float32 is 2^-23.
    expect_close("out", out, want, p.threshold == 65535 ? 0.05 : 1e-5);
    p.input = nullptr, p.out = mask.data, p.dtype = Dtype::boolean;
    run_kernel(p, {&mask});
    expect_close("mask", mask, kept, 0);
  }
}

}  // namespace fastattn::testing
