"""The CPU backend, C++ with SIMD: ``csrc/cpu``, compiled into ``_cpu.so``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from fastattn.backends import native
from fastattn.backends.common import common_refusal
from fastattn.backends.schema import AnyArgs

DEVICE = "cpu"
# Most keys of attention whose backward pass reads no residual. kWholeRow in csrc/cpu/kernels.h is the same number.
WHOLE_ROW = 32
MISSING = native.missing("cpu")
FUNCTIONS = {} if MISSING else native.functions("cpu")

if not MISSING and native.missing_instruction_set():
    warnings.warn(
        f"fastattn is built without its kernels for {native.missing_instruction_set()}, slower ones run; "
        "FASTATTN_CPU_BUILD=all at the installation adds those of every processor",
        stacklevel=2,
    )


def compiled() -> dict[str, Callable[..., Any]]:
    """Return the library's operations by name."""
    return FUNCTIONS


def refusal(op: str, args: AnyArgs) -> str | None:
    """Return why this backend does not serve ``op(args)``, or None."""
    return common_refusal(DEVICE, MISSING, args)
