"""Parallel text: read it, encode it, and pack it into batches of about equal numbers of tokens."""

import array
import contextlib
import dataclasses
import gzip
import hashlib
import itertools
import json
import os
import queue
import struct
import sys
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor
from torch.nn import functional

from fastattn.errors import InputError
from fastattn.files import StrPath, remove, written_whole
from fastattn.translation import checkpoint
from fastattn.translation.model import ROW_MULTIPLE, Packed
from fastattn.translation.tokenizer import BOS_ID, EOS_ID, PAD_ID, Tokenizer

# Maximum pieces per side of a training pair, because attention's cost is quadratic. Translation takes any length.
MAX_TRAINING_PIECES = 256
LENGTH_MULTIPLE = 4  # divisor of padded lengths in translation: the matrix library prepares code per number of rows
CHUNK = 2**16  # pairs that are encoded at once
SIDES, TOKENS, OFFSETS = ("source", "target"), ".tokens", ".offsets"  # files of encoded text

VERSES = Path(__file__).parent.parent / "verses"

Files = tuple[StrPath, StrPath]


def verses(split: str) -> tuple[Path, Path]:
    """Return the files of the bundled English and Spanish text: "train", "dev" or "test"."""
    suffix = ".gz" if split == "train" else ""
    return VERSES / f"{split}.en{suffix}", VERSES / f"{split}.es{suffix}"


def lines_of(path: StrPath) -> Iterator[str]:
    """Yield the lines of a UTF-8 text file, plain or gzip (``.gz``), as they are read.

    Raises:
        InputError: the file cannot be read, or has no text.
    """
    path = Path(path)
    is_blank = True
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                text = _decoded(line, number, str(path))
                is_blank = is_blank and not text.strip()
                yield text
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except (EOFError, zlib.error) as error:
        raise InputError(f"{path} is not a complete gzip file: {error}") from None
    if is_blank:
        raise InputError(f"{path} is empty: expected one sentence a line")


def _decoded(line: bytes, number: int, name: str) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8: byte {error.object[error.start]:#04x} in line {number}") from None


def read_lines(path: StrPath) -> list[str]:
    """Return all lines of :func:`lines_of`."""
    return list(lines_of(path))


def arriving_lines(stream: BinaryIO, name: str, most: int) -> Iterator[list[str]]:
    """Yield the lines of a UTF-8 stream as they arrive, 1 to ``most`` at a time.

    Raises:
        InputError: a line is not UTF-8, or the stream cannot be read.
    """
    arrived: queue.Queue[bytes | Exception | None] = queue.Queue(most)

    def read() -> None:
        try:
            for line in own:
                arrived.put(line)
            if own is not stream:
                own.close()
            arrived.put(None)
        except Exception as error:
            arrived.put(error)

    def next_line() -> bytes | None:
        line = arrived.get()
        if isinstance(line, OSError):
            raise InputError(f"cannot read {name}: {line.strerror}")
        if isinstance(line, Exception):
            raise line
        return line

    own = _reopened(stream)
    threading.Thread(target=read, daemon=True).start()
    number, line = 0, next_line()
    while line is not None:
        lines = []
        while line is not None:
            number += 1
            try:
                lines.append(_decoded(line, number, name))
            except InputError:
                if lines:
                    yield lines
                raise
            if len(lines) == most or arrived.empty():
                break
            line = next_line()
        yield lines
        line = next_line() if line is not None else None


def _reopened(stream: BinaryIO) -> BinaryIO:
    """Return the stream reopened on a duplicated descriptor, or the stream itself if it is not a file.

    A daemon thread blocked in ``sys.stdin`` holds its buffer lock. Python needs that lock at exit and would abort.
    """
    try:
        return open(os.dup(stream.fileno()), "rb")
    except OSError:  # not a file
        return stream


def pairs_of(source: StrPath, target: StrPath) -> Iterator[tuple[str, str]]:
    """Yield the pairs of lines of two files, whose lines n translate each other, as they are read.

    Raises:
        InputError: as :func:`lines_of`, or the files differ in length.
    """
    sources, targets, number = lines_of(source), lines_of(target), 0
    for number, (first, second) in enumerate(itertools.zip_longest(sources, targets), 1):
        if first is None or second is None:
            longer = number + sum(1 for _ in (sources if second is None else targets))
            counts = (number - 1, longer) if first is None else (longer, number - 1)
            raise InputError(
                f"{source} has {counts[0]} lines but {target} has {counts[1]}: line n must pair with line n"
            )
        yield first, second


def read_parallel(source: StrPath, target: StrPath) -> tuple[list[str], list[str]]:
    """Return all lines of :func:`pairs_of`, per side."""
    sources, targets = zip(*pairs_of(source, target), strict=True)
    return list(sources), list(targets)


def digest(source: StrPath, target: StrPath) -> str:
    """Return a checksum of the text of two files, gzipped or not, which must be readable again.

    Raises:
        InputError: as :func:`pairs_of`, or one is not a regular file, such as a pipe, which can be read only once.
    """
    source, target = Path(source), Path(target)
    for path in (source, target):
        if path.exists() and not path.is_file():
            raise InputError(f"{path} is no regular file, and training reads its text again and again: write it to one")
    found = hashlib.sha256()
    for pair in pairs_of(source, target):
        found.update("{}\n{}\n".format(*pair).encode())
    return found.hexdigest()


class Sentences:
    """Encoded sentences, each ended by ``EOS_ID``, in one flat tensor.

    Args:
        tokens: int32, of all sentences.
        offsets: int64 (N + 1,), the start of each sentence, and the end.
    """

    def __init__(self, tokens: Tensor, offsets: Tensor):
        self._tokens, self._offsets = tokens, offsets

    @classmethod
    def of(cls, ids: list[list[int]]) -> "Sentences":
        """Make sentences of these piece ids."""
        lengths = torch.tensor([0, *(len(sentence) + 1 for sentence in ids)], dtype=torch.int64, device="cpu")
        flat = [token for sentence in ids for token in (*sentence, EOS_ID)]
        tokens = torch.tensor(flat, dtype=torch.int32, device="cpu")
        return cls(tokens, lengths.cumsum(0))

    @classmethod
    def mapped(cls, stem: StrPath) -> "Sentences":
        """Map two files that :func:`encode` wrote into memory; pages are read on demand and shared by processes.

        Raises:
            InputError: the files do not fit each other.
        """
        stem = Path(stem)

        def read(path: Path, dtype: torch.dtype) -> Tensor:
            size = path.stat().st_size // dtype.itemsize
            return torch.from_file(str(path), shared=False, size=size, dtype=dtype, device="cpu")

        tokens, offsets = read(stem.with_suffix(TOKENS), torch.int32), read(stem.with_suffix(OFFSETS), torch.int64)
        fits = len(offsets) and int(offsets[0]) == 0 and int(offsets[-1]) == len(tokens)
        if not fits or (len(offsets) > 1 and int(offsets.diff().min()) < 1):
            raise InputError(
                f"{stem}{TOKENS} and {OFFSETS} differ: remove {stem.parent}, and the text is encoded again"
            )
        return cls(tokens, offsets)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @property
    def lengths(self) -> Tensor:
        """Lengths of all sentences, int64 (N,)."""
        return self._offsets.diff()

    def lengths_of(self, index: Tensor) -> Tensor:
        """Return the lengths of sentences ``index``: int64 (N,)."""
        return self._offsets[index + 1] - self._offsets[index]

    def hold(self, ids: list[list[int]]) -> list[bool]:
        """Return for each of the given sentences whether it is among these sentences."""
        wanted = [(*sentence, EOS_ID) for sentence in ids]
        sought, found = set(wanted), set()
        for first in range(0, len(self), CHUNK):
            offsets = self._offsets[first : first + CHUNK + 1].tolist()
            tokens = self._tokens[offsets[0] : offsets[-1]].tolist()
            places = ((begin - offsets[0], end - offsets[0]) for begin, end in itertools.pairwise(offsets))
            found |= sought.intersection(tuple(tokens[begin:end]) for begin, end in places)
        return [sentence in found for sentence in wanted]

    def packed(self, index: Tensor) -> Packed:
        """Return sentences ``index`` (N,), packed, and padded with ``PAD_ID`` to a multiple of ``ROW_MULTIPLE``."""
        lengths = self.lengths_of(index)
        rest = -int(lengths.sum()) % ROW_MULTIPLE
        offsets = functional.pad(torch.cat((lengths, lengths.new_tensor([rest]))).cumsum(0), (1, 0))
        sentence = torch.arange(len(index), device="cpu").repeat_interleave(lengths)
        places = torch.arange(len(sentence), device="cpu") - offsets[sentence]
        tokens = self._tokens[self._offsets[index][sentence] + places].long()
        padded = functional.pad(tokens, (0, rest), value=PAD_ID), functional.pad(places, (0, rest))
        return Packed(*padded, offsets, int(lengths.max()))

    def padded(self, index: Tensor, most: int = sys.maxsize) -> tuple[Tensor, Tensor]:
        """Return sentences ``index`` (N,): tokens int64 (N, L), padded on the right, and their lengths int64 (N,).

        L is a multiple of ``LENGTH_MULTIPLE``, unless that is more than ``most``.
        """
        lengths = self.lengths_of(index)
        longest = int(lengths.max())
        width = max(longest, min(most, longest + -longest % LENGTH_MULTIPLE))
        column = torch.arange(width, device="cpu")
        position = (self._offsets[index, None] + column).clamp_(max=len(self._tokens) - 1)
        return self._tokens[position].long().masked_fill_(column >= lengths[:, None], PAD_ID), lengths


class _Writer:
    """Writer that appends sentences to two files, for :func:`Sentences.mapped`.

    One file has the tokens, int32, each sentence ended by ``EOS_ID``. The other has the offsets, int64: the start of
    each sentence, and the end.
    """

    def __init__(self, tokens: BinaryIO, offsets: BinaryIO):
        self._tokens, self._offsets = tokens, offsets
        self._end = 0
        array.array("q", [0]).tofile(self._offsets)

    def write(self, ids: list[list[int]]) -> None:
        tokens, ends = array.array("i"), array.array("q")
        for sentence in ids:
            tokens.extend(sentence)
            tokens.append(EOS_ID)
            ends.append(self._end + len(tokens))
        self._end += len(tokens)
        tokens.tofile(self._tokens)
        ends.tofile(self._offsets)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sentence pairs as the model's inputs; target sentences begin with ``BOS_ID``.

    Labels are int64 (N,), the token to predict at each position of the target, or ``PAD_ID`` if there is none.
    """

    source: Packed
    target: Packed
    labels: Tensor
    tokens: int  # labels that are not padding
    filled: int  # tokens of both sides that are not padding

    @property
    def rows(self) -> int:
        """Tokens of both sides, with padding."""
        return len(self.source.tokens) + len(self.target.tokens)

    def to(self, device: torch.device) -> "Batch":
        source, target = (
            Packed(sent(side.tokens, device), sent(side.places, device), sent(side.offsets, device), side.longest)
            for side in (self.source, self.target)
        )
        return dataclasses.replace(self, source=source, target=target, labels=sent(self.labels, device))


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on ``device``.

    A CPU tensor is copied to a GPU through pinned memory, so that the host does not wait for the GPU's earlier work.
    """
    pinned = device.type == "cuda" and tensor.device.type == "cpu"
    return (tensor.pin_memory() if pinned else tensor).to(device, non_blocking=True)


class ParallelText:
    """Encoded sentence pairs.

    Args:
        sources, targets: sentences that pair up.
        left_out, first_left_out: number of pairs of the text that are left out, and the line number of the first one.
    """

    def __init__(self, sources: Sentences, targets: Sentences, left_out: int = 0, first_left_out: int | None = None):
        self.sources, self.targets = sources, targets
        self.left_out, self.first_left_out = left_out, first_left_out

    @classmethod
    def encoded(cls, tokenizer: Tokenizer, sources: list[str], targets: list[str], name: str) -> "ParallelText":
        """Encode the lines of the text ``name``, which pair up.

        Pairs with an empty side, or a side above ``MAX_TRAINING_PIECES``, are left out.

        Raises:
            InputError: all pairs are left out.
        """
        kept: tuple[list[list[int]], list[list[int]]] = ([], [])
        left_out: list[int] = []
        for *pair, lines in _encoded(tokenizer, zip(sources, targets, strict=True), name):
            for side, ids in zip(kept, pair, strict=True):
                side += ids
            left_out += lines
        return cls(Sentences.of(kept[0]), Sentences.of(kept[1]), len(left_out), min(left_out, default=None))

    @classmethod
    def mapped(cls, folder: StrPath) -> "ParallelText":
        """Map the text that :func:`encode` wrote; it is read on demand."""
        folder = Path(folder)
        about = json.loads((folder / checkpoint.ABOUT).read_text(encoding="utf-8"))
        sources, targets = (Sentences.mapped(folder / side) for side in SIDES)
        return cls(sources, targets, about["left_out"], about["first_left_out"])

    def batch(self, index: Tensor) -> Batch:
        source, target = self.sources.packed(index), self.targets.packed(index)
        labels = target.tokens
        target = dataclasses.replace(target, tokens=labels.roll(1).masked_fill_(target.places == 0, BOS_ID))
        tokens, of_source = (int(side.offsets[-2]) for side in (target, source))
        return Batch(source, target, labels, tokens, tokens + of_source)

    def batches(self, batch_tokens: int, shuffle: torch.Generator | None = None) -> Iterator[Tensor]:
        """Yield the indices of the pairs of each batch, in the order of the text, or in a random one with ``shuffle``.

        A batch has as many pairs as fit ``batch_tokens`` tokens per side. A pair with more tokens is a batch by itself.
        """
        order = torch.arange(len(self.sources), device="cpu")
        if shuffle is not None:
            order = torch.randperm(len(order), generator=shuffle, device="cpu")
        ends = [functional.pad(side.lengths_of(order).cumsum(0), (1, 0)) for side in (self.sources, self.targets)]
        first = 0
        while first < len(order):
            last = min(int(torch.searchsorted(end, end[first] + batch_tokens, right=True)) for end in ends) - 1
            last = max(last, first + 1)
            yield order[first:last]
            first = last

    def epochs(self, batch_tokens: int, seed: int, epoch: int = 0, skip: int = 0) -> Iterator[tuple[int, int, Tensor]]:
        """Yield shuffled :meth:`batches` without end, from place ``skip`` of ``epoch`` on.

        An epoch's order depends only on ``seed`` and its number.

        Yields:
            (epoch, place in the epoch, indices).
        """
        while True:
            key = hashlib.blake2b(struct.pack("<2q", seed, epoch), digest_size=8).digest()
            shuffle = torch.Generator("cpu").manual_seed(*struct.unpack("<q", key))
            for place, index in enumerate(self.batches(batch_tokens, shuffle)):
                if place >= skip:
                    yield epoch, place, index
            epoch, skip = epoch + 1, 0


def _by(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the entry of ``checkpoint.ABOUT`` that identifies the tokenizer."""
    return {"tokenizer": hashlib.sha256(b"".join(tokenizer.models)).hexdigest()}


def _says(folder: Path, about: Mapping[str, str | int | None]) -> bool:
    """Return whether :func:`encode` wrote this folder and its description contains ``about``."""
    try:
        return about.items() <= json.loads((folder / checkpoint.ABOUT).read_text(encoding="utf-8")).items()
    except (OSError, ValueError, AttributeError):
        return False


def training_sources(path: StrPath, tokenizer: Tokenizer) -> Sentences | None:
    """Return the sources that a checkpoint, or a run's best, was trained on; None if the run's folder lacks their text.

    Raises:
        InputError: there is no checkpoint, or the text is damaged.
    """
    folder = checkpoint.find(path).resolve().parent / checkpoint.TEXT
    return Sentences.mapped(folder / SIDES[0]) if _says(folder, _by(tokenizer)) else None


def encode(tokenizer: Tokenizer, files: Files, text_digest: str, folder: StrPath) -> None:
    """Write the text of ``files`` for :meth:`ParallelText.mapped`, unless ``folder`` has it already.

    An older encoded text in ``folder`` is removed.

    Args:
        text_digest: :func:`digest` of ``files``.

    Raises:
        InputError: ``folder`` holds something else.
    """
    folder = Path(folder)
    about: dict[str, str | int | None] = {"text": text_digest, **_by(tokenizer)}
    if _says(folder, about):
        return
    if folder.exists() and not (folder / checkpoint.ABOUT).is_file():
        raise InputError(f"{folder} is not what `fastattn train` wrote: name another folder for the run")
    if folder.exists():
        remove(folder)
    with written_whole(folder) as partial:
        with contextlib.ExitStack() as stack:
            writers = [
                _Writer(*(stack.enter_context(open(partial / f"{side}{kind}", "wb")) for kind in (TOKENS, OFFSETS)))
                for side in SIDES
            ]
            left_out, first_left_out = 0, None
            for *pair, lines in _encoded(tokenizer, pairs_of(*files), "training"):
                for writer, ids in zip(writers, pair, strict=True):
                    writer.write(ids)
                left_out += len(lines)
                first_left_out = first_left_out or min(lines, default=None)
        about.update(left_out=left_out, first_left_out=first_left_out)
        (partial / checkpoint.ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _encoded(
    tokenizer: Tokenizer, pairs: Iterable[tuple[str, str]], name: str
) -> Iterator[tuple[list[list[int]], list[list[int]], list[int]]]:
    """Yield, per chunk, the piece ids of both sides of the used pairs, and the line numbers of the other pairs.

    Raises:
        InputError: no pair is used.
    """
    pairs, first, kept_any = iter(pairs), 1, False
    while chunk := list(itertools.islice(pairs, CHUNK)):
        sources, targets = (list(lines) for lines in zip(*chunk, strict=True))
        sides = tokenizer.encode(sources), tokenizer.encode(targets, target=True)
        used = [bool(s and t) and max(len(s), len(t)) <= MAX_TRAINING_PIECES for s, t in zip(*sides, strict=True)]
        source, target = ([ids for ids, use in zip(side, used, strict=True) if use] for side in sides)
        yield source, target, [line for line, use in enumerate(used, first) if not use]
        first += len(chunk)
        kept_any = kept_any or any(used)
    if not kept_any:
        raise InputError(f"no sentence pair of the {name} text has two sides of 1 to {MAX_TRAINING_PIECES} pieces")
