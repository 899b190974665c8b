"""The registration of torch ops, and the two ways to a kernel: through torch's dispatcher and past it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from fastattn._torch_private import (
    OperatorBase,
    SingleLevelFunction,
    below_autograd,
    bind_apply,
    count_flops,
    is_autocast_enabled,
    is_batched_gradient,
    is_forward_mode,
    is_observed,
    is_onnx_export,
    is_transformed,
    is_within_transform,
    single_level_autograd,
)
from fastattn.backends import TABLE, choose, thread
from fastattn.backends.common import is_recorded
from fastattn.backends.schema import RECORDS, SCHEMAS, TENSORS, AnyArgs, flatten, unflatten
from fastattn.ops.check import unscriptable
from fastattn.ops.copies import copy_op, expanded_copy

__all__ = ["decompositions"]

PLAIN = frozenset((Tensor, Parameter))  # other subclasses may intercept calls
_library = torch.library.Library("fastattn", "DEF")
_decompositions: dict[OperatorBase, Callable[..., Any]] = {copy_op: Tensor.clone}
_flops: dict[Any, Callable[..., int]] = {}
Args = TypeVar("Args", bound=AnyArgs)
Results = TypeVar("Results")


class Op(Generic[Args, Results]):
    """A backend function as ``torch.ops.fastattn.<name>``, with autograd.

    Its schema is the backend function's with ``str backend`` appended. A call goes through torch's dispatcher if it is
    intercepted there: by torch.compile, fake tensors, torch.func or dispatch modes. Otherwise it goes straight to the
    backend's function, through the same ``autograd.Function`` if a gradient is needed.

    Args:
        name: name of the backend function.
        fake: takes the function's record, returns tensors with the results' shapes, dtypes and strides.
        setup_context: takes autograd's ``ctx``, the record and the results, and saves what ``backward`` reads.
        backward: as in ``autograd.Function``; returns the gradients of the leading arguments and may omit the rest.
            None for backward ops; only the reference backend can differentiate those.
        decompose: takes the record, returns the function's results by torch's own functions. Its threshold is 0.
        flops: takes the record, returns the floating-point operations that ``FlopCounterMode`` counts.
    """

    def __init__(
        self,
        name: str,
        fake: Callable[[Args], Results],
        setup_context: Callable[[Any, Args, Results], None] | None = None,
        backward: Callable[..., Any] | None = None,
        decompose: Callable[[Args], Results] | None = None,
        flops: Callable[[Args], int] | None = None,
    ) -> None:
        arguments, results = SCHEMAS[name].split(") ->")
        self.name = name
        self._record = RECORDS[name]
        self._tensors = TENSORS[self._record]
        self._decompose = decompose
        self._is_backward = backward is None
        _library.define(f"{arguments}, str backend) ->{results}")
        _library.impl(name, self._run, "CompositeExplicitAutograd")
        _library.impl(name, self._differentiate, "Autograd")
        torch.library.register_fake(f"fastattn::{name}", lambda *flat: fake(self._args(flat)), lib=_library)
        torch.library.register_vmap(f"fastattn::{name}", self._map, lib=_library)
        self._overload = getattr(torch.ops.fastattn, name).default
        self._apply = bind_apply(_autograd_function(name, setup_context, backward))
        if decompose is not None:
            _decompositions[self._overload] = self._decomposed
        if flops is not None:
            _flops[self._overload.overloadpacket] = lambda *flat, out_val: flops(self._args(flat))

    def __call__(self, args: Args) -> Results:
        """Return the results, from the chosen or the forced backend."""
        return self.on(choose(self.name, args), args)

    def on(self, backend: str, args: Args) -> Results:
        """Return the results, from this backend."""
        flat = flatten(args)
        if is_observed():
            count_flops(_flops)
            if is_forward_mode() and backend == "reference":  # torch's operations differentiate in forward mode
                return TABLE[backend].FUNCTIONS[self.name](args)
            return self._overload(*flat, backend)
        wants_grad, grad_enabled = False, torch.is_grad_enabled()
        tensors = flat[: self._tensors]
        for arg in tensors:
            if type(arg) in PLAIN:
                if self._is_backward and is_batched_gradient(arg):
                    return self._overload(*flat, backend)
                wants_grad = wants_grad or (grad_enabled and arg.requires_grad)
            elif isinstance(arg, Tensor):
                return self._overload(*flat, backend)
        function = TABLE[backend].FUNCTIONS[self.name]
        if wants_grad and not (self._is_backward and backend == "reference"):
            return self._apply(*tensors, backend, function, args)
        return function(args)

    def _args(self, flat: tuple[Any, ...]) -> Args:
        """Return the record of a call of the op, whose last argument is the backend."""
        return unflatten(self._record, flat[:-1])

    def _run(self, *flat: Any) -> Results:
        """Run the op below autograd."""
        return TABLE[flat[-1]].FUNCTIONS[self.name](self._args(flat))

    def _map(self, info: Any, in_dims: tuple[Any, ...], *flat: Any) -> Any:
        """Run the op inside vmap: one call per element, one after the other, each parallel over the processor."""
        batch = [arg.movedim(dim, 0) if isinstance(dim, int) else None for arg, dim in zip(flat, in_dims, strict=True)]
        if info.batch_size == 0:  # one call of zeros gives the results' shapes and dtypes
            batch = [arg if arg is None else arg.new_zeros(1, *arg.shape[1:]) for arg in batch]
        calls = (
            [arg if of_call is None else of_call[i] for arg, of_call in zip(flat, batch, strict=True)]
            for i in range(max(1, info.batch_size))
        )
        results = [self._overload(*call) for call in calls]
        if isinstance(results[0], Tensor):
            return torch.stack(results)[: info.batch_size], 0
        stacked = tuple(torch.stack(parts)[: info.batch_size] for parts in zip(*results, strict=True))
        return stacked, (0,) * len(stacked)

    def _differentiate(self, *flat: Any) -> Any:
        """Run the op at the autograd key. torch.func's transforms ran above it, so this autograd has one level."""
        if self._decompose is not None and is_onnx_export():  # ONNX export has no table of decompositions
            return self._decomposed(*flat)
        backend = flat[-1]
        if self._is_backward and backend == "reference" and is_transformed():  # torch operations, differentiable
            return TABLE[backend].FUNCTIONS[self.name](self._args(flat))

        grad_enabled = torch.is_grad_enabled()

        def redispatch(args: Args) -> Any:
            # An autograd.Function turns gradients off, and the transforms around it would then record none.
            with below_autograd(), torch.set_grad_enabled(grad_enabled):
                return self._overload(*flatten(args), backend)

        with single_level_autograd():
            return self._apply(*flat[: self._tensors], backend, redispatch, self._args(flat))

    def _decomposed(self, *flat: Any) -> Results:
        """Compute the op by torch's own functions; ValueError with dropout."""
        args = self._args(flat)
        if getattr(args, "threshold", 0) > 0:
            raise ValueError(
                f"fastattn: {self.name} with dropout cannot be written in torch's own operations, whose dropout is "
                "another; export the model in evaluation (model.eval()), or with a probability of 0"
            )
        assert self._decompose is not None
        return self._decompose(args)


def decompositions() -> dict[OperatorBase, Callable[..., Any]]:
    """Return fastattn's operations in terms of torch's own, for ``torch.export``.

    ``exported.run_decompositions(fastattn.decompositions())`` gives a program that runs without fastattn. Attention
    becomes ``torch.nn.functional.scaled_dot_product_attention`` with all masks merged into one; fully masked rows are
    0. ``torch.onnx.export(dynamo=True)`` needs no table. Dropout above 0 raises ValueError.

    Returns:
        The decomposition of each forward op, as the table that ``run_decompositions`` takes.
    """
    return dict(_decompositions)


def may_want_gradient(*tensors: Tensor | None) -> bool:
    """Return whether gradients of these may be needed. If a call is observed, the observer decides that later.

    torch.compile decides at once, outside torch.func's transforms: it compiles a call again if its operands begin to
    require gradients.
    """
    if is_recorded(*tensors):
        return True
    if torch.compiler.is_dynamo_compiling() and not is_within_transform():
        return False
    return is_observed() and torch.is_grad_enabled()


def save_call(ctx: Any, args: Any, *results: Tensor) -> None:
    """Save a forward pass's record and ``results`` for its backward pass, which reads them by ``saved_call``."""
    record = type(args)
    tensors = TENSORS[record]
    ctx.save_for_backward(*args[:tensors], *results)
    ctx.record, ctx.settings = record, args[tensors:]


def saved_call(ctx: Any) -> tuple[Any, ...]:
    """Return the record and the results that ``save_call`` saved."""
    saved, tensors = ctx.saved_tensors, TENSORS[ctx.record]
    return ctx.record(*saved[:tensors], *ctx.settings), *saved[tensors:]


def _autograd_function(
    name: str, setup_context: Callable[..., None] | None, backward: Callable[..., Any] | None
) -> type[SingleLevelFunction]:
    """Return the op's ``autograd.Function``.

    It takes the op's tensors, for autograd to see, the backend's name, the function that computes the results, and the
    record.
    """

    class Function(SingleLevelFunction):
        @staticmethod
        def forward(*inputs: Any) -> Any:
            *_, function, args = inputs
            return function(args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            *tensors, ctx.backend, _, args = inputs
            ctx.count = len(inputs)
            ctx.set_materialize_grads(False)
            if setup_context is not None:
                if any(map(_needs_copy, tensors)):
                    args = args._make(expanded_copy(arg) if _needs_copy(arg) else arg for arg in args)
                setup_context(ctx, args, output)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            if backward is None:
                raise RuntimeError(
                    f"fastattn: {name} has no derivative on this backend (double backward); "
                    'run the forward pass inside fastattn.backend("reference"), where it has one'
                )
            # A gradient is sparse if an embedding with sparse=True reads the dropout's result as its weight.
            found = backward(ctx, *(grad.to_dense() if grad is not None and grad.is_sparse else grad for grad in grads))
            return *found, *(None,) * (ctx.count - len(found))

    Function.__name__ = Function.__qualname__ = f"fastattn_{name}"
    return Function


def _needs_copy(arg: Any) -> bool:
    """Return whether a backward pass needs a copy of an argument of its forward pass.

    A bool mask may be refilled before, through numpy even unnoticed; torch's function keeps a float copy of it.
    Inference tensors cannot be saved.
    """
    return isinstance(arg, Tensor) and (arg.dtype is torch.bool or arg.is_inference())


# Python types that a fast path accepts for each type of a schema.
_TYPES = {
    "Tensor": PLAIN,
    "Tensor?": PLAIN | {type(None)},
    "float": frozenset((float,)),
    "float?": frozenset((float, type(None))),
    "bool": frozenset((bool,)),
    "int[]": frozenset((tuple,)),
}


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def fast_path(name: str) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Decorate a public function: plain calls go to the compiled ``name`` with the user's own arguments.

    The compiled function checks the arguments itself. For a call that is not plain it returns None or raises, and the
    decorated function then serves the call or raises its own error. The fast path is skipped if a gradient is needed, a
    backend is forced, autocast is on, or the call is observed at torch's dispatcher.
    """
    compiled = TABLE["cpu"].FUNCTIONS.get(name)
    arguments = [argument.split() for argument in SCHEMAS[name].split("(")[1].split(")")[0].split(", ")]
    types = {label.split("=")[0]: _TYPES[kind] for kind, label in arguments}
    positional = tuple(types.values())
    required = sum("=" not in label for _, label in arguments)

    def is_plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if is_observed() or not required <= len(args) <= len(positional):
            return False
        given: Iterable[tuple[Any, Any]] = zip(args, positional, strict=False)
        if kwargs:
            given = itertools.chain(given, ((arg, types.get(label, ())) for label, arg in kwargs.items()))
        grad_enabled = torch.is_grad_enabled()
        for arg, kinds in given:
            kind = type(arg)
            if kind not in kinds or (grad_enabled and kind in PLAIN and arg.requires_grad):
                return False
            if kind is tuple and not all(type(number) is int for number in arg):
                return False
        return True

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        if compiled is None:
            return unscriptable(function)

        @functools.wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            if thread.forced is None and not thread.explaining and not is_autocast_enabled() and is_plain(args, kwargs):
                try:
                    result = compiled(*args, **kwargs)
                except RuntimeError:  # torch refuses the layout, or an argument that is given twice
                    result = None
                if result is not None:
                    return result
            return function(*args, **kwargs)

        return unscriptable(call)

    return decorate
