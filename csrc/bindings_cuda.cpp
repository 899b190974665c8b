// The operations of the `cuda` backend as torch ops. Of this library the only file that sees torch; stable ABI.
#include <torch/csrc/stable/accelerator.h>

#include <optional>
#include <tuple>
#include <vector>

#include "cuda/dropout.h"
#include "schemas.h"
#include "tensors.h"

// torch declares it where it is built with CUDA itself; libtorch_cuda has it.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace {

using namespace fastattn;
using namespace fastattn::cuda;

// The device of an operand, made the current one while this lives, and its current stream.
struct Place {
  Device device;
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream;

  explicit Place(const Tensor& operand) : device(device_of(operand)), guard(device.index) {
    void* current;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device.index, &current));
    stream = (cudaStream_t)current;
  }
};

// ---- dropout ----

void run_dropout(const Place& place, const Matrices& in, const Matrices& to, const Tensor* input, const Tensor& out,
                 const Tensor& seed, int64_t threshold) {
  const Tensor numbers = torch::stable::contiguous(seed);
  Dropout problem;
  set_matrices(problem, in, to, input, out);
  problem.seed = numbers.const_data_ptr<int64_t>();
  problem.threshold = (int)threshold;
  cuda::dropout(problem, place.stream);
}

Tensor dropout(const Tensor& input, const Tensor& seed, int64_t threshold) {
  const Place place(input);
  return map_matrices(input, place.device,
                      [&](const Matrices& in, const Matrices& to, const Tensor& x, const Tensor& out) {
                        run_dropout(place, in, to, &x, out, seed, threshold);
                      });
}

Tensor dropout_mask(std::vector<int64_t> shape, const Tensor& seed, int64_t threshold) {
  const Place place(seed);
  const Tensor out = empty(Sizes(shape.data(), shape.size()), Dtype::boolean, place.device);
  Matrices to;
  to.describe(out);
  run_dropout(place, to, to, nullptr, out, seed, threshold);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY(fastattn_cuda, m) {
  m.def(schemas::kDropout);
  m.def(schemas::kDropoutMask);
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_cuda, CompositeExplicitAutograd, m) {
  m.impl("dropout", TORCH_BOX(&::dropout));
  m.impl("dropout_mask", TORCH_BOX(&::dropout_mask));
}
