// The operations of the `cpu` backend as torch ops. The only file of this library that sees torch; stable ABI.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <sys/mman.h>

#include <optional>
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
  STD_TORCH_CHECK(current, "FASTATTN_CPU_ISA names an instruction set that this machine does not have; it has ",
                  isas());
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

// Fresh memory costs a page fault for every 4 KiB, more than the kernels' own work on it; huge pages cost 512 times
// fewer.
void prefer_huge_pages(const Tensor& tensor, int64_t bytes) {
  constexpr int64_t kWorthwhile = 4 << 20;
  constexpr uintptr_t kPage = 4096;
  if (bytes < kWorthwhile) return;
  const uintptr_t first = (uintptr_t)tensor.mutable_data_ptr();
  const uintptr_t begin = (first + kPage - 1) & ~(kPage - 1), end = (first + (uintptr_t)bytes) & ~(kPage - 1);
  madvise((void*)begin, end - begin, MADV_HUGEPAGE);  // a hint: kernels without huge pages refuse it
}

// Not through the dispatcher, which costs as much as a small operation.
Tensor empty_strided(Sizes sizes, Sizes strides, ScalarType dtype) {
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided((int64_t)sizes.size(), sizes.data(), strides.data(),
                                                         shim_dtype(dtype), aoti_torch_device_type_cpu(), 0, &handle));
  const Tensor tensor(handle);
  prefer_huge_pages(tensor, tensor.numel() * (dtype == ScalarType::Float ? 4 : dtype == ScalarType::Bool ? 1 : 2));
  return tensor;
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

// A call's scratch memory: on the stack where it is small.
struct Workspace {
  static constexpr int64_t kLocal = 8192;
  alignas(64) char local[kLocal];
  std::optional<Tensor> tensor;
  void* data = local;

  Workspace(const Workspace&) = delete;
  explicit Workspace(int64_t bytes) {
    if (bytes <= kLocal) return;
    const int64_t floats = (bytes + 3) / 4;
    tensor = empty(Sizes(&floats, 1), ScalarType::Float);
    data = tensor->mutable_data_ptr();
  }
};

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

// A tensor as rows at one stride: the last dimension, and all others folded into one; a copy where they do not fold.
struct Rows {
  Tensor tensor;
  const void* data;
  Dtype dtype;
  int64_t stride = 0;

  Rows(const Tensor& source, const char* name)
      : tensor(folds(source) ? source : torch::stable::contiguous(source)),
        data(tensor.const_data_ptr()),
        dtype(dtype_of(source, name)) {
    const Sizes sizes = tensor.sizes(), strides = tensor.strides();
    for (int64_t d = (int64_t)sizes.size() - 2; d >= 0; --d)
      if (sizes[d] > 1) {
        stride = strides[d];
        break;
      }
  }

 private:
  static bool folds(const Tensor& tensor) {
    const Sizes sizes = tensor.sizes(), strides = tensor.strides();
    const int64_t last = (int64_t)sizes.size() - 1;
    if (sizes[last] > 1 && strides[last] != 1) return false;
    int64_t expected = -1;
    for (int64_t d = last - 1; d >= 0; --d) {
      if (sizes[d] == 1) continue;
      if (expected >= 0 && strides[d] != expected) return false;
      expected = strides[d] * sizes[d];
    }
    return true;
  }
};

Tensor nothing(ScalarType dtype) {
  const int64_t size = 0;
  return empty(Sizes(&size, 1), dtype);
}

Sizes without_last(Sizes sizes) { return Sizes(sizes.data(), sizes.size() - 1); }

// (matrices, rows, columns) as the dropout formula counts them: a 1-D tensor is one row.
template <class Problem>
void set_shape(Problem& problem, Sizes sizes) {
  const int64_t dims = (int64_t)sizes.size();
  problem.columns = sizes[dims - 1];
  problem.rows = dims >= 2 ? sizes[dims - 2] : 1;
  problem.matrices = 1;
  for (int64_t d = 0; d < dims - 2; ++d) problem.matrices *= sizes[d];
}

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

// ---- attention ----

Tensor with_dense_columns(const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  return tensor.size(last) == 1 || tensor.stride(last) == 1 ? tensor : torch::stable::contiguous(tensor);
}

// (batch, heads, rows, columns), or (rows, heads, columns) of packed sequences.
Heads heads_of(const Tensor& tensor) {
  void* data = const_cast<void*>(tensor.const_data_ptr());
  if (tensor.dim() == 3) return {data, 0, tensor.stride(1), tensor.stride(0)};
  return {data, tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

// (batch, heads, length, size): heads lie inside positions where they do so in `like`, otherwise contiguous.
Tensor empty_heads(const Tensor& like, int64_t length, int64_t size) {
  const int64_t batch = like.size(0), heads = like.size(1);
  const int64_t sizes[4] = {batch, heads, length, size};
  const bool inside = like.stride(1) < like.stride(2);
  const int64_t strides[4] = {heads * length * size, inside ? size : length * size, inside ? heads * size : size, 1};
  return empty_strided(Sizes(sizes, 4), Sizes(strides, 4), like.scalar_type());
}

AttentionMask mask_of(const std::optional<Tensor>& tensor) {
  AttentionMask mask = {};
  if (!tensor) return mask;
  mask.data = const_cast<void*>(tensor->const_data_ptr());
  mask.dtype = dtype_of(*tensor, "attn_mask");
  const auto dimension = [&](int d, int64_t* size, int64_t* stride) {
    *stride = tensor->size(d) == 1 ? 0 : tensor->stride(d);
    *size = *stride == 0 ? 1 : tensor->size(d);
  };
  dimension(0, &mask.batches, &mask.batch);
  dimension(1, &mask.heads, &mask.head);
  dimension(2, &mask.rows, &mask.row);
  dimension(3, &mask.columns, &mask.column);
  return mask;
}

// What dense and packed attention, forward and backward, have in common.
Attention attention_problem(const Tensor& query, const Tensor& key, const Tensor& value,
                            const std::optional<Tensor>& seed, double scale, int64_t window_left, int64_t window_right,
                            int64_t threshold) {
  Attention a = {};
  const int head = (int)query.dim() - 3, row = query.dim() == 3 ? 0 : 2, column = (int)query.dim() - 1;
  a.dtype = dtype_of(query, "query");
  a.batch = query.size(0), a.queries = query.size(row), a.keys = key.size(row);
  a.heads = query.size(query.dim() == 3 ? 1 : head), a.key_heads = key.size(query.dim() == 3 ? 1 : head);
  a.depth = (int)query.size(column), a.value_depth = (int)value.size(column);
  a.query = heads_of(query), a.key = heads_of(key), a.value = heads_of(value);
  a.scale = (float)scale;
  // Beyond all keys there is no bound; this keeps sums of positions from overflowing.
  const int64_t far = a.queries + a.keys;
  a.window_left = window_left < far ? window_left : -1;
  a.window_right = window_right < far ? window_right : -1;
  if (seed) a.seed = seed_of(*seed);
  a.threshold = (int)threshold;
  return a;
}

void set_rows(Attention* a, const Tensor& stats) {
  float* data = (float*)const_cast<void*>(stats.const_data_ptr());
  a->reference = data;
  a->sum = data + stats.stride(0);
}

Tensor workspace_of(int64_t bytes) {
  const int64_t sizes[1] = {bytes / 4 + 16}, strides[1] = {1};
  return empty_strided(Sizes(sizes, 1), Sizes(strides, 1), ScalarType::Float);
}

char* align(const Tensor& workspace) { return (char*)(((uintptr_t)workspace.mutable_data_ptr() + 63) / 64 * 64); }

void run_attention_backward(const Attention& a, const AttentionGradients& gradients) {
  const Parallel threads = torch_threads();
  const AttentionBackwardKernels& kernels = *table().attention_backward;
  const Tensor workspace = workspace_of(kernels.workspace(a, gradients, threads));
  kernels.backward(a, gradients, threads, align(workspace));
}

void run_attention(const Attention& a) {
  const Parallel threads = torch_threads();
  const AttentionKernels& kernels = *table().attention;
  const Tensor workspace = workspace_of(kernels.workspace(a, threads));
  kernels.forward(a, threads, align(workspace));
}

std::tuple<Tensor, Tensor, Tensor> attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                             std::optional<Tensor> attn_mask, std::optional<Tensor> key_lengths,
                                             std::optional<Tensor> seed, double scale, int64_t window_left,
                                             int64_t window_right, bool lower_right, int64_t threshold) {
  const Tensor q = with_dense_columns(query), k = with_dense_columns(key), v = with_dense_columns(value);
  Attention a = attention_problem(q, k, v, seed, scale, window_left, window_right, threshold);
  a.mask = mask_of(attn_mask);
  a.lower_right = lower_right;
  const Tensor lengths = key_lengths ? torch::stable::contiguous(*key_lengths) : Tensor();
  if (key_lengths) a.key_lengths = lengths.const_data_ptr<int64_t>();
  const int64_t rows[4] = {2, a.batch, a.heads, a.queries};
  const Tensor out = empty_heads(query, a.queries, a.value_depth);
  const Tensor lse = empty(Sizes(rows + 1, 3), ScalarType::Float), stats = empty(Sizes(rows, 4), ScalarType::Float);
  a.out = heads_of(out);
  a.lse = lse.mutable_data_ptr<float>();
  set_rows(&a, stats);
  a.row_batch = a.heads * a.queries, a.row_head = a.queries, a.row_query = 1;
  run_attention(a);
  return {out, lse, stats};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad_out, std::optional<Tensor> grad_lse, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& out, const Tensor& stats, std::optional<Tensor> attn_mask, std::optional<Tensor> key_lengths,
    std::optional<Tensor> seed, double scale, int64_t window_left, int64_t window_right, bool lower_right,
    int64_t threshold, bool mask_grad) {
  const Tensor q = with_dense_columns(query), k = with_dense_columns(key), v = with_dense_columns(value);
  const Tensor grad = with_dense_columns(grad_out), o = with_dense_columns(out),
               rows = torch::stable::contiguous(stats);
  const Tensor lse_grad = grad_lse ? torch::stable::contiguous(*grad_lse) : Tensor();
  const Tensor lengths = key_lengths ? torch::stable::contiguous(*key_lengths) : Tensor();
  Attention a = attention_problem(q, k, v, seed, scale, window_left, window_right, threshold);
  a.mask = mask_of(attn_mask);
  a.lower_right = lower_right;
  if (key_lengths) a.key_lengths = lengths.const_data_ptr<int64_t>();
  a.out = heads_of(o);
  set_rows(&a, rows);
  a.row_batch = a.heads * a.queries, a.row_head = a.queries, a.row_query = 1;

  const Tensor query_grad = empty_heads(query, a.queries, a.depth), key_grad = empty_heads(key, a.keys, a.depth);
  const Tensor value_grad = empty_heads(value, a.keys, a.value_depth);
  const int64_t none[1] = {0};
  const Tensor mask_gradient =
      mask_grad ? empty(attn_mask->sizes(), attn_mask->scalar_type()) : empty(Sizes(none, 1), query.scalar_type());
  AttentionGradients g = {};
  g.out_grad = heads_of(grad);
  if (grad_lse) g.lse_grad = lse_grad.const_data_ptr<float>();
  g.query_grad = heads_of(query_grad), g.key_grad = heads_of(key_grad), g.value_grad = heads_of(value_grad);
  if (mask_grad) {
    // The gradient has all of the mask's elements, those too that share their memory.
    a.mask.batches = attn_mask->size(0), a.mask.heads = attn_mask->size(1);
    a.mask.rows = attn_mask->size(2), a.mask.columns = attn_mask->size(3);
    g.mask_grad = mask_gradient.mutable_data_ptr();
  }
  run_attention_backward(a, g);
  return {query_grad, key_grad, value_grad, mask_gradient};
}

// The offsets and lengths of packed sequences, as the kernels want them.
struct PackedSequences {
  Tensor query_start, key_start, used;

  PackedSequences(const Tensor& cu_seq_q, const Tensor& cu_seq_k, const std::optional<Tensor>& seqused_k)
      : query_start(torch::stable::contiguous(cu_seq_q)), key_start(torch::stable::contiguous(cu_seq_k)) {
    if (seqused_k) used = torch::stable::contiguous(*seqused_k);
  }

  void describe(Attention* a, int64_t max_q, int64_t max_k) const {
    a->batch = query_start.numel() - 1;
    a->queries = max_q, a->keys = max_k;
    a->query_start = query_start.const_data_ptr<int64_t>(), a->key_start = key_start.const_data_ptr<int64_t>();
    if (used.defined()) a->key_lengths = used.const_data_ptr<int64_t>();
    a->lower_right = true;
    a->row_head = 1, a->row_query = a->heads;
  }
};

std::tuple<Tensor, Tensor, Tensor> varlen_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                                    const Tensor& cu_seq_q, const Tensor& cu_seq_k,
                                                    std::optional<Tensor> seqused_k, std::optional<Tensor> seed,
                                                    int64_t max_q, int64_t max_k, double scale, int64_t window_left,
                                                    int64_t window_right, int64_t threshold) {
  const Tensor q = with_dense_columns(query), k = with_dense_columns(key), v = with_dense_columns(value);
  const PackedSequences sequences(cu_seq_q, cu_seq_k, seqused_k);
  Attention a = attention_problem(q, k, v, seed, scale, window_left, window_right, threshold);
  sequences.describe(&a, max_q, max_k);
  const int64_t sizes[3] = {query.size(0), a.heads, a.value_depth}, rows[3] = {2, query.size(0), a.heads};
  const Tensor out = empty(Sizes(sizes, 3), query.scalar_type());
  const Tensor lse = empty(Sizes(rows + 1, 2), ScalarType::Float), stats = empty(Sizes(rows, 3), ScalarType::Float);
  a.out = heads_of(out);
  a.lse = lse.mutable_data_ptr<float>();
  set_rows(&a, stats);
  run_attention(a);
  return {out, lse, stats};
}

std::tuple<Tensor, Tensor, Tensor> varlen_attention_backward(
    const Tensor& grad_out, std::optional<Tensor> grad_lse, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& out, const Tensor& stats, const Tensor& cu_seq_q, const Tensor& cu_seq_k,
    std::optional<Tensor> seqused_k, std::optional<Tensor> seed, int64_t max_q, int64_t max_k, double scale,
    int64_t window_left, int64_t window_right, int64_t threshold) {
  const Tensor q = with_dense_columns(query), k = with_dense_columns(key), v = with_dense_columns(value);
  const Tensor grad = with_dense_columns(grad_out), o = with_dense_columns(out),
               rows = torch::stable::contiguous(stats);
  const Tensor lse_grad = grad_lse ? torch::stable::contiguous(*grad_lse) : Tensor();
  const PackedSequences sequences(cu_seq_q, cu_seq_k, seqused_k);
  Attention a = attention_problem(q, k, v, seed, scale, window_left, window_right, threshold);
  sequences.describe(&a, max_q, max_k);
  a.out = heads_of(o);
  set_rows(&a, rows);

  const Tensor query_grad = empty(query.sizes(), query.scalar_type()), key_grad = empty(key.sizes(), key.scalar_type());
  const Tensor value_grad = empty(value.sizes(), value.scalar_type());
  AttentionGradients g = {};
  g.out_grad = heads_of(grad);
  if (grad_lse) g.lse_grad = lse_grad.const_data_ptr<float>();
  g.query_grad = heads_of(query_grad), g.key_grad = heads_of(key_grad), g.value_grad = heads_of(value_grad);
  run_attention_backward(a, g);
  return {query_grad, key_grad, value_grad};
}

// ---- layer_norm ----

// weight or bias as float32, which almost always they are.
struct Parameter {
  std::optional<Tensor> dense;
  std::optional<Workspace> converted;
  const float* values = nullptr;

  Parameter(const std::optional<Tensor>& source, const char* name) {
    if (!source) return;
    const Dtype dtype = dtype_of(*source, name);
    dense = source->is_contiguous() ? *source : torch::stable::contiguous(*source);
    values = (const float*)dense->const_data_ptr();
    if (dtype == Dtype::float32) return;
    converted.emplace(dense->numel() * 4);
    table().layer_norm->to_float32(values, dtype, dense->numel(), (float*)converted->data);
    values = (const float*)converted->data;
  }
};

std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& input, const std::optional<Tensor>& weight,
                                              const std::optional<Tensor>& bias, double eps) {
  const Sizes sizes = input.sizes();
  const Rows x(input, "input");
  const Parameter w(weight, "weight"), b(bias, "bias");
  Tensor out = empty(sizes, input.scalar_type());
  Tensor mean = empty(without_last(sizes), ScalarType::Float), rstd = empty(without_last(sizes), ScalarType::Float);
  LayerNorm problem = {};
  set_shape(problem, sizes);
  problem.rows *= problem.matrices, problem.matrices = 1;
  problem.input = x.data, problem.input_dtype = problem.dtype = x.dtype, problem.input_row = x.stride;
  problem.weight = w.values, problem.bias = b.values;
  problem.out = out.mutable_data_ptr();
  problem.mean = mean.mutable_data_ptr<float>(), problem.rstd = rstd.mutable_data_ptr<float>();
  problem.eps = (float)eps;
  table().layer_norm->forward(problem, torch_threads());
  return {out, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> dropout_add_layer_norm(const Tensor& input, const Tensor& residual,
                                                                  const std::optional<Tensor>& weight,
                                                                  const std::optional<Tensor>& bias,
                                                                  const std::optional<Tensor>& seed, int64_t threshold,
                                                                  double eps) {
  const Sizes sizes = input.sizes();
  const Rows x(input, "input"), r(residual, "residual");
  const Parameter w(weight, "weight"), b(bias, "bias");
  const ScalarType dtype = x.dtype == r.dtype ? input.scalar_type() : ScalarType::Float;
  Tensor out = empty(sizes, dtype), sum = empty(sizes, dtype);
  Tensor mean = empty(without_last(sizes), ScalarType::Float), rstd = empty(without_last(sizes), ScalarType::Float);
  LayerNorm problem = {};
  set_shape(problem, sizes);
  problem.input = x.data, problem.input_dtype = x.dtype, problem.input_row = x.stride;
  problem.residual = r.data, problem.residual_dtype = r.dtype, problem.residual_row = r.stride;
  problem.weight = w.values, problem.bias = b.values;
  problem.sum = sum.mutable_data_ptr(), problem.out = out.mutable_data_ptr(), problem.dtype = dtype_of(sum, "sum");
  problem.mean = mean.mutable_data_ptr<float>(), problem.rstd = rstd.mutable_data_ptr<float>();
  problem.eps = (float)eps;
  if (threshold > 0) problem.seed = seed_of(seed.value()), problem.threshold = (int)threshold;
  table().layer_norm->forward(problem, torch_threads());
  return {out, sum, mean, rstd};
}

// grad_input is written where input_dtype is given. Returns (grad_x, grad_input, grad_weight, grad_bias).
std::tuple<Tensor, Tensor, Tensor, Tensor> run_layer_norm_backward(
    LayerNormBackward& problem, const Tensor& grad_out, const std::optional<Tensor>& grad_sum, const Tensor& x,
    const Tensor& mean, const Tensor& rstd, const std::optional<Tensor>& weight,
    const std::optional<ScalarType>& input_dtype, bool weight_grad, bool bias_grad) {
  const ScalarType dtype = x.scalar_type();
  STD_TORCH_CHECK(grad_out.scalar_type() == dtype, "grad_out has dtype ",
                  torch::headeronly::toString(grad_out.scalar_type()), ", expected ",
                  torch::headeronly::toString(dtype));
  const Rows dy(grad_out, "grad_out"), normalized(x, "input");
  const Parameter w(weight, "weight");
  const ScalarType parameter_dtype = weight ? weight->scalar_type() : ScalarType::Float;
  const int64_t columns = problem.columns;
  Tensor grad_x = empty(x.sizes(), dtype);
  Tensor grad_input = input_dtype ? empty(x.sizes(), *input_dtype) : grad_x;
  Tensor grad_weight = weight_grad ? empty(Sizes(&columns, 1), parameter_dtype) : nothing(parameter_dtype);
  Tensor grad_bias = bias_grad ? empty(Sizes(&columns, 1), parameter_dtype) : nothing(parameter_dtype);

  problem.grad_out = dy.data, problem.grad_out_row = dy.stride;
  problem.x = normalized.data, problem.x_row = normalized.stride, problem.dtype = normalized.dtype;
  std::optional<Rows> more;
  if (grad_sum) {
    STD_TORCH_CHECK(grad_sum->scalar_type() == dtype, "grad_sum has dtype ",
                    torch::headeronly::toString(grad_sum->scalar_type()), ", expected ",
                    torch::headeronly::toString(dtype));
    more.emplace(*grad_sum, "grad_sum");
    problem.grad_sum = more->data, problem.grad_sum_row = more->stride;
  }
  problem.mean = mean.const_data_ptr<float>(), problem.rstd = rstd.const_data_ptr<float>();
  problem.weight = w.values;
  problem.grad_x = grad_x.mutable_data_ptr();
  problem.grad_input = input_dtype ? grad_input.mutable_data_ptr() : nullptr;
  problem.input_dtype = dtype_of(grad_input, "grad_input");
  problem.grad_weight = weight_grad ? grad_weight.mutable_data_ptr() : nullptr;
  problem.grad_bias = bias_grad ? grad_bias.mutable_data_ptr() : nullptr;
  problem.weight_dtype = problem.bias_dtype = dtype_of(grad_weight, "weight");
  const Workspace workspace(table().layer_norm->workspace(problem) * 4);
  problem.workspace = (float*)workspace.data;
  table().layer_norm->backward(problem, torch_threads());
  return {grad_x, grad_input, grad_weight, grad_bias};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad_out, const Tensor& input, const Tensor& mean,
                                                       const Tensor& rstd, const std::optional<Tensor>& weight,
                                                       bool weight_grad, bool bias_grad) {
  LayerNormBackward problem = {};
  set_shape(problem, input.sizes());
  problem.rows *= problem.matrices, problem.matrices = 1;
  auto [grad_input, same, grad_weight, grad_bias] = run_layer_norm_backward(
      problem, grad_out, std::nullopt, input, mean, rstd, weight, std::nullopt, weight_grad, bias_grad);
  return {grad_input, grad_weight, grad_bias};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> dropout_add_layer_norm_backward(
    const Tensor& grad_out, const std::optional<Tensor>& grad_sum, const Tensor& sum, const Tensor& mean,
    const Tensor& rstd, const std::optional<Tensor>& weight, const std::optional<Tensor>& seed, int64_t threshold,
    ScalarType input_dtype, bool weight_grad, bool bias_grad) {
  LayerNormBackward problem = {};
  set_shape(problem, sum.sizes());
  if (threshold > 0) problem.seed = seed_of(seed.value()), problem.threshold = (int)threshold;
  auto [grad_sum_total, grad_input, grad_weight, grad_bias] = run_layer_norm_backward(
      problem, grad_out, grad_sum, sum, mean, rstd, weight, input_dtype, weight_grad, bias_grad);
  return {grad_input, grad_sum_total, grad_weight, grad_bias};
}

// ---- softmax_dropout ----

// A 4-D tensor with dense columns; a copy where they are not.
Tensor dense_columns(const Tensor& tensor) {
  return tensor.size(3) > 1 && tensor.stride(3) != 1 ? torch::stable::contiguous(tensor) : tensor;
}

int64_t broadcast_stride(const Tensor& mask, int64_t dim) { return mask.size(dim) > 1 ? mask.stride(dim) : 0; }

// `input` has dense columns; `lengths` is contiguous.
Scores scores_of(const Tensor& input, const std::optional<Tensor>& attn_mask, const std::optional<Tensor>& lengths,
                 double scale, int64_t window_left, int64_t window_right, bool lower_right) {
  Scores scores = {};
  scores.input = input.const_data_ptr();
  scores.dtype = dtype_of(input, "input");
  const Sizes strides = input.strides(), sizes = input.sizes();
  scores.input_batch = strides[0], scores.input_head = strides[1], scores.input_row = strides[2];
  scores.batch = sizes[0], scores.heads = sizes[1], scores.rows = sizes[2], scores.columns = sizes[3];
  if (attn_mask) {
    scores.mask = attn_mask->const_data_ptr();
    scores.mask_dtype = dtype_of(*attn_mask, "attn_mask");
    scores.mask_batch = broadcast_stride(*attn_mask, 0), scores.mask_head = broadcast_stride(*attn_mask, 1);
    scores.mask_row = broadcast_stride(*attn_mask, 2), scores.mask_column = broadcast_stride(*attn_mask, 3);
  }
  if (lengths) scores.key_lengths = lengths->const_data_ptr<int64_t>();
  scores.scale = (float)scale;
  scores.window_left = window_left, scores.window_right = window_right;
  scores.lower_right = lower_right;
  return scores;
}

std::optional<Tensor> contiguous(const std::optional<Tensor>& tensor) {
  if (!tensor || tensor->is_contiguous()) return tensor;
  return torch::stable::contiguous(*tensor);
}

std::tuple<Tensor, Tensor> softmax_dropout(const Tensor& input, const std::optional<Tensor>& attn_mask,
                                           const std::optional<Tensor>& key_lengths, const std::optional<Tensor>& seed,
                                           double scale, int64_t window_left, int64_t window_right, bool lower_right,
                                           int64_t threshold) {
  const Tensor x = dense_columns(input);
  const std::optional<Tensor> lengths = contiguous(key_lengths);
  const Sizes sizes = x.sizes();
  const int64_t stats_sizes[4] = {2, sizes[0], sizes[1], sizes[2]};
  Tensor out = empty(sizes, x.scalar_type()), stats = empty(Sizes(stats_sizes, 4), ScalarType::Float);
  SoftmaxDropout problem = {};
  problem.scores = scores_of(x, attn_mask, lengths, scale, window_left, window_right, lower_right);
  if (threshold > 0) problem.seed = seed_of(seed.value()), problem.threshold = (int)threshold;
  problem.out = out.mutable_data_ptr();
  problem.stats = stats.mutable_data_ptr<float>();
  const Parallel parallel = torch_threads();
  const Workspace workspace(table().softmax_dropout->forward_workspace(problem, parallel));
  problem.workspace = (char*)workspace.data;
  table().softmax_dropout->forward(problem, parallel);
  return {out, stats};
}

std::tuple<Tensor, Tensor> softmax_dropout_backward(const Tensor& grad_out, const Tensor& input, const Tensor& stats,
                                                    const std::optional<Tensor>& attn_mask,
                                                    const std::optional<Tensor>& key_lengths,
                                                    const std::optional<Tensor>& seed, double scale,
                                                    int64_t window_left, int64_t window_right, bool lower_right,
                                                    int64_t threshold, bool mask_grad) {
  STD_TORCH_CHECK(grad_out.scalar_type() == input.scalar_type(), "grad_out has dtype ",
                  torch::headeronly::toString(grad_out.scalar_type()), ", expected ",
                  torch::headeronly::toString(input.scalar_type()));
  const Tensor x = dense_columns(input), dy = dense_columns(grad_out);
  const std::optional<Tensor> lengths = contiguous(key_lengths);
  Tensor grad_input = empty(x.sizes(), x.scalar_type());
  SoftmaxDropoutBackward problem = {};
  problem.scores = scores_of(x, attn_mask, lengths, scale, window_left, window_right, lower_right);
  if (threshold > 0) problem.seed = seed_of(seed.value()), problem.threshold = (int)threshold;
  problem.grad_out = dy.const_data_ptr();
  problem.grad_batch = dy.stride(0), problem.grad_head = dy.stride(1), problem.grad_row = dy.stride(2);
  problem.stats = stats.const_data_ptr<float>();
  problem.grad_input = grad_input.mutable_data_ptr();
  Tensor grad_mask =
      mask_grad && attn_mask ? empty(attn_mask->sizes(), attn_mask->scalar_type()) : nothing(x.scalar_type());
  if (mask_grad && attn_mask) {
    problem.grad_mask = grad_mask.mutable_data_ptr();
    for (int64_t d = 0; d < 4; ++d) problem.full[d] = attn_mask->size(d) == x.size(d);
  }
  const Parallel parallel = torch_threads();
  const Workspace workspace(table().softmax_dropout->backward_workspace(problem, parallel));
  problem.workspace = (char*)workspace.data;
  table().softmax_dropout->backward(problem, parallel);
  return {grad_input, grad_mask};
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
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? key_lengths, Tensor? seed, "
      "float scale, int window_left, int window_right, bool lower_right, int threshold) -> (Tensor, Tensor, Tensor)");
  m.def(
      "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, "
      "Tensor stats, Tensor? attn_mask, Tensor? key_lengths, Tensor? seed, float scale, int window_left, "
      "int window_right, bool lower_right, int threshold, bool mask_grad) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "varlen_attention(Tensor query, Tensor key, Tensor value, Tensor cu_seq_q, Tensor cu_seq_k, Tensor? seqused_k, "
      "Tensor? seed, int max_q, int max_k, float scale, int window_left, int window_right, int threshold) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "varlen_attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor "
      "out, "
      "Tensor stats, Tensor cu_seq_q, Tensor cu_seq_k, Tensor? seqused_k, Tensor? seed, int max_q, int max_k, "
      "float scale, int window_left, int window_right, int threshold) -> (Tensor, Tensor, Tensor)");
  m.def("multiply_add(int operations, bool bfloat16) -> ()");
  m.def("dropout(Tensor input, Tensor seed, int threshold) -> Tensor");
  m.def("dropout_mask(SymInt[] shape, Tensor seed, int threshold) -> Tensor");
  m.def("layer_norm(Tensor input, Tensor? weight, Tensor? bias, float eps) -> (Tensor out, Tensor mean, Tensor rstd)");
  m.def(
      "layer_norm_backward(Tensor grad_out, Tensor input, Tensor mean, Tensor rstd, Tensor? weight, bool weight_grad, "
      "bool bias_grad) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");
  m.def(
      "dropout_add_layer_norm(Tensor input, Tensor residual, Tensor? weight, Tensor? bias, Tensor? seed, "
      "int threshold, float eps) -> (Tensor out, Tensor sum, Tensor mean, Tensor rstd)");
  m.def(
      "dropout_add_layer_norm_backward(Tensor grad_out, Tensor? grad_sum, Tensor sum, Tensor mean, Tensor rstd, "
      "Tensor? weight, Tensor? seed, int threshold, ScalarType input_dtype, bool weight_grad, bool bias_grad) "
      "-> (Tensor grad_input, Tensor grad_sum_total, Tensor grad_weight, Tensor grad_bias)");
  m.def(
      "softmax_dropout(Tensor input, Tensor? attn_mask, Tensor? key_lengths, Tensor? seed, float scale, "
      "int window_left, int window_right, bool lower_right, int threshold) -> (Tensor out, Tensor stats)");
  m.def(
      "softmax_dropout_backward(Tensor grad_out, Tensor input, Tensor stats, Tensor? attn_mask, Tensor? key_lengths, "
      "Tensor? seed, float scale, int window_left, int window_right, bool lower_right, int threshold, bool mask_grad) "
      "-> (Tensor grad_input, Tensor grad_mask)");
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_cpu, CompositeExplicitAutograd, m) {
  m.impl("isa", TORCH_BOX(&isa));
  m.impl("isas", TORCH_BOX(&isas));
  m.impl("set_isa", TORCH_BOX(&set_isa));
  m.impl("multiply_add", TORCH_BOX(&multiply_add));
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_cpu, CPU, m) {
  m.impl("attention", TORCH_BOX(&attention));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
  m.impl("varlen_attention", TORCH_BOX(&varlen_attention));
  m.impl("varlen_attention_backward", TORCH_BOX(&varlen_attention_backward));
  m.impl("dropout", TORCH_BOX(&dropout));
  m.impl("dropout_mask", TORCH_BOX(&dropout_mask));
  m.impl("layer_norm", TORCH_BOX(&layer_norm));
  m.impl("layer_norm_backward", TORCH_BOX(&layer_norm_backward));
  m.impl("dropout_add_layer_norm", TORCH_BOX(&dropout_add_layer_norm));
  m.impl("dropout_add_layer_norm_backward", TORCH_BOX(&dropout_add_layer_norm_backward));
  m.impl("softmax_dropout", TORCH_BOX(&softmax_dropout));
  m.impl("softmax_dropout_backward", TORCH_BOX(&softmax_dropout_backward));
}
