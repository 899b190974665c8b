"""Attention weights that are computed when somebody reads them.

The public programs return the weights, or keep them, at every call and hardly ever use them: the matrix that fused
attention exists to avoid.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattn.ops.attention import attention_weights
from fastattn.torch_private import is_observed, tree_map_only, without_torch_function, wrapper_tensor


def weights_when_read(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, dropout_p: float, scale: float, seed: Tensor | None
) -> Tensor:
    """``attention_weights``: at once where somebody observes the calls (torch.compile, torch.func), otherwise as a
    tensor that holds the operands until it is read. The caller leaves mask and seed unmodified."""

    def compute(query: Tensor, key: Tensor) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):  # the operands have the dtype of their product
            return attention_weights(query, key, attn_mask, dropout_p, scale=scale, seed=seed)

    if is_observed():
        return compute(query, key)
    return _Weights.apply(query, key, _Values(query, key, compute))


class _Values:
    """The weights of these operands, in the grad mode and inference mode of now."""

    def __init__(self, query: Tensor, key: Tensor, compute: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.operands = query, key
        self.compute = compute
        self.is_grad, self.is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.versions = [_version(operand) for operand in self.operands]
        self.detached: Tensor | None = None

    def with_history(self) -> Tensor:
        """Raises RuntimeError if query or key were modified in place."""
        if self.versions != [_version(operand) for operand in self.operands]:
            raise RuntimeError(
                "the query or the key of these attention weights was modified by an in-place operation before they "
                "were read: read the weights first, or modify a copy"
            )
        with torch.inference_mode(self.is_inference), torch.set_grad_enabled(self.is_grad):
            return self.compute(*self.operands)

    def without_history(self) -> Tensor:
        """The same tensor every time."""
        if self.detached is None:
            self.detached = self.with_history().detach()
        return self.detached


def _version(operand: Tensor) -> int | None:
    """How often the tensor was modified in place; inference tensors do not count."""
    return None if operand.is_inference() else operand._version


class LazyWeights(Tensor):
    """A tensor without memory, which the first function of torch that is called with it makes a plain one.

    What cannot be made plain, because C++ holds it or because the function is traced, has its values in
    ``__torch_dispatch__`` and its history in :class:`_Weights`.
    """

    @staticmethod
    def __new__(cls, values: _Values) -> LazyWeights:
        query, key = values.operands
        return wrapper_tensor(cls, (*query.shape[:-1], key.size(-2)), query.dtype, query.device)

    def __init__(self, values: _Values) -> None:
        self._deferred = values

    def read(self) -> Tensor:
        """This tensor, plain from now on, or else a plain view of it."""
        if not is_observed() and self._deferred.detached is None:
            plain = self._deferred.with_history()
            vars(plain).update((name, value) for name, value in vars(self).items() if name != "_deferred")
            try:
                torch.utils.swap_tensors(self, plain)
            except RuntimeError:  # something else refers to it
                return self.view(self.shape)
            return self
        return self.view(self.shape)

    def set_(self, *args: Any, **kwargs: Any) -> Any:  # torch calls it without __torch_function__
        return self.read().set_(*args, **kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_torch_function():
            if func not in _METADATA and not torch.compiler.is_compiling():
                args, kwargs = tree_map_only(LazyWeights, LazyWeights.read, (args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(LazyWeights, lambda lazy: lazy._deferred.without_history(), (args, kwargs or {}))
        return func(*args, **kwargs)


# What is known before the values are.
_METADATA = frozenset(
    [getattr(Tensor, name).__get__ for name in ("device", "dtype", "layout", "ndim", "requires_grad", "shape")]
    + [getattr(Tensor, name) for name in ("__len__", "dim", "numel", "size")]
)


class _Weights(torch.autograd.Function):
    """The history of weights that no function of torch has made plain."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, values: _Values) -> Tensor:
        ctx.save_for_backward(query, key)
        ctx.compute = values.compute
        return LazyWeights(values)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            operands = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            weights = ctx.compute(*operands)
        return *torch.autograd.grad(weights, operands, grad), None
