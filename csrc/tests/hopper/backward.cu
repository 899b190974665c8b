// The backward pass of csrc/cuda/attention_hopper_backward.cu on plain memory, for tests/hopper.py.
#include "../../cuda/kernels.h"
#include "start.h"

using namespace fastattn;

namespace {

// Operands are (matrices, length, head_dim), bfloat16, dense. `stats` is (2, matrices, length): row_max, row_sum.
AttentionBackward problem(int head_dim, void* const (&operands)[8], float* stats, const int64_t* lengths,
                          const int64_t* seed, int threshold, int matrices, int length, int is_causal, float scale) {
  AttentionBackward a = {};
  a.dtype = Dtype::bfloat16;
  a.batch = matrices, a.num_heads = a.num_kv_heads = 1;
  a.seqlen_q = a.seqlen_k = a.rows_q = a.rows_k = length;
  a.head_dim = a.value_head_dim = head_dim;
  Heads* const heads[] = {&a.query, &a.key, &a.value, &a.out, &a.grad_out, &a.grad_query, &a.grad_key, &a.grad_value};
  for (int i = 0; i < 8; ++i) *heads[i] = {operands[i], (int64_t)length * head_dim, 0, head_dim};
  a.row_max = stats, a.row_sum = stats + (int64_t)matrices * length;
  a.key_lengths = lengths;
  a.scale = scale;
  a.window_left = length, a.window_right = is_causal ? 0 : length;
  a.seed = seed, a.threshold = threshold;
  return a;
}

}  // namespace

// Run with a workspace, or set *floats to its size if it is null.
FASTATTN_EXPORT const char* hopper_backward(int head_dim, void* q, void* k, void* v, void* out, void* grad, void* dq,
                                            void* dk, void* dv, float* stats, const int64_t* lengths,
                                            const int64_t* seed, int threshold, int matrices, int length, int is_causal,
                                            float scale, float* workspace, int64_t* floats, cudaStream_t stream) {
  return attempt([&] {
    const AttentionBackward a = problem(head_dim, {q, k, v, out, grad, dq, dk, dv}, stats, lengths, seed, threshold,
                                        matrices, length, is_causal, scale);
    if (workspace)
      cuda::run_hopper(a, workspace, stream);
    else
      *floats = cuda::hopper_workspace(a);
  });
}
