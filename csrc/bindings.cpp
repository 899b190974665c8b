// The operations of the `cpu` backend as torch ops. The only file of this library that sees torch; stable ABI.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <string>
#include <tuple>
#include <vector>

#include "cpu/kernels.h"

namespace {

using namespace fastattn;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

// ---- instruction sets ----

std::string isas() {
  int count;
  const InstructionSet* sets = instruction_sets(&count);
  std::string names;
  for (int i = 0; i < count; ++i) names += (i ? "," : "") + std::string(sets[i].name);
  return names;
}

const InstructionSet& table() {
  const InstructionSet* current = kernels();
  STD_TORCH_CHECK(current, "FASTATTN_CPU_ISA names an instruction set that this machine does not have; it has ", isas());
  return *current;
}

std::string isa() { return table().name; }

void set_isa(std::string name) {
  STD_TORCH_CHECK(use_instruction_set(name.c_str()), "isa '", name, "': this machine has ", isas());
}

// ---- what the kernels need of torch ----

Parallel torch_threads() {
  return {(int)torch::stable::get_num_threads(), [](int workers, void (*body)(void*, int), void* argument) {
            torch::stable::parallel_for(0, workers, 1, [=](int64_t begin, int64_t end) {
              for (int64_t worker = begin; worker < end; ++worker) body(argument, (int)worker);
            });
          }};
}

Dtype dtype_of(const Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return Dtype::float32;
    case ScalarType::BFloat16: return Dtype::bfloat16;
    case ScalarType::Half: return Dtype::float16;
    case ScalarType::Bool: return Dtype::boolean;
    default: break;
  }
  STD_TORCH_CHECK(false, name, " has dtype ", torch::headeronly::toString(tensor.scalar_type()),
                  ", expected float32, bfloat16 or float16");
}

int32_t shim_dtype(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return aoti_torch_dtype_float32();
    case ScalarType::BFloat16: return aoti_torch_dtype_bfloat16();
    case ScalarType::Half: return aoti_torch_dtype_float16();
    case ScalarType::Bool: return aoti_torch_dtype_bool();
    default: break;
  }
  STD_TORCH_CHECK(false, "no output of dtype ", torch::headeronly::toString(dtype));
}

// Not through the dispatcher, which costs as much as a small operation.
Tensor empty_strided(Sizes sizes, Sizes strides, ScalarType dtype) {
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided((int64_t)sizes.size(), sizes.data(), strides.data(),
                                                         shim_dtype(dtype), aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

constexpr int kMaxDims = 64;  // torch's own limit

Tensor empty(Sizes sizes, ScalarType dtype) {
  int64_t strides[kMaxDims], stride = 1;
  for (int64_t d = (int64_t)sizes.size() - 1; d >= 0; --d) {
    strides[d] = stride;
    stride *= sizes[d] > 1 ? sizes[d] : 1;
  }
  return empty_strided(sizes, Sizes(strides, sizes.size()), dtype);
}

Seed seed_of(const Tensor& seed) {
  STD_TORCH_CHECK(seed.scalar_type() == ScalarType::Long && seed.numel() == 2,
                  "seed: expected an int64 tensor of shape (2,)");
  const int64_t* values = seed.const_data_ptr<int64_t>();
  const int64_t pair[2] = {values[0], values[seed.stride(0)]};
  return make_seed(pair);
}

// A tensor as a stack of matrices: the last two dimensions, and all others folded into two.
struct Matrices {
  int64_t outer = 1, inner = 1, rows = 1, columns = 1;
  int64_t outer_stride = 0, inner_stride = 0, row_stride = 0;

  // False where the columns are not dense or the other dimensions do not fold.
  bool describe(const Tensor& tensor) {
    const Sizes sizes = tensor.sizes(), strides = tensor.strides();
    const int64_t dims = (int64_t)sizes.size();
    if (dims >= 1) {
      columns = sizes[dims - 1];
      if (columns > 1 && strides[dims - 1] != 1) return false;
    }
    if (dims >= 2) {
      rows = sizes[dims - 2];
      row_stride = strides[dims - 2];
    }
    int64_t folded = 0;
    for (int64_t d = dims - 3; d >= 0; --d) {
      if (sizes[d] == 1) continue;
      if (folded == 0) {
        inner = sizes[d];
        inner_stride = strides[d];
        folded = 1;
      } else if (folded == 1 && strides[d] == inner * inner_stride) {
        inner *= sizes[d];
      } else if (folded == 1) {
        outer = sizes[d];
        outer_stride = strides[d];
        folded = 2;
      } else if (strides[d] == outer * outer_stride) {
        outer *= sizes[d];
      } else {
        return false;
      }
    }
    return true;
  }
};

// ---- dropout ----

// Whether the elements fill a block of memory without gaps or overlaps, in whatever order of dimensions.
bool is_dense(const Tensor& tensor) {
  const Sizes sizes = tensor.sizes(), strides = tensor.strides();
  int64_t filled = 1;
  for (bool found = true; found;) {
    found = false;
    for (size_t d = 0; d < sizes.size(); ++d)
      if (sizes[d] > 1 && strides[d] == filled) {
        filled *= sizes[d];
        found = true;
        break;
      }
  }
  return filled == tensor.numel();
}

void run_dropout(const Matrices& in, const Matrices& out, const Tensor* input, const Tensor& output, Seed seed,
                 int64_t threshold) {
  Dropout problem;
  problem.input = input ? input->const_data_ptr() : nullptr;
  problem.out = output.mutable_data_ptr();
  problem.dtype = dtype_of(output, "input");
  problem.outer = in.outer, problem.inner = in.inner, problem.rows = in.rows, problem.columns = in.columns;
  problem.input_outer = in.outer_stride, problem.input_inner = in.inner_stride, problem.input_row = in.row_stride;
  problem.out_outer = out.outer_stride, problem.out_inner = out.inner_stride, problem.out_row = out.row_stride;
  problem.seed = seed;
  problem.threshold = (int)threshold;
  (input ? table().dropout->dropout : table().dropout->mask)(problem, torch_threads());
}

Tensor dropout(const Tensor& input, const Tensor& seed, int64_t threshold) {
  const bool same_order = !input.is_contiguous() && is_dense(input);
  Matrices in;
  if (!in.describe(input)) {
    const Tensor out = dropout(torch::stable::contiguous(input), seed, threshold);
    if (!same_order) return out;
    Tensor reordered = empty_strided(input.sizes(), input.strides(), input.scalar_type());
    return torch::stable::copy_(reordered, out);
  }
  const Tensor out = same_order ? empty_strided(input.sizes(), input.strides(), input.scalar_type())
                                : empty(input.sizes(), input.scalar_type());
  Matrices to = in;
  if (!same_order) {
    to.row_stride = in.columns;
    to.inner_stride = in.rows * in.columns;
    to.outer_stride = in.inner * to.inner_stride;
  }
  run_dropout(in, to, &input, out, seed_of(seed), threshold);
  return out;
}

Tensor dropout_mask(std::vector<int64_t> shape, const Tensor& seed, int64_t threshold) {
  const Tensor out = empty(Sizes(shape.data(), shape.size()), ScalarType::Bool);
  Matrices to;
  to.describe(out);
  run_dropout(to, to, nullptr, out, seed_of(seed), threshold);
  return out;
}

// ---- limits ----

// At least so many floating-point operations on all threads, in the arithmetic of `bfloat16` or of float32.
void multiply_add(int64_t operations, bool bfloat16) {
  const Parallel threads = torch_threads();
  std::vector<float> sink(threads.threads);
  (bfloat16 ? table().limits->bfloat16 : table().limits->float32)(sink.data(), operations, threads);
}

}  // namespace

STABLE_TORCH_LIBRARY(fastattn_cpu, m) {
  m.def("isa() -> str");
  m.def("isas() -> str");
  m.def("set_isa(str name) -> ()");
  m.def("multiply_add(int operations, bool bfloat16) -> ()");
  m.def("dropout(Tensor input, Tensor seed, int threshold) -> Tensor");
  m.def("dropout_mask(SymInt[] shape, Tensor seed, int threshold) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_cpu, CompositeExplicitAutograd, m) {
  m.impl("isa", TORCH_BOX(&isa));
  m.impl("isas", TORCH_BOX(&isas));
  m.impl("set_isa", TORCH_BOX(&set_isa));
  m.impl("multiply_add", TORCH_BOX(&multiply_add));
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_cpu, CPU, m) {
  m.impl("dropout", TORCH_BOX(&dropout));
  m.impl("dropout_mask", TORCH_BOX(&dropout_mask));
}
