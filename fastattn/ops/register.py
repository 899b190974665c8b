"""The registration of torch ops, and the two ways to a kernel: through torch's dispatcher and past it."""

from __future__ import annotations

import ast
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

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
from fastattn.backends.schema import (
    RECORDS,
    RESULTS,
    RETURNED,
    SCHEMAS,
    TENSORS,
    AnyArgs,
    arguments,
    flatten,
    read_by_backward,
    unflatten,
)
from fastattn.ops.check import autocast_dtype
from fastattn.ops.copies import copy_op, expanded_copy

__all__ = ["decompositions"]

PLAIN = frozenset((Tensor, Parameter))  # other subclasses may intercept calls
PLAIN_OR_NONE = PLAIN | {type(None)}
_library = torch.library.Library("fastattn", "DEF")
_decompositions: dict[OperatorBase, Callable[..., Any]] = {copy_op: Tensor.clone}
_flops: dict[Any, Callable[..., int]] = {}
OPS: dict[str, Op[Any, Any]] = {}
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
        backward: name of the backend function that computes the gradients of the record's first tensors. It takes the
            results' gradients, arguments and results of the forward pass by their names, and ``wanted``. None for
            backward ops; only the reference backend can differentiate those.
        wanted: takes the record's tensors, and whether each needs a gradient; returns the backward function's last
            arguments, which say which gradients to compute. None if there are none.
        decompose: takes the record, returns the function's results by torch's own functions. Its threshold is 0.
        flops: takes the record, returns the floating-point operations that ``FlopCounterMode`` counts.
    """

    def __init__(
        self,
        name: str,
        fake: Callable[[Args], Results],
        backward: str | None = None,
        wanted: Callable[[Sequence[Any], Sequence[bool]], tuple[Any, ...]] | None = None,
        decompose: Callable[[Args], Results] | None = None,
        flops: Callable[[Args], int] | None = None,
    ) -> None:
        given, results = SCHEMAS[name].split(") ->")
        self.name = name
        self._record = RECORDS[name]
        self._tensors = TENSORS[self._record]
        self._decompose = decompose
        self._is_backward = backward is None
        self._accepted: set[tuple[type, ...]] = set()
        _library.define(f"{given}, str backend) ->{results}")
        _library.impl(name, self._run, "CompositeExplicitAutograd")
        _library.impl(name, self._differentiate, "Autograd")
        torch.library.register_fake(f"fastattn::{name}", lambda *flat: fake(self._args(flat)), lib=_library)
        torch.library.register_vmap(f"fastattn::{name}", self._map, lib=_library)
        self._overload = getattr(torch.ops.fastattn, name).default
        self.function = _autograd_function(name, backward, wanted)
        self._apply = bind_apply(self.function)
        OPS[name] = self
        if decompose is not None:
            _decompositions[self._overload] = self._decomposed
        if flops is not None:
            _flops[self._overload.overloadpacket] = lambda *flat, out_val: flops(self._args(flat))

    def __call__(self, args: Args) -> Results:
        """Return the results, from the chosen or the forced backend."""
        return self.on(choose(self.name, args), flatten(args))

    def on(self, backend: str, flat: Sequence[Any]) -> Results:
        """Return the results for a flattened record, from this backend."""
        if is_observed():
            count_flops(_flops)
            if is_forward_mode() and backend == "reference":  # torch's operations differentiate in forward mode
                return TABLE[backend].FUNCTIONS[self.name](unflatten(self._record, flat))
            return self._overload(*flat, backend)
        tensors = flat[: self._tensors]
        if not self._are_plain(tensors):
            return self._overload(*flat, backend)
        function = TABLE[backend].FUNCTIONS[self.name]
        if torch.is_grad_enabled() and not (self._is_backward and backend == "reference"):
            for tensor in tensors:
                if tensor is not None and tensor.requires_grad:
                    return self._apply(*tensors, backend, function, unflatten(self._record, flat))
        operation = getattr(function, "operation", None)
        return function(unflatten(self._record, flat)) if operation is None else operation(*flat)

    def _are_plain(self, tensors: Sequence[Any]) -> bool:
        """Return whether no tensor is of a subclass, which may intercept calls, or batched by the legacy vmap."""
        types = tuple(map(type, tensors))
        if types not in self._accepted:
            if not PLAIN_OR_NONE.issuperset(types):
                return False
            self._accepted.add(types)
        if self._is_backward:
            for gradient in tensors[:2]:
                if gradient is not None and is_batched_gradient(gradient):
                    return False
        return True

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

    Examples:
        >>> model = fastattn.LayerNorm(512)
        >>> exported = torch.export.export(model, (torch.randn(4, 512),))
        >>> portable = exported.run_decompositions(fastattn.decompositions())
        >>> any("fastattn" in str(node.target) for node in portable.graph.nodes)
        False
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


def _autograd_function(name: str, backward: str | None, wanted: Callable[..., tuple[Any, ...]] | None) -> Any:
    """Return the op's ``autograd.Function``.

    It takes the op's tensors, for autograd to see, the backend's name, the function that computes the results, and the
    record.
    """
    read = read_by_backward(name, backward) if backward else []
    there = [label for label, _ in arguments(RECORDS[name])] + RESULTS[name]
    select = operator.itemgetter(*(there.index(label) for label, _ in read)) if read else tuple
    saved = sum(kind.startswith("Tensor") for _, kind in read)
    gradients = len(RESULTS[name]) if backward is None else _gradients(backward)

    class Function(SingleLevelFunction):
        derivative: str | None = None  # the backward function
        count = gradients  # the number of gradients that it takes

        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            *given, ctx.backend, function, args = inputs
            found = function(args)
            if any(map(_needs_copy, given)):
                args = args._make(expanded_copy(arg) if _needs_copy(arg) else arg for arg in args)
            outputs = (found,) if isinstance(found, Tensor) else found
            ctx.mark_non_differentiable(*outputs[gradients:])
            if backward is not None:
                Function.keep(ctx, given, select((*args, *outputs)))
            return found

        @staticmethod
        def keep(ctx: Any, tensors: Sequence[Any], read: Sequence[Any]) -> None:
            """Keep what the backward function reads of a call with these tensors."""
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*read[:saved])
            ctx.settings = read[saved:] if wanted is None else (*read[saved:], *wanted(tensors, ctx.needs_input_grad))

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            if backward is None:
                raise RuntimeError(
                    f"fastattn: {name} has no derivative on this backend (double backward); "
                    'run the forward pass inside fastattn.backend("reference"), where it has one'
                )
            kept = ctx.saved_tensors
            # A gradient is sparse if an embedding with sparse=True reads the dropout's result as its weight.
            given = [grad.to_dense() if grad is not None and grad.is_sparse else grad for grad in grads[:gradients]]
            given += [None] * (gradients - len(given))
            if given[0] is None:
                if all(grad is None for grad in given):
                    return (None,) * len(ctx.needs_input_grad)
                given[0] = torch.zeros_like(kept[0])
            return Function.selected(ctx, OPS[backward].on(ctx.backend, (*given, *kept, *ctx.settings)))

        @staticmethod
        def selected(ctx: Any, found: Any) -> tuple[Tensor | None, ...]:
            """Return the gradients that are needed, and None for all other inputs."""
            found = (found,) if isinstance(found, Tensor) else found
            needs = ctx.needs_input_grad
            return tuple([grad if needed else None for grad, needed in itertools.zip_longest(found, needs)])

    Function.derivative = backward
    return _named(Function, name)


def _named(function: Any, name: str) -> Any:
    """Return the function under the op's name, by which errors, profiles and anomaly mode name the node."""
    return type(function)(f"fastattn_{name}", (function,), {})


def _gradients(backward: str) -> int:
    """Return how many gradients a backward function takes."""
    labels = [label for label, _ in arguments(RECORDS[backward])]
    return sum(label.startswith("grad_") for label in labels) or 1  # dropout is its own backward function


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
    "int": frozenset((int,)),
    "bool": frozenset((bool,)),
    "ScalarType?": frozenset((torch.dtype, type(None))),
}


# By operation: the library functions for CPU tensors, which tests replace, and those of any backend.
FAST_PATHS: dict[str, tuple[dict[str, Any], Callable[[str], Any]]] = {}


def fast_path(name: str, *, is_cast: bool = False, widened: int | None = None) -> Callable[..., Any]:
    """Return a function for plain calls: one call of compiled code, with autograd's node if a gradient is needed.

    It takes the record's tensors and the settings of the operation's ``NAME_fast`` in the schema; the last ones may be
    left out. It returns that function's results. For a call that is not plain it returns None, or None for each result;
    the public function then serves the call, or raises the error. docs/design.md says what is plain.

    Args:
        name: name of the operation.
        is_cast: whether autocast casts the operands to 16 bits.
        widened: the argument that autocast casts to float32 on CUDA.
    """
    labels, kinds, defaults = _fast_arguments(f"{name}_fast")
    tensors, required = TENSORS[RECORDS[name]], len(labels) - len(defaults)
    mask = labels.index("attn_mask") if "attn_mask" in labels else None
    accepted: set[tuple[type, ...]] = set()
    usual = _usual_calls(name, labels, required, defaults)

    @functools.cache
    def road(backend: str) -> tuple[Callable[..., Any], ...] | None:
        """Return a library's functions: without a gradient, for usual calls, and the maker of autograd's."""
        compiled = TABLE[backend].compiled().get(f"{name}_fast")
        if compiled is None:
            return None
        for_usual = TABLE[backend].compiled().get(f"{name}_fast_usual", compiled)
        return compiled, for_usual, functools.cache(functools.partial(_plain_apply, name, backend))

    def accept(types: tuple[type, ...]) -> bool:
        """Return whether these types are the schema's, and keep them if they are. A bool is no integer."""
        if not all(kind in allowed for kind, allowed in zip(types, kinds, strict=False)):
            return False
        accepted.add(types)
        return True

    def call(*values: Any) -> Any:
        if thread.forced is not None or thread.explaining or is_observed():
            return None
        types = tuple(map(type, values))
        if types not in accepted and not accept(types):
            return None
        functions = roads["cpu"] if values[0].is_cpu else on_gpu(values)
        if functions is None:
            return None
        compiled, for_usual, differentiated = functions
        if is_cast and is_autocast_enabled() and autocast_dtype(values[0]) not in (None, values[0].dtype):
            return None
        if mask is not None and values[mask] is not None and values[mask].dim() < 4:
            values = *values[:mask], _of_four_dimensions(values[mask]), *values[mask + 1 :]
        if torch.is_grad_enabled():
            for value in values[:tensors]:
                if value is not None and value.requires_grad:
                    return differentiated()(*values)
        try:
            given = usual.get(values[required:])
            if given is None:
                return compiled(*values)
            return for_usual(*values[:required], *given)
        except RuntimeError:  # torch refuses the layout, or the bindings packed sequences
            return None

    roads, on_gpu = {"cpu": road("cpu")}, _roads_of_gpus(name, road, widened)
    FAST_PATHS[name] = roads, road
    return call


def _roads_of_gpus(
    name: str, road: Callable[[str], tuple[Callable[..., Any], ...] | None], widened: int | None
) -> Callable[[tuple[Any, ...]], tuple[Callable[..., Any], ...] | None]:
    """Return a function that chooses the library for a call on CUDA tensors, and returns its functions or None."""

    @functools.cache
    def on_device(device: torch.device) -> list[tuple[Callable[..., bool], Any]]:
        """Return the functions of each library for a GPU, with what says whether it serves a call."""
        found = [(TABLE[backend].plain(name, device), road(backend)) for backend in ("cuda", "triton")]
        return [(serves, functions) for serves, functions in found if serves is not None and functions is not None]

    def on_gpu(values: tuple[Any, ...]) -> tuple[Callable[..., Any], ...] | None:
        if widened is not None and is_autocast_enabled() and values[widened].dtype is not torch.float32:
            return None
        for serves, functions in on_device(values[0].device):
            if serves(values):
                return functions
        return None

    return on_gpu


def _fast_arguments(name: str) -> tuple[list[str], list[frozenset[Any]], tuple[Any, ...]]:
    """Return the names of a function's arguments, the types that each accepts, and the defaults of the last ones."""
    given = [argument.split() for argument in SCHEMAS[name].split("(")[1].split(")")[0].split(", ")]
    defaults = [label.split("=")[1] for _, label in given if "=" in label]
    labels = [label.split("=")[0] for _, label in given]
    return labels, [_TYPES[kind] for kind, _ in given], tuple(map(ast.literal_eval, defaults))


def _usual_calls(
    name: str, labels: list[str], required: int, defaults: tuple[Any, ...]
) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """Return the usual values of the arguments after the required ones, each with those that the compiled function for
    usual calls takes. Usual are the defaults, and True for a flag that ``NAME_fast_usual`` has."""
    usual: dict[tuple[Any, ...], tuple[Any, ...]] = {defaults[:count]: () for count in range(len(defaults) + 1)}
    for flag in _fast_arguments(f"{name}_fast_usual")[0][required:] if f"{name}_fast_usual" in SCHEMAS else ():
        at = labels.index(flag) - required
        for count in range(at + 1, len(defaults) + 1):
            given = *defaults[:at], True, *defaults[at + 1 : count]
            usual[given] = (True,)
    return usual


def _of_four_dimensions(mask: Tensor) -> Tensor:
    """Return a mask of fewer than 4 dimensions with leading dimensions of 1 if it is strided, else as it is."""
    if mask.layout is not torch.strided or mask.is_nested:
        return mask
    return mask[(None,) * (4 - mask.dim())]


def _plain_apply(name: str, backend: str) -> Callable[..., Any]:
    """Return the ``apply`` of a function of autograd whose inputs are the arguments of a fast path on this backend.

    It returns what the fast path returns.
    """
    function, tensors, returned = OPS[name].function, TENSORS[RECORDS[name]], RETURNED.get(name, 1)
    functions = TABLE[backend].compiled()
    compiled, differentiate = functions[f"{name}_fast_saving"], functions[function.derivative].operation
    is_hooked = TABLE[backend].hooks() if backend == "triton" else bool
    absent = (None,) * (function.count - returned)

    class Plain(function):  # type: ignore[misc, valid-type]  # mypy requires a base known before the program runs
        @staticmethod
        def forward(ctx: Any, *values: Any) -> Any:
            for value in values[:tensors]:
                if value is not None and value.is_inference():  # cannot be saved
                    return None
            try:
                found = compiled(*values)
            except RuntimeError:
                return None
            if found[0] is not None:
                function.keep(ctx, values, found[returned:])
            return found[0] if returned == 1 else found[:returned]

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            if torch.is_grad_enabled() or is_observed() or is_hooked() or not _are_plain_gradients(*grads):
                ctx.backend = backend
                return function.backward(ctx, *grads)
            saved = ctx.saved_tensors  # once: hooks may refuse to unpack them again
            try:
                found = differentiate(*grads, *absent, *saved, *ctx.settings)
            except RuntimeError:  # the usual backward pass has other kernels, and words the errors
                found = OPS[function.derivative].on(backend, (*grads, *absent, *saved, *ctx.settings))
            return function.selected(ctx, found)

    return bind_apply(_named(Plain, name))


def _are_plain_gradients(first: Tensor | None, *others: Tensor | None) -> bool:
    """Return whether a library takes these gradients: ordinary tensors, or None for one behind the first."""
    return _is_plain_gradient(first) and (not others or all(g is None or _is_plain_gradient(g) for g in others))


def _is_plain_gradient(grad: Tensor | None) -> bool:
    return type(grad) is Tensor and not grad.is_sparse and not is_batched_gradient(grad)
