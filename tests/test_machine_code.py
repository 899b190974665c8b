"""The model that predicts a GPU kernel's cost from its machine code: counts known by hand, kernels whose speed is
published, and the figures of another implementation of the same model."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from conftest import require

from sass import native, public, rates
from sass.code import parse, written
from sass.cost import Attention, Loop, Rows, issue_share, occupancy, order, plain_loop, row_path, widths
from sass.loops import innermost, inside, natural_loops, successors, whole
from sass.simulation import simulate

DATA = Path(__file__).parent / "data"
# {"provenance", "kernels", "ours": {name: {"instructions", "overlap", "simulated", "clocks"}}}, "ours" with "kernel"
REFERENCE = json.loads((DATA / "machine_code_reference.json").read_text())
ROOT = Path(__file__).resolve().parent.parent
RESULTS = json.loads((ROOT / "benchmarks/results/machine-code.json").read_text())


def code(text):
    """Instructions of 16 bytes each; those that begin with a number wait so many clocks."""
    lines = []
    for place, line in enumerate(text.strip().splitlines()):
        first, _, rest = line.strip().partition(" ")
        control, line = (int(first, 0), rest) if first[0].isdigit() else (7 << 5 | 7 << 8 | 1, line.strip())
        lines.append(f"/*{16 * place:04x}*/ {line} ; /* 0x{0:016x} */\n /* 0x{control << 41:016x} */")
    return parse("\n".join(lines))


# Two tiles of 8 scores a thread from registers; the wait at the end, out of line, comes back into the loop.
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


def test_parsing():
    instructions = code(KERNEL)
    assert [i.base for i in instructions[:4]] == ["S2R", "LDG", "LDSM", "HMMA"]
    assert (instructions[6].predicate, instructions[6].count) == ("@!P1", 0xC0)
    assert instructions[3].multiply_adds == 16 * 8 * 16
    assert instructions[2].shared_bytes == 4 * 8 * 16
    assert [i.pipe for i in instructions[5:9]] == ["mufu", "control", "imad_move", "local"]
    assert parse(written(instructions)) == instructions
    # bits of the control information: stall 4, yield 1, scoreboards 3 and 3, a mask of 6
    [waiting] = code("0x10c4b MUFU.EX2 R0, R1")
    assert (waiting.stall, waiting.write, waiting.read, waiting.waits) == (11, 2, 4, (0, 5))


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
    """As cuobjdump of CUDA 12.8 writes them for sm_120."""
    lines = "FADD R0, R0, R1 &req={0} ?trans5\nBRA.U UP0, 0x0          &req={3}     ?trans11\nEXIT ?trans5"
    instructions = code(lines)
    assert [i.operands for i in instructions] == ["R0, R0, R1", "UP0, 0x0", ""]
    assert natural_loops(successors(instructions)) == {0: {0, 1}}


def test_waits_out_of_line_are_no_loops():
    instructions = code(KERNEL)
    [body] = innermost(instructions, ("tensor",))
    assert [i.address // 16 for i in body] == list(range(2, 10))
    assert [i.address // 16 for i in whole(instructions)] == list(range(12))
    # what a wait out of line returns to is reached past it as well, and does not dominate it
    assert natural_loops([[1], [2, 3], [], [1]]) == {1: {1, 3}}
    assert natural_loops([[1, 2], [3], [3], [4, 1], []]) == {}


def test_nested_loops():
    nested = code("NOP \n HMMA.16816.F32 R0, R4, R8, R0 \n @P0 BRA 0x10 \n FADD R0, R0, R1 \n @P1 BRA 0x0 \n EXIT")
    assert [[i.address // 16 for i in body] for body in innermost(nested, ("tensor",))] == [[1, 2]]
    assert [[i.address // 16 for i in body] for body in innermost(nested, ("fp32",))] == [[0, 1, 2, 3, 4]]


def test_calls_that_leave_a_loop():
    """What follows is reached, the loop around both too; a routine that returns is in neither."""
    called = code(
        "NOP \n LDG.E R0, [R2.64] \n CALL.REL.NOINC 0x90 \n @P0 CALL.REL.NOINC 0x50 \n BRA 0x10 \n STG.E [R2.64], R0 \n"
        "@P1 BRA 0x50 \n @P2 EXIT \n BRA 0x0 \n MUFU.RSQ R0, R1 \n RET.REL.NODEC R4 0x0"
    )
    assert [[i.address // 16 for i in body] for body in innermost(called, ("global",))] == [[1, 2, 3, 4], [5, 6]]
    assert sorted(len(body) for body in natural_loops(successors(called)).values()) == [2, 4, 9]


def test_plain_loop():
    """Of two, that with fewer instructions to a product; of none, nothing."""
    product, other = "HMMA.16816.F32.BF16 R0, R4, R8, R0 \n", "FADD R0, R0, R1 \n"
    masked, plain = f"{product}{other * 2}@P0 BRA 0x0 \n", f"{product}{other}@P0 BRA 0x40 \n"
    assert [i.address // 16 for i in plain_loop(code(f"{masked}{plain}EXIT"))] == [4, 5, 6]
    assert plain_loop(code(f"{other}@P0 BRA 0x0 \n{product}EXIT")) == []
    assert [i.base for i in inside(code(f"{other}{product}@P0 BRA 0x10 \n EXIT"))] == ["HMMA", "BRA"]


def test_counts():
    """Two instructions of 16 x 8 x 16 are a score's two products of 16 multiply-adds: 128 scores, of a thread 4."""
    kernel = Attention(80, 16, products=2, registers=128, threads=128, shared=48 << 10, fetched=3.0)
    loop = Loop(plain_loop(code(KERNEL)), kernel)
    assert loop.scores == 4
    assert loop.per_score == {
        "tensor": 2 / 4, "shared": 1 / 4, "mufu": 1 / 4, "control": 2 / 4, "imad_move": 1 / 4, "local": 1 / 4,
    }  # fmt: skip
    assert loop.clocks == {
        "tensor": 2 * 2048 / 4 / 1024, "mufu": 32 / 4 / 16, "fma": 32 / 4 / 64, "alu": 0.0, "shared": 512 / 4 / 128,
        "tmem": 0.0,
        "l2": 3 * 32 / 30, "issue": 8 / 4 / 4,
    }  # fmt: skip
    # an A100 has 108 SMs at 1.41 GHz; bound by L2 alone, or by products and it after each other
    flops = 2 * 2 * 16 * 32 * 108 * 1.41 / 1e3
    assert loop.overlap == pytest.approx((flops / (1 + 3.2), flops / 3.2))
    assert (loop.local, loop.barriers, loop.drains) == (1, 0, 0)
    assert loop.programs == 3
    assert order(loop.body) == "2 HMMA, MUFU, LDL"
    assert widths(code(KERNEL)) == {"LDG": {128: 1}, "LDL": {32: 1}, "STG": {16: 1}}


def test_scores_of_a_program():
    """What a fifth-generation tensor core multiplies is in a descriptor: here 64 or 128 rows by 32 columns, by 16. With
    64 it is half as fast."""
    for descriptor, rows in (("0x4080490", 64), ("0x8080490", 128)):
        product = "UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], UP0"
        loop = Loop(code(f"UMOV UR11, {descriptor} \n {product}"), Attention(100, 16, 1, 128, 128, 0, 1.0))
        assert code(f"UMOV UR11, {descriptor} \n UIADD3 UR11, UR4, UR5, URZ \n {product}")[2].multiply_adds == 0
        assert loop.scores == rows * 32 / 128
        assert loop.clocks["tensor"] == 16 * 32 / 4096 * 128 / rows
        assert loop.clocks["shared"] == 32 * (rows + 32) / 128 / (rows * 32 / 32)


@pytest.mark.parametrize(
    ("registers", "threads", "shared", "programs"),
    [
        (255, 128, 64 << 10, 2),
        (255, 128, 0, 2),
        (128, 128, 0, 4),
        (32, 256, 0, 8),
        (255, 256, 140000, 1),
        (8, 32, 0, 32),
    ],
)
def test_occupancy(registers, threads, shared, programs):
    assert occupancy(rates.MACHINES[80], registers, threads, shared) == programs


def clocks(text, programs=1, warps=1, capability=80):
    machine = rates.MACHINES[capability]
    return simulate(
        code(text), machine, programs, warps, lambda i: i.multiply_adds / (machine.matrix or machine.mma), iterations=64
    )


def test_simulation_of_what_bounds_a_loop():
    """By the stall counts of one warp, by the clock's one instruction of many, by a pipe that all of them share."""
    idle = 7 << 5 | 7 << 8
    assert clocks(f"{idle | 5} MOV R0, R1\n" * 4) == 4 * 5
    assert clocks(f"{idle | 2} NOP\n" * 10, warps=4) == pytest.approx(4 * 10, abs=0.5)
    assert clocks("MUFU.EX2 R0, R1\n" * 4, warps=2) == pytest.approx(2 * 4 * 32 / 4, abs=0.5)
    assert clocks("HMMA.16816.F32 R0, R4, R8, R0\n" * 4, warps=2) == pytest.approx(2 * 4 * 2048 / 256, abs=0.5)
    assert clocks("LDS.128 R0, [R4]\n" * 4, warps=2) == pytest.approx(2 * 4 * 512 / 32, abs=1)


def test_simulation_of_waiting():
    """A scoreboard keeps a warp until the result is there; another warp goes on meanwhile."""
    idle, waiting = 7 << 5 | 7 << 8 | 1, 7 << 5 | 7 << 8 | 1 << 11 | 1
    load = f"{0 << 5 | 7 << 8 | 1} LDS R0, [R4] \n {waiting} FADD R0, R0, R0"
    alone = clocks(load)
    assert alone == pytest.approx(4 + rates.LATENCY["shared"] + 1, abs=1)
    assert clocks(load, warps=4) == pytest.approx(alone, abs=1)
    # products, then a wait for all of them, or for all but those of the next turn
    products = f"HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR4], R24, gsb0 \n {idle | 15} NOP \n" * 2
    drained = clocks(products + "WARPGROUP.DEPBAR.LE gsb0, 0x0", capability=90)
    overlapped = clocks(products + "WARPGROUP.DEPBAR.LE gsb0, 0x1", capability=90)
    busy = 2 * 64 * 64 * 16 / 4 / (2048 / 4)
    assert overlapped == pytest.approx(busy, abs=2)
    assert drained == pytest.approx(busy + rates.PRODUCTS + 1, abs=2)


def test_simulation_of_barriers():
    """The warps of a program wait for each other, those of another do not wait for them."""
    idle = 7 << 5 | 7 << 8
    body = f"{idle | 8} MOV R0, R1 \n BAR.SYNC 0x0"
    assert clocks(body) == pytest.approx(8 + 1 + rates.BARRIER, abs=1)
    assert clocks(body, warps=2) == pytest.approx(8 + 1 + rates.BARRIER + 1, abs=2)
    assert clocks(body, programs=2) == pytest.approx(clocks(body), abs=1)


def test_rows():
    """A block without a loop is the whole kernel, else its loop's iteration."""
    straight = code("LDG.E.128 R4, [R2.64] \n FADD R4, R4, R5 \n STG.E.128 [R2.64], R4 \n EXIT")
    assert len(row_path(straight)) == 4
    looped = code("MOV R0, R1 \n LDG.E R4, [R2.64] \n STG.E [R2.64], R4 \n @P0 BRA 0x10 \n EXIT")
    assert len(row_path(looped)) == 3
    # of H100's 3.35 TB/s, 132 SMs at 1.65 GHz; 32 x 4 instructions of threads a clock
    share = issue_share(straight, Rows(90, elements=8, bytes=4.0))
    assert share == pytest.approx(3350 / 132 / 1.65 / 4.0 * 4 / 8 / 128)


LOOPS = public.loops()


@pytest.mark.parametrize(
    "name",
    [
        name if name in public.PUBLISHED and "d128" in name else pytest.param(name, marks=pytest.mark.slow)
        for name in public.KERNELS
    ],
)
def test_public_kernels(name):
    """Near what is published, and what the other implementation says of the whole kernel."""
    loop = LOOPS[name]
    simulated = agrees(loop, REFERENCE["kernels"][name])
    if name in public.PUBLISHED:
        assert simulated == pytest.approx(public.PUBLISHED[name], rel=0.15 if name.startswith("fa2") else 0.5)
    assert simulated == pytest.approx(RESULTS["public"][name]["predicted_tflops"]["simulated"])


OURS = public.read(DATA / "machine_code_ours.sass.xz")


@pytest.mark.parametrize(
    "name", [name if "d128_drop" in name else pytest.param(name, marks=pytest.mark.slow) for name in OURS]
)
def test_our_kernels(name):
    """Our own main loops are not flattered: the other implementation says the same of them."""
    reference = REFERENCE["ours"][name]
    agrees(Loop(OURS[name], Attention(**reference["kernel"])), reference)


def test_every_kernel_of_ours_has_a_reference():
    assert OURS.keys() == REFERENCE["ours"].keys()
    assert len(OURS) == 2 * 2 * 2 * 3  # architectures, head sizes, with dropout, kernels


def agrees(loop, reference):
    """Within 10 % with the other implementation; TFLOP/s."""
    simulated = loop.simulated()
    assert simulated == pytest.approx(reference["simulated"], rel=0.1)
    assert len(loop.body) / loop.scores == pytest.approx(reference["instructions"], rel=0.1)
    assert loop.overlap == pytest.approx(reference["overlap"], rel=0.1)
    found = loop.clocks
    assert found.pop("tmem") == 0
    found["shared"] -= 0.75 * loop.per_score.get("shuffle", 0)  # of which the other counts a quarter
    assert found == pytest.approx(reference["clocks"], rel=0.1)
    return simulated


NESTED = """
MOV R0, RZ
LDG.E.128 R4, [R2.64]
FADD R8, R8, R4
@P0 BRA 0x50
BRA 0x20
STG.E.128 [R2.64], R8
@P1 BRA 0x10
EXIT
"""


def test_executed():
    """By hand: the outer loop twice, the inner, which is left from its middle, four times."""
    found = Counter(i.base for i in native.executed(code(NESTED), (1, 2, 4)))
    assert found == {"MOV": 1, "LDG": 2, "FADD": 4, "BRA": 4 + 4 + 2, "STG": 2, "EXIT": 1}
    assert {i.base for i in native.executed(code(NESTED), (0, 1, 1))} == {"LDG", "FADD", "BRA", "STG"}


def test_page():
    """docs/machine-code.md has the tables of the committed results, and says of every line that it is a prediction."""
    require("triton")
    import machine_code

    page = (ROOT / "docs/machine-code.md").read_text()
    tables = machine_code.tables(RESULTS)
    assert f"<!-- machine-code:begin -->\n{tables}\n<!-- machine-code:end -->" in page
    assert [line for line in tables.splitlines() if re.match(r"\| [^-]", line) and "predicted" not in line] == []
    # by hand: 5 products of 128 multiply-adds, where our two kernels do 3 and 4
    rates = [
        next(found for found in RESULTS["kernels"] if found["name"] == f"{kernel} d128 sm_90")["predicted_tflops"]
        for kernel in ("grad_query", "grad_key_value")
    ]
    wanted = 5 / (3 / rates[0]["simulated"] + 4 / rates[1]["simulated"])
    assert f"| H100 backward D=128 | predicted {wanted:.0f} |" in tables
    for name, published in public.PUBLISHED.items():
        predicted = RESULTS["public"][name]["predicted_tflops"]["simulated"]
        assert f"| predicted {predicted:.0f} ({published}) |" in tables, name


def test_one_backward_kernel():
    """By hand: where the loop takes an SM of H100 16 clocks for 32 scores, a fifth product of 64 multiply-adds takes 1;
    dQ's sums in float32 are 8 bytes a score beside 4, at 25 a clock."""
    require("triton")
    import machine_code

    clock = 132 * 1.65 / 1e3  # TFLOP/s of one operation a clock
    found = {"tile": [64, 64, 4, 2], "clocks": {"l2": 32 * 4 / 25}}
    found["predicted_tflops"] = {"simulated": 2 * 4 * 64 * 32 / 16 * clock}
    after, beside = machine_code.one_pass({"grad_key_value d64 sm_90": found}, 64, "d64", 90)
    assert after == pytest.approx(2 * 5 * 64 * 32 / (17 + 32 * 8 / 25) * clock)
    assert beside == pytest.approx(2 * 5 * 64 * 32 / 17 * clock)  # L2 is not the bound
    found["clocks"]["l2"] = 10.0
    _, beside = machine_code.one_pass({"grad_key_value d64 sm_90": found}, 64, "d64", 90)
    assert beside == pytest.approx(2 * 5 * 64 * 32 / (10 + 32 * 8 / 25) * clock)


# Prints the instructions of the plain loops of what each call compiles that those before it have not.
CALLS = """
import functools, json
import aot_gate, machine_code
from fake_gpu import pretend

def forward(window, has_lengths):
    query, key, value = (aot_gate.empty(4, 8, 2048, 64, dtype=machine_code.DTYPE) for _ in range(3))
    lengths = aot_gate.empty(4, dtype=machine_code.torch.int64) if has_lengths else None
    machine_code.FUNCTIONS["attention"](query, key, value, None, lengths, None, 0.125, *window, False, 0)

pretend(90)
seen, found = set(), {}
for name, *call in ("plain", (-1, -1), False), ("causal", (-1, 0), False), ("lengths", (-1, -1), True):
    kernels = machine_code.compiled(0, functools.partial(forward, *call), seen)
    found[name] = [aot_gate.examine(*kernel, 90).instructions for kernel in kernels]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_causal_calls_and_key_lengths_have_the_plain_loop():
    """Causal calls run the kernel of others; with key lengths a loop over whole tiles has no more instructions."""
    require("triton")
    from test_triton import last_json, program

    status, output = program("-c", f"import sys; sys.path.insert(0, {str(ROOT / 'tools')!r})\n{CALLS}")
    assert status == 0, output
    found = last_json(output)
    [plain], [lengths] = found["plain"], found["lengths"]
    assert found["causal"] == []
    assert plain > 100
    assert lengths <= 1.02 * plain


@pytest.mark.slow
def test_program():
    """From a kernel's source to its line: a row of 512 is accessed by 128 bits, eight times for 64 elements of 16.

    CUDA C++'s kernels of the same calls follow Triton's.
    """
    require("triton")
    from test_triton import program

    tool, only = str(ROOT / "tools/machine_code.py"), "^softmax_dropout forward 512|^dropout 512"
    status, output = program(tool, "--arch", "90", "--only", only)
    assert status == 0, output
    lines = {line.split("  ")[0]: line for line in output.splitlines() if "predicted" in line}
    calls = ["softmax_dropout forward 512", "dropout 512"]
    assert list(lines) == [f"{call} sm_90{by}" for by in ("", " CUDA C++") for call in calls]
    assert lines["dropout 512 sm_90"].endswith("128: 8}, 'STG': {128: 8}}")  # the seed's loads are narrower
    assert lines["dropout 512 sm_90 CUDA C++"].endswith("128: 2}, 'STG': {128: 2}}")
    status, output = program(tool, "--only", "forwards")
    assert status == 2
    assert "no kernel's name has 'forwards'" in output
    assert "Traceback" not in output
