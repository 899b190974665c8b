// What the tests of the kernels share: operands between guard pages, exact conversions, threads, comparison.
#pragma once
#include <stdint.h>

#include <functional>
#include <string>
#include <vector>

#include "../common/arithmetic.h"
#include "../common/philox.h"
#include "../common/types.h"
#include "../cpu/kernels.h"

namespace fastattn::testing {

// splitmix64: the same cases on every run.
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

const char* name_of(Dtype);
double round_to(Dtype, double);  // nearest value, ties to even
double unit_roundoff(Dtype);     // half the distance from 1 to the next number
Dtype any_float(Random&);

// Elements that end, or begin, at an inaccessible page, and start out as NaN (all bits set).
class Buffer {
 public:
  Buffer(Dtype dtype, int64_t count, bool at_end = true);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer(Buffer&&) noexcept;

  double get(int64_t index) const;
  void set(int64_t index, double value);  // rounds
  void fill_nan();
  std::vector<char> bytes() const;

  Dtype dtype;
  int64_t count;
  void* data;

 private:
  void* mapping_;
  size_t mapped_;
};

// The case in progress, named by whatever fails in it, crashes included.
void begin_case(const std::string& name);
void fail(const std::string& what);
int failures();

// |got - want| <= u |want| + slack element by element, u the dtype's unit roundoff; want may be NaN.
void expect_close(const char* what, const Buffer& got, const std::vector<double>& want, double slack);

// Runs the kernel on 1, 2 and 5 threads, outputs NaN before each; all runs must write the same bits.
void run_on_threads(const std::vector<Buffer*>& outputs, const std::function<void(const Parallel&)>& kernel);

// Runs the kernel of a problem in a workspace between guard pages.
template <class Problem>
void run_kernel(const Problem& problem, const Parallel& parallel) {
  const Kernel<Problem>& kernel = kernel_of(problem);
  Buffer workspace(Dtype::float32, round_up(kernel.workspace(problem, parallel), 64) / 4);
  kernel.run(problem, parallel, (char*)workspace.data);
}

// A side of a window: narrow, or `reach`, from which on it bounds nothing.
int64_t any_window(Random&, int64_t reach);

// The kernel, run again with `out` as its only output, writes the bits that are there.
void expect_again(Buffer& out, const std::function<void(const Parallel&)>& kernel);

// One function for each kernel file: that many random problems on the instruction set in use.
void test_attention(int cases);
void test_dropout(int cases);
void test_layer_norm(int cases);
void test_softmax_dropout(int cases);

}  // namespace fastattn::testing
