"""Table 1 of the paper as a measurement: layers that map a sequence to one of the same length, forward and backward.

    python benchmarks/table1.py --record

`--record` keeps the results as benchmarks/results/table1-MACHINE.json; `make tables` shows them. The layers are whole
ones, d = 512 in float32: self-attention with its projections, 8 heads; the complexity is that of the paper, of what
depends on the length.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fastattn
from fastattn.bench import contest, report
from fastattn.bench.timer import interleave

ROOT = Path(__file__).resolve().parent.parent
WIDTH, HEADS, BATCH = 512, 8, 1
NEIGHBOURS = 64  # on each side
KERNEL = 3
LENGTHS = (64, 256, 1024, 4096)
LAYERS = {
    # complexity, sequential operations, maximum path length
    "self-attention, fastattn": ("O(n² d)", "O(1)", "O(1)"),
    "self-attention, torch": ("O(n² d)", "O(1)", "O(1)"),
    f"restricted self-attention, fastattn, r = {2 * NEIGHBOURS + 1}": ("O(r n d)", "O(1)", "O(n / r)"),
    "recurrent, torch's LSTM": ("O(n d²)", "O(n)", "O(n)"),
    f"convolutional, torch, k = {KERNEL}": ("O(k n d²)", "O(1)", "O(log_k n) dilated, else O(n / k)"),
}


def layers() -> dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """Of each row of the table the module, and its call on (1, n, d)."""
    ours, torchs = (
        kind(WIDTH, HEADS, batch_first=True) for kind in (fastattn.MultiHeadAttention, nn.MultiheadAttention)
    )
    lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
    convolution = nn.Conv1d(WIDTH, WIDTH, KERNEL, padding=KERNEL // 2)
    window = (NEIGHBOURS, NEIGHBOURS)
    calls = (
        (ours, lambda x: ours(x, x, x, need_weights=False)[0]),
        (torchs, lambda x: torchs(x, x, x, need_weights=False)[0]),
        (ours, lambda x: ours(x, x, x, need_weights=False, window_size=window)[0]),
        (lstm, lambda x: lstm(x)[0]),
        (convolution, lambda x: convolution(x.mT).mT),
    )
    return dict(zip(LAYERS, calls, strict=True))


def measure(length: int, budget: float = 2.0) -> dict[str, Any]:
    """Seconds of each layer for a sequence of `length`; again while neighbours disturb."""
    torch.manual_seed(0)
    x = torch.randn(BATCH, length, WIDTH, requires_grad=True)
    grad = torch.randn(BATCH, length, WIDTH)

    def step(module: nn.Module, call: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        operands = [x, *module.parameters()]
        return lambda: torch.autograd.grad(call(x), operands, grad)

    functions = {name: step(*layer) for name, layer in layers().items()}
    ours, torchs, *_ = functions
    for _ in range(contest.ATTEMPTS):
        timing = interleave(functions, budget=budget * len(functions), rounds=(4, 100))
        result = contest.Result(f"n = {length}", {}, {"torch": timing.ratio(torchs, ours)})
        disturbed = contest.disturbance(result, timing.others)
        if not disturbed:
            break
    return {
        "length": length,
        "seconds": {name: timing.seconds(name) for name in functions},
        "disturbed": disturbed,
    }


def table(found: list[dict[str, Any]]) -> str:
    """The paper's columns, then milliseconds for each length."""
    lengths = [f"n = {row['length']}" for row in found]
    rows = [["layer", "complexity", "sequential operations", "maximum path length", *lengths]]
    for name, known in LAYERS.items():
        rows.append([name, *known, *(report.milliseconds(row["seconds"][name]) for row in found)])
    return report.markdown(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="keep the results")
    options = parser.parse_args()
    found = [measure(length) for length in LENGTHS]
    print(table(found))
    disturbed = [f"n = {row['length']}: {row['disturbed']}" for row in found if row["disturbed"]]
    if options.record:
        report.record(ROOT / "benchmarks/results", "table1", {"layers": found}, "; ".join(disturbed))


def section(data: dict[str, Any]) -> str:
    """One machine's part of the page."""
    return f"{report.origin(data)}.\n\n{table(data['layers'])}"


if __name__ == "__main__":
    main()
