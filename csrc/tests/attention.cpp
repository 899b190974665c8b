#include <math.h>

#include "../common/attention.h"
#include "harness.h"

namespace fastattn {
FASTATTN_KERNEL(Attention, attention)
FASTATTN_KERNEL(AttentionBackward, attention_backward)
}  // namespace fastattn

namespace fastattn::testing {
namespace {

// The values that the kernel should write, NaN for elements that it should not write. `size` bounds the sums of the
// magnitudes that the values are made of.
struct Expected {
  explicit Expected(const Operand& operand) : values(operand.zeros) {}
  explicit Expected(const Buffer& buffer) : values((size_t)buffer.count) {}
  void add(int64_t at, double value, double magnitude) {
    values[(size_t)at] += value;
    size = fmax(size, magnitude);
  }
  std::vector<double> values;
  double size = 0;
};

// A sum and the sum of its terms' magnitudes.
struct Sum {
  void add(double term) { value += term, size += fabs(term); }
  double value = 0, size = 0;
};

struct Problem {
  Attention a = {};
  bool packed;
  std::vector<int64_t> cu_seq_q, cu_seq_k, lengths;
  RandomMask mask;

  int64_t first_query(int64_t b) const { return packed ? cu_seq_q[(size_t)b] : 0; }
  int64_t first_key(int64_t b) const { return packed ? cu_seq_k[(size_t)b] : 0; }
  int64_t queries(int64_t b) const { return packed ? cu_seq_q[(size_t)b + 1] - first_query(b) : a.seqlen_q; }
  int64_t stored(int64_t b) const { return packed ? cu_seq_k[(size_t)b + 1] - first_key(b) : a.seqlen_k; }
  int64_t keys(int64_t b) const { return lengths.empty() ? stored(b) : lengths[(size_t)b]; }
  int64_t row(int64_t b, int64_t h, int64_t i) const {
    return packed ? (first_query(b) + i) * a.num_heads + h : (b * a.num_heads + h) * a.seqlen_q + i;
  }
  bool is_in_window(int64_t b, int64_t i, int64_t j) const { return in_window(a, queries(b), keys(b), i, j); }
};

// Put NaN into every key and value that the window (with the length) or the mask hides from all queries of all heads.
void spoil_unseen(const Problem& p, const Operand& key, const Operand& value) {
  for (int64_t b = 0; b < p.a.batch; ++b)
    for (int64_t j = 0; j < p.stored(b); ++j) {
      bool in_window = false, in_mask = false;
      for (int64_t h = 0; h < p.a.num_heads; ++h)
        for (int64_t i = 0; i < p.queries(b); ++i) {
          in_window |= p.is_in_window(b, i, j);
          in_mask |= p.mask(b, h, i, j) != -INFINITY;
        }
      for (int64_t h = 0; h < p.a.num_kv_heads && !(in_window && in_mask); ++h) {
        for (int64_t d = 0; d < p.a.head_dim; ++d) key.buffer->set(key.at(b, h, p.first_key(b) + j, d), NAN);
        for (int64_t d = 0; d < p.a.value_head_dim; ++d) value.buffer->set(value.at(b, h, p.first_key(b) + j, d), NAN);
      }
    }
}

void test_problem(Random& random, Problem& p) {
  Attention& a = p.a;
  const auto operand = [&](int64_t heads, int64_t rows, int64_t columns, double scale) {
    const bool heads_inside = p.packed || random.chance(40);
    return Operand(random, a.dtype, p.packed ? 1 : a.batch, heads, rows, columns, heads_inside, scale);
  };
  const int64_t query_rows = p.packed ? p.cu_seq_q.back() : a.seqlen_q;
  const auto of_queries = [&](int64_t columns, double scale = 1) {
    return operand(a.num_heads, query_rows, columns, scale);
  };
  const auto of_keys = [&](int64_t columns, double scale = 1) {
    return operand(a.num_kv_heads, p.packed ? p.cu_seq_k.back() : a.seqlen_k, columns, scale);
  };
  const double scale = random.chance(5) ? 100 : 1;  // of queries and keys
  Operand query = of_queries(a.head_dim, scale), key = of_keys(a.head_dim, scale), value = of_keys(a.value_head_dim);
  Operand out = of_queries(a.value_head_dim), residual = of_queries(a.value_head_dim);
  Operand grad_out = of_queries(a.value_head_dim);
  Operand grad_query = of_queries(a.head_dim), grad_key = of_keys(a.head_dim), grad_value = of_keys(a.value_head_dim);
  spoil_unseen(p, key, value);
  a.query = query.heads(), a.key = key.heads(), a.value = value.heads(), a.out = out.heads();

  const int64_t rows = (p.packed ? 1 : a.batch) * a.num_heads * query_rows;
  Buffer lse(Dtype::float32, rows), row_max(Dtype::float32, rows), row_sum(Dtype::float32, rows);
  Buffer grad_lse(Dtype::float32, rows);
  a.lse = (float*)lse.data, a.row_max = (float*)row_max.data, a.row_sum = (float*)row_sum.data;
  for (int64_t i = 0; i < rows; ++i) grad_lse.set(i, random.normal());
  const bool keeps_residual = a.dtype != Dtype::float32 && random.chance(70);
  if (keeps_residual) {
    a.residual = residual.heads();
    run_kernel(a, {out.buffer.get(), residual.buffer.get(), &lse, &row_max, &row_sum});
  } else {
    run_kernel(a, {out.buffer.get(), &lse, &row_max, &row_sum});
  }
  Attention alone = a;
  alone.lse = alone.row_max = alone.row_sum = nullptr, alone.residual.data = nullptr;
  run_kernel(alone, {out.buffer.get()}, true);

  AttentionBackward g = {};
  (Attention&)g = a;
  g.grad_out = grad_out.heads();
  if (random.chance(50)) g.grad_lse = (const float*)grad_lse.data;
  g.grad_query = grad_query.heads(), g.grad_key = grad_key.heads(), g.grad_value = grad_value.heads();
  const bool wants_mask = p.mask.is_float() && random.chance(60);
  Buffer grad_mask(a.mask.dtype, wants_mask ? p.mask.buffer->count : 0);
  if (wants_mask) g.grad_mask = grad_mask.data;
  run_kernel(g, {grad_query.buffer.get(), grad_key.buffer.get(), grad_value.buffer.get(), &grad_mask});

  Expected want_out(out), want_residual(residual), want_lse(lse), want_query(grad_query), want_key(grad_key),
      want_value(grad_value);
  Expected want_mask(grad_mask);
  const double scale_of_kept = kept_scale(a.threshold);
  const int64_t group = a.num_heads / a.num_kv_heads;
  double greatest = 0;  // the greatest sum of magnitudes of a score
  for (int64_t b = 0; b < a.batch; ++b)
    for (int64_t h = 0; h < a.num_heads; ++h)
      for (int64_t i = 0; i < p.queries(b); ++i) {
        const int64_t row = p.first_query(b) + i, first = p.first_key(b), kh = h / group;
        std::vector<double> s((size_t)p.keys(b), -INFINITY);
        double top = -INFINITY, total = 0;
        for (int64_t j = 0; j < p.keys(b); ++j) {
          const double added = p.mask(b, h, i, j);
          if (!p.is_in_window(b, i, j) || added == -INFINITY) continue;
          Sum dot;
          for (int64_t d = 0; d < a.head_dim; ++d) dot.add(query(b, h, row, d) * key(b, kh, first + j, d));
          s[(size_t)j] = dot.value * a.scale + added;
          greatest = fmax(greatest, dot.size * fabs(a.scale) + fabs(added));
          top = fmax(top, s[(size_t)j]);
        }
        for (const double score : s) total += top == -INFINITY ? 0 : exp(score - top);
        want_lse.values[(size_t)p.row(b, h, i)] = total == 0 ? -INFINITY : top + log(total);
        const auto probability_of = [&](int64_t j) { return total == 0 ? 0 : exp(s[(size_t)j] - top) / total; };
        const auto factor_of = [&](int64_t j) {
          const bool kept = philox_keep(make_seed(a.seed), (uint32_t)(b * a.num_heads + h), i, j, a.threshold);
          return kept ? scale_of_kept : 0;
        };
        const auto grad_probability = [&](int64_t j) {
          Sum dp;
          for (int64_t d = 0; d < a.value_head_dim; ++d) dp.add(grad_out(b, h, row, d) * value(b, kh, first + j, d));
          return dp;
        };
        Sum delta;
        for (int64_t j = 0; has_short_rows(a) && j < p.keys(b); ++j) {
          const double weight = probability_of(j) * factor_of(j);
          if (weight == 0) continue;
          const Sum dp = grad_probability(j);
          delta.value += weight * dp.value, delta.size += weight * dp.size;
        }
        for (int64_t d = 0; !has_short_rows(a) && d < a.value_head_dim; ++d) {
          delta.add(grad_out(b, h, row, d) * out(b, h, row, d));
          if (keeps_residual) delta.add(grad_out(b, h, row, d) * residual(b, h, row, d));
        }
        if (g.grad_lse) delta.value -= grad_lse.get(p.row(b, h, i));
        for (int64_t j = 0; j < p.keys(b); ++j) {
          const double probability = probability_of(j), factor = factor_of(j);
          if (probability == 0) continue;
          const double terms_of_keys = (double)(group * a.seqlen_q);
          for (int64_t d = 0; d < a.value_head_dim; ++d) {
            const double x = value(b, kh, first + j, d), dy = grad_out(b, h, row, d);
            want_out.add(out.at(b, h, row, d), probability * factor * x, scale_of_kept * fabs(x));
            want_value.add(grad_value.at(b, kh, first + j, d), probability * factor * dy,
                           scale_of_kept * fabs(dy) * terms_of_keys);
          }
          const Sum dp = grad_probability(j);
          const double ds = probability * (dp.value * factor - delta.value);
          const double ds_size = dp.size * scale_of_kept + delta.size + fabs(delta.value);
          for (int64_t d = 0; d < a.head_dim; ++d) {
            const double q = a.scale * query(b, h, row, d), k = a.scale * key(b, kh, first + j, d);
            want_query.add(grad_query.at(b, h, row, d), ds * k, fabs(k) * ds_size);
            want_key.add(grad_key.at(b, kh, first + j, d), ds * q, fabs(q) * ds_size * terms_of_keys);
          }
          if (wants_mask)
            want_mask.add(p.mask.at(b, h, i, j), ds, ds_size * (double)(a.batch * a.num_heads * a.seqlen_q));
        }
      }
  if (keeps_residual)
    for (int64_t b = 0; b < a.batch; ++b)
      for (int64_t h = 0; h < a.num_heads; ++h)
        for (int64_t i = 0; i < p.queries(b); ++i)
          for (int64_t d = 0; d < a.value_head_dim; ++d) {
            const int64_t row = p.first_query(b) + i;
            want_residual.add(residual.at(b, h, row, d),
                              want_out.values[(size_t)out.at(b, h, row, d)] - out(b, h, row, d), 0);
          }
  // P and dS are rounded at most to the operands' dtype, scores to float32.
  const double operand_error = a.dtype == Dtype::bfloat16 ? unit_roundoff(Dtype::bfloat16) : 0;
  const double score_error = kEpsilon * (a.head_dim + 8) * greatest;
  const double error = operand_error + 4 * score_error + 64 * kEpsilon;
  expect_close("out", *out.buffer, want_out.values, want_out.size * error);
  if (keeps_residual) expect_close("residual", *residual.buffer, want_residual.values, want_out.size * error);
  expect_close("lse", lse, want_lse.values, 2 * score_error + 8 * kEpsilon);
  expect_close("grad_query", *grad_query.buffer, want_query.values, want_query.size * error);
  expect_close("grad_key", *grad_key.buffer, want_key.values, want_key.size * error);
  expect_close("grad_value", *grad_value.buffer, want_value.values, want_value.size * error);
  expect_close("grad_mask", grad_mask, want_mask.values, want_mask.size * error);
}

}  // namespace

void test_attention(int cases) {
  Random random = {4};
  for (int c = 0; c < cases; ++c) {
    const bool large = c % 25 == 0;
    Problem p;
    Attention& a = p.a;
    p.packed = random.chance(25);
    a.dtype = any_float(random);
    a.batch = random.between(large ? 1 : 0, 2), a.num_kv_heads = random.between(1, 2);
    a.num_heads = a.num_kv_heads * random.between(1, 3);
    a.seqlen_q = large ? random.between(100, 140) : random.chance(30) ? random.between(0, 4) : random.between(5, 100);
    a.seqlen_k = c % 10 == 3 ? 900 : random.between(large ? 200 : 0, large ? 230 : 110);
    // Rows of whole vectors are read in place.
    a.head_dim = (int)(random.chance(40) ? 32 * random.between(1, large ? 4 : 2) : random.between(1, large ? 140 : 40));
    a.value_head_dim = random.chance(50) ? a.head_dim : (int)(random.chance(40) ? 32 : random.between(1, 40));
    a.scale = (float)random.pick({0.1, 0.1, 0.1, -0.2, 0.0});
    a.lower_right = p.packed || random.chance(50);
    draw_window(random, a, a.seqlen_q, a.seqlen_k);
    a.threshold = random.pick({0, 0, 0, 6554, 32768, 65536});
    const std::vector<int64_t> seed = {(int64_t)random.next(), (int64_t)random.next()};
    a.seed = seed.data();

    p.cu_seq_q = p.cu_seq_k = {0};
    for (int64_t b = 0; b < a.batch; ++b) {
      p.cu_seq_q.push_back(p.cu_seq_q.back() + random.between(0, a.seqlen_q));
      p.cu_seq_k.push_back(p.cu_seq_k.back() + random.between(0, a.seqlen_k));
    }
    if (p.packed) a.cu_seq_q = p.cu_seq_q.data(), a.cu_seq_k = p.cu_seq_k.data();
    if (random.chance(40))
      for (int64_t b = 0; b < a.batch; ++b) p.lengths.push_back(random.between(0, p.stored(b)));
    if (!p.lengths.empty()) a.key_lengths = p.lengths.data();
    if (!p.packed && random.chance(50)) p.mask = RandomMask(random, a.batch, a.num_heads, a.seqlen_q, a.seqlen_k);
    a.mask = p.mask.mask;
    begin_case("attention", a.dtype, p.packed ? "packed" : "dense", a.batch, a.num_heads, a.num_kv_heads, a.seqlen_q,
               a.seqlen_k, a.head_dim, a.value_head_dim, p.mask, "window", a.window_left, a.window_right, "threshold",
               a.threshold, "scale", a.scale, "case", c);
    test_problem(random, p);
  }
}

}  // namespace fastattn::testing
