"""How a kernel is declared and started."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.compiler import CompiledKernel
from triton.runtime.jit import MockTensor
from triton.tools.tensor_descriptor import TensorDescriptor


def kernel(function: Callable[..., Any]) -> Any:
    """triton.jit, specialised for constexprs and dtypes alone, not for values and alignments of arguments: a new
    sequence length compiles nothing. What a kernel may rely on, its constexprs say. Arguments are grouped in named
    tuples, which ``_unknown`` keeps unspecialised; numbers that may be large are annotated with their type, which would
    otherwise follow their size."""
    parameters = inspect.signature(function).parameters.values()
    return triton.jit(function, do_not_specialize=[p.name for p in parameters if "constexpr" not in str(p.annotation)])


# Compiled kernels, by kernel, device, types of the arguments and constexprs: Triton's own lookup costs several times as
# much as the launch.
_compiled: dict[Any, CompiledKernel] = {}


def launch(function: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **constants: Any) -> None:
    """Start ``function`` on the current stream of ``device``; an empty grid has nothing to do.

    ``args`` are the kernel's arguments up to its constexprs, which come last and by name, as do Triton's options.
    """
    if 0 in grid:
        return
    constants["enable_fp_fusion"] = True  # Triton's default, which it is about to change
    if not isinstance(function, triton.JITFunction):  # interpreted
        function[grid](*args, **constants)
    elif device.index == torch.cuda.current_device():
        _start(function, grid, device.index, args, constants)
    else:
        with torch.cuda.device(device):
            _start(function, grid, device.index, args, constants)


def _start(function: Any, grid: tuple[int, ...], device: int, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
    key = function.fn, device, _types(args), tuple(constants.items())
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = function.warmup(*map(_unknown, args), grid=grid, **constants)
        if not isinstance(compiled, CompiledKernel):  # a hook of Triton's has taken over the compilation
            function[grid](*args, **constants)
            return
        _compiled[key] = compiled
    compiled[(*grid, 1, 1)[:3]](*args, *(None,) * len(function.constexprs))


class _Pointer(MockTensor):
    """Stands for a tensor at any address."""

    @staticmethod
    def data_ptr() -> int:
        return 1


def _unknown(argument: Any) -> Any:
    """What stands for an argument at compilation, so that Triton knows its type alone. ``do_not_specialize`` has no
    effect in tuples: there Triton specialises for numbers that are 1 or multiples of 16 and for aligned pointers."""
    if isinstance(argument, tuple):
        return type(argument)(*map(_unknown, argument))
    kind = type(argument)
    if kind is int:
        return 3 if -(2**31) <= argument < 2**31 else 2**32 + 3
    if argument is None or kind is float or kind is TensorDescriptor:
        return argument
    return _Pointer(argument.dtype)


def _types(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """What of the arguments a compiled kernel is for: dtypes, and which numbers take more than 32 bits."""
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
    """How many blocks cover a size. Triton's own function of this name takes as long as an allocation."""
    return -(-size // block)
