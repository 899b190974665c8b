"""Scaled dot-product attention, attention weights, and attention over packed sequences.

Source: Vaswani et al. 2017, section 3.2.1, equation 1: softmax(Q K^T / sqrt(d_k)) V.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from fastattn._torch_private import max_length, ragged_dim
from fastattn.backends import choose, reads_residual
from fastattn.backends.common import empty_heads, stat_dtype, without_autocast
from fastattn.backends.schema import (
    AttentionArgs,
    AttentionBackwardArgs,
    SoftmaxDropoutArgs,
    VarlenAttentionArgs,
    VarlenAttentionBackwardArgs,
)
from fastattn.backends.visibility import add_mask, blind_queries, packed_visibility, softmax, unused_keys, visibility
from fastattn.ops import check
from fastattn.ops.copies import owned
from fastattn.ops.jagged import is_jagged, same_lengths, with_values
from fastattn.ops.register import Op, fast_path, may_want_gradient
from fastattn.ops.sharding import Shards, attend, is_sharded
from fastattn.ops.softmax_dropout import fake_mask_grad, softmax_dropout_op

__all__ = ["attention_weights", "scaled_dot_product_attention", "varlen_attn"]

_VARIANTS = ("upper_left", "lower_right")


plain_attention = fast_path("attention", is_cast=True)
_plain_varlen = fast_path("varlen_attention", is_cast=True)


@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
    causal_variant: str = "upper_left", key_lengths: Tensor | None = None, window_size: tuple[int, int] = (-1, -1),
    return_lse: Literal[False] = False, seed: Tensor | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
    causal_variant: str = "upper_left", key_lengths: Tensor | None = None, window_size: tuple[int, int] = (-1, -1),
    return_lse: Literal[True], seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
    causal_variant: str = "upper_left", key_lengths: Tensor | None = None, window_size: tuple[int, int] = (-1, -1),
    return_lse: bool, seed: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@check.unscriptable
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    causal_variant: str = "upper_left",
    key_lengths: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    return_lse: bool = False,
    seed: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute dropout(softmax(scale * query @ key^T + mask)) @ value, a superset of torch's function of this name.

    The masks may be given together. A row that sees no key gives output 0, gradient 0 and LSE -inf. Dropout applies
    whenever ``dropout_p`` > 0, as in torch's function: pass 0 in evaluation.

    Args:
        query: (..., Hq, Lq, E), float32, bfloat16, float16 or float64 (reference backend), any strides. With a head
            size of 0 all weights of a row are equal.
        key: (..., Hk, Lk, E) of query's dtype. Batch dimensions broadcast.
        value: (..., Hk, Lk, Ev) of query's dtype. All three may be jagged nested tensors (B, H, sequence, E), which
            ``varlen_attn`` serves, without ``attn_mask`` and ``key_lengths``. All three may be DTensors, divided alike
            along batch dimensions and heads.
        attn_mask: bool (True = takes part) or float (added to the scaled scores, may require grad), broadcastable to
            (..., Hq, Lq, Lk); or torch's ``CausalBias``.
        dropout_p: probability in [0, 1] of dropping a weight; kept ones are scaled up (docs/design.md has the formula).
        is_causal: query i sees no key to the right of the diagonal.
        scale: any real number; 1 / sqrt(E) by default.
        enable_gqa: allow Hq to be a multiple of Hk; query head h uses key head h // (Hq // Hk).
        causal_variant: the diagonal: "upper_left", j = i, or "lower_right", j = i + length - Lq, where length is the
            sequence's key length. The window counts from the same diagonal.
        key_lengths: (B,) integers, B the flattened batch: only the leading ``key_lengths[b]`` keys exist.
        window_size: (left, right), how far a query sees on each side of the diagonal, -1 = unbounded.
        return_lse: also return the natural logarithm of each row's sum of exponentiated scores, differentiable.
        seed: int64 (2,), (key, offset), of the dropout; drawn from torch's default generator when not given.

    Returns:
        (..., Hq, Lq, Ev) in query's dtype. A result of four dimensions has query's memory layout, others are
        contiguous. With ``return_lse`` also (..., Hq, Lq) in float32, or float64 for float64 operands.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or value; the message names it.

    Examples:
        >>> query, key, value = torch.randn(3, 2, 8, 128, 64)
        >>> key_lengths = torch.tensor([128, 70])
        >>> out = scaled_dot_product_attention(query, key, value, is_causal=True, key_lengths=key_lengths)
        >>> out.shape
        torch.Size([2, 8, 128, 64])
    """
    if causal_variant == "upper_left" and return_lse is False and type(window_size) is tuple and len(window_size) == 2:
        out = plain_attention(
            query,
            key,
            value,
            attn_mask,
            key_lengths,
            seed,
            dropout_p,
            is_causal,
            scale,
            enable_gqa,
            *(() if window_size is _UNBOUNDED else window_size),
        )
        if out is not None:
            return out
    name = "scaled_dot_product_attention"
    check.flag(name, "enable_gqa", enable_gqa)
    check.flag(name, "return_lse", return_lse)
    if is_sharded(query):
        return attend(
            scaled_dot_product_attention, query, {"key": key, "value": value}, value.size(-1), attn_mask=attn_mask,
            dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
            causal_variant=causal_variant, key_lengths=key_lengths, window_size=window_size, return_lse=return_lse,
            seed=seed,
        )  # fmt: skip
    if is_jagged(query) and is_jagged(key) and is_jagged(value):
        _check_jagged(name, query, key, value, is_causal, causal_variant, window_size, attn_mask, key_lengths)
        return _jagged_attention(
            query, key, value, return_lse, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
            window_size=window_size, enable_gqa=enable_gqa, seed=seed,
        )  # fmt: skip
    q, k, v, batch = _operands(name, query, key, value, enable_gqa)
    args = dense_args(
        name, q, k, v, batch, attn_mask, dropout_p, is_causal, scale, causal_variant, key_lengths, window_size, seed
    )
    out, lse, _, _ = attention_op(args)
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        rank = max(query.dim(), key.dim(), value.dim())
        out, lse = _as_given(out, batch, rank), _as_given(lse, batch, rank)
    return (out, lse) if return_lse else out


# The default window, which a fast call leaves out: each argument takes 0.1 us.
_UNBOUNDED = inspect.signature(scaled_dot_product_attention).parameters["window_size"].default


@check.unscriptable
def attention_weights(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    causal_variant: str = "upper_left",
    key_lengths: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    seed: Tensor | None = None,
) -> Tensor:
    """Compute dropout(softmax(scale * query @ key^T + mask)), the matrix that attention multiplies ``value`` by.

    The matrix takes O(Lq Lk) memory, unlike ``scaled_dot_product_attention``. With the same seed it holds exactly the
    weights that attention used.

    Args:
        query, key, attn_mask, dropout_p, is_causal, scale, enable_gqa, causal_variant, key_lengths, window_size, seed:
            as in ``scaled_dot_product_attention``.

    Returns:
        (..., Hq, Lq, Lk) in query's dtype; rows that see nothing are zero.

    Raises:
        TypeError, ValueError: as in ``scaled_dot_product_attention``.

    Examples:
        >>> query, key = torch.randn(2, 1, 8, 5, 64)
        >>> weights = attention_weights(query, key, is_causal=True)
        >>> weights[0, 0, 0]  # the first query sees the first key only
        tensor([1., 0., 0., 0., 0.])
    """
    name = "attention_weights"
    check.flag(name, "enable_gqa", enable_gqa)
    if is_sharded(query):
        return attend(
            attention_weights, query, {"key": key}, key.size(-2), attn_mask=attn_mask, dropout_p=dropout_p,
            is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, causal_variant=causal_variant,
            key_lengths=key_lengths, window_size=window_size, seed=seed,
        )  # fmt: skip
    q, k, _, batch = _operands(name, query, key, key, enable_gqa)
    args = dense_args(
        name, q, k, k, batch, attn_mask, dropout_p, is_causal, scale, causal_variant, key_lengths, window_size, seed
    )
    unmade = q.new_empty((), dtype=stat_dtype(q.dtype)).expand(*q.shape[:3], k.size(2))  # takes no memory
    of_scores = SoftmaxDropoutArgs(
        input=unmade, attn_mask=args.attn_mask, key_lengths=args.key_lengths, seed=args.seed, scale=args.scale,
        window_left=args.window_left, window_right=args.window_right, lower_right=args.lower_right,
        threshold=args.threshold,
    )  # fmt: skip
    backend = choose("softmax_dropout", of_scores)
    visible = visibility(args)
    if visible is not None:  # blind queries and unused keys may hold NaN, which the product's gradient would spread
        q = q.masked_fill(blind_queries(visible), 0.0)
        k = k.masked_fill(unused_keys(visible).all(1, keepdim=True), 0.0)
    with without_autocast(q.device):  # in float32, as attention's own scores are
        groups = (k.size(1), q.size(1) // max(k.size(1), 1))
        grouped = q.to(unmade.dtype).unflatten(1, groups)
        scores = (grouped @ k.to(unmade.dtype).mT.unsqueeze(2)).flatten(1, 2)
    weights, _ = softmax_dropout_op.on(backend, of_scores._replace(input=scores))
    return _as_given(weights.to(q.dtype), batch, max(query.dim(), key.dim()))


@overload
def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False, seqused_k: Tensor | None = None,
    return_lse: Literal[False] = False, seed: Tensor | None = None, **unsupported: Any,
) -> Tensor: ...  # fmt: skip
@overload
def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False, seqused_k: Tensor | None = None,
    return_lse: Literal[True], seed: Tensor | None = None, **unsupported: Any,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False, seqused_k: Tensor | None = None,
    return_lse: bool, seed: Tensor | None = None, **unsupported: Any,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@check.unscriptable
def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
    seed: Tensor | None = None,
    **unsupported: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention within sequences of different lengths, packed one after the other without padding.

    The arguments follow ``torch.nn.attention.varlen.varlen_attn``: the diagonal is the lower-right one, and
    ``window_size=(-1, 0)`` is causal. Beyond torch's function there are dropout, CPU tensors, float32, a gradient with
    ``seqused_k``, and ``return_lse`` instead of ``return_aux``. ``block_table``, ``num_splits`` and ``return_aux`` are
    refused.

    Args:
        query: (Tq, Hq, E), float32, bfloat16, float16 or float64. All three may be DTensors, divided alike along heads.
        key: (Tk, Hk, E); value: (Tk, Hk, Ev).
        cu_seq_q, cu_seq_k: (N + 1,) integers from 0 to Tq or Tk, never falling: sequence s is rows cu[s] to cu[s + 1].
        max_q, max_k: upper bounds of the sequences' lengths, at best the longest sequence's.
        dropout_p, is_causal, scale, window_size, enable_gqa, seed: as in ``scaled_dot_product_attention``; dropout
            counts rows and columns within the sequence.
        seqused_k: (N,) integers: only the leading ``seqused_k[s]`` keys of sequence s exist.
        return_lse: also return the natural-log sums (Tq, Hq), differentiable.

    Returns:
        (Tq, Hq, Ev) in query's dtype, contiguous; with ``return_lse`` also (Tq, Hq) in float32, or float64 for float64
        operands. On CUDA ``cu_seq_q`` is not read, which would synchronise, so rows that belong to no sequence are
        undefined.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or value; the message names it.

    Examples:
        Two sequences of 3 and 5 tokens:

        >>> query, key, value = torch.randn(3, 8, 4, 64)
        >>> offsets = torch.tensor([0, 3, 8])
        >>> varlen_attn(query, key, value, offsets, offsets, 5, 5, is_causal=True).shape
        torch.Size([8, 4, 64])
    """
    if return_lse is False and not unsupported and type(window_size) is tuple and len(window_size) == 2:
        out = _plain_varlen(
            query, key, value, cu_seq_q, cu_seq_k, seqused_k, seed, max_q, max_k, dropout_p, is_causal, scale,
            enable_gqa, *(() if window_size is _UNBOUNDED else window_size),
        )  # fmt: skip
        if out is not None:
            return out
    name = "varlen_attn"
    check.flag(name, "enable_gqa", enable_gqa)
    check.flag(name, "return_lse", return_lse)
    if unsupported:
        raise check.BadType(f"varlen_attn: {', '.join(sorted(unsupported))} is not supported; leave it out")
    if is_sharded(query):
        shards = Shards(name, "query", query, (1,))
        k, v, settings = shards.local("key", key), shards.local("value", value), (cu_seq_q, cu_seq_k, seqused_k)
        offsets_q, offsets_k, used = (shards.part("cu_seq_q, cu_seq_k and seqused_k", t, {}) for t in settings)
        if not (shards.divides(1, query.size(1)) and shards.divides(1, key.size(1))):
            raise check.BadValue(
                f"{name}: as DTensors query and key must have heads that the processes divide evenly, got "
                f"{query.size(1)} and {key.size(1)}"
            )
        out, lse = varlen_attn(
            shards.own, k, v, offsets_q, offsets_k, max_q, max_k, dropout_p=dropout_p, is_causal=is_causal,
            scale=scale, window_size=window_size, enable_gqa=enable_gqa, seqused_k=used, return_lse=True,
            seed=shards.seed(seed, dropout_p),
        )  # fmt: skip
        out, lse = shards.whole(out, (*query.shape[:2], value.size(2))), shards.whole(lse, query.shape[:2])
        return (out, lse) if return_lse else out
    args = packed_args(
        name, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, dropout_p, is_causal, scale, window_size, enable_gqa,
        seqused_k, seed,
    )  # fmt: skip
    out, lse, _, _ = varlen_attention_op(args)
    return (out, lse) if return_lse else out


# Checks


def _operands(
    name: str, query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """Return the operands as (B, H, L, E) in autocast's dtype with broadcast batch dimensions, and those dimensions."""
    for label, tensor in (("query", query), ("key", key), ("value", value)):
        check.operand(name, label, tensor)
        if tensor.dim() < 2:
            raise check.BadValue(
                f"{name}: {label} must have at least 2 dimensions (..., length, head size), "
                f"got shape {tuple(tensor.shape)}"
            )
    q, k, v = check.autocast_low(query, key, value)
    _same_kind(name, q, k, v)
    if k.size(-2) != v.size(-2):
        raise check.BadValue(
            f"{name}: key and value must have the same length, got {k.size(-2)} and {v.size(-2)} "
            f"from shapes {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        q, k, v = (t[(None,) * (4 - t.dim())] for t in (q, k, v))
    if q.size(-3) == 1 != k.size(-3) and not enable_gqa:  # heads broadcast as batch dimensions do
        q = q.expand(*q.shape[:-3], k.size(-3), *q.shape[-2:])
    _head_counts(name, q.size(-3), k.size(-3), q.size(-1), k.size(-1), enable_gqa or k.size(-3) == 1)
    if v.size(-3) != k.size(-3):
        heads = q.size(-3)
        if v.size(-3) == 1 or k.size(-3) == 1:
            shared = v.size(-3) if k.size(-3) == 1 else k.size(-3)
            k, v = (t.expand(*t.shape[:-3], shared, *t.shape[-2:]) for t in (k, v))
            if heads == 1 and not enable_gqa:
                q = q.expand(*q.shape[:-3], shared, *q.shape[-2:])
            _head_counts(name, q.size(-3), shared, q.size(-1), k.size(-1), enable_gqa, "key and value together")
        elif enable_gqa and k.size(-3) and v.size(-3) and heads % v.size(-3) == 0:  # key and value groups differ
            k, v = (t.repeat_interleave(heads // t.size(-3), -3) for t in (k, v))
        else:
            raise check.BadValue(
                f"{name}: value must have key's {k.size(-3)} heads, got {v.size(-3)} from shape {tuple(value.shape)}"
            )
    batch_sizes = q.shape[:-3]
    if k.shape[:-3] != batch_sizes or v.shape[:-3] != batch_sizes:
        try:
            batch_sizes = torch.broadcast_shapes(batch_sizes, k.shape[:-3], v.shape[:-3])
        except RuntimeError:
            raise check.BadValue(
                f"{name}: the batch dimensions of query, key and value must broadcast, got shapes "
                f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
            ) from None
        q, k, v = (t.expand(*batch_sizes, *t.shape[-3:]) for t in (q, k, v))
    if len(batch_sizes) > 1:
        q, k, v = (t.flatten(0, -4) for t in (q, k, v))
    return q, k, v, tuple(batch_sizes)


def _as_given(result: Tensor, batch: tuple[int, ...], rank: int) -> Tensor:
    """Return a result (B, H, ...) with the batch dimensions of operands of this rank, contiguous, as torch's."""
    if len(batch) > 1:
        return result.unflatten(0, batch).contiguous()
    for _ in range(rank, 4):  # the leading dimensions that _operands added
        result = result.squeeze(0)
    return result.contiguous()


def _jagged_attention(
    query: Any, key: Any, value: Any, return_lse: bool, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention of jagged tensors (B, H, sequence, E) by ``varlen_attn`` of their values."""
    q, k, v = (t.values().transpose(0, 1) for t in (query, key, value))
    results = varlen_attn(
        q, k, v, query.offsets(), key.offsets(), max_length(query), max_length(key), return_lse=True, **options
    )
    out, lse = (with_values(query, t.transpose(0, 1)) for t in results)
    return (out, lse) if return_lse else out


def _check_jagged(
    name: str, query: Any, key: Any, value: Any, is_causal: bool, causal_variant: str, window_size: tuple[int, int],
    *absent: Tensor | None,
) -> None:  # fmt: skip
    """Raise unless packed attention, whose diagonal is the lower-right one, can serve these nested operands."""
    for label, argument in zip(("attn_mask", "key_lengths"), absent, strict=True):
        if argument is not None:
            raise check.BadValue(
                f"{name}: {label} cannot be given beside jagged operands; pad them, to_padded_tensor(0.0), and give "
                "their lengths as key_lengths"
            )
    for label, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4 or ragged_dim(tensor) != 2 or tensor.lengths() is not None:
            raise check.BadValue(
                f"{name}: {label} must be a jagged tensor (batch, heads, sequence, head size) without holes; make it "
                "one by unflatten(-1, (heads, -1)).transpose(1, 2), and contiguous() before if it was narrowed"
            )
    if not same_lengths(key, value):
        raise check.BadValue(f"{name}: key and value must have sequences of the same lengths")
    lower_right = _lower_right(name, causal_variant)
    has_diagonal = is_causal or check.sides(name, window_size) != (-1, -1)
    if has_diagonal and not lower_right and not same_lengths(query, key):
        raise check.BadValue(
            f"{name}: queries and keys of different lengths have two diagonals; jagged operands have the one of "
            'causal_variant="lower_right", say so'
        )


def dense_args(
    name: str, q: Tensor, k: Tensor, v: Tensor, batch: tuple[int, ...], attn_mask: Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None, causal_variant: str, key_lengths: Tensor | None,
    window_size: tuple[int, int], seed: Tensor | None,
) -> AttentionArgs:  # fmt: skip
    """Check and normalise the options of a dense call, whose operands are (B, H, L, E)."""
    _, heads, rows, head_dim = q.shape
    columns = k.shape[2]
    if attn_mask is not None:
        attn_mask, is_causal, causal_variant = _causal_bias(name, attn_mask, is_causal, causal_variant, rows, columns)
        attn_mask = check.mask(name, attn_mask, torch.Size((*batch, heads, rows, columns)), q.dtype, q.device)
    if key_lengths is not None:
        key_lengths = check.key_lengths(name, key_lengths, q.size(0), columns, q.device)
    lower_right = _lower_right(name, causal_variant)
    window_left, window_right = check.window(name, window_size, is_causal, lower_right, rows, columns)
    threshold = check.threshold(name, dropout_p)
    check.seed(name, seed, q.device)
    scale = _scale(name, scale, head_dim)
    return AttentionArgs(
        query=q, key=k, value=v, attn_mask=attn_mask, key_lengths=key_lengths,
        seed=check.draw_seed(seed, threshold, q), scale=scale, window_left=window_left,
        window_right=window_right, lower_right=lower_right, threshold=threshold,
        keep_residual=_keep_residual((columns,), q, k, v, attn_mask),
    )  # fmt: skip


def _keep_residual(keys: tuple[int, ...], query: Tensor, *others: Tensor | None) -> bool:
    """Return whether the backward pass may read the residual of a call with these operands.

    A row has at most the least of ``keys``. A traced call keeps the residual for any number, which may be symbolic.
    """
    if query.dtype not in check.HALVES or not may_want_gradient(query, *others):
        return False
    if torch.compiler.is_compiling() or any(isinstance(count, torch.SymInt) for count in keys):
        return True
    return reads_residual(query, min(keys))


def packed_args(
    name: str, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, scale: float | None, window_size: tuple[int, int], enable_gqa: bool,
    seqused_k: Tensor | None, seed: Tensor | None,
) -> VarlenAttentionArgs:  # fmt: skip
    """Check and normalise the arguments of a call over packed sequences."""
    for label, tensor in (("query", query), ("key", key), ("value", value)):
        check.operand(name, label, tensor)
        if tensor.dim() != 3:
            raise check.BadValue(f"{name}: {label} must be (tokens, heads, head size), got shape {tuple(tensor.shape)}")
    q, k, v = check.autocast_low(query, key, value)
    _same_kind(name, q, k, v)
    if k.size(0) != v.size(0) or k.size(1) != v.size(1):
        raise check.BadValue(
            f"{name}: key and value must have the same tokens and heads, "
            f"got {tuple(key.shape)} and {tuple(value.shape)}"
        )
    _head_counts(name, q.size(1), k.size(1), q.size(2), k.size(2), enable_gqa)
    cu_seq_q = _cumulative(name, "cu_seq_q", cu_seq_q, q.size(0), max_q, "max_q", q.device)
    cu_seq_k = _cumulative(name, "cu_seq_k", cu_seq_k, k.size(0), max_k, "max_k", q.device)
    if cu_seq_q.shape != cu_seq_k.shape:
        raise check.BadValue(
            f"{name}: cu_seq_q and cu_seq_k must name the same number of sequences, got "
            f"{cu_seq_q.size(0) - 1} and {cu_seq_k.size(0) - 1}"
        )
    used = None
    if seqused_k is not None:
        used = check.key_lengths(name, seqused_k, cu_seq_k.size(0) - 1, max_k, q.device, "seqused_k")
        own = cu_seq_k.diff()
        if check.is_readable(used) and bool((used > own).any()):
            raise check.BadValue(
                f"{name}: seqused_k must not exceed the sequences' lengths {_brief(own)}, got {_brief(used)}"
            )
        used = torch.minimum(used, own)
    window_left, window_right = check.window(name, window_size, is_causal, True, max_q, max_k)
    threshold = check.threshold(name, dropout_p)
    check.seed(name, seed, q.device)
    scale = _scale(name, scale, q.size(2))
    return VarlenAttentionArgs(
        query=q, key=k, value=v, cu_seq_q=cu_seq_q, cu_seq_k=cu_seq_k, seqused_k=used,
        seed=check.draw_seed(seed, threshold, q), max_q=max_q, max_k=max_k, scale=scale,
        window_left=window_left, window_right=window_right, threshold=threshold,
        keep_residual=_keep_residual((max_k, k.size(0)), q, k, v),
    )  # fmt: skip


def _same_kind(name: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise check.BadType(
            f"{name}: query, key and value must have one dtype, got "
            f"{', '.join(check.dtype_name(t.dtype) for t in (q, k, v))}"
        )
    if k.device != q.device or v.device != q.device:
        raise check.BadValue(
            f"{name}: query, key and value must be on one device, got {q.device}, {k.device} and {v.device}"
        )


def _head_counts(name: str, hq: int, hk: int, e: int, ek: int, grouped: bool, of: str = "key") -> None:
    if e != ek:
        raise check.BadValue(f"{name}: query and key must have the same head size, got {e} and {ek}")
    if hq == hk:
        return
    if not grouped:
        raise check.BadValue(
            f"{name}: query has {hq} heads and {of} {hk}; they must be equal, or pass enable_gqa=True for grouped heads"
        )
    if hk == 0 or hq % hk:
        raise check.BadValue(f"{name}: query's heads must be a multiple of those of {of}, got {hq} and {hk}")


def _scale(name: str, scale: float | None, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim or 1)  # with head size 0 the scores are 0 for every scale
    return check.scale(name, scale)


def _lower_right(name: str, causal_variant: str) -> bool:
    if causal_variant not in _VARIANTS:
        raise check.BadValue(f'{name}: causal_variant must be "upper_left" or "lower_right", got {causal_variant!r}')
    return causal_variant == "lower_right"


def _causal_bias(
    name: str, attn_mask: Any, is_causal: bool, causal_variant: str, rows: int, columns: int
) -> tuple[Tensor | None, bool, str]:
    """Convert torch's CausalBias to is_causal and its variant; return other masks unchanged."""
    if type(attn_mask).__name__ != "CausalBias":  # importing its module would double the time of `import fastattn`
        return attn_mask, is_causal, causal_variant
    if (attn_mask.seq_len_q, attn_mask.seq_len_kv) != (rows, columns):
        raise check.BadValue(
            f"{name}: attn_mask is a CausalBias of {attn_mask.seq_len_q} queries and {attn_mask.seq_len_kv} keys, "
            f"but there are {rows} and {columns}"
        )
    if is_causal:
        raise check.BadValue(f"{name}: attn_mask is a CausalBias, which is_causal=True says again; give one of them")
    return None, True, attn_mask.variant.name.lower()


def _cumulative(
    name: str, label: str, offsets: Tensor, total: int, longest: int, longest_label: str, device: torch.device
) -> Tensor:
    if not isinstance(offsets, Tensor) or offsets.dtype not in (torch.int64, torch.int32):
        kind = check.dtype_name(offsets.dtype) if isinstance(offsets, Tensor) else type(offsets).__name__
        raise check.BadType(f"{name}: {label} must be an int32 or int64 Tensor of shape (sequences + 1,), got {kind}")
    check.dense(name, label, offsets)
    if offsets.dim() != 1 or offsets.size(0) < 1:
        raise check.BadValue(f"{name}: {label} must have shape (sequences + 1,), got {tuple(offsets.shape)}")
    check.same_device(name, label, offsets, device)
    if isinstance(longest, bool) or not isinstance(longest, numbers.Integral | torch.SymInt) or longest < 0:
        raise check.BadValue(f"{name}: {longest_label} must be an integer of at least 0, got {longest!r}")
    if isinstance(longest, numbers.Integral) and longest >= 2**63:
        raise check.BadValue(f"{name}: {longest_label} must be less than 2**63, got {longest}")
    if check.is_readable(offsets):
        lengths = offsets.diff()
        least, most = map(int, lengths.aminmax()) if lengths.numel() else (0, 0)
        if int(offsets[0]) != 0 or int(offsets[-1]) != total or least < 0:
            raise check.BadValue(f"{name}: {label} must rise from 0 to {total}, got {_brief(offsets)}")
        if most > longest:
            raise check.BadValue(
                f"{name}: {longest_label} must be at least the longest sequence, {most}, got {longest}"
            )
    return owned(offsets)


def _brief(values: Tensor) -> str:
    shown = values.tolist()
    return str(shown) if len(shown) <= 8 else f"[{', '.join(map(str, shown[:6]))}, ..., {shown[-1]}]"


# Fake, autograd, decomposition


Results = tuple[Tensor, Tensor, Tensor, Tensor]


def _fake_attention(args: AttentionArgs | VarlenAttentionArgs) -> Results:
    query, size = args.query, args.value.size(-1)
    rows, dtype = query.shape[:-1], stat_dtype(query.dtype)
    out = empty_heads(query, size) if query.dim() == 4 else query.new_empty((*rows, size))
    residual = torch.empty_like(out) if args.keep_residual else out.new_empty(0)
    return out, query.new_empty(rows, dtype=dtype), query.new_empty((2, *rows), dtype=dtype), residual


def _fake_attention_backward(args: AttentionBackwardArgs) -> tuple[Tensor, ...]:
    forward = args.forward
    grads = tuple(empty_heads(t, t.size(3)) for t in (forward.query, forward.key, forward.value))
    return *grads, fake_mask_grad(forward.query, forward.attn_mask, args.mask_grad)


def _pairs(args: AttentionArgs | VarlenAttentionArgs) -> int:
    """Count the pairs of a query and a key of one sequence, over all heads, without masks.

    If the offsets of packed sequences cannot be read, every sequence counts with the longest lengths.
    """
    if isinstance(args, AttentionArgs):
        batch, heads, rows, _ = args.query.shape
        return batch * heads * rows * args.key.size(2)
    if check.is_readable(args.cu_seq_q):
        pairs = int((args.cu_seq_q.diff() * args.cu_seq_k.diff()).sum())
    else:
        pairs = (args.cu_seq_q.size(0) - 1) * args.max_q * args.max_k
    return args.query.size(1) * pairs


def _flops(args: AttentionArgs | VarlenAttentionArgs) -> int:
    """Count two products and ignore masks, as torch does for its own attention."""
    return 2 * _pairs(args) * (args.query.size(-1) + args.value.size(-1))


def _backward_flops(args: AttentionBackwardArgs | VarlenAttentionBackwardArgs) -> int:
    """Count five products; the first recomputes the scores."""
    forward = args.forward
    return 2 * _pairs(forward) * (3 * forward.query.size(-1) + 2 * forward.value.size(-1))


attention_backward_op = Op("attention_backward", _fake_attention_backward, flops=_backward_flops)


def _wanted(tensors: Sequence[Tensor | None], needs_grad: Sequence[bool]) -> tuple[bool]:
    return (needs_grad[3],)


def _decompose_attention(args: AttentionArgs) -> Results:
    """Compute attention by torch's function, which takes one mask.

    If unused, the log-sum-exp is removed as dead code.
    """
    q, k, v, attn_mask = args.query, args.key, args.value, args.attn_mask
    dtype, wide = q.dtype, stat_dtype(q.dtype)
    if k.size(1) != q.size(1):
        k, v = (t.repeat_interleave(q.size(1) // k.size(1), 1) for t in (k, v))
    visible = visibility(args)
    mask = None
    if visible is not None:
        unused = unused_keys(visible)
        k, v = k.masked_fill(unused, 0.0), v.masked_fill(unused, 0.0)
        mask = visible
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            q, k, v = (t.to(torch.promote_types(t.dtype, attn_mask.dtype)) for t in (q, k, v))
            mask = attn_mask.to(q.dtype).masked_fill(~visible, -torch.inf)
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=args.scale)
    if visible is not None:
        out = out.masked_fill(blind_queries(visible), 0.0)
    _, stats = softmax(add_mask(q.to(wide) @ k.to(wide).mT * args.scale, attn_mask), visible)
    out = out.to(dtype)
    return out, stats[0] + stats[1].log(), stats, torch.zeros_like(out) if args.keep_residual else out.new_empty(0)


attention_op = Op("attention", _fake_attention, "attention_backward", _wanted, _decompose_attention, _flops)


def _fake_varlen_attention_backward(args: VarlenAttentionBackwardArgs) -> tuple[Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in (args.forward.query, args.forward.key, args.forward.value))


varlen_attention_backward_op = Op("varlen_attention_backward", _fake_varlen_attention_backward, flops=_backward_flops)


def _decompose_varlen_attention(args: VarlenAttentionArgs) -> Results:
    """Compute one attention over all tokens, with a mask that keeps the sequences apart."""
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (args.query, args.key, args.value))
    all_tokens = AttentionArgs(
        query=q, key=k, value=v, attn_mask=packed_visibility(args)[None, None], key_lengths=None, seed=None,
        scale=args.scale, window_left=q.size(2), window_right=k.size(2), lower_right=False, threshold=0,
        keep_residual=False,
    )  # fmt: skip
    out, lse, stats, _ = _decompose_attention(all_tokens)
    out = out[0].transpose(0, 1)
    return out, lse[0].T, stats[:, 0].mT, torch.zeros_like(out) if args.keep_residual else out.new_empty(0)


varlen_attention_op = Op(
    "varlen_attention", _fake_attention, "varlen_attention_backward", None, _decompose_varlen_attention, _flops
)  # fmt: skip
