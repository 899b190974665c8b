"""A training step of the base model compared with torch.nn.Transformer's."""

import pytest

from fastattn.bench.cases import training


@pytest.mark.parametrize("case", training(), ids=lambda case: case.name)
def test_training_step(gate, case):
    gate(case, rounds=(4, 6))
