"""The keys that a query sees, by the rule of ``schema.py``, and the softmax over them, in PyTorch's own operations."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.backends.schema import AttentionArgs, SoftmaxDropoutArgs, VarlenAttentionArgs


def visibility(args: AttentionArgs | SoftmaxDropoutArgs) -> Tensor | None:
    """Return a bool tensor, True where a row sees a column, or None if every row sees every column.

    Each of its four dimensions is 1 or that of (B, H, rows, columns).
    """
    if isinstance(args, AttentionArgs):
        rows, columns, device = args.query.size(2), args.key.size(2), args.query.device
    else:
        rows, columns, device = args.input.size(2), args.input.size(3), args.input.device
    visible = None
    j = torch.arange(columns, device=device)
    length: Tensor | int = columns
    if args.key_lengths is not None:
        length = args.key_lengths[:, None, None, None]
        visible = j < length
    reach = (columns, rows) if args.lower_right else (rows, columns)
    if args.window_left < reach[0] or args.window_right < reach[1]:
        i = torch.arange(rows, device=device)[:, None]
        distance = j - i - (length - rows if args.lower_right else 0)
        visible = _both(visible, (distance >= -args.window_left) & (distance <= args.window_right))
    if args.attn_mask is not None:
        is_bool = args.attn_mask.dtype == torch.bool
        visible = _both(visible, args.attn_mask if is_bool else args.attn_mask != -torch.inf)
    return visible if visible is None else visible[(None,) * (4 - visible.dim())]


def blind_queries(visible: Tensor) -> Tensor:
    """Return bool (1 or B, 1 or H, 1 or rows, 1), True where a query sees nothing.

    Such a query may hold NaN, which the products of the backward pass would spread.
    """
    return ~visible.any(3, keepdim=True)


def unused_keys(visible: Tensor) -> Tensor:
    """Return bool (1 or B, 1 or H, 1 or columns, 1), True where no row sees the key.

    Such a key may hold NaN (unused cache memory), and 0 * NaN is NaN.
    """
    return ~visible.any(2).unsqueeze(-1)


def packed_visibility(args: VarlenAttentionArgs) -> Tensor:
    """Return the visibility of packed sequences, bool (Tq, Tk).

    Sequences do not see each other, and the diagonal is the lower-right one.
    """
    sequence_q, i = _places(args.query.size(0), args.cu_seq_q)
    sequence_k, j = _places(args.key.size(0), args.cu_seq_k)
    length = args.cu_seq_k.diff() if args.seqused_k is None else args.seqused_k
    distance = j - (i + (length - args.cu_seq_q.diff())[sequence_q])[:, None]
    visible = (sequence_q[:, None] == sequence_k) & (j < length[sequence_k])
    return visible & (distance >= -args.window_left) & (distance <= args.window_right)


def _places(tokens: int, cu_seq: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sequence of each packed token and its place in that sequence, both (tokens,) int64."""
    token = torch.arange(tokens, device=cu_seq.device)
    sequence = (token[:, None] >= cu_seq[1:]).sum(1)
    return sequence, token - cu_seq[sequence]


def _both(first: Tensor | None, second: Tensor) -> Tensor:
    return second if first is None else first & second


def softmax(scores: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the softmax over the last dimension of the visible scores; rows that see nothing are zero.

    Returns:
        P, and stats (2, ...): row_max and row_sum = sum(exp(score - row_max)). Both are 0 for a row that sees nothing.
    """
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    if scores.size(-1) == 0:
        return scores, scores.new_zeros(2, *scores.shape[:-1])
    row_max = scores.detach().amax(-1, keepdim=True)
    row_max = row_max.masked_fill(row_max == -torch.inf, 0.0)
    exponentials = torch.exp(scores - row_max)
    row_sum = exponentials.sum(-1, keepdim=True)
    probabilities = exponentials / row_sum.masked_fill(row_sum == 0, 1.0)
    return probabilities, torch.stack((row_max.squeeze(-1), row_sum.squeeze(-1)))


def add_mask(scores: Tensor, attn_mask: Tensor | None) -> Tensor:
    """Return the scores with a float mask added; ``visibility`` handles bool masks."""
    if attn_mask is None or attn_mask.dtype == torch.bool:
        return scores
    return scores + attn_mask.to(scores.dtype)
