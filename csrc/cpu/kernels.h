// The kernels of every operation, one table for each instruction set that they are compiled for.
#pragma once
#include "attention.h"
#include "dropout.h"
#include "layer_norm.h"
#include "limits.h"
#include "softmax_dropout.h"

// FASTATTN_ISA is the name of the instruction set that a kernel file is being compiled for.
#define FASTATTN_CONCATENATE_(stem, isa) stem##_##isa
#define FASTATTN_CONCATENATE(stem, isa) FASTATTN_CONCATENATE_(stem, isa)
#define FASTATTN_TABLE(stem) FASTATTN_CONCATENATE(stem, FASTATTN_ISA)

namespace fastattn {

#if defined(__x86_64__)
#define FASTATTN_DECLARE_TABLES(Type, stem) \
  extern const Type stem##_amx_bf16, stem##_avx512_bf16, stem##_avx512, stem##_avx2, stem##_generic
#else
#define FASTATTN_DECLARE_TABLES(Type, stem) extern const Type stem##_generic
#endif
FASTATTN_DECLARE_TABLES(AttentionKernels, attention);
FASTATTN_DECLARE_TABLES(AttentionBackwardKernels, attention_backward);
FASTATTN_DECLARE_TABLES(DropoutKernels, dropout);
FASTATTN_DECLARE_TABLES(LayerNormKernels, layer_norm);
FASTATTN_DECLARE_TABLES(LimitKernels, limits);
FASTATTN_DECLARE_TABLES(SoftmaxDropoutKernels, softmax_dropout);

struct InstructionSet {
  const char* name;
  const AttentionKernels* attention;
  const AttentionBackwardKernels* attention_backward;
  const DropoutKernels* dropout;
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
