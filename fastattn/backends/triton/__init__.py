"""The Triton backend, for CUDA tensors. Under TRITON_INTERPRET=1 it also serves CPU tensors, if it is forced.

The first use of a function imports Triton; importing this package does not.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn._torch_private import is_lazy
from fastattn.backends import native
from fastattn.backends.common import OLDEST_GPU, capability, common_refusal, device_of, forward_of, python_functions
from fastattn.backends.schema import AnyArgs, AttentionArgs, SoftmaxDropoutArgs, flatten, unflatten

DEVICE = "cuda"
MAX_POSITIONS = 2**31 - 2**16  # queries plus keys per sequence, a sum in int32; packed operands are exempt

if importlib.util.find_spec("triton") is None:
    MISSING = "triton is not installed"
elif torch.version.hip is not None:
    MISSING = "it is for NVIDIA GPUs, and this torch is built for AMD's"
else:
    MISSING = ""


class _Functions(dict[str, Callable[..., Any]]):
    def __missing__(self, name: str) -> Callable[..., Any]:
        self.update({stem: _on_values(function) for stem, function in python_functions(__name__).items()})
        return self[name]


def _on_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function`` so that lazily negated operands and zeros without memory are computed first.

    Kernels read the memory of an operand, which does not hold the values of these two kinds. For other kernels torch's
    dispatcher computes them.
    """

    @functools.wraps(function)
    def call(args: AnyArgs) -> Any:
        flat = [arg.clone() if isinstance(arg, Tensor) and is_lazy(arg) else arg for arg in flatten(args)]
        return function(unflatten(type(args), flat))

    return call


FUNCTIONS = _Functions()


@functools.cache
def compiled() -> dict[str, Callable[..., Any]]:
    """Return the operations of the library that starts Triton's kernels (``csrc/launch``), by name; {} without it."""
    if MISSING or native.missing("triton"):
        return {}
    functions = native.functions("triton")
    native.library("triton").set_compile(ctypes.cast(_compile(), ctypes.c_void_p).value)
    return functions


@functools.cache
def _compile() -> Any:
    """Return the function that answers the library's requests, as a function of C, which must not be deleted."""
    from fastattn.backends.triton import recipes

    return recipes.COMPILE(recipes.answer)


def plain(op: str, device: torch.device) -> Callable[[Sequence[Any]], bool] | None:
    """Return what says whether the fast path of ``op`` asks this library, from its arguments; None: never."""
    if device.type != DEVICE or f"{op}_fast" not in compiled() or capability(device) < OLDEST_GPU:
        return None
    hooked = hooks()
    return lambda values: not hooked()


@functools.cache
def hooks() -> Callable[[], bool]:
    """Return what says whether a hook of Triton observes launches. Only Triton's own launcher calls hooks."""
    from fastattn._triton_private import is_hooked

    return is_hooked


def refusal(op: str, args: AnyArgs) -> str | None:
    """Return why this backend does not serve ``op(args)``, or None."""
    interpreted = device_of(args).type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    reason = common_refusal("cpu" if interpreted else DEVICE, MISSING, args)
    if reason:
        return reason
    forward, positions = forward_of(args), 0
    if isinstance(forward, AttentionArgs):
        positions = forward.query.size(-2) + forward.key.size(-2)
    elif isinstance(forward, SoftmaxDropoutArgs):
        positions = sum(forward.input.shape[-2:])
    if positions > MAX_POSITIONS:
        return f"it takes up to 2**31 - 2**16 queries and keys together, not {positions}"
    return None
