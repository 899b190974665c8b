// Attention, forward: backends/triton/attention.
#include "attention.h"

#include <float.h>

#include <algorithm>

namespace fastattn::triton {

bool serves(const Attention& a) {
  constexpr int64_t kDescriptorRows = 1024;  // DESCRIPTOR_ROWS in Python
  constexpr float kHuge = FLT_MAX / 1.5f;
  const bool short_rows = a.seqlen_q < kDescriptorRows && a.seqlen_k < kDescriptorRows;
  return (short_rows || a.cu_seq_q) && a.dtype != Dtype::float32 && !a.mask.data && a.scale > 0 && a.scale <= kHuge;
}

namespace {

struct Plan {
  Kernel kernel;
  int64_t tiles_q, programs, num_splits;  // num_splits of the keys, with which few queries occupy the device

  Plan(const Attention& a, Place place)
      : kernel(kernel_of(a.seqlen_q > 16 ? "attention.forward" : "attention.forward_few", place, a,
                         bits_of(a.out, a.dtype))),
        tiles_q(cdiv(a.seqlen_q, kernel.block_m())),
        programs(tiles_q * a.num_heads * a.batch) {
    constexpr int64_t kMostSplits = 64, kTilesPerSplit = 4;
    const int64_t tiles_k = cdiv(a.seqlen_k, kernel.block_n());
    num_splits =
        std::min({kernel.multiprocessors() / std::max(programs, (int64_t)1), tiles_k / kTilesPerSplit, kMostSplits});
    num_splits = std::max(num_splits, (int64_t)1);
  }
};

using OptionalHeads = std::optional<Named<Pointer, int64_t, int64_t, int64_t>>;

auto result_of(const Attention& a, const Heads& out, Dtype dtype, const OptionalHeads& residual, const float* row_max,
               const float* row_sum, const float* lse) {
  const RowStrides rows = row_strides(a, a.seqlen_q);
  return named("Result", heads_of(out, dtype), residual, lse, row_max, row_sum, rows.batch, rows.head, rows.row);
}

}  // namespace

// The splits' results: (num_splits, *out) and statistics (2, num_splits, *rows).
int64_t workspace(const Attention& a, Place place) {
  const int64_t num_splits = Plan(a, place).num_splits;
  return num_splits == 1 ? 0 : num_splits * a.rows * (a.value_head_dim + 2);
}

void run(const Attention& a, float* workspace, Place place) {
  Plan plan(a, place);
  const OptionalHeads residual = a.residual.data ? OptionalHeads(heads_of(a.residual, a.dtype)) : std::nullopt;
  const auto problem = problem_of(a);
  const auto result = result_of(a, a.out, a.dtype, residual, a.row_max, a.row_sum, a.lse);
  if (plan.num_splits == 1)
    return plan.kernel.start(plan.programs, 1, None(), None(), problem, None(), None(), result, named("Splits", 0, 0),
                             plan.tiles_q);
  const int64_t size = a.rows * a.value_head_dim, columns = a.value_head_dim;
  const Heads split_out = a.cu_seq_q
                              ? Heads{workspace, 0, columns, columns * a.num_heads}
                              : Heads{workspace, columns * a.seqlen_q * a.num_heads, columns * a.seqlen_q, columns};
  float* split_max = workspace + plan.num_splits * size;
  const auto split =
      result_of(a, split_out, Dtype::float32, std::nullopt, split_max, split_max + plan.num_splits * a.rows, nullptr);
  const auto splits = named("Splits", size, a.rows);
  plan.kernel.start(plan.programs, plan.num_splits, None(), None(), problem, None(), None(), split, splits,
                    plan.tiles_q);
  Kernel merge = kernel_of("attention.merge", place, a, bits_of(a.out, a.dtype));
  const int64_t tiles_q = cdiv(a.seqlen_q, merge.block_m());
  merge.start(tiles_q * a.num_heads * a.batch, 1, problem, split, splits, plan.num_splits, result, tiles_q);
}

}  // namespace fastattn::triton
