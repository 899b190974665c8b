"""The layout of attention's operands in memory, and the loads and stores of their tiles."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fastattn.backends.triton.philox import Dropout
from fastattn.backends.triton.visibility import Band, Window, band_of


class Heads(NamedTuple):
    """A tensor of heads: (B, H, L, D) or packed (T, H, D) with unit stride along D.

    A tensor with one value per row is (B, H, L) or packed (T, H).
    """

    pointer: Tensor
    batch: int  # strides
    head: int
    row: int


class Sequences(NamedTuple):
    """The lengths of all sequences of a call."""

    seqlen_q: int  # for packed operands an upper bound
    seqlen_k: int
    cu_seq_q: Tensor | None  # (B + 1,) int64; None: not packed
    cu_seq_k: Tensor | None
    lengths: Tensor | None  # (B,) int64, the number of existing keys per sequence; None: all


class Sequence(NamedTuple):
    """One sequence: its place among packed rows (0 if not packed), its lengths and its visible pairs."""

    first_query: tl.tensor
    seqlen_q: tl.tensor
    first_key: tl.tensor
    seqlen_k: tl.tensor
    band: Band


class Problem(NamedTuple):
    """The arguments that all kernels share."""

    query: Heads  # Heads, multiplied by the sign of the scale
    key: Heads
    value: Heads
    mask: Heads | None  # Heads, uint8 or float, with stride 0 in dimensions that it broadcasts
    mask_column: int | None  # the stride of the mask's columns; None: 1
    dropout: Dropout | None  # philox.Dropout
    sequences: Sequences
    window: Window
    num_heads: int
    group: int  # query heads per key head
    head_dim: int
    value_head_dim: int
    scale: float
    magnitude: float  # |scale|, or 1 if the scale is 0


@triton.jit
def program(tiles, heads):
    """Return (tile, head, sequence) of this program.

    Tiles run from the last to the first, because under a causal mask the last ones take longest.
    """
    program = tl.program_id(0)
    return tiles - 1 - program % tiles, program // tiles % heads, program // tiles // heads


@triton.jit
def sequence_of(b, sequences, window, LOWER_RIGHT: tl.constexpr):
    """Return the ``Sequence`` number b."""
    seqlen_q, seqlen_k, cu_seq_q, cu_seq_k, lengths = sequences
    first_query, first_key = b * 0, b * 0
    if cu_seq_q is not None:
        first_query, first_key = tl.load(cu_seq_q + b), tl.load(cu_seq_k + b)
        seqlen_q = (tl.load(cu_seq_q + b + 1) - first_query).to(tl.int32)
        seqlen_k = (tl.load(cu_seq_k + b + 1) - first_key).to(tl.int32)
    length = seqlen_k
    if lengths is not None:
        # The host clamps lengths that it can read. csrc/launch cannot, and another kernel would take longer.
        length = tl.minimum(tl.maximum(tl.load(lengths + b), 0), seqlen_k).to(tl.int32)
    band = band_of(length, seqlen_q, window, LOWER_RIGHT)
    return Sequence(first_query, seqlen_q, first_key, seqlen_k, band)


@triton.jit
def wide(n):
    """Convert n >= 0 to 64 bits through uint32: the compiler then knows that the upper half is 0."""
    return n.to(tl.uint32).to(tl.int64) if n.dtype == tl.int32 else n


@triton.jit
def rematerialise(x, n):
    """Return x behind an optimisation barrier: ``n >> 30`` is 0 for a count n, which the compiler cannot prove.

    In a loop n contains the loop's counter, or the compiler would hoist the barrier.

    Workaround (ptxas, under Triton 3.6 to 3.9): it keeps values derived from x in registers across the loops. They are
    mostly the rows i and j, and in masked kernels some sixty products of b and h with strides. With the barrier they
    are recomputed. Without it masked kernels spill: on sm_90 in bfloat16, head size 64, 34 of the 516 instructions of
    the main loop for the query's gradient access the stack.
    """
    return x + (n >> 30)


@triton.jit
def head_of(tensor, b, h, first):
    """Return (pointer to row ``first`` of head h of sequence b, int64 stride between rows)."""
    row = tl.cast(tensor.row, tl.int64)
    return tensor.pointer + (wide(b) * tensor.batch + wide(h) * tensor.head + first * row), row


@triton.jit
def row_offsets(rows, b, h, first, i):
    """Return the offsets of the per-query values of queries i, by the strides of ``rows``."""
    place = wide(first + i)
    if rows.row is not None:
        place *= rows.row
    return wide(b) * rows.batch + wide(h) * rows.head + place


@triton.jit
def _pointers(head, first, M: tl.constexpr, D: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Return (M, D) pointers to the rows from ``first`` on.

    Rows begin at multiples of ALIGNMENT elements, which is 16 bytes, or 1 element. Workaround (Triton 3.6 to 3.9): the
    kernels are compiled without the values of strides, so ``row // ALIGNMENT * ALIGNMENT`` states the divisor. Without
    it Triton cannot vectorise the accesses to 128 bits. ``load_tile`` does so for head_dim.
    """
    base, row = head
    row = row // ALIGNMENT * ALIGNMENT
    if (base.dtype.element_ty == tl.float32) | (ALIGNMENT == 1):
        # Workaround (Triton 3.6 to 3.9): offsets that depend on the tile are recomputed for each tile. Hoisted out of
        # the loop, they raise register pressure, and float32 and unaligned kernels spill.
        offset = wide(first + tl.arange(0, M))
    else:
        base += wide(first) * row
        offset = tl.arange(0, M)
    pointers = base + (offset[:, None] * row + tl.arange(0, D)[None, :])
    if ALIGNMENT > 1:  # workaround (Triton 3.6 to 3.9): adding an offset to ``base`` would lose a hint given there
        pointers = tl.multiple_of(pointers, (1, 16))
    return pointers


@triton.jit
def load_tile(
    head, first, inside, head_dim, M: tl.constexpr, D: tl.constexpr, EVEN: tl.constexpr, ALIGNMENT: tl.constexpr,
    descriptor=None, b=0, h=0,
):  # fmt: skip
    """Load a tile (M, D) of a head.

    It is zero in rows outside ``inside`` (None: all rows are inside) and in columns beyond head_dim (EVEN: head_dim is
    D). If all rows are inside and the operand has a tensor descriptor, the tile is read through it.
    """
    if inside is None and descriptor is not None:
        tile = descriptor.load([b, h, first, 0]).reshape(M, D)
    else:
        pointers = _pointers(head, first, M, D, ALIGNMENT)
        if not EVEN:
            columns = (tl.arange(0, D) < head_dim // ALIGNMENT * ALIGNMENT)[None, :]
            mask = columns if inside is None else columns & inside[:, None]
            tile = tl.load(pointers, mask=mask, other=0.0)
        elif inside is None:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=inside[:, None], other=0.0)
    return tile


@triton.jit
def load_rows(pointers, inside, other, ALIGNED: tl.constexpr):
    """Load one value per row, and ``other`` for rows outside ``inside`` (None: all rows are inside).

    ALIGNED: the values are contiguous and begin at a multiple of 16 bytes.
    """
    if ALIGNED:
        pointers = tl.multiple_of(pointers, 16)
    if inside is None:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=inside, other=other)
    return values


@triton.jit
def store_tile(head, first, inside, head_dim, tile, ALIGNMENT: tl.constexpr):
    """Store the rows of a tile that are ``inside`` and its columns up to head_dim, in the tensor's dtype."""
    pointers = _pointers(head, first, tile.shape[0], tile.shape[1], ALIGNMENT)
    columns = tl.arange(0, tile.shape[1]) < head_dim // ALIGNMENT * ALIGNMENT
    tl.store(pointers, tile.to(head[0].dtype.element_ty), mask=inside[:, None] & columns[None, :])
