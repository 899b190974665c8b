"""Result files, and the tables made from them."""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import fastattn
from fastattn.backends import native
from fastattn.bench import limits, peers
from fastattn.bench.cases import FLOORED, PATCHED, listed, sweep
from fastattn.bench.contest import Result, below_floor, disturbed_by
from fastattn.errors import InputError
from fastattn.files import write_file
from fastattn.info import cpu_name


@dataclass(frozen=True)
class Report:
    """The results of a run, and everything needed to judge them."""

    machine: dict[str, Any]
    versions: dict[str, str]
    commit: str
    date: str
    limits: dict[str, float | None]
    results: dict[str, Result]

    @classmethod
    def new(cls, results: Iterable[Result] = (), measured: dict[str, float | None] | None = None) -> Report:
        """A report of `results` on this machine, now; its limits are measured unless given. A result that was recorded
        before keeps its commit and date."""
        head, date = commit(), now()
        return cls(
            machine(),
            {"fastattn": fastattn.__version__, "torch": torch.__version__, "python": platform.python_version()}
            | peers.versions(),
            head,
            date,
            limits.measure() if measured is None else measured,
            {r.name: r if r.date else replace(r, commit=head, date=date) for r in results},
        )

    def beside(self, recorded: Report | None) -> Report:
        """What is to be recorded of this report where `recorded` was: quiet results, and of the same torch the older
        ones that they do not replace; the older limits, if neighbours disturbed the new ones."""
        results = {name: result for name, result in self.results.items() if not result.disturbed}
        if recorded is None:
            return replace(self, results=results)
        if recorded.versions["torch"] == self.versions["torch"]:
            results = recorded.results | results
        disturbed = disturbed_by(self.limits.get("others"))
        return replace(self, results=results, limits=recorded.limits if disturbed else self.limits)

    @property
    def days(self) -> str:
        """The day of its results, or the first and the last one."""
        found = sorted({result.date[:10] for result in self.results.values()}) or [self.date[:10]]
        return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"

    @classmethod
    def read(cls, path: Path) -> Report:
        """Raises InputError where `path` is no result file."""
        try:
            data = json.loads(path.read_text())
            data["results"] = {entry["name"]: Result.from_json(entry) for entry in data["results"]}
            return cls(**data)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise InputError(f"{path}: expected a result file, which `fastattn bench --output FILE` writes") from None

    def write(self, path: Path) -> None:
        """Writes the report to `path`, whole or not at all, a result a line."""
        head = json.dumps(vars(self) | {"results": []}, indent=1).removesuffix("[]\n}")
        results = ",\n".join(f"  {json.dumps(_rounded(result.to_json()))}" for result in self.results.values())
        _write(path, f"{head}[\n{results}\n ]\n}}")


def _rounded(data: Any) -> Any:
    """Its floats to four significant digits."""
    if isinstance(data, dict):
        return {name: _rounded(value) for name, value in data.items()}
    return float(f"{data:.4g}") if isinstance(data, float) else data


def write_json(path: Path, data: Any) -> None:
    """Writes `data` to `path`, whole or not at all."""
    _write(path, json.dumps(data, indent=1))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, f"{text}\n".encode())


def record(folder: Path, name: str, data: dict[str, Any], disturbed: str = "", **versions: str) -> None:
    """Keeps what a benchmark has measured here as ``folder/NAME-MACHINE.json``, with where it comes from: the machine,
    the commit, the day, the `versions` of other programs. What was `disturbed` ends the program instead."""
    if disturbed:
        sys.exit(f"not recorded, run it on a quiet machine: {disturbed}")
    now = Report.new(measured={})
    about = {"machine": now.machine, "versions": now.versions | versions, "commit": now.commit, "date": now.date}
    write_json(folder / f"{name}-{kind(now.machine)}.json", about | data)


def machine() -> dict[str, Any]:
    """The processor, the instruction set that the kernels use (torch's, where there are none), the threads in use."""
    library = native.library("cpu")
    return {
        "cpu": cpu_name(),
        "architecture": platform.machine(),
        "isa": library.isa.default() if library else f"torch {torch.backends.cpu.get_cpu_capability()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def kind(machine: dict[str, Any]) -> str:
    """A file name's worth of what makes results comparable: processor, instruction set, threads."""
    return re.sub(r"[^a-z0-9]+", "-", f"{machine['cpu']} {machine['isa']} {machine['threads']} threads".lower()).strip(
        "-"
    )


CODE = (":/fastattn", ":/csrc", ":/benchmarks/*.py")
"""What results depend on, as git names it."""


def commit() -> str:
    """The commit the package runs from, marked where code differs from it; outside a checkout $FASTATTN_COMMIT."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "-uno", "--", *CODE], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("FASTATTN_COMMIT", "")
    return head + (" with changes" if changed else "")


def on_gpu(
    description: str, run: Callable[[Path, dict[str, Any], float], list[str]], compile_part: Callable[[slice], None]
) -> None:
    """A script's command line: calls ``run(path, about, seconds)`` with where its results go, what says where they come
    from, and how long it may take. It returns what of ours failed, which makes the script fail. ``compile_part`` makes
    the calls of a part of the work, whose compiled kernels a run finds in the caches on disk."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("results", type=Path)
    parser.add_argument("--seconds", type=float, default=120, help="begin nothing further after so long")
    parser.add_argument(
        "--compile", type=_part, metavar="K/N", help="measure nothing: compile the K-th of N parts for a later run"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device")
    if options.compile:
        compile_part(options.compile)
        return
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    about |= {"triton": importlib.import_module("triton").__version__, "commit": commit(), "date": now()}
    failures = run(options.results, about, options.seconds)
    if failures:
        sys.exit("\n".join(["failed:", *failures]))


def _part(text: str) -> slice:
    """The second of every twelve, for "2/12"."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"expected K/N with K from 1 to N, such as 2/12, got {text!r}")
    return slice(int(found[1]) - 1, None, int(found[2]))


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def brief(error: Exception) -> str:
    """In one line."""
    return " ".join([type(error).__name__, *str(error).splitlines()[:1]])


def table(results: Iterable[Result], *, whole: bool = False) -> str:
    """A Markdown table: times torch's speed with quartiles, the share of the limit, and the other comparisons. Columns
    without an entry are left out, unless `whole`."""
    rows = [("case", "ours", "times torch", "of the limit", "of own plain time", "other peers", "disturbed")]
    for result in results:
        torch_ratio, own = result.ratios["torch"], result.own
        rows.append(
            (
                result.name,
                milliseconds(result.seconds["ours"]),
                f"{torch_ratio.median:.2f} ({torch_ratio.low:.2f}-{torch_ratio.high:.2f})",
                share(result),
                f"{own.median:.2f}" if own else "",
                ", ".join(f"{name} {ratio.median:.2f}" for name, ratio in result.ratios.items() if name != "torch"),
                result.disturbed,
            )
        )
    keep = [column for column in range(len(rows[0])) if whole or any(row[column] for row in rows[1:])]
    return markdown([row[column] for column in keep] for row in rows)


def markdown(rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table whose first row is its header."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "| --- " * lines[0].count(" | ") + "| --- |")
    return "\n".join(lines)


def share(result: Result) -> str:
    """Of the limit that ours reaches. No share is above 100 %: what ours beats is not its limit."""
    if result.fraction is None or result.disturbed:
        return ""
    value = result.fraction.median
    if result.limited_by == "copy":
        return f"{value:.0%} of a copy" if value <= 1 else "faster than a copy"
    return f"{value:.0%}" if value <= 1 else "at the limit"


CELL = (
    "A cell: torch's time over ours; our share of the limit; our time over our own without mask, padding or dropout. "
    "The limit is arithmetic or, where marked, a copy of as many bytes into fresh memory. Ours can beat a copy: caches "
    "keep data between passes, and few queries mostly read."
)


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def weakest(results: Iterable[Result], count: int = 10) -> list[Result]:
    """The undisturbed results with the least ratio to torch, weakest first."""
    quiet = [result for result in results if not result.disturbed]
    return sorted(quiet, key=lambda result: result.ratios["torch"].median)[:count]


GENERATIONS = {
    (6, 143): "Intel Sapphire Rapids",
    (6, 173): "Intel Granite Rapids",
    (6, 207): "Intel Emerald Rapids",
    (25, 17): "AMD Zen 4",
    (26, 2): "AMD Zen 5",
}
"""By family and model, where the name of the processor does not say it."""


def processor(machine: dict[str, Any]) -> str:
    """A short name of the processor."""
    numbers = re.search(r"family (\d+), model (\d+)", machine["cpu"])
    generation = GENERATIONS.get((int(numbers[1]), int(numbers[2]))) if numbers else None
    return generation or re.sub(r" Processor| \(family.*|\(R\)", "", machine["cpu"])


def of_torch(report: Report) -> str:
    """The version of torch that ours ran in and beside."""
    return f"torch {report.versions['torch'].split('+')[0]}"


def origin(data: Mapping[str, Any], *programs: str) -> str:
    """Where a result file's data is from, in a line: the machine, the versions of torch and of `programs`, the day."""
    return _origin(data["machine"], data["versions"], data["date"][:10], programs)


def _origin(machine: Mapping[str, Any], versions: Mapping[str, str], days: str, programs: Iterable[str]) -> str:
    known = "".join(f", {name} {versions[name]}" for name in ("torch", *programs) if name in versions)
    return f"{machine['cpu']}, {machine['threads']} threads, {machine['isa']}{known}, {days}"


def origin_of(report: Report, *programs: str, with_limits: bool = True) -> str:
    """:func:`origin` of a report, with the machine's limits."""
    text = _origin(report.machine, report.versions, report.days, programs)
    figures = report.limits if with_limits else {}
    known = [f"{figures[name]:.0f} GFLOP/s {name}" for name in ("float32", "bfloat16") if figures.get(name)]
    if figures.get("copy_fresh"):
        known.append(
            f"copy {figures['copy_fresh']:.1f} GB/s into fresh memory, {figures['copy_cached']:.0f} GB/s in cache"
        )
    disturbed = f" ({words})" if (words := disturbed_by(figures.get("others"))) else ""
    return text + (f"; limits{disturbed}: {', '.join(known)}" if known else "")


def _shown(reports: Sequence[Report]) -> list[str]:
    """Names of the results that the tables show: the listed cases, and patched models."""
    known = dict.fromkeys(name for report in reports for name in report.results)
    return [
        *(case.name for case in listed() if case.name in known),
        *(name for name in PATCHED if name in known),
    ]


def tables(report: Report) -> str:
    """The machine and its limits, the listed cases with a column for each dtype, how the sweep went."""
    sections = [
        f"{origin_of(report)}. {CELL}",
        _by_dtype([report.results[name] for name in _shown([report])]),
        _summed_up(report),
    ]
    return "\n\n".join(filter(None, sections))


def _swept(report: Report) -> str:
    named = _shown([report])
    swept = [result for name, result in report.results.items() if name not in named and not result.disturbed]
    if not swept:
        return ""
    slow = [result for result in swept if result.ratios["torch"].median < 1]
    text = f"Of {len(swept)} cases of the sweep {len(swept) - len(slow)} are at least as fast as torch."
    slowest = ", ".join(f"{result.name} ({result.ratios['torch'].median:.2f})" for result in weakest(slow))
    return f"{text} The slowest: {slowest}." if slow else text


def _missed(report: Report) -> str:
    """The floors that are out of reach, of the instruction sets that have any of their own."""
    if report.machine["isa"] not in FLOORED:
        return ""
    floors = {case.name: case.floor for case in (*sweep(), *listed(report.machine["isa"]))} | PATCHED
    missed = [
        f"{name} ({'; '.join(words.values())})"
        for name, result in report.results.items()
        if name in floors and not result.disturbed and (words := below_floor(replace(result, floor=floors[name])))
    ]
    return f"Floors missed: {', '.join(missed)}." if missed else "Every floor is reached."


def _summed_up(report: Report) -> str:
    return " ".join(filter(None, (_swept(report), _missed(report))))


def comparison(reports: Sequence[Report]) -> str:
    """The listed cases, a column for each machine; of one machine, for each instruction set, to which torch is held; of
    one instruction set of it, for each version of torch."""
    names = [f"{processor(report.machine)}, {report.machine['isa']}" for report in reports]
    if len({report.machine["cpu"] for report in reports}) == 1:
        names = [report.machine["isa"] for report in reports]
        if len(set(names)) == 1:
            names = list(map(of_torch, reports))
    where = "\n".join(f"- {name}: {origin_of(report)}." for name, report in zip(names, reports, strict=True))
    rows = [["", *names]]
    for name in _shown(reports):
        rows.append([name, *(_cell(result) if (result := r.results.get(name)) else "" for r in reports)])
    summed_up = "\n".join(
        f"- {name}: {text}" for name, report in zip(names, reports, strict=True) if (text := _summed_up(report))
    )
    return "\n\n".join(filter(None, (where, CELL, markdown(rows), summed_up)))


SUMMARY = {
    "attention, forward": "attention {} 1x8x2048x64 forward",
    "attention, forward+backward": "attention {} 1x8x2048x64 forward+backward",
    "the same with dropout": "attention {} 1x8x2048x64 dropout 0.1 forward+backward",
    "dropout + residual + LayerNorm": "dropout_add_layer_norm {} 4096x512 dropout 0.1 forward+backward",
    "a training step": "training_step {} 32x48 dropout 0.1 forward+backward",
}
"""Columns of the table with a row for each machine, and the cases that they show."""


def summary(reports: Iterable[Report]) -> str:
    """Times torch's speed of a few cases, a row for each machine and dtype."""
    rows = [["processor", "dtype", *SUMMARY, "measured"]]
    for report in reports:
        for dtype in ("float32", "bfloat16"):
            found = [report.results.get(case.format(dtype)) for case in SUMMARY.values()]
            cells = [
                "" if result is None else "disturbed" if result.disturbed else f"{result.ratios['torch'].median:.1f}x"
                for result in found
            ]
            rows.append([f"{processor(report.machine)}, {report.machine['isa']}", dtype, *cells, report.days])
    return markdown(rows)


def _cell(result: Result) -> str:
    """Times torch, the share of the limit, our time over our plain time, as far as they are known."""
    if result.disturbed:
        return "disturbed"
    own = f"{result.own.median:.2f} of plain" if result.own else ""
    return ", ".join(filter(None, (f"{result.ratios['torch'].median:.2f}x", share(result), own)))


def _by_dtype(results: Iterable[Result]) -> str:
    rows: dict[str, dict[str, str]] = {}
    dtypes = ("float32", "bfloat16", "float64")
    for result in results:
        dtype = next(name for name in dtypes if f" {name}" in result.name)
        rows.setdefault(result.name.replace(f" {dtype}", ""), {})[dtype] = _cell(result)
    columns = [dtype for dtype in dtypes if any(dtype in cells for cells in rows.values())]
    return markdown(
        [["", *columns], *([name, *(cells.get(dtype, "") for dtype in columns)] for name, cells in rows.items())]
    )


def insert(page: Path, name: str, text: str) -> None:
    """Replaces what stands between the lines `<!-- NAME:begin -->` and `<!-- NAME:end -->` in `page`; raises InputError
    where it has not both."""
    old = page.read_text(encoding="utf-8")
    first, last = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    begin, end = old.find(first), old.find(last)
    if not 0 <= begin < end:
        raise InputError(f"{page}: expected the lines {first!r} and {last!r}, between which the tables go")
    write_file(page, f"{old[: begin + len(first)]}\n{text}\n{old[end:]}".encode())
