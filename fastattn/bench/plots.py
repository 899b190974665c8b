"""The picture of speed and memory over sequence length."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fastattn import errors, figures
from fastattn.bench.cases import DTYPES, Case, lengths
from fastattn.bench.report import Row, origin

PEERS = {
    "torch": "torch SDPA",
    "torch math": "torch SDPA, math",
    "flex": "FlexAttention",
    "compiled": "torch.compile of the formula",
    "zentorch": "zentorch",
    "onnxruntime": "ONNX Runtime",
}
OURS = "fastattn"
PANELS = (("forward", False), ("forward + backward, dropout 0.1", True), ("forward + backward, dropout 0.1", True))


def save(drawn: Any, stem: Path, source: str | None = None) -> None:
    """Write STEM.png and STEM.svg of a figure."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    for kind in figures.FORMATS:
        figures.save(drawn, stem.with_name(f"{stem.name}.{kind}"), source=source)


def caption(picture: Any, text: str) -> None:
    picture.supxlabel(text, fontsize=7, color="0.35", x=0.01, ha="left")


def _lines(rows: list[Row], cases: list[Case], memory: bool) -> dict[str, list[tuple[int, float]]]:
    """Return points (length, GFLOP/s or MB) by the name of the contestant."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for case in cases:
        found = [row for row in rows if row.case == f"{case.name}{', memory' * memory}" and row.peer in PEERS]
        for name, amount in [
            *((OURS, row.value if memory else row.seconds) for row in found[:1]),
            *((PEERS[row.peer], row.theirs) for row in found),
        ]:
            if amount:
                figure = amount / 2**20 if memory else case.flops / amount / 1e9
                lines.setdefault(name, []).append((case.shape[2], figure))
    return lines


def over_length(rows: Iterable[Row]) -> Any:
    """Draw speed of inference, speed of training and memory of training over sequence length; a dtype a row.

    Args:
        rows: results of one machine.

    Raises:
        InputError: there is no result to draw.
    """
    names = {f"{case.name}{end}" for case in lengths() for end in ("", ", memory")}
    limit = {row.case: row.value or 0.0 for row in rows if row.case.startswith("limit")}
    rows = [row for row in rows if row.case in names]
    if not rows:
        raise errors.InputError("nothing to draw: every measurement was noisy; run it on a quiet machine")
    ticker = errors.require("matplotlib.ticker")
    picture = figures.figure(13.0, 7.6)
    panels = picture.subplots(2, len(PANELS), sharex=True)
    order = [OURS, *PEERS.values()]
    for of_dtype, dtype in zip(panels, DTYPES, strict=True):
        name = str(dtype).removeprefix("torch.")
        for column, (axes, (title, backward)) in enumerate(zip(of_dtype, PANELS, strict=True)):
            cases = [case for case in lengths() if case.dtype == dtype and case.backward == backward]
            lines = _lines(rows, cases, memory=column == 2)
            for label, points in lines.items():
                style = {"linewidth": 2.5, "zorder": 3} if label == OURS else {"linewidth": 1.2}
                color = f"C{order.index(label)}"
                axes.plot(*zip(*points, strict=True), "o-", markersize=4, label=label, color=color, **style)
            if column < 2 and limit.get(f"limit: {name}"):
                level = limit[f"limit: {name}"] / 1e9
                axes.axhline(level, color="0.3", linestyle="--", linewidth=1, label="arithmetic limit")
            if not lines:
                axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color="0.5")
            axes.set_title(f"{name}: {title}", fontsize=10)
            axes.set_ylabel("MB beside the operands (log)" if column == 2 else "GFLOP/s (log)")
            _log_axes(axes, ticker)
    for axes in panels[-1]:
        axes.set_xlabel("sequence length (log), 8 heads of 64")
    drawn = {name: line for axes in panels.flat for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    picture.legend(drawn.values(), drawn.keys(), loc="outside upper center", ncols=len(drawn), fontsize=9)
    caption(picture, f"{origin(rows)}. FLOP/s count our products: 2 forward, 7 with the backward pass.")
    return picture


def _log_axes(axes: Any, ticker: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({case.shape[2] for case in lengths()})
    axes.set_xticks(ticks, list(map(str, ticks)))
    axes.grid(alpha=0.3, which="both", linewidth=0.5)
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
