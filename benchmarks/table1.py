"""Measure Table 1 of the paper: layers that map a sequence to one of the same length, forward and backward.

    python benchmarks/table1.py

adds rows to benchmarks/results.csv; `make tables` shows them. The layers are whole ones, d = 512 in float32.
Self-attention has 8 heads and its projections.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import fastattn
from fastattn.bench import contest, report

RESULTS = Path(__file__).with_name("results.csv")
WIDTH, HEADS, BATCH = 512, 8, 1
NEIGHBOURS = 64  # on each side
KERNEL = 3
LENGTHS = (64, 256, 1024, 4096)


def layers() -> dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """Return each layer's module and its call on (1, n, d) by the name of its row."""
    ours, torchs = (
        kind(WIDTH, HEADS, batch_first=True) for kind in (fastattn.MultiHeadAttention, nn.MultiheadAttention)
    )
    lstm, convolution = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Conv1d(WIDTH, WIDTH, KERNEL, padding=KERNEL // 2)
    window = (NEIGHBOURS, NEIGHBOURS)
    return {
        "ours": (ours, lambda x: ours(x, x, x, need_weights=False)[0]),
        "self-attention, torch": (torchs, lambda x: torchs(x, x, x, need_weights=False)[0]),
        f"restricted self-attention, fastattn, r = {2 * NEIGHBOURS + 1}": (
            ours,
            lambda x: ours(x, x, x, need_weights=False, window_size=window)[0],
        ),
        "recurrent, torch's LSTM": (lstm, lambda x: lstm(x)[0]),
        f"convolutional, torch, k = {KERNEL}": (convolution, lambda x: convolution(x.mT).mT),
    }


def measure(length: int, budget: float = 2.0) -> contest.Result:
    """Time forward and backward of each layer on a sequence of `length`."""
    torch.manual_seed(0)
    x = torch.randn(BATCH, length, WIDTH, requires_grad=True)
    grad = torch.randn(BATCH, length, WIDTH)

    def step(module: nn.Module, call: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        operands = [x, *module.parameters()]
        return lambda: torch.autograd.grad(call(x), operands, grad)

    functions = {name: step(*layer) for name, layer in layers().items()}
    return contest.measured(f"layer, n = {length}", functions, budget=budget * len(functions), rounds=(4, 100))


def main() -> None:
    where, rows = report.here(), []
    for result in map(measure, LENGTHS):
        print(result, flush=True)
        if result.noise:
            sys.exit(f"not recorded, run it on a quiet machine: {result.noise}")
        rows += report.rows_of(result, "float32", where)
    report.append(RESULTS, rows)


if __name__ == "__main__":
    main()
