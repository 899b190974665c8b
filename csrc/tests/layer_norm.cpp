#include <math.h>

#include "../common/layer_norm.h"
#include "harness.h"

namespace fastattn {
FASTATTN_KERNEL(LayerNorm, layer_norm)
FASTATTN_KERNEL(LayerNormBackward, layer_norm_backward)
}  // namespace fastattn

namespace fastattn::testing {

void test_layer_norm(int cases) {
  Random random = {2};
  for (int c = 0; c < cases; ++c) {
    const bool large = c % 50 == 0, fused = random.chance(60);
    LayerNorm p = {};
    p.matrices = random.between(large ? 1 : 0, 3), p.rows = random.between(large ? 200 : 0, large ? 230 : 40);
    p.columns = c % 50 == 25 ? 5000 : random.between(large ? 300 : 1, large ? 500 : 90);
    const int64_t columns = p.columns, all = p.matrices * p.rows, count = all * columns;
    p.input_dtype = any_float(random), p.residual_dtype = fused ? any_float(random) : p.input_dtype;
    p.dtype = p.input_dtype == p.residual_dtype ? p.input_dtype : Dtype::float32;
    p.out_dtype = fused && p.dtype == Dtype::float32 ? any_float(random) : p.dtype;
    p.weight_dtype = any_float(random), p.bias_dtype = any_float(random);
    p.eps = 1e-5f;
    const std::vector<int64_t> seed = {(int64_t)random.next(), (int64_t)random.next()};
    p.seed = seed.data();
    p.threshold = fused ? random.pick({0, 6554, 32768, 65536}) : 0;
    begin_case(fused ? "dropout_add_layer_norm" : "layer_norm", p.matrices, p.rows, columns, p.input_dtype,
               p.residual_dtype, "threshold", p.threshold, "case", c);

    const auto operand = [&](Dtype dtype, int64_t rows, double mean = 0) {
      return Operand(random, dtype, 1, 1, rows, columns, false, 1, mean);
    };
    const double mean = random.pick({0.0, 3.0, 1e4}), scale_of_kept = kept_scale(p.threshold);
    Operand input = operand(p.input_dtype, all, mean), residual = operand(p.residual_dtype, fused ? all : 0);
    Operand weight = operand(p.weight_dtype, 1, 1), bias = operand(p.bias_dtype, 1);
    Buffer sum(p.dtype, fused ? count : 0, random.chance(50)), out(p.out_dtype, count, random.chance(50));
    Buffer means(Dtype::float32, all), rstds(Dtype::float32, all);
    p.input = input.buffer->data, p.input_row = input.row;
    if (fused) p.residual = residual.buffer->data, p.residual_row = residual.row;
    if (random.chance(70)) p.weight = weight.buffer->data;
    if (random.chance(70)) p.bias = bias.buffer->data;
    p.sum = sum.data, p.out = out.data, p.mean = (float*)means.data, p.rstd = (float*)rstds.data;
    run_kernel(p, {&sum, &out, &means, &rstds});

    const auto kept = [&](int64_t row, int64_t j) {
      return philox_keep(make_seed(seed.data()), (uint32_t)(row / p.rows), row % p.rows, j, p.threshold);
    };
    const auto x = [&](int64_t row, int64_t j) {  // The kernel normalises the sum as stored.
      return fused ? sum.get(row * columns + j) : input(row, j);
    };
    const auto gain = [&](int64_t j) { return p.weight ? weight(0, j) : 1; };
    std::vector<double> want_sum, want, want_mean, want_rstd;
    double largest_rstd = 0;
    for (int64_t row = 0; row < all; ++row) {
      double total = 0, squares = 0;
      for (int64_t j = 0; j < columns; ++j) {
        if (fused) want_sum.push_back(residual(row, j) + (kept(row, j) ? input(row, j) * scale_of_kept : 0));
        total += x(row, j);
      }
      const double m = total / (double)columns;
      for (int64_t j = 0; j < columns; ++j) squares += pow(x(row, j) - m, 2);
      const double rstd = 1 / sqrt(squares / (double)columns + p.eps);
      want_mean.push_back(m), want_rstd.push_back(rstd);
      largest_rstd = fmax(largest_rstd, rstd);
      for (int64_t j = 0; j < columns; ++j)
        want.push_back((x(row, j) - m) * rstd * gain(j) + (p.bias ? bias(0, j) : 0));
    }
    // Rounding x - mean and the mean costs a few epsilons of |x|, which rstd magnifies. |weight| is below 7.
    const double magnitude = (mean + 8) * fmax(1, scale_of_kept), x_error = 4 * kEpsilon * magnitude;
    expect_close("sum", sum, want_sum, x_error);
    expect_close("mean", means, want_mean, x_error);
    expect_close("rstd", rstds, want_rstd, 8 * kEpsilon * largest_rstd + largest_rstd * pow(x_error * largest_rstd, 2));
    const double xhat_error = x_error * largest_rstd * (1 + sqrt((double)columns) * x_error * largest_rstd);
    expect_close("out", out, want, 7 * (xhat_error + 16 * kEpsilon * sqrt((double)columns)));

    LayerNormBackward q = {};
    q.matrices = p.matrices, q.rows = p.rows, q.columns = columns, q.seed = p.seed, q.threshold = p.threshold;
    q.dtype = p.dtype, q.input_dtype = p.input_dtype, q.grad_out_dtype = p.out_dtype;
    q.x = fused ? sum.data : p.input, q.x_row = fused ? columns : input.row;
    Operand grad_out = operand(p.out_dtype, all), grad_sum = operand(p.dtype, all);
    q.grad_out = grad_out.buffer->data, q.grad_out_row = grad_out.row;
    if (fused && random.chance(50)) q.grad_sum = grad_sum.buffer->data, q.grad_sum_row = grad_sum.row;
    q.mean = p.mean, q.rstd = p.rstd, q.weight = p.weight, q.weight_dtype = p.weight_dtype;
    q.grad_weight_dtype = any_float(random), q.grad_bias_dtype = any_float(random);
    Buffer grad_x(p.dtype, count, random.chance(50)), grad_input(p.input_dtype, fused ? count : 0, random.chance(50));
    Buffer grad_weight(q.grad_weight_dtype, random.chance(70) ? columns : 0);
    Buffer grad_bias(q.grad_bias_dtype, random.chance(70) ? columns : 0);
    q.grad_x = grad_x.data, q.grad_input = fused ? grad_input.data : nullptr;
    q.grad_weight = grad_weight.count ? grad_weight.data : nullptr;
    q.grad_bias = grad_bias.count ? grad_bias.data : nullptr;
    run_kernel(q, {&grad_x, &grad_input, &grad_weight, &grad_bias});

    std::vector<double> want_x, want_input, want_weight((size_t)grad_weight.count), want_bias((size_t)grad_bias.count);
    double largest_xhat = 1;
    for (int64_t row = 0; row < all; ++row) {
      const double m = means.get(row), rstd = rstds.get(row);
      double g_mean = 0, gx_mean = 0;
      for (int64_t j = 0; j < columns; ++j) {
        const double g = grad_out(row, j) * gain(j), xhat = (x(row, j) - m) * rstd;
        g_mean += g / (double)columns;
        gx_mean += g * xhat / (double)columns;
        largest_xhat = fmax(largest_xhat, fabs(xhat));
        if (q.grad_weight) want_weight[(size_t)j] += grad_out(row, j) * xhat;
        if (q.grad_bias) want_bias[(size_t)j] += grad_out(row, j);
      }
      for (int64_t j = 0; j < columns; ++j) {
        const double g = grad_out(row, j) * gain(j), xhat = (x(row, j) - m) * rstd;
        want_x.push_back((g - g_mean - xhat * gx_mean) * rstd + (q.grad_sum ? grad_sum(row, j) : 0));
        if (fused) want_input.push_back(kept(row, j) ? want_x.back() * scale_of_kept : 0);
      }
    }
    // g is below 40 and xhat * mean(g * xhat) below 40 largest_xhat^2. There are a dozen roundings, and the means'.
    const double roundings = (16 + 2 * log2((double)columns)) * kEpsilon;
    const double slack = roundings * 40 * (1 + largest_xhat * largest_xhat) * fmax(1, largest_rstd);
    expect_close("grad_x", grad_x, want_x, slack);
    expect_close("grad_input", grad_input, want_input, slack * fmax(1, scale_of_kept));
    const double sums = kEpsilon * 6 * (double)all;  // a sum of `all` terms below 6 (times xhat), added one by one
    expect_close("grad_weight", grad_weight, want_weight, sums * largest_xhat + 1e-6);
    expect_close("grad_bias", grad_bias, want_bias, sums + 1e-6);
  }
}

}  // namespace fastattn::testing
