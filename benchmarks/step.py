"""A training step on the CPU: where its time goes, and what was chosen by measuring.

    python benchmarks/step.py --record

- the shares of an update, by torch's profiler: of `base` on 32 x 48 tokens and of `tiny` on a batch of the verses;
- forward and backward of `base` beside jadore801120's program, in the same process by turns, with the vocabulary of the
  other benchmarks, and how much of ours are matrix products, which are torch's in both;
- the loss beside whole logits, which `F.linear_cross_entropy` makes too where there is label smoothing;
- packed batches beside padded ones of sentences of like length.

`--record` keeps the results as benchmarks/results/step-MACHINE.json; `make tables` shows them.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from translation import OfLikeLengths, lengths, padded

from fastattn import Transformer, TransformerConfig
from fastattn.bench import contest, report
from fastattn.bench.cases import BASE
from fastattn.bench.timer import Neighbours, interleave
from fastattn.translation import memory, precision
from fastattn.translation.config import PRESETS, TrainingConfig
from fastattn.translation.data import Batch, ParallelText, Sentences, read_parallel, verses
from fastattn.translation.evaluate import loss_of, smoothed_loss
from fastattn.translation.tokenizer import PAD_ID, Tokenizer
from fastattn.translation.train import Trainer

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 37_000
SHAPE = 32, 48
# Section 7 of docs/design.md, of the ratio to jadore801120's step; where so much of ours are products, that does.
FLOORS, ENOUGH_PRODUCTS = {"bf16": 1.4, "fp32": 1.15}, 0.8
# By the beginning of the names of operations; what has none of them is the rest.
PARTS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm"),
    "attention": ("fastattn_cpu::attention", "fastattn_cpu::varlen_attention"),
    "softmax and sums of the loss": ("fastattn_cpu::softmax_dropout",),
    "dropout, residual, LayerNorm": ("fastattn_cpu::",),
    "copies, most of them casts of autocast's": ("aten::copy_", "aten::cat"),
    "Adam": ("aten::_fused_adam_",),
    "embeddings": ("aten::embedding", "aten::index_select"),
}
REST = "other elementwise operations, Python"


def random_ids(sentences: int, pieces: int, vocabulary: int = VOCABULARY) -> list[list[int]]:
    """Of one length; with the end ``pieces`` each."""
    return torch.randint(4, vocabulary, (sentences, pieces - 1), generator=torch.Generator().manual_seed(1)).tolist()


def corpus() -> tuple[Tokenizer, ParallelText]:
    sources, targets = read_parallel(*verses("train"))
    tokenizer = Tokenizer.train(sources + targets, PRESETS["tiny"].vocab_size)
    return tokenizer, ParallelText.encoded(tokenizer, sources, targets, "training")


def trainer(preset: str, vocabulary: int, text: ParallelText, batch_tokens: int) -> Trainer:
    torch.manual_seed(1)
    config = TrainingConfig(batch_tokens=batch_tokens, precision=precision.resolve("auto"))
    return Trainer(Transformer(TransformerConfig.preset(preset, vocabulary)), text, config)


def shares(update: Callable[[], Any], updates: int) -> dict[str, float]:
    """Of the time that some updates take, by PARTS: an operation's own time, without that of those it calls."""
    update()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        started = time.perf_counter()
        for _ in range(updates):
            update()
        total = 1e6 * (time.perf_counter() - started)
    spent: Counter[str] = Counter()
    for event in found.key_averages():
        part = next((part for part, names in PARTS.items() if event.key.startswith(names)), REST)
        spent[part] += event.self_cpu_time_total
    spent[REST] = total - sum(spent[part] for part in PARTS)  # what is between operations too
    return {part: spent[part] / total for part in (*PARTS, REST)}


def program(seconds: float, updates: int) -> tuple[dict[str, float], dict[str, float]]:
    """jadore801120's time over ours, and the share of matrix products in ours: forward, loss and backward of the base
    model, dropout on. With nothing but these products ours would be faster by one over their share."""
    sys.path.insert(0, str(ROOT / "tests"))
    from public_models import jadore

    vocabulary = BASE["vocab_size"]
    ids = torch.tensor(random_ids(SHAPE[0], SHAPE[1] + 2, vocabulary))
    source, target, label = ids[:, : SHAPE[1]], ids[:, :-1][:, : SHAPE[1]], ids[:, 1:][:, : SHAPE[1]].flatten()
    theirs = jadore.Transformer(vocabulary, vocabulary, PAD_ID, PAD_ID)
    ours = Transformer(TransformerConfig.preset("base", vocabulary, attention_dropout=0.1))
    found, products = {}, {}
    for name in ("bf16", "fp32"):

        def step(model, name=name):
            def run():
                with torch.autocast("cpu", torch.bfloat16, enabled=name == "bf16"):
                    logits = model(source, target).flatten(0, -2)
                loss = F.cross_entropy(logits, label, label_smoothing=0.1)
                return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)

            return run

        found[name] = ratio({"ours": step(ours), "theirs": step(theirs)}, seconds)["theirs"]
        products[name] = shares(step(ours), updates)["matrix products"]
    return found, products


def losses(seconds: float) -> dict[str, float]:
    """The time of each over ours, forward and backward, of 1536 tokens of `base`."""
    features = torch.randn(SHAPE[0] * SHAPE[1], 512).bfloat16().requires_grad_()
    weight = (torch.randn(VOCABULARY, 512) / 512**0.5).requires_grad_()
    labels = torch.randint(4, VOCABULARY, (len(features),))
    smoothing = {"label_smoothing": 0.1, "ignore_index": PAD_ID, "reduction": "sum"}

    def run(loss: Callable[[], torch.Tensor]) -> Callable[[], Any]:
        def call():
            with torch.autocast("cpu", torch.bfloat16):
                value = loss()
            return torch.autograd.grad(value, (features, weight))

        return call

    programs = {
        "ours": run(lambda: smoothed_loss(features, weight, None, labels, 0.1, PAD_ID)[0]),
        "whole logits": run(lambda: F.cross_entropy(F.linear(features, weight).float(), labels, **smoothing)),
    }
    if hasattr(nn, "LinearCrossEntropyOptions"):
        chunks = {"reduction": "sum", "options": nn.LinearCrossEntropyOptions()}
        programs["torch's chunks, without label smoothing"] = run(
            lambda: F.linear_cross_entropy(features, weight.bfloat16(), labels, **chunks)
        )
    return ratio(programs, seconds)


class PaddedLoss(nn.Module):
    """The loss of a batch whose sentences are padded."""

    def __init__(self, model: Transformer, smoothing: float):
        super().__init__()
        self.model, self.smoothing = model, smoothing

    def forward(self, batch: Batch, seeds: torch.Tensor) -> tuple[torch.Tensor, ...]:
        source, target = batch.source, batch.target
        sides = padded(source.tokens, source), padded(target.tokens, target)
        features = self.model.features(*sides, lengths(source), lengths(target), seeds=seeds)
        labels = padded(batch.labels, target).flatten()
        return loss_of(self.model, features.flatten(0, 1), labels, self.smoothing)


def packing(tokenizer: Tokenizer, text: ParallelText, seconds: float) -> dict[str, float]:
    """Of an epoch of `tiny`: the shares of padding of packed batches and of padded ones; and tokens a second on packed
    batches over those on padded ones, by turns, in the second half of ``seconds``, since the matrix library prepares
    its code in the first."""
    budget = TrainingConfig.of_preset("tiny").batch_tokens
    trainers = {
        "packed": trainer("tiny", tokenizer.vocab_size, text, budget),
        "padded": trainer("tiny", tokenizer.vocab_size, OfLikeLengths(text.sources, text.targets), budget),
    }
    trainers["padded"].loss = PaddedLoss(trainers["padded"].model, trainers["padded"].config.label_smoothing)
    filled, rows = Counter[str](), Counter[str]()
    for name, of in trainers.items():
        for batch in map(text.batch, of.text.batches(budget)):
            filled[name] += batch.filled
            for side in (batch.source, batch.target):
                rows[name] += len(side.tokens) if name == "packed" else padded(side.tokens, side).numel()
    times, tokens = Counter[str](), Counter[str]()
    started, ready = time.perf_counter(), False
    while (elapsed := time.perf_counter() - started) < seconds:
        if elapsed > seconds / 2 and not ready:
            times.clear(), tokens.clear()
            ready = True
        for name, of in trainers.items():
            start = time.perf_counter()
            tokens[name] += int(of.update()[4])
            times[name] += time.perf_counter() - start
    speeds = {name: tokens[name] / times[name] for name in trainers}
    shares = {name: 1 - filled[name] / rows[name] for name in trainers}
    return {**shares, "tokens a second over padded": speeds["packed"] / speeds["padded"]}


def ratio(functions: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """The time of each over that of ours, by turns."""
    timing = interleave(functions, budget=seconds, rounds=(3, 100))
    return {name: timing.ratio(name, "ours").median for name in functions if name != "ours"}


def judged(name: str, ratio: float, products: float | None) -> str:
    """What is to be said of a ratio to jadore801120's step: the share of products in ours, and a floor below it."""
    share = "" if products is None else f"; {products:.0%} of ours are matrix products"
    if ratio >= FLOORS[name]:
        return share
    if products is not None and products >= ENOUGH_PRODUCTS:
        return f"{share}, so the floor of {FLOORS[name]} is met by the share of products"
    return f"{share}; misses the floor of {FLOORS[name]}"


def tables(results: dict[str, Any]) -> str:
    of_shares = results["shares"]
    share_rows = [[part, *(f"{shares[part]:.0%}" for shares in of_shares.values())] for part in (*PARTS, REST)]
    beside = {
        f"jadore801120's step, {name}": f"{value:.2f}{judged(name, value, results.get('products', {}).get(name))}"
        for name, value in results["program"].items()
    }
    beside |= {f"the loss: {name}": f"{value:.2f}" for name, value in results["losses"].items()}
    sections = [
        report.markdown([["share of an update", *of_shares], *share_rows]),
        report.markdown([["alternative", "time over ours"], *beside.items()]),
    ]
    if found := results.get("packing"):
        sections.append(
            f"Packed batches are {found['packed']:.1%} padding, padded ones of like lengths {found['padded']:.1%}. "
            f"Packed ones train on {found['tokens a second over padded']:.2f} times as many tokens a second."
        )
    return "\n\n".join(sections)


def section(data: dict[str, Any]) -> str:
    """One machine's part of the page."""
    return f"{report.origin(data)}.\n\n{tables(data)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each comparison (default 60)")
    parser.add_argument("--updates", type=int, default=10, help="that are profiled (default 10)")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    memory.keep_freed()  # as `fastattn train` does
    neighbours = Neighbours()
    tokenizer, text = corpus()
    sentences = Sentences.of(random_ids(256, SHAPE[1]))
    even = ParallelText(sentences, sentences)
    beside, products = program(options.seconds, options.updates)
    base = trainer("base", VOCABULARY, even, SHAPE[0] * SHAPE[1])
    tiny = trainer("tiny", tokenizer.vocab_size, text, TrainingConfig.of_preset("tiny").batch_tokens)
    results = {
        "shares": {
            f"`{of.config.precision}`, {name}": shares(of.update, options.updates)
            for name, of in (("`base`, 32 x 48 tokens", base), ("`tiny`, 2048 tokens", tiny))
        },
        "program": beside,
        "products": products,
        "losses": losses(options.seconds),
        "packing": packing(tokenizer, text, 4 * options.seconds),
    }
    disturbed = contest.disturbed_by(neighbours.share())
    print(tables(results))
    if options.record:
        report.record(ROOT / "benchmarks/results", "step", results, disturbed)


if __name__ == "__main__":
    main()
