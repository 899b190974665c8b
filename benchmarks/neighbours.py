"""What `fastattn train` sets for its process: its target tokens a second, alone and beside two busy processes, for
several bounds on how long OpenMP's threads spin, and with malloc left alone.

    python benchmarks/neighbours.py --record

The settings take turns. `--record` keeps the results as benchmarks/results/neighbours-MACHINE.json; `make tables`
shows them.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import fastattn_command
from fastattn.bench import contest, report
from fastattn.bench.timer import Neighbours
from fastattn.translation.data import verses
from fastattn.translation.train import read_metrics

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {
    "the command's": {},
    "malloc's own": {"MALLOC_ARENA_TEST": "8"},  # a default: what is set has the command leave malloc alone
    "OpenMP's own": {"GOMP_SPINCOUNT": "300000"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
}
SET = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MALLOC_", "GLIBC_TUNABLES")  # beginnings of variables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=40, help="of a measurement")
    parser.add_argument("--busy", type=int, default=2, help="processes")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    watched = Neighbours()
    cases = [(setting, busy) for setting in SETTINGS for busy in (0, options.busy)]
    found: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for _ in range(options.rounds):
        for setting, busy in cases:
            found[setting, busy].append(tokens_per_second(SETTINGS[setting], busy, options.updates))
            print(f"{setting}, {busy} busy processes: {found[setting, busy][-1]:.0f} tokens/s", flush=True)
    others = watched.share()  # without the busy processes, which are its children
    medians = {
        setting: {f"{busy} busy": statistics.median(found[setting, busy]) for busy in (0, options.busy)}
        for setting in SETTINGS
    }
    print(json.dumps(medians, indent=1))
    if options.record:
        data = {"tokens_per_second": medians, "spin": fastattn_command.SPIN}
        report.record(ROOT / "benchmarks/results", "neighbours", data, contest.disturbed_by(others))


def section(data: dict[str, Any]) -> str:
    """One machine's part of the page."""
    found = data["tokens_per_second"]
    columns = list(next(iter(found.values())))
    rows = [[name, *(f"{row[column]:.0f}" for column in columns)] for name, row in found.items()]
    return f"{report.origin(data)}:\n\n{report.markdown([['target tokens a second', *columns], *rows])}"


def tokens_per_second(setting: dict[str, str], busy: int, updates: int) -> float:
    """Of the last updates of a short run: the first ones prepare."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(SET)}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        for _ in range(busy):
            neighbour = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(neighbour.kill)
        entry = "import fastattn_command, sys; sys.exit(fastattn_command.main())"
        command = [sys.executable, "-c", entry, "train", "--train", *verses("test"), "--valid", *verses("dev")]
        command += [
            "--out",
            f"{folder}/run",
            "--vocab-size",
            "4000",
            "--max-steps",
            str(updates),
            "--save-every",
            "9999",
        ]
        subprocess.run(
            command, env=environment | setting, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        rows = read_metrics(Path(folder) / "run")
    return statistics.median(row["tokens_per_second"] for row in rows[1:])


if __name__ == "__main__":
    main()
