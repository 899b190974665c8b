// The kernels of every operation: compiled once for each instruction set, chosen at run time.
#pragma once
#include "../common/parallel.h"

namespace fastattn {

template <class Problem>
struct Kernel {
  int64_t (*workspace)(const Problem&, const Parallel&);          // bytes
  void (*run)(const Problem&, const Parallel&, char* workspace);  // 64-byte aligned
};

// The arithmetic limit of an instruction set: its multiply-adds on registers alone.
struct Limits {
  // At least `operations` floating-point operations (a multiply-add is two), split evenly over the threads. Every
  // thread leaves what remains in its element of `sink`, so that nothing is optimised away.
  void (*float32)(float* sink, int64_t operations, const Parallel&);
  // Dot products of pairs, or products of matrices, where there are instructions for them.
  void (*bfloat16)(float* sink, int64_t operations, const Parallel&);
};

// Best first. FASTATTN_OF_EACH(&, stem) lists the addresses of what a kernel file exports for each.
#if defined(__x86_64__)
constexpr const char* kInstructionSets[] = {"amx_bf16", "avx512_bf16", "avx512", "avx2", "generic"};
#define FASTATTN_OF_EACH(prefix, stem) \
  prefix stem##_amx_bf16, prefix stem##_avx512_bf16, prefix stem##_avx512, prefix stem##_avx2, prefix stem##_generic
#else
constexpr const char* kInstructionSets[] = {"generic"};
#define FASTATTN_OF_EACH(prefix, stem) prefix stem##_generic
#endif
constexpr int kInstructionSetCount = sizeof kInstructionSets / sizeof *kInstructionSets;

// Whether this machine can run the instruction set of this index.
bool has_instruction_set(int index);

// The index of the one in use: the best, or the one that the environment variable FASTATTN_CPU_ISA names. -1 where it
// names none that this machine has.
int instruction_set();

// Switches to the named one. False where this machine does not have it.
bool use_instruction_set(const char* name);

// In a kernel file: what it exports. FASTATTN_ISA is the instruction set that it is being compiled for.
#define FASTATTN_CONCATENATE_(stem, isa) stem##_##isa
#define FASTATTN_CONCATENATE(stem, isa) FASTATTN_CONCATENATE_(stem, isa)
#define FASTATTN_EXPORT(Type, stem)                           \
  extern const Type FASTATTN_CONCATENATE(stem, FASTATTN_ISA); \
  const Type FASTATTN_CONCATENATE(stem, FASTATTN_ISA)

// In a kernel file of products: templates workspace<T>(problem, parallel) and run<T>(problem, parallel, memory) for
// every dtype, but for those that are left to the vectors of avx512_bf16 (product.h).
#define FASTATTN_EXPORT_PRODUCTS(Problem, stem)                                   \
  extern const Kernel<Problem> stem##_avx512_bf16;                                \
  static const Kernel<Problem>& kernel_of_type(Dtype dtype) {                     \
    return *with_type(dtype, [](auto type) -> const Kernel<Problem>* {            \
      using T = decltype(type);                                                   \
      if constexpr (kLeftToVectors<T>) {                                          \
        return &stem##_avx512_bf16;                                               \
      } else {                                                                    \
        static constexpr Kernel<Problem> own = {&workspace<T>, &run<T>};          \
        return &own;                                                              \
      }                                                                           \
    });                                                                           \
  }                                                                               \
  static int64_t workspace_any(const Problem& p, const Parallel& parallel) {      \
    return kernel_of_type(p.dtype).workspace(p, parallel);                        \
  }                                                                               \
  static void run_any(const Problem& p, const Parallel& parallel, char* memory) { \
    kernel_of_type(p.dtype).run(p, parallel, memory);                             \
  }                                                                               \
  FASTATTN_EXPORT(Kernel<Problem>, stem) = {&workspace_any, &run_any}

// Elsewhere: function(...) returns what kernel files export as `stem`, for the instruction set in use.
#define FASTATTN_IMPORT(Type, stem, function)                     \
  extern const Type FASTATTN_OF_EACH(, stem);                     \
  inline const Type& function {                                   \
    static const Type* const all[] = {FASTATTN_OF_EACH(&, stem)}; \
    return *all[instruction_set()];                               \
  }

// kernel_of(problem), exported as `stem`.
#define FASTATTN_KERNEL(Problem, stem) FASTATTN_IMPORT(Kernel<Problem>, stem, kernel_of(const Problem&))

}  // namespace fastattn
