// The keys j that query i sees before the mask: j < length and -window_left <= j - i - diagonal <= window_right.
#pragma once
#include "arithmetic.h"

namespace fastattn {
namespace {

// The visibility of one sequence. Both sides of the window are finite and at least 0.
template <class Int>
struct Visibility {
  Int length, diagonal, window_left, window_right;

  // The diagonal passes through the last query and the last key if `lower_right`, else through the first ones.
  FASTATTN_HOST_DEVICE Visibility(int64_t length, int64_t seqlen_q, bool lower_right, int64_t left, int64_t right)
      : length((Int)length),
        diagonal(lower_right ? (Int)(length - seqlen_q) : 0),
        window_left((Int)left),
        window_right((Int)right) {}

  // The keys [begin, end) of query i: 0 <= begin <= end <= length.
  FASTATTN_HOST_DEVICE Int begin(Int i) const { return min(max(i + diagonal - window_left, (Int)0), length); }
  FASTATTN_HOST_DEVICE Int end(Int i) const { return min(max(i + diagonal + window_right + 1, (Int)0), length); }

  // Whether key j is visible to the query whose key on the diagonal is `center`, i + diagonal.
  FASTATTN_HOST_DEVICE bool is_visible(Int center, Int j) const {
    return center - window_left <= j && j <= center + window_right && j < length;
  }

  // The queries whose window holds key j: first_query(j) to last_query(j). These may lie outside the sequence.
  FASTATTN_HOST_DEVICE Int first_query(Int j) const { return j - diagonal - window_right; }
  FASTATTN_HOST_DEVICE Int last_query(Int j) const { return j - diagonal + window_left; }
};

}  // namespace
}  // namespace fastattn
