"""How much memory a call needs beside its operands."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak(function: Callable[[], object]) -> int | None:
    """Bytes by which this process grows at most during a call of `function`; None where the kernel does not tell.

    Linux keeps the most that a process has held, which writing 5 to ``clear_refs`` resets. Memory that the allocator
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
