// Launches of the CUDA kernels: run(problem, ..., stream), with operands in device memory. Workspaces are in floats,
// 16-byte aligned.
#pragma once
#include "../common/attention.h"
#include "../common/dropout.h"
#include "../common/layer_norm.h"
#include "../common/softmax_dropout.h"

typedef struct CUstream_st* cudaStream_t;

namespace fastattn::cuda {

// Forward, dense and without dropout, for few queries to many keys as in decoding. num_splits: of the keys, so that
// every multiprocessor works.
constexpr int64_t kMaxKeys = 1 << 29;  // counted in 32 bits; more would not fit into a device's memory
int num_splits_of(const Attention&, int device);
int64_t workspace(const Attention&, int num_splits);
void run(const Attention&, int num_splits, float* workspace, cudaStream_t);

void run(const SoftmaxDropout&, cudaStream_t);
void run(const SoftmaxDropoutBackward&, cudaStream_t);

void run(const LayerNorm&, cudaStream_t);
int64_t workspace(const LayerNormBackward&);
void run(const LayerNormBackward&, float* workspace, cudaStream_t);

void run(const Dropout&, cudaStream_t);

}  // namespace fastattn::cuda
