"""Error against float64, ours compared with torch's own functions, per operation, dtype and length.

    python benchmarks/accuracy.py

adds rows to benchmarks/results.csv; `make tables` shows them.

All three get the same operands, rounded to the dtype. The float64 result of torch's functions on them is the truth.
Dropout is left out, because masks differ; where an element is kept, dropout multiplies it by a constant.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastattn.bench import peers, report
from fastattn.bench.cases import OPERATIONS, Case

RESULTS = Path(__file__).with_name("results.csv")
ROWS = 64
LENGTHS = (64, 256, 1024, 4096, 16384)


def cases(lengths: tuple[int, ...] = LENGTHS) -> list[Case]:
    """Return a case per operation, dtype and length of its sums: attention's keys, or a row's columns."""
    return [
        Case(operation, (1, 2, ROWS, 64), dtype, True, keys=length)
        if operation == "attention"
        else Case(operation, (ROWS, length), dtype, True)
        for operation in ("attention", "softmax_dropout", "layer_norm", "dropout_add_layer_norm")
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for length in lengths
    ]


def measure(case: Case) -> dict[str, tuple[float, float]]:
    """Return our error and torch's, of the output and of all gradients together."""
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
    found = results(operation.call, tensors), results(torchs, tensors)
    return {
        part: tuple(error(of[number], truth[number]) for of in found)  # type: ignore[misc]
        for number, part in enumerate(("output", "gradients"))
    }


def error(value: Tensor, truth: Tensor) -> float:
    """Return the Euclidean norm of the difference, relative to that of the truth."""
    return ((value - truth).norm() / truth.norm()).item()


def main() -> None:
    where, rows = report.here(), []
    for case in cases():
        name, dtype = f"accuracy of {case.operation}, {case.keys or case.shape[1]}", str(case.dtype)[len("torch.") :]
        for part, (ours, torchs) in measure(case).items():
            columns = {"case": f"{name}, {part}", "dtype": dtype, "peer": "torch"}
            rows.append(report.Row(**where, **columns, value=ours, ratio=torchs / ours))
            print(f"{name}, {part}, {dtype}: {ours:.1e}, torch {torchs:.1e}", flush=True)
    report.append(RESULTS, rows)


if __name__ == "__main__":
    main()
