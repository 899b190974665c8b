"""Pairwise parameters of tests: every pair of values in a few cases, instead of every combination."""

import itertools

import pytest


def pairwise(**parameters):
    """Return a mark that parametrizes a test by cases in which any two values of different parameters meet.

    The cases are chosen greedily, the same in every run. A case has its values' marks. Values without marks meet in
    cases without marks. The parameter `backend` is the fixture's."""
    columns = [[v if hasattr(v, "marks") else pytest.param(v) for v in values] for values in parameters.values()]
    everything = [range(len(values)) for values in columns]
    unmarked = [[n for n in range(len(values)) if not values[n].marks] for values in columns]
    cases, met = [], set()
    for numbers in (unmarked, everything):
        choices = [[(column, n) for n in which] for column, which in enumerate(numbers)]
        for pair in (pair for two in itertools.combinations(choices, 2) for pair in itertools.product(*two)):
            if frozenset(pair) in met or not all(choices):
                continue
            case = dict(pair)
            for column in range(len(columns)):
                if column not in case:
                    _, case[column] = max(
                        choices[column], key=lambda one: sum({one, other} not in met for other in case.items())
                    )
            met.update(map(frozenset, itertools.combinations(case.items(), 2)))
            cases.append([columns[column][case[column]] for column in range(len(columns))])
    return pytest.mark.parametrize(
        ",".join(parameters),
        [
            pytest.param(
                *(value.values[0] for value in case),
                marks=[mark for value in case for mark in value.marks],
                id="-".join(value.id or str(value.values[0]) for value in case),
            )
            for case in cases
        ],
        indirect=[name for name in parameters if name == "backend"],
    )


def in_turn(values, others):
    """Return each value with one of the others, which take turns."""
    return list(zip(values, itertools.cycle(others), strict=False))
