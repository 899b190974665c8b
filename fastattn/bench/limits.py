"""Measure what the machine could do at best.

A case needs a number of floating-point operations and moves a number of bytes. The functions made here do just that, so
they take part in the timing like any peer. The slower of the two is the physical limit of the case.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import fastattn  # noqa: F401  loads the compiled library

from .timer import wall_clock


def instruction_set() -> str:
    """Return the instruction set that the kernels use; without a compiled library, torch's."""
    library = torch.ops.fastattn_cpu
    return library.isa() if hasattr(library, "isa") else f"torch {torch.backends.cpu.get_cpu_capability()}"


def arithmetic(flops: int, dtype: torch.dtype) -> Callable[[], object] | None:
    """Make a function that does `flops` operations on registers only, on all threads; None where nothing can.

    float32 counts a fused multiply-add as two operations. bfloat16 uses the dot product of pairs, or of matrices, where
    the processor has one. The compiled library holds the loops, because only it knows the instruction set.
    """
    library, bfloat16 = torch.ops.fastattn_cpu, dtype == torch.bfloat16
    if not hasattr(library, "multiply_add") or dtype not in (torch.float32, torch.bfloat16):
        return None
    return lambda: library.multiply_add(flops, bfloat16)


def copy(size: int, block: int) -> Callable[[], object]:
    """Make a function that reads and writes `size` bytes in all, by copies of `block` bytes into fresh tensors."""
    half = size // 2
    lengths = [block] * (half // block) + ([half % block] if half % block else [])
    sources = [torch.zeros(length, dtype=torch.uint8) for length in lengths]
    return lambda: [torch.empty_like(source).copy_(source) for source in sources]


def measure(seconds: float = 0.2) -> dict[str, float]:
    """Return this machine's limits by name, the best of a few samples.

    Arithmetic is in FLOP/s. Copies are in bytes/s read and written: "fresh" of 256 MB into a new tensor, "cached" of
    1 MB into an existing one.
    """
    flops, large = 2 * 10**9, 256 << 20
    small = torch.zeros(1 << 20, dtype=torch.uint8)
    target = torch.empty_like(small)
    work: dict[str, tuple[float, Callable[[], object] | None]] = {
        "float32": (flops, arithmetic(flops, torch.float32)),
        "bfloat16": (flops, arithmetic(flops, torch.bfloat16)),
        "copy, fresh": (2 * large, copy(2 * large, large)),
        "copy, cached": (2 * len(small), lambda: target.copy_(small)),
    }
    return {name: amount / _best(function, seconds) for name, (amount, function) in work.items() if function}


def _best(function: Callable[[], object], seconds: float) -> float:
    samples = 5
    repeats = max(1, int(seconds / samples / max(wall_clock(function, 1), 1e-9)))
    return min(wall_clock(function, repeats) for _ in range(samples))
