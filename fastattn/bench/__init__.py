"""Compare fastattn with what a user could call instead, and with what the machine could do at best.

`timer`, `cases`, `peers`, `limits`, `training` and `contest` import each other relatively, and only public
names of fastattn. `pytest benchmarks --against REF` loads them from this folder, under another name, to measure
the package of another commit.
"""

from __future__ import annotations

import argparse
import re
import sys

import torch

from fastattn.bench import contest, report
from fastattn.bench.cases import listed, sweep
from fastattn.errors import InputError
from fastattn.files import check_file

__all__ = ["main"]

SECONDS, ROUNDS = 0.5, (4, 100)  # per contestant and case: the first line appears within ten seconds


def main(args: argparse.Namespace) -> int:
    """Measure, print a line per case, and write a results file: `fastattn bench`. Return the exit status.

    Raises:
        InputError: no case has the text of ``--filter``, or the file cannot be written.
    """
    if args.output:  # before the work, not after it
        check_file(args.output)
        if args.output.is_file():
            report.read(args.output)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    rows = _measure(args)
    if args.output:
        report.append(args.output, rows)
    return 0


def has_text(name: str, text: str) -> bool:
    """Whether the name of a case has this text; letters from the start of a word, so that float16 is not bfloat16."""
    start = r"(?<!\w)" if text[:1].isalpha() else ""
    return re.search(start + re.escape(text), name) is not None


def _measure(args: argparse.Namespace) -> list[report.Row]:
    """Print a line per case, and return the rows of the results that are not noisy."""
    where = report.here()
    cases = list(sweep()) if args.sweep else listed(where["isa"])
    chosen = [case for case in cases if has_text(case.name, args.filter)]
    if not chosen:
        raise InputError(f"--filter {args.filter!r}: no case has this in its name; one is {cases[0].name!r}")
    rows = report.limit_rows(where)
    print(report.origin([report.Row(**where)]) + report.limit_words(rows), flush=True)
    on_terminal = sys.stderr.isatty()
    for number, case in enumerate(chosen, 1):
        if on_terminal:  # until the line of figures takes its place
            print(f"{number}/{len(chosen)} {case.name} ...", end="\r", file=sys.stderr, flush=True)
        result = contest.run(case, budget=args.seconds or SECONDS, rounds=ROUNDS, everyone=args.peers)
        if on_terminal:
            print("\033[K", end="", file=sys.stderr, flush=True)
        print(f"{number}/{len(chosen)} {report.sentence(result)}", flush=True)
        if not result.noise:
            rows += report.rows_of(result, str(case.dtype).removeprefix("torch."), where)
    return rows
