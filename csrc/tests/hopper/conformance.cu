// Small kernels, each of which shows a fact about Hopper's instructions: where they read and write, and what they wait
// for. tests/hopper.py runs them in the emulation and on a GPU, and compares the results with one file.
//
// Kernels run in one block of threads, except the ordered sums and the products of warps. Results are 32-bit words.
#include "../../cuda/hopper.h"
#include "../../cuda/launch.h"
#include "../../cuda/mma.h"
#include "start.h"

namespace fastattn::cuda {
namespace {

constexpr int kImage = 96 << 10;  // bytes of shared memory that a test fills

__device__ void copy_words(uint32_t* to, const uint32_t* from, int count) {
  for (int i = (int)threadIdx.x; i < count; i += (int)blockDim.x) to[i] = from[i];
}

// Start one product from an image of shared memory, or of A from `words` (thread, register). Store the sums (thread,
// register). The descriptors count from the image's beginning.
template <class T, int N, bool kFromRegisters, Major A, Major B>
__global__ void __launch_bounds__(kWarpgroup)
    product_kernel(const uint32_t* image, const uint32_t* words, uint64_t a, uint64_t b, float* out) {
  uint8_t* const shared = dynamic_shared();
  const uint64_t start = descriptor(shared_address(shared), 0, 0, Swizzle::none);
  copy_words((uint32_t*)shared, image, kImage / 4);
  fence_async();
  __syncthreads();
  float sums[N / 2];
  uint32_t of_a[4];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) sums[i] = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) of_a[i] = words[threadIdx.x * 4 + i];
  fence_products(sums, of_a);
  if constexpr (kFromRegisters)
    multiply<T, B>(sums, of_a, b + start, false);
  else
    multiply<T, A, B>(sums, a + start, b + start, false);
  commit_products();
  wait_products<0>(sums);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) out[threadIdx.x * (N / 2) + i] = sums[i];
}

template <int N>
void start_product(int form, const uint32_t* image, const uint32_t* words, uint64_t a, uint64_t b, float* out,
                   cudaStream_t stream) {
  constexpr Major kDepth = Major::depth, kOuter = Major::outer;
  void (*const kernels[])(const uint32_t*, const uint32_t*, uint64_t, uint64_t, float*) = {
      product_kernel<bfloat16, N, false, kDepth, kDepth>, product_kernel<bfloat16, N, false, kOuter, kDepth>,
      product_kernel<bfloat16, N, true, kDepth, kDepth>,  product_kernel<bfloat16, N, true, kDepth, kOuter>,
      product_kernel<float16, N, false, kDepth, kDepth>,  product_kernel<float16, N, true, kDepth, kDepth>,
      product_kernel<bfloat16, N, false, kOuter, kOuter>, product_kernel<float16, N, false, kOuter, kOuter>,
      product_kernel<float16, N, true, kDepth, kOuter>};
  launch(kernels[form], dim3(1), kWarpgroup, kImage + kSharedAlignment, stream, image, words, a, b, out);
}

// Load a box into shared memory whose words are all ones, and store what is there.
__global__ void __launch_bounds__(kWarpgroup)
    tile_kernel(const __grid_constant__ CUtensorMap map, int4 at, int bytes, uint32_t* out) {
  uint8_t* const shared = dynamic_shared();
  const uint32_t to = shared_address(shared), full = to + kImage;
  for (int i = (int)threadIdx.x; i < bytes / 4; i += kWarpgroup) ((uint32_t*)shared)[i] = ~0u;
  fence_async();
  if (threadIdx.x == 0) {
    init_barrier(full, 1);
    fence_barriers();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    arrive_expecting(full, bytes);
    load_tile(to, map, full, at.x, at.y, at.z, at.w);
  }
  wait(full, 0);
  copy_words(out, (const uint32_t*)shared, bytes / 4);
}

// Store a box from an image of shared memory.
__global__ void __launch_bounds__(kWarpgroup)
    tile_store_kernel(const __grid_constant__ CUtensorMap map, int4 at, int bytes, const uint32_t* image) {
  uint8_t* const shared = dynamic_shared();
  copy_words((uint32_t*)shared, image, bytes / 4);
  fence_async();
  __syncthreads();
  if (threadIdx.x != 0) return;
  store_tile(map, shared_address(shared), at.x, at.y, at.z, at.w);
  commit_stores();
  wait_stores<0>();
}

// Note which phases of barriers have ended, before and after arrivals and bytes. `from` is 4096 bytes.
__global__ void barrier_kernel(const uint8_t* from, uint32_t* out) {
  uint8_t* const shared = dynamic_shared();
  const uint32_t to = shared_address(shared), barrier = to + 4096;
  if (threadIdx.x != 0) return;
  const auto fresh = [&](int number, int arrivals) {
    init_barrier(barrier + 8 * number, arrivals);
    fence_barriers();
    return barrier + 8 * number;
  };
  const auto note = [&](uint32_t one) { *out++ = has_ended(one, 0) + 2 * has_ended(one, 1); };
  uint32_t one = fresh(0, 2);  // two arrivals per phase
  note(one);
  for (int i = 0; i < 4; ++i) {
    arrive(one);
    note(one);
  }
  one = fresh(1, 1);  // bytes in two loads
  arrive_expecting(one, 4096);
  note(one);
  load_bytes(to, from, 2048, one);
  load_bytes(to + 2048, from + 2048, 2048, one);
  wait(one, 0);
  note(one);
  *out++ = *(const uint32_t*)shared;
  *out++ = *(const uint32_t*)(shared + 4092);
  one = fresh(2, 1);  // a load before its expectation
  load_bytes(to, from, 1024, one);
  note(one);
  arrive_expecting(one, 1024);
  wait(one, 0);
  note(one);
  one = fresh(3, 2);  // two expectations in a phase
  arrive_expecting(one, 1024);
  arrive_expecting(one, 2048);
  load_bytes(to, from, 3072, one);
  wait(one, 0);
  note(one);
  one = fresh(4, 1);  // half of the bytes, for some time
  arrive_expecting(one, 4096);
  load_bytes(to, from, 2048, one);
  bool ended = false;
  for (int i = 0; i < 100; ++i) ended |= has_ended(one, 0);
  *out++ = ended;
  load_bytes(to + 2048, from, 2048, one);
  wait(one, 0);
  note(one);
}

// Let warpgroups take turns by named barriers. The first one's turn is announced by itself.
__global__ void turn_kernel(int groups, int rounds, uint32_t* out) {
  uint32_t* const next = (uint32_t*)dynamic_shared();
  const int group = (int)threadIdx.x / kWarpgroup;
  if (threadIdx.x == 0) *next = 0;
  __syncthreads();
  if (group == 0) arrive_named(1, 2 * kWarpgroup);
  for (int round = 0; round < rounds; ++round) {
    sync_named(1 + group, 2 * kWarpgroup);
    if (threadIdx.x % kWarpgroup == 0) {
      const uint32_t at = *(volatile uint32_t*)next;
      out[at] = (uint32_t)group;
      *(volatile uint32_t*)next = at + 1;
    }
    arrive_named(1 + (group + 1) % groups, 2 * kWarpgroup);
  }
}

// Add a row (n) of each block to the sums of each tile (tiles, n), in the order of their tickets. The first one stores.
__global__ void ordered_kernel(const float* from, int n, int tiles, int* next, int* turns, float* sums) {
  float* const row = (float*)dynamic_shared();
  int* const ticket = (int*)(row + n);
  if (threadIdx.x == 0) *ticket = take_ticket(next);
  __syncthreads();
  const int number = *ticket;
  for (int tile = 0; tile < tiles; ++tile) {
    const float* source = from + ((size_t)tile * gridDim.x + (size_t)number) * (size_t)n;
    for (int i = (int)threadIdx.x; i < n; i += (int)blockDim.x) row[i] = source[i];
    fence_async();
    __syncthreads();
    if (threadIdx.x == 0) {
      float* const to = sums + (size_t)tile * (size_t)n;
      wait_turn(turns + tile, number);
      if (number == 0)
        store_bytes(to, shared_address(row), n * 4);
      else
        add_floats(to, shared_address(row), n * 4);
      commit_stores();
      wait_stores<0>();
      pass_turn(turns + tile, number + 1);
    }
    __syncthreads();
  }
}

// Hold more registers than the launch gave, in two warpgroups that take them from a third.
__global__ void __launch_bounds__(3 * kWarpgroup, 1) register_kernel(const uint32_t* in, int rounds, uint32_t* out) {
  constexpr int kHeld = 200;
  if (threadIdx.x < kWarpgroup) {
    give_registers<24>();
    return;
  }
  take_registers<240>();
  uint32_t held[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) held[i] = in[(threadIdx.x + (unsigned)i) % 1024];
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) held[i] = held[i] * 3 + (held[(i + 1) % kHeld] ^ (unsigned)round);
  }
  uint32_t all = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) all = all * 5 + held[i];
  out[threadIdx.x - kWarpgroup] = all;
}

// Store the sum of `rounds` equal products of each warp, (blocks, threads, 4). `words` (blocks, threads, 6) has A, then
// B.
__global__ void warp_product_kernel(const uint32_t* words, int rounds, float* out) {
  const size_t thread = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  const uint32_t* const own = words + 6 * thread;
  float sums[4] = {};
  for (int round = 0; round < rounds; ++round)
    mma_16x8x16(sums, uint4{own[0], own[1], own[2], own[3]}, own[4], own[5], bfloat16());
  for (int i = 0; i < 4; ++i) out[4 * thread + (size_t)i] = sums[i];
}

// Store matrices whose elements name their lane, register and half.
__global__ void matrix_kernel(uint32_t* out) {
  uint8_t* const shared = dynamic_shared();
  uint32_t words[4];
#pragma unroll
  for (unsigned i = 0; i < 4; ++i) words[i] = (threadIdx.x * 8 + i * 2) | (threadIdx.x * 8 + i * 2 + 1) << 16;
  store_matrices(shared_address(shared + threadIdx.x * 16), words);
  __syncthreads();
  copy_words(out, (const uint32_t*)shared, 128);
}

// Compute powers of 2 and pairs of 16-bit numbers.
__global__ void arithmetic_kernel(const float* in, int n, uint32_t* out) {
  for (int i = (int)threadIdx.x; i < n; i += (int)blockDim.x) {
    out[i] = __float_as_uint(exp2_fast(in[i]));
    out[n + i] = pack(in[i], 1.0f, bfloat16());
    out[2 * n + i] = pack(in[i], 1.0f, float16());
  }
}

// Write static shared memory, which kernels with dynamic shared memory do without.
__global__ void static_kernel() {
  __shared__ volatile int number;
  number = (int)threadIdx.x;
}

}  // namespace

FASTATTN_EXPORT const char* hopper_static_memory(cudaStream_t stream) {
  return attempt([&] { launch(static_kernel, dim3(1), 1, kSharedAlignment, stream); });
}

FASTATTN_EXPORT const char* hopper_product(int columns, int form, const uint32_t* image, const uint32_t* words,
                                           uint64_t a, uint64_t b, float* out, cudaStream_t stream) {
  return attempt([&] {
    switch (columns) {
      case 32: return start_product<32>(form, image, words, a, b, out, stream);
      case 64: return start_product<64>(form, image, words, a, b, out, stream);
      case 96: return start_product<96>(form, image, words, a, b, out, stream);
      case 128: return start_product<128>(form, image, words, a, b, out, stream);
      case 160: return start_product<160>(form, image, words, a, b, out, stream);
      case 192: return start_product<192>(form, image, words, a, b, out, stream);
      case 256: return start_product<256>(form, image, words, a, b, out, stream);
    }
  });
}

FASTATTN_EXPORT const char* hopper_tile(void* data, const uint64_t* sizes, const uint64_t* strides, const uint32_t* box,
                                        int swizzle, const int* at, int is_store, uint32_t* image,
                                        cudaStream_t stream) {
  return attempt([&] {
    const CUtensorMap map =
        tensor_map(data, {sizes[0], sizes[1], sizes[2], sizes[3]}, {strides[0], strides[1], strides[2]},
                   {box[0], box[1], box[2], box[3]}, (Swizzle)swizzle);
    const int bytes = (int)(box[0] * box[1] * box[2] * box[3] * 2), shared = kImage + 8 + kSharedAlignment;
    const int4 place = {at[0], at[1], at[2], at[3]};
    if (is_store)
      launch(tile_store_kernel, dim3(1), kWarpgroup, shared, stream, map, place, bytes, image);
    else
      launch(tile_kernel, dim3(1), kWarpgroup, shared, stream, map, place, bytes, image);
  });
}

FASTATTN_EXPORT const char* hopper_barriers(const uint8_t* from, uint32_t* out, cudaStream_t stream) {
  return attempt([&] { launch(barrier_kernel, dim3(1), 32, 4096 + 40 + kSharedAlignment, stream, from, out); });
}

FASTATTN_EXPORT const char* hopper_turns(int groups, int rounds, uint32_t* out, cudaStream_t stream) {
  return attempt(
      [&] { launch(turn_kernel, dim3(1), groups * kWarpgroup, 4 + kSharedAlignment, stream, groups, rounds, out); });
}

FASTATTN_EXPORT const char* hopper_ordered(int blocks, const float* from, int n, int tiles, int* next, int* turns,
                                           float* sums, cudaStream_t stream) {
  return attempt([&] {
    launch(ordered_kernel, dim3((unsigned)blocks), 64, 4 * n + 4 + kSharedAlignment, stream, from, n, tiles, next,
           turns, sums);
  });
}

FASTATTN_EXPORT const char* hopper_registers(const uint32_t* in, int rounds, uint32_t* out, cudaStream_t stream) {
  return attempt([&] { launch(register_kernel, dim3(1), 3 * kWarpgroup, kSharedAlignment, stream, in, rounds, out); });
}

FASTATTN_EXPORT const char* hopper_warp_products(int blocks, const uint32_t* words, int rounds, float* out,
                                                 cudaStream_t stream) {
  return attempt(
      [&] { launch(warp_product_kernel, dim3((unsigned)blocks), 64, kSharedAlignment, stream, words, rounds, out); });
}

FASTATTN_EXPORT const char* hopper_matrices(uint32_t* out, cudaStream_t stream) {
  return attempt([&] { launch(matrix_kernel, dim3(1), 32, 512 + kSharedAlignment, stream, out); });
}

FASTATTN_EXPORT const char* hopper_arithmetic(const float* in, int n, uint32_t* out, cudaStream_t stream) {
  return attempt([&] { launch(arithmetic_kernel, dim3(1), 32, kSharedAlignment, stream, in, n, out); });
}

}  // namespace fastattn::cuda
