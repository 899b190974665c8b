"""Layer normalisation, also of residual + dropout(input).

    _forward, per BLOCK_M rows: x = residual + dropout(input); mean, rstd; out = (x - mean) * rstd * weight + bias
        ROW_FITS: one read of the row; otherwise BLOCK_M = 1, and two loops over blocks of BLOCK_N columns
    _backward, per program (at most 512): for every num_programs-th block of rows: dx, d input; weight and bias sums
    _reduce, per 64 columns: adds the programs' sums

input, residual, out, total (rows, columns) with unit stride along columns: 16-bit or float32. weight, bias (columns,).
mean, rstd (rows,) float32. partial (2, programs, columns) float32. All arithmetic is float32.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.backends.schema import (
    DropoutAddLayerNormArgs,
    DropoutAddLayerNormBackwardArgs,
    LayerNormArgs,
    LayerNormBackwardArgs,
)
from fastattn.backends.triton.kernel import cdiv, kernel, launch
from fastattn.backends.triton.philox import Dropout, dropout_of, keep_rows
from fastattn.backends.triton.rows import (
    LIMITS,
    RowLimits,
    are_aligned,
    as_rows,
    divide,
    empty_like,
    exists,
    fits_int32,
    places,
    row_tile,
)

LIMITS["layer_norm"] = RowLimits(4096, 16384, 8192, 1024)
LIMITS["layer_norm_backward"] = RowLimits(2048, 8192, 8192, 512)

LARGEST = tl.constexpr(torch.finfo(torch.float32).max)

# Maximum programs that share the rows of a weight gradient. It is the same on every device, and so is the order of
# summation.
MAX_PROGRAMS = 512


@triton.jit
def _drop(x, dropout, row, first, matrix_rows, INT32: tl.constexpr):
    """Return dropout of x, the columns from ``first`` on of these rows."""
    if dropout is not None:
        matrix, i = divide(row, matrix_rows, INT32)
        x = tl.where(keep_rows(dropout, matrix, i, first, x.shape[1]), x * dropout.scale, 0.0)
    return x


@triton.jit
def _residual_sum(
    input_rows, residual_rows, dropout, row, first, column, inside, matrix_rows, dtype: tl.constexpr,
    INT32: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Return residual + dropout(input) in float32, 0 outside.

    With a residual the sum is rounded to dtype, as the backward pass reads it.
    """
    x = tl.load(places(input_rows, column, ALIGNED), mask=inside, other=0.0).to(tl.float32)
    x = _drop(x, dropout, row, first, matrix_rows, INT32)
    if residual_rows is not None:
        x += tl.load(places(residual_rows, column, ALIGNED), mask=inside, other=0.0).to(tl.float32)
        x = x.to(dtype).to(tl.float32)
    return x


@triton.jit
def _parameter(pointer, column, columns, ALIGNED: tl.constexpr):
    """Return columns (1, BLOCK_N) of a weight or bias in float32, or (M, BLOCK_N) for pointers (M, 1)."""
    pointers = pointer + column
    if ALIGNED:
        pointers = tl.multiple_of(pointers, (1, 16))
    return tl.load(pointers, mask=exists(column, columns, ALIGNED), other=0.0).to(tl.float32)


@triton.jit
def _affine(normal, weight, bias, column, columns, ALIGNED: tl.constexpr):
    if weight is not None:
        normal *= _parameter(weight, column, columns, ALIGNED)
    if bias is not None:
        normal += _parameter(bias, column, columns, ALIGNED)
    return normal


@triton.jit
def _rstd(variance, eps):
    """Return 1 / sqrt(variance + eps), or NaN if the variance, or its sum with a finite eps, overflows.

    An rstd of 0 would make the row look healthy.
    """
    radicand = variance + eps
    overflowed = (radicand == float("inf")) & ((variance == float("inf")) | (eps <= LARGEST))
    return tl.where(overflowed, float("nan"), 1.0 / tl.sqrt_rn(radicand))


@kernel
def _forward(
    input, residual, weight, bias, dropout, out, total, mean, rstd, rows: tl.int64, columns: tl.int32,
    matrix_rows: tl.int64, input_stride: tl.int64, residual_stride: tl.int64, eps: tl.float32,
    INT32: tl.constexpr, ALIGNED: tl.constexpr, ROW_FITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write out = (x - mean) * rstd * weight + bias, x = total = residual + dropout(input)."""
    if ALIGNED:
        columns = columns // 16 * 16  # workaround: states the divisor (rows.py, places)
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)[None, :]
    valid = (row < rows)[:, None]
    input_rows, out_rows = input + row * input_stride, out + row * columns
    residual_rows = None
    if residual is not None:
        residual_rows = residual + row * residual_stride
    dtype: tl.constexpr = (out if total is None else total).dtype.element_ty
    if ROW_FITS:
        inside = valid & exists(column, columns, ALIGNED)
        x = _residual_sum(
            input_rows, residual_rows, dropout, row, 0, column, inside, matrix_rows, dtype, INT32, ALIGNED
        )
        # The mean of the deviations is the rounding error of a large mean, and corrects it.
        origin = tl.sum(x, 1) / columns
        deviations = tl.where(inside, x - origin[:, None], 0.0)
        shift = tl.sum(deviations, 1) / columns
        centred = tl.where(inside, deviations - shift[:, None], 0.0)
        squares = tl.sum(centred * centred, 1)
    else:
        # Merge the blocks' sums by Chan, Golub and LeVeque 1983, equations 2.1. The sums are of deviations from the
        # first block's mean, so a large mean costs no digits for any number of blocks.
        origin = tl.zeros([BLOCK_M], tl.float32)
        shift = tl.zeros([BLOCK_M], tl.float32)
        squares = tl.zeros([BLOCK_M], tl.float32)
        for first in range(0, columns, BLOCK_N):
            here = first + column
            inside = valid & exists(here, columns, ALIGNED)
            x = _residual_sum(
                input_rows, residual_rows, dropout, row, first, here, inside, matrix_rows, dtype, INT32, ALIGNED
            )
            count = tl.minimum(columns - first, BLOCK_N).to(tl.float32)
            if first == 0:
                origin = tl.sum(x, 1) / count
            deviations = tl.where(inside, x - origin[:, None], 0.0)
            block_shift = tl.sum(deviations, 1) / count
            centred = tl.where(inside, deviations - block_shift[:, None], 0.0)
            step = (block_shift - shift) * (count / (first + count))
            squares += tl.sum(centred * centred, 1) + step * (block_shift - shift) * first
            shift += step
    center = origin + shift
    scaling = _rstd(squares / columns, eps)
    tl.store(mean + row, center, mask=row < rows)
    tl.store(rstd + row, scaling, mask=row < rows)
    if ROW_FITS:
        normal = _affine(centred * scaling[:, None], weight, bias, column, columns, ALIGNED)
        tl.store(places(out_rows, column, ALIGNED), normal, mask=inside)
        if total is not None:
            tl.store(places(total + row * columns, column, ALIGNED), x, mask=inside)
    else:
        for first in range(0, columns, BLOCK_N):
            here = first + column
            inside = valid & exists(here, columns, ALIGNED)
            x = _residual_sum(
                input_rows, residual_rows, dropout, row, first, here, inside, matrix_rows, dtype, INT32, ALIGNED
            )
            normal = (x - origin[:, None] - shift[:, None]) * scaling[:, None]
            tl.store(
                places(out_rows, here, ALIGNED), _affine(normal, weight, bias, here, columns, ALIGNED), mask=inside
            )
            if total is not None:
                tl.store(places(total + row * columns, here, ALIGNED), x, mask=inside)


@triton.jit
def _normal_and_grad(grad_rows, total_rows, center, scaling, column, inside, ALIGNED: tl.constexpr):
    """Return the normalised rows and the gradient of the output, both float32 and 0 outside."""
    x = tl.load(places(total_rows, column, ALIGNED), mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(places(grad_rows, column, ALIGNED), mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, (x - center[:, None]) * scaling[:, None], 0.0), grad


@triton.jit
def _store_grads(
    grad, sum_rows, dropout, grad_input, grad_total, row, first, column, inside, columns, matrix_rows,
    INT32: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Store the gradient of the sum, with ``sum_rows`` added, and the gradient of the input, through dropout."""
    if sum_rows is not None:
        grad += tl.load(places(sum_rows, column, ALIGNED), mask=inside, other=0.0).to(tl.float32)
    tl.store(places(grad_total + row * columns, column, ALIGNED), grad, mask=inside)
    if grad_input is not None:
        grad = _drop(grad, dropout, row, first, matrix_rows, INT32)
        tl.store(places(grad_input + row * columns, column, ALIGNED), grad, mask=inside)


@kernel
def _backward(
    grad_out, grad_sum, total, mean, rstd, weight, dropout, grad_input, grad_total, partial, rows: tl.int64,
    columns: tl.int32, matrix_rows: tl.int64, grad_stride: tl.int64, sum_stride: tl.int64, total_stride: tl.int64,
    INT32: tl.constexpr, ALIGNED: tl.constexpr, ROW_FITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), g = grad_out * weight.

    A program takes every num_programs-th block of rows. Into ``partial`` (2, programs, columns) it writes the sums of
    grad_out * xhat and of grad_out over its rows. ``_reduce`` adds them up to the gradients of weight and bias.
    """
    if ALIGNED:
        columns = columns // 16 * 16  # workaround: states the divisor (rows.py, places)
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    column = tl.arange(0, BLOCK_N)[None, :]
    if weight is not None:
        # Workaround (Triton 3.6 to 3.9): pointers (BLOCK_M, 1) load the weight once per row, in the rows' layout. A
        # weight loaded once for all rows has another layout, to which every row would be converted.
        weight += tl.zeros([BLOCK_M, 1], tl.int32)
    if partial is not None:
        weight_sums = partial + program * columns
        bias_sums = weight_sums + programs * columns
    weight_products = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    bias_products = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for top in range(program * BLOCK_M, rows, programs * BLOCK_M):
        row = tl.cast(top, tl.int64) + tl.arange(0, BLOCK_M)
        valid = (row < rows)[:, None]
        center = tl.load(mean + row, mask=row < rows, other=0.0)
        scaling = tl.load(rstd + row, mask=row < rows, other=0.0)
        grad_rows, total_rows = grad_out + row * grad_stride, total + row * total_stride
        sum_rows = None
        if grad_sum is not None:
            sum_rows = grad_sum + row * sum_stride
        if ROW_FITS:
            inside = valid & exists(column, columns, ALIGNED)
            normal, grad = _normal_and_grad(grad_rows, total_rows, center, scaling, column, inside, ALIGNED)
            if partial is not None:
                weight_products += grad * normal
                bias_products += grad
            grad = _affine(grad, weight, None, column, columns, ALIGNED)
            grad_mean, product_mean = tl.sum(grad, 1) / columns, tl.sum(grad * normal, 1) / columns
            grad = scaling[:, None] * (grad - grad_mean[:, None] - normal * product_mean[:, None])
            _store_grads(
                grad, sum_rows, dropout, grad_input, grad_total, row, 0, column, inside, columns, matrix_rows,
                INT32, ALIGNED,
            )  # fmt: skip
        else:
            grad_mean, product_mean = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
            for first in range(0, columns, BLOCK_N):
                here = first + column
                inside = valid & exists(here, columns, ALIGNED)
                normal, grad = _normal_and_grad(grad_rows, total_rows, center, scaling, here, inside, ALIGNED)
                if partial is not None:  # BLOCK_M = 1, one row at a time: the sums so far are this program's own
                    more = inside & (row != program * BLOCK_M)[:, None]
                    sums = tl.load(weight_sums + here, mask=more, other=0.0) + grad * normal
                    tl.store(weight_sums + here, sums, mask=inside)
                    sums = tl.load(bias_sums + here, mask=more, other=0.0) + grad
                    tl.store(bias_sums + here, sums, mask=inside)
                grad = _affine(grad, weight, None, here, columns, ALIGNED)
                grad_mean += tl.sum(grad, 1) / columns
                product_mean += tl.sum(grad * normal, 1) / columns
            for first in range(0, columns, BLOCK_N):
                here = first + column
                inside = valid & exists(here, columns, ALIGNED)
                normal, grad = _normal_and_grad(grad_rows, total_rows, center, scaling, here, inside, ALIGNED)
                grad = _affine(grad, weight, None, here, columns, ALIGNED)
                grad = scaling[:, None] * (grad - grad_mean[:, None] - normal * product_mean[:, None])
                _store_grads(
                    grad, sum_rows, dropout, grad_input, grad_total, row, first, here, inside, columns, matrix_rows,
                    INT32, ALIGNED,
                )  # fmt: skip
            tl.debug_barrier()  # the next row adds to the sums that this row's threads have stored
    if ROW_FITS and partial is not None:
        inside = tl.arange(0, BLOCK_N) < columns
        tl.store(weight_sums + tl.arange(0, BLOCK_N), tl.sum(weight_products, 0), mask=inside)
        tl.store(bias_sums + tl.arange(0, BLOCK_N), tl.sum(bias_products, 0), mask=inside)


@kernel
def _reduce(
    partial, grad_weight, grad_bias, programs: tl.int64, columns: tl.int64, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Sum ``partial`` (2, programs, columns) over its programs. Grid index (., 0) is the weight, (., 1) the bias."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    table = partial + tl.program_id(1) * programs * columns
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, programs, BLOCK_M):
        row = (first + tl.arange(0, BLOCK_M))[:, None]
        sums += tl.load(table + row * columns + column, mask=(row < programs) & (column < columns), other=0.0)
    if tl.program_id(1) == 0:
        if grad_weight is not None:
            tl.store(grad_weight + column, tl.sum(sums, 0), mask=column < columns)
    else:
        if grad_bias is not None:
            tl.store(grad_bias + column, tl.sum(sums, 0), mask=column < columns)


def _constants(
    kernel: str, device: torch.device | None, columns: int, is_aligned: bool, is_int32: bool
) -> dict[str, Any]:
    """Return the constexprs and options of a kernel for rows of this many columns."""
    tile = row_tile(kernel, columns, is_aligned)
    return {
        "INT32": bool(is_int32), "ALIGNED": bool(is_aligned), "ROW_FITS": columns <= tile.block_n,
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "num_warps": tile.num_warps,
    }  # fmt: skip


def _reduce_constants(device: torch.device | None) -> dict[str, Any]:
    return {"BLOCK_M": 32, "BLOCK_N": 64, "num_warps": 4}


RECIPES = {  # what csrc/launch starts
    "layer_norm.forward": (_forward, functools.partial(_constants, "layer_norm")),
    "layer_norm.backward": (_backward, functools.partial(_constants, "layer_norm_backward")),
    "layer_norm.reduce": (_reduce, _reduce_constants),
}


def layer_norm(args: LayerNormArgs) -> tuple[Tensor, Tensor, Tensor]:
    out = empty_like(args.input)
    mean, rstd = _run_forward(args, None, None, out, None)
    return out, mean, rstd


def layer_norm_backward(args: LayerNormBackwardArgs) -> tuple[Tensor, Tensor, Tensor]:
    grad = empty_like(args.input)
    return grad, *_run_backward(args, None, None, None, grad)


def dropout_add_layer_norm(args: DropoutAddLayerNormArgs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    input, residual = args.input, args.residual
    dtype = torch.promote_types(input.dtype, residual.dtype)
    out = empty_like(input, args.out_dtype or dtype)
    total = empty_like(input, dtype) if args.keep_sum else None
    mean, rstd = _run_forward(args, residual, dropout_of(args.seed, args.threshold), out, total)
    return out, out.new_empty(0) if total is None else total, mean, rstd


def dropout_add_layer_norm_backward(args: DropoutAddLayerNormBackwardArgs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_sum = LayerNormBackwardArgs(
        args.grad_out, args.sum, args.mean, args.rstd, args.weight, args.weight_grad_dtype, args.bias_grad_dtype
    )
    grad_input, grad_total = empty_like(args.sum, args.input_dtype), empty_like(args.sum)
    dropout = dropout_of(args.seed, args.threshold)
    return grad_input, grad_total, *_run_backward(of_sum, args.grad_sum, dropout, grad_input, grad_total)


def _run_forward(
    args: LayerNormArgs | DropoutAddLayerNormArgs, residual: Tensor | None, dropout: Dropout | None, out: Tensor,
    total: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Fill ``out`` and ``total``, and return mean and rstd, each float32 with one value per row."""
    input = args.input
    mean = input.new_empty(tuple(input.shape[:-1]), dtype=torch.float32)
    rstd = empty_like(mean)
    rows, columns = mean.numel(), input.size(-1)
    x, x_stride = as_rows(input)
    r, r_stride = (None, 0) if residual is None else as_rows(residual)
    w, b = _contiguous(args.weight), _contiguous(args.bias)
    is_aligned = are_aligned(columns, x, r, w, b)
    constants = _constants("layer_norm", input.device, columns, is_aligned, fits_int32(rows))
    launch(
        _forward, (cdiv(rows, constants["BLOCK_M"]),), input.device,
        x, r, w, b, dropout, out, total, mean, rstd, rows, columns, _matrix_rows(input), x_stride, r_stride,
        args.eps, **constants,
    )  # fmt: skip
    return mean, rstd


def _run_backward(
    args: LayerNormBackwardArgs, grad_sum: Tensor | None, dropout: Dropout | None, grad_input: Tensor | None,
    grad_total: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Fill ``grad_total``, the gradient of what was normalised, and ``grad_input``; return those of weight and bias.

    ``grad_sum`` is added to ``grad_total``, whose dropout ``grad_input`` is.
    """
    total, dtypes = args.input, (args.weight_grad_dtype, args.bias_grad_dtype)
    rows, columns, device = args.mean.numel(), total.size(-1), total.device
    (g, g_stride), (x, x_stride) = as_rows(args.grad_out), as_rows(total)
    s, s_stride = (None, 0) if grad_sum is None else as_rows(grad_sum)
    w = _contiguous(args.weight)
    is_aligned = are_aligned(columns, g, s, x, w)
    constants = _constants("layer_norm_backward", device, columns, is_aligned, fits_int32(rows))
    programs = min(cdiv(rows, constants["BLOCK_M"]), MAX_PROGRAMS)
    partial = torch.empty(2, programs, columns, dtype=torch.float32, device=device) if any(dtypes) else None
    launch(
        _backward, (programs,), device,
        g, s, x, args.mean, args.rstd, w, dropout, grad_input, grad_total, partial, rows, columns,
        _matrix_rows(total), g_stride, s_stride, x_stride, **constants,
    )  # fmt: skip
    grads = [torch.empty(columns if dtype else 0, dtype=dtype or torch.float32, device=device) for dtype in dtypes]
    if partial is not None:
        constants = _reduce_constants(device)
        launch(
            _reduce, (cdiv(columns, constants["BLOCK_N"]), 2), device, partial,
            *(grad if grad.numel() else None for grad in grads), programs, columns, **constants,
        )  # fmt: skip
    return grads[0], grads[1]


def _matrix_rows(tensor: Tensor) -> int:
    """Return the rows per matrix. Dropout counts rows within a matrix, and matrices over the leading dimensions."""
    return tensor.size(-2) if tensor.dim() > 1 else 1


def _contiguous(parameter: Tensor | None) -> Tensor | None:
    return parameter if parameter is None else parameter.contiguous()
