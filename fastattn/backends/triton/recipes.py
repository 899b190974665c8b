"""The recipes by which ``csrc/launch`` starts Triton's kernels: its requests, and the answers to them.

Triton compiles a kernel here, at the first call with new types or settings. Later calls start it without Python.

A request names a kernel, a device and the kernel's settings, for which the answer holds the kernel's block. A second
request adds the types of the arguments, for which the answer holds the compiled function:

    layer_norm.forward 0 512 1 1
    layer_norm.forward 0 512 1 1:bnffnbnffiiiiir

A letter is an argument, and ``Heads(biii)`` a named tuple of four. ``csrc/launch/launcher.h`` writes them.
"""

from __future__ import annotations

import ctypes
import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fastattn._triton_private import CompiledKernel, Unknown, compile_kernel, launch_parts, parameter_types
from fastattn.backends.triton.attention.tiles import multiprocessors
from fastattn.backends.triton.kernel import OPTIONS
from fastattn.backends.triton.philox import Dropout
from fastattn.backends.triton.visibility import Window

_POINTERS = {
    "f": torch.float32, "b": torch.bfloat16, "h": torch.float16, "l": torch.int64, "t": torch.bool,
    "u": torch.uint8, "c": torch.int8, "w": torch.int32,
}  # fmt: skip
# Triton's types that agree with a letter. The kernel may declare more bits for an integer than its value needs.
_TYPES = {"i": ("i32", "i64"), "j": ("i64",), "r": ("fp32",)}
_TOKENS = re.compile(r"[A-Z]\w*\(|\w|\)")
_SHARED = {"Dropout": Dropout, "Window": Window}
_kept: list[CompiledKernel] = []  # a compiled kernel unloads its function when it is deleted


class Recipe(ctypes.Structure):
    """The answer to a request; ``csrc/launch/kernels.h`` has the same struct."""

    _fields_ = (
        ("function", ctypes.c_uint64),
        ("threads", ctypes.c_int32),
        ("shared_bytes", ctypes.c_int32),
        ("block_m", ctypes.c_int32),
        ("block_n", ctypes.c_int32),
        ("multiprocessors", ctypes.c_int32),
        ("is_served", ctypes.c_int32),
    )


COMPILE = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.POINTER(Recipe))


def answer(request: bytes, recipe: Any) -> None:
    """Write the answer to a request into ``recipe``.

    An exception cannot pass through C++. ctypes hands it to ``sys.unraisablehook``, and Triton starts the kernel.
    """
    asked = Request(request.decode())
    found, constants = recipe.contents, asked.constants
    found.block_m, found.block_n = constants.get("BLOCK_M", 0), constants.get("BLOCK_N", 0)
    found.multiprocessors = multiprocessors(asked.device)
    found.is_served = not asked.tokens or _compile(found, asked)


def device_at(index: int) -> torch.device:
    return torch.device("cuda", index)


class Request:
    """A request in parts: the kernel, its device and constants, and the types of its arguments as tokens."""

    def __init__(self, text: str) -> None:
        settings, _, types = text.partition(":")
        name, index, *numbers = settings.split()
        module = importlib.import_module(f"{__package__}.{name.partition('.')[0]}")
        self.function, constants_of = module.RECIPES[name]
        self.device = device_at(int(index))
        self.constants: dict[str, Any] = constants_of(self.device, *map(int, numbers))
        self.tokens = _TOKENS.findall(types)
        self._classes = {**vars(module), **_SHARED}

    def letters(self) -> list[str]:
        """Return the letters of the parameters that the kernel has, in order: all but those of None."""
        return [token for token in self.tokens if token in _POINTERS or token in _TYPES]

    def arguments(self, values: Callable[[str], Any]) -> tuple[Any, ...]:
        """Return the kernel's arguments, each made from its letter."""
        return tuple(self._nested(iter(self.tokens), values))

    def _nested(self, tokens: Iterator[str], values: Callable[[str], Any]) -> Iterator[Any]:
        for token in tokens:
            if token == ")":
                return
            if token.endswith("("):
                yield self._classes[token[:-1]](*self._nested(tokens, values))
            else:
                yield None if token == "n" else values(token)


def _compile(recipe: Any, asked: Request) -> bool:
    """Compile the kernel for arguments of these types, and write the recipe.

    Return whether the launcher can start it.
    """
    with torch.cuda.device(asked.device):
        compiled = compile_kernel(asked.function, asked.arguments(_stand_in), (1,), {**asked.constants, **OPTIONS})
        parts = None if compiled is None else launch_parts(compiled)
    if compiled is None or parts is None:
        return False
    letters, passed = asked.letters(), parameter_types(compiled)
    if len(letters) != len(passed) or not all(map(_agree, letters, passed)):
        raise TypeError(f"the kernel takes {passed}, given {letters}")
    _kept.append(compiled)
    recipe.function, recipe.threads, recipe.shared_bytes = parts
    return True


def _stand_in(letter: str) -> Any:
    return Unknown(_POINTERS[letter]) if letter in _POINTERS else {"i": 0, "j": 2**40, "r": 0.0}[letter]


def _agree(letter: str, kind: str) -> bool:
    return kind.startswith("*") if letter in _POINTERS else kind in _TYPES[letter]
