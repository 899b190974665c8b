"""Writes what the pages show of benchmarks/results: the tables between their markers, and the pictures. `make tables`
runs it."""

import hashlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accuracy
import decoding
import gpu
import hour
import neighbours
import step
import table1
import translation

from fastattn.bench import plots, report
from fastattn.bench.cases import PATCHED, listed

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
MACHINES = ("amd-epyc-*-avx512-bf16-2-threads", "intel-*-threads")
NEWEST_TORCH = "torch-2.14.1/*"  # pytest benchmarks --results benchmarks/results/torch-2.14.1
OTHER_SETS = tuple(f"amd-epyc-family-26-model-2-{isa}-2-threads" for isa in ("avx512", "avx2", "generic"))


def files(*names: str) -> list[Path]:
    return [path for name in names for path in sorted(RESULTS.glob(f"{name}.json"))]


def recorded(name: str) -> list[dict[str, Any]]:
    """What a script recorded, by machine."""
    return [json.loads(path.read_text()) for path in files(f"{name}-*")]


def newest(name: str, suits: Callable[[dict[str, Any]], bool] = lambda data: True) -> dict[str, Any]:
    return max(filter(suits, recorded(name)), key=lambda data: data["date"])


def reports(*names: str) -> list[report.Report]:
    """What the benchmarks of pytest and of `fastattn bench` recorded."""
    return list(map(report.Report.read, files(*names)))


def sections(name: str, section: Callable[[dict[str, Any]], str]) -> str:
    """One after the other, those of all machines."""
    return "\n\n".join(map(section, recorded(name)))


def of_machines(*names: str) -> str:
    """Their results side by side, and what the file of each has none of."""
    found, lines = reports(*names), []
    for of in found:
        wanted = *(case.name for case in listed(of.machine["isa"])), *PATCHED
        if lacking := [case for case in wanted if case not in of.results]:
            lines.append(f"- {report.processor(of.machine)}, not recorded: {', '.join(lacking)}.")
    return "\n\n".join(filter(None, (report.comparison(found), "\n".join(lines))))


def on_gpu() -> str:
    names = "benchmarks", "kernels", "tuning", "host", "training", "tests"
    return gpu.section(*(json.loads((RESULTS / f"gpu/{name}.json").read_text()) for name in names))


def tables() -> dict[tuple[str, str], str]:
    """What stands between which markers of which page."""
    performance, training = "docs/performance.md", "docs/training.md"
    return {
        ("README.md", "speed"): report.summary(reports(*MACHINES)),
        ("README.md", "translation"): translation.table(recorded("translation")),
        (performance, "machines"): of_machines(*MACHINES),
        (performance, "step"): sections("step", step.section),
        (performance, "decoding"): sections("decoding", decoding.section),
        (performance, "table1"): sections("table1", table1.section),
        (performance, "instruction-sets"): report.comparison(reports(*OTHER_SETS)),
        (performance, "newest-torch"): of_machines(NEWEST_TORCH),
        (training, "hour"): sections("hour", hour.section),
        (training, "neighbours"): sections("neighbours", neighbours.section),
        ("docs/accuracy.md", "accuracy"): accuracy.section(newest("accuracy")),
        ("docs/gpu.md", "gpu"): on_gpu(),
    }


PICTURES: dict[str, tuple[tuple[str, ...], Callable[[Any], Any], Callable[[], Any]]] = {  # of which files, how, of what
    "speed": (MACHINES, plots.picture, lambda: reports(*MACHINES)),
    "lengths": (("lengths-*",), plots.picture, lambda: reports("lengths-*")),
    "accuracy": (("accuracy-*",), accuracy.picture, lambda: newest("accuracy")),
    "loss": (
        ("translation-*",),
        translation.picture,
        lambda: newest("translation", lambda data: len(data["runs"]) == 2),
    ),
}


def source(name: str) -> str:
    """The state of the files that a picture is drawn from, and of the code that draws it. The picture keeps it."""
    patterns, draw, _ = PICTURES[name]
    content = b"".join(path.read_bytes() for path in files(*patterns))
    content += "".join(map(inspect.getsource, (plots, draw))).encode()
    return f"benchmarks/results, SHA-256 {hashlib.sha256(content).hexdigest()[:16]}"


def main() -> None:
    for (page, name), text in tables().items():
        report.insert(ROOT / page, name, text)
    for name, (_, draw, data) in PICTURES.items():
        plots.save(draw(data()), ROOT / "docs/images" / name, source(name))


if __name__ == "__main__":
    main()
