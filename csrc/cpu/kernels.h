// The kernels of every operation, one table for each instruction set that they are compiled for.
#pragma once
#include "../common/attention.h"
#include "../common/dropout.h"
#include "../common/layer_norm.h"
#include "../common/parallel.h"
#include "../common/softmax_dropout.h"

// FASTATTN_ISA is the name of the instruction set that a kernel file is being compiled for.
#define FASTATTN_CONCATENATE_(stem, isa) stem##_##isa
#define FASTATTN_CONCATENATE(stem, isa) FASTATTN_CONCATENATE_(stem, isa)
#define FASTATTN_TABLE(stem) FASTATTN_CONCATENATE(stem, FASTATTN_ISA)

namespace fastattn {

template <class Problem>
struct Kernel {
  int64_t (*workspace)(const Problem&, const Parallel&);          // bytes
  void (*run)(const Problem&, const Parallel&, char* workspace);  // 64-byte aligned
};

struct LayerNormKernels {
  Kernel<LayerNorm> forward;
  Kernel<LayerNormBackward> backward;
};

struct SoftmaxDropoutKernels {
  Kernel<SoftmaxDropout> forward;
  Kernel<SoftmaxDropoutBackward> backward;
};

// The arithmetic limit of an instruction set: its multiply-adds on registers alone.
struct LimitKernels {
  // At least `operations` floating-point operations (a multiply-add is two), split evenly over the threads. Every
  // thread leaves what remains in its element of `sink`, so that nothing is optimised away.
  void (*float32)(float* sink, int64_t operations, const Parallel&);
  // Dot products of pairs, or products of matrices, where there are instructions for them.
  void (*bfloat16)(float* sink, int64_t operations, const Parallel&);
};

#if defined(__x86_64__)
#define FASTATTN_DECLARE_TABLES(Type, stem) \
  extern const Type stem##_amx_bf16, stem##_avx512_bf16, stem##_avx512, stem##_avx2, stem##_generic
#else
#define FASTATTN_DECLARE_TABLES(Type, stem) extern const Type stem##_generic
#endif
FASTATTN_DECLARE_TABLES(Kernel<Attention>, attention);
FASTATTN_DECLARE_TABLES(Kernel<AttentionBackward>, attention_backward);
FASTATTN_DECLARE_TABLES(Kernel<Dropout>, dropout);
FASTATTN_DECLARE_TABLES(LayerNormKernels, layer_norm);
FASTATTN_DECLARE_TABLES(LimitKernels, limits);
FASTATTN_DECLARE_TABLES(SoftmaxDropoutKernels, softmax_dropout);

struct InstructionSet {
  const char* name;
  const Kernel<Attention>* attention;
  const Kernel<AttentionBackward>* attention_backward;
  const Kernel<Dropout>* dropout;
  const LayerNormKernels* layer_norm;
  const LimitKernels* limits;
  const SoftmaxDropoutKernels* softmax_dropout;
};

// Those that this machine can run, best first; *count says how many.
const InstructionSet* instruction_sets(int* count);

// The one in use: the best, or the one named by the environment variable FASTATTN_CPU_ISA.
// Null where that names none that this machine has.
const InstructionSet* kernels();

// Switches to the named one. False where this machine does not have it.
bool use_instruction_set(const char* name);

}  // namespace fastattn
