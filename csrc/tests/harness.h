// Code that the tests of the kernels share: operands between guard pages, exact conversions, threads, comparison.
#pragma once
#include <stdint.h>

#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "../common/operands.h"
#include "../common/philox.h"
#include "../cpu/kernels.h"

namespace fastattn::testing {

constexpr double kEpsilon = 0x1p-23;

// A generator, splitmix64, which gives the same cases on every run.
struct Random {
  uint64_t state;
  uint64_t next();
  int64_t below(int64_t n) { return (int64_t)(next() % (uint64_t)n); }
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool chance(int percent) { return below(100) < percent; }
  double normal();
  template <class T>
  T pick(std::initializer_list<T> options) {
    return options.begin()[below((int64_t)options.size())];
  }
};

std::ostream& operator<<(std::ostream&, Dtype);
double unit_roundoff(Dtype);  // Half the distance from 1 to the next number.
Dtype any_float(Random&);
double kept_scale(int threshold);  // The factor of the elements that dropout keeps.

// Elements that end, or begin, at an inaccessible page and are NaN (all bits set) at first.
class Buffer {
 public:
  Buffer(Dtype dtype, int64_t count, bool at_end = true);
  ~Buffer();
  Buffer(const Buffer&) = delete;

  double get(int64_t index) const;
  void set(int64_t index, double value);  // Rounds to nearest, ties to even.
  void fill_nan();
  std::string bytes() const;

  Dtype dtype;
  int64_t count;
  void* data;

 private:
  void* mapping_;
  size_t mapped_;
};

// Normal numbers (batch, head, row, column). Columns are dense. Padding follows each row, or each row of a head if the
// heads are inside the rows. It is NaN. The batch has stride 0 if there is one, as packed sequences need.
struct Operand {
  Operand(Random&, Dtype, int64_t batches, int64_t heads, int64_t rows, int64_t columns, bool heads_inside = false,
          double scale = 1, double mean = 0);
  int64_t at(int64_t b, int64_t h, int64_t i, int64_t j) const { return b * batch + h * head + i * row + j; }
  double operator()(int64_t b, int64_t h, int64_t i, int64_t j) const { return buffer->get(at(b, h, i, j)); }
  double operator()(int64_t i, int64_t j) const { return (*this)(0, 0, i, j); }
  Heads heads() const { return {buffer->data, batch, head, row}; }

  int64_t batch, head, row;
  std::unique_ptr<Buffer> buffer;
  std::vector<double> zeros;  // 0 for every element, NaN for the padding
};

// A mask that may be boolean or broadcast. It may hide nearly everything, or the tails of all rows. Without a shape it
// is absent and hides nothing.
struct RandomMask {
  RandomMask() = default;
  RandomMask(Random&, int64_t batches, int64_t heads, int64_t rows, int64_t columns);
  int64_t at(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return b * mask.batch + h * mask.head + i * mask.row + j * mask.column;
  }
  double operator()(int64_t b, int64_t h, int64_t i, int64_t j) const;  // the addend of a score
  bool is_float() const { return buffer && mask.dtype != Dtype::boolean; }

  Mask mask = {};
  bool finite_extremes = false;  // Hides by -65504 instead of -inf.
  std::unique_ptr<Buffer> buffer;
};

inline std::ostream& operator<<(std::ostream& out, const RandomMask& m) {
  return m.buffer ? out << "mask " << m.mask.dtype : out << "no mask";
}

// Whether query i of `queries` sees key j of `keys` through the window of a problem.
template <class Problem>
bool in_window(const Problem& p, int64_t queries, int64_t keys, int64_t i, int64_t j) {
  const int64_t offset = j - i - (p.lower_right ? keys - queries : 0);
  return j < keys && -p.window_left <= offset && offset <= p.window_right;
}

// Draw both sides of a problem's window: narrow, or wide enough to hide nothing.
template <class Problem>
void draw_window(Random& random, Problem& p, int64_t queries, int64_t keys) {
  const auto side = [&](int64_t reach) {
    return random.chance(40) ? reach : min(random.pick<int64_t>({0, 3, 20, 40}), reach);
  };
  p.window_left = side(p.lower_right ? keys : queries), p.window_right = side(p.lower_right ? queries : keys);
}

// Begin a case. Failures in it, crashes included, print its name: the words and the instruction set.
void begin_named_case(const std::string& name);
template <class... Words>
void begin_case(const Words&... words) {
  std::ostringstream name;
  ((name << words << ' '), ...) << "on " << kInstructionSets[instruction_set()];
  begin_named_case(name.str());
}
void fail(const std::string& what);
int failures();

// Fail unless |got - want| <= 1.01 u |want| + slack for every element, with the dtype's unit roundoff u. `want` may be
// NaN; then `got` must be.
void expect_close(const char* what, const Buffer& got, const std::vector<double>& want, double slack);

void run_workers(int workers, void (*body)(void*, int), void* argument);  // a Parallel's

// Run the kernel of a problem on 1, 2 and 5 threads, with outputs of NaN before each run, in a workspace between guard
// pages. All runs must write the same bits, and the bits before the first run if `again`.
template <class Problem>
void run_kernel(const Problem& problem, const std::vector<Buffer*>& outputs, bool again = false) {
  const Kernel<Problem>& kernel = kernel_of(problem);
  std::vector<std::string> first;
  for (const Buffer* output : outputs) first.push_back(output->bytes());
  for (const int threads : {1, 2, 5}) {
    for (Buffer* output : outputs) output->fill_nan();
    const Parallel parallel = {threads, run_workers};
    Buffer workspace(Dtype::float32, round_up(kernel.workspace(problem, parallel), 64) / 4);
    kernel.run(problem, parallel, (char*)workspace.data);
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (threads == 1 && !again) first[i] = outputs[i]->bytes();
      if (outputs[i]->bytes() != first[i])
        fail("output " + std::to_string(i) + " on " + std::to_string(threads) + " threads differs from the run before");
    }
  }
}

// One function per kernel file. It runs so many random problems on the instruction set in use.
void test_attention(int cases);
void test_dropout(int cases);
void test_layer_norm(int cases);
void test_softmax_dropout(int cases);

}  // namespace fastattn::testing
