// The forward pass's results: sums over some of the keys, their merge, and the output.
//
//   for each chunk of keys of a task, in order: merge it into the task's total;
//   after the task's last chunk: write the output, or store the total as the split's partial result;
//   for each query, if the keys are split: merge the splits in order, and write the output.
#pragma once
#include <math.h>

#include "attention_rows.h"
#include "tasks.h"

namespace fastattn {
namespace {

// A row's result over some of the keys, not yet divided by row_sum. A row that has seen nothing has row_sum 0 and
// arbitrary values in `out`.
struct Partial {
  const float* out;  // (width)
  float row_max, row_sum;
};

struct Partials {
  int64_t width;                   // Elements per row of values, rounded up to whole vectors.
  float *out, *row_max, *row_sum;  // (rows, width), (rows), (rows).

  Partial at(int64_t row) const { return {out + row * width, row_max[row], row_sum[row]}; }

  // Merge a result into the one at `row`, or copy it if it is the first one.
  void merge(int64_t row, bool first, Partial added) const {
    float* to = out + row * width;
    if (first || row_sum[row] == 0) {
      memcpy(to, added.out, (size_t)width * sizeof(float));
      row_max[row] = added.row_max;
      row_sum[row] = added.row_sum;
    } else if (added.row_sum != 0) {
      const float new_max = fmaxf(row_max[row], added.row_max);
      const float rescale = expf(row_max[row] - new_max), factor = expf(added.row_max - new_max);
      for (int i = 0; i < width; i += kLanes)
        store(to + i, fma(load(to + i), splat(rescale), load(added.out + i) * factor));
      row_max[row] = new_max;
      row_sum[row] = row_sum[row] * rescale + added.row_sum * factor;
    }
  }
};

struct Results {
  const Attention& a;
  const Splits splits;
  const Partials partials;  // One row per split and query, if the keys are split.

  // `tasks` is the number of tasks without splits. If it is small and the keys are many, the keys are split.
  Results(const Attention& a, int64_t tasks, Arena* arena)
      : a(a), splits(a, min(kTasks / max(tasks, 1), a.seqlen_k / kSplitKeys)), partials(take(splits.rows(a), arena)) {}

  Partials take(int64_t rows, Arena* arena) const {
    Partials taken;
    taken.width = round_up(a.value_head_dim, kLanes);
    arena->take(rows * taken.width, &taken.out);
    arena->take(rows, &taken.row_max, &taken.row_sum);
    return taken;
  }

  // Take the totals of a task's rows, if a task may have more than one chunk of keys.
  Partials take_totals(int64_t rows, Arena* arena) const { return take(a.seqlen_k > kChunk ? rows : 0, arena); }

  // Put the result of a chunk of keys, the first or the last one of a split, into row `row` of the task's totals.
  void put(const Sequence& s, int64_t head, int64_t query, int64_t split, bool first, bool last, const Partials& totals,
           int64_t row, Partial chunk) const {
    if (!first || !last) totals.merge(row, first, chunk);
    if (!last) return;
    const Partial total = first ? chunk : totals.at(row);
    if (splits.count == 1) return write(s, head, query, total);
    partials.merge(Splits::row(a, split, s, head, query), true, total);
  }

  void merge_splits(const Parallel& parallel, int workers) const {
    if (splits.count == 1) return;
    for_each_query(a, parallel, workers, [&](const Sequence& s, int64_t head, int64_t query) {
      const int64_t total = Splits::row(a, 0, s, head, query);
      for (int64_t split = 1; split < splits.count; ++split)
        partials.merge(total, false, partials.at(Splits::row(a, split, s, head, query)));
      write(s, head, query, partials.at(total));
    });
  }

  void write(const Sequence& s, int64_t head, int64_t query, Partial total) const {
    rows_of(a).write_output(total.out, total.row_sum, dropout_scale(a.threshold) / total.row_sum, a.value_head_dim,
                            query_rows(a, a.out, s, head, query), query_rows(a, a.residual, s, head, query));
    write_stats(s, head, query, total.row_max, total.row_sum);
  }

  void write_stats(const Sequence& s, int64_t head, int64_t query, float row_max, float row_sum) const {
    if (!a.row_max) return;
    const int64_t row = stats_offset(a, s, head, query);
    if (a.lse) a.lse[row] = row_sum == 0 ? -kInfinity : row_max + logf(row_sum);
    a.row_max[row] = row_sum == 0 ? 0 : row_max;
    a.row_sum[row] = row_sum;
  }
};

}  // namespace
}  // namespace fastattn
