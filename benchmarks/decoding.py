"""Compare decoding with CTranslate2: the base model with random weights, 25 source tokens, as many target tokens.

    python benchmarks/decoding.py

adds rows to benchmarks/results.csv; `make tables` shows them. A batch of 32 is decoded with beam 4 and one sentence
greedily. Two OpenMP runtimes in one process falsify each other's times, so each program has a process of its own. The
processes take turns, and ratios are those of the medians.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from against import Worker
from torch.nn import functional as F

from fastattn import Transformer, TransformerConfig
from fastattn.bench import report
from fastattn.bench.timer import Neighbours
from fastattn.translation import checkpoint, precision
from fastattn.translation.data import read_lines, verses
from fastattn.translation.export import to_ctranslate2
from fastattn.translation.search import Search, beam_search
from fastattn.translation.tokenizer import EOS_ID, Tokenizer

RESULTS = Path(__file__).with_name("results.csv")
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
PRESET, VOCABULARY, TOKENS = "base", 16_000, 25
CASES = {"32 sentences, beam 4": (32, 4), "1 sentence, greedy": (1, 1)}
RIVALS = {"bf16": "int8", "fp32": "float32"}  # of like precision
HAS_RIVAL = find_spec("ctranslate2") is not None


def write_model(folder: Path) -> None:
    """Write the base model, with random weights, as a checkpoint and for CTranslate2."""
    lines = [line for path in verses("train") for line in read_lines(path)]
    tokenizer = Tokenizer.train(lines, VOCABULARY)
    torch.manual_seed(1)
    model = Transformer(TransformerConfig.preset(PRESET, tokenizer.vocab_size)).eval()
    checkpoint.save_model(model, tokenizer, folder / "fastattn")
    if HAS_RIVAL:
        to_ctranslate2(model, tokenizer, folder / "ctranslate2")


def decoder(folder: Path, program: str, kind: str) -> Callable[[int, int], int]:
    """Return decode(batch, beam), which returns the number of target tokens."""
    model, tokenizer = checkpoint.load(folder / "fastattn")
    generator = torch.Generator().manual_seed(2)
    source = torch.randint(10, tokenizer.vocab_size, (32, TOKENS - 1), generator=generator)
    if program == "fastattn":
        model = model.to(precision.DTYPES[kind])
        ended, lengths = F.pad(source, (0, 1), value=EOS_ID), torch.full((32,), TOKENS)

        def decode(batch: int, beam: int) -> int:
            found = beam_search(model, ended[:batch], lengths[:batch], Search(beam, extra_tokens=0))
            return sum(len(best.tokens) for best, *_ in found)

        return decode

    import ctranslate2

    options = {"compute_type": kind, "intra_threads": torch.get_num_threads()}
    translator = ctranslate2.Translator(f"{folder}/ctranslate2", **options)
    pieces = [tokenizer.pieces(row) for row in source.tolist()]
    limits = {"min_decoding_length": TOKENS, "max_decoding_length": TOKENS, "length_penalty": 0.6}

    def decode_theirs(batch: int, beam: int) -> int:
        results = translator.translate_batch(pieces[:batch], beam_size=beam, **limits)
        return sum(len(result.hypotheses[0]) for result in results)

    return decode_theirs


def serve(folder: Path, program: str, kind: str, seconds: float) -> None:
    """Answer each line, the name of a case, with its seconds per token."""
    decode = decoder(folder, program, kind)
    for line in sys.stdin:
        batch, beam = CASES[line.strip()]
        decode(batch, beam)
        tokens, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            tokens += decode(batch, beam)
        print(json.dumps({"seconds": (time.perf_counter() - start) / tokens}), flush=True)


def measure(folder: Path, rounds: int, seconds: float, where: dict[str, str]) -> list[report.Row]:
    """Return a row per case and precision."""
    rows = []
    for kind in ["fp32"] if precision.resolve("auto") == "fp32" else ["bf16", "fp32"]:
        programs = {"ours": ("fastattn", kind)} | ({"theirs": ("ctranslate2", RIVALS[kind])} if HAS_RIVAL else {})
        arguments = [sys.executable, __file__, "--seconds", str(seconds), "--child", str(folder)]
        workers = {side: Worker([*arguments, *program]) for side, program in programs.items()}
        columns = where | {"dtype": DTYPES[kind]}
        for case in CASES:
            times: dict[str, list[float]] = {side: [] for side in workers}
            for _ in range(rounds):
                for side, worker in workers.items():
                    times[side].append(worker.seconds(case))
            ours, *theirs = map(statistics.median, times.values())
            peer = {"peer": f"ctranslate2 {RIVALS[kind]}", "ratio": theirs[0] / ours} if theirs else {}
            rows.append(report.Row(**columns, case=f"decoding, {case}", seconds=ours, **peer))
        for worker in workers.values():
            worker.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="minimum of a measurement")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        folder, program, kind = options.child
        return serve(Path(folder), program, kind, options.seconds)
    where, neighbours = report.here(), Neighbours()
    if HAS_RIVAL:
        where["torch"] += f", ctranslate2 {version('ctranslate2')}"
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        rows = measure(Path(folder), options.rounds, options.seconds, where)
    for row in rows:
        print(row.case, row.dtype, row.seconds, row.peer, row.ratio or "")
    if noise := neighbours.noise():  # ended children are no neighbours
        sys.exit(f"not recorded, run it on a quiet machine: {noise}")
    return report.append(options.results, rows)


if __name__ == "__main__":
    main()
