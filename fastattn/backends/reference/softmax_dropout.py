"""Masked softmax and dropout of scores: out = dropout(softmax(scale * input + mask)).

Source: Vaswani et al. 2017, section 3.2.1 (softmax of scaled scores) and 5.4 (dropout).
"""

from __future__ import annotations

from torch import Tensor

from fastattn.backends.reference.dropout import drop, opmath
from fastattn.backends.visibility import add_mask, softmax, visibility


def softmax_backward(grad: Tensor, probabilities: Tensor) -> Tensor:
    """Return dS = P * (dP - rowsum(P * dP)) for P = softmax(S); ``grad`` is dP."""
    # If P is 0, dP may be NaN from a product with an excluded value, and must not count.
    grad = grad.masked_fill(probabilities == 0, 0.0)
    return probabilities * (grad - (probabilities * grad).sum(-1, keepdim=True))


def softmax_dropout(
    input: Tensor, attn_mask: Tensor | None, key_lengths: Tensor | None, seed: Tensor | None, scale: float,
    window_left: int, window_right: int, lower_right: bool, threshold: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, columns = input.shape[-2:]
    visible = visibility(rows, columns, input.device, attn_mask, key_lengths, window_left, window_right, lower_right)
    probabilities, stats = softmax(add_mask(opmath(input) * scale, attn_mask), visible)
    return drop(probabilities, seed, threshold).to(input.dtype).contiguous(), stats


def softmax_dropout_backward(
    grad_out: Tensor, stats: Tensor, input: Tensor, attn_mask: Tensor | None, key_lengths: Tensor | None,
    seed: Tensor | None, scale: float, window_left: int, window_right: int, lower_right: bool, threshold: int,
    mask_grad: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, columns = input.shape[-2:]
    visible = visibility(rows, columns, input.device, attn_mask, key_lengths, window_left, window_right, lower_right)
    probabilities, _ = softmax(add_mask(opmath(input) * scale, attn_mask), visible)
    grad_scores = softmax_backward(drop(opmath(grad_out), seed, threshold), probabilities)
    grad_mask = input.new_empty(0)
    if attn_mask is not None and mask_grad:
        grad_mask = grad_scores.sum_to_size(attn_mask.shape).to(attn_mask.dtype)
    return (grad_scores * scale).to(input.dtype).contiguous(), grad_mask
