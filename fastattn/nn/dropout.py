"""Dropout modules: plain dropout, and dropout after softmax."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from fastattn.ops import check
from fastattn.ops.dropout import dropout
from fastattn.ops.softmax_dropout import softmax_dropout


class SoftmaxDropout(nn.Module):
    """``softmax_dropout`` with dropout in training only.

    Args:
        p: probability of dropping an element in training.

    Raises:
        TypeError, ValueError: p is not a number, or is outside [0, 1].

    Examples:
        >>> fastattn.SoftmaxDropout(0.1).eval()(torch.zeros(4))
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """

    __prepare_scriptable__ = check.refuse_torchscript

    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        check.threshold("SoftmaxDropout", p, "p")
        self.p = p

    def forward(
        self,
        input: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float = 1.0,
        *,
        seed: Tensor | None = None,
    ) -> Tensor:
        """Return ``softmax_dropout`` of scores (..., L, S). The arguments are those of the function."""
        return softmax_dropout(input, self.p if self.training else 0.0, attn_mask, is_causal, scale, seed=seed)

    if TYPE_CHECKING:  # torch types the call of a module as Any
        __call__ = forward

    def extra_repr(self) -> str:
        return f"p={self.p}"


class Dropout(nn.Dropout):
    """A ``torch.nn.Dropout`` that calls fastattn's ``dropout``.

    Examples:
        >>> x = torch.ones(4)
        >>> fastattn.Dropout(0.5).eval()(x)
        tensor([1., 1., 1., 1.])
    """

    __prepare_scriptable__ = check.refuse_torchscript

    def forward(self, input: Tensor, seed: Tensor | None = None) -> Tensor:
        """Return ``fastattn.dropout`` of ``input``.

        Args:
            input: any shape and strides, in one of the dtypes of ``fastattn.dropout``.
            seed: int64 (2,), (key, offset); drawn from torch's default generator when not given.
        """
        return dropout(input, self.p, self.training, self.inplace, seed=seed)

    if TYPE_CHECKING:  # torch types the call of a module as Any
        __call__ = forward
