// Launches of the CUDA kernels. Operands are in device memory.
#pragma once
#include "../common/attention.h"
#include "../common/layer_norm.h"

typedef struct CUstream_st* cudaStream_t;

namespace fastattn::cuda {

int multiprocessors_of(int device);

template <class Problem>
void run(const Problem&, cudaStream_t);

// The launches below need a workspace, 16-byte aligned. Its size is in floats.

// Attention forward, dense and without dropout, for few queries to many keys as in decoding. The keys are divided into
// num_splits splits, so that every multiprocessor has work.
constexpr int64_t kMaxKeys = 1 << 29;  // keys are counted in 32 bits; more would not fit into a device's memory
constexpr int64_t kMaxDecodingQueries = 16;
inline bool is_for_decoding(const Attention& a) {
  return a.seqlen_q <= kMaxDecodingQueries && a.threshold == 0 && !a.cu_seq_q && !a.residual.data;
}
int num_splits_of(const Attention&, int device);
int64_t workspace(const Attention&, int num_splits);
void run(const Attention&, int num_splits, float* workspace, cudaStream_t);

// Attention forward on devices of compute capability 9.0, dense or packed, in 16 bits. TMA loads the operands, so head
// sizes are multiples of 8, rows begin at multiples of 16 bytes, and no dimension is expanded. At most `blocks` blocks
// of threads share the work, one per multiprocessor.
bool is_for_hopper(const Attention&);
int64_t hopper_workspace(const Attention&);
void run_hopper(const Attention&, float* workspace, int blocks, cudaStream_t);

// Attention backward, from the results of run_hopper, for the same operands, and a gradient of the output with such
// rows. There is no gradient of the mask.
bool is_for_hopper(const AttentionBackward&);
int64_t hopper_workspace(const AttentionBackward&);
void run_hopper(const AttentionBackward&, float* workspace, cudaStream_t);

int64_t workspace(const LayerNormBackward&);
void run(const LayerNormBackward&, float* workspace, cudaStream_t);

}  // namespace fastattn::cuda
