"""Compare this checkout with another commit on the same machine: `pytest benchmarks --against REF`.

Each side has a process, and the two take turns. This file run as a program is such a process: it measures cases with
the fastattn of its PYTHONPATH. Cases and timer come from this checkout by path, so both sides do the same work. A
request is the name of a case in a line, a reply is a line of JSON: {"seconds": ...} or {"error": ...}.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KEPT = 0.9
"""Minimum of the other commit's time over ours. A lower ratio in two measurements fails."""
SAMPLE = 5e-3
"""Minimum seconds of a sample."""


def harness(name: str) -> Any:
    """Import a module of this checkout's fastattn/bench by path. Its `import fastattn` finds the package under test."""
    if "measuring" not in sys.modules:
        package = types.ModuleType("measuring")
        package.__path__ = [str(ROOT / "fastattn/bench")]
        sys.modules["measuring"] = package
    return importlib.import_module(f"measuring.{name}")


def serve() -> None:
    """Measure the cases named on standard input, one sample per line."""
    import fastattn

    timer, contest, cases = map(harness, ("timer", "contest", "cases"))
    named = {case.name: case for case in (*cases.listed(), *cases.sweep())}
    print(json.dumps({"package": fastattn.__file__}), flush=True)
    current, call, repeats = "", None, 0
    for line in sys.stdin:
        try:
            if line.strip() != current:
                current = line.strip()
                call = contest.ours(named[current])
                repeats = timer.calls_per_sample(call, SAMPLE)
            reply = {"seconds": timer.wall_clock(call, repeats)}
        except Exception as error:
            current, reply = "", {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)


class Worker:
    """A process that answers lines with lines of JSON."""

    def __init__(self, command: list[str], **environment: str) -> None:
        # Threads of the waiting process must not spin while the other one is timed.
        variables = {**os.environ, "GOMP_SPINCOUNT": "1000", **environment}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, text=True, env=variables, **pipes)  # type: ignore[call-overload]

    def ask(self, request: str | None = None) -> dict[str, Any]:
        """Send a request, unless the process speaks first, and return the reply."""
        if request is not None:
            self.process.stdin.write(f"{request}\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that measures ended with status {self.process.wait()}")
        return json.loads(line)

    def seconds(self, case: str) -> float:
        reply = self.ask(case)
        if "error" in reply:
            raise Lacking(reply["error"])
        return reply["seconds"]

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


class Lacking(Exception):
    """A package cannot do a case."""


def worker(root: Path) -> Worker:
    """Start a process that measures the package in the folder `root`."""
    started = Worker([sys.executable, __file__], PYTHONPATH=str(root))
    package = Path(started.ask()["package"]).resolve()
    if root.resolve() not in package.parents:
        started.close()
        raise RuntimeError(f"{package} was imported, expected the package in {root}")
    return started


@contextlib.contextmanager
def built(ref: str) -> Iterator[Path]:
    """Check out a commit into a temporary folder and compile it."""
    with tempfile.TemporaryDirectory() as folder:
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", folder, ref], check=True, capture_output=True)
        try:
            build = [sys.executable, "setup.py", "build_ext", "--inplace"]
            wanted = {"FASTATTN_CPU_BUILD": os.environ.get("FASTATTN_CPU_ISA") or "native"}
            environment = os.environ | {"FASTATTN_BUILD": "1", "FASTATTN_CUDA": "0"} | wanted
            subprocess.run(build, cwd=folder, check=True, env=environment, stdout=subprocess.DEVNULL)
            yield Path(folder)
        finally:
            subprocess.run([*git, "remove", "--force", folder], check=True)


def compare(name: str, sides: Mapping[str, Callable[[str], float]], **options: Any) -> Any:
    """Measure a case on both sides alternately, again if it is noisy or slower. Return a `contest.Result`.

    Args:
        sides: "before" and "now", each returns the seconds of a case's sample.
        options: budget and rounds of the timer.
    """
    timer, contest = harness("timer"), harness("contest")
    functions = {side: partial(seconds, name) for side, seconds in sides.items()}
    lost = noisy = 0
    while lost < 2 and noisy < contest.ATTEMPTS:
        timing = timer.interleave(functions, measure=lambda function, repeats: function(), **options)
        ratio = timing.ratio("before", "now")
        if ratio.high - ratio.low > contest.SPREAD * ratio.median:
            noisy += 1
        elif ratio.median < KEPT:
            lost += 1
        else:
            break
    seconds = {side: timing.seconds(side) for side in functions}
    noise = f"quartiles {ratio.low:.2f} and {ratio.high:.2f}" if noisy == contest.ATTEMPTS else ""
    return contest.Result(name, seconds, {"before": ratio}, noise=noise)


def times_as_fast(change: Any) -> float:
    return change.ratios["before"].median


def is_lost(change: Any) -> bool:
    return not change.noise and times_as_fast(change) < KEPT


def summary(changes: list[Any]) -> list[list[str]]:
    """Return rows of a table, slowest first, and the geometric mean."""
    rows = [["case", "before", "now", "times as fast", ""]]
    for change in sorted(changes, key=times_as_fast):
        times = (f"{1e3 * change.seconds[side]:.4g} ms" for side in ("before", "now"))
        rows.append([change.name, *times, f"{times_as_fast(change):.2f}", "slower" * is_lost(change) or change.noise])
    quiet = [times_as_fast(change) for change in changes if not change.noise]
    return [*rows, [f"geometric mean of {len(quiet)}", "", "", f"{geometric_mean(quiet):.3f}" if quiet else "", ""]]


if __name__ == "__main__":
    serve()
