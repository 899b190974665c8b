"""The CPU backend, C++ with SIMD: ``csrc/cpu``, compiled into ``_cpu.so``."""

from __future__ import annotations

from fastattn.backends import native
from fastattn.backends.common import common_refusal
from fastattn.backends.schema import AnyArgs

DEVICE = "cpu"
MISSING = native.missing("cpu")
FUNCTIONS = {} if MISSING else native.functions("cpu")


def refusal(op: str, args: AnyArgs) -> str | None:
    """Return why this backend does not serve ``op(args)``, or None."""
    return common_refusal(DEVICE, MISSING, args)
