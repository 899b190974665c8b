"""Measures fastattn beside what a user would pick instead and beside what the machine could do at best."""

from __future__ import annotations

import argparse

import torch

from fastattn import figures
from fastattn.bench import contest, limits, peers, plots, report
from fastattn.bench.cases import Case, lengths, listed, sweep
from fastattn.errors import InputError, require
from fastattn.files import check_file
from fastattn_command import has_text

__all__ = ["main", "speed_table"]


def speed_table() -> str:
    """A small Markdown table of speeds against torch, for someone new; takes a few seconds."""
    dtypes = (torch.float32, torch.bfloat16)
    cases = [
        *(Case("attention", (1, 8, 1024, 64), dtype) for dtype in dtypes),
        *(Case("attention", (1, 8, 512, 64), dtype, True, causal=True, dropout=0.1) for dtype in dtypes),
        Case("softmax_dropout", (4096, 512), backward=True, dropout=0.1),
        Case("dropout_add_layer_norm", (4096, 512), backward=True, dropout=0.1),
        Case("dropout", (4096, 512), backward=True, dropout=0.1),
        Case("layer_norm", (4096, 512), backward=True),
    ]
    return report.table(contest.run(case, budget=0.2, rounds=(4, 20), attempts=1) for case in cases)


def main(args: argparse.Namespace) -> int:
    """`fastattn bench`: measures, or reads, and shows tables and pictures. Returns the exit status.

    Raises:
        InputError: no case has the text of ``--filter``, a file of ``--from`` is no result file, there is nothing to
            draw, or a file cannot be written.
    """
    if args.plot:
        require("matplotlib")
    pictures = [args.plot.with_name(f"{args.plot.name}.{kind}") for kind in figures.FORMATS] if args.plot else []
    for path in filter(None, (args.output, *pictures)):
        check_file(path)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    found = [report.Report.read(source) for source in args.sources] or [_measure(args)]
    if args.output:
        found[0].beside(None).write(args.output)  # without what was disturbed
    if args.plot:
        plots.save(plots.picture(found), args.plot)
    elif args.sources:
        print(report.tables(found[0]) if len(found) == 1 else report.comparison(found))
    return 0


def _measure(args: argparse.Namespace) -> report.Report:
    over_length = args.plot is not None
    cases = lengths() if over_length else list(sweep()) if args.sweep else listed()
    chosen = [case for case in cases if has_text(case.name, args.filter)]
    if not chosen:
        raise InputError(f"--filter {args.filter!r}: no case has this in its name; one is {cases[0].name!r}")
    before = limits.measure()
    limits.remember(before)
    now = report.Report.new(measured=before)
    everyone = args.peers or over_length
    print(report.origin_of(now, *(peers.OPTIONAL if everyone else ())), flush=True)
    results: list[contest.Result] = []
    for case in chosen:
        result = contest.run(
            case,
            budget=args.seconds or 1.0,
            rounds=(3, 100) if over_length else (6, 100),
            everyone=everyone,
            with_memory=over_length and case.backward,
        )
        lines = report.table([result], whole=True).splitlines()
        print(*lines[2 if results else 0 :], sep="\n", flush=True)
        results.append(result)
    results = [contest.reviewed(case, result) for case, result in zip(chosen, results, strict=True)]
    return report.Report.new(results, limits.best(before, limits.measure()))
