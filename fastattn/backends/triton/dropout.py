"""Dropout and its mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.backends.common import dense_strides, dropout_scale
from fastattn.backends.triton.kernel import cdiv, kernel, launch
from fastattn.backends.triton.philox import Dropout, keep_rows
from fastattn.backends.triton.rows import LIMITS, RowLimits, are_aligned, divide, exists, fits_int32, places, row_tile

LIMITS["dropout"] = RowLimits(4096, 4096, 4096, 1024)


class Matrices(NamedTuple):
    """(outer, inner, matrix_rows, columns)"""

    pointer: Any
    outer: Any  # strides; None: contiguous
    inner: Any
    row: Any
    column: Any  # None: 1


@triton.jit
def _places(matrices, row, matrix, i, inner_matrices, column, columns, INT32: tl.constexpr, ALIGNED: tl.constexpr):
    if matrices.outer is None:
        offset = row * columns
    else:
        outer, inner = divide(matrix, inner_matrices, INT32)
        offset = outer.to(tl.int64) * matrices.outer + inner.to(tl.int64) * matrices.inner
        offset += i.to(tl.int64) * matrices.row
    if matrices.column is not None:
        column = column * matrices.column
    return places(matrices.pointer + offset, column, ALIGNED)


@kernel
def _dropout(
    input, out, dropout, rows: tl.int64, columns: tl.int64, matrix_rows: tl.int64, inner_matrices: tl.int64,
    INT32: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Without an input, out is the mask."""
    if ALIGNED:
        columns = columns // 16 * 16  # shows the compiler what divides it
    group, block = divide(tl.program_id(0), tl.cdiv(columns, BLOCK_N), True)
    row = group.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = block.to(tl.int64) * BLOCK_N
    column = (first + tl.arange(0, BLOCK_N))[None, :]
    inside = (row < rows)[:, None] & exists(column, columns, ALIGNED)
    matrix, i = divide(row, matrix_rows, INT32)
    kept = keep_rows(dropout, matrix, i, first, BLOCK_N)
    outs = _places(out, row, matrix, i, inner_matrices, column, columns, INT32, ALIGNED)
    if input is None:
        tl.store(outs, kept, mask=inside)
    else:
        inputs = _places(input, row, matrix, i, inner_matrices, column, columns, INT32, ALIGNED)
        x = tl.load(inputs, mask=inside).to(tl.float32)
        tl.store(outs, tl.where(kept, x, 0.0) * dropout.scale, mask=inside)


def _launch(input: Tensor | None, out: Tensor, seed: Tensor, threshold: int) -> None:
    """``input`` and ``out`` contiguous, or of at most four dimensions and any strides."""
    if out.numel() == 0:
        return
    if threshold == 0:  # a rate below half a 65536th
        if input is None:
            out.fill_(True)
        else:
            out.copy_(input)
        return
    if out.dim() > 4:
        out = out.view(-1, *out.shape[-2:])
        input = input if input is None else input.view(out.shape)
    outer, inner, matrix_rows, columns = _four(out.shape, 1)
    outs, inputs = _matrices(out), None if input is None else _matrices(input)
    is_unit = outs.column is None and (inputs is None or inputs.column is None)
    rows = outer * inner * matrix_rows
    is_aligned = is_unit and are_aligned(columns, input, out)
    tile = row_tile("dropout", columns, is_aligned)
    launch(
        _dropout, (cdiv(rows, tile.block_m) * cdiv(columns, tile.block_n),), out.device,
        inputs, outs, Dropout(seed, threshold, dropout_scale(threshold)), rows, columns, matrix_rows,
        inner, INT32=fits_int32(rows), ALIGNED=is_aligned,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, num_warps=tile.num_warps,
    )  # fmt: skip


def _matrices(tensor: Tensor) -> Matrices:
    if tensor.is_contiguous():
        return Matrices(tensor, None, None, None, None)
    outer, inner, row, column = _four(tensor.stride(), 0)
    return Matrices(tensor, outer, inner, row, None if column == 1 else column)


def _four(values: Sequence[int], fill: int) -> tuple[int, ...]:
    return (fill,) * (4 - len(values)) + tuple(values)


def dropout(input: Tensor, seed: Tensor, threshold: int) -> Tensor:
    if input.dim() > 4 and not input.is_contiguous():
        out = dropout(input.contiguous(), seed, threshold)
        return torch.empty_strided(input.shape, dense_strides(input), dtype=out.dtype, device=out.device).copy_(out)
    out = torch.empty_strided(input.shape, dense_strides(input), dtype=input.dtype, device=input.device)
    _launch(input, out, seed, threshold)
    return out


def dropout_mask(shape: Sequence[int], seed: Tensor, threshold: int) -> Tensor:
    out = torch.empty(tuple(shape), dtype=torch.bool, device=seed.device)
    _launch(None, out, seed, threshold)
    return out
