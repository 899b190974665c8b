"""Error against float64, ours compared with torch's own functions, per operation, dtype and length.

    python benchmarks/accuracy.py --record

`--record` keeps the results as benchmarks/results/accuracy-MACHINE.json; `make tables` shows them.

All three get the same operands, rounded to the dtype; the float64 result of torch's functions on them is the truth.
Without dropout, whose masks differ; where an element is kept, dropout multiplies it by a constant.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastattn import figures
from fastattn.bench import peers, plots, report
from fastattn.bench.cases import OPERATIONS, Case

ROOT = Path(__file__).resolve().parent.parent
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = 64
LENGTHS = (64, 256, 1024, 4096, 16384)
LABELS = {
    "attention": ("attention", "keys, of 64 queries"),
    "softmax_dropout": ("softmax", "columns"),
    "layer_norm": ("LayerNorm", "columns"),
    "dropout_add_layer_norm": ("float32 residual + LayerNorm", "columns"),
}


def cases(lengths: tuple[int, ...] = LENGTHS) -> list[Case]:
    """Of each operation, dtype and length; the length is that of the sums: keys of attention, columns of a row."""
    return [
        Case(operation, (1, 2, ROWS, 64), dtype, True, keys=length)
        if operation == "attention"
        else Case(operation, (ROWS, length), dtype, True)
        for operation in LABELS
        for dtype in DTYPES
        for length in lengths
    ]


def measure(case: Case) -> list[dict[str, Any]]:
    """The errors of the output and of all gradients together: in the Euclidean norm, relative to that of the truth, and
    at most, relative to the truth's largest element."""
    operation = OPERATIONS[case.operation]
    tensors, _ = operation.operands(case)
    torchs = peers.PEERS[case.operation]["torch"]

    def results(function: Any, operands: list[Tensor]) -> list[Tensor]:
        operands = [tensor.detach().requires_grad_() for tensor in operands]
        out = function(case, *operands)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2017)).to(case.dtype)
        gradients = torch.autograd.grad(out, operands, grad.to(out.dtype))
        return [out.detach().flatten().double(), torch.cat([gradient.flatten().double() for gradient in gradients])]

    truth = results(torchs, [tensor.double() for tensor in tensors])
    found = {"ours": results(operation.call, tensors), "torch": results(torchs, tensors)}
    return [
        {
            "operation": case.operation,
            "dtype": str(case.dtype).removeprefix("torch."),
            "length": case.keys or case.shape[1],
            "of": what,
            **{name: errors(values[part], truth[part]) for name, values in found.items()},
        }
        for part, what in enumerate(("output", "gradients"))
    ]


def errors(value: Tensor, truth: Tensor) -> dict[str, float]:
    difference = value - truth
    return {
        "norm": (difference.norm() / truth.norm()).item(),
        "most": (difference.abs().max() / truth.abs().max()).item(),
    }


def table(found: list[dict[str, Any]]) -> str:
    """A row for each operation, dtype and result, a column for each length: our error in the norm, and torch's."""
    by_row: dict[tuple[str, str, str], dict[int, str]] = {}
    for entry in found:
        row = by_row.setdefault((LABELS[entry["operation"]][0], entry["dtype"], entry["of"]), {})
        row[entry["length"]] = f"{entry['ours']['norm']:.1e} / {entry['torch']['norm']:.1e}"
    lengths = sorted({entry["length"] for entry in found})
    return report.markdown(
        [
            ["operation", "dtype", "of", *map(str, lengths)],
            *([*row, *(cells.get(length, "") for length in lengths)] for row, cells in by_row.items()),
        ]
    )


def picture(data: dict[str, Any]) -> Any:
    """A panel for each operation and dtype."""
    figure = figures.figure(11, 11)
    dtypes = list(dict.fromkeys(entry["dtype"] for entry in data["errors"]))
    panels = figure.subplots(len(LABELS), len(dtypes), sharex=True, squeeze=False)
    for row, (operation, (title, axis)) in zip(panels, LABELS.items(), strict=True):
        for axes, dtype in zip(row, dtypes, strict=True):
            for of, marker in (("output", "o-"), ("gradients", "s--")):
                entries = [
                    entry
                    for entry in data["errors"]
                    if (entry["operation"], entry["dtype"], entry["of"]) == (operation, dtype, of)
                ]
                for name, color, size in (("torch", "C1", 7), ("ours", "C0", 3)):
                    axes.plot(
                        [entry["length"] for entry in entries],
                        [entry[name]["norm"] for entry in entries],
                        marker,
                        color=color,
                        markersize=size,
                        label=f"{'fastattn' if name == 'ours' else 'torch'}, {of}",
                    )
            axes.set_xscale("log", base=4)
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            axes.set_ylim(low / 3, high * 3)
            axes.set_title(f"{title}, {dtype}", fontsize=9)
            axes.set_xlabel(f"{axis} (log)", fontsize=8)
            axes.grid(alpha=0.3, which="both", linewidth=0.5)
        row[0].set_ylabel("relative error (log)", fontsize=8)
    ticks = sorted({entry["length"] for entry in data["errors"]})
    panels[0][0].set_xticks(ticks, list(map(str, ticks)))
    panels[0][0].legend(fontsize=7)
    plots.caption(figure, report.origin(data))
    return figure


def section(data: dict[str, Any]) -> str:
    return f"{report.origin(data)}.\n\n{table(data['errors'])}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="keep the results")
    options = parser.parse_args()
    found = [entry for case in cases() for entry in measure(case)]
    print(table(found))
    if options.record:
        report.record(ROOT / "benchmarks/results", "accuracy", {"errors": found})


if __name__ == "__main__":
    main()
