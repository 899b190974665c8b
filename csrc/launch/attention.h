// The arguments that attention's kernels share: backends/triton/attention.
#pragma once
#include "launcher.h"

namespace fastattn::triton {

namespace {

inline int64_t bits_of(const Heads& heads, Dtype dtype) {
  return ((heads.batch | heads.head | heads.row) * size_of(dtype)) | address(heads.data);
}

inline auto heads_of(const Heads& heads, Dtype dtype) {
  return named("Heads", Pointer{heads.data, dtype}, heads.batch, heads.head, heads.row);
}

// Whether every row of the operands begins at a multiple of 16 bytes.
inline bool is_aligned(const Attention& a) {
  const int64_t bits = (a.head_dim | a.value_head_dim) * size_of(a.dtype) | bits_of(a.query, a.dtype) |
                       bits_of(a.key, a.dtype) | bits_of(a.value, a.dtype);
  return bits % 16 == 0;
}

// A kernel; `bits` are those of further tensors that it accesses by rows, which count for the alignment.
inline Kernel kernel_of(const char* name, Place place, const Attention& a, int64_t bits) {
  const bool aligned = is_aligned(a);
  return Kernel(name, place,
                {a.dtype == Dtype::bfloat16, a.head_dim, a.value_head_dim, a.cu_seq_q != nullptr, aligned,
                 aligned && bits % 16 == 0, a.lower_right, a.mask.data != nullptr,
                 a.mask.data && a.mask.dtype != Dtype::boolean});
}

using MaskHeads = std::optional<Named<Memory, int64_t, int64_t, int64_t>>;

inline MaskHeads mask_heads(const Mask& m) {
  if (!m.data) return std::nullopt;
  const char letters[] = {'f', 'b', 'h', 'u'};  // by Dtype; a bool mask is read as bytes
  return named("Heads", Memory{m.data, letters[(int)m.dtype]}, m.batch, m.head, m.row);
}

// The stride of the mask's columns; null for 1.
inline std::optional<int64_t> mask_column(const Mask& m) {
  if (!m.data || m.column == 1) return std::nullopt;
  return m.column;
}

inline auto sequences_of(const Attention& a) {
  return named("Sequences", a.seqlen_q, a.seqlen_k, a.cu_seq_q, a.cu_seq_k, a.key_lengths);
}

inline auto window_of(const Attention& a) { return named("Window", a.window_left, a.window_right); }

inline auto problem_of(const Attention& a) {
  const int64_t group = a.num_heads / (a.num_kv_heads ? a.num_kv_heads : 1);
  return named("Problem", heads_of(a.query, a.dtype), heads_of(a.key, a.dtype), heads_of(a.value, a.dtype),
               mask_heads(a.mask), mask_column(a.mask), drop_of(a.seed, a.threshold), sequences_of(a), window_of(a),
               a.num_heads, group, a.head_dim, a.value_head_dim, a.scale, a.scale);
}

// The strides of float32 values per query, (batch, heads, rows) or packed (rows, heads); null for dense rows.
struct RowStrides {
  int64_t batch, head;
  std::optional<int64_t> row;
};

inline RowStrides row_strides(const Attention& a, int64_t rows) {
  if (a.cu_seq_q) return {0, 1, a.num_heads};
  return {a.num_heads * rows, rows, std::nullopt};
}

}  // namespace

// The lists of tiles that a kernel visits under a mask, and the keys that each tile of queries sees (block_mask.py).
struct TileLists {
  std::optional<Named<Memory, int64_t, int64_t, int64_t, int64_t>> lists;
  std::optional<Named<Memory, int64_t, int64_t, int64_t>> seen;
};

// The memory of a kernel's lists in floats, 0 without a mask. `keys_own`: tiles of keys own the lists.
int64_t list_floats(const Attention&, const Kernel&, bool keys_own);
// Start the kernels that write the lists of a kernel into this memory.
TileLists make_lists(const Attention&, const Kernel&, bool keys_own, float* memory, Place);

}  // namespace fastattn::triton
