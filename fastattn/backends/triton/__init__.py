"""CUDA tensors, in Triton. Under TRITON_INTERPRET=1, CPU tensors, where this backend is forced.

Triton is imported with the first function that is needed, not with this package.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

from fastattn.backends.common import attention_operands, common_refusal, device_of, python_functions

DEVICE = "cuda"
MAX_POSITIONS = 2**31 - 2**16  # queries and keys of a sequence, added up in 32 bits; not of packed ones

if importlib.util.find_spec("triton") is None:
    MISSING = "triton is not installed"
elif torch.version.hip is not None:
    MISSING = "it is for NVIDIA GPUs, and this torch is built for AMD's"
else:
    MISSING = ""


class _Functions(dict[str, Callable[..., Any]]):
    def __missing__(self, name: str) -> Callable[..., Any]:
        self.update(python_functions(__name__))
        return self[name]


FUNCTIONS = _Functions()


def refusal(op: str, args: tuple) -> str | None:
    """Why this backend does not serve ``op(*args)``, or None."""
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
