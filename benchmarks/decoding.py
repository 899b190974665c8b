"""Decoding beside CTranslate2: the base model with random weights, 25 source tokens, as many target tokens (or as asked
for), a batch of 32 with beam 4 and one sentence greedily.

    python benchmarks/decoding.py --record

Two OpenMP runtimes in one process falsify each other, so each program is timed in processes of its own, by turns; a
ratio is that of the medians. `--record` keeps the results, with what a step consists of, as
benchmarks/results/decoding-MACHINE.json; `make tables` shows them.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

from fastattn import Transformer, TransformerConfig
from fastattn import nn as modules
from fastattn.bench import contest, report
from fastattn.bench.timer import Neighbours
from fastattn.translation import checkpoint, precision, search
from fastattn.translation import model as transformer
from fastattn.translation.data import read_lines, verses
from fastattn.translation.export import to_ctranslate2
from fastattn.translation.search import Search, beam_search
from fastattn.translation.tokenizer import EOS_ID, Tokenizer

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 16_000
SOURCE_TOKENS = 25
CASES = {"32 sentences, beam 4": (32, 4), "1 sentence, greedy": (1, 1)}
RIVALS = {"ctranslate2 float32": "fastattn fp32", "ctranslate2 int8": "fastattn bf16"}  # of like precision
HAS_RIVAL = find_spec("ctranslate2") is not None
# What a step's time goes into: the functions that do it. The rest is the search itself and Python.
PARTS = {
    "matrix products": [(F, "linear")],
    "attention": [(modules, "scaled_dot_product_attention")],
    "residual + LayerNorm": [(modules, "dropout_add_layer_norm"), (modules, "layer_norm")],
    "keys and values": [(modules.KeyValueCache, "_stored"), (transformer.DecoderState, "select")],
    "choice of tokens": [(search, "_largest"), (torch.Tensor, "amax"), (torch.Tensor, "softmax")],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=25, help="target tokens")
    parser.add_argument("--seconds", type=float, default=3.0, help="that a measurement takes at least")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--child", nargs=2, metavar=("PROGRAM", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        program, folder = options.child
        print(json.dumps(child(program, Path(folder), options.tokens, options.seconds)))
        return
    neighbours = Neighbours()
    dtypes = ["fp32"] if precision.resolve("auto") == "fp32" else ["bf16", "fp32"]
    programs = [f"fastattn {dtype}" for dtype in dtypes]
    if HAS_RIVAL:
        programs += RIVALS
    else:
        print("ctranslate2 is not installed: ours alone", file=sys.stderr)
    found: dict[str, list[dict[str, Any]]] = {program: [] for program in programs}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        for turn in range(options.rounds):
            for program in programs:
                command = [sys.executable, __file__, "--tokens", str(options.tokens), "--seconds", str(options.seconds)]
                command += ["--child", program, folder]
                lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                found[program].append(json.loads(lines.splitlines()[-1]))
                print(turn, program, found[program][-1]["tokens_per_second"], file=sys.stderr, flush=True)
    results = {
        program: {
            "tokens_per_second": {
                case: statistics.median(run["tokens_per_second"][case] for run in runs) for case in CASES
            },
            "shares": runs[-1]["shares"],
        }
        for program, runs in found.items()
    }
    print(tables(results))
    if options.record:
        record(results, options.tokens, contest.disturbed_by(neighbours.share()))


def write_model(folder: Path) -> None:
    """The base model, random, as a checkpoint and for CTranslate2."""
    lines = [line for path in verses("train") for line in read_lines(path)]
    tokenizer = Tokenizer.train(lines, VOCABULARY)
    torch.manual_seed(1)
    model = Transformer(TransformerConfig.preset("base", tokenizer.vocab_size)).eval()
    checkpoint.save_model(model, tokenizer, folder / "fastattn")
    if HAS_RIVAL:
        to_ctranslate2(model, tokenizer, folder / "ctranslate2")


def child(program: str, folder: Path, tokens: int, seconds: float) -> dict[str, Any]:
    """Tokens a second of each case, and for ours the shares of a step."""
    name, kind = program.split()
    generator = torch.Generator().manual_seed(2)
    source = torch.randint(10, VOCABULARY, (32, SOURCE_TOKENS - 1), generator=generator)
    decode: Callable[[int, int], int]
    if name == "fastattn":
        model, _ = checkpoint.load(folder / "fastattn")
        model = model.to(precision.DTYPES[kind])
        ended = F.pad(source, (0, 1), value=EOS_ID)
        lengths = torch.full((32,), SOURCE_TOKENS)

        def decode(batch: int, beam: int) -> int:
            wanted = Search(beam, extra_tokens=tokens - SOURCE_TOKENS)
            found = beam_search(model, ended[:batch], lengths[:batch], wanted)
            return sum(len(best.tokens) for best, *_ in found)
    else:
        import ctranslate2

        threads = torch.get_num_threads()
        translator = ctranslate2.Translator(f"{folder}/ctranslate2", compute_type=kind, intra_threads=threads)
        _, tokenizer = checkpoint.load(folder / "fastattn")
        pieces = [tokenizer.pieces(row) for row in source.tolist()]

        def decode(batch: int, beam: int) -> int:
            limits = {"min_decoding_length": tokens, "max_decoding_length": tokens}
            results = translator.translate_batch(pieces[:batch], beam_size=beam, length_penalty=0.6, **limits)
            return sum(len(result.hypotheses[0]) for result in results)

    speeds, shares = {}, {}
    for case, (batch, beam) in CASES.items():
        speeds[case] = speed(decode, batch, beam, seconds)
        if name == "fastattn":
            with timed_parts() as parts:
                start = time.perf_counter()
                speed(decode, batch, beam, seconds)
                elapsed = time.perf_counter() - start
            shares[case] = {part: spent / elapsed for part, spent in parts.items()}
    return {"tokens_per_second": speeds, "shares": shares}


def speed(decode: Callable[[int, int], int], batch: int, beam: int, seconds: float) -> float:
    """Tokens a second of calls that take so many seconds at least."""
    decode(batch, beam)
    tokens, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        tokens += decode(batch, beam)
    return tokens / (time.perf_counter() - start)


@contextlib.contextmanager
def timed_parts():
    """Within it the functions of PARTS count their seconds; one inside another counts for the inner one alone."""
    spent, inner = dict.fromkeys(PARTS, 0.0), [0.0]

    def timed(function: Callable, part: str) -> Callable:
        def call(*args, **kwargs):
            start, before = time.perf_counter(), inner[0]
            inner[0] = 0.0
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - start
                spent[part] += seconds - inner[0]
                inner[0] = before + seconds

        return call

    with contextlib.ExitStack() as patches:
        for part, functions in PARTS.items():
            for owner, name in functions:
                patches.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name), part)))
        yield spent


def tables(results: dict[str, Any]) -> str:
    """The speeds of all programs, and what a step of ours consists of."""
    ours, *_ = results
    speed_rows = [["tokens a second", *CASES]]
    for program, result in results.items():
        speeds = result["tokens_per_second"]
        cells = [f"{speeds[case]:.0f}" for case in CASES]
        if program in RIVALS:
            rival = results.get(RIVALS[program], results[ours])["tokens_per_second"]
            cells = [f"{cell}, {rival[case] / speeds[case]:.2f}x" for cell, case in zip(cells, CASES, strict=True)]
        speed_rows.append([program, *cells])
    shares = results[ours]["shares"]
    share_rows = [
        [f"share of a step, {ours}", *CASES],
        *([part, *(f"{shares[case][part]:.0%}" for case in CASES)] for part in PARTS),
        ["the search itself, Python", *(f"{1 - sum(shares[case].values()):.0%}" for case in CASES)],
    ]
    return f"{report.markdown(speed_rows)}\n\n{report.markdown(share_rows)}"


def record(results: dict[str, Any], tokens: int, disturbed: str) -> None:
    data = {"tokens": tokens, "results": results}
    versions = {"ctranslate2": version("ctranslate2")} if HAS_RIVAL else {}
    report.record(ROOT / "benchmarks/results", "decoding", data, disturbed, **versions)


def section(data: dict[str, Any]) -> str:
    """One machine's part of the page."""
    head = f"{report.origin(data, 'ctranslate2')}; {SOURCE_TOKENS} source tokens, {data['tokens']} target tokens."
    if RIVALS.keys() & data["results"]:
        head += " Behind figures of CTranslate2: fastattn's speed over them, of fp32 over float32, of bf16 over int8."
    return f"{head}\n\n{tables(data['results'])}"


if __name__ == "__main__":
    main()
