"""The contract of the backend functions: names, arguments and results, each written once.

The ops, the compiled libraries' registrations and a test of every backend's signatures follow from ``SCHEMAS``. The
build reads this file too, without torch.

A backend function has no autograd and no checks. It relies on what ``ops`` has normalised:

- query (B, Hq, Lq, E), key (B, Hk, Lk, E), value (B, Hk, Lk, Ev) have one dtype and any strides. Packed operands are
  (Tq, Hq, E), (Tk, Hk, E), (Tk, Hk, Ev). softmax_dropout's input is (B, H, L, S).
- attn_mask is 4-D with sizes 1 or full, bool (True = takes part) or float (added to the scaled scores).
- key_lengths (B,), seqused_k (N,), cu_seq_q and cu_seq_k (N + 1,) are contiguous int64 and within range.
- Query i sees key j iff j < length, -window_left <= j - i - diagonal <= window_right and the mask allows it. length is
  key_lengths[b] or Lk. diagonal is length - Lq if lower_right, which packed sequences are, else 0.
- Both sides of the window are at least 0, and is_causal is window_right = 0. A side that bounds nothing reaches exactly
  to the last position: left Lq and right Lk for the upper-left diagonal, left Lk and right Lq for the lower-right one.
- scale is finite, and 0 or at least float32's least normal number. seed is contiguous int64 (2,), None iff threshold
  is 0. An element is kept iff its 16-bit value is at least threshold, 0 to 65536.

Results:

- out has query's layout in memory and a gradient its operand's: dense, with B, H and L in the operand's order of
  strides and columns innermost. It is contiguous if a stride is 0 (expanded) or columns are not dense. dropout's result
  keeps the strides of a dense input. Every other result is contiguous.
- lse (B, Hq, Lq), mean, rstd and stats are float32, or float64 for float64 operands. lse is a natural logarithm.
- stats (2, B, Hq, Lq) holds each row's finite row_max and row_sum = sum(exp(s - row_max)), so that
  P = exp(s - row_max) / row_sum. Both are 0 for a fully masked row. lse does not suffice: in a row all at finfo.min,
  rounding loses the log of the sum. torch's kernels, to which the reference leaves float64, return only lse. Without
  such a row stats is then lse and 1, which gives the same P.
- sum is an empty tensor of shape (0,) without keep_sum: it is not read, and writing it takes a third of the time.
- out_dtype is the sum's dtype, or a 16-bit one if the sum is float32 and kept. grad_out has out_dtype or the sum's.
- Gradients have their operand's dtype. A gradient that is not needed is an empty tensor of shape (0,), and its
  weight_grad_dtype or bias_grad_dtype is None.
"""

import hashlib

_ATTENTION = (
    "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? key_lengths, Tensor? seed, float scale, "
    "SymInt window_left, SymInt window_right, bool lower_right, int threshold"
)
_VARLEN_ATTENTION = (
    "Tensor query, Tensor key, Tensor value, Tensor cu_seq_q, Tensor cu_seq_k, Tensor? seqused_k, Tensor? seed, "
    "SymInt max_q, SymInt max_k, float scale, SymInt window_left, SymInt window_right, int threshold"
)
_SOFTMAX_DROPOUT = (
    "Tensor input, Tensor? attn_mask, Tensor? key_lengths, Tensor? seed, float scale, SymInt window_left, "
    "SymInt window_right, bool lower_right, int threshold"
)
_PARAMETER_GRADS = "ScalarType? weight_grad_dtype, ScalarType? bias_grad_dtype"

# stem: {backend function: its signature}. An operation's files have the stem's name in every folder.
_STEMS = {
    "attention": {
        "attention": f"({_ATTENTION}) -> (Tensor out, Tensor lse, Tensor stats)",
        "attention_backward": (
            f"(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor stats, {_ATTENTION}, bool mask_grad) "
            "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_attn_mask)"
        ),
        "varlen_attention": f"({_VARLEN_ATTENTION}) -> (Tensor out, Tensor lse, Tensor stats)",
        "varlen_attention_backward": (
            f"(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor stats, {_VARLEN_ATTENTION}) "
            "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"
        ),
    },
    "softmax_dropout": {
        "softmax_dropout": f"({_SOFTMAX_DROPOUT}) -> (Tensor out, Tensor stats)",
        "softmax_dropout_backward": (
            f"(Tensor grad_out, Tensor stats, {_SOFTMAX_DROPOUT}, bool mask_grad) "
            "-> (Tensor grad_input, Tensor grad_attn_mask)"
        ),
    },
    "layer_norm": {
        "layer_norm": (
            "(Tensor input, Tensor? weight, Tensor? bias, float eps) -> (Tensor out, Tensor mean, Tensor rstd)"
        ),
        "layer_norm_backward": (
            f"(Tensor grad_out, Tensor input, Tensor mean, Tensor rstd, Tensor? weight, {_PARAMETER_GRADS}) "
            "-> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)"
        ),
        "dropout_add_layer_norm": (
            "(Tensor input, Tensor residual, Tensor? weight, Tensor? bias, Tensor? seed, int threshold, float eps, "
            "bool keep_sum, ScalarType out_dtype) -> (Tensor out, Tensor sum, Tensor mean, Tensor rstd)"
        ),
        "dropout_add_layer_norm_backward": (
            "(Tensor grad_out, Tensor? grad_sum, Tensor sum, Tensor mean, Tensor rstd, Tensor? weight, Tensor? seed, "
            f"int threshold, ScalarType input_dtype, {_PARAMETER_GRADS}) "
            "-> (Tensor grad_input, Tensor grad_residual, Tensor grad_weight, Tensor grad_bias)"
        ),
    },
    "dropout": {
        "dropout": "(Tensor input, Tensor seed, int threshold) -> Tensor",  # is its own backward pass
        "dropout_mask": "(SymInt[] shape, Tensor seed, int threshold) -> Tensor",  # bool, True = kept
    },
}
# Compiled fast paths, with the arguments of their public functions (ops/register.py).
_FAST_PATHS = {
    "attention_fast": (
        "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, "
        "float? scale=None, bool enable_gqa=False) -> Tensor"
    ),
    "layer_norm_fast": (
        "(Tensor input, int[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1e-05) -> Tensor"
    ),
}

STEM_OF = {name: stem for stem, functions in _STEMS.items() for name in functions}
SCHEMAS = {
    name: name + signature for functions in (*_STEMS.values(), _FAST_PATHS) for name, signature in functions.items()
}
CONTRACT = hashlib.sha256(repr(SCHEMAS).encode()).hexdigest()[:12]  # compiled into the libraries
