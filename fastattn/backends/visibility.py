"""The keys that a query sees, by the rule of ``schema.py``, and the softmax over them, in PyTorch's own operations."""

from __future__ import annotations

import torch
from torch import Tensor


def visibility(
    rows: int, columns: int, device: torch.device, attn_mask: Tensor | None, key_lengths: Tensor | None,
    window_left: int, window_right: int, lower_right: bool,
) -> Tensor | None:  # fmt: skip
    """Return a bool tensor, True where a row sees a column, or None if every row sees every column.

    Each of its four dimensions is 1 or that of (B, H, rows, columns).
    """
    visible = None
    j = torch.arange(columns, device=device)
    length: Tensor | int = columns
    if key_lengths is not None:
        length = key_lengths[:, None, None, None]
        visible = j < length
    reach = (columns, rows) if lower_right else (rows, columns)
    if window_left < reach[0] or window_right < reach[1]:
        i = torch.arange(rows, device=device)[:, None]
        distance = j - i - (length - rows if lower_right else 0)
        visible = _both(visible, (distance >= -window_left) & (distance <= window_right))
    if attn_mask is not None:
        visible = _both(visible, attn_mask if attn_mask.dtype == torch.bool else attn_mask != -torch.inf)
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


def packed_visibility(
    tokens_q: int, tokens_k: int, cu_seq_q: Tensor, cu_seq_k: Tensor, seqused_k: Tensor | None, window_left: int,
    window_right: int,
) -> Tensor:  # fmt: skip
    """Return the visibility of packed sequences, bool (tokens_q, tokens_k).

    Sequences do not see each other, and the diagonal is the lower-right one.
    """
    sequence_q, i = _places(tokens_q, cu_seq_q)
    sequence_k, j = _places(tokens_k, cu_seq_k)
    length = cu_seq_k.diff() if seqused_k is None else seqused_k
    distance = j - (i + (length - cu_seq_q.diff())[sequence_q])[:, None]
    visible = (sequence_q[:, None] == sequence_k) & (j < length[sequence_k])
    return visible & (distance >= -window_left) & (distance <= window_right)


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
