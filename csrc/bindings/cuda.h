// The part of the bindings for the library of the `cuda` backend.
#pragma once
#include <torch/csrc/stable/accelerator.h>

#include "../cuda/kernels.h"
#include "tensors.h"

#define FASTATTN_LIBRARY fastattn_cuda

// A function of libtorch_cuda. torch's headers declare it only in a torch that is built with CUDA.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace fastattn {

// Declares the launch of a kernel.
#define FASTATTN_KERNEL(Problem, stem)    \
  namespace cuda {                        \
  template <>                             \
  void run(const Problem&, cudaStream_t); \
  }

namespace {

// The device of an operand, which is the current device in this scope, and its current stream.
struct Backend {
  static constexpr bool kSumsMaskGrad = false, kReadsOffsets = false;
  Device device;
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream;

  explicit Backend(const Tensor& operand) : device(device_of(operand)), guard(device.index) {
    void* current;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device.index, &current));
    stream = (cudaStream_t)current;
  }

  // Whether a fast path's call of attention can be served, with what a backward pass reads if `keep`. The kernel for
  // Hopper serves none of them.
  static bool serves(const Attention& a, bool keep) { return !keep && cuda::is_for_decoding(a) && !a.key_lengths; }

  // Whether the backward pass reads the residual of a call whose operands have 16 bits.
  static bool reads_residual(const Attention&) { return true; }

  // Return a gradient of the output as the kernel reads it: TMA loads rows that begin at multiples of 16 bytes, and no
  // expanded dimension.
  static Tensor loadable(const Tensor& grad_out) {
    const Sizes sizes = grad_out.sizes(), strides = grad_out.strides();
    bool is_aligned = has_dense_columns(grad_out) && (uintptr_t)grad_out.const_data_ptr() % 16 == 0;
    for (size_t d = 0; d + 1 < sizes.size(); ++d)
      is_aligned = is_aligned && (sizes[d] == 1 || (strides[d] > 0 && strides[d] % 8 == 0));
    if (is_aligned) return grad_out;
    Tensor copy = empty(sizes, dtype_of(grad_out, "grad_out"), device_of(grad_out));
    torch::stable::copy_(copy, grad_out);
    return copy;
  }

  template <class Problem>
  void run(const Problem& problem) const {
    cuda::run(problem, stream);
  }

  void run(const LayerNormBackward& problem) const {
    const Tensor workspace = empty({cuda::workspace(problem)}, Dtype::float32, device);
    cuda::run(problem, workspace.mutable_data_ptr<float>(), stream);
  }

  void run(const Attention& a) const {
    STD_TORCH_CHECK(a.seqlen_q <= cuda::kMaxKeys && a.seqlen_k <= cuda::kMaxKeys && a.rows <= INT32_MAX,
                    "attention: at most ", cuda::kMaxKeys, " queries or keys and 2**31 - 1 rows of queries");
    if (a.rows == 0 || a.batch == 0) return;
    if (cuda::is_for_decoding(a)) {
      const int num_splits = cuda::num_splits_of(a, device.index);
      const Tensor workspace = empty({cuda::workspace(a, num_splits)}, Dtype::float32, device);
      return cuda::run(a, num_splits, workspace.mutable_data_ptr<float>(), stream);
    }
#ifdef FASTATTN_HOPPER
    STD_TORCH_CHECK(cuda::is_for_hopper(a),
                    "attention: the kernel for Hopper takes 16-bit operands with heads of 8 to 256 columns, rows that ",
                    "begin at multiples of 16 bytes and no expanded dimension");
    const Tensor workspace = empty({cuda::hopper_workspace(a)}, Dtype::float32, device);
    cuda::run_hopper(a, workspace.mutable_data_ptr<float>(), cuda::multiprocessors_of(device.index), stream);
#else
    STD_TORCH_CHECK(false, "attention: this library has no kernel for Hopper");
#endif
  }

  // Of a library with the kernels for Hopper.
  void run(const AttentionBackward& a) const {
    STD_TORCH_CHECK(a.seqlen_q <= cuda::kMaxKeys && a.seqlen_k <= cuda::kMaxKeys, "attention_backward: at most ",
                    cuda::kMaxKeys, " queries or keys");
    STD_TORCH_CHECK(!a.grad_mask, "attention_backward: the kernel for Hopper has no gradient of a mask");
    STD_TORCH_CHECK(cuda::is_for_hopper(a),
                    "attention_backward: the kernel for Hopper takes 16-bit operands whose rows ",
                    "begin at multiples of 16 bytes");
    const Tensor workspace = empty({cuda::hopper_workspace(a)}, Dtype::float32, device);
    cuda::run_hopper(a, workspace.mutable_data_ptr<float>(), stream);
  }
};

}  // namespace
}  // namespace fastattn
