"""A training step on the CPU: where its time goes, and what was chosen by measuring.

    python benchmarks/step.py --record

- the shares of an update, by torch's profiler: of `base` on 32 x 48 tokens and of `tiny` on a batch of the verses;
- forward and backward of `base` beside jadore801120's program, in the same process by turns, with the vocabulary of the
  other benchmarks;
- the loss beside whole logits, which `F.linear_cross_entropy` makes too where there is label smoothing;
- batches of sentences of like length beside batches without any padding, of sentences of one length, and beside packed
  batches through `varlen_attn`.

`--record` keeps the results as benchmarks/results/step-MACHINE.json and writes the tables of docs/performance.md.
"""

import argparse
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import fastattn
from fastattn import Transformer, TransformerConfig, varlen_attn
from fastattn.bench import report
from fastattn.bench.cases import BASE
from fastattn.bench.timer import interleave
from fastattn.translation import precision
from fastattn.translation.config import PRESETS, TrainingConfig
from fastattn.translation.data import ParallelText, Sentences, read_parallel
from fastattn.translation.evaluate import smoothed_loss
from fastattn.translation.model import _add_norm
from fastattn.translation.tokenizer import BOS_ID, PAD_ID, Tokenizer
from fastattn.translation.train import Trainer, dropout_seeds

ROOT = Path(__file__).resolve().parent.parent
VERSES = Path(fastattn.__file__).parent / "verses"
VOCABULARY = 37_000
SHAPE = 32, 48
# By the beginning of the names of operations; what has none of them is the rest.
PARTS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm"),
    "attention": ("fastattn_cpu::attention",),
    "dropout, residual, LayerNorm": ("fastattn_cpu::",),
    "copies, most of them casts of autocast's": ("aten::copy_", "aten::cat"),
    "Adam": ("aten::_fused_adam_",),
    "softmax and sums of the loss": ("aten::_softmax", "aten::softmax", "aten::amax", "aten::mean", "aten::gather"),
    "embeddings": ("aten::embedding", "aten::index_select"),
}
REST = "other elementwise operations, Python"


def text_of(ids: tuple[list[list[int]], list[list[int]]]) -> ParallelText:
    text = ParallelText.__new__(ParallelText)
    text.sources, text.targets = map(Sentences, ids)
    return text


def random_ids(sentences: int, pieces: int, vocabulary: int = VOCABULARY) -> list[list[int]]:
    """Of one length; with the end ``pieces`` each."""
    return torch.randint(4, vocabulary, (sentences, pieces - 1), generator=torch.Generator().manual_seed(1)).tolist()


def verses() -> tuple[Tokenizer, ParallelText]:
    sources, targets = read_parallel(VERSES / "train.en.gz", VERSES / "train.es.gz")
    tokenizer = Tokenizer.train(sources + targets, PRESETS["tiny"].vocab_size)
    return tokenizer, ParallelText(tokenizer, sources, targets)


def trainer(preset: str, vocabulary: int, text: ParallelText, batch_tokens: int) -> Trainer:
    torch.manual_seed(1)
    config = TrainingConfig(batch_tokens=batch_tokens, precision=precision.resolve("auto"))
    return Trainer(Transformer(TransformerConfig.preset(preset, vocabulary)), text, config)


def shares(update: Callable[[], Any], updates: int) -> dict[str, float]:
    """Of the time of some updates, by PARTS: an operation's own time, without that of those it calls."""
    update()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(updates):
            update()
    spent: Counter[str] = Counter()
    for event in found.key_averages():
        part = next((part for part, names in PARTS.items() if event.key.startswith(names)), REST)
        spent[part] += event.self_cpu_time_total
    return {part: spent[part] / spent.total() for part in (*PARTS, REST)}


def program(seconds: float) -> dict[str, float]:
    """jadore801120's time over ours: forward, loss and backward of the base model, dropout on."""
    sys.path.insert(0, str(ROOT / "tests"))
    from public_models import jadore

    vocabulary = BASE["vocab_size"]
    ids = torch.tensor(random_ids(SHAPE[0], SHAPE[1] + 2, vocabulary))
    source, target, label = ids[:, : SHAPE[1]], ids[:, :-1][:, : SHAPE[1]], ids[:, 1:][:, : SHAPE[1]].flatten()
    theirs = jadore.Transformer(vocabulary, vocabulary, PAD_ID, PAD_ID)
    ours = Transformer(TransformerConfig.preset("base", vocabulary, attention_dropout=0.1))
    found = {}
    for name in ("bf16", "fp32"):

        def step(model, name=name):
            def run():
                with torch.autocast("cpu", torch.bfloat16, enabled=name == "bf16"):
                    logits = model(source, target).flatten(0, -2)
                loss = F.cross_entropy(logits, label, label_smoothing=0.1)
                return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)

            return run

        found[name] = ratio({"ours": step(ours), "theirs": step(theirs)}, seconds)["theirs"]
    return found


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
    return ratio(programs, seconds)


def padding(tokenizer: Tokenizer, text: ParallelText, seconds: float) -> dict[str, float]:
    """Of an epoch of `tiny`'s batches: the share of padding, and the time of a token over that of one in batches of as
    many tokens whose sentences all have the mean length."""
    budget = TrainingConfig.of_preset("tiny").batch_tokens
    batches = [text.batch(index) for index in text.buckets(budget)]
    filled = sum(int(b.source_lengths.sum()) + b.tokens for b in batches)
    places = sum(b.source.numel() + b.target.numel() for b in batches)
    pairs = len(text.sources)
    mean = round(filled / (2 * pairs))
    even = text_of((random_ids(budget, mean, tokenizer.vocab_size),) * 2)
    ours = trainer("tiny", tokenizer.vocab_size, text, budget)
    whole = trainer("tiny", tokenizer.vocab_size, even, budget // mean * mean)
    trainers = {"ours": ours, "whole": whole}
    times, tokens = Counter[str](), Counter[str]()
    for of in trainers.values():
        of.update()
    while sum(times.values()) < seconds:
        for name, of in trainers.items():
            start = time.perf_counter()
            tokens[name] += int(of.update()[4])
            times[name] += time.perf_counter() - start
    costs = {name: times[name] / tokens[name] for name in trainers}
    return {"padding": 1 - filled / places, "a token over one without padding": costs["ours"] / costs["whole"]}


def packed_features(model: Transformer, batch: dict[str, Any], seeds: torch.Tensor | None) -> torch.Tensor:
    """:meth:`Transformer.features` of the tokens alone, (tokens, d_model), sentence after sentence."""

    def attend(module, x, memory, queries, keys, causal):
        sizes, weight = module._projection_sizes, module.in_proj_weight
        if x is memory:
            q, k, v = F.linear(x, weight).split(sizes, -1)
        else:
            q, (k, v) = F.linear(x, weight[: sizes[0]]), F.linear(memory, weight[sizes[0] :]).split(sizes[1:], -1)
        q, k, v = (t.unflatten(-1, (module.num_heads, -1)) for t in (q, k, v))
        longest = batch[f"longest {queries}"], batch[f"longest {keys}"]
        dropout_p, seed = module.dropout if module.training else 0.0, next(sites)
        out = varlen_attn(
            q, k, v, batch[queries], batch[keys], *longest, is_causal=causal, dropout_p=dropout_p, seed=seed
        )
        return F.linear(out.flatten(1), module.out_proj.weight)

    def embed(side, embedding, positions):
        rows = positions(0, batch[f"longest {side}"], torch.device("cpu"))[batch[f"places {side}"]]
        return model._embed(embedding, rows, batch[f"tokens {side}"], next(sites))

    sites = model._sites(seeds, None)
    x, residual = model.encoder.begin(embed("source", model.source_embedding, model.source_positions))
    for layer in model.encoder.layers:
        y = attend(layer.self_attention, x, x, "source", "source", False)
        x, residual = _add_norm(layer.self_attention_norm, y, residual, next(sites))
        x, residual = _add_norm(layer.feed_forward_norm, layer.feed_forward(x, next(sites)), residual, next(sites))
    memory = x
    x, residual = model.decoder.begin(embed("target", model.target_embedding, model.target_positions))
    for layer in model.decoder.layers:
        y = attend(layer.self_attention, x, x, "target", "target", True)
        x, residual = _add_norm(layer.self_attention_norm, y, residual, next(sites))
        y = attend(layer.cross_attention, x, memory, "target", "source", False)
        x, residual = _add_norm(layer.cross_attention_norm, y, residual, next(sites))
        x, residual = _add_norm(layer.feed_forward_norm, layer.feed_forward(x, next(sites)), residual, next(sites))
    return x


def packed_batch(text: ParallelText, index: torch.Tensor, multiple: int) -> dict[str, Any]:
    """Sentences ``index`` one after the other, and after them one of padding up to a ``multiple`` of tokens: the matrix
    library prepares code for every new number of rows."""
    batch: dict[str, Any] = {}
    for side, sentences in (("source", text.sources), ("target", text.targets)):
        lengths = sentences.lengths_of(index)
        rest = -int(lengths.sum()) % multiple
        offsets = F.pad(torch.cat((lengths, torch.tensor([rest]))).cumsum(0), (1, 0))
        sentence = torch.arange(len(index)).repeat_interleave(lengths)
        places = torch.arange(len(sentence)) - offsets[sentence]
        tokens = sentences._tokens[sentences._offsets[index][sentence] + places].long()
        batch[side], batch[f"longest {side}"] = offsets, int(offsets.diff().max())
        batch[f"tokens {side}"] = F.pad(tokens, (0, rest), value=PAD_ID)
        batch[f"places {side}"] = F.pad(places, (0, rest))
        batch[f"filled {side}"] = len(tokens)
    batch["labels"] = batch["tokens target"]
    shifted = batch["labels"].roll(1)
    batch["tokens target"] = torch.where(batch["places target"] == 0, BOS_ID, shifted)
    return batch


def packed(tokenizer: Tokenizer, text: ParallelText, seconds: float) -> float:
    """Tokens a second of `tiny` on packed batches, of sentences in random order, over those on batches of like lengths:
    in turns, the second half of ``seconds``, since the matrix library prepares its code in the first."""
    config = TrainingConfig.of_preset("tiny")
    ours, other = (trainer("tiny", tokenizer.vocab_size, text, config.batch_tokens) for _ in range(2))
    order = torch.randperm(len(text.sources), generator=torch.Generator().manual_seed(1))
    ends = torch.maximum(*(side.lengths[order].cumsum(0) for side in (text.sources, text.targets)))
    batches = order.split((ends // config.batch_tokens).bincount().tolist())

    def update(index: torch.Tensor) -> int:
        batch = packed_batch(text, index, 256)
        other.step += 1
        seeds = dropout_seeds(1, other.step, 0, other.model.dropout_sites)
        with other.autocast():
            features = packed_features(other.model, batch, seeds)
            loss, _, _ = smoothed_loss(*other.model.projection(features), batch["labels"], 0.1, PAD_ID)
        (loss / batch["filled target"]).backward()
        for group in other.optimizer.param_groups:
            group["lr"] = other.learning_rate(other.step)
        other.optimizer.step()
        other.optimizer.zero_grad(set_to_none=True)
        return batch["filled source"] + batch["filled target"]

    programs = {"ours": lambda index: int(ours.update()[4]), "packed": update}
    times, tokens = Counter[str](), Counter[str]()
    started, ready = time.perf_counter(), False
    for index in itertools.cycle(batches):
        elapsed = time.perf_counter() - started
        if elapsed > seconds:
            break
        if elapsed > seconds / 2 and not ready:
            times.clear(), tokens.clear()
            ready = True
        for name, program in programs.items():
            start = time.perf_counter()
            tokens[name] += program(index)
            times[name] += time.perf_counter() - start
    speeds = {name: tokens[name] / times[name] for name in programs}
    return speeds["packed"] / speeds["ours"]


def ratio(functions: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """The time of each over that of ours, by turns."""
    timing = interleave(functions, budget=seconds, rounds=(3, 100))
    return {name: timing.ratio(name, "ours").median for name in functions if name != "ours"}


def tables(results: dict[str, Any]) -> str:
    of_shares = results["shares"]
    lines = [f"| share of an update | {' | '.join(of_shares)} |", f"| --- | {' | '.join('---' for _ in of_shares)} |"]
    lines += [
        f"| {part} | {' | '.join(f'{shares[part]:.0%}' for shares in of_shares.values())} |" for part in (*PARTS, REST)
    ]
    lines += ["", "| beside ours | time over ours |", "| --- | --- |"]
    lines += [f"| jadore801120's step, {name} | {value:.2f} |" for name, value in results["program"].items()]
    lines += [f"| the loss: {name} | {value:.2f} |" for name, value in results["losses"].items()]
    found = results["padding"]
    lines += [
        "",
        f"Batches of like lengths are {found['padding']:.1%} padding. A token of theirs costs "
        f"{found['a token over one without padding']:.2f} times what one costs in batches without any.",
    ]
    if "packed" in results:
        lines[-1] += f" Packed batches train on {results['packed']:.2f} times as many tokens a second."
    return "\n".join(lines)


def section(data: dict[str, Any]) -> str:
    """One machine's part of the page."""
    machine, versions = data["machine"], data["versions"]
    head = f"{machine['cpu']}, {machine['threads']} threads, {machine['isa']}, torch {versions['torch']}.\n\n"
    return head + tables(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each comparison (default 60)")
    parser.add_argument("--updates", type=int, default=10, help="that are profiled (default 10)")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    tokenizer, text = verses()
    even = text_of((random_ids(256, SHAPE[1]),) * 2)
    base = trainer("base", VOCABULARY, even, SHAPE[0] * SHAPE[1])
    tiny = trainer("tiny", tokenizer.vocab_size, text, TrainingConfig.of_preset("tiny").batch_tokens)
    results = {
        "shares": {
            f"`{of.config.precision}`, {name}": shares(of.update, options.updates)
            for name, of in (("`base`, 32 x 48 tokens", base), ("`tiny`, 2048 tokens", tiny))
        },
        "program": program(options.seconds),
        "losses": losses(options.seconds),
        "padding": padding(tokenizer, text, options.seconds),
        "packed": packed(tokenizer, text, 4 * options.seconds),
    }
    print(tables(results))
    if options.record:
        report.record(ROOT / "benchmarks/results", "step", results, {}, ROOT / "docs/performance.md", section)


if __name__ == "__main__":
    main()
