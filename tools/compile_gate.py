"""Compile the CUDA library for several architectures, without a GPU, and print the registers and faults of each kernel.

Usage: python tools/compile_gate.py [--record] [ARCHITECTURE ...], by default 8.0 9.0 10.0, and the kernels with
Hopper's asynchronous products for 9.0a. The exit status is 1 if a kernel has a fault: local memory (spills or arrays),
or aligned operands without 128-bit loads and stores.

A file with asynchronous products has no kernel without them. Their compiler serialises none. Their plain main loop has
a product that is still pending behind the first wait, and at most two barriers that stop the consumers, three with
dropout. Only a kernel with dropout accesses the stack, a few times per iteration. The registers of its roles, the
instructions per score and the order of products, waits and barriers in its plain main loop, and the instructions by
which it takes turns with other blocks are those in tests/hopper_code.txt. --record writes that file after an intended
change, and does nothing else.
"""

import argparse
import dataclasses
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "csrc"))
import native_build  # noqa: E402
from sass.code import Instruction, parse  # noqa: E402
from sass.counts import Loop, order, plain_loop  # noqa: E402

ARCHITECTURES = ("8.0", "9.0", "10.0")
TESTED = "8.0", "10.0"  # by the tests. 9.0 compiles the same source.
HOPPER = "9.0a"
# Messages of ptxas: setmaxnreg has no effect, and reasons for which it puts waits between products.
SERIALISED = re.compile(r"\(C75(?:08|1[0-8])\)[^\n]*")
PHILOX = "-0x2daee0ad"  # 0xd2511f53, a multiplier of Philox, as the disassembler writes it
MOST_LOCAL = 10  # Accesses to the stack per iteration of a plain main loop with dropout, 24 instructions per score.
MOST_BARRIERS = 2  # one more with dropout, at which two warps exchange words
REGISTERS = 512  # A multiprocessor's, per thread of a warpgroup.
RECORD = ROOT / "tests/hopper_code.txt"
RECORDED = ("HGMMA", "WARPGROUP", "BAR", "SYNCS")  # instructions whose order is recorded
# Instructions that order a block's accesses to global memory relative to other blocks: atomics, acquiring loads (whose
# CCTL empties the L1 cache) and releasing stores, fences, and the bulk stores and additions between them.
ORDERING = re.compile(r"\.STRONG\.GPU|^CCTL|^MEMBAR\.\w+\.GPU|^FENCE\.VIEW\.ASYNC\.G|^UBLKRED|^UBLKCP\.G")
TOLERANCE = 0.02  # Relative change of the instructions per score, which differ a little between compilers.
# Kernels with few, unaligned or strided operands
SCALAR = re.compile(r"add_groups|merge|cover_tiles|list_(query_)?tiles|prepare|attend<.*(false|, 0)")


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
    disassembly: str = dataclasses.field(repr=False)
    source: str = ""  # name of its file, if that has asynchronous products

    @cached_property
    def code(self) -> list[Instruction]:
        return parse(self.disassembly)

    @cached_property
    def loop(self) -> Loop | None:
        """The plain main loop of a kernel with asynchronous products. The first of them gives the scores."""
        body = plain_loop(self.code) if "HGMMA" in self.disassembly else []
        products = [i for i in body if i.base == "HGMMA"]
        if not products:
            return None
        scores = products[0].multiply_adds // (16 * 32)  # per thread
        return Loop(body, 90, sum(i.multiply_adds for i in products) // (32 * scores))

    @property
    def roles(self) -> list[int]:
        """Registers per thread that the warpgroups take or keep, as setmaxnreg says."""
        return sorted(i.count or 0 for i in self.code if i.base == "USETMAXREG")

    @property
    def drops(self) -> bool:
        """Whether the kernel draws dropout's random numbers."""
        return any(PHILOX in i.operands for i in self.code)

    @property
    def record(self) -> str:
        """The kernel's line in the file of records, "" without a loop with products."""
        if self.loop is None:
            return ""
        registers, rate = " and ".join(map(str, self.roles)), len(self.loop.body) / self.loop.scores
        events = order([i for i in self.loop.body if i.base in RECORDED])
        turns = ", ".join(i.opcode for i in self.code if ORDERING.search(i.opcode)) or "no turns"
        parts = f"registers {registers}", f"{rate:.2f} instructions per score", events, turns
        return f"{self.source}: {self.name}: {'; '.join(parts)}"

    def faults(self) -> list[str]:
        if self.loop is not None:
            return self._faults_of(self.loop)
        found = []
        if self.source:
            found.append("has no loop with asynchronous products")
        if self.local:
            found.append(f"spills or has arrays in {self.local} bytes of local memory")
        if not SCALAR.match(self.name) and not (self.wide_loads and self.wide_stores):
            found.append("lacks 128-bit loads or stores")
        return found

    def _faults_of(self, loop: Loop) -> list[str]:
        found = []
        if self.local and not self.drops:
            found.append(f"{self.local} bytes of local memory without dropout")
        if loop.local > MOST_LOCAL:
            found.append(f"{loop.local} accesses to the stack in the loop")
        if loop.barriers > MOST_BARRIERS + self.drops:
            found.append(f"{loop.barriers} barriers in the loop")
        waits = [i.count or 0 for i in loop.body if i.base == "WARPGROUP" and "DEPBAR" in i.opcode]
        if not waits or waits[0] == 0:
            found.append("no product is pending behind the first wait of the loop")
        if len(self.roles) < 2:
            found.append("no warpgroup gives registers that another takes")
            return found
        # One warpgroup gives, the others take. Without enough registers at the launch they would wait without end.
        groups = REGISTERS // self.registers
        if self.registers * groups < self.roles[0] + (groups - 1) * self.roles[-1]:
            found.append(f"{groups} warpgroups launched with {self.registers} registers cannot have {self.roles}")
        return found

    def __str__(self) -> str:
        if self.loop is not None:
            return (
                f"sm_{self.architecture:4} {self.name:64} registers {self.roles}, {self.local} bytes of local memory, "
                f"{len(self.loop.body) / self.loop.scores:.2f} instructions per score, {self.loop.local} to the stack\n"
                f"    {order(self.loop.body)}" + "".join(f"; {fault.upper()}" for fault in self.faults())
            )
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


def kernels_of(path: Path, source: str = "") -> list[Kernel]:
    """Return all kernels in a compiled file. ``source`` names its source if that has asynchronous products."""
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
            wide_loads=len(re.findall(r"LDG\.E\.(?:\w+\.)*128", text)),
            wide_stores=len(re.findall(r"STG\.E\.(?:\w+\.)*128", text)),
            disassembly=text,
            source=source,
        )
        for ((architecture, symbol), text), name in zip(code.items(), names.stdout.splitlines(), strict=True)
    ]


def _short(name: str) -> str:
    """Shorten a kernel's name to name<template arguments>(type of the first parameter)."""
    name = re.sub(r"\(anonymous namespace\)::|fastattn::(?:cuda::)?|^void ", "", name)
    name = re.sub(r"\(Span\)(\d)", lambda m: ("warp", "block", "pieces")[int(m[1])], name)
    name = re.sub(r"\(Kind\)(\d)", lambda m: ("plain", "dropout", "general")[int(m[1])], name)
    return re.sub(r"\((\w+).*\)$", r"(\1)", name)


def library(architectures: tuple[str, ...] = ARCHITECTURES) -> Path:
    """Compile and return the CUDA library for these architectures. Raise native_build.BuildError if that fails."""
    directory = ROOT / "build/compile_gate"
    torch = native_build.torch_for_building()
    return native_build.compile_cuda(directory, torch, list(architectures), hopper=False)  # compile_hopper has these


def compile_hopper(source: Path, directory: Path = ROOT / "build/compile_gate") -> tuple[Path, list[str]]:
    """Compile a file of kernels with asynchronous products. Return the result, and the messages on serialised products.

    Raises:
        native_build.BuildError: The file does not compile.
    """
    target = directory / f"{source.stem}.fatbin"
    directory.mkdir(parents=True, exist_ok=True)
    flags = shlex.split(native_build.cuda_flags([HOPPER]))
    command = [native_build.nvcc()[0], *flags, "-Xptxas=-v", "-fatbin", source, "-o", target]  # without host code
    done = subprocess.run(command, capture_output=True, text=True)
    output = done.stdout + done.stderr
    if done.returncode:
        raise native_build.BuildError(f"{source.name} does not compile: {output.strip()[-500:]}")
    return target, [match[0] for match in SERIALISED.finditer(output)]


def hopper_sources() -> list[Path]:
    """Return the files of kernels whose main loop has asynchronous products."""
    files = [path for folder in ("cuda", "tests/hopper") for path in sorted((ROOT / "csrc" / folder).glob("*.cu"))]
    return [path for path in files if "wait_products<1>" in path.read_text()]


def hopper_kernels() -> tuple[list[Kernel], list[str]]:
    """Compile all kernels with asynchronous products. Return them and the messages on serialised products."""
    found: list[Kernel] = []
    messages = []
    for source in hopper_sources():
        path, serialised = compile_hopper(source)
        found += kernels_of(path, source.name)
        messages += [f"{source.name}: {message}" for message in serialised]
    return found, messages


def record(kernels: list[Kernel]) -> None:
    """Write the file of records."""
    RECORD.write_text("".join(f"{line}\n" for line in sorted(kernel.record for kernel in kernels) if line))


def differences(kernels: list[Kernel], source: str = "") -> list[str]:
    """Return how the kernels, all those of one file or of all, differ from their records."""
    recorded, present = (
        {": ".join(parts[:2]): parts[2].split("; ") for parts in (line.split(": ", 2) for line in lines)}
        for lines in (
            [line for line in RECORD.read_text().splitlines() if line.split(": ")[0] == source or not source],
            [kernel.record for kernel in kernels if kernel.record],
        )
    )
    found = [f"{name}: recorded, but not found" for name in recorded if name not in present]
    for name, now in present.items():
        if name not in recorded:
            found.append(f"{name}: not in {RECORD.name}")
            continue
        rates = [float(parts[1].split()[0]) for parts in (recorded[name], now)]
        is_other = [before != after for before, after in zip(recorded[name], now, strict=True)]
        is_other[1] = abs(rates[1] / rates[0] - 1) > TOLERANCE
        parts = zip(is_other, recorded[name], now, strict=True)
        found += [f"{name}: {after}; recorded: {before}" for other, before, after in parts if other]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the CUDA kernels and examine their machine code.")
    parser.add_argument("architectures", nargs="*", default=ARCHITECTURES, metavar="ARCHITECTURE")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.relative_to(ROOT)} and do nothing else")
    arguments = parser.parse_args()
    hopper, messages = hopper_kernels()
    if arguments.record:
        return record(hopper)
    found = [*kernels_of(library(tuple(arguments.architectures))), *hopper]
    messages += differences(hopper)
    print(*found, *messages, sep="\n")
    sys.exit(bool(messages) or any(kernel.faults() for kernel in found))


if __name__ == "__main__":
    main()
