"""Correctness and speed of all cases, with the floors of docs/design.md, section 7."""

from fastattn.bench import limits
from fastattn.bench.cases import dispatch, double, headline, sweep, training

SAMPLE = 41
"""Without --sweep, every 41st case of the sweep is run. A prime, so that the sample meets every value of every axis."""


def pytest_generate_tests(metafunc):
    isa = limits.instruction_set()
    cases = {
        "test_dispatch": dispatch,
        "test_floor": lambda: [*headline(isa), *double()],
        "test_training_step": lambda: training(isa),
        "test_sweep": lambda: list(sweep())[:: 1 if metafunc.config.getoption("--sweep") else SAMPLE],
    }[metafunc.function.__name__]()
    metafunc.parametrize("case", cases, ids=lambda case: case.name)


def test_dispatch(gate, case):
    """The path from Python to the kernel is all that such small problems cost."""
    gate(case)


def test_floor(gate, case):
    gate(case)


def test_training_step(gate, case):
    gate(case, rounds=(4, 6))


def test_sweep(gate, case):
    gate(case, budget=0.2, rounds=(4, 40))
