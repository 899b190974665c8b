"""Trains the preset `tiny` on the verses: `fastattn.Transformer`, and `torch.nn.Transformer` of the same size with
`torch.nn.functional.cross_entropy`, on the same text and schedule. Ours takes packed batches, torch's padded ones of
sentences of like length. They train by turns, and then translate the test text greedily.

    python benchmarks/translation.py fastattn torch --minutes 20 --record

`--record` keeps the results as benchmarks/results/translation-MACHINE.json, where the runs named replace those of
earlier calls; `make tables` shows them.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastattn import Transformer, TransformerConfig, figures
from fastattn.bench import contest, plots, report
from fastattn.bench.timer import Neighbours
from fastattn.translation import memory, precision
from fastattn.translation.config import PRESETS, TrainingConfig
from fastattn.translation.data import LENGTH_MULTIPLE, Batch, ParallelText, Sentences, read_parallel, verses
from fastattn.translation.evaluate import held_out, scores
from fastattn.translation.model import Packed, SinusoidalPositions
from fastattn.translation.search import Search, translate
from fastattn.translation.tokenizer import PAD_ID, Tokenizer
from fastattn.translation.train import Trainer

ROOT = Path(__file__).resolve().parent.parent


class TorchTransformer(nn.Module):
    """`torch.nn.Transformer` between tied embeddings and sinusoidal positions, called as `fastattn.Transformer` is."""

    dropout_sites = 0
    fixed_id = None
    device = torch.device("cpu")

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        self.output = nn.Linear(config.d_model, config.vocab_size, bias=False)
        nn.init.normal_(self.output.weight, std=config.d_model**-0.5)
        self.positions = SinusoidalPositions(config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        sizes = config.d_model, config.num_heads, config.encoder_layers, config.decoder_layers, config.d_ff
        self.transformer = nn.Transformer(*sizes, config.dropout, batch_first=True, norm_first=config.norm_first)
        # In evaluation its fused encoder raises under bfloat16 autocast on the CPU.
        self.transformer.encoder.enable_nested_tensor = False
        torch.backends.mha.set_fastpath_enabled(False)

    def embed(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.output.weight, self.config.pad_id) * self.config.d_model**0.5
        return self.dropout(x + self.positions(0, tokens.shape[1], tokens.device))

    def features(self, source: Tensor, target: Tensor, source_lengths: Tensor) -> Tensor:
        """Of sentences that are padded on the right."""
        hidden = torch.arange(source.shape[1]) >= source_lengths[:, None]
        length = target.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.bool)
        return self.transformer(
            self.embed(source),
            self.embed(target),
            tgt_mask=causal,
            src_key_padding_mask=hidden,
            memory_key_padding_mask=hidden,
            tgt_is_causal=True,
        )

    def packed_features(self, source: Packed, target: Packed) -> Tensor:
        """Those of packed sentences, which are padded for it."""
        features = self.features(padded(source.tokens, source), padded(target.tokens, target), lengths(source))
        rows = torch.arange(len(lengths(target))).repeat_interleave(lengths(target))
        found = features[rows, target.places[: len(rows)]]
        return F.pad(found, (0, 0, 0, len(target.tokens) - len(rows)))

    def projection(self, features: Tensor) -> tuple[Tensor, Tensor, None]:
        return features, self.output.weight, None


def lengths(packed: Packed) -> Tensor:
    """Of the sentences, int64 (B,), without that of padding."""
    return packed.offsets.diff()[:-1]


def padded(tokens: Tensor, packed: Packed) -> Tensor:
    """What belongs to packed sentences, (tokens,), as (B, L), padded on the right with ``PAD_ID``."""
    sentences = tokens.split(packed.offsets.diff().tolist())[:-1]
    rows = nn.utils.rnn.pad_sequence(sentences, batch_first=True, padding_value=PAD_ID)
    return F.pad(rows, (0, -rows.shape[1] % LENGTH_MULTIPLE), value=PAD_ID)


class OfLikeLengths(ParallelText):
    """Pairs whose batches hold sentences of like length: little of them is padding once they are padded."""

    def batches(self, batch_tokens: int, shuffle: torch.Generator | None = None) -> Iterator[Tensor]:
        """At most ``batch_tokens`` tokens a side, padding included. ``shuffle`` breaks ties and orders the batches."""
        source, target = (side.lengths + -side.lengths % LENGTH_MULTIPLE for side in (self.sources, self.targets))
        # Source lengths go up and down by turns, so that a batch across two target lengths has like source lengths.
        by_source = torch.where(target // LENGTH_MULTIPLE % 2 == 1, source, -source)
        key = target * (2 * int(source.max()) + 1) + by_source
        order = torch.arange(len(key)) if shuffle is None else torch.randperm(len(key), generator=shuffle)
        order = order[key[order].argsort(stable=True)]
        longest = torch.maximum(source, target)[order]
        batches, first = [], 0
        while first < len(order):
            most = max(1, batch_tokens // int(longest[first]))
            tokens = longest[first : first + most].cummax(0).values
            tokens *= torch.arange(1, len(tokens) + 1)  # of a batch that ends here
            count = max(1, int((tokens <= batch_tokens).sum()))
            batches.append(order[first : first + count])
            first += count
        if shuffle is not None:
            batches = [batches[i] for i in torch.randperm(len(batches), generator=shuffle).tolist()]
        return iter(batches)


class TorchLoss(nn.Module):
    """The label-smoothed cross-entropy that is written beside it: of all logits at once."""

    def __init__(self, model: TorchTransformer, smoothing: float):
        super().__init__()
        self.model, self.smoothing = model, smoothing

    def forward(self, batch: Batch, seeds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        source, target, labels = (
            padded(tokens, side)
            for tokens, side in (
                (batch.source.tokens, batch.source), (batch.target.tokens, batch.target), (batch.labels, batch.target)
            )
        )  # fmt: skip
        logits = self.model.output(self.model.features(source, target, lengths(batch.source))).flatten(0, 1)
        loss = F.cross_entropy(
            logits, labels.flatten(), ignore_index=PAD_ID, reduction="sum", label_smoothing=self.smoothing
        )
        return loss, *loss.detach().new_zeros(2)  # what only reports would read


@torch.inference_mode()
def greedy(model: TorchTransformer, tokenizer: Tokenizer, lines: list[str]) -> list[str]:
    sentences, found = Sentences.of(tokenizer.encode(lines)), []
    for index in torch.arange(len(lines)).split(Search.batch_size):
        source, lengths = sentences.padded(index)
        target = torch.full((len(index), 1), model.config.bos_id)
        finished = torch.zeros(len(index), dtype=torch.bool)
        while not finished.all() and target.shape[1] < source.shape[1] + Search.extra_tokens:
            token = model.output(model.features(source, target, lengths)[:, -1]).argmax(-1)
            token.masked_fill_(finished, model.config.eos_id)
            target, finished = torch.cat((target, token[:, None]), 1), finished | (token == model.config.eos_id)
        found += tokenizer.decode(target.tolist())
    return found


TURN = 10.0  # seconds


def by_turns(programs: dict[str, Generator[None, None, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """What the programs return, each advanced for a turn at a time: a machine that changes its speed changes it for
    all."""
    waiting, results = dict(programs), {}
    while waiting:
        for kind, program in list(waiting.items()):
            end = time.monotonic() + TURN
            try:
                while time.monotonic() < end:
                    next(program)
            except StopIteration as finished:
                results[kind] = finished.value
                del waiting[kind]
    return {kind: results[kind] for kind in programs}


def run(kind: str, minutes: float) -> Generator[None, None, dict[str, Any]]:
    """Trains for so many minutes, validation not counted, an update between two yields; returns what README's table and
    the curves need."""
    train, dev, test = (read_parallel(*verses(split)) for split in ("train", "dev", "test"))
    tokenizer = Tokenizer.train(train[0] + train[1], PRESETS["tiny"].vocab_size)
    training = dataclasses.replace(TrainingConfig.of_preset("tiny"), precision=precision.resolve("auto"))
    torch.manual_seed(training.seed)
    config = TransformerConfig.preset("tiny", tokenizer.vocab_size)
    model = {"fastattn": Transformer, "torch": TorchTransformer}[kind](config)
    text = {"fastattn": ParallelText, "torch": OfLikeLengths}[kind]
    trainer = Trainer(model, text.encoded(tokenizer, *train), training)
    if kind == "torch":
        trainer.loss = TorchLoss(model, training.label_smoothing)
    held_out_text = text.encoded(tokenizer, *dev)
    held_out_batches = [held_out_text.batch(index) for index in held_out_text.batches(training.batch_tokens)]

    neighbours = Neighbours()
    seconds, tokens, curve = 0.0, 0.0, []
    while seconds < 60 * minutes:
        start = time.monotonic()
        tokens += trainer.update()[3].item()
        seconds += time.monotonic() - start
        if trainer.step % training.save_every == 0 or seconds >= 60 * minutes:
            on_dev = held_out(model, held_out_batches, trainer.autocast())
            curve.append({"update": trainer.step, "seconds": round(seconds, 1), "tokens": tokens, **on_dev})
            print(kind, curve[-1], flush=True)
        yield
    disturbed = contest.disturbed_by(neighbours.share())
    model.eval()
    translations = (
        translate(model, tokenizer, test[0], Search(beam=1))
        if kind == "fastattn"
        else greedy(model, tokenizer, test[0])
    )
    found = scores(translations, test[1])
    return {
        "updates": trainer.step,
        "tokens_per_second": tokens / seconds,
        "valid_loss": curve[-1]["valid_loss"],
        "bleu": found.bleu,
        "signature": found.bleu_signature,
        "precision": training.precision,
        "loss": LOSSES[kind],
        "minutes": minutes,
        "curve": curve,
        "disturbed": disturbed,
        "commit": report.commit(),
        "date": report.now(),
    }


NAMES = {"fastattn": "fastattn.Transformer", "torch": "torch.nn.Transformer"}
LOSSES = {"fastattn": "fastattn's", "torch": "cross_entropy"}


def record(runs: dict[str, dict[str, Any]]) -> None:
    """Keeps the runs in this machine's file, where they replace earlier ones of the same models."""
    folder, machine = ROOT / "benchmarks/results", report.machine()
    path = folder / f"translation-{report.kind(machine)}.json"
    earlier = json.loads(path.read_text())["runs"] if path.exists() else {}
    report.record(folder, "translation", {"runs": earlier | runs})


def table(recorded: list[dict[str, Any]]) -> str:
    """A row for each run on each machine."""
    head = ["processor", "model", "loss", "precision", "minutes", "updates", "target tokens/s", "compared with torch"]
    rows = [[*head, "validation loss", "greedy BLEU", "measured"]]
    for data in recorded:
        torchs = data["runs"].get("torch", {}).get("tokens_per_second")
        rows += [
            [
                report.processor(data["machine"]), f"`{NAMES[kind]}`", run["loss"], run["precision"],
                f"{run['minutes']:g}", str(run["updates"]), f"{run['tokens_per_second']:.0f}",
                f"{run['tokens_per_second'] / torchs:.2f}x" if torchs else "", f"{run['valid_loss']:.2f}",
                f"{run['bleu']:.1f}", run["date"][:10],
            ]
            for kind, run in sorted(data["runs"].items())
        ]  # fmt: skip
    return report.markdown(rows)


def picture(data: dict[str, Any]) -> Any:
    """The validation loss of one machine's runs over time."""
    figure = figures.figure(7, 4)
    axes = figure.add_subplot()
    for kind, run in sorted(data["runs"].items()):
        minutes = [point["seconds"] / 60 for point in run["curve"]]
        losses = [point["valid_loss"] for point in run["curve"]]
        axes.plot(minutes, losses, "o-", label=f"{NAMES[kind]}, {run['precision']}")
    axes.set(xlabel="minutes of training", ylabel="validation loss (nats a token)", xlim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    plots.caption(figure, report.origin(data))
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=["fastattn", "torch"])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    memory.keep_freed()  # as `fastattn train` does
    runs = by_turns({kind: run(kind, arguments.minutes) for kind in arguments.models})
    for kind, result in runs.items():
        print(kind, {name: value for name, value in result.items() if name != "curve"})
    disturbed = {kind: words for kind, result in runs.items() if (words := result.pop("disturbed"))}
    quiet = {kind: result for kind, result in runs.items() if kind not in disturbed}
    if arguments.record and quiet:
        record(quiet)
    if arguments.record and disturbed:
        reasons = "; ".join(f"{kind}: {words}" for kind, words in disturbed.items())
        sys.exit(f"not recorded, run it on a quiet machine: {reasons}")


if __name__ == "__main__":
    main()
