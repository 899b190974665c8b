// The kernels of every operation, compiled once per instruction set and chosen at run time.
#pragma once
#include "../common/attention.h"
#include "../common/parallel.h"

namespace fastattn {

// Whether rows of attention are short: a block of the backward pass has all keys. It then computes delta from P and dP
// and reads neither `out` nor `residual`. WHOLE_ROW in fastattn/backends/cpu is the same number.
constexpr int kWholeRow = 32;
static inline bool has_short_rows(const Attention& a) { return a.seqlen_k <= kWholeRow; }

template <class Problem>
struct Kernel {
  int64_t (*workspace)(const Problem&, const Parallel&);          // bytes
  void (*run)(const Problem&, const Parallel&, char* workspace);  // 64-byte aligned
};

// The arithmetic limit of an instruction set: multiply-adds that access only registers.
struct Limits {
  // Run at least `operations` floating-point operations (a multiply-add is two), split evenly over the threads. Every
  // thread stores its result in its element of `sink`, so that the compiler cannot remove the operations.
  void (*float32)(float* sink, int64_t operations, const Parallel&);
  // Run dot products of pairs or products of matrices instead, if the instruction set has them.
  void (*bfloat16)(float* sink, int64_t operations, const Parallel&);
};

// The instruction sets, best first. FASTATTN_OF_EACH(&, stem) lists the addresses of a kernel file's exports for each.
#if defined(__x86_64__)
constexpr const char* kInstructionSets[] = {"amx_bf16", "avx512_bf16", "avx512", "avx2", "generic"};
#define FASTATTN_OF_EACH(prefix, stem) \
  prefix stem##_amx_bf16, prefix stem##_avx512_bf16, prefix stem##_avx512, prefix stem##_avx2, prefix stem##_generic
#else
constexpr const char* kInstructionSets[] = {"generic"};
#define FASTATTN_OF_EACH(prefix, stem) prefix stem##_generic
#endif
constexpr int kInstructionSetCount = sizeof kInstructionSets / sizeof *kInstructionSets;

// Whether this machine can run the instruction set with this index. It does not request AMX's tiles from Linux.
bool machine_has_instruction_set(int index);

// Whether the library has the kernels of the instruction set. FASTATTN_CPU_BUILD leaves sets out (native_build.py).
bool is_compiled(int index);

// Whether both hold, and Linux permits the tiles.
bool has_instruction_set(int index);

// Return the index of the instruction set in use: the best one, or the one that FASTATTN_CPU_ISA names. If the library
// lacks that one's kernels, it is the next one. -1 if the variable names one that this machine does not have.
int instruction_set();

// Switch to the named instruction set. Return false if this machine or the library does not have it.
bool use_instruction_set(const char* name);

// Defines an export of a kernel file. FASTATTN_ISA is the instruction set that the file is being compiled for.
#define FASTATTN_CONCATENATE_(stem, isa) stem##_##isa
#define FASTATTN_CONCATENATE(stem, isa) FASTATTN_CONCATENATE_(stem, isa)
#define FASTATTN_EXPORT(Type, stem)                           \
  extern const Type FASTATTN_CONCATENATE(stem, FASTATTN_ISA); \
  const Type FASTATTN_CONCATENATE(stem, FASTATTN_ISA)

// Exports a kernel of products, defined by templates workspace<Unit>(problem, parallel) and run<Unit>(problem,
// parallel, memory). It serves every dtype, except those that are left to the vectors of avx512_bf16 (product.h).
#define FASTATTN_EXPORT_PRODUCTS(Problem, stem)                                   \
  extern const Kernel<Problem> stem##_avx512_bf16;                                \
  static const Kernel<Problem>& kernel_of_type(Dtype dtype) {                     \
    return *with_unit(dtype, [](auto unit) -> const Kernel<Problem>* {            \
      using Unit = decltype(unit);                                                \
      if constexpr (kLeftToVectors<Unit>) {                                       \
        return &stem##_avx512_bf16;                                               \
      } else {                                                                    \
        static constexpr Kernel<Problem> own = {&workspace<Unit>, &run<Unit>};    \
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

// Declares the exports `stem` of every instruction set. The address of an export that is not compiled is null.
#define FASTATTN_DECLARE(Type, stem) extern __attribute__((weak)) const Type FASTATTN_OF_EACH(, stem)

// Defines function(...) outside of kernel files. It returns the export `stem` for the instruction set in use.
#define FASTATTN_IMPORT(Type, stem, function)                     \
  FASTATTN_DECLARE(Type, stem);                                   \
  inline const Type& function {                                   \
    static const Type* const all[] = {FASTATTN_OF_EACH(&, stem)}; \
    return *all[instruction_set()];                               \
  }

// Defines kernel_of(problem), which returns the kernel exported as `stem`.
#define FASTATTN_KERNEL(Problem, stem) FASTATTN_IMPORT(Kernel<Problem>, stem, kernel_of(const Problem&))

}  // namespace fastattn
