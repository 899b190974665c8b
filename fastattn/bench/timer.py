"""Time functions against each other: interleaved in one process, compared pair by pair.

Other programs slow neighbouring samples alike. The ratio of two samples taken one after the other is therefore steadier
than the ratio of two medians taken apart. Ratios are medians over the quieter half of the rounds, because other
programs only ever add time.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles

Measure = Callable[[Callable[[], object], int], float]

CACHED = 10e-3
"""Seconds within which a call may find its operands in the caches."""

STAT = Path("/proc/stat")

LEAST_WATCHED = 0.2
"""Minimum seconds to judge by the kernel's counters of processor time, which advance by 0.01."""

OTHERS = 0.10
"""Maximum share of the processors that other programs may take. Half of the rounds do not count anyway."""


def wall_clock(function: Callable[[], object], repeats: int) -> float:
    """Return the seconds of one call of `function`, the mean over `repeats` calls in a row.

    This is the default `Measure`. A device that works asynchronously needs another one.
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
    """Seconds per call of each function, one sample a round. Sample `i` of all functions was taken in round `i`.

    others: the share of this process's processors that other programs took meanwhile, None if unknown.
    """

    samples: dict[str, list[float]]
    others: float | None = None

    def quieter_half(self) -> Timing:
        """Return the rounds that took least time for all functions together, in their order."""
        totals = [sum(times) for times in zip(*self.samples.values(), strict=True)]
        quiet = sorted(sorted(range(len(totals)), key=totals.__getitem__)[: (len(totals) + 1) // 2])
        return replace(self, samples={name: [times[i] for i in quiet] for name, times in self.samples.items()})

    def seconds(self, name: str) -> float:
        return median(self.samples[name])

    def ratio(self, name: str, base: str) -> Ratio:
        """Return the time of `name` over the time of `base`, pair by pair."""
        return Ratio.of([a / b for a, b in zip(self.samples[name], self.samples[base], strict=True)])


def interleave(
    functions: Mapping[str, Callable[[], object]],
    *,
    budget: float = 1.0,
    rounds: tuple[int, int] = (6, 100),
    sample: float = 2e-3,
    measure: Measure = wall_clock,
) -> Timing:
    """Time `functions` in turn (a, b, a, b, ...), after a warm-up, and keep the quieter half of the rounds.

    Before each sample comes a call of the same function that is not counted. The state of the caches then does not
    depend on which function ran last.

    Args:
        budget: seconds for all rounds together.
        rounds: minimum and maximum number of rounds, whatever the budget.
        sample: minimum seconds of a sample. Shorter calls are repeated within it.
    """
    with _no_garbage_collection():
        repeats = {name: calls_per_sample(function, sample, measure) for name, function in functions.items()}
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


class Neighbours:
    """Watch, from construction on, what other programs and virtual machines take of this process's processors."""

    def __init__(self) -> None:
        self._start, self._busy = time.perf_counter(), _busy_beside()

    def share(self) -> float | None:
        """Return their share of the processors' time until now, None if unknown. Ended children are not neighbours."""
        elapsed, busy = time.perf_counter() - self._start, _busy_beside()
        if self._busy is None or busy is None or elapsed < LEAST_WATCHED:
            return None
        return max(0.0, busy - self._busy) / (elapsed * len(os.sched_getaffinity(0)))

    def noise(self) -> str:
        """Say by how much they disturbed a measurement, or return ""."""
        return noise_of(self.share())


def noise_of(others: float | None) -> str:
    """Say in words that a share of the processors disturbs a measurement, or return ""."""
    return f"other programs took {others:.0%} of the processors" if others is not None and others > OTHERS else ""


def _busy_beside() -> float | None:
    """Return the seconds that this process's processors have worked for others since boot, None if unknown.

    These are user, nice, system, irq, softirq and steal of /proc/stat, less this process's own time.
    """
    try:
        rows = [line.split() for line in STAT.read_text().splitlines() if line.startswith("cpu")]
        mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        ticks = sum(sum(map(int, (*row[1:4], *row[6:9]))) for row in rows if row[0] in mine)
    except (OSError, AttributeError, ValueError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4]) if ticks else None


def calls_per_sample(function: Callable[[], object], sample: float, measure: Measure = wall_clock) -> int:
    """Return how many calls take at least `sample` seconds. Finding out warms the function up."""
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
