"""The declaration and the launch of a Triton kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from fastattn._triton_private import CompiledKernel, compile_kernel, identity, is_interpreted, start


def kernel(function: Callable[..., Any]) -> Any:
    """Decorate a kernel: ``triton.jit``, specialised only for constexprs and dtypes.

    Values and alignments of arguments are not specialised, so a new sequence length compiles nothing. A kernel may rely
    only on what its constexprs state. ``compile_kernel`` keeps arguments within named tuples unspecialised. Numbers
    that may be large are annotated with their type, because Triton otherwise derives it from their size.
    """
    parameters = inspect.signature(function).parameters.values()
    return triton.jit(function, do_not_specialize=[p.name for p in parameters if "constexpr" not in str(p.annotation)])


OPTIONS = {"enable_fp_fusion": True}  # Triton's present default, stated because Triton is about to change it
_compiled: dict[Any, CompiledKernel] = {}  # by (kernel, device, argument types, constexprs)


def launch(function: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **constants: Any) -> None:
    """Start ``function`` on the current stream of ``device``, unless the grid is empty.

    Args:
        args: the kernel's arguments, in order, up to its constexprs.
        constants: the constexprs and Triton's options, by name.
    """
    if 0 in grid:
        return
    constants |= OPTIONS
    if is_interpreted(function):
        function[grid](*args, **constants)
    elif device.index == torch.cuda.current_device():
        _start(function, grid, device.index, args, constants)
    else:
        with torch.cuda.device(device):
            _start(function, grid, device.index, args, constants)


def _start(function: Any, grid: tuple[int, ...], device: int, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
    key = identity(function), device, _types(args), tuple(constants.items())
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = compile_kernel(function, args, grid, constants)
        if compiled is None:
            function[grid](*args, **constants)
            return
        _compiled[key] = compiled
    start(compiled, function, grid, args)


def _types(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what a compiled kernel depends on: the arguments' dtypes, and which integers exceed 32 bits."""
    types: list[Any] = []
    for argument in arguments:
        kind = type(argument)
        if kind is int:
            types.append(-(2**31) <= argument < 2**31)
        elif argument is None or kind is float:
            types.append(kind)
        elif isinstance(argument, tuple):
            types.append(_types(argument))
        elif kind is TensorDescriptor:
            types.append(argument.base.dtype)
        else:
            types.append(argument.dtype)
    return tuple(types)


def cdiv(size: int, block: int) -> int:
    """Return ceil(size / block). Triton's function of this name takes as long as an allocation."""
    return -(-size // block)
