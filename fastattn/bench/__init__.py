"""Measures fastattn beside what a user would pick instead and beside what the machine could do at best."""

from __future__ import annotations

import argparse

import torch

from fastattn.bench import contest, report
from fastattn.bench.cases import Case, listed, sweep

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
    return report.table(contest.run(case, budget=0.2, rounds=(4, 20)) for case in cases)


def main(args: argparse.Namespace) -> int:
    """`fastattn bench`: measures, or reads, and shows tables. Returns the exit status."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    found = [report.Report.read(source) for source in args.sources] or [_measure(args)]
    text = report.tables(found[0]) if len(found) == 1 else report.comparison(found)
    if args.output:
        found[0].write(args.output)
    if args.table:
        report.insert(args.table, "bench", text)
    elif args.sources:
        print(text)
    return 0


def _measure(args: argparse.Namespace) -> report.Report:
    results = []
    for case in sweep() if args.sweep else listed():
        if args.filter in case.name:
            result = contest.run(case, budget=args.seconds, everyone=args.peers)
            print(report.table([result]).splitlines()[-1], flush=True)
            results.append(result)
    return report.Report.new(results)
