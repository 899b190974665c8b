"""The scores of a tile, their masking, and the exponential.

A score is s = scale * Q K^T + mask, in natural units. Q carries the sign of the scale, so a larger x is a larger s.

    value:              | PRESCALED (float mask or huge scale) | otherwise
    x, masked scores:   | magnitude * Q K^T + mask, base e     | Q K^T, without unit
    y, to_exponent(x):  | x, base e                            | x * magnitude * log2(e), base 2
    m, maximum of y:    | base e                               | base 2
    exponential(y - m): | exp2((y - m) * log2(e))              | exp2(y - m)
    shift, backward:    | row_max, base e                      | row_max * log2(e), base 2; FOLD_SUM: + log2(row_sum)

Stored row_max and LSE are base e. FOLD_SUM requires operands of 16 bits and no PRESCALED.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fastattn.backends.triton.attention.operands import rematerialise, wide
from fastattn.backends.triton.visibility import is_seen, is_visible

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)
INFINITY: tl.constexpr = tl.constexpr(float("inf"))
SUMS: tl.constexpr = tl.constexpr(16)  # columns of a product with ones, the fewest that every matrix instruction takes


class SeenKeys(NamedTuple):
    """Keys that the mask shows to some query of a tile, (B, H, tiles of queries, Lk) uint8, 1 if seen."""

    pointer: Tensor
    batch: int
    head: int
    tile: int


@triton.jit
def mask_pointers(mask, column, b, h, i, j):
    """Return pointers to the mask at (b, h, i, j). ``column`` is the stride of its columns; None: 1."""
    columns = wide(j) if column is None else wide(j) * column
    return mask.pointer + (wide(b) * mask.batch + wide(h) * mask.head) + (wide(i) * mask.row + columns)


@triton.jit
def seen_keys(seen, b, h, tile, j, sequence):
    """Return, for keys j, whether some query sees them by the window and, if ``seen`` is given, by the mask.

    Other keys may hold anything, including NaN, and are loaded as zero.
    """
    inside = is_seen(j, sequence.seqlen_q, sequence.band)
    if seen is not None:
        base = seen.pointer + (wide(b) * seen.batch + wide(h) * seen.head + wide(tile) * seen.tile)
        inside = inside & (tl.load(base + j, mask=j < sequence.seqlen_k, other=0) != 0)
    return inside


@triton.jit
def load_mask(problem, b, h, i, j, sequence):
    """Return whether query i sees key j of a partial tile, and the float mask's values; without one, the same twice.

    Workaround (Triton 3.6 to 3.9): call it before the product that it masks. The layout of what is loaded last wins for
    the statistics of rows. If that is the mask, the exponential and dropout are computed twice, in both layouts.
    """
    visible = is_visible(i, j, sequence.band)
    value = visible
    if problem.mask is not None:
        pointers = mask_pointers(problem.mask, problem.mask_column, b, h, i, j)
        inside = (i < sequence.seqlen_q) & (j < sequence.seqlen_k)
        if pointers.dtype.element_ty == tl.uint8:
            visible = visible & (tl.load(pointers, mask=inside, other=0) != 0)
            value = visible
        else:
            value = tl.load(pointers, mask=inside, other=-INFINITY).to(tl.float32)
            visible = visible & (value != -INFINITY)
    return visible, value


@triton.jit
def mask_scores(x, visible, value):
    """Return x with a float mask added, -inf where it is not visible."""
    if value.dtype == tl.float32:
        x += value
        x = tl.where(x < LOWEST, LOWEST, x)  # a finite mask value hides no key, even if the sum overflows
    return tl.where(visible, x, -INFINITY)


@triton.jit
def scores(a, b, magnitude, PRESCALED: tl.constexpr, PRECISION: tl.constexpr):
    """Return x = A B^T (M, N), float32, before masking; times magnitude if PRESCALED."""
    x = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    return x * magnitude if PRESCALED else x


@triton.jit
def to_exponent(x, magnitude, PRESCALED: tl.constexpr):
    """Return y with exponential(y - m) = exp(score - row_max)."""
    return x if PRESCALED else x * (magnitude * LOG2E)


@triton.jit
def exponential(x, PRESCALED: tl.constexpr):
    """Return e^x if PRESCALED, otherwise 2^x."""
    return tl.exp2(x * LOG2E) if PRESCALED else tl.exp2(x)


@triton.jit
def dropped(p, kept, group, SCARCE: tl.constexpr):
    """Return p where it is kept, 0 elsewhere.

    Workaround (Triton 3.6 to 3.9): with a constant 0 the compiler first converts p to 16 bits and then selects among
    halves of registers. A zero behind ``rematerialise`` prevents that. It takes registers, so kernels in which they are
    SCARCE use the constant. The cost of the selection by halves is not recorded.
    """
    return tl.where(kept, p, 0.0 if SCARCE else rematerialise(0, group).to(tl.float32))


@triton.jit
def add_rounded(weights, sums):
    """Add the rows of 16-bit weights (M, N) to each column of ``sums`` (M, SUMS), float32.

    A product with ones takes a tenth of the instructions that converting the weights back would.
    """
    return tl.dot(weights, tl.full((weights.shape[1], SUMS), 1.0, tl.float32).to(weights.dtype), sums)


@triton.constexpr_function
def partial_stages(is_described, is_listed, block_d, block_dv):
    """Return the pipeline stages for the loads of partial tiles; None: as many as for full tiles.

    Pointers read partial tiles. If descriptors read the full ones, large heads leave no registers to load tiles ahead
    through pointers. Few tiles are partial unless a mask lists them.
    """
    return 1 if is_described and not is_listed and block_d + block_dv > 128 else None


@triton.constexpr_function
def licm_spills(block_d, block_dv, dtype):
    """Return whether such heads leave no registers for values hoisted out of the main loop.

    Workaround (LICM under Triton 3.6 to 3.9): hoisted offsets and masks stay in registers through the whole loop. If
    hoisting is allowed for these heads, the kernels spill.
    """
    return block_d + block_dv > 256 or dtype.primitive_bitwidth == 32


@triton.jit
def order_products(operand):
    """Place a barrier before a float32 product.

    Workaround (Triton 3.6 to 3.9): the operands of two consecutive products would be live together, and they do not fit
    in registers. Before the barrier and the present tiles, dQ of heads of 128 spilled over 200 bytes on every
    architecture (commit 48bc5d7).
    """
    if operand.dtype == tl.float32:
        tl.debug_barrier()
