"""Attention weights that are computed when somebody reads them.

The public programs return the weights, or keep them, at every call and hardly ever use them: the matrix that fused
attention exists to avoid.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn.ops.attention import attention_weights
from fastattn.torch_private import is_observed, tree_map_only, without_torch_function, wrapper_tensor


def weights_when_read(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, dropout_p: float, scale: float, seed: Tensor | None
) -> Tensor:
    """``attention_weights``: at once where somebody observes the calls (torch.compile, torch.func), otherwise as a
    tensor that holds the operands until its values are needed. The caller leaves them unmodified."""
    if is_observed():
        return attention_weights(query, key, attn_mask, dropout_p, scale=scale, seed=seed)
    return _Weights.apply(query, key, attn_mask, dropout_p, scale, seed)


def _compute(query: Tensor, key: Tensor, settings: tuple[Any, ...]) -> Tensor:
    attn_mask, dropout_p, scale, seed = settings
    with torch.autocast(query.device.type, enabled=False):  # the operands have the dtype of their product
        return attention_weights(query, key, attn_mask, dropout_p, scale=scale, seed=seed)


class _Weights(torch.autograd.Function):
    """The history of weights that may not exist yet."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, *settings: Any) -> Tensor:
        ctx.save_for_backward(query, key)
        ctx.settings = settings
        return LazyWeights(query.detach(), key.detach(), settings)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            query, key = operands = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            weights = _compute(query, key, ctx.settings)
        return *torch.autograd.grad(weights, operands, grad), *(None,) * len(ctx.settings)


class LazyWeights(Tensor):
    """A tensor without values: the first operation that asks for them computes them. Results are plain tensors."""

    @staticmethod
    def __new__(cls, query: Tensor, key: Tensor, settings: tuple[Any, ...]) -> LazyWeights:
        return wrapper_tensor(cls, (*query.shape[:-1], key.size(-2)), query.dtype, query.device)

    def __init__(self, query: Tensor, key: Tensor, settings: tuple[Any, ...]) -> None:
        self._call: Any = query, key, settings
        self._result: Tensor | None = None

    def computed(self) -> Tensor:
        """The values; their history is the wrapper's, in autograd above it."""
        if self._result is None:
            with torch.inference_mode(False), torch.no_grad():
                self._result = _compute(*self._call)
            self._call = None
        return self._result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(LazyWeights, LazyWeights.computed, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_torch_function():
            if func in _READERS:
                args, kwargs = tree_map_only(LazyWeights, lambda lazy: lazy.view(lazy.shape), (args, kwargs or {}))
            return func(*args, **(kwargs or {}))


# What looks at a tensor's memory without an operation, where nothing else would ask for the values.
_READERS = frozenset(
    getattr(Tensor, name)
    for name in (
        "__array__", "__deepcopy__", "__dlpack__", "__reduce_ex__", "__repr__", "data_ptr", "numpy", "share_memory_",
        "tolist",
    )
)  # fmt: skip
