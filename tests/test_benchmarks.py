"""The gate of `pytest benchmarks`, and the comparison with another commit."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fastattn.bench import report
from fastattn.bench.timer import Ratio

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import against  # noqa: E402

sys.path.remove(str(ROOT / "benchmarks"))
GATED = "attention {} 1x8x1x64 32 keys forward"
PLANT = """
import dataclasses, time
from fastattn.bench import timer
from fastattn.bench.cases import OPERATIONS

timer.Neighbours.share = lambda self: 0.0
right, calls = OPERATIONS["attention"], []

def call(case, *operands, **others):
    out = right.call(case, *operands, **others)
    {}
    return out

OPERATIONS["attention"] = dataclasses.replace(right, call=call)
"""


@pytest.fixture
def pytest_benchmarks(tmp_path):
    """pytest_benchmarks(planted, *options): the exit status, the output of the gate of two cases, and the rows."""

    def run(planted, *options):
        (tmp_path / "planted.py").write_text(PLANT.format(planted))
        results = tmp_path / "results.csv"
        (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q -p planted -p no:cacheprovider\n")
        command = [sys.executable, "-m", "pytest", "-c", tmp_path / "pytest.ini", "--rootdir", tmp_path]
        command += [ROOT / "benchmarks/test_cases.py", "-k", "dispatch", "--record", "--results", results, *options]
        imported = os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "tests")))
        environment = os.environ | {"PYTHONPATH": imported, "OMP_NUM_THREADS": str(torch.get_num_threads())}
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
        return done.returncode, done.stdout, report.read(results) if results.exists() else []

    return run


@pytest.mark.slow
def test_the_gate_catches_a_planted_slowdown_and_a_planted_loss_of_accuracy(pytest_benchmarks):
    planted = [
        "dtype = operands[0].dtype.itemsize",
        "    if dtype == 4: time.sleep(2e-3)",
        "    if dtype == 2 and not calls: out, _ = out * 1.1, calls.append(1)",  # ours; the next one is the reference
    ]
    status, said, rows = pytest_benchmarks("\n".join(planted))
    assert (status, "2 failed" in said) == (1, True)
    assert "times as fast as torch, at least 1.00" in said
    assert f"{GATED.format('bfloat16')}: output is off by" in said
    assert GATED.format("float32") in {row.case for row in rows}
    assert GATED.format("bfloat16") not in {row.case for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize(("options", "status"), [((), 1), (("--report",), 0)], ids=["gate", "report"])
def test_what_is_noisy_passes_no_gate(pytest_benchmarks, options, status):
    """Calls take 2 to 14 ms, in turn, so that the quartiles disagree in the quieter half of the rounds too."""
    planted = "calls.append(1), time.sleep(2e-3 * (1 + 3 * len(calls) % 7))"
    found, said, rows = pytest_benchmarks(planted, *options)
    assert found == status
    assert "2 skipped" in said
    assert "not measured: too many noisy cases" in said
    assert not rows


# --- another commit ---


def test_a_loss_counts_if_it_repeats(monkeypatch):
    """Two losses fail. One loss, or noise that a second measurement does not have, do not."""
    clock = dict.fromkeys(("before", "now"), lambda name: 1.0)
    good, lost, noisy = Ratio(1.0, 1.0, 1.0), Ratio(0.8, 0.8, 0.8), Ratio(0.8, 0.5, 1.0)
    for measured, expected in (
        ([good], (False, "")),
        ([Ratio(0.91, 0.91, 0.91)], (False, "")),
        ([lost, good], (False, "")),
        ([lost, lost], (True, "")),
        ([noisy, good], (False, "")),
        ([noisy, lost, lost], (True, "")),
        ([lost, noisy, noisy], (False, "quartiles 0.50 and 1.00")),
    ):
        ratios = iter(measured)

        def interleave(functions, ratios=ratios, **options):
            ratio = next(ratios)
            return SimpleNamespace(ratio=lambda *names: ratio, seconds=lambda side: 1.0)

        monkeypatch.setattr(against.harness("timer"), "interleave", interleave)
        found = against.compare("case", clock)
        assert (against.is_lost(found), found.noise) == expected
        assert next(ratios, None) is None


@pytest.fixture
def package(tmp_path):
    """package(changes): a copy of the package with text replaced in its files."""

    def copy(changes=()):
        root = tmp_path / f"copy-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(ROOT / "fastattn", root / "fastattn", ignore=shutil.ignore_patterns("verses", "__pycache__"))
        shutil.copy(ROOT / "fastattn_command.py", root)
        for name, old, new in changes:
            path = root / "fastattn" / name
            assert old in path.read_text()
            path.write_text(path.read_text().replace(old, new))
        return root

    return copy


SLEEP = (
    "def dropout(*arguments, **options):\n    import time\n    time.sleep({})\n    return _d(*arguments, **options)\n"
)


@pytest.mark.slow
def test_a_package_that_was_slowed_down_is_found(package):
    """Compared with an equal one nothing is. A case that a package lacks is named. Sleep outweighs noise."""
    equal = f"from fastattn.ops.dropout import dropout as _d\n{SLEEP}__version__"
    slow = f"{equal.format(0.1)} = 'slow'\ndel layer_norm\n__version__"
    case, other = "dropout float32 1000x77 dropout 0.1 forward", "layer_norm float32 1000x77 forward"
    with contextlib.ExitStack() as stack:
        ask = {}
        for name, text in (("equal", equal.format(0.05)), ("slow", slow)):
            worker = against.worker(package([("__init__.py", "__version__", text)]))
            stack.callback(worker.close)
            ask[name] = worker.seconds
        found = against.compare(case, {"before": ask["equal"], "now": ask["slow"]}, budget=0.0, rounds=(4, 4))
        assert against.is_lost(found)
        assert found.seconds["now"] >= 0.1 > found.seconds["before"]
        for before in ("slow", "equal"):
            sides = {"before": ask[before], "now": ask["equal"]}
            assert not against.is_lost(against.compare(case, sides, budget=0.0, rounds=(4, 4)))
        with pytest.raises(against.Lacking, match=r"AttributeError.*layer_norm"):
            ask["slow"](other)
        assert ask["slow"](case) > 0
        assert ask["equal"](other) > 0
