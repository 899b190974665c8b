// Hopper's asynchronous instructions (sm_90a) as functions: products by warpgroups (wgmma), bulk copies (TMA), and the
// barriers, fences and semaphores that order them. Kernels for Hopper use no inline PTX besides these.
// csrc/tests/emulation has the same functions for the host, which check the rules below.
//
// - An asynchronous instruction is pending until a wait for it returns. Until then a thread touches neither its
//   destination nor its operands.
// - Ordinary writes of shared memory need fence_async() by each thread that wrote, then a barrier, before an
//   asynchronous instruction reads or overwrites the same bytes.
// - Products need fence_products() of their registers after ordinary accesses to these.
// - Only dynamic shared memory is used. shared_address() returns its 32-bit addresses.
#pragma once
#include <cuda_runtime.h>
#include <stdint.h>

#include <stdexcept>
#include <type_traits>

#include "../common/types.h"

namespace fastattn::cuda {
namespace {

constexpr int kWarpgroup = 128;         // threads
constexpr int kSharedAlignment = 1024;  // A launch needs so many bytes more than the kernel uses.

// Which of an operand's dimensions is contiguous in shared memory: the depth of the product, or its rows or columns.
enum class Major { depth, outer };

// Width in bytes of rows whose 16-byte chunks are permuted. The number of a chunk within 128 bytes is changed by
// exclusive or with the lowest 3, 2 or 1 bits of the address divided by 128. The values are a descriptor's codes.
enum class Swizzle { none = 0, bytes128 = 1, bytes64 = 2, bytes32 = 3 };

// Return the descriptor of an operand that begins at a shared address. Groups of 8 rows are contiguous in memory. A row
// is as wide as the swizzle, 16 bytes without one.
// - Depth contiguous: a row is a row of A or a column of B. Groups of 8 rows begin `stride` bytes apart. Without a
//   swizzle, the halves of the depth begin `leading` bytes apart.
// - Outer dimension contiguous: a row has one element of the depth. Groups of 8 rows begin `stride` bytes apart, and
//   groups of as many outer elements as a row has `leading` bytes. Without a swizzle, the two change places.
__host__ __device__ constexpr uint64_t descriptor(uint32_t address, int leading, int stride,
                                                  Swizzle swizzle = Swizzle::bytes128) {
  return (uint64_t)(address >> 4 & 0x3fff) | (uint64_t)(leading >> 4 & 0x3fff) << 16 |
         (uint64_t)(stride >> 4 & 0x3fff) << 32 | (uint64_t)swizzle << 62;
}

}  // namespace
}  // namespace fastattn::cuda

#ifdef FASTATTN_EMULATED
#include <emulated_hopper.h>
#else
#include <cuda.h>

namespace fastattn::cuda {
namespace {

// Shared memory

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return (uint32_t)__cvta_generic_to_shared(pointer);
}

// Return the block's dynamic shared memory, from its first multiple of kSharedAlignment on.
__device__ __forceinline__ uint8_t* dynamic_shared() {
  extern __shared__ uint8_t memory[];
  const uint32_t address = shared_address(memory);
  return memory + ((address + kSharedAlignment - 1) / kSharedAlignment * kSharedAlignment - address);
}

// Make this thread's ordinary writes of shared memory visible to asynchronous instructions that follow a barrier.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Store four 8 x 8 matrices of 16-bit elements. Register r of lane l holds elements (l / 4, 2 (l % 4)) and the next of
// matrix r. The 16 bytes at the address of lane l become row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(uint32_t to, const uint32_t* registers) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(registers[0]),
               "r"(registers[1]), "r"(registers[2]), "r"(registers[3])
               : "memory");
}

// Barriers in shared memory (mbarrier, 8 bytes each). A phase ends when so many arrivals and all expected bytes have
// come. Waiting for a parity returns once the phase of this parity, 0 for the first, has ended: a fresh barrier lets
// waits for parity 1 pass.

__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Make the barriers that this thread has begun known to asynchronous instructions; __syncthreads() does so to the
// block's threads.
__device__ __forceinline__ void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrive, and expect so many bytes of loads in this phase.
__device__ __forceinline__ void arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ bool has_ended(uint32_t barrier, uint32_t parity) {
  uint32_t ended;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(ended)
               : "r"(barrier), "r"(parity)
               : "memory");
  return ended;
}

__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  while (!has_ended(barrier, parity)) {
  }
}

// Named barriers, 1 to 15; 0 is __syncthreads(). Whole warps come to them, `threads` threads in all.

__device__ __forceinline__ void sync_named(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void arrive_named(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Registers per thread of this warpgroup, a multiple of 8. take_registers waits until others have given enough.

template <int N>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// Loads, which count their bytes at a barrier. Shared addresses are multiples of 16, of 128 for tiles; bytes of 16.

// Return the map of a tensor of 16-bit elements, for load_tile and store_tile: its sizes and those of a box, columns
// first, and the strides of the other dimensions in bytes. A row of the box has as many bytes as the swizzle. Data and
// strides are multiples of 16 bytes. For the host.
inline CUtensorMap tensor_map(const void* data, const uint64_t (&sizes)[4], const uint64_t (&strides)[3],
                              const uint32_t (&box)[4], Swizzle swizzle) {
  static void* const entry = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    if (!found) throw std::runtime_error("fastattn: the driver lacks cuTensorMapEncodeTiled");
    return found;
  }();
  constexpr CUtensorMapSwizzle kSwizzles[] = {CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                              CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_SWIZZLE_32B};
  constexpr uint32_t kDense[] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult error = ((decltype(&cuTensorMapEncodeTiled))entry)(
      &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, (void*)data, (const cuuint64_t*)sizes, (const cuuint64_t*)strides, box,
      kDense, CU_TENSOR_MAP_INTERLEAVE_NONE, kSwizzles[(int)swizzle], CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error != CUDA_SUCCESS) throw std::runtime_error("fastattn: the driver refuses a tensor map");
  return map;
}

// Load the box of a tensor map that begins at column x, row y, of matrices z and w. Elements outside the tensor are 0.
__device__ __forceinline__ void load_tile(uint32_t to, const CUtensorMap& map, uint32_t barrier, int x, int y, int z,
                                          int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

__device__ __forceinline__ void load_bytes(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// Stores, and additions to float32 numbers, in groups of the thread that started them.

// Store the box of a tensor map, without what lies outside the tensor.
__device__ __forceinline__ void store_tile(const CUtensorMap& map, uint32_t from, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(from), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}

__device__ __forceinline__ void store_bytes(void* to, uint32_t from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void add_floats(float* to, uint32_t from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Wait until at most N groups have stores that read shared memory.
template <int N>
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// Wait until at most N groups have stores that are not in global memory.
template <int N>
__device__ __forceinline__ void wait_stores() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

// Semaphores in global memory, which order blocks. CUDA promises no order in which blocks start, so a block may wait
// only for those with lower tickets, which have started.

// Return how many tickets others have taken.
__device__ __forceinline__ int take_ticket(int* next) { return atomicAdd(next, 1); }

// Wait for the turn. Bulk stores and additions that follow come after those of the blocks before.
__device__ __forceinline__ void wait_turn(const int* turn, int value) {
  int now;
  do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
  while (now != value);
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Set the semaphore. This thread's writes, and the stores that it has waited for, are visible before that.
__device__ __forceinline__ void pass_turn(int* turn, int value) {
  asm volatile("fence.acq_rel.gpu;\nst.relaxed.gpu.global.s32 [%0], %1;" ::"l"(turn), "r"(value) : "memory");
}

// Products of a warpgroup

// Keep accesses to registers on their side of this point.
template <class T, int N>
__device__ __forceinline__ void hold(T (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if constexpr (std::is_same_v<T, float>)
      asm volatile("" : "+f"(registers[i])::"memory");
    else
      asm volatile("" : "+r"(registers[i])::"memory");
  }
}

// Order ordinary accesses to these arrays of registers before the products that follow.
template <class... Arrays>
__device__ __forceinline__ void fence_products(Arrays&... arrays) {
  (hold(arrays), ...);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until at most N groups of products are pending. The sums that they have left are in the array.
template <int N, int Registers>
__device__ __forceinline__ void wait_products(float (&sums)[Registers]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
  hold(sums);
}

// Names of the first registers, and the operands that they are.
#define FASTATTN_D16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define FASTATTN_D32 FASTATTN_D16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FASTATTN_D48 FASTATTN_D32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define FASTATTN_D64 FASTATTN_D48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FASTATTN_D80 FASTATTN_D64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define FASTATTN_D96 FASTATTN_D80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FASTATTN_D112 \
  FASTATTN_D96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define FASTATTN_D128 \
  FASTATTN_D112 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define FASTATTN_O8(i)                                                                                        \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define FASTATTN_O16(i) FASTATTN_O8(i), FASTATTN_O8(i + 8)
#define FASTATTN_O32(i) FASTATTN_O16(i), FASTATTN_O16(i + 16)
#define FASTATTN_O48(i) FASTATTN_O32(i), FASTATTN_O16(i + 32)
#define FASTATTN_O64(i) FASTATTN_O32(i), FASTATTN_O32(i + 32)
#define FASTATTN_O80(i) FASTATTN_O64(i), FASTATTN_O16(i + 64)
#define FASTATTN_O96(i) FASTATTN_O64(i), FASTATTN_O32(i + 64)
#define FASTATTN_O128(i) FASTATTN_O64(i), FASTATTN_O64(i + 64)

#define FASTATTN_WGMMA(columns, type, sums, operands, scale)                                                     \
  "{\n.reg .pred p;\nsetp.ne.b32 p, %" #scale ", 0;\nwgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type \
  "." type " {" sums "}, " operands ";\n}\n"

// Products of elements of type T: A from shared memory, and A from registers. n0 to n6 number the operands after the
// sums.
#define FASTATTN_PRODUCTS(T, type, columns, registers, n0, n1, n2, n3, n4, n5, n6)                                 \
  template <int A, int B>                                                                                          \
  static __device__ __forceinline__ void run(float (&d)[registers], uint64_t a, uint64_t b, int scale, T) {        \
    asm volatile(                                                                                                  \
        FASTATTN_WGMMA(columns, type, FASTATTN_D##registers, "%" #n0 ", %" #n1 ", p, 1, 1, %" #n3 ", %" #n4, n2)   \
        : FASTATTN_O##registers(0)                                                                                 \
        : "l"(a), "l"(b), "r"(scale), "n"(A), "n"(B));                                                             \
  }                                                                                                                \
  template <int B>                                                                                                 \
  static __device__ __forceinline__ void run(float (&d)[registers], const uint32_t* a, uint64_t b, int scale, T) { \
    asm volatile(FASTATTN_WGMMA(columns, type, FASTATTN_D##registers,                                              \
                                "{%" #n0 ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4 ", p, 1, 1, %" #n6, n5)          \
                 : FASTATTN_O##registers(0)                                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(scale), "n"(B));                        \
  }
#define FASTATTN_PRODUCT(columns, registers, ...)                        \
  template <>                                                            \
  struct Product<registers> {                                            \
    FASTATTN_PRODUCTS(bfloat16, "bf16", columns, registers, __VA_ARGS__) \
    FASTATTN_PRODUCTS(float16, "f16", columns, registers, __VA_ARGS__)   \
  };

template <int Registers>
struct Product;
FASTATTN_PRODUCT(32, 16, 16, 17, 18, 19, 20, 21, 22)
FASTATTN_PRODUCT(64, 32, 32, 33, 34, 35, 36, 37, 38)
FASTATTN_PRODUCT(96, 48, 48, 49, 50, 51, 52, 53, 54)
FASTATTN_PRODUCT(128, 64, 64, 65, 66, 67, 68, 69, 70)
FASTATTN_PRODUCT(160, 80, 80, 81, 82, 83, 84, 85, 86)
FASTATTN_PRODUCT(192, 96, 96, 97, 98, 99, 100, 101, 102)
FASTATTN_PRODUCT(256, 128, 128, 129, 130, 131, 132, 133, 134)

// Start D (64 x 2 Registers, float32) = A (64 x 16) B (16 x 2 Registers), plus D if `accumulate`. A and B have type T.
// Register 4c + 2h + e of thread 32w + l is D(16w + l / 4 + 8h, 8c + 2 (l % 4) + e). The shape must be among those
// above.
template <class T, Major A, Major B, int Registers>
__device__ __forceinline__ void multiply(float (&d)[Registers], uint64_t a, uint64_t b, bool accumulate) {
  Product<Registers>::template run<(int)A, (int)B>(d, a, b, (int)accumulate, T());
}

// Start such a product with A in four registers. The low half of register 2h + g of thread 32w + l is
// A(16w + l / 4 + 8g, 8h + 2 (l % 4)). The high half is the next element of this row. Sums of 16 columns, packed in
// pairs, have this order.
template <class T, Major B, int Registers>
__device__ __forceinline__ void multiply(float (&d)[Registers], const uint32_t* a, uint64_t b, bool accumulate) {
  Product<Registers>::template run<(int)B>(d, a, b, (int)accumulate, T());
}

// Arithmetic

// Return 2**x by the special function unit; results below 2**-126 are 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Return two numbers rounded to T, the first in the low half.
__device__ __forceinline__ uint32_t pack(float low, float high, bfloat16) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ uint32_t pack(float low, float high, float16) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

}  // namespace
}  // namespace fastattn::cuda
#endif
