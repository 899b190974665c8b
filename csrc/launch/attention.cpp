// Attention, forward: backends/triton/attention.
#include "attention.h"

#include <float.h>

#include <algorithm>

namespace fastattn::triton {

bool serves(const Attention& a) {
  constexpr int64_t kDescriptorRows = 1024;  // DESCRIPTOR_ROWS in Python
  constexpr float kHuge = FLT_MAX / 1.5f;
  const bool short_rows = a.seqlen_q < kDescriptorRows && a.seqlen_k < kDescriptorRows;
  const bool has_pairs = a.rows > 0 && a.seqlen_k > 0;  // an empty operand has no address
  return has_pairs && (short_rows || a.cu_seq_q) && a.dtype != Dtype::float32 && a.scale > 0 && a.scale <= kHuge;
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

namespace {

// The sizes of a mask, of its tiles and of a kernel's lists.
struct ListSizes {
  int64_t batch, heads, tiles_q, tiles_k;  // of what the mask alone decides
  int64_t list_batch, own_tiles, count;    // of the lists; count of the other side's tiles

  ListSizes(const Attention& a, const Kernel& kernel, bool keys_own)
      : batch(a.mask.batches),
        heads(a.mask.heads),
        tiles_q(cdiv(a.mask.rows, kernel.block_m())),
        tiles_k(cdiv(a.seqlen_k, kernel.block_n())),
        list_batch(a.key_lengths ? a.batch : batch) {
    const int64_t own_q = cdiv(a.seqlen_q, kernel.block_m());
    own_tiles = keys_own ? tiles_k : own_q;
    count = keys_own ? own_q : tiles_k;
  }

  // Floats, each array rounded up to 16 bytes: lists int32, cover int8, seen uint8.
  int64_t lists() const { return cdiv(list_batch * heads * own_tiles * (2 + count), 4) * 4; }
  int64_t cover() const { return cdiv(batch * heads * tiles_q * tiles_k, 16) * 4; }
  int64_t seen(const Attention& a) const { return cdiv(batch * heads * tiles_q * a.seqlen_k, 16) * 4; }
};

int64_t broadcast(int64_t size, int64_t stride) { return size > 1 ? stride : 0; }

}  // namespace

int64_t list_floats(const Attention& a, const Kernel& kernel, bool keys_own) {
  if (!a.mask.data) return 0;
  const ListSizes n(a, kernel, keys_own);
  return n.lists() + n.cover() + n.seen(a);
}

TileLists make_lists(const Attention& a, const Kernel& kernel, bool keys_own, float* memory, Place place) {
  if (!a.mask.data) return {};
  const ListSizes n(a, kernel, keys_own);
  const int64_t block_m = kernel.block_m(), block_n = kernel.block_n();
  const Memory lists = {memory, 'w'}, cover = {memory + n.lists(), 'c'}, seen = {memory + n.lists() + n.cover(), 'u'};
  Kernel covers("attention.cover", place, {block_m, block_n});
  covers.start(n.batch * n.heads * n.tiles_q * n.tiles_k, 1, mask_heads(a.mask), mask_column(a.mask), cover, seen,
               n.tiles_q, n.tiles_k, n.heads, a.mask.rows, a.seqlen_k);
  const int64_t stride_q = broadcast(n.tiles_q, n.tiles_k), stride_k = broadcast(n.tiles_k, 1);
  const int64_t plane = n.tiles_q * n.tiles_k, own = keys_own ? block_n : block_m, other = keys_own ? block_m : block_n;
  Kernel lister("attention.list", place, {own, other, a.lower_right, keys_own});
  lister.start(n.list_batch * n.heads * n.own_tiles, 1, sequences_of(a), window_of(a),
               named("Cover", cover, broadcast(n.batch, n.heads * plane), broadcast(n.heads, plane),
                     keys_own ? stride_k : stride_q, keys_own ? stride_q : stride_k),
               lists, n.heads, n.own_tiles, n.count);
  const int64_t entry = 2 + n.count, head = n.own_tiles * entry, seen_head = n.tiles_q * a.seqlen_k;
  return {named("TileLists", lists, broadcast(n.list_batch, n.heads * head), broadcast(n.heads, head), entry, n.count),
          named("SeenKeys", seen, broadcast(n.batch, n.heads * seen_head), broadcast(n.heads, seen_head),
                broadcast(n.tiles_q, a.seqlen_k))};
}

namespace {

// The splits' results: (num_splits, *out) and statistics (2, num_splits, *rows), in floats.
int64_t split_floats(const Attention& a, const Plan& plan) {
  return plan.num_splits == 1 ? 0 : cdiv(plan.num_splits * a.rows * (a.value_head_dim + 2), 4) * 4;
}

}  // namespace

void run(const Attention& a, Place place, const Allocate& allocate) {
  Plan plan(a, place);
  float* workspace = allocate(split_floats(a, plan) + list_floats(a, plan.kernel, false));
  const auto [lists, seen] = make_lists(a, plan.kernel, false, workspace + split_floats(a, plan), place);
  const OptionalHeads residual = a.residual.data ? OptionalHeads(heads_of(a.residual, a.dtype)) : std::nullopt;
  const auto problem = problem_of(a);
  const auto result = result_of(a, a.out, a.dtype, residual, a.row_max, a.row_sum, a.lse);
  if (plan.num_splits == 1)
    return plan.kernel.start(plan.programs, 1, None(), None(), problem, lists, seen, result, named("Splits", 0, 0),
                             plan.tiles_q);
  const int64_t size = a.rows * a.value_head_dim, columns = a.value_head_dim;
  const Heads split_out = a.cu_seq_q
                              ? Heads{workspace, 0, columns, columns * a.num_heads}
                              : Heads{workspace, columns * a.seqlen_q * a.num_heads, columns * a.seqlen_q, columns};
  float* split_max = workspace + plan.num_splits * size;
  const auto split =
      result_of(a, split_out, Dtype::float32, std::nullopt, split_max, split_max + plan.num_splits * a.rows, nullptr);
  const auto splits = named("Splits", size, a.rows);
  plan.kernel.start(plan.programs, plan.num_splits, None(), None(), problem, lists, seen, split, splits, plan.tiles_q);
  Kernel merge = kernel_of("attention.merge", place, a, bits_of(a.out, a.dtype));
  const int64_t tiles_q = cdiv(a.seqlen_q, merge.block_m());
  merge.start(tiles_q * a.num_heads * a.batch, 1, problem, split, splits, plan.num_splits, result, tiles_q);
}

}  // namespace fastattn::triton
