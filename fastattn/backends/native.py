"""The loader of the compiled libraries in the package's folder, or the reason why one is not loaded.

The build (csrc/native_build.py) writes `_build.json`: the compiler and the targets of each library, or why it is not
built.
"""

import ctypes
import functools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fastattn._torch_private import bind
from fastattn.backends.schema import CONTRACT, RECORDS, SCHEMAS, flatten

PACKAGE = Path(__file__).resolve().parent.parent
LIBRARIES = ("cpu", "cuda", "triton")
OLDEST_TORCH = (2, 10)


def build_record() -> dict[str, dict[str, Any]]:
    """Return the build's record by library: `instruction_sets`, `compiler`, `torch_headers`, or `reason`; or {}."""
    try:
        return json.loads((PACKAGE / "_build.json").read_text())
    except (OSError, ValueError):
        return {}


def _compiler() -> str:
    """Return the CUDA library's compiler, such as "nvcc 13.0", or "" if the build left no record."""
    return build_record().get("cuda", {}).get("compiler", "")


def _driver() -> int:
    """Return the major version of CUDA that the driver is of, or 0 without a driver."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value // 1000


def _newer_than_the_driver() -> str:
    """Return why the driver cannot run the CUDA library, or "". It runs the code of older versions of CUDA too."""
    compiler = re.search(r"(\d+)\.\d+", _compiler())
    if compiler and 0 < _driver() < int(compiler[1]):
        return f"is built by {_compiler()} and needs a driver of CUDA {compiler[1]}, this one is of CUDA {_driver()}"
    return ""


def capabilities() -> tuple[tuple[tuple[int, int], tuple[int, int]], ...]:
    """Return the (first, last) compute capabilities of each range that the CUDA library has code for.

    Without a record every capability counts. Code for 8.6 also serves later 8.x, code for 9.0a only 9.0, and "+PTX"
    everything later.
    """
    ranges = []
    for name in build_record().get("cuda", {}).get("architectures", ["0.0+PTX"]):
        match = re.fullmatch(r"(\d+)\.(\d)([a-z]?)(\+PTX)?", name)
        if match:
            first = int(match[1]), int(match[2])
            ranges.append((first, first if match[3] else (999 if match[4] else first[0], 9)))
    return tuple(ranges)


@functools.cache
def _load(name: str) -> tuple[Any, str]:
    """Return (namespace of the library's operations or None, why it is None)."""
    path = PACKAGE / f"_{name}.so"
    if name == "cuda" and torch.version.cuda is None:
        return None, "this torch is built without CUDA"
    if not path.exists():
        unknown = f"{path} is not there; in a checkout `pip install -e .` compiles it"
        return None, build_record().get(name, {}).get("reason", unknown)
    version = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if version and (int(version[1]), int(version[2])) < OLDEST_TORCH:
        return None, "torch {} is installed, the library needs {}.{} or newer".format(torch.__version__, *OLDEST_TORCH)
    if name == "cuda" and _newer_than_the_driver():
        return None, f"{path.name} {_newer_than_the_driver()}"
    try:
        torch.ops.load_library(str(path))
    except (OSError, RuntimeError) as error:
        return None, f"{path.name} does not load: {str(error).splitlines()[0]}"
    loaded = getattr(torch.ops, f"fastattn_{name}")
    if not hasattr(loaded, "contract") or loaded.contract() != CONTRACT:
        return None, f"{path.name} is of another version of this package; build it anew"
    return loaded, ""


def library(name: str) -> Any:
    """Return `torch.ops.fastattn_NAME`, the operations of a library of LIBRARIES, or None if it is not loaded."""
    return _load(name)[0]


def reason(name: str) -> str:
    """Return why `library(name)` is None, or "" if it is loaded."""
    return _load(name)[1]


def missing(name: str) -> str:
    """Return `reason(name)` in the words of `explain`, or "" if the library is loaded."""
    return f"its library is not loaded: {reason(name)}" if reason(name) else ""


def missing_instruction_set() -> str:
    """Return the instruction set that FASTATTN_CPU_ISA names, else the machine's best one, if the build left it out.

    Otherwise return "". The `cpu` library is loaded.
    """
    loaded = library("cpu")
    machine = loaded.machine_isas().split(",")
    wanted = os.environ.get("FASTATTN_CPU_ISA") or machine[0]
    return wanted if wanted in machine and wanted not in loaded.compiled_isas().split(",") else ""


_defined: list[torch.library.Library] = []  # keeps the schemas: each is removed with its Library object


def functions(name: str) -> dict[str, Callable[..., Any]]:
    """Define the schemas of a loaded library, which contains only kernels, and return its operations by name."""
    loaded = getattr(torch.ops, f"fastattn_{name}")
    operations = loaded.operations().split(",")
    fragment = torch.library.Library(f"fastattn_{name}", "FRAGMENT")
    _defined.append(fragment)
    for operation in operations:
        fragment.define(SCHEMAS[operation])
        fragment.impl(operation, torch.library.fallthrough_kernel, "Autograd")  # ops/register.py adds the nodes
    bound = {operation: bind(getattr(loaded, operation).default) for operation in operations}
    return {name: _OfRecord(function) if name in RECORDS else function for name, function in bound.items()}


class _OfRecord:
    """A backend function, which takes a record, from an operation, which takes a record's arguments."""

    def __init__(self, operation: Callable[..., Any]) -> None:
        self.operation = operation

    def __call__(self, args: Any) -> Any:
        return self.operation(*flatten(args))
