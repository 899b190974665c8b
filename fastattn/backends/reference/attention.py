"""Scaled dot-product attention: out = dropout(softmax(scale * Q K^T + mask)) V, a whole (Lq, Lk) matrix at once.

Source: Vaswani et al. 2017, section 3.2.1, equation 1. Shapes: query (B, Hq, Lq, E), key (B, Hk, Lk, E),
value (B, Hk, Lk, Ev), Hk dividing Hq.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from fastattn._torch_private import flash_attention, flash_attention_backward
from fastattn.backends.common import device_of, is_recorded, is_torchs, memory_order, stat_dtype, without_autocast
from fastattn.backends.reference.dropout import dropper, opmath
from fastattn.backends.reference.softmax_dropout import softmax_backward
from fastattn.backends.schema import (
    AttentionArgs,
    AttentionBackwardArgs,
    VarlenAttentionArgs,
    VarlenAttentionBackwardArgs,
)
from fastattn.backends.visibility import add_mask, blind_queries, softmax, unused_keys, visibility

Args = TypeVar("Args", AttentionArgs, AttentionBackwardArgs)
Others = ParamSpec("Others")
Result = TypeVar("Result")

# Elements of P that a CPU computes at a time, so that its cache holds them over the passes.
CACHED = 2**19
# Bound of a log-sum-exp: below it the float64 value is exact to 1e-13, and so is P recomputed from it.
LARGEST_LSE = 2.0**10


def _in_own_dtype(
    function: Callable[Concatenate[Args, Others], Result],
) -> Callable[Concatenate[Args, Others], Result]:
    """Decorate a function so that its products stay in float32, which autocast would run in 16 bits."""

    @functools.wraps(function)
    def run(args: Args, /, *others: Others.args, **named: Others.kwargs) -> Result:
        with without_autocast(device_of(args)):
            return function(args, *others, **named)

    return run


def _in_layout_of(tensor: Tensor, like: Tensor) -> Tensor:
    order = memory_order(like)
    return tensor.to(like.dtype).permute(order).contiguous().permute([order.index(dim) for dim in range(4)])


def _dense_columns(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _per_query_head(tensor: Tensor, heads: int) -> Tensor:
    """Repeat key or value heads for the query heads of their group: query head h uses key head h // group."""
    return tensor if tensor.size(1) == heads else tensor.repeat_interleave(heads // tensor.size(1), 1)


def _sum_groups(tensor: Tensor, heads: int) -> Tensor:
    return tensor if tensor.size(1) == heads else tensor.unflatten(1, (heads, -1)).sum(2)


def _parts(query: Tensor, key: Tensor, *others: Tensor | None) -> list[tuple[int, Callable[[Tensor], Tensor]]]:
    """Divide a call's matrices (Lq, Lk) into parts that fit in a CPU's cache.

    If autograd records the call, there is one part: autograd keeps all intermediates anyway, and would add up a
    full-size gradient per part.

    Returns:
        For each part the number of its first matrix, and a function that takes the part of a tensor (B, H, ...).
    """
    (batch, heads, rows), (kv_heads, columns) = query.shape[:3], key.shape[1:3]
    if query.device.type != "cpu" or batch * heads * rows * columns <= CACHED or is_recorded(query, key, *others):
        return [(0, lambda tensor: tensor)]
    group, matrices = heads // kv_heads, max(1, CACHED // (rows * columns))
    sequences = max(1, matrices // heads)
    some = heads  # query heads per part: all, or a multiple of a group, or a divisor of one
    if matrices < heads:
        some = matrices // group * group or max(n for n in range(1, matrices + 1) if group % n == 0)

    def part(b: int, h: int) -> tuple[int, Callable[[Tensor], Tensor]]:
        def take(tensor: Tensor) -> Tensor:
            shared_b, shared_h = batch // tensor.size(0), heads // tensor.size(1)  # by broadcasting or by groups
            last_b, last_h = (b + sequences - 1) // shared_b, (h + some - 1) // shared_h
            return tensor[b // shared_b : last_b + 1, h // shared_h : last_h + 1]

        return b * heads + h, take

    return [part(b, h) for b in range(0, batch, sequences) for h in range(0, heads, some)]


def _gradient(per_query_head: Tensor, like: Tensor) -> Tensor:
    """Return the gradient of ``like`` in its layout, summed over the query heads that share one of its heads."""
    return _in_layout_of(_sum_groups(per_query_head, like.size(1)), like)


def _joined(parts: Sequence[Tensor], batch: int) -> Tensor:
    """Join the parts to (B, H, ...)."""
    return parts[0] if len(parts) == 1 else torch.cat([part.flatten(0, 1) for part in parts]).unflatten(0, (batch, -1))


def _probabilities(
    args: AttentionArgs, take: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute P and stats of a part.

    Returns:
        query, key and value in the dtype of computation, P, stats. Key and value are per query head. Blind queries,
        unused keys and their values are zero.
    """
    q, k, v = (opmath(take(tensor)) for tensor in (args.query, args.key, args.value))
    k, v = _per_query_head(k, q.size(1)), _per_query_head(v, q.size(1))
    attn_mask = None if args.attn_mask is None else take(args.attn_mask)
    key_lengths = None if args.key_lengths is None else take(args.key_lengths[:, None])[:, 0]
    visible = visibility(args._replace(query=q, key=k, value=v, attn_mask=attn_mask, key_lengths=key_lengths))
    if visible is not None:
        unused = unused_keys(visible)
        q, k, v = q.masked_fill(blind_queries(visible), 0.0), k.masked_fill(unused, 0.0), v.masked_fill(unused, 0.0)
    probabilities, stats = softmax(add_mask((q @ k.mT).mul_(args.scale), attn_mask), visible)
    return q, k, v, probabilities, stats


def _torchs(
    args: AttentionArgs, *others: Tensor | None
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any], Tensor | None] | None:
    """Return the operands and options of torch's fused attention, and the rows that see nothing; or None.

    None means that torch's function computes something else. Its dropout differs, and it requires dense columns.
    """
    query, key, value, attn_mask = args.query, args.key, args.value, args.attn_mask
    if (
        args.threshold > 0
        or args.scale <= 0
        or query.size(3) != value.size(3)
        or not is_torchs(query, key, value, attn_mask, *others)
    ):
        return None
    rows, columns = query.size(2), key.size(2)
    query, key, value = map(_dense_columns, (query, key, value))
    k, v = _per_query_head(key, query.size(1)), _per_query_head(value, query.size(1))
    is_causal = (  # and every key is seen
        attn_mask is None
        and args.key_lengths is None
        and args.window_left >= rows >= columns
        and args.window_right == 0
        and (rows == columns or not args.lower_right)
    )
    visible = None if is_causal else visibility(args)
    if visible is None:
        return (query, k, v), {"is_causal": is_causal, "scale": args.scale}, None
    blind, unused = blind_queries(visible), unused_keys(visible)
    if blind.any():
        query = query.masked_fill(blind, 0.0)
    if unused.any():
        k, v = k.masked_fill(unused, 0.0), v.masked_fill(unused, 0.0)
    added = query.new_zeros(()) if attn_mask is None or attn_mask.dtype == torch.bool else attn_mask
    mask = torch.where(visible, added, query.new_full((), -torch.inf)).to(query.dtype)
    return (query, k, v), {"is_causal": False, "scale": args.scale, "attn_mask": mask}, blind.squeeze(-1)


def _keeps_sums(lse: Tensor) -> bool:
    """Return whether P can be recomputed from the log-sum-exps, the only statistics of torch's kernels.

    For a row all at a mask's finfo.min it cannot: rounding has lost the log of the sum.
    """
    return bool((lse.abs() < LARGEST_LSE).all())


@_in_own_dtype
def attention(args: AttentionArgs, first_matrix: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key, value, attn_mask = args.query, args.key, args.value, args.attn_mask
    if (call := _torchs(args)) is not None:
        operands, options, empty = call
        out, lse = flash_attention(*operands, **options)
        maximum, total = lse, torch.ones_like(lse, memory_format=torch.contiguous_format)
        if empty is not None and empty.any():
            out, maximum, total = out.masked_fill(empty.unsqueeze(-1), 0.0), lse.masked_fill(empty, 0.0), total * ~empty
            lse = lse.masked_fill(empty, -torch.inf)
        if empty is None or _keeps_sums(maximum):
            return _in_layout_of(out, query), lse.contiguous(), torch.stack((maximum, total)), query.new_empty(0)
    found = []
    for first, take in _parts(query, key, value, attn_mask):
        _, _, v, probabilities, stats = _probabilities(args, take)
        dropped = dropper(probabilities.shape, args.seed, args.threshold, first_matrix + first)(probabilities)
        found.append((dropped @ v, *stats))
    out, maximum, total = (_joined(tensors, query.size(0)) for tensors in zip(*found, strict=True))
    empty = total == 0  # log has no derivative at 0, and values that only other rows see may hold NaN
    out = out.masked_fill(empty.unsqueeze(-1), 0.0)
    lse = (maximum + total.masked_fill(empty, 1.0).log()).masked_fill(empty, -torch.inf)
    rounded, residual = _in_layout_of(out, query), query.new_empty(0)
    if args.keep_residual:  # this backend's own backward pass recomputes the result instead
        residual = _in_layout_of((out - rounded).masked_fill(~rounded.isfinite(), 0.0).detach(), query)
    return rounded, lse, torch.stack((maximum, total)), residual


@_in_own_dtype
def attention_backward(args: AttentionBackwardArgs, first_matrix: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_out, grad_lse, out, stats, _, forward, mask_grad = args
    query, key, value, attn_mask = forward.query, forward.key, forward.value, forward.attn_mask
    if grad_lse is None and not mask_grad:
        call = _torchs(forward, grad_out)
        if call is not None and _keeps_sums(lse := stats[0] + stats[1].masked_fill(stats[1] == 0, 1.0).log()):
            operands, options, empty = call
            lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
            if empty is not None:
                grad_out = grad_out.masked_fill(empty.unsqueeze(-1), 0.0)
            grad_q, grad_k, grad_v = flash_attention_backward(
                grad_out, *operands, out, lse, 0.0, options.pop("is_causal"), **options
            )
            if empty is not None:
                grad_q = grad_q.masked_fill(empty.unsqueeze(-1), 0.0)
            return _gradient(grad_q, query), _gradient(grad_k, key), _gradient(grad_v, value), query.new_empty(0)
    found, grad_mask = [], None
    parts = _parts(query, key, value, attn_mask, grad_out, grad_lse)
    for first, take in parts:
        q, k, v, probabilities, (_, total) = _probabilities(forward, take)
        drop = dropper(probabilities.shape, forward.seed, forward.threshold, first_matrix + first)
        empty = total.unsqueeze(-1) == 0
        grad_o = opmath(take(grad_out)).masked_fill(empty, 0.0)
        grad_v = drop(probabilities).mT @ grad_o
        grad_scores = softmax_backward(drop(grad_o @ v.mT), probabilities)
        if grad_lse is not None:  # d lse_i / d s_ij = P_ij
            of_lse = probabilities * take(grad_lse).unsqueeze(-1)
            grad_scores = grad_scores + of_lse.masked_fill(probabilities == 0, 0.0)
        grad_q = (grad_scores @ k * forward.scale).masked_fill(empty, 0.0)
        found.append((grad_q, grad_scores.mT @ q * forward.scale, grad_v))
        if attn_mask is not None and mask_grad:
            summed = grad_scores.sum_to_size(take(attn_mask).shape)
            if len(parts) == 1:
                grad_mask = summed
            else:
                grad_mask = summed.new_zeros(attn_mask.shape) if grad_mask is None else grad_mask
                take(grad_mask).add_(summed)
    grad_q, grad_k, grad_v = (_joined(tensors, query.size(0)) for tensors in zip(*found, strict=True))
    return (
        _gradient(grad_q, query),
        _gradient(grad_k, key),
        _gradient(grad_v, value),
        query.new_empty(0) if attn_mask is None or grad_mask is None else grad_mask.to(attn_mask.dtype),
    )


def _sequences(args: VarlenAttentionArgs) -> list[tuple[slice, slice, AttentionArgs]]:
    """Return each sequence's rows of query and of key, and its call as a batch of one; [] for meta tensors."""
    if args.cu_seq_q.is_meta:
        return []
    q, k = args.cu_seq_q.tolist(), args.cu_seq_k.tolist()
    lengths = args.seqused_k if args.seqused_k is not None else args.cu_seq_k.diff()
    sequences = []
    for s, length in enumerate(lengths.tolist()):
        queries, keys = slice(q[s], q[s + 1]), slice(k[s], k[s] + length)
        call = AttentionArgs(
            query=_as_batch(args.query, queries), key=_as_batch(args.key, keys), value=_as_batch(args.value, keys),
            attn_mask=None, key_lengths=None, seed=args.seed, scale=args.scale, window_left=args.window_left,
            window_right=args.window_right, lower_right=True, threshold=args.threshold,
            keep_residual=args.keep_residual,
        )  # fmt: skip
        sequences.append((queries, keys, call))
    return sequences


def _as_batch(tensor: Tensor, rows: slice) -> Tensor:
    """Return the rows (L, H, E) of one sequence as (1, H, L, E)."""
    return tensor[rows].transpose(0, 1).unsqueeze(0)


def varlen_attention(args: VarlenAttentionArgs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attend within each sequence; query (Tq, Hq, E), out (Tq, Hq, Ev), lse (Tq, Hq), stats (2, Tq, Hq)."""
    tokens, heads, _ = args.query.shape
    out = args.query.new_zeros(tokens, heads, args.value.size(2))
    stats = args.query.new_zeros(2, tokens, heads, dtype=stat_dtype(args.query.dtype))
    lse = torch.full_like(stats[0], -torch.inf)
    residual = torch.zeros_like(out) if args.keep_residual else out.new_empty(0)
    for s, (rows, _, call) in enumerate(_sequences(args)):
        o, row_lse, row_stats, row_residual = attention(call, s * heads)
        out[rows], lse[rows], stats[:, rows] = o[0].transpose(0, 1), row_lse[0].T, row_stats[:, 0].mT
        if args.keep_residual:
            residual[rows] = row_residual[0].transpose(0, 1)
    return out, lse, stats, residual


def varlen_attention_backward(args: VarlenAttentionBackwardArgs) -> tuple[Tensor, Tensor, Tensor]:
    forward = args.forward
    operands = forward.query, forward.key, forward.value
    grads = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in operands]
    for s, (queries, keys, call) in enumerate(_sequences(forward)):
        backward = AttentionBackwardArgs(
            grad_out=_as_batch(args.grad_out, queries),
            grad_lse=None if args.grad_lse is None else args.grad_lse[queries].T.unsqueeze(0),
            out=_as_batch(args.out, queries),
            stats=args.stats[:, queries].mT.unsqueeze(1),
            residual=args.residual,
            forward=call,
            mask_grad=False,
        )
        *of_sequence, _ = attention_backward(backward, s * forward.query.size(1))
        for grad, rows, part in zip(grads, (queries, keys, keys), of_sequence, strict=True):
            grad[rows] = part[0].transpose(0, 1)
    return grads[0], grads[1], grads[2]
