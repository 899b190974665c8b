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

// Launch kernel(arguments...) on a grid of `blocks` blocks of `threads` threads. The grid may be empty.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), int64_t blocks, int threads, cudaStream_t stream,
            const Arguments&... arguments) {
  if (blocks == 0) return;
  if (blocks > INT32_MAX) throw std::runtime_error("fastattn: more than 2**31 - 1 blocks of threads");
  cudaLaunchConfig_t configuration = {};
  configuration.gridDim = dim3((unsigned)blocks);
  configuration.blockDim = dim3((unsigned)threads);
  configuration.stream = stream;
  check(cudaLaunchKernelEx(&configuration, kernel, arguments...));
}

}  // namespace
}  // namespace fastattn::cuda
