"""The rule of visibility: query i of a sequence sees key j iff j < length and -left <= j - i - diagonal <= right.

Both sides of a window are finite and at least 0. A mask may hide more pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Window(NamedTuple):
    """Numbers of keys that a query sees to the left and to the right of the diagonal."""

    left: int
    right: int


class Band(NamedTuple):
    """The visible pairs (i, j) of a sequence: queries and keys or, as ``owned`` may return it, keys and queries."""

    length: tl.tensor
    diagonal: tl.tensor
    left: tl.tensor
    right: tl.tensor


@triton.jit
def band_of(length, seqlen_q, window, LOWER_RIGHT: tl.constexpr):
    """Return the band of a sequence of ``length`` existing keys.

    The diagonal begins at the first query and key. If LOWER_RIGHT, it ends at the last query and existing key.
    """
    diagonal = length - seqlen_q if LOWER_RIGHT else 0
    return Band(length, diagonal, window.left, window.right)


@triton.jit
def first_key(i, band):
    """Return the first key that query i sees, if it sees any."""
    return tl.maximum(i + band.diagonal - band.left, 0)


@triton.jit
def end_key(i, band):
    """Return one more than the last key that query i sees; at most ``first_key`` if it sees none."""
    return tl.minimum(i + 1 + band.diagonal + band.right, band.length)


@triton.jit
def is_visible(i, j, band):
    """Return whether query i sees key j; i and j broadcast."""
    distance = j - i - band.diagonal
    return (j < band.length) & (distance >= -band.left) & (distance <= band.right)


@triton.jit
def is_seen(j, seqlen_q, band):
    """Return whether at least one query sees key j."""
    return (j < band.length) & (j >= band.diagonal - band.left) & (j < seqlen_q + band.diagonal + band.right)


@triton.jit
def owned(first, SIZE: tl.constexpr, seqlen_q, band, KEYS_OWN: tl.constexpr):
    """Return the last existing row of a program's SIZE queries or, with KEYS_OWN, SIZE keys, and the band.

    In the returned band the owned side takes the role of the queries.
    """
    if KEYS_OWN:
        last = tl.minimum(first + SIZE, band.length) - 1
        seen = Band(tl.where(first < band.length, seqlen_q, 0), -band.diagonal, band.right, band.left)
    else:
        last = tl.minimum(first + SIZE, seqlen_q) - 1
        seen = band
    return last, seen


@triton.jit
def visible_tiles(first, last, band, BLOCK: tl.constexpr):
    """Return (begin, first full, end of full, end) of the tiles of BLOCK keys that queries first to last see."""
    begin = tl.minimum(first_key(first, band), band.length) // BLOCK
    end = tl.maximum(begin, tl.cdiv(tl.maximum(end_key(last, band), 0), BLOCK))
    full_begin = _clamp(tl.cdiv(first_key(last, band), BLOCK), begin, end)
    full_end = _clamp(tl.maximum(end_key(first, band), 0) // BLOCK, full_begin, end)
    return begin, full_begin, full_end, end


@triton.jit
def visible_part(first, last, first_j, last_j, band):
    """Return (whether some, whether every) pair of queries first to last and keys first_j to last_j is visible."""
    nearest, farthest = first_j - last - band.diagonal, last_j - first - band.diagonal
    some = (first_j < band.length) & (farthest >= -band.left) & (nearest <= band.right)
    return some, (last_j < band.length) & (nearest >= -band.left) & (farthest <= band.right)


@triton.jit
def _clamp(x, low, high):
    return tl.maximum(low, tl.minimum(x, high))
