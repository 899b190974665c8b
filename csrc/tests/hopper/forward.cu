// A forward pass of attention as a kernel for Hopper has it: a test of the emulation and of the compiler's code.
//
//   for each block: tiles of M = 64 kGroups queries of a matrix (batch, head):
//     the producer, one thread: load Q; for each tile of N = 128 keys, the last first: load K, load V;
//     each consumer warpgroup, which takes turns with the others: for each tile of keys, with its 64 queries:
//       S (64, N) = Q K';  O (64, D) += P V of the tile before;  P = keep exp2(S - row_max);  O = rescale O;
//
// q, k, v and out are (matrices, L, D), bfloat16, dense; lse is (matrices, L), natural log. Keys from lengths[matrix]
// on may hold anything. A matrix without keys has one tile of them, whose scores are all masked. Dropout is the public
// formula (common/philox.h).
#include <math.h>

#include "../../cuda/launch.h"
#include "attention.h"
#include "start.h"

namespace fastattn::cuda {
namespace {

constexpr int kKeys = 128;

struct Problem {
  int length, matrices;
  float scale;
  int threshold;
  const int64_t* seed;
  const int* lengths;  // (matrices,)
  uint32_t* out;
  float* lse;
};

template <int D, int kGroups>
struct Layout {
  static constexpr int kRows = 64 * kGroups, kTile = kKeys * D * 2;
  static constexpr int kQuery = 0, kKey = kQuery + kRows * D * 2, kValue = kKey + kStages * kTile,
                       kBarriers = kValue + kStages * kTile;
  // Barriers. A full one counts bytes, an empty one the warps that have read.
  static constexpr int kQueryFull = kBarriers, kQueryEmpty = kBarriers + 8, kKeyFull = kBarriers + 16,
                       kValueFull = kKeyFull + 8 * kStages, kKeyEmpty = kValueFull + 8 * kStages,
                       kValueEmpty = kKeyEmpty + 8 * kStages, kBytes = kValueEmpty + 8 * kStages;
};

// One tile of queries: the matrix z, its first query, the number of its tiles of keys and of its keys.
struct Tile {
  int z, first, count, keys;

  template <int kRows, bool kCausal>
  static __device__ __forceinline__ Tile at(const Problem& p, int index) {
    const int tiles = (p.length + kRows - 1) / kRows, z = index / tiles, m = index % tiles;
    const int first = (kCausal ? tiles - 1 - m : m) * kRows;
    const int keys = p.lengths[z], last = kCausal && first + kRows < keys ? first + kRows : keys;
    return {z, first, last > 0 ? (last + kKeys - 1) / kKeys : 1, keys};
  }
};

// Load a tile, the only one of a phase.
template <int D>
__device__ __forceinline__ void load(uint32_t to, const CUtensorMap& map, uint32_t full, int rows, int first, int z) {
  arrive_expecting(full, rows * D * 2);
  load_columns<D>(to, map, full, rows, first, z);
}

template <int D, int kGroups, bool kDropout, bool kCausal>
__global__ void __launch_bounds__(kWarpgroup*(kGroups + 1), 1)
    forward_kernel(const __grid_constant__ CUtensorMap query, const __grid_constant__ CUtensorMap key,
                   const __grid_constant__ CUtensorMap value, const Problem p) {
  using At = Layout<D, kGroups>;
  static_assert(!kCausal || At::kRows == kKeys, "the first tile of keys alone has the diagonal");
  constexpr int kTurn = 1, kCleared = kTurn + kGroups;  // named barriers
  uint8_t* const shared = dynamic_shared();
  const uint32_t base = shared_address(shared);
  const int group = __shfl_sync(0xffffffff, (int)threadIdx.x / kWarpgroup, 0);
  const int tiles = (p.length + At::kRows - 1) / At::kRows * p.matrices;
  if (threadIdx.x == 0) {
    init_barrier(base + At::kQueryFull, 1);
    init_barrier(base + At::kQueryEmpty, 4 * kGroups);
    for (int i = 0; i < kStages; ++i) {
      init_barrier(base + At::kKeyFull + 8 * i, 1);
      init_barrier(base + At::kValueFull + 8 * i, 1);
      init_barrier(base + At::kKeyEmpty + 8 * i, 4 * kGroups);
      init_barrier(base + At::kValueEmpty + 8 * i, 4 * kGroups);
    }
    fence_barriers();
  }
  __syncthreads();
  if (group == 0) {
    if constexpr (kGroups == 2)
      give_registers<24>();
    else
      give_registers<32>();
    if (threadIdx.x != 0) return;
    Stage stage;
    uint32_t turn = 0;
    for (int index = (int)blockIdx.x; index < tiles; index += (int)gridDim.x, turn ^= 1) {
      const Tile tile = Tile::at<At::kRows, kCausal>(p, index);
      wait(base + At::kQueryEmpty, turn ^ 1);
      load<D>(base + At::kQuery, query, base + At::kQueryFull, At::kRows, tile.first, tile.z);
      for (int n = tile.count - 1; n >= 0; --n, stage.advance()) {
        const int offset = stage.index * At::kTile, number = 8 * stage.index;
        wait(base + At::kKeyEmpty + number, stage.parity ^ 1);
        load<D>(base + At::kKey + offset, key, base + At::kKeyFull + number, kKeys, n * kKeys, tile.z);
        wait(base + At::kValueEmpty + number, stage.parity ^ 1);
        load<D>(base + At::kValue + offset, value, base + At::kValueFull + number, kKeys, n * kKeys, tile.z);
      }
    }
    return;
  }

  if constexpr (kGroups == 2)
    take_registers<240>();
  else
    take_registers<160>();
  const int w = group - 1, lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x % kWarpgroup / 32;
  const float scale = p.scale * kLog2e;
  const RoundKeys keys(make_seed(p.seed));
  float S[kKeys / 2], O[D / 2], row_max[2], row_sum[2], factor[2];
  uint32_t P[kKeys / 4], words[kKeys / 4];
  Stage stage;
  uint32_t turn = 0;

  // Start S = Q K'.
  const auto start_scores = [&](int at) {
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      const int column = k / 4, depth = k % 4 * 32;
      const uint32_t q = base + At::kQuery + w * 8192 + column * At::kRows * 128 + depth;
      const uint32_t of_key = base + At::kKey + at * At::kTile + column * kKeys * 128 + depth;
      multiply<bfloat16, Major::depth, Major::depth>(S, descriptor(q, 16, 1024), descriptor(of_key, 16, 1024), k != 0);
    }
    commit_products();
  };
  // Start O += P V.
  const auto start_output = [&](int at) {
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      const uint32_t of_value = base + At::kValue + at * At::kTile + k * 2048;
      multiply<bfloat16, Major::outer>(O, &P[4 * k], descriptor(of_value, kKeys * 128, 1024), true);
    }
    commit_products();
  };
  const auto my_turn = [&] { sync_named(kTurn + w, 2 * kWarpgroup); };
  const auto next_turn = [&] { arrive_named(kTurn + (w + 1) % kGroups, 2 * kWarpgroup); };
  const auto release = [&](int barrier) {
    if (lane == 0) arrive(base + (uint32_t)barrier);
  };
  if (w == 0) arrive_named(kTurn, 2 * kWarpgroup);

  for (int index = (int)blockIdx.x; index < tiles; index += (int)gridDim.x, turn ^= 1) {
    const Tile tile = Tile::at<At::kRows, kCausal>(p, index);
    const int row = tile.first + w * 64 + warp * 16 + lane / 4;
    // Draw the words for the tile of keys n: those of columns 8c + 2 (lane % 4) + e, c / 4 = g, e < 2.
    const auto draw = [&](int n) {
      if constexpr (kDropout) {
#pragma unroll
        for (int g = 0; g < kKeys / 32; ++g)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            uint32_t four[4] = {(uint32_t)(n * (kKeys / 4) + g * 8 + lane % 4 * 2 + e),
                                (uint32_t)(row / 16 * 8 + row % 8), (uint32_t)tile.z, keys.offset};
            philox(four, keys);
#pragma unroll
            for (int i = 0; i < 4; ++i) keep(words[8 * g + 4 * e + i] = four[i]);
          }
      }
    };
    // Wait for values, and set those of keys that do not exist to 0, because 0 * NaN is NaN. All consumers meet here,
    // so none may have the turn.
    const auto wait_cleared = [&](int n, const Stage& at) {
      const int first = tile.keys - n * kKeys;
      if (first >= kKeys) return;
      wait(base + At::kValueFull + 8 * at.index, at.parity);
      for (int i = (int)threadIdx.x - kWarpgroup; i < kKeys * D / 8; i += kGroups * kWarpgroup)
        if (i / 8 % kKeys >= first) *(uint4*)(shared + At::kValue + at.index * At::kTile + i * 16) = uint4{0, 0, 0, 0};
      fence_async();
      sync_named(kCleared, kGroups * kWarpgroup);
    };
    const auto mask = [&](int n) {
      if (n * kKeys + kKeys <= tile.keys && (!kCausal || n * kKeys + kKeys <= tile.first + w * 64 + 1)) return;
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        const int column = n * kKeys + i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (column >= tile.keys || (kCausal && column > row + 8 * (i / 2 % 2))) S[i] = -INFINITY;
      }
    };
    const auto softmax = [&] {
      float shift[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float most = row_max[r];
#pragma unroll
        for (int i = 0; i < kKeys / 4; ++i) most = fmaxf(most, S[i / 2 * 4 + 2 * r + i % 2]);
        most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
        const float finite = most == -INFINITY ? 0.0f : most;
        factor[r] = exp2_fast((row_max[r] - finite) * scale);
        shift[r] = -finite * scale;
        row_max[r] = most;
        row_sum[r] *= factor[r];
      }
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        S[i] = exp2_fast(fmaf(S[i], scale, shift[i / 2 % 2]));
        row_sum[i / 2 % 2] += S[i];
      }
      if constexpr (kDropout) {
        const uint32_t bound = ((uint32_t)p.threshold << 16) - 1;  // 0 < threshold < 65536
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) {
          const int v = 4 * (i / 2 % 2) + i / 4 % 4;
          const uint32_t word = words[8 * (i / 16) + 4 * (i % 2) + v / 2];
          S[i] = (v % 2 ? word : word << 16) > bound ? S[i] : 0.0f;
        }
      }
    };
    const auto pack_scores = [&] {
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i) P[i] = pack(S[2 * i], S[2 * i + 1], bfloat16());
    };

#pragma unroll
    for (int i = 0; i < D / 2; ++i) O[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) row_max[r] = -INFINITY, row_sum[r] = 0.0f;
    wait(base + At::kQueryFull, turn);
    wait(base + At::kKeyFull + 8 * stage.index, stage.parity);
    int n = tile.count - 1;
    my_turn();
    fence_products(S);
    start_scores(stage.index);
    next_turn();
    draw(n);
    wait_products<0>(S);
    release(At::kKeyEmpty + 8 * stage.index);
    mask(n);
    softmax();
    pack_scores();
    wait_cleared(n, stage);
#pragma unroll 1
    while (--n >= 0) {
      const Stage before = stage;
      stage.advance();
      wait(base + At::kKeyFull + 8 * stage.index, stage.parity);
      my_turn();
      fence_products(S);
      start_scores(stage.index);
      wait(base + At::kValueFull + 8 * before.index, before.parity);
      fence_products(O, P);
      start_output(before.index);
      next_turn();
      draw(n);
      wait_products<1>(S);
      release(At::kKeyEmpty + 8 * stage.index);
      softmax();
      wait_products<0>(O);
      release(At::kValueEmpty + 8 * before.index);
#pragma unroll
      for (int i = 0; i < D / 2; ++i) O[i] *= factor[i / 2 % 2];
      pack_scores();
    }
    release(At::kQueryEmpty);
    wait(base + At::kValueFull + 8 * stage.index, stage.parity);
    fence_products(O, P);
    start_output(stage.index);
    wait_products<0>(O);
    release(At::kValueEmpty + 8 * stage.index);
    stage.advance();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row_sum[r] += __shfl_xor_sync(0xffffffff, row_sum[r], 1);
      row_sum[r] += __shfl_xor_sync(0xffffffff, row_sum[r], 2);
      const int query_row = row + 8 * r;
      if (query_row >= p.length) continue;
      const float by = row_sum[r] > 0.0f ? dropout_scale(p.threshold) / row_sum[r] : 0.0f;
      uint32_t* const out = p.out + ((size_t)tile.z * p.length + query_row) * (D / 2) + lane % 4;
#pragma unroll
      for (int c = 0; c < D / 8; ++c) out[4 * c] = pack(O[4 * c + 2 * r] * by, O[4 * c + 2 * r + 1] * by, bfloat16());
      if (lane % 4 == 0) p.lse[(size_t)tile.z * p.length + query_row] = row_max[r] * p.scale + logf(row_sum[r]);
    }
  }
}

template <int D, int kGroups, bool kDropout, bool kCausal>
void start_forward(const void* q, const void* k, const void* v, const Problem& p, int blocks, cudaStream_t stream) {
  using At = Layout<D, kGroups>;
  const auto map = [&](const void* data, int rows) {
    const uint64_t row = D * 2, matrix = row * (uint64_t)p.length;
    return tensor_map(data, {D, (uint64_t)p.length, (uint64_t)p.matrices, 1},
                      {row, matrix, matrix * (uint64_t)p.matrices}, {64, (uint32_t)rows, 1, 1}, Swizzle::bytes128);
  };
  launch(forward_kernel<D, kGroups, kDropout, kCausal>, dim3((unsigned)blocks), kWarpgroup * (kGroups + 1),
         At::kBytes + kSharedAlignment, stream, map(q, At::kRows), map(k, kKeys), map(v, kKeys), p);
}

}  // namespace

// A threshold above 0 turns on dropout. A tile has 128 queries, or 192 at a head size of 64 if it is not causal.
FASTATTN_EXPORT const char* hopper_forward(int head_dim, const void* q, const void* k, const void* v, void* out,
                                           float* lse, const int* lengths, const int64_t* seed, int threshold,
                                           int matrices, int length, int is_causal, float scale, int blocks,
                                           cudaStream_t stream) {
  return attempt([&] {
    const Problem p = {length, matrices, scale, threshold, seed, lengths, (uint32_t*)out, lse};
    const auto start = [&](auto dropout, auto causal) {
      if (head_dim == 64)
        start_forward<64, causal ? 2 : 3, dropout, causal>(q, k, v, p, blocks, stream);
      else
        start_forward<128, 2, dropout, causal>(q, k, v, p, blocks, stream);
    };
    const auto choose = [&](auto causal) {
      threshold ? start(std::true_type(), causal) : start(std::false_type(), causal);
    };
    is_causal ? choose(std::true_type()) : choose(std::false_type());
  });
}

}  // namespace fastattn::cuda
