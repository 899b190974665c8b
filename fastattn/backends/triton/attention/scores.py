"""Scores of a tile, their masking, and the exponential.

x is a score but for the factor that ``to_exponent`` adds: Q K^T or, PRESCALED, magnitude * Q K^T + mask. The scale's
sign is in Q, so that a larger x is a larger score. m is the row's maximum in the units of ``to_exponent``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fastattn.backends.triton.attention.operands import rematerialise, wide
from fastattn.backends.triton.visibility import is_seen, is_visible

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)
INFINITY: tl.constexpr = tl.constexpr(float("inf"))


class SeenKeys(NamedTuple):
    """(B, H, tiles of queries, Lk) uint8: whether some query of the tile sees the key, as far as the mask goes."""

    pointer: Any
    batch: Any
    head: Any
    tile: Any


@triton.jit
def mask_pointers(mask, column, b, h, i, j):
    """``column`` is the columns' stride; None: 1."""
    columns = wide(j) if column is None else wide(j) * column
    return mask.pointer + (wide(b) * mask.batch + wide(h) * mask.head) + (wide(i) * mask.row + columns)


@triton.jit
def seen_keys(seen, b, h, tile, j, sequence):
    """The keys j that some query sees as far as the window goes, and as far as the mask. The others may hold anything,
    NaN too, and count as zero."""
    inside = is_seen(j, sequence.seqlen_q, sequence.band)
    if seen is not None:
        base = seen.pointer + (wide(b) * seen.batch + wide(h) * seen.head + wide(tile) * seen.tile)
        inside = inside & (tl.load(base + j, mask=j < sequence.seqlen_k, other=0) != 0)
    return inside


@triton.jit
def mask_scores(x, problem, b, h, i, j, sequence):
    """x of a partial tile: -inf where query i does not see key j. A float mask is added."""
    visible = is_visible(i, j, sequence.band)
    if problem.mask is not None:
        pointers = mask_pointers(problem.mask, problem.mask_column, b, h, i, j)
        inside = (i < sequence.seqlen_q) & (j < sequence.seqlen_k)
        if pointers.dtype.element_ty == tl.uint8:
            visible = visible & (tl.load(pointers, mask=inside, other=0) != 0)
        else:
            value = tl.load(pointers, mask=inside, other=-INFINITY).to(tl.float32)
            visible = visible & (value != -INFINITY)
            x += value
            x = tl.where(x < LOWEST, LOWEST, x)  # a finite mask hides nothing
    return tl.where(visible, x, -INFINITY)


@triton.jit
def scores(a, b, magnitude, PRESCALED: tl.constexpr, PRECISION: tl.constexpr):
    x = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    return x * magnitude if PRESCALED else x


@triton.jit
def to_exponent(x, magnitude, PRESCALED: tl.constexpr):
    """exponential(to_exponent(x) - m) = exp(score - row_max)"""
    return x if PRESCALED else x * (magnitude * LOG2E)


@triton.jit
def exponential(x, PRESCALED: tl.constexpr):
    return tl.exp2(x * LOG2E) if PRESCALED else tl.exp2(x)


@triton.jit
def dropped(p, kept, group, SCARCE: tl.constexpr):
    """p where it is kept, 0 elsewhere. Unless registers are SCARCE, the zero is opaque to the compiler, which would
    otherwise convert p to 16 bits first and select halves of registers."""
    return tl.where(kept, p, 0.0 if SCARCE else rematerialise(0, group).to(tl.float32))


@triton.constexpr_function
def partial_stages(is_described, is_listed, block_d, block_dv):
    """How many stages pipeline the loads of partial tiles; None: as many as of full ones. Pointers read partial tiles.
    Where descriptors read the full ones, large heads leave no registers to load pointers' tiles ahead, and unless tiles
    are listed few are partial."""
    return 1 if is_described and not is_listed and block_d + block_dv > 128 else None


@triton.constexpr_function
def licm_spills(block_d, block_dv, dtype):
    """Whether such heads leave no registers for what LICM hoists out of the main loop."""
    return block_d + block_dv > 256 or dtype.primitive_bitwidth == 32


@triton.jit
def order_products(operand):
    """A barrier before a float32 product: the operands of two consecutive ones do not fit in registers."""
    if operand.dtype == tl.float32:
        tl.debug_barrier()
