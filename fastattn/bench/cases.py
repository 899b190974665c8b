"""Cases to measure: operations, shapes, dtypes and features, with their work and their floors.

An operation has an entry in `OPERATIONS` (its operands and its call) and entries in `FLOPS` and `BYTES` (its work). A
new case goes into `headline()` with its own floor, or into `sweep()` with the common one.

Cases call only the public API: `pytest benchmarks --against REF` runs them on the package of another commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

import fastattn

DTYPES = (torch.float32, torch.bfloat16)
SWEEP_CAP = 100 * 10**9
OVERHEAD = {False: 1e-6, True: 30e-6}
"""Seconds that a call may take longer than torch's, without and with a gradient. Torch's node of autograd is in C++,
ours in Python: an empty one takes 20 us more for both passes."""
REFERENCE_OVERHEAD = 100e-6
"""The same with a gradient for float64, which takes the usual road."""


@dataclass(frozen=True)
class Floor:
    """Minimum figures of a case. A field of None requires nothing.

    ratio: minimum of torch's time over ours.
    fraction: minimum share of the physical limit. It is enough where torch leaves less room than `ratio` requires.
    both: the fraction is required in addition to the ratio.
    own: maximum of our time over our own time without the case's features (causal, dropout, padding).
    overhead: seconds of a call's path through Python, which `ratio` does not count.
    """

    ratio: float | None = 0.97
    fraction: float | None = None
    both: bool = False
    own: float | None = None
    overhead: float = 0.0


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    shape: attention (batch, heads, length, head size), row operations (rows, columns), training (sentences, tokens).
    keys: attention's key length, if it is not `length`.
    padding: "lengths" or "mask" declares half of the keys invalid; "uneven lengths" a quarter to all of them remain.
    """

    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    backward: bool = False
    keys: int | None = None
    causal: bool = False
    dropout: float = 0.0
    padding: str = ""
    floor: Floor = field(default=Floor(), compare=False)

    @property
    def name(self) -> str:
        features = (
            f"{self.keys} keys" if self.keys else "",
            "causal" if self.causal else "",
            f"padding by {self.padding}" if self.padding else "",
            f"dropout {self.dropout:g}" if self.dropout else "",
        )
        parts = (
            self.operation,
            str(self.dtype).removeprefix("torch."),
            "x".join(map(str, self.shape)),
            *filter(None, features),
            "forward+backward" if self.backward else "forward",
        )
        return " ".join(parts)

    @property
    def plain(self) -> Case:
        """This case without its features."""
        return replace(self, causal=False, dropout=0.0, padding="", floor=Floor())

    @property
    def flops(self) -> int:
        """Floating-point operations of the matrix products. Element-wise arithmetic is not counted."""
        return FLOPS[self.operation](self) if self.operation in FLOPS else 0

    @property
    def bytes(self) -> int:
        """Bytes read or written, each operand and result of a pass once; 0 where only arithmetic counts."""
        return BYTES[self.operation](self) if self.operation in BYTES else 0


@dataclass(frozen=True)
class Operation:
    """operands(case) returns differentiable tensors and other arguments; call(case, *tensors, seed=, **others)."""

    operands: Callable[[Case], tuple[list[Tensor], dict[str, Any]]]
    call: Callable[..., Tensor]


def random(number: int, *shape: int, dtype: torch.dtype) -> Tensor:
    """Draw standard normal values, the same for the same operand `number` and shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(dtype)


# --- attention ---


def key_lengths(case: Case) -> list[int]:
    """Return the number of keys of each sequence of the batch that are not padding."""
    batch, keys = case.shape[0], case.keys or case.shape[2]
    if case.padding == "uneven lengths":
        least = max(1, keys // 4)
        return [least + (keys - least) * n // max(1, batch - 1) for n in range(batch)]
    return [max(1, keys // 2) if case.padding else keys] * batch


def visible_pairs(case: Case) -> int:
    """Count the pairs of a query and a key that it attends to, over all batches and heads."""
    _, heads, length, _ = case.shape

    def pairs(keys: int) -> int:
        if not case.causal:
            return length * keys
        triangle = min(length, keys)
        return triangle * (triangle + 1) // 2 + (length - triangle) * keys

    return heads * sum(map(pairs, key_lengths(case)))


def _attention_operands(case: Case) -> tuple[list[Tensor], dict[str, Any]]:
    batch, heads, length, size = case.shape
    keys = case.keys or length
    tensors = [random(i, batch, heads, n, size, dtype=case.dtype) for i, n in enumerate((length, keys, keys))]
    if case.padding == "mask":
        return tensors, {"attn_mask": (torch.arange(keys) < key_lengths(case)[0]).expand(batch, 1, 1, keys)}
    if case.padding:
        return tensors, {"key_lengths": torch.tensor(key_lengths(case))}
    return tensors, {}


def _attention(case: Case, *operands: Tensor, attn_mask: Tensor | None = None, **others: Tensor) -> Tensor:
    # Operands are passed by position, as to torch's. `others` are arguments that torch's does not have.
    return fastattn.scaled_dot_product_attention(*operands, attn_mask, case.dropout, case.causal, **others)


def _attention_flops(case: Case) -> int:
    """Count two products forward and five more backward: the scores again, and one each for dV, dP, dQ and dK."""
    return 2 * visible_pairs(case) * case.shape[3] * (7 if case.backward else 2)


def _attention_bytes(case: Case) -> int:
    """Count q, k, v, out forward; backward these and grad_out are read, three gradients are written."""
    batch, heads, length, size = case.shape
    queries, keys = (6, 6) if case.backward else (2, 2)
    return case.dtype.itemsize * heads * size * (queries * batch * length + keys * sum(key_lengths(case)))


# --- row operations ---


def _rows_bytes(backward: int) -> Callable[[Case], int]:
    """Count two tensors of the input's size forward and `backward` more in the backward pass."""
    return lambda case: case.dtype.itemsize * prod(case.shape) * (2 + backward * case.backward)


def _input(case: Case) -> tuple[list[Tensor], dict[str, Any]]:
    return [random(0, *case.shape, dtype=case.dtype)], {}


def _affine(columns: int, dtype: torch.dtype) -> list[Tensor]:
    """Make LayerNorm's weight and bias, (columns,) each, float32 with a 16-bit input, as under autocast."""
    dtype = torch.promote_types(dtype, torch.float32)
    return [1 + random(1, columns, dtype=dtype) / 8, random(2, columns, dtype=dtype)]


def _layer_norm_operands(case: Case) -> tuple[list[Tensor], dict[str, Any]]:
    return [random(0, *case.shape, dtype=case.dtype), *_affine(case.shape[1], case.dtype)], {}


def _residual_operands(case: Case) -> tuple[list[Tensor], dict[str, Any]]:
    """Make the input in the case's dtype and the residual in float32, as under autocast."""
    residual = random(3, *case.shape, dtype=torch.float32)
    return [random(0, *case.shape, dtype=case.dtype), residual, *_affine(case.shape[1], case.dtype)], {}


def _dropout_add_layer_norm(case: Case, *operands: Tensor, **seed: Tensor) -> Tensor:
    return fastattn.dropout_add_layer_norm(*operands, case.dropout, **seed)


def _residual_bytes(case: Case) -> int:
    """Count input, residual, out forward; with backward also the sum twice, grad_out, and both gradients."""
    own, single = case.dtype.itemsize, torch.float32.itemsize
    return prod(case.shape) * ((2 * own + 6 * single) if case.backward else (own + 2 * single))


# --- a training step (training.py has its contestants) ---

BASE: dict[str, Any] = {
    "vocab_size": 8000, "d_model": 512, "d_ff": 2048, "num_heads": 8, "encoder_layers": 6, "decoder_layers": 6
}  # fmt: skip


def _training_flops(case: Case) -> int:
    """Count the base model's matrix products at equal source and target length; backward costs twice the forward."""
    sentences, length = case.shape
    width, layers = BASE["d_model"], BASE["encoder_layers"]
    projections, feed_forward = 4 * width * width, 2 * width * BASE["d_ff"]
    scores = (2 * 2 + 1) * width * length  # encoder, cross, half of the causal ones; two products each
    weights = layers * (3 * projections + 2 * feed_forward + scores) + BASE["vocab_size"] * width
    return 2 * sentences * length * weights * (3 if case.backward else 1)


OPERATIONS = {
    "attention": Operation(_attention_operands, _attention),
    "softmax_dropout": Operation(_input, lambda case, x, **seed: fastattn.softmax_dropout(x, case.dropout, **seed)),
    "layer_norm": Operation(
        _layer_norm_operands, lambda case, x, *affine, seed=None: fastattn.layer_norm(x, case.shape[1:], *affine)
    ),
    "dropout_add_layer_norm": Operation(_residual_operands, _dropout_add_layer_norm),
    "dropout": Operation(_input, lambda case, x, **seed: fastattn.dropout(x, case.dropout, **seed)),
}
FLOPS = {"attention": _attention_flops, "training_step": _training_flops}
BYTES = {
    "attention": _attention_bytes,
    "softmax_dropout": _rows_bytes(3),
    "layer_norm": _rows_bytes(3),
    "dropout_add_layer_norm": _residual_bytes,
    "dropout": _rows_bytes(2),
}


# --- the lists ---


FLOORED = ("avx512_bf16", "amx_bf16")
"""Instruction sets whose floors docs/design.md states."""


def headline(isa: str = "") -> list[Case]:
    """Return the cases with floors of their own, which are those of an instruction set.

    With AMX, products are not most of a bfloat16 case's time: its floor is torch. Where docs/design.md states a ratio
    without a fraction, the fraction is what the ratio meant on the machine where it was set (500 and 940 GFLOP/s): for
    instance 2.5 x 119 / 500 for (32, 8, 64, 64) in float32. LayerNorm's in float32 is what remains where torch takes
    less than 1.3 times as long as a copy of the bytes.
    """

    def products(ratio: float, fraction: float, both: bool = False) -> Floor:
        return Floor() if isa == "amx_bf16" else Floor(ratio, fraction, both)

    single, half = torch.float32, torch.bfloat16
    long, wide, short = (1, 8, 2048, 64), (1, 8, 2048, 128), (32, 8, 64, 64)
    cases = [
        Case("attention", long, single, floor=Floor(2.1, 0.78, both=True)),
        Case("attention", wide, single, floor=Floor(2.1, 0.82, both=True)),
        Case("attention", long, half, floor=products(3.7, 0.70, both=True)),
        Case("attention", wide, half, floor=products(3.7, 0.78, both=True)),
        Case("attention", short, single, floor=Floor(2.5, fraction=0.59)),
        Case("attention", short, half, floor=products(4.0, 0.44)),
        Case("attention", long, single, backward=True, floor=Floor(2.0, fraction=0.64)),
        Case("attention", long, half, backward=True, floor=products(2.3, 0.56)),
        Case("attention", long, single, backward=True, dropout=0.1, floor=Floor(own=1.15)),
        Case("attention", long, half, backward=True, dropout=0.1, floor=Floor(own=1.25)),
    ]
    for dtype, backward in product((single, half), (False, True)):
        cases += [
            Case("attention", long, dtype, backward, causal=True, floor=Floor(own=0.58)),
            Case("attention", long, dtype, backward, padding="lengths", floor=Floor(own=0.6)),
            Case("attention", long, dtype, backward, padding="mask", floor=Floor(own=0.6)),
        ]
    for dtype in (single, half):
        cases += [
            Case("softmax_dropout", (8192, 512), dtype, True, dropout=0.1, floor=Floor(10.0)),
            Case("dropout_add_layer_norm", (4096, 512), dtype, False, dropout=0.1, floor=Floor(10.0)),
            Case("dropout_add_layer_norm", (4096, 512), dtype, True, dropout=0.1, floor=Floor(6.0)),
            Case("dropout", (4096, 512), dtype, True, dropout=0.1, floor=Floor(10.0)),
            Case("layer_norm", (4096, 512), dtype, False, floor=Floor(1.0)),
            Case("layer_norm", (4096, 512), dtype, True, floor=Floor(1.3, fraction=0.8 if dtype == single else None)),
        ]
    return cases


def training(isa: str = "") -> list[Case]:
    """Return the steps of training that an instruction set, empty: any, takes within seconds.

    Without instructions for bfloat16, torch's linear layers take minutes in it.
    """
    floors = {torch.float32: Floor(1.15), torch.bfloat16: Floor(1.4)}
    dtypes = list(floors) if isa in ("", *FLOORED) else [torch.float32]
    return [Case("training_step", (32, 48), dtype, True, dropout=0.1, floor=floors[dtype]) for dtype in dtypes]


def dispatch() -> list[Case]:
    """Return calls so small that the path from Python to the kernel is all their cost: attention of decoding size."""
    return [
        Case("attention", (1, 8, 1, 64), keys=32, floor=Floor(1.0)),
        Case("attention", (1, 8, 1, 64), torch.bfloat16, keys=32, floor=Floor(1.0)),
    ]


def double() -> list[Case]:
    """Return the cases in float64, for which fastattn has no kernels.

    The reference calls torch where it can and copies the result into the layout of its operand.
    """
    shapes = {"attention": (4, 8, 512, 64), "layer_norm": (4096, 512)}
    return [
        Case(operation, shape, torch.float64, backward, floor=Floor(0.9, overhead=REFERENCE_OVERHEAD))
        for (operation, shape), backward in product(shapes.items(), (False, True))
    ]


def listed(isa: str = "") -> list[Case]:
    """Return all cases except the sweep's, in the order of docs/performance.md."""
    return [*headline(isa), *training(isa), *dispatch(), *double()]


PROGRAMS = {
    "patched step of jadore801120's base model, bfloat16 32x48": Floor(1.25),
    "patched step of torch.nn.TransformerEncoder, bfloat16 16x512x512": Floor(1.5),
    "step beside jadore801120's base model, bfloat16 32x48": Floor(1.4, fraction=0.8),
    "step beside jadore801120's base model, float32 32x48": Floor(1.15, fraction=0.8),
}
"""Training steps that `benchmarks/test_programs.py` measures, and their floors. The limit is matrix products."""


def sweep() -> Iterator[Case]:
    """Yield whatever a user may bring. No case may be slower than torch, except for the overhead."""
    floors = {backward: Floor(overhead=seconds) for backward, seconds in OVERHEAD.items()}
    for batch, heads, length, size, dtype, backward, causal in product(
        (1, 8, 64), (1, 16), (1, 7, 32, 128, 512, 4096), (32, 64, 128, 256), DTYPES, (False, True), (False, True)
    ):
        case = Case("attention", (batch, heads, length, size), dtype, backward, causal=causal, floor=floors[backward])
        if case.flops <= SWEEP_CAP and (size == 64 or not causal):
            yield case
    for keys, batch, dtype in product((16, 256, 4096), (1, 8, 64), DTYPES):
        yield Case("attention", (batch, 8, 1, 64), dtype, keys=keys, floor=floors[False])
    for shape, dtype, backward in product(
        ((16, 65536), (1024, 4096), (16384, 1024), (4096, 512), (512, 512), (8192, 64), (1000, 77)),
        DTYPES,
        (False, True),
    ):
        yield Case("layer_norm", shape, dtype, backward, floor=floors[backward])
        for operation in ("softmax_dropout", "dropout_add_layer_norm", "dropout"):
            yield Case(operation, shape, dtype, backward, dropout=0.1, floor=floors[backward])
