// A backward pass of attention as a kernel for Hopper has it: a test of the emulation and of the compiler's code.
//
//   for each block: N = 128 keys of a matrix:
//     the producer, one thread: load K, V; for each tile of M = 64 queries, ascending: load Q and lse, dO and delta;
//     two consumer warpgroups of 64 keys: for each tile of queries:
//       S (64, M) = K Q';  X = V dO';  P = keep exp2(S - lse);  S = P (X - delta);
//       dV (64, D) += P dO;  dK += S Q;  half of dQ (M, D / 2) = S' K, S by shared memory;
//     the writer, a warp: add each half of dQ to global memory, in the order of the blocks.
//
// q, k, v, grad, dk and dv are (matrices, L, D), bfloat16, dense, L a multiple of 128; lse, times log2(e), and delta
// are (matrices, L), float32. dq is float32, by tile, half, register / 4, thread, register % 4 of the sums. `turns` is
// (matrices, L / 64) zeros. Beforehand: delta = sum(out grad) / s, afterwards: dQ *= scale s, with dropout's scale s.
#include "../../cuda/launch.h"
#include "../../cuda/hopper_attention.h"
#include "start.h"

namespace fastattn::cuda {
namespace {

constexpr int kKeys = 128, kQueries = 64, kStages = 2;
enum Named { kScoresReady = 1, kSumsFull = 2, kSumsEmpty = 4 };  // The latter two have a barrier per half.

struct Problem {
  int length;
  float scale;
  int threshold;
  const float *lse, *delta;
  const int64_t* seed;
  float* dq;
  uint32_t *dk, *dv;
  int* turns;
};

template <int D>
struct Layout {
  static constexpr int kHalf = D / 2, kOwn = kKeys * D * 2, kTile = kQueries * D * 2, kRow = kQueries * 4,
                       kScoreBytes = kKeys * kQueries * 2, kSumBytes = kQueries * kHalf * 4;
  static constexpr int kKey = 0, kValue = kKey + kOwn, kQuery = kValue + kOwn, kGrad = kQuery + kStages * kTile,
                       kScores = kGrad + kStages * kTile, kSums = kScores + 2 * kScoreBytes,
                       kLse = kSums + 2 * kSumBytes, kDelta = kLse + kStages * kRow,
                       kBarriers = kDelta + kStages * kRow;
  static constexpr int kKeyFull = kBarriers, kQueryFull = kKeyFull + 8, kGradFull = kQueryFull + 8 * kStages,
                       kQueryEmpty = kGradFull + 8 * kStages, kGradEmpty = kQueryEmpty + 8 * kStages,
                       kBytes = kGradEmpty + 8 * kStages;
};

// Load the block's keys and values, then queries and gradients for its consumers.
template <int D>
__device__ __forceinline__ void produce(const Problem& p, uint32_t base, const CUtensorMap& query,
                                        const CUtensorMap& key, const CUtensorMap& value, const CUtensorMap& grad) {
  using At = Layout<D>;
  const int z = (int)blockIdx.y, first = (int)blockIdx.x * kKeys;
  arrive_expecting(base + At::kKeyFull, 2 * At::kOwn);
  load_columns<D>(base + At::kKey, key, base + At::kKeyFull, kKeys, first, z);
  load_columns<D>(base + At::kValue, value, base + At::kKeyFull, kKeys, first, z);
  Stage<kStages> stage;
  for (int m = 0; m < p.length; m += kQueries, stage.advance()) {
    const int at = stage.index, number = 8 * at;
    const size_t row = (size_t)z * p.length + m;
    wait(base + At::kQueryEmpty + number, stage.parity ^ 1);
    arrive_expecting(base + At::kQueryFull + number, At::kTile + At::kRow);
    load_columns<D>(base + At::kQuery + at * At::kTile, query, base + At::kQueryFull + number, kQueries, m, z);
    load_bytes(base + At::kLse + at * At::kRow, p.lse + row, At::kRow, base + At::kQueryFull + number);
    wait(base + At::kGradEmpty + number, stage.parity ^ 1);
    arrive_expecting(base + At::kGradFull + number, At::kTile + At::kRow);
    load_columns<D>(base + At::kGrad + at * At::kTile, grad, base + At::kGradFull + number, kQueries, m, z);
    load_bytes(base + At::kDelta + at * At::kRow, p.delta + row, At::kRow, base + At::kGradFull + number);
  }
}

// Add the consumers' dQ to global memory. The first block stores instead.
template <int D>
__device__ __forceinline__ void write_sums(const Problem& p, uint32_t base, bool is_first_lane) {
  using At = Layout<D>;
  constexpr int kParty = kWarpgroup + 32;
  const int tiles = p.length / kQueries, number = (int)blockIdx.x;
  for (int w = 0; w < 2; ++w) arrive_named(kSumsEmpty + w, kParty);
  for (int m = 0; m < tiles; ++m) {
    int* const turn = p.turns + (size_t)blockIdx.y * tiles + m;
    float* const to = p.dq + ((size_t)blockIdx.y * p.length + m * kQueries) * D;
    for (int w = 0; w < 2; ++w) {
      sync_named(kSumsFull + w, kParty);
      if (is_first_lane) {
        const uint32_t from = base + At::kSums + w * At::kSumBytes;
        if (w == 0) wait_turn(turn, number);
        if (number == 0)
          store_bytes(to + w * kQueries * At::kHalf, from, At::kSumBytes);
        else
          add_floats(to + w * kQueries * At::kHalf, from, At::kSumBytes);
        commit_stores();
        wait_stores_read<0>();
      }
      __syncwarp();
      arrive_named(kSumsEmpty + w, kParty);
    }
    if (is_first_lane) {
      wait_stores<0>();
      pass_turn(turn, number + 1);
    }
    __syncwarp();
  }
}

template <int D, bool kDropout>
__device__ __forceinline__ void consume(const Problem& p, uint8_t* shared, uint32_t base, int w) {
  using At = Layout<D>;
  constexpr int kHalf = At::kHalf;
  const int t = (int)threadIdx.x % kWarpgroup, lane = t % 32, warp = t / 32, z = (int)blockIdx.y;
  const int key = (int)blockIdx.x * kKeys + w * 64 + warp * 16 + lane / 4;
  const float scale = p.scale * kLog2e;
  RoundKeys keys;
  keys.set(make_seed(p.seed));
  const uint32_t of_key = base + At::kKey + w * 8192, of_value = base + At::kValue + w * 8192;
  float S[kQueries / 2], X[kQueries / 2], dK[D / 2], dV[D / 2], dQ[kHalf / 2];
  uint32_t P[kQueries / 4], dS[kQueries / 4], words[kQueries / 4];
  const auto release = [&](int barrier) {
    if (lane == 0) arrive(base + (uint32_t)barrier);
  };
  // Start a product over the depth of D.
  const auto start_scores = [&](float (&sums)[kQueries / 2], uint32_t a, uint32_t b) {
#pragma unroll
    for (int k = 0; k < D / 16; ++k)
      multiply<bfloat16, Major::depth, Major::depth>(sums, descriptor(a + k / 4 * kKeys * 128 + k % 4 * 32, 16, 1024),
                                                     descriptor(b + k / 4 * kQueries * 128 + k % 4 * 32, 16, 1024),
                                                     k != 0);
    commit_products();
  };
  // Start sums += A B, A (64 keys, M) from registers.
  const auto start_gradient = [&](float (&sums)[D / 2], const uint32_t* a, uint32_t b) {
#pragma unroll
    for (int k = 0; k < kQueries / 16; ++k)
      multiply<bfloat16, Major::outer>(sums, a + 4 * k, descriptor(b + k * 2048, kQueries * 128, 1024), true);
    commit_products();
  };
#pragma unroll
  for (int i = 0; i < D / 2; ++i) dK[i] = dV[i] = 0.0f;
  wait(base + At::kKeyFull, 0);
  Stage<kStages> stage;
#pragma unroll 1
  for (int m = 0; m < p.length / kQueries; ++m, stage.advance()) {
    const int at = stage.index, number = 8 * at;
    const uint32_t of_query = base + At::kQuery + at * At::kTile, of_grad = base + At::kGrad + at * At::kTile,
                   scores = base + At::kScores + m % 2 * At::kScoreBytes;
    const float *const lse = (const float*)(shared + At::kLse + at * At::kRow), *const delta =
                                                                                    (const float*)(shared + At::kDelta +
                                                                                                   at * At::kRow);
    wait(base + At::kQueryFull + number, stage.parity);
    fence_products(S);
    start_scores(S, of_key, of_query);
    wait(base + At::kGradFull + number, stage.parity);
    fence_products(X);
    start_scores(X, of_value, of_grad);
    if constexpr (kDropout) {
#pragma unroll
      for (int g = 0; g < kQueries / 16; ++g)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int query = m * (kQueries / 2) + g * 8 + lane % 4 * 2 + e;
          uint32_t four[4] = {(uint32_t)(key / 32 * 8 + key % 8), (uint32_t)query, (uint32_t)z, keys.offset};
          keys.draw(four);
          keep(words[4 * g + 2 * e] = warp % 2 ? four[1] : four[0]);
          keep(words[4 * g + 2 * e + 1] = warp % 2 ? four[3] : four[2]);
        }
    }
    wait_products<1>(S);
#pragma unroll
    for (int c = 0; c < kQueries / 8; ++c) {
      const float2 of_pair = *(const float2*)&lse[8 * c + lane % 4 * 2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float* const s = &S[4 * c + 2 * r];
        s[0] = exp2_fast(fmaf(s[0], scale, -of_pair.x));
        s[1] = exp2_fast(fmaf(s[1], scale, -of_pair.y));
      }
    }
    wait_products<0>(X);
#pragma unroll
    for (int c = 0; c < kQueries / 8; ++c) {
      const float2 of_pair = *(const float2*)&delta[8 * c + lane % 4 * 2];
#pragma unroll
      for (int i = 4 * c; i < 4 * c + 4; ++i) {
        const float by = i % 2 ? of_pair.y : of_pair.x, weight = S[i];
        if constexpr (kDropout) {
          const uint32_t bound = ((uint32_t)p.threshold << 16) - 1;  // 0 < threshold < 65536
          const uint32_t word = words[4 * (c / 2) + 2 * (i % 2) + c % 2];
          S[i] = (i / 2 % 2 ? word : word << 16) > bound ? weight : 0.0f;
        }
        X[i] = fmaf(S[i], X[i], -weight * by);
      }
    }
#pragma unroll
    for (int i = 0; i < kQueries / 4; ++i) {
      P[i] = pack(S[2 * i], S[2 * i + 1], bfloat16());
      dS[i] = pack(X[2 * i], X[2 * i + 1], bfloat16());
    }
    fence_products(dV, P);
    start_gradient(dV, P, of_grad);
#pragma unroll
    for (int c = 0; c < kQueries / 16; ++c) {
      const int row = w * 64 + warp * 16 + lane % 16;
      store_matrices(scores + row * 128 + (((2 * c + lane / 16) ^ (row & 7)) << 4), &dS[4 * c]);
    }
    fence_async();
    sync_named(kScoresReady, 2 * kWarpgroup);  // The scores of the tile before may still be read.
    fence_products(dQ, dK, dS);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      const uint32_t half = base + At::kKey + (D == 128 ? w * kKeys * 128 : w * 64) + k * 2048;
      multiply<bfloat16, Major::outer, Major::outer>(dQ, descriptor(scores + k * 2048, 8192, 1024),
                                                     descriptor(half, kKeys * 128, 1024), k != 0);
    }
    commit_products();
    start_gradient(dK, dS, of_query);
    wait_products<2>(dV);
    release(At::kGradEmpty + number);
    wait_products<1>(dQ);
    sync_named(kSumsEmpty + w, kWarpgroup + 32);
#pragma unroll
    for (int i = 0; i < kHalf / 2; i += 4)
      *(float4*)(shared + At::kSums + w * At::kSumBytes + (i / 4 * kWarpgroup + t) * 16) =
          float4{dQ[i], dQ[i + 1], dQ[i + 2], dQ[i + 3]};
    fence_async();
    arrive_named(kSumsFull + w, kWarpgroup + 32);
    wait_products<0>(dK);
    release(At::kQueryEmpty + number);
  }
  const float s = dropout_scale(p.threshold);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const size_t at = ((size_t)z * p.length + key + 8 * r) * (D / 2) + lane % 4;
#pragma unroll
    for (int c = 0; c < D / 8; ++c) {
      const int i = 4 * c + 2 * r;
      p.dk[at + 4 * c] = pack(dK[i] * p.scale * s, dK[i + 1] * p.scale * s, bfloat16());
      p.dv[at + 4 * c] = pack(dV[i] * s, dV[i + 1] * s, bfloat16());
    }
  }
}

template <int D, bool kDropout>
__global__ void __launch_bounds__(3 * kWarpgroup, 1)
    backward_kernel(const __grid_constant__ CUtensorMap query, const __grid_constant__ CUtensorMap key,
                    const __grid_constant__ CUtensorMap value, const __grid_constant__ CUtensorMap grad,
                    const Problem p) {
  using At = Layout<D>;
  uint8_t* const shared = dynamic_shared();
  const uint32_t base = shared_address(shared);
  const int group = __shfl_sync(0xffffffff, (int)threadIdx.x / kWarpgroup, 0);
  if (threadIdx.x == 0) {
    init_barrier(base + At::kKeyFull, 1);
    for (int i = 0; i < kStages; ++i) {
      init_barrier(base + At::kQueryFull + 8 * i, 1);
      init_barrier(base + At::kGradFull + 8 * i, 1);
      init_barrier(base + At::kQueryEmpty + 8 * i, 8);  // warps
      init_barrier(base + At::kGradEmpty + 8 * i, 8);
    }
    fence_barriers();
  }
  __syncthreads();
  if (group == 0) {
    give_registers<24>();
    if (threadIdx.x == 0)
      produce<D>(p, base, query, key, value, grad);
    else if (threadIdx.x / 32 == 1)
      write_sums<D>(p, base, threadIdx.x == 32);
  } else {
    take_registers<240>();
    consume<D, kDropout>(p, shared, base, group - 1);
  }
}

template <int D, bool kDropout>
void start_backward(const void* const (&operands)[4], int matrices, const Problem& p, cudaStream_t stream) {
  const auto map = [&](const void* data, uint32_t rows) {
    const uint64_t row = D * 2, matrix = row * (uint64_t)p.length;
    return tensor_map(data, {D, (uint64_t)p.length, (uint64_t)matrices, 1}, {row, matrix, matrix * (uint64_t)matrices},
                      {64, rows, 1, 1}, Swizzle::bytes128);
  };
  launch(backward_kernel<D, kDropout>, dim3((unsigned)(p.length / kKeys), (unsigned)matrices), 3 * kWarpgroup,
         Layout<D>::kBytes + kSharedAlignment, stream, map(operands[0], kQueries), map(operands[1], kKeys),
         map(operands[2], kKeys), map(operands[3], kQueries), p);
}

}  // namespace

FASTATTN_EXPORT const char* hopper_backward(int head_dim, const void* q, const void* k, const void* v, const void* grad,
                                            const float* lse, const float* delta, float* dq, void* dk, void* dv,
                                            int* turns, const int64_t* seed, int threshold, int matrices, int length,
                                            float scale, cudaStream_t stream) {
  return attempt([&] {
    const Problem p = {length, scale, threshold, lse, delta, seed, dq, (uint32_t*)dk, (uint32_t*)dv, turns};
    const void* const operands[] = {q, k, v, grad};
    if (head_dim == 64 && threshold) return start_backward<64, true>(operands, matrices, p, stream);
    if (head_dim == 64) return start_backward<64, false>(operands, matrices, p, stream);
    if (threshold) return start_backward<128, true>(operands, matrices, p, stream);
    return start_backward<128, false>(operands, matrices, p, stream);
  });
}

}  // namespace fastattn::cuda
