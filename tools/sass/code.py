"""Parse a disassembly of cuobjdump: instructions, their pipes, the bytes they move and the products they compute."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tempfile
from functools import cached_property
from pathlib import Path

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;\n]*);")
_ANNOTATIONS = re.compile(r"\s*([&?]\S+\s*)+$")  # control information, which some versions print for Blackwell

# Pipes by the first part of an opcode. The pipe of IMAD depends on the rest; uniform instructions have their own pipe.
_PIPES = {
    opcode: pipe
    for pipe, opcodes in {
        "tensor": "HMMA HGMMA IMMA QGMMA BMMA UTCHMMA UTCQMMA UTCIMMA UTCOMMA",
        "mufu": "MUFU",
        "fp32": "FFMA FFMA2 FADD FADD2 FMUL FMUL2 HFMA2 HADD2 HMUL2 FFMA32I FADD32I FMUL32I FSWZADD",
        "max": "FMNMX FMNMX3",
        "select": "FSEL FSETP SEL ISETP PLOP3 P2R R2P FSET",
        "convert": "F2FP F2F I2F F2I I2FP",
        "int": "IADD3 LOP3 SHF PRMT LEA VIADD IABS IMNMX VIMNMX IADD ISCADD BMSK SGXT POPC FLO BREV LOP S2R CS2R R2UR "
        "VOTE IDP S2UR",
        "move": "MOV",
        "shared": "LDS LDSM STS STSM ATOMS",
        "tmem": "LDTM STTM",
        "shuffle": "SHFL",
        "global": "LDG LDGSTS STG RED REDG ATOM ATOMG UTMALDG UBLKCP UTMASTG UTMAREDG UTMACMDFLUSH LD ST LDC",
        "local": "LDL STL",
        "sync": "BAR SYNCS WARPSYNC WARPGROUP DEPBAR LDGDEPBAR FENCE MEMBAR ERRBAR CCTL ELECT UTMACCTL WARPGROUPSET "
        "ARRIVES UTCBAR",
        "control": "BRA BSSY BSYNC EXIT NOP CALL RET BRX JMP BREAK YIELD NANOSLEEP KILL BPT USETMAXREG",
    }.items()
    for opcode in opcodes.split()
}


@dataclasses.dataclass(frozen=True)
class Instruction:
    address: int
    predicate: str  # such as "@!P0", or ""
    opcode: str
    operands: str

    @cached_property
    def base(self) -> str:
        return self.opcode.partition(".")[0]

    @cached_property
    def pipe(self) -> str:
        if self.base == "IMAD":
            if ".MOV" in self.opcode:
                return "imad_move"
            return "wide" if ".WIDE" in self.opcode or ".HI" in self.opcode else "imad"
        return _PIPES.get(self.base, "uniform" if self.base.startswith("U") else "other")

    @property
    def count(self) -> int | None:
        """The number at the operands' end: a branch's target, or how many groups may be pending after a wait."""
        number = re.search(r"0x([0-9a-f]+)\s*$", self.operands)
        return int(number[1], 16) if number else None

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of one warp (wgmma: a quarter of the warpgroup's), 0 on a fifth-generation tensor core."""
        if shape := re.search(r"GMMA\.(\d+)x(\d+)x(\d+)", self.opcode):
            rows, columns, depth = map(int, shape.groups())
            return rows * columns * depth // 4
        shape = re.match(r"HMMA\.(168(?:8|16))\b", self.opcode)
        return {"16816": 2048, "1688": 1024}[shape[1]] if shape else 0

    @property
    def bits(self) -> int:
        """Bits that a thread accesses in memory."""
        width = re.search(r"\.[US]?(8|16|64|128|256)\b", self.opcode)
        return int(width[1]) if width else 32

    @property
    def shared_bytes(self) -> float:
        """Bytes of shared memory that a warp moves. Operands in registers move none."""
        if self.base == "HGMMA":
            columns = int(re.search(r"x(\d+)x", self.opcode)[1])  # type: ignore[index]
            is_from_shared = self.operands.split(", ")[1].startswith("gdesc")  # the first factor
            return (columns + 64 * is_from_shared) * 32 / 4
        if self.base in ("LDSM", "STSM"):
            matrices = re.search(r"\.([24])$", self.opcode)
            return 128 * int(matrices[1] if matrices else 1)
        if self.pipe == "shared" or self.base == "LDGSTS":
            return self.bits * 32 / 8
        return 0


def parse(disassembly: str) -> list[Instruction]:
    """Return the instructions of one kernel, disassembled by ``cuobjdump --dump-sass``."""
    return [
        Instruction(int(address, 16), predicate, opcode, _ANNOTATIONS.sub("", operands).rstrip())
        for address, predicate, opcode, operands in _INSTRUCTION.findall(disassembly)
    ]


@dataclasses.dataclass(frozen=True)
class Binary:
    """A compiled kernel."""

    registers: int
    stack: int  # bytes
    instructions: list[Instruction]


def disassemble(cubin: bytes, tools: Path) -> Binary:
    """Disassemble a cubin with the cuobjdump in the folder ``tools``."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, disassembly = (
            subprocess.run([tools / "cuobjdump", flag, file.name], check=True, capture_output=True, text=True).stdout
            for flag in ("--dump-resource-usage", "--dump-sass")
        )
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())  # type: ignore[union-attr]
    return Binary(registers, stack, parse(disassembly))
