"""Dropout and its mask.

    for each group of BLOCK_M rows (pairs i, i + 8) and each block of BLOCK_N columns (programs):
        out = where(kept, input * scale, 0), or without an input out = kept

input and out (outer, inner, matrix_rows, columns): up to four dimensions of any strides, or contiguous with the leading
dimensions flattened. 16-bit or float32, computed in float32. The mask is bool. A row of Philox calls serves two rows of
elements (philox.py); (outer, inner) number the matrices z of the formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.backends.common import empty_dense
from fastattn.backends.schema import DropoutArgs, DropoutMaskArgs
from fastattn.backends.triton.kernel import cdiv, kernel, launch
from fastattn.backends.triton.philox import dropout_of, keep_pairs
from fastattn.backends.triton.rows import (
    LIMITS,
    RowLimits,
    are_aligned,
    divide,
    exists,
    fits_int32,
    places,
    row_slots,
    row_tile,
    rows_of,
)

LIMITS["dropout"] = RowLimits(4096, 2048, 2048, 2048, rows=2)


class Matrices(NamedTuple):
    """A tensor (outer, inner, matrix_rows, columns)."""

    # None: no tensor. Workaround (Triton 3.6): a kernel cannot compare a tuple that holds None with None, so the tuple
    # itself is never None.
    pointer: Tensor | None
    outer: int | None  # strides; None: contiguous
    inner: int | None
    row: int | None
    column: int | None  # None: 1


@triton.jit
def _places(matrices, rows, inner_matrices, first, column, columns, INT32: tl.constexpr, ALIGNED: tl.constexpr):
    if matrices.outer is None:
        offset = rows.row * columns
    else:
        outer, inner = divide(rows.matrix, inner_matrices, INT32)
        offset = outer.to(tl.int64) * matrices.outer + inner.to(tl.int64) * matrices.inner + rows.i * matrices.row
    if matrices.column is None:
        offset += first
    else:
        column = (first + column) * matrices.column
    return places(matrices.pointer + offset, column, ALIGNED)


@kernel
def _dropout(
    input, out, dropout, rows: tl.int64, columns: tl.int64, matrix_rows: tl.int64, inner_matrices: tl.int64,
    slots: tl.int64, blocks: tl.int32,
    INT32: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write dropout of the input, or without an input the mask."""
    if ALIGNED:
        columns = columns // 16 * 16  # workaround: states the divisor (rows.py, places)
    group, block = divide(tl.program_id(0), blocks, True)
    here = rows_of(group, slots, matrix_rows, rows, dropout, BLOCK_M, INT32)
    first = block.to(tl.int64) * BLOCK_N
    column = tl.arange(0, BLOCK_N)[None, :]
    inside = here.exists[:, None] & exists(column, tl.minimum(columns - first, BLOCK_N).to(tl.int32), ALIGNED)
    kept = keep_pairs(dropout, here, first, BLOCK_N)
    outs = _places(out, here, inner_matrices, first, column, columns, INT32, ALIGNED)
    if input.pointer is None:
        tl.store(outs, kept, mask=inside)
    else:
        inputs = _places(input, here, inner_matrices, first, column, columns, INT32, ALIGNED)
        x = tl.load(inputs, mask=inside).to(tl.float32)
        tl.store(outs, tl.where(kept, x, 0.0) * dropout.scale, mask=inside)


def _constants(device: torch.device | None, columns: int, is_aligned: bool, is_int32: bool) -> dict[str, Any]:
    """Return the constexprs and options of the kernel for rows of this many columns."""
    tile = row_tile("dropout", columns, is_aligned)
    return {
        "INT32": bool(is_int32), "ALIGNED": bool(is_aligned), "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        "num_warps": tile.num_warps,
    }  # fmt: skip


RECIPES = {"dropout": (_dropout, _constants)}  # what csrc/launch starts


def _launch(input: Tensor | None, out: Tensor, seed: Tensor, threshold: int) -> None:
    """Fill ``out``. Both tensors are contiguous, or have at most four dimensions and any strides."""
    if out.numel() == 0:
        return
    if threshold == 0:  # a rate below 0.5 / 65536
        if input is None:
            out.fill_(True)
        else:
            out.copy_(input)
        return
    if out.dim() > 4:
        out = out.view(-1, *out.shape[-2:])
        input = input if input is None else input.view(out.shape)
    outer, inner, matrix_rows, columns = _four(out.shape, 1)
    outs, inputs = _matrices(out), _matrices(input)
    is_unit = outs.column is None and inputs.column is None
    rows = outer * inner * matrix_rows
    is_aligned = is_unit and are_aligned(columns, input, out)
    dropout = dropout_of(seed, threshold)
    slots = row_slots(matrix_rows, dropout)
    constants = _constants(out.device, columns, is_aligned, fits_int32(outer * inner * slots))
    blocks = cdiv(columns, constants["BLOCK_N"])
    launch(
        _dropout, (cdiv(outer * inner * slots, constants["BLOCK_M"]) * blocks,), out.device,
        inputs, outs, dropout, rows, columns, matrix_rows, inner, slots, blocks, **constants,
    )  # fmt: skip


def _matrices(tensor: Tensor | None) -> Matrices:
    if tensor is None or tensor.is_contiguous():
        return Matrices(tensor, None, None, None, None)
    outer, inner, row, column = _four(tensor.stride(), 0)
    return Matrices(tensor, outer, inner, row, None if column == 1 else column)


def _four(values: Sequence[int], fill: int) -> tuple[int, ...]:
    return (fill,) * (4 - len(values)) + tuple(values)


def dropout(args: DropoutArgs) -> Tensor:
    out = empty_dense(args.input)
    if args.input.dim() > 4 and not args.input.is_contiguous():
        return out.copy_(dropout(args._replace(input=args.input.contiguous())))
    _launch(args.input, out, args.seed, args.threshold)
    return out


def dropout_mask(args: DropoutMaskArgs) -> Tensor:
    out = torch.empty(tuple(args.shape), dtype=torch.bool, device=args.seed.device)
    _launch(None, out, args.seed, args.threshold)
    return out
