"""The floors of docs/design.md, section "Numbers to reach"."""

import pytest

from fastattn.bench.cases import double, headline


@pytest.mark.parametrize("case", [*headline(), *double()], ids=lambda case: case.name)
def test_floor(gate, case):
    gate(case)
