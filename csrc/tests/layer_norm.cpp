#include <math.h>

#include "../common/layer_norm.h"
#include "harness.h"

namespace fastattn {
FASTATTN_KERNEL(LayerNorm, layer_norm)
FASTATTN_KERNEL(LayerNormBackward, layer_norm_backward)
}  // namespace fastattn

namespace fastattn::testing {
namespace {

constexpr double kEpsilon = 0x1p-23;

// Rows at a stride. The elements between rows are NaN and must not be read.
struct Rows {
  Rows(Random& random, Dtype dtype, int64_t rows, int64_t columns, double mean)
      : stride(columns + random.between(0, 5)),
        buffer(dtype, rows ? (rows - 1) * stride + columns : 0, random.chance(50)) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t j = 0; j < columns; ++j) buffer.set(r * stride + j, random.normal() + mean);
  }
  double operator()(int64_t row, int64_t column) const { return buffer.get(row * stride + column); }

  int64_t stride;
  Buffer buffer;
};

std::string describe(const char* op, int64_t matrices, int64_t rows, int64_t columns, Dtype a, Dtype b, int threshold) {
  return std::string(op) + " (" + std::to_string(matrices) + ", " + std::to_string(rows) + ", " +
         std::to_string(columns) + ") " + name_of(a) + " " + name_of(b) + " threshold " + std::to_string(threshold) +
         " on " + kInstructionSets[instruction_set()];
}

Dtype promoted(Dtype a, Dtype b) { return a == b ? a : Dtype::float32; }

// Rows of +-`size` have a variance that overflows float32. Their rstd and the normalised rows are NaN, not 0.
void test_overflow(Dtype dtype, int64_t columns, double size) {
  constexpr int64_t kRows = 3;
  begin_case("layer_norm of +-" + std::to_string(size) + " (1, 3, " + std::to_string(columns) + ") " + name_of(dtype) +
             " on " + kInstructionSets[instruction_set()]);
  Buffer input(dtype, kRows * columns), out(dtype, kRows * columns);
  Buffer means(Dtype::float32, kRows), rstds(Dtype::float32, kRows);
  for (int64_t i = 0; i < input.count; ++i) input.set(i, i % 2 == 0 ? size : -size);
  LayerNorm p = {};
  p.matrices = 1, p.rows = kRows, p.columns = columns, p.eps = 1e-5f;
  p.input = input.data, p.input_dtype = p.dtype = p.out_dtype = dtype, p.input_row = columns;
  p.out = out.data, p.mean = (float*)means.data, p.rstd = (float*)rstds.data;
  run_on_threads({&out, &means, &rstds}, [&](const Parallel& parallel) { run_kernel(p, parallel); });
  expect_close("rstd", rstds, std::vector<double>(kRows, NAN), 0);
  expect_close("out", out, std::vector<double>((size_t)out.count, NAN), 0);
}

}  // namespace

void test_layer_norm(int cases) {
  for (const Dtype dtype : {Dtype::float32, Dtype::bfloat16})
    for (const int64_t columns : {5, 700})
      for (const double size : {1e20, 3e38}) test_overflow(dtype, columns, size);
  Random random = {2};
  for (int i = 0; i < cases; ++i) {
    const bool large = i % 50 == 0, fused = random.chance(60);
    const int64_t matrices = random.between(large ? 1 : 0, 3), rows = random.between(large ? 200 : 0, large ? 230 : 40);
    const int64_t columns = i % 50 == 25 ? 5000 : random.between(large ? 300 : 1, large ? 500 : 90);
    const int64_t all = matrices * rows, count = all * columns;
    const Dtype input_dtype = any_float(random), residual_dtype = fused ? any_float(random) : input_dtype;
    const Dtype dtype = promoted(input_dtype, residual_dtype);
    const Dtype out_dtype = fused && dtype == Dtype::float32 ? any_float(random) : dtype;
    const int threshold = fused ? random.pick({0, 6554, 32768, 65536}) : 0;
    const double mean = random.pick({0.0, 3.0, 1e4}),
                 keep_scale = threshold < 65536 ? 65536.0 / (65536 - threshold) : 0;
    begin_case(describe(fused ? "dropout_add_layer_norm" : "layer_norm", matrices, rows, columns, input_dtype,
                        residual_dtype, threshold));

    LayerNorm p = {};
    p.matrices = matrices, p.rows = rows, p.columns = columns, p.eps = 1e-5f;
    const int64_t seed[2] = {(int64_t)random.next(), (int64_t)random.next()};
    p.seed = seed;
    p.threshold = threshold;
    Rows input(random, input_dtype, all, columns, mean), residual(random, residual_dtype, fused ? all : 0, columns, 0);
    p.weight_dtype = any_float(random), p.bias_dtype = any_float(random);
    Rows weight(random, p.weight_dtype, 1, columns, 1), bias(random, p.bias_dtype, 1, columns, 0);
    Buffer sum(dtype, fused ? count : 0, random.chance(50)), out(out_dtype, count, random.chance(50));
    Buffer means(Dtype::float32, all), rstds(Dtype::float32, all);
    p.input = input.buffer.data, p.input_dtype = input_dtype, p.input_row = input.stride;
    if (fused) p.residual = residual.buffer.data, p.residual_dtype = residual_dtype, p.residual_row = residual.stride;
    if (random.chance(70)) p.weight = weight.buffer.data;
    if (random.chance(70)) p.bias = bias.buffer.data;
    p.sum = sum.data, p.dtype = dtype, p.out = out.data, p.out_dtype = out_dtype;
    p.mean = (float*)means.data, p.rstd = (float*)rstds.data;
    run_on_threads({&sum, &out, &means, &rstds}, [&](const Parallel& parallel) { run_kernel(p, parallel); });

    // The kernel normalises the sum as stored.
    std::vector<double> want_sum, x, want, want_mean, want_rstd;
    double largest_rstd = 0;
    for (int64_t row = 0; row < all; ++row) {
      double total = 0, squares = 0;
      for (int64_t j = 0; j < columns; ++j) {
        const bool kept = !threshold || philox_keep(make_seed(seed), (uint32_t)(row / rows), row % rows, j, threshold);
        if (fused) want_sum.push_back(residual(row, j) + (kept ? input(row, j) * keep_scale : 0));
        x.push_back(fused ? sum.get(row * columns + j) : input(row, j));
        total += x.back();
      }
      for (int64_t j = 0; j < columns; ++j) squares += pow(x[(size_t)(row * columns + j)] - total / (double)columns, 2);
      want_mean.push_back(total / (double)columns);
      want_rstd.push_back(1 / sqrt(squares / (double)columns + p.eps));
      largest_rstd = fmax(largest_rstd, want_rstd.back());
      for (int64_t j = 0; j < columns; ++j)
        want.push_back((x[(size_t)(row * columns + j)] - want_mean.back()) * want_rstd.back() *
                           (p.weight ? weight(0, j) : 1) +
                       (p.bias ? bias(0, j) : 0));
    }
    // Rounding x - mean and the mean costs a few epsilons of |x|, which rstd magnifies. |weight| is below 7.
    const double magnitude = (mean + 8) * fmax(1, keep_scale), x_error = 4 * kEpsilon * magnitude;
    expect_close("sum", sum, want_sum, x_error);
    expect_close("mean", means, want_mean, x_error);
    expect_close("rstd", rstds, want_rstd, 8 * kEpsilon * largest_rstd + largest_rstd * pow(x_error * largest_rstd, 2));
    const double xhat_error = x_error * largest_rstd * (1 + sqrt((double)columns) * x_error * largest_rstd);
    expect_close("out", out, want, 7 * (xhat_error + 16 * kEpsilon * sqrt((double)columns)));

    LayerNormBackward q = {};
    q.matrices = matrices, q.rows = rows, q.columns = columns;
    q.seed = p.seed, q.threshold = threshold, q.dtype = dtype, q.input_dtype = input_dtype;
    q.x = fused ? sum.data : input.buffer.data, q.x_row = fused ? columns : input.stride;
    q.grad_out_dtype = out_dtype;
    Rows grad_out(random, out_dtype, all, columns, 0), grad_sum(random, dtype, all, columns, 0);
    const bool add = fused && random.chance(50);
    q.grad_out = grad_out.buffer.data, q.grad_out_row = grad_out.stride;
    if (add) q.grad_sum = grad_sum.buffer.data, q.grad_sum_row = grad_sum.stride;
    q.mean = p.mean, q.rstd = p.rstd, q.weight = p.weight, q.weight_dtype = p.weight_dtype;
    q.grad_weight_dtype = any_float(random), q.grad_bias_dtype = any_float(random);
    const bool weight_grad = random.chance(70), bias_grad = random.chance(70);
    Buffer grad_x(dtype, count, random.chance(50)), grad_input(input_dtype, fused ? count : 0, random.chance(50));
    Buffer grad_weight(q.grad_weight_dtype, weight_grad ? columns : 0),
        grad_bias(q.grad_bias_dtype, bias_grad ? columns : 0);
    q.grad_x = grad_x.data, q.grad_input = fused ? grad_input.data : nullptr;
    q.grad_weight = weight_grad ? grad_weight.data : nullptr, q.grad_bias = bias_grad ? grad_bias.data : nullptr;
    run_on_threads({&grad_x, &grad_input, &grad_weight, &grad_bias},
                   [&](const Parallel& parallel) { run_kernel(q, parallel); });

    std::vector<double> want_x, want_input, want_weight((size_t)grad_weight.count), want_bias((size_t)grad_bias.count);
    double largest_xhat = 1;
    for (int64_t row = 0; row < all; ++row) {
      const double m = means.get(row), rstd = rstds.get(row);
      double g_mean = 0, gx_mean = 0;
      for (int64_t j = 0; j < columns; ++j) {
        const double g = grad_out(row, j) * (p.weight ? weight(0, j) : 1);
        const double xhat = (x[(size_t)(row * columns + j)] - m) * rstd;
        g_mean += g / (double)columns;
        gx_mean += g * xhat / (double)columns;
        largest_xhat = fmax(largest_xhat, fabs(xhat));
        if (weight_grad) want_weight[(size_t)j] += grad_out(row, j) * xhat;
        if (bias_grad) want_bias[(size_t)j] += grad_out(row, j);
      }
      for (int64_t j = 0; j < columns; ++j) {
        const double g = grad_out(row, j) * (p.weight ? weight(0, j) : 1);
        const double xhat = (x[(size_t)(row * columns + j)] - m) * rstd;
        want_x.push_back((g - g_mean - xhat * gx_mean) * rstd + (add ? grad_sum(row, j) : 0));
        const bool kept = !threshold || philox_keep(make_seed(seed), (uint32_t)(row / rows), row % rows, j, threshold);
        if (fused) want_input.push_back(kept ? want_x.back() * keep_scale : 0);
      }
    }
    // g is below 40 and xhat * mean(g * xhat) below 40 largest_xhat^2. There are a dozen roundings, and the means'.
    const double roundings = (16 + 2 * log2((double)columns)) * kEpsilon;
    const double slack = roundings * 40 * (1 + largest_xhat * largest_xhat) * fmax(1, largest_rstd);
    expect_close("grad_x", grad_x, want_x, slack);
    expect_close("grad_input", grad_input, want_input, slack * fmax(1, keep_scale));
    const double sums = kEpsilon * 6 * (double)all;  // a sum of `all` terms below 6 (times xhat), added one by one
    expect_close("grad_weight", grad_weight, want_weight, sums * largest_xhat + 1e-6);
    expect_close("grad_bias", grad_bias, want_bias, sums + 1e-6);
  }
}

}  // namespace fastattn::testing
