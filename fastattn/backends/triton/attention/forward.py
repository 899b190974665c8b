"""Attention's forward pass: online softmax (Milakov and Gimelshein 2018) in FlashAttention's tiles (Dao et al. 2022).

    for each tile of BLOCK_M queries, head, sequence (programs; split-KV: times splits of the keys):
        for full tiles, then for partial tiles of BLOCK_N keys (of this split):
            S = Q K^T, masked if partial; P = exp(S - m); acc = acc * rescale + round(dropout(P)) V
    merge_kernel, after split-KV, for each tile of 16 queries, head, sequence: for each split: acc += weight * out

query (B, Hq, Lq, E), key (B, Hk, Lk, E), value (B, Hk, Lk, Ev), out (B, Hq, Lq, Ev): one dtype, 16-bit or float32.
Packed operands are (T, H, D). LSE, row_max, row_sum: (B, Hq, Lq) or (Tq, Hq), float32, natural units. Each split
writes out, row_max and row_sum in float32, with the splits as the first dimension. Sums are float32.

P is rounded to 16 bits for its product with V. acc is divided by the sum of the rounded P, so that a constant that all
values have in common passes exactly. ``residual``, as out, is what the rounding of out to 16 bits takes away.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fastattn.backends.triton.attention.block_mask import tile, tile_plan
from fastattn.backends.triton.attention.operands import (
    Heads,
    head_of,
    load_tile,
    program,
    rematerialise,
    row_offsets,
    sequence_of,
    store_tile,
)
from fastattn.backends.triton.attention.scores import (
    INFINITY,
    LN2,
    LOG2E,
    SUMS,
    add_rounded,
    exponential,
    licm_spills,
    load_mask,
    mask_scores,
    order_products,
    partial_stages,
    scores,
    seen_keys,
    to_exponent,
)
from fastattn.backends.triton.kernel import kernel
from fastattn.backends.triton.philox import keep


class Result(NamedTuple):
    """The tensors that a kernel writes; statistics are float32, natural units."""

    out: Heads
    residual: Heads | None  # None: not wanted, or in split-KV, whose merge computes it
    lse: Tensor | None  # None: not wanted, or in split-KV, whose merge computes it
    row_max: Tensor | None  # None: no backward pass follows
    row_sum: Tensor | None
    batch: int  # strides of the statistics
    head: int
    row: int | None  # None: 1


class Splits(NamedTuple):
    """Strides between the results of successive splits."""

    out: int
    rows: int


@triton.jit
def _residual(acc, dtype: tl.constexpr):
    """Return what rounding to ``dtype`` takes away from the result, 0 where it is not finite."""
    residual = acc - acc.to(dtype).to(tl.float32)
    return tl.where(tl.abs(residual) < INFINITY, residual, 0.0)


@kernel
def forward_kernel(
    key_descriptor, value_descriptor, problem, lists, seen, result, splits, tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, EVEN: tl.constexpr,
    ALIGNMENT: tl.constexpr, LOWER_RIGHT: tl.constexpr, PRESCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute out and the statistics of a tile of queries. Grid: (tiles * Hq * B, splits of the keys)."""
    tile_q, own_h, own_b = program(tiles, problem.num_heads)
    h, b = own_h, own_b
    sequence = sequence_of(b, problem.sequences, problem.window, LOWER_RIGHT)
    first_i = tile_q * BLOCK_M
    if first_i >= sequence.seqlen_q:
        return
    i = first_i + tl.arange(0, BLOCK_M)
    inside = i < sequence.seqlen_q
    keys = head_of(problem.key, b, h // problem.group, sequence.first_key)
    values = head_of(problem.value, b, h // problem.group, sequence.first_key)
    queries = head_of(problem.query, b, h, sequence.first_query)
    q = load_tile(queries, first_i, inside, problem.head_dim, BLOCK_M, BLOCK_D, EVEN, ALIGNMENT)

    row_max = tl.full((BLOCK_M,), -INFINITY, tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    kept_sum, rounded_sums = tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M, SUMS), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    plan = tile_plan(lists, b, h, tile_q, sequence, BLOCK_M, BLOCK_N, False)
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    PARTIAL_STAGES: tl.constexpr = partial_stages(key_descriptor is not None, lists is not None, BLOCK_D, BLOCK_DV)
    for PARTIAL in tl.static_range(2):
        count = plan[PARTIAL].to(tl.int64)  # count * splits may exceed 32 bits
        begin, end = (count * split // num_splits).to(tl.int32), (count * (split + 1) // num_splits).to(tl.int32)
        for n in tl.range(
            begin, end, num_stages=PARTIAL_STAGES if PARTIAL else None,
            disable_licm=(PARTIAL == 1) | licm_spills(BLOCK_D, BLOCK_DV, q.dtype),
        ):  # fmt: skip
            first_j = tile(plan, n, lists, PARTIAL) * BLOCK_N
            if lists is not None:  # workaround: see rematerialise
                h, b = rematerialise(own_h, n + problem.group), rematerialise(own_b, n + problem.group)
                keys = head_of(problem.key, b, h // problem.group, sequence.first_key)
                values = head_of(problem.value, b, h // problem.group, sequence.first_key)
            j = first_j + tl.arange(0, BLOCK_N)
            seen_j = seen_keys(seen, b, h, tile_q, j, sequence) if PARTIAL else None
            k = load_tile(
                keys, first_j, seen_j, problem.head_dim, BLOCK_N, BLOCK_D, EVEN, ALIGNMENT,
                key_descriptor, b, h // problem.group,
            )  # fmt: skip
            if PARTIAL:
                own_i = rematerialise(first_i, n + problem.group) + tl.arange(0, BLOCK_M)
                visible, value = load_mask(problem, b, h, own_i[:, None], j[None, :], sequence)
            order_products(q)
            x = scores(q, k, problem.magnitude, PRESCALED, PRECISION)
            if PARTIAL:
                x = mask_scores(x, visible, value)
            raised = tl.maximum(row_max, to_exponent(tl.max(x, 1), problem.magnitude, PRESCALED))
            m = tl.where(raised == -INFINITY, 0.0, raised)  # the row has seen no key so far
            p = exponential(to_exponent(x, problem.magnitude, PRESCALED) - m[:, None], PRESCALED)
            rescale = exponential(row_max - m, PRESCALED)
            row_max = raised
            weights = p
            if problem.dropout is not None:
                kept = keep(problem.dropout, b * problem.num_heads + h, first_i, first_j, BLOCK_M, BLOCK_N)
                weights = tl.where(kept, p, 0.0)
            v = load_tile(
                values, first_j, seen_j, problem.value_head_dim, BLOCK_N, BLOCK_DV, EVEN, ALIGNMENT,
                value_descriptor, b, h // problem.group,
            )  # fmt: skip
            # Workaround (ptxas of Triton 3.9): with the sums before the load of v, it copies the rounded weights for
            # the second product. That takes half an instruction per score with dropout.
            row_sum = row_sum * rescale + tl.sum(p, 1)
            if problem.dropout is not None and q.dtype != tl.float32:
                kept_sum = kept_sum * rescale + tl.sum(weights, 1)
            rounded = weights.to(v.dtype)
            if v.dtype != tl.float32:
                rounded_sums = add_rounded(rounded, rounded_sums * rescale[:, None])
            acc = tl.dot(rounded, v, acc * rescale[:, None], input_precision=PRECISION)

    dropout_scale = 1.0 if problem.dropout is None else problem.dropout.scale
    # Rows that see nothing give 0. Their acc may be NaN: they were multiplied with values that only other rows see.
    empty = row_sum == 0
    normaliser = dropout_scale / tl.where(empty, 1.0, row_sum)
    if q.dtype != tl.float32:
        rounded_sum = tl.max(rounded_sums, 1)
        kept_sum = row_sum if problem.dropout is None else kept_sum
        normaliser *= kept_sum / tl.where(rounded_sum == 0, 1.0, rounded_sum)
    acc = tl.where(empty[:, None], 0.0, acc * normaliser[:, None])
    first_i = rematerialise(first_i, problem.group)
    i = first_i + tl.arange(0, BLOCK_M)
    inside = i < sequence.seqlen_q
    base, row = head_of(result.out, own_b, own_h, sequence.first_query)
    base += split * tl.cast(splits.out, tl.int64)
    store_tile((base, row), first_i, inside, problem.value_head_dim, acc, ALIGNMENT)
    if result.residual is not None:
        head = head_of(result.residual, own_b, own_h, sequence.first_query)
        store_tile(head, first_i, inside, problem.value_head_dim, _residual(acc, q.dtype), ALIGNMENT)
    m = tl.where(row_max == -INFINITY, 0.0, row_max)
    natural_max = m if PRESCALED else m * LN2
    # The change of units rounds the maximum, so the sum is corrected by the same amount.
    row_sum *= exponential(m - (natural_max if PRESCALED else natural_max * LOG2E), PRESCALED)
    at = row_offsets(result, own_b, own_h, sequence.first_query, i) + split * tl.cast(splits.rows, tl.int64)
    if result.row_max is not None:
        tl.store(result.row_max + at, natural_max, mask=inside)
        tl.store(result.row_sum + at, row_sum, mask=inside)
    if result.lse is not None:
        tl.store(result.lse + at, natural_max + tl.log(row_sum), mask=inside)


@kernel
def merge_kernel(
    problem, split_result, splits, num_splits, result, tiles,
    BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, EVEN: tl.constexpr, ALIGNMENT: tl.constexpr,
    LOWER_RIGHT: tl.constexpr,
):  # fmt: skip
    """Merge the splits' results into attention to all keys.

    A split's weight is exp(row_max - highest) * row_sum, with ``highest`` the largest row_max of the splits.
    """
    tile_q, h, b = program(tiles, problem.num_heads)
    sequence = sequence_of(b, problem.sequences, problem.window, LOWER_RIGHT)
    first_i = tile_q * BLOCK_M
    if first_i >= sequence.seqlen_q:
        return
    i = first_i + tl.arange(0, BLOCK_M)
    inside = i < sequence.seqlen_q
    at = row_offsets(result, b, h, sequence.first_query, i)
    stride, row_stride = tl.cast(splits.out, tl.int64), tl.cast(splits.rows, tl.int64)
    highest = tl.full((BLOCK_M,), -INFINITY, tl.float32)
    for split in range(num_splits):
        row_max = tl.load(split_result.row_max + at + split * row_stride, mask=inside, other=0.0)
        row_sum = tl.load(split_result.row_sum + at + split * row_stride, mask=inside, other=0.0)
        highest = tl.maximum(highest, tl.where(row_sum == 0, -INFINITY, row_max))
    highest = tl.where(highest == -INFINITY, 0.0, highest)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    base, row = head_of(split_result.out, b, h, sequence.first_query)
    for split in range(num_splits):
        row_max = tl.load(split_result.row_max + at + split * row_stride, mask=inside, other=0.0)
        row_sum = tl.load(split_result.row_sum + at + split * row_stride, mask=inside, other=0.0)
        weight = tl.where(row_sum == 0, 0.0, tl.exp2((row_max - highest) * LOG2E) * row_sum)
        head = base + split * stride, row
        acc += weight[:, None] * load_tile(
            head, first_i, inside, problem.value_head_dim, BLOCK_M, BLOCK_DV, EVEN, ALIGNMENT
        )
        total += weight
    acc *= tl.where(total == 0, 0.0, 1 / total)[:, None]
    head = head_of(result.out, b, h, sequence.first_query)
    store_tile(head, first_i, inside, problem.value_head_dim, acc, ALIGNMENT)
    if result.residual is not None:
        residual = _residual(acc, result.out.pointer.dtype.element_ty)
        head = head_of(result.residual, b, h, sequence.first_query)
        store_tile(head, first_i, inside, problem.value_head_dim, residual, ALIGNMENT)
    if result.row_max is not None:
        tl.store(result.row_max + at, highest, mask=inside)
        tl.store(result.row_sum + at, total, mask=inside)
    if result.lse is not None:
        tl.store(result.lse + at, highest + tl.log(total), mask=inside)
