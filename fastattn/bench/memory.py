"""Measure how much memory a call needs in addition to its operands."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak(function: Callable[[], object]) -> int | None:
    """Return the maximum bytes by which this process grows during a call of `function`, None if unknown.

    Linux keeps the maximum that a process has held. Writing 5 to ``clear_refs`` resets it. Memory that the allocator
    keeps from earlier calls is handed back before, so that it is counted.
    """
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        RESET.write_text("5")
        before = _kilobytes("VmRSS")
    except (OSError, AttributeError, TypeError):
        return None
    function()
    return 1024 * max(0, _kilobytes("VmHWM") - before)


def _kilobytes(field: str) -> int:
    return int(re.search(rf"^{field}:\s*(\d+) kB", STATUS.read_text(), re.M)[1])  # type: ignore[index]
