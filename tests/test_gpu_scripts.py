"""Programs for a machine with a GPU, checked without one.

Covered are the operands and contestants of every case, the tuner's candidates, and stages that fail."""

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
from fastattn.bench import peers, report, timer

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


def test_benchmarks_begin_with_each_kind(gpu):
    cases = list(gpu.cases())
    kinds = {(c.operation, c.dropout > 0, c.padding, c.keys is not None) for c in cases}
    assert {(c.operation, c.dropout > 0, c.padding, c.keys is not None) for c in cases[: len(kinds)]} == kinds
    assert len(set(cases)) == len(cases)


@pytest.mark.slow
def test_every_benchmark_runs(gpu, monkeypatch, tmp_path):
    cases = list(dict.fromkeys(map(small, gpu.cases())))
    monkeypatch.setattr(gpu, "cases", lambda: cases)
    assert gpu.run(tmp_path / "results.json", {"device": None}, seconds=1000) == []
    results = json.loads((tmp_path / "results.json").read_text())
    assert [r["case"] for r in results["cases"]] == [c.name for c in cases]
    for case, result in zip(cases, results["cases"], strict=True):
        assert "error" not in result, result
        timed = result["milliseconds"].keys()
        composed = "math" if case.operation == "attention" else "torch"
        assert timed >= {"fastattn", "compiled", composed}, result
        if case.operation == "attention" and not (case.dropout or case.backward):  # on the CPU flex has neither
            assert "flex" in timed, result


def test_a_case_that_fails_does_not_stop_the_rest(gpu, monkeypatch, tmp_path):
    def broken(case):
        raise MemoryError

    cases = [small(case) for case in gpu.cases()][:2]
    monkeypatch.setattr(gpu, "cases", lambda: cases)
    monkeypatch.setattr(gpu, "contestants", broken)
    failures = gpu.run(tmp_path / "results.json", {}, seconds=1000)
    assert failures == [f"{case.name}: MemoryError" for case in cases]
    results = json.loads((tmp_path / "results.json").read_text())
    assert [r["error"] for r in results["cases"]] == ["MemoryError"] * 2


@pytest.mark.slow
def test_scores_beyond_memory_are_left_to_others(gpu, monkeypatch):
    """Peers whose scores exceed the memory are left out, with the reason. If fastattn fails on its backend, that is an
    error."""
    case = next(small(case) for case in gpu.cases() if case.operation == "attention" and case.dropout)
    monkeypatch.setattr(gpu, "SCORES", 0)
    result = gpu.measure(case, 1.0, 1.0)
    assert "error" not in result
    for peer in ("math", "compiled"):
        assert "its scores would take" in result["refused"][peer]
        assert peer not in result["milliseconds"]
    other = types.SimpleNamespace(reasons={"cuda": "its attention has no dropout", "triton": "cuda is faster"})
    monkeypatch.setattr(fastattn, "explain", lambda *args, **options: other)
    monkeypatch.setattr(fastattn, "backend", mock.Mock(side_effect=RuntimeError("no such kernel\nat all")))
    result = gpu.measure(case, 1.0, 1.0)
    assert result["error"] == "fastattn triton: RuntimeError no such kernel"
    assert "fastattn" in result["milliseconds"]


def test_the_page_of_an_imperfect_run(gpu):
    """Cases that failed, peers that refused and tiles that do not run are left out. The goals of section 7 are
    judged."""
    full, half = (
        next(c for c in gpu.cases() if c.name.endswith(f"2x16x8192x128 {end}"))
        for end in ("forward", "forward+backward")
    )
    step, rows = (next(c for c in gpu.cases() if c.operation == name) for name in ("training_step", "layer_norm"))
    shares = {"share_of_copy": 0.85, "share_of_product": 0.3}
    results = [
        {"case": full.name, "milliseconds": {"fastattn": 2.0, "flash": 3.0, "cudnn": 1.0}, **shares},
        {"case": half.name, "milliseconds": {"fastattn": 6.0, "flash": 6.0}, **shares},
        {"case": step.name, "milliseconds": {"fastattn": 4.0, "torch": 6.0}, **shares},
        {"case": rows.name, "milliseconds": {"fastattn": 1.0}, **shares},
        {"case": "one that failed", "error": "MemoryError"},
    ]
    for result in results[:4]:
        ours, *_ = result["milliseconds"].values()
        result["times_as_fast_as"] = {
            name: ms / ours for name, ms in result["milliseconds"].items() if name != "fastattn"
        }
    assert [(case, value) for case, _, _, value in gpu.goals(results[:4])] == [
        (full.name, 1.5), (rows.name, 0.85), (step.name, 1.5), (half.name, 0.75),
    ]  # fmt: skip
    about = {"device": "a GPU", "torch": "2", "cuda": "13", "triton": "3", "commit": "0123456789"}
    tile = dict.fromkeys(("block_m", "block_n", "num_warps", "num_stages"), 4) | {"maxnreg": None}
    tile |= {"register_usage_level": None, "present": True}
    page = gpu.section(
        about | {"limits": {"copy GB/s": 3000.0, "bfloat16 TFLOP/s": 700.0}, "cases": results},
        about | {"kernels": [{"kernel": "a kernel", "unit": "TFLOP/s", "measured": 418.9}]},
        about | {"tiles": {"a kernel": [tile | {"milliseconds": 2.0}], "another": [tile | {"error": "x"}], "none": []}},
        about | {"microseconds": {"a call": {"triton": 9.0}}},
        about | {"preset": "base", "batch_tokens": 10, "runs": []},
        about | {"seconds": 9, "of": 7, "passed": 5, "failed": 1, "failures": ["test_one"]},
    )
    assert f"| {full.name} | 2 | 85% of a copy | cudnn 0.50, flash 1.50 |" in page
    assert f"| {half.name} | 1 times flash, of the backward pass | **0.75** |" in page
    assert "| a kernel | 419 TFLOP/s |" in page
    assert "| a kernel | 4x4, 4 warps, 4 stages: 2.000 | 4x4, 4 warps, 4 stages: 2.000 | 1.00 |" in page
    assert "one that failed" not in page
    assert "another" not in page
    assert "5 of the 7 tests of the backends for CUDA tensors passed and 1 failed: `test_one`." in page
    assert (
        f"Not measured for want of time: {sorted({c.name for c in gpu.cases()} - {r['case'] for r in results})[0]}"
        in page
    )


def test_calls_are_timed_as_replayed_graphs(monkeypatch):
    module, called = load("benchmarks/gpu.py"), []
    for name in ("Stream", "current_stream", "stream", "graph", "CUDAGraph", "Event"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    torch.cuda.Event.return_value.elapsed_time.return_value = 6.0
    call = functools.partial(called.append, None)
    assert module.replay(call, 2) == 6.0 / 1000 / 2
    assert len(called) == 3 + 2  # before the capture, and in it
    assert module.replay(call, 2) == 6.0 / 1000 / 2
    assert len(called) == 3 + 2
    assert torch.cuda.CUDAGraph.return_value.replay.call_count == 2


def test_calls_are_timed_from_python(monkeypatch):
    """Calls are timed from an idle device until it has finished all of them."""
    module, events, clock = load("benchmarks/gpu.py"), [], iter((5.0, 11.0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("synchronize"))
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    assert module.eager(lambda: events.append("call"), 3) == 2.0
    assert events == ["synchronize", "call", "call", "call", "synchronize"]


def test_results_say_where_they_come_from(monkeypatch, tmp_path):
    require("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    given = []
    monkeypatch.setattr(sys, "argv", ["gpu", str(tmp_path / "results.json"), "--seconds", "5"])
    monkeypatch.setattr(report.subprocess, "run", mock.Mock(side_effect=FileNotFoundError))  # no git
    monkeypatch.setenv("FASTATTN_COMMIT", "that one")
    report.on_gpu("", lambda *arguments: given.append(arguments), lambda part: None)
    [(path, about, seconds)] = given
    assert (path, seconds) == (tmp_path / "results.json", 5)
    assert about["device"] == "a GPU"
    assert about["torch"] == torch.__version__
    assert about["commit"] == "that one"
    with pytest.raises(SystemExit, match="this case"):
        report.on_gpu("", lambda *arguments: ["this case", "and that one"], lambda part: None)


def test_seconds_are_the_kernels_own(monkeypatch):
    """A kernel's seconds are the median of its times on the device, by the profiler. The first call, which compiles, is
    not counted."""
    profile, called, device = mock.MagicMock(), [], torch.autograd.DeviceType
    events = ("a", 3), ("a", 5), ("a", 100), ("b", 7), ("cuLaunchKernel", 9)
    profile.__enter__.return_value.events.return_value = [
        types.SimpleNamespace(
            name=name,
            device_type=device.CPU if name.startswith("cu") else device.CUDA,
            time_range=types.SimpleNamespace(elapsed_us=lambda duration=duration: duration),
        )
        for name, duration in events
    ]
    monkeypatch.setattr(torch.profiler, "profile", lambda **options: profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert timer.kernel_seconds(lambda: called.append(None), 4) == pytest.approx({"a": 5e-6, "b": 7e-6})
    assert len(called) == 1 + 4


def test_parts_to_compile(monkeypatch, tmp_path, capsys):
    """All parts together are the whole, and nothing is measured."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    done = []
    for part in ("1/3", "2/3", "3/3"):
        monkeypatch.setattr(sys, "argv", ["gpu", str(tmp_path / "results.json"), "--compile", part])
        report.on_gpu("", lambda *arguments: pytest.fail("measured"), lambda part: done.extend(range(7)[part]))
    assert sorted(done) == list(range(7))
    for wrong in ("0/3", "4/3", "3", "a/b"):
        monkeypatch.setattr(sys, "argv", ["gpu", str(tmp_path / "results.json"), "--compile", wrong])
        with pytest.raises(SystemExit):
            report.on_gpu("", lambda *arguments: [], lambda part: None)
        assert f"such as 2/12, got '{wrong}'" in capsys.readouterr().err


def test_each_script_compiles_its_part(gpu, monkeypatch):
    """A contestant that fails does not stop the others."""
    called = []
    case = next(small(case) for case in gpu.cases() if case.operation == "attention")
    monkeypatch.setattr(gpu, "cases", lambda: [case] * 5)
    makes = {"a": lambda: functools.partial(called.append, "a"), "b": mock.Mock(side_effect=MemoryError)}
    monkeypatch.setattr(gpu, "contestants", lambda case: makes.items())
    gpu.compile_part(slice(1, None, 2))
    assert called == ["a", "a"]


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

    small = {"DEVICE": "cpu", "LONG": (1, 1, 20), "SHORT": (1, 1, 9), "PACKED": (2, 1, 6), "ELEMENTS": 2**13}
    for name, value in (small | {"BLOCK_ELEMENTS": (1024,), "WARP_ELEMENTS": (512,), "TILES": tune.TILES[:1]}).items():
        monkeypatch.setattr(tune, name, value)
    monkeypatch.setattr(tune, "kernel_seconds", time_once)
    monkeypatch.setattr(tiles, "capability", lambda device: (12, 0))
    monkeypatch.setattr(tiles, "choose", record)
    failures = tune.run(tmp_path / "results.json", {}, seconds=1000)
    found = json.loads((tmp_path / "results.json").read_text())["tiles"]
    assert len(found) == 3 * 4 * 2 * 2 + 5 * 3
    timed = [[entry["milliseconds"] for entry in entries if "error" not in entry] for entries in found.values()]
    assert all(times == sorted(times) for times in timed)
    errors = [entry["error"] for entries in found.values() for entry in entries if "error" in entry]
    assert set(errors) == {"RuntimeError out of resource"}
    assert len(errors) + len(failures) == len(raised)  # present choices first, then all
    assert 0 < len(failures) < len(errors)
    assert all("out of resource" in failure for failure in failures)
    assert tune.TILES[0] in chosen
    assert tables() == before
    chosen.clear()
    tune.compile_part(slice(1, None, 5))
    assert tune.TILES[0] in chosen
    assert tables() == before


def stages(out, *names, **variables):
    environment = {**os.environ, "PYTHON": sys.executable, **variables}
    command = ["bash", ROOT / "benchmarks/run_gpu.sh", "--out", out, *names]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    return result.returncode, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
def test_stages_fail_one_by_one(tmp_path):
    status, output = stages(tmp_path, "benchmarks", "tuning")
    assert status == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["device"] is None
    assert {name: stage["result"] for name, stage in summary["stages"].items()} == dict.fromkeys(
        ["benchmarks", "tuning"], "failed"
    )
    assert "no CUDA device" in output


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
@pytest.mark.parametrize(("fault", "result"), [("", "passed"), ("exit 1", "failed")])
def test_every_part_is_compiled(tmp_path, fault, result):
    """Every part of each script is compiled, by as many processes as there are cores. A part that fails does not stop
    the others."""
    (tmp_path / "bin").mkdir()
    python = tool(
        tmp_path / "bin/python",
        f"""case "$*" in
        *--compile*) echo "$1 $4" >>{tmp_path}/called; [[ "$1 $4" != *tune.py*2/3 ]] || {fault or "exit 0"} ;;
        *) exec {sys.executable} "$@" ;; esac""",
    )
    tool(tmp_path / "bin/nproc", "echo 3")
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    status, output = stages(tmp_path / "out", "compile", PYTHON=python, PATH=path)
    assert status == (result == "failed"), output
    scripts = "benchmarks/gpu.py", "tools/tune.py"
    called = (tmp_path / "called").read_text().splitlines()
    assert sorted(called) == sorted(f"{script} {part}/3" for script in scripts for part in (1, 2, 3))
    found = json.loads((tmp_path / "out/summary.json").read_text())["stages"]
    assert found["compile"]["result"] == result


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "result"), [("", "out of time"), ("echo FAILED tests/test_x.py", "failed")])
def test_how_stages_end(tmp_path, fault, result):
    """The summary has the end of each stage, and exists while the last stage runs.

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
        *gpu.py*) cp {out}/summary.json {tmp_path}/before.json ;;
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
    for summary in (out / "summary.json", tmp_path / "before.json"):
        found = json.loads(summary.read_text())["stages"]
        assert {name: stage["result"] for name, stage in found.items()} == {name: ends[name] for name in found}
        assert len(found) == (3 if summary.parent == out else 2)
