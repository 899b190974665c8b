"""The gate that every case here goes through, and the results that a run leaves.

    pytest benchmarks                the floors, dispatch overhead, a sample of the sweep
    pytest benchmarks --sweep        the whole sweep as well
    pytest benchmarks --peers        torch's other backends, FlexAttention and torch.compile as well
    pytest benchmarks --report       only wrong results fail; missed floors are reported
    pytest benchmarks --record       add the results to benchmarks/results.csv
    pytest benchmarks --against REF  compare with another commit on this machine, instead of floors

    FASTATTN_CPU_ISA=avx2 pytest benchmarks     the kernels of another instruction set, fastattn's and torch's

A noisy case is measured again once. Then it is skipped as noisy and not recorded. If more than a tenth of the cases are
noisy, the run fails as "not measured".
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import against
import pytest

from fastattn.bench import contest, report
from fastattn.bench.cases import Case, Floor

RESULTS = Path(__file__).parent / "results.csv"
MOST_NOISY = 0.1


class Found:
    """The outcomes of a run."""

    def __init__(self) -> None:
        self.results: list[contest.Result] = []
        self.changes: list[contest.Result] = []
        self.rows: list[report.Row] = []
        self.missed: list[str] = []
        self.where = report.here()

    def noisy(self) -> list[str]:
        return [f"{one.name}: {one.noise}" for one in (*self.results, *self.changes) if one.noise]

    def is_unmeasured(self) -> bool:
        return len(self.noisy()) > MOST_NOISY * len([*self.results, *self.changes])


FOUND = pytest.StashKey[Found]()


def pytest_addoption(parser):
    group = parser.getgroup("fastattn")
    group.addoption("--sweep", action="store_true", help="every case of the sweep, not a sample")
    group.addoption("--peers", action="store_true", help="all peers, not torch's functions alone")
    group.addoption("--report", action="store_true", help="report speed, fail on wrong results only")
    group.addoption("--record", action="store_true", help="add the results that are not noisy to the file of results")
    group.addoption("--results", type=Path, default=RESULTS, help="the file of results (default: %(default)s)")
    group.addoption("--against", metavar="REF", help="build another commit and fail on a loss of 10 %% that repeats")


def pytest_configure(config):
    config.stash[FOUND] = Found()


@pytest.fixture(scope="session")
def sides(request):
    """Both packages' processes, with --against."""
    with contextlib.ExitStack() as stack:
        workers = {}
        folders = {"before": stack.enter_context(against.built(request.config.getoption("--against")))}
        for side, folder in (folders | {"now": against.ROOT}).items():
            workers[side] = against.worker(folder)
            stack.callback(workers[side].close)
        yield workers


@pytest.fixture
def judge(request):
    """judge(result, floor, dtype, rows): keep a result with further rows, and fail where it misses its floor."""
    found, config = request.config.stash[FOUND], request.config
    if config.getoption("--against"):
        pytest.skip("it has no counterpart in the other commit")

    def judge(result: contest.Result, floor: Floor, dtype: str, rows: Sequence[report.Row] = ()) -> None:
        found.results.append(result)
        if result.noise:
            pytest.skip(f"noisy: {result.noise}")
        found.rows += report.rows_of(result, dtype, found.where)
        found.rows += [dataclasses.replace(row, **found.where, dtype=dtype) for row in rows]
        missed = f"{result.name}: {'; '.join(words)}" if (words := result.missed(floor)) else ""
        if missed and config.getoption("--report"):
            found.missed.append(missed)
        elif missed:
            pytest.fail(missed, pytrace=False)

    return judge


@pytest.fixture
def gate(request):
    """gate(case): fail unless fastattn is right, and as fast as the case's floor or the other commit."""
    config = request.config
    compare = _compare if config.getoption("--against") else _beside_peers

    def gate(case: Case, budget: float = 0.5, rounds: tuple[int, int] = (6, 100)) -> None:
        if wrong := contest.check(case):
            pytest.fail(f"{case.name}: {'; '.join(wrong)}", pytrace=False)
        compare(request, case, budget, rounds)

    return gate


def _beside_peers(request, case: Case, budget: float, rounds: tuple[int, int]) -> None:
    judge, option = request.getfixturevalue("judge"), request.config.getoption
    attempts, everyone = contest.ATTEMPTS, option("--peers")
    if option("--report"):  # a short look, since no speed is judged
        attempts, budget, rounds = 1, budget / 5, (2, rounds[1])
    result = contest.run(case, budget=budget, rounds=rounds, everyone=everyone, attempts=attempts)
    if result.missed(case.floor) and not (result.noise or option("--report")):  # only a longer look condemns
        result = contest.run(case, budget=3 * budget, rounds=rounds, everyone=everyone)
    judge(result, case.floor, str(case.dtype).removeprefix("torch."))


def _compare(request, case: Case, budget: float, rounds: tuple[int, int]) -> None:
    sides = request.getfixturevalue("sides")
    sides["now"].seconds(case.name)  # fails if this checkout cannot do its own case
    try:
        sides["before"].seconds(case.name)
    except against.Lacking as error:
        pytest.skip(f"the other commit lacks it: {error}")
    calls = {side: worker.seconds for side, worker in sides.items()}
    change = against.compare(case.name, calls, budget=2 * budget, rounds=rounds)
    request.config.stash[FOUND].changes.append(change)
    if change.noise:
        pytest.skip(f"noisy: {change.noise}")
    if against.is_lost(change) and not request.config.getoption("--report"):
        pytest.fail(f"{case.name}: {against.times_as_fast(change):.2f} times as fast as before, twice", pytrace=False)


def pytest_sessionfinish(session):
    found, option = session.config.stash[FOUND], session.config.getoption
    if found.is_unmeasured() and not option("--report"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if found.rows and option("--record"):
        report.append(option("--results"), [*report.limit_rows(found.where), *found.rows])


def pytest_terminal_summary(terminalreporter, config):
    found = config.stash[FOUND]
    sections = {
        "fastattn compared with torch and the machine's limits, slowest last": found.results
        and report.table(sorted(found.results, key=lambda result: -result.ratios["torch"].median)),
        "this checkout compared with the other commit": found.changes
        and report.markdown(against.summary(found.changes)),
        "floors missed": "\n".join(found.missed),
        "not measured: too many noisy cases" if found.is_unmeasured() else "noisy": "\n".join(found.noisy()),
    }
    for title, text in sections.items():
        if text:
            terminalreporter.section(title)
            terminalreporter.write_line(text)
