"""The accuracy report: its errors, and that every case is recorded."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
specification = importlib.util.spec_from_file_location("accuracy", ROOT / "benchmarks/accuracy.py")
accuracy = importlib.util.module_from_spec(specification)
specification.loader.exec_module(accuracy)
RECORDED = sorted((ROOT / "benchmarks/results").glob("accuracy-*.json"))
ROUNDING = {"float32": 2**-24, "bfloat16": 2**-9, "float16": 2**-12}


def test_errors():
    found = accuracy.errors(*torch.tensor([[3.0, 4.5], [3.0, 4.0]], dtype=torch.float64))
    assert found == {"norm": 0.1, "most": 0.125}


@pytest.mark.parametrize("case", accuracy.cases((64,)), ids=lambda case: case.name)
def test_ours_is_at_most_twice_as_far_as_torch(case):
    """Beside a rounding of each result; and none is exact, as it would be if the truth were computed in the dtype."""
    for entry in accuracy.measure(case):
        assert 0 < entry["ours"]["norm"] < 2 * entry["torch"]["norm"] + ROUNDING[entry["dtype"]]


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_the_recorded_errors_are_of_every_case(path):
    found = json.loads(path.read_text())["errors"]
    cases = [(case.operation, str(case.dtype), case.keys or case.shape[1]) for case in accuracy.cases()]
    assert [(entry["operation"], f"torch.{entry['dtype']}", entry["length"]) for entry in found[::2]] == cases
