"""The harness of the benchmarks: what it times, counts, lets through and writes."""

import ast
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import fastattn_command
from fastattn import bench
from fastattn.bench import cases, contest, limits, peers, report, timer, training
from fastattn.bench.cases import BASE, OPERATIONS, Case, Floor, listed, sweep
from fastattn.bench.timer import Ratio, Timing, interleave
from fastattn.errors import InputError

ROOT = Path(__file__).resolve().parent.parent
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


def result(ratio, *, name="case", share=None, limit="", own=None, noise=""):
    """A result of fastattn in one second."""
    ratios = {"torch": ratio} if own is None else {"torch": ratio, "plain": 1 / own}
    exact = {peer: Ratio(value, value, value) for peer, value in ratios.items()}
    return contest.Result(name, {"ours": 1.0}, exact, share and Ratio(share, share, share), limit, noise=noise)


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


@pytest.mark.parametrize("name", ["timer", "cases", "peers", "limits", "training", "contest"])
def test_the_harness_imports_the_public_package_alone(name):
    """Otherwise `--against` could not measure the package of another commit with it."""
    tree = ast.parse((ROOT / f"fastattn/bench/{name}.py").read_text())
    absolute = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    plain = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert {name for name in (*absolute, *plain) if name.startswith("fastattn")} <= {"fastattn"}


# --- timer ---


@pytest.mark.parametrize(("seconds", "rounds", "repeats"), [(1.0, "abab", [1] * 4), (1e-5, "aabbaabb", [1, 100] * 4)])
def test_samples_alternate_and_short_ones_come_after_a_call_that_is_not_counted(seconds, rounds, repeats):
    """Short calls are repeated within a sample, and reported per call."""
    calls, repeated = [], []

    def measure(function, repeats):
        function()
        repeated.append(repeats)
        return seconds

    functions = {name: partial(calls.append, name) for name in "ab"}
    samples = interleave(functions, sample=1e-3, rounds=(4, 4), measure=measure).samples
    assert "".join(calls[-len(rounds) :]) == rounds
    assert repeated[-len(rounds) :] == repeats
    assert samples == {"a": [seconds] * 2, "b": [seconds] * 2}


def test_the_budget_ends_the_rounds_but_not_before_the_least():
    """Half of the rounds are kept."""
    pause = {"a": lambda: time.sleep(0.005)}
    assert len(interleave(pause, budget=0.0, rounds=(8, 50)).samples["a"]) == 4
    assert 1 <= len(interleave(pause, budget=0.1, rounds=(1, 1000)).samples["a"]) <= 11


def test_rounds_that_a_neighbour_disturbed_do_not_count():
    """A neighbour adds 5 to one of the two samples of every other round. Ratios are of pairs."""
    a, b = [1.0, 6.0, 1.0, 1.0, 1.0, 6.0], [2.0, 2.0, 2.0, 7.0, 2.0, 2.0]
    quiet = Timing({"a": a, "b": b}).quieter_half()
    assert quiet.samples == {"a": [1.0] * 3, "b": [2.0] * 3}
    assert Timing({"a": [2.0, 20.0], "b": [1.0, 10.0]}).ratio("a", "b") == Ratio(2.0, 2.0, 2.0)
    assert Ratio.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Ratio(3.0, 2.0, 4.0)


def test_others_are_what_the_processors_did_beside_this_process(tmp_path, monkeypatch):
    """User, nice, system, irq, softirq and steal of processors 0 and 1, not idle and iowait, less our own 2 seconds."""
    cpus = "cpu 9 9\ncpu0 1 2 3 400 500 4 5 6 0 0\ncpu1 100 0 200 400 500 0 0 600 0 0\ncpu2 9 9 9 9 9 9 9 9 9 9\n"
    (tmp_path / "stat").write_text(f"{cpus}ctxt 7\n")
    monkeypatch.setattr(timer, "STAT", tmp_path / "stat")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    monkeypatch.setattr(os, "times", lambda: (1.0, 0.5, 0.3, 0.2, 1000.0))
    assert timer._busy_beside() == pytest.approx(9.21 - 2.0)
    counter, clock = iter([100.0, 100.3]), iter([0.0, 0.6])
    monkeypatch.setattr(timer, "_busy_beside", lambda: next(counter))
    monkeypatch.setattr(timer.time, "perf_counter", lambda: next(clock))
    assert timer.Neighbours().noise() == "other programs took 25% of the processors"


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
        (Case("attention", (3, 1, 4, 8), keys=8, padding="uneven lengths"), 2 * 2 * 4 * 15 * 8, 4 * (192 + 240)),
        (Case("layer_norm", (3, 7)), 0, 4 * 21 * 2),
        (Case("softmax_dropout", (3, 7), torch.bfloat16, True), 0, 2 * 21 * 5),
        # bf16 input and its gradient; residual, sum twice, out, grad_out, gradient of the residual in float32
        (Case("dropout_add_layer_norm", (3, 7), torch.bfloat16, True), 0, 21 * (2 * 2 + 6 * 4)),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)
def test_work_is_counted_as_by_hand(case, flops, size):
    assert (case.flops, case.bytes) == (flops, size)


def test_names_of_cases_tell_them_apart():
    every = {*listed(), *sweep()}
    assert len({case.name for case in every}) == len(every)


# --- peers and check ---


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_peers_compute_what_ours_computes(case, monkeypatch):
    """Otherwise a ratio would compare different work. Compilation would take too long here, so nothing is compiled."""
    monkeypatch.setattr(peers, "_compiled", lambda function: function)
    tensors, others = OPERATIONS[case.operation].operands(case)
    ours = OPERATIONS[case.operation].call(case, *tensors, **others)
    for name, peer in peers.available(case, everyone=True).items():
        if name != "flex":
            tolerance = {"rtol": 2e-2, "atol": 1e-2} if case.dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
            torch.testing.assert_close(peer(*tensors, **others), ours, **tolerance)


DROPPING = [replace(case, dropout=0.25) for case in SMALL if case.operation != "layer_norm"]


@pytest.mark.parametrize("case", [*SMALL, *DROPPING], ids=lambda case: case.name)
def test_check_accepts_ours(case):
    assert contest.check(case) == []


gradients = [f"gradient of operand {index}" for index in range(3)]


def dropped(out):
    out[out.nonzero()[7].unbind()] = 0
    return out


@pytest.mark.parametrize(
    ("case", "wrong", "found"),
    [
        (Case("dropout", (30, 50), dropout=0.5), lambda out: out * (1 + 1e-4), ["output"]),
        (Case("dropout", (30, 50), dropout=0.5), dropped, ["output"]),
        # The right output, every gradient negated.
        (Case("layer_norm", (30, 50), backward=True), lambda out: 2 * out.detach() - out, gradients),
    ],
    ids=["off by 1e-4", "dropped", "gradients"],
)
def test_check_reports_a_wrong_result(monkeypatch, case, wrong, found):
    """The first result of the case's call, fastattn's, is wrong. The others are the reference's."""
    right, wrongs = OPERATIONS[case.operation], iter([wrong])

    def call(*arguments, **keywords):
        return next(wrongs, lambda out: out)(right.call(*arguments, **keywords))

    monkeypatch.setitem(OPERATIONS, case.operation, replace(right, call=call))
    assert [line.split(" is off by ")[0] for line in contest.check(case)] == found


# --- floors and noise ---


@pytest.mark.parametrize(
    ("floor", "figures", "failing"),
    [
        (Floor(2.0), {"ratio": 2.1}, ""),
        (Floor(2.0), {"ratio": 1.9}, "1.90 times as fast as torch, at least 2.00"),
        (Floor(2.0), {"ratio": 1.999}, "1.999 times as fast as torch, at least 2.000"),
        (Floor(None), {"ratio": 0.1}, ""),
        (Floor(0.97, own=0.6), {"ratio": 1.0, "own": 0.7}, "0.70 of our time"),
        (Floor(0.97, own=0.6), {"ratio": 1.0, "own": 0.5}, ""),
        (Floor(2.1, 0.8, both=True), {"ratio": 2.5, "share": 0.7}, "70% of the limit, at least 80%"),
        (Floor(2.1, 0.8), {"ratio": 2.5, "share": 0.7}, ""),
        (Floor(2.1, 0.8), {"ratio": 1.5, "share": 0.75}, "1.50 times as fast as torch, at least 1.60"),
        # The limit is twice torch's speed: 2.1 is out of reach, 80 % of the limit (1.6) is not.
        (Floor(2.1, fraction=0.8), {"ratio": 1.65, "share": 0.825}, ""),
        # The limit is ten times torch's speed: 2.1 counts.
        (Floor(2.1, fraction=0.25), {"ratio": 2.0, "share": 0.2}, "2.00 times"),
        # A tenth of torch's time, two seconds, is not counted: 1 / (1 / 0.97 + 0.1) = 0.88.
        (Floor(0.97, overhead=0.089), {"ratio": 0.89}, ""),
        (Floor(0.97, overhead=0.087), {"ratio": 0.87}, "0.87 times as fast as torch, at least 0.88"),
        # Without a limit only the ratio counts.
        (Floor(2.1, fraction=0.8), {"ratio": 2.0}, "2.00 times"),
    ],
)
def test_floors(floor, figures, failing):
    found = result(**figures).missed(floor)
    assert (failing in found[0] and len(found) == 1) if failing else found == []


@pytest.mark.parametrize(("isa", "ratio", "fraction"), [("amx_bf16", 0.97, None), ("avx512_bf16", 3.7, 0.7)])
def test_floor_of_bfloat16_products_is_torch_where_matrix_instructions_make_them(isa, ratio, fraction):
    floors = {case.name: case.floor for case in cases.headline(isa)}
    assert floors["attention bfloat16 1x8x2048x64 forward"] == Floor(ratio, fraction, both=fraction is not None)
    assert floors["attention float32 1x8x2048x64 forward"] == Floor(2.1, 0.78, both=True)


@pytest.mark.parametrize(
    ("others", "samples", "expected"),
    [
        (0.02, {"torch": (1.0, 1.0, 1.05, 1.1)}, ""),
        (None, {"torch": (1.0, 1.0, 1.05, 1.1)}, ""),
        (0.4, {"torch": (1.0, 1.0, 1.05, 1.1)}, "other programs took 40% of the processors"),
        (0.02, {"torch": (1.0, 1.0, 2.0, 2.0)}, "quartiles of the ratio to torch: 1.00 and 2.00"),
        (0.0, {"torch": (2.0,) * 4, "copy": (6.0,) * 4}, ""),
        (0.0, {"torch": (2.0,) * 4, "copy": (821.2,) * 4}, "copy, the limit, took 821.2 times as long as ours"),
        (0.0, {"torch": (2.0,) * 4, "arithmetic": (1.5,) * 4}, "arithmetic, the limit, took 1.5 times as long as ours"),
    ],
)
def test_a_noisy_measurement_says_why(others, samples, expected):
    timing = Timing({"ours": [1.0] * 4, **{name: list(times) for name, times in samples.items()}}, others)
    assert contest.summarise("case", timing).noise == expected


@pytest.mark.parametrize(("noisy", "measured", "is_noisy"), [(0, 1, False), (1, 2, False), (9, 2, True)])
def test_a_noisy_case_is_measured_again_once(monkeypatch, noisy, measured, is_noisy):
    shares = []

    def timed(functions, **options):
        shares.append(0.5 if len(shares) < noisy else 0.0)
        return Timing({name: [1.0] for name in functions}, shares[-1])

    monkeypatch.setattr(contest, "interleave", timed)
    found = contest.run(Case("dropout", (3, 7), dropout=0.1))
    assert (len(shares), bool(found.noise)) == (measured, is_noisy)


def test_the_slower_limit_is_the_limit():
    samples = {"ours": [4.0], "torch": [8.0], "arithmetic": [1.0], "copy": [2.0]}
    found = contest.summarise("case", Timing(samples))
    assert (found.limit, found.share.median, found.ratios["torch"].median) == ("copy", 0.5, 2.0)
    assert set(found.ratios) == {"torch"}


def test_a_copy_is_not_the_limit_of_products_in_float64():
    attention, layer_norm = (Case(*of, torch.float64) for of in (("attention", (1, 1, 8, 8)), ("layer_norm", (8, 8))))
    assert contest.contestants(attention).keys() == {"ours", "torch"}
    assert contest.contestants(layer_norm).keys() == {"ours", "torch", "copy"}


# --- rows ---


def test_the_newest_row_of_a_case_is_kept(tmp_path):
    """A row takes the place of the earlier one of its case, at the end."""
    path, where = tmp_path / "results.csv", report.here()
    first = report.rows_of(result(2.0, share=0.5, limit="copy", own=0.5), "float32", where)
    report.append(path, first)
    assert report.read(path) == first
    assert [(row.case, row.peer, row.seconds, row.ratio, row.share, row.note) for row in first] == [
        ("case", "torch", 1.0, 2.0, 0.5, "copy"),
        ("case", "plain", 1.0, 2.0, 0.5, "copy"),
    ]
    assert first[0].theirs == 2
    assert first[0].machine == report.cpu_name()
    report.append(path, [replace(first[0], ratio=1 / 3)])
    assert [row.ratio for row in report.read(path)] == [2.0, 0.33333]  # five digits, newest last
    another = replace(first[0], torch="2.10.0")
    assert len(report.newest([*first, another])) == 3


@pytest.mark.parametrize(
    ("machine", "name"),
    [
        ("AMD EPYC (family 25, model 17)", "AMD Zen 4"),
        ("AMD EPYC 9B45 Processor (family 25, model 99)", "AMD EPYC 9B45"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"),
    ],
)
def test_processors_have_the_names_of_their_generations(machine, name):
    assert report.processor(machine) == name


@pytest.mark.parametrize("text", ["", "{", "date,case\n", ",".join(report.COLUMNS) + "\n" + "x," * 15 + "x\n"])
def test_a_file_that_is_no_results_file_is_named(tmp_path, text):
    path = tmp_path / "results.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=re.escape(f"{path}: expected a results file")):
        report.read(path)


def test_a_commit_is_marked_where_code_differs_and_not_where_results_do(tmp_path, monkeypatch):
    """Each recording changes results, and would mark the next one."""

    paths = ["fastattn/bench/report.py", "csrc/cpu/a.cpp", "benchmarks/b.py", "benchmarks/results.csv", "README.md"]
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=n", "-c", "user.email=e", *command], check=True)
    monkeypatch.setattr(report, "__file__", str(tmp_path / paths[0]))
    clean = report.commit()
    assert re.fullmatch("[0-9a-f]{12}", clean)
    for path in paths:
        (tmp_path / path).write_text("changed")
        assert report.commit() == clean + "+" * (not path.endswith((".csv", ".md"))), path
        (tmp_path / path).write_text("")


@pytest.mark.parametrize(
    ("share", "limit", "shown"),
    [
        (0.8, "arithmetic", "80%"),
        (1.02, "arithmetic", "at the limit"),
        (0.8, "copy", "80% of a copy"),
        (821.2, "copy", "faster than a copy"),
        (None, "", ""),
    ],
)
def test_no_share_of_a_limit_is_above_it(share, limit, shown):
    assert report.share(share, limit) == shown
    assert (f"| {shown} |" in report.table([result(2.0, share=share, limit=limit)])) is bool(shown)


def test_a_column_that_would_be_empty_is_left_out():
    plain, noisy = result(1.53), result(0.8, name="other", share=0.5, limit="arithmetic", own=0.6, noise="busy")
    assert report.table([plain]) == (
        "| case | ours | compared with torch |\n| --- | --- | --- |\n| case | 1000.00 ms | 1.53x as fast (1.53-1.53) |"
    )
    head, _, *rows = report.table([plain, noisy]).splitlines()
    assert head == "| case | ours | compared with torch | of the limit | of own plain time | noisy |"
    assert rows[0].endswith(" | 1.53x as fast (1.53-1.53) |  |  |  |")
    assert rows[1].endswith(" | 0.80x as fast (0.80-0.80) | 50% | 0.60 | busy |")


def test_a_line_of_the_command_says_what_its_numbers_are():
    assert report.sentence(result(1.53)) == "case: 1000.00 ms, 1.53x as fast as torch (1.53-1.53)"
    full = result(0.8, share=0.5, limit="copy", own=0.6, noise="busy")
    full.ratios["flex"] = Ratio(2.0, 2.0, 2.0)
    assert report.sentence(full) == (
        "case: 1000.00 ms, 0.80x as fast as torch (0.80-0.80), 50% of a copy, 0.60 of own plain time, "
        "2.00x as fast as flex, noisy: busy"
    )


def test_limits_that_other_programs_disturbed_have_no_rows(monkeypatch):
    monkeypatch.setattr(limits, "measure", lambda: {"float32": 5e11})
    for noise, words in (("", "; limits: 500 GFLOP/s float32"), ("busy", "")):
        monkeypatch.setattr(timer.Neighbours, "noise", lambda self, noise=noise: noise)
        assert report.limit_words(report.limit_rows(report.here())) == words


def test_tables_go_between_the_markers(tmp_path):
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- speed:begin -->\nold\n<!-- speed:end -->\nafter\n")
    report.insert(page, "speed", "new")
    assert page.read_text() == "before\n<!-- speed:begin -->\nnew\n<!-- speed:end -->\nafter\n"
    page.write_text("no markers")
    with pytest.raises(InputError, match="expected the lines"):
        report.insert(page, "speed", "")


# --- the command ---


def command(*options):
    return bench.main(fastattn_command.parse(["bench", *map(str, options)]))


def test_a_filter_that_matches_nothing_is_an_error():
    with pytest.raises(InputError, match="--filter '7777': no case has this in its name; one is 'attention float32"):
        command("--filter", "7777")


@pytest.mark.parametrize(
    ("text", "has", "lacks"),
    [
        ("layer_norm", "layer_norm float32 4096x512", "dropout_add_layer_norm float32 4096x512"),
        ("float16", "attention float16 1x8x1x64", "attention bfloat16 1x8x1x64"),
        ("2048x64 causal", "attention float32 1x8x2048x64 causal forward", "attention float32 1x8x2048x64 forward"),
        ("+backward", "layer_norm float32 4096x512 forward+backward", "layer_norm float32 4096x512 forward"),
    ],
)
def test_a_filter_chooses_by_words(text, has, lacks):
    assert bench.has_text(has, text)
    assert not bench.has_text(lacks, text)


@pytest.fixture
def measured(monkeypatch):
    """Make the command measure nothing: the results are fixed, and those of bfloat16 noisy."""

    def run(case, **options):
        return result(2.0, name=case.name, share=0.5, limit="arithmetic", noise="busy" * (case.dtype == torch.bfloat16))

    monkeypatch.setattr(timer.Neighbours, "noise", lambda self: "")
    monkeypatch.setattr(limits, "measure", lambda: {"float32": 1e11})
    monkeypatch.setattr(contest, "run", run)


@pytest.mark.usefixtures("measured")
def test_lines_stand_below_the_machine_and_its_limits(capsys, tmp_path):
    """Each has its number and the total. The file leaves out what was noisy; the line says so."""
    output = tmp_path / "results.csv"
    assert command("--filter", "1x8x1x64 32 keys", "--output", output) == 0
    machine, *lines = capsys.readouterr().out.splitlines()
    assert machine.startswith(report.cpu_name())
    assert machine.endswith("limits: 100 GFLOP/s float32")
    names = [f"attention {dtype} 1x8x1x64 32 keys forward" for dtype in ("float32", "bfloat16")]
    figures = "1000.00 ms, 2.00x as fast as torch (2.00-2.00), 50% of the limit"
    assert lines == [f"1/2 {names[0]}: {figures}", f"2/2 {names[1]}: {figures}, noisy: busy"]
    assert [row.case for row in report.read(output)] == ["limit: float32", names[0]]


@pytest.mark.usefixtures("measured")
def test_a_terminal_shows_which_case_is_being_measured(monkeypatch, capsys):
    """Before its line, and removed by an escape sequence that clears the terminal's line."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert command("--filter", "float32 1x8x1x64 32 keys") == 0
    assert capsys.readouterr().err == "1/1 attention float32 1x8x1x64 32 keys forward ...\r\033[K"


@pytest.mark.slow
def test_no_contestant_of_the_training_step_computes_with_subnormals():
    """A softmax of probabilities below float32's least normal number takes some processors longer."""
    case = Case("training_step", (1, 48))
    source, target = torch.randint(3, BASE["vocab_size"], (2, 1, 48))
    for name, model in training._models(case).items():
        with torch.no_grad():
            probabilities = model.eval()(source, target).softmax(-1)
        assert (probabilities >= torch.finfo(torch.float32).tiny).all(), name
