// Launches of Triton's kernels. Operands are in device memory.
#pragma once
#include <functional>

#include "../common/attention.h"
#include "../common/dropout.h"
#include "../common/layer_norm.h"
#include "../common/softmax_dropout.h"

namespace fastattn::triton {

// The device on which a kernel runs, and its current stream.
struct Place {
  int device;
  void* stream;
};

void* current_stream(int device);

void run(const Dropout&, Place);
void run(const LayerNorm&, Place);
void run(const SoftmaxDropout&, Place);
void run(const SoftmaxDropoutBackward&, Place);

// Returns a workspace of so many floats, 16-byte aligned, or null for 0.
using Allocate = std::function<float*(int64_t floats)>;

void run(const LayerNormBackward&, Place, const Allocate&);
void run(const Attention&, Place, const Allocate&);
void run(const AttentionBackward&, Place, const Allocate&);

// Whether these kernels serve a plain call. They read both sides through pointers: Python makes tensor descriptors.
// float32 is left to Python too, where torch's setting of tf32 counts.
bool serves(const Attention&);

// Python's answer to a request: first for a kernel with its settings, then for a kernel with the types of its arguments
// too. fastattn/backends/triton/recipes.py has the same struct.
struct Recipe {
  uint64_t function;  // CUfunction; 0 in the first answer
  int32_t threads, shared_bytes;
  int32_t block_m, block_n;  // The block of the kernel.
  int32_t multiprocessors;   // The device's number of them.
  int32_t is_served;         // 0: Triton has to start the kernel.
};

// Writes the answer to a request into zeros.
using Compile = void (*)(const char* request, Recipe* answer);

void set_compile(Compile);

// Take the functions of CUDA's driver and of libtorch_cuda from this file, a fake of them, instead of from theirs.
void set_driver(const char* file);

}  // namespace fastattn::triton
