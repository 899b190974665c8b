"""Attention weights that are computed on their first use.

The public programs return or store the weights at every call and hardly ever use them. Computing them at once would
cost the (Lq, Lk) matrix that fused attention avoids.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fastattn._torch_private import is_in_function, is_observed, tree_map_only
from fastattn.ops.attention import attention_weights


def weights_when_read(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, dropout_p: float, scale: float, seed: Tensor | None
) -> Tensor | LazyWeights:
    """Return ``attention_weights`` of the operands as an object that computes them when they are read.

    If calls are observed (torch.compile, torch.func), or on ``meta``, return the tensor itself. The caller must not
    modify mask and seed.
    """

    def compute() -> Tensor:
        return attention_weights(query, key, attn_mask, dropout_p, scale=scale, seed=seed)

    return compute() if is_observed() or query.is_meta else LazyWeights(_computed_once(compute, query, key))


_READING = threading.RLock()


def _computed_once(compute: Callable[[], Tensor], query: Tensor, key: Tensor) -> Callable[[], Tensor]:
    """Return a function that returns ``compute()``, as it would be now, and the same tensor at each call.

    The function raises RuntimeError if query or key was modified in place before its first call.
    """
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    versions = _version(query), _version(key)
    found: list[Tensor] = []

    def weights() -> Tensor:
        if found:
            return found[0]
        if versions != (_version(query), _version(key)):
            raise RuntimeError(
                "the query or the key of these attention weights was modified by an in-place operation before they "
                "were read: read the weights first, or modify a copy"
            )
        observed = is_observed()
        # Transforms of torch.func refuse inference mode. Autocast is off, because the operands' dtype is the product's.
        with (
            torch.inference_mode(inference and not observed), torch.set_grad_enabled(grad),
            torch.autocast(query.device.type, enabled=False),
        ):  # fmt: skip
            if observed:  # the observer's tensors are not valid after it has ended
                return compute()
            # The reader's hooks are bypassed: a checkpoint would miss the saved tensors when it repeats the reading.
            with _READING, saved_tensors_hooks(_unchanged, _unchanged):
                if not found:
                    found.append(compute())
        return found[0]

    return weights


def _version(operand: Tensor) -> int | None:
    """Return how often the tensor was modified in place; None for inference tensors, which do not count it."""
    return None if operand.is_inference() else operand._version


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


class LazyWeights:
    """Stand-in for a tensor. Each operation on it runs on the tensor, which the first one computes.

    It has no memory and is no ``torch.Tensor``: C++ code that requires a tensor raises an error.

    Attributes:
        compute: function that returns the tensor, the same one at each call.
    """

    compute: Callable[[], Tensor]
    made_in_function: bool

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        vars(self).update(compute=compute, made_in_function=is_in_function())  # __setattr__ is the tensor's

    def read(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: its gradient would be lost, because an ``autograd.Function`` tracks only tensors.
        """
        tensor = self.compute()
        if is_in_function() != self.made_in_function and (tensor.requires_grad or torch.is_grad_enabled()):
            raise RuntimeError(
                "attention weights that are computed when they are read lose their gradient in an autograd.Function "
                "and in torch.utils.checkpoint(use_reentrant=True): pass weights.clone() to it, read weights that it "
                "returned under torch.no_grad(), or pass use_reentrant=False"
            )
        return tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.read(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(LazyWeights, LazyWeights.read, (args, kwargs or {}))
        return func(*args, **kwargs)


def _on_tensor(name: str) -> Callable[..., Any]:
    def method(self: LazyWeights, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.read(), name)(*args, **kwargs)

    return method


# Special methods that ``object`` has too. Python looks up all special methods in the class, past __getattr__.
_OVERRIDDEN = {
    "__delattr__", "__dir__", "__eq__", "__format__", "__ge__", "__gt__", "__le__", "__lt__", "__ne__", "__reduce_ex__",
    "__repr__", "__setattr__",
}  # fmt: skip
for _name in set(dir(Tensor)) - {*dir(LazyWeights), "__torch_dispatch__"} | _OVERRIDDEN:
    if _name.startswith("__") and callable(getattr(Tensor, _name)):
        setattr(LazyWeights, _name, _on_tensor(_name))
