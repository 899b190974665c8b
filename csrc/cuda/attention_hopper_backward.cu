// Attention backward for Hopper (sm_90a), in bfloat16 and float16, in one pass of five products, with the schedule of
// FlashAttention 3 (Shah, Bikshandi, Zhang, Thakkar, Ramani and Dao 2024). query_gradient.cu prepares and finishes.
//
//   differentiate, for each block of threads: a tile of N = kKeys keys of a head of keys and values:
//     the producer, one thread: load K, V;
//     for each head of queries of its group: for each tile of M = 64 queries that sees some of the keys:
//       the producer: load Q and the rows' values, dO;
//       two consumer warpgroups:
//         S (N, M) = K Q';  X = V dO';  draw dropout's words;  P = exp(S - lse);  S = keep P;  X = S X - P delta;
//         dV (N, D) += S dO;  dK += X Q;  dQ (M, D) = X' K, X by shared memory;
//       two warps: sum X over half of the keys each;
//       the writer, a warp: add dQ and these sums to global memory, in the order of the tiles of keys;
//     the consumers: store dK and dV.
//
// Up to D = 128, N is 128: a consumer has 64 keys and all columns of dK and dV, and S and X are operands in registers.
// Beyond, N is 64: a consumer computes 32 columns of S and X, which both share by shared memory, and half of the
// columns of dK and dV. Each computes half of the columns of dQ.
//
// query, key, value and their gradients have dtype T, (B, H, L, E), and packed ones (tokens, H, E). dO is (B, Hq, Lq,
// Ev). In shared memory E and Ev are padded to D columns by zeros. All sums are float32; S and X are rounded to T.
#include <math.h>

#include "hopper_attention.h"
#include "kernels.h"
#include "launch.h"
#include "query_gradient.h"

namespace fastattn::cuda {
namespace {

// A kernel's tiles, and the offsets in bytes of its buffers in shared memory.
template <class Element, int kHeadDim, Kind kCode>
struct Shape {
  using T = Element;
  static constexpr int D = kHeadDim;
  static constexpr Kind kKind = kCode;
  static constexpr bool kIsWide = D > 128;
  static constexpr int kKeys = kIsWide ? 64 : 128, kStages = D <= 192 ? 2 : 1;
  static constexpr int kOwn = kIsWide ? kQueries / 2 : kQueries;  // columns of S of a consumer
  static constexpr int kThreads = 3 * kWarpgroup, kProducerRegisters = 24, kConsumerRegisters = 240;
  static constexpr int kValues = kKind == Kind::general ? 3 : 2;  // per row
  // Warps exchange dropout's words where the tensor cores would wait for them.
  static constexpr bool kExchanges = D == 64 && kKind == Kind::dropout;

  // Groups of kColumns columns of a buffer are rows of kRowBytes. A half of the columns is whole groups, or in one.
  static constexpr int kColumns = D == 64 || D % 128 == 0 ? 64 : 32, kRowBytes = 2 * kColumns;
  static constexpr int kUpper = D == 96 ? 64 : D / 2;  // columns of the first half of dQ
  static constexpr Swizzle kSwizzle = kColumns == 64 ? Swizzle::bytes128 : Swizzle::bytes64;
  static constexpr int kKeyTile = kKeys * D * 2, kTile = kQueries * D * 2, kScoreTile = kKeys * kQueries * 2,
                       kUpperSums = kQueries * (kUpper + 1) * 4, kSumTile = kQueries * (D + 2) * 4,
                       kRowTile = kValues * kQueries * 4;
  // X has two buffers, so that one barrier per tile suffices. S has as many in a wide kernel.
  static constexpr int kKey = 0, kValue = kKey + kKeyTile, kQuery = kValue + kKeyTile, kGrad = kQuery + kStages * kTile,
                       kScores = kGrad + kStages * kTile, kWeights = kScores + 2 * kScoreTile,
                       kSums = kWeights + (kIsWide ? 2 * kScoreTile : 0), kRows = kSums + kSumTile,
                       kWords = kRows + kStages * kRowTile,
                       kBarriers = kWords + (kExchanges ? 2 * kWarpgroup * kQueries : 0);
  // Barriers. A full one counts bytes, an empty one the warps that have read. The block's ticket follows.
  static constexpr int kKeyFull = kBarriers, kQueryFull = kKeyFull + 8, kGradFull = kQueryFull + 8 * kStages,
                       kQueryEmpty = kGradFull + 8 * kStages, kGradEmpty = kQueryEmpty + 8 * kStages,
                       kTicket = kGradEmpty + 8 * kStages, kBytes = kTicket + 8;
};

constexpr int kWarp = 32, kConsumers = 2 * kWarpgroup;

// Named barriers, and the threads that come to them. There are one per half of dQ for sums, and one per two warps for
// words.
enum Named { kScoresReady = 1, kSumsFull = 2, kSumsEmpty = 4, kCleared = 6, kWordsReady = 7 };
constexpr int kScoresParty = kConsumers + 2 * kWarp, kSumsParty = kWarpgroup + 2 * kWarp;

using Problem = QueryGradient;

// A block's tile of keys, and the tiles of queries that visit it through the lengths and the window.
struct Tile {
  int batch, kv_head, number;
  Sequence sequence;
  int first;                             // its first key
  int begin, full_begin, full_end, end;  // tiles of queries
  int place;                             // of the sequence's first tile of queries
};

// The tiles of queries of a head that visit a tile of keys.
struct Visits {
  int begin, full_begin, full_end, count;
  const int* list;  // with a mask

  __device__ __forceinline__ int tile(int n) const { return list ? list[n] >> 1 : begin + n; }
  __device__ __forceinline__ bool is_partial(int n) const {
    return list ? list[n] & 1 : begin + n < full_begin || begin + n >= full_end;
  }
};

template <class At>
__device__ __forceinline__ Tile tile_at(const Problem& p, int ticket);

template <class At>
struct Producer;

template <class At>
struct Adder;

template <class At>
struct Writer;

template <class At>
struct Consumer;

template <class At>
__device__ __forceinline__ void store_gradients(const Consumer<At>& c, const Tile& tile);

// Call use(head, tile of queries) for each visit to a tile of keys.
template <class At, class Use>
__device__ __forceinline__ void each_visit(const Problem& p, const Tile& tile, const Use& use);

template <class At>
__device__ __forceinline__ Visits visits_of(const Problem& p, const Tile& tile, int head);

template <class At>
__global__ void __launch_bounds__(At::kThreads, 1)
    differentiate(const __grid_constant__ CUtensorMap query, const __grid_constant__ CUtensorMap key,
                  const __grid_constant__ CUtensorMap value, const __grid_constant__ CUtensorMap grad,
                  const __grid_constant__ Problem p) {
  const uint32_t base = shared_address(dynamic_shared());
  int& ticket = *(int*)(dynamic_shared() + At::kTicket);
  if (threadIdx.x == 0) {
    const int taken = take_ticket(p.ticket);
    init_barrier(base + At::kKeyFull, 1);
    for (int i = 0; i < At::kStages; ++i) {
      init_barrier(base + At::kQueryFull + 8 * i, 1);
      init_barrier(base + At::kGradFull + 8 * i, 1);
      init_barrier(base + At::kQueryEmpty + 8 * i, kConsumers / kWarp);
      init_barrier(base + At::kGradEmpty + 8 * i, kConsumers / kWarp);
    }
    fence_barriers();
    ticket = taken;
  }
  __syncthreads();

  const int group = __shfl_sync(kAllLanes, (int)threadIdx.x / kWarpgroup, 0);
  // Each role computes the tile for itself, since few registers are common to all.
  const auto run = [&](auto role) {
    const Tile tile = tile_at<At>(p, ticket);
    if (tile.first < tile.sequence.seqlen_k) role(tile);
  };
  if (group > 0) {
    take_registers<At::kConsumerRegisters>();
    run(Consumer<At>(p, base, group - 1));
    return;
  }
  give_registers<At::kProducerRegisters>();
  const int warp = (int)threadIdx.x / kWarp;
  if (threadIdx.x == 0)
    run(Producer<At>{query, key, value, grad, p, base});
  else if (warp == 1)
    run(Writer<At>{p, base});
  else if (warp > 1)
    run(Adder<At>{p, warp - 2});
}

// Return the tile of a ticket. A head's tiles have neighbouring tickets, in the order in which they add to dQ, because
// a block may wait only for lower ones. They descend: in a causal call a tile begins at its diagonal, so it reaches a
// tile of queries after the tiles behind it, and need not wait.
template <class At>
__device__ __forceinline__ Tile tile_at(const Problem& p, int ticket) {
  const int z = ticket / p.tiles_k, number = p.tiles_k - 1 - ticket % p.tiles_k;
  const int first = number * At::kKeys;
  const int batch = z / (int)p.num_kv_heads, kv_head = z % (int)p.num_kv_heads;
  const Sequence s(p, batch);
  const Visibility<int>& v = s.visibility;
  // Tile m of queries visits if one of its queries sees one of the keys. It is full if each sees all of them.
  const int last = first + At::kKeys - 1, tiles = (s.seqlen_q + kQueries - 1) / kQueries,
            first_query = max(v.first_query(first), 0);
  int begin = first_query / kQueries,
      end = min((max(v.last_query(min(last, v.length - 1)) + 1, 0) + kQueries - 1) / kQueries, tiles);
  if (first >= v.length || first_query >= s.seqlen_q || begin > end) begin = end = 0;
  int full_begin = min(max((max(v.first_query(last), 0) + kQueries - 1) / kQueries, begin), end);
  int full_end = max(min(max(v.last_query(first) + 1, 0), s.seqlen_q) / kQueries, full_begin);
  if (last >= v.length) full_end = full_begin;
  return {batch, kv_head, number, s, first, begin, full_begin, min(full_end, end), end, p.first_place(batch)};
}

template <class At>
__device__ __forceinline__ Visits visits_of(const Problem& p, const Tile& tile, int head) {
  Visits visits = {tile.begin, tile.full_begin, tile.full_end, tile.end - tile.begin, nullptr};
  if (At::kKind == Kind::general && p.mask.data && visits.count > 0) {
    visits.list = p.mask_tiles.list(tile.batch, head, tile.number);
    visits.count = *visits.list++;
  }
  return visits;
}

template <class At, class Use>
__device__ __forceinline__ void each_visit(const Problem& p, const Tile& tile, const Use& use) {
  for (int head = tile.kv_head * p.group; head < (tile.kv_head + 1) * p.group; ++head) {
    const Visits visits = visits_of<At>(p, tile, head);
    for (int n = 0; n < visits.count; ++n) use(head, visits.tile(n));
  }
}

// The thread that loads.
template <class At>
struct Producer {
  const CUtensorMap &query, &key, &value, &grad;
  const Problem& p;
  uint32_t base;

  __device__ __forceinline__ void operator()(const Tile& tile) {
    if (tile.begin == tile.end) return;
    const int batch = p.cu_seq_q ? 0 : tile.batch, first_key = tile.sequence.first_key + tile.first;
    const auto load = [&](int to, const CUtensorMap& map, int full, int rows, int first, int head) {
      load_columns<At::D, At::kColumns>(base + to, map, base + full, rows, first, head, batch);
    };
    arrive_expecting(base + At::kKeyFull, 2 * At::kKeyTile);
    load(At::kKey, key, At::kKeyFull, At::kKeys, first_key, tile.kv_head);
    load(At::kValue, value, At::kKeyFull, At::kKeys, first_key, tile.kv_head);
    Stage<At::kStages> stage;
    each_visit<At>(p, tile, [&](int head, int m) {
      const int number = 8 * stage.index, first = tile.sequence.first_query + m * kQueries;
      const float* const values = p.row_values + (int64_t)(head * p.places + tile.place + m) * (At::kValues * kQueries);
      wait(base + At::kQueryEmpty + number, stage.parity ^ 1);
      arrive_expecting(base + At::kQueryFull + number, At::kTile + At::kRowTile);
      load(At::kQuery + stage.index * At::kTile, query, At::kQueryFull + number, kQueries, first, head);
      load_bytes(base + At::kRows + stage.index * At::kRowTile, values, At::kRowTile, base + At::kQueryFull + number);
      wait(base + At::kGradEmpty + number, stage.parity ^ 1);
      arrive_expecting(base + At::kGradFull + number, At::kTile);
      load(At::kGrad + stage.index * At::kTile, grad, At::kGradFull + number, kQueries, first, head);
      stage.advance();
    });
  }
};

// A warp that sums the rounded X of half of the keys, by query.
template <class At>
struct Adder {
  using T = typename At::T;
  const Problem& p;
  int w;

  __device__ __forceinline__ void operator()(const Tile& tile) {
    uint8_t* const shared = dynamic_shared();
    // Sixteen lanes have a key's row of 64 queries, the other ones the next row. Chunks of 16 bytes are permuted by
    // exclusive or with the row's number.
    const int lane = (int)threadIdx.x % kWarp, row = lane / 16;
    const int first = (w * (At::kKeys / 2) + row) * 128 + ((lane % 16 / 2) ^ row) * 16 + lane % 2 * 8;
    int buffer = At::kScores;
    each_visit<At>(p, tile, [&](int, int) {
      float sums[4] = {};
      sync_named(kScoresReady, kScoresParty);
#pragma unroll 1
      for (int i = 0; i < At::kKeys / 8; ++i) {
        const uint8_t* const rows = shared + buffer + i * 512;
        const int even = first ^ i % 2 * 64;
        const uint2 pairs[2] = {*(const uint2*)(rows + even), *(const uint2*)(rows + (even ^ 32) + 256)};
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          sums[0] += to_float(T{(uint16_t)pairs[k].x}), sums[1] += to_float(T{(uint16_t)(pairs[k].x >> 16)});
          sums[2] += to_float(T{(uint16_t)pairs[k].y}), sums[3] += to_float(T{(uint16_t)(pairs[k].y >> 16)});
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] += __shfl_xor_sync(kAllLanes, sums[i], 16);
      sync_named(kSumsEmpty + w, kSumsParty);
      float* const to = (float*)(shared + At::kSums) + kQueries * (w ? At::D + 1 : At::kUpper);
      if (lane < 16) ((float4*)to)[lane] = {sums[0], sums[1], sums[2], sums[3]};
      fence_async();
      arrive_named(kSumsFull + w, kSumsParty);
      buffer ^= At::kScores ^ (At::kScores + At::kScoreTile);
    });
  }
};

// The warp that adds the tiles of dQ to global memory.
template <class At>
struct Writer {
  const Problem& p;
  uint32_t base;

  __device__ __forceinline__ void operator()(const Tile& tile) {
    const bool is_first_lane = threadIdx.x % kWarp == 0;
    for (int w = 0; w < 2; ++w) arrive_named(kSumsEmpty + w, kSumsParty);
    each_visit<At>(p, tile, [&](int head, int m) {
      const int place = head * p.places + tile.place + m;
      const int rank = rank_of(tile, head, m);
      int* const turn = p.turns + place;
      for (int w = 0; w < 2; ++w) {
        float* const to = p.sums + (int64_t)place * (At::kSumTile / 4) + (w ? At::kUpperSums / 4 : 0);
        const uint32_t from = base + At::kSums + (w ? At::kUpperSums : 0);
        const int bytes = w ? At::kSumTile - At::kUpperSums : At::kUpperSums;
        sync_named(kSumsFull + w, kSumsParty);
        if (is_first_lane) {
          if (w == 0) wait_turn(turn, rank);
          if (rank == 0)
            store_bytes(to, from, bytes);
          else
            add_floats(to, from, bytes);
          commit_stores();
          wait_stores_read<0>();
        }
        __syncwarp();
        arrive_named(kSumsEmpty + w, kSumsParty);
      }
      if (is_first_lane) {
        wait_stores<0>();
        pass_turn(turn, rank + 1);
      }
      __syncwarp();
    });
  }

  // Return how many tiles of keys add to a tile of queries before this one.
  __device__ __forceinline__ int rank_of(const Tile& tile, int head, int m) {
    const int first = m * kQueries, last = min(first + kQueries, tile.sequence.seqlen_q) - 1;
    const Interval seen(tile.sequence.visibility, first, last, At::kKeys);
    if (At::kKind != Kind::general || !p.mask.data) return seen.end - 1 - tile.number;
    const uint8_t* const covers = p.mask_tiles.covers(tile.batch, head, m);
    int count = 0;
    for (int n = tile.number + 1 + (int)threadIdx.x % kWarp; n < seen.end; n += kWarp) count += covers[n] != kNone;
    for (int step = 1; step < kWarp; step *= 2) count += __shfl_xor_sync(kAllLanes, count, step);
    return count;
  }
};

// A thread of a consumer warpgroup. It has rows lane / 4 + 8 r of its warp's 16 keys, r < 2, and of each 8 queries
// 2 (lane % 4) and the next one: S[i] and X[i] are of row r = i / 2 % 2, column i / 4 * 8 + lane % 4 * 2 + i % 2.
template <class At>
struct Consumer {
  using T = typename At::T;
  static constexpr int D = At::D, kKeys = At::kKeys, kOwn = At::kOwn;
  static constexpr bool kIsWide = At::kIsWide, kIsGeneral = At::kKind == Kind::general,
                        kDraws = At::kKind != Kind::plain;
  static constexpr int kOwnColumns = kIsWide ? D / 2 : D;  // of dK and dV

  const Problem& p;
  uint8_t* const shared;
  uint32_t base, thread;  // the shared address; the thread's number among the consumers
  const int w;            // warpgroup
  const float unit;       // Factor from scores in S to exponents of 2.
  Stage<At::kStages> stage;
  int buffer = 0;  // of X
  RoundKeys round_keys;

  float S[kOwn / 2], X[kOwn / 2], dK[kOwnColumns / 2], dV[kOwnColumns / 2];
  uint32_t P[kOwn / 4], dS[kOwn / 4];
  alignas(16) uint32_t words[kDraws ? kOwn / 4 : 1];

  __device__ __forceinline__ Consumer(const Problem& p, uint32_t base, int w)
      : p(p), shared(dynamic_shared()), base(base), thread(threadIdx.x - kWarpgroup), w(w), unit(p.scale * kLog2e) {
    if (kDraws && p.threshold) round_keys.set(make_seed(p.seed));
  }

  __device__ __forceinline__ int lane() const { return (int)thread % kWarp; }
  // The first of its keys in a tile, and the first of its queries in a tile.
  __device__ __forceinline__ int in_tile() const {
    return (kIsWide ? 0 : w * 64) + (int)thread % kWarpgroup / kWarp * 16 + lane() / 4;
  }
  __device__ __forceinline__ int own_query() const { return (kIsWide ? w * kOwn : 0) + lane() % 4 * 2; }

  __device__ __forceinline__ void operator()(const Tile& tile) {
#pragma unroll
    for (int i = 0; i < kOwnColumns / 2; ++i) dK[i] = dV[i] = 0.0f;
    if (tile.begin < tile.end) {
      wait(base + At::kKeyFull, 0);
      clear_keys(tile);
#pragma unroll 1
      for (int head = tile.kv_head * p.group; head < (tile.kv_head + 1) * p.group; ++head) attend(tile, head);
    }
    store_gradients(*this, tile);
  }

  // Take in the queries of a head.
  __device__ __forceinline__ void attend(const Tile& tile, int head) {
    const Visits visits = visits_of<At>(p, tile, head);
    int n = 0;
#pragma unroll 1
    while (n < visits.count) {
#pragma unroll 1
      for (; n < visits.count && visits.is_partial(n); ++n) step<true>(tile, head, visits.tile(n));
#pragma unroll 1
      for (; n < visits.count && !visits.is_partial(n); ++n) step<false>(tile, head, visits.tile(n));
    }
  }

  // Take in a tile of queries.
  template <bool kPartial>
  __device__ __forceinline__ void step(const Tile& tile, int head, int m) {
    keep(thread);  // Addresses are computed again in each step, because registers for them are few.
    if constexpr (D > 64) keep(base);
    const int number = 8 * stage.index;
    const uint32_t query = base + At::kQuery + stage.index * At::kTile,
                   grad = base + At::kGrad + stage.index * At::kTile;
    wait(base + At::kQueryFull + number, stage.parity);
    if constexpr (kPartial) clear_rows(tile, m);
    fence_products(S);
    start_scores(S, At::kKey, query);
    wait(base + At::kGradFull + number, stage.parity);
    fence_products(X);
    start_scores(X, At::kValue, grad);
    draw(tile, head, m);
    wait_products<1>(S);
    if constexpr (kPartial)
      mask(tile, head, m);
    else
      scale_scores();
    weigh();
    wait_products<0>(X);
    differentiate_scores<kPartial>();
    round_scores();
    if constexpr (!kIsWide) {
      fence_products(dV, P);
      start_gradient(dV, P, 0, grad);
    }
    share_scores();
    fence_async();
    sync_named(kScoresReady, kScoresParty);  // The scores of the tile before may still be read.
    if constexpr (D == 96) {
      if (w == 0)
        finish_step<At::kUpper>(query, grad);
      else
        finish_step<D - At::kUpper>(query, grad);
    } else {
      finish_step<D / 2>(query, grad);
    }
    stage.advance();
    buffer ^= 1;
  }

  // Multiply the shared scores by K, Q and in a wide kernel dO. The warpgroup has so many columns of dQ.
  template <int kCount>
  __device__ __forceinline__ void finish_step(uint32_t query, uint32_t grad) {
    const int number = 8 * stage.index;
    float dQ[kCount / 2];
    if constexpr (kIsWide) {
      fence_products(dV);
      start_gradient(dV, P, At::kWeights, grad);
    }
    fence_products(dQ, dK, dS);
    start_query_gradient(dQ);
    start_gradient(dK, dS, At::kScores, query);
    wait_products<2>(dV);
    release(At::kGradEmpty + number);
    wait_products<1>(dQ);
    sync_named(kSumsEmpty + w, kSumsParty);
    uint8_t* const sums = shared + At::kSums + (w ? At::kUpperSums : 0) + (int)thread % kWarpgroup * 16;
#pragma unroll
    for (int i = 0; i < kCount / 2; i += 4)
      *(float4*)(sums + i / 4 * kWarpgroup * 16) = float4{dQ[i], dQ[i + 1], dQ[i + 2], dQ[i + 3]};
    fence_async();
    arrive_named(kSumsFull + w, kSumsParty);
    wait_products<0>(dK);
    release(At::kQueryEmpty + number);
  }

  __device__ __forceinline__ void release(int barrier) {
    if (lane() == 0) arrive(base + (uint32_t)barrier);
  }

  // Start sums (64, kOwn) = A B', of rows of keys or values and of queries or dO.
  __device__ __forceinline__ void start_scores(float (&sums)[kOwn / 2], int keys, uint32_t queries) {
    const uint32_t a = base + (uint32_t)keys + (kIsWide ? 0 : w * 64) * At::kRowBytes,
                   b = queries + (kIsWide ? w * kOwn : 0) * At::kRowBytes;
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      constexpr int kSteps = At::kColumns / 16;
      const int column = k / kSteps * At::kRowBytes, depth = k % kSteps * 32;
      multiply<T, Major::depth, Major::depth>(
          sums, descriptor(a + kKeys * column + depth, 16, 8 * At::kRowBytes, At::kSwizzle),
          descriptor(b + kQueries * column + depth, 16, 8 * At::kRowBytes, At::kSwizzle), k != 0);
    }
    commit_products();
  }

  // Start sums (64, kOwnColumns) += A B, with A (64, M) from registers, in a wide kernel from a buffer of shared
  // memory.
  __device__ __forceinline__ void start_gradient(float (&sums)[kOwnColumns / 2], const uint32_t* a, int shared_a,
                                                 uint32_t queries) {
    const uint32_t b = queries + (kIsWide ? w * (kOwnColumns / At::kColumns) : 0) * kQueries * At::kRowBytes;
#pragma unroll
    for (int k = 0; k < kQueries / 16; ++k) {
      const uint64_t of_b =
          descriptor(b + k * 16 * At::kRowBytes, kQueries * At::kRowBytes, 8 * At::kRowBytes, At::kSwizzle);
      if constexpr (kIsWide)
        multiply<T, Major::depth, Major::outer>(
            sums, descriptor(base + (uint32_t)shared_a + buffer * At::kScoreTile + k * 32, 16, 1024), of_b, true);
      else
        multiply<T, Major::outer>(sums, a + 4 * k, of_b, true);
    }
    commit_products();
  }

  // Start dQ (M, columns) = X' K.
  template <int N>
  __device__ __forceinline__ void start_query_gradient(float (&dQ)[N]) {
    const uint32_t scores = base + At::kScores + buffer * At::kScoreTile;
    // Half of 64 columns begins inside a row, other halves begin with a group.
    const uint32_t key =
        base + At::kKey + w * (D == 64 ? At::kRowBytes / 2 : At::kUpper / At::kColumns * kKeys * At::kRowBytes);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k)
      multiply<T, Major::outer, Major::outer>(
          dQ, descriptor(scores + k * 2048, 0, 1024),
          descriptor(key + k * 16 * At::kRowBytes, kKeys * At::kRowBytes, 8 * At::kRowBytes, At::kSwizzle), k != 0);
    commit_products();
  }

  // Draw dropout's words for a tile of queries. A thread has four of the eight values of a call, those of two queries,
  // 8 apart, and of two keys: words warp % 2 and 2 + warp % 2. Its partner, 32 threads away, has the others.
  __device__ __forceinline__ void draw(const Tile& tile, int head, int m) {
    if constexpr (kDraws) {
      if (kIsGeneral && p.threshold == 0) return;
      constexpr int kGroups = kOwn / 16 / (At::kExchanges ? 2 : 1);  // of 16 queries
      const int key = tile.first + in_tile(), query = m * kQueries + own_query();
      const bool is_odd = in_tile() & 16;
      const int first = At::kExchanges && is_odd ? kGroups : 0;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        uint32_t of_even[4], of_odd[4];  // words of the even and of the odd one of two warps
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          uint32_t four[4] = {(uint32_t)(key / 32 * 8 + key % 8),
                              (uint32_t)(query / 16 * 8 + query % 8 + (first + g) * 8 + e),
                              (uint32_t)(tile.batch * (int)p.num_heads + head), round_keys.offset};
          round_keys.draw(four);
          of_even[2 * e] = four[0], of_even[2 * e + 1] = four[2];
          of_odd[2 * e] = four[1], of_odd[2 * e + 1] = four[3];
        }
        if constexpr (At::kExchanges) {
          *words_of(thread & ~kWarp, first + g) = {of_even[0], of_even[1], of_even[2], of_even[3]};
          *words_of(thread | kWarp, first + g) = {of_odd[0], of_odd[1], of_odd[2], of_odd[3]};
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) keep(words[4 * g + i] = is_odd ? of_odd[i] : of_even[i]);
        }
      }
      if constexpr (At::kExchanges) {
        sync_named(kWordsReady + (int)thread / (2 * kWarp), 2 * kWarp);
#pragma unroll
        for (int g = 0; g < kOwn / 16; ++g) *(uint4*)&words[4 * g] = *words_of(thread, g);
      }
    }
  }

  // The words of a thread for 16 queries, in the buffer by which two warps exchange them.
  __device__ __forceinline__ uint4* words_of(uint32_t of_thread, int group) const {
    return (uint4*)(shared + At::kWords) + group * kConsumers + of_thread;
  }

  // Bring the scores of a general kernel to natural units.
  __device__ __forceinline__ void scale_scores() {
    if constexpr (kIsGeneral) {
#pragma unroll
      for (int i = 0; i < kOwn / 2; ++i) S[i] *= p.scale;
    }
  }

  // Set hidden scores to -inf, after adding the mask.
  __device__ __forceinline__ void mask(const Tile& tile, int head, int m) {
    scale_scores();
    const Visibility<int>& visibility = tile.sequence.visibility;
    const int first = m * kQueries + own_query();
    const int64_t size = size_of(p.mask.dtype), step = p.mask.row * size;
    int begin[2], end[2];
    const char* values[2];  // the mask's columns, from the query `first` on
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = tile.first + in_tile() + 8 * r;
      begin[r] = visibility.first_query(key) - first;
      end[r] = key < visibility.length ? min(visibility.last_query(key) + 1, tile.sequence.seqlen_q) - first : 0;
      values[r] = (const char*)p.mask.data + mask_offset(p.mask, tile.batch, head, first, key) * size;
    }
    hide_scores<kIsGeneral>(S, begin, end, p.mask, values, step);
  }

  // A pair of the values of the columns i / 4 * 8 + lane() % 4 * 2 and the next one.
  __device__ __forceinline__ float2 row_values(int which, int i) const {
    const uint8_t* const rows = shared + At::kRows + stage.index * At::kRowTile;
    return *(const float2*)(rows + (which * kQueries + i / 4 * 8 + own_query()) * 4);
  }

  // Replace the scores by the weights P, before dropout.
  __device__ __forceinline__ void weigh() {
#pragma unroll
    for (int i = 0; i < kOwn / 2; i += 4) {
      const float2 shift = row_values(0, i);
      const float2 factor = kIsGeneral ? row_values(2, i) : float2{1.0f, 1.0f};
#pragma unroll
      for (int k = i; k < i + 4; ++k) {
        const float of_row = k % 2 ? shift.y : shift.x;
        if constexpr (kIsGeneral)
          S[k] = exp2_fast((S[k] - of_row) * kLog2e) * (k % 2 ? factor.y : factor.x);
        else
          S[k] = exp2_fast(fmaf(S[k], unit, -of_row));
      }
    }
  }

  // Replace X by the gradients of the scores, and S by the weights that dropout keeps. Both lack dropout's scale.
  template <bool kPartial>
  __device__ __forceinline__ void differentiate_scores() {
    // A value is kept if it is at least the threshold, from 1 to 65536: as the upper half of a word above this bound.
    const uint32_t bound = ((uint32_t)p.threshold << 16) - 1;
#pragma unroll
    for (int i = 0; i < kOwn / 2; i += 4) {
      const float2 delta = row_values(1, i);
#pragma unroll
      for (int k = i; k < i + 4; ++k) {
        const float weight = S[k];
        if constexpr (kDraws) {
          const uint32_t word = words[4 * (k / 8) + 2 * (k % 2) + k / 4 % 2];
          const bool is_kept = (kIsGeneral && p.threshold == 0) || (k / 2 % 2 ? word : word << 16) > bound;
          S[k] = is_kept ? weight : 0.0f;
        }
        X[k] = fmaf(S[k], X[k], -weight * (k % 2 ? delta.y : delta.x));
        if (kPartial && weight == 0) X[k] = 0.0f;  // A hidden value may be NaN.
      }
    }
  }

  __device__ __forceinline__ void round_scores() {
#pragma unroll
    for (int i = 0; i < kOwn / 4; ++i) {
      P[i] = pack(S[2 * i], S[2 * i + 1], T());
      dS[i] = pack(X[2 * i], X[2 * i + 1], T());
    }
  }

  // Store the rounded X, and in a wide kernel S, as rows of keys.
  __device__ __forceinline__ void share_scores() {
    const int row = in_tile() - lane() / 4 + lane() % 16, first = (kIsWide ? w * (kOwn / 8) : 0) + lane() / 16;
    const uint32_t to = base + buffer * At::kScoreTile + row * 128;
#pragma unroll
    for (int c = 0; c < kOwn / 16; ++c) {
      const uint32_t chunk = (uint32_t)((first + 2 * c) ^ (row & 7)) << 4;
      store_matrices(to + At::kScores + chunk, &dS[4 * c]);
      if constexpr (kIsWide) store_matrices(to + At::kWeights + chunk, &P[4 * c]);
    }
  }

  // Set keys and values that no query sees to 0: they may be NaN, and 0 * NaN is NaN.
  __device__ __forceinline__ void clear_keys(const Tile& tile) {
    const Visibility<int>& visibility = tile.sequence.visibility;
    const int begin = visibility.begin(0), end = visibility.end(tile.sequence.seqlen_q - 1);
    const bool has_mask = kIsGeneral && p.mask.data;
    if (!has_mask && begin <= tile.first && tile.first + kKeys <= end) return;
    const int t = (int)thread, key = tile.first + t % kKeys;
    bool is_seen = begin <= key && key < end;
    if (has_mask && is_seen) is_seen = is_seen_through_mask(tile, key);
    if (!is_seen) {
      clear_row(At::kKey, kKeys, t);
      clear_row(At::kValue, kKeys, t);
    }
    fence_async();
    sync_named(kCleared, kConsumers);
  }

  // Whether the mask shows a key to some query of the group's heads.
  __device__ __forceinline__ bool is_seen_through_mask(const Tile& tile, int key) {
    const MaskTiles& tiles = p.mask_tiles;
    const int count = tiles.heads == 1 ? 1 : p.group;
#pragma unroll 1
    for (int head = tile.kv_head * p.group; head < tile.kv_head * p.group + count; ++head)
#pragma unroll 1
      for (int m = 0; m < tiles.mask_q; ++m)
        if (tiles.seen_keys(tile.batch, head, m)[key]) return true;
    return false;
  }

  // Set a part of row `thread % rows` of a buffer to 0. Threads of the same row have a part each.
  __device__ __forceinline__ void clear_row(int buffer_at, int rows, int thread) {
    constexpr int kChunks = At::kRowBytes / 16;
    for (int c = thread / rows; c < D / 8; c += kConsumers / rows)
      *(uint4*)(shared + buffer_at + (c / kChunks * rows + thread % rows) * At::kRowBytes + c % kChunks * 16) = {0, 0,
                                                                                                                 0, 0};
  }

  // Set the queries and gradients of rows that see nothing, also those beyond the sequence, to 0: they may be NaN.
  __device__ __forceinline__ void clear_rows(const Tile& tile, int m) {
    const Visibility<int>& visibility = tile.sequence.visibility;
    const int first = m * kQueries, last = first + kQueries - 1;
    const auto is_empty = [&](int row) { return visibility.begin(row) >= visibility.end(row); };
    const bool has_mask = kIsGeneral && p.mask.data;
    if (!has_mask && last < tile.sequence.seqlen_q && !is_empty(first) && !is_empty(last)) return;
    wait(base + At::kGradFull + 8 * stage.index, stage.parity);
    const int t = (int)thread;
    const float shift = *(const float*)(shared + At::kRows + stage.index * At::kRowTile + t % kQueries * 4);
    if (shift == INFINITY) {
      clear_row(At::kQuery + stage.index * At::kTile, kQueries, t);
      clear_row(At::kGrad + stage.index * At::kTile, kQueries, t);
    }
    fence_async();
    sync_named(kCleared, kConsumers);
  }
};

// Store the gradients of a consumer's keys and values.
template <class At>
__device__ __forceinline__ void store_gradients(const Consumer<At>& c, const Tile& tile) {
  using T = typename At::T;
  constexpr int kColumns = Consumer<At>::kOwnColumns;
  const Problem& p = c.p;
  const int first = At::kIsWide ? c.w * kColumns : 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = tile.first + c.in_tile() + 8 * r;
    const auto store = [&](const Heads& to, int columns, const float* sums, float scale) {
      const int64_t at = row_offset(to, p.cu_seq_q ? 0 : tile.batch, tile.kv_head, tile.sequence.first_key + key);
      store_row<kColumns>((T*)to.data + at + first, columns - first, key < tile.sequence.seqlen_k, r,
                          [&](int i) { return sums[i] * scale * p.fold; });  // scale * fold may be infinite.
    };
    store(p.grad_key, p.head_dim, c.dK, p.scale);
    store(p.grad_value, p.value_head_dim, c.dV, 1.0f);
  }
}

// Return the problem for a shape, with its buffers in the workspace, and their size in floats.
template <class At>
std::pair<Problem, int64_t> problem_of(const AttentionBackward& a, float* workspace) {
  Problem p;
  (AttentionBackward&)p = a;
  p.columns = At::D, p.upper = At::kUpper, p.keys = At::kKeys;
  p.is_general = At::kKind == Kind::general;
  p.fold = a.threshold < kDropoutLevels ? dropout_scale(a.threshold) : 1.0f;
  const int64_t floats = p.set(workspace);
  return {p, floats};
}

template <class At>
void launch_shape(const AttentionBackward& a, float* workspace, cudaStream_t stream) {
  const Problem p = problem_of<At>(a, workspace).first;
  const int64_t blocks = a.batch * a.num_kv_heads * p.tiles_k;
  if (max(blocks, max(p.places, a.batch * p.tiles_q) * a.num_heads) > INT32_MAX)
    throw std::runtime_error("fastattn: more than 2**31 - 1 tiles of queries or keys");
  if (p.mask.data) list_mask_tiles(a, p.mask_tiles, stream);
  prepare_rows(p, stream);
  const int64_t batch = a.cu_seq_q ? 1 : a.batch;
  const auto map = [&](const Heads& operand, int columns, int64_t rows, int64_t num_heads, int box_rows) {
    return map_of(operand, {At::kColumns, box_rows}, At::kSwizzle, columns, rows, num_heads, batch, a.key.data);
  };
  if (blocks > 0)
    launch(differentiate<At>, dim3((unsigned)blocks), At::kThreads, At::kBytes + kSharedAlignment, stream,
           map(a.query, a.head_dim, a.rows_q, a.num_heads, kQueries),
           map(a.key, a.head_dim, a.rows_k, a.num_kv_heads, At::kKeys),
           map(a.value, a.value_head_dim, a.rows_k, a.num_kv_heads, At::kKeys),
           map(a.grad_out, a.value_head_dim, a.rows_q, a.num_heads, kQueries), p);
  finish_query_gradient(p, stream);
}

}  // namespace

bool is_for_hopper(const AttentionBackward& a) {
  return is_for_hopper((const Attention&)a) && !a.grad_mask &&
         is_addressed(a.grad_out, a.value_head_dim, a.rows_q, a.num_heads, a.cu_seq_q ? 1 : a.batch);
}

int64_t hopper_workspace(const AttentionBackward& a) {
  return with_shape<Shape>(a, [&](auto at) { return problem_of<decltype(at)>(a, nullptr).second; });
}

void run_hopper(const AttentionBackward& a, float* workspace, cudaStream_t stream) {
  with_shape<Shape>(a, [&](auto at) { launch_shape<decltype(at)>(a, workspace, stream); });
}

}  // namespace fastattn::cuda
