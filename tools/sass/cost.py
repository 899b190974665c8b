"""What the main loop of a kernel costs: instructions, clocks of each pipe, bounds, and what holds it up."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from sass import rates
from sass.code import Instruction
from sass.loops import innermost, whole
from sass.rates import MACHINES, SCHEDULERS, Machine
from sass.simulation import simulate


def occupancy(machine: Machine, registers: int, threads: int, shared: int) -> int:
    """How many programs an SM has at a time."""
    by_registers = rates.REGISTERS // (-(-registers // 8) * 8 * threads)
    by_shared = machine.shared // (shared + rates.RESERVED_SHARED)
    return max(1, min(by_registers, by_shared, rates.THREADS // threads, rates.PROGRAMS))


@dataclasses.dataclass(frozen=True)
class Attention:
    """What the machine code of an attention kernel does not say. A score is a pair of a query and a key."""

    capability: int
    head_dim: int
    products: int  # matrix products of the loop, each of ``head_dim`` multiply-adds a score
    registers: int
    threads: int
    shared: int  # bytes a program
    fetched: float  # bytes a score from L2; sums in float32 that are added to there count twice
    warps: int = 0  # of a program that multiply, if not all do

    @property
    def machine(self) -> Machine:
        return MACHINES[self.capability]


@dataclasses.dataclass(frozen=True)
class Loop:
    """An iteration of an attention kernel's loop over tiles. Clocks are an SM's, for 32 scores: a warp's instruction a
    score takes one of a pipe with 32 lanes."""

    body: list[Instruction]
    kernel: Attention

    def multiply_adds(self, i: Instruction) -> float:
        """Of a warp: its part of what a program's instruction does for all."""
        return i.multiply_adds / self._warps if i.is_fifth else i.multiply_adds

    def shared_bytes(self, i: Instruction) -> float:
        """The same of shared memory."""
        return i.shared_bytes / self._warps if i.is_fifth else i.shared_bytes

    def tensor_clocks(self, i: Instruction) -> float:
        """Of an SM, for a warp's part."""
        machine = self.kernel.machine
        if i.is_fifth and i.rows:
            return self.multiply_adds(i) / machine.matrix * max(1, rates.FULL_ROWS / i.rows)
        return self.multiply_adds(i) / (machine.mma if i.base == "HMMA" else machine.matrix)

    def product_clocks(self, i: Instruction) -> float:
        """The same, or as long as shared memory takes for the operands."""
        return max(self.tensor_clocks(i), self.shared_bytes(i) / self.kernel.machine.bytes)

    @property
    def _warps(self) -> int:
        return self.kernel.warps or self.kernel.threads // 32

    @property
    def scores(self) -> float:
        """Of a thread in an iteration."""
        done = sum(map(self.multiply_adds, self.body))
        return done / (self.kernel.products * self.kernel.head_dim * 32)

    @property
    def per_score(self) -> dict[str, float]:
        """A thread's instructions by pipe."""
        return {pipe: count / self.scores for pipe, count in Counter(i.pipe for i in self.body).most_common()}

    @property
    def clocks(self) -> dict[str, float]:
        """What each pipe needs."""
        machine, count = self.kernel.machine, Counter(self.per_score)
        integers = 32 * (count["imad"] + count["imad_move"] + 2 * count["wide"]) / machine.imad
        multiplied = count["fp32"] + count["imad"] + count["imad_move"] + count["wide"]
        if machine.shares_multiplier:
            fma = 32 * count["fp32"] / machine.fp32 + integers
        else:
            fma = max(32 * multiplied / machine.fp32, integers)
        logic = count["max"] + count["select"] + count["convert"] + count["int"] + count["move"]
        return {
            "tensor": sum(self.tensor_clocks(i) for i in self.body if i.pipe == "tensor") / self.scores,
            "mufu": 32 * count["mufu"] / machine.mufu,
            "fma": fma,
            "alu": 32 * logic / machine.alu,
            "shared": sum(map(self.shared_bytes, self.body)) / self.scores / machine.bytes
            + 32 * count["shuffle"] / machine.shuffle,
            "tmem": sum(i.tensor_memory_bytes for i in self.body) / self.scores / machine.tensor_memory,
            "l2": 32 * self.kernel.fetched / machine.l2,
            "issue": len(self.body) / self.scores / SCHEDULERS,
        }

    def rate(self, clocks: float) -> float:
        """TFLOP/s where 32 scores take so long."""
        machine = self.kernel.machine
        flops = 2 * self.kernel.products * self.kernel.head_dim * 32
        return flops / clocks * machine.multiprocessors * machine.clock / 1e3

    @property
    def overlap(self) -> tuple[float, float]:
        """TFLOP/s where nothing runs beside matrix products, and where everything does."""
        clocks = self.clocks
        rest = max(needed for pipe, needed in clocks.items() if pipe != "tensor")
        return self.rate(clocks["tensor"] + rest), self.rate(max(clocks["tensor"], rest))

    @property
    def programs(self) -> int:
        return occupancy(self.kernel.machine, self.kernel.registers, self.kernel.threads, self.kernel.shared)

    def simulated(self) -> float:
        """TFLOP/s of the in-order simulation: a mean over how far the programs of an SM are from each other."""
        machine, warps = self.kernel.machine, -(-self._warps // SCHEDULERS)
        distances = (0.0, 0.3, 0.7, 1.3) if self.programs > 1 else (0.0,)
        clocks = [
            simulate(self.body, machine, self.programs, warps, self.product_clocks, distance) for distance in distances
        ]
        mean = sum(clocks) / len(clocks) / (self.programs * warps * self.scores) / SCHEDULERS
        return min(self.rate(max(mean, self.clocks["l2"])), machine.sustained * machine.peak)

    @property
    def local(self) -> int:
        """Accesses to a thread's stack."""
        return sum(i.pipe == "local" for i in self.body)

    @property
    def shared_share(self) -> float:
        """Clocks of shared memory for one of the tensor cores."""
        clocks = self.clocks
        return clocks["shared"] / clocks["tensor"]

    @property
    def barriers(self) -> int:
        """Of all warps of a program."""
        return sum(i.base == "BAR" and ".ARV" not in i.opcode for i in self.body)

    @property
    def drains(self) -> int:
        """wgmma's waits until no matrix product is pending any more: none runs beside what follows."""
        return sum(i.base == "WARPGROUP" and "DEPBAR" in i.opcode and i.count == 0 for i in self.body)


def plain_loop(code: Sequence[Instruction]) -> list[Instruction]:
    """The loop with the fewest instructions to its matrix products, which has no mask; empty where there is none."""
    found = [(sum(i.multiply_adds for i in body) / len(body), body) for body in innermost(code, ("tensor",))]
    work, body = max(found, key=lambda one: one[0], default=(0, []))
    return body if work else []


def order(body: Sequence[Instruction]) -> str:
    """What of a loop matters for overlap, in its order: products, waits, barriers, exponentials, copies."""
    found: list[tuple[str, int]] = []
    quiet = 0  # instructions since
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


def widths(code: Sequence[Instruction]) -> dict[str, dict[int, int]]:
    """Accesses to memory by instruction and bits."""
    found: dict[str, Counter[int]] = {}
    for i in code:
        if i.base in ("LDG", "STG", "LDS", "STS", "LDL", "STL", "LDGSTS"):
            found.setdefault(i.base, Counter())[i.bits] += 1
    return {base: dict(sorted(count.items())) for base, count in sorted(found.items())}


def wide_share(code: Sequence[Instruction], bases: Sequence[str]) -> float:
    """Of the bytes that these instructions move, the part moved by 128 bits at a time; 1 of none."""
    moved = [i.bits for i in code if i.base in bases]
    return sum(bits for bits in moved if bits >= 128) / sum(moved) if moved else 1.0


@dataclasses.dataclass(frozen=True)
class Rows:
    """What the machine code of a row operation does not say: elements, and bytes of each that memory must move."""

    capability: int
    elements: float  # of a thread in an iteration
    bytes: float

    @property
    def machine(self) -> Machine:
        return MACHINES[self.capability]


def row_path(code: Sequence[Instruction]) -> list[Instruction]:
    """What is done to a block of rows: the loops over blocks, once each, or, where there are none, all."""
    return [i for body in innermost(code, ("global",)) for i in body] or whole(code)


def issue_share(path: Sequence[Instruction], rows: Rows) -> float:
    """Of the instructions that an SM can issue, those that it must at the memory's full speed."""
    machine = rows.machine
    elements = machine.memory * 1e3 / machine.multiprocessors / machine.clock / rows.bytes  # a clock
    return elements * len(path) / rows.elements / 32 / SCHEDULERS
