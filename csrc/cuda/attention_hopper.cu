// Attention forward for Hopper (sm_90a), in bfloat16 and float16, with the schedule of FlashAttention 3 (Shah,
// Bikshandi, Zhang, Thakkar, Ramani and Dao 2024).
//
//   attend_hopper, for each block of threads: tiles of M = 64 kGroups queries of a head; for each of them:
//     the producer, one thread: load Q; for each visible tile of N = kKeys keys, partial ones first: load K, load V;
//     each consumer warpgroup, which takes turns with the others, with its 64 queries: for each tile of keys:
//       S (64, N) = Q K';  O (64, D) += P V of the tile before;  draw dropout's words;
//       P (64, N) = keep exp(S - row_max);  O = rescale O;
//     store O, the statistics and the residual.
//
// query (B, Hq, Lq, E), key (B, Hk, Lk, E), value (B, Hk, Lk, Ev) and out (B, Hq, Lq, Ev) have dtype T; packed ones are
// (tokens, H, E). In shared memory E and Ev are padded to D columns by zeros. LSE, row_max and row_sum are (B, Hq, Lq)
// or (tokens, Hq), float32. S, O and all sums are float32; P is rounded to T for its product.
#include <math.h>

#include <utility>

#include "hopper_attention.h"
#include "kernels.h"
#include "launch.h"
#include "mask_tiles.h"
#include "mma.h"

namespace fastattn::cuda {
namespace {

// A kernel's tile, and the offsets in bytes of its buffers in shared memory.
template <class Element, int kHeadDim, Kind kCode>
struct Shape {
  using T = Element;
  static constexpr int D = kHeadDim;
  static constexpr Kind kKind = kCode;
  static constexpr int kGroups = D == 64 && kKind != Kind::general ? 3 : 2;  // consumer warpgroups
  static constexpr int kRows = 64 * kGroups;
  // Registers bound the keys of a tile.
  static constexpr int kKeys = kKind == Kind::general              ? 8192 / D
                               : D == 64 && kKind == Kind::dropout ? 96
                               : D <= 128                          ? 128
                               : D == 192                          ? 96
                                                                   : 64;
  static constexpr int kStages = D <= 96 ? 3 : 2;
  static constexpr int kThreads = kWarpgroup * (kGroups + 1);
  static constexpr int kProducerRegisters = kGroups == 2 ? 24 : 32, kConsumerRegisters = kGroups == 2 ? 240 : 160;

  // Groups of kColumns columns of a buffer are rows of kRowBytes.
  static constexpr int kColumns = D % 64 == 0 ? 64 : 32, kRowBytes = 2 * kColumns;
  static constexpr Swizzle kSwizzle = kColumns == 64 ? Swizzle::bytes128 : Swizzle::bytes64;
  static constexpr int kTile = kKeys * D * 2;
  static constexpr int kQuery = 0, kKey = kQuery + kRows * D * 2, kValue = kKey + kStages * kTile,
                       kBarriers = kValue + kStages * kTile;
  // Barriers. A full one counts bytes, an empty one the warps that have read.
  static constexpr int kQueryFull = kBarriers, kQueryEmpty = kBarriers + 8, kKeyFull = kBarriers + 16,
                       kValueFull = kKeyFull + 8 * kStages, kKeyEmpty = kValueFull + 8 * kStages,
                       kValueEmpty = kKeyEmpty + 8 * kStages, kBytes = kValueEmpty + 8 * kStages;
};

struct Problem : Attention {
  MaskTiles mask_tiles;  // with a mask
  int tiles;             // of queries, per head
  int section;           // Number of heads whose keys and values fit into the L2 cache. Their tiles are neighbours.
  int total;             // tiles of queries of all heads
};

// A tile of queries, and the tiles of keys that it visits.
struct Tile {
  int batch, head, number;
  int first_query, first_key;  // rows of its sequence within packed operands, else 0
  int seqlen_q;
  Visibility<int> visibility;
  int first;           // its first query
  int count, partial;  // tiles of keys; partial ones, which come first
  int full_begin, full_end, end;
  const int* list;  // with a mask

  // Return the number of the n-th tile of keys.
  __device__ __forceinline__ int keys(int n) const {
    if (list) return list[n];
    if (n >= partial) return full_end - 1 - (n - partial);
    return n < end - full_end ? end - 1 - n : full_begin - 1 - (n - (end - full_end));
  }
};

template <class At>
__device__ __forceinline__ Tile tile_at(const Problem& p, int index);

template <class At>
struct Producer;

template <class At>
struct Consumer;

template <class At>
__device__ __forceinline__ void store_results(const Consumer<At>& c, const Tile& tile);

template <class At>
__device__ __forceinline__ void store_statistics(const Problem& p, const Tile& tile, int row, float shift, float sum);

template <class At>
__global__ void __launch_bounds__(At::kThreads, 1)
    attend_hopper(const __grid_constant__ CUtensorMap query, const __grid_constant__ CUtensorMap key,
                  const __grid_constant__ CUtensorMap value, const __grid_constant__ Problem p) {
  uint8_t* const shared = dynamic_shared();
  const uint32_t base = shared_address(shared);
  if (threadIdx.x == 0) {
    init_barrier(base + At::kQueryFull, 1);
    init_barrier(base + At::kQueryEmpty, 4 * At::kGroups);
    for (int i = 0; i < At::kStages; ++i) {
      init_barrier(base + At::kKeyFull + 8 * i, 1);
      init_barrier(base + At::kValueFull + 8 * i, 1);
      init_barrier(base + At::kKeyEmpty + 8 * i, 4 * At::kGroups);
      init_barrier(base + At::kValueEmpty + 8 * i, 4 * At::kGroups);
    }
    fence_barriers();
  }
  __syncthreads();

  // Call use(tile) for the block's tiles. Every other round goes backwards, so that all blocks get about equal work.
  const auto each_tile = [&](auto& use) {
    for (int round = 0, first = 0; first < p.total; ++round, first += (int)gridDim.x) {
      const int index = first + (int)(round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
      if (index >= p.total) return;
      const Tile tile = tile_at<At>(p, index);
      if (tile.first < tile.seqlen_q) use(tile);
    }
  };
  const int group = __shfl_sync(kAllLanes, (int)threadIdx.x / kWarpgroup, 0);
  if (group == 0) {
    give_registers<At::kProducerRegisters>();
    if (threadIdx.x != 0) return;
    Producer<At> producer = {query, key, value, p, base};
    each_tile(producer);
  } else {
    take_registers<At::kConsumerRegisters>();
    Consumer<At> consumer(p, shared, base, group - 1);
    each_tile(consumer);
  }
}

// Return a tile by its index. Within a section the last queries come first, because under a causal mask they take
// longest.
template <class At>
__device__ __forceinline__ Tile tile_at(const Problem& p, int index) {
  const int heads = (int)(p.batch * p.num_heads), size = p.section * p.tiles, begin = index / size * p.section;
  const int in_section = min(p.section, heads - begin), z = begin + index % size % in_section;
  const int number = p.tiles - 1 - index % size / in_section, first = number * At::kRows;
  const int batch = z / (int)p.num_heads, head = z % (int)p.num_heads;

  const Sequence s(p, batch);
  const Interval seen(s.visibility, first, min(first + At::kRows, s.seqlen_q) - 1, At::kKeys);
  int count = seen.end - seen.begin, partial = count - (seen.full_end - seen.full_begin);
  const int* list = nullptr;
  if (At::kKind == Kind::general && p.mask.data && first < s.seqlen_q) {
    list = p.mask_tiles.list(batch, head, number);
    partial = list[0], count = list[1], list += 2;
  }
  return {batch, head,  number,  s.first_query,   s.first_key,   s.seqlen_q, s.visibility,
          first, count, partial, seen.full_begin, seen.full_end, seen.end,   list};
}

// The thread that loads.
template <class At>
struct Producer {
  const CUtensorMap &query, &key, &value;
  const Problem& p;
  uint32_t base;
  Stage<At::kStages> stage = {};
  uint32_t turn = 0;

  __device__ __forceinline__ void operator()(const Tile& tile) {
    if (tile.count == 0) return;
    const int batch = p.cu_seq_q ? 0 : tile.batch, kv_head = tile.head / (int)(p.num_heads / p.num_kv_heads);
    // Load a tile, the only one of a phase.
    const auto load = [&](int to, const CUtensorMap& map, int full, int rows, int first, int head) {
      arrive_expecting(base + full, rows * At::D * 2);
      load_columns<At::D, At::kColumns>(base + to, map, base + full, rows, first, head, batch);
    };
    wait(base + At::kQueryEmpty, turn ^ 1);
    turn ^= 1;
    load(At::kQuery, query, At::kQueryFull, At::kRows, tile.first_query + tile.first, tile.head);
    for (int n = 0; n < tile.count; ++n, stage.advance()) {
      const int offset = stage.index * At::kTile, number = 8 * stage.index;
      const int first = tile.first_key + tile.keys(n) * At::kKeys;
      wait(base + At::kKeyEmpty + number, stage.parity ^ 1);
      load(At::kKey + offset, key, At::kKeyFull + number, At::kKeys, first, kv_head);
      wait(base + At::kValueEmpty + number, stage.parity ^ 1);
      load(At::kValue + offset, value, At::kValueFull + number, At::kKeys, first, kv_head);
    }
  }
};

// A thread of a consumer warpgroup. It has rows lane / 4 + 8 r of its warp's 16 queries, r < 2, and of each 8 columns
// 2 (lane % 4) and the next one: S[i] and O[i] are of row r = i / 2 % 2, column i / 4 * 8 + lane % 4 * 2 + i % 2.
template <class At>
struct Consumer {
  using T = typename At::T;
  static constexpr int D = At::D, kKeys = At::kKeys, kGroups = At::kGroups;
  static constexpr bool kIsGeneral = At::kKind == Kind::general, kDraws = At::kKind != Kind::plain;
  static constexpr int kTurn = 1, kCleared = kTurn + kGroups;  // named barriers

  const Problem& p;
  uint8_t* const shared;
  const uint32_t base;
  const int w, lane, in_tile;  // warpgroup; lane; first of its rows in the tile
  const float unit;            // Factor from scores in S to exponents of 2; for plain and dropout.
  Stage<At::kStages> stage;
  uint32_t turn = 0;  // parity of the queries' barrier
  RoundKeys round_keys;

  float S[kKeys / 2], O[D / 2];
  uint32_t P[kKeys / 4], words[kDraws ? kKeys / 4 : 1];
  // By row: minus the maximum, in exponents of 2 (natural ones if general), infinite before the row has seen a key; the
  // factor for earlier sums; the sums of the weights, and of the weights that dropout keeps.
  float shift[2], factor[2], row_sum[2], kept_sum[2];
  float rounded_sum[4];  // Sums of the rounded weights, a product with ones: of row r at 2 r.

  __device__ __forceinline__ Consumer(const Problem& p, uint8_t* shared, uint32_t base, int w)
      : p(p),
        shared(shared),
        base(base),
        w(w),
        lane((int)threadIdx.x % 32),
        in_tile(w * 64 + (int)threadIdx.x % kWarpgroup / 32 * 16 + lane / 4),
        unit(p.scale * kLog2e) {
    if (kDraws && p.threshold) round_keys.set(make_seed(p.seed));
    if (w == 0) arrive_named(kTurn, 2 * kWarpgroup);
  }

  __device__ __forceinline__ void operator()(const Tile& tile) {
#pragma unroll
    for (int i = 0; i < D / 2; ++i) O[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) shift[r] = INFINITY, row_sum[r] = kept_sum[r] = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) rounded_sum[i] = 0.0f;
    if (tile.count > 0) attend(tile);
    store_results(*this, tile);
  }

  __device__ __forceinline__ void attend(const Tile& tile) {
    wait(base + At::kQueryFull, turn);
    turn ^= 1;
    int n = 0, number = tile.keys(n);
    wait(base + At::kKeyFull + 8 * stage.index, stage.parity);
    my_turn();
    fence_products(S);
    start_scores(stage.index);
    next_turn();
    draw(tile, number);
    wait_products<0>(S);
    release(At::kKeyEmpty + 8 * stage.index);
    mask(tile, number);
    softmax();
    pack_weights();
    clear_values(tile, number);
#pragma unroll 1
    for (++n; n < tile.partial; ++n) step<true>(tile, tile.keys(n));
#pragma unroll 1
    for (; n < tile.count; ++n) step<false>(tile, tile.keys(n));
    release(At::kQueryEmpty);
    wait(base + At::kValueFull + 8 * stage.index, stage.parity);
    fence_products(O, P);
    start_output(stage.index);
    wait_products<0>(O);
    release(At::kValueEmpty + 8 * stage.index);
    stage.advance();
  }

  // Take in another tile of keys, and add the one before to O.
  template <bool kPartial>
  __device__ __forceinline__ void step(const Tile& tile, int number) {
    const Stage<At::kStages> before = stage;
    stage.advance();
    wait(base + At::kKeyFull + 8 * stage.index, stage.parity);
    my_turn();
    fence_products(S);
    start_scores(stage.index);
    wait(base + At::kValueFull + 8 * before.index, before.parity);
    fence_products(O, P);
    start_output(before.index);
    next_turn();
    draw(tile, number);
    wait_products<1>(S);
    release(At::kKeyEmpty + 8 * stage.index);
    if constexpr (kPartial)
      mask(tile, number);
    else
      scale_scores();
    softmax();
    wait_products<0>(O);
    release(At::kValueEmpty + 8 * before.index);
#pragma unroll
    for (int i = 0; i < D / 2; ++i) O[i] *= factor[i / 2 % 2];
#pragma unroll
    for (int i = 0; i < 4; ++i) rounded_sum[i] *= factor[i / 2];
    pack_weights();
    if constexpr (kPartial) clear_values(tile, number);
  }

  __device__ __forceinline__ void my_turn() { sync_named(kTurn + w, 2 * kWarpgroup); }
  __device__ __forceinline__ void next_turn() { arrive_named(kTurn + (w + 1) % kGroups, 2 * kWarpgroup); }

  __device__ __forceinline__ void release(int barrier) {
    if (lane == 0) arrive(base + (uint32_t)barrier);
  }

  // Start S = Q K'.
  __device__ __forceinline__ void start_scores(int at) {
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      constexpr int kSteps = At::kColumns / 16;
      const int column = k / kSteps, depth = k % kSteps * 32;
      const uint32_t q = base + At::kQuery + (column * At::kRows + w * 64) * At::kRowBytes + depth;
      const uint32_t key = base + At::kKey + at * At::kTile + column * kKeys * At::kRowBytes + depth;
      multiply<T, Major::depth, Major::depth>(S, descriptor(q, 16, 8 * At::kRowBytes, At::kSwizzle),
                                              descriptor(key, 16, 8 * At::kRowBytes, At::kSwizzle), k != 0);
    }
    commit_products();
  }

  // Start O += P V.
  __device__ __forceinline__ void start_output(int at) {
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      const uint32_t value = base + At::kValue + at * At::kTile + k * 16 * At::kRowBytes;
      multiply<T, Major::outer>(O, &P[4 * k], descriptor(value, kKeys * At::kRowBytes, 8 * At::kRowBytes, At::kSwizzle),
                                true);
    }
    commit_products();
  }

  // Draw dropout's words for a tile of keys: those of columns 8 c + 2 (lane % 4) + e, c / 4 = g, e < 2.
  __device__ __forceinline__ void draw(const Tile& tile, int number) {
    if constexpr (kDraws) {
      if (kIsGeneral && p.threshold == 0) return;
      const int row = tile.first + in_tile;
#pragma unroll
      for (int g = 0; g < kKeys / 32; ++g)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          uint32_t four[4] = {(uint32_t)(number * (kKeys / 4) + g * 8 + lane % 4 * 2 + e),
                              (uint32_t)(row / 16 * 8 + row % 8), (uint32_t)(tile.batch * (int)p.num_heads + tile.head),
                              round_keys.offset};
          round_keys.draw(four);
#pragma unroll
          for (int i = 0; i < 4; ++i) keep(words[8 * g + 4 * e + i] = four[i]);
        }
    }
  }

  // Bring the scores of a general kernel to natural units.
  __device__ __forceinline__ void scale_scores() {
    if constexpr (kIsGeneral) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) S[i] *= p.scale;
    }
  }

  // Set hidden scores to -inf, after adding the mask.
  __device__ __forceinline__ void mask(const Tile& tile, int number) {
    scale_scores();
    const int first = number * kKeys + lane % 4 * 2;
    const int64_t size = size_of(p.mask.dtype), step = p.mask.column * size;
    int begin[2], end[2];
    const char* values[2];  // the mask's rows, from the key `first` on
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = tile.first + in_tile + 8 * r;
      begin[r] = tile.visibility.begin(row) - first;
      end[r] = row < tile.seqlen_q ? tile.visibility.end(row) - first : 0;
      values[r] = (const char*)p.mask.data + mask_offset(p.mask, tile.batch, tile.head, row, first) * size;
    }
    hide_scores<kIsGeneral>(S, begin, end, p.mask, values, step);
  }

  // Replace the scores by the weights, which are relative to the row's new maximum.
  __device__ __forceinline__ void softmax() {
    const float scale = kIsGeneral ? 1.0f : unit;
    float used[2], sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = -INFINITY;
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i) most = fmaxf(most, S[i / 2 * 4 + 2 * r + i % 2]);
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 2));
      const float raised = fminf(shift[r], -most * scale);
      used[r] = raised == INFINITY ? 0.0f : raised;  // The row has seen no key so far.
      factor[r] = exponential(used[r] - shift[r]);
      shift[r] = raised;
    }
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      const int r = i / 2 % 2;
      S[i] = kIsGeneral ? exponential(S[i] + used[r]) : exponential(fmaf(S[i], scale, used[r]));
      sum[r] += S[i];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) row_sum[r] = fmaf(row_sum[r], factor[r], sum[r]);
    if constexpr (kDraws) {
      if (!kIsGeneral || p.threshold) drop();
    }
  }

  __device__ __forceinline__ float exponential(float x) const { return exp2_fast(kIsGeneral ? x * kLog2e : x); }

  // Set the weights that dropout does not keep to 0.
  __device__ __forceinline__ void drop() {
    // A value is kept if it is at least the threshold, from 1 to 65536: as the upper half of a word above this bound.
    const uint32_t bound = ((uint32_t)p.threshold << 16) - 1;
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      const int r = i / 2 % 2, v = 4 * r + i / 4 % 4;
      const uint32_t word = words[8 * (i / 16) + 4 * (i % 2) + v / 2];
      S[i] = (v % 2 ? word : word << 16) > bound ? S[i] : 0.0f;
      sum[r] += S[i];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) kept_sum[r] = fmaf(kept_sum[r], factor[r], sum[r]);
  }

  // Round the weights for their product with the values, and add up what they have become.
  __device__ __forceinline__ void pack_weights() {
    const uint32_t one = pack(1.0f, 1.0f, T());
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
      for (int i = 4 * k; i < 4 * k + 4; ++i) P[i] = pack(S[2 * i], S[2 * i + 1], T());
      mma_16x8x16(rounded_sum, uint4{P[4 * k], P[4 * k + 1], P[4 * k + 2], P[4 * k + 3]}, one, one, T());
    }
  }

  // Wait for the values of a partial tile, and set those of keys to 0 that no query of the sequence sees, or none of
  // these by a mask: they may be NaN, and 0 * NaN is NaN. All consumers meet here, so none may have the turn.
  __device__ __forceinline__ void clear_values(const Tile& tile, int number) {
    const int first = number * kKeys, begin = tile.visibility.begin(0), end = tile.visibility.end(tile.seqlen_q - 1);
    const uint8_t* seen = nullptr;
    if (kIsGeneral && p.mask.data) seen = p.mask_tiles.seen_keys(tile.batch, tile.head, tile.number);
    if (!seen && begin <= first && first + kKeys <= end) return;
    constexpr int kChunks = At::kRowBytes / 16;  // per row
    uint8_t* const values = shared + At::kValue + stage.index * At::kTile;
    wait(base + At::kValueFull + 8 * stage.index, stage.parity);
    for (int i = (int)threadIdx.x - kWarpgroup; i < kKeys * D / 8; i += kGroups * kWarpgroup) {
      const int key = first + i / kChunks % kKeys;
      if (key < begin || key >= end || (seen && !seen[key])) *(uint4*)(values + i * 16) = uint4{0, 0, 0, 0};
    }
    fence_async();
    sync_named(kCleared, kGroups * kWarpgroup);
  }
};

// Add x over the four lanes that have a row's columns.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

// Store the results of a consumer's rows.
template <class At>
__device__ __forceinline__ void store_results(const Consumer<At>& c, const Tile& tile) {
  using T = typename At::T;
  const Problem& p = c.p;
  const bool drops = At::kKind != Kind::plain && p.threshold > 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = tile.first + c.in_tile + 8 * r;
    const bool is_inside = row < tile.seqlen_q;
    const float sum = quad_sum(c.row_sum[r]), kept = drops ? quad_sum(c.kept_sum[r]) : sum;
    // The sum of the rounded weights divides, so that a constant that all values share passes exactly.
    const float rounded = c.rounded_sum[2 * r], ratio = kept / (rounded == 0 ? 1.0f : rounded);
    const float by = sum == 0 ? 0.0f : (drops ? dropout_scale(p.threshold) : 1.0f) / sum * ratio;
    const auto result = [&](int i) { return sum == 0 ? 0.0f : c.O[i] * by; };
    const auto residual = [&](int i) {
      const float x = result(i), rest = x - to_float(from_float<T>(x));
      return fabsf(rest) < INFINITY ? rest : 0.0f;
    };
    const auto store = [&](const Heads& to, const auto& values) {
      T* const out = (T*)to.data + row_offset(to, p.cu_seq_q ? 0 : tile.batch, tile.head, tile.first_query + row);
      store_row<At::D>(out, p.value_head_dim, is_inside, r, values);
    };
    store(p.out, result);
    if (p.residual.data) store(p.residual, residual);
    if (is_inside && c.lane % 4 == 0) store_statistics<At>(p, tile, row, c.shift[r], sum);
  }
}

// Store a row's statistics in natural units, from minus its maximum and the sum of its weights.
template <class At>
__device__ __forceinline__ void store_statistics(const Problem& p, const Tile& tile, int row, float shift, float sum) {
  constexpr float kLn2 = 0.6931471805599453f;
  const int64_t place = tile.first_query + row, z = tile.batch * p.num_heads + tile.head;
  const int64_t at = p.cu_seq_q ? place * p.num_heads + tile.head : z * p.seqlen_q + row;
  const float highest = shift == INFINITY ? 0.0f : -shift;
  const float row_max = At::kKind == Kind::general ? highest : highest * kLn2;
  // The change of units rounds the maximum, so the sum is corrected by the same amount.
  if (At::kKind != Kind::general) sum *= exp2f(highest - row_max * kLog2e);
  if (p.row_max) p.row_max[at] = row_max, p.row_sum[at] = sum;
  if (p.lse) p.lse[at] = sum == 0 ? -INFINITY : row_max + logf(sum);
}

constexpr int64_t kSectionBytes = 32 << 20;  // of keys and values, of an H100's 50 MiB of L2 cache

template <class At>
void launch_shape(const Attention& a, void* workspace, int blocks, cudaStream_t stream) {
  Problem p;
  (Attention&)p = a;
  const int64_t heads = a.batch * a.num_heads, group = a.num_heads / a.num_kv_heads;
  const int64_t head_bytes = a.seqlen_k * (a.head_dim + a.value_head_dim) * 2 / group;
  p.tiles = (int)ceil_div(a.seqlen_q, At::kRows);
  p.section = (int)max(min(kSectionBytes / max(head_bytes, 1), heads), 1);
  if (heads * p.tiles > INT32_MAX / 2) throw std::runtime_error("fastattn: more than 2**30 tiles of queries");
  p.total = (int)(heads * p.tiles);
  p.mask_tiles = {};
  if (a.mask.data) {
    p.mask_tiles.set(a, At::kRows, At::kKeys, false, workspace);
    list_mask_tiles(a, p.mask_tiles, stream);
  }
  const bool is_packed = a.cu_seq_q != nullptr;
  const int64_t batch = is_packed ? 1 : a.batch;
  const auto map = [&](const Heads& operand, int columns, int64_t rows, int64_t num_heads, int box_rows) {
    return map_of(operand, {At::kColumns, box_rows}, At::kSwizzle, columns, rows, num_heads, batch, a.query.data);
  };
  launch(attend_hopper<At>, dim3((unsigned)min(p.total, blocks)), At::kThreads, At::kBytes + kSharedAlignment, stream,
         map(a.query, a.head_dim, a.rows_q, a.num_heads, At::kRows),
         map(a.key, a.head_dim, a.rows_k, a.num_kv_heads, At::kKeys),
         map(a.value, a.value_head_dim, a.rows_k, a.num_kv_heads, At::kKeys), p);
}

}  // namespace

bool is_for_hopper(const Attention& a) {
  const int64_t batch = a.cu_seq_q ? 1 : a.batch;
  return (a.dtype == Dtype::bfloat16 || a.dtype == Dtype::float16) && max(a.head_dim, a.value_head_dim) <= 256 &&
         max(a.rows_q, a.rows_k) <= INT32_MAX && is_addressed(a.query, a.head_dim, a.rows_q, a.num_heads, batch) &&
         is_addressed(a.key, a.head_dim, a.rows_k, a.num_kv_heads, batch) &&
         is_addressed(a.value, a.value_head_dim, a.rows_k, a.num_kv_heads, batch);
}

int64_t hopper_workspace(const Attention& a) {
  if (!a.mask.data) return 0;
  return with_shape<Shape>(a, [&](auto at) {
    MaskTiles tiles;
    return ceil_div(tiles.set(a, decltype(at)::kRows, decltype(at)::kKeys, false, nullptr), (int64_t)sizeof(float));
  });
}

void run_hopper(const Attention& a, float* workspace, int blocks, cudaStream_t stream) {
  with_shape<Shape>(a, [&](auto at) { launch_shape<decltype(at)>(a, workspace, blocks, stream); });
}

}  // namespace fastattn::cuda
