"""CPU tensors, in C++ with SIMD: ``csrc/cpu``, compiled into ``_cpu.so``."""

from __future__ import annotations

from fastattn.backends import native
from fastattn.backends.common import device_of, float64_operand, large_head, other_device

DEVICE = "cpu"
MISSING = native.missing("cpu")
FUNCTIONS = {} if MISSING else native.functions("cpu")


def refusal(op: str, args: tuple) -> str | None:
    """Why this backend does not serve ``op(*args)``, or None."""
    return other_device(DEVICE, device_of(args)) or float64_operand(args) or large_head(op, args) or MISSING or None
