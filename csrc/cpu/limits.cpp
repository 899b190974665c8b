// See limits.h.
#include "limits.h"

#include "kernels.h"
#include "simd.h"

namespace fastattn {
namespace {

// Independent chains. A multiply-add takes 4 or 5 cycles and two start in each, so 10 chains keep the units busy; 12
// and their operands fit into 16 registers.
constexpr int kChains = 12;

struct MultiplyAdd {
  static constexpr int kOperations = 2 * kLanes;
  // The chain approaches 1: nothing overflows, nothing becomes denormal.
  static FASTATTN_INLINE vf step(vf chain) { return fma(chain, splat(0x1.ffp-1f), splat(0x1p-9f)); }
};

#if defined(__AVX512BF16__)
struct DotPairs {
  static constexpr int kOperations = 4 * kLanes;
  static FASTATTN_INLINE vf step(vf chain) {
    const __m512bh zero = (__m512bh)splat(0.0f), one = (__m512bh)splat_bits(0x3f803f80);
    return (vf)_mm512_dpbf16_ps((__m512)chain, zero, one);
  }
};
#else
using DotPairs = MultiplyAdd;
#endif

template <class Arithmetic>
void run(float* sink, int64_t operations, const Parallel& parallel) {
  const int64_t rounds = operations / (int64_t(kChains) * Arithmetic::kOperations * parallel.threads) + 1;
  parallel_for(parallel, parallel.threads, parallel.threads, [&](int64_t task, int) {
    vf chain[kChains];
    for (int c = 0; c < kChains; ++c) chain[c] = splat((float)(task + c));  // each its own, and unknown to the compiler
    for (int64_t round = 0; round < rounds; ++round)
      for (int c = 0; c < kChains; ++c) chain[c] = Arithmetic::step(chain[c]);
    for (int c = 1; c < kChains; ++c) chain[0] += chain[c];
    sink[task] = sum(chain[0]);
  });
}

}  // namespace

extern const LimitKernels FASTATTN_TABLE(limits);
const LimitKernels FASTATTN_TABLE(limits) = {&run<MultiplyAdd>, &run<DotPairs>};

}  // namespace fastattn
