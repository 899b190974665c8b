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

from fastattn.backends.common import attention_operands, common_refusal, device_of, python_functions
from fastattn.torch_private import is_lazy

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
    def call(*args: Any) -> Any:
        return function(*(arg.clone() if isinstance(arg, Tensor) and is_lazy(arg) else arg for arg in args))

    return call


FUNCTIONS = _Functions()


def refusal(op: str, args: tuple) -> str | None:
    """Return why this backend does not serve ``op(*args)``, or None."""
    interpreted = device_of(args).type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    reason = common_refusal("cpu" if interpreted else DEVICE, MISSING, op, args)
    if reason:
        return reason
    positions = 0
    if op in ("attention", "attention_backward"):
        query, key, _ = attention_operands(op, args)
        positions = query.size(-2) + key.size(-2)
    elif op == "softmax_dropout":
        positions = sum(args[0].shape[-2:])
    if positions > MAX_POSITIONS:
        return f"it takes up to 2**31 - 2**16 queries and keys together, not {positions}"
    return None
