"""What a call costs beside its arithmetic: problems so small that the way from Python to the kernel is all there is."""

import pytest

from fastattn.bench.cases import dispatch


@pytest.mark.parametrize("case", dispatch(), ids=lambda case: case.name)
def test_dispatch(gate, case):
    gate(case)
