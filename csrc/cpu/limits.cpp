// The arithmetic limit of an instruction set: multiply-adds that access only registers, for a caller to time.
#include "amx.h"
#include "kernels.h"
#include "simd.h"

namespace fastattn {
namespace {

// Independent dependency chains. FMA has a latency of 4 or 5 cycles and a throughput of 2 per cycle, so 10 chains
// saturate the units. 12 chains and their operands fit into 16 registers.
constexpr int kChains = 12;

struct MultiplyAdd {
  static constexpr int kOperations = 2 * kLanes;
  // The chain approaches 1, so it neither overflows nor becomes denormal.
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

// Return the rounds per thread, of `in_one` operations each, for at least `operations` in all.
int64_t rounds_of(int64_t operations, int64_t in_one, const Parallel& parallel) {
  return operations / (in_one * parallel.threads) + 1;
}

template <class Arithmetic>
void run(float* sink, int64_t operations, const Parallel& parallel) {
  const int64_t rounds = rounds_of(operations, kChains * Arithmetic::kOperations, parallel);
  parallel_for(parallel, parallel.threads, parallel.threads, [&](int64_t task, int) {
    vf chain[kChains];
    for (int c = 0; c < kChains; ++c) chain[c] = splat((float)(task + c));  // distinct, unknown to the compiler
    for (int64_t round = 0; round < rounds; ++round)
      for (int c = 0; c < kChains; ++c) chain[c] = Arithmetic::step(chain[c]);
    for (int c = 1; c < kChains; ++c) chain[0] += chain[c];
    sink[task] = sum(chain[0]);
  });
}

#if defined(__AMX_BF16__)
// Multiply arbitrary numbers, because the clock is higher on zeros.
void run_pairs(float* sink, int64_t operations, const Parallel& parallel) {
  const int64_t rounds = rounds_of(operations, 4 * 2 * 16 * 16 * 32, parallel);
  parallel_for(parallel, parallel.threads, parallel.threads, [&](int64_t task, int) {
    uint16_t factor[16 * 32];
    for (uint32_t i = 0; i < 16 * 32; ++i) factor[i] = (uint16_t)(0x3f00 | (i * 0x9e3779b9 >> 16 & 0x80ff));
    float sum[16 * 16];
    with_tiles<true>([&] {
      load_tile<4>(factor, 64), load_tile<5>(factor, 64), load_tile<6>(factor, 64), load_tile<7>(factor, 64);
      for (int64_t round = 0; round < rounds; ++round) {
        multiply_tiles<0, 4, 6>();
        multiply_tiles<1, 4, 7>();
        multiply_tiles<2, 5, 6>();
        multiply_tiles<3, 5, 7>();
      }
      store_tile<0>(sum, 64);
    });
    sink[task] = sum[0];
  });
}
#else
void run_pairs(float* sink, int64_t operations, const Parallel& parallel) { run<DotPairs>(sink, operations, parallel); }
#endif

}  // namespace

FASTATTN_EXPORT(Limits, limits) = {&run<MultiplyAdd>, &run_pairs};

}  // namespace fastattn
