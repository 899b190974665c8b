// Softmax-dropout and its backward pass: backends/triton/softmax_dropout.py.
#include "launcher.h"

namespace fastattn::triton {
namespace {

using Stride = std::optional<int64_t>;

// The launch over the scores, with the values that both kernels share.
struct Call {
  Kernel kernel;
  bool is_aligned;
  int64_t rows, slots, programs;

  // `more`: further bits that count for the alignment.
  Call(const char* name, Place place, const Scores& s, int threshold, int64_t more)
      : kernel(name, place,
               {padded(s.columns), aligned(s, more), fits_int32(s.batch * s.heads * row_slots(s.rows, threshold != 0)),
                s.lower_right}),
        is_aligned(aligned(s, more)),
        rows(s.batch * s.heads * s.rows),
        slots(row_slots(s.rows, threshold != 0)),
        programs(cdiv(s.batch * s.heads * slots, kernel.block_m())) {}

  static bool aligned(const Scores& s, int64_t more) {
    int64_t bits = s.columns | address(s.input.data) | more;
    if (s.rows > 1) bits |= s.input.row;
    if (s.heads > 1) bits |= s.input.head;
    if (s.batch > 1) bits |= s.input.batch;
    return bits % 16 == 0;
  }
};

// Python's Matrices: null strides for contiguous scores.
auto scores_of(const Scores& s) {
  const bool contiguous = (s.rows == 1 || s.input.row == s.columns) &&
                          (s.heads == 1 || s.input.head == s.rows * s.columns) &&
                          (s.batch == 1 || s.input.batch == s.heads * s.rows * s.columns);
  const Stride none, strides[] = {s.input.batch, s.input.head, s.input.row};
  const Pointer input = {s.input.data, s.dtype};
  return contiguous ? named("Matrices", input, none, none, none)
                    : named("Matrices", input, strides[0], strides[1], strides[2]);
}

using MaskMatrices = std::optional<Named<Pointer, Stride, Stride, Stride>>;

MaskMatrices mask_of(const Mask& m) {
  if (!m.data) return std::nullopt;
  return named("Matrices", Pointer{m.data, m.dtype}, Stride(m.batch), Stride(m.head), Stride(m.row));
}

// The stride of the mask's columns; null for 1 in aligned rows.
Stride mask_column(const Mask& m, bool scores_are_aligned) {
  if (!m.data) return std::nullopt;
  const bool aligned = (m.columns | address(m.data) | m.batch | m.head | m.row) % 16 == 0;
  return scores_are_aligned && aligned && m.column == 1 ? Stride() : Stride(m.column);
}

using Window = std::optional<Named<int64_t, int64_t>>;

// Null if lengths and window let every row see every column.
Window window_of(const Scores& s) {
  const int64_t left = s.lower_right ? s.columns : s.rows, right = s.lower_right ? s.rows : s.columns;
  if (!s.key_lengths && s.window_left >= left && s.window_right >= right) return std::nullopt;
  return named("Window", s.window_left, s.window_right);
}

}  // namespace

void run(const SoftmaxDropout& p, Place place) {
  const Scores& s = p.scores;
  constexpr int64_t kMaxPositions = ((int64_t)1 << 31) - (1 << 16);  // MAX_POSITIONS in Python, a sum in int32
  if (s.columns == 0 || s.rows + s.columns > kMaxPositions) throw NotServed("fastattn: no columns, or too many");
  Call call("softmax_dropout.forward", place, s, p.threshold, 0);
  call.kernel.start(call.programs, 1, scores_of(s), mask_of(s.mask), mask_column(s.mask, call.is_aligned),
                    s.key_lengths, drop_of(p.seed, p.threshold), Pointer{p.out, s.dtype}, p.stats, call.rows,
                    call.slots, s.heads, s.rows, s.columns, s.scale, window_of(s));
}

void run(const SoftmaxDropoutBackward& p, Place place) {
  const Scores& s = p.scores;
  const Heads& g = p.grad_out;
  if (s.batch * s.heads * s.rows * s.columns == 0) return;
  // The kernel takes the gradient's rows at one stride.
  const int64_t row = s.rows > 1 ? g.row : s.heads > 1 ? g.head : g.batch;
  if ((s.heads > 1 && g.head != row * s.rows) || (s.batch > 1 && g.batch != row * s.rows * s.heads))
    throw NotServed("fastattn: rows of a gradient that do not fold");
  const int64_t stride = s.batch * s.heads * s.rows > 1 ? row : s.columns;
  Call call("softmax_dropout.backward", place, s, p.threshold, address(g.data) | stride);
  call.kernel.start(call.programs, 1, Pointer{g.data, s.dtype}, p.stats, scores_of(s), mask_of(s.mask),
                    mask_column(s.mask, call.is_aligned), s.key_lengths, drop_of(p.seed, p.threshold),
                    Pointer{p.grad_input, s.dtype}, Pointer{p.grad_mask, p.grad_mask_dtype}, call.rows, call.slots,
                    s.heads, s.rows, s.columns, stride, s.scale, window_of(s));
}

}  // namespace fastattn::triton
