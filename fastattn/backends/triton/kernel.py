"""The declaration and the launch of a Triton kernel."""

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
    """Decorate a kernel: ``triton.jit``, specialised only for constexprs and dtypes.

    Values and alignments of arguments are not specialised, so a new sequence length compiles nothing. A kernel may rely
    only on what its constexprs state. ``_unknown`` keeps arguments within named tuples unspecialised. Numbers that may
    be large are annotated with their type, because Triton otherwise derives it from their size.
    """
    parameters = inspect.signature(function).parameters.values()
    return triton.jit(function, do_not_specialize=[p.name for p in parameters if "constexpr" not in str(p.annotation)])


# Compiled kernels by (kernel, device, argument types, constexprs). Triton's own lookup costs several times as much as
# the launch.
_compiled: dict[Any, CompiledKernel] = {}


def launch(function: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **constants: Any) -> None:
    """Start ``function`` on the current stream of ``device``, unless the grid is empty.

    Args:
        args: the kernel's arguments, in order, up to its constexprs.
        constants: the constexprs and Triton's options, by name.
    """
    if 0 in grid:
        return
    constants["enable_fp_fusion"] = True  # Triton's present default, stated because Triton is about to change it
    if not isinstance(function, triton.JITFunction):  # TRITON_INTERPRET=1
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
        if not isinstance(compiled, CompiledKernel):  # one of Triton's hooks has taken over the compilation
            function[grid](*args, **constants)
            return
        _compiled[key] = compiled
    compiled[(*grid, 1, 1)[:3]](*args, *(None,) * len(function.constexprs))


class _Pointer(MockTensor):
    """A tensor at an unknown address, for compilation."""

    @staticmethod
    def data_ptr() -> int:
        return 1


def _unknown(argument: Any) -> Any:
    """Return a stand-in for an argument at compilation, from which Triton learns only the type.

    Workaround (Triton 3.6 to 3.9): ``do_not_specialize`` has no effect within tuples. There Triton specialises for
    numbers that are 1 or multiples of 16 and for aligned pointers. Without the stand-in a kernel compiled for one call
    would run for another with other values, and read the wrong memory.
    """
    if isinstance(argument, tuple):
        return type(argument)(*map(_unknown, argument))
    kind = type(argument)
    if kind is int:
        return 3 if -(2**31) <= argument < 2**31 else 2**32 + 3
    if argument is None or kind is float or kind is TensorDescriptor:
        return argument
    return _Pointer(argument.dtype)


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
