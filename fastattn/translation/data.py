"""Parallel text: reading it, encoding it, and cutting it into batches of about equal numbers of tokens."""

import dataclasses
import gzip
import queue
import random
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from fastattn.translation.errors import InputError
from fastattn.translation.tokenizer import BOS_ID, EOS_ID, PAD_ID, Tokenizer

# Pairs with a longer side are left out of training (attention's cost is quadratic); translation takes any length.
MAX_TRAINING_PIECES = 256
# Batches are padded to a multiple of this. The matrix library prepares code for every new number of rows, some of it
# for good; so there are few of them, for 3 % more padding.
LENGTH_MULTIPLE = 4


def read_lines(path: str | Path) -> list[str]:
    """The lines of a UTF-8 text file, plain or gzip (``.gz``); raises :class:`InputError` where there are none."""
    path = Path(path)
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except (EOFError, zlib.error) as error:
        raise InputError(f"{path} is not a complete gzip file: {error}") from None
    return decode_lines(data, str(path))


def arriving_lines(stream: BinaryIO, name: str, most: int) -> Iterator[list[str]]:
    """The lines of a UTF-8 stream as they come: at least one at a time, at most ``most``, whatever has arrived.

    Raises:
        InputError: a line is not UTF-8.
    """
    arrived: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def read() -> None:
        for line in stream:
            arrived.put(line)
        arrived.put(None)

    threading.Thread(target=read, daemon=True).start()
    number, line = 0, arrived.get()
    while line is not None:
        lines = []
        while line is not None:
            number += 1
            try:
                lines.append(line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n"))
            except UnicodeDecodeError as error:
                if lines:
                    yield lines
                raise InputError(f"{name} is not UTF-8: byte {line[error.start]:#04x} in line {number}") from None
            if len(lines) == most or arrived.empty():
                break
            line = arrived.get()
        yield lines
        line = arrived.get() if line is not None else None


def decode_lines(data: bytes, name: str) -> list[str]:
    """The lines of UTF-8 ``data``, called ``name`` in errors."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{name} is not UTF-8: byte {data[error.start]:#04x} in line {line}") from None
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    if not any(line.strip() for line in lines):
        raise InputError(f"{name} is empty: expected one sentence a line")
    return lines


def read_parallel(source: str | Path, target: str | Path) -> tuple[list[str], list[str]]:
    """Two files whose line n are translations of each other."""
    sources, targets = read_lines(source), read_lines(target)
    if len(sources) != len(targets):
        raise InputError(
            f"{source} has {len(sources)} lines but {target} has {len(targets)}: line n must pair with line n"
        )
    return sources, targets


class Sentences:
    """Encoded sentences, each ended by ``EOS_ID``, in one flat tensor.

    Args:
        ids: piece ids of each sentence.
    """

    def __init__(self, ids: list[list[int]]):
        self.lengths = torch.tensor([len(sentence) + 1 for sentence in ids], dtype=torch.int64)
        self._starts = self.lengths.cumsum(0) - self.lengths
        self._tokens = torch.tensor([token for sentence in ids for token in (*sentence, EOS_ID)], dtype=torch.int32)

    def __len__(self) -> int:
        return len(self.lengths)

    def padded(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Sentences ``index`` (N,): tokens int64 (N, L), padded on the right, and their lengths int64 (N,)."""
        lengths = self.lengths[index]
        column = torch.arange(_padded(int(lengths.max())))
        position = (self._starts[index, None] + column).clamp_(max=len(self._tokens) - 1)
        return self._tokens[position].long().masked_fill_(column >= lengths[:, None], PAD_ID), lengths


def _padded(length: int) -> int:
    return -(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sentence pairs, padded on the right.

    source (B, S) and target (B, T) are the model's inputs, target beginning with ``BOS_ID``; labels (B, T) is the token
    to predict at each target position, ``PAD_ID`` where there is none. All int64, as are the lengths (B,).
    """

    source: Tensor
    source_lengths: Tensor
    target: Tensor
    target_lengths: Tensor
    labels: Tensor
    tokens: int  # labels that are not padding

    def to(self, device: torch.device) -> "Batch":
        names = [field.name for field in dataclasses.fields(self) if field.name != "tokens"]
        return dataclasses.replace(self, **{name: getattr(self, name).to(device) for name in names})


class ParallelText:
    """Encoded sentence pairs.

    Args:
        tokenizer: encodes both sides.
        sources, targets: lines that pair up. Pairs with an empty side, or a side above ``MAX_TRAINING_PIECES``, are
            left out; ``left_out`` counts them.
    """

    def __init__(self, tokenizer: Tokenizer, sources: list[str], targets: list[str]):
        pairs = zip(tokenizer.encode(sources), tokenizer.encode(targets), strict=True)
        kept = [(s, t) for s, t in pairs if s and t and max(len(s), len(t)) <= MAX_TRAINING_PIECES]
        if not kept:
            raise InputError(f"no sentence pair has two sides of 1 to {MAX_TRAINING_PIECES} pieces")
        self.left_out = len(sources) - len(kept)
        self.sources = Sentences([s for s, _ in kept])
        self.targets = Sentences([t for _, t in kept])

    def batch(self, index: Tensor) -> Batch:
        source, source_lengths = self.sources.padded(index)
        labels, target_lengths = self.targets.padded(index)
        begin = labels.new_full((len(index), 1), BOS_ID)
        target = torch.cat((begin, labels[:, :-1]), dim=1)
        return Batch(source, source_lengths, target, target_lengths, labels, int(target_lengths.sum()))

    def buckets(self, batch_tokens: int, shuffle: random.Random | None = None) -> list[Tensor]:
        """Indices of the pairs of each batch: at most ``batch_tokens`` tokens a side, padding included.

        Pairs of like length share a batch. ``shuffle`` breaks the ties and orders the batches; without it both follow
        the text.
        """
        order = list(range(len(self.sources)))
        if shuffle is not None:
            shuffle.shuffle(order)
        source, target = ([_padded(n) for n in side.lengths.tolist()] for side in (self.sources, self.targets))
        # Source lengths go up and down by turns, so that a batch across two target lengths has like source lengths.
        order.sort(key=lambda i: (target[i], source[i] if target[i] // LENGTH_MULTIPLE % 2 else -source[i]))
        batches, first, longest = [], 0, 0
        for end, i in enumerate(order):
            longest = max(longest, source[i], target[i])
            if (end + 1 - first) * longest > batch_tokens and end > first:
                batches.append(torch.tensor(order[first:end]))
                first, longest = end, max(source[i], target[i])
        batches.append(torch.tensor(order[first:]))
        if shuffle is not None:
            shuffle.shuffle(batches)
        return batches

    def epochs(self, batch_tokens: int, seed: int, epoch: int = 0, skip: int = 0) -> Iterator[tuple[int, int, Tensor]]:
        """Shuffled :meth:`buckets` without end, as (epoch, place in the epoch, indices), from place ``skip`` of
        ``epoch`` on.

        An epoch's order depends on ``seed`` and its number alone.
        """
        while True:
            batches = self.buckets(batch_tokens, random.Random(f"{seed} {epoch}"))
            for place in range(skip, len(batches)):
                yield epoch, place, batches[place]
            epoch, skip = epoch + 1, 0
