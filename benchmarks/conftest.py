"""The gate that every benchmark here goes through, and the results that a run leaves.

    pytest benchmarks/               the floors, dispatch overhead, a sample of the sweep
    pytest benchmarks/ --sweep       the whole sweep as well
    pytest benchmarks/ --peers       in addition: torch's other backends, FlexAttention, torch.compile
    pytest benchmarks/ --report      only wrong results fail; floors and lost ratios are reported
    pytest benchmarks/ --record      keep the results as benchmarks/results/MACHINE.json
    pytest benchmarks/ --results DIR     compare with, and record in, another folder

    FASTATTN_CPU_ISA=avx2 pytest benchmarks/         on a machine of another instruction set, ours and torch's kernels

A recorded file is also the baseline: a later run on a machine of that kind must keep its ratios and the floors that it
reached. A floor that it missed is reported, and what it has no result of is named. A disturbed result passes no gate
and is not recorded.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fastattn.bench import contest, limits, report
from fastattn.bench.cases import Case

RESULTS = Path(__file__).parent / "results"
FOUND = pytest.StashKey[dict[str, contest.Result]]()
CASES = pytest.StashKey[dict[str, Case]]()
MISSED = pytest.StashKey[list[str]]()


def pytest_addoption(parser):
    group = parser.getgroup("fastattn")
    group.addoption("--sweep", action="store_true", help="every case of the sweep, not a sample")
    group.addoption("--peers", action="store_true", help="all peers, not torch's functions alone")
    group.addoption("--report", action="store_true", help="report speed, fail on wrong results only")
    group.addoption("--record", action="store_true", help="keep the results, but for disturbed ones")
    group.addoption("--results", type=Path, default=RESULTS, help="the folder of results (default: %(default)s)")


def pytest_configure(config):
    config.stash[FOUND], config.stash[CASES] = {}, {}
    config.stash[MISSED] = []


@pytest.fixture(scope="session")
def baseline(request) -> report.Report | None:
    recorded = _recorded(request.config)
    if recorded:
        limits.remember(recorded.limits)
    return recorded


def _recorded(config) -> report.Report | None:
    path = _path(config)
    return report.Report.read(path) if path.exists() else None


def _path(config) -> Path:
    return config.getoption("--results") / f"{report.kind(report.machine())}.json"


@pytest.fixture
def judge(request, baseline):
    """judge(result): keeps it; fails, or notes with --report, where it misses its floor or the recorded ratio, or was
    disturbed. A floor that the recorded result misses too is noted."""

    def judge(result: contest.Result) -> None:
        request.config.stash[FOUND][result.name] = result
        missed, known = contest.judged(result, baseline and baseline.results.get(result.name))
        if result.disturbed:
            missed.append(f"disturbed, run it on a quiet machine ({result.disturbed})")
        if known:
            request.config.stash[MISSED].append(f"{result.name}, as recorded: {'; '.join(known)}")
        if missed and request.config.getoption("--report"):
            request.config.stash[MISSED].append(f"{result.name}: {'; '.join(missed)}")
        elif missed:
            pytest.fail(f"{result.name}: {'; '.join(missed)}", pytrace=False)

    return judge


@pytest.fixture
def gate(request, benchmark, judge, baseline):
    """gate(case): fails unless ours is right, and as fast as the case's floor and the recorded ratio ask."""

    def gate(case: Case, budget: float = 0.5, rounds: tuple[int, int] = (6, 100)) -> None:
        request.config.stash[CASES][case.name] = case
        wrong = contest.check(case)
        if wrong:
            pytest.fail(f"{case.name}: {'; '.join(wrong)}", pytrace=False)
        recorded = baseline and baseline.results.get(case.name)
        everyone, lenient = request.config.getoption("--peers"), request.config.getoption("--report")
        attempts = 1 if lenient else contest.ATTEMPTS
        result = contest.run(case, budget=budget, rounds=rounds, everyone=everyone, attempts=attempts)
        if not (lenient or result.disturbed) and contest.judged(result, recorded)[0]:  # only a longer look condemns
            result = contest.run(case, budget=3 * budget, rounds=rounds, everyone=everyone)
        benchmark.extra_info.update(result.to_json())
        benchmark.pedantic(contest.ours(case), rounds=3, warmup_rounds=1)
        judge(result)

    return gate


def pytest_benchmark_update_machine_info(config, machine_info):
    machine_info.update(report.machine())


def pytest_terminal_summary(terminalreporter, config):
    results = config.stash[FOUND]
    if not results:
        return
    for name in results.keys() & config.stash[CASES].keys():  # the machine may have been slow at first
        results[name] = contest.reviewed(config.stash[CASES][name], results[name])
    recorded = _recorded(config)
    uncompared = [name for name in results if not recorded or name not in recorded.results]
    found, path = report.Report.new(results.values()), Path(config.rootpath) / ".benchmarks" / _path(config).name
    if config.getoption("--record"):
        found, path = found.beside(recorded), _path(config)
    if found.results:
        found.write(path)
    terminalreporter.section("fastattn compared with torch and the machine's limits")
    terminalreporter.write_line(report.table(results.values()))
    if weakest := report.weakest(results.values()):
        terminalreporter.section("the ten weakest")
        terminalreporter.write_line(report.table(weakest))
    if config.stash[MISSED]:
        terminalreporter.section("not reached")
        terminalreporter.write_line("\n".join(config.stash[MISSED]))
    if uncompared and not config.getoption("--record"):
        kind = report.kind(found.machine)
        terminalreporter.section(f"not compared: no recorded result on {kind}")
        terminalreporter.write_line("\n".join(uncompared))
    terminalreporter.write_line(f"results: {path}")
