// Kernel launches.
#pragma once
#include <cuda_runtime.h>
#include <stdint.h>

#include <stdexcept>
#include <string>

namespace fastattn::cuda {
namespace {

// Throw std::runtime_error if a CUDA call failed.
inline void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("fastattn: ") + cudaGetErrorString(error));
}

// Launch kernel(arguments...) on a grid of blocks of `threads` threads with so much dynamic shared memory.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes, cudaStream_t stream,
            const Arguments&... arguments) {
  if (shared_bytes > 0) check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  cudaLaunchConfig_t configuration = {};
  configuration.gridDim = grid;
  configuration.blockDim = dim3((unsigned)threads);
  configuration.dynamicSmemBytes = (size_t)shared_bytes;
  configuration.stream = stream;
  check(cudaLaunchKernelEx(&configuration, kernel, arguments...));
}

// Launch kernel(arguments...) on `blocks` blocks of `threads` threads. The grid may be empty.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), int64_t blocks, int threads, cudaStream_t stream,
            const Arguments&... arguments) {
  if (blocks == 0) return;
  if (blocks > INT32_MAX) throw std::runtime_error("fastattn: more than 2**31 - 1 blocks of threads");
  launch(kernel, dim3((unsigned)blocks), threads, 0, stream, arguments...);
}

}  // namespace
}  // namespace fastattn::cuda
