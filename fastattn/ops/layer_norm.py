"""Layer normalisation, also fused with the dropout and the residual addition before it.

Source: Ba et al. 2016; in the Transformer, LayerNorm(x + Sublayer(x)): Vaswani et al. 2017, sections 3.1 and 5.4.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from fastattn._torch_private import is_expanded_weight
from fastattn.backends.common import stat_dtype
from fastattn.backends.schema import (
    DropoutAddLayerNormArgs,
    DropoutAddLayerNormBackwardArgs,
    LayerNormArgs,
    LayerNormBackwardArgs,
)
from fastattn.ops import check
from fastattn.ops.dropout import dropout
from fastattn.ops.jagged import is_jagged, on_values
from fastattn.ops.register import Op, fast_path, may_want_gradient
from fastattn.ops.sharding import Shards, is_sharded

__all__ = ["dropout_add_layer_norm", "layer_norm"]

_SIZES = (int, numbers.Integral, torch.SymInt)


_plain = fast_path("layer_norm", widened=0)
_plain_residual = fast_path("dropout_add_layer_norm", widened=1)


@check.unscriptable
def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Compute (x - mean) / sqrt(var + eps) * weight + bias over the last dimensions, a superset of torch's function.

    A row and its gradient are NaN if the row holds NaN or infinity, or if its mean or variance overflows. The range is
    float32's, or float64's for float64 input. In float32 the variance of values about 1e19 overflows. torch gives 0 or
    NaN there.

    Args:
        input: (..., *normalized_shape), float32, bfloat16, float16 or float64; or a jagged nested tensor; or a DTensor,
            divided along other dimensions than the last ones.
        normalized_shape: the sizes of the last dimensions, over which mean and (biased) variance are taken.
        weight, bias: tensors of normalized_shape, each in one of these dtypes, which may differ from input's.
        eps: added to the variance, any number; if the sum is negative the row is NaN, as in torch.

    Returns:
        input's shape and dtype, contiguous.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or value; the message names it.

    Examples:
        >>> layer_norm(torch.tensor([1.0, 2.0, 3.0]), (3,))
        tensor([-1.2247,  0.0000,  1.2247])
    """
    shape: Any = normalized_shape
    out = _plain(input, weight, bias, shape[0] if isinstance(shape, tuple) and len(shape) == 1 else shape, eps)
    if out is not None:
        return out
    name = "layer_norm"
    if is_jagged(input):
        return on_values(lambda values: layer_norm(values, normalized_shape, weight, bias, eps), input)
    check.operand(name, "input", input)
    if type(shape) is not tuple:
        if not isinstance(shape, (Sequence, *_SIZES)):
            raise check.BadType(f"{name}: normalized_shape must be an integer or a sequence of them, got {shape!r}")
        shape = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    if not all(isinstance(size, _SIZES) for size in shape):
        raise check.BadType(f"{name}: normalized_shape must hold integers, got {normalized_shape!r}")
    dims = len(shape)
    if dims == 0 or input.shape[-dims:] != shape:
        raise check.BadValue(
            f"{name}: normalized_shape must be input's last sizes, "
            f"got {shape} for an input of shape {tuple(input.shape)}"
        )
    if is_sharded(input):
        shards = Shards(name, "input", input, range(input.dim() - dims))
        weight, bias = shards.part("weight", weight, {}), shards.part("bias", bias, {})
        return shards.whole(layer_norm(shards.own, shape, weight, bias, eps), input.shape)
    if is_expanded_weight(weight) or is_expanded_weight(bias):  # per-sample gradients support only torch's functions
        return F.layer_norm(input, shape, weight, bias, eps)
    _parameters(name, input, weight, bias, shape)
    eps = _eps(name, eps)
    x = check.autocast_float32(input)
    if dims > 1:
        x = x.flatten(-dims)
        weight, bias = (p if p is None else p.flatten() for p in (weight, bias))
    out, _, _ = layer_norm_op(LayerNormArgs(x, weight, bias, eps))
    return out if dims == 1 else out.view(input.shape)


@overload
def dropout_add_layer_norm(
    input: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, dropout_p: float = 0.0,
    eps: float = 1e-5, *, prenorm: Literal[False] = False, seed: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def dropout_add_layer_norm(
    input: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, dropout_p: float = 0.0,
    eps: float = 1e-5, *, prenorm: Literal[True], seed: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def dropout_add_layer_norm(
    input: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, dropout_p: float = 0.0,
    eps: float = 1e-5, *, prenorm: bool, seed: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@check.unscriptable
def dropout_add_layer_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    eps: float = 1e-5,
    *,
    prenorm: bool = False,
    seed: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute layer_norm(residual + dropout(input)) over the last dimension in one pass: the end of every sub-layer.

    The sum has the promoted dtype of input and residual, so that a bfloat16 sub-layer adds to a float32 residual
    stream without a cast. Dropout applies whenever ``dropout_p`` > 0: pass 0 in evaluation. A row of the sum whose
    statistics overflow is NaN, as in ``layer_norm``.

    Args:
        input: (..., D), the sub-layer's output, float32, bfloat16, float16 or float64. input and residual may be
            DTensors, divided alike and not along D.
        residual: tensor of input's shape, in one of these dtypes.
        weight, bias: (D,), each in one of these dtypes, or None.
        dropout_p: probability in [0, 1] of dropping an element of input; kept ones are scaled up.
        eps: added to the variance.
        prenorm: also return the sum, the residual of the next sub-layer in a pre-norm Transformer.
        seed: int64 (2,), (key, offset), of the dropout; drawn from torch's default generator when not given.
        out_dtype: dtype of the normalised sum; the sum's by default. For a float32 sum it may be bfloat16 or float16,
            so that the product that reads it needs no cast.

    Returns:
        The normalised sum, contiguous, in the sum's dtype or ``out_dtype``; with ``prenorm`` also the sum.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or value; the message names it.

    Examples:
        >>> sublayer, residual = torch.randn(4, 512, dtype=torch.bfloat16), torch.randn(4, 512)
        >>> out, residual = dropout_add_layer_norm(sublayer, residual, dropout_p=0.1, prenorm=True)
        >>> out.dtype, residual.dtype
        (torch.float32, torch.float32)
    """
    found = _plain_residual(input, residual, weight, bias, seed, dropout_p, eps, prenorm, out_dtype)
    if found is not None and found[0] is not None:
        return found if prenorm else found[0]
    name = "dropout_add_layer_norm"
    check.flag(name, "prenorm", prenorm)
    check.operand(name, "input", input)
    check.operand(name, "residual", residual)
    if input.shape != residual.shape or input.dim() == 0:
        raise check.BadValue(
            f"{name}: input and residual must have one shape (..., D), "
            f"got {tuple(input.shape)} and {tuple(residual.shape)}"
        )
    if is_sharded(input):
        shards = Shards(name, "input", input, range(input.dim() - 1))
        residual, seed = shards.local("residual", residual), shards.seed(seed, dropout_p)
        weight, bias = shards.part("weight", weight, {}), shards.part("bias", bias, {})
        results = dropout_add_layer_norm(
            shards.own, residual, weight, bias, dropout_p, eps, prenorm=True, seed=seed, out_dtype=out_dtype
        )
        out, total = (shards.whole(result, input.shape) for result in results)
        return (out, total) if prenorm else out
    if is_expanded_weight(weight) or is_expanded_weight(bias):
        total = residual + dropout(input, dropout_p, seed=seed)
        out = F.layer_norm(total, total.shape[-1:], weight, bias, eps).to(out_dtype or total.dtype)
        return (out, total) if prenorm else out
    check.same_device(name, "residual", residual, input.device)
    _parameters(name, input, weight, bias, input.shape[-1:])
    eps = _eps(name, eps)
    threshold = check.threshold(name, dropout_p)
    check.seed(name, seed, input.device)
    residual = check.autocast_float32(residual)
    seed = check.draw_seed(seed, threshold, input)
    sum_dtype = torch.promote_types(input.dtype, residual.dtype)
    if out_dtype is None:
        out_dtype = sum_dtype
    elif out_dtype != sum_dtype and (sum_dtype != torch.float32 or out_dtype not in check.HALVES):
        raise check.BadValue(
            f"{name}: out_dtype must be the sum's dtype, {check.dtype_name(sum_dtype)}, or beside float32 bfloat16 or "
            f"float16, got {str(out_dtype).removeprefix('torch.')}"
        )
    keep_sum = prenorm or out_dtype != sum_dtype or may_want_gradient(input, residual, weight, bias)
    args = DropoutAddLayerNormArgs(
        input=input, residual=residual, weight=weight, bias=bias, seed=seed, threshold=threshold, eps=eps,
        keep_sum=keep_sum, out_dtype=out_dtype,
    )  # fmt: skip
    out, total, _, _ = dropout_add_layer_norm_op(args)
    return (out, total) if prenorm else out


def _parameters(name: str, input: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int]) -> None:
    for label, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        check.operand(name, label, parameter)
        if parameter.shape != shape:
            raise check.BadValue(f"{name}: {label} must have shape {tuple(shape)}, got {tuple(parameter.shape)}")
        check.same_device(name, label, parameter, input.device)


def _eps(name: str, eps: float) -> float:
    return eps if type(eps) is float else check.real(name, "eps", eps)


def _fake_layer_norm(args: LayerNormArgs) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_rows(args.input)


def _fake_rows(input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mean = input.new_empty(input.shape[:-1], dtype=stat_dtype(input.dtype))
    return input.new_empty(input.shape), mean, torch.empty_like(mean)


def _fake_parameter_grads(input: Tensor, *dtypes: torch.dtype | None) -> list[Tensor]:
    return [input.new_empty(0 if dtype is None else input.size(-1), dtype=dtype or torch.float32) for dtype in dtypes]


def _fake_layer_norm_backward(args: LayerNormBackwardArgs) -> tuple[Tensor, ...]:
    grads = _fake_parameter_grads(args.input, args.weight_grad_dtype, args.bias_grad_dtype)
    return args.input.new_empty(args.input.shape), *grads


layer_norm_backward_op = Op("layer_norm_backward", _fake_layer_norm_backward)


def _wanted(tensors: Sequence[Any], needs_grad: Sequence[bool]) -> tuple[torch.dtype | None, ...]:
    _, weight, bias = tensors[:3]
    return weight.dtype if needs_grad[1] else None, bias.dtype if needs_grad[2] else None


def _decompose_layer_norm(args: LayerNormArgs) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the op by torch's function, which requires one dtype for all operands."""
    x = args.input.to(stat_dtype(args.input.dtype))
    w, b = (p if p is None else p.to(x.dtype) for p in (args.weight, args.bias))
    out, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], w, b, args.eps)
    return out.to(args.input.dtype), mean.squeeze(-1), rstd.squeeze(-1)


layer_norm_op = Op("layer_norm", _fake_layer_norm, "layer_norm_backward", _wanted, _decompose_layer_norm)


def _fake_residual(args: DropoutAddLayerNormArgs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(args.input.dtype, args.residual.dtype)
    sum = args.input.new_empty(args.input.shape, dtype=dtype)
    out, mean, rstd = _fake_rows(sum)
    return out.to(args.out_dtype or dtype), sum if args.keep_sum else sum.new_empty(0), mean, rstd


def _fake_residual_backward(args: DropoutAddLayerNormBackwardArgs) -> tuple[Tensor, ...]:
    sum = args.sum
    grads = _fake_parameter_grads(sum, args.weight_grad_dtype, args.bias_grad_dtype)
    return sum.new_empty(sum.shape, dtype=args.input_dtype), sum.new_empty(sum.shape), *grads


dropout_add_layer_norm_backward_op = Op("dropout_add_layer_norm_backward", _fake_residual_backward)


def _residual_wanted(tensors: Sequence[Any], needs_grad: Sequence[bool]) -> tuple[torch.dtype | None, ...]:
    input, _, weight, bias = tensors[:4]
    return input.dtype, weight.dtype if needs_grad[2] else None, bias.dtype if needs_grad[3] else None


def _decompose_residual(args: DropoutAddLayerNormArgs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(args.input.dtype, args.residual.dtype)
    sum = args.input.to(stat_dtype(dtype)) + args.residual
    out, mean, rstd = _decompose_layer_norm(LayerNormArgs(sum, args.weight, args.bias, args.eps))
    return (
        out.to(args.out_dtype or dtype),
        sum.to(dtype) if args.keep_sum else sum.new_empty(0, dtype=dtype),
        mean,
        rstd,
    )


dropout_add_layer_norm_op = Op(
    "dropout_add_layer_norm",
    _fake_residual,
    "dropout_add_layer_norm_backward",
    _residual_wanted,
    _decompose_residual,
)
