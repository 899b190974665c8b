"""The Triton backend, for CUDA tensors. Under TRITON_INTERPRET=1 it also serves CPU tensors, if it is forced.

The first use of a function imports Triton; importing this package does not.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattn._torch_private import is_lazy
from fastattn.backends.common import common_refusal, device_of, forward_of, python_functions
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
