"""Where attention's operands lie in memory, and tiles of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fastattn.backends.triton.visibility import band_of


class Heads(NamedTuple):
    """(B, H, L, D) or packed (T, H, D), with unit stride in a row; (B, H, L) or packed (T, H) of a number a row."""

    pointer: Any
    batch: Any  # strides
    head: Any
    row: Any


class Sequences(NamedTuple):
    seqlen_q: Any
    seqlen_k: Any
    cu_seq_q: Any  # (B + 1,), of packed operands
    cu_seq_k: Any
    lengths: Any  # (B,), how many keys of each exist; None: all


class Sequence(NamedTuple):
    first_query: Any  # of the packed rows
    seqlen_q: Any
    first_key: Any
    seqlen_k: Any
    band: Any


class Problem(NamedTuple):
    """What every kernel gets."""

    query: Any  # Heads, times the scale's sign
    key: Any
    value: Any
    mask: Any  # Heads, uint8 or float, with strides of 0 where it broadcasts
    mask_column: Any  # its columns' stride; None: 1
    dropout: Any  # philox.Dropout
    sequences: Any
    window: Any
    num_heads: Any
    group: Any
    head_dim: Any
    value_head_dim: Any
    scale: Any
    magnitude: Any  # |scale|, 1 if that is 0


@triton.jit
def program(tiles, heads):
    """(tile, head, sequence) of this program; late tiles first, since under a causal mask they are the longest."""
    program = tl.program_id(0)
    return tiles - 1 - program % tiles, program // tiles % heads, program // tiles // heads


@triton.jit
def sequence_of(b, sequences, window, LOWER_RIGHT: tl.constexpr):
    seqlen_q, seqlen_k, cu_seq_q, cu_seq_k, lengths = sequences
    first_query, first_key = b * 0, b * 0
    if cu_seq_q is not None:
        first_query, first_key = tl.load(cu_seq_q + b), tl.load(cu_seq_k + b)
        seqlen_q = (tl.load(cu_seq_q + b + 1) - first_query).to(tl.int32)
        seqlen_k = (tl.load(cu_seq_k + b + 1) - first_key).to(tl.int32)
    length = seqlen_k
    if lengths is not None:
        length = tl.load(lengths + b).to(tl.int32)
    band = band_of(length, seqlen_q, window, LOWER_RIGHT)
    return Sequence(first_query, seqlen_q, first_key, seqlen_k, band)


@triton.jit
def wide(n):
    """n >= 0 in 64 bits. Its upper half is known to be zero and takes no register."""
    return n.to(tl.uint32).to(tl.int64) if n.dtype == tl.int32 else n


@triton.jit
def rematerialise(x, n):
    """x, opaque to the compiler, which does not know that 0 <= n < 2**30: what follows from the result is computed
    here, rather than kept in registers from an earlier use of x."""
    return x + (n >> 30)


@triton.jit
def head_of(tensor, b, h, first):
    """(pointer to row ``first`` of head h of sequence b, stride of rows in 64 bits)"""
    row = tl.cast(tensor.row, tl.int64)
    return tensor.pointer + (wide(b) * tensor.batch + wide(h) * tensor.head + first * row), row


@triton.jit
def row_offsets(rows, b, h, first, i):
    """Offsets of the numbers of queries i; ``rows`` has their strides."""
    place = wide(first + i)
    if rows.row is not None:
        place *= rows.row
    return wide(b) * rows.batch + wide(h) * rows.head + place


@triton.jit
def _pointers(head, first, M: tl.constexpr, D: tl.constexpr, ALIGNMENT: tl.constexpr):
    """(M, D), rows from ``first``. Rows begin at multiples of ALIGNMENT elements: 16 bytes, or 1 element."""
    base, row = head
    row = row // ALIGNMENT * ALIGNMENT
    if (base.dtype.element_ty == tl.float32) | (ALIGNMENT == 1):
        # Offsets that depend on the tile are rematerialised: hoisted, they raise register pressure.
        offset = wide(first + tl.arange(0, M))
    else:
        base += wide(first) * row
        offset = tl.arange(0, M)
    pointers = base + (offset[:, None] * row + tl.arange(0, D)[None, :])
    if ALIGNMENT > 1:  # of a hint on ``base`` Triton loses track where an offset is added to it
        pointers = tl.multiple_of(pointers, (1, 16))
    return pointers


@triton.jit
def load_tile(
    head, first, inside, head_dim, M: tl.constexpr, D: tl.constexpr, EVEN: tl.constexpr, ALIGNMENT: tl.constexpr,
    descriptor=None, b=0, h=0,
):  # fmt: skip
    """(M, D), zero in rows that are not ``inside`` (None: all are) and beyond head_dim (EVEN: it is D). A tile whose
    rows are all inside is read through the operand's tensor descriptor, if it has one."""
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
    """A number of each row; ``other`` of those that are not ``inside`` (None: all are). ALIGNED: they lie side by side
    from a multiple of 16 bytes on."""
    if ALIGNED:
        pointers = tl.multiple_of(pointers, 16)
    if inside is None:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=inside, other=other)
    return values


@triton.jit
def store_tile(head, first, inside, head_dim, tile, ALIGNMENT: tl.constexpr):
    pointers = _pointers(head, first, tile.shape[0], tile.shape[1], ALIGNMENT)
    columns = tl.arange(0, tile.shape[1]) < head_dim // ALIGNMENT * ALIGNMENT
    tl.store(pointers, tile.to(head[0].dtype.element_ty), mask=inside[:, None] & columns[None, :])
