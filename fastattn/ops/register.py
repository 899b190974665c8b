"""The registration of torch ops, and the two ways to a kernel: through torch's dispatcher and past it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from fastattn.backends import TABLE, choose, thread
from fastattn.backends.common import is_recorded
from fastattn.backends.schema import SCHEMAS
from fastattn.ops.check import expanded_clone, unscriptable
from fastattn.torch_private import (
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
    single_level_autograd,
)

__all__ = ["decompositions"]

PLAIN = frozenset((Tensor, Parameter))  # other subclasses may intercept calls
_library = torch.library.Library("fastattn", "DEF")
_decompositions: dict[OperatorBase, Callable[..., Any]] = {}
_flops: dict[Any, Callable[..., int]] = {}


class Op:
    """A backend function as ``torch.ops.fastattn.<name>``, with autograd.

    Its schema is the backend function's with ``str backend`` appended. A call goes through torch's dispatcher if it is
    intercepted there: by torch.compile, fake tensors, torch.func or dispatch modes. Otherwise it goes straight to the
    backend's function, through the same ``autograd.Function`` if a gradient is needed.

    Args:
        name: name of the backend function.
        fake: takes the function's arguments, returns tensors with the results' shapes, dtypes and strides.
        setup_context: as in ``autograd.Function``; its ``inputs`` are the function's arguments.
        backward: as in ``autograd.Function``; returns the gradients of the leading arguments and may omit the rest.
            None for backward ops; only the reference backend can differentiate those.
        decompose: takes the function's arguments, returns its results by torch's own functions. Its threshold is 0.
        flops: takes the function's arguments, returns the floating-point operations that ``FlopCounterMode`` counts.
    """

    def __init__(
        self,
        name: str,
        fake: Callable[..., Any],
        setup_context: Callable[..., None] | None = None,
        backward: Callable[..., Any] | None = None,
        decompose: Callable[..., Any] | None = None,
        flops: Callable[..., int] | None = None,
    ) -> None:
        arguments, results = SCHEMAS[name].split(") ->")
        self.name = name
        labels = [argument.split()[-1] for argument in arguments.split(", ")]
        self._threshold = labels.index("threshold") if "threshold" in labels else None
        self._decompose = decompose
        self._tensors = arguments.count("Tensor")  # tensors come first
        self._is_backward = backward is None
        _library.define(f"{arguments}, str backend) ->{results}")
        _library.impl(name, self._run, "CompositeExplicitAutograd")
        _library.impl(name, self._differentiate, "Autograd")
        torch.library.register_fake(f"fastattn::{name}", lambda *args: fake(*args[:-1]), lib=_library)
        torch.library.register_vmap(f"fastattn::{name}", self._map, lib=_library)
        self._overload = getattr(torch.ops.fastattn, name).default
        self._apply = bind_apply(_autograd_function(name, setup_context, backward))
        if decompose is not None:
            _decompositions[self._overload] = self._decomposed
        if flops is not None:
            _flops[self._overload.overloadpacket] = lambda *args, out_val: flops(*args[:-1])

    def __call__(self, *args: Any) -> Any:
        """Return the results, from the chosen or the forced backend."""
        return self.on(choose(self.name, args), *args)

    def on(self, backend: str, *args: Any) -> Any:
        """Return the results, from this backend."""
        if is_observed():
            count_flops(_flops)
            if is_forward_mode() and backend == "reference":  # torch's operations differentiate in forward mode
                return TABLE[backend].FUNCTIONS[self.name](*args)
            return self._overload(*args, backend)
        wants_grad, grad_enabled = False, torch.is_grad_enabled()
        for arg in args[: self._tensors]:
            if type(arg) in PLAIN:
                if self._is_backward and is_batched_gradient(arg):
                    return self._overload(*args, backend)
                wants_grad = wants_grad or (grad_enabled and arg.requires_grad)
            elif isinstance(arg, Tensor):
                return self._overload(*args, backend)
        function = TABLE[backend].FUNCTIONS[self.name]
        if wants_grad and not (self._is_backward and backend == "reference"):
            return self._apply(*args, backend, function)
        return function(*args)

    def _run(self, *args: Any) -> Any:
        """Run the op below autograd."""
        return TABLE[args[-1]].FUNCTIONS[self.name](*args[:-1])

    def _map(self, info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        """Run the op inside vmap: one call per element, one after the other, each parallel over the processor."""
        batch = [arg.movedim(dim, 0) if isinstance(dim, int) else None for arg, dim in zip(args, in_dims, strict=True)]
        if info.batch_size == 0:  # one call of zeros gives the results' shapes and dtypes
            batch = [arg if arg is None else arg.new_zeros(1, *arg.shape[1:]) for arg in batch]
        calls = (
            [arg if of_call is None else of_call[i] for arg, of_call in zip(args, batch, strict=True)]
            for i in range(max(1, info.batch_size))
        )
        results = [self._overload(*call) for call in calls]
        if isinstance(results[0], Tensor):
            return torch.stack(results)[: info.batch_size], 0
        stacked = tuple(torch.stack(parts)[: info.batch_size] for parts in zip(*results, strict=True))
        return stacked, (0,) * len(stacked)

    def _differentiate(self, *args: Any) -> Any:
        """Run the op at the autograd key. torch.func's transforms ran above it, so this autograd has one level."""
        if self._decompose is not None and is_onnx_export():  # ONNX export has no table of decompositions
            return self._decomposed(*args)
        backend = args[-1]
        if self._is_backward and backend == "reference" and is_transformed():  # torch operations, differentiable
            return TABLE[backend].FUNCTIONS[self.name](*args[:-1])

        grad_enabled = torch.is_grad_enabled()

        def redispatch(*args: Any) -> Any:
            # An autograd.Function turns gradients off, and the transforms around it would then record none.
            with below_autograd(), torch.set_grad_enabled(grad_enabled):
                return self._overload(*args, backend)

        with single_level_autograd():
            return self._apply(*args, redispatch)

    def _decomposed(self, *args: Any) -> Any:
        """Compute the op by torch's own functions; ValueError with dropout."""
        if self._threshold is not None and args[self._threshold] > 0:
            raise ValueError(
                f"fastattn: {self.name} with dropout cannot be written in torch's own operations, whose dropout is "
                "another; export the model in evaluation (model.eval()), or with a probability of 0"
            )
        assert self._decompose is not None
        return self._decompose(*args[:-1])


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
    """Return whether gradients of these may be needed. If a call is observed, the observer decides that later."""
    return is_observed() or is_recorded(*tensors)


def save_call(ctx: Any, inputs: tuple[Any, ...], *results: Tensor) -> None:
    """Save ``results`` and the call's leading tensors for the backward pass, and its other arguments in
    ``ctx.settings``."""
    tensors = next((n for n, arg in enumerate(inputs) if not isinstance(arg, Tensor | None)), len(inputs))
    ctx.save_for_backward(*results, *inputs[:tensors])
    ctx.settings = inputs[tensors:]


def _autograd_function(
    name: str, setup_context: Callable[..., None] | None, backward: Callable[..., Any] | None
) -> type[SingleLevelFunction]:
    """Return the op's ``autograd.Function``.

    It takes the op's arguments, which end with the backend's name, and the function that computes the results.
    """

    class Function(SingleLevelFunction):
        @staticmethod
        def forward(*args: Any) -> Any:
            return args[-1](*args[:-2])

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.count, ctx.backend = len(inputs), inputs[-2]
            ctx.set_materialize_grads(False)
            if setup_context is not None:
                # A bool mask may be refilled before the backward pass, through numpy even unnoticed. Torch's function
                # keeps a float copy of it. Inference tensors cannot be saved.
                saved = (expanded_clone(arg) if _needs_copy(arg) else arg for arg in inputs[:-2])
                setup_context(ctx, tuple(saved), output)

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
