// The part of the bindings for the library of the `cpu` backend.
#pragma once
#include "../cpu/kernels.h"
#include "tensors.h"

#define FASTATTN_LIBRARY fastattn_cpu

namespace fastattn {

// Return the names of the instruction sets for which has(index) holds, separated by commas.
inline std::string instruction_sets_with(bool (*has)(int)) {
  std::string names;
  for (int i = 0; i < kInstructionSetCount; ++i)
    if (has(i)) names += (names.empty() ? "" : ",") + std::string(kInstructionSets[i]);
  return names;
}

inline void check_instruction_set() {
  STD_TORCH_CHECK(instruction_set() >= 0, "FASTATTN_CPU_ISA names an instruction set that this machine does not have; ",
                  "it has ", instruction_sets_with(&has_instruction_set));
}

inline Parallel torch_threads() {
  return {(int)torch::stable::get_num_threads(), [](int workers, void (*body)(void*, int), void* argument) {
            torch::stable::parallel_for(0, workers, 1, [=](int64_t begin, int64_t end) {
              for (int64_t worker = begin; worker < end; ++worker) body(argument, (int)worker);
            });
          }};
}

// A call's workspace, 64-byte aligned. A small one is on the stack. A medium one is memory that the thread keeps,
// because page faults would cost such a call more than its arithmetic. A large one is a tensor.
struct Workspace {
  static constexpr int64_t kAlignment = 64, kLocal = 16 << 10, kKept = 1 << 20;
  struct Kept {
    alignas(kAlignment) char data[kKept];
    bool taken;
  };
  static inline thread_local Kept kept;

  alignas(kAlignment) char local[kLocal];
  std::optional<Tensor> tensor;
  char* data = local;

  Workspace(const Workspace&) = delete;
  explicit Workspace(int64_t bytes) {
    if (bytes <= kLocal) return;
    if (bytes <= kKept && !kept.taken) {
      kept.taken = true;
      data = kept.data;
      return;
    }
    tensor = empty({(bytes + kAlignment + 3) / 4}, Dtype::float32, Device{});
    data = (char*)round_up((int64_t)tensor->mutable_data_ptr(), kAlignment);
  }
  ~Workspace() {
    if (data == kept.data) kept.taken = false;
  }
};

namespace {

// The device of a call's results, and the runner of its kernel.
struct Backend {
  static constexpr bool kSumsMaskGrad = true, kReadsOffsets = true;
  Device device;

  explicit Backend(const Tensor&) {}

  // Return a gradient of the output as the kernel reads it.
  static Tensor loadable(const Tensor& grad_out) { return with_dense_columns(grad_out); }

  // Whether a fast path's call of attention can be served, with what a backward pass reads if `keep`.
  template <class Problem>
  static constexpr bool serves(const Problem&, bool) {
    return true;
  }

  // Whether the backward pass reads the residual of a call whose operands have 16 bits.
  static bool reads_residual(const Attention& a) { return !has_short_rows(a); }

  template <class Problem>
  void run(const Problem& problem) const {
    check_instruction_set();
    const Kernel<Problem>& kernel = kernel_of(problem);
    const Parallel threads = torch_threads();
    const Workspace workspace(kernel.workspace(problem, threads));
    kernel.run(problem, threads, workspace.data);
  }
};

}  // namespace
}  // namespace fastattn
