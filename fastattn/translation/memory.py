"""Reuse of the memory that freed tensors leave."""

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # constants of glibc's malloc.h


def keep_freed() -> None:
    """Keep freed memory for this process's next allocations, if torch allocates with GNU's malloc.

    Otherwise, large blocks go back to the system, which clears fresh pages for the next tensor. On a CPU that takes
    part of each update's time (docs/training.md). If the environment configures malloc, nothing is changed.
    """
    is_set = any(name.startswith("MALLOC_") for name in os.environ)
    if sys.platform != "linux" or is_set or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)
