"""Dropout, and its mask, which is a formula of seed and position.

Source: Srivastava et al. 2014; in the Transformer: Vaswani et al. 2017, section 5.4. The formula: docs/design.md.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence

import torch
from torch import Tensor

from fastattn.backends.common import empty_dense
from fastattn.backends.schema import DropoutArgs, DropoutMaskArgs
from fastattn.ops import check
from fastattn.ops.jagged import is_jagged, on_values
from fastattn.ops.register import Op, fast_path
from fastattn.ops.sharding import Shards, is_sharded

__all__ = ["dropout", "dropout_mask"]


_plain = fast_path("dropout")


@check.unscriptable
def dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, seed: Tensor | None = None
) -> Tensor:
    """Zero each element with probability ``p`` and scale the others up, a superset of torch's function of this name.

    The rate is realised in steps of 2**-16 and the scale is that of the realised rate, so the result is unbiased.

    Args:
        input: any shape, float32, bfloat16, float16 or float64; or a jagged nested tensor, which is treated as its
            ``values()``; or a DTensor, divided along any dimension.
        p: probability in [0, 1] of dropping an element.
        training: if False, input is returned as it is, in every dtype.
        inplace: write the result into input.
        seed: int64 (2,), (key, offset); drawn from torch's default generator when not given.

    Returns:
        input's shape, dtype and, where input is dense, strides.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or value; the message names it.

    Examples:
        >>> dropout(torch.ones(8), 0.5, seed=torch.tensor([1, 2]))
        tensor([2., 0., 2., 2., 0., 2., 0., 0.])
    """
    if training is True and inplace is False:
        out = _plain(input, seed, p)
        if out is not None:
            return out
    check.flag("dropout", "training", training)
    if not isinstance(inplace, int):  # torch takes 0 and 1
        check.flag("dropout", "inplace", inplace)
    threshold = check.threshold("dropout", p, "p")
    if isinstance(input, Tensor) and (not training or threshold == 0):
        return input.clone() if training and p > 0 and not inplace else input
    if is_jagged(input):
        return on_values(lambda values: dropout(values, p, training, inplace, seed=seed), input)
    check.operand("dropout", "input", input)
    if is_sharded(input):
        shards = Shards("dropout", "input", input, range(input.dim()))
        out = dropout(shards.own, p, seed=shards.seed(seed, p))
        return input.copy_(shards.whole(out, input.shape)) if inplace else shards.whole(out, input.shape)
    check.seed("dropout", seed, input.device)
    drawn = check.draw_seed(seed, threshold, input)
    assert drawn is not None  # the threshold is not 0
    out = dropout_op(DropoutArgs(input, drawn, threshold))
    return input.copy_(out) if inplace else out


@check.unscriptable
def dropout_mask(shape: Sequence[int], dropout_p: float, seed: Tensor) -> Tensor:
    """Return the mask that every operation of fastattn applies to a tensor of this shape for this seed.

    Args:
        shape: sizes; the last two are rows and columns, the rest number the matrices. For attention: (B, Hq, Lq, Lk).
        dropout_p: probability in [0, 1] of dropping an element.
        seed: int64 (2,), (key, offset).

    Returns:
        bool tensor of that shape on seed's device, True = kept.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape or value; the message names it.

    Examples:
        >>> seed = torch.tensor([1, 2])
        >>> kept = dropout_mask((2, 8), 0.5, seed)
        >>> torch.equal(dropout(torch.ones(2, 8), 0.5, seed=seed), 2.0 * kept)
        True
    """
    name = "dropout_mask"
    if not isinstance(seed, Tensor):
        raise check.BadType(
            f"{name}: seed must be an int64 Tensor of shape (2,), (key, offset), got {type(seed).__name__}"
        )
    check.seed(name, seed, seed.device)
    try:
        shape = tuple(shape)
    except TypeError:
        raise check.BadType(f"{name}: shape must be a sequence of integers, got {shape!r}") from None
    if not all(isinstance(size, numbers.Integral | torch.SymInt) and size >= 0 for size in shape):
        raise check.BadValue(f"{name}: shape must hold integers of at least 0, got {shape!r}")
    if math.prod(shape) >= 2**63:
        raise check.BadValue(f"{name}: shape must hold less than 2**63 elements, got {shape!r}")
    threshold = check.threshold(name, dropout_p)
    return dropout_mask_op(DropoutMaskArgs(shape, seed.contiguous(), threshold))


def _fake_dropout(args: DropoutArgs) -> Tensor:
    return empty_dense(args.input)


def _decompose(args: DropoutArgs) -> Tensor:
    return args.input.clone()


# Dropout multiplies by a diagonal matrix, which is its own transpose: it is its own backward pass.
dropout_op = Op("dropout", _fake_dropout, "dropout", decompose=_decompose)


def _fake_dropout_mask(args: DropoutMaskArgs) -> Tensor:
    return args.seed.new_empty(args.shape, dtype=torch.bool)


def _decompose_dropout_mask(args: DropoutMaskArgs) -> Tensor:
    return args.seed.new_ones(args.shape, dtype=torch.bool)


dropout_mask_op = Op("dropout_mask", _fake_dropout_mask, decompose=_decompose_dropout_mask)
