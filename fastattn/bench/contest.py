"""Run a case: check fastattn against the reference, then time it with its peers and the machine's limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fastattn

from . import limits, peers, training
from .cases import OPERATIONS, Case, Floor
from .timer import Ratio, Timing, interleave, noise_of

CHECKED_SCORES = 1 << 22
"""Attention is checked on as many heads of the first batch as have this many scores in all (one head at least)."""

EPSILON = {torch.float64: 4e-15, torch.float32: 2e-6, torch.bfloat16: 4e-3}
"""Error allowed in addition to twice the reference's own, relative to the largest element. It covers a few roundings of
intermediate values (half a unit in the last place is 1e-16, 6e-8 and 2e-3), for references that happen to be exact."""

SPREAD = 0.30
"""Maximum distance of a ratio's quartiles, relative to its median. On a quiet machine 5 % is usual."""

IMPLAUSIBLE = {"arithmetic": 1.1, "copy": 10.0}
"""Shares of a limit above which the limit was disturbed. A copy into fresh memory pays for its page faults, so what
only reads, or finds its memory in place, beats it several times."""

ATTEMPTS = 2
"""Measurements of a noisy case before it is called noisy."""

VISIBLE_LIMIT = 20e-6
"""Seconds below which a limit says nothing, because the call that measures it takes as long."""


@dataclass(frozen=True)
class Result:
    """The figures of one case.

    seconds: median per contestant. ratios: time of each peer over fastattn's; "plain" is fastattn without the
    case's features.
    share: of the physical limit, which is `limit`: "arithmetic" or "copy"; None if the limit is too short to be seen.
    noise: why the figures say nothing, or "".
    """

    name: str
    seconds: dict[str, float]
    ratios: dict[str, Ratio]
    share: Ratio | None = None
    limit: str = ""
    noise: str = ""

    def missed(self, floor: Floor) -> list[str]:
        medians = {peer: ratio.median for peer, ratio in self.ratios.items()}
        return missed(floor, self.seconds["ours"], medians, self.share.median if self.share else None)


def ours(case: Case) -> Callable[[], Any]:
    """Return our call of a case."""
    if case.operation == "training_step":
        return training.contestants(case)["ours"]
    operation = OPERATIONS[case.operation]
    tensors, others = operation.operands(case)
    return step(case, partial(operation.call, case, **others), tensors)


def step(case: Case, function: Callable[..., Tensor], tensors: list[Tensor]) -> Callable[[], Any]:
    """Return a call of `function(*tensors)`, with the gradients of all tensors if the case has a backward pass."""
    if not case.backward:
        return partial(function, *tensors)
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    grad = torch.randn_like(function(*tensors))
    return lambda: torch.autograd.grad(function(*tensors), tensors, grad)


def contestants(case: Case, *, everyone: bool = False) -> dict[str, Callable[[], Any]]:
    """Return fastattn, the peers, "plain" if the floor needs it, and the limits of the machine."""
    if case.operation == "training_step":
        return training.contestants(case) | _arithmetic(case)
    tensors, others = OPERATIONS[case.operation].operands(case)
    functions = {"ours": ours(case)}
    for name, peer in peers.available(case, everyone=everyone).items():
        functions[name] = step(case, partial(peer, **others), tensors)
    if case.floor.own is not None:
        functions["plain"] = ours(case.plain)
    functions |= _arithmetic(case)
    if case.flops and "arithmetic" not in functions:
        return functions  # a copy does not limit products
    return functions | {"copy": limits.copy(case.bytes, max(tensor.nbytes for tensor in tensors))}


def _arithmetic(case: Case) -> dict[str, Callable[[], Any]]:
    work = limits.arithmetic(case.flops, case.dtype) if case.flops else None
    return {"arithmetic": work} if work else {}


def run(
    case: Case,
    *,
    budget: float = 1.5,
    rounds: tuple[int, int] = (6, 100),
    everyone: bool = False,
    attempts: int = ATTEMPTS,
) -> Result:
    """Time `case` for about `budget` seconds a contestant, up to `attempts` times while it is noisy."""
    functions = contestants(case, everyone=everyone)
    return measured(case.name, functions, budget=budget * len(functions), rounds=rounds, attempts=attempts)


def measured(
    name: str,
    functions: Mapping[str, Callable[[], Any]],
    *,
    budget: float,
    rounds: tuple[int, int] = (6, 100),
    attempts: int = ATTEMPTS,
) -> Result:
    """Time functions, of which one is "ours", up to `attempts` times while they are noisy."""
    for _ in range(attempts):
        result = summarise(name, interleave(functions, budget=budget, rounds=rounds))
        if not result.noise:
            break
    return result


def summarise(name: str, timing: Timing) -> Result:
    """Return the figures of a timing, whose functions are "ours", peers, and the limits "arithmetic" and "copy"."""
    seconds = {name: timing.seconds(name) for name in timing.samples}
    bounds = {name: seconds[name] for name in IMPLAUSIBLE if name in seconds}
    limit = max((name for name in bounds if bounds[name] > VISIBLE_LIMIT), key=bounds.__getitem__, default="")
    ratios = {name: timing.ratio(name, "ours") for name in seconds if name not in ("ours", *bounds)}
    share = timing.ratio(limit, "ours") if limit else None
    return Result(name, seconds, ratios, share, limit, noise=_noise(ratios, share, limit, timing.others))


def _noise(ratios: Mapping[str, Ratio], share: Ratio | None, limit: str, others: float | None) -> str:
    """Say what disturbed a measurement: other programs, samples that disagree, an impossible figure; or return ""."""
    if by_others := noise_of(others):
        return by_others
    for peer, ratio in ratios.items():
        if ratio.high - ratio.low > SPREAD * ratio.median:
            return f"quartiles of the ratio to {peer}: {ratio.low:.2f} and {ratio.high:.2f}"
    if share and share.median > IMPLAUSIBLE[limit]:
        return f"{limit}, the limit, took {share.median:.1f} times as long as ours"
    return ""


def missed(floor: Floor, seconds: float, ratios: Mapping[str, float], share: float | None) -> list[str]:
    """Say which parts of its floor a case misses.

    A ratio set on one machine can exceed limit / torch on another, where torch is nearer to the limit. The floor's
    fraction of the limit is enough there.
    """
    found, ratio = [], ratios.get("torch", 0.0)
    if floor.both and floor.fraction is not None and share and share < floor.fraction:
        found.append(f"{share:.0%} of the limit, at least {floor.fraction:.0%}")
    if floor.ratio is not None and ratio:
        least = floor.ratio
        if floor.overhead:
            least = 1 / (1 / least + floor.overhead / (ratio * seconds))
        if floor.fraction is not None and share:
            least = min(least, floor.fraction * ratio / share)
        if ratio < least:
            digits = 2 if f"{ratio:.2f}" != f"{least:.2f}" else 3
            found.append(f"{ratio:.{digits}f} times as fast as torch, at least {least:.{digits}f}")
    if floor.own is not None and ratios.get("plain") and (own := 1 / ratios["plain"]) > floor.own:
        found.append(f"{own:.2f} of our time without the features, at most {floor.own:.2f}")
    return found


def check(case: Case) -> list[str]:
    """Say which of our results are further from the float64 reference than allowed.

    Allowed is twice the error of the reference in the case's dtype, plus EPSILON. Attention is called on the whole case
    and compared on the leading heads of the first batch. A head's dropout mask depends only on its number, so a
    leading part has the mask of the whole. The operations of a training step are checked by their own cases.
    """
    if case.operation == "training_step":
        return []
    operation = OPERATIONS[case.operation]
    tensors, others = operation.operands(case)
    seed = torch.tensor([2017, 6])
    generator = torch.Generator().manual_seed(2017)
    grad = torch.randn(tensors[0].shape, generator=generator)  # every output has the first operand's shape
    heads = _checked_heads(case)

    def leading(tensor: Tensor) -> Tensor:
        return tensor[:1, :heads] if heads else tensor

    def results(backend: str | None, operands: list[Tensor], grad: Tensor, others: Mapping[str, Any]) -> list[Tensor]:
        operands = [tensor.detach().requires_grad_(case.backward) for tensor in operands]
        with nullcontext() if backend is None else fastattn.backend(backend):
            out = operation.call(case, *operands, seed=seed, **others)
            gradients = torch.autograd.grad(out, operands, grad.to(out.dtype)) if case.backward else ()
        return [out.detach(), *gradients]

    def reference(dtype: torch.dtype | None) -> list[Tensor]:
        operands = [leading(tensor).to(dtype or tensor.dtype) for tensor in tensors]
        return results("reference", operands, leading(grad), {name: value[:1] for name, value in others.items()})

    actual = [leading(tensor) for tensor in results(None, tensors, grad, others)]
    truth = reference(torch.float64)
    scales = [exact.abs().max().item() for exact in truth]
    if case.operation == "attention":  # dQ and dK cancel: with one key they are 0, as differences of numbers like dV's
        scales[1:] = [max(scales)] * (len(scales) - 1)
    found = []
    for index, (ours, plain, exact, scale) in enumerate(zip(actual, reference(None), truth, scales, strict=True)):
        allowed = 2 * (plain.double() - exact).abs().max().item() + EPSILON[case.dtype] * scale
        error = (ours.double() - exact).abs().max().item()
        if not error <= allowed:
            what = f"gradient of operand {index - 1}" if index else "output"
            found.append(f"{what} is off by {error:.3g}, allowed {allowed:.3g} (largest element {scale:.3g})")
    return found


def _checked_heads(case: Case) -> int:
    """Return how many heads of the first batch `check` compares; 0 for row operations, which are compared whole."""
    if case.operation != "attention":
        return 0
    _, heads, length, _ = case.shape
    return max(1, min(heads, CHECKED_SCORES // (length * (case.keys or length))))
