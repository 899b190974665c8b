"""LayerNorm modules: plain LayerNorm, and the end of a sub-layer."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fastattn.ops import check
from fastattn.ops.layer_norm import dropout_add_layer_norm, layer_norm


class LayerNorm(nn.LayerNorm):
    """A ``torch.nn.LayerNorm`` that calls fastattn's ``layer_norm``: same constructor, parameters and state dict.

    Examples:
        >>> norm = fastattn.LayerNorm(512)
        >>> norm(torch.randn(4, 512)).shape
        torch.Size([4, 512])
    """

    __prepare_scriptable__ = check.refuse_torchscript

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)

    if TYPE_CHECKING:  # torch types the call of a module as Any
        __call__ = forward


class DropoutAddLayerNorm(nn.LayerNorm):
    """LayerNorm(residual + dropout(input)) over the last dimension, in one pass: the end of a sub-layer.

    Args:
        normalized_shape: size of the last dimension.
        p: probability of dropping an element of input in training.
        eps, elementwise_affine, bias, device, dtype: as in ``torch.nn.LayerNorm``.
        prenorm: also return the sum, the residual of the next sub-layer.

    Raises:
        TypeError, ValueError: p is outside [0, 1], or ``normalized_shape`` is not one integer.

    Examples:
        >>> end = fastattn.DropoutAddLayerNorm(512, p=0.1)
        >>> sublayer, x = torch.randn(2, 4, 512)
        >>> end(sublayer, x).shape
        torch.Size([4, 512])
    """

    __prepare_scriptable__ = check.refuse_torchscript

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        p: float = 0.1,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        prenorm: bool = False,
    ) -> None:
        shape = normalized_shape if isinstance(normalized_shape, Sequence) else (normalized_shape,)
        if not all(isinstance(size, numbers.Integral) for size in shape):
            raise TypeError(f"DropoutAddLayerNorm: normalized_shape must be an integer, got {normalized_shape!r}")
        super().__init__(list(map(int, shape)), eps, elementwise_affine, bias, device, dtype)
        if len(self.normalized_shape) != 1:
            raise ValueError(f"DropoutAddLayerNorm: normalized_shape must be one size, got {normalized_shape}")
        check.threshold("DropoutAddLayerNorm", p, "p")
        self.p = p
        self.prenorm = prenorm

    def forward(  # type: ignore[override]
        self, input: Tensor, residual: Tensor, seed: Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the normalised sum of residual (..., D) and dropout of input (..., D); with ``prenorm`` also the sum.

        The normalised sum is in ``out_dtype``, by default the sum's dtype.
        """
        return dropout_add_layer_norm(
            input, residual, self.weight, self.bias, self.p if self.training else 0.0, self.eps, prenorm=self.prenorm,
            seed=seed, out_dtype=out_dtype,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, p={self.p}, prenorm={self.prenorm}"
