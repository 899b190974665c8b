"""Shared parts of the row operations: blocks of BLOCK_M rows and BLOCK_N columns, and the rows' layout in memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class RowTile(NamedTuple):
    """A block of rows and columns, and its warps."""

    block_m: int
    block_n: int
    num_warps: int


class RowLimits(NamedTuple):
    """The limits from which ``row_tile`` makes a kernel's block."""

    elements: int  # Elements per block of narrow rows.
    widest: int  # Maximum columns of a row that is read once.
    block_n: int  # Columns per block of wider rows, which are read twice.
    warp_elements: int  # Elements per warp.
    rows: int = 1  # Minimum rows per block.


LIMITS: dict[str, RowLimits] = {}  # by kernel; each operation's file adds its own
_MAX_WARPS = 16


def row_tile(kernel: str, columns: int, is_aligned: bool) -> RowTile:
    """Return the block of a kernel for rows of this many columns.

    Its sizes are powers of 2, so varied sizes share a few compiled kernels.
    """
    limits = LIMITS[kernel]
    block_m, block_n = limits.rows, limits.block_n
    if columns <= limits.widest:
        block_n = max(32, 1 << (columns - 1).bit_length())
        block_m = max(limits.rows, limits.elements // block_n)
    warp_elements = limits.warp_elements
    if not is_aligned:  # each element has its own pointer, so twice the warps supply the registers
        warp_elements //= 2
        if block_n <= 64:  # a thread has many rows, whose offsets take registers too
            warp_elements = min(warp_elements, 512)
    return RowTile(block_m, block_n, max(1, min(_MAX_WARPS, block_m * block_n // warp_elements)))


def empty_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate a contiguous tensor of this shape, by torch's quickest function."""
    return torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)


def as_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """Return (tensor, stride): its rows along the last dimension, dense and at one stride, copied if necessary."""
    if tensor.is_contiguous():  # needs no view
        return tensor, tensor.size(-1)
    rows = tensor.reshape(-1, tensor.size(-1))
    return (rows, rows.stride(0)) if rows.stride(1) == 1 or rows.size(1) == 1 else (rows.contiguous(), rows.size(1))


def are_aligned(columns: int, *operands: Tensor | None) -> bool:
    """Return whether every row of these operands, and of a contiguous result, begins at a multiple of 16 bytes.

    The test is stricter: 16 must divide the addresses in bytes, and the columns and strides in elements.
    """
    bits = columns
    for tensor in operands:
        if tensor is not None:
            bits |= tensor.data_ptr()
            if not tensor.is_contiguous():
                for stride in tensor.stride()[:-1]:
                    bits |= stride
    return bits % 16 == 0


def fits_int32(rows: int) -> bool:
    """Return whether rows can be counted in 32 bits. A division then takes a tenth of the instructions."""
    return rows < 2**31


def row_slots(rows: int, dropout: object) -> int:
    """Return the number of row slots per matrix, as ``rows_of`` counts them; with dropout whole pairs i, i + 8."""
    return rows if dropout is None else 2 * (rows // 16 * 8 + min(rows % 16, 8))


class Rows(NamedTuple):
    """The rows of a program, each field (M,) except those of pairs."""

    matrix: tl.tensor
    i: tl.tensor  # row within the matrix
    row: tl.tensor  # row among all matrices
    exists: tl.tensor
    pair_matrix: tl.tensor  # (M // 2,), the z of dropout's formula
    pair: tl.tensor  # (M // 2,), i // 16 * 8 + i % 8, the y of dropout's formula


@triton.jit
def rows_of(program, slots, matrix_rows, rows, dropout, M: tl.constexpr, INT32: tl.constexpr):
    """Return the ``Rows`` of a program: consecutive rows or, with dropout, pairs i, i + 8, which share Philox calls.

    In the last rows of a matrix, the second row of a pair may not exist.
    """
    if dropout is None:
        matrix, i = divide(program.to(tl.int64) * M + tl.arange(0, M), slots, INT32)
        pair_matrix, pair = matrix, i
    else:
        first = program.to(tl.int64) * (M // 2)
        pair_matrix, pair = divide(first + tl.arange(0, M // 2), slots // 2, INT32)
        matrix, place = divide(first + tl.arange(0, M) // 2, slots // 2, INT32)
        i = place // 8 * 16 + place % 8 + tl.arange(0, M) % 2 * 8
    i = i.to(tl.int64)
    row = matrix.to(tl.int64) * matrix_rows + i
    return Rows(matrix, i, row, (i < matrix_rows) & (row < rows), pair_matrix, pair)


@triton.jit
def divide(row, size, INT32: tl.constexpr):
    """Return (row // size, row % size)."""
    if INT32:
        row, size = row.to(tl.uint32), size.to(tl.uint32)
    return row // size, row % size


@triton.jit
def places(rows, column, ALIGNED: tl.constexpr):
    """Return (M, N) pointers to columns (1, N) of rows (M,).

    Workaround (Triton 3.6 to 3.9): the alignment hint is on the pointers themselves. If a program owns one row, a hint
    on ``rows`` folds away, and accesses are no longer vectorised to 128 bits. The kernels also write ``columns // 16 *
    16``: they are compiled without the value of ``columns``, and this states that 16 divides it.
    """
    pointers = rows[:, None] + column
    if ALIGNED:
        pointers = tl.multiple_of(pointers, (1, 16))
    return pointers


@triton.jit
def exists(column, columns, ALIGNED: tl.constexpr):
    """Return whether columns exist. If ALIGNED, 16 divides their number and one comparison serves 16 of them."""
    return column // 16 < columns // 16 if ALIGNED else column < columns
