"""The tiles that a program visits: an interval given by the window, or under a mask the lists made here.

    cover_kernel, per tile of the mask (BLOCK_M, BLOCK_N): reads the mask once; writes cover and seen
    list_kernel, per owned tile of SIZE queries or keys: for each chunk of 128 other tiles: appends to the two lists

mask (B, H, rows, Lk), uint8 or float, with 1 in place of the sizes B, H, rows that it broadcasts.
cover (B, H, tiles_q, tiles_k) int8; seen (B, H, tiles_q, Lk) uint8; lists (B, H, owned tiles, 2 + count) int32.
A program visits the full tiles first, then the partial ones.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fastattn.backends.triton.attention.operands import sequence_of, wide
from fastattn.backends.triton.attention.scores import INFINITY, mask_pointers
from fastattn.backends.triton.kernel import kernel
from fastattn.backends.triton.visibility import owned, visible_part, visible_tiles

SOME: tl.constexpr = tl.constexpr(1)
ALL: tl.constexpr = tl.constexpr(2)


class TileLists(NamedTuple):
    """The lists of tiles to visit, (B, H, owned tiles, 2 + count) int32.

    An entry holds the number of full tiles, the number of partial tiles, the full tiles from the front, and the partial
    tiles from the back.
    """

    pointer: Tensor
    batch: int  # strides
    head: int
    tile: int
    others: int  # tiles of the other side


class Cover(NamedTuple):
    """The kinds of the mask's tiles, (B, H, owned tiles, other tiles) int8.

    ALL: every pair is visible and no mask value is added. SOME: at least one pair is visible. 0: no pair is.
    """

    pointer: Tensor
    batch: int  # strides
    head: int
    own: int
    other: int


class Plan(NamedTuple):
    """The tiles that a program visits."""

    full_tiles: tl.tensor  # number of full tiles
    partial_tiles: tl.tensor  # number of partial tiles
    full: tl.tensor  # the first full tile; with lists a pointer to it
    partial: tl.tensor  # first partial tile, before the full ones; with lists a pointer, the others lie before it


@triton.jit
def tile_plan(lists, b, h, own, sequence, SIZE: tl.constexpr, BLOCK: tl.constexpr, KEYS_OWN: tl.constexpr):
    """Return the ``Plan`` of the program that owns tile ``own``: the tiles of BLOCK that it visits.

    The tile has SIZE queries or, with KEYS_OWN, SIZE keys.
    """
    if lists is None:
        first = own * SIZE
        last, band = owned(first, SIZE, sequence.seqlen_q, sequence.band, KEYS_OWN)
        begin, full_begin, full_end, end = visible_tiles(first, last, band, BLOCK)
        plan = Plan(full_end - full_begin, end - begin - (full_end - full_begin), full_begin, full_begin - begin)
    else:
        entry = lists.pointer + (wide(b) * lists.batch + wide(h) * lists.head + wide(own) * lists.tile)
        plan = Plan(tl.load(entry), tl.load(entry + 1), entry + 2, entry + 1 + lists.others)
    return plan


@triton.jit
def tile(plan, n, lists, PARTIAL: tl.constexpr):
    """Return the number of the n-th full or partial tile of a plan."""
    if lists is not None:
        tile = tl.load(plan.partial - n) if PARTIAL else tl.load(plan.full + n)
    elif PARTIAL:
        tile = plan.full - plan.partial + n + tl.where(n < plan.partial, 0, plan.full_tiles)
    else:
        tile = plan.full + n
    return tile


@kernel
def cover_kernel(
    mask, mask_column, cover, seen, tiles_q, tiles_k, mask_heads, mask_rows, seqlen_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write the ``Cover`` of the mask's tiles and the ``SeenKeys``, from one read of the mask."""
    program = tl.program_id(0)
    tile_k, tile_q = program % tiles_k, program // tiles_k % tiles_q
    plane = program // tiles_k // tiles_q
    i, j = tile_q * BLOCK_M + tl.arange(0, BLOCK_M), tile_k * BLOCK_N + tl.arange(0, BLOCK_N)
    pointers = mask_pointers(mask, mask_column, plane // mask_heads, plane % mask_heads, i[:, None], j[None, :])
    inside = (i < mask_rows)[:, None] & (j < seqlen_k)[None, :]
    value = tl.load(pointers, mask=inside, other=0)
    if value.dtype == tl.uint8:
        visible = (value != 0) & inside
        full = visible
    else:
        visible = (value.to(tl.float32) != -INFINITY) & inside
        full = (value.to(tl.float32) == 0) & inside
    seen_j = tl.max(visible.to(tl.int32), 0)
    some = tl.max(seen_j, 0)
    every = tl.min((full | ~inside).to(tl.int32))
    tl.store(cover + program, tl.where(every == 1, ALL, some * SOME).to(tl.int8))
    seen_row = seen + wide(plane * tiles_q + tile_q) * seqlen_k
    tl.store(seen_row + j, seen_j.to(tl.uint8), mask=j < seqlen_k)


@kernel
def list_kernel(
    sequences, window, cover, lists, list_heads, tiles, count,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, LOWER_RIGHT: tl.constexpr, KEYS_OWN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the ``TileLists`` of tiles of SIZE queries or, with KEYS_OWN, SIZE keys.

    A list holds the other side's tiles of BLOCK that both ``cover`` and the window leave visible.
    """
    program = tl.program_id(0)
    own, h, b = program % tiles, program // tiles % list_heads, program // tiles // list_heads
    sequence = sequence_of(b, sequences, window, LOWER_RIGHT)
    last, band = owned(own * SIZE, SIZE, sequence.seqlen_q, sequence.band, KEYS_OWN)
    base = cover.pointer + (wide(b) * cover.batch + wide(h) * cover.head + wide(own) * cover.own)
    entry = lists + wide(program) * (count + 2)
    full_tiles, partial_tiles = program * 0, program * 0
    for chunk in range(tl.cdiv(count, CHUNK)):
        other = chunk * CHUNK + tl.arange(0, CHUNK)
        kind = tl.load(base + wide(other) * cover.other, mask=other < count, other=0)
        some, every = visible_part(own * SIZE, last, other * BLOCK, other * BLOCK + BLOCK - 1, band)
        some, every = some & (kind >= SOME), every & (kind == ALL)
        full, partial = (some & every).to(tl.int32), (some & ~every).to(tl.int32)
        tl.store(entry + 2 + full_tiles + tl.cumsum(full, 0) - 1, other, mask=full != 0)
        tl.store(entry + 2 + count - partial_tiles - tl.cumsum(partial, 0), other, mask=partial != 0)
        full_tiles += tl.sum(full, 0)
        partial_tiles += tl.sum(partial, 0)
    tl.store(entry, full_tiles)
    tl.store(entry + 1, partial_tiles)
