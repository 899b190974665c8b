"""The table of backends, the choice among them, ``backend()`` and ``explain()``.

A backend is a namespace of plain functions (no autograd, no checks, canonical shapes) with the
names and signatures that ``docs/design.md`` lists. Choosing one reads the operands' device, dtypes and
sizes, and the backend that this thread may have been told to use; torch's dispatcher has no part in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor

from fastattn.backends import native, reference

MAX_HEAD_SIZE = 256
MAX_DECODING_QUERIES = 16  # the cuda backend's attention is for decoding
MAX_DECODING_KEYS = 2**29  # it counts keys and rows of queries in 32 bits
MAX_DECODING_ROWS = 2**31 - 1
MAX_POSITIONS = 2**31 - 2**16  # queries and keys of a sequence that triton adds up in 32 bits; not of packed ones
OLDEST_GPU = (8, 0)
_NATIVE_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
_MASK_DTYPES = _NATIVE_DTYPES | {torch.bool}

# The most specialised first; the reference serves everything. What is not named here is taken only when forced.
_ORDER = {"cpu": ("cpu", "reference"), "cuda": ("cuda", "triton", "reference")}
_NAMES = ("cpu", "cuda", "triton", "reference")
_functorch_level = torch._C._functorch.peek_interpreter_stack
_DEVICES = {"cpu": "cpu", "cuda": "cuda", "triton": "cuda"}


def _overloads(library: Any) -> SimpleNamespace:
    """The functions that a compiled library has, bound once: a packet would resolve its overload at each call."""
    return SimpleNamespace(
        **{name: getattr(library, name).default._op for name in reference.__all__ if hasattr(library, name)}
    )


class _Triton:
    """The functions of ``backends/triton``, imported with Triton when the first is needed."""

    def __getattr__(self, name: str) -> Any:
        function = getattr(importlib.import_module("fastattn.backends.triton"), name)
        setattr(self, name, function)  # the next access finds it without coming here
        return function


_CUDA_CAPABILITIES = native.capabilities()
TABLE: dict[str, Any] = {"reference": reference}
MISSING: dict[str, str] = {}  # why a backend is not in the table
if native.library("cpu") is not None:
    TABLE["cpu"] = _overloads(native.library("cpu"))
else:
    MISSING["cpu"] = f"its library is not loaded: {native.reason('cpu')}"
if native.library("cuda") is not None:
    TABLE["cuda"] = _overloads(native.library("cuda"))
else:
    MISSING["cuda"] = f"its library is not loaded: {native.reason('cuda')}"
if importlib.util.find_spec("triton") is None:
    MISSING["triton"] = "triton is not installed"
elif torch.version.hip is not None:
    MISSING["triton"] = "it is for NVIDIA GPUs, and this torch is built for AMD's"
else:
    TABLE["triton"] = _Triton()
_CPU_OPS = frozenset(vars(TABLE["cpu"])) if "cpu" in TABLE else frozenset()


def compiled(name: str) -> Callable[..., Any]:
    """A function of the compiled CPU library that belongs to the direct way (docs/design.md).

    It takes a plain call from the user's arguments to the result. Without the library no call is plain.
    """
    library = native.library("cpu")
    return _unavailable if library is None else getattr(library, name).default._op


def _unavailable(*args: Any) -> NoReturn:
    raise RuntimeError(f"fastattn: the compiled CPU library is not loaded: {MISSING['cpu']}")


class _Thread(threading.local):
    forced: str | None = None
    explaining: bool = False
    direct: bool = "cpu" in TABLE  # the compiled CPU kernels may be called without a choice


thread = _Thread()
_warned: set[str] = set()


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Which backend serves a call, and why each other would not.

    Attributes:
        op: name of the operation.
        backend: name of the backend that would run, None where the forced backend cannot.
        reasons: for every other backend, why it was not taken.
    """

    op: str
    backend: str | None
    reasons: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{self.op} runs on: {self.backend or 'no backend (this call raises)'}"]
        lines += [f"  not {name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join(lines)

    __repr__ = __str__


class _Explained(Exception):
    def __init__(self, explanation: Explanation) -> None:
        self.explanation = explanation


def is_interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on CPU tensors: for tests, and only where forced."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def refusal(
    name: str,
    op: str,
    operands: tuple[Tensor, ...],
    attn_mask: Tensor | None = None,
    head_size: int = 0,
    threshold: int = 0,
    siblings: tuple[Tensor, ...] = (),
) -> str | None:
    """Why backend ``name`` cannot run ``op`` on these operands, or None if it can; the arguments are ``choose``'s."""
    if name == "reference":
        return None
    device = operands[0].device
    if device.type != _DEVICES[name] and not (name == "triton" and device.type == "cpu" and is_interpreted()):
        return f"it takes {_DEVICES[name]} tensors, the operands are on {device.type}"
    for operand in operands:
        if operand.is_floating_point() and operand.dtype not in _NATIVE_DTYPES:
            return f"it takes float32, bfloat16 and float16, not {_short(operand.dtype)}"
    if attn_mask is not None and attn_mask.dtype not in _MASK_DTYPES:
        return f"it takes bool, float32, bfloat16 and float16 masks, not {_short(attn_mask.dtype)}"
    if head_size > MAX_HEAD_SIZE:
        return f"it takes head sizes up to {MAX_HEAD_SIZE}, not {head_size}"
    backend_ = TABLE.get(name)
    if backend_ is None:  # after the operands' own reasons: it would serve these if it were there
        return MISSING[name]
    if device.type == "cuda" and _capability(device) < OLDEST_GPU:
        oldest, found = (".".join(map(str, version)) for version in (OLDEST_GPU, _capability(device)))
        return f"it takes GPUs of compute capability {oldest} or newer, this one has {found}"
    if name == "cuda" and device.type == "cuda":
        capability = _capability(device)
        if not any(first <= capability <= last for first, last in _CUDA_CAPABILITIES):
            return "its library has no code for this GPU's compute capability, {}.{}".format(*capability)
    # Triton's has every operation; to look would import it, which torch.compile cannot trace.
    if name != "triton" and not hasattr(backend_, op):
        return f"it has no {op}"
    if name == "triton" and op in ("attention", "softmax_dropout"):
        positions = operands[0].size(2) + (siblings[0].size(2) if siblings else operands[0].size(3))
        if positions > MAX_POSITIONS:
            return f"it takes up to 2**31 - 2**16 queries and keys together, not {positions}"
    if name == "cuda" and op == "attention":
        batch, heads, queries = operands[0].shape[:3]
        if queries > MAX_DECODING_QUERIES:
            return f"it takes up to {MAX_DECODING_QUERIES} queries, not {queries}"
        if batch * heads * queries > MAX_DECODING_ROWS:
            return f"it takes up to 2**31 - 1 rows of queries, not {batch * heads * queries}"
        if siblings and siblings[0].size(2) > MAX_DECODING_KEYS:
            return f"it takes up to 2**29 keys, not {siblings[0].size(2)}"
        if threshold > 0:
            return "its attention has no dropout"
        if torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (*operands, *siblings, attn_mask)
        ):
            return "its attention has no gradient"
        if _functorch_level() is not None:  # inside vmap a tensor does not say whether a gradient is wanted
            return "its attention is not for functorch's transforms"
    return None


def choose(
    op: str,
    operands: tuple[Tensor, ...],
    attn_mask: Tensor | None = None,
    head_size: int = 0,
    threshold: int = 0,
    siblings: tuple[Tensor, ...] = (),
) -> str:
    """The backend's name for this call.

    Args:
        op: name of the operation in the table.
        operands: the tensors whose device and floating-point dtypes decide; the first one's device counts.
        attn_mask: the mask, whose dtype decides too.
        head_size: the largest head size, for attention.
        threshold: of attention's dropout, 0 for none.
        siblings: attention's key and value, or the key alone, of the query's dtype and device.

    Raises:
        RuntimeError: this thread is in ``backend(name)`` and ``name`` cannot serve the call.
    """
    call = op, operands, attn_mask, head_size, threshold, siblings
    if thread.explaining:
        _explain(*call)
    forced = thread.forced
    if forced is None and attn_mask is None and head_size <= MAX_HEAD_SIZE:  # the short way for small problems
        first = operands[0]
        if first.is_cpu and first.dtype in _NATIVE_DTYPES and len(operands) == 1 and op in _CPU_OPS:
            return "cpu"
    if forced is not None:
        reason = refusal(forced, *call)
        if reason is not None:
            raise RuntimeError(f'backend("{forced}") cannot run {op}: {reason}')
        return forced
    device = operands[0].device.type
    for name in _ORDER.get(device, ("reference",)):
        if refusal(name, *call) is None:
            if name == "reference":
                _warn_if_slow(device, call)
            return name
    raise AssertionError("the reference refuses nothing")


def _explain(op: str, operands: tuple[Tensor, ...], *rest: Any) -> NoReturn:
    refusals = {name: refusal(name, op, operands, *rest) for name in _NAMES}
    able = [name for name, reason in refusals.items() if reason is None]
    if thread.forced is None:
        order = _ORDER.get(operands[0].device.type, ("reference",))
        chosen: str | None = next(name for name in order if name in able)
        reasons = {name: reason or f"{chosen} is faster" for name, reason in refusals.items() if name != chosen}
    else:
        chosen = thread.forced if thread.forced in able else None
        reasons = {
            name: reason or f'this thread is in backend("{thread.forced}")'
            for name, reason in refusals.items()
            if name != chosen
        }
    raise _Explained(Explanation(op, chosen, reasons))


def _warn_if_slow(device: str, call: tuple[Any, ...]) -> None:
    """Once a device: there are faster kernels for this call, and this installation or machine lacks them."""
    if device in _warned or device == "meta" or torch.compiler.is_compiling():
        return
    reason: str | None = "fastattn has no kernels for this device"
    if device in _ORDER:
        fallback = _ORDER[device][-2]  # serves whatever those before it do
        reason = refusal(fallback, *call)
        if fallback in TABLE or reason != MISSING[fallback]:
            return
    _warned.add(device)
    warnings.warn(f"fastattn runs its plain PyTorch reference on {device} tensors, slowly: {reason}", stacklevel=4)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Force a backend in this thread: ``with fastattn.backend("reference"): ...``.

    A call inside the block that the backend cannot serve raises RuntimeError with the reason. The backward
    pass runs on the backend of its forward pass, inside the block or not.

    Args:
        name: ``"reference"``, ``"cpu"``, ``"triton"`` or ``"cuda"``.

    Raises:
        ValueError: no backend has this name.
    """
    if name not in _NAMES:
        raise ValueError(f"backend: name must be one of {', '.join(map(repr, _NAMES))}, got {name!r}")
    previous = thread.forced, thread.direct
    thread.forced, thread.direct = name, name == "cpu" and name in TABLE
    try:
        yield
    finally:
        thread.forced, thread.direct = previous


def explain(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Say which backend ``op(*args, **kwargs)`` would run on, and why each other would not. Nothing is computed.

    Args:
        op: a public function of fastattn, ``explain(fastattn.layer_norm, x, (512,))``, or a module built on them,
            of which the first operation reached is explained.
        *args, **kwargs: its arguments.

    Returns:
        Explanation: printable, with ``backend`` and ``reasons``.

    Raises:
        TypeError: ``op`` is not callable, or reaches no operation of fastattn.
        ValueError, TypeError: what ``op`` itself raises for bad arguments.
    """
    if not callable(op):
        raise TypeError(f"explain: op must be a function such as fastattn.layer_norm, got {op!r}")
    previous = thread.direct
    thread.explaining, thread.direct = True, False
    try:
        op(*args, **kwargs)
    except _Explained as explained:
        return explained.explanation
    finally:
        thread.explaining, thread.direct = False, previous
    raise TypeError(f"explain: {getattr(op, '__name__', op)} ran no operation of fastattn")
