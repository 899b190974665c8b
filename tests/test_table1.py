"""The layers of the paper's Table 1 reach as far as the table says, and its rows show what was measured."""

import importlib.util
from pathlib import Path

import pytest
import torch

from fastattn.bench.timer import Timing

ROOT = Path(__file__).resolve().parent.parent
specification = importlib.util.spec_from_file_location("table1", ROOT / "benchmarks/table1.py")
table1 = importlib.util.module_from_spec(specification)
specification.loader.exec_module(table1)
N, MIDDLE = 200, 100
REACH = {  # positions that one layer's output in the middle depends on
    "self-attention, fastattn": range(N),
    "self-attention, torch": range(N),
    "restricted self-attention, fastattn, r = 129": range(MIDDLE - 64, MIDDLE + 65),
    "recurrent, torch's LSTM": range(MIDDLE + 1),
    "convolutional, torch, k = 3": range(MIDDLE - 1, MIDDLE + 2),
}


@pytest.mark.parametrize("name", table1.LAYERS)
def test_reach(name):
    torch.manual_seed(0)
    x = torch.randn(1, N, table1.WIDTH, requires_grad=True)
    out = table1.layers()[name][1](x)
    assert out.shape == x.shape
    (gradient,) = torch.autograd.grad(out[0, MIDDLE].sum(), x)
    assert gradient[0].any(-1).nonzero().flatten().tolist() == list(REACH[name])


def test_a_disturbed_measurement_is_made_again(monkeypatch):
    shares = iter([0.5, 0.0])
    timed = {name: [0.001 * place] for place, name in enumerate(table1.LAYERS, 1)}
    monkeypatch.setattr(table1, "interleave", lambda functions, **options: Timing(timed, next(shares)))
    found = table1.measure(4)
    assert found["disturbed"] == ""
    rows = table1.table([found]).splitlines()[2:]
    assert [row.split(" | ")[-1] for row in rows] == [f"{place}.00 ms |" for place in range(1, 6)]
