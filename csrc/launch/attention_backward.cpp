// Attention, backward: backends/triton/attention.
#include "attention.h"

namespace fastattn::triton {
namespace {

// The rows per head of the values that dQ's kernel writes for the others.
int64_t padded_rows(const Attention& a) { return cdiv(a.seqlen_q, 4) * 4; }

// The number of these values, in each of three arrays.
int64_t values_of(const Attention& a) { return a.cu_seq_q ? a.rows : a.batch * a.num_heads * padded_rows(a); }

}  // namespace

void run(const AttentionBackward& a, Place place, const Allocate& allocate) {
  const int64_t out_bits = bits_of(a.out, a.dtype), grad_bits = bits_of(a.grad_out, a.dtype);
  const int64_t residual_bits = a.residual.data ? bits_of(a.residual, a.dtype) : 0;
  if (!serves(a) || a.grad_mask || (is_aligned(a) && grad_bits % 16))
    throw NotServed("fastattn: Python serves this backward pass");
  const auto problem = problem_of(a);
  const auto grad_out = heads_of(a.grad_out, a.dtype);
  const RowStrides of_values = row_strides(a, padded_rows(a)), of_stats = row_strides(a, a.seqlen_q);
  Kernel grad_query = kernel_of("attention.grad_query", place, a,
                                out_bits | residual_bits | grad_bits | bits_of(a.grad_query, a.dtype));
  Kernel grad_key_value = kernel_of("attention.grad_key_value", place, a,
                                    grad_bits | bits_of(a.grad_key, a.dtype) | bits_of(a.grad_value, a.dtype));
  const int64_t count = values_of(a), values_floats = cdiv(3 * count, 4) * 4;
  const int64_t query_floats = list_floats(a, grad_query, false), key_floats = list_floats(a, grad_key_value, true);
  float* workspace = allocate(values_floats + query_floats + key_floats);
  float* memory = workspace + values_floats;
  const float* values = workspace;
  const auto rows =
      named("Rows", values, values + count, values + 2 * count, of_values.batch, of_values.head, of_values.row);
  const auto statistics = named("Statistics", (const float*)a.row_max, (const float*)a.row_sum, of_stats.batch,
                                of_stats.head, of_stats.row);
  using OptionalHeads = std::optional<Named<Pointer, int64_t, int64_t, int64_t>>;
  const OptionalHeads residual = a.residual.data ? OptionalHeads(heads_of(a.residual, a.dtype)) : std::nullopt;
  const Heads lse = {(void*)a.grad_lse, of_stats.batch, of_stats.head, of_stats.row.value_or(1)};
  const OptionalHeads grad_lse = a.grad_lse ? OptionalHeads(heads_of(lse, Dtype::float32)) : std::nullopt;

  const auto [lists, seen] = make_lists(a, grad_query, false, memory, place);
  const int64_t tiles_q = cdiv(a.seqlen_q, grad_query.block_m());
  grad_query.start(tiles_q * a.num_heads * a.batch, 1, None(), None(), problem, lists, seen, heads_of(a.out, a.dtype),
                   residual, grad_out, grad_lse, statistics, heads_of(a.grad_query, a.dtype), rows, tiles_q);

  const auto key_lists = make_lists(a, grad_key_value, true, memory + query_floats, place).lists;
  const int64_t tiles_k = cdiv(a.seqlen_k, grad_key_value.block_n());
  grad_key_value.start(tiles_k * a.num_kv_heads * a.batch, 1, None(), None(), problem, key_lists, grad_out,
                       heads_of(a.grad_key, a.dtype), heads_of(a.grad_value, a.dtype), rows, tiles_k);
}

}  // namespace fastattn::triton
