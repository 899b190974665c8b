"""What the machine could do at best, measured beside what is compared with it.

A case needs so many floating-point operations and moves so many bytes. The functions made here do just that much and
nothing else, so they take part in the timing like any peer: the slower of the two is the physical limit of the case.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fastattn.backends import native
from fastattn.bench.timer import Neighbours, wall_clock
from fastattn.ops.check import dtype_name

fastest: dict[torch.dtype, float] = {}
"""Operations a second of :func:`arithmetic`, the most that this process has seen or read of this machine."""


def arithmetic(flops: int, dtype: torch.dtype) -> Callable[[], object] | None:
    """A function that does `flops` operations on registers alone, on all threads; None where nothing can.

    float32 counts fused multiply-adds as two operations; bfloat16 uses the dot product of pairs, or of matrices, where
    the processor has one. The compiled library holds the loops, since only there is the instruction set known.
    """
    library = native.library("cpu")
    if library is None or dtype not in (torch.float32, torch.bfloat16):
        return None
    multiply_add, bfloat16 = library.multiply_add.default, dtype == torch.bfloat16
    return lambda: multiply_add(flops, bfloat16)


def copy(size: int, block: int) -> Callable[[], object]:
    """A function that reads and writes `size` bytes in all, by copies of `block` bytes each into fresh tensors."""
    half = size // 2
    lengths = [block] * (half // block) + ([half % block] if half % block else [])
    sources = [torch.zeros(length, dtype=torch.uint8) for length in lengths]
    return lambda: [torch.empty_like(source).copy_(source) for source in sources]


def measure(seconds: float = 0.2) -> dict[str, float | None]:
    """The limits of this machine with the threads torch uses now, best of a few samples.

    Arithmetic in GFLOP/s (None where it is unknown), copies in GB/s read and written: `copy_fresh` of 256 MB into a
    tensor allocated for it, `copy_cached` of 1 MB into one that exists. `others` is the share of the processors that
    other programs took meanwhile (None where it is unknown).
    """
    found: dict[str, float | None] = {}
    neighbours = Neighbours()
    for dtype in (torch.float32, torch.bfloat16):
        flops = 2 * 10**9
        work = arithmetic(flops, dtype)
        found[dtype_name(dtype)] = work and flops / _best(work, seconds) / 1e9
    large = 256 << 20
    found["copy_fresh"] = 2 * large / _best(copy(2 * large, large), seconds) / 1e9
    small = torch.zeros(1 << 20, dtype=torch.uint8)
    target = torch.empty_like(small)
    found["copy_cached"] = 2 * len(small) / _best(lambda: target.copy_(small), seconds) / 1e9
    found["others"] = neighbours.share()
    return found


def remember(measured: dict[str, float | None]) -> None:
    """Take in what was measured of this machine."""
    for dtype in (torch.float32, torch.bfloat16):
        rate = 1e9 * (measured.get(dtype_name(dtype)) or 0.0)
        fastest[dtype] = max(rate, fastest.get(dtype, 0.0))


def best(*measured: dict[str, float | None]) -> dict[str, float | None]:
    """Of the limits measured before and after a run, the better: a neighbour only ever lowers them."""
    known = {name: [value for found in measured if (value := found[name]) is not None] for name in measured[0]}
    return {name: (min if name == "others" else max)(values, default=None) for name, values in known.items()}


def _best(function: Callable[[], object], seconds: float) -> float:
    once = max(wall_clock(function, 1), 1e-9)
    samples = 5
    repeats = max(1, int(seconds / samples / once))
    return min(wall_clock(function, repeats) for _ in range(samples))
