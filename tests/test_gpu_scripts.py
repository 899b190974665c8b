"""Scripts for a machine with a GPU, as far as they run without one: operands, contestants, tuning, failing stages."""

import dataclasses
import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import DEVICE, require

import fastattn
from fastattn.bench import peers, report, timer, training

TIMEOUT = shutil.which("timeout")
ROOT = Path(__file__).parent.parent


def load(path):
    """Load a file as a new module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def small(case):
    shapes = {"attention": (2, 2, min(case.shape[-2], 5), 16), "training_step": (2, 5)}
    shape = shapes.get(case.operation, (6, 40))
    return dataclasses.replace(case, shape=shape, keys=case.keys and 7)


@pytest.fixture
def gpu(monkeypatch):
    """Return benchmarks/gpu.py set to run on the CPU, timed by the clock, with peers that are not compiled."""
    module = load("benchmarks/gpu.py")
    for name, value in {"DEVICE": "cpu", "LARGE": 2**12, "BUDGET": 0.0}.items():
        monkeypatch.setattr(module, name, value)
    for name in ("replay", "eager"):
        monkeypatch.setattr(module, name, timer.wall_clock)
    monkeypatch.setattr(peers, "_compiled", lambda function: function)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **options: None)
    monkeypatch.setattr(fastattn, "explain", lambda *args, **options: types.SimpleNamespace(reasons={}))
    return module


@pytest.mark.slow
def test_every_benchmark_runs(gpu, monkeypatch, tmp_path):
    """A row per peer, those from Python behind the others."""
    cases = list(dict.fromkeys(map(small, gpu.cases())))
    sizes = {"vocab_size": 50, "d_model": 32, "d_ff": 64, "num_heads": 4, "encoder_layers": 1, "decoder_layers": 1}
    monkeypatch.setattr(training, "BASE", sizes)
    monkeypatch.setattr(gpu, "cases", lambda: cases)
    monkeypatch.setattr(gpu, "small_cases", lambda: [cases[-1]])
    path = tmp_path / "results.csv"
    assert gpu.run(path, {"machine": "a GPU"}, seconds=1000) == []
    found = {}
    for row in report.read(path):
        found.setdefault(row.case, {})[row.peer] = row
    names = [c.name for c in cases]
    assert list(found) == ["limit: copy", "limit: product", *names, f"{names[-1]}, from Python"]
    for case in cases:
        peers = found[case.name]
        composed = "math" if case.operation == "attention" else "torch"
        assert peers.keys() >= {"compiled", composed}, case.name
        assert all(row.seconds and row.ratio and row.share and row.machine == "a GPU" for row in peers.values())
        if case.operation == "attention" and not (case.dropout or case.backward):  # on the CPU flex has neither
            assert "flex" in peers, case.name


def test_the_command_line_of_a_gpu(monkeypatch, tmp_path):
    """Results name their machine, and a failure of fastattn fails the script. All parts to compile together are the
    whole, whatever fails, and nothing is measured."""
    require("triton")
    for name, value in (("is_available", True), ("get_device_name", "a GPU"), ("get_device_capability", (9, 0))):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(report.subprocess, "run", mock.Mock(side_effect=FileNotFoundError))  # no git
    monkeypatch.setenv("FASTATTN_COMMIT", "that one")
    run, done = mock.Mock(return_value=["this case", "and that one"]), []
    calls = [(str(n), functools.partial(done.append, n)) for n in range(7)]
    calls.insert(3, ("broken", mock.Mock(side_effect=MemoryError)))
    for part in "123":
        monkeypatch.setattr(sys, "argv", ["gpu", "results.csv", "--compile", part, "3"])
        report.on_gpu("", run, lambda: calls)
    assert sorted(done) == list(range(7))
    assert not run.called
    monkeypatch.setattr(sys, "argv", ["gpu", str(tmp_path / "results.csv"), "--seconds", "5"])
    with pytest.raises(SystemExit, match="this case"):
        report.on_gpu("", run, lambda: ())
    [(path, where, seconds)] = [call.args for call in run.call_args_list]
    assert (path, seconds) == (tmp_path / "results.csv", 5)
    assert where.items() >= {"machine": "a GPU", "isa": "sm_90", "threads": "", "commit": "that one"}.items()
    assert where["torch"].startswith(f"{torch.__version__}, triton ")


@pytest.mark.slow
def test_tuner(monkeypatch, tmp_path):
    """Every candidate is tried by a kernel that runs with it. The tables do not change whatever fails, and failures are
    reported."""
    require("triton")
    if DEVICE != "cpu":
        pytest.skip("for Triton's interpreter")
    tune = load("tools/tune.py")
    from fastattn.backends.triton import FUNCTIONS, rows
    from fastattn.backends.triton.attention import tiles

    assert FUNCTIONS["dropout"]  # imports the operations, which list their blocks

    def tables():
        return repr([rows.LIMITS, *(table for name, table in vars(tiles).items() if name.isupper())])

    before, chosen = tables(), set()
    tried, raised = [], []

    def record(*arguments, choose=tiles.choose):
        chosen.add(choose(*arguments))
        return choose(*arguments)

    def time_once(call):
        tried.append(call)
        call()
        if len(tried) % 5 == 4:
            raised.append(len(tried))
            raise RuntimeError("out of resource")
        return dict.fromkeys((f"{kernel}_kernel" for kernel in tune.KERNELS), 1.0 / len(tried))

    small = {"DEVICE": "cpu", "LONG": (1, 1, 20), "SHORT": (1, 1, 9), "PACKED": (2, 1, 6), "ELEMENTS": 2**11}
    few = {"HEAD_DIMS": (64,), "COLUMNS": (512, 1024), "BLOCK_ELEMENTS": (1024,), "WARP_ELEMENTS": (512,)}
    for name, value in (small | few | {"TILES": tune.TILES[:1]}).items():
        monkeypatch.setattr(tune, name, value)
    monkeypatch.setattr(tune, "kernel_seconds", time_once)
    monkeypatch.setattr(tiles, "capability", lambda device: (12, 0))
    monkeypatch.setattr(tiles, "choose", record)
    failures = tune.run(tmp_path / "results.csv", {}, seconds=1000)
    found = report.read(tmp_path / "results.csv")
    assert 0 < len(found) <= 2 * (3 * 5 * 2 + 5 * 2)  # the present choices alone first, then all
    assert all(0 < row.ratio <= 1 and row.note.count("; ") == 1 for row in found)
    assert 0 < len(failures) < len(raised)  # the present choices among them
    assert all("out of resource" in failure for failure in failures)
    assert tune.TILES[0] in chosen
    assert tables() == before
    assert len(list(tune.calls())) >= 3 * 5 * 2 + 5 * 2


@pytest.mark.parametrize("fault", ["", "seed", "output", "unwritten"])
def test_what_differs_between_replays(monkeypatch, fault):
    """A difference between replays of one seed is called by what may have caused it."""
    replay = load("benchmarks/replay.py")
    monkeypatch.setattr(replay, "DEVICE", "cpu")

    def capture(call):
        outputs, calls = call(), []

        def again():
            calls.append(1)
            faulty = fault if len(calls) % 3 == 0 else ""
            if faulty == "seed":
                torch.rand(1)
            fresh = call()
            if faulty == "output":
                fresh[1][5] += 1
            for output, value in list(zip(outputs, fresh, strict=True))[faulty == "unwritten" :]:
                output.copy_(value)

        return again, outputs

    monkeypatch.setattr(replay, "capture", capture)
    counts = replay.search("torch", replay.Mode(rounds=2), 0.05)
    assert counts["rounds"] == 2 * counts["graphs"] > 0
    assert {kind: counts[kind] for kind in replay.KINDS} == {
        kind: counts["rounds"] * (kind == fault) for kind in replay.KINDS
    }


@pytest.mark.slow
def test_passed_tests_are_left_out(tmp_path):
    """A later run has the tests that have not passed."""
    (tmp_path / "all").write_text("")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", ROOT / "tests/test_workflow.py"]
    variables = {"FASTATTN_TEST_SHARD": "1/2", "FASTATTN_TEST_PASSED": str(tmp_path)}

    def run():
        done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, cwd=ROOT)
        return done.returncode, done.stdout.splitlines()[-1]

    first = run()
    passed = (tmp_path / "shard-1").read_text()
    assert (first[0], len(passed.splitlines())) == (0, 4)
    (tmp_path / "all").write_text(passed)
    status, line = run()
    assert (status, line.split(" in ")[0]) == (0, "2 passed")


def stages(out, *names, **variables):
    environment = {**os.environ, "PYTHON": sys.executable, **variables}
    command = ["bash", ROOT / "benchmarks/run_gpu.sh", "--out", out, *names]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    return result.returncode, result.stdout + result.stderr


def test_stages_by_name(tmp_path):
    status, output = stages(tmp_path, "tuning", "benchmarking")
    assert status == 2
    assert "benchmarking" in output
    commands = re.findall(r"^benchmarks/run_gpu.sh((?: \w+)*) +#", (ROOT / "docs/gpu.md").read_text(), re.MULTILINE)
    named = {stage for command in commands for stage in command.split()}  # stages that the page names
    assert named
    assert named <= set(output.split())
    assert not list(tmp_path.iterdir())  # no stage has begun


def tool(path, script):
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "result"), [("", "out of time"), ("echo FAILED tests/test_x.py", "failed")])
def test_how_stages_end(tmp_path, fault, result):
    """The summary has the end of each stage.

    Stand-ins replace the tools. One shard of the tests takes too long, and may have reported a failing test before. One
    of the sanitizer's tools finds something; the others pass."""
    out = tmp_path / "out"
    (tmp_path / "bin").mkdir()
    shard = f"""{fault}
        exec {sys.executable} -Sc 'import time
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")'"""
    python = tool(
        tmp_path / "bin/python",
        f"""case "$FASTATTN_TEST_SHARD $*" in
        "3/12 -m pytest"*) {shard} ;;
        *"-m pytest"*) exit 0 ;;
        *gpu.py*) exit 0 ;;
        *) exec {sys.executable} "$@" ;; esac""",
    )
    tool(tmp_path / "bin/timeout", f'[[ $1 != --signal=INT ]] || set -- "${{@:1:2}}" 3 "${{@:4}}"\n{TIMEOUT} "$@"')
    tool(tmp_path / "bin/compute-sanitizer", "echo $4; [[ $4 == memcheck ]]")
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    status, output = stages(out, "tests", "sanitizer", "benchmarks", PYTHON=python, PATH=path)
    assert status == 1, output
    assert "shard 3: interrupted" in (out / "tests.log").read_text()
    assert (out / "sanitizer.log").read_text().split() == ["racecheck", "memcheck"]
    ends = {"tests": result, "sanitizer": "failed", "benchmarks": "passed"}
    found = json.loads((out / "summary.json").read_text())["stages"]
    assert {name: stage["result"] for name, stage in found.items()} == ends
