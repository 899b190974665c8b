#include <math.h>

#include "../common/softmax_dropout.h"
#include "harness.h"

namespace fastattn {
FASTATTN_KERNEL(SoftmaxDropout, softmax_dropout)
FASTATTN_KERNEL(SoftmaxDropoutBackward, softmax_dropout_backward)
}  // namespace fastattn

namespace fastattn::testing {

void test_softmax_dropout(int cases) {
  Random random = {3};
  for (int c = 0; c < cases; ++c) {
    const bool large = c % 50 == 0;
    SoftmaxDropout p = {};
    Scores& s = p.scores;
    s.dtype = any_float(random);
    s.batch = random.between(large ? 2 : 0, 3), s.heads = random.between(large ? 2 : 1, 3);
    s.rows = random.between(large ? 100 : 0, large ? 120 : 40);
    s.columns = c % 50 == 25 ? 3000 : random.between(large ? 300 : 0, large ? 500 : 90);
    s.scale = (float)random.pick({1.0, 0.125, -0.5, 0.0});
    s.lower_right = random.chance(50);
    draw_window(random, s, s.rows, s.columns);
    p.threshold = random.pick({0, 6554, 32768, 65536});
    const std::vector<int64_t> seed = {(int64_t)random.next(), (int64_t)random.next()};
    p.seed = seed.data();
    const int64_t all_rows = s.batch * s.heads * s.rows, count = all_rows * s.columns;

    RandomMask mask;
    if (random.chance(70)) mask = RandomMask(random, s.batch, s.heads, s.rows, s.columns);
    s.mask = mask.mask;
    std::vector<int64_t> lengths;
    for (int64_t b = 0; b < s.batch; ++b) lengths.push_back(random.between(0, s.columns));
    if (random.chance(40)) s.key_lengths = lengths.data();
    begin_case("softmax_dropout", s.dtype, s.batch, s.heads, s.rows, s.columns, mask, "window", s.window_left,
               s.window_right, "threshold", p.threshold, "scale", s.scale, "case", c);

    const auto operand = [&] {
      return Operand(random, s.dtype, s.batch, s.heads, s.rows, s.columns, random.chance(30), 3);
    };
    Operand input = operand(), grad_out = operand();
    s.input = input.heads();
    const auto score = [&](int64_t b, int64_t h, int64_t i, int64_t j) {
      if (!in_window(s, s.rows, s.key_lengths ? lengths[(size_t)b] : s.columns, i, j)) return -INFINITY;
      const double added = mask(b, h, i, j);
      if (added > -INFINITY) return (float)(input(b, h, i, j) * (double)s.scale + added);
      input.buffer->set(input.at(b, h, i, j), NAN);  // hidden elements may hold NaN
      grad_out.buffer->set(grad_out.at(b, h, i, j), NAN);
      return -INFINITY;
    };

    const bool mask_grad = mask.is_float();
    Buffer out(s.dtype, count, random.chance(50)), stats(Dtype::float32, 2 * all_rows);
    Buffer grad_input(s.dtype, count, random.chance(50)), grad_mask(s.mask.dtype, mask_grad ? mask.buffer->count : 0);
    std::vector<double> want, want_stats(2 * (size_t)all_rows), want_grad, want_mask_grad((size_t)grad_mask.count);
    const double scale_of_kept = kept_scale(p.threshold);
    double total_max = 1;
    for (int64_t row = 0; row < all_rows; ++row) {
      const int64_t b = row / s.rows / s.heads, h = row / s.rows % s.heads, i = row % s.rows;
      std::vector<double> e, grad;
      double reference = -INFINITY, total = 0, dot = 0;
      for (int64_t j = 0; j < s.columns; ++j) {
        e.push_back(score(b, h, i, j));
        reference = fmax(reference, e.back());
      }
      if (reference == -INFINITY) reference = 0;
      for (double& value : e) total += value = exp(value - reference);
      want_stats[(size_t)row] = reference, want_stats[(size_t)(all_rows + row)] = total;
      total_max = fmax(total_max, total);
      for (int64_t j = 0; j < s.columns; ++j) {
        const double probability = e[(size_t)j] /= total == 0 ? 1 : total;
        const bool kept = philox_keep(make_seed(seed.data()), (uint32_t)(b * s.heads + h), i, j, p.threshold);
        want.push_back(kept ? probability * scale_of_kept : 0);
        grad.push_back(kept && probability > 0 ? grad_out(b, h, i, j) * scale_of_kept : 0);
        dot += probability * grad.back();
      }
      for (int64_t j = 0; j < s.columns; ++j) {
        const double grad_score = e[(size_t)j] * (grad[(size_t)j] - dot);
        want_grad.push_back(grad_score * (double)s.scale);
        if (mask_grad) want_mask_grad[(size_t)mask.at(b, h, i, j)] += grad_score;
      }
    }

    p.out = out.data, p.stats = (float*)stats.data;
    run_kernel(p, {&out, &stats});
    // Scores below 16 (65504 with the extreme mask) are rounded once. Their absolute error is a relative error of P.
    const double largest = mask.finite_extremes ? 65520 : 16, relative = (largest + 16) * kEpsilon;
    expect_close("out", out, want, relative * fmax(1, scale_of_kept));
    expect_close("stats", stats, want_stats, relative * total_max);

    SoftmaxDropoutBackward q = {};
    q.scores = s, q.seed = p.seed, q.threshold = p.threshold, q.grad_out = grad_out.heads(), q.stats = p.stats;
    q.grad_input = grad_input.data, q.grad_mask = mask_grad ? grad_mask.data : nullptr;
    q.grad_mask_dtype = s.mask.dtype;
    run_kernel(q, {&grad_input, &grad_mask});
    // |dP| is below 18 scale_of_kept. An element of the mask's gradient is a sum over the scores that it is broadcast
    // to.
    const double grad_slack = 4 * relative * 18 * fmax(1, scale_of_kept);
    expect_close("grad_input", grad_input, want_grad, grad_slack);
    expect_close("grad_mask", grad_mask, want_mask_grad,
                 grad_slack * sqrt((double)count / fmax(1, (double)grad_mask.count)) + 1e-6);
  }
}

}  // namespace fastattn::testing
