"""How an operation becomes a torch op: schema, fake, autograd, and the shortest way from Python to the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from fastattn.backends import TABLE

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
        self._function = _autograd_function(self, setup_context, backward)
        _library.impl(name, self._differentiate, "Autograd")

    def __call__(self, backend: str, *args: Any) -> Any:
        if torch.compiler.is_compiling() or _is_observed():
            return self._overload(*args, backend)
        wants_grad = False
        for arg in args:
            if type(arg) is Tensor or type(arg) is Parameter:
                wants_grad = wants_grad or arg.requires_grad
            elif isinstance(arg, Tensor):  # a subclass, which may have its own idea of the call
                return self._overload(*args, backend)
        if wants_grad and torch.is_grad_enabled():
            return self._differentiate_plain(*args, backend)
        return getattr(TABLE[backend], self.name)(*args)

    def _run(self, *args: Any) -> Any:
        return getattr(TABLE[args[-1]], self.name)(*args[:-1])

    def _differentiate(self, *args: Any) -> Any:
        return self._function.apply(*args)

    def _differentiate_plain(self, *args: Any) -> Any:
        # Function.apply adds what functorch needs (it inspects a signature each time); nobody transforms this call.
        return super(torch.autograd.Function, self._function).apply(*args)  # type: ignore[misc]

    def below_autograd(self, *args: Any) -> Any:
        if _is_plain(args):
            return self._run(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return self._overload(*args)


def _is_observed() -> bool:
    """Whether a dispatch mode, functorch or forward-mode differentiation wants to see every call in this thread."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


def _is_plain(args: tuple[Any, ...]) -> bool:
    """Whether nothing but autograd has to see this call."""
    return not _is_observed() and all(type(a) in (Tensor, Parameter) for a in args if isinstance(a, Tensor))


def _autograd_function(
    op: Op, setup_context: Callable[..., None] | None, backward: Callable[..., Any] | None
) -> type[torch.autograd.Function]:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            return op.below_autograd(*args)

    if setup_context is None or backward is None:

        def refuse(ctx: Any, *grads: Tensor | None) -> Any:
            raise RuntimeError(
                f"fastattn: {op.name} has no derivative on this backend (double backward); "
                'run the forward pass inside fastattn.backend("reference"), where it has one'
            )

        Function.setup_context = staticmethod(lambda ctx, inputs, output: None)  # type: ignore[method-assign]
        Function.backward = staticmethod(refuse)  # type: ignore[method-assign]
    else:
        Function.setup_context = staticmethod(setup_context)  # type: ignore[method-assign]
        Function.backward = staticmethod(backward)  # type: ignore[method-assign]
    Function.__name__ = Function.__qualname__ = f"fastattn_{op.name}"
    return Function


class BackwardOp(Op):
    """The backward pass of an operation. Autograd sees into the reference's, run eagerly: double backward works."""

    def _differentiate(self, *args: Any) -> Any:
        if args[-1] == "reference" and _is_plain(args):
            return self._run(*args)
        return super()._differentiate(*args)

    def _differentiate_plain(self, *args: Any) -> Any:
        return self._run(*args) if args[-1] == "reference" else super()._differentiate_plain(*args)
