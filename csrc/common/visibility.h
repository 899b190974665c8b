// Which keys a query sees, but for the mask: j < length and -window_left <= j - i - diagonal <= window_right.
#pragma once
#include "arithmetic.h"

namespace fastattn {
namespace {

// Of one sequence. Both sides of the window are finite and at least 0.
struct Visibility {
  int64_t length, diagonal, window_left, window_right;

  // The diagonal is that of the last query and the last key where `lower_right`, else of the first ones.
  FASTATTN_HOST_DEVICE Visibility(int64_t length, int64_t seqlen_q, bool lower_right, int64_t left, int64_t right)
      : length(length), diagonal(lower_right ? length - seqlen_q : 0), window_left(left), window_right(right) {}

  // The keys [begin, end) that query i sees: 0 <= begin <= end <= length.
  FASTATTN_HOST_DEVICE int64_t begin(int64_t i) const {
    return min(max(i + diagonal - window_left, (int64_t)0), length);
  }
  FASTATTN_HOST_DEVICE int64_t end(int64_t i) const {
    return min(max(i + diagonal + window_right + 1, (int64_t)0), length);
  }

  // The queries whose window holds key j: from first_query(j) to last_query(j), of all integers.
  FASTATTN_HOST_DEVICE int64_t first_query(int64_t j) const { return j - diagonal - window_right; }
  FASTATTN_HOST_DEVICE int64_t last_query(int64_t j) const { return j - diagonal + window_left; }
};

}  // namespace
}  // namespace fastattn
