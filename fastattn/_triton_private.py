"""Every private part of Triton that the package leans on."""

from __future__ import annotations

from typing import Any

from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction, MockTensor
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = ["CompiledKernel", "compile_kernel", "identity", "is_interpreted", "start"]


def is_interpreted(function: Any) -> bool:
    """Return whether the kernel runs in Triton's interpreter, TRITON_INTERPRET=1."""
    return not isinstance(function, JITFunction)


def identity(function: Any) -> Any:
    """Return what stands for the kernel in a key; the kernel itself takes long to hash."""
    return function.fn


def compile_kernel(
    function: Any, args: tuple[Any, ...], grid: tuple[int, ...], constants: dict[str, Any]
) -> CompiledKernel | None:
    """Compile for the arguments' types only; None if one of Triton's hooks has taken over the compilation."""
    compiled = function.warmup(*map(_unknown, args), grid=grid, **constants)
    return compiled if isinstance(compiled, CompiledKernel) else None


def start(compiled: CompiledKernel, function: Any, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
    """Start a compiled kernel on the current stream. Triton's own lookup costs several times as much as the launch."""
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
