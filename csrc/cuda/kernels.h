// Launches of the CUDA kernels, with operands in device memory.
#pragma once
#include "../common/attention.h"
#include "../common/layer_norm.h"

typedef struct CUstream_st* cudaStream_t;

namespace fastattn::cuda {

template <class Problem>
void run(const Problem&, cudaStream_t);

// Those below need a workspace, in floats, 16-byte aligned.

// Forward, dense and without dropout, for few queries to many keys as in decoding. num_splits: of the keys, so that
// every multiprocessor works.
constexpr int64_t kMaxKeys = 1 << 29;  // counted in 32 bits; more would not fit into a device's memory
int num_splits_of(const Attention&, int device);
int64_t workspace(const Attention&, int num_splits);
void run(const Attention&, int num_splits, float* workspace, cudaStream_t);

int64_t workspace(const LayerNormBackward&);
void run(const LayerNormBackward&, float* workspace, cudaStream_t);

}  // namespace fastattn::cuda
