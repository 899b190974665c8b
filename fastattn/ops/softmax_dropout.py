"""Masked softmax and dropout of scores in one pass.

Source: Vaswani et al. 2017, section 3.2.1 (softmax of the scaled scores) and 5.4 (dropout).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn.backends import choose, compiled
from fastattn.backends.reference.dropout import stat_dtype
from fastattn.ops import check
from fastattn.ops.register import BackwardOp, Op, is_plain_backward, plain_apply, wants_gradient

_direct = compiled("softmax_dropout_direct")
_kept, _kept_backward = compiled("softmax_dropout_kept"), compiled("softmax_dropout_kept_backward")


def softmax_dropout(
    input: Tensor,
    dropout_p: float = 0.0,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float = 1.0,
    *,
    seed: Tensor | None = None,
) -> Tensor:
    """dropout(softmax(scale * input + mask)) over the last dimension: the part of attention between its two products.

    Beyond ``torch.softmax`` followed by ``dropout``: masks, a row that sees nothing is 0, and the dropout is the one
    that fused attention applies for the same seed. It drops whenever ``dropout_p`` > 0: pass 0 in evaluation.

    Args:
        input: (..., L, S) scores, float32, bfloat16, float16 or float64; 1-D is one row.
        dropout_p: probability in [0, 1] of dropping an element; kept ones are scaled up.
        attn_mask: bool (True = takes part) or float (added to scale * input, may require grad), broadcastable to input.
        is_causal: element (i, j) takes part only where j <= i.
        scale: any real number.
        seed: int64 (2,), (key, offset), of the dropout; drawn from torch's default generator when not given.

    Returns:
        input's shape and dtype, contiguous.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or value; the message names it.
    """
    name = "softmax_dropout"
    if (
        attn_mask is None
        and is_causal is False
        and type(scale) is float
        and scale == 1.0
        and (differentiate := wants_gradient(input, seed)) is not None
    ):
        threshold = check.threshold(name, dropout_p)
        if differentiate and seed is None:
            seed = check.draw_seed(None, threshold, input.device)
        run = _apply_direct if differentiate else _direct
        out = run(input) if threshold == 0 and seed is None else run(input, threshold, seed)
        if out is not None:
            return out
    check.float_tensor(name, "input", input)
    if input.dim() == 0:
        raise ValueError(f"{name}: input must have at least 1 dimension, got a scalar")
    x = check.autocast_float32(input)
    check.flag(name, "is_causal", is_causal)
    threshold = check.threshold(name, dropout_p)
    check.check_seed(name, seed, x.device)
    scale = check.scale(name, scale)
    mask = check.mask(name, attn_mask, x.shape, x.dtype, x.device)
    scores = x[(None,) * (4 - x.dim())] if x.dim() < 4 else x.flatten(0, -4)
    backend = choose("softmax_dropout", (scores,), mask)
    out, _ = softmax_dropout_op(
        backend, scores, mask, None, check.draw_seed(seed, threshold, x.device), scale, -1,
        0 if is_causal else -1, False, threshold,
    )  # fmt: skip
    return out.view(x.shape)


def _fake_softmax_dropout(input: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return (
        input.new_empty(input.shape),
        input.new_empty((2, *input.shape[:-1]), dtype=stat_dtype(input.dtype)),
    )


def fake_mask_grad(like: Tensor, attn_mask: Tensor | None, wanted: bool) -> Tensor:
    """The mask's gradient in shape and dtype; an empty tensor where it is not wanted."""
    return like.new_empty(0) if attn_mask is None or not wanted else attn_mask.new_empty(attn_mask.shape)


def _fake_softmax_dropout_backward(
    grad_out: Tensor, input: Tensor, stats: Tensor, attn_mask: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    return input.new_empty(input.shape), fake_mask_grad(input, attn_mask, rest[-1])


softmax_dropout_backward_op = BackwardOp(
    "softmax_dropout_backward(Tensor grad_out, Tensor input, Tensor stats, Tensor? attn_mask, Tensor? key_lengths, "
    "Tensor? seed, float scale, SymInt window_left, SymInt window_right, bool lower_right, int threshold, "
    "bool mask_grad) -> (Tensor, Tensor)",
    _fake_softmax_dropout_backward,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    input, attn_mask, key_lengths, seed, *ctx.settings, ctx.backend = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    # The input and two numbers a row, rather than P: one tensor less is written, and P is cheap to recompute.
    ctx.save_for_backward(input, output[1], attn_mask, key_lengths, seed)


def _backward(ctx: Any, grad_out: Tensor | None, _: None) -> tuple[Any, ...]:
    if grad_out is None:
        return (None,) * 10
    mask_grad = ctx.needs_input_grad[1]
    grad_input, grad_mask = softmax_dropout_backward_op(
        ctx.backend, grad_out, *ctx.saved_tensors, *ctx.settings, mask_grad
    )
    return grad_input, grad_mask if mask_grad else None, *(None,) * 8


softmax_dropout_op = Op(
    "softmax_dropout(Tensor input, Tensor? attn_mask, Tensor? key_lengths, Tensor? seed, float scale, "
    "SymInt window_left, SymInt window_right, bool lower_right, int threshold) -> (Tensor, Tensor)",
    _fake_softmax_dropout,
    _setup,
    _backward,
)


class _Direct(torch.autograd.Function):
    """The direct way of a call that wants a gradient: nothing but the output is a result."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, threshold: int = 0, seed: Tensor | None = None) -> Tensor | None:
        out, stats = _kept(input, threshold, seed)
        if out is not None:
            ctx.save_for_backward(input, stats, seed)
            ctx.threshold = threshold
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        input, stats, seed = ctx.saved_tensors
        if is_plain_backward(grad_out):
            return _kept_backward(grad_out, input, stats, ctx.threshold, seed), None, None
        shape = stats.shape[1:] + input.shape[-1:]
        grad_input, _ = softmax_dropout_backward_op(
            "cpu", grad_out.view(shape), input.view(shape), stats, None, None, seed, 1.0, -1, -1, False, ctx.threshold,
            False,
        )  # fmt: skip
        return grad_input.view(input.shape), None, None


_apply_direct = plain_apply(_Direct)
