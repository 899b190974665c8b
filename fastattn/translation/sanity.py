"""Warnings of probable mistakes in a corpus, given before hours are spent on it."""

import collections
import itertools
import re
from collections.abc import Iterable

import torch

from fastattn.translation.data import MAX_TRAINING_PIECES, ParallelText, Sentences
from fastattn.translation.tokenizer import Tokenizer

Pairs = tuple[list[str], list[str]]

EXAMINED = 200_000  # number of first training pairs that are examined; only overlaps are looked for in the whole text.
OVERLAP = 0.05  # maximum share of held-out sources in the training text; verses and news repeat themselves a little.
COPIES = 0.05  # maximum share of pairs with equal sides; even few teach a model to copy (Khayrallah and Koehn 2018).
LEFT_OUT = 0.05  # maximum share of pairs that no update sees.
WHOLE_WORDS = 0.2  # minimum share of words that are one piece.
SPACED = 20  # maximum characters per word; above, the script has no spaces between words.
PAIRED = 0.3  # minimum correlation between the lengths of sentences and their translations; real text has at least 0.8.
ENOUGH = 100  # minimum lines for a meaningful share or correlation.
# UTF-8 read as Latin-1 or Windows-1252 and written again, the replacement character, and UTF-16.
MOJIBAKE = re.compile("[ÃÂ][\u0080-\u00bf]|â€|\ufffd|\0")


def training_warnings(
    pairs: Iterable[tuple[str, str]],
    valid: Pairs,
    train_text: ParallelText,
    valid_text: ParallelText,
    tokenizer: Tokenizer,
) -> list[str]:
    """Return warnings about the text of a run: its training ``pairs``, the pairs of ``valid``, and both encoded."""
    pairs = iter(pairs)
    first = list(itertools.islice(pairs, EXAMINED))
    train = [source for source, _ in first], [target for _, target in first]
    found = [*_pairing(train, "training"), *_encoding(train, "training"), *_encoding(valid, "validation")]
    found += _swapped(train, valid)
    for text, name in ((train_text, "training"), (valid_text, "validation")):
        number = len(text.sources) + text.left_out
        if text.left_out > LEFT_OUT * number:
            found.append(
                f"{text.left_out} of {number} {name} pairs are left out, the first in line {text.first_left_out}: "
                f"a side is empty or longer than {MAX_TRAINING_PIECES} pieces"
            )
    held_out = list(map(_normal, valid[0]))
    seen = set(held_out).intersection(_normal(source) for source, _ in itertools.chain(first, pairs))
    found += _overlap((line in seen for line in held_out), "validation")
    for lines, side in zip(train, ("source", "target"), strict=True):
        words = collections.Counter(word for line in lines[:10_000] for word in line.split())
        number = words.total()
        if not number or sum(len(word) * count for word, count in words.items()) > SPACED * number:
            continue
        encoded = zip(words.values(), tokenizer.encode(list(words), target=side == "target"), strict=True)
        whole = sum(count for count, ids in encoded if len(ids) == 1)
        if whole < WHOLE_WORDS * number:
            found.append(
                f"only {whole / number:.0%} of the words of the {side} side are one piece of the vocabulary of "
                f"{tokenizer.vocab_size}: sentences grow long and training slow; give a larger --vocab-size"
            )
    return found


def translation_warnings(lines: list[str], first: int, tokenizer: Tokenizer) -> list[str]:
    """Return warnings about lines to translate, numbered from ``first``."""
    may_be = [(number, line) for number, line in enumerate(lines, first) if len(line) > MAX_TRAINING_PIECES]
    encoded = zip(may_be, tokenizer.encode([line for _, line in may_be]), strict=True)
    overlong = [(number, len(ids)) for (number, _), ids in encoded if len(ids) > MAX_TRAINING_PIECES]
    if not overlong:
        return []
    number, pieces = overlong[0]
    return [
        f"line {number} has {pieces} pieces, more than the {MAX_TRAINING_PIECES} of a training sentence at most: "
        "expect a bad translation, and write a sentence a line"
    ]


def overlap_warnings(sources: list[str], tokenizer: Tokenizer, training: Sentences) -> list[str]:
    """Return warnings about test lines that also occur among the sources that the model was trained on."""
    return _overlap(training.hold(tokenizer.encode(sources)), "test")


def evaluation_warnings(
    sources: list[str], translations: list[str], references: list[str], text: ParallelText
) -> list[str]:
    """Return warnings about translations and their references; ``text`` holds sources and references, encoded."""
    found = [*_pairing((sources, references), "test"), *_encoding((sources, references), "test")]
    if text.left_out:
        found.append(
            f"perplexity and accuracy leave out {text.left_out} of {len(sources)} test pairs, the first in line "
            f"{text.first_left_out}: a side is empty or longer than {MAX_TRAINING_PIECES} pieces"
        )
    if _fit(sources, translations) > _fit(references, translations):
        found.append(
            "the translations have more words of the sources than of the references: "
            "are the two files swapped, or does the model copy?"
        )
    return found


def _pairing(pairs: Pairs, name: str) -> list[str]:
    """Return warnings about copies, and about lines that do not translate each other."""
    sources, targets = pairs
    copied = (_normal(s) == _normal(t) != "" for s, t in zip(sources, targets, strict=True))
    found = _share(copied, COPIES, f"{name} pairs have two equal sides", "a model learns to copy from them")
    if len(sources) >= ENOUGH:
        sizes = torch.tensor([[len(line) for line in side] for side in pairs], dtype=torch.float64, device="cpu")
        bounded = sizes.minimum(3 * sizes.median(dim=1, keepdim=True).values)  # overlong lines count less
        correlation = float(torch.corrcoef(bounded)[0, 1])  # NaN if all lines of a side have the same length
        if correlation < PAIRED:
            found.append(
                f"the lengths of the {name} lines and of their translations hardly go together (correlation "
                f"{correlation:.2f}): does line n pair with line n?"
            )
    return found


def _encoding(pairs: Pairs, name: str) -> list[str]:
    found = []
    for lines, side in zip(pairs, ("source", "target"), strict=True):
        broken = [number for number, line in enumerate(lines, 1) if MOJIBAKE.search(line)]
        if broken:
            example = MOJIBAKE.search(lines[broken[0] - 1])
            found.append(
                f"{len(broken)} {name} {side} lines look like text in a wrong encoding, the first in line {broken[0]}: "
                f"{example[0] if example else ''!r}"
            )
    return found


def _swapped(train: Pairs, valid: Pairs) -> list[str]:
    """Return a warning if the validation files are in the other order than the training files."""
    straight, crossed = (
        sum(_fit(known, lines) for known, lines in zip(train, side, strict=True)) for side in (valid, valid[::-1])
    )
    if crossed > straight:
        return ["the validation source has the words of the training target and the reverse: the languages are swapped"]
    return []


def _fit(known: Iterable[str], lines: Iterable[str]) -> float:
    """Return the share of the words of ``lines`` that occur in ``known``."""
    vocabulary = {word for line in known for word in line.lower().split()}
    words = [word for line in lines for word in line.lower().split()]
    return sum(word in vocabulary for word in words) / max(1, len(words))


def _overlap(seen: Iterable[bool], name: str) -> list[str]:
    what = f"{name} sources also stand in the training text"
    return _share(seen, OVERLAP, what, "scores on them say nothing of new text")


def _share(hits: Iterable[bool], most: float, what: str, why: str) -> list[str]:
    """Return a warning with the number of hits and the first one, if more than a share ``most`` of lines are hits."""
    marks = list(hits)
    number = sum(marks)
    if number <= most * len(marks):
        return []
    return [f"{number} of {len(marks)} {what}, the first in line {marks.index(True) + 1}: {why}"]


def _normal(line: str) -> str:
    return " ".join(line.lower().split())
