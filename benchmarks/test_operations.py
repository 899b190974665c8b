"""The floors of docs/design.md, section "Numbers to reach"."""

import pytest

from fastattn.bench.cases import headline


@pytest.mark.parametrize("case", headline(), ids=lambda case: case.name)
def test_floor(gate, case):
    gate(case)
