"""Scaled dot-product attention, out = dropout(softmax(scale * Q K^T + mask)) V, forward and backward, in tiles.

Source: Vaswani et al. 2017, section 3.2.1, equation 1; the running softmax is Milakov and Gimelshein's (2018), the
tiles and the recomputing backward pass with its row sum D are FlashAttention's (Dao et al. 2022).

i counts the queries of a sequence and j its keys. Query i sees key j iff -left <= j - i - diagonal <= right,
j < length, and the mask lets it. A program owns a tile of one side and visits those tiles of the other that see any of
it: first the plain ones, of which every pair sees each other, then the edges, where each pair is checked. Which these
are follows from the window, or if there is a mask from lists that ``_cover`` and ``_list`` make.

What would be hoisted out of a loop (offsets, Philox's key schedule) takes registers in every loop: where they are
scarce, ``disable_licm`` has it computed again, and ``_anew`` what is used in a loop of edges, or only after the loops.

x is a score before what can be left to the exponential: Q K^T, or with a float mask magnitude * Q K^T + mask. The
scale's sign has gone into Q, so that a larger x is a larger score.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fastattn.backends.common import empty_heads
from fastattn.backends.triton import configurations
from fastattn.backends.triton.kernel import bounded, cdiv, dropout_scale, kernel, launch
from fastattn.backends.triton.philox import keep, keep_transposed

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)
INFINITY: tl.constexpr = tl.constexpr(float("inf"))


# Rows of heads


@triton.jit
def _program(tiles, heads):
    """(tile, head, sequence) of this program; late tiles first, since under a causal mask they are the longest."""
    program = tl.program_id(0)
    return tiles - 1 - program % tiles, program // tiles % heads, program // tiles // heads


@triton.jit
def _sequence(b, sequences, LOWER_RIGHT: tl.constexpr):
    """(first query, queries, first key, keys, length, diagonal) of sequence b; of its keys, ``length`` exist."""
    queries, keys, query_starts, key_starts, lengths = sequences
    first_query, first_key = b * 0, b * 0
    if query_starts is not None:
        first_query, first_key = tl.load(query_starts + b), tl.load(key_starts + b)
        queries = (tl.load(query_starts + b + 1) - first_query).to(tl.int32)
        keys = (tl.load(key_starts + b + 1) - first_key).to(tl.int32)
    length = keys
    if lengths is not None:
        length = tl.load(lengths + b).to(tl.int32)
    diagonal = length - queries if LOWER_RIGHT else 0
    return first_query, queries, first_key, keys, length, diagonal


@triton.jit
def _wide(n):
    """n, which is not negative, in 64 bits: its upper half is known then, and takes no register."""
    return n.to(tl.uint32).to(tl.int64) if n.dtype == tl.int32 else n


@triton.jit
def _head(tensor, b, h, first):
    """Where head h of sequence b has its row 0, and the stride of rows in 64 bits, as all offsets are."""
    pointer, batch, head, row = tensor
    row = tl.cast(row, tl.int64)
    return pointer + (_wide(b) * batch + _wide(h) * head + first * row), row


@triton.jit
def _statistic(rows, b, h, first, i):
    """Offsets of the statistics of queries i."""
    batch, head, row = rows
    return _wide(b) * batch + _wide(h) * head + _wide(first + i) * row


@triton.jit
def _pointers(head, first, N: tl.constexpr, D: tl.constexpr, ALIGNMENT: tl.constexpr):
    """(N, D) pointers to the rows from ``first``. Rows begin at multiples of ALIGNMENT elements: 16 bytes, or 1."""
    base, row = head
    row = row // ALIGNMENT * ALIGNMENT
    if (base.dtype.element_ty == tl.float32) | (ALIGNMENT == 1):
        # Anew for each tile: kept, they would take registers that products need.
        place = _wide(first + tl.arange(0, N))
    else:
        base += _wide(first) * row
        place = tl.arange(0, N)
    if ALIGNMENT > 1:
        base = tl.multiple_of(base, 16)
    return base + (place[:, None] * row + tl.arange(0, D)[None, :])


@triton.jit
def _load(
    head, first, rows, size,
    N: tl.constexpr, D: tl.constexpr, EXACT: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """(N, D): zero in the rows that are not in ``rows`` (None: all are) and beyond the head size (EXACT: it is D)."""
    pointers = _pointers(head, first, N, D, ALIGNMENT)
    if EXACT:
        if rows is None:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=rows[:, None], other=0.0)
    else:
        inside = (tl.arange(0, D) < size // ALIGNMENT * ALIGNMENT)[None, :]
        if rows is not None:
            inside = inside & rows[:, None]
        tile = tl.load(pointers, mask=inside, other=0.0)
    return tile


@triton.jit
def _tile(
    descriptor, b, h, head, first, rows, size,
    N: tl.constexpr, D: tl.constexpr, EXACT: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """(N, D) as ``_load`` reads it; all rows of a tile through the operand's tensor descriptor, if there is one."""
    if rows is None and descriptor is not None:
        tile = descriptor.load([b, h, first, 0]).reshape(N, D)
    else:
        tile = _load(head, first, rows, size, N, D, EXACT, ALIGNMENT)
    return tile


@triton.jit
def _load_rows(pointers, rows, other):
    """A number of each row; ``other`` of those that are not in ``rows`` (None: all are)."""
    if rows is None:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=rows, other=other)
    return values


@triton.jit
def _store(head, first, rows, size, tile, ALIGNMENT: tl.constexpr):
    pointers = _pointers(head, first, tile.shape[0], tile.shape[1], ALIGNMENT)
    inside = rows[:, None] & (tl.arange(0, tile.shape[1]) < size // ALIGNMENT * ALIGNMENT)[None, :]
    tl.store(pointers, tile.to(head[0].dtype.element_ty), mask=inside)


# Who sees whom


@triton.jit
def _plan(lists, b, h, tile, SIZE: tl.constexpr, STEP: tl.constexpr, end, diagonal, left, right):
    """Which tiles of the other side, of STEP positions up to ``end``, the program of a tile of SIZE positions visits:
    (plain tiles, edge tiles, first plain tile, edge tiles before it), or with lists (plain tiles, edge tiles, where the
    plain ones are listed, where the edges are, backwards)."""
    if lists is None:
        first = tile * SIZE
        begin = _between(0, first + diagonal - left, end) // STEP
        stop = tl.maximum(begin, tl.cdiv(_between(0, first + SIZE + diagonal + right, end), STEP))
        plain = _between(begin, tl.cdiv(tl.maximum(first + SIZE - 1 + diagonal - left, 0), STEP), stop)
        plain_stop = _between(plain, _between(0, first + diagonal + right + 1, end) // STEP, stop)
        plan = plain_stop - plain, stop - begin - (plain_stop - plain), plain, plain - begin
    else:
        pointer, batch, head, row, count = lists
        entry = pointer + (_wide(b) * batch + _wide(h) * head + _wide(tile) * row)
        plan = tl.load(entry), tl.load(entry + 1), entry + 2, entry + 1 + count
    return plan


@triton.jit
def _between(low, x, high):
    return tl.maximum(low, tl.minimum(x, high))


@triton.jit
def _visit(plan, n, lists, EDGE: tl.constexpr):
    """The n-th plain or edge tile."""
    plain_tiles, _, plain, edge = plan
    if lists is not None:
        tile = tl.load(edge - n) if EDGE else tl.load(plain + n)
    elif EDGE:
        tile = plain - edge + n + tl.where(n < edge, 0, plain_tiles)
    else:
        tile = plain + n
    return tile


@triton.jit
def _seen(seen, b, h, tile, j, queries, keys, length, diagonal, left, right):
    """The keys j that some query sees as far as the window goes, and as far as the mask; the others may hold anything,
    NaN too, and count as zero."""
    rows = (j < length) & (j >= diagonal - left) & (j < queries + diagonal + right)
    if seen is not None:
        pointer, batch, head, row = seen
        base = pointer + (_wide(b) * batch + _wide(h) * head + _wide(tile) * row)
        rows = rows & (tl.load(base + j, mask=j < keys, other=0) != 0)
    return rows


@triton.jit
def _columns(j, column):
    """Offsets of a mask's columns; without a stride they are dense, and take no registers."""
    if column is None:
        offset = _wide(j)
    else:
        offset = _wide(j) * column
    return offset


@triton.jit
def _hide(x, mask, b, h, i, j, queries, keys, length, diagonal, left, right, MASKED: tl.constexpr):
    """x of an edge tile: -inf where query i does not see key j; a float mask is added, and hides where it ends."""
    distance = j - i - diagonal
    visible = (j < length) & (distance >= -left) & (distance <= right)
    if MASKED:
        pointer, batch, head, row, column = mask
        pointers = pointer + (_wide(b) * batch + _wide(h) * head)
        pointers += _wide(i) * row + _columns(j, column)
        inside = (i < queries) & (j < keys)
        if pointer.dtype.element_ty == tl.uint8:
            visible = visible & (tl.load(pointers, mask=inside, other=0) != 0)
        else:
            value = tl.load(pointers, mask=inside, other=-INFINITY).to(tl.float32)
            visible = visible & (value != -INFINITY)
            x += value
            x = tl.where(x < LOWEST, LOWEST, x)  # a finite mask hides nothing
    return tl.where(visible, x, -INFINITY)


@triton.jit
def _anew(x, n):
    """x, with a number n from 0 up to 2**30 of which a compiler knows nothing: what follows from the result is computed
    from there on, and takes no registers before."""
    return x + (n >> 30)


@triton.jit
def _keep_order(operand):
    """Before a product of float32 whose operands would else be read beside those of the product before, which registers
    cannot hold."""
    if operand.dtype == tl.float32:
        tl.debug_barrier()


@triton.jit
def _scores(a, b, magnitude, FLOAT: tl.constexpr, PRECISION: tl.constexpr):
    x = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    return x * magnitude if FLOAT else x


@triton.jit
def _scaled(x, magnitude, FLOAT: tl.constexpr):
    """x in the units of the reference point m, of which _exponential(_scaled(x) - m) = exp(score - reference)."""
    return x if FLOAT else x * (magnitude * LOG2E)


@triton.jit
def _exponential(x, FLOAT: tl.constexpr):
    return tl.exp2(x * LOG2E) if FLOAT else tl.exp2(x)


@triton.constexpr_function
def _is_scarce(e, ev, dtype):
    """Whether such heads leave no registers for what could be hoisted out of the main loop."""
    return e + ev > 256 or dtype.primitive_bitwidth == 32


# Forward


@kernel
def _forward(
    key_descriptor, value_descriptor, query, key, value, mask, seed, sequences, lists, seen, out, lse, point, sum, rows,
    part_of_out: tl.int64, part_of_rows: tl.int64, tiles, heads,
    group, size, value_size, scale, magnitude, left, right, threshold, factor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, E: tl.constexpr, EV: tl.constexpr, EXACT: tl.constexpr,
    ALIGNMENT: tl.constexpr, LOWER_RIGHT: tl.constexpr, FLOAT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, own_h, own_b = _program(tiles, heads)
    h, b = own_h, own_b
    first_query, queries, first_key, keys, length, diagonal = _sequence(b, sequences, LOWER_RIGHT)
    first_i = tile * ROWS
    if first_i >= queries:
        return
    i = first_i + tl.arange(0, ROWS)
    keys_of_head = _head(key, b, h // group, first_key)
    values_of_head = _head(value, b, h // group, first_key)
    q = _load(_head(query, b, h, first_query), first_i, i < queries, size, ROWS, E, EXACT, ALIGNMENT)

    highest = tl.full((ROWS,), -INFINITY, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, EV), tl.float32)
    plan = _plan(lists, b, h, tile, ROWS, COLUMNS, length, diagonal, left, right)
    part, parts = tl.program_id(1), tl.num_programs(1)  # of the keys
    for EDGE in tl.static_range(2):
        begin, end = plan[EDGE] * part // parts, plan[EDGE] * (part + 1) // parts
        for n in tl.range(begin, end, disable_licm=(EDGE == 1) | _is_scarce(E, EV, q.dtype)):
            first_j = _visit(plan, n, lists, EDGE) * COLUMNS
            if lists is not None:  # which take registers
                h, b = _anew(own_h, n + group), _anew(own_b, n + group)
                keys_of_head = _head(key, b, h // group, first_key)
                values_of_head = _head(value, b, h // group, first_key)
            j = first_j + tl.arange(0, COLUMNS)
            seen_j = _seen(seen, b, h, tile, j, queries, keys, length, diagonal, left, right) if EDGE else None
            k = _tile(key_descriptor, b, h // group, keys_of_head, first_j, seen_j, size, COLUMNS, E, EXACT, ALIGNMENT)
            _keep_order(q)
            x = _scores(q, k, magnitude, FLOAT, PRECISION)
            if EDGE:
                own = _anew(first_i, n + group) + tl.arange(0, ROWS)
                x = _hide(
                    x, mask, b, h, own[:, None], j[None, :],
                    queries, keys, length, diagonal, left, right, lists is not None,
                )  # fmt: skip
            raised = tl.maximum(highest, _scaled(tl.max(x, 1), magnitude, FLOAT))
            m = tl.where(raised == -INFINITY, 0.0, raised)  # a row that has seen nothing so far
            p = _exponential(_scaled(x, magnitude, FLOAT) - m[:, None], FLOAT)
            shrink = _exponential(highest - m, FLOAT)
            highest = raised
            total = total * shrink + tl.sum(p, 1)
            if seed is not None:
                p = tl.where(keep(seed, b * heads + h, first_i, first_j, threshold, ROWS, COLUMNS), p, 0.0)
            v = _tile(
                value_descriptor, b, h // group, values_of_head, first_j, seen_j, value_size,
                COLUMNS, EV, EXACT, ALIGNMENT,
            )  # fmt: skip
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)

    acc *= tl.where(total == 0, 0.0, factor / total)[:, None]
    first_i = _anew(first_i, group)
    i = first_i + tl.arange(0, ROWS)
    base, row = _head(out, own_b, own_h, first_query)
    base += part * part_of_out
    _store((base, row), first_i, i < queries, value_size, acc, ALIGNMENT)
    m = tl.where(highest == -INFINITY, 0.0, highest)
    reference = m if FLOAT else m * LN2
    total *= _exponential(m - (reference if FLOAT else reference * LOG2E), FLOAT)  # where rounding moved the reference
    at = _statistic(rows, own_b, own_h, first_query, i) + part * part_of_rows
    tl.store(point + at, reference, mask=i < queries)
    tl.store(sum + at, total, mask=i < queries)
    if lse is not None:
        tl.store(lse + at, reference + tl.log(total), mask=i < queries)


@kernel
def _merge(
    part_out, part_point, part_sum, part_of_out: tl.int64, part_of_rows: tl.int64, parts,
    sequences, out, lse, point, sum, rows, tiles, heads, value_size,
    ROWS: tl.constexpr, EV: tl.constexpr, EXACT: tl.constexpr, ALIGNMENT: tl.constexpr, LOWER_RIGHT: tl.constexpr,
):  # fmt: skip
    """Attention to all keys from attention to each part of them: weights exp(its reference - the largest) * its sum."""
    tile, h, b = _program(tiles, heads)
    first_query, queries, _, _, _, _ = _sequence(b, sequences, LOWER_RIGHT)
    first_i = tile * ROWS
    if first_i >= queries:
        return
    i = first_i + tl.arange(0, ROWS)
    at = _statistic(rows, b, h, first_query, i)
    highest = tl.full((ROWS,), -INFINITY, tl.float32)
    for part in range(parts):
        m = tl.load(part_point + at + part * part_of_rows, mask=i < queries, other=0.0)
        total = tl.load(part_sum + at + part * part_of_rows, mask=i < queries, other=0.0)
        highest = tl.maximum(highest, tl.where(total == 0, -INFINITY, m))
    reference = tl.where(highest == -INFINITY, 0.0, highest)
    whole = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, EV), tl.float32)
    base, row = _head(part_out, b, h, first_query)
    for part in range(parts):
        m = tl.load(part_point + at + part * part_of_rows, mask=i < queries, other=0.0)
        total = tl.load(part_sum + at + part * part_of_rows, mask=i < queries, other=0.0)
        weight = tl.where(total == 0, 0.0, tl.exp2((m - reference) * LOG2E) * total)
        head = base + part * part_of_out, row
        acc += weight[:, None] * _load(head, first_i, i < queries, value_size, ROWS, EV, EXACT, ALIGNMENT)
        whole += weight
    acc *= tl.where(whole == 0, 0.0, 1 / whole)[:, None]
    _store(_head(out, b, h, first_query), first_i, i < queries, value_size, acc, ALIGNMENT)
    tl.store(point + at, reference, mask=i < queries)
    tl.store(sum + at, whole, mask=i < queries)
    tl.store(lse + at, reference + tl.log(whole), mask=i < queries)


# Backward: P again from the statistics; with D = rowsum(dO * O) - dLSE, dS = P * (dP - D)


@triton.jit
def _normaliser(point, sum, at, rows, FLOAT: tl.constexpr, FOLD: tl.constexpr):
    """(m, r) of which ``_probabilities`` makes P. FOLD puts the sum into m, which costs nothing later and is as exact
    as 16-bit operands deserve; under a float mask the reference point may be too large for that."""
    m = tl.load(point + at, mask=rows, other=0.0)
    total = tl.load(sum + at, mask=rows, other=0.0)
    r = tl.where(total == 0, 0.0, 1 / total)
    if FOLD:
        m = tl.where(total == 0, INFINITY, m * LOG2E + tl.log2(total))
    elif not FLOAT:
        m *= LOG2E
    return m, r


@triton.jit
def _probabilities(x, m, r, magnitude, FLOAT: tl.constexpr, FOLD: tl.constexpr):
    p = _exponential(_scaled(x, magnitude, FLOAT) - m, FLOAT)
    return p if FOLD else p * r


@kernel
def _grad_query(
    key_descriptor, value_descriptor, query, key, value, mask, seed, sequences, lists, seen,
    out, grad_out, grad_lse, grad_query,
    point, sum, shift, rate, delta, rows,
    tiles, heads, group, size, value_size, scale, magnitude, left, right, threshold, factor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, E: tl.constexpr, EV: tl.constexpr, EXACT: tl.constexpr,
    ALIGNMENT: tl.constexpr, LOWER_RIGHT: tl.constexpr, FLOAT: tl.constexpr, FOLD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tile, own_h, own_b = _program(tiles, heads)
    h, b = own_h, own_b
    first_query, queries, first_key, keys, length, diagonal = _sequence(b, sequences, LOWER_RIGHT)
    first_i = tile * ROWS
    if first_i >= queries:
        return
    i = first_i + tl.arange(0, ROWS)
    keys_of_head = _head(key, b, h // group, first_key)
    values_of_head = _head(value, b, h // group, first_key)
    q = _load(_head(query, b, h, first_query), first_i, i < queries, size, ROWS, E, EXACT, ALIGNMENT)
    o = _load(_head(out, b, h, first_query), first_i, i < queries, value_size, ROWS, EV, EXACT, ALIGNMENT)
    do = _load(_head(grad_out, b, h, first_query), first_i, i < queries, value_size, ROWS, EV, EXACT, ALIGNMENT)

    at = _statistic(rows, b, h, first_query, i)
    m, r = _normaliser(point, sum, at, i < queries, FLOAT, FOLD)
    d = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    if grad_lse is not None:
        pointer, batch, head, row = grad_lse
        d -= tl.load(pointer + _statistic((batch, head, row), b, h, first_query, i), mask=i < queries, other=0.0)
    d = tl.where(r == 0, 0.0, d)  # a row that sees nothing
    tl.store(delta + at, d, mask=i < queries)
    tl.store(shift + at, m, mask=i < queries)
    tl.store(rate + at, r, mask=i < queries)

    dq = tl.zeros((ROWS, E), tl.float32)
    plan = _plan(lists, b, h, tile, ROWS, COLUMNS, length, diagonal, left, right)
    for EDGE in tl.static_range(2):
        for n in tl.range(plan[EDGE], disable_licm=(EDGE == 1) | _is_scarce(E, EV, q.dtype)):
            first_j = _visit(plan, n, lists, EDGE) * COLUMNS
            if lists is not None:  # which take registers
                h, b = _anew(own_h, n + group), _anew(own_b, n + group)
                keys_of_head = _head(key, b, h // group, first_key)
                values_of_head = _head(value, b, h // group, first_key)
            j = first_j + tl.arange(0, COLUMNS)
            seen_j = _seen(seen, b, h, tile, j, queries, keys, length, diagonal, left, right) if EDGE else None
            k = _tile(key_descriptor, b, h // group, keys_of_head, first_j, seen_j, size, COLUMNS, E, EXACT, ALIGNMENT)
            v = _tile(
                value_descriptor, b, h // group, values_of_head, first_j, seen_j, value_size,
                COLUMNS, EV, EXACT, ALIGNMENT,
            )  # fmt: skip
            _keep_order(q)
            x = _scores(q, k, magnitude, FLOAT, PRECISION)
            if EDGE:
                own = _anew(first_i, n + group) + tl.arange(0, ROWS)
                x = _hide(
                    x, mask, b, h, own[:, None], j[None, :],
                    queries, keys, length, diagonal, left, right, lists is not None,
                )  # fmt: skip
            p = _probabilities(x, m[:, None], r[:, None], magnitude, FLOAT, FOLD)
            _keep_order(q)
            dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            if seed is not None:
                dp = tl.where(keep(seed, b * heads + h, first_i, first_j, threshold, ROWS, COLUMNS), dp, 0.0) * factor
            ds = p * (dp - d[:, None])
            if EDGE:
                ds = tl.where(x == -INFINITY, 0.0, ds)
            _keep_order(q)
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    first_i = _anew(first_i, group)
    i = first_i + tl.arange(0, ROWS)
    _store(_head(grad_query, own_b, own_h, first_query), first_i, i < queries, size, dq * scale, ALIGNMENT)


@kernel
def _grad_key_value(
    query_descriptor, grad_descriptor, query, key, value, mask, seed, sequences, lists, grad_out, grad_key, grad_value,
    shift, rate, delta, rows,
    tiles, key_heads, group, size, value_size, scale, magnitude, left, right, threshold, factor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, E: tl.constexpr, EV: tl.constexpr, EXACT: tl.constexpr,
    ALIGNMENT: tl.constexpr, LOWER_RIGHT: tl.constexpr, FLOAT: tl.constexpr, FOLD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tile, key_head, own_b = _program(tiles, key_heads)
    b = own_b
    first_query, queries, first_key, keys, length, diagonal = _sequence(b, sequences, LOWER_RIGHT)
    first_j = tile * COLUMNS
    if first_j >= keys:
        return
    j = first_j + tl.arange(0, COLUMNS)
    seen_j = _seen(None, b, key_head, 0, j, queries, keys, length, diagonal, left, right)
    k = _load(_head(key, b, key_head, first_key), first_j, seen_j, size, COLUMNS, E, EXACT, ALIGNMENT)
    v = _load(_head(value, b, key_head, first_key), first_j, seen_j, value_size, COLUMNS, EV, EXACT, ALIGNMENT)

    dk = tl.zeros((COLUMNS, E), tl.float32)
    dv = tl.zeros((COLUMNS, EV), tl.float32)
    visited = tl.where(first_j < length, queries, 0)
    for EDGE in tl.static_range(2):
        for n_head in tl.range(group, disable_licm=True):
            own_h = (_wide(key_head) * group + n_head).to(tl.int32)
            h = own_h
            plan = _plan(lists, own_b, own_h, tile, COLUMNS, ROWS, visited, -diagonal, right, left)
            for n in tl.range(plan[EDGE], disable_licm=True):
                first_i = _visit(plan, n, lists, EDGE) * ROWS
                if lists is not None:  # which take registers
                    h, b = _anew(own_h, n + group), _anew(own_b, n + group)
                queries_of_head = _head(query, b, h, first_query)
                grads_of_head = _head(grad_out, b, h, first_query)
                i = first_i + tl.arange(0, ROWS)
                real_i = i < queries if EDGE else None
                q = _tile(query_descriptor, b, h, queries_of_head, first_i, real_i, size, ROWS, E, EXACT, ALIGNMENT)
                do = _tile(
                    grad_descriptor, b, h, grads_of_head, first_i, real_i, value_size, ROWS, EV, EXACT, ALIGNMENT
                )
                at = _statistic(rows, b, h, first_query, i)
                m = _load_rows(shift + at, real_i, INFINITY)
                r = _load_rows(rate + at, real_i, 0.0)
                d = _load_rows(delta + at, real_i, 0.0)
                x = _scores(k, q, magnitude, FLOAT, PRECISION)
                if EDGE:
                    own = _anew(first_j, n + group) + tl.arange(0, COLUMNS)
                    x = _hide(
                        x, mask, b, h, i[None, :], own[:, None],
                        queries, keys, length, diagonal, left, right, lists is not None,
                    )  # fmt: skip
                if (E + EV > 256) & (q.dtype != tl.float32):
                    tl.debug_barrier()  # or what the next product reads is in registers beside what this one did
                p = _probabilities(x, m[None, :], r[None, :], magnitude, FLOAT, FOLD)
                dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
                dropped = p
                if seed is not None:
                    kept = keep_transposed(seed, b * key_heads * group + h, first_i, first_j, threshold, ROWS, COLUMNS)
                    dropped = tl.where(kept, p, 0.0)
                    dp = tl.where(kept, dp, 0.0) * factor
                elif EDGE & (E + EV > 256) & (q.dtype == tl.float32):
                    # What P is, but made here: P would be in shared memory from where it is made, and beside the
                    # operands there is no room for that on some devices.
                    dropped = tl.where(x == -INFINITY, 0.0, p)
                dv = tl.dot(dropped.to(do.dtype), do, dv, input_precision=PRECISION)
                ds = p * (dp - d[None, :])
                if EDGE:
                    ds = tl.where(x == -INFINITY, 0.0, ds)
                _keep_order(q)
                dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    first_j = _anew(first_j, group)
    j = first_j + tl.arange(0, COLUMNS)
    dk = tl.where((j < length)[:, None], dk * magnitude, 0.0)
    dv = tl.where((j < length)[:, None], dv * factor, 0.0)
    _store(_head(grad_key, own_b, key_head, first_key), first_j, j < keys, size, dk, ALIGNMENT)
    _store(_head(grad_value, own_b, key_head, first_key), first_j, j < keys, value_size, dv, ALIGNMENT)


@triton.constexpr_function
def _part(size, dtype):
    return min(size, 1024 // dtype.primitive_bitwidth)


@triton.jit
def _product(
    a, first_a, rows_a, b, first_b, rows_b, size,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, EXACT: tl.constexpr, ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A B^T of rows of heads, from 128 bytes of them at a time: whole rows would take registers that x and dP need."""
    product = tl.zeros((M, N), tl.float32)
    PART: tl.constexpr = _part(D, a[0].dtype.element_ty)
    for start in tl.range(0, D, PART, disable_licm=True):
        part_a = _load((a[0] + start, a[1]), first_a, rows_a, size - start, M, PART, EXACT, ALIGNMENT)
        part_b = _load((b[0] + start, b[1]), first_b, rows_b, size - start, N, PART, EXACT, ALIGNMENT)
        product = tl.dot(part_a, tl.trans(part_b), product, input_precision=PRECISION)
    return product


@kernel
def _grad_mask(
    query, key, value, mask, seed, sequences, grad_out, grad, point, sum, delta, rows,
    tiles, column_tiles, mask_heads, batch,
    heads, group, size, value_size, scale, magnitude, left, right, threshold, factor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, E: tl.constexpr, EV: tl.constexpr, EXACT: tl.constexpr,
    ALIGNMENT: tl.constexpr, LOWER_RIGHT: tl.constexpr, PRECISION: tl.constexpr,
    ONE_ROW: tl.constexpr, ONE_COLUMN: tl.constexpr, ONE_HEAD: tl.constexpr, ONE_BATCH: tl.constexpr,
):  # fmt: skip
    """dS summed over what the mask broadcasts: a program owns a tile of the mask, visits all that it was added to."""
    program = tl.program_id(0)
    i_tiles = 1 if ONE_ROW else tiles
    j_tiles = 1 if ONE_COLUMN else column_tiles
    own_j, own_i = program % j_tiles, program // j_tiles % i_tiles
    own_h, own_b = program // j_tiles // i_tiles % mask_heads, program // j_tiles // i_tiles // mask_heads
    visits_j = column_tiles if ONE_COLUMN else 1
    visits_i = tiles if ONE_ROW else 1
    visits_h = heads if ONE_HEAD else 1
    visits_b = batch if ONE_BATCH else 1
    ds_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    for n in tl.range(visits_b * visits_h * visits_i * visits_j, disable_licm=True):
        first_j = (own_j + n % visits_j) * COLUMNS
        first_i = (own_i + n // visits_j % visits_i) * ROWS
        h = own_h + n // visits_j // visits_i % visits_h
        b = own_b + n // visits_j // visits_i // visits_h
        first_query, queries, first_key, keys, length, diagonal = _sequence(b, sequences, LOWER_RIGHT)
        i, j = first_i + tl.arange(0, ROWS), first_j + tl.arange(0, COLUMNS)
        seen_j = _seen(None, b, h, 0, j, queries, keys, length, diagonal, left, right)
        q, k = _head(query, b, h, first_query), _head(key, b, h // group, first_key)
        x = magnitude * _product(
            q, first_i, i < queries, k, first_j, seen_j, size, ROWS, COLUMNS, E, EXACT, ALIGNMENT, PRECISION
        )
        do, v = _head(grad_out, b, h, first_query), _head(value, b, h // group, first_key)
        dp = _product(
            do, first_i, i < queries, v, first_j, seen_j, value_size, ROWS, COLUMNS, EV, EXACT, ALIGNMENT, PRECISION
        )
        at = _statistic(rows, b, h, first_query, i)
        m, r = _normaliser(point, sum, at, i < queries, True, False)
        d = tl.load(delta + at, mask=i < queries, other=0.0)
        x = _hide(x, mask, b, h, i[:, None], j[None, :], queries, keys, length, diagonal, left, right, True)
        if seed is not None:
            dp = tl.where(keep(seed, b * heads + h, first_i, first_j, threshold, ROWS, COLUMNS), dp, 0.0) * factor
        ds = _probabilities(x, m[:, None], r[:, None], magnitude, True, False) * (dp - d[:, None])
        ds_sum += tl.where(x == -INFINITY, 0.0, ds)
    if ONE_ROW:
        ds_sum = tl.sum(ds_sum, 0, keep_dims=True)
    if ONE_COLUMN:
        ds_sum = tl.sum(ds_sum, 1, keep_dims=True)
    i = own_i * ROWS + tl.arange(0, ds_sum.shape[0])
    j = own_j * COLUMNS + tl.arange(0, ds_sum.shape[1])
    pointer, batch_stride, head_stride, row_stride, mask_rows, mask_columns = grad
    base = pointer + (_wide(own_b) * batch_stride + _wide(own_h) * head_stride)
    inside = (i < mask_rows)[:, None] & (j < mask_columns)[None, :]
    tl.store(base + (_wide(i)[:, None] * row_stride + j[None, :]), ds_sum.to(pointer.dtype.element_ty), mask=inside)


# Which tiles a mask leaves

SOME: tl.constexpr = tl.constexpr(1)
ALL: tl.constexpr = tl.constexpr(2)


@kernel
def _cover(
    mask, cover, seen, row_tiles, column_tiles, mask_heads, mask_rows, mask_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Reads the mask once: ``cover`` of each tile is ALL if all of it is seen and nothing added, SOME if some is seen,
    else 0; ``seen`` tells which keys of it a query sees."""
    program = tl.program_id(0)
    tile_j, tile_i = program % column_tiles, program // column_tiles % row_tiles
    plane = program // column_tiles // row_tiles
    h, b = plane % mask_heads, plane // mask_heads
    i, j = tile_i * ROWS + tl.arange(0, ROWS), tile_j * COLUMNS + tl.arange(0, COLUMNS)
    pointer, batch, head, row, column = mask
    base = pointer + (_wide(b) * batch + _wide(h) * head)
    inside = (i < mask_rows)[:, None] & (j < mask_columns)[None, :]
    value = tl.load(base + (_wide(i)[:, None] * row + _columns(j, column)[None, :]), mask=inside, other=0)
    if value.dtype == tl.uint8:
        visible = (value != 0) & inside
        plain = visible
    else:
        visible = (value.to(tl.float32) != -INFINITY) & inside
        plain = (value.to(tl.float32) == 0) & inside
    seen_j = tl.max(visible.to(tl.int32), 0)
    something = tl.max(seen_j, 0)
    everything = tl.min((plain | ~inside).to(tl.int32))
    tl.store(cover + program, tl.where(everything == 1, ALL, something * SOME).to(tl.int8))
    seen_row = seen + _wide(plane * row_tiles + tile_i) * mask_columns
    tl.store(seen_row + j, seen_j.to(tl.uint8), mask=j < mask_columns)


@kernel
def _list(
    cover, lists, sequences, list_heads, own_tiles, count, left, right,
    OWN: tl.constexpr, STEP: tl.constexpr, LOWER_RIGHT: tl.constexpr, KEYS_OWN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """For each tile of one side, of OWN positions, which of the other side's, of STEP, its program visits: the number
    of plain and of edge tiles, the plain ones, and from the end backwards the edges. KEYS_OWN: it is a tile of keys."""
    program = tl.program_id(0)
    own, h, b = program % own_tiles, program // own_tiles % list_heads, program // own_tiles // list_heads
    _, queries, _, _, length, diagonal = _sequence(b, sequences, LOWER_RIGHT)
    cover_pointer, cover_batch, cover_head, cover_own, cover_other = cover
    classes = cover_pointer + (_wide(b) * cover_batch + _wide(h) * cover_head + _wide(own) * cover_own)
    entry = lists + _wide(program) * (count + 2)
    plain_tiles, edge_tiles = program * 0, program * 0
    ROWS: tl.constexpr = STEP if KEYS_OWN else OWN
    COLUMNS: tl.constexpr = OWN if KEYS_OWN else STEP
    for chunk in range(tl.cdiv(count, CHUNK)):
        other = chunk * CHUNK + tl.arange(0, CHUNK)
        kind = tl.load(classes + _wide(other) * cover_other, mask=other < count, other=0)
        first_i, first_j = (other * STEP, own * OWN) if KEYS_OWN else (own * OWN, other * STEP)
        nearest = first_j - (first_i + ROWS - 1) - diagonal
        farthest = first_j + COLUMNS - 1 - first_i - diagonal
        some = (kind >= SOME) & (first_j < length) & (farthest >= -left) & (nearest <= right)
        whole = (kind == ALL) & (first_j + COLUMNS <= length) & (nearest >= -left) & (farthest <= right)
        if KEYS_OWN:  # a tile of queries is read without a check where it is plain
            whole = whole & (first_i + ROWS <= queries)
        plain, edge = (some & whole).to(tl.int32), (some & ~whole).to(tl.int32)
        tl.store(entry + 2 + plain_tiles + tl.cumsum(plain, 0) - 1, other, mask=plain != 0)
        tl.store(entry + 2 + count - edge_tiles - tl.cumsum(edge, 0), other, mask=edge != 0)
        plain_tiles += tl.sum(plain, 0)
        edge_tiles += tl.sum(edge, 0)
    tl.store(entry, plain_tiles)
    tl.store(entry + 1, edge_tiles)


# From tensors to launches


def _stride(tensor: Tensor, dim: int) -> int:
    """The stride, 0 where the dimension has size 1: it may be one that broadcasts."""
    return tensor.stride(dim) if tensor.size(dim) > 1 else 0


def _readable(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _heads(tensor: Tensor) -> tuple[Any, ...]:
    """(tensor, batch stride, head stride, row stride) of (B, H, L, E), or of packed (T, H, E)."""
    *strides, _ = tensor.stride()
    return (tensor, *strides) if len(strides) == 3 else (tensor, 0, strides[1], strides[0])


def _rows(statistic: Tensor) -> tuple[int, ...]:
    """(batch, head, row) strides of (B, H, L) or packed (T, H) statistics."""
    return statistic.stride() if statistic.dim() == 3 else (0, statistic.stride(1), statistic.stride(0))


def _empty(like: Tensor, size: int) -> Tensor:
    """(B, H, L, size) in the layout of ``like``, or packed, (T, H, size)."""
    return empty_heads(like, like.size(2), size) if like.dim() == 4 else like.new_empty((*like.shape[:2], size))


def _padded(size: int) -> int:
    """The columns of a tile that has a head of this size."""
    return max(16, 1 << (size - 1).bit_length())


class _Problem:
    """What the launches of a call share: every kernel's arguments begin with ``operands``, after the ``descriptors`` of
    what it visits if it has any, and end with ``numbers``.

    Packed operands have ``starts``, the offsets of their sequences, of which ``longest`` are the longest lengths.
    """

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, lengths: Tensor | None,
        seed: Tensor | None, scale: float, left: int, right: int, lower_right: bool, threshold: int,
        starts: tuple[Tensor | None, Tensor | None] = (None, None), longest: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        self.given = query, key, value
        queries, keys = (query.size(2), key.size(2)) if longest is None else longest
        self.queries, self.keys, self.lengths = queries, keys, lengths
        self.lower_right, self.dtype, self.device = lower_right, query.dtype, query.device
        self.size, self.value_size = query.size(-1), value.size(-1)
        self.heads, self.key_heads = query.size(1), key.size(1)
        self.batch = query.size(0) if starts[0] is None else starts[0].size(0) - 1
        self.left, self.right = bounded(left, right, lower_right, queries, keys)
        self.attn_mask = attn_mask
        self.mask: tuple[Any, ...] | None = None
        if attn_mask is not None:
            mask = attn_mask.view(torch.uint8) if attn_mask.dtype == torch.bool else attn_mask
            *strides, column = (_stride(mask, dim) for dim in range(4))
            self.mask = mask, *strides, None if column == 1 else column
        # The largest scales are no number beside log2(e); what adds a float mask does without.
        is_huge = abs(scale) > torch.finfo(torch.float32).max / 1.5
        self.is_float = is_huge or (attn_mask is not None and attn_mask.dtype != torch.bool)
        if scale <= 0:
            query = query * (-1 if scale < 0 else 0)
        tensors = _heads(_readable(query)), _heads(_readable(key)), _heads(_readable(value))
        self.sequences = queries, keys, *starts, lengths
        self.operands = *tensors, self.mask, seed if threshold else None, self.sequences
        self.is_aligned = self._are_aligned(*tensors) and not (self.size | self.value_size) * self.dtype.itemsize % 16
        self.numbers = (
            self.heads // max(self.key_heads, 1), self.size, self.value_size, float(scale), abs(float(scale)) or 1.0,
            self.left, self.right, threshold, dropout_scale(threshold),
        )  # fmt: skip

    def _are_aligned(self, *operands: tuple[Any, ...]) -> bool:
        """Whether every row begins at a multiple of 16 bytes."""
        bits, size = 0, self.dtype.itemsize
        for tensor, batch, head, row in operands:
            bits |= (batch | head | row) * size | tensor.data_ptr()
        return bits % 16 == 0

    def tiles(self, kernel: str) -> configurations.Tiles:
        size = max(self.size, self.value_size)
        is_regular = self.sequences[2] is None and self.size == self.value_size and size & (size - 1) == 0
        kind = "masked" if self.mask is not None else "regular" if is_regular else "irregular"
        return configurations.attention(kernel, self.dtype, size, kind, self.is_aligned, self.device)

    def constants(self, tiles: configurations.Tiles, *others: tuple[Any, ...]) -> dict[str, Any]:
        """A kernel's constexprs and options; ``others`` are what it reads and writes beside the operands."""
        e, ev = _padded(self.size), _padded(self.value_size)
        is_aligned = self.is_aligned and self._are_aligned(*others)
        is_tf32 = (
            self.dtype == torch.float32
            and torch.backends.cuda.matmul.fp32_precision == "tf32"
            and max(e, ev) <= configurations.largest_tf32_head(self.mask is not None, self.device)
        )
        return {
            "ROWS": tiles.rows, "COLUMNS": tiles.columns, "E": e, "EV": ev,
            "EXACT": e == self.size and ev == self.value_size,
            "ALIGNMENT": 16 // self.dtype.itemsize if is_aligned else 1, "LOWER_RIGHT": self.lower_right,
            "PRECISION": "tf32" if is_tf32 else "ieee", "num_warps": tiles.warps, "num_stages": tiles.stages,
            "maxnreg": tiles.registers,
            **({"ptx_options": "--register-usage-level=0"} if tiles.is_frugal else {}),
        }  # fmt: skip

    def lists(self, tiles: configurations.Tiles, keys_own: bool) -> tuple[Any, Any]:
        """What ``_plan`` and ``_seen`` look up under a mask, in which dimensions that it broadcasts have size 1."""
        if self.mask is None:
            return None, None
        mask, *strides = self.mask
        batch, heads, rows = (
            size if stride else min(size, 1) for size, stride in zip(mask.shape[:3], strides[:3], strict=True)
        )
        row_tiles, key_tiles = cdiv(rows, tiles.rows), cdiv(self.keys, tiles.columns)
        cover = mask.new_empty((batch, heads, row_tiles, key_tiles), dtype=torch.int8)
        seen = mask.new_empty((batch, heads, row_tiles, self.keys), dtype=torch.uint8)
        launch(
            _cover, (cover.numel(),), self.device, self.mask, cover, seen, row_tiles, key_tiles, heads, rows, self.keys,
            ROWS=tiles.rows, COLUMNS=tiles.columns,
        )  # fmt: skip
        cover_strides = [_stride(cover, dim) for dim in range(4)]
        own_tiles, count = cdiv(self.queries, tiles.rows), key_tiles
        own, step = tiles.rows, tiles.columns
        if keys_own:
            own_tiles, count, own, step = count, own_tiles, step, own
            cover_strides[2:] = cover_strides[:1:-1]
        batch = batch if self.lengths is None else self.batch
        lists = mask.new_empty((batch, heads, own_tiles, 2 + count), dtype=torch.int32)
        launch(
            _list, (batch * heads * own_tiles,), self.device, (cover, *cover_strides), lists, self.sequences, heads,
            own_tiles, count, self.left, self.right,
            OWN=own, STEP=step, LOWER_RIGHT=self.lower_right, KEYS_OWN=keys_own, CHUNK=128,
        )  # fmt: skip
        return (
            (lists, _stride(lists, 0), _stride(lists, 1), lists.stride(2), count),
            (seen, *(_stride(seen, dim) for dim in range(3))),
        )

    def descriptors(self, operands: tuple[Any, ...], rows: int, block: int) -> tuple[Any, ...]:
        """Through what tiles of ``block`` rows of these operands are read, which have this many rows a sequence: tensor
        descriptors where they pay and can be, else None, for which pointers serve."""
        if not (
            configurations.has_descriptors(rows, self.device)
            and (self.mask is None or max(self.size, self.value_size) <= 128)  # beyond, masks leave no registers
            and self.is_aligned and self.dtype.itemsize == 2 and self.sequences[2] is None
            and all(tensor.numel() > 0 and all(stride > 0 for stride in strides) for tensor, *strides in operands)
        ):  # fmt: skip
            return (None,) * len(operands)
        return tuple(
            TensorDescriptor(tensor, tensor.shape, tensor.stride(), [1, 1, block, _padded(tensor.size(-1))])
            for tensor, *_ in operands
        )

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """The output in query's layout, LSE and statistics."""
        query, _, value = self.given
        out, shape = _empty(query, value.size(-1)), tuple(query.shape[:-1])
        stats = query.new_empty((2, *shape), dtype=torch.float32)
        lse = query.new_empty(shape, dtype=torch.float32)
        point, total = stats.unbind()
        tiles = self.tiles("forward" if self.queries > 16 else "forward_few")
        row_tiles, key_tiles = cdiv(self.queries, tiles.rows), cdiv(self.keys, tiles.columns)
        programs = row_tiles * self.heads * self.batch
        parts = configurations.parts(programs, key_tiles, self.device)
        out_heads, rows = _heads(out), _rows(lse)
        constants = self.constants(tiles, out_heads)
        common = *self.operands, *self.lists(tiles, keys_own=False)
        if parts == 1:
            described = self.descriptors(self.operands[1:3], self.keys, tiles.columns)
            launch(
                _forward, (programs, 1), self.device, *described, *common, out_heads, lse, point, total, rows, 0, 0,
                row_tiles, self.heads, *self.numbers, FLOAT=self.is_float, **constants,
            )  # fmt: skip
            return out, lse, stats
        part_out = out.new_empty((parts, *out.shape), dtype=torch.float32)
        part_stats = stats.new_empty((2, parts, *shape))
        part_heads = part_out, *_heads(part_out[0])[1:]
        strides = part_out.stride(0), part_stats.stride(1)
        launch(
            _forward, (programs, parts), self.device, None, None, *common, part_heads, None, *part_stats, rows,
            *strides, row_tiles, self.heads, *self.numbers, FLOAT=self.is_float, **constants,
        )  # fmt: skip
        row_tiles = cdiv(self.queries, 16)
        launch(
            _merge, (row_tiles * self.heads * self.batch,), self.device, part_heads, *part_stats, *strides, parts,
            self.sequences, out_heads, lse, point, total, rows, row_tiles, self.heads, self.value_size, ROWS=16,
            **{name: constants[name] for name in ("EV", "EXACT", "ALIGNMENT", "LOWER_RIGHT")},
        )  # fmt: skip
        return out, lse, stats

    def backward(
        self, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, stats: Tensor, mask_grad: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The gradients of query, key, value and, where it is wanted, the mask."""
        grads = [_empty(tensor, tensor.size(-1)) for tensor in self.given]
        out_heads, grad_heads = _heads(_readable(out)), _heads(_readable(grad_out))
        if self.is_aligned and not self._are_aligned(grad_heads):
            grad_heads = _heads(grad_out.clone(memory_format=torch.contiguous_format))
        query_heads, key_heads, value_heads = map(_heads, grads)
        point, total = stats.unbind()
        shift, rate, delta = torch.empty((3, *point.shape), dtype=stats.dtype, device=self.device).unbind()
        rows = _rows(delta)
        modes = {"FLOAT": self.is_float, "FOLD": not self.is_float and self.dtype != torch.float32}

        tiles = self.tiles("grad_query")
        row_tiles = cdiv(self.queries, tiles.rows)
        described = self.descriptors(self.operands[1:3], self.keys, tiles.columns)
        launch(
            _grad_query, (row_tiles * self.heads * self.batch,), self.device, *described, *self.operands,
            *self.lists(tiles, keys_own=False), out_heads, grad_heads,
            None if grad_lse is None else (grad_lse, *_rows(grad_lse)), query_heads, point, total, shift, rate,
            delta, rows, row_tiles, self.heads, *self.numbers, **modes,
            **self.constants(tiles, out_heads, grad_heads, query_heads),
        )  # fmt: skip

        tiles = self.tiles("grad_key_value")
        key_tiles = cdiv(self.keys, tiles.columns)
        lists, _ = self.lists(tiles, keys_own=True)
        described = self.descriptors((self.operands[0], grad_heads), self.queries, tiles.rows)
        launch(
            _grad_key_value, (key_tiles * self.key_heads * self.batch,), self.device, *described, *self.operands, lists,
            grad_heads, key_heads, value_heads, shift, rate, delta, rows, key_tiles, self.key_heads, *self.numbers,
            **modes, **self.constants(tiles, grad_heads, key_heads, value_heads),
        )  # fmt: skip

        if self.attn_mask is None or not mask_grad:
            return grads[0], grads[1], grads[2], None
        grad_mask = self.attn_mask.new_empty(self.attn_mask.shape)
        tiles = self.tiles("grad_mask")
        batch, heads, mask_rows, mask_columns = grad_mask.shape
        programs = batch * heads * cdiv(mask_rows, tiles.rows) * cdiv(mask_columns, tiles.columns)
        launch(
            _grad_mask, (programs,), self.device, *self.operands, grad_heads,
            (*_heads(grad_mask), mask_rows, mask_columns), point, total, delta, rows, cdiv(self.queries, tiles.rows),
            cdiv(self.keys, tiles.columns), heads, self.batch, self.heads, *self.numbers,
            ONE_ROW=mask_rows == 1, ONE_COLUMN=mask_columns == 1, ONE_HEAD=heads == 1, ONE_BATCH=batch == 1,
            **self.constants(tiles, grad_heads),
        )  # fmt: skip
        return grads[0], grads[1], grads[2], grad_mask


def _packed(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, seqused_k: Tensor | None,
    seed: Tensor | None, max_q: int, max_k: int, *settings: Any,
) -> _Problem:  # fmt: skip
    scale, left, right, threshold = settings
    return _Problem(
        query, key, value, None, seqused_k, seed, scale, left, right, True, threshold, (cu_seq_q, cu_seq_k),
        (max_q, max_k),
    )  # fmt: skip


# The backend's functions (docs/design.md lists their arguments).


def attention(query: Tensor, key: Tensor, value: Tensor, *settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _Problem(query, key, value, *settings).forward()


def attention_backward(
    grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, stats: Tensor, query: Tensor, key: Tensor, value: Tensor,
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    *shared, mask_grad = settings
    problem = _Problem(query, key, value, *shared)
    *grads, grad_mask = problem.backward(grad_out, grad_lse, out, stats, mask_grad)
    return *grads, query.new_empty(0) if grad_mask is None else grad_mask  # type: ignore[return-value]


def varlen_attention(query: Tensor, key: Tensor, value: Tensor, *settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _packed(query, key, value, *settings).forward()


def varlen_attention_backward(
    grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, stats: Tensor, query: Tensor, key: Tensor, value: Tensor,
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _packed(query, key, value, *settings).backward(grad_out, grad_lse, out, stats, False)[:3]
