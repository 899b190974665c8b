// The operations of the `cuda` backend as torch ops; stable ABI. Python defines their schemas.
#include <torch/csrc/stable/accelerator.h>

#include <string>

#include "../cuda/kernels.h"
#include "attention.h"
#include "dropout.h"
#include "layer_norm.h"
#include "softmax_dropout.h"

// torch declares it where it is built with CUDA itself; libtorch_cuda has it.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace {

using namespace fastattn;

std::string contract() { return FASTATTN_CONTRACT; }

// The device of an operand, the current one while this lives, and its current stream.
struct Cuda {
  static constexpr bool kSumsMaskGrad = false;
  Device device;
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream;

  explicit Cuda(const Tensor& operand) : device(device_of(operand)), guard(device.index) {
    void* current;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device.index, &current));
    stream = (cudaStream_t)current;
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
    const int64_t rows = a.batch * a.num_heads * a.seqlen_q;
    STD_TORCH_CHECK(a.threshold == 0, "attention: this backend has no dropout");
    STD_TORCH_CHECK(a.seqlen_k <= cuda::kMaxKeys && rows <= INT32_MAX, "attention: at most ", cuda::kMaxKeys,
                    " keys and 2**31 - 1 rows of queries");
    if (rows == 0) return;
    const int num_splits = cuda::num_splits_of(a, device.index);
    const Tensor workspace = empty({cuda::workspace(a, num_splits)}, Dtype::float32, device);
    cuda::run(a, num_splits, workspace.mutable_data_ptr<float>(), stream);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY(fastattn_cuda, m) { m.def("contract() -> str"); }

STABLE_TORCH_LIBRARY_IMPL(fastattn_cuda, CompositeExplicitAutograd, m) {
  m.impl("contract", TORCH_BOX(&contract));
  m.impl("attention", TORCH_BOX(&attention<Cuda>));
  m.impl("softmax_dropout", TORCH_BOX(&softmax_dropout<Cuda>));
  m.impl("softmax_dropout_backward", TORCH_BOX(&softmax_dropout_backward<Cuda>));
  m.impl("layer_norm", TORCH_BOX(&layer_norm<Cuda>));
  m.impl("layer_norm_backward", TORCH_BOX(&layer_norm_backward<Cuda>));
  m.impl("dropout_add_layer_norm", TORCH_BOX(&dropout_add_layer_norm<Cuda>));
  m.impl("dropout_add_layer_norm_backward", TORCH_BOX(&dropout_add_layer_norm_backward<Cuda>));
  m.impl("dropout", TORCH_BOX(&dropout<Cuda>));
  m.impl("dropout_mask", TORCH_BOX(&dropout_mask<Cuda>));
}
