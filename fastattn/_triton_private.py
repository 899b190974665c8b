"""Every private part of Triton that the package leans on."""

from __future__ import annotations

from typing import Any

from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction, MockTensor
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = [
    "CompiledKernel",
    "Unknown",
    "compile_kernel",
    "identity",
    "is_hooked",
    "is_interpreted",
    "launch_parts",
    "parameter_types",
    "start",
]

_runtime = knobs.runtime
_LARGEST_SHARED = 228 << 10  # bytes; Triton asks for more by an attribute of the launch


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


def is_hooked() -> bool:
    """Return whether a hook observes launches, as profilers do. Only Triton's own launcher calls hooks."""
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def launch_parts(compiled: CompiledKernel) -> tuple[int, int, int] | None:
    """Load a compiled kernel on the current device, and return its CUfunction, threads and bytes of shared memory.

    None if a launch needs more than that: clusters, attributes, or memory that Triton allocates.
    """
    compiled._init_handles()
    metadata = compiled.metadata
    special = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")
    is_special = any(getattr(metadata, name, 0) for name in (*special, "instrumentation_mode"))
    if is_special or metadata.num_ctas != 1 or metadata.shared > _LARGEST_SHARED:
        return None
    return compiled.function, 32 * metadata.num_warps, metadata.shared


def parameter_types(compiled: CompiledKernel) -> list[str]:
    """Return Triton's types of the parameters of a compiled kernel, such as ``"*bf16"`` and ``"i32"``, in order.

    Two pointers to scratch memory follow them.
    """
    return list(_flat(tuple(compiled.src.signature.values())))


def _flat(types: tuple[Any, ...]) -> Any:
    for kind in types:
        if isinstance(kind, tuple):
            yield from _flat(kind)
        elif kind != "constexpr":
            yield kind


class Unknown(MockTensor):
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
    return Unknown(argument.dtype)
