"""Attention's backward pass, FlashAttention's (Dao et al. 2022). P is recomputed from the statistics.

    grad_query_kernel, per tile of BLOCK_M queries: delta = rowsum(dO * (O + residual)) - dLSE; for full, then partial
    key tiles:
        S = Q K^T; P; dP = dO V^T; dS = P * (dP - delta); dQ += round(dS) K
    grad_key_value_kernel, per tile of BLOCK_N keys: for full, then partial: for query heads of the group: query tiles:
        S^T = K Q^T; P^T; dP^T = V dO^T; dV += dropout(P)^T dO; dK += dS^T Q
    grad_mask_kernel, per tile of the mask: for each sequence, head and tile that broadcasts to it: sum += dS

Operands as in forward.py. dO: as out; dLSE, row_max, row_sum: (B, Hq, Lq) or (Tq, Hq), float32, natural units; Rows:
three float32 values per query. Gradients have their operand's dtype; sums are float32.

In 16 bits two identities cancel large numbers, and rounding must not break them. delta = sum_j P_ij dP_ij holds for the
result before its rounding, O + residual. sum_j dS_ij = dLSE_i does not hold for the rounded dS, so what keys have in
common would remain in dQ: dQ += (dLSE_i - sum_j round(dS_ij)) mean(K), with the mean of any keys that the rows see.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fastattn.backends.triton.attention.block_mask import tile, tile_plan
from fastattn.backends.triton.attention.operands import (
    head_of,
    load_rows,
    load_tile,
    program,
    rematerialise,
    row_offsets,
    sequence_of,
    store_tile,
    wide,
)
from fastattn.backends.triton.attention.scores import (
    INFINITY,
    LOG2E,
    SUMS,
    add_rounded,
    dropped,
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
from fastattn.backends.triton.philox import keep, keep_transposed


class Statistics(NamedTuple):
    """The forward pass's statistics, float32, one of each per query."""

    row_max: Tensor  # natural units
    row_sum: Tensor  # sum(exp(score - row_max))
    batch: int  # strides
    head: int
    row: int | None  # None: 1


class Rows(NamedTuple):
    """Float32 values per query, which ``grad_query_kernel`` writes for the other kernels."""

    shift: Tensor  # P = exponential(to_exponent(x) - shift) * inverse_sum
    inverse_sum: Tensor
    delta: Tensor
    batch: int  # strides
    head: int
    row: int | None  # None: 1, and a head's values begin at a multiple of 16 bytes


@triton.jit
def _normaliser(stats, at, inside, PRESCALED: tl.constexpr, FOLD_SUM: tl.constexpr):
    """Return (shift, inverse_sum) for ``_probabilities``, each (M,) float32.

    FOLD_SUM adds log2(row_sum) to the shift, which saves a multiplication and is exact enough for 16-bit operands. It
    is off under a float mask, because a large row_max would round log2(row_sum) away.
    """
    shift = tl.load(stats.row_max + at, mask=inside, other=0.0)
    row_sum = tl.load(stats.row_sum + at, mask=inside, other=0.0)
    inverse_sum = tl.where(row_sum == 0, 0.0, 1 / row_sum)
    if FOLD_SUM:
        shift = tl.where(row_sum == 0, INFINITY, shift * LOG2E + tl.log2(row_sum))
    elif not PRESCALED:
        shift *= LOG2E
    return shift, inverse_sum


@triton.jit
def _probabilities(x, shift, inverse_sum, magnitude, PRESCALED: tl.constexpr, FOLD_SUM: tl.constexpr):
    """Return P before dropout, float32. FOLD_SUM: the shift contains log2(row_sum)."""
    p = exponential(to_exponent(x, magnitude, PRESCALED) - shift, PRESCALED)
    return p if FOLD_SUM else p * inverse_sum


@kernel
def grad_query_kernel(
    key_descriptor, value_descriptor, problem, lists, seen, out, residual, grad_out, grad_lse, stats, grad_query,
    rows, tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, EVEN: tl.constexpr,
    ALIGNMENT: tl.constexpr, LOWER_RIGHT: tl.constexpr, PRESCALED: tl.constexpr, FOLD_SUM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dQ of a tile of queries, and ``Rows`` for the kernels after it. Grid: tiles * Hq * B."""
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
    outs = head_of(out, b, h, sequence.first_query)
    o = load_tile(outs, first_i, inside, problem.value_head_dim, BLOCK_M, BLOCK_DV, EVEN, ALIGNMENT).to(tl.float32)
    if residual is not None:
        outs = head_of(residual, b, h, sequence.first_query)
        o += load_tile(outs, first_i, inside, problem.value_head_dim, BLOCK_M, BLOCK_DV, EVEN, ALIGNMENT)
    grads = head_of(grad_out, b, h, sequence.first_query)
    do = load_tile(grads, first_i, inside, problem.value_head_dim, BLOCK_M, BLOCK_DV, EVEN, ALIGNMENT)

    at = row_offsets(stats, b, h, sequence.first_query, i)
    shift, inverse_sum = _normaliser(stats, at, inside, PRESCALED, FOLD_SUM)
    delta = tl.sum(do.to(tl.float32) * o, 1)
    dlse = tl.zeros((BLOCK_M,), tl.float32)
    if grad_lse is not None:
        at_lse = row_offsets(grad_lse, b, h, sequence.first_query, i)
        dlse = tl.load(grad_lse.pointer + at_lse, mask=inside, other=0.0)
        delta -= dlse
    delta = tl.where(inverse_sum == 0, 0.0, delta)  # 0 for rows that see nothing
    at = row_offsets(rows, b, h, sequence.first_query, i)
    tl.store(rows.delta + at, delta, mask=inside)
    tl.store(rows.shift + at, shift, mask=inside)
    tl.store(rows.inverse_sum + at, inverse_sum, mask=inside)

    dq, rounded_sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32), tl.zeros((BLOCK_M, SUMS), tl.float32)
    plan = tile_plan(lists, b, h, tile_q, sequence, BLOCK_M, BLOCK_N, False)
    for PARTIAL in tl.static_range(2):
        for n in tl.range(plan[PARTIAL], disable_licm=(PARTIAL == 1) | licm_spills(BLOCK_D, BLOCK_DV, q.dtype)):
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
            v = load_tile(
                values, first_j, seen_j, problem.value_head_dim, BLOCK_N, BLOCK_DV, EVEN, ALIGNMENT,
                value_descriptor, b, h // problem.group,
            )  # fmt: skip
            if PARTIAL:
                own_i = rematerialise(first_i, n + problem.group) + tl.arange(0, BLOCK_M)
                visible, value = load_mask(problem, b, h, own_i[:, None], j[None, :], sequence)
            order_products(q)
            x = scores(q, k, problem.magnitude, PRESCALED, PRECISION)
            if PARTIAL:
                x = mask_scores(x, visible, value)
            p = _probabilities(x, shift[:, None], inverse_sum[:, None], problem.magnitude, PRESCALED, FOLD_SUM)
            order_products(q)
            dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            if problem.dropout is not None:
                kept = keep(problem.dropout, b * problem.num_heads + h, first_i, first_j, BLOCK_M, BLOCK_N)
                dp = tl.where(kept, dp, 0.0) * problem.dropout.scale
            ds = p * (dp - delta[:, None])
            if PARTIAL:
                ds = tl.where(x == -INFINITY, 0.0, ds)
            order_products(q)
            rounded = ds.to(k.dtype)
            if k.dtype != tl.float32:
                rounded_sums = add_rounded(rounded, rounded_sums)
            dq = tl.dot(rounded, k, dq, input_precision=PRECISION)
    if q.dtype != tl.float32:
        # The mean of the keys of one tile that the rows visit serves.
        b, h = rematerialise(own_b, problem.group), rematerialise(own_h, problem.group)
        plan = tile_plan(lists, b, h, tile_q, sequence, BLOCK_M, BLOCK_N, False)
        first_j = 0
        if plan[0] > 0:
            first_j = tile(plan, 0, lists, 0) * BLOCK_N
        elif plan[1] > 0:
            first_j = tile(plan, 0, lists, 1) * BLOCK_N
        seen_j = seen_keys(seen, b, h, tile_q, first_j + tl.arange(0, BLOCK_N), sequence)
        keys = head_of(problem.key, b, h // problem.group, sequence.first_key)
        k = load_tile(keys, first_j, seen_j, problem.head_dim, BLOCK_N, BLOCK_D, EVEN, ALIGNMENT)
        number = tl.maximum(tl.sum(seen_j.to(tl.int32), 0), 1)
        mean = tl.sum(k.to(tl.float32), 0) / number
        mean = tl.where(tl.abs(mean) < INFINITY, mean, 0.0)
        dq += (dlse - tl.max(rounded_sums, 1))[:, None] * mean[None, :]
    first_i = rematerialise(first_i, problem.group)
    i = first_i + tl.arange(0, BLOCK_M)
    sees_nothing = shift == INFINITY if FOLD_SUM else inverse_sum == 0
    dq = tl.where(sees_nothing[:, None], 0.0, dq * problem.scale)
    head = head_of(grad_query, own_b, own_h, sequence.first_query)
    store_tile(head, first_i, i < sequence.seqlen_q, problem.head_dim, dq, ALIGNMENT)


@kernel
def grad_key_value_kernel(
    query_descriptor, grad_descriptor, problem, lists, grad_out, grad_key, grad_value, rows, tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, EVEN: tl.constexpr,
    ALIGNMENT: tl.constexpr, LOWER_RIGHT: tl.constexpr, PRESCALED: tl.constexpr, FOLD_SUM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of a tile of keys, summed over the query heads of its group. Grid: tiles * Hk * B."""
    tile_k, kv_head, own_b = program(tiles, problem.num_heads // problem.group)
    b = own_b
    sequence = sequence_of(b, problem.sequences, problem.window, LOWER_RIGHT)
    first_j = tile_k * BLOCK_N
    if first_j >= sequence.seqlen_k:
        return
    j = first_j + tl.arange(0, BLOCK_N)
    seen_j = seen_keys(None, b, kv_head, 0, j, sequence)
    keys = head_of(problem.key, b, kv_head, sequence.first_key)
    values = head_of(problem.value, b, kv_head, sequence.first_key)
    k = load_tile(keys, first_j, seen_j, problem.head_dim, BLOCK_N, BLOCK_D, EVEN, ALIGNMENT)
    v = load_tile(values, first_j, seen_j, problem.value_head_dim, BLOCK_N, BLOCK_DV, EVEN, ALIGNMENT)

    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    PARTIAL_STAGES: tl.constexpr = partial_stages(query_descriptor is not None, lists is not None, BLOCK_D, BLOCK_DV)
    for PARTIAL in tl.static_range(2):
        for group_head in tl.range(problem.group, disable_licm=True):
            own_h = (wide(kv_head) * problem.group + group_head).to(tl.int32)
            h = own_h
            plan = tile_plan(lists, own_b, own_h, tile_k, sequence, BLOCK_N, BLOCK_M, True)
            for n in tl.range(plan[PARTIAL], num_stages=PARTIAL_STAGES if PARTIAL else None, disable_licm=True):
                first_i = tile(plan, n, lists, PARTIAL) * BLOCK_M
                if lists is not None:  # workaround: see rematerialise
                    h, b = rematerialise(own_h, n + problem.group), rematerialise(own_b, n + problem.group)
                queries = head_of(problem.query, b, h, sequence.first_query)
                grads = head_of(grad_out, b, h, sequence.first_query)
                i = first_i + tl.arange(0, BLOCK_M)
                inside = i < sequence.seqlen_q if PARTIAL else None
                q = load_tile(
                    queries, first_i, inside, problem.head_dim, BLOCK_M, BLOCK_D, EVEN, ALIGNMENT,
                    query_descriptor, b, h,
                )  # fmt: skip
                do = load_tile(
                    grads, first_i, inside, problem.value_head_dim, BLOCK_M, BLOCK_DV, EVEN, ALIGNMENT,
                    grad_descriptor, b, h,
                )  # fmt: skip
                at = row_offsets(rows, b, h, sequence.first_query, i)
                shift = load_rows(rows.shift + at, inside, INFINITY, rows.row is None)
                inverse_sum = load_rows(rows.inverse_sum + at, inside, 0.0, rows.row is None)
                delta = load_rows(rows.delta + at, inside, 0.0, rows.row is None)
                if PARTIAL:
                    own_j = rematerialise(first_j, n + problem.group) + tl.arange(0, BLOCK_N)
                    visible, value = load_mask(problem, b, h, i[None, :], own_j[:, None], sequence)
                x = scores(k, q, problem.magnitude, PRESCALED, PRECISION)
                if PARTIAL:
                    x = mask_scores(x, visible, value)
                if (BLOCK_D + BLOCK_DV > 256) & (q.dtype != tl.float32):
                    tl.debug_barrier()  # workaround: as order_products, for large heads in 16 bits
                p = _probabilities(x, shift[None, :], inverse_sum[None, :], problem.magnitude, PRESCALED, FOLD_SUM)
                dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
                dropped_p = p
                if problem.dropout is not None:
                    z = b * problem.num_heads + h
                    kept = keep_transposed(problem.dropout, z, first_i, first_j, BLOCK_M, BLOCK_N)
                    dropped_p = dropped(p, kept, problem.group, licm_spills(BLOCK_D, BLOCK_DV, q.dtype))
                    dp = tl.where(kept, dp, 0.0) * problem.dropout.scale
                elif PARTIAL & (BLOCK_D + BLOCK_DV > 256) & (q.dtype == tl.float32):
                    # Workaround (Triton 3.6 to 3.9): Triton keeps P in shared memory, together with the operands of the
                    # products. The total exceeds the 99 KiB of 8.6, 8.9 and 12.x by 1 KiB, and the launch fails. This
                    # selection changes no value and makes Triton recompute P.
                    dropped_p = tl.where(x == -INFINITY, 0.0, p)
                dv = tl.dot(dropped_p.to(do.dtype), do, dv, input_precision=PRECISION)
                ds = p * (dp - delta[None, :])
                if PARTIAL:
                    ds = tl.where(x == -INFINITY, 0.0, ds)
                order_products(q)
                dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    first_j = rematerialise(first_j, problem.group)
    j = first_j + tl.arange(0, BLOCK_N)
    exists, inside = (j < sequence.band.length)[:, None], j < sequence.seqlen_k
    dk = tl.where(exists, dk * problem.magnitude, 0.0)
    dv = tl.where(exists, dv if problem.dropout is None else dv * problem.dropout.scale, 0.0)
    head = head_of(grad_key, own_b, kv_head, sequence.first_key)
    store_tile(head, first_j, inside, problem.head_dim, dk, ALIGNMENT)
    head = head_of(grad_value, own_b, kv_head, sequence.first_key)
    store_tile(head, first_j, inside, problem.value_head_dim, dv, ALIGNMENT)


@triton.constexpr_function
def _slice_width(head_dim, dtype):
    """Return the columns per slice: 128 bytes, at most head_dim."""
    return min(head_dim, 1024 // dtype.primitive_bitwidth)


@triton.jit
def _product(
    a, first_a, inside_a, b, first_b, inside_b, head_dim,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, EVEN: tl.constexpr, ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return A B^T, (M, N) float32, of M and N rows of two heads.

    Slices of 128 bytes per row are multiplied one after the other, which lowers register pressure.
    """
    product = tl.zeros((M, N), tl.float32)
    WIDTH: tl.constexpr = _slice_width(D, a[0].dtype.element_ty)
    for start in tl.range(0, D, WIDTH, disable_licm=True):
        slice_a = load_tile((a[0] + start, a[1]), first_a, inside_a, head_dim - start, M, WIDTH, EVEN, ALIGNMENT)
        slice_b = load_tile((b[0] + start, b[1]), first_b, inside_b, head_dim - start, N, WIDTH, EVEN, ALIGNMENT)
        product = tl.dot(slice_a, tl.trans(slice_b), product, input_precision=PRECISION)
    return product


class MaskGrad(NamedTuple):
    """The gradient of the mask, in the mask's dtype, with sizes 1 or full."""

    pointer: Tensor  # contiguous
    batch: int  # strides
    head: int
    row: int
    num_heads: int  # sizes
    rows: int
    columns: int


@kernel
def grad_mask_kernel(
    problem, batch, grad_out, stats, grad, rows, tiles_q, tiles_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, EVEN: tl.constexpr,
    ALIGNMENT: tl.constexpr, LOWER_RIGHT: tl.constexpr, PRECISION: tl.constexpr,
    ONE_ROW: tl.constexpr, ONE_COLUMN: tl.constexpr, ONE_HEAD: tl.constexpr, ONE_BATCH: tl.constexpr,
):  # fmt: skip
    """Sum dS over the dimensions that the mask broadcasts.

    A program owns a tile of the mask and visits every tile of scores to which the mask was added.
    """
    program = tl.program_id(0)
    own_tiles_q = 1 if ONE_ROW else tiles_q
    own_tiles_k = 1 if ONE_COLUMN else tiles_k
    own_k, own_q = program % own_tiles_k, program // own_tiles_k % own_tiles_q
    plane = program // own_tiles_k // own_tiles_q
    own_h, own_b = plane % grad.num_heads, plane // grad.num_heads
    visits_k = tiles_k if ONE_COLUMN else 1
    visits_q = tiles_q if ONE_ROW else 1
    visits_h = problem.num_heads if ONE_HEAD else 1
    visits_b = batch if ONE_BATCH else 1
    ds_sum = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for n in tl.range(visits_b * visits_h * visits_q * visits_k, disable_licm=True):
        first_j = (own_k + n % visits_k) * BLOCK_N
        first_i = (own_q + n // visits_k % visits_q) * BLOCK_M
        h = own_h + n // visits_k // visits_q % visits_h
        b = own_b + n // visits_k // visits_q // visits_h
        sequence = sequence_of(b, problem.sequences, problem.window, LOWER_RIGHT)
        i, j = first_i + tl.arange(0, BLOCK_M), first_j + tl.arange(0, BLOCK_N)
        inside, seen_j = i < sequence.seqlen_q, seen_keys(None, b, h, 0, j, sequence)
        queries = head_of(problem.query, b, h, sequence.first_query)
        keys = head_of(problem.key, b, h // problem.group, sequence.first_key)
        x = problem.magnitude * _product(
            queries, first_i, inside, keys, first_j, seen_j, problem.head_dim,
            BLOCK_M, BLOCK_N, BLOCK_D, EVEN, ALIGNMENT, PRECISION,
        )  # fmt: skip
        grads = head_of(grad_out, b, h, sequence.first_query)
        values = head_of(problem.value, b, h // problem.group, sequence.first_key)
        dp = _product(
            grads, first_i, inside, values, first_j, seen_j, problem.value_head_dim,
            BLOCK_M, BLOCK_N, BLOCK_DV, EVEN, ALIGNMENT, PRECISION,
        )  # fmt: skip
        at = row_offsets(stats, b, h, sequence.first_query, i)
        shift, inverse_sum = _normaliser(stats, at, inside, True, False)
        delta = tl.load(rows.delta + row_offsets(rows, b, h, sequence.first_query, i), mask=inside, other=0.0)
        visible, value = load_mask(problem, b, h, i[:, None], j[None, :], sequence)
        x = mask_scores(x, visible, value)
        if problem.dropout is not None:
            kept = keep(problem.dropout, b * problem.num_heads + h, first_i, first_j, BLOCK_M, BLOCK_N)
            dp = tl.where(kept, dp, 0.0) * problem.dropout.scale
        p = _probabilities(x, shift[:, None], inverse_sum[:, None], problem.magnitude, True, False)
        ds_sum += tl.where(x == -INFINITY, 0.0, p * (dp - delta[:, None]))
    if ONE_ROW:
        ds_sum = tl.sum(ds_sum, 0, keep_dims=True)
    if ONE_COLUMN:
        ds_sum = tl.sum(ds_sum, 1, keep_dims=True)
    i = own_q * BLOCK_M + tl.arange(0, ds_sum.shape[0])
    j = own_k * BLOCK_N + tl.arange(0, ds_sum.shape[1])
    base = grad.pointer + (wide(own_b) * grad.batch + wide(own_h) * grad.head)
    inside = (i < grad.rows)[:, None] & (j < grad.columns)[None, :]
    pointers = base + (wide(i)[:, None] * grad.row + j[None, :])
    tl.store(pointers, ds_sum.to(grad.pointer.dtype.element_ty), mask=inside)
