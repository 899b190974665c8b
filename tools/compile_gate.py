"""Compile the CUDA library for several architectures, without a GPU, and print the registers and faults of each kernel.

Usage: python tools/compile_gate.py [ARCHITECTURE ...], by default 8.0 9.0 10.0. The exit status is 1 if a kernel has a
fault: local memory (spills or arrays), or aligned operands without 128-bit loads and stores.
"""

import dataclasses
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "csrc"))
import native_build  # noqa: E402

ARCHITECTURES = ("8.0", "9.0", "10.0")
SCALAR = re.compile(r"add_groups|merge|attend<.*(false|, 0)")  # kernels with few or with unaligned operands


@dataclasses.dataclass
class Kernel:
    """Facts of a kernel's machine code for one architecture."""

    name: str
    architecture: str
    registers: int
    shared: int  # bytes per block
    local: int  # bytes per thread, for arrays and spilled values
    wide_loads: int
    wide_stores: int

    def faults(self) -> list[str]:
        found = []
        if self.local:
            found.append(f"spills or has arrays in {self.local} bytes of local memory")
        if not SCALAR.match(self.name) and not (self.wide_loads and self.wide_stores):
            found.append("lacks 128-bit loads or stores")
        return found

    def __str__(self) -> str:
        return (
            f"sm_{self.architecture:4} {self.name:64} {self.registers:4} registers, "
            f"{self.shared:5} bytes shared, {self.wide_loads:2} wide loads, {self.wide_stores:2} wide stores"
            + "".join(f"; {fault.upper()}" for fault in self.faults())
        )


def cuobjdump(*arguments: object) -> str:
    """Return the output of the disassembler: the toolkit's, or the one in Triton's package."""
    command = shutil.which("cuobjdump")
    spec = None if command else importlib.util.find_spec("triton")
    if spec is not None and spec.origin is not None:
        command = shutil.which(str(Path(spec.origin).parent / "backends/nvidia/bin/cuobjdump"))
    if command is None:
        raise native_build.NotBuilt("no cuobjdump (of the CUDA toolkit or of Triton)")
    return subprocess.run([command, *map(str, arguments)], capture_output=True, text=True, check=True).stdout


def kernels_of(path: Path) -> list[Kernel]:
    """Return all kernels in a compiled file."""
    code = {}
    for part in re.split(r"^arch = sm_", cuobjdump("--dump-sass", path), flags=re.MULTILINE)[1:]:
        architecture, *functions = re.split(r"Function : ", part)
        for function in functions:
            symbol, text = function.split("\n", 1)
            code[architecture.split()[0], symbol] = text
    usage = {}
    for part in re.split(r"^arch = sm_", cuobjdump("--dump-resource-usage", path), flags=re.MULTILINE)[1:]:
        for symbol, text in re.findall(r"Function (\S+):\n(.*)", part):
            usage[part.split()[0], symbol] = {key: int(n) for key, n in re.findall(r"(\w+):(\d+)", text)}
    names = subprocess.run(["c++filt"], input="\n".join(symbol for _, symbol in code), capture_output=True, text=True)
    return [
        Kernel(
            name=_short(name),
            architecture=architecture,
            registers=usage[architecture, symbol]["REG"],
            shared=usage[architecture, symbol]["SHARED"],
            local=usage[architecture, symbol]["STACK"] + usage[architecture, symbol]["LOCAL"],
            wide_loads=len(re.findall(r"\bLDG\.E\.(?:\w+\.)*128", text)),
            wide_stores=len(re.findall(r"\bSTG\.E\.(?:\w+\.)*128", text)),
        )
        for ((architecture, symbol), text), name in zip(code.items(), names.stdout.splitlines(), strict=True)
    ]


def _short(name: str) -> str:
    """Shorten a kernel's name to name<template arguments>(type of the first parameter)."""
    name = re.sub(r"\(anonymous namespace\)::|fastattn::(?:cuda::)?|^void ", "", name)
    name = re.sub(r"\(Span\)(\d)", lambda m: ("warp", "block", "pieces")[int(m[1])], name)
    return re.sub(r"\((\w+).*\)$", r"(\1)", name)


def library(architectures: tuple[str, ...] = ARCHITECTURES) -> Path:
    """Compile and return the CUDA library for these architectures. Raise native_build.BuildError if that fails."""
    directory = ROOT / "build/compile_gate"
    return native_build.compile_cuda(directory, native_build.torch_for_building(), list(architectures))


if __name__ == "__main__":
    found = kernels_of(library(tuple(sys.argv[1:]) or ARCHITECTURES))
    print(*found, sep="\n")
    sys.exit(any(kernel.faults() for kernel in found))
