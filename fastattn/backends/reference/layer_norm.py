"""Layer normalisation over the last dimension, also of residual + dropout(input).

Source: Ba et al. 2016; in the Transformer, LayerNorm(x + Sublayer(x)): Vaswani et al. 2017, sections 3.1 and 5.4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.backends.common import is_torchs
from fastattn.backends.reference.dropout import drop, opmath
from fastattn.backends.schema import (
    DropoutAddLayerNormArgs,
    DropoutAddLayerNormBackwardArgs,
    LayerNormArgs,
    LayerNormBackwardArgs,
)


def _centre(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x - mean and the mean.

    The mean of the differences corrects the mean's rounding error, so constant rows give 0.
    """
    mean = x.mean(-1, keepdim=True)
    deviations = x - mean
    shift = deviations.mean(-1, keepdim=True)
    return deviations.sub_(shift), mean + shift


def _rstd(variance: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(variance + eps), or NaN if the variance, or its sum with a finite eps, overflows.

    An rstd of 0 would make the row look healthy.
    """
    radicand = variance + eps
    bounded = radicand if eps <= torch.finfo(variance.dtype).max else variance
    return torch.rsqrt(radicand).masked_fill(bounded == torch.inf, torch.nan)


def _normalise(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x - mean) / sqrt(var + eps) with the biased variance, mean and rstd."""
    centred, mean = _centre(x)
    rstd = _rstd((centred * centred).mean(-1, keepdim=True), eps)
    return centred * rstd, mean.squeeze(-1), rstd.squeeze(-1)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        x = x * weight.to(x.dtype)
    return x if bias is None else x + bias.to(x.dtype)


def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    if is_torchs(x, weight, bias):
        weight, bias = (p if p is None else p.to(x.dtype) for p in (weight, bias))
        out, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
        if rstd.all():  # torch 2.13 gives 0, for some sizes, if the variance overflows
            return out, mean.squeeze(-1), rstd.squeeze(-1)
    normal, mean, rstd = _normalise(x, eps)
    return _affine(normal, weight, bias), mean, rstd


def layer_norm(args: LayerNormArgs) -> tuple[Tensor, Tensor, Tensor]:
    out, mean, rstd = _layer_norm(opmath(args.input), args.weight, args.bias, args.eps)
    return out.to(args.input.dtype).contiguous(), mean.contiguous(), rstd.contiguous()


def layer_norm_backward(args: LayerNormBackwardArgs) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), g = grad_out * weight, xhat the normalised row."""
    grad_out, input, mean, rstd, weight, weight_grad_dtype, bias_grad_dtype = args
    grad, x = opmath(grad_out), opmath(input)
    nothing = grad.new_empty(0, dtype=torch.float32)
    if is_torchs(x, grad, weight):
        # For a bias's gradient torch requires a weight. It does not read the bias.
        gain = grad.new_ones(x.size(-1)) if weight is None else weight.to(x.dtype)
        wanted = [True, weight_grad_dtype is not None, bias_grad_dtype is not None]
        grad_input, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
            grad, x, x.shape[-1:], mean.unsqueeze(-1), rstd.unsqueeze(-1), gain, gain, wanted
        )
        return (
            grad_input.contiguous(),
            nothing if weight_grad_dtype is None else grad_weight.to(weight_grad_dtype),
            nothing if bias_grad_dtype is None else grad_bias.to(bias_grad_dtype),
        )
    centred, _ = _centre(x)
    # Double backward needs rstd as a function of the variance. The factor on the saved rstd, which contains eps, is
    # exactly 1.
    variance = (centred * centred).mean(-1, keepdim=True)
    saved = rstd.detach().unsqueeze(-1)
    inverse = saved * torch.rsqrt(1.0 + (variance - variance.detach()) * saved * saved)
    normal = centred * inverse
    g = grad if weight is None else grad * weight.to(grad.dtype)
    grad_input = inverse * (g - g.mean(-1, keepdim=True) - normal * (g * normal).mean(-1, keepdim=True))
    rows = tuple(range(input.dim() - 1))
    grad_weight = (grad * normal).sum(rows) if rows else grad * normal
    grad_bias = grad.sum(rows) if rows else grad
    return (
        grad_input.to(input.dtype).contiguous(),
        nothing if weight_grad_dtype is None else grad_weight.to(weight_grad_dtype),
        nothing if bias_grad_dtype is None else grad_bias.to(bias_grad_dtype),
    )


def dropout_add_layer_norm(args: DropoutAddLayerNormArgs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(args.input.dtype, args.residual.dtype)
    total = drop(opmath(args.input), args.seed, args.threshold) + opmath(args.residual)
    out, mean, rstd = _layer_norm(total, args.weight, args.bias, args.eps)
    return out.to(args.out_dtype or dtype), total.to(dtype) if args.keep_sum else total.new_empty(0), mean, rstd


def dropout_add_layer_norm_backward(args: DropoutAddLayerNormBackwardArgs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_sum = LayerNormBackwardArgs(
        args.grad_out, args.sum, args.mean, args.rstd, args.weight, args.weight_grad_dtype, args.bias_grad_dtype
    )
    grad_total, grad_weight, grad_bias = layer_norm_backward(of_sum)
    if args.grad_sum is not None:
        grad_total = (opmath(grad_total) + opmath(args.grad_sum)).to(args.sum.dtype)
    grad_input = drop(opmath(grad_total), args.seed, args.threshold).to(args.input_dtype)
    return grad_input.contiguous(), grad_total.contiguous(), grad_weight, grad_bias
