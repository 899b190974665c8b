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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fastattn
from fastattn.backends import native
from fastattn.bench import limits
from fastattn.bench.cases import headline, listed
from fastattn.bench.contest import Result


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
        """A report of `results` on this machine, now; its limits are measured unless given."""
        return cls(
            machine(),
            {"fastattn": fastattn.__version__, "torch": torch.__version__, "python": platform.python_version()},
            commit(),
            datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            limits.measure() if measured is None else measured,
            {result.name: result for result in results},
        )

    @classmethod
    def read(cls, path: Path) -> Report:
        data = json.loads(path.read_text())
        data["results"] = {entry["name"]: Result.from_json(entry) for entry in data["results"]}
        return cls(**data)

    def write(self, path: Path) -> None:
        """Writes the report to `path`, whole or not at all."""
        data = vars(self) | {"results": [result.to_json() for result in self.results.values()]}
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        try:
            with part.open("w") as file:
                json.dump(data, file, indent=1)
                file.write("\n")
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def machine() -> dict[str, Any]:
    """The processor, the instruction set that the kernels use (torch's, where there are none), the threads in use."""
    library = native.library("cpu")
    cpu = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        fields = dict(
            re.findall(
                r"^(model name|cpu family|model|CPU implementer|CPU part)\s*: (.*)$", information.read_text(), re.M
            )
        )
        cpu = (
            fields.get("model name", f"{fields.get('CPU implementer', '')} {fields.get('CPU part', '')}").strip() or cpu
        )
        if "cpu family" in fields:
            cpu += f" (family {fields['cpu family']}, model {fields['model']})"
    return {
        "cpu": cpu,
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


def commit() -> str:
    """The commit the package runs from, marked where files differ from it; outside a checkout $FASTATTN_COMMIT."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("FASTATTN_COMMIT", "")
    return head + (" with changes" if changed else "")


def on_gpu(description: str, run: Callable[[Path, dict[str, Any], float], list[str]]) -> None:
    """A script's command line: calls ``run(path, about, seconds)`` with where its results go, what says where they come
    from, and how long it may take. It returns what of ours failed, which makes the script fail."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("results", type=Path)
    parser.add_argument("--seconds", type=float, default=120, help="begin nothing further after so long")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device")
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    about |= {"triton": importlib.import_module("triton").__version__, "commit": commit()}
    failures = run(options.results, about, options.seconds)
    if failures:
        sys.exit("\n".join(["failed:", *failures]))


def brief(error: Exception) -> str:
    """In one line."""
    return " ".join([type(error).__name__, *str(error).splitlines()[:1]])


def table(results: Iterable[Result]) -> str:
    """A Markdown table: times torch's speed with quartiles, the share of the limit, and the other comparisons."""
    rows = [("case", "ours", "times torch", "of the limit", "of own plain time", "other peers")]
    for result in results:
        torch_ratio = result.ratios["torch"]
        fraction, own = result.fraction, result.own
        rows.append(
            (
                result.name,
                milliseconds(result.seconds["ours"]),
                f"{torch_ratio.median:.2f} ({torch_ratio.low:.2f}-{torch_ratio.high:.2f})",
                f"{fraction.median:.0%} {result.limited_by}" if fraction else "",
                f"{own.median:.2f}" if own else "",
                ", ".join(f"{name} {ratio.median:.2f}" for name, ratio in result.ratios.items() if name != "torch"),
            )
        )
    keep = [column for column in range(len(rows[0])) if any(row[column] for row in rows[1:])]
    lines = ["| " + " | ".join(row[column] for column in keep) + " |" for row in rows]
    lines.insert(1, "| --- " * len(keep) + "|")
    return "\n".join(lines)


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def weakest(results: Iterable[Result], count: int = 10) -> list[Result]:
    """The results with the least ratio to torch, weakest first."""
    return sorted(results, key=lambda result: result.ratios["torch"].median)[:count]


def _arithmetic(report: Report) -> list[str]:
    return [f"{report.limits[name]:.0f} GFLOP/s {name}" for name in ("float32", "bfloat16") if report.limits.get(name)]


def tables(report: Report) -> str:
    """README's text: the machine and its limits, the listed cases with a column for each dtype, how the sweep went."""
    figures = report.limits
    known = [
        *_arithmetic(report),
        f"copy {figures['copy_fresh']:.1f} GB/s into fresh memory, {figures['copy_cached']:.0f} GB/s in cache",
    ]
    machine = report.machine
    sections = [
        f"{machine['cpu']}, {machine['threads']} threads, {machine['isa']}, torch {report.versions['torch']}, "
        f"{report.date[:10]}. Limits measured in the same run: {', '.join(known)}. In the table: torch's time over "
        "ours (medians of interleaved pairs), the share of the limit that ours reaches where it can be seen, and for "
        "causal masks, padding and dropout our time over our own without them.",
        _by_dtype([report.results[case.name] for case in listed() if case.name in report.results]),
    ]
    named = {case.name for case in listed()}
    swept = [result for name, result in report.results.items() if name not in named]
    if swept:
        fast = sum(result.ratios["torch"].median >= 1 for result in swept)
        slowest = ", ".join(f"{r.name} ({r.ratios['torch'].median:.2f})" for r in weakest(swept))
        sections.append(f"Of {len(swept)} further cases {fast} are at least as fast as torch. The weakest: {slowest}.")
    return "\n\n".join(sections)


def comparison(reports: Iterable[Report]) -> str:
    """The cases with a floor, a column for each instruction set of a machine, to which torch is held too."""
    by_isa = {report.machine["isa"]: report for report in reports}
    limits = "; ".join(f"{isa} {', '.join(_arithmetic(report))}" for isa, report in by_isa.items())
    lines = [
        f"Limits measured in the same runs: {limits}.\n",
        "| | " + " | ".join(by_isa) + " |",
        "| --- " * (1 + len(by_isa)) + "|",
    ]
    for name in (case.name for case in headline()):
        found = [report.results.get(name) for report in by_isa.values()]
        if any(found):
            lines.append(f"| {name} | " + " | ".join(_cell(result) if result else "" for result in found) + " |")
    return "\n".join(lines)


def _cell(result: Result) -> str:
    """Times torch, the share of the limit, our time over our plain time, as far as they are known."""
    return ", ".join(
        (
            f"{result.ratios['torch'].median:.2f}x",
            *([f"{result.fraction.median:.0%}"] if result.fraction else []),
            *([f"{result.own.median:.2f} of plain"] if result.own else []),
        )
    )


def _by_dtype(results: Iterable[Result]) -> str:
    rows: dict[str, dict[str, str]] = {}
    for result in results:
        dtype = "bfloat16" if "bfloat16" in result.name else "float32"
        rows.setdefault(result.name.replace(f" {dtype}", ""), {})[dtype] = _cell(result)
    lines = ["| | float32 | bfloat16 |", "| --- | --- | --- |"]
    lines += [f"| {name} | {cells.get('float32', '')} | {cells.get('bfloat16', '')} |" for name, cells in rows.items()]
    return "\n".join(lines)


def insert(readme: Path, name: str, text: str) -> None:
    """Replaces what stands between the lines `<!-- NAME:begin -->` and `<!-- NAME:end -->` in `readme`."""
    page, first, last = readme.read_text(), f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    begin, end = page.find(first), page.find(last)
    if not 0 <= begin < end:
        raise ValueError(f"{readme}: expected the lines {first!r} and {last!r}, between which the tables go")
    readme.write_text(page[: begin + len(first)] + "\n" + text + "\n" + page[end:])
