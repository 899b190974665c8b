"""Times functions against each other: interleaved in one process, compared pair by pair.

A machine that other programs use slows neighbouring samples alike, so the ratio of two samples taken one after the
other is steadier than the ratio of two medians taken apart. Every figure of this package is such a ratio, its median
over the quieter half of the rounds: what a neighbour does only ever adds time.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles

import torch

Measure = Callable[[Callable[[], object], int], float]

CACHED = 10e-3
"""Seconds within which a call may find its operands in the caches; a longer one has gone through more memory."""


STAT = Path("/proc/stat")

LEAST_WATCHED = 0.2
"""Seconds below which the kernel's counters of processor time, which advance by 0.01, say nothing."""


def wall_clock(function: Callable[[], object], repeats: int) -> float:
    """Seconds of one call of `function`, the mean over `repeats` calls in a row.

    The default `Measure`. One for a device that works asynchronously replays `repeats` captured calls between two
    events; everything else here stays as it is.
    """
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    return (time.perf_counter() - start) / repeats


@dataclass(frozen=True)
class Ratio:
    """A median ratio and its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Ratio:
        low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        return cls(middle, low, high)


@dataclass(frozen=True)
class Timing:
    """Seconds per call of each function, one sample a round; sample `i` of all functions was taken in round `i`.

    others: the share of this process's processors that other programs, or other virtual machines, took meanwhile; None
    where it is unknown.
    """

    samples: dict[str, list[float]]
    others: float | None = None

    def quieter_half(self) -> Timing:
        """The rounds that took least time for all functions together, in their order."""
        totals = [sum(times) for times in zip(*self.samples.values(), strict=True)]
        quiet = sorted(sorted(range(len(totals)), key=totals.__getitem__)[: (len(totals) + 1) // 2])
        return replace(self, samples={name: [times[i] for i in quiet] for name, times in self.samples.items()})

    def seconds(self, name: str) -> float:
        return median(self.samples[name])

    def ratio(self, name: str, base: str) -> Ratio:
        """Time of `name` over time of `base`, pair by pair."""
        return Ratio.of([a / b for a, b in zip(self.samples[name], self.samples[base], strict=True)])


def interleave(
    functions: Mapping[str, Callable[[], object]],
    *,
    budget: float = 1.0,
    rounds: tuple[int, int] = (6, 100),
    sample: float = 2e-3,
    measure: Measure = wall_clock,
) -> Timing:
    """Times `functions` in turn (a, b, a, b, ...), after a warm-up, for about `budget` seconds; the quieter half.

    Each sample comes after a call of the same function that is not counted: which of the operands the caches hold is
    then its own doing, and not that of the function before it.

    budget: seconds for the rounds; at least `rounds[0]` and at most `rounds[1]` are run whatever it says.
    sample: seconds that one sample lasts at least; shorter calls are repeated within it.
    """
    with _no_garbage_collection():
        repeats = {name: _repeats(function, sample, measure) for name, function in functions.items()}
        samples: dict[str, list[float]] = {name: [] for name in functions}
        start, neighbours = time.perf_counter(), Neighbours()
        for count in range(rounds[1]):
            if count >= rounds[0] and time.perf_counter() - start > budget:
                break
            for name, function in functions.items():
                if not samples[name] or samples[name][-1] < CACHED:
                    measure(function, 1)
                samples[name].append(measure(function, repeats[name]))
        others = neighbours.share()
    return Timing(samples, others).quieter_half()


def kernel_seconds(call: Callable[[], object], repeats: int = 10) -> dict[str, float]:
    """Seconds of each CUDA kernel that a call starts, by its name: the GPU's own, the median over several calls."""
    call()  # compiles
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:  # others are what the host did
            found[event.name].append(event.time_range.elapsed_us() / 1e6)
    return {name: median(times) for name, times in found.items()}


class Neighbours:
    """Watches from its making on what other programs, or other virtual machines, take of this process's processors."""

    def __init__(self) -> None:
        self._start, self._busy = time.perf_counter(), _busy_beside()

    def share(self) -> float | None:
        """Of the processors' time until now; None where it is unknown. Children count as ours once they have ended."""
        elapsed, busy = time.perf_counter() - self._start, _busy_beside()
        if self._busy is None or busy is None or elapsed < LEAST_WATCHED:
            return None
        return max(0.0, busy - self._busy) / (elapsed * len(os.sched_getaffinity(0)))


def _busy_beside() -> float | None:
    """Seconds that this process's processors have worked for others since the machine started; None where the kernel
    does not tell. Counted in user, nice, system, irq, softirq and steal of /proc/stat."""
    try:
        rows = [line.split() for line in STAT.read_text().splitlines() if line.startswith("cpu")]
        mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        ticks = sum(sum(map(int, (*row[1:4], *row[6:9]))) for row in rows if row[0] in mine)
    except (OSError, AttributeError, ValueError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4]) if ticks else None


def _repeats(function: Callable[[], object], sample: float, measure: Measure) -> int:
    """Calls that make a sample of at least `sample` seconds; finding out warms the function up."""
    function()
    repeats = 1
    while (seconds := measure(function, repeats)) * repeats < sample / 2:
        repeats = max(2 * repeats, min(10 * repeats, math.ceil(sample / max(seconds, 1e-9))))
    return max(1, math.ceil(sample / seconds))


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
