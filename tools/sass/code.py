"""Reads a disassembly of cuobjdump or nvdisasm: instructions, the pipes they take, what they move and multiply."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tempfile
from functools import cached_property
from pathlib import Path

_INSTRUCTION = re.compile(
    r"/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^\n]*?)\s*;\s+"
    r"/\* 0x[0-9a-f]{16} \*/\s+/\* 0x([0-9a-f]{16}) \*/"
)
_ANNOTATIONS = re.compile(r"\s*([&?]\S+\s*)+$")  # the control information, as some versions write it out for Blackwell
_CONTROL = 41  # the bit of the second word at which an instruction's control information begins

# Pipes by the first part of an opcode; IMAD's depends on the rest, and uniform instructions have one of their own.
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
    control: int  # stall count, and which scoreboards are set and waited for, as encoded
    descriptor: int = 0  # of a fifth-generation tensor core's instruction: PTX ISA, tcgen05, instruction descriptor

    @cached_property
    def base(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def stall(self) -> int:
        """Clocks until the warp's next instruction."""
        return self.control & 15

    @property
    def write(self) -> int:
        """The scoreboard that the result frees; 7: none."""
        return self.control >> 5 & 7

    @property
    def read(self) -> int:
        """The scoreboard that the reading of the operands frees; 7: none."""
        return self.control >> 8 & 7

    @property
    def waits(self) -> tuple[int, ...]:
        """The scoreboards that must be free before."""
        return tuple(board for board in range(6) if self.control >> 11 + board & 1)

    @cached_property
    def pipe(self) -> str:
        if self.base == "IMAD":
            if ".MOV" in self.opcode:
                return "imad_move"
            return "wide" if ".WIDE" in self.opcode or ".HI" in self.opcode else "imad"
        return _PIPES.get(self.base, "uniform" if self.base.startswith("U") else "other")

    @property
    def count(self) -> int | None:
        """The number at the operands' end: how much may be pending behind a wait."""
        number = re.search(r"0x([0-9a-f]+)\s*$", self.operands)
        return int(number[1], 16) if number else None

    @property
    def multiply_adds(self) -> int:
        """Of a warp: a quarter of its warpgroup's. A program's, of a fifth-generation tensor core; 0: not known."""
        if self.is_fifth:
            return self.rows * (self.descriptor >> 17 & 63) * 8 * 16
        if shape := re.search(r"GMMA\.(\d+)x(\d+)x(\d+)", self.opcode):
            rows, columns, depth = map(int, shape.groups())
            return rows * columns * depth // 4
        shape = re.match(r"HMMA\.(168(?:8|16))\b", self.opcode)
        return {"16816": 2048, "1688": 1024}[shape[1]] if shape else 0

    @property
    def is_fifth(self) -> bool:
        """Whether one thread starts it for all of a program, on a fifth-generation tensor core."""
        return self.base.startswith("UTC") and self.pipe == "tensor"

    @property
    def rows(self) -> int:
        """Of a product on a fifth-generation tensor core."""
        return (self.descriptor >> 24 & 31) * 16

    @property
    def bits(self) -> int:
        """The width of a thread's access to memory, by the opcode."""
        width = re.search(r"\.[US]?(8|16|64|128|256)\b", self.opcode)
        return int(width[1]) if width else 32

    @property
    def shared_bytes(self) -> float:
        """Bytes of shared memory that a warp's instruction moves; of matrix instructions as ``multiply_adds``, without
        the operand that comes from registers or tensor memory."""
        if self.is_fifth:
            return ((self.descriptor >> 17 & 63) * 8 + (self.rows if self.is_from_shared else 0)) * 32
        if self.base == "HGMMA":
            columns = int(re.search(r"x(\d+)x", self.opcode)[1])  # type: ignore[index]
            return (columns + (64 if self.is_from_shared else 0)) * 32 / 4
        if self.base in ("LDSM", "STSM"):
            matrices = re.search(r"\.([24])$", self.opcode)
            return 128 * int(matrices[1] if matrices else 1)
        if self.pipe == "shared" or self.base == "LDGSTS":
            return self.bits * 32 / 8
        return 0

    @property
    def tensor_memory_bytes(self) -> float:
        """Bytes of tensor memory that a warp's instruction moves."""
        registers = re.search(r"\.x(\d+)", self.opcode) if self.pipe == "tmem" else None
        lanes = 16 if ".16dp" in self.opcode else 32
        return int(registers[1]) * lanes * 4 if registers else 0

    @property
    def is_from_shared(self) -> bool:
        """Whether the first factor of wgmma or of a fifth-generation tensor core lies in shared memory."""
        return self.operands.split(", ")[0 if self.is_fifth else 1].startswith("gdesc")


def parse(disassembly: str) -> list[Instruction]:
    """The instructions of a disassembly of one kernel with their encodings (``cuobjdump --dump-sass``)."""
    found: list[Instruction] = []
    constants: dict[str, int] = {}  # in uniform registers
    for address, predicate, opcode, operands, word in _INSTRUCTION.findall(disassembly):
        operands = _ANNOTATIONS.sub("", operands)
        if opcode == "UMOV" and (constant := re.fullmatch(r"(UR\d+), 0x([0-9a-f]+)", operands)):
            constants[constant[1]] = int(constant[2], 16)
        elif destination := re.match(r"UR\d+", operands):
            constants.pop(destination[0], None)
        register = re.search(r"\bidesc\[(UR\d+)\]", operands)
        descriptor = constants.get(register[1], 0) if register else 0
        control = int(word, 16) >> _CONTROL & 0x1FFFF
        found.append(Instruction(int(address, 16), predicate, opcode, operands, control, descriptor))
    return found


def written(instructions: list[Instruction]) -> str:
    """What ``parse`` reads as these: a disassembly without encodings, but for the control information."""
    return "".join(
        f"/*{i.address:04x}*/ {i.predicate}{' ' if i.predicate else ''}{i.opcode} {i.operands} ; "
        f"/* 0x{0:016x} */ /* 0x{i.control << _CONTROL:016x} */\n"
        for i in instructions
    )


@dataclasses.dataclass(frozen=True)
class Binary:
    """A compiled kernel."""

    registers: int
    stack: int  # bytes
    instructions: list[Instruction]


def disassemble(cubin: bytes, tools: Path) -> Binary:
    """By the cuobjdump of this folder."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, disassembly = (
            subprocess.run([tools / "cuobjdump", flag, file.name], check=True, capture_output=True, text=True).stdout
            for flag in ("--dump-resource-usage", "--dump-sass")
        )
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())  # type: ignore[union-attr]
    return Binary(registers, stack, parse(disassembly))
