"""Dropout's mask: Philox4x32-7 on the element's position, the formula of docs/design.md, section 2.

One Philox call gives eight 16-bit values of a 16x32 tile: rows i, i + 8 and columns j, j + 8, j + 16, j + 24. The
functions below arrange them into a block of matrix ``z`` only by join, reshape and permute. True = kept.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fastattn.backends.common import dropout_scale


class Dropout(NamedTuple):
    """The dropout of a call."""

    seed: Tensor  # (2,) int64: (key, offset)
    threshold: int  # 1 to 65536
    scale: float  # factor of kept elements


def dropout_of(seed: Tensor | None, threshold: int) -> Dropout | None:
    """Return a kernel's argument, or None for no dropout."""
    return None if seed is None else Dropout(seed, threshold, dropout_scale(threshold))


@triton.jit
def _product(a, factor, in_64_bits: tl.constexpr):
    """Return the high and the low word of a product of uint32: one instruction in 64 bits, otherwise two."""
    if in_64_bits:
        product = a.to(tl.uint64) * factor
        return (product >> 32).to(tl.uint32), product.to(tl.uint32)
    return tl.umulhi(a, factor), a * factor


@triton.jit
def _words(dropout, z, x, y, in_64_bits: tl.constexpr = True):
    """Return the four uint32 words of a call for tile coordinates x (columns) and y (rows), which broadcast with z.

    Values that depend only on x, y or z are computed at that size. Workaround (Triton 3.9): it decides by bytes whether
    to recompute such values for another layout or to convert the layout of the words. In 64 bits a small tile's words
    would be converted, so small tiles compute in 32 bits.
    """
    key, offset = tl.load(dropout.seed), tl.load(dropout.seed + 1)
    c0, c1, c2, c3 = x.to(tl.uint32), y.to(tl.uint32), z.to(tl.uint32), offset.to(tl.uint32)
    k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    for _ in tl.static_range(7):
        first, second = _product(c0, 0xD2511F53, in_64_bits), _product(c2, 0xCD9E8D57, in_64_bits)
        c0, c1, c2, c3 = second[0] ^ c1 ^ k0, second[1], first[0] ^ c3 ^ k1, first[1]
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _bound(dropout):
    """Return the uint32 bound that a word exceeds iff its upper half is kept. At threshold 65536 no word exceeds it."""
    return ((dropout.threshold << 16) - 1).to(tl.uint32)


@triton.jit
def _halves(word, dropout):
    """Return whether values 2w (low half) and 2w + 1 (high half) of word w are kept, in a new last dimension of 2."""
    return tl.join((word << 16) > _bound(dropout), word > _bound(dropout))


@triton.jit
def keep(dropout, z, i, j, M: tl.constexpr, N: tl.constexpr):
    """Return the mask (M, N) of rows from i and columns from j. 16 divides i and M; 32 divides j and N.

    One Philox call serves 8 elements.
    """
    y = i // 2 + tl.arange(0, M // 2)[:, None]
    x = j // 4 + tl.arange(0, N // 4)[None, :]
    w0, w1, w2, w3 = _words(dropout, z, x, y, M >= 128)
    rows = tl.join(_halves(w0, dropout), _halves(w2, dropout))
    rows_right = tl.join(_halves(w1, dropout), _halves(w3, dropout))
    # (16-row tile, i % 8, 32-column tile, j % 8, j // 8 % 2, i // 8 % 2, j // 16 % 2)
    values = tl.join(rows, rows_right).reshape(M // 16, 8, N // 32, 8, 2, 2, 2)
    return values.permute(0, 5, 1, 2, 6, 4, 3).reshape(M, N)


@triton.jit
def keep_transposed(dropout, z, i, j, M: tl.constexpr, N: tl.constexpr):
    """Return ``keep`` transposed, (N, M), for blocks whose columns are the rows of the matrix, as in dK and dV.

    There a thread owns two of the four columns of a call. Words are chosen by j // 16 % 2; one call serves 4 elements.
    """
    y = i // 2 + tl.arange(0, M // 2)[None, :]
    row = tl.arange(0, N // 2)[:, None]  # (32-column tile, j // 16 % 2, j % 8)
    x = j // 4 + row // 16 * 8 + row % 8
    w0, w1, w2, w3 = _words(dropout, z, x, y, M >= 64)
    left = row // 8 % 2 == 0
    upper, lower = tl.where(left, w0, w1), tl.where(left, w2, w3)
    # (j // 16, j % 8, 16-row tile, i % 8, j // 8 % 2, i // 8 % 2)
    values = tl.join(_halves(upper, dropout), _halves(lower, dropout)).reshape(N // 16, 8, M // 16, 8, 2, 2)
    return values.permute(0, 4, 1, 2, 5, 3).reshape(N, M)


@triton.jit
def _side_by_side(even, odd):
    """Return one word with the low halves of two words, and one with their high halves."""
    return (even & 0xFFFF) | (odd << 16), (even >> 16) | (odd & 0xFFFF0000)


@triton.jit
def _stack(a, b):
    """Stack two blocks along the first dimension. Every value stays in its thread."""
    return tl.join(a, b).permute(2, 0, 1).reshape(2 * a.shape[0], a.shape[1])


@triton.jit
def _two_calls(dropout, z, x, y):
    """Return the values of calls x and x + 1, two per word.

    They are stacked by (j // 8 % 2, j // 16 % 2, i // 8 % 2).
    """
    a0, a1, a2, a3 = _words(dropout, z, x, y)
    b0, b1, b2, b3 = _words(dropout, z, x + 1, y)
    v0, v1 = _side_by_side(a0, b0)
    v2, v3 = _side_by_side(a1, b1)
    v4, v5 = _side_by_side(a2, b2)
    v6, v7 = _side_by_side(a3, b3)
    return _stack(_stack(_stack(v0, v4), _stack(v2, v6)), _stack(_stack(v1, v5), _stack(v3, v7)))


@triton.jit
def _two_half_calls(dropout, z, x, y, upper):
    """Return the values of ``_two_calls`` for the upper or the lower eight rows of a tile.

    They are stacked by (j // 8 % 2, j // 16 % 2).
    """
    a0, a1, a2, a3 = _words(dropout, z, x, y)
    b0, b1, b2, b3 = _words(dropout, z, x + 1, y)
    v0, v1 = _side_by_side(tl.where(upper, a0, a2), tl.where(upper, b0, b2))
    v2, v3 = _side_by_side(tl.where(upper, a1, a3), tl.where(upper, b1, b3))
    return _stack(_stack(v0, v2), _stack(v1, v3))


# In a row in memory a thread holds 8 adjacent columns, which belong to 8 calls. So in the two functions for rows,
# values change threads before they are compared. They move two per word, in the row's order, from four adjacent calls.


@triton.jit
def keep_rows(dropout, z, i, j, N: tl.constexpr):
    """Return the mask (M, N) of arbitrary rows i (M,) of matrices z (M,), columns from j. 32 divides j and N.

    One Philox call serves 4 elements.
    """
    M: tl.constexpr = i.shape[0]
    z, y, upper = z[:, None], (i // 16 * 8 + i % 8)[:, None], (i // 8 % 2 == 0)[:, None]
    x = j // 4 + 4 * tl.arange(0, N // 16)[None, :]
    values = _stack(_two_half_calls(dropout, z, x, y, upper), _two_half_calls(dropout, z, x + 2, y, upper))
    # Permute to the order in rows. Before: (j % 4 // 2, j // 8 % 2, j // 16 % 2, row, 32-column tile, j % 8 // 4).
    values = values.reshape(2, 2, 2, M, N // 32, 2).permute(3, 4, 2, 1, 5, 0).reshape(M, N // 2)
    return _halves(values, dropout).reshape(M, N)


@triton.jit
def keep_pairs(dropout, rows, j, N: tl.constexpr):
    """Return the mask (M, N) of ``Rows`` (M,), which are in pairs, and columns from j. 32 divides j and N.

    One Philox call serves 8 elements.
    """
    P: tl.constexpr = rows.pair.shape[0]
    z, y = rows.pair_matrix[:, None], rows.pair[:, None]
    x = j // 4 + 4 * tl.arange(0, N // 16)[None, :]
    values = _stack(_two_calls(dropout, z, x, y), _two_calls(dropout, z, x + 2, y))
    # Permute to the order in rows. Before:
    # (j % 4 // 2, j // 8 % 2, j // 16 % 2, i // 8 % 2, pair, 32-column tile, j % 8 // 4).
    values = values.reshape(2, 2, 2, 2, P, N // 32, 2).permute(4, 3, 5, 2, 1, 6, 0).reshape(2 * P, N // 2)
    return _halves(values, dropout).reshape(2 * P, N)
