"""Write what the pages show of the results: tables between markers, and pictures. Run by `make tables`.

Every table shows the newest row of each case. A missing row leaves a cell empty.
"""

import csv
import hashlib
import inspect
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fastattn import figures
from fastattn.bench import contest, report
from fastattn.bench.cases import FLOORED, PROGRAMS, listed, sweep
from fastattn.bench.report import Row, markdown, origin, processor

NAMED = 10  # missed floors that a page names
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results.csv"
GRADIENTS = ROOT / "benchmarks/gradients.csv"
TORCH, NEWEST_TORCH = "2.13.0", "2.14.1"
WIDTH = 6.4  # inches of a picture: a phone shows it at six tenths of its size, where 10 points are still legible
DTYPES = ("float32", "bfloat16")
CELL = (
    "A cell: torch's time over ours; our share of the limit; our time over our own without mask, padding or dropout. "
    "The limit is arithmetic or, where marked, a copy of as many bytes into fresh memory. Ours can beat a copy: caches "
    "keep data between passes, and few queries mostly read."
)
SPEED = {
    "attention, forward": "attention {} 1x8x2048x64 forward",
    "attention, forward+backward": "attention {} 1x8x2048x64 forward+backward",
    "the same with dropout": "attention {} 1x8x2048x64 dropout 0.1 forward+backward",
    "dropout + residual + LayerNorm": "dropout_add_layer_norm {} 4096x512 dropout 0.1 forward+backward",
    "a training step": "training_step {} 32x48 dropout 0.1 forward+backward",
}
BARS = {
    "attention, forward only": SPEED["attention, forward"],
    "attention": SPEED["attention, forward+backward"],
    "attention, causal": "attention {} 1x8x2048x64 causal forward+backward",
    "attention, half the keys are padding": "attention {} 1x8x2048x64 padding by lengths forward+backward",
    "attention, dropout 0.1": SPEED["the same with dropout"],
    "softmax-dropout": "softmax_dropout {} 8192x512 dropout 0.1 forward+backward",
    "dropout + residual + LayerNorm": SPEED["dropout + residual + LayerNorm"],
    "dropout": "dropout {} 4096x512 dropout 0.1 forward+backward",
    "LayerNorm": "layer_norm {} 4096x512 forward+backward",
    "training step, base model": SPEED["a training step"],
}
OPERATIONS = {
    "attention": "attention",
    "softmax_dropout": "softmax",
    "layer_norm": "LayerNorm",
    "dropout_add_layer_norm": "float32 residual + LayerNorm",
}
STEP = "update of |step beside .*: |loss of base|tiny, "
TOKENS = re.compile("target token|^decoding")


# --- rows ---


def on_cpu(row: Row) -> bool:
    return not row.isa.startswith("sm_")


def chosen(rows: Iterable[Row], pattern: str) -> list[Row]:
    """Return the rows whose case begins with a regular expression."""
    return [row for row in rows if re.match(pattern, row.case)]


def by(rows: Iterable[Row], *names: str) -> dict[tuple[str, ...], list[Row]]:
    """Group rows by fields, in the order of the processors' names."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(getattr(row, name) for name in names), []).append(row)
    return dict(sorted(found.items(), key=lambda group: processor(group[1][0].machine)))


def on_machines(rows: Iterable[Row], torch: str, *, floored: bool = True) -> dict[tuple[str, ...], list[Row]]:
    """Group the rows of processors by machine and instruction set, with or without floors in docs/design.md."""
    wanted = (row for row in rows if on_cpu(row) and row.version == torch and (row.isa in FLOORED) == floored)
    return by(wanted, "machine", "isa")


def ratios(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """Return rows by case and peer."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row.case, {})[row.peer] = row
    return found


# --- tables of the operations ---


def speed(rows: list[Row]) -> str:
    """Return how many times as fast as torch a few cases are, a row per machine and dtype."""
    lines = [["processor", "dtype", *SPEED, "measured"]]
    for (machine, isa), group in on_machines(rows, TORCH).items():
        known = {row.case: row for row in group if row.peer == "torch"}
        for dtype in DTYPES:
            found = [known.get(case.format(dtype)) for case in SPEED.values()]
            if any(found):
                cells = [f"{row.ratio:.1f}x" if row else "" for row in found]
                day = max(row.date for row in found if row)
                lines.append([f"{processor(machine)}, {isa}", dtype, *cells, day])
    return markdown(lines)


def cell(found: dict[str, Row]) -> str:
    """Return times torch, the share of the limit, and our time over our plain time, as far as they are known."""
    if "torch" not in found:
        return ""
    row, plain = found["torch"], found.get("plain")
    own = f"{1 / plain.ratio:.2f} of plain" if plain and plain.ratio else ""
    return ", ".join(filter(None, (f"{row.ratio:.2f}x", report.share(row.share, row.note), own)))


def comparison(groups: dict[str, list[Row]]) -> str:
    """Return the listed cases with a column per group, how the sweep went, and the missed floors."""
    known = {name: ratios(rows) for name, rows in groups.items()}
    shown = [
        case for case in (*(case.name for case in listed()), *PROGRAMS) if any(case in of for of in known.values())
    ]
    lines = [["", *groups], *([case, *(cell(of.get(case, {})) for of in known.values())] for case in shown)]
    where, summed_up = [], []
    for name, rows in groups.items():
        cases = {*shown, *swept(known[name])}
        figures = [row for row in rows if row.case in cases and row.peer in ("torch", "plain")]
        where.append(f"- {name}: {origin(figures)}{report.limit_words(rows)}.")
        if text := " ".join(filter(None, (sweep_words(known[name]), missed_words(rows[0].isa, known[name])))):
            summed_up.append(f"- {name}: {text}")
    return "\n\n".join(filter(None, ("\n".join(where), CELL, markdown(lines), "\n".join(summed_up))))


def swept(found: dict[str, dict[str, Row]]) -> dict[str, float]:
    """Return the ratio to torch of the sweep's cases."""
    names = {case.name for case in sweep()} - {case.name for case in listed()}
    return {name: found[name]["torch"].ratio for name in found if name in names and "torch" in found[name]}


def sweep_words(found: dict[str, dict[str, Row]]) -> str:
    cases = swept(found)
    slow = sorted((ratio, case) for case, ratio in cases.items() if ratio < 1)
    if not cases:
        return ""
    text = f"Of {len(cases)} cases of the sweep {len(cases) - len(slow)} are at least as fast as torch."
    slowest = ", ".join(f"{case} ({ratio:.2f})" for ratio, case in slow[:10])
    return f"{text} The slowest: {slowest}." if slow else text


def missed_words(isa: str, found: dict[str, dict[str, Row]]) -> str:
    """Name the missed floors, if the instruction set has floors of its own."""
    if isa not in FLOORED:
        return ""
    floors = {case.name: case.floor for case in (*sweep(), *listed(isa))} | PROGRAMS
    missed = []
    for case, peers in found.items():
        if case in floors and "torch" in peers:
            row, times = peers["torch"], {peer: row.ratio for peer, row in peers.items()}
            if words := contest.missed(floors[case], row.seconds or 0.0, times, row.share):
                missed.append(f"{case} ({'; '.join(words)})")
    more = f", and {len(missed) - NAMED} more" if len(missed) > NAMED else ""
    return f"Floors missed: {', '.join(missed[:NAMED])}{more}." if missed else "Every floor is reached."


def machines(rows: list[Row], torch: str) -> str:
    groups = on_machines(rows, torch).items()
    return comparison({f"{processor(machine)}, {isa}": group for (machine, isa), group in groups})


def instruction_sets(rows: list[Row]) -> str:
    groups = on_machines(rows, TORCH, floored=False)
    order = ("avx512", "avx2", "generic")
    return comparison({isa: groups[key] for isa in order for key in groups if key[1] == isa})


def accuracy(rows: list[Row]) -> str:
    """Return relative errors, fastattn's / torch's, with a column per length."""
    rows = chosen(rows, "accuracy of ")
    found: dict[tuple[str, str, str], dict[int, Row]] = {}
    for row in rows:
        operation, length, part = row.case.removeprefix("accuracy of ").split(", ")
        found.setdefault((OPERATIONS[operation], row.dtype, part), {})[int(length)] = row
    lengths = sorted({length for points in found.values() for length in points})
    lines = [["operation", "dtype", "of", *map(str, lengths)]]
    for key, points in found.items():
        lines.append([*key, *(f"{r.value:.1e} / {r.theirs:.1e}" if (r := points.get(n)) else "" for n in lengths)])
    return f"{origin(rows)}.\n\n{markdown(lines)}"


def regimes(rows: list[Row]) -> str:
    """Return relative errors by backend and regime: fastattn's / torch's, and for attention / its math backend's."""
    rows = chosen(rows, "regime of ")
    found: dict[tuple[str, ...], dict[str, list[Row]]] = {}
    for row in rows:
        where, regime, part = row.case.removeprefix("regime of ").split(", ")
        operation, backend = where.split(" on ")
        found.setdefault((OPERATIONS[operation], backend, regime, row.dtype), {}).setdefault(part, []).append(row)
    tables = []
    for parts in (("dQ", "dK", "dV"), ("output", "gradients")):
        lines = [["operation", "backend", "regime", "dtype", *parts]]
        for key, of in found.items():
            if parts[0] in of:
                errors = [[of[part][0].value, *(row.theirs for row in of[part])] for part in parts]
                lines.append([*key, *(" / ".join(f"{error:.1e}" for error in each) for each in errors)])
        tables.append(markdown(lines))
    return "\n\n".join((f"{origin(rows)}.", *tables))


# --- tables of everything else ---


def figure(row: Row, amount: float) -> str:
    """Return seconds or a value in words. Seconds per token become tokens a second."""
    if row.value is not None:
        return f"{amount / 1e12:.3g} T/s" if amount >= 1e9 else f"{amount:,.5g}"
    return f"{1 / amount:,.0f}/s" if TOKENS.search(row.case) else report.duration(amount)


def listing(rows: Iterable[Row], pattern: str) -> str:
    """Return a line per row of the cases that match, except for shares of a whole. Empty columns are left out."""
    rows = [row for row in chosen(rows, pattern) if row.peer or row.value or row.seconds]
    lines = [["processor", "case", "dtype", "fastattn", "compared with", "its figure", "its over ours", "", "measured"]]
    for row in sorted(rows, key=lambda row: processor(row.machine)):
        ours = row.seconds if row.value is None else row.value
        compared = [row.peer, figure(row, row.theirs) if ours else "", f"{row.ratio:.2f}"] if row.ratio else [""] * 3
        note = f"{row.share:.0%} {row.note}".strip() if row.share is not None else row.note
        amount = figure(row, ours) if ours else ""
        lines.append([processor(row.machine), row.case, row.dtype, amount, *compared, note, row.date])
    keep = [column for column in range(len(lines[0])) if any(line[column] for line in lines[1:])]
    keep = keep[len({row.machine for row in rows}) == 1 :]
    return markdown([line[column] for column in keep] for line in lines)


def shares(rows: Iterable[Row], pattern: str) -> str:
    """Return shares of a whole, whose cases are "WHOLE: PART": a line per part, a column per machine and whole.

    All parts of a whole come from one commit, the newest.
    """
    rows = [row for row in chosen(rows, pattern) if not row.peer and row.share is not None]
    newest = {(row.machine, row.case.partition(": ")[0]): row.commit for row in rows}
    cells: dict[str, dict[str, str]] = {}
    for row in sorted(rows, key=lambda row: processor(row.machine)):
        whole, _, part = row.case.partition(": ")
        if row.commit == newest[row.machine, whole]:
            cells.setdefault(part, {})[f"{processor(row.machine)}: {whole}"] = f"{row.share:.0%}"
    columns = dict.fromkeys(column for of in cells.values() for column in of)
    return markdown([["share", *columns], *([part, *(of.get(c, "") for c in columns)] for part, of in cells.items())])


def origins(rows: Iterable[Row], pattern: str) -> str:
    return "\n".join(
        f"- {processor(name)}: {origin(of)}." for (name,), of in by(chosen(rows, pattern), "machine").items()
    )


# --- tables of the GPU ---

SDPA = ("cudnn", "flash", "efficient", "math")
GOALS: tuple[tuple[str, tuple[str, ...], float, float], ...] = (  # cases, fastest of these peers, or share of a copy
    (r"attention .* \w+x128 forward$", ("flash",), 1.15, 0.0),
    (r"attention .* \w+x128 forward\+backward$", ("flash",), 1.0, 0.0),
    (r"attention .* \w+x128 dropout 0.1 forward\+backward$", ("flash",), 1.2, 0.0),
    (r"attention .* padding .*\+backward$", SDPA, 3.0, 0.7),
    (r"(layer_norm|softmax_dropout) .* 16384x.* forward$", (), 0.0, 0.9),
    (r"(layer_norm|softmax_dropout) .* 16384x.*\+backward$", (), 0.0, 0.8),
    (r"training_step ", ("torch",), 1.5, 0.0),
    (r"training_step ", ("compiled",), 1.2, 0.0),
)
"""The GPU lines of docs/design.md, section 7. A backward pass is judged together with its forward pass."""


def goals(case: str, peers: dict[str, Row]) -> str:
    """Say what docs/design.md requires of a case, and that it is missed."""
    words = []
    for pattern, wanted, least, least_share in GOALS:
        if re.match(pattern, case):
            row = next(iter(peers.values()))
            times = min((r.ratio for peer, r in peers.items() if peer in wanted), default=0.0)
            is_reached = (least and times >= least) or (least_share and row.note == "copy" and row.share >= least_share)
            required = [f"{least:g} times {' or '.join(wanted)}"] if least else []
            required += [f"{least_share:.0%} of a copy"] if least_share else []
            words.append(f"{'' if is_reached else '**missed:** '}{', or '.join(required)}")
    return "; ".join(words)


def by_case(rows: Iterable[Row]) -> str:
    lines = [["case", "ms", "of the limit", "times as fast as", "required"]]
    for case, peers in ratios(rows).items():
        row = next(iter(peers.values()))
        others = sorted(peers.values(), key=lambda row: row.ratio)
        words = ", ".join(f"{row.peer} {row.ratio:.2f}" for row in others)
        lines.append([case, f"{1e3 * row.seconds:.3g}", report.share(row.share, row.note), words, goals(case, peers)])
    return markdown(lines)


def gpu(rows: list[Row]) -> str:
    """Return everything that was measured on GPUs, one GPU after the other."""
    parts = []
    for group in by((row for row in rows if not on_cpu(row)), "machine").values():
        replayed = [row for row in chosen(group, "(attention|softmax|layer|dropout|training)") if row.share is not None]
        parts += [f"{origin(group)}.", listing(group, "limit|tests"), "### Compared with torch's backends"]
        parts += ["Replayed as CUDA graphs; peers' times over ours.", by_case(replayed), "### Small calls"]
        parts += ["Bound by the host.", listing(group, ".*from Python"), "### Training", listing(group, "train ")]
        parts += [
            "### Kernels",
            "By the kernel's own time, attention of 8x16x4096.",
            listing(group, "kernel: "),
            "### Tiles",
        ]
        parts += ["The tile when it was measured; the quickest one.", listing(group, "tile: ")]
    return "\n\n".join(parts)


# --- gradients along a training run ---


def gradient_rows() -> list[dict[str, str]]:
    """Return the rows of benchmarks/gradients.csv: a row per setting, backend, update and layer."""
    return list(csv.DictReader(GRADIENTS.read_text(encoding="utf-8").splitlines()))


def gradient_origin(rows: list[dict[str, str]]) -> str:
    return origin([Row(**{name: rows[0][name] for name in ("date", "machine", "isa", "torch")})])


def runs(rows: list[dict[str, str]], *names: str) -> dict[tuple[str, ...], list[dict[str, str]]]:
    """Group rows by columns, in their order."""
    found: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def gradients(rows: list[dict[str, str]]) -> str:
    """Return a line per setting and backend: medians over updates and layers, the greatest angle, the last loss."""
    lines = [["", "attention", "W_q", "W_k", "W_v", "angle of W_q", "greatest angle", "last loss"]]
    for key, group in runs(rows, "setting", "backend").items():
        numbers = {name: [float(row[name]) for row in group] for name in group[0] if "_" in name}
        errors = [statistics.median(numbers[f"{part}_error"]) for part in ("query", "key", "value")]
        angles = [of(numbers["query_angle"]) for of in (statistics.median, max)]
        shown = [*(f"{100 * error:.3g} %" for error in errors), *(f"{angle:.3g}°" for angle in angles)]
        lines.append([*key, *shown, f"{float(group[-1]['loss']):.3f}"])
    return f"{gradient_origin(rows)}.\n\n{markdown(lines)}"


def wrapped(text: str, width: int = 90) -> str:
    return "\n".join(textwrap.wrap(text, width))


def curves(rows: list[dict[str, str]]) -> Any:
    """Draw error and angle of W_q's gradient, and the loss: a column per setting, a line per backend and layer."""
    shown = {"query_error": "error of W_q's gradient", "query_angle": "its angle, degrees", "loss": "held-out loss"}
    settings = [setting for (setting,) in runs(rows, "setting")]
    backends = [backend for (backend,) in runs(rows, "backend")]
    picture = figures.figure(WIDTH, 7.5)
    panels = picture.subplots(len(shown), len(settings), sharex=True, sharey="row", squeeze=False)
    for (setting, backend, layer), group in runs(rows, "setting", "backend", "layer").items():
        column = panels[:, settings.index(setting)]
        style = {"color": f"C{backends.index(backend)}", "linestyle": ("-", ":", "--", "-.")[int(layer) - 1]}
        updates = [int(row["update"]) for row in group]
        for axes, name in zip(column, shown, strict=True):
            if name != "loss" or layer == "1":  # which all layers share
                values = [float(row[name]) for row in group]
                axes.plot(updates, values, label=f"{backend}, layer {layer}", linewidth=1.2, **style)
        column[0].set_title(setting, fontsize=11)
    for axes, (name, label) in zip(panels[:, 0], shown.items(), strict=True):
        axes.set_ylabel(label, fontsize=10)
        axes.set_yscale("linear" if name == "loss" else "log")
    for axes in panels.flat:
        axes.grid(alpha=0.3)
    picture.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2, fontsize=10)
    picture.supxlabel(f"updates\n{wrapped(gradient_origin(rows))}", fontsize=9, color="0.35")
    return picture


# --- the speed of operations ---


def in_bars(rows: list[Row]) -> list[Row]:
    names = {case.format(dtype) for case in BARS.values() for dtype in DTYPES}
    return [row for row in rows if row.case in names]


def bars(rows: list[Row]) -> Any:
    """Draw how many times as fast as torch, a panel per machine, a bar per dtype."""
    groups = on_machines(rows, TORCH)
    lines = -(-len(groups) // 2)
    picture = figures.figure(WIDTH, 1.0 + 4.2 * lines)
    panels = picture.subplots(lines, 2, sharex=True, sharey=True, squeeze=False).flatten()
    for unused in panels[len(groups) :]:
        unused.set_visible(False)
    for axes, ((machine, _), group) in zip(panels, groups.items(), strict=False):
        known = {row.case: row.ratio for row in group if row.peer == "torch"}
        for offset, dtype in enumerate(DTYPES):
            values = {
                n: known[case.format(dtype)] for n, case in enumerate(BARS.values()) if case.format(dtype) in known
            }
            places = [place + 0.4 * offset for place in values]
            drawn = axes.barh(places, [v - 1 for v in values.values()], 0.38, 1, label=dtype, color=f"C{offset}")
            axes.bar_label(drawn, [f"{value:.1f}" for value in values.values()], padding=2, fontsize=9)
        axes.axvline(1.0, color="black", linewidth=1)
        axes.set_title(processor(machine), fontsize=11)
        axes.set(xscale="log")
        axes.set_xticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
        axes.minorticks_off()
        axes.set_xlim(0.75, 45)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    panels[0].set_yticks([place + 0.2 for place in range(len(BARS))], [wrapped(name, 22) for name in BARS], fontsize=9)
    panels[0].invert_yaxis()
    picture.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, fontsize=10)
    origins = "\n".join(wrapped(origin(row for row in group if row.peer == "torch")) for group in groups.values())
    text = f"times as fast as torch (log), forward + backward where nothing else is said\n{origins}"
    picture.supxlabel(text, fontsize=8, color="0.35", x=0.01, ha="left")
    return picture


# --- what stands where ---


def tables() -> dict[tuple[str, str], str]:
    """Return what stands between which markers of which page."""
    rows = report.newest(report.read(RESULTS))
    performance, training = "docs/performance.md", "docs/training.md"
    return {
        ("README.md", "speed"): speed(rows),
        (training, "translation"): listing(rows, r"tiny for 20 minutes: (target token|validation loss|BLEU)$"),
        (performance, "machines"): machines(rows, TORCH),
        (performance, "step"): "\n\n".join(part(rows, STEP) for part in (origins, shares, listing)),
        (performance, "decoding"): "\n\n".join(part(rows, "decoding, ") for part in (origins, listing)),
        (performance, "instruction-sets"): instruction_sets(rows),
        (performance, "newest-torch"): machines(rows, NEWEST_TORCH),
        (training, "hour"): listing(rows, "tiny for 60 minutes"),
        (training, "neighbours"): listing(rows, "first updates of tiny, "),
        ("docs/accuracy.md", "accuracy"): accuracy(rows),
        ("docs/accuracy.md", "gradients"): gradients(gradient_rows()),
        ("docs/accuracy.md", "regimes"): regimes(rows),
        ("docs/gpu.md", "gpu"): gpu(rows),
    }


def pictures() -> dict[str, tuple[Callable[..., Any], list[Any], Path]]:
    """Return how each picture in docs/images is drawn, from which rows of which file."""
    return {
        "speed.svg": (bars, in_bars(report.newest(report.read(RESULTS))), RESULTS),
        "gradients.svg": (curves, gradient_rows(), GRADIENTS),
    }


def source(draw: Callable[..., Any], rows: list[Any], path: Path) -> str:
    """Return the state of a picture's rows and of the code that draws them. The picture keeps it."""
    content = f"{rows}{inspect.getsource(draw)}"
    return f"benchmarks/{path.name}, SHA-256 {hashlib.sha256(content.encode()).hexdigest()[:16]}"


def main() -> None:
    for (page, name), text in tables().items():
        report.insert(ROOT / page, name, text)
    for name, (draw, rows, path) in pictures().items():
        figures.save(draw(rows), ROOT / "docs/images" / name, source=source(draw, rows, path))


if __name__ == "__main__":
    main()
