"""Masked softmax and dropout of scores, row by row.

    for each group of BLOCK_M rows (with dropout in pairs i, i + 8; programs):
        ROW_FITS: one read of the rows; otherwise two loops over blocks of BLOCK_N columns:
            forward: 1. row_max and row_sum, online; 2. out = dropout(exp(s - row_max) / row_sum)
            backward: 1. sum(P * dP); 2. dS = P * (dP - sum)

input, out, grad_out (B, H, Lq, Lk), 16-bit or float32; attn_mask (B, H, Lq, Lk), bool or float, stride 0 where it
broadcasts; stats (2, B, H, Lq) float32: row_max in natural units and row_sum. All arithmetic is float32.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.backends.schema import SoftmaxDropoutArgs, SoftmaxDropoutBackwardArgs
from fastattn.backends.triton.kernel import cdiv, kernel, launch
from fastattn.backends.triton.philox import dropout_of, keep_pairs
from fastattn.backends.triton.rows import (
    LIMITS,
    RowLimits,
    Rows,
    are_aligned,
    as_rows,
    divide,
    empty_like,
    exists,
    fits_int32,
    places,
    row_slots,
    row_tile,
    rows_of,
)
from fastattn.backends.triton.visibility import Window, band_of, end_key, first_key

# Measured on an H100 and taken for all architectures.
LIMITS["softmax_dropout"] = RowLimits(2048, 8192, 4096, 1024, rows=2)
LIMITS["softmax_dropout_backward"] = RowLimits(2048, 8192, 4096, 1024, rows=2)


class Matrices(NamedTuple):
    """Scores (B, H, Lq, Lk) with unit stride along Lk, or their mask, with stride 0 in broadcast dimensions."""

    pointer: Tensor
    batch: int | None  # strides; None: contiguous
    head: int | None
    row: int | None


class Place(NamedTuple):
    """The rows (M,) of a program, and the columns that they see."""

    rows: Rows
    batch: tl.tensor
    head: tl.tensor
    begin: tl.tensor  # (M, 1), the first visible column; unused if every row sees every column
    end: tl.tensor  # (M, 1), one more than the last visible column


@triton.jit
def _place(
    program, slots, rows, heads, seqlen_q, seqlen_k, key_lengths, dropout, window, BLOCK_M: tl.constexpr,
    LOWER_RIGHT: tl.constexpr, INT32: tl.constexpr,
):  # fmt: skip
    """Return the ``Place`` of a program."""
    here = rows_of(program, slots, seqlen_q, rows, dropout, BLOCK_M, INT32)
    batch, head = divide(here.matrix, heads, INT32)
    batch, head = batch.to(tl.int64), head.to(tl.int64)
    begin, end = here.i[:, None], here.i[:, None]  # workaround: Triton 3.6 cannot return a tuple that holds None
    if window is not None:
        i = here.i.to(tl.int32)
        length = tl.zeros_like(i) + seqlen_k
        if key_lengths is not None:
            length = tl.load(key_lengths + batch, mask=here.exists, other=0).to(tl.int32)
        band = band_of(length, seqlen_q.to(tl.int32), window, LOWER_RIGHT)
        begin = first_key(i, band)[:, None]
        end = tl.where(here.exists, end_key(i, band), 0)[:, None]
    return Place(here, batch, head, begin, end)


@triton.jit
def _rows_at(place, matrices, seqlen_k):
    """Return pointers (M,) to the first column of each row."""
    if matrices.batch is None:
        offset = place.rows.row * seqlen_k
    else:
        offset = place.batch * matrices.batch + place.head * matrices.head + place.rows.i * matrices.row
    return matrices.pointer + offset


@triton.jit
def _wanted(column, place, window, seqlen_k, ALIGNED: tl.constexpr):
    """Return which columns to load: the visible ones, if ALIGNED rounded out to groups of 16 for vectorised access."""
    if window is None:
        wanted = place.rows.exists[:, None] & exists(column, seqlen_k, ALIGNED)
    elif ALIGNED:
        wanted = (column // 16 >= place.begin // 16) & (column // 16 < (place.end + 15) // 16)
    else:
        wanted = (column >= place.begin) & (column < place.end)
    return wanted


@triton.jit
def _load(rows, column, place, window, seqlen_k, ALIGNED: tl.constexpr):
    """Load the columns that ``_wanted`` selects, in float32, 0 elsewhere."""
    wanted = _wanted(column, place, window, seqlen_k, ALIGNED)
    return tl.load(places(rows, column, ALIGNED), mask=wanted, other=0.0).to(tl.float32)


@triton.jit
def _scores(input_rows, attn_mask, mask_column, column, place, window, seqlen_k, scale, ALIGNED: tl.constexpr):
    """Return scale * input + mask in float32, -inf where not visible.

    ``mask_column`` is the stride of the mask's columns. None: 1, with rows that begin at multiples of 16 elements.
    """
    if window is None:
        visible = place.rows.exists[:, None] & exists(column, seqlen_k, ALIGNED)
    else:  # one comparison: differences of columns before the first visible one wrap to large numbers
        visible = (column - place.begin).to(tl.uint32) < tl.maximum(place.end - place.begin, 0).to(tl.uint32)
    scores = _load(input_rows, column, place, window, seqlen_k, ALIGNED) * scale
    if attn_mask is not None:
        mask_rows = _rows_at(place, attn_mask, seqlen_k)
        if mask_column is None:
            pointers = places(mask_rows, column, True)
        else:
            pointers = places(mask_rows, column.to(tl.int64) * mask_column, False)
        values = tl.load(pointers, mask=_wanted(column, place, window, seqlen_k, ALIGNED), other=0)
        if values.dtype.is_int():
            visible = visible & (values != 0)
        else:
            added = values.to(tl.float32)
            visible = visible & (added != float("-inf"))  # -inf hides the element, even if its score is inf or NaN
            scores += added
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def _exp(x):
    """Return exp(x) with subnormal results flushed. ``tl.exp`` spends three more instructions on them."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _finite(row_max):
    return tl.where(row_max == float("-inf"), 0.0, row_max)


@triton.jit
def _drop(x, dropout, place, first):
    """Return x with 0 where it is dropped, without scaling."""
    if dropout is not None:
        x = tl.where(keep_pairs(dropout, place.rows, first, x.shape[1]), x, 0.0)
    return x


@kernel
def _forward(
    input, attn_mask, mask_column, key_lengths, dropout, out, stats,
    rows: tl.int64, slots: tl.int64, heads: tl.int64, seqlen_q: tl.int64, seqlen_k: tl.int32, scale: tl.float32, window,
    LOWER_RIGHT: tl.constexpr, INT32: tl.constexpr, ALIGNED: tl.constexpr, ROW_FITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    if ALIGNED:
        seqlen_k = seqlen_k // 16 * 16  # workaround: states the divisor (rows.py, places)
    place = _place(
        tl.program_id(0), slots, rows, heads, seqlen_q, seqlen_k, key_lengths, dropout, window, BLOCK_M, LOWER_RIGHT,
        INT32,
    )  # fmt: skip
    row, valid = place.rows.row, place.rows.exists
    input_rows = _rows_at(place, input, seqlen_k)
    out_rows = out + row * seqlen_k
    column = tl.arange(0, BLOCK_N)[None, :]
    if ROW_FITS:
        scores = _scores(input_rows, attn_mask, mask_column, column, place, window, seqlen_k, scale, ALIGNED)
        row_max = _finite(tl.max(scores, 1))
        exponentials = _exp(scores - row_max[:, None])
        row_sum = tl.sum(exponentials, 1)
    else:
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        for first in range(0, seqlen_k, BLOCK_N):
            here = first + column
            scores = _scores(input_rows, attn_mask, mask_column, here, place, window, seqlen_k, scale, ALIGNED)
            raised = tl.maximum(row_max, tl.max(scores, 1))
            finite = _finite(raised)
            row_sum = row_sum * _exp(row_max - finite) + tl.sum(_exp(scores - finite[:, None]), 1)
            row_max = raised
        row_max = _finite(row_max)
    tl.store(stats + row, row_max, mask=valid)
    tl.store(stats + rows + row, row_sum, mask=valid)
    dropout_scale = 1.0 if dropout is None else dropout.scale
    inverse_sum = (dropout_scale / tl.where(row_sum == 0.0, 1.0, row_sum))[:, None]
    if ROW_FITS:
        weights = _drop(exponentials, dropout, place, 0) * inverse_sum
        inside = valid[:, None] & exists(column, seqlen_k, ALIGNED)
        tl.store(places(out_rows, column, ALIGNED), weights, mask=inside)
    else:
        for first in range(0, seqlen_k, BLOCK_N):
            here = first + column
            scores = _scores(input_rows, attn_mask, mask_column, here, place, window, seqlen_k, scale, ALIGNED)
            weights = _drop(_exp(scores - row_max[:, None]), dropout, place, first) * inverse_sum
            inside = valid[:, None] & exists(here, seqlen_k, ALIGNED)
            tl.store(places(out_rows, here, ALIGNED), weights, mask=inside)


@triton.jit
def _weights_and_grad(
    input_rows, attn_mask, mask_column, grad_rows, dropout, place, window, first, column, seqlen_k, scale, row_max,
    inverse_sum, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Return P before dropout, and the gradient that reaches it, both float32.

    The gradient is 0 where P is 0, because products with excluded values may be NaN.
    """
    scores = _scores(input_rows, attn_mask, mask_column, column, place, window, seqlen_k, scale, ALIGNED)
    weights = _exp(scores - row_max[:, None]) * inverse_sum[:, None]
    grad = _load(grad_rows, column, place, window, seqlen_k, ALIGNED)
    if dropout is not None:
        grad = _drop(grad * dropout.scale, dropout, place, first)
    return weights, tl.where(weights == 0.0, 0.0, grad)


@kernel
def _backward(
    grad_out, stats, input, attn_mask, mask_column, key_lengths, dropout, grad_input, grad_scores,
    rows: tl.int64, slots: tl.int64, heads: tl.int64, seqlen_q: tl.int64, seqlen_k: tl.int32, grad_stride: tl.int64,
    scale: tl.float32, window, LOWER_RIGHT: tl.constexpr, INT32: tl.constexpr, ALIGNED: tl.constexpr,
    ROW_FITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write dS = P * (dP - sum(P * dP)), the gradient of the mask, and scale * dS, the gradient of the input.

    P is recomputed from ``stats``.
    """
    if ALIGNED:
        seqlen_k = seqlen_k // 16 * 16  # workaround: states the divisor (rows.py, places)
    place = _place(
        tl.program_id(0), slots, rows, heads, seqlen_q, seqlen_k, key_lengths, dropout, window, BLOCK_M, LOWER_RIGHT,
        INT32,
    )  # fmt: skip
    row, valid = place.rows.row, place.rows.exists
    input_rows = _rows_at(place, input, seqlen_k)
    grad_rows = grad_out + row * grad_stride
    out_rows = grad_input + row * seqlen_k
    column = tl.arange(0, BLOCK_N)[None, :]
    row_max = tl.load(stats + row, mask=valid, other=0.0)
    row_sum = tl.load(stats + rows + row, mask=valid, other=0.0)
    inverse_sum = 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum)
    if ROW_FITS:
        weights, grad = _weights_and_grad(
            input_rows, attn_mask, mask_column, grad_rows, dropout, place, window, 0, column, seqlen_k,
            scale, row_max, inverse_sum, ALIGNED,
        )  # fmt: skip
        grad = weights * (grad - tl.sum(weights * grad, 1)[:, None])
        inside = valid[:, None] & exists(column, seqlen_k, ALIGNED)
        tl.store(places(out_rows, column, ALIGNED), grad * scale, mask=inside)
        if grad_scores is not None:
            tl.store(places(grad_scores + row * seqlen_k, column, ALIGNED), grad, mask=inside)
    else:
        product = tl.zeros([BLOCK_M], tl.float32)
        for first in range(0, seqlen_k, BLOCK_N):
            weights, grad = _weights_and_grad(
                input_rows, attn_mask, mask_column, grad_rows, dropout, place, window, first, first + column, seqlen_k,
                scale, row_max, inverse_sum, ALIGNED,
            )  # fmt: skip
            product += tl.sum(weights * grad, 1)
        for first in range(0, seqlen_k, BLOCK_N):
            here = first + column
            weights, grad = _weights_and_grad(
                input_rows, attn_mask, mask_column, grad_rows, dropout, place, window, first, here, seqlen_k,
                scale, row_max, inverse_sum, ALIGNED,
            )  # fmt: skip
            grad = weights * (grad - product[:, None])
            inside = valid[:, None] & exists(here, seqlen_k, ALIGNED)
            tl.store(places(out_rows, here, ALIGNED), grad * scale, mask=inside)
            if grad_scores is not None:
                tl.store(places(grad_scores + row * seqlen_k, here, ALIGNED), grad, mask=inside)


def _constants(
    kernel: str, device: torch.device | None, columns: int, is_aligned: bool, is_int32: bool, lower_right: bool
) -> dict[str, Any]:
    """Return the constexprs and options of a kernel for rows of this many columns."""
    tile = row_tile(kernel, columns, is_aligned)
    return {
        "LOWER_RIGHT": bool(lower_right), "INT32": bool(is_int32), "ALIGNED": bool(is_aligned),
        "ROW_FITS": columns <= tile.block_n, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        "num_warps": tile.num_warps,
    }  # fmt: skip


RECIPES = {  # what csrc/launch starts
    "softmax_dropout.forward": (_forward, functools.partial(_constants, "softmax_dropout")),
    "softmax_dropout.backward": (_backward, functools.partial(_constants, "softmax_dropout_backward")),
}


def softmax_dropout(args: SoftmaxDropoutArgs) -> tuple[Tensor, Tensor]:
    out = empty_like(args.input)
    stats = args.input.new_empty((2, *args.input.shape[:-1]), dtype=torch.float32)
    if args.input.size(3) == 0:
        return out, stats.zero_()
    call = _Call("softmax_dropout", args)
    launch(
        _forward, call.grid, args.input.device, *call.operands, out, stats, *call.sizes, args.scale, call.window,
        **call.constants,
    )  # fmt: skip
    return out, stats


def softmax_dropout_backward(args: SoftmaxDropoutBackwardArgs) -> tuple[Tensor, Tensor]:
    forward = args.forward
    input, attn_mask = forward.input, forward.attn_mask
    grad = empty_like(input)
    grad_scores = None
    if args.mask_grad and attn_mask is not None:  # float32 if the mask broadcasts: the sum is taken from float32
        dtype = attn_mask.dtype if attn_mask.shape == input.shape else torch.float32
        grad_scores = empty_like(input, dtype)
    if input.numel() > 0:
        grad_out, grad_stride = as_rows(args.grad_out)
        call = _Call("softmax_dropout_backward", forward, grad_out)
        launch(
            _backward, call.grid, input.device, grad_out, args.stats, *call.operands, grad, grad_scores, *call.sizes,
            grad_stride, forward.scale, call.window, **call.constants,
        )  # fmt: skip
    if grad_scores is None or attn_mask is None:
        return grad, grad.new_empty(0)
    return grad, grad_scores.sum_to_size(attn_mask.shape).to(attn_mask.dtype)


class _Call:
    """One launch over the scores: the arguments of both kernels.

    Args:
        others: further tensors that the kernel accesses by rows, which count for the alignment.
    """

    def __init__(self, kernel: str, args: SoftmaxDropoutArgs, *others: Tensor) -> None:
        batch, heads, seqlen_q, seqlen_k = args.input.shape
        scores = args.input  # with unit stride along the last dimension, copied if necessary
        if scores.stride(3) != 1 and seqlen_k != 1:
            scores = scores.contiguous()
        is_aligned = are_aligned(seqlen_k, scores, *others)
        dropout = dropout_of(args.seed, args.threshold)
        slots = row_slots(seqlen_q, dropout)
        count = batch * heads * slots
        self.constants = _constants(kernel, scores.device, seqlen_k, is_aligned, fits_int32(count), args.lower_right)
        self.grid = (cdiv(count, self.constants["BLOCK_M"]),)
        self.operands = _scores_of(scores), *_mask(args.attn_mask, is_aligned), args.key_lengths, dropout
        self.sizes = batch * heads * seqlen_q, slots, heads, seqlen_q, seqlen_k
        self.window = _window(args)


def _window(args: SoftmaxDropoutArgs) -> Window | None:
    """Return the window, or None if lengths and window let every row see every column."""
    rows, columns = args.input.shape[2:]
    reach = (columns, rows) if args.lower_right else (rows, columns)
    sees_all = args.key_lengths is None and args.window_left >= reach[0] and args.window_right >= reach[1]
    return None if sees_all else Window(args.window_left, args.window_right)


def _scores_of(scores: Tensor) -> Matrices:
    return Matrices(scores, None, None, None) if scores.is_contiguous() else Matrices(scores, *_strides(scores)[:3])


def _mask(mask: Tensor | None, scores_are_aligned: bool) -> tuple[Matrices | None, int | None]:
    """Return the mask and the stride of its columns, None for 1 in aligned rows.

    Workaround (Triton 3.6): the stride is a separate argument, because a kernel cannot compare a tuple that holds None
    with None.
    """
    if mask is None:
        return None, None
    *strides, column = _strides(mask)
    is_aligned = scores_are_aligned and column == 1 and are_aligned(mask.size(3), mask)
    return Matrices(mask, *strides), None if is_aligned else column


def _strides(tensor: Tensor) -> list[int]:
    """Return the strides, 0 for dimensions of size 1, which broadcast."""
    return [0 if n == 1 else stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)]
