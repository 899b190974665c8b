// Integer arithmetic on the host and the device.
#pragma once
#include <stdint.h>

#if defined(__CUDACC__)
#define FASTATTN_HOST_DEVICE __host__ __device__
#else
#define FASTATTN_HOST_DEVICE
#endif

namespace fastattn {
namespace {

template <class A, class B>
FASTATTN_HOST_DEVICE constexpr auto min(A a, B b) {
  return a < b ? a : b;
}

template <class A, class B>
FASTATTN_HOST_DEVICE constexpr auto max(A a, B b) {
  return a > b ? a : b;
}

FASTATTN_HOST_DEVICE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
FASTATTN_HOST_DEVICE constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace
}  // namespace fastattn
