// Code that the tests of the kernels share: operands between guard pages, exact conversions, threads, comparison.
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

const char* name_of(Dtype);
double round_to(Dtype, double);  // Nearest value, ties to even.
double unit_roundoff(Dtype);     // Half the distance from 1 to the next number.
Dtype any_float(Random&);

// Elements that end, or begin, at an inaccessible page and are NaN (all bits set) at first.
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

// Begin a case. Failures in it, crashes included, print its name.
void begin_case(const std::string& name);
void fail(const std::string& what);
int failures();

// Fail unless |got - want| <= 1.01 u |want| + slack for every element, with the dtype's unit roundoff u. `want` may be
// NaN; then `got` must be.
void expect_close(const char* what, const Buffer& got, const std::vector<double>& want, double slack);

// Run the kernel on 1, 2 and 5 threads, with outputs of NaN before each run. All runs must write the same bits.
void run_on_threads(const std::vector<Buffer*>& outputs, const std::function<void(const Parallel&)>& kernel);

// Run the kernel of a problem in a workspace between guard pages.
template <class Problem>
void run_kernel(const Problem& problem, const Parallel& parallel) {
  const Kernel<Problem>& kernel = kernel_of(problem);
  Buffer workspace(Dtype::float32, round_up(kernel.workspace(problem, parallel), 64) / 4);
  kernel.run(problem, parallel, (char*)workspace.data);
}

// Return a side of a window: a narrow one, or `reach`, which is wide enough to hide nothing.
int64_t any_window(Random&, int64_t reach);

// Run the kernel again with `out` as its only output. It must write the same bits as before.
void expect_again(Buffer& out, const std::function<void(const Parallel&)>& kernel);

// One function per kernel file. It runs so many random problems on the instruction set in use.
void test_attention(int cases);
void test_dropout(int cases);
void test_layer_norm(int cases);
void test_softmax_dropout(int cases);

}  // namespace fastattn::testing
