"""How an operation becomes a torch op: schema, fake, autograd, and the shortest way from Python to the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.nn import Parameter

from fastattn.backends import TABLE, thread

_is_compiling, _is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled  # a name less to look up
_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_transformed = torch._C._are_functorch_transforms_active
_PLAIN = frozenset((Tensor, Parameter))  # a subclass may have its own idea of a call
_library = torch.library.Library("fastattn", "DEF")


class Op:
    """One operation of the table as ``torch.ops.fastattn.<name>``.

    The schema is the backend function's with ``str backend`` appended. Inside the op the table picks that backend's
    plain function. Calls go through torch's dispatcher only where somebody listens there (torch.compile, fake
    tensors, functorch, dispatch modes); otherwise straight to the function, by way of autograd if a gradient is wanted.

    Args:
        schema: ``name(arguments) -> results`` without the backend.
        fake: takes the schema's arguments, returns tensors with the results' shapes, dtypes and strides.
        setup_context, backward: as of ``torch.autograd.Function``; without them the op is a backward pass itself,
            which is differentiable on the reference alone.
    """

    def __init__(
        self,
        schema: str,
        fake: Callable[..., Any],
        setup_context: Callable[..., None] | None = None,
        backward: Callable[..., Any] | None = None,
    ) -> None:
        name, arguments = schema.split("(", 1)
        arguments, results = arguments.rsplit(") ->", 1)
        self.name = name
        _library.define(f"{name}({arguments}, str backend) ->{results}")
        _library.impl(name, self._run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fastattn::{name}", lambda *args: fake(*args[:-1]), lib=_library)
        self._overload = getattr(torch.ops.fastattn, name).default
        self._tensors = arguments.count("Tensor")  # they come first
        self._apply = plain_apply(_autograd_function(name, self._below_autograd, setup_context, backward))
        self._apply_plain = plain_apply(_autograd_function(name, self._run, setup_context, backward))
        _library.impl(name, self._differentiate, "Autograd")

    def __call__(self, backend: str, *args: Any) -> Any:
        if _is_observed():
            return self._overload(*args, backend)
        grad, wants_grad = _is_grad_enabled(), False
        for arg in args[: self._tensors]:
            kind = type(arg)
            if kind is Tensor or kind is Parameter:
                if grad and arg.requires_grad:
                    wants_grad = True
            elif arg is not None and isinstance(arg, Tensor):  # a subclass, which may have its own idea of the call
                return self._overload(*args, backend)
        if wants_grad:
            return self._differentiate_plain(*args, backend)
        return getattr(TABLE[backend], self.name)(*args)

    def _run(self, *args: Any) -> Any:
        return getattr(TABLE[args[-1]], self.name)(*args[:-1])

    def _differentiate(self, *args: Any) -> Any:
        # functorch's transforms are above this key and have had their turn; of a transform that differentiates, this
        # is the autograd of one level, which ``apply`` would hand back to functorch.
        with enable_single_level_autograd_function():
            return self._apply(*args)

    def _differentiate_plain(self, *args: Any) -> Any:
        return self._apply_plain(*args)

    def _below_autograd(self, *args: Any) -> Any:
        if _is_plain(args):
            return self._run(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return self._overload(*args)


def wants_gradient(*operands: Tensor | None) -> bool | None:
    """Whether a call that may take the direct way wants a gradient; None where it may not take it.

    It may not where somebody watches it or asks for another backend, or away from the CPU.
    """
    if not thread.direct or _is_observed():
        return None
    wanted = False
    for operand in operands:
        if type(operand) in _PLAIN:
            wanted = wanted or operand.requires_grad  # type: ignore[union-attr]
        elif operand is not None:
            return None
    return wanted and _is_grad_enabled() if getattr(operands[0], "is_cpu", False) else None


def is_plain_backward(grad_out: Tensor) -> bool:
    """Whether a backward pass may take the direct way: nobody differentiates it (create_graph) or watches it."""
    return not _is_grad_enabled() and not _is_observed() and type(grad_out) in _PLAIN


def plain_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` for calls that nobody transforms: without what functorch needs, a signature's inspection.

    Its backward pass is what autograd calls, without torch's look at which other one (``vjp``) it may have.
    """
    function._backward_cls.apply = function.backward
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def _is_observed() -> bool:
    """Whether compilation, a dispatch mode, functorch or forward-mode differentiation has to see every call."""
    return _is_compiling() or _dispatch_modes() > 0 or _is_transformed() or forward_ad._current_level >= 0


def _is_plain(args: tuple[Any, ...]) -> bool:
    """Whether nothing but autograd has to see this call."""
    return not _is_observed() and all(type(a) in (Tensor, Parameter) for a in args if isinstance(a, Tensor))


def _autograd_function(
    name: str,
    forward: Callable[..., Any],
    setup_context: Callable[..., None] | None,
    backward: Callable[..., Any] | None,
) -> type[torch.autograd.Function]:
    class Function(torch.autograd.Function):
        pass

    Function.forward = staticmethod(forward)  # type: ignore[method-assign]
    if setup_context is None or backward is None:

        def refuse(ctx: Any, *grads: Tensor | None) -> Any:
            raise RuntimeError(
                f"fastattn: {name} has no derivative on this backend (double backward); "
                'run the forward pass inside fastattn.backend("reference"), where it has one'
            )

        Function.setup_context = staticmethod(lambda ctx, inputs, output: None)  # type: ignore[method-assign]
        Function.backward = staticmethod(refuse)  # type: ignore[method-assign]
    else:
        Function.setup_context = staticmethod(setup_context)  # type: ignore[method-assign]
        Function.backward = staticmethod(backward)  # type: ignore[method-assign]
    Function.__name__ = Function.__qualname__ = f"fastattn_{name}"
    return Function


class BackwardOp(Op):
    """The backward pass of an operation. Autograd sees into the reference's, run eagerly: double backward works."""

    def _differentiate(self, *args: Any) -> Any:
        if args[-1] == "reference" and _is_plain(args):
            return self._run(*args)
        return super()._differentiate(*args)

    def _differentiate_plain(self, *args: Any) -> Any:
        return self._run(*args) if args[-1] == "reference" else super()._differentiate_plain(*args)
