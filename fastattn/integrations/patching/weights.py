"""Attention weights that are computed on their first use.

The public programs return or store the weights at every call and hardly ever use them. Computing them at once would
cost the (Lq, Lk) matrix that fused attention avoids.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattn._torch_private import is_observed, tree_map_only, without_torch_function, wrapper_tensor
from fastattn.ops.attention import attention_weights


def weights_when_read(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, dropout_p: float, scale: float, seed: Tensor | None
) -> Tensor:
    """Return ``attention_weights`` of the operands as a tensor that holds them until it is read.

    If calls are observed (torch.compile, torch.func), or on ``meta``, the weights are computed at once. The caller must
    not modify mask and seed.
    """

    def compute(query: Tensor, key: Tensor) -> Tensor:
        # Autocast is off, because the operands have the dtype of their product already. meta has no autocast.
        with contextlib.nullcontext() if query.is_meta else torch.autocast(query.device.type, enabled=False):
            return attention_weights(query, key, attn_mask, dropout_p, scale=scale, seed=seed)

    if is_observed() or query.is_meta:
        return compute(query, key)
    return _Weights.apply(query, key, _Values(query, key, compute))


_READING = threading.RLock()


class _Values:
    """Weights of these operands without autograd history, computed by the first ``get``."""

    def __init__(self, query: Tensor, key: Tensor, compute: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.operands = [query.detach(), key.detach()]
        self.compute = compute
        self.is_inference = torch.is_inference_mode_enabled()
        self.versions = [_version(operand) for operand in self.operands]
        self.tensor: Tensor | None = None

    def get(self) -> Tensor:
        """Return the weights.

        Raises:
            RuntimeError: query or key was modified in place before the first call.
        """
        with _READING:
            if self.tensor is None:
                if self.versions != [_version(operand) for operand in self.operands]:
                    raise RuntimeError(
                        "the query or the key of these attention weights was modified by an in-place operation before "
                        "they were read: read the weights first, or modify a copy"
                    )
                with torch.inference_mode(self.is_inference), torch.no_grad():
                    self.tensor = self.compute(*self.operands)
                self.operands.clear()
            return self.tensor


def _version(operand: Tensor) -> int | None:
    """Return how often the tensor was modified in place; None for inference tensors, which do not count it."""
    return None if operand.is_inference() else operand._version


class LazyWeights(Tensor):
    """Tensor without memory until torch calls the first function with it; then it shares the memory of its values.

    Its history, hooks and gradient in autograd are the same before and after. Operations on it run on the values, a
    plain tensor, and return plain tensors.
    """

    @staticmethod
    def __new__(cls, values: _Values) -> LazyWeights:
        query, key = values.operands
        return wrapper_tensor(cls, (*query.shape[:-1], key.size(-2)), query.dtype, query.device)

    def __init__(self, values: _Values) -> None:
        self._held = values
        self._has_memory = False

    def read(self) -> LazyWeights:
        """Return this tensor with memory. Observed operations compute the values without giving it memory."""
        with _READING:
            if not self._has_memory:
                _SET_DATA(self, self._held.get())
                self._has_memory = True
        return self

    def plain(self) -> Tensor:
        """Return a plain ``torch.Tensor`` with this one's memory and history."""
        with without_torch_function():
            return self.read().view(self.shape)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with without_torch_function():
            if func not in _METADATA and not is_observed():
                args, kwargs = tree_map_only(LazyWeights, LazyWeights.read, (args, kwargs))
            if func in _PLAIN:
                args, kwargs = tree_map_only(LazyWeights, LazyWeights.plain, (args, kwargs))
            elif func == _SET_DATA and isinstance(args[0], LazyWeights):
                args[0]._held.tensor = args[1].detach()
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        given = args, kwargs or {}
        values = tree_map_only(LazyWeights, lambda lazy: lazy._held.get(), given)
        result = func(*values[0], **values[1])
        if torch.Tag.inplace_view in func.tags and isinstance(args[0], LazyWeights):
            _SET_DATA(args[0], args[0]._held.get())  # the operation changed the values' shape or memory
        return result


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
# Functions that read no values.
_METADATA = frozenset(
    [getattr(Tensor, name).__get__ for name in ("device", "dtype", "layout", "ndim", "requires_grad", "shape")]
    + [getattr(Tensor, name) for name in ("__len__", "dim", "numel", "size")]
)
# Functions that torch refuses for subclasses, or for which it would make another subclass.
_PLAIN = frozenset(
    getattr(Tensor, name)
    for name in (
        "__array__", "__deepcopy__", "__dlpack__", "__reduce_ex__", "__repr__", "apply_", "map_", "numpy", "tolist",
    )
)  # fmt: skip


def _on_plain(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def method(self: LazyWeights, *args: Any, **kwargs: Any) -> Any:
        return function(self.plain(), *args, **kwargs)

    return method


for _function in _PLAIN:  # overridden, because autograd calls its hooks while __torch_function__ is disabled
    setattr(LazyWeights, _function.__name__, _on_plain(_function))


class _Weights(torch.autograd.Function):
    """Autograd node of lazy weights; its backward pass computes the weights again."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, values: _Values) -> Tensor:
        ctx.save_for_backward(query, key)
        ctx.compute = values.compute
        return LazyWeights(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():  # operates on separate tensors, because key may depend on query
            operands = [t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in ctx.saved_tensors]
            weights = ctx.compute(*operands)
        return *torch.autograd.grad(weights, operands, grad, create_graph=torch.is_grad_enabled()), None
