"""What the row operations share: blocks of BLOCK_M rows and BLOCK_N columns, and where rows lie."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class RowTile(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int


class RowLimits(NamedTuple):
    elements: int  # of a block of narrow rows
    widest: int  # columns up to which a row is read once
    block_n: int  # of wider rows, which are read twice
    warp_elements: int
    rows: int = 1  # the fewest of a block


LIMITS: dict[str, RowLimits] = {}  # by kernel; each operation's file has its own
_MAX_WARPS = 16


def row_tile(kernel: str, columns: int, is_aligned: bool) -> RowTile:
    """The block of a kernel for rows of this many columns: powers of two, so that varied sizes share a few kernels."""
    limits = LIMITS[kernel]
    block_m, block_n = limits.rows, limits.block_n
    if columns <= limits.widest:
        block_n = max(32, 1 << (columns - 1).bit_length())
        block_m = max(limits.rows, limits.elements // block_n)
    warp_elements = limits.warp_elements
    if not is_aligned:  # each element has a pointer of its own, for which there are registers of twice as many warps
        warp_elements //= 2
        if block_n <= 64:  # and a thread has many rows, whose places take registers too
            warp_elements = min(warp_elements, 512)
    return RowTile(block_m, block_n, max(1, min(_MAX_WARPS, block_m * block_n // warp_elements)))


def empty_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Contiguous; the quickest of torch's ways to one."""
    return torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)


def as_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """(tensor, stride): its rows, the last dimension, dense and at one stride; a copy where it has to be."""
    if tensor.is_contiguous():  # at once, without a view
        return tensor, tensor.size(-1)
    rows = tensor.reshape(-1, tensor.size(-1))
    return (rows, rows.stride(0)) if rows.stride(1) == 1 or rows.size(1) == 1 else (rows.contiguous(), rows.size(1))


def are_aligned(columns: int, *operands: Tensor | None) -> bool:
    """Whether every row of these operands, and of a contiguous result, begins at a multiple of 16 bytes."""
    bits = columns
    for tensor in operands:
        if tensor is not None:
            bits |= tensor.data_ptr()
            if not tensor.is_contiguous():
                for stride in tensor.stride()[:-1]:
                    bits |= stride
    return bits % 16 == 0


def fits_int32(rows: int) -> bool:
    """Whether rows can be counted in 32 bits, in which a division takes a tenth of the instructions."""
    return rows < 2**31


def row_slots(rows: int, dropout: object) -> int:
    """The places of a matrix's rows as ``rows_of`` counts them."""
    return rows if dropout is None else 2 * (rows // 16 * 8 + min(rows % 16, 8))


class Rows(NamedTuple):
    """Which rows (M,) a program has."""

    matrix: Any
    i: Any  # in the matrix
    row: Any  # of all
    exists: Any
    pair_matrix: Any  # (M // 2,), and i // 16 * 8 + i % 8: the arguments of dropout's formula
    pair: Any


@triton.jit
def rows_of(program, slots, matrix_rows, rows, dropout, M: tl.constexpr, INT32: tl.constexpr):
    """Rows one after another or, with dropout, in pairs i, i + 8, which share its values. Of a pair in a matrix's last
    rows the second may not exist."""
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
    """(row // size, row % size)"""
    if INT32:
        row, size = row.to(tl.uint32), size.to(tl.uint32)
    return row // size, row % size


@triton.jit
def places(rows, column, ALIGNED: tl.constexpr):
    """(M, N) pointers to these columns (1, N) of the rows (M,). The alignment hint is on the pointers themselves:
    of a hint on ``rows`` Triton loses track where a program owns one row."""
    pointers = rows[:, None] + column
    if ALIGNED:
        pointers = tl.multiple_of(pointers, (1, 16))
    return pointers


@triton.jit
def exists(column, columns, ALIGNED: tl.constexpr):
    """Whether there are such columns: one comparison for 16 of them where 16 divides their number."""
    return column // 16 < columns // 16 if ALIGNED else column < columns
