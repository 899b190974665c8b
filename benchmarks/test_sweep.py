"""Nothing is slower than torch: a sample of the sweep, or the whole of it with --sweep."""

from fastattn.bench.cases import sweep

SAMPLE = 41
"""Every so many cases are run without --sweep; prime, so that the sample meets every value of every axis."""


def pytest_generate_tests(metafunc):
    cases = list(sweep())
    if not metafunc.config.getoption("--sweep"):
        cases = cases[::SAMPLE]
    metafunc.parametrize("case", cases, ids=lambda case: case.name)


def test_sweep(gate, case):
    gate(case, budget=0.2, rounds=(4, 40))
