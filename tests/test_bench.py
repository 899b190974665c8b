"""The benchmark framework: what it times, what it counts, what it lets through, what it writes."""

import importlib
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fastattn
import fastattn_command
from fastattn import bench, files
from fastattn.bench import cases, contest, limits, memory, peers, plots, report, timer, training
from fastattn.bench.cases import BASE, OPERATIONS, Case, Floor, listed, sweep
from fastattn.bench.timer import Ratio, Timing, interleave
from fastattn.errors import InputError

RECORDED = sorted((Path(__file__).parent.parent / "benchmarks/results").glob("**/*.json"))
SMALL = [
    Case("attention", (2, 3, 20, 16)),
    Case("attention", (2, 3, 20, 16), backward=True, causal=True),
    Case("attention", (2, 3, 20, 16), torch.bfloat16, padding="lengths"),
    Case("attention", (3, 2, 20, 16), padding="uneven lengths"),
    Case("attention", (2, 3, 20, 16), backward=True, padding="mask"),
    Case("attention", (2, 3, 1, 16), keys=40),
    Case("softmax_dropout", (30, 50), backward=True),
    Case("layer_norm", (30, 50), torch.bfloat16, backward=True),
    Case("dropout_add_layer_norm", (30, 50), torch.bfloat16, backward=True),
    Case("dropout", (30, 50), backward=True),
]


def named(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@pytest.fixture(autouse=True)
def unknown_machine(monkeypatch):
    monkeypatch.setattr(limits, "fastest", {})


def result(
    ratio,
    *,
    fraction=None,
    own=None,
    floor=Floor(),  # noqa: B008
    torch_seconds=1.0,
    limit_seconds=0.5,
    limited_by="arithmetic",
):
    def exactly(value):
        return None if value is None else Ratio(value, value, value)

    return contest.Result(
        "case",
        seconds={"ours": torch_seconds / ratio, "torch": torch_seconds, limited_by: limit_seconds},
        ratios={"torch": exactly(ratio)},
        fraction=exactly(fraction),
        limited_by=limited_by if fraction is not None else "",
        own=exactly(own),
        floor=floor,
    )


@pytest.mark.slow
def test_torch_is_held_to_the_instruction_set_of_our_kernels(python):
    """MKL too, which says of each product how it is restricted."""
    program = """
        import fastattn.bench, torch
        torch.ones(64, 64) @ torch.ones(64, 64)
        print(torch.backends.cpu.get_cpu_capability())
    """
    *said, capability = python(program, FASTATTN_CPU_ISA="generic", MKL_VERBOSE="1").splitlines()
    assert capability == "DEFAULT"
    assert any("GEMM" in line and "CNR:COMPATIBLE" in line for line in said) == torch.backends.mkl.is_available()


# --- timer ---


@pytest.mark.parametrize(("seconds", "rounds"), [(1.0, "abab"), (1e-3, "aabbaabb")])
def test_samples_alternate_and_short_ones_come_after_a_call_that_is_not_counted(seconds, rounds):
    calls = []

    def measure(function, repeats):
        function()
        return seconds

    functions = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    samples = interleave(functions, sample=1e-3, rounds=(4, 4), measure=measure).samples
    assert "".join(calls[-len(rounds) :]) == rounds
    assert samples == {"a": [seconds] * 2, "b": [seconds] * 2}


def test_short_calls_are_repeated_within_a_sample_and_reported_per_call():
    asked = []

    def measure(function, repeats):  # a clock on which every call takes 10 us
        asked.append(repeats)
        return 1e-5

    timing = interleave({"a": lambda: None}, sample=2e-3, rounds=(3, 3), measure=measure)
    assert asked[-6:] == [1, 200] * 3
    assert timing.samples == {"a": [1e-5] * 2}


def test_the_budget_ends_the_rounds_but_not_before_the_least():
    """Half of the rounds are kept."""
    pause = {"a": lambda: time.sleep(0.005)}
    assert len(interleave(pause, budget=0.0, rounds=(8, 50)).samples["a"]) == 4
    assert 1 <= len(interleave(pause, budget=0.1, rounds=(1, 1000)).samples["a"]) <= 11


def test_rounds_that_a_neighbour_disturbed_do_not_count():
    """A neighbour adds 5 to one of the two samples of every other round."""
    a = [1.0, 6.0, 1.0, 1.0, 1.0, 6.0]
    b = [2.0, 2.0, 2.0, 7.0, 2.0, 2.0]
    quiet = Timing({"a": a, "b": b}).quieter_half()
    assert quiet.samples == {"a": [1.0] * 3, "b": [2.0] * 3}


@pytest.mark.parametrize(("worked", "share"), [(0.0, 0.0), (0.3, 0.25)])
def test_other_programs_share_of_the_processors_is_measured(monkeypatch, worked, share):
    """Of two processors for 0.6 seconds, in which others worked for 0.3."""
    counter, clock = iter([100.0, 100.0 + worked]), iter([0.0, 0.0, 0.6])
    monkeypatch.setattr(timer, "_busy_beside", lambda: next(counter))
    monkeypatch.setattr(timer.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    timing = interleave({"a": lambda: None}, rounds=(5, 5), measure=lambda function, repeats: 1.0)
    assert timing.others == pytest.approx(share)


def test_others_are_what_the_processors_did_beside_this_process(tmp_path, monkeypatch):
    """User, nice, system, irq, softirq and steal of processors 0 and 1, not idle and iowait, less our own 2 seconds."""
    stat = tmp_path / "stat"
    rows = [
        "cpu 9 9",
        "cpu0 1 2 3 400 500 4 5 6 0 0",
        "cpu1 100 0 200 400 500 0 0 600 0 0",
        "cpu2" + " 9" * 10,
        "ctxt 7",
    ]
    stat.write_text("\n".join(rows) + "\n")
    monkeypatch.setattr(timer, "STAT", stat)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    monkeypatch.setattr(os, "times", lambda: (1.0, 0.5, 0.3, 0.2, 1000.0))
    assert timer._busy_beside() == pytest.approx(9.21 - 2.0)
    monkeypatch.setattr(timer, "STAT", tmp_path / "none")
    assert timer._busy_beside() is None


def test_ratios_are_of_pairs():
    """A machine that is ten times slower in some rounds changes the seconds, not the ratio."""
    slow = [1, 10, 1, 10, 10]
    timing = Timing({"a": [2.0 * s for s in slow], "b": [1.0 * s for s in slow]})
    assert timing.ratio("a", "b") == Ratio(2.0, 2.0, 2.0)
    assert timing.seconds("a") == 20.0
    assert Ratio.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Ratio(3.0, 2.0, 4.0)
    assert Ratio.of([7.0]) == Ratio(7.0, 7.0, 7.0)


# --- cases ---


@pytest.mark.parametrize(
    ("case", "flops", "size"),
    [
        # 2 products of 2 * (2 * 3 * 4 * 5) * 8 operations; q and out 2*3*4*8, k and v 2*3*5*8 elements
        (Case("attention", (2, 3, 4, 8), keys=5), 3840, 4 * (2 * 192 + 2 * 240)),
        # causal, 4 queries over 3 keys: 1 + 2 + 3 + 3 = 9 pairs, 7 products; 6 tensors of 32, 6 of 24 elements
        (Case("attention", (1, 1, 4, 8), torch.bfloat16, True, keys=3, causal=True), 7 * 2 * 9 * 8, 2 * (192 + 144)),
        # half of 10 keys are valid: 4 x 5 pairs
        (Case("attention", (1, 1, 4, 8), keys=10, padding="lengths"), 2 * 2 * 20 * 8, 4 * (2 * 32 + 2 * 40)),
        # 2, 5 and 8 of 8 keys are valid
        (
            Case("attention", (3, 1, 4, 8), keys=8, padding="uneven lengths"),
            2 * 2 * 4 * 15 * 8,
            4 * (2 * 96 + 2 * 8 * 15),
        ),
        (Case("layer_norm", (3, 7)), 0, 4 * 21 * 2),
        (Case("softmax_dropout", (3, 7), torch.bfloat16, True), 0, 2 * 21 * 5),
        (Case("dropout", (3, 7), backward=True), 0, 4 * 21 * 4),
        # bf16 input and its gradient; residual, sum twice, out, grad_out, gradient of the residual in float32
        (Case("dropout_add_layer_norm", (3, 7), torch.bfloat16, True), 0, 21 * (2 * 2 + 6 * 4)),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)
def test_work_is_counted_as_by_hand(case, flops, size):
    assert (case.flops, case.bytes) == (flops, size)


@pytest.mark.parametrize(("backward", "products"), [(False, 2), (True, 6)])
def test_flops_of_attention_agree_with_the_counter_of_torch(backward, products):
    """torch's math path keeps the weights for its backward pass, which ours computes again: six products, not seven."""
    case = Case("attention", (2, 3, 64, 16), backward=backward)
    math = peers.available(case, everyone=True)["torch math"]
    step = contest.step(case, math, OPERATIONS["attention"].operands(case)[0])
    with FlopCounterMode(display=False) as counter:
        step()
    assert counter.get_total_flops() == case.flops * products // (7 if backward else 2)


def test_names_of_cases_tell_them_apart():
    cases = {*listed(), *sweep()}
    assert len({case.name for case in cases}) == len(cases)


# --- peers and check ---


@named(SMALL)
def test_peers_compute_what_ours_computes(case, monkeypatch):
    """Otherwise a ratio would compare different work. Nothing is compiled, which takes too long here."""
    monkeypatch.setattr(peers, "_compiled", lambda function: function)
    tensors, others = OPERATIONS[case.operation].operands(case)
    ours = OPERATIONS[case.operation].call(case, *tensors, **others)
    for name, peer in peers.available(case, everyone=True).items():
        if name not in ("flex", "zentorch"):
            tolerance = {"rtol": 2e-2, "atol": 1e-2} if case.dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
            torch.testing.assert_close(peer(*tensors, **others), ours, **tolerance)


@named([*SMALL, *(replace(case, dropout=0.25) for case in SMALL if case.operation != "layer_norm")])
def test_check_accepts_ours(case):
    assert contest.check(case) == []


def spoil(monkeypatch, name, call):
    monkeypatch.setitem(OPERATIONS, name, replace(OPERATIONS[name], call=call))


def wrong_at_first(case, wrong):
    """The case's call whose first use, which is ours (the others are the reference), goes through `wrong`."""
    call, calls = OPERATIONS[case.operation].call, []

    def first_wrong(*arguments, **keywords):
        calls.append(1)
        out = call(*arguments, **keywords)
        return wrong(out) if len(calls) == 1 else out

    return first_wrong


def test_check_reports_a_wrong_output(monkeypatch):
    """Off by 1e-4 of its size; and an element dropped that the formula keeps."""
    case = Case("dropout", (30, 50), dropout=0.5)
    spoil(monkeypatch, "dropout", wrong_at_first(case, lambda out: out * (1 + 1e-4)))
    (line,) = contest.check(case)
    assert line.startswith("output is off by ")

    def flip(out):
        out[out.nonzero()[7].unbind()] = 0
        return out

    spoil(monkeypatch, "dropout", wrong_at_first(case, flip))
    assert len(contest.check(case)) == 1


def test_check_reports_a_wrong_gradient(monkeypatch):
    """The right output, every gradient negated."""
    case = Case("layer_norm", (30, 50), backward=True)
    spoil(monkeypatch, "layer_norm", wrong_at_first(case, lambda out: 2 * out.detach() - out))
    assert [line.split(" is off")[0] for line in contest.check(case)] == [
        f"gradient of operand {index}" for index in range(3)
    ]


# --- the gate ---


def test_a_slow_ours_fails_the_gate(monkeypatch):
    def slow(case, x, seed=None):
        time.sleep(0.01)
        return fastattn.dropout(x, case.dropout)

    spoil(monkeypatch, "dropout", slow)
    (line,) = contest.below_floor(contest.run(Case("dropout", (30, 50), dropout=0.1), budget=0.0)).values()
    assert "as fast as torch, at least 0.97" in line


@pytest.mark.parametrize(
    ("floor", "figures", "failing"),
    [
        (Floor(2.0), {"ratio": 2.1}, ""),
        (Floor(2.0), {"ratio": 1.9}, "1.90 times as fast as torch, at least 2.00"),
        (Floor(2.0), {"ratio": 1.999}, "1.999 times as fast as torch, at least 2.000"),
        (Floor(None), {"ratio": 0.1}, ""),
        (Floor(0.97, own=0.6), {"ratio": 1.0, "own": 0.7}, "0.70 of our time"),
        (Floor(0.97, own=0.6), {"ratio": 1.0, "own": 0.5}, ""),
        (Floor(2.1, 0.8, both=True), {"ratio": 2.5, "fraction": 0.7}, "70% of the limit (arithmetic), at least 80%"),
        (Floor(2.1, 0.8), {"ratio": 2.5, "fraction": 0.7}, ""),
        (Floor(2.1, 0.8), {"ratio": 1.5, "fraction": 0.75}, "1.50 times as fast as torch, at least 1.60"),
        # The limit is twice torch's speed: 2.1 is out of reach, 80 % of the limit (1.6) is not.
        (Floor(2.1, fraction=0.8), {"ratio": 1.65, "fraction": 0.82}, ""),
        # The limit is ten times torch's speed: 2.1 counts.
        (Floor(2.1, fraction=0.25), {"ratio": 2.0, "fraction": 0.26, "limit_seconds": 0.1}, "2.00 times"),
        # A tenth of torch's second is not counted: 1 / (1 / 0.97 + 0.1) = 0.88.
        (Floor(0.97, overhead=0.1), {"ratio": 0.89}, ""),
        (Floor(0.97, overhead=0.1), {"ratio": 0.87}, "0.87 times as fast as torch, at least 0.88"),
        # Without a limit the ratio counts alone.
        (Floor(2.1, fraction=0.8), {"ratio": 2.0}, "2.00 times"),
    ],
)
def test_floors(floor, figures, failing):
    found = list(contest.below_floor(result(**figures, floor=floor)).values())
    assert (failing in found[0] and len(found) == 1) if failing else found == []


@pytest.mark.parametrize(("isa", "ratio", "fraction"), [("amx_bf16", 0.97, None), ("avx512_bf16", 3.7, 0.7)])
def test_floor_of_bfloat16_products_is_torch_where_matrix_instructions_make_them(monkeypatch, isa, ratio, fraction):
    monkeypatch.setattr(cases.native, "library", lambda name: SimpleNamespace(isa=lambda: isa))
    floors = {case.name: case.floor for case in cases.headline()}
    assert floors["attention bfloat16 1x8x2048x64 forward"] == Floor(ratio, fraction, both=fraction is not None)
    assert floors["attention float32 1x8x2048x64 forward"] == Floor(2.1, 0.78, both=True)


def test_a_lost_ratio_fails_against_the_recorded_one_where_ours_is_slower_too():
    recorded = result(4.0)
    lost = "3.00 times as fast as torch, 4.00 when it was recorded; 333 ms a call, 250 then"
    assert contest.judged(result(3.5), recorded) == ([], [])
    assert contest.judged(result(3.0), recorded) == ([lost], [])
    assert contest.judged(result(3.0, torch_seconds=0.75), recorded) == ([], [])  # torch alone was faster
    assert contest.judged(result(3.9, torch_seconds=3.0), recorded) == ([], [])  # both were slower: the machine


def test_a_ratio_is_lost_beside_one_recorded_while_the_machine_was_slow():
    """Twice as fast now, ours as long as before: half as much of the limit."""
    recorded = result(4.0, torch_seconds=2.0, fraction=0.8)
    lost = "2.00 times as fast as torch, 4.00 when it was recorded; 40% of the limit (arithmetic), 80% then"
    assert contest.judged(result(2.0, torch_seconds=1.0, fraction=0.4), recorded) == ([lost], [])
    assert contest.judged(result(2.0, torch_seconds=1.0, fraction=0.8), recorded) == ([], [])  # torch alone was faster
    assert contest.judged(result(2.0, torch_seconds=1.0, fraction=0.4, limited_by="copy"), recorded) == ([], [])


def test_a_machine_that_does_half_its_arithmetic_is_disturbed():
    """As two processors of a virtual machine do that lie on one core, with nothing else to show for it."""
    case = Case("attention", (1, 8, 2048, 64))

    def disturbed(seconds):
        samples = {"ours": [2 * seconds] * 4, "torch": [3 * seconds] * 4, "arithmetic": [seconds] * 4}
        return contest.summarise(case, Timing(samples, 0.0)).disturbed

    assert [disturbed(seconds) for seconds in (0.02, 0.01, 0.014, 0.02)] == [
        "",
        "",
        "",
        "the machine did 50% of its arithmetic",
    ]
    assert limits.fastest == {torch.float32: case.flops / 0.01}
    early = contest.summarise(case, Timing({"ours": [0.1], "torch": [0.2], "arithmetic": [0.01]}, 0.0))
    assert contest.reviewed(case, early).disturbed == ""
    limits.remember({"float32": case.flops / 0.004 / 1e9, "bfloat16": None})
    assert contest.reviewed(case, early).disturbed == "the machine did 40% of its arithmetic"
    limits.fastest[torch.float32] = 1e30
    assert disturbed(1.1 * contest.RATED)
    assert disturbed(0.9 * contest.RATED) == ""  # too short to tell


def test_a_floor_that_the_recorded_result_misses_too_is_known():
    """A ratio that is lost on the way further down is not."""
    slow = result(1.9, floor=Floor(2.0))
    missed = ["1.90 times as fast as torch, at least 2.00"]
    assert contest.judged(slow, None) == (missed, [])
    assert contest.judged(slow, result(2.1)) == (missed, [])
    assert contest.judged(slow, result(1.95)) == ([], missed)
    lost, known = contest.judged(result(1.0, floor=Floor(2.0)), result(1.9))
    assert lost == ["1.00 times as fast as torch, 1.90 when it was recorded; 1e+03 ms a call, 526 then"]
    assert known == ["1.00 times as fast as torch, at least 2.00"]


def test_a_known_miss_hides_no_other():
    """A case that never reached its ratio, and whose features have become dear."""
    floor = Floor(2.0, own=1.2)
    assert contest.judged(result(1.9, own=1.5, floor=floor), result(1.9, own=1.1)) == (
        ["1.50 of our time without the features, at most 1.20"],
        ["1.90 times as fast as torch, at least 2.00"],
    )


@pytest.mark.parametrize(
    ("others", "ratios", "expected"),
    [
        (0.02, (1.0, 1.0, 1.05, 1.1), ""),
        (None, (1.0, 1.0, 1.05, 1.1), ""),
        (0.4, (1.0, 1.0, 1.05, 1.1), "other programs took 40% of the processors"),
        (0.02, (1.0, 1.0, 2.0, 2.0), "quartiles of the ratio to torch: 1.00 and 2.00"),
    ],
)
def test_a_disturbed_measurement_says_by_what(others, ratios, expected):
    timing = Timing({"ours": [1.0] * 4, "torch": list(ratios)}, others)
    assert contest.summarise(Case("dropout", (3, 7)), timing).disturbed == expected


@pytest.mark.parametrize(("noisy", "measured", "disturbed"), [(0, 1, False), (2, 3, False), (9, 3, True)])
def test_a_disturbed_case_is_measured_again(monkeypatch, noisy, measured, disturbed):
    shares = []

    def timed(functions, **options):
        shares.append(0.5 if len(shares) < noisy else 0.0)
        return Timing({name: [1.0] for name in functions}, shares[-1])

    monkeypatch.setattr(contest, "interleave", timed)
    found = contest.run(Case("dropout", (3, 7), dropout=0.1))
    assert (len(shares), bool(found.disturbed)) == (measured, disturbed)


@pytest.mark.parametrize(
    ("limit", "seconds", "expected"),
    [
        ("copy", 6.0, ""),
        ("copy", 821.2, "copy, the limit, took 821.2 times as long as ours"),
        ("arithmetic", 1.05, ""),
        ("arithmetic", 1.5, "arithmetic, the limit, took 1.5 times as long as ours"),
    ],
)
def test_a_limit_that_is_far_too_slow_was_disturbed(limit, seconds, expected):
    timing = Timing({"ours": [1.0] * 4, "torch": [2.0] * 4, limit: [seconds] * 4}, 0.0)
    assert contest.summarise(Case("dropout", (3, 7)), timing).disturbed == expected


@pytest.mark.parametrize(
    ("features", "plain", "expected"),
    [
        ({"dropout": 0.1}, (0.9, 1.0, 1.0, 1.02), ""),
        ({"dropout": 0.1}, (1.06, 1.1, 1.15, 1.2), "100% of the arithmetic took 89% of our time without the features"),
        (
            {"dropout": 0.1},
            (0.4, 0.8, 0.8, 1.6),
            "quartiles of the ratio to our time without the features: 1.09 and",
        ),
        ({"causal": True}, (1.9,) * 4, ""),
        ({"causal": True}, (2.2,) * 4, "51% of the arithmetic took 45% of our time without the features"),
        ({"padding": "lengths"}, (2.2,) * 4, "50% of the arithmetic took 45% of our time without the features"),
    ],
)
def test_a_plain_time_that_cannot_be_was_disturbed(features, plain, expected):
    timing = Timing({"ours": [1.0] * 4, "torch": [2.0] * 4, "plain": list(plain)}, 0.0)
    found = contest.summarise(Case("attention", (1, 1, 64, 8), **features), timing).disturbed
    assert found.startswith(expected) if expected else not found


def test_the_slower_limit_is_the_limit():
    samples = {"ours": [4.0], "torch": [8.0], "arithmetic": [1.0], "copy": [2.0]}
    found = contest.summarise(Case("attention", (1, 1, 8, 8)), Timing(samples))
    assert (found.limited_by, found.fraction.median, found.ratios["torch"].median) == ("copy", 0.5, 2.0)
    assert set(found.ratios) == {"torch"}


# --- the gate as it runs: `pytest benchmarks` ---

GATED = "attention {} 1x8x1x64 32 keys forward"
PLANT = """
import dataclasses, time
from fastattn.bench.cases import OPERATIONS

right, calls = OPERATIONS["attention"], []

def call(case, *operands, **others):
    out = right.call(case, *operands, **others)
    {}
    return out

OPERATIONS["attention"] = dataclasses.replace(right, call=call)
"""


@pytest.fixture
def pytest_benchmarks(tmp_path):
    """pytest_benchmarks(planted, *options): the output of the gate of two cases, of which that in float32 was recorded
    as fast as torch, and what is recorded afterwards."""

    def run(planted, *options):
        (tmp_path / "planted.py").write_text(PLANT.format(planted))
        path = tmp_path / "results" / f"{report.kind(report.machine())}.json"
        report.Report.new([replace(result(1.0, torch_seconds=1e-5), name=GATED.format("float32"))], {}).write(path)
        root = Path(__file__).resolve().parent.parent
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "planted",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            tmp_path,
        ]
        command += [root / "benchmarks/test_dispatch.py", "--results", path.parent, *options]
        imported = os.pathsep.join(map(str, (tmp_path, root, root / "tests")))
        environment = os.environ | {"PYTHONPATH": imported, "OMP_NUM_THREADS": str(torch.get_num_threads())}
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
        assert "2 passed" in done.stdout or "failed" in done.stdout, done.stdout + done.stderr
        return done.stdout, report.Report.read(path).results

    return run


@pytest.mark.slow
def test_the_gate_catches_a_planted_slowdown_and_a_planted_loss_of_accuracy(pytest_benchmarks):
    planted = [
        "dtype = operands[0].dtype.itemsize",
        "    if dtype == 4: time.sleep(2e-3)",
        "    if dtype == 2 and not calls: out, _ = out * 1.1, calls.append(1)",  # ours; the next one is the reference
    ]
    said, _ = pytest_benchmarks("\n".join(planted), "--record")
    assert "2 failed" in said
    assert "times as fast as torch, 1.00 when it was recorded" in said
    assert f"{GATED.format('bfloat16')}: output is off by" in said


def test_what_a_benchmark_measured_is_kept_beside_other_machines(tmp_path):
    another = tmp_path / "speed-another-machine.json"
    another.write_text("{}")
    for tokens in (2, 3):  # the second replaces the first
        report.record(tmp_path, "speed", {"tokens": tokens}, peer="1.0")
    with pytest.raises(SystemExit, match="not recorded, run it on a quiet machine: other programs took 11%"):
        report.record(tmp_path, "speed", {"tokens": 4}, contest.disturbed_by(0.11))
    here = report.machine()
    path = tmp_path / f"speed-{report.kind(here)}.json"
    kept = json.loads(path.read_text())
    assert (kept["machine"], kept["tokens"], kept["versions"]["peer"]) == (here, 3, "1.0")
    assert kept.keys() == {"machine", "versions", "commit", "date", "tokens"}
    assert sorted(tmp_path.iterdir()) == sorted([another, path])
    where = report.origin(kept, "peer")
    assert where.startswith(here["cpu"])
    assert where.endswith(f", peer 1.0, {kept['date'][:10]}")


@pytest.mark.slow
def test_the_gate_names_what_it_cannot_compare_and_records_nothing_that_was_disturbed(pytest_benchmarks):
    """Calls take 2 to 14 ms, in turn, so that the quartiles disagree in the quieter half of the rounds too. None is
    shorter than a sample, which would be the mean of several."""
    planted = "calls.append(1), time.sleep(2e-3 * (1 + 3 * len(calls) % 7))"
    said, _ = pytest_benchmarks(planted, "--report")
    assert said.count("disturbed, run it on a quiet machine") == 2
    section = said[said.index("not compared: no recorded result on") :]
    assert section.splitlines()[1:2] == [GATED.format("bfloat16")]
    said, recorded = pytest_benchmarks(planted, "--report", "--record")
    assert recorded.keys() == {GATED.format("float32")}
    assert recorded[GATED.format("float32")].ratios["torch"].median == 1.0


# --- limits ---


@pytest.mark.slow
def test_limits_are_plausible():
    """No matrix product is faster than the registers alone; bfloat16 has at least half of float32's speed (two dot
    products of pairs a cycle are twice that, one every other cycle is half); 10 % allowed for noise. Of everything the
    fastest of a few rounds: what else runs on the machine may slow down one of two that are compared."""
    a, fastest = torch.randn(1024, 1024), {}
    for _ in range(10):
        found = limits.measure(seconds=0.05)
        if found["float32"] is None:
            pytest.skip("no compiled library, arithmetic limits are unknown")
        product = interleave({"product": lambda: a @ a}, budget=0.2)
        found["product"] = 2 * 1024**3 / min(product.samples["product"]) / 1e9
        fastest = {name: max(value, fastest.get(name, 0)) for name, value in found.items()}
        if fastest["product"] < 1.1 * fastest["float32"] and fastest["bfloat16"] > 0.9 / 2 * fastest["float32"]:
            break
    assert fastest["product"] < 1.1 * fastest["float32"]
    assert fastest["bfloat16"] > 0.9 / 2 * fastest["float32"]
    assert fastest["copy_fresh"] > 0
    assert fastest["copy_cached"] > 0


def test_copy_moves_the_bytes_asked_for():
    assert [tensor.nbytes for tensor in limits.copy(1000, block=300)()] == [300, 200]


# --- reports ---


def test_report_round_trips_and_is_written_whole(tmp_path, monkeypatch):
    path = tmp_path / "results" / "machine.json"
    first = report.Report.new([result(2.0, fraction=0.5, own=0.9)], measured={})
    first.write(path)
    assert report.Report.read(path) == first
    assert sum('"name"' in line for line in path.read_text().splitlines()) == 1

    def interrupted(part):
        assert part.read_text().startswith("{")
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "flush", interrupted)
    with pytest.raises(KeyboardInterrupt):
        report.Report.new([result(3.0)], measured={}).write(path)
    assert report.Report.read(path) == first
    assert list(path.parent.iterdir()) == [path]


def test_results_keep_the_day_and_the_commit_of_their_recording(tmp_path):
    """Whatever is recorded beside them later."""
    path = tmp_path / "machine.json"
    old = replace(result(2.0), name="old", date="2026-01-02T03:04:05+00:00", commit="a" * 40)
    report.Report.new([old, replace(result(1 / 3), name="new")], measured={}).write(path)
    found = report.Report.read(path)
    assert found.results["old"] == old
    new = found.results["new"]
    assert (new.date, new.commit) == (found.date, found.commit)
    assert new.ratios["torch"].median == 0.3333  # four digits
    assert found.days == f"2026-01-02 to {found.date[:10]}"
    assert found.days in report.summary([found])
    assert found.days in report.comparison([found])


def test_a_commit_has_changes_where_code_differs_and_not_where_results_do(tmp_path, monkeypatch):
    """Each recording changes results, and would mark the next one."""

    def git(*arguments):
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=n", "-c", "user.email=e", *arguments], check=True)

    paths = ["fastattn/bench/report.py", "csrc/cpu/a.cpp", "benchmarks/b.py", "benchmarks/results/c.json", "README.md"]
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "all")
    monkeypatch.setattr(report, "__file__", str(tmp_path / paths[0]))
    clean = report.commit()
    assert re.fullmatch("[0-9a-f]{40}", clean)
    for path in paths:
        (tmp_path / path).write_text("changed")
        is_code = not path.endswith((".json", ".md"))
        assert report.commit() == clean + " with changes" * is_code, path
        (tmp_path / path).write_text("")


def test_a_recording_stands_beside_earlier_ones():
    """Quiet results replace what they measure again and nothing else; another torch's are no baseline; limits that
    neighbours disturbed are not taken over."""
    old, again = (replace(result(ratio), name="again") for ratio in (2.0, 3.0))
    other, noisy = (replace(result(2.0), name=name) for name in ("other", "noisy"))
    recorded = report.Report.new([old, other, noisy], {"float32": 500.0, "others": 0.0})
    busy = [again, replace(noisy, ratios={}, disturbed="by a neighbour")]
    found = report.Report.new(busy, {"float32": 80.0, "others": 0.5})
    kept = found.beside(recorded)
    assert kept.results == recorded.results | {"again": found.results["again"]}
    assert kept.limits == recorded.limits
    quiet = replace(found, limits={"float32": 510.0, "others": 0.02})
    assert quiet.beside(recorded).limits == quiet.limits
    assert found.beside(None).results.keys() == {"again"}
    another = replace(recorded, versions=recorded.versions | {"torch": "2.10.0"})
    assert found.beside(another).results.keys() == {"again"}


def test_limits_that_were_disturbed_are_shown_as_such():
    quiet, busy = ({"float32": 500.0, "bfloat16": None, "others": others} for others in (0.02, 0.4))
    best = limits.best(busy, quiet | {"float32": 400.0})
    assert best == {"float32": 500.0, "bfloat16": None, "others": 0.02}
    assert "; limits: 500 GFLOP/s float32" in report.origin_of(report.Report.new(measured=quiet))
    text = report.origin_of(report.Report.new(measured=busy))
    assert "; limits (other programs took 40% of the processors): 500 GFLOP/s float32" in text


def test_the_machine_is_told_apart_by_processor_instructions_and_threads():
    machine = report.machine()
    assert machine["threads"] == torch.get_num_threads()
    kinds = {report.kind(machine | change) for change in ({}, {"cpu": "other"}, {"isa": "other"}, {"threads": 99})}
    assert len(kinds) == 4
    assert (
        report.kind({"cpu": "AMD EPYC (family 25)", "isa": "AVX512", "threads": 2})
        == "amd-epyc-family-25-avx512-2-threads"
    )


def test_weakest_come_first():
    results = [replace(result(ratio), name=str(ratio)) for ratio in (3.0, 1.0, 2.0)]
    assert [entry.name for entry in report.weakest(results, 2)] == ["1.0", "2.0"]


def test_the_readme_shows_a_column_per_dtype_and_the_slowest_of_the_sweep():
    case = next(case for case in listed() if case.dtype == torch.float32)
    names = [case.name, replace(case, dtype=torch.bfloat16).name, "swept", "also swept"]
    figures = [result(2.5, fraction=0.8), result(3.25), result(0.9), result(1.5)]
    results = [replace(figure, name=name) for name, figure in zip(names, figures, strict=True)]
    limit = {"float32": 500.0, "bfloat16": None, "copy_fresh": 4.0, "copy_cached": 90.0}
    text = report.tables(report.Report.new(results, limit))
    assert f"| {case.name.replace(' float32', '')} | 2.50x, 80% | 3.25x |" in text
    assert "500 GFLOP/s float32, copy 4.0 GB/s into fresh memory, 90 GB/s in cache" in text
    assert "Of 2 cases of the sweep 1 are at least as fast as torch. The slowest: swept (0.90)." in text


@pytest.mark.parametrize(
    ("fraction", "limited_by", "shown"),
    [
        (0.8, "arithmetic", "80%"),
        (1.02, "arithmetic", "at the limit"),
        (0.8, "copy", "80% of a copy"),
        (1.1, "copy", "faster than a copy"),
        (821.2, "copy", "faster than a copy"),
        (None, "", ""),
    ],
)
def test_no_share_of_a_limit_is_above_it(fraction, limited_by, shown):
    known = replace(result(2.0, fraction=fraction, limited_by=limited_by), name=listed()[0].name)
    assert report.share(known) == shown
    found = report.Report.new([known], {})
    cell = f"| {', '.join(filter(None, ('2.00x', shown)))} |"
    assert all(cell in text for text in (report.tables(found), report.comparison([found, found])))
    assert report.share(replace(known, disturbed="by a neighbour")) == ""


def test_float64_has_a_column_of_its_own_and_no_copy_as_the_limit_of_products():
    dtypes = ("float32", "bfloat16", "float64")
    known = [replace(result(2.0), name=f"layer_norm {dtype} 4096x512 forward") for dtype in dtypes]
    found = replace(report.Report.new(known, {}), machine=report.machine() | {"isa": "isa"})
    assert "| layer_norm 4096x512 forward | 2.00x | 2.00x | 2.00x |" in report._by_dtype(found.results.values())
    attention, layer_norm = (Case(*of, torch.float64) for of in (("attention", (1, 1, 8, 8)), ("layer_norm", (8, 8))))
    assert contest.contestants(attention).keys() == {"ours", "torch"}
    assert contest.contestants(layer_norm).keys() == {"ours", "torch", "copy"}


def test_the_page_names_what_a_machines_file_lacks(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "benchmarks"))
    pages = importlib.import_module("pages")
    names = [*(case.name for case in listed()), *cases.PATCHED]
    for lacking in ([], names[1::7]):
        found = report.Report.new([replace(result(2.0), name=name) for name in names if name not in lacking], {})
        monkeypatch.setattr(pages, "reports", lambda *patterns, found=found: [found])
        _, word, said = pages.of_machines().partition(", not recorded: ")
        assert (bool(word), said) == (bool(lacking), f"{', '.join(lacking)}." if lacking else "")


def test_disturbed_results_are_shown_as_such():
    known = replace(result(2.0, fraction=0.8), name=listed()[0].name, disturbed="by a neighbour")
    found = report.Report.new([known, replace(known, name="swept")], {})
    assert "by a neighbour" in report.table([known])
    assert "| disturbed |" in report.comparison([found])
    assert "of the sweep" not in report.tables(found)
    assert report.weakest([known]) == []


@pytest.mark.parametrize(
    ("isa", "ratio", "words"),
    [
        ("avx512_bf16", 1.2, "Floors missed: {} (1.20 times as fast as torch, at least 1.25)."),
        ("amx_bf16", 1.3, "Every floor is reached."),
        ("avx2", 1.2, ""),
    ],
)
def test_a_page_names_the_floors_that_a_machine_misses(isa, ratio, words):
    name = next(iter(cases.PATCHED))
    of_products = "attention bfloat16 1x8x2048x64 forward"
    results = [replace(result(ratio), name=name), replace(result(3.9, fraction=0.8), name=of_products)]
    found = replace(report.Report.new(results, {}), machine=report.machine() | {"isa": isa})
    text = report.tables(found)
    assert words.format(name) in text
    assert ("floor" in text.lower()) == bool(words)


@pytest.mark.parametrize(
    "path",
    [path for path in RECORDED if {"limits", "results"} <= json.loads(path.read_text()).keys()],
    ids=lambda path: path.stem,
)
def test_no_disturbed_result_is_kept(path):
    recorded = report.Report.read(path)
    known = {case.name: case for case in (*cases.listed(), *sweep())}
    for kept in recorded.results.values():
        left = known[kept.name].left if kept.name in known else 0.0
        assert not kept.disturbed
        assert not contest.disturbance(kept, left=left), kept.name
    timed = [(known[name], kept.seconds) for name, kept in recorded.results.items() if name in known]
    for _ in range(2):  # once to learn the machine's arithmetic
        slow = {case.name: words for case, seconds in timed if (words := contest.slow_machine(case, seconds))}
    assert slow == {}


def test_a_machine_has_a_row_for_each_dtype():
    cases = ["attention float32 1x8x2048x64 forward", "attention bfloat16 1x8x2048x64 forward"]
    reports = [
        replace(
            report.Report.new([replace(result(2.04), name=case) for case in cases], {}),
            machine=report.machine() | {"cpu": cpu, "isa": "isa"},
        )
        for cpu in (
            "AMD EPYC (family 25, model 17)",
            "Intel(R) Xeon(R) Processor (family 6, model 207)",
            "Intel(R) Xeon(R) Processor (family 6, model 167)",
        )
    ]
    rows = report.summary(reports).splitlines()[2:]
    names = "AMD Zen 4", "Intel Emerald Rapids", "Intel Xeon"
    assert [row.split(" | ")[:3] for row in rows] == [
        [f"| {name}, isa", dtype, "2.0x"] for name in names for dtype in ("float32", "bfloat16")
    ]


def test_a_disturbed_figure_is_no_figure_of_a_row():
    disturbed = replace(result(2.0), name="attention float32 1x8x2048x64 forward", disturbed="by a neighbour")
    row = report.summary([report.Report.new([disturbed], {})]).splitlines()[2]
    assert row.split(" | ")[1:3] == ["float32", "disturbed"]


def test_patched_models_that_exist_are_in_the_table():
    patched = next(iter(cases.PATCHED))
    known = [replace(result(2.5), name=name) for name in (listed()[0].name, patched)]
    found = report.Report.new(known, {})
    assert f"| {patched} | 2.50x |" in report.comparison([found])
    assert "of the sweep" not in report.comparison([found])


def test_instruction_sets_stand_side_by_side():
    name = listed()[0].name
    limit = {"float32": 240.0, "bfloat16": 240.0}
    reports = [
        replace(report.Report.new(results, limit), machine=report.machine() | {"isa": isa})
        for isa, results in (
            ("avx2", [replace(result(2.5, fraction=0.8, own=0.5), name=name)]),
            ("generic", [replace(result(0.5), name=name)]),
        )
    ]
    text = report.comparison(reports)
    assert "limits: 240 GFLOP/s float32, 240 GFLOP/s bfloat16." in text
    assert "|  | avx2 | generic |" in text
    assert f"| {name} | 2.50x, 80%, 0.50 of plain | 0.50x |" in text
    assert [line.split(":")[0] for line in text.splitlines()[:2]] == ["- avx2", "- generic"]


def test_versions_of_torch_stand_side_by_side():
    found = report.Report.new([replace(result(2.5), name=listed()[0].name)], {})
    reports = [replace(found, versions=found.versions | {"torch": torch}) for torch in ("2.13.0+cpu", "2.14.1")]
    assert "|  | torch 2.13.0 | torch 2.14.1 |" in report.comparison(reports)


def test_tables_go_between_the_markers(tmp_path):
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- speed:begin -->\nold\n<!-- speed:end -->\nafter\n")
    report.insert(page, "speed", report.table([result(2.5)]))
    text = page.read_text()
    assert "old" not in text
    assert "2.50 (2.50-2.50)" in text
    assert text.startswith("before\n<!-- speed:begin -->\n")
    assert text.endswith("\n<!-- speed:end -->\nafter\n")
    page.write_text("no markers")
    with pytest.raises(InputError, match="expected the lines"):
        report.insert(page, "speed", "")


# --- the command ---


def test_a_filter_that_matches_nothing_is_an_error():
    options = fastattn_command.parse(["bench", "--filter", "7777"])
    with pytest.raises(InputError, match="--filter '7777': no case has this in its name; one is 'attention float32"):
        bench.main(options)


@pytest.mark.parametrize(
    "option",
    [
        ["--filter", "float32"],
        ["--sweep"],
        ["--peers"],
        ["--threads", "2"],
        ["--seconds", "1"],
        ["--output", "copy.json"],
    ],
    ids=lambda option: option[0],
)
def test_what_measures_is_refused_beside_what_was_measured(option, capsys):
    with pytest.raises(SystemExit) as stopped:
        fastattn_command.parse(["bench", "--from", "results.json", *option])
    assert stopped.value.code == 2
    assert (
        f"argument {option[0]}: goes with a measurement, in whose place --from shows files" in capsys.readouterr().err
    )


@pytest.mark.parametrize("options", [[], ["--plot", "speed"]])
def test_what_was_measured_is_shown(options, tmp_path, capsys):
    """As text, or else as a picture."""
    known = report.Report.new([replace(result(2.5), name=listed()[0].name)], {"float32": 500.0, "bfloat16": None})
    source, stem = tmp_path / "results.json", tmp_path / "speed"
    known.write(source)
    given = [word.replace("speed", str(stem)) for word in options]
    assert bench.main(fastattn_command.parse(["bench", "--from", str(source), *given])) == 0
    assert ("2.50x" in capsys.readouterr().out, stem.with_suffix(".svg").exists()) == (not given, bool(given))


@pytest.mark.slow
def test_a_length_is_measured_and_drawn(tmp_path, capsys):
    """For real, beside every peer that there is, those of torch.compile among them."""
    stem = tmp_path / "speed"
    given = ["bench", "--plot", str(stem), "--filter", "float32 1x8x256x64 forward", "--seconds", "0.05"]
    assert bench.main(fastattn_command.parse(given)) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("| attention"))
    assert all(f"{peer} " in row for peer in ("compiled", "flex", "math"))
    assert stem.with_suffix(".svg").stat().st_size > 1000
    assert stem.with_suffix(".png").stat().st_size > 1000


@pytest.mark.parametrize("stem", [".", "/"])
def test_a_picture_has_a_name(stem, capsys):
    with pytest.raises(SystemExit):
        fastattn_command.parse(["bench", "--plot", stem])
    assert f"argument --plot: {stem} is given, expected the name of a picture" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "has", "lacks"),
    [
        ("layer_norm", "layer_norm float32 4096x512", "dropout_add_layer_norm float32 4096x512"),
        ("float32", "attention float32 1x8x1x64", "attention bfloat16 1x8x1x64"),
        ("2048x64 causal", "attention float32 1x8x2048x64 causal forward", "attention float32 1x8x2048x64 forward"),
        ("+backward", "layer_norm float32 4096x512 forward+backward", "layer_norm float32 4096x512 forward"),
    ],
)
def test_a_filter_chooses_by_words(text, has, lacks):
    assert fastattn_command.has_text(has, text)
    assert not fastattn_command.has_text(lacks, text)


def test_a_filter_is_checked_before_torch_is_loaded(capsys):
    """By the words that names of cases are made of."""
    for case in (*listed(), *list(cases.sweep())[::7], *cases.lengths()):
        assert fastattn_command.parse(["bench", "--filter", case.name]).filter == case.name
    with pytest.raises(SystemExit):
        fastattn_command.parse(["bench", "--filter", "layer_norms float32"])
    assert "argument --filter: no word in a case's name begins with 'layer_norms'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):  # no part of bfloat16
        fastattn_command.parse(["bench", "--filter", "float16"])
    assert "argument --filter: no word in a case's name begins with 'float16'" in capsys.readouterr().err


def test_rows_stand_below_the_machine_its_limits_and_a_header(monkeypatch, capsys, tmp_path):
    """The limits of the file are the better ones of before and after."""
    measured = iter([{"float32": 100.0, "bfloat16": None}, {"float32": 200.0, "bfloat16": None}])
    monkeypatch.setattr(limits, "measure", lambda: next(measured))
    monkeypatch.setattr(contest, "run", lambda case, **options: replace(result(2.0, fraction=0.5), name=case.name))
    output = tmp_path / "results.json"
    assert bench.main(fastattn_command.parse(["bench", "--filter", "1x8x1x64 32 keys", "--output", str(output)])) == 0
    machine, header, rule, *rows = capsys.readouterr().out.splitlines()
    assert report.machine()["cpu"] in machine
    assert "100 GFLOP/s float32" in machine
    assert header.startswith("| case | ours | times torch | of the limit |")
    assert set(rule) == {"|", "-", " "}
    assert [row.split(" | ")[:4] for row in rows] == [
        [f"| attention {dtype} 1x8x1x64 32 keys forward", "500.00 ms", "2.00 (2.00-2.00)", "50%"]
        for dtype in ("float32", "bfloat16")
    ]
    assert report.Report.read(output).limits == {"float32": 200.0, "bfloat16": None}


def test_the_output_leaves_out_what_was_disturbed(monkeypatch, capsys, tmp_path):
    """The rows say so."""

    def run(case, **options):
        disturbed = "by a neighbour" if case.dtype == torch.bfloat16 else ""
        return replace(result(2.0, limit_seconds=1e-4), name=case.name, disturbed=disturbed)

    monkeypatch.setattr(limits, "measure", lambda: {"float32": 100.0, "bfloat16": None})
    monkeypatch.setattr(contest, "run", run)
    output = tmp_path / "results.json"
    assert bench.main(fastattn_command.parse(["bench", "--filter", "1x8x1x64 32 keys", "--output", str(output)])) == 0
    assert "disturbed" in capsys.readouterr().out
    assert list(report.Report.read(output).results) == ["attention float32 1x8x1x64 32 keys forward"]


def test_the_output_leaves_out_what_was_measured_before_the_machine_showed_its_speed(monkeypatch, tmp_path):
    """It did half of its arithmetic beside the first case, which nothing could tell then."""
    measured = []

    def run(case, **options):
        measured.append(case.name)
        seconds = case.flops / (1e11 if len(measured) > 1 else 5e10)
        found = replace(result(2.0, limit_seconds=seconds), name=case.name)
        return replace(found, disturbed=contest.slow_machine(case, found.seconds))

    monkeypatch.setattr(limits, "measure", lambda: {"float32": 1.0, "bfloat16": None})
    monkeypatch.setattr(contest, "run", run)
    output = tmp_path / "results.json"
    assert (
        bench.main(fastattn_command.parse(["bench", "--filter", "float32 1x8x2048x64", "--output", str(output)])) == 0
    )
    assert len(measured) > 2
    assert list(report.Report.read(output).results) == measured[1:]


@pytest.mark.parametrize("text", ["{", "[]", '{"results": [1]}', '{"machine": {}, "results": []}'])
def test_a_file_that_is_no_result_file_is_named(tmp_path, text):
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(InputError, match=re.escape(f"{path}: expected a result file")):
        report.Report.read(path)


def test_memory_of_a_call_is_what_it_holds_at_most():
    """Two tensors of 64 MB, one after the other beside a third of 32; freed ones of earlier calls are counted anew."""

    def call():
        kept = torch.ones(32 << 18)
        for _ in range(2):
            torch.ones(64 << 18).add_(kept.sum())

    found = [memory.peak(call) for _ in range(2)]
    if None in found:
        pytest.skip("the kernel does not tell a process's peak")
    assert all(92 << 20 < size < 110 << 20 for size in found)


def test_errors_of_a_call_whose_memory_is_measured_are_its_own():
    def call():
        raise OSError("the call's")

    with pytest.raises(OSError, match="the call's"):
        memory.peak(call)


def test_a_picture_of_disturbed_results_alone():
    results = [replace(result(2.0), name=case.name, disturbed="neighbours") for case in cases.lengths()]
    picture = plots.over_length(report.Report.new(results, {"float32": None, "bfloat16": None}))
    assert not picture.legends
    assert all(axes.texts[0].get_text() == "not measured" for axes in picture.axes)


@pytest.mark.slow
def test_pictures_of_ratios_and_of_lengths(tmp_path):
    """In both formats; results that were disturbed are not drawn."""
    known = [replace(result(2.0), name=case.name) for case in listed()]
    over_length = [
        replace(result(2.0), name=case.name, memory={"ours": 1 << 20, "torch": 1 << 22}) for case in cases.lengths()
    ]
    for stem, results in (("ratios", known), ("lengths", over_length)):
        found = report.Report.new(results, {"float32": 500.0, "bfloat16": None})
        plots.save(plots.picture([found]), tmp_path / stem)
        assert (tmp_path / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / f"{stem}.svg").read_text()
    (axes, *_) = plots.over_length(found).axes
    lengths = [case.shape[2] for case in cases.lengths() if case.dtype == torch.float32 and not case.backward]
    speeds = [case.flops / 0.5 / 1e9 for case in cases.lengths()[: len(lengths)]]
    line = axes.get_lines()[0]
    assert (line.get_label(), list(line.get_xdata()), list(line.get_ydata())) == ("fastattn", lengths, speeds)
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    disturbed = report.Report.new([replace(entry, disturbed="by a neighbour") for entry in known], {})
    with pytest.raises(InputError, match="nothing to draw"):
        plots.picture([disturbed])


@pytest.mark.slow
def test_no_contestant_of_the_training_step_computes_with_subnormals():
    """A softmax of probabilities below float32's least normal number takes some processors longer."""
    case = Case("training_step", (1, 48))
    source, target = torch.randint(3, BASE["vocab_size"], (2, 1, 48))
    for name, model in training._models(case).items():
        with torch.no_grad():
            probabilities = model.eval()(source, target).softmax(-1)
        assert (probabilities >= torch.finfo(torch.float32).tiny).all(), name
