"""Masked softmax and dropout of scores: out = dropout(softmax(scale * input + mask)).

Source: Vaswani et al. 2017, section 3.2.1 (softmax of scaled scores) and 5.4 (dropout).
"""

from __future__ import annotations

from torch import Tensor

from fastattn.backends.reference.dropout import drop, opmath
from fastattn.backends.schema import SoftmaxDropoutArgs, SoftmaxDropoutBackwardArgs
from fastattn.backends.visibility import add_mask, softmax, visibility


def softmax_backward(grad: Tensor, probabilities: Tensor) -> Tensor:
    """Return dS = P * (dP - rowsum(P * dP)) for P = softmax(S); ``grad`` is dP."""
    # If P is 0, dP may be NaN from a product with an excluded value, and must not count.
    grad = grad.masked_fill(probabilities == 0, 0.0)
    return probabilities * (grad - (probabilities * grad).sum(-1, keepdim=True))


def _probabilities(args: SoftmaxDropoutArgs) -> tuple[Tensor, Tensor]:
    """Return P and stats."""
    return softmax(add_mask(opmath(args.input) * args.scale, args.attn_mask), visibility(args))


def softmax_dropout(args: SoftmaxDropoutArgs) -> tuple[Tensor, Tensor]:
    probabilities, stats = _probabilities(args)
    return drop(probabilities, args.seed, args.threshold).to(args.input.dtype).contiguous(), stats


def softmax_dropout_backward(args: SoftmaxDropoutBackwardArgs) -> tuple[Tensor, Tensor]:
    forward = args.forward
    probabilities, _ = _probabilities(forward)
    grad_scores = softmax_backward(drop(opmath(args.grad_out), forward.seed, forward.threshold), probabilities)
    grad_mask = forward.input.new_empty(0)
    if forward.attn_mask is not None and args.mask_grad:
        grad_mask = grad_scores.sum_to_size(forward.attn_mask.shape).to(forward.attn_mask.dtype)
    return (grad_scores * forward.scale).to(forward.input.dtype).contiguous(), grad_mask
