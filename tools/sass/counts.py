"""Count what one iteration of a kernel's main loop issues, and bound its time by three units of an SM.

The counts and bounds are exact as far as the machine code goes. How well warps hide each other's latencies is not
modelled, so the bounds do not rank tiles: measure them with ``tools/tune.py``.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from functools import cached_property

from sass.code import Instruction
from sass.loops import innermost

# Multiply-adds of 16-bit operands per clock and SM, by compute capability: with operands in registers (mma.sync), and
# in shared memory (wgmma). Sources: the CUDA programming guide and the data sheets of A100 and H100; mma.sync reaches
# 62 % of wgmma on H100 (arXiv 2402.13499).
TENSOR = {80: (1024, 1024), 90: (0.62 * 2048, 2048)}
SHARED_BYTES = 128  # of shared memory per clock and SM
SHUFFLES = 32  # lanes per clock and SM, which take turns with shared memory
SCHEDULERS = 4  # per SM; each issues one warp instruction per clock


@dataclasses.dataclass(frozen=True)
class Loop:
    """One warp's iteration of a loop with matrix products."""

    body: list[Instruction]
    capability: int
    depth: int = 0  # multiply-adds per score, that is per pair of a query and a key, in all products; 0: unknown

    @property
    def scores(self) -> float:
        """Scores per thread and iteration, 0 if unknown."""
        return sum(i.multiply_adds for i in self.body) / (self.depth * 32) if self.depth else 0.0

    @property
    def pipes(self) -> dict[str, int]:
        """Instructions by pipe."""
        return dict(Counter(i.pipe for i in self.body).most_common())

    @cached_property
    def clocks(self) -> dict[str, float]:
        """An SM's clocks for this warp's iteration, by unit; the longest bounds the loop. Empty if the rate of the
        tensor cores is unknown."""
        if self.capability not in TENSOR:
            return {}
        from_registers, from_shared = TENSOR[self.capability]
        work = ((i.multiply_adds, from_registers if i.base == "HMMA" else from_shared) for i in self.body)
        shared = (32 / SHUFFLES if i.pipe == "shuffle" else i.shared_bytes / SHARED_BYTES for i in self.body)
        return {
            "tensor": sum(count / rate for count, rate in work),
            "shared": sum(shared),
            "issue": len(self.body) / SCHEDULERS,
        }

    @property
    def shared_share(self) -> float | None:
        """Clocks of shared memory over clocks of the tensor cores; None if unknown."""
        return self.clocks["shared"] / self.clocks["tensor"] if self.clocks.get("tensor") else None

    @property
    def local(self) -> int:
        """Accesses to a thread's stack."""
        return sum(i.pipe == "local" for i in self.body)

    @property
    def barriers(self) -> int:
        """Barriers that all warps of a program wait at."""
        return sum(i.base == "BAR" and ".ARV" not in i.opcode for i in self.body)

    @property
    def drains(self) -> int:
        """Waits until none of the warp's wgmma products is pending, so that none overlaps with the code after it."""
        return sum(i.base == "WARPGROUP" and "DEPBAR" in i.opcode and i.count == 0 for i in self.body)

    def __str__(self) -> str:
        """Counts per score and thread, clocks per 32 scores and SM, access widths, and the order of products."""
        if not self.scores:
            return "scores unknown"
        pipes, clocks = (
            ", ".join(f"{name} {count / self.scores:.2f}" for name, count in by.items())
            for by in (self.pipes, self.clocks)
        )
        accesses = ", ".join(f"{count} {base} of {bits} bits" for (base, bits), count in widths(self.body).items())
        return (
            f"{len(self.body) / self.scores:.2f} instructions per score: {pipes}\n"
            f"clocks per 32 scores: {clocks or 'unknown'}\n"
            f"accesses: {accesses or 'none'}\n"
            f"order: {order(self.body)}"
        )


def plain_loop(code: Sequence[Instruction]) -> list[Instruction]:
    """Return the loop with the fewest instructions per matrix product, which applies no mask; [] if there is none."""
    found = [(sum(i.pipe == "tensor" for i in body) / len(body), body) for body in innermost(code, "tensor")]
    return max(found, key=lambda one: one[0], default=(0, []))[1]


def order(body: Sequence[Instruction]) -> str:
    """Return the products, waits, barriers, exponentials and copies of a loop in their order, repetitions counted."""
    found: list[tuple[str, int]] = []
    quiet = 0  # instructions since the last event
    for i in body:
        name = _event(i)
        if not name:
            quiet += 1
            continue
        if found and found[-1][0] == name and quiet <= 40:
            found[-1] = name, found[-1][1] + 1
        else:
            found.append((name, 1))
        quiet = 0
    return ", ".join(f"{count} {name}" if count > 1 else name for name, count in found)


def _event(i: Instruction) -> str:
    if i.pipe == "tensor":
        return i.base + (" commit" if "gsb0" in i.operands else "")
    if "DEPBAR" in i.opcode and i.base != "LDGDEPBAR":
        return f"{i.base}.DEPBAR<={i.count or 0}" if i.base == "WARPGROUP" else f"DEPBAR<={i.count or 0}"
    if i.base in ("BAR", "SYNCS", "UTCBAR", "LDTM", "STTM", "UTMALDG", "LDGSTS", "MUFU"):
        return ".".join(i.opcode.split(".")[: 3 if i.base in ("BAR", "SYNCS") else 1])
    return i.base if i.pipe == "local" else ""


def widths(code: Sequence[Instruction]) -> dict[tuple[str, int], int]:
    """Return the number of memory accesses by instruction and width in bits."""
    accesses = ("LDG", "STG", "LDS", "STS", "LDL", "STL", "LDGSTS")
    return dict(sorted(Counter((i.base, i.bits) for i in code if i.base in accesses).items()))


def wide_share(code: Sequence[Instruction], bases: Sequence[str]) -> float:
    """Return the share of bytes that these instructions move by 128 bits at a time, 1 if they move none."""
    moved = [i.bits for i in code if i.base in bases]
    return sum(bits for bits in moved if bits >= 128) / sum(moved) if moved else 1.0
