"""Dropout and its mask."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from fastattn.backends.common import dense_strides
from fastattn.backends.triton import philox
from fastattn.backends.triton.configurations import row_tile
from fastattn.backends.triton.kernel import are_aligned, are_few, cdiv, divide, dropout_scale, kernel, launch, rows_of


@kernel
def _dropout(
    input,
    out,
    seed,
    rows: tl.int64,
    columns: tl.int64,
    matrix_rows: tl.int64,
    inner_matrices: tl.int64,
    input_outer: tl.int64,
    input_inner: tl.int64,
    input_row: tl.int64,
    input_column: tl.int64,
    out_outer: tl.int64,
    out_inner: tl.int64,
    out_row: tl.int64,
    out_column: tl.int64,
    threshold: tl.int32,
    scale: tl.float32,
    FEW: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Matrices (outer, inner, matrix_rows, columns) of any strides. Without an input, out is the mask."""
    if UNIT:
        input_column, out_column = 1, 1
    if ALIGNED:
        columns = columns // 16 * 16  # which it is: so the compiler sees it
    group, block = divide(tl.program_id(0), tl.cdiv(columns, BLOCK), True)
    row = group.to(tl.int64) * R + tl.arange(0, R)
    first = block.to(tl.int64) * BLOCK
    column = (first + tl.arange(0, BLOCK))[None, :]
    inside = (row < rows)[:, None] & (column < columns)
    matrix, i = divide(row, matrix_rows, FEW)
    outer, inner = divide(matrix, inner_matrices, FEW)

    kept = philox.keep_rows(seed, matrix, i, first, threshold, BLOCK)
    out_rows = rows_of(
        out, outer.to(tl.int64) * out_outer + inner.to(tl.int64) * out_inner + i.to(tl.int64) * out_row, ALIGNED
    )
    if input is None:
        tl.store(out_rows + column * out_column, kept, mask=inside)
    else:
        input_rows = rows_of(input, outer * input_outer + inner * input_inner + i * input_row, ALIGNED)
        x = tl.load(input_rows + column * input_column, mask=inside).to(tl.float32)
        tl.store(out_rows + column * out_column, tl.where(kept, x * scale, 0.0), mask=inside)


def _launch(input: Tensor | None, out: Tensor, seed: Tensor, threshold: int) -> None:
    """``input`` and ``out`` contiguous, or of at most four dimensions and any strides."""
    if out.numel() == 0:
        return
    if out.dim() > 4:
        out = out.view(-1, *out.shape[-2:])
        input = input if input is None else input.view(out.shape)
    outer, inner, matrix_rows, columns = _four(out.shape, 1)
    out_strides = _four(out.stride(), 0)
    input_strides = out_strides if input is None else _four(input.stride(), 0)
    unit = input_strides[3] == out_strides[3] == 1
    rows = outer * inner * matrix_rows
    tile = row_tile("dropout", columns)
    launch(
        _dropout, (cdiv(rows, tile.rows) * cdiv(columns, tile.columns),), out.device,
        input, out, seed, rows, columns, matrix_rows, inner, *input_strides, *out_strides, threshold,
        dropout_scale(threshold), FEW=are_few(rows), UNIT=unit, ALIGNED=unit and are_aligned(columns, input, out),
        R=tile.rows, BLOCK=tile.columns, num_warps=tile.warps,
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
