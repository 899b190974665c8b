#include <math.h>

#include <memory>

#include "../common/attention.h"
#include "harness.h"

namespace fastattn {
FASTATTN_KERNEL(Attention, attention)
FASTATTN_KERNEL(AttentionBackward, attention_backward)
}  // namespace fastattn

namespace fastattn::testing {
namespace {

constexpr double kEpsilon = 0x1p-23;

// An operand (batch, head, row, column), or (row, head, column) with the batch's sequences one after the other.
struct Operand {
  Operand(Random& random, Dtype dtype, int64_t batch, int64_t heads, int64_t rows, int64_t columns, bool packed)
      : heads(heads), rows(rows), columns(columns), packed(packed) {
    const int64_t padded = columns + random.between(0, 5);
    const bool inside = packed || random.chance(40);
    row = inside ? heads * padded : padded;
    head = inside ? padded : rows * padded;
    this->batch = packed ? 0 : heads * rows * padded;
    buffer = std::make_unique<Buffer>(dtype, packed ? rows * row : batch * this->batch, random.chance(50));
    values.resize((size_t)buffer->count);
  }

  void fill(Random& random, double scale) {
    for (int64_t i = 0; i < buffer->count; ++i) set(i, random.normal() * scale);
  }
  void set(int64_t at, double value) {
    buffer->set(at, value);
    values[(size_t)at] = buffer->get(at);
  }
  void read() {
    for (int64_t i = 0; i < buffer->count; ++i) values[(size_t)i] = buffer->get(i);
  }
  int64_t at(int64_t b, int64_t h, int64_t i, int64_t d) const { return b * batch + h * head + i * row + d; }
  double operator()(int64_t b, int64_t h, int64_t i, int64_t d) const { return values[(size_t)at(b, h, i, d)]; }
  Heads heads_of() const { return {buffer->data, batch, head, row}; }

  int64_t heads, rows, columns, batch, head, row;
  bool packed;
  std::unique_ptr<Buffer> buffer;
  std::vector<double> values;
};

// The values that the kernel should write, NaN for elements that it should not write. `size` bounds the sums of the
// magnitudes that the values are made of.
struct Expected {
  explicit Expected(const Buffer& buffer) : values((size_t)buffer.count, NAN) {}
  void add(int64_t at, double value, double magnitude) {
    values[(size_t)at] += value;
    size = fmax(size, magnitude);
  }
  std::vector<double> values;
  double size = 0;
};

struct Problem {
  Attention a = {};
  bool packed;
  std::vector<int64_t> cu_seq_q, cu_seq_k, lengths;
  std::unique_ptr<Buffer> mask;

  int64_t first_query(int64_t b) const { return packed ? cu_seq_q[(size_t)b] : 0; }
  int64_t first_key(int64_t b) const { return packed ? cu_seq_k[(size_t)b] : 0; }
  int64_t queries(int64_t b) const { return packed ? cu_seq_q[(size_t)b + 1] - first_query(b) : a.seqlen_q; }
  int64_t stored(int64_t b) const { return packed ? cu_seq_k[(size_t)b + 1] - first_key(b) : a.seqlen_k; }
  int64_t keys(int64_t b) const { return lengths.empty() ? stored(b) : lengths[(size_t)b]; }
  int64_t row(int64_t b, int64_t h, int64_t i) const {
    return packed ? (first_query(b) + i) * a.num_heads + h : (b * a.num_heads + h) * a.seqlen_q + i;
  }

  double mask_value(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const Mask& m = a.mask;
    return mask->get(b * m.batch + h * m.head + i * m.row + j * m.column);
  }

  bool in_window(int64_t b, int64_t i, int64_t j) const {
    const int64_t offset = j - i - (a.lower_right ? keys(b) - queries(b) : 0);
    return j < keys(b) && -a.window_left <= offset && offset <= a.window_right;
  }
  bool in_mask(int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (!mask) return true;
    return a.mask.dtype == Dtype::boolean ? mask_value(b, h, i, j) != 0 : mask_value(b, h, i, j) != -INFINITY;
  }
  bool visible(int64_t b, int64_t h, int64_t i, int64_t j) const { return in_window(b, i, j) && in_mask(b, h, i, j); }
};

// Put NaN into every key and value that the window (with the length) or the mask hides from all queries of all heads.
void spoil_unseen(const Problem& p, Operand* key, Operand* value) {
  for (int64_t b = 0; b < p.a.batch; ++b)
    for (int64_t j = 0; j < p.stored(b); ++j) {
      bool in_window = false, in_mask = false;
      for (int64_t h = 0; h < p.a.num_heads; ++h)
        for (int64_t i = 0; i < p.queries(b); ++i) {
          in_window |= p.in_window(b, i, j);
          in_mask |= p.in_mask(b, h, i, j);
        }
      for (int64_t h = 0; h < p.a.num_kv_heads && !(in_window && in_mask); ++h) {
        for (int64_t d = 0; d < p.a.head_dim; ++d) key->set(key->at(b, h, p.first_key(b) + j, d), NAN);
        for (int64_t d = 0; d < p.a.value_head_dim; ++d) value->set(value->at(b, h, p.first_key(b) + j, d), NAN);
      }
    }
}

void test_problem(Random& random, Problem& p) {
  Attention& a = p.a;
  const int64_t group = a.num_heads / a.num_kv_heads;
  const int64_t query_rows = p.packed ? p.cu_seq_q.back() : a.seqlen_q,
                key_rows = p.packed ? p.cu_seq_k.back() : a.seqlen_k;
  const auto operand = [&](int64_t heads, int64_t rows, int64_t columns) {
    return Operand(random, a.dtype, a.batch, heads, rows, columns, p.packed);
  };
  Operand query = operand(a.num_heads, query_rows, a.head_dim), key = operand(a.num_kv_heads, key_rows, a.head_dim);
  Operand value = operand(a.num_kv_heads, key_rows, a.value_head_dim),
          out = operand(a.num_heads, query_rows, a.value_head_dim);
  Operand grad_out = operand(a.num_heads, query_rows, a.value_head_dim),
          grad_query = operand(a.num_heads, query_rows, a.head_dim);
  Operand grad_key = operand(a.num_kv_heads, key_rows, a.head_dim),
          grad_value = operand(a.num_kv_heads, key_rows, a.value_head_dim);
  const bool large_scores = random.chance(5);
  query.fill(random, large_scores ? 100 : 1);
  key.fill(random, large_scores ? 100 : 1);
  value.fill(random, 1);
  grad_out.fill(random, 1);
  spoil_unseen(p, &key, &value);
  a.query = query.heads_of(), a.key = key.heads_of(), a.value = value.heads_of(), a.out = out.heads_of();

  const int64_t rows = (p.packed ? 1 : a.batch) * a.num_heads * query_rows;
  Buffer lse(Dtype::float32, rows), row_max(Dtype::float32, rows), row_sum(Dtype::float32, rows),
      grad_lse(Dtype::float32, rows);
  a.lse = (float*)lse.data, a.row_max = (float*)row_max.data, a.row_sum = (float*)row_sum.data;
  for (int64_t i = 0; i < rows; ++i) grad_lse.set(i, random.normal());

  run_on_threads({out.buffer.get(), &lse, &row_max, &row_sum},
                 [&](const Parallel& parallel) { run_kernel(a, parallel); });
  out.read();
  Attention alone = a;
  alone.lse = alone.row_max = alone.row_sum = nullptr;
  expect_again(*out.buffer, [&](const Parallel& parallel) { run_kernel(alone, parallel); });

  AttentionBackward g = {};
  (Attention&)g = a;
  g.grad_out = grad_out.heads_of();
  if (random.chance(50)) g.grad_lse = (const float*)grad_lse.data;
  g.grad_query = grad_query.heads_of(), g.grad_key = grad_key.heads_of(), g.grad_value = grad_value.heads_of();
  const bool wants_mask = p.mask && a.mask.dtype != Dtype::boolean && random.chance(60);
  Buffer grad_mask(a.mask.dtype, wants_mask ? p.mask->count : 0);
  if (wants_mask) g.grad_mask = grad_mask.data;
  run_on_threads({grad_query.buffer.get(), grad_key.buffer.get(), grad_value.buffer.get(), &grad_mask},
                 [&](const Parallel& parallel) { run_kernel(g, parallel); });

  Expected want_out(*out.buffer), want_lse(lse), want_query(*grad_query.buffer), want_key(*grad_key.buffer);
  Expected want_value(*grad_value.buffer), want_mask(grad_mask);
  for (double& x : want_mask.values) x = 0;
  for (int64_t b = 0; b < a.batch; ++b)
    for (int64_t h = 0; h < a.num_kv_heads; ++h)
      for (int64_t j = p.first_key(b); j < p.first_key(b) + p.stored(b); ++j) {
        for (int64_t d = 0; d < a.head_dim; ++d) want_key.values[(size_t)grad_key.at(b, h, j, d)] = 0;
        for (int64_t d = 0; d < a.value_head_dim; ++d) want_value.values[(size_t)grad_value.at(b, h, j, d)] = 0;
      }
  const double kept_scale = dropout_scale(a.threshold);
  double greatest = 0;  // the greatest sum of magnitudes of a score
  std::vector<double> s((size_t)a.seqlen_k), weight((size_t)a.seqlen_k);
  for (int64_t b = 0; b < a.batch; ++b)
    for (int64_t h = 0; h < a.num_heads; ++h)
      for (int64_t i = 0; i < p.queries(b); ++i) {
        const int64_t row = p.first_query(b) + i, first = p.first_key(b), kh = h / group;
        double top = -INFINITY, total = 0;
        for (int64_t j = 0; j < p.keys(b); ++j) {
          s[(size_t)j] = -INFINITY;
          if (!p.visible(b, h, i, j)) continue;
          double dot = 0, magnitude = 0;
          for (int64_t d = 0; d < a.head_dim; ++d) {
            const double term = query(b, h, row, d) * key(b, kh, first + j, d);
            dot += term;
            magnitude += fabs(term);
          }
          const double added = p.mask && a.mask.dtype != Dtype::boolean ? p.mask_value(b, h, i, j) : 0;
          s[(size_t)j] = dot * a.scale + added;
          greatest = fmax(greatest, magnitude * fabs(a.scale) + fabs(added));
          top = fmax(top, s[(size_t)j]);
        }
        for (int64_t j = 0; j < p.keys(b); ++j)
          total += weight[(size_t)j] = top == -INFINITY ? 0 : exp(s[(size_t)j] - top);
        want_lse.values[(size_t)p.row(b, h, i)] = total == 0 ? -INFINITY : top + log(total);
        for (int64_t d = 0; d < a.value_head_dim; ++d) want_out.values[(size_t)out.at(b, h, row, d)] = 0;
        for (int64_t d = 0; d < a.head_dim; ++d) want_query.values[(size_t)grad_query.at(b, h, row, d)] = 0;
        double delta = 0, delta_size = 0;
        for (int64_t d = 0; d < a.value_head_dim; ++d) {
          delta += grad_out(b, h, row, d) * out(b, h, row, d);
          delta_size += fabs(grad_out(b, h, row, d) * out(b, h, row, d));
        }
        if (g.grad_lse) delta -= grad_lse.get(p.row(b, h, i));
        for (int64_t j = 0; j < p.keys(b); ++j) {
          const double probability = total == 0 ? 0 : weight[(size_t)j] / total;
          if (probability == 0) continue;
          const bool kept =
              a.threshold == 0 || philox_keep(make_seed(a.seed), (uint32_t)(b * a.num_heads + h), i, j, a.threshold);
          const double dropped = kept ? probability * kept_scale : 0;
          double dp = 0, dp_size = 0;
          for (int64_t d = 0; d < a.value_head_dim; ++d) {
            const double x = value(b, kh, first + j, d), dy = grad_out(b, h, row, d);
            want_out.add(out.at(b, h, row, d), dropped * x, kept_scale * fabs(x));
            want_value.add(grad_value.at(b, kh, first + j, d), dropped * dy,
                           kept_scale * fabs(dy) * (double)(group * a.seqlen_q));
            dp += dy * x;
            dp_size += fabs(dy * x);
          }
          const double ds = probability * ((kept ? dp * kept_scale : 0) - delta);
          const double ds_size = dp_size * kept_scale + delta_size + fabs(delta);
          for (int64_t d = 0; d < a.head_dim; ++d) {
            const double q = query(b, h, row, d), k = key(b, kh, first + j, d);
            want_query.add(grad_query.at(b, h, row, d), a.scale * ds * k, fabs(a.scale * k) * ds_size);
            want_key.add(grad_key.at(b, kh, first + j, d), a.scale * ds * q,
                         fabs(a.scale * q) * ds_size * (double)(group * a.seqlen_q));
          }
          if (wants_mask) {
            const Mask& m = a.mask;
            want_mask.add(b * m.batch + h * m.head + i * m.row + j * m.column, ds,
                          ds_size * (double)(a.batch * a.num_heads * a.seqlen_q));
          }
        }
      }
  // P and dS are rounded at most to the operands' dtype, scores to float32.
  const double operand_error = a.dtype == Dtype::bfloat16 ? unit_roundoff(Dtype::bfloat16) : 0;
  const double score_error = kEpsilon * (a.head_dim + 8) * greatest,
               error = operand_error + 4 * score_error + 64 * kEpsilon;
  expect_close("out", *out.buffer, want_out.values, want_out.size * error);
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
    a.window_left = any_window(random, a.lower_right ? a.seqlen_k : a.seqlen_q);
    a.window_right = any_window(random, a.lower_right ? a.seqlen_q : a.seqlen_k);
    a.threshold = random.pick({0, 0, 0, 6554, 32768, 65536});
    const int64_t seed[2] = {(int64_t)random.next(), (int64_t)random.next()};
    a.seed = seed;

    std::vector<int64_t> stored;
    p.cu_seq_q = p.cu_seq_k = {0};
    for (int64_t b = 0; b < a.batch; ++b) {
      stored.push_back(p.packed ? random.between(0, a.seqlen_k) : a.seqlen_k);
      p.cu_seq_q.push_back(p.cu_seq_q.back() + random.between(0, a.seqlen_q));
      p.cu_seq_k.push_back(p.cu_seq_k.back() + stored.back());
    }
    if (p.packed) a.cu_seq_q = p.cu_seq_q.data(), a.cu_seq_k = p.cu_seq_k.data();
    if (random.chance(40))
      for (int64_t b = 0; b < a.batch; ++b) p.lengths.push_back(random.between(0, stored[(size_t)b]));
    if (!p.lengths.empty()) a.key_lengths = p.lengths.data();

    if (!p.packed && random.chance(50)) {
      Mask& m = a.mask;
      m.dtype = random.chance(50) ? Dtype::boolean : any_float(random);
      int64_t* sizes[4] = {&m.batches, &m.heads, &m.rows, &m.columns};
      int64_t* strides[4] = {&m.batch, &m.head, &m.row, &m.column};
      const int64_t shape[4] = {a.batch, a.num_heads, a.seqlen_q, a.seqlen_k};
      int64_t count = 1;
      for (int d = 3; d >= 0; --d) {
        const bool full = random.chance(d == 3 ? 90 : 60) && shape[d] != 1;
        *sizes[d] = full ? shape[d] : 1;
        *strides[d] = full ? count : 0;
        count *= *sizes[d];
      }
      p.mask = std::make_unique<Buffer>(m.dtype, count, random.chance(50));
      const int hidden = (int)random.pick({0, 10, 50, 95});
      const bool finite_extremes = random.chance(20), has_tails = m.columns > 1 && random.chance(50);
      int64_t shown = m.columns;  // columns shown in some rows; later columns are hidden
      for (int64_t i = 0; i < count; ++i) {
        if (has_tails && i % (32 * m.columns) == 0) shown = random.between(0, m.columns);
        const bool hide = random.chance(hidden) || i % m.columns >= shown ||
                          (hidden > 10 && m.columns > 1 && i % m.columns < m.columns / 2);
        if (m.dtype == Dtype::boolean)
          p.mask->set(i, hide ? 0 : random.between(1, 255));
        else
          p.mask->set(i, !hide ? random.normal() : finite_extremes ? -65504 : -INFINITY);
      }
      m.data = p.mask->data;
    }
    begin_case("attention " + std::string(name_of(a.dtype)) + (p.packed ? " packed (" : " (") +
               std::to_string(a.batch) + ", " + std::to_string(a.num_heads) + "/" + std::to_string(a.num_kv_heads) +
               ", " + std::to_string(a.seqlen_q) + "x" + std::to_string(a.seqlen_k) + ", " +
               std::to_string(a.head_dim) + "/" + std::to_string(a.value_head_dim) + ") mask " +
               (p.mask ? name_of(a.mask.dtype) : "none") + " window " + std::to_string(a.window_left) + " " +
               std::to_string(a.window_right) + " threshold " + std::to_string(a.threshold) + " scale " +
               std::to_string(a.scale) + " case " + std::to_string(c) + " on " + kInstructionSets[instruction_set()]);
    test_problem(random, p);
  }
}

}  // namespace fastattn::testing
