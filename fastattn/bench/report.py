"""Results as rows of a CSV file, and the tables made from them."""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib
import io
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from fastattn.bench import limits
from fastattn.bench.contest import Result
from fastattn.bench.timer import Neighbours
from fastattn.errors import InputError
from fastattn.files import write_file
from fastattn.info import cpu_name


@dataclass(frozen=True)
class Row:
    """One figure of fastattn, compared with one peer. Fields are the columns of the file, None is an empty cell.

    date, commit: the recording's. machine: the processor or GPU. torch: its version, then those of other programs.
    peer: what `ratio` compares with; "plain" is fastattn without the case's features; "" is nothing.
    seconds: fastattn's time per call, or per token. value: fastattn's figure if it is no time (an error).
    ratio, low, high: the peer's figure over fastattn's, median and quartiles.
    share: of the limit that `note` names ("arithmetic", "copy", "product"), or of a whole.
    note: a limit, or what else the figures need to be understood.
    """

    date: str = ""
    commit: str = ""
    machine: str = ""
    isa: str = ""
    threads: str = ""
    torch: str = ""
    case: str = ""
    dtype: str = ""
    peer: str = ""
    seconds: float | None = None
    value: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    share: float | None = None
    note: str = ""

    @property
    def version(self) -> str:
        """Torch's version without what it was built for."""
        return re.split(r"[+,]", self.torch)[0]

    @property
    def theirs(self) -> float:
        """The peer's seconds or value."""
        return (self.ratio or 0.0) * (self.value or self.seconds or 0.0)


COLUMNS = [field.name for field in fields(Row)]
NUMBERS = ("seconds", "value", "ratio", "low", "high", "share")


def read(path: Path) -> list[Row]:
    """Read a results file.

    Raises:
        InputError: `path` is not a results file.
    """
    reader = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
    try:
        if reader.fieldnames != COLUMNS:
            raise ValueError
        return [Row(**_parsed(line)) for line in reader]
    except (ValueError, TypeError, AttributeError):
        raise InputError(f"{path}: expected a results file, with the columns {','.join(COLUMNS)}") from None


def _parsed(line: dict[str, str]) -> dict[str, Any]:
    return {name: (float(cell) if cell else None) if name in NUMBERS else cell for name, cell in line.items()}


def append(path: Path, rows: Iterable[Row]) -> None:
    """Write rows in the place of those that the file has of the same cases, whole or not at all."""
    kept = read(path) if path.exists() else []
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in newest((*kept, *rows)):
        cells = asdict(row).values()
        writer.writerow("" if v is None else f"{v:.5g}" if isinstance(v, float) else v for v in cells)
    write_file(path, text.getvalue().encode())


def newest(rows: Iterable[Row]) -> list[Row]:
    """Return the last row of each case, machine, torch and peer, in the order of the file."""
    found: dict[tuple[str, ...], Row] = {}
    for row in rows:
        key = row.machine, row.isa, row.threads, row.version, row.case, row.dtype, row.peer
        found.pop(key, None)
        found[key] = row
    return list(found.values())


def here() -> dict[str, Any]:
    """Return the fields of a row that say when and where it was measured, on the CPU."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": commit(),
        "machine": cpu_name(),
        "isa": limits.instruction_set(),
        "threads": str(torch.get_num_threads()),
        "torch": str(torch.__version__),
    }


def rows_of(result: Result, dtype: str, where: dict[str, Any]) -> list[Row]:
    """Return the rows of a result, one per peer."""
    share: dict[str, Any] = {"share": result.share.median, "note": result.limit} if result.share else {}
    common: dict[str, Any] = {**where, "case": result.name, "dtype": dtype, "seconds": result.seconds["ours"], **share}
    return [
        Row(**common, peer=peer, ratio=ratio.median, low=ratio.low, high=ratio.high)
        for peer, ratio in result.ratios.items()
    ]


def limit_rows(where: dict[str, Any], measured: dict[str, float] | None = None) -> list[Row]:
    """Return the rows of a machine's limits, in FLOP/s and bytes/s.

    Args:
        measured: the limits. By default this processor's are measured; no rows are returned if that was noisy.
    """
    watched = Neighbours()
    measured = limits.measure() if measured is None else measured
    return [] if watched.noise() else [Row(**where, case=f"limit: {n}", value=value) for n, value in measured.items()]


def limit_words(rows: Iterable[Row]) -> str:
    """Return the limits among the rows, in words."""
    known = {row.case.partition(": ")[2]: (row.value or 0) / 1e9 for row in rows if row.case.startswith("limit: ")}
    words = [f"{known[name]:.0f} GFLOP/s {name}" for name in ("float32", "bfloat16") if name in known]
    if "copy, fresh" in known:
        words.append(
            f"copy {known['copy, fresh']:.1f} GB/s into fresh memory, {known['copy, cached']:.0f} GB/s in cache"
        )
    return f"; limits: {', '.join(words)}" if words else ""


CODE = (":/fastattn", ":/csrc", ":/benchmarks/*.py")
"""What results depend on, as git names it."""


def commit() -> str:
    """Return the commit the package runs from, with "+" if code differs; outside a checkout $FASTATTN_COMMIT."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        status = [*git, "status", "--porcelain", "-uno", "--", *CODE]
        changed = subprocess.run(status, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("FASTATTN_COMMIT", "")
    return head + "+" * bool(changed)


def on_gpu(
    description: str,
    run: Callable[[Path, dict[str, Any], float], list[str]],
    calls: Callable[[], Iterable[tuple[str, Callable[[], object]]]],
) -> None:
    """Parse a script's command line and call ``run(path, where, seconds)``.

    Args:
        run: measures for so many seconds and writes to `path`. It returns what of ours failed, and the script fails.
        calls: returns names and calls whose compiled kernels a run finds in the caches on disk.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("results", type=Path)
    parser.add_argument("--seconds", type=float, default=120, help="begin nothing further after so long")
    text = "measure nothing: compile the K-th of N parts for a later run"
    parser.add_argument("--compile", type=int, nargs=2, metavar=("K", "N"), help=text)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device")
    if options.compile:
        part, parts = options.compile
        for name, call in itertools.islice(calls(), part - 1, None, parts):
            try:
                call()
            except Exception as error:  # other processes use the device meanwhile
                print(f"{name}: {brief(error)}")
        return
    major, minor = torch.cuda.get_device_capability()
    where = here() | {"machine": torch.cuda.get_device_name(), "isa": f"sm_{major}{minor}", "threads": ""}
    where["torch"] = f"{torch.__version__}, triton {importlib.import_module('triton').__version__}"
    failures = run(options.results, where, options.seconds)
    if failures:
        sys.exit("\n".join(["failed:", *failures]))


def brief(error: Exception) -> str:
    """Return an error in one line."""
    return " ".join([type(error).__name__, *str(error).splitlines()[:1]])


def cells(result: Result) -> dict[str, str]:
    """Return the figures of a result in words, by the head of their column in `table`; "" where there is none."""
    torchs, plain = result.ratios["torch"], result.ratios.get("plain")
    others = [f"{n} {ratio.median:.2f}x" for n, ratio in result.ratios.items() if n not in ("torch", "plain")]
    return {
        "case": result.name,
        "ours": duration(result.seconds["ours"]),
        "compared with torch": f"{torchs.median:.2f}x as fast ({torchs.low:.2f}-{torchs.high:.2f})",
        "of the limit": share(result.share.median if result.share else None, result.limit),
        "of own plain time": f"{1 / plain.median:.2f}" if plain else "",
        "compared with others": ", ".join(others),
        "noisy": result.noise,
    }


def table(results: Iterable[Result]) -> str:
    """Return a Markdown table of results, without the columns that would be empty."""
    rows = [cells(result) for result in results]
    heads = [head for head in rows[0] if any(row[head] for row in rows)]
    return markdown([heads, *([row[head] for head in heads] for row in rows)])


def sentence(result: Result) -> str:
    """Return the figures of a result as one line."""
    of = cells(result)
    words = (
        of["ours"],
        of["compared with torch"].replace("as fast", "as fast as torch"),
        of["of the limit"].replace("%", "% of the limit") if result.limit == "arithmetic" else of["of the limit"],
        of["of own plain time"] and f"{of['of own plain time']} of own plain time",
        *(f"{r.median:.2f}x as fast as {name}" for name, r in result.ratios.items() if name not in ("torch", "plain")),
        of["noisy"] and f"noisy: {of['noisy']}",
    )
    return f"{result.name}: {', '.join(filter(None, words))}"


def markdown(rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table whose first row is its header."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "| --- " * lines[0].count(" | ") + "| --- |")
    return "\n".join(lines)


def share(value: float | None, limit: str) -> str:
    """Return the share of a limit in words. No share is above 100 %: a faster time is called faster than the limit."""
    if value is None:
        return ""
    if limit == "arithmetic":
        return f"{value:.0%}" if value <= 1 else "at the limit"
    if limit not in ("copy", "product"):
        return f"{value:.0%} {limit}"
    return f"{value:.0%} of a {limit}" if value <= 1 else f"faster than a {limit}"


def duration(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


GENERATIONS = {
    (6, 143): "Intel Sapphire Rapids",
    (6, 173): "Intel Granite Rapids",
    (6, 207): "Intel Emerald Rapids",
    (25, 17): "AMD Zen 4",
    (26, 2): "AMD Zen 5",
}
"""Processors by family and model, where their names do not say it."""


def processor(machine: str) -> str:
    """Return a short name of a processor."""
    numbers = re.search(r"family (\d+), model (\d+)", machine)
    generation = GENERATIONS.get((int(numbers[1]), int(numbers[2]))) if numbers else None
    return generation or re.sub(r" Processor| \(family.*|\(R\)", "", machine)


def origin(rows: Iterable[Row]) -> str:
    """Say where rows of one machine come from: processor, threads, instruction set, versions, days."""
    rows = list(rows)
    days = sorted({row.date for row in rows})
    last = max(rows, key=lambda row: row.date)
    where = (last.machine, f"{last.threads} threads" * bool(last.threads), last.isa, f"torch {last.torch}")
    return ", ".join([*filter(None, where), " to ".join(dict.fromkeys((days[0], days[-1])))])


def insert(page: Path, name: str, text: str) -> None:
    """Replace what stands between the lines `<!-- NAME:begin -->` and `<!-- NAME:end -->` in `page`.

    Raises:
        InputError: the page does not have both lines.
    """
    old = page.read_text(encoding="utf-8")
    first, last = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    begin, end = old.find(first), old.find(last)
    if not 0 <= begin < end:
        raise InputError(f"{page}: expected the lines {first!r} and {last!r}, between which the tables go")
    write_file(page, f"{old[: begin + len(first)]}\n{text}\n{old[end:]}".encode())
