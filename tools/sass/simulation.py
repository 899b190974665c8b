"""A main loop on one of an SM's schedulers, instruction by instruction."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sass import rates
from sass.code import Instruction
from sass.rates import LATENCY, QUEUE, SCHEDULERS, Machine

_PARTS = {
    "max": "alu", "select": "alu", "convert": "alu", "int": "alu", "move": "alu", "imad_move": "imad",
    "shuffle": "memory", "shared": "memory",
}  # fmt: skip


class _Step(NamedTuple):
    """What the simulation has to know of an instruction."""

    unit: str  # what it takes
    clocks: float  # for so long
    slack: float  # clocks of work before it that do not keep it
    latency: float
    stall: int
    write: int
    read: int
    waits: tuple[int, ...]
    arrives: bool  # at a named barrier for others, without waiting
    meets: bool  # the program's other warps, at a barrier
    commits: str  # what waits for it, and all of its kind before it, as a group: "products", "copies", a barrier
    awaits: str  # the same of it: until it, or what its scoreboard stands for, no more groups than these are pending
    pending: int


@dataclasses.dataclass
class _Warp:
    program: int
    ready: float  # clock at which its next instruction may be issued
    at: int = 0  # its next instruction
    iteration: int = 0
    is_waiting: bool = False  # at a barrier
    boards: list[float] = dataclasses.field(default_factory=lambda: [0.0] * 6)  # clocks at which they are free
    multiplied: float = 0.0  # clock at which its matrix products are done
    groups: dict[str, list[float]] = dataclasses.field(default_factory=lambda: defaultdict(list))


def _barriers(loop: Sequence[Instruction]) -> dict[int, str]:
    """By place: the barrier in shared memory that a fifth-generation tensor core arrives at, or that is waited for.

    A wait is for the products whose barrier it names. Where compilers have named one in two ways, the next wait that
    names no other is for it; the rest are for copies.
    """
    arrivals = {place: i.operands.partition("]")[0] for place, i in enumerate(loop) if i.base == "UTCBAR"}
    waits = {
        place: i.operands[i.operands.index("[") :].partition("]")[0]
        for place, i in enumerate(loop)
        if "PHASECHK" in i.opcode
    }
    found = arrivals | {place: name for place, name in waits.items() if name in arrivals.values()}
    for place, name in arrivals.items():
        if name not in waits.values():
            rest = [wait for wait in waits if wait not in found]
            found |= dict.fromkeys((*(w for w in rest if w > place), *rest)[:1], name)
    return found


def _step(i: Instruction, machine: Machine, product_clocks: Callable[[Instruction], float], barrier: str) -> _Step:
    lanes = {
        "fp32": machine.fp32, "mufu": machine.mufu, "imad": machine.imad, "wide": machine.imad / 2, "alu": machine.alu,
    }  # fmt: skip
    unit = "memory" if i.base == "LDGSTS" else _PARTS.get(i.pipe, i.pipe)
    slack = QUEUE.get(unit, 0.0)
    if i.pipe == "tensor":
        clocks = product_clocks(i) * SCHEDULERS
        if i.base != "HMMA":
            slack = QUEUE["matrix"]
    elif i.pipe == "tmem":
        clocks = i.tensor_memory_bytes * SCHEDULERS / machine.tensor_memory
    elif i.pipe == "shuffle":
        clocks = 32 * SCHEDULERS / machine.shuffle
    elif unit == "memory":
        clocks = i.shared_bytes * SCHEDULERS / machine.bytes
    else:
        clocks = 32 * SCHEDULERS / lanes[unit] if unit in lanes else 1.0
    if unit in ("imad", "wide"):
        unit = "fp32" if machine.shares_multiplier else "imad"
    awaits = "" if i.base == "UTCBAR" else barrier
    if "DEPBAR" in i.opcode and i.base in ("WARPGROUP", "DEPBAR"):
        awaits = "products" if i.base == "WARPGROUP" else "copies"
    commits = barrier if i.base == "UTCBAR" else "products" if i.pipe == "tensor" and "gsb0" in i.operands else ""
    if i.base == "LDGDEPBAR":
        commits = "copies"
    stall = max(1, i.stall) + (rates.FENCE if i.base in ("MEMBAR", "FENCE") else 0)
    is_barrier, arrives = i.base == "BAR", ".ARV" in i.opcode
    return _Step(
        unit, clocks, slack, LATENCY.get(i.pipe, 4), stall, i.write, i.read, i.waits, is_barrier and arrives,
        is_barrier and not arrives, commits, awaits, 0 if barrier else i.count or 0,
    )  # fmt: skip


def simulate(
    loop: Sequence[Instruction],
    machine: Machine,
    programs: int,
    warps: int,
    product_clocks: Callable[[Instruction], float],
    distance: float = 0.0,
    iterations: int = 12,
) -> float:
    """Clocks an iteration takes in the steady state, of a scheduler that has ``warps`` of each of ``programs``.

    Instructions are issued in order, one a clock. A warp waits for stall counts, scoreboards, pipes and barriers, as
    the code says. Bulk copies are taken to arrive in time. ``product_clocks`` are an SM's for a matrix instruction of a
    warp; ``distance`` is how far one program is behind another, in iterations of an instruction a clock.
    """
    barriers = _barriers(loop)
    steps = [_step(i, machine, product_clocks, barriers.get(place, "")) for place, i in enumerate(loop)]
    everyone = [_Warp(n // warps, distance * len(steps) * (n // warps)) for n in range(programs * warps)]
    # Warpgroups that let each other go on in turn by named barriers: each waits for the one before it.
    takes_turns = sum(step.arrives for step in steps) == sum(step.meets for step in steps) == 1
    turns: list[list[float]] = [[0.0]] + [[] for _ in everyone[1:]]
    free: dict[str, float] = defaultdict(float)  # clock at which a unit has done what it was given
    arrived: dict[tuple[int, int], list[float]] = defaultdict(list)
    finished: list[float] = []  # clocks at which an iteration of any warp ended
    now, last = 0.0, 0
    while any(warp.iteration < iterations for warp in everyone):
        soonest = float("inf")
        for number in (*range(last, len(everyone)), *range(last)):
            warp = everyone[number]
            if warp.iteration == iterations:
                continue
            step = steps[warp.at]
            start = max(warp.ready, free[step.unit] - step.slack)
            for board in step.waits:
                start = max(start, warp.boards[board])
            groups = warp.groups[step.awaits] if step.awaits else []
            complete = groups[-step.pending - 1] if len(groups) > step.pending else 0.0
            if step.write == 7:
                start = max(start, complete)
            if step.meets and takes_turns:
                if not turns[number]:
                    soonest = min(soonest, now + 1)
                    continue
                start = max(start, turns[number][0])
            elif step.meets:
                here = arrived[warp.program, warp.iteration * len(steps) + warp.at]
                if not warp.is_waiting and start <= now:
                    warp.is_waiting = True
                    here.append(now)
                if len(here) < warps:
                    soonest = min(soonest, max(start, now + 1))
                    continue
                start = max(start, max(here) + rates.BARRIER)
            if start > now:
                soonest = min(soonest, start)
                continue
            done = free[step.unit] = max(now, free[step.unit]) + step.clocks
            if step.write < 6:
                warp.boards[step.write] = max(warp.boards[step.write], done + step.latency, complete)
            if step.read < 6:
                warp.boards[step.read] = max(warp.boards[step.read], done + rates.OPERANDS_READ)
            if step.unit == "tensor":
                warp.multiplied = done
            if step.commits:
                end = now + rates.COPY if step.commits == "copies" else warp.multiplied + rates.PRODUCTS
                warp.groups[step.commits].append(end)
            if takes_turns and step.arrives:
                turns[(number + 1) % len(everyone)].append(now + rates.ARRIVAL)
            elif takes_turns and step.meets:
                turns[number].pop(0)
            warp.is_waiting, warp.ready = False, now + step.stall
            warp.at += 1
            if warp.at == len(steps):
                warp.at, warp.iteration = 0, warp.iteration + 1
                finished.append(now)
            last = number
            break
        else:
            now = max(now + 1, soonest)
            continue
        now += 1
    half = len(finished) // 2
    return (finished[-1] - finished[half - 1]) / (len(finished) - half) * len(everyone)
