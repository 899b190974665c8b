"""Train the preset `tiny` and `torch.nn.Transformer` of its size on the verses, alternately, and translate greedily.

    python benchmarks/translation.py --minutes 20

adds rows to benchmarks/results.csv; `make tables` shows them. Text and schedule are the same. Ours trains on packed
batches with our loss, torch's on padded batches of sentences of like length with `torch.nn.functional.cross_entropy`.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastattn import Transformer, TransformerConfig
from fastattn.bench import report, training
from fastattn.bench.timer import Neighbours
from fastattn.translation import memory, precision
from fastattn.translation.config import PRESETS, TrainingConfig
from fastattn.translation.data import LENGTH_MULTIPLE, Batch, ParallelText, Sentences, read_parallel, verses
from fastattn.translation.evaluate import held_out, scores
from fastattn.translation.model import Packed
from fastattn.translation.search import Search, translate
from fastattn.translation.tokenizer import PAD_ID, Tokenizer
from fastattn.translation.train import Trainer

RESULTS = Path(__file__).with_name("results.csv")
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
TURN = 10.0  # seconds


class TorchTransformer(training.TorchTransformer):
    """`torch.nn.Transformer`, called as `fastattn.Transformer` is."""

    dropout_sites = 0
    fixed_id = None
    device = torch.device("cpu")

    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        # In evaluation its fused encoder raises under bfloat16 autocast on the CPU.
        self.transformer.encoder.enable_nested_tensor = False
        torch.backends.mha.set_fastpath_enabled(False)

    def packed_features(self, source: Packed, target: Packed) -> Tensor:
        """Return the features of packed sentences, (tokens, d_model). They are padded in between."""
        features = self.features(padded(source.tokens, source), padded(target.tokens, target))
        rows = torch.arange(len(lengths(target))).repeat_interleave(lengths(target))
        found = features[rows, target.places[: len(rows)]]
        return F.pad(found, (0, 0, 0, len(target.tokens) - len(rows)))

    def projection(self, features: Tensor) -> tuple[Tensor, Tensor, None]:
        return features, self.embedding.weight, None


def lengths(packed: Packed) -> Tensor:
    """Return the lengths of the sentences, int64 (B,), without that of padding."""
    return packed.offsets.diff()[:-1]


def padded(tokens: Tensor, packed: Packed) -> Tensor:
    """Return what belongs to packed sentences, (tokens,), as (B, L), padded on the right with ``PAD_ID``."""
    sentences = tokens.split(packed.offsets.diff().tolist())[:-1]
    rows = nn.utils.rnn.pad_sequence(sentences, batch_first=True, padding_value=PAD_ID)
    return F.pad(rows, (0, -rows.shape[1] % LENGTH_MULTIPLE), value=PAD_ID)


class OfLikeLengths(ParallelText):
    """Pairs whose batches hold sentences of like length, so that padding adds little to them."""

    def batches(self, batch_tokens: int, shuffle: torch.Generator | None = None) -> Iterator[Tensor]:
        """Yield batches of at most ``batch_tokens`` tokens per side, padding included.

        ``shuffle`` breaks ties and orders the batches.
        """
        source, target = (side.lengths + -side.lengths % LENGTH_MULTIPLE for side in (self.sources, self.targets))
        # Source lengths rise for one target length and fall for the next: a batch across both has similar lengths.
        by_source = torch.where(target // LENGTH_MULTIPLE % 2 == 1, source, -source)
        key = target * (2 * int(source.max()) + 1) + by_source
        order = torch.arange(len(key)) if shuffle is None else torch.randperm(len(key), generator=shuffle)
        order = order[key[order].argsort(stable=True)]
        longest = torch.maximum(source, target)
        batches, most = [order[:0]], 0
        for index in order.split(1):
            most = max(most, int(longest[index]))
            if len(batches[-1]) and most * (len(batches[-1]) + 1) > batch_tokens:
                batches.append(order[:0])
                most = int(longest[index])
            batches[-1] = torch.cat((batches[-1], index))
        if shuffle is not None:
            batches = [batches[i] for i in torch.randperm(len(batches), generator=shuffle).tolist()]
        return iter(batches)


class TorchLoss(nn.Module):
    """Torch's label-smoothed cross-entropy of all logits at once."""

    def __init__(self, model: TorchTransformer, smoothing: float):
        super().__init__()
        self.model, self.smoothing = model, smoothing

    def forward(self, batch: Batch, seeds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        source, target = padded(batch.source.tokens, batch.source), padded(batch.target.tokens, batch.target)
        labels = padded(batch.labels, batch.target).flatten()
        logits = F.linear(self.model.features(source, target), self.model.embedding.weight).flatten(0, 1)
        smoothing = {"ignore_index": PAD_ID, "reduction": "sum", "label_smoothing": self.smoothing}
        loss = F.cross_entropy(logits, labels, **smoothing)
        return loss, *loss.detach().new_zeros(2)  # only reports would read these


@torch.inference_mode()
def greedy(model: TorchTransformer, tokenizer: Tokenizer, lines: list[str]) -> list[str]:
    sentences, found = Sentences.of(tokenizer.encode(lines)), []
    for index in torch.arange(len(lines)).split(Search.batch_size):
        source, _ = sentences.padded(index)
        target = torch.full((len(index), 1), model.config.bos_id)
        finished = torch.zeros(len(index), dtype=torch.bool)
        while not finished.all() and target.shape[1] < source.shape[1] + Search.extra_tokens:
            token = F.linear(model.features(source, target)[:, -1], model.embedding.weight).argmax(-1)
            token.masked_fill_(finished, model.config.eos_id)
            target, finished = torch.cat((target, token[:, None]), 1), finished | (token == model.config.eos_id)
        found += tokenizer.decode(target.tolist())
    return found


def by_turns(programs: dict[str, Generator[None, None, Any]]) -> dict[str, Any]:
    """Return what the programs return. Each advances for a turn at a time: a machine's changes of speed affect all."""
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


def run(kind: str, minutes: float, settings: TrainingConfig) -> Generator[None, None, dict[str, Any]]:
    """Train for some minutes, validation not counted, with an update between two yields; return the figures."""
    train, dev, test = (read_parallel(*verses(split)) for split in ("train", "dev", "test"))
    tokenizer = Tokenizer.train(train[0] + train[1], PRESETS["tiny"].vocab_size)
    torch.manual_seed(settings.seed)
    config = TransformerConfig.preset("tiny", tokenizer.vocab_size)
    model = {"ours": Transformer, "torch": TorchTransformer}[kind](config)
    text = {"ours": ParallelText, "torch": OfLikeLengths}[kind]
    trainer = Trainer(model, text.encoded(tokenizer, *train, "training"), settings)
    if kind == "torch":
        trainer.loss = TorchLoss(model, settings.label_smoothing)
    held_out_text = text.encoded(tokenizer, *dev, "validation")
    batches = [held_out_text.batch(index) for index in held_out_text.batches(settings.batch_tokens)]
    seconds, tokens = 0.0, 0.0
    while seconds < 60 * minutes:
        start = time.monotonic()
        tokens += trainer.update()[3].item()
        seconds += time.monotonic() - start
        yield
    loss = held_out(model, batches, trainer.autocast())["valid_loss"]
    model.eval()
    translations = translate(model, tokenizer, test[0], Search(beam=1)) if kind == "ours" else None
    translations = translations or greedy(model, tokenizer, test[0])
    return {"token": seconds / tokens, "loss": loss, "bleu": scores(translations, test[1]).bleu}


def rows_of(found: dict[str, dict[str, Any]], minutes: float, where: dict[str, str]) -> list[report.Row]:
    """Return a row per figure, compared with torch's."""
    ours, torchs, head = found["ours"], found["torch"], f"tiny for {minutes:g} minutes: "
    rows = [report.Row(**where, case=f"{head}target token", peer="torch", seconds=ours["token"],
                       ratio=torchs["token"] / ours["token"])]  # fmt: skip
    for name, figure in (("validation loss", "loss"), ("BLEU", "bleu")):
        columns = {"case": head + name, "peer": "torch", "value": ours[figure]}
        rows.append(report.Row(**where, **columns, ratio=torchs[figure] / max(ours[figure], 1e-9)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    minutes = parser.parse_args().minutes
    memory.keep_freed()  # as `fastattn train` does
    settings = dataclasses.replace(TrainingConfig.of_preset("tiny"), precision=precision.resolve("auto"))
    where, neighbours = report.here() | {"dtype": DTYPES[settings.precision]}, Neighbours()
    found = by_turns({kind: run(kind, minutes, settings) for kind in ("ours", "torch")})
    rows = rows_of(found, minutes, where)
    print(*rows, sep="\n")
    if noise := neighbours.noise():
        sys.exit(f"not recorded, run it on a quiet machine: {noise}")
    report.append(RESULTS, rows)


if __name__ == "__main__":
    main()
