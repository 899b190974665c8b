// Tasks of attention's kernels: splits of the keys, scratch memory, loops in parallel.
//
// A kernel is a struct with a type Unit, in which it multiplies, and the members tasks(), the number of its tasks,
// take_scratch(Arena*), a worker's memory, and run_task(index, scratch).
#pragma once
#include "sequence.h"

namespace fastattn {
namespace {

constexpr int kTasks = 16;          // Tasks that splitting the keys aims at.
constexpr int kSplitKeys = 4 * 96;  // Minimum keys per split.

// The splits of the keys. They depend only on the shape, so results do not depend on the number of workers.
struct Splits {
  int64_t keys, count;  // Keys per split, a multiple of kBlockN.

  Splits(const Attention& a, int64_t wanted)
      : keys(max(round_up(ceil_div(a.seqlen_k, max(wanted, 1)), kBlockN), kBlockN)),
        count(max(ceil_div(a.seqlen_k, keys), 1)) {}

  // Partial results are (count, batch, num_heads, seqlen_q) rows. There are none without splits.
  int64_t rows(const Attention& a) const { return count > 1 ? count * a.batch * a.num_heads * a.seqlen_q : 0; }
  static int64_t row(const Attention& a, int64_t split, const Sequence& s, int64_t head, int64_t query) {
    return ((split * a.batch + s.index) * a.num_heads + head) * a.seqlen_q + query;
  }
};

// Take the scratch memory of all workers.
template <class Kernel>
void take_scratch(const Kernel& kernel, int workers, Arena* arena) {
  for (int64_t worker = 0; worker < min(workers, kernel.tasks()); ++worker) kernel.take_scratch(arena);
}

// Run a kernel's tasks in parallel. The workers' scratch memory begins where the arena ends.
template <class Kernel>
void run_tasks(const Kernel& kernel, const Parallel& parallel, int workers, const Arena& arena) {
  Arena end = arena;
  kernel.take_scratch(&end);
  const uintptr_t size = end.at - arena.at;
  parallel_for(parallel, workers, kernel.tasks(), [&](int64_t index, int worker) {
    Arena own = {arena.at + (uintptr_t)worker * size};
    const auto scratch = kernel.take_scratch(&own);
    with_tiles<kUsesAmx<typename Kernel::Unit>>([&] { kernel.run_task(index, scratch); });
  });
}

// Call body(s, head, query) for every query, in parallel.
template <class Body>
void for_each_query(const Attention& a, const Parallel& parallel, int workers, const Body& body) {
  parallel_for(parallel, workers, a.batch * a.num_heads * a.seqlen_q, [&](int64_t index, int) {
    const Sequence s = find_sequence(a, index / a.seqlen_q / a.num_heads);
    const int64_t query = index % a.seqlen_q;
    if (query < s.seqlen_q) body(s, index / a.seqlen_q % a.num_heads, query);
  });
}

}  // namespace
}  // namespace fastattn
