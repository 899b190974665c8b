"""Digests of the code of three public programs, per function and version of Python.

A digest covers the instructions, constants, names of attributes, arguments with their defaults, and the meaning of
global names. It leaves out files, lines, docstrings, annotations and names of locals. It is computed from compiled
code, so notebooks and programs without source files have digests too. ``tools/known_code.py`` prints the digests of a
program's files.
"""

from __future__ import annotations

import builtins
import dis
import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fastattn.integrations.patching.family import is_torchs

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
KINDS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE
KINDS |= inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE
JUMPS = {*dis.hasjrel, *dis.hasjabs}
CONSTANTS = {"LOAD_CONST", "RETURN_CONST", "KW_NAMES"}
VARIABLES = {*dis.haslocal, *dis.hasfree}
# Instructions that depend on line breaks, on imports in the same file, or on the alphabetical order of locals. Others
# differ between releases of one version of Python: a comprehension has one GET_ITER in 3.13.0 and two in 3.13.1.
PLAIN = {"LOAD_METHOD": "LOAD_ATTR", "CALL_METHOD": "CALL_FUNCTION"}
SKIPPED = {"NOP", "EXTENDED_ARG", "PUSH_NULL", "GET_ITER", "MAKE_CELL", "LOAD_CLOSURE", "COPY_FREE_VARS"}
PAIR = re.compile("((?:LOAD|STORE)_FAST)_((?:LOAD|STORE)_FAST)")  # joined only if both are on one line


def difference(function: Any, name: str) -> str | None:
    """Return how the code differs from every known version of ``name``; None if it equals one.

    The functions of the program that the code calls are compared too.

    Args:
        function: the ``forward`` of a class, or a function.
        name: name of the class or function in :data:`DIGESTS`, such as "attention of the Annotated Transformer".
    """
    known = DIGESTS.get(name, {}).get(PYTHON)
    if known is None:
        return f"fastattn does not know {name} as Python {PYTHON} compiles it"
    if not isinstance(function, FunctionType) or digest(function) not in known.split():
        return f"its code is not that of {name}"
    if replaced := _replaced(function.__code__):
        return f"its code calls {replaced} of torch, which another package has replaced"
    program = name.partition(" of ")[2]
    for called, value in _globals(function.__code__, function):
        if isinstance(value, FunctionType) and (found := difference(value, f"{called} of {program}")):
            return found
    return None


def _replaced(code: CodeType) -> str | None:
    """Return a function or method of torch that the code may call and that does not come from torch."""
    for name in code.co_names:
        for owner in (torch, functional, Tensor):
            if not is_torchs(getattr(owner, name, None)):
                return name
    nested = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return next(filter(None, map(_replaced, nested)), None)


def digest(function: FunctionType) -> str:
    """Return the digest of the function, without the functions that it calls."""
    defaults = [_value(value) for value in function.__defaults__ or ()]
    named = {name: _value(value) for name, value in sorted((function.__kwdefaults__ or {}).items())}
    form = _form(function.__code__, lambda name: _global(name, function))
    return hashlib.sha256(repr((form, defaults, named)).encode()).hexdigest()[:16]


def _form(
    code: CodeType, describe: Callable[[str], str], outer: Callable[[str], Any] = lambda name: name
) -> tuple[Any, ...]:
    """Return the code with each operand replaced by its meaning; locals are numbered in order of appearance."""
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    arguments = code.co_varnames[:count]
    numbers = {name: number for number, name in enumerate(arguments)}

    def variable(name: str) -> Any:
        return ("outer", outer(name)) if name in code.co_freevars else numbers.setdefault(name, len(numbers))

    found: list[tuple[str, Any]] = []
    places, targets = {}, {}
    for instruction in dis.get_instructions(code):
        places[instruction.offset] = len(found)
        operation, value = instruction.opname.replace("_BORROW", ""), instruction.argval
        operation = PLAIN.get(operation, operation)
        if operation in SKIPPED:
            continue
        if pair := PAIR.fullmatch(operation):
            found += [(operation, variable(name)) for operation, name in zip(pair.groups(), value, strict=True)]
            continue
        operand: Any = instruction.arg
        if instruction.opcode in JUMPS:
            targets[len(found)] = value
        elif operation in CONSTANTS:
            value = code.co_consts[operand]  # dis resolves only some constants
            operand = _form(value, describe, variable) if isinstance(value, CodeType) else repr(value)
        elif operation == "LOAD_GLOBAL":
            operand = describe(value)
        elif instruction.opcode in dis.hasname:
            operand = value
        elif instruction.opcode in VARIABLES:
            operand = variable(value)
        found.append((operation, operand))
    for place, target in targets.items():
        found[place] = found[place][0], places[target]
    return found, arguments, code.co_argcount, code.co_posonlyargcount, code.co_flags & KINDS


def _globals(code: CodeType, function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the globals that the function's code names, and their values."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield instruction.argval, _resolve(instruction.argval, function)
        elif isinstance(instruction.argval, CodeType):
            yield from _globals(instruction.argval, function)


def _resolve(name: str, function: FunctionType) -> Any:
    return function.__globals__.get(name, getattr(builtins, name, None))


def _global(name: str, function: FunctionType) -> str:
    value = _resolve(name, function)
    if isinstance(value, FunctionType):
        return f"function {name}"
    if isinstance(value, ModuleType) and sys.modules.get(value.__name__) is value:
        return f"module {value.__name__}"
    if name not in function.__globals__ and hasattr(builtins, name):
        return f"builtin {name}"
    return _value(value)


def _value(value: Any) -> str:
    """Return a description: equal values of plain types share it, any other object has its own."""
    plain = value is None or type(value) in (bool, int, float, str)
    return repr(value) if plain else f"object {id(value)}"


DIGESTS: dict[str, dict[str, str]] = {
    "ScaledDotProductAttention of jadore801120": {
        "3.10": "31b5c88e0504c052 0de4136e8d9140da",
        "3.11": "70e677fcd034f484 4c2cfc119693ef61",
        "3.12": "d3e0aad36b7d6946 3bf23ddeac7eef78",
        "3.13": "495f1925749e6e5a 9a291a396fc1b748",
        "3.14": "97818c71c76b524c b67d4b230dbe636a",
    },
    "MultiHeadAttention of jadore801120": {
        "3.10": "71933ddab9ab6cda f9388928108f4c7f",
        "3.11": "ba5877603f181b70 17292224be0fc107",
        "3.12": "f8e7441d27b1cc8a fea4352f4fd19c6b",
        "3.13": "791f10bd1c735da7 ce1d2a7e3d5ea20c",
        "3.14": "25478a9af8fc462d 7fbf53069d0cb3e9",
    },
    "PositionwiseFeedForward of jadore801120": {
        "3.10": "755ad4d6c6abd4c6 050293464d420cb8",
        "3.11": "3c03548a13ac79ef 5b87e65a56a23bc2",
        "3.12": "e1bfc5176a116fea 2486c1db51e6c7ae",
        "3.13": "e1bfc5176a116fea 2486c1db51e6c7ae",
        "3.14": "e1bfc5176a116fea 2486c1db51e6c7ae",
    },
    "scaled_dot_product_attention of the notebook": {
        "3.10": "9fbf70d1656def8a",
        "3.11": "67465337ab7a1f4f",
        "3.12": "bdf7c94c1227dddc",
        "3.13": "9344a8ef2a4b8e04",
        "3.14": "e9e5b528b9cc50b3",
    },
    "AttentionHead of the notebook": {
        "3.10": "73c37d84b157d113",
        "3.11": "1efd1aa0d3846649",
        "3.12": "1025a92067d5e22e",
        "3.13": "2d4f59d9936f22b5",
        "3.14": "2d4f59d9936f22b5",
    },
    "MultiHeadAttention of the notebook": {
        "3.10": "ede727cda439da8a",
        "3.11": "78b609f22c4c9750",
        "3.12": "d9059e93f993e7f3",
        "3.13": "831a7635584dfe0d",
        "3.14": "3f0d14d544216311",
    },
    "Residual of the notebook": {
        "3.10": "fa35a57d0ce8d456",
        "3.11": "50446b9dcf4c5965",
        "3.12": "844d445162d7c55b",
        "3.13": "844d445162d7c55b",
        "3.14": "8a512f411b1c7cfb",
    },
    "attention of the Annotated Transformer": {
        "3.10": "2a4175b02912df49 f6d4acefb8bde906 f201526cd1891f2d",
        "3.11": "1d798e3628fc6af3 6178811fd212f4b8 278c641c435c4212",
        "3.12": "8187b08f962ce254 c2f09425c5ab7272 461d9421a0d587c0",
        "3.13": "d0b8f2ebe27c4ec8 294bccda1344cc17 c90d758b45df1564",
        "3.14": "1f9bf87ab7ac7c79 cd603d4a7d069de3 682af66be5cc29a2",
    },
    "MultiHeadedAttention of the Annotated Transformer": {
        "3.10": "9a2950a88bdc7250 393749e5869c2596",
        "3.11": "8eeb9333daf74784 8517fcbd592f1974",
        "3.12": "71f3942f790743b2 b4ad1f96ec285be2",
        "3.13": "41740b152e68a5bd 6de52187a40f8b82",
        "3.14": "0a8f62605d2a2872 6a86d56dcaf0a374",
    },
    "LayerNorm of the Annotated Transformer": {
        "3.10": "049bba3fa869b48c",
        "3.11": "23dc8c14b45f8848",
        "3.12": "f3c0cdb533a58da1",
        "3.13": "c632143e46fee8f2",
        "3.14": "c632143e46fee8f2",
    },
}
"""By name and by version of Python, the digests of the versions of a program's function, separated by spaces."""
