#include <math.h>

#include "../common/dropout.h"
#include "harness.h"

namespace fastattn {
FASTATTN_KERNEL(Dropout, dropout)
}  // namespace fastattn

namespace fastattn::testing {
namespace {

// The known answers of Random123 (kat_vectors, philox4x32 7).
void test_known_answers() {
  static const uint32_t cases[3][10] = {
      {0, 0, 0, 0, 0, 0, 0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48},
      {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, 0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662},
      {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0x4dfccaba, 0x190a87f0, 0xc47362ba,
       0xb6b5242a},
  };
  begin_case("philox4x32-7");
  for (const auto& known : cases) {
    uint32_t counter[4] = {known[0], known[1], known[2], known[3]};
    philox(counter, known[4], known[5]);
    for (int i = 0; i < 4; ++i)
      if (counter[i] != known[6 + i]) fail("not Random123's known answer");
  }
}

}  // namespace

void test_dropout(int cases) {
  test_known_answers();
  Random random = {1};
  for (int i = 0; i < cases; ++i) {
    Dropout p = {};
    p.dtype = any_float(random);
    const bool large = i % 50 == 0, one_row = i % 100 == 50;
    p.outer = random.between(large ? 1 : 0, 3), p.inner = random.between(1, 3);
    p.rows = one_row ? 1 : random.between(large ? 200 : 0, large ? 230 : 40);
    p.columns = one_row ? random.between(200000, 210000) : random.between(large ? 300 : 0, large ? 500 : 90);
    p.threshold = random.pick({0, 1, 6554, 32768, 65535, 65536});
    const int64_t seed[2] = {(int64_t)random.next(), (int64_t)random.next()};
    p.seed = seed;
    p.input_row = p.columns + random.between(0, 3);
    p.input_inner = p.rows * p.input_row, p.input_outer = p.inner * p.input_inner;
    if (random.chance(30)) {  // (outer, rows, inner, columns) in memory
      p.input_inner = p.input_row;
      p.input_row *= p.inner;
    }
    p.out_row = p.columns, p.out_inner = p.rows * p.columns, p.out_outer = p.inner * p.out_inner;
    const int64_t matrices = p.outer * p.inner, count = matrices * p.rows * p.columns;
    begin_case("dropout " + std::string(name_of(p.dtype)) + " (" + std::to_string(p.outer) + ", " +
               std::to_string(p.inner) + ", " + std::to_string(p.rows) + ", " + std::to_string(p.columns) +
               ") threshold " + std::to_string(p.threshold) + " on " + kInstructionSets[instruction_set()]);

    Buffer input(p.dtype, p.outer * p.input_outer, random.chance(50)), out(p.dtype, count, random.chance(50));
    Buffer mask(Dtype::boolean, count, random.chance(50));
    p.input = input.data;
    std::vector<double> kept, want;
    for (int64_t z = 0; z < matrices; ++z)
      for (int64_t row = 0; row < p.rows; ++row)
        for (int64_t column = 0; column < p.columns; ++column) {
          const int64_t at = z / p.inner * p.input_outer + z % p.inner * p.input_inner + row * p.input_row + column;
          input.set(at, random.normal());
          kept.push_back(philox_keep(make_seed(seed), (uint32_t)z, row, column, p.threshold));
          want.push_back(kept.back() ? input.get(at) * 65536 / (65536 - p.threshold) : 0.0);
        }
    p.out = out.data;
    run_on_threads({&out}, [&](const Parallel& parallel) { run_kernel(p, parallel); });
    expect_close("out", out, want,
                 p.threshold == 65535 ? 0.05 : 1e-5);  // the scale's relative rounding error in float32 is 2^-23
    p.input = nullptr, p.out = mask.data, p.dtype = Dtype::boolean;
    run_on_threads({&mask}, [&](const Parallel& parallel) { run_kernel(p, parallel); });
    expect_close("mask", mask, kept, 0);
  }
}

}  // namespace fastattn::testing
