"""The backends, the choice among them, ``backend()`` and ``explain()``.

A backend is a package with three names. ``FUNCTIONS`` holds its backend functions (``schema.py``). ``MISSING`` says why
it is not available, or is "". ``refusal(op, args)`` returns why it does not serve a call, or None.

The choice depends on the operands' device, dtypes and sizes, and on the backend that this thread forces. torch's
dispatcher never chooses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from fastattn.backends import cpu, cuda, reference, triton
from fastattn.backends.common import device_of
from fastattn.backends.schema import AnyArgs, AttentionArgs

__all__ = ["backend", "checkpoint_contexts", "explain"]

TABLE: dict[str, Any] = {"cpu": cpu, "cuda": cuda, "triton": triton, "reference": reference}
# Backends by device, in order of preference. The reference follows them and serves everything. The last of each tuple
# serves every call that the others serve. Other backends run only if they are forced.
_ORDER = {"cpu": ("cpu",), "cuda": ("cuda", "triton")}


def _order(args: AnyArgs) -> tuple[str, ...]:
    """Return the order of preference. On a GPU, `cuda` is first if the host's launch dominates, otherwise `triton`.
    Calls that `cuda` withholds leave it out."""
    device = device_of(args).type
    if device == "cuda" and cuda.withheld(args):
        return _ORDER[device][1:]
    if device == "cuda" and not cuda.is_bound_by_host(args):
        return _ORDER[device][::-1]
    return _ORDER.get(device, ())


class _Thread(threading.local):
    forced: str | None = None
    explaining: bool = False

    def __init__(self) -> None:
        self.outer: list[str | None] = []  # what was forced around the recomputations that are going on


thread = _Thread()
_warned: set[str] = set()


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The backend that serves a call, and why each other one would not.

    Attributes:
        op: name of the operation.
        backend: name of the backend that would run, or None if the forced backend cannot.
        reasons: for every other backend, why it was not taken.

    Examples:
        >>> with fastattn.backend("reference"):
        ...     explanation = fastattn.explain(fastattn.dropout, torch.ones(8))
        >>> explanation.backend, explanation.reasons["cpu"]
        ('reference', 'this thread is in backend("reference")')
    """

    op: str
    backend: str | None
    reasons: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{self.op} runs on: {self.backend or 'no backend (this call raises)'}"]
        lines += [f"  not {name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join(lines)

    __repr__ = __str__


class _Explained(BaseException):
    """The exception that ends the explained call; a module's own ``except Exception`` must not stop it."""

    def __init__(self, explanation: Explanation) -> None:
        self.explanation = explanation


def choose(op: str, args: AnyArgs) -> str:
    """Return the name of the backend for a call of the backend function ``op`` with this record.

    Raises:
        RuntimeError: this thread is in ``backend(name)`` and ``name`` cannot serve the call.
    """
    if thread.explaining:
        _explain(op, args)
    if thread.forced is not None:
        reason = TABLE[thread.forced].refusal(op, args)
        if reason is not None:
            raise RuntimeError(f'backend("{thread.forced}") cannot run {op}: {reason}')
        return thread.forced
    for name in _order(args):
        if TABLE[name].refusal(op, args) is None:
            return name
    _warn_if_slow(device_of(args).type, op, args)
    return "reference"


def has_kernels(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether a backend other than the reference serves attention of these, or a backend is forced."""
    args = AttentionArgs(
        query=query, key=key, value=value, attn_mask=None, key_lengths=None, seed=None, scale=1.0, window_left=0,
        window_right=0, lower_right=False, threshold=0, keep_residual=False,
    )  # fmt: skip
    order = _ORDER.get(query.device.type)
    return thread.forced is not None or (order is not None and TABLE[order[-1]].refusal("attention", args) is None)


def reads_residual(query: Tensor, keys: int) -> bool:
    """Return whether attention's backward pass may read the residual of a call with at most so many keys per row."""
    is_on_cpu = query.device.type == "cpu" and thread.forced in (None, "cpu", "reference")  # the reference reads none
    return keys > cpu.WHOLE_ROW or not is_on_cpu


def _explain(op: str, args: AnyArgs) -> NoReturn:
    refusals = {name: backend.refusal(op, args) for name, backend in TABLE.items()}
    if thread.forced is None:
        refusals["cuda"] = refusals["cuda"] or cuda.withheld(args)
    able = [name for name, reason in refusals.items() if reason is None]
    if thread.forced is None:
        order = *_order(args), "reference"
        chosen: str | None = next(name for name in order if name in able)
        otherwise = f"{chosen} is faster"
    else:
        chosen = thread.forced if thread.forced in able else None
        otherwise = f'this thread is in backend("{thread.forced}")'
    reasons = {name: reason or otherwise for name, reason in refusals.items() if name != chosen}
    raise _Explained(Explanation(op, chosen, reasons))


def _warn_if_slow(device: str, op: str, args: AnyArgs) -> None:
    """Warn once per device if this installation or machine lacks faster kernels that would serve the call."""
    if device in _warned or device == "meta" or torch.compiler.is_compiling():
        return
    reason = "fastattn has no kernels for this device"
    if device in _ORDER:
        fallback = TABLE[_ORDER[device][-1]]  # serves every call that the backends before it serve
        reason = fallback.MISSING
        if not reason or fallback.refusal(op, args) != reason:
            return
    _warned.add(device)
    warnings.warn(f"fastattn runs its plain PyTorch reference on {device} tensors, slowly: {reason}", stacklevel=5)


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Force a backend in this thread: ``with fastattn.backend("reference"): ...``.

    A call inside the block that the backend cannot serve raises RuntimeError with the reason. The backward pass of a
    call runs on the backend of that call, inside the block or not.

    ``torch.utils.checkpoint`` computes a function again in the backward pass, after the block. Its recomputation runs
    on the same backend if it is given ``context_fn=fastattn.checkpoint_contexts``. With ``use_reentrant=True``, which
    has no ``context_fn``, decorate the function: ``checkpoint(backend("reference")(function), x, use_reentrant=True)``.

    Args:
        name: ``"reference"``, ``"cpu"``, ``"triton"`` or ``"cuda"``.

    Raises:
        ValueError: no backend has this name.

    Examples:
        >>> x = torch.randn(4, 512)
        >>> with fastattn.backend("reference"):
        ...     wanted = fastattn.layer_norm(x, (512,))
        >>> torch.testing.assert_close(fastattn.layer_norm(x, (512,)), wanted)
    """
    if not isinstance(name, str) or name not in TABLE:
        raise ValueError(f"backend: name must be one of {', '.join(map(repr, TABLE))}, got {name!r}")
    previous = thread.forced
    thread.forced = name
    try:
        yield
    finally:
        thread.forced = previous


class _Recomputation(contextlib.AbstractContextManager[None]):
    """Context of a recomputation: the backend of its forward pass, None for the usual choice.

    It is entered again for each backward pass of a graph, and by whichever thread of autograd computes it.
    """

    def __init__(self, name: str | None) -> None:
        self._name = name

    def __enter__(self) -> None:
        thread.outer.append(thread.forced)
        thread.forced = self._name

    def __exit__(self, *error: object) -> None:
        thread.forced = thread.outer.pop()


def checkpoint_contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """Carry ``backend(name)`` into the recomputation of ``torch.utils.checkpoint``.

    ``checkpoint(function, x, use_reentrant=False, context_fn=fastattn.checkpoint_contexts)``, called inside the block,
    computes the function again on the block's backend, wherever the backward pass is called. Outside a block the
    recomputation chooses as the forward pass does, also if the backward pass is called inside one.

    Each checkpoint needs it, a nested one too. A function of ``torch.compile`` holds its backend, so a checkpoint
    inside it needs no ``context_fn``, and torch refuses this one there. ``checkpoint_sequential`` takes none.

    Returns:
        The contexts of the forward pass and of the recomputation, as ``context_fn`` returns them.

    Examples:
        >>> from torch.utils.checkpoint import checkpoint
        >>> x = torch.randn(4, 512, requires_grad=True)
        >>> with fastattn.backend("reference"):
        ...     out = checkpoint(
        ...         fastattn.softmax_dropout, x, use_reentrant=False, context_fn=fastattn.checkpoint_contexts
        ...     )
        >>> out.sum().backward()
    """
    return contextlib.nullcontext(), _Recomputation(thread.forced)


def explain(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Say which backend ``op(*args, **kwargs)`` would run on, and why each other one would not.

    The operation is not run, no random numbers are drawn, and a cache stays as it is. A module's forward runs up to its
    first operation of fastattn. What it changes until then stays changed: in training, ``spectral_norm`` of a parameter
    that it reads advances its buffers.

    Args:
        op: a public function of fastattn, ``explain(fastattn.layer_norm, x, (512,))``, or a module built on them. The
            first operation that a module reaches is explained.
        *args, **kwargs: its arguments.

    Returns:
        An ``Explanation``, printable, with ``backend`` and ``reasons``.

    Raises:
        TypeError: ``op`` is not callable, or reaches no operation of fastattn.
        ValueError, TypeError: ``op`` itself raises them for bad arguments.

    Examples:
        >>> x = torch.randn(4, 512, dtype=torch.float64)
        >>> fastattn.explain(fastattn.layer_norm, x, (512,)).backend
        'reference'
    """
    if not callable(op):
        raise TypeError(f"explain: op must be a function such as fastattn.layer_norm, got {op!r}")
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    thread.explaining = True
    try:
        with torch.random.fork_rng(devices):
            op(*args, **kwargs)
    except _Explained as explained:
        return explained.explanation
    finally:
        thread.explaining = False
    raise TypeError(f"explain: {getattr(op, '__name__', op)} ran no operation of fastattn")
