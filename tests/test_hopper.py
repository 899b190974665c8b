"""Hopper's instructions: facts and rules of the emulation, faults that it must find, and the machine code from nvcc.

Without a GPU the kernels of csrc/tests/hopper and attention's for Hopper are emulated (csrc/tests/emulation)."""

import functools
import re
import shutil
import time

import oracle
import pytest
import torch
from conftest import DEVICE, require, slow
from preloaded import forks
from test_cuda import ROOT, build, compile_gate, planted, require_nvcc

import emulation
import hopper

SCHEDULES = [1, *slow(10)] if DEVICE == "cpu" else [1]  # the number of schedules; a GPU has its own


@pytest.fixture
def kernels():
    """Return the library of the test kernels, emulated or compiled for the GPU."""
    if DEVICE != "cpu":
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("for GPUs of compute capability 9.0")
        with torch.device("cpu"):  # The tests' tensors; hopper.py copies them.
            yield hopper.compiled()
        return
    require("cuda")
    with emulation.strict():
        yield emulation.library()[1]


def in_schedules(library, count, call):
    """Return the results of a call in so many schedules of threads and asynchronous instructions."""
    results = []
    for seed in range(count):
        if DEVICE == "cpu":
            library.seed_order(seed)
        results.append(call())
    return results


@pytest.mark.parametrize("count", SCHEDULES)
@pytest.mark.parametrize("name", hopper.BY_NAME)
def test_facts(kernels, name, count):
    """The emulation and a GPU show the same facts."""
    for lines in in_schedules(kernels, count, lambda: hopper.lines(kernels, name)):
        assert lines == hopper.expected(name) != []


FORWARD = {
    "whole tiles": ((64, 512), {}),
    "dropout": ((64, 512), {"dropout_p": 0.1}),
    "uneven lengths, several tiles per block": ((64, 400, [300, 400]), {"dropout_p": 0.1, "blocks": 3}),
    "no key": ((64, 260, [0, 200]), {"dropout_p": 0.1, "blocks": 2}),
    "no key, causal": ((128, 130, [130, 0]), {"is_causal": True}),
    "causal": ((64, 300), {"is_causal": True, "dropout_p": 0.1}),
    "wide heads": ((128, 300, [300, 130]), {"is_causal": True, "blocks": 2}),
    "wide heads, dropout": ((128, 260), {"dropout_p": 0.1, "blocks": 1}),
}


@pytest.mark.parametrize("count", SCHEDULES)
@pytest.mark.parametrize("name", FORWARD)
def test_forward(kernels, name, count):
    """Every schedule gives right results, and the same bits for any number of blocks."""
    arguments, options = FORWARD[name]
    first = hopper.forward(kernels, *arguments, **options)
    others = options | {"blocks": None}
    for found in in_schedules(kernels, count, lambda: hopper.forward(kernels, *arguments, **others)):
        assert all(map(torch.equal, found, first))


BACKWARD = {
    "whole tiles": ((64, 256), {}),
    "dropout": ((64, 256), {"dropout_p": 0.1}),
    "uneven lengths": ((64, 300, [300, 140]), {"dropout_p": 0.1}),
    "no key": ((64, 200, [0, 200]), {}),
    "causal": ((64, 300), {"is_causal": True, "dropout_p": 0.1}),
    "wide heads": ((128, 256), {}),
    "wide heads, causal": ((128, 280, [280, 100]), {"is_causal": True, "dropout_p": 0.1}),
    "two stages of 192 columns": ((192, 200), {"dropout_p": 0.1}),
    "a stage of 256 columns": ((256, 150, [150, 100]), {"is_causal": True}),
}


@pytest.mark.parametrize("count", SCHEDULES)
@pytest.mark.parametrize("name", BACKWARD)
def test_backward(kernels, name, count):
    """Every schedule gives right results, and the same bits although the blocks add to the same sums."""
    arguments, options = BACKWARD[name]
    call = functools.partial(hopper.backward, kernels, *arguments, **options)
    first = call()
    for found in in_schedules(kernels, count, call):
        assert all(map(torch.equal, found, first))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_dropped_weights(kernels, head_dim):
    """Both passes drop the weights that the formula drops, and no other."""
    wanted = oracle.dropout_mask((2, 256, 256), 0.1, hopper.SEED)
    assert all(torch.equal(found, wanted) for found in hopper.kept(kernels, head_dim, 256, 0.1))


@pytest.mark.skipif(DEVICE != "cpu", reason="for the emulation")
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_the_emulation_is_fast(kernels, dropout_p):
    """The forward pass at (1, 2, 512, 64) takes under 10 s."""
    operands = [*hopper.operands(3, (2, 512, 64))]
    begin = time.perf_counter()
    hopper.run_forward(kernels, *operands, [512, 512], dropout_p)
    assert time.perf_counter() - begin < 10


@pytest.mark.skipif(DEVICE != "cpu", reason="for the emulation")
def test_static_shared_memory_is_refused(kernels):
    """Blocks that are resident together would share it."""
    with pytest.raises(RuntimeError, match="static shared memory"):
        hopper.call(kernels, "static_memory")


@pytest.mark.skipif(DEVICE != "cpu", reason="for the emulation")
@pytest.mark.parametrize(
    ("form", "offset", "leading", "stride", "swizzle", "base"),
    [
        (2, 512, 16, 1024, "128", 0), (2, 512, 16, 1024, "128", 2), (2, 0, 16, 1024, "128", 4),
        (2, 0, 16, 512, "128", 0), (2, 64, 16, 512, "64", 0), (2, 128, 16, 256, "32", 0),
        (3, 128, 8192, 1024, "128", 0), (3, 0, 2048 + 128, 512, "64", 0), (3, 0, 4096, 256, "none", 1),
    ],
)  # fmt: skip
def test_operands_that_begin_within_a_pattern_are_refused(kernels, form, offset, leading, stride, swizzle, base):
    """Where the swizzle's pattern begins is a multiple of its size, or what the base offset says."""
    b = hopper.descriptor(offset, leading, stride, hopper.SWIZZLES[swizzle], base)
    with pytest.raises(RuntimeError, match=f"base offset {base} is not where its swizzle's pattern"):
        hopper.product(kernels, 64, form, hopper.empty_image(), hopper.no_words(), 0, b)


@pytest.mark.skipif(DEVICE != "cpu", reason="for the emulation")
def test_a_deadlock_is_found(kernels):
    """The message names each place at which threads wait, and the seed that repeats it."""
    turn = torch.full((1,), 7, dtype=torch.int32)  # nobody's

    def message():
        ticket = torch.zeros(1, dtype=torch.int32)
        with pytest.raises(RuntimeError, match="deadlock") as error:
            hopper.call(kernels, "ordered", 2, torch.zeros(1, 2, 16), 16, 1, ticket, turn, torch.zeros(1, 16))
        return str(error.value)

    kernels.seed_order(5)
    found = message()
    assert re.search(r" \d at wait_turn at \S*conformance.cu:\d+, the first is thread 0 of block [01],0,0;", found)
    assert re.search(r" \d+ at __syncthreads at \S*conformance.cu:\d+, the first is thread 1 of block [01],0,0;", found)
    kernels.seed_order(int(re.search(r"seed (\d+)$", found)[1]))
    assert message() == found


# Planted faults by name: (kernel, lines of its code, a part of them, the fault that replaces it, texts of which one
# must appear in every schedule, for the faults in ``BY_CHANCE`` in one). Lines are compared without indentation and
# comments. They stand in the file once.
ACCURACY = "error .* > |not finite"
FAULTS = {
    "none": ("forward", "", "", "", "as expected"),
    "none in the backward pass": ("backward", "", "", "", "as expected"),
    "no proxy fence": (
        "backward", "fence_async();\nsync_named(kScoresReady, kScoresParty);", "fence_async();", "",
        "has not called fence_async",
    ),
    "no proxy fence after clearing": (
        "forward", "fence_async();\nsync_named(kCleared, kGroups * kWarpgroup);", "fence_async();", "",
        "has not called fence_async",
    ),
    "barriers not fenced": ("backward", "fence_barriers();", "fence_barriers();", "", "no fence_barriers"),
    "parity off by one": (
        "forward",
        "wait(base + At::kKeyFull + 8 * stage.index, stage.parity);\nmy_turn();\nfence_products(S);\n"
        "start_scores(stage.index);\nnext_turn();",
        "stage.parity", "stage.parity ^ 1", "a pending load writes|deadlock",
    ),
    "parity of the producer off by one": (
        "forward", "wait(base + At::kKeyEmpty + number, stage.parity ^ 1);", " ^ 1", "", "deadlock",
    ),
    "stage released before the wait": (
        "forward", "wait_products<0>(O);\nrelease(At::kValueEmpty + 8 * before.index);",
        "wait_products<0>(O);\nrelease(At::kValueEmpty + 8 * before.index);",
        "release(At::kValueEmpty + 8 * before.index);\nwait_products<0>(O);", "a pending instruction reads",
    ),
    "too few bytes expected": (
        "forward", "arrive_expecting(base + full, rows * At::D * 2);", "At::D * 2", "At::D * 2 - 1024",
        "more bytes than barrier|bytes more are on the way",
    ),
    "too many bytes expected": (
        "forward", "arrive_expecting(base + full, rows * At::D * 2);", "At::D * 2", "At::D * 2 + 16", "deadlock",
    ),
    "leading and stride swapped": (
        "forward",
        "multiply<T, Major::outer>(O, &P[4 * k], descriptor(value, kKeys * At::kRowBytes, 8 * At::kRowBytes, "
        "At::kSwizzle),",
        "kKeys * At::kRowBytes, 8 * At::kRowBytes", "8 * At::kRowBytes, kKeys * At::kRowBytes",
        f"{ACCURACY}|outside the block|no fence_products|pending",
    ),
    "an arrival missing": (
        "forward", "wait_products<1>(S);\nrelease(At::kKeyEmpty + 8 * stage.index);",
        "release(At::kKeyEmpty + 8 * stage.index);", "", "deadlock.* wait.barrier",
    ),
    "a turn not passed on": (
        "forward", "start_output(before.index);\nnext_turn();", "next_turn();", "", "deadlock.* sync_named",
    ),
    "PV before V has arrived": (
        "forward", "wait(base + At::kValueFull + 8 * before.index, before.parity);",
        "wait(base + At::kValueFull + 8 * before.index, before.parity);", "", "a pending load writes",
    ),
    "a single thread waits for V": (
        "forward", "wait(base + At::kValueFull + 8 * before.index, before.parity);",
        "wait(base", "if (threadIdx.x % 128 == 0) wait(base", "a pending load writes",
    ),
    "semaphore raised before the sums have landed": (
        "backward", "wait_stores<0>();\npass_turn(turn, rank + 1);", "wait_stores<0>();", "",
        "a pending store writes the same global memory",
    ),
    "a turn that never comes": (
        "backward", "if (w == 0) wait_turn(turn, rank);", "rank", "rank + 1", "deadlock.* wait_turn",
    ),
    "a turn not waited for": (
        "backward", "if (w == 0) wait_turn(turn, rank);", "if (w == 0) wait_turn(turn, rank);", "",
        "a pending store writes the same global memory|" + ACCURACY,
    ),
    "tiles by the numbers of blocks": (
        "backward", "ticket = taken;", "taken", "(int)blockIdx.x", "deadlock.* wait_turn",
    ),
    "tiles taken in another order than that of their turns": (
        "backward", "const int z = ticket / p.tiles_k, number = p.tiles_k - 1 - ticket % p.tiles_k;",
        "p.tiles_k - 1 - ticket", "ticket", "deadlock.* wait_turn",
    ),
    "tiles of queries out of order": (
        "backward", "const int place = head * p.places + tile.place + m;", "m;", "(m ^ 1);", ACCURACY,
    ),
    "a tile's number out of order": (
        "backward", "for (; n < visits.count && !visits.is_partial(n); ++n) step<false>(tile, head, visits.tile(n));",
        "visits.tile(n)", "visits.tile(n ^ 1)", ACCURACY,
    ),
    "one buffer for the scores": (
        "backward", "stage.advance();\nbuffer ^= 1;", "buffer ^= 1;", "", "pending instruction reads|" + ACCURACY,
    ),
    "queries released before the product with dS": (
        "backward", "wait_products<0>(dK);\nrelease(At::kQueryEmpty + number);",
        "wait_products<0>(dK);\nrelease(At::kQueryEmpty + number);",
        "release(At::kQueryEmpty + number);\nwait_products<0>(dK);", "a pending instruction reads",
    ),
    "words of the other warp": (
        "backward", "of_odd[2 * e] = four[1], of_odd[2 * e + 1] = four[3];", "four[1]", "four[0]", ACCURACY,
    ),
    "words read before the other warp has written them": (
        "backward", "sync_named(kWordsReady + (int)thread / (2 * kWarp), 2 * kWarp);",
        "sync_named(kWordsReady + (int)thread / (2 * kWarp), 2 * kWarp);", "", ACCURACY,
    ),
    "keys beyond a length not cleared": ("backward", "if (!is_seen) {", "!is_seen", "false", ACCURACY),
    "sums overwritten before they are read": (
        "backward", "wait_stores_read<0>();", "wait_stores_read<0>();", "", "which a pending instruction reads",
    ),
    "values beyond a length not cleared": (
        "forward", "if (!seen && begin <= first && first + kKeys <= end) return;",
        "if (!seen && begin <= first && first + kKeys <= end) ", "", ACCURACY,
    ),
    "registers not fenced": (
        "forward", "fence_products(O, P);\nstart_output(before.index);", "fence_products(O, P);", "",
        "no fence_products",
    ),
    "weights packed while they are read": (
        "forward", "softmax();\nwait_products<0>(O);", "softmax();", "softmax();\npack_weights();",
        "registers of A changed",
    ),
    "sums used before the wait": (
        "forward", "wait_products<0>(O);\nrelease(At::kValueEmpty + 8 * before.index);", "wait_products<0>",
        "wait_products<1>", "sums were written|pending instruction reads|registers of A changed|fence_products",
    ),
    "barriers fenced by another thread": (
        "forward", "fence_barriers();\n}\n__syncthreads();", "fence_barriers();\n}",
        "}\nif (threadIdx.x == 1) fence_barriers();", "no fence_barriers",
    ),
    "a store into a barrier": (
        "forward", "fence_barriers();\n}\n__syncthreads();", "fence_barriers();",
        "fence_barriers();\n*(uint32_t*)(shared + At::kValueFull) = 0;", "writes the barrier",
    ),
    "a load into a barrier": (
        "forward", "kBarriers = kValue + kStages * kTile;", "kTile", "kTile - 16", "a load writes the barrier",
    ),
    "a barrier begun twice": (
        "forward", "init_barrier(base + At::kValueFull + 8 * i, 1);", "kValueFull", "kKeyFull", "one has begun",
    ),
    "some lanes without a proxy fence": (
        "backward", "fence_async();\nsync_named(kScoresReady, kScoresParty);", "fence_async();",
        "if (lane() % 4) fence_async();", "has not called fence_async",
    ),
    "the first of two writers without a proxy fence": (
        "forward", "fence_async();\nsync_named(kCleared, kGroups * kWarpgroup);", "fence_async();",
        "fence_async();\nsync_named(kCleared, kGroups * kWarpgroup);\n"
        "uint32_t* const last = (uint32_t*)(values + At::kTile - 16);\n"
        "if (threadIdx.x == kWarpgroup + 1) *last = 0;\n__syncwarp();\n"
        "if (threadIdx.x == kWarpgroup) {\n*last = 0;\nfence_async();\n}",
        "thread 129 wrote .* has not called fence_async",
    ),
    "a lane alone at a named barrier": (
        "forward",
        "__device__ __forceinline__ void next_turn() { arrive_named(kTurn + (w + 1) % kGroups, 2 * kWarpgroup); }",
        "arrive_named", "if (lane == 0) arrive_named", "deadlock.* a shuffle|a shuffle .* waits for thread|different",
    ),
    "half a warp at a named barrier": (
        "backward", "constexpr int kScoresParty = kConsumers + 2 * kWarp, kSumsParty = kWarpgroup + 2 * kWarp;",
        "kWarpgroup + 2 * kWarp", "kWarpgroup + kWarp + 16", "no named barrier",
    ),
    "polls of a barrier that never ends": (
        "forward", "wait(base + At::kValueFull + 8 * before.index, before.parity);",
        "wait(base + At::kValueFull + 8 * before.index, before.parity);",
        "while (!has_ended(base + At::kQueryEmpty, turn ^ 1)) {\n}",
        r"deadlock.* has_ended.barrier \d+, parity \d. at ",
    ),
    "a loop on memory that nobody writes": (
        "forward", "wait(base + At::kQueryFull, turn);", "wait(base + At::kQueryFull, turn);",
        "while (*(volatile uint32_t*)p.out.data != 7) {\n}", "goes on without end",
    ),
    "registers that nobody has": (
        "backward", "take_registers<At::kConsumerRegisters>();", "At::kConsumerRegisters", "248",
        "deadlock.* take_registers",
    ),
}  # fmt: skip
BY_CHANCE = {
    "a turn not waited for",
    "tiles by the numbers of blocks",
    "tiles taken in another order than that of their turns",
}


HEADER = "cuda/hopper_attention.h"
_BY_HEAD_DIM = "with_head_dim<Shape, bfloat16>(a, use) : with_head_dim<Shape, float16>(a, use)"


def only(kind):
    """Return the change of HEADER that leaves one kernel, so that a pass compiles fast: (lines, a part, its
    replacement)."""
    part = f"a.dtype == Dtype::bfloat16 ? {_BY_HEAD_DIM}"
    return f"return {part};", part, f"(void)a, use(Shape<bfloat16, 64, Kind::{kind}>())"


SOURCES = {"forward": "cuda/attention_hopper.cu", "backward": "cuda/attention_hopper_backward.cu"}


@pytest.fixture(scope="module")
def schedules_of():
    with forks("planted_faults_hopper") as call:
        yield call


@pytest.mark.slow
@pytest.mark.skipif(DEVICE != "cpu", reason="for the emulation")
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(schedules_of, name, tmp_path):
    """Each of five schedules finds the fault, or one of 20 if only some orders of the blocks show it."""
    require("cuda")
    kernel, *fault, found = FAULTS[name]
    for folder in ("cuda", "common", "tests/hopper"):
        shutil.copytree(ROOT / "csrc" / folder, tmp_path / folder)
    path = tmp_path / SOURCES[kernel]
    if fault[0]:
        path.write_text(planted(path, *fault))
    (tmp_path / HEADER).write_text(planted(tmp_path / HEADER, *only("dropout")))
    library = build.build_emulated(path)
    schedules = 20 if name in BY_CHANCE else 5
    _, output = schedules_of(library, kernel, schedules)
    lines = [line for line in output.splitlines() if line.startswith("schedule ")]
    assert len(lines) == schedules, output
    others = [line for line in lines if not re.search(found, line)]
    if name in BY_CHANCE:
        assert len(others) < schedules
        others = [line for line in others if not line.endswith("as expected")]
    assert others == []


# Machine code from nvcc


# A change of HEADER: float16, whose kernels differ from bfloat16's by products and conversions, has one tile per kind.
FEW_OF_FLOAT16 = (
    f"return a.dtype == Dtype::bfloat16 ? {_BY_HEAD_DIM};", "with_head_dim<Shape, float16>(a, use)",
    "with_kind<Shape, float16, 128>(a, use)",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("source", compile_gate.hopper_sources(), ids=lambda path: path.stem)
def test_machine_code_is_sound(source, tmp_path):
    """The compiler serialises no products, and the plain loops are as they are written and recorded."""
    require_nvcc()
    for folder in ("cuda", "common"):
        shutil.copytree(ROOT / "csrc" / folder, tmp_path / folder)
    (tmp_path / HEADER).write_text(planted(tmp_path / HEADER, *FEW_OF_FLOAT16))
    path, messages = compile_gate.compile_hopper(tmp_path / "cuda" / source.name, tmp_path)
    kernels = compile_gate.kernels_of(path, source.name)
    assert messages == []
    assert [str(kernel) for kernel in kernels if kernel.faults()] == []
    others = re.compile(r".*<Shape<float16, (64|96|192|256), .*: recorded, but not found")
    differences = compile_gate.differences(kernels, source.name)
    assert [text for text in differences if not others.fullmatch(text)] == []
    assert len(differences) == 10
    print(*kernels, sep="\n")


# Planted faults of machine code by name: (kernel, lines of its code, a part of them, the fault that replaces it, a text
# that must appear).
GATED = {
    "sums used while they are pending": (
        "forward", "softmax();\nwait_products<0>(O);", "softmax();", "softmax();\nO[0] *= factor[0];", "C7514",
    ),
    "scores waited for with all others": ("forward", "wait_products<1>(S);", "1", "0", "no product is pending"),
    "registers kept": (
        "forward", "give_registers<At::kProducerRegisters>();", "give_registers<At::kProducerRegisters>();", "",
        "no warpgroup gives registers",
    ),
    "more registers taken than launched": (
        "forward", "take_registers<At::kConsumerRegisters>();", "At::kConsumerRegisters", "168",
        r"4 warpgroups launched with 128 registers cannot have \[32, 168\]",
    ),
    "no product": (
        "forward", "if (tile.count > 0) attend(tile);", "if (tile.count > 0) attend(tile);", "",
        "no loop with asynchronous products",
    ),
    "a value on the stack": (
        "forward", "softmax();\nwait_products<0>(O);", "softmax();",
        "softmax();\nvolatile float kept = S[0];\nS[0] = kept;", "bytes of local memory without dropout",
    ),
    "an array on the stack": (
        "forward", "softmax();\nwait_products<0>(O);", "softmax();",
        "softmax();\nfloat kept[16];\n#pragma unroll\nfor (int i = 0; i < 16; ++i) kept[(i + number) % 16] = S[i];\n"
        "#pragma unroll\nfor (int i = 0; i < 16; ++i) S[i] = kept[i];",
        r"attend_hopper<Shape<bfloat16, 64, dropout> >.*: \d+ accesses to the stack in the loop",
    ),
    "a turn passed on before the product with V": (
        "forward", "fence_products(O, P);\nstart_output(before.index);\nnext_turn();", "fence_products(O, P);",
        "next_turn();\nfence_products(O, P);", r"BAR\.ARV, 7 HGMMA.*; recorded: ",
    ),
    "other registers than recorded": (
        "forward", "take_registers<At::kConsumerRegisters>();", "At::kConsumerRegisters", "152",
        "registers 32 and 152; recorded: registers 32 and 160",
    ),
    "a sum computed twice": (
        "forward",
        "S[i] = kIsGeneral ? exponential(S[i] + used[r]) : exponential(fmaf(S[i], scale, used[r]));\nsum[r] += S[i];",
        "S[i] =", "sum[1 - r] += S[i];\nS[i] =", r"\d\.\d\d instructions per score; recorded: \d",
    ),
    "dQ waited for with dK": (
        "backward", "wait_products<1>(dQ);", "1", "0", r"DEPBAR<=2, SYNCS\S*, WARPGROUP\.DEPBAR<=0, BAR.*; recorded: ",
    ),
    "a turn read without acquiring": (
        "backward", "if (w == 0) wait_turn(turn, rank);", "wait_turn(turn, rank);",
        "while (*(volatile int*)turn != rank) {\n}", r"recorded: ATOMG\S*, LDG\S*, CCTL\.IVALL, FENCE\.VIEW\.ASYNC\.G",
    ),
    "dropout's words drawn after the scores": (
        "backward", "draw(tile, head, m);\nwait_products<1>(S);", "draw(tile, head, m);\nwait_products<1>(S);",
        "wait_products<1>(S);\ndraw(tile, head, m);", r"DEPBAR<=1, BAR\.SYNC\S*, WARPGROUP\.DEPBAR<=0.*; recorded: ",
    ),
    "a gradient of the scores on the stack": (
        "backward", "round_scores();\nif constexpr (!kIsWide) {", "round_scores();",
        "volatile float kept = X[0];\nX[0] = kept;\nround_scores();", "bytes of local memory without dropout",
    ),
}  # fmt: skip
WITH_DROPOUT = {"an array on the stack", "dropout's words drawn after the scores"}


@pytest.mark.slow
@pytest.mark.parametrize("name", GATED)
def test_the_gate_finds_planted_faults(name, tmp_path):
    require_nvcc()
    kernel, *fault, found = GATED[name]
    for folder in ("cuda", "common", "tests/hopper"):
        shutil.copytree(ROOT / "csrc" / folder, tmp_path / folder)
    path = tmp_path / SOURCES[kernel]
    path.write_text(planted(path, *fault))
    (tmp_path / HEADER).write_text(planted(tmp_path / HEADER, *only("dropout" if name in WITH_DROPOUT else "plain")))
    compiled, messages = compile_gate.compile_hopper(path, tmp_path)
    kernels = compile_gate.kernels_of(compiled, path.name)
    faults = [f"{one.name}: {fault}" for one in kernels for fault in one.faults()]
    faults += [*messages, *compile_gate.differences(kernels, path.name)]
    assert any(re.search(found, text) for text in faults), faults


@pytest.mark.parametrize("name", [name for name, fault in {**FAULTS, **GATED}.items() if fault[1]])
def test_planted_faults_are_still_possible(name):
    kernel, *fault, _ = {**FAULTS, **GATED}[name]
    planted(ROOT / "csrc" / SOURCES[kernel], *fault)


def test_records_of_other_kernels_are_found():
    """The gate reports a kernel without a record, and a record without a kernel."""
    records = {line.split(": registers")[0] for line in compile_gate.RECORD.read_text().splitlines()}
    assert {found.split(": recorded")[0] for found in compile_gate.differences([])} == records != set()
