// Software prefetch of the next task's operands and results, a few cache lines at a time between rows of this task's
// products. A short sequence is read once, which is too brief for the hardware prefetcher.
#pragma once
#include "product.h"
#include "sequence.h"

namespace fastattn {
namespace {

struct Prefetcher {
  static constexpr int64_t kLine = 64, kMaxBytes = 128 << 10;

  struct Operand {
    const char* data;
    int64_t stride, rows, bytes;  // stride in bytes, rows, bytes per row
  } operand[9];
  int left = 0;  // operands left; the last one comes first
  int64_t row = 0, byte = 0;

  // Whether heads are short. The rows of a long head serve so many products that the time to fetch them hardly counts.
  static bool serves(const Attention& a) {
    return max(a.seqlen_q, a.seqlen_k) * (a.head_dim + a.value_head_dim) * size_of(a.dtype) <= kMaxBytes;
  }

  // Add `count` rows of `length` elements, unless the operand is missing.
  void add(const Attention& a, Rows rows, int64_t count, int64_t length) {
    if (!rows.data) return;
    const int64_t stride = rows.stride * size_of(a.dtype), bytes = length * size_of(a.dtype);
    operand[left++] =
        stride == bytes ? Operand{rows.data, 0, 1, count * bytes} : Operand{rows.data, stride, count, bytes};
  }

  void prefetch(int64_t lines) {
    while (lines > 0 && left > 0) {
      const Operand& o = operand[left - 1];
      const int64_t count = min(lines, ceil_div(o.bytes - byte, kLine));
      const char* from = o.data + row * o.stride + byte;
      for (int64_t i = 0; i < count; ++i) __builtin_prefetch(from + i * kLine, 0, 2);
      lines -= count;
      byte += count * kLine;
      if (byte < o.bytes) return;
      byte = 0;
      if (++row < o.rows) continue;
      row = 0;
      --left;
    }
  }
};

// Compute a product, a few rows at a time while there is something left to prefetch between them. Bursts are short,
// because a long burst would stall, and the product with it.
template <bool by_columns, Beta beta, class Unit>
FASTATTN_INLINE void multiply(int vectors, Product<Unit> p, Prefetcher* next) {
  constexpr int kRows = kUsesAmx<Unit> ? 2 * kLanes : kMicroRows, kLines = 48;
  while (p.rows > 0) {
    next->prefetch(kLines);
    Product<Unit> part = p;
    if (next->left) part.rows = min(kRows, p.rows);
    multiply<by_columns, beta>(vectors, part);
    p.advance(part.rows, by_columns ? (int64_t)sizeof(Unit) : p.a.stride);
  }
}

}  // namespace
}  // namespace fastattn
