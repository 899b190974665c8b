"""Runs a case: ours is checked against the reference, then timed against torch and against the machine's limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fastattn
from fastattn.bench import limits, memory, peers, training
from fastattn.bench.cases import OPERATIONS, Case, Floor
from fastattn.bench.timer import Ratio, Timing, interleave

CHECKED_SCORES = 1 << 22
"""Attention is checked on as many heads of the first batch as have this many scores in all (one head at least)."""

EPSILON = {torch.float64: 4e-15, torch.float32: 2e-6, torch.bfloat16: 4e-3}
"""Allowed beside twice the reference's own error, relative to the largest element: what a few roundings of intermediate
values make (half a unit in the last place is 1e-16, 6e-8 and 2e-3), so that a reference that happens to be exact does
not fail us."""

REGRESSION = 0.85
"""The share of a recorded ratio to torch that a later run must keep, unless ours takes no more than SLOWER times what
it took, in seconds and beside the limit: neighbouring runs on a quiet machine differ by 5-10 %, and where a virtual
machine's processors lie changes torch's speed in small cases by 1.4, in which ours has no part."""

SLOWER = 1.1

OTHERS = 0.10
"""The share of the processors that other programs may take of a measurement: half of its rounds do not count anyway."""

SPREAD = 0.30
"""How far apart the quartiles of a ratio may be, relative to its median; on a quiet machine 5 % is usual."""

LESS_THAN_LEFT = 0.98
"""How much less than its share of the plain case's arithmetic a case's time may be, in 3 of 4 samples: keys that are
skipped leave more of the cache to the others."""

IMPLAUSIBLE = {"arithmetic": 1.1, "copy": 10.0}
"""Shares of a limit beyond which it was the limit that was disturbed. A copy into fresh memory, which pays for its page
faults, may be beaten several times by what only reads, or finds its memory in place."""

SHARED = 0.7
"""The share of the machine's arithmetic below which a case's own limit tells that the processors lie on one core, where
those of a virtual machine may come to lie for a while: no counter shows it, and both together do what one did."""

RATED = 1e-3
"""Seconds from which the arithmetic limit runs at its full speed, so that it tells that."""

ATTEMPTS = 3
"""Times that a disturbed case is measured before it is reported as such."""

VISIBLE_LIMIT = 20e-6
"""Seconds below which a limit says nothing: calling the function that measures it costs as much."""


@dataclass(frozen=True)
class Result:
    """One case's figures.

    seconds: median per contestant. ratios: how many times as fast as each peer ours is. fraction: of the physical
    limit that ours reaches, which is `limited_by` "arithmetic" or "copy"; None where the limit is too short to be
    seen. own: our time in multiples of our time without the case's features. memory: bytes that a call of each
    contestant needs beside its operands, where they were measured. disturbed: by what, of a measurement whose figures
    say nothing. commit, date: of a result that was recorded.
    """

    name: str
    seconds: dict[str, float]
    ratios: dict[str, Ratio]
    fraction: Ratio | None = None
    limited_by: str = ""
    own: Ratio | None = None
    floor: Floor = field(default_factory=Floor)
    memory: dict[str, int] = field(default_factory=dict)
    disturbed: str = ""
    commit: str = ""
    date: str = ""

    def to_json(self) -> dict[str, Any]:
        """Without the floor, which is the case's, and without what is not known."""
        return {name: value for name, value in asdict(self).items() if name != "floor" and value not in (None, "", {})}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Result:
        def ratio(name: str) -> Ratio | None:
            return Ratio(**data[name]) if name in data else None

        return cls(
            name=data["name"],
            seconds=dict(data["seconds"]),
            ratios={name: Ratio(**value) for name, value in data["ratios"].items()},
            fraction=ratio("fraction"),
            limited_by=data.get("limited_by", ""),
            own=ratio("own"),
            memory=dict(data.get("memory", {})),
            disturbed=data.get("disturbed", ""),
            commit=data["commit"],
            date=data["date"],
        )


def ours(case: Case) -> Callable[[], Any]:
    """What is timed of ours."""
    if case.operation == "training_step":
        return training.contestants(case)["ours"]
    operation = OPERATIONS[case.operation]
    tensors, others = operation.operands(case)
    return step(case, partial(operation.call, case, **others), tensors)


def step(case: Case, function: Callable[..., Tensor], tensors: list[Tensor]) -> Callable[[], Any]:
    """`function(*tensors)`, and the gradients of all tensors where the case has a backward pass."""
    if not case.backward:
        return partial(function, *tensors)
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    grad = torch.randn_like(function(*tensors))

    def forward_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(*tensors), tensors, grad)

    return forward_backward


def contestants(case: Case, *, everyone: bool = False) -> dict[str, Callable[[], Any]]:
    """Ours, the peers, ours without the case's features where the floor asks, and the limits of the machine."""
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
        return functions  # a copy is not what limits products
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
    with_memory: bool = False,
    attempts: int = ATTEMPTS,
) -> Result:
    """Times `case` for about `budget` seconds a contestant; again, up to `attempts` times, while it is disturbed."""
    functions = contestants(case, everyone=everyone)
    for _ in range(attempts):
        result = summarise(case, interleave(functions, budget=budget * len(functions), rounds=rounds))
        if not result.disturbed:
            break
    if with_memory:
        grown = {name: memory.peak(functions[name]) for name in ("ours", *result.ratios)}
        result = replace(result, memory={name: size for name, size in grown.items() if size is not None})
    return result


def summarise(case: Case, timing: Timing) -> Result:
    bounds = {name: timing.seconds(name) for name in ("arithmetic", "copy") if name in timing.samples}
    limit = max((name for name in bounds if bounds[name] > VISIBLE_LIMIT), key=bounds.__getitem__, default="")
    rivals = [name for name in timing.samples if name not in ("ours", "plain", *bounds)]
    ratios = {name: timing.ratio(name, "ours") for name in rivals}
    result = Result(
        name=case.name,
        seconds={name: timing.seconds(name) for name in timing.samples},
        ratios=ratios,
        fraction=timing.ratio(limit, "ours") if limit else None,
        limited_by=limit,
        own=timing.ratio("ours", "plain") if "plain" in timing.samples else None,
        floor=case.floor,
    )
    disturbed = disturbance(result, timing.others, case.left) or slow_machine(case, result.seconds)
    return replace(result, disturbed=disturbed)


def disturbance(result: Result, others: float | None = None, left: float = 0.0) -> str:
    """What disturbed a measurement, or "": other programs at work, samples that disagree, or a figure that cannot be.

    Args:
        others: the share of the processors that other programs took.
        left: of the arithmetic of the case without its features, what they leave.
    """
    if by_others := disturbed_by(others):
        return by_others
    for peer, ratio in (("torch", result.ratios["torch"]), ("our time without the features", result.own)):
        if ratio and ratio.high - ratio.low > SPREAD * ratio.median:
            return f"quartiles of the ratio to {peer}: {ratio.low:.2f} and {ratio.high:.2f}"
    if result.own and result.own.high < LESS_THAN_LEFT * left:
        return f"{left:.0%} of the arithmetic took {result.own.median:.0%} of our time without the features"
    if result.fraction and result.fraction.median > IMPLAUSIBLE[result.limited_by]:
        return f"{result.limited_by}, the limit, took {result.fraction.median:.1f} times as long as ours"
    return ""


def slow_machine(case: Case, seconds: Mapping[str, float]) -> str:
    """Whether the machine did much less beside this case than it can: in words, or ""."""
    taken = seconds.get("arithmetic", 0.0)
    if taken < RATED:
        return ""
    rate = case.flops / taken
    fastest = limits.fastest[case.dtype] = max(rate, limits.fastest.get(case.dtype, 0.0))
    return f"the machine did {rate / fastest:.0%} of its arithmetic" if rate < SHARED * fastest else ""


def reviewed(case: Case, result: Result) -> Result:
    """`result`, disturbed where the machine has since done much more than beside it."""
    return result if result.disturbed else replace(result, disturbed=slow_machine(case, result.seconds))


def disturbed_by(others: float | None) -> str:
    """Whether other programs, with their share of the processors, disturbed a measurement: in words, or ""."""
    return f"other programs took {others:.0%} of the processors" if others is not None and others > OTHERS else ""


def below_floor(result: Result) -> dict[str, str]:
    """Which parts of its floor `result` does not reach: "limit", "torch", "own", each in words."""
    found = {}
    floor, torch_ratio = result.floor, result.ratios["torch"].median
    if floor.both and floor.fraction is not None and result.fraction and result.fraction.median < floor.fraction:
        found["limit"] = (
            f"{result.fraction.median:.0%} of the limit ({result.limited_by}), at least {floor.fraction:.0%}"
        )
    if floor.ratio is not None and torch_ratio < (least := attainable_ratio(result)):
        digits = 2 if f"{torch_ratio:.2f}" != f"{least:.2f}" else 3
        found["torch"] = f"{torch_ratio:.{digits}f} times as fast as torch, at least {least:.{digits}f}"
    if floor.own is not None and result.own and result.own.median > floor.own:
        found["own"] = f"{result.own.median:.2f} of our time without the features, at most {floor.own:.2f}"
    return found


def judged(result: Result, recorded: Result | None) -> tuple[list[str], list[str]]:
    """What condemns `result` beside what was recorded on a machine of this kind: a lost ratio, or a part of its floor
    that was reached. And what is known: a part that the recorded result misses too."""
    missed = below_floor(result)
    if recorded is None:
        return list(missed.values()), []
    before = below_floor(replace(recorded, floor=result.floor))
    condemned = [words for part, words in missed.items() if part not in before]
    known = [words for part, words in missed.items() if part in before]
    ratio, then = result.ratios["torch"].median, recorded.ratios["torch"].median
    if ratio < REGRESSION * then and (slower := _slower(result, recorded)):
        condemned.append(f"{ratio:.2f} times as fast as torch, {then:.2f} when it was recorded; {slower}")
    return condemned, known


def _slower(result: Result, recorded: Result) -> str:
    """How ours takes longer than when it was recorded, or "": in seconds, or beside the limit where all of the machine
    was slower then."""
    now, then = result.seconds["ours"], recorded.seconds["ours"]
    if now > SLOWER * then:
        return f"{now * 1e3:.3g} ms a call, {then * 1e3:.3g} then"
    if result.fraction and recorded.fraction and result.limited_by == recorded.limited_by == "arithmetic":
        share, before = result.fraction.median, recorded.fraction.median
        if before > SLOWER * share:
            return f"{share:.0%} of the limit (arithmetic), {before:.0%} then"
    return ""


def attainable_ratio(result: Result) -> float:
    """The floor's ratio to torch beside its overhead, or what its fraction of the limit is worth here if that is less.

    A ratio set on one machine can exceed limit / torch on another, where torch sits nearer to the limit.
    """
    floor = result.floor
    ratio = floor.ratio or 0.0
    if ratio and floor.overhead:
        ratio = 1 / (1 / ratio + floor.overhead / result.seconds["torch"])
    if floor.fraction is None or not result.fraction:
        return ratio
    return min(ratio, floor.fraction * result.seconds["torch"] / result.seconds[result.limited_by])


def check(case: Case) -> list[str]:
    """What of ours is further from the float64 reference than twice the reference in the case's dtype.

    Attention is called on the whole case and compared on the leading heads of the first batch: the dropout mask of a
    head depends on its number alone, so a leading part has the whole's mask.
    """
    if case.operation == "training_step":
        return training.check(case)
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
    """Heads of the first batch that `check` compares; 0 for the row operations, which are compared whole."""
    if case.operation != "attention":
        return 0
    _, heads, length, _ = case.shape
    return max(1, min(heads, CHECKED_SCORES // (length * (case.keys or length))))
