// A sequence of the batch, dense or packed, and the places of its rows.
#pragma once
#include "../common/attention.h"
#include "../common/parallel.h"
#include "blocks.h"

namespace fastattn {

// Rows of an operand in memory, of the operands' dtype. The stride is in elements. Null data: the operand is missing.
struct Rows {
  char* data;
  int64_t stride;
};

namespace {

struct Sequence {
  int64_t index, first_query, first_key, seqlen_q;
  int64_t seqlen_k;  // keys in memory, also those beyond the length
  Visibility<int64_t> visibility;

  int64_t length() const { return visibility.length; }
  int64_t begin(int64_t i) const { return visibility.begin(i); }
  int64_t end(int64_t i) const { return visibility.end(i); }
};

FASTATTN_INLINE Sequence find_sequence(const Attention& a, int64_t index) {
  const bool packed = a.cu_seq_q;
  const int64_t first_query = packed ? a.cu_seq_q[index] : 0, first_key = packed ? a.cu_seq_k[index] : 0;
  const int64_t seqlen_q = packed ? a.cu_seq_q[index + 1] - first_query : a.seqlen_q;
  const int64_t seqlen_k = packed ? a.cu_seq_k[index + 1] - first_key : a.seqlen_k;
  const int64_t length = a.key_lengths ? a.key_lengths[index] : seqlen_k;
  return {index,    first_query, first_key,
          seqlen_q, seqlen_k,    Visibility<int64_t>(length, seqlen_q, a.lower_right, a.window_left, a.window_right)};
}

// Return the rows of a head from this row of the operand on.
FASTATTN_INLINE Rows rows_from(const Attention& a, const Heads& heads, int64_t batch, int64_t head, int64_t row) {
  if (!heads.data) return {nullptr, 0};
  return {(char*)heads.data + row_offset(heads, batch, head, row) * size_of(a.dtype), heads.row};
}

// Return the rows of a head from this query, or from this key, on.
FASTATTN_INLINE Rows query_rows(const Attention& a, const Heads& heads, const Sequence& s, int64_t head,
                                int64_t query) {
  return rows_from(a, heads, s.index, head, s.first_query + query);
}
FASTATTN_INLINE Rows key_rows(const Attention& a, const Heads& heads, const Sequence& s, int64_t head, int64_t key) {
  return rows_from(a, heads, s.index, head, s.first_key + key);
}

// Return the offset of a query's statistics (LSE, row_max, row_sum), in elements.
FASTATTN_INLINE int64_t stats_offset(const Attention& a, const Sequence& s, int64_t head, int64_t query) {
  if (a.cu_seq_q) return (s.first_query + query) * a.num_heads + head;
  return (s.index * a.num_heads + head) * a.seqlen_q + query;
}

// Return the number of query heads per key/value head. There may be no heads at all.
FASTATTN_INLINE int64_t group_of(const Attention& a) { return a.num_heads / max(a.num_kv_heads, 1); }

// Return how many threads are worth waking. A thread pays off from about 20 us of work. Each (batch, head) has a fixed
// cost. A single query counts as two, because its keys have to come from memory.
FASTATTN_INLINE int useful_workers(const Attention& a, const Parallel& parallel, int products) {
  const double pairs = (double)max(a.seqlen_q, 2) * a.seqlen_k;
  const double work = a.batch * a.num_heads * (0.5 * pairs * (a.head_dim + a.value_head_dim) * products + 2000);
  return (int)min((double)parallel.threads, 1 + work / 500000);
}

}  // namespace
}  // namespace fastattn
