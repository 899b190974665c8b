"""Masked softmax and dropout of scores, a row at a time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.backends.triton import philox
from fastattn.backends.triton.configurations import row_tile
from fastattn.backends.triton.kernel import (
    are_aligned,
    are_few,
    as_rows,
    bounded,
    cdiv,
    divide,
    dropout_scale,
    empty_like,
    kernel,
    launch,
    rows_of,
)


@triton.jit
def _place(
    row, heads, matrix_rows, columns, key_lengths, window_left, window_right, lower_right, valid, FEW: tl.constexpr
):
    """(matrix, batch, head, query) of each row, and the first column that it sees and the one after the last."""
    matrix, i = divide(row, matrix_rows, FEW)
    batch, head = divide(matrix, heads, FEW)
    batch, head, i = batch.to(tl.int64), head.to(tl.int64), i.to(tl.int32)
    length = tl.zeros_like(i) + columns
    if key_lengths is not None:
        length = tl.load(key_lengths + batch, mask=valid, other=0).to(tl.int32)
    diagonal = i + tl.where(lower_right != 0, length - matrix_rows.to(tl.int32), 0)
    return (
        matrix,
        batch,
        head,
        i,
        tl.maximum(diagonal - window_left, 0),
        tl.minimum(diagonal + window_right + 1, length),
    )


@triton.jit
def _load(rows, column, seen_from, seen_to, ALIGNED: tl.constexpr):
    """The columns that a row sees, in float32: with those beside them where that makes the accesses wide."""
    if ALIGNED:
        wanted = (column // 16 >= seen_from // 16) & (column // 16 < (seen_to + 15) // 16)
    else:
        wanted = (column >= seen_from) & (column < seen_to)
    return tl.load(rows + column, mask=wanted, other=0.0).to(tl.float32)


@triton.jit
def _scores(input_rows, mask_rows, column, seen_from, seen_to, scale, mask_column, ALIGNED: tl.constexpr):
    """scale * input + mask in float32, -inf where not visible."""
    visible = (column >= seen_from) & (column < seen_to)
    scores = _load(input_rows, column, seen_from, seen_to, ALIGNED) * scale
    if mask_rows is not None:
        if mask_rows.dtype.element_ty.is_int():
            taken = tl.load(mask_rows + column.to(tl.int64) * mask_column, mask=visible, other=0)
            visible = visible & (taken != 0)
        else:
            added = tl.load(mask_rows + column.to(tl.int64) * mask_column, mask=visible, other=0.0).to(tl.float32)
            visible = visible & (added != float("-inf"))  # hidden, whatever the score is
            scores += added
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def _point(maximum):
    """A finite reference point of a row: its maximum, 0 where it sees nothing."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def _drop(x, seed, matrix, i, first, threshold):
    """x with 0 where it is dropped, not scaled; x itself without a seed."""
    if seed is not None:
        x = tl.where(philox.keep_rows(seed, matrix, i, first, threshold, x.shape[1]), x, 0.0)
    return x


@kernel
def _forward(
    input,
    attn_mask,
    key_lengths,
    seed,
    out,
    stats,
    rows: tl.int64,
    columns: tl.int32,
    matrix_rows: tl.int64,
    heads: tl.int64,
    input_batch: tl.int64,
    input_head: tl.int64,
    input_row: tl.int64,
    mask_batch: tl.int64,
    mask_head: tl.int64,
    mask_row: tl.int64,
    mask_column: tl.int64,
    scale: tl.float32,
    window_left: tl.int32,
    window_right: tl.int32,
    lower_right: tl.int32,
    threshold: tl.int32,
    dropout_scale: tl.float32,
    FEW: tl.constexpr,
    ALIGNED: tl.constexpr,
    FITS: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if ALIGNED:
        columns = columns // 16 * 16  # which it is: so the compiler sees it
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    valid = row < rows
    matrix, batch, head, i, begin, end = _place(
        row, heads, matrix_rows, columns, key_lengths, window_left, window_right, lower_right, valid, FEW
    )
    input_rows = rows_of(input, batch * input_batch + head * input_head + i * input_row, ALIGNED)
    mask_rows = None
    if attn_mask is not None:
        mask_rows = rows_of(attn_mask, batch * mask_batch + head * mask_head + i * mask_row, False)
    out_rows = rows_of(out, row * columns, ALIGNED)
    column = tl.arange(0, BLOCK)[None, :]
    seen_from, seen_to = begin[:, None], tl.where(valid, end, 0)[:, None]
    if FITS:
        scores = _scores(input_rows, mask_rows, column, seen_from, seen_to, scale, mask_column, ALIGNED)
        point = _point(tl.max(scores, 1))
        exponentials = tl.exp(scores - point[:, None])
        total = tl.sum(exponentials, 1)
    else:
        maximum = tl.full([R], float("-inf"), tl.float32)
        total = tl.zeros([R], tl.float32)
        for first in range(0, columns, BLOCK):
            scores = _scores(input_rows, mask_rows, first + column, seen_from, seen_to, scale, mask_column, ALIGNED)
            larger = tl.maximum(maximum, tl.max(scores, 1))
            point = _point(larger)
            total = total * tl.exp(maximum - point) + tl.sum(tl.exp(scores - point[:, None]), 1)
            maximum = larger
        point = _point(maximum)
    tl.store(stats + row, point, mask=valid)
    tl.store(stats + rows + row, total, mask=valid)
    inverse = (dropout_scale / tl.where(total == 0.0, 1.0, total))[:, None]
    if FITS:
        weights = _drop(exponentials * inverse, seed, matrix, i, 0, threshold)
        tl.store(out_rows + column, weights, mask=valid[:, None] & (column < columns))
    else:
        for first in range(0, columns, BLOCK):
            here = first + column
            scores = _scores(input_rows, mask_rows, here, seen_from, seen_to, scale, mask_column, ALIGNED)
            weights = tl.exp(scores - point[:, None]) * inverse
            weights = _drop(weights, seed, matrix, i, first, threshold)
            tl.store(out_rows + here, weights, mask=valid[:, None] & (here < columns))


@triton.jit
def _weights_and_grad(
    input_rows, mask_rows, grad_rows, seed, matrix, i, first, column, seen_from, seen_to, scale, mask_column, point,
    inverse, threshold, dropout_scale, ALIGNED: tl.constexpr,
):  # fmt: skip
    """P before dropout and the gradient that reaches it, 0 where P is: a product with what is excluded may be NaN."""
    scores = _scores(input_rows, mask_rows, column, seen_from, seen_to, scale, mask_column, ALIGNED)
    weights = tl.exp(scores - point[:, None]) * inverse[:, None]
    grad = _load(grad_rows, column, seen_from, seen_to, ALIGNED)
    grad = _drop(grad * dropout_scale, seed, matrix, i, first, threshold)
    return weights, tl.where(weights == 0.0, 0.0, grad)


@kernel
def _backward(
    grad_out,
    input,
    stats,
    attn_mask,
    key_lengths,
    seed,
    grad_input,
    grad_scores,
    rows: tl.int64,
    columns: tl.int32,
    matrix_rows: tl.int64,
    heads: tl.int64,
    grad_row: tl.int64,
    input_batch: tl.int64,
    input_head: tl.int64,
    input_row: tl.int64,
    mask_batch: tl.int64,
    mask_head: tl.int64,
    mask_row: tl.int64,
    mask_column: tl.int64,
    scale: tl.float32,
    window_left: tl.int32,
    window_right: tl.int32,
    lower_right: tl.int32,
    threshold: tl.int32,
    dropout_scale: tl.float32,
    FEW: tl.constexpr,
    ALIGNED: tl.constexpr,
    FITS: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dS = P * (dP - sum(P * dP)), the gradient of the mask; scale * dS, that of the input. P again from ``stats``."""
    if ALIGNED:
        columns = columns // 16 * 16  # which it is: so the compiler sees it
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    valid = row < rows
    matrix, batch, head, i, begin, end = _place(
        row, heads, matrix_rows, columns, key_lengths, window_left, window_right, lower_right, valid, FEW
    )
    input_rows = rows_of(input, batch * input_batch + head * input_head + i * input_row, ALIGNED)
    mask_rows = None
    if attn_mask is not None:
        mask_rows = rows_of(attn_mask, batch * mask_batch + head * mask_head + i * mask_row, False)
    grad_rows = rows_of(grad_out, row * grad_row, ALIGNED)
    out_rows = rows_of(grad_input, row * columns, ALIGNED)
    column = tl.arange(0, BLOCK)[None, :]
    seen_from, seen_to = begin[:, None], tl.where(valid, end, 0)[:, None]
    point = tl.load(stats + row, mask=valid, other=0.0)
    total = tl.load(stats + rows + row, mask=valid, other=0.0)
    inverse = 1.0 / tl.where(total == 0.0, 1.0, total)
    if FITS:
        weights, grad = _weights_and_grad(
            input_rows, mask_rows, grad_rows, seed, matrix, i, 0, column, seen_from, seen_to, scale, mask_column,
            point, inverse, threshold, dropout_scale, ALIGNED,
        )  # fmt: skip
        grad = weights * (grad - tl.sum(weights * grad, 1)[:, None])
        inside = valid[:, None] & (column < columns)
        tl.store(out_rows + column, grad * scale, mask=inside)
        if grad_scores is not None:
            tl.store(rows_of(grad_scores, row * columns, ALIGNED) + column, grad, mask=inside)
    else:
        product = tl.zeros([R], tl.float32)
        for first in range(0, columns, BLOCK):
            weights, grad = _weights_and_grad(
                input_rows, mask_rows, grad_rows, seed, matrix, i, first, first + column, seen_from, seen_to, scale,
                mask_column, point, inverse, threshold, dropout_scale, ALIGNED,
            )  # fmt: skip
            product += tl.sum(weights * grad, 1)
        for first in range(0, columns, BLOCK):
            here = first + column
            weights, grad = _weights_and_grad(
                input_rows, mask_rows, grad_rows, seed, matrix, i, first, here, seen_from, seen_to, scale,
                mask_column, point, inverse, threshold, dropout_scale, ALIGNED,
            )  # fmt: skip
            grad = weights * (grad - product[:, None])
            inside = valid[:, None] & (here < columns)
            tl.store(out_rows + here, grad * scale, mask=inside)
            if grad_scores is not None:
                tl.store(rows_of(grad_scores, row * columns, ALIGNED) + here, grad, mask=inside)


def _mask_strides(attn_mask: Tensor | None) -> tuple[int, ...]:
    """A mask's strides, 0 where it broadcasts."""
    if attn_mask is None:
        return 0, 0, 0, 0
    return tuple(0 if n == 1 else stride for n, stride in zip(attn_mask.shape, attn_mask.stride(), strict=True))


def softmax_dropout(
    input: Tensor,
    attn_mask: Tensor | None,
    key_lengths: Tensor | None,
    seed: Tensor | None,
    scale: float,
    window_left: int,
    window_right: int,
    lower_right: bool,
    threshold: int,
) -> tuple[Tensor, Tensor]:
    _, heads, matrix_rows, columns = input.shape
    out = empty_like(input)
    stats = input.new_empty((2, *input.shape[:-1]), dtype=torch.float32)
    if columns == 0:
        return out, stats.zero_()
    rows = stats.numel() // 2
    x = _unit_rows(input)
    tile = row_tile("softmax_dropout", columns)
    launch(
        _forward, (cdiv(rows, tile.rows),), input.device,
        x, attn_mask, key_lengths, seed if threshold else None, out, stats, rows, columns, matrix_rows, heads,
        *x.stride()[:3], *_mask_strides(attn_mask), scale,
        *bounded(window_left, window_right, lower_right, matrix_rows, columns), int(lower_right), threshold,
        dropout_scale(threshold), FEW=are_few(rows), ALIGNED=are_aligned(columns, x), FITS=columns <= tile.columns,
        R=tile.rows, BLOCK=tile.columns, num_warps=tile.warps,
    )  # fmt: skip
    return out, stats


def softmax_dropout_backward(
    grad_out: Tensor,
    stats: Tensor,
    input: Tensor,
    attn_mask: Tensor | None,
    key_lengths: Tensor | None,
    seed: Tensor | None,
    scale: float,
    window_left: int,
    window_right: int,
    lower_right: bool,
    threshold: int,
    mask_grad: bool,
) -> tuple[Tensor, Tensor]:
    _, heads, matrix_rows, columns = input.shape
    grad = empty_like(input)
    grad_scores = None
    if mask_grad and attn_mask is not None:  # what a mask broadcasts is summed from float32
        dtype = attn_mask.dtype if attn_mask.shape == input.shape else torch.float32
        grad_scores = empty_like(input, dtype)
    if input.numel() > 0:
        rows = input.numel() // columns
        x, (g, g_stride) = _unit_rows(input), as_rows(grad_out)
        tile = row_tile("softmax_dropout_backward", columns)
        launch(
            _backward, (cdiv(rows, tile.rows),), input.device,
            g, x, stats, attn_mask, key_lengths, seed if threshold else None, grad, grad_scores, rows, columns,
            matrix_rows, heads, g_stride, *x.stride()[:3], *_mask_strides(attn_mask), scale,
            *bounded(window_left, window_right, lower_right, matrix_rows, columns), int(lower_right), threshold,
            dropout_scale(threshold),
            FEW=are_few(rows), ALIGNED=are_aligned(columns, g, x), FITS=columns <= tile.columns,
            R=tile.rows, BLOCK=tile.columns, num_warps=tile.warps,
        )  # fmt: skip
    if grad_scores is None or attn_mask is None:
        return grad, grad.new_empty(0)
    return grad, grad_scores.sum_to_size(attn_mask.shape).to(attn_mask.dtype)


def _unit_rows(scores: Tensor) -> Tensor:
    """Scores with unit stride in a row."""
    return scores if scores.stride(3) == 1 or scores.size(3) == 1 else scores.contiguous()
