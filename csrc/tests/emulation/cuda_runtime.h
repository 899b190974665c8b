// The part of CUDA that csrc/cuda uses, for the host. Its sources are compiled unchanged, with this folder instead of
// the toolkit's headers. Every thread of a block is a fiber. Blocks run one after another, in a shuffled order.
//
// A fiber runs until it waits for others. The next fiber is drawn at random, so code that holds in only one order
// fails. Undefined behaviour ends the launch with an error that names the fault, the place and the thread:
// - a barrier that not all threads reach, or threads at different barriers;
// - a shuffle that names a missing lane, or whose lanes disagree;
// - an access outside an operand, which torch.cpp puts between inaccessible pages;
// - a misaligned access or an index beyond a shared array, which the compiler's checks find.
//
// Shared memory begins as NaN in every block.
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

enum class Collective { barrier, warp_barrier, shuffle };

// Wait until all threads of the block, or the lanes in `mask`, are at the same line with the same mask. Return the
// value that lane `source` of the warp came with.
uint64_t meet(Collective kind, unsigned mask, uint64_t value, unsigned source, const char* file, int line);

// Run body() in every thread of every block. Throw std::runtime_error on a fault.
void run(dim3 grid, dim3 block, const std::function<void()>& body);

unsigned lane();

template <class T>
T shuffle(unsigned mask, T value, unsigned source, const char* file, int line) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "CUDA shuffles 4 or 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  bits = meet(Collective::shuffle, mask, bits, source, file, line);
  memcpy(&value, &bits, sizeof value);
  return value;
}

inline unsigned reduce_or(unsigned mask, unsigned value, const char* file, int line) {
  unsigned all = 0;
  for (unsigned source = 0; source < 32; ++source)
    if (mask >> source & 1) all |= shuffle(mask, value, source, file, line);
  return all;
}

}  // namespace emulation

#define MEET(kind, mask, value) emulation::meet(emulation::Collective::kind, mask, value, 0, __FILE__, __LINE__)
#define __syncthreads() ((void)MEET(barrier, 0, 0))
#define __syncwarp() ((void)MEET(warp_barrier, 0xffffffff, 0))
#define __shfl_xor_sync(mask, value, bits) \
  emulation::shuffle(mask, value, emulation::lane() ^ (unsigned)(bits), __FILE__, __LINE__)
#define __reduce_or_sync(mask, value) emulation::reduce_or(mask, value, __FILE__, __LINE__)

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
  emulation::run(configuration->gridDim, configuration->blockDim,
                 [&] { kernel(std::remove_cv_t<Parameters>(arguments)...); });
  return cudaSuccess;
}
