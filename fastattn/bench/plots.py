"""Pictures of result files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fastattn import errors, figures
from fastattn.bench.cases import Case, lengths
from fastattn.bench.contest import Result
from fastattn.bench.peers import OPTIONAL
from fastattn.bench.report import Report, origin_of, processor

RATIOS = {
    "attention, forward alone": "attention {} 1x8x2048x64 forward",
    "attention": "attention {} 1x8x2048x64 forward+backward",
    "attention, causal": "attention {} 1x8x2048x64 causal forward+backward",
    "attention, half the keys are padding": "attention {} 1x8x2048x64 padding by lengths forward+backward",
    "attention, dropout 0.1": "attention {} 1x8x2048x64 dropout 0.1 forward+backward",
    "softmax-dropout": "softmax_dropout {} 8192x512 dropout 0.1 forward+backward",
    "dropout + residual + LayerNorm": "dropout_add_layer_norm {} 4096x512 dropout 0.1 forward+backward",
    "dropout": "dropout {} 4096x512 dropout 0.1 forward+backward",
    "LayerNorm": "layer_norm {} 4096x512 forward+backward",
    "training step, base model": "training_step {} 32x48 dropout 0.1 forward+backward",
}
PEERS = {
    "ours": "fastattn",
    "torch": "torch SDPA",
    "torch math": "torch SDPA, math",
    "flex": "FlexAttention",
    "compiled": "torch.compile of the formula",
    "zentorch": "zentorch",
    "onnxruntime": "ONNX Runtime",
}
COLORS = {peer: f"C{n}" for n, peer in enumerate(PEERS)}


def picture(reports: Sequence[Report]) -> Any:
    """Over sequence length where the first report was measured so, else the ratios to torch."""
    first = reports[0]
    measured = [first.results[case.name] for case in lengths() if case.name in first.results]
    if any(len(result.ratios) > 1 or result.memory for result in measured):
        return over_length(first)
    if any(_ratios(report) for report in reports):
        return ratios(reports)
    raise errors.InputError("nothing to draw: expected results of `fastattn bench`, or of its --plot")


def save(drawn: Any, stem: Path, source: str | None = None) -> None:
    """STEM.png and STEM.svg of a figure."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    for kind in figures.FORMATS:
        figures.save(drawn, stem.with_name(f"{stem.name}.{kind}"), source=source)


def caption(picture: Any, text: str) -> None:
    picture.supxlabel(text, fontsize=7, color="0.35", x=0.01, ha="left")


def _ratios(report: Report) -> dict[str, dict[str, float]]:
    """By dtype and label."""
    found: dict[str, dict[str, float]] = {}
    for dtype in ("float32", "bfloat16"):
        for label, name in RATIOS.items():
            result = report.results.get(name.format(dtype))
            if result and not result.disturbed:
                found.setdefault(dtype, {})[label] = result.ratios["torch"].median
    return found


def ratios(reports: Sequence[Report]) -> Any:
    """How many times as fast as torch, a panel for each report, a bar for each dtype."""
    picture = figures.figure(3.4 + 2.7 * len(reports), 4.4)
    panels = picture.subplots(1, len(reports), sharex=True, sharey=True, squeeze=False)[0]
    for axes, report in zip(panels, reports, strict=True):
        for offset, (dtype, values) in enumerate(_ratios(report).items()):
            places = [list(RATIOS).index(label) + 0.4 * offset for label in values]
            bars = axes.barh(places, [value - 1 for value in values.values()], 0.38, 1, label=dtype, color=f"C{offset}")
            axes.bar_label(bars, [f"{value:.1f}" for value in values.values()], padding=2, fontsize=8)
        axes.axvline(1.0, color="black", linewidth=1)
        axes.set_title(processor(report.machine), fontsize=10)
        axes.set(xscale="log", xlabel="times as fast as torch (log)")
        axes.xaxis.label.set_fontsize(8)
        axes.set_xticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
        axes.minorticks_off()
        axes.set_xlim(0.75, 45)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    panels[0].set_yticks([place + 0.2 for place in range(len(RATIOS))], list(RATIOS), fontsize=9)
    panels[0].invert_yaxis()
    panels[0].legend(fontsize=8, loc="upper right")
    origins = "\n".join(origin_of(report, with_limits=False) for report in reports)
    caption(picture, f"forward + backward where nothing else is said\n{origins}")
    return picture


def over_length(report: Report) -> Any:
    """Speed of inference, speed of training, memory of training, over sequence length; a row of panels a dtype."""
    ticker = errors.require("matplotlib.ticker")
    picture = figures.figure(13.0, 7.6)
    kinds: list[tuple[str, bool, Callable[[Case, Result, str], float | None]]] = [
        ("forward", False, lambda case, result, peer: case.flops / result.seconds[peer] / 1e9),
        ("forward + backward, dropout 0.1", True, lambda case, result, peer: case.flops / result.seconds[peer] / 1e9),
        ("forward + backward, dropout 0.1", True, lambda case, result, peer: result.memory.get(peer, 0) / 2**20),
    ]
    panels, disturbed = picture.subplots(2, len(kinds), sharex=True), 0
    for row, dtype in zip(panels, ("float32", "bfloat16"), strict=True):
        for column, (axes, (title, backward, value)) in enumerate(zip(row, kinds, strict=True)):
            lines: dict[str, list[tuple[int, float]]] = {}
            for case in lengths():
                result = report.results.get(case.name)
                if result is None or str(case.dtype) != f"torch.{dtype}" or case.backward != backward:
                    continue
                if result.disturbed and column < 2:
                    disturbed += 1
                    continue
                for peer in ("ours", *result.ratios):
                    if figure_of := value(case, result, peer):
                        lines.setdefault(peer, []).append((case.shape[2], figure_of))
            for peer, points in lines.items():
                style = {"linewidth": 2.5, "zorder": 3} if peer == "ours" else {"linewidth": 1.2}
                axes.plot(
                    *zip(*points, strict=True), "o-", markersize=4, label=PEERS[peer], color=COLORS[peer], **style
                )
            limit = report.limits.get(dtype)
            if column < 2 and limit:
                axes.axhline(limit, color="0.3", linestyle="--", linewidth=1, label="arithmetic limit")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_title(f"{dtype}: {title}", fontsize=10)
            axes.set_ylabel("MB beside the operands (log)" if column == 2 else "GFLOP/s (log)")
            axes.grid(alpha=0.3, which="both", linewidth=0.5)
            axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(ticker.NullFormatter())
            if not lines:
                axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color="0.5")
        ticks = sorted({case.shape[2] for case in lengths()})
        row[0].set_xticks(ticks, [str(tick) for tick in ticks])
    for axes in panels[-1]:
        axes.set_xlabel("sequence length (log), 8 heads of 64")
    drawn = {name: line for axes in panels.flat for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    if drawn:
        picture.legend(drawn.values(), drawn.keys(), loc="outside upper center", ncols=len(drawn), fontsize=9)
    where = origin_of(report, *OPTIONAL, with_limits=False)
    text = f"{where}. FLOP/s count our products: 2 forward, 7 with the backward pass."
    caption(picture, text + (f" {disturbed} disturbed measurements are left out." if disturbed else ""))
    return picture
