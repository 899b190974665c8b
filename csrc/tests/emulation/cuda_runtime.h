// The part of CUDA that csrc/cuda uses, for the host. Its sources are compiled unchanged, with this folder instead of
// the toolkit's headers. Every thread of a block is a fiber. Blocks start in a shuffled order and run one after
// another. Blocks with dynamic shared memory may use the functions of csrc/cuda/hopper.h (asynchronous.h), and a random
// number of them is resident together.
//
// A fiber runs until it waits for others. The next fiber is drawn at random, so code that holds in only one order
// fails. Undefined behaviour ends the launch with an error that names the fault, the place and the thread:
// - a barrier that not all threads reach, or threads at different barriers;
// - threads that all wait;
// - a shuffle that names a missing lane, or whose lanes disagree;
// - an access outside an operand, which torch.cpp puts between inaccessible pages;
// - a misaligned access or an index beyond a shared array, which the compiler's checks find.
//
// Shared memory begins as NaN in every block. A message ends with the seed for seed_order that repeats the launch.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <functional>
#include <type_traits>

#define FASTATTN_EMULATED

#define __global__
#define __device__
#define __host__
#define __shared__ static thread_local  // One block runs at a time. emulation.cpp finds all of these together.
#define __launch_bounds__(...)
#define __grid_constant__
#define __forceinline__ inline

struct uint2 {
  alignas(8) unsigned x;
  unsigned y;
};
struct uint4 {
  alignas(16) unsigned x;
  unsigned y, z, w;
};
struct float2 {
  alignas(8) float x;
  float y;
};
struct float4 {
  alignas(16) float x;
  float y, z, w;
};

struct int4 {
  alignas(16) int x;
  int y, z, w;
};

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace emulation {

struct Place {
  const char* file;
  int line;
};

enum class Collective { barrier, warp_barrier, shuffle };

// Wait until all threads of the block, or the lanes in `mask`, are at the same line with the same mask. Return the
// value that lane `source` of the warp came with.
uint64_t meet(Collective kind, unsigned mask, uint64_t value, unsigned source, Place place);

// Run body() in every thread of every block. Throw std::runtime_error on a fault.
void run(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& body);

unsigned lane();

template <class T>
T shuffle(unsigned mask, T value, unsigned source, Place place) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "CUDA shuffles 4 or 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  bits = meet(Collective::shuffle, mask, bits, source, place);
  memcpy(&value, &bits, sizeof value);
  return value;
}

inline unsigned reduce_or(unsigned mask, unsigned value, Place place) {
  unsigned all = 0;
  for (unsigned source = 0; source < 32; ++source)
    if (mask >> source & 1) all |= shuffle(mask, value, source, place);
  return all;
}

}  // namespace emulation

#define FASTATTN_PLACE \
  emulation::Place { __FILE__, __LINE__ }
#define __syncthreads() ((void)emulation::meet(emulation::Collective::barrier, 0, 0, 0, FASTATTN_PLACE))
#define __syncwarp() ((void)emulation::meet(emulation::Collective::warp_barrier, 0xffffffff, 0, 0, FASTATTN_PLACE))
#define __shfl_sync(mask, value, lane) emulation::shuffle(mask, value, (unsigned)(lane), FASTATTN_PLACE)
#define __shfl_xor_sync(mask, value, bits) \
  emulation::shuffle(mask, value, emulation::lane() ^ (unsigned)(bits), FASTATTN_PLACE)
#define __reduce_or_sync(mask, value) emulation::reduce_or(mask, value, FASTATTN_PLACE)

inline unsigned __float_as_uint(float x) {
  unsigned bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

template <class T>
void __stwb(T* address, T value) {
  *address = value;
}

// ---- the runtime ----

typedef int cudaError_t;
typedef struct CUstream_st* cudaStream_t;
constexpr cudaError_t cudaSuccess = 0;
inline const char* cudaGetErrorString(cudaError_t) { return "success"; }

enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
namespace emulation {
extern int multiprocessors;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = emulation::multiprocessors;
  return cudaSuccess;
}

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int) {
  return cudaSuccess;
}

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  void* attrs;
  unsigned numAttrs;
};

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* configuration, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  emulation::run(configuration->gridDim, configuration->blockDim, configuration->dynamicSmemBytes,
                 [&] { kernel(std::remove_cv_t<Parameters>(arguments)...); });
  return cudaSuccess;
}
