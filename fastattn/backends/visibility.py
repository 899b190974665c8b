"""Which keys a query sees, for PyTorch's own operations: the rule of ``schema.py``."""

from __future__ import annotations

import torch
from torch import Tensor


def visibility(
    rows: int, columns: int, device: torch.device, attn_mask: Tensor | None, key_lengths: Tensor | None,
    window_left: int, window_right: int, lower_right: bool,
) -> Tensor | None:  # fmt: skip
    """bool, broadcastable to (B, H, rows, columns), True where a row sees a column; None where all see all."""
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
    return visible


def _both(first: Tensor | None, second: Tensor) -> Tensor:
    return second if first is None else first & second
