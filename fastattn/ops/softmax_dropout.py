"""Masked softmax and dropout of scores in one pass.

Source: Vaswani et al. 2017, section 3.2.1 (softmax of the scaled scores) and 5.4 (dropout).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastattn.backends.common import stat_dtype
from fastattn.backends.schema import SoftmaxDropoutArgs, SoftmaxDropoutBackwardArgs
from fastattn.backends.visibility import add_mask, softmax, visibility
from fastattn.ops import check
from fastattn.ops.register import Op, fast_path
from fastattn.ops.sharding import Shards, is_sharded

__all__ = ["softmax_dropout"]


_plain = fast_path("softmax_dropout", widened=0)


@check.unscriptable
def softmax_dropout(
    input: Tensor,
    dropout_p: float = 0.0,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float = 1.0,
    *,
    seed: Tensor | None = None,
) -> Tensor:
    """Compute dropout(softmax(scale * input + mask)) over the last dimension: attention without its two products.

    Differences from ``torch.softmax`` followed by ``dropout``: there are masks, a row that sees nothing is 0, and for
    the same seed fused attention drops the same elements. Dropout applies whenever ``dropout_p`` > 0: pass 0 in
    evaluation.

    Args:
        input: (..., L, S) scores, float32, bfloat16, float16 or float64; 1-D is one row. It may be a DTensor, divided
            along other dimensions than L and S.
        dropout_p: probability in [0, 1] of dropping an element; kept ones are scaled up.
        attn_mask: bool (True = takes part) or float (added to scale * input, may require grad), broadcastable to input.
        is_causal: element (i, j) takes part only where j <= i.
        scale: any real number.
        seed: int64 (2,), (key, offset), of the dropout; drawn from torch's default generator when not given.

    Returns:
        input's shape and dtype, contiguous.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or value; the message names it.

    Examples:
        >>> softmax_dropout(torch.zeros(3, 3), is_causal=True)
        tensor([[1.0000, 0.0000, 0.0000],
                [0.5000, 0.5000, 0.0000],
                [0.3333, 0.3333, 0.3333]])
    """
    out = _plain(input, attn_mask, None, seed, dropout_p, is_causal, scale)
    if out is not None:
        return out
    name = "softmax_dropout"
    check.operand(name, "input", input)
    if input.dim() == 0:
        raise check.BadValue(f"{name}: input must have at least 1 dimension, got a scalar")
    if is_sharded(input):
        shards = Shards(name, "input", input, range(input.dim() - 2))
        mask, seed = shards.mask(attn_mask), shards.seed(seed, dropout_p)
        return shards.whole(softmax_dropout(shards.own, dropout_p, mask, is_causal, scale, seed=seed), input.shape)
    x = check.autocast_float32(input)
    threshold = check.threshold(name, dropout_p)
    check.seed(name, seed, x.device)
    scale = check.scale(name, scale)
    mask = check.mask(name, attn_mask, x.shape, x.dtype, x.device)
    scores = x[(None,) * (4 - x.dim())] if x.dim() < 4 else x.flatten(0, -4)
    window = check.window(name, (-1, -1), is_causal, False, scores.size(2), scores.size(3))
    seed = check.draw_seed(seed, threshold, x)
    args = SoftmaxDropoutArgs(
        input=scores, attn_mask=mask, key_lengths=None, seed=seed, scale=scale, window_left=window[0],
        window_right=window[1], lower_right=False, threshold=threshold,
    )  # fmt: skip
    out, _ = softmax_dropout_op(args)
    return out.view(x.shape)


def _fake_softmax_dropout(args: SoftmaxDropoutArgs) -> tuple[Tensor, Tensor]:
    input = args.input
    return input.new_empty(input.shape), input.new_empty((2, *input.shape[:-1]), dtype=stat_dtype(input.dtype))


def fake_mask_grad(like: Tensor, attn_mask: Tensor | None, wanted: bool) -> Tensor:
    """Return a fake of the mask's gradient, or an empty tensor if the gradient is not needed."""
    return like.new_empty(0) if attn_mask is None or not wanted else attn_mask.new_empty(attn_mask.shape)


def _fake_softmax_dropout_backward(args: SoftmaxDropoutBackwardArgs) -> tuple[Tensor, Tensor]:
    input = args.forward.input
    return input.new_empty(input.shape), fake_mask_grad(input, args.forward.attn_mask, args.mask_grad)


softmax_dropout_backward_op = Op("softmax_dropout_backward", _fake_softmax_dropout_backward)


def _wanted(tensors: Sequence[Tensor | None], needs_grad: Sequence[bool]) -> tuple[bool]:
    return (needs_grad[1],)


def _decompose(args: SoftmaxDropoutArgs) -> tuple[Tensor, Tensor]:
    visible, dtype = visibility(args), args.input.dtype
    scores = add_mask(args.input.to(stat_dtype(dtype)) * args.scale, args.attn_mask)
    _, stats = softmax(scores, visible)
    if visible is None:
        return scores.softmax(-1).to(dtype), stats
    out = scores.masked_fill(~visible, -torch.inf).softmax(-1).masked_fill(~visible.any(-1, keepdim=True), 0.0)
    return out.to(dtype), stats


# The backward pass reads the input and two values per row instead of P. One tensor less is written, and P is cheap to
# recompute.
softmax_dropout_op = Op("softmax_dropout", _fake_softmax_dropout, "softmax_dropout_backward", _wanted, _decompose)
