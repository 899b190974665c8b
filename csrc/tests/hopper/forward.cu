// The forward pass of csrc/cuda/attention_hopper.cu on plain memory, for tests/hopper.py.
#include "../../cuda/kernels.h"
#include "start.h"

using namespace fastattn;

// q, k, v and out are (matrices, length, head_dim), bfloat16, dense; lse is (matrices, length). `lengths` are of the
// keys of each matrix. `blocks` is the number of blocks of threads, at most one per tile of queries.
FASTATTN_EXPORT const char* hopper_forward(int head_dim, void* q, void* k, void* v, void* out, float* lse,
                                           const int64_t* lengths, const int64_t* seed, int threshold, int matrices,
                                           int length, int is_causal, float scale, int blocks, cudaStream_t stream) {
  Attention a = {};
  a.dtype = Dtype::bfloat16;
  a.batch = matrices, a.num_heads = a.num_kv_heads = 1;
  a.seqlen_q = a.seqlen_k = a.rows_q = a.rows_k = length;
  a.head_dim = a.value_head_dim = head_dim;
  const auto heads = [&](void* data) { return Heads{data, (int64_t)length * head_dim, 0, head_dim}; };
  a.query = heads(q), a.key = heads(k), a.value = heads(v), a.out = heads(out);
  a.key_lengths = lengths;
  a.scale = scale;
  a.window_left = length, a.window_right = is_causal ? 0 : length;
  a.seed = seed, a.threshold = threshold;
  a.lse = lse;
  return attempt([&] { cuda::run_hopper(a, nullptr, blocks, stream); });
}
