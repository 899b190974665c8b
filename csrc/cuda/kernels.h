// Launches of the CUDA kernels. Operands are in device memory.
#pragma once
#include "../common/attention.h"
#include "../common/layer_norm.h"

typedef struct CUstream_st* cudaStream_t;

namespace fastattn::cuda {

template <class Problem>
void run(const Problem&, cudaStream_t);

// The launches below need a workspace, 16-byte aligned. Its size is in floats.

// Attention forward, dense and without dropout, for few queries to many keys as in decoding. The keys are divided into
// num_splits splits, so that every multiprocessor has work.
constexpr int64_t kMaxKeys = 1 << 29;  // keys are counted in 32 bits; more would not fit into a device's memory
int num_splits_of(const Attention&, int device);
int64_t workspace(const Attention&, int num_splits);
void run(const Attention&, int num_splits, float* workspace, cudaStream_t);

int64_t workspace(const LayerNormBackward&);
void run(const LayerNormBackward&, float* workspace, cudaStream_t);

}  // namespace fastattn::cuda
