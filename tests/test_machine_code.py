"""Tests of the reader of GPU machine code: instructions, loops and counts known by hand."""

from pathlib import Path

import pytest
from conftest import require

from sass.code import parse
from sass.counts import Loop, order, plain_loop, wide_share, widths
from sass.loops import innermost, natural_loops, successors

TOOLS = Path(__file__).resolve().parent.parent / "tools"


def code(text):
    """Return instructions of 16 bytes each."""
    lines = enumerate(text.strip().splitlines())
    return parse("\n".join(f"/*{16 * place:04x}*/ {line.strip()} ; /* 0x{0:016x} */" for place, line in lines))


# Two products, each of 16 x 8 x 16 per warp. The wait at the end, out of line, branches back into the loop.
KERNEL = """
S2R R0, SR_TID.X
LDG.E.128 R4, [R2.64]
LDSM.16.M88.4 R8, [R3]
HMMA.16816.F32.BF16 R12, R8, R4, R12
HMMA.16816.F32.BF16 R16, R8, R6, R16
MUFU.EX2 R20, R12
@!P1 BRA 0xc0
IMAD.MOV.U32 R21, RZ, RZ, R20
LDL R22, [R1]
@P0 BRA 0x20
STG.E.U16 [R2.64], R20
EXIT
BAR.SYNC.DEFER_BLOCKING 0x0
BRA 0x70
"""


@pytest.mark.parametrize(
    ("line", "multiply_adds", "bytes"),
    [
        ("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0", 64 * 128 * 16 // 4, (64 + 128) * 16 * 2 // 4),
        ("HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR4], R24", 64 * 64 * 16 // 4, 64 * 16 * 2 // 4),
        ("HMMA.1688.F32.TF32 R4, R8, R9, R4", 16 * 8 * 8, 0),
        ("LDS.U.128 R4, [R8]", 0, 16 * 32),
        ("STS.U16 [R8], R4", 0, 2 * 32),
        ("LDS R4, [R8]", 0, 4 * 32),
        ("LDSM.16.MT88.2 R4, [R8]", 0, 2 * 128),
        ("LDGSTS.E.BYPASS.128 [R4], [R8.64]", 0, 16 * 32),
        ("FFMA R4, R4, R8, R9", 0, 0),
    ],
)
def test_work_of_an_instruction(line, multiply_adds, bytes):
    [instruction] = code(line)
    assert (instruction.multiply_adds, instruction.shared_bytes) == (multiply_adds, bytes)


def test_annotations_are_no_operands():
    """Annotations, in the form that cuobjdump of CUDA 12.8 writes for sm_120, are not read as operands."""
    lines = "FADD R0, R0, R1 &req={0} ?trans5\nBRA.U UP0, 0x0          &req={3}     ?trans11\nEXIT ?trans5"
    instructions = code(lines)
    assert [i.operands for i in instructions] == ["R0, R0, R1", "UP0, 0x0", ""]
    assert natural_loops(successors(instructions)) == {0: {0, 1}}


def test_waits_out_of_line_are_no_loops():
    [body] = innermost(code(KERNEL), "tensor")
    assert [i.address // 16 for i in body] == list(range(2, 10))
    # A wait out of line does not dominate the place that it returns to, which is also reached past the wait.
    assert natural_loops([[1], [2, 3], [], [1]]) == {1: {1, 3}}
    assert natural_loops([[1, 2], [3], [3], [4, 1], []]) == {}


def test_calls_that_leave_a_loop():
    """The code after a call is reached, and so are both loops around it; the routine that returns is in neither."""
    called = code(
        "NOP \n LDG.E R0, [R2.64] \n CALL.REL.NOINC 0x90 \n @P0 CALL.REL.NOINC 0x50 \n BRA 0x10 \n STG.E [R2.64], R0 \n"
        "@P1 BRA 0x50 \n @P2 EXIT \n BRA 0x0 \n MUFU.RSQ R0, R1 \n RET.REL.NODEC R4 0x0"
    )
    assert [[i.address // 16 for i in body] for body in innermost(called, "global")] == [[1, 2, 3, 4], [5, 6]]
    assert sorted(len(body) for body in natural_loops(successors(called)).values()) == [2, 4, 9]


def test_counts():
    """Two products of 16 x 8 x 16 are 32 multiply-adds for each of 128 scores, 4 per thread. A wait that leaves
    products pending is no drain, and an arrival at a barrier is no wait."""
    loop = Loop(plain_loop(code(KERNEL)), capability=80, depth=2 * 16)
    assert loop.scores == 4
    assert loop.pipes == {"tensor": 2, "control": 2, "shared": 1, "mufu": 1, "imad_move": 1, "local": 1}
    assert loop.clocks == {"tensor": 2 * 2048 / 1024, "shared": 512 / 128, "issue": 8 / 4}
    assert loop.shared_share == 1
    assert (loop.local, loop.barriers, loop.drains) == (1, 0, 0)
    assert widths(code(KERNEL)) == {("LDG", 128): 1, ("LDL", 32): 1, ("STG", 16): 1}
    assert wide_share(code(KERNEL), ("LDG", "STG")) == 128 / 144
    lines = str(loop).splitlines()
    assert lines[0].startswith("2.00 instructions per score: tensor 0.50, control 0.50, shared 0.25, ")
    assert lines[1:] == [
        "clocks per 32 scores: tensor 1.00, shared 1.00, issue 0.50", "accesses: 1 LDL of 32 bits",
        "order: 2 HMMA, MUFU, LDL",
    ]  # fmt: skip
    waits = "WARPGROUP.DEPBAR.LE gsb0, 0x0 \n WARPGROUP.DEPBAR.LE gsb0, 0x1 \n BAR.SYNC 0x0 \n BAR.ARV 0x1, 0x100"
    loop = Loop(code(waits), capability=90)
    assert (loop.drains, loop.barriers) == (1, 1)
    assert order(loop.body) == "WARPGROUP.DEPBAR<=0, WARPGROUP.DEPBAR<=1, BAR.SYNC, BAR.ARV"


# Program that prints tile, scores and instructions of plain loops: plain on sm_80, sm_90, with lengths, on sm_120.
CALLS = """
import json, torch
import aot_gate, fake_gpu
from torch._subclasses.fake_tensor import FakeTensorMode

fake_gpu.pretend(80, 90, 120)
found = []
for device, has_lengths in (0, False), (1, False), (1, True), (2, False):
    seen = {id(kernel) for _, kernel in aot_gate.specialisations(device)}
    with torch.cuda.device(device), FakeTensorMode():
        query, key, value = (aot_gate.empty(4, 8, 2048, 64, dtype=torch.bfloat16) for _ in range(3))
        lengths = aot_gate.empty(4, dtype=torch.int64) if has_lengths else None
        aot_gate.call("attention", query, key, value, None, lengths, None, 0.125, -1, -1, False, 0)
    [(function, kernel)] = [one for one in aot_gate.specialisations(device) if id(one[1]) not in seen]
    report = aot_gate.examine(function, kernel, (80, 90, 120)[device])
    tile = int(report.known["BLOCK_M"]) * int(report.known["BLOCK_N"]) / kernel.metadata.num_warps / 32
    found.append([tile, report.instructions / report.per_score, report.instructions])
print(json.dumps({"found": found}))
"""


@pytest.mark.slow
def test_compiled_loops():
    """An iteration has the scores of a tile. With key lengths, a loop over whole tiles has at most 2 % more
    instructions."""
    require("triton")
    from test_triton import last_json, program

    status, output = program("-c", f"import sys; sys.path.insert(0, {str(TOOLS)!r})\n{CALLS}")
    assert status == 0, output
    found = last_json(output)["found"]
    assert all(scores == tile and instructions > 100 for tile, scores, instructions in found), found
    assert found[2][2] <= 1.02 * found[1][2]
