// The operations of the `cuda` backend as torch ops. Of this library the only file that sees torch; stable ABI.
#include <torch/csrc/stable/accelerator.h>

#include <optional>
#include <tuple>
#include <vector>

#include "cuda/attention.h"
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

// ---- attention ----

std::tuple<Tensor, Tensor, Tensor> attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                             std::optional<Tensor> attn_mask, std::optional<Tensor> key_lengths,
                                             std::optional<Tensor> seed, double scale, int64_t window_left,
                                             int64_t window_right, bool lower_right, int64_t threshold) {
  const Place place(query);
  const Tensor q = with_dense_columns(query), k = with_dense_columns(key), v = with_dense_columns(value);
  Attention a = {};
  a.dtype = dtype_of(query, "query");
  a.batch = q.size(0), a.heads = q.size(1), a.key_heads = k.size(1), a.queries = q.size(2), a.keys = k.size(2);
  STD_TORCH_CHECK(threshold == 0 && !seed && a.keys <= kMostKeys, "attention: no dropout, and at most ", kMostKeys,
                  " keys");
  a.depth = (int)q.size(3), a.value_depth = (int)v.size(3);
  a.query = heads_of(q), a.key = heads_of(k), a.value = heads_of(v);
  const Tensor lengths = key_lengths ? torch::stable::contiguous(*key_lengths) : Tensor();
  if (key_lengths) a.key_lengths = lengths.const_data_ptr<int64_t>();
  a.mask = mask_of(attn_mask);
  a.scale = (float)scale;
  const int64_t far = a.queries + a.keys;  // beyond all keys there is no bound
  a.window_left = window_left < far ? window_left : -1;
  a.window_right = window_right < far ? window_right : -1;
  a.lower_right = lower_right;
  const int64_t rows[4] = {2, a.batch, a.heads, a.queries};
  const Tensor out = empty_heads(query, a.queries, a.value_depth, place.device);
  const Tensor lse = empty(Sizes(rows + 1, 3), Dtype::float32, place.device);
  const Tensor stats = empty(Sizes(rows, 4), Dtype::float32, place.device);
  a.out = heads_of(out);
  a.lse = lse.mutable_data_ptr<float>();
  a.reference = stats.mutable_data_ptr<float>(), a.sum = a.reference + lse.numel();
  if (lse.numel() == 0) return {out, lse, stats};
  const int splits = attention_splits(a, place.device.index);
  const int64_t floats = attention_workspace(a, splits);
  const Tensor workspace = empty(Sizes(&floats, 1), Dtype::float32, place.device);
  cuda::attention(a, splits, workspace.mutable_data_ptr<float>(), place.stream);
  return {out, lse, stats};
}

}  // namespace

STABLE_TORCH_LIBRARY(fastattn_cuda, m) {
  m.def(schemas::kAttention);
  m.def(schemas::kDropout);
  m.def(schemas::kDropoutMask);
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_cuda, CompositeExplicitAutograd, m) {
  m.impl("attention", TORCH_BOX(&::attention));
  m.impl("dropout", TORCH_BOX(&::dropout));
  m.impl("dropout_mask", TORCH_BOX(&::dropout_mask));
}
