// The operations of the `cpu` backend as torch ops; stable ABI. Python defines their schemas.
#include <float.h>
#include <math.h>

#include <string>

#include "../cpu/kernels.h"
#include "attention.h"
#include "dropout.h"
#include "layer_norm.h"
#include "softmax_dropout.h"

namespace {

using namespace fastattn;

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
  STD_TORCH_CHECK(current, "FASTATTN_CPU_ISA names an instruction set that this machine does not have; it has ",
                  isas());
  return *current;
}

std::string isa() { return table().name; }

void set_isa(std::string name) {
  STD_TORCH_CHECK(use_instruction_set(name.c_str()), "isa '", name, "': this machine has ", isas());
}

std::string contract() { return FASTATTN_CONTRACT; }

const Kernel<Attention>& kernel_of(const Attention&) { return *table().attention; }
const Kernel<AttentionBackward>& kernel_of(const AttentionBackward&) { return *table().attention_backward; }
const Kernel<Dropout>& kernel_of(const Dropout&) { return *table().dropout; }
const Kernel<LayerNorm>& kernel_of(const LayerNorm&) { return table().layer_norm->forward; }
const Kernel<LayerNormBackward>& kernel_of(const LayerNormBackward&) { return table().layer_norm->backward; }
const Kernel<SoftmaxDropout>& kernel_of(const SoftmaxDropout&) { return table().softmax_dropout->forward; }
const Kernel<SoftmaxDropoutBackward>& kernel_of(const SoftmaxDropoutBackward&) {
  return table().softmax_dropout->backward;
}

// ---- the backend ----

Parallel torch_threads() {
  return {(int)torch::stable::get_num_threads(), [](int workers, void (*body)(void*, int), void* argument) {
            torch::stable::parallel_for(0, workers, 1, [=](int64_t begin, int64_t end) {
              for (int64_t worker = begin; worker < end; ++worker) body(argument, (int)worker);
            });
          }};
}

// A call's workspace, 64-byte aligned: on the stack where it is small; of medium size, memory that the thread keeps,
// since page faults would cost such a call more than its arithmetic.
struct Workspace {
  static constexpr int64_t kAlignment = 64, kLocal = 128 << 10, kKept = 1 << 20;
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

struct Cpu {
  static constexpr bool kSumsMaskGrad = true;
  Device device;

  explicit Cpu(const Tensor&) {}

  template <class Problem>
  void run(const Problem& problem) const {
    const Kernel<Problem>& kernel = kernel_of(problem);
    const Parallel threads = torch_threads();
    const Workspace workspace(kernel.workspace(problem, threads));
    kernel.run(problem, threads, workspace.data);
  }
};

// ---- the fast path of decoding ----

// A dense CPU tensor (batch, heads, rows, columns) of a dtype that the kernels take.
bool is_plain(const Tensor& tensor, Dtype* dtype) {
  if (!tensor.defined()) return false;
  int32_t device, layout;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(tensor.get(), &layout));
  return device == aoti_torch_device_type_cpu() && layout == aoti_torch_layout_strided() && is_dtype(tensor, dtype) &&
         *dtype != Dtype::boolean && tensor.dim() == 4 && has_dense_columns(tensor);
}

// A whole public call without checks in Python, gradient and statistics. Undefined, None in Python, where it is not a
// plain one: the public function then takes the usual path, which words the errors.
Tensor attention_fast(const Tensor& query, const Tensor& key, const Tensor& value,
                      const std::optional<Tensor>& attn_mask, double dropout_p, bool is_causal,
                      std::optional<double> scale, bool enable_gqa) {
  constexpr int64_t kMaxHeadDim = 256;
  Dtype dtype, key_dtype, value_dtype;
  if (attn_mask || dropout_p != 0 || enable_gqa || !is_plain(query, &dtype) || !is_plain(key, &key_dtype) ||
      !is_plain(value, &value_dtype) || key_dtype != dtype || value_dtype != dtype)
    return Tensor();
  const Sizes q = query.sizes(), k = key.sizes(), v = value.sizes();
  if (k[0] != q[0] || v[0] != q[0] || k[1] != q[1] || v[1] != q[1] || v[2] != k[2] || k[3] != q[3]) return Tensor();
  if (q[3] < 1 || q[3] > kMaxHeadDim || v[3] < 1 || v[3] > kMaxHeadDim) return Tensor();
  double factor = scale.value_or(1 / sqrt((double)q[3]));
  if (!(fabs(factor) <= FLT_MAX)) return Tensor();
  if (fabs(factor) < FLT_MIN) factor = 0;

  const Cpu backend(query);
  Attention a = {};
  set_operands(a, query, key, value, std::nullopt, factor, q[2], is_causal ? 0 : k[2], false, 0);
  const Tensor out = empty_heads(query, a.seqlen_q, a.value_head_dim, backend.device);
  a.out = heads_of(out);
  backend.run(a);
  return out;
}

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
  m.def("contract() -> str");
  m.def("multiply_add(int operations, bool bfloat16) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_cpu, CompositeExplicitAutograd, m) {
  m.impl("isa", TORCH_BOX(&isa));
  m.impl("isas", TORCH_BOX(&isas));
  m.impl("set_isa", TORCH_BOX(&set_isa));
  m.impl("contract", TORCH_BOX(&contract));
  m.impl("multiply_add", TORCH_BOX(&multiply_add));
  m.impl("attention_fast", TORCH_BOX(&attention_fast));
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_cpu, CPU, m) {
  m.impl("attention", TORCH_BOX(&attention<Cpu>));
  m.impl("attention_backward", TORCH_BOX(&attention_backward<Cpu>));
  m.impl("varlen_attention", TORCH_BOX(&varlen_attention<Cpu>));
  m.impl("varlen_attention_backward", TORCH_BOX(&varlen_attention_backward<Cpu>));
  m.impl("softmax_dropout", TORCH_BOX(&softmax_dropout<Cpu>));
  m.impl("softmax_dropout_backward", TORCH_BOX(&softmax_dropout_backward<Cpu>));
  m.impl("layer_norm", TORCH_BOX(&layer_norm<Cpu>));
  m.impl("layer_norm_backward", TORCH_BOX(&layer_norm_backward<Cpu>));
  m.impl("dropout_add_layer_norm", TORCH_BOX(&dropout_add_layer_norm<Cpu>));
  m.impl("dropout_add_layer_norm_backward", TORCH_BOX(&dropout_add_layer_norm_backward<Cpu>));
  m.impl("dropout", TORCH_BOX(&dropout<Cpu>));
  m.impl("dropout_mask", TORCH_BOX(&dropout_mask<Cpu>));
}
