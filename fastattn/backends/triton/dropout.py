"""Dropout and its mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from fastattn.backends.common import dense_strides, dropout_scale
from fastattn.backends.triton.kernel import cdiv, kernel, launch
from fastattn.backends.triton.philox import Dropout, keep_rows
from fastattn.backends.triton.rows import LIMITS, RowLimits, are_aligned, divide, fits_int32, row_tile, rows_of

LIMITS["dropout"] = RowLimits(2048, 1024, 1024, 512)


class Matrices(NamedTuple):
    """(outer, inner, matrix_rows, columns)"""

    pointer: Any
    outer: Any  # strides
    inner: Any
    row: Any
    column: Any


@kernel
def _dropout(
    input, out, dropout, rows: tl.int64, columns: tl.int64, matrix_rows: tl.int64, inner_matrices: tl.int64,
    INT32: tl.constexpr, UNIT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """UNIT: columns are dense. Without an input, out is the mask."""
    if ALIGNED:
        columns = columns // 16 * 16  # shows the compiler what divides it
    group, block = divide(tl.program_id(0), tl.cdiv(columns, BLOCK_N), True)
    row = group.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = block.to(tl.int64) * BLOCK_N
    column = (first + tl.arange(0, BLOCK_N))[None, :]
    inside = (row < rows)[:, None] & (column < columns)
    matrix, i = divide(row, matrix_rows, INT32)
    outer, inner = divide(matrix, inner_matrices, INT32)
    place = outer.to(tl.int64), inner.to(tl.int64), i.to(tl.int64)

    kept = keep_rows(dropout, matrix, i, first, BLOCK_N)
    out_columns = column if UNIT else column * out.column
    out_rows = rows_of(out.pointer, place[0] * out.outer + place[1] * out.inner + place[2] * out.row, ALIGNED)
    if input is None:
        tl.store(out_rows + out_columns, kept, mask=inside)
    else:
        offset = place[0] * input.outer + place[1] * input.inner + place[2] * input.row
        input_columns = column if UNIT else column * input.column
        x = tl.load(rows_of(input.pointer, offset, ALIGNED) + input_columns, mask=inside).to(tl.float32)
        tl.store(out_rows + out_columns, tl.where(kept, x * dropout.scale, 0.0), mask=inside)


def _launch(input: Tensor | None, out: Tensor, seed: Tensor, threshold: int) -> None:
    """``input`` and ``out`` contiguous, or of at most four dimensions and any strides."""
    if out.numel() == 0:
        return
    if threshold == 0:  # a rate below half a 65536th
        out.copy_(True if input is None else input)
        return
    if out.dim() > 4:
        out = out.view(-1, *out.shape[-2:])
        input = input if input is None else input.view(out.shape)
    outer, inner, matrix_rows, columns = _four(out.shape, 1)
    out_matrices = Matrices(out, *_four(out.stride(), 0))
    input_matrices = None if input is None else Matrices(input, *_four(input.stride(), 0))
    is_unit = out_matrices.column == 1 and (input_matrices is None or input_matrices.column == 1)
    rows = outer * inner * matrix_rows
    tile = row_tile("dropout", columns)
    launch(
        _dropout, (cdiv(rows, tile.block_m) * cdiv(columns, tile.block_n),), out.device,
        input_matrices, out_matrices, Dropout(seed, threshold, dropout_scale(threshold)), rows, columns, matrix_rows,
        inner, INT32=fits_int32(rows), UNIT=is_unit, ALIGNED=is_unit and are_aligned(columns, input, out),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, num_warps=tile.num_warps,
    )  # fmt: skip


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
