"""What the process does with memory that tensors have left."""

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def keep_freed() -> None:
    """Have freed memory serve this process's next allocations, where torch allocates with GNU's malloc.

    By default large blocks go back to the system, which clears fresh pages for the next tensor: on a CPU a part of each
    update (docs/training.md). Settings of malloc's in the environment go first.
    """
    is_set = any(name.startswith("MALLOC_") for name in os.environ)
    if sys.platform != "linux" or is_set or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)
