#include <math.h>

#include "../common/softmax_dropout.h"
#include "harness.h"

namespace fastattn {
FASTATTN_KERNEL(SoftmaxDropout, softmax_dropout)
FASTATTN_KERNEL(SoftmaxDropoutBackward, softmax_dropout_backward)
}  // namespace fastattn

namespace fastattn::testing {
namespace {

constexpr double kEpsilon = 0x1p-23;

// Matrices (batch, head, row, column) with dense columns and padded rows. Heads are inside rows or rows inside heads.
struct Matrices {
  Matrices(Random& random, Dtype dtype, const Scores& s)
      : padded(s.columns + random.between(0, 5)),
        heads_inside(random.chance(30)),
        row(heads_inside ? s.heads * padded : padded),
        head(heads_inside ? padded : s.rows * padded),
        batch(s.heads * s.rows * padded),
        buffer(dtype, s.batch * batch, random.chance(50)) {
    for (int64_t b = 0; b < s.batch; ++b)
      for (int64_t h = 0; h < s.heads; ++h)
        for (int64_t i = 0; i < s.rows; ++i)
          for (int64_t j = 0; j < s.columns; ++j) buffer.set(b * batch + h * head + i * row + j, random.normal() * 3);
  }
  double operator()(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return buffer.get(b * batch + h * head + i * row + j);
  }

  int64_t padded;
  bool heads_inside;
  int64_t row, head, batch;
  Buffer buffer;
};

}  // namespace

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
    s.window_left = any_window(random, s.lower_right ? s.columns : s.rows);
    s.window_right = any_window(random, s.lower_right ? s.rows : s.columns);
    p.threshold = random.pick({0, 6554, 32768, 65536});
    const int64_t seed[2] = {(int64_t)random.next(), (int64_t)random.next()};
    p.seed = seed;
    const int64_t shape[4] = {s.batch, s.heads, s.rows, s.columns};
    const int64_t all_rows = s.batch * s.heads * s.rows, count = all_rows * s.columns;

    const bool masked = random.chance(70), lengths_given = random.chance(40);
    s.mask.dtype = random.chance(40) ? Dtype::boolean : any_float(random);
    bool full[4];
    int64_t mask_shape[4], mask_stride[4], mask_count = 1;
    for (int d = 3; d >= 0; --d) {
      full[d] = random.chance(60);
      mask_shape[d] = full[d] ? shape[d] : 1;
      mask_stride[d] = full[d] ? mask_count : 0;
      mask_count *= mask_shape[d];
    }
    const bool finite_extremes = random.chance(20);
    Buffer mask(s.mask.dtype, masked ? mask_count : 0, random.chance(50));
    for (int64_t i = 0; i < mask.count; ++i) {
      const bool hidden = random.chance(25);
      if (s.mask.dtype == Dtype::boolean)
        mask.set(i, !hidden);
      else
        mask.set(i, !hidden ? random.normal() : finite_extremes ? -65504 : -INFINITY);
    }
    begin_case("softmax_dropout " + std::string(name_of(s.dtype)) + " (" + std::to_string(s.batch) + ", " +
               std::to_string(s.heads) + ", " + std::to_string(s.rows) + ", " + std::to_string(s.columns) + ") mask " +
               (masked ? name_of(s.mask.dtype) : "none") + " window " + std::to_string(s.window_left) + " " +
               std::to_string(s.window_right) + " threshold " + std::to_string(p.threshold) + " scale " +
               std::to_string(s.scale) + " case " + std::to_string(c) + " on " + kInstructionSets[instruction_set()]);
    if (masked) {
      s.mask = {mask.data,     s.mask.dtype,   mask_shape[0],  mask_shape[1],  mask_shape[2],
                mask_shape[3], mask_stride[0], mask_stride[1], mask_stride[2], mask_stride[3]};
    }
    std::vector<int64_t> lengths;
    for (int64_t b = 0; b < s.batch; ++b) lengths.push_back(random.between(0, s.columns));
    if (lengths_given) s.key_lengths = lengths.data();

    Matrices input(random, s.dtype, s), grad_out(random, s.dtype, s);
    s.input = {input.buffer.data, input.batch, input.head, input.row};
    const auto mask_at = [&](int64_t b, int64_t h, int64_t i, int64_t j) {
      return b * mask_stride[0] + h * mask_stride[1] + i * mask_stride[2] + j * mask_stride[3];
    };
    const auto score = [&](int64_t b, int64_t h, int64_t i, int64_t j) {
      const int64_t length = s.key_lengths ? lengths[(size_t)b] : s.columns;
      const int64_t distance = j - i - (s.lower_right ? length - s.rows : 0);
      if (j >= length || distance < -s.window_left || distance > s.window_right) return -INFINITY;
      double added = 0;
      if (masked) {
        added = mask.get(mask_at(b, h, i, j));
        if (s.mask.dtype == Dtype::boolean) added = added != 0 ? 0 : -INFINITY;
      }
      if (added == -INFINITY) {  // hidden elements may hold NaN
        input.buffer.set(b * input.batch + h * input.head + i * input.row + j, NAN);
        grad_out.buffer.set(b * grad_out.batch + h * grad_out.head + i * grad_out.row + j, NAN);
        return -INFINITY;
      }
      return (float)(input(b, h, i, j) * (double)s.scale + added);
    };

    std::vector<double> want, want_stats(2 * (size_t)all_rows), want_grad, want_mask_grad((size_t)mask.count);
    const double kept_scale = p.threshold < 65536 ? 65536.0 / (65536 - p.threshold) : 0;
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
      for (int64_t j = 0; j < s.columns; ++j) {
        const double probability = total == 0 ? 0 : e[(size_t)j] / total;
        const bool kept = philox_keep(make_seed(seed), (uint32_t)(b * s.heads + h), i, j, p.threshold);
        want.push_back(kept ? probability * kept_scale : 0);
        grad.push_back(kept && probability > 0 ? grad_out(b, h, i, j) * kept_scale : 0);
        dot += probability * grad.back();
        e[(size_t)j] = probability;
      }
      for (int64_t j = 0; j < s.columns; ++j) {
        const double grad_score = e[(size_t)j] * (grad[(size_t)j] - dot);
        want_grad.push_back(grad_score * (double)s.scale);
        if (mask.count) want_mask_grad[(size_t)mask_at(b, h, i, j)] += grad_score;
      }
    }

    Buffer out(s.dtype, count, random.chance(50)), stats(Dtype::float32, 2 * all_rows);
    p.out = out.data, p.stats = (float*)stats.data;
    run_on_threads({&out, &stats}, [&](const Parallel& parallel) { run_kernel(p, parallel); });
    // Scores below 16 (65504 with the extreme mask) are rounded once. Their absolute error is a relative error of P.
    const double largest = finite_extremes && masked ? 65520 : 16, relative = (largest + 16) * kEpsilon;
    expect_close("out", out, want, relative * fmax(1, kept_scale));
    double total_max = 1;
    for (int64_t row = 0; row < all_rows; ++row) total_max = fmax(total_max, want_stats[(size_t)(all_rows + row)]);
    expect_close("stats", stats, want_stats, relative * total_max);

    SoftmaxDropoutBackward q = {};
    q.scores = s, q.seed = p.seed, q.threshold = p.threshold;
    q.grad_out = {grad_out.buffer.data, grad_out.batch, grad_out.head, grad_out.row};
    q.stats = p.stats;
    const bool mask_grad = masked && s.mask.dtype != Dtype::boolean;
    Buffer grad_input(s.dtype, count, random.chance(50)), grad_mask(s.mask.dtype, mask_grad ? mask_count : 0);
    q.grad_input = grad_input.data, q.grad_mask = mask_grad ? grad_mask.data : nullptr;
    q.grad_mask_dtype = s.mask.dtype;
    run_on_threads({&grad_input, &grad_mask}, [&](const Parallel& parallel) { run_kernel(q, parallel); });
    // |dP| is below 18 kept_scale. An element of the mask's gradient is a sum over the scores that it is broadcast to.
    const double grad_slack = 4 * relative * 18 * fmax(1, kept_scale);
    expect_close("grad_input", grad_input, want_grad, grad_slack);
    if (!mask_grad) want_mask_grad.clear();
    expect_close("grad_mask", grad_mask, want_mask_grad,
                 grad_slack * sqrt((double)(count / fmax(1, (double)mask_count))) + 1e-6);
  }
}

}  // namespace fastattn::testing
