"""Errors against float64 of fastattn and of torch's own functions, per operation, dtype, length and regime.

    python benchmarks/accuracy.py

adds rows to benchmarks/results.csv; `make tables` shows them.

All get the same operands, rounded to the dtype. The float64 result of torch's functions on them is the truth.
Dropout is left out, because masks differ; where an element is kept, dropout multiplies it by a constant. Regimes are
also measured on Triton's kernels, in its interpreter and with few operands.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fastattn
from fastattn.bench import peers, report
from fastattn.bench.cases import OPERATIONS, Case

RESULTS = Path(__file__).with_name("results.csv")
ROWS = 64
LENGTHS = (64, 256, 1024, 4096, 16384)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PEERS = ("torch", "torch math")
GRADIENTS = ("dQ", "dK", "dV")
SHAPES = {"cpu": (1, 8, 256, 64), "triton": (1, 2, 128, 64)}  # of attention's operands in the regimes
ROTATED, STEP = "RoPE of keys with bias 5; values + 5", "keys + 20; then - 20; values + 20"
MOVING = (ROTATED, STEP)
"""Regimes in which the mean of the keys changes along the sequence. One mean per head does not centre such keys."""
ROW_REGIMES = (  # operation, which operand has this deviation and mean
    ("softmax_dropout", 0, 10, 0),
    ("layer_norm", 0, 1, 1000),
    ("layer_norm", 0, 1, 10000),
    ("dropout_add_layer_norm", 1, 1, 1000),
)


def cases(lengths: tuple[int, ...] = LENGTHS) -> list[Case]:
    """Return a case per operation, dtype and length of its sums: attention's keys, or a row's columns."""
    return [
        Case(operation, (1, 2, ROWS, 64), dtype, True, keys=length)
        if operation == "attention"
        else Case(operation, (ROWS, length), dtype, True)
        for operation in ("attention", "softmax_dropout", "layer_norm", "dropout_add_layer_norm")
        for dtype in DTYPES
        for length in lengths
    ]


def rotated(tensor: Tensor) -> Tensor:
    """Return a tensor (..., L, E) with rotary position embeddings: each pair of columns turned by an angle."""
    length, width = tensor.shape[-2:]
    angle = torch.arange(length)[:, None] * 10000 ** (-torch.arange(0, width, 2) / width)
    pairs = torch.view_as_complex(tensor.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


def regimes(shape: tuple[int, ...] = SHAPES["cpu"]) -> Iterator[tuple[Case, str, list[Tensor]]]:
    """Yield cases, the name of what costs their backward passes digits, and operands that have it."""

    def normal(mean: float = 0.0) -> Tensor:
        return torch.randn(shape) + mean

    def columns(deviation: float) -> Tensor:
        return normal() + deviation * torch.randn(shape[-1])

    def wide() -> Tensor:
        return torch.rand(shape) * 18 - 9

    torch.manual_seed(2017)
    direction = F.normalize(torch.randn(shape[-1]), dim=0)
    below = torch.where(torch.arange(shape[-2])[:, None] % 4 == 0, normal() - 60 * direction, normal())
    step = torch.where(torch.arange(shape[-2])[:, None] < shape[-2] // 2, 20.0, -20.0)
    of_attention = {
        "normal": (normal(), normal(), normal()),
        "keys + 20": (normal(), normal(20), normal()),
        "values + 20": (normal(), normal(), normal(20)),
        **{f"keys and values + {mean}": (normal(), normal(mean), normal(mean)) for mean in (2, 5, 20)},
        "peaked": (wide(), wide(), normal()),
        "peaked; values + 20": (wide(), wide(), normal(20)),
        "deeply negative": (below, normal() + 10 * direction, normal()),
        "a mean per column; deviation 20": (normal(), columns(20), columns(20)),
        ROTATED: (rotated(normal()), rotated(columns(5)), normal(5)),
        STEP: (normal(), normal() + step, normal(20)),
    }
    for dtype, regime in product(DTYPES, of_attention):
        yield Case("attention", shape, dtype, True), regime, [tensor.to(dtype) for tensor in of_attention[regime]]
    for (operation, which, deviation, mean), dtype in product(ROW_REGIMES, DTYPES):
        case = Case(operation, (ROWS, 512), dtype, True)
        operands = list(OPERATIONS[operation].operands(case)[0])
        operands[which] = (operands[which].float() * deviation + mean).to(operands[which].dtype)
        yield case, f"mean {mean:g}; deviation {deviation:g}", operands


def measure(case: Case, operands: list[Tensor] | None = None, mean: float = 0.0) -> dict[str, tuple[float, ...]]:
    """Return our error, torch's and, for attention, that of torch's math backend.

    Their keys are the output, all gradients together and, for attention, dQ, dK and dV. ``mean`` is the mean of the
    output's gradient, whose deviation is 1.
    """
    operation, torchs = OPERATIONS[case.operation], peers.PEERS[case.operation]
    tensors = operation.operands(case)[0] if operands is None else operands

    def results(function: Any, operands: list[Tensor]) -> dict[str, Tensor]:
        operands = [tensor.detach().requires_grad_() for tensor in operands]
        out = function(case, *operands)
        grad = (torch.randn(out.shape, generator=torch.Generator().manual_seed(2017)) + mean).to(case.dtype)
        gradients = [g.flatten().double() for g in torch.autograd.grad(out, operands, grad.to(out.dtype))]
        each = zip(GRADIENTS, gradients, strict=True) if case.operation == "attention" else ()
        return {"output": out.detach().flatten().double(), "gradients": torch.cat(gradients), **dict(each)}

    truth = results(torchs["torch"], [tensor.double() for tensor in tensors])
    functions = [operation.call, *(torchs[peer] for peer in PEERS if peer in torchs)]
    found = [results(function, tensors) for function in functions]
    return {part: tuple(error(of[part], value) for of in found) for part, value in truth.items()}


def error(value: Tensor, truth: Tensor) -> float:
    """Return the Euclidean norm of the difference, relative to that of the truth."""
    return ((value - truth).norm() / truth.norm()).item()


def interpreter() -> contextlib.AbstractContextManager[None]:
    """Run Triton's kernels in its interpreter, with a GPU's rounding, inside the block."""
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    sys.path.append(str(RESULTS.parent.parent / "tests"))
    from interpreter import strict

    return strict()


def main() -> None:
    where, rows = report.here(), []

    def record(name: str, dtype: torch.dtype, ours: float, *others: float) -> None:
        of = str(dtype)[len("torch.") :]
        for peer, theirs in zip(PEERS, others, strict=False):
            rows.append(report.Row(**where, case=name, dtype=of, peer=peer, value=ours, ratio=theirs / ours))
        print(f"{name}, {of}: {ours:.1e}, torch {', '.join(f'{x:.1e}' for x in others)}", flush=True)

    for case in cases():
        found = measure(case)
        for part in ("output", "gradients"):
            name = f"accuracy of {case.operation}, {case.keys or case.shape[1]}, {part}"
            record(name, case.dtype, *found[part][:2])
    for backend, shape in SHAPES.items():
        with interpreter() if backend == "triton" else contextlib.nullcontext(), fastattn.backend(backend):
            for case, regime, tensors in regimes(shape):
                found = measure(case, tensors, 0.5)
                for part in GRADIENTS if case.operation == "attention" else ("output", "gradients"):
                    record(f"regime of {case.operation} on {backend}, {regime}, {part}", case.dtype, *found[part])
    report.append(RESULTS, rows)


if __name__ == "__main__":
    main()
