"""Dropout by formula: Philox4x32-7 on the element's position (docs/design.md, "Dropout is defined by a formula")."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fastattn.backends.common import DROP_ALL, dense_strides, dropout_scale, empty_dense, stat_dtype
from fastattn.backends.schema import DropoutArgs, DropoutMaskArgs

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 7
_LOW = 0xFFFFFFFF  # mask of a word; words are int64, whose products wrap modulo 2**64 with the right bits


def _philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four random 32-bit words, as int64, for each counter, as Random123 defines Philox4x32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) ^ c1 ^ k0) & _LOW,
            product1,  # the next round masks its high half
            ((product0 >> 32) ^ c3 ^ k1) & _LOW,
            product0,
        )
        k0, k1 = (k0 + _KEY_INCREMENTS[0]) & _LOW, (k1 + _KEY_INCREMENTS[1]) & _LOW
    return c0, c1 & _LOW, c2, c3 & _LOW


def dropout_mask(args: DropoutMaskArgs) -> Tensor:
    return keep_mask(*args)


def keep_mask(shape: Sequence[int], seed: Tensor, threshold: int, first_matrix: int = 0) -> Tensor:
    """Return the bool mask, True = kept.

    ``first_matrix`` is the number z of the first matrix, not 0 for the later sequences of a packed batch.
    """
    columns = shape[-1] if len(shape) > 0 else 1
    rows = shape[-2] if len(shape) > 1 else 1
    matrices = 1
    for size in shape[:-2]:
        matrices *= size
    tiles_x, tiles_y = -(-columns // 32), -(-rows // 16)
    device = seed.device
    x = torch.arange(tiles_x * 8, device=device)
    y = torch.arange(tiles_y * 8, device=device)[:, None]
    z = torch.arange(first_matrix, first_matrix + matrices, device=device)[:, None, None] & _LOW
    key, offset = seed[0], seed[1] & _LOW
    philox = _philox((x, y, z, offset), (key & _LOW, (key >> 32) & _LOW))
    words = [word.expand(matrices, tiles_y * 8, tiles_x * 8) for word in philox]
    # Value v is half v % 2 of word v // 2. In its 16x32 tile it belongs to row half v // 4 and column quarter v % 4.
    kept = torch.stack([half >= threshold for word in words for half in (word & 0xFFFF, word >> 16)])
    kept = kept.view(2, 4, matrices, tiles_y, 8, tiles_x, 8).permute(2, 3, 0, 4, 5, 1, 6)
    return kept.reshape(matrices, tiles_y * 16, tiles_x * 32)[:, :rows, :columns].reshape(tuple(shape)).contiguous()


def dropper(
    shape: Sequence[int], seed: Tensor | None, threshold: int, first_matrix: int = 0
) -> Callable[[Tensor], Tensor]:
    """Return a function that applies dropout to tensors of this shape, in their dtype, with one mask for all calls.

    Dropped elements become 0, and kept ones are scaled by 65536 / (65536 - threshold).
    """
    if threshold == 0 or seed is None:
        return lambda input: input
    if threshold == DROP_ALL:
        return torch.zeros_like
    keep = keep_mask(shape, seed, threshold, first_matrix)
    return lambda input: torch.where(keep, input, 0.0).mul_(dropout_scale(threshold))


def drop(input: Tensor, seed: Tensor | None, threshold: int) -> Tensor:
    """Return dropout of one tensor, by :func:`dropper`."""
    return dropper(input.shape, seed, threshold)(input)


def opmath(tensor: Tensor) -> Tensor:
    """Return the tensor in the dtype of its computation, ``stat_dtype``."""
    return tensor.to(stat_dtype(tensor.dtype))


def dropout(args: DropoutArgs) -> Tensor:
    out = drop(opmath(args.input), args.seed, args.threshold).to(args.input.dtype)
    if out.stride() == dense_strides(args.input):
        return out
    return empty_dense(args.input).copy_(out)
