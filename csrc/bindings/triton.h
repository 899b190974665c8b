// The part of the bindings for the library of the `triton` backend, which starts Triton's kernels.
#pragma once
#include "../launch/kernels.h"
#include "tensors.h"

#define FASTATTN_LIBRARY fastattn_triton

namespace fastattn {

// Declares nothing, because csrc/launch/kernels.h declares all launches.
#define FASTATTN_KERNEL(Problem, stem)

namespace {

// The device of an operand, and its current stream.
struct Backend {
  static constexpr bool kSumsMaskGrad = false, kReadsOffsets = false;
  Device device;
  triton::Place place;

  explicit Backend(const Tensor& operand)
      : device(device_of(operand)), place{std::max(device.index, 0), nullptr} {  // tests have operands on the CPU
    place.stream = triton::current_stream(place.device);
  }

  // Return a gradient of the output as the kernel reads it.
  static Tensor loadable(const Tensor& grad_out) { return with_dense_columns(grad_out); }

  // Whether a fast path's call of attention can be served, with what a backward pass reads if `keep`.
  static bool serves(const Attention& a, bool) { return triton::serves(a); }

  // Whether the backward pass reads the residual of a call whose operands have 16 bits.
  static bool reads_residual(const Attention&) { return true; }

  template <class Problem>
  void run(const Problem& problem) const {
    triton::run(problem, place);
  }

  void run(const LayerNormBackward& problem) const { run_with_workspace(problem); }
  void run(const Attention& problem) const { run_with_workspace(problem); }
  void run(const AttentionBackward& problem) const { run_with_workspace(problem); }

 private:
  template <class Problem>
  void run_with_workspace(const Problem& problem) const {
    std::optional<Tensor> workspace;
    triton::run(problem, place, [&](int64_t floats) {
      if (floats > 0) workspace = empty({floats}, Dtype::float32, device);
      return floats > 0 ? workspace->mutable_data_ptr<float>() : nullptr;
    });
  }
};

}  // namespace
}  // namespace fastattn
