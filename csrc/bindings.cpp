// The operations of the `cpu` backend as torch ops. The only file of this library that sees torch; stable ABI.
#include <math.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/kernels.h"
#include "tensors.h"

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

std::string contract() { return FASTATTN_CONTRACT; }

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

// A call's scratch memory, 64-byte aligned: on the stack where it is small; where it is of medium size, memory that the
// thread keeps, since fresh pages would cost such a call more than its arithmetic.
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
    const int64_t floats = (bytes + kAlignment + 3) / 4;
    tensor = empty(Sizes(&floats, 1), Dtype::float32);
    data = (char*)(((uintptr_t)tensor->mutable_data_ptr() + kAlignment - 1) / kAlignment * kAlignment);
  }
  ~Workspace() {
    if (data == kept.data) kept.taken = false;
  }
};

Seed seed_of(const Tensor& seed) {
  int32_t dtype;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(seed.get(), &dtype));
  STD_TORCH_CHECK(dtype == aoti_torch_dtype_int64() && seed.numel() == 2,
                  "seed: expected an int64 tensor of shape (2,)");
  const int64_t* values = seed.const_data_ptr<int64_t>();
  const int64_t pair[2] = {values[0], values[seed.stride(0)]};
  return make_seed(pair);
}

// ---- dropout ----

void run_dropout(const Matrices& in, const Matrices& out, const Tensor* input, const Tensor& output, Seed seed,
                 int64_t threshold) {
  Dropout problem;
  set_matrices(problem, in, out, input, output);
  problem.seed = seed;
  problem.threshold = (int)threshold;
  (input ? table().dropout->dropout : table().dropout->mask)(problem, torch_threads());
}

Tensor dropout(const Tensor& input, Seed seed, int64_t threshold) {
  return map_matrices(input, {}, [&](const Matrices& in, const Matrices& to, const Tensor& x, const Tensor& out) {
    run_dropout(in, to, &x, out, seed, threshold);
  });
}

Tensor dropout_op(const Tensor& input, const Tensor& seed, int64_t threshold) {
  return dropout(input, seed_of(seed), threshold);
}

Tensor dropout_mask(std::vector<int64_t> shape, const Tensor& seed, int64_t threshold) {
  const Tensor out = empty(Sizes(shape.data(), shape.size()), Dtype::boolean);
  Matrices to;
  to.describe(out);
  run_dropout(to, to, nullptr, out, seed_of(seed), threshold);
  return out;
}

// ---- attention ----

// What dense and packed attention, forward and backward, have in common.
Attention attention_problem(const Tensor& query, const Tensor& key, const Tensor& value,
                            const std::optional<Tensor>& seed, double scale, int64_t window_left, int64_t window_right,
                            int64_t threshold) {
  Attention a = {};
  const Sizes q = query.sizes(), k = key.sizes(), v = value.sizes();
  const int row = q.size() == 3 ? 0 : 2;
  a.dtype = dtype_of(query, "query");
  a.batch = q[0], a.heads = q[1], a.key_heads = k[1];
  a.queries = q[row], a.keys = k[row];
  a.depth = (int)q[q.size() - 1], a.value_depth = (int)v[v.size() - 1];
  a.query = heads_of(query), a.key = heads_of(key), a.value = heads_of(value);
  a.scale = (float)scale;
  a.window_left = window_left, a.window_right = window_right;
  if (seed) a.seed = seed_of(*seed);
  a.threshold = (int)threshold;
  return a;
}

void set_rows(Attention* a, float* reference, float* sum) {
  a->reference = reference, a->sum = sum;
  a->row_batch = a->heads * a->queries, a->row_head = a->queries, a->row_query = 1;
}

void set_rows(Attention* a, const Tensor& stats) {
  float* data = (float*)const_cast<void*>(stats.const_data_ptr());
  set_rows(a, data, data + stats.stride(0));
}

void run_attention_backward(const Attention& a, const AttentionGradients& gradients) {
  const Parallel threads = torch_threads();
  const AttentionBackwardKernels& kernels = *table().attention_backward;
  const Workspace workspace(kernels.workspace(a, gradients, threads));
  kernels.backward(a, gradients, threads, workspace.data);
}

void run_attention(const Attention& a) {
  const Parallel threads = torch_threads();
  const AttentionKernels& kernels = *table().attention;
  const Workspace workspace(kernels.workspace(a, threads));
  kernels.forward(a, threads, workspace.data);
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
  const Tensor lse = empty(Sizes(rows + 1, 3), Dtype::float32), stats = empty(Sizes(rows, 4), Dtype::float32);
  a.out = heads_of(out);
  a.lse = lse.mutable_data_ptr<float>();
  set_rows(&a, stats);
  run_attention(a);
  return {out, lse, stats};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad_out, std::optional<Tensor> grad_lse, const Tensor& out, const Tensor& stats, const Tensor& query,
    const Tensor& key, const Tensor& value, std::optional<Tensor> attn_mask, std::optional<Tensor> key_lengths,
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

  const Tensor query_grad = empty_heads(query, a.queries, a.depth), key_grad = empty_heads(key, a.keys, a.depth);
  const Tensor value_grad = empty_heads(value, a.keys, a.value_depth);
  const int64_t none[1] = {0};
  const Tensor mask_gradient = mask_grad ? empty(attn_mask->sizes(), dtype_of(*attn_mask, "attn_mask"))
                                         : empty(Sizes(none, 1), dtype_of(query, "query"));
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

void set_packed_rows(Attention* a, const Tensor& stats) {
  set_rows(a, stats);
  a->row_batch = 0, a->row_head = 1, a->row_query = a->heads;
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
  const Tensor out = empty(Sizes(sizes, 3), dtype_of(query, "query"));
  const Tensor lse = empty(Sizes(rows + 1, 2), Dtype::float32), stats = empty(Sizes(rows, 3), Dtype::float32);
  a.out = heads_of(out);
  a.lse = lse.mutable_data_ptr<float>();
  set_packed_rows(&a, stats);
  run_attention(a);
  return {out, lse, stats};
}

std::tuple<Tensor, Tensor, Tensor> varlen_attention_backward(
    const Tensor& grad_out, std::optional<Tensor> grad_lse, const Tensor& out, const Tensor& stats, const Tensor& query,
    const Tensor& key, const Tensor& value, const Tensor& cu_seq_q, const Tensor& cu_seq_k,
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
  set_packed_rows(&a, rows);

  const Tensor query_grad = empty(query.sizes(), dtype_of(query, "query")),
               key_grad = empty(key.sizes(), dtype_of(key, "key"));
  const Tensor value_grad = empty(value.sizes(), dtype_of(value, "value"));
  AttentionGradients g = {};
  g.out_grad = heads_of(grad);
  if (grad_lse) g.lse_grad = lse_grad.const_data_ptr<float>();
  g.query_grad = heads_of(query_grad), g.key_grad = heads_of(key_grad), g.value_grad = heads_of(value_grad);
  run_attention_backward(a, g);
  return {query_grad, key_grad, value_grad};
}

// ---- layer_norm ----

// weight or bias as float32, which almost always they are. It points into `source`.
struct Parameter {
  std::optional<Tensor> dense, converted;
  const float* values = nullptr;

  Parameter(const std::optional<Tensor>& source, const char* name) {
    if (source) set(*source, name);
  }
  Parameter(const Tensor& source, const char* name) {
    if (source.defined()) set(source, name);
  }

 private:
  void set(const Tensor& source, const char* name) {
    const Dtype dtype = dtype_of(source, name);
    if (!source.is_contiguous()) dense = torch::stable::contiguous(source);
    values = (const float*)(dense ? *dense : source).const_data_ptr();
    if (dtype == Dtype::float32) return;
    const int64_t columns = source.numel();
    converted = empty(Sizes(&columns, 1), Dtype::float32);
    table().layer_norm->to_float32(values, dtype, columns, (float*)converted->mutable_data_ptr());
    values = (const float*)converted->const_data_ptr();
  }
};

// Everything but the statistics and the sum.
LayerNorm layer_norm_problem(Sizes sizes, const Rows& input, const Rows* residual, const Parameter& weight,
                             const Parameter& bias, double eps, const Tensor& out) {
  LayerNorm problem = {};
  set_shape(problem, sizes);
  problem.input = input.data, problem.input_dtype = problem.dtype = input.dtype, problem.input_row = input.stride;
  if (residual) {
    problem.residual = residual->data, problem.residual_dtype = residual->dtype;
    problem.residual_row = residual->stride;
    if (residual->dtype != input.dtype) problem.dtype = Dtype::float32;
  } else {
    problem.rows *= problem.matrices, problem.matrices = 1;
  }
  problem.weight = weight.values, problem.bias = bias.values;
  problem.out = out.mutable_data_ptr();
  problem.eps = (float)eps;
  return problem;
}

std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& input, const std::optional<Tensor>& weight,
                                              const std::optional<Tensor>& bias, double eps) {
  const Sizes sizes = input.sizes();
  const Rows x(input, "input");
  const Parameter w(weight, "weight"), b(bias, "bias");
  const Tensor out = empty(sizes, x.dtype);
  const Tensor mean = empty(without_last(sizes), Dtype::float32), rstd = empty(without_last(sizes), Dtype::float32);
  LayerNorm problem = layer_norm_problem(sizes, x, nullptr, w, b, eps, out);
  problem.mean = mean.mutable_data_ptr<float>(), problem.rstd = rstd.mutable_data_ptr<float>();
  table().layer_norm->forward(problem, torch_threads());
  return {out, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> dropout_add_layer_norm(const Tensor& input, const Tensor& residual,
                                                                  const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                                                                  const std::optional<Tensor>& seed, int64_t threshold,
                                                                  double eps) {
  const Sizes sizes = input.sizes();
  const Rows x(input, "input"), r(residual, "residual");
  const Parameter w(weight, "weight"), b(bias, "bias");
  const Dtype dtype = x.dtype == r.dtype ? x.dtype : Dtype::float32;
  const Tensor out = empty(sizes, dtype), sum = empty(sizes, dtype);
  const Tensor mean = empty(without_last(sizes), Dtype::float32), rstd = empty(without_last(sizes), Dtype::float32);
  LayerNorm problem = layer_norm_problem(sizes, x, &r, w, b, eps, out);
  problem.sum = sum.mutable_data_ptr();
  problem.mean = mean.mutable_data_ptr<float>(), problem.rstd = rstd.mutable_data_ptr<float>();
  if (threshold > 0) problem.seed = seed_of(seed.value()), problem.threshold = (int)threshold;
  table().layer_norm->forward(problem, torch_threads());
  return {out, sum, mean, rstd};
}

// grad_input is written where input_dtype is given. Returns (grad_x, grad_input, grad_weight, grad_bias).
std::tuple<Tensor, Tensor, Tensor, Tensor> run_layer_norm_backward(
    LayerNormBackward& problem, const Tensor& grad_out, const std::optional<Tensor>& grad_sum, const Tensor& x,
    const Tensor& mean, const Tensor& rstd, const std::optional<Tensor>& weight,
    const std::optional<ScalarType>& input_dtype, const std::optional<ScalarType>& weight_grad,
    const std::optional<ScalarType>& bias_grad) {
  const Dtype dtype = dtype_of(x, "input");
  check_dtype(grad_out, "grad_out", x);
  const Rows dy(grad_out, "grad_out"), normalized(x, "input");
  const Parameter w(weight, "weight");
  Tensor grad_x = empty(x.sizes(), dtype);
  Tensor grad_input = input_dtype ? empty(x.sizes(), dtype_from(*input_dtype)) : grad_x;
  Tensor grad_weight = parameter_grad(weight_grad, problem.columns);
  Tensor grad_bias = parameter_grad(bias_grad, problem.columns);

  problem.grad_out = dy.data, problem.grad_out_row = dy.stride;
  problem.x = normalized.data, problem.x_row = normalized.stride, problem.dtype = normalized.dtype;
  std::optional<Rows> more;
  if (grad_sum) {
    check_dtype(*grad_sum, "grad_sum", x);
    more.emplace(*grad_sum, "grad_sum");
    problem.grad_sum = more->data, problem.grad_sum_row = more->stride;
  }
  problem.mean = mean.const_data_ptr<float>(), problem.rstd = rstd.const_data_ptr<float>();
  problem.weight = w.values;
  problem.grad_x = grad_x.mutable_data_ptr();
  problem.grad_input = input_dtype ? grad_input.mutable_data_ptr() : nullptr;
  problem.input_dtype = dtype_of(grad_input, "input");
  problem.grad_weight = weight_grad ? grad_weight.mutable_data_ptr() : nullptr;
  problem.grad_bias = bias_grad ? grad_bias.mutable_data_ptr() : nullptr;
  problem.weight_dtype = dtype_of(grad_weight, "weight"), problem.bias_dtype = dtype_of(grad_bias, "bias");
  const Workspace workspace(table().layer_norm->workspace(problem) * 4);
  problem.workspace = (float*)workspace.data;
  table().layer_norm->backward(problem, torch_threads());
  return {grad_x, grad_input, grad_weight, grad_bias};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad_out, const Tensor& input, const Tensor& mean,
                                                       const Tensor& rstd, const std::optional<Tensor>& weight,
                                                       std::optional<ScalarType> weight_grad,
                                                       std::optional<ScalarType> bias_grad) {
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
    ScalarType input_dtype, std::optional<ScalarType> weight_grad, std::optional<ScalarType> bias_grad) {
  LayerNormBackward problem = {};
  set_shape(problem, sum.sizes());
  if (threshold > 0) problem.seed = seed_of(seed.value()), problem.threshold = (int)threshold;
  auto [grad_sum_total, grad_input, grad_weight, grad_bias] = run_layer_norm_backward(
      problem, grad_out, grad_sum, sum, mean, rstd, weight, input_dtype, weight_grad, bias_grad);
  return {grad_input, grad_sum_total, grad_weight, grad_bias};
}

// ---- softmax_dropout ----

void run_softmax_dropout(SoftmaxDropout& problem) {
  const Parallel parallel = torch_threads();
  const Workspace workspace(table().softmax_dropout->forward_workspace(problem, parallel));
  problem.workspace = workspace.data;
  table().softmax_dropout->forward(problem, parallel);
}

void run_softmax_dropout_backward(SoftmaxDropoutBackward& problem) {
  const Parallel parallel = torch_threads();
  const Workspace workspace(table().softmax_dropout->backward_workspace(problem, parallel));
  problem.workspace = workspace.data;
  table().softmax_dropout->backward(problem, parallel);
}

std::tuple<Tensor, Tensor> softmax_dropout(const Tensor& input, const std::optional<Tensor>& attn_mask,
                                           const std::optional<Tensor>& key_lengths, const std::optional<Tensor>& seed,
                                           double scale, int64_t window_left, int64_t window_right, bool lower_right,
                                           int64_t threshold) {
  const Tensor x = with_dense_columns(input);
  const std::optional<Tensor> lengths = contiguous(key_lengths);
  const Sizes sizes = x.sizes();
  const int64_t stats_sizes[4] = {2, sizes[0], sizes[1], sizes[2]};
  Tensor out = empty(sizes, dtype_of(x, "x")), stats = empty(Sizes(stats_sizes, 4), Dtype::float32);
  SoftmaxDropout problem = {};
  set_scores(problem.scores, x, attn_mask, lengths, scale, window_left, window_right, lower_right);
  if (threshold > 0) problem.seed = seed_of(seed.value()), problem.threshold = (int)threshold;
  problem.out = out.mutable_data_ptr();
  problem.stats = stats.mutable_data_ptr<float>();
  run_softmax_dropout(problem);
  return {out, stats};
}

std::tuple<Tensor, Tensor> softmax_dropout_backward(const Tensor& grad_out, const Tensor& stats, const Tensor& input,
                                                    const std::optional<Tensor>& attn_mask,
                                                    const std::optional<Tensor>& key_lengths,
                                                    const std::optional<Tensor>& seed, double scale,
                                                    int64_t window_left, int64_t window_right, bool lower_right,
                                                    int64_t threshold, bool mask_grad) {
  check_dtype(grad_out, "grad_out", input);
  const Tensor x = with_dense_columns(input), dy = with_dense_columns(grad_out);
  const std::optional<Tensor> lengths = contiguous(key_lengths);
  Tensor grad_input = empty(x.sizes(), dtype_of(x, "x"));
  SoftmaxDropoutBackward problem = {};
  set_scores(problem.scores, x, attn_mask, lengths, scale, window_left, window_right, lower_right);
  if (threshold > 0) problem.seed = seed_of(seed.value()), problem.threshold = (int)threshold;
  problem.grad_out = dy.const_data_ptr();
  problem.grad_batch = dy.stride(0), problem.grad_head = dy.stride(1), problem.grad_row = dy.stride(2);
  problem.stats = stats.const_data_ptr<float>();
  problem.grad_input = grad_input.mutable_data_ptr();
  Tensor grad_mask =
      mask_grad && attn_mask ? empty(attn_mask->sizes(), dtype_of(*attn_mask, "attn_mask")) : nothing(dtype_of(x, "x"));
  if (mask_grad && attn_mask) {
    problem.grad_mask = grad_mask.mutable_data_ptr();
    for (int64_t d = 0; d < 4; ++d) problem.full[d] = attn_mask->size(d) == x.size(d);
  }
  run_softmax_dropout_backward(problem);
  return {grad_input, grad_mask};
}

// ---- the fast path of decoding ----

// A dense CPU tensor of a dtype that the kernels take.
bool is_plain(const Tensor& tensor, Dtype* dtype) {
  if (!tensor.defined()) return false;
  int32_t device, layout;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(tensor.get(), &layout));
  return device == aoti_torch_device_type_cpu() && layout == aoti_torch_layout_strided() && is_dtype(tensor, dtype) &&
         *dtype != Dtype::boolean;
}

// scaled_dot_product_attention's arguments, as the user gave them; undefined, in Python None, for all but plain calls.
Tensor attention_fast(const Tensor& query, const Tensor& key, const Tensor& value,
                      const std::optional<Tensor>& attn_mask, double dropout_p, bool is_causal,
                      std::optional<double> scale, bool enable_gqa) {
  constexpr int64_t kMaxHeadDim = 256;
  Dtype dtype, key_dtype, value_dtype;
  if (attn_mask || dropout_p != 0 || enable_gqa || !is_plain(query, &dtype) || !is_plain(key, &key_dtype) ||
      !is_plain(value, &value_dtype) || key_dtype != dtype || value_dtype != dtype)
    return Tensor();
  const Sizes q = query.sizes(), k = key.sizes(), v = value.sizes();
  if (q.size() != 4 || k.size() != 4 || v.size() != 4) return Tensor();
  for (int d = 0; d < 2; ++d)
    if (k[d] != q[d] || v[d] != q[d]) return Tensor();
  if (v[2] != k[2] || k[3] != q[3] || q[3] < 1 || q[3] > kMaxHeadDim || v[3] > kMaxHeadDim) return Tensor();
  if (!has_dense_columns(query) || !has_dense_columns(key) || !has_dense_columns(value)) return Tensor();
  const double factor = scale.value_or(1 / sqrt((double)q[3]));
  if (!(fabs(factor) <= __FLT_MAX__)) return Tensor();
  Attention a = attention_problem(query, key, value, std::nullopt, fabs(factor) < __FLT_MIN__ ? 0 : factor, q[2],
                                  is_causal ? 0 : k[2], 0);
  const Tensor out = empty_heads(query, a.queries, a.value_depth);
  a.out = heads_of(out);
  run_attention(a);
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
  m.def("contract() -> str");
  m.def("multiply_add(int operations, bool bfloat16) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_cpu, CompositeExplicitAutograd, m) {
  m.impl("attention_fast", TORCH_BOX(&attention_fast));
  m.impl("contract", TORCH_BOX(&contract));
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
  m.impl("dropout", TORCH_BOX(&dropout_op));
  m.impl("dropout_mask", TORCH_BOX(&dropout_mask));
  m.impl("layer_norm", TORCH_BOX(&layer_norm));
  m.impl("layer_norm_backward", TORCH_BOX(&layer_norm_backward));
  m.impl("dropout_add_layer_norm", TORCH_BOX(&dropout_add_layer_norm));
  m.impl("dropout_add_layer_norm_backward", TORCH_BOX(&dropout_add_layer_norm_backward));
  m.impl("softmax_dropout", TORCH_BOX(&softmax_dropout));
  m.impl("softmax_dropout_backward", TORCH_BOX(&softmax_dropout_backward));
}
