"""Byte-pair encoding shared by both languages, with sentencepiece."""

import collections
import functools
import io
import itertools
import random
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fastattn.errors import InputError, require
from fastattn.translation.config import NORMALIZATIONS

PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)
LEARNED_FROM = 10_000_000  # maximum lines that pieces are learned from.
SPACE = "\u2581"  # sentencepiece's spelling of the space before a word.
RESERVED = "\u2585"  # character that makes sentencepiece's trainer drop a line.
NAME = re.compile("<(?=(?:pad|s|/s|unk)>)")  # begin of a special piece's name, which the trainer drops from a line.
# sentencepiece computes the share of characters that have a piece in float32, and drops the rest once it rounds to 1.
# Characters rarer than one in RARE are therefore required by name.
RARE = 2**23
LONGEST_LINE = 2**30  # bytes; sentencepiece drops longer lines


class VocabularyTooLarge(InputError):
    """The error of a vocabulary that is larger than its text allows; ``most`` is the size that the text allows."""

    def __init__(self, given: int, most: int):
        super().__init__(
            f"a vocabulary of {given} is larger than this text allows: it has {most} pieces at most "
            f"(--vocab-size {most} or less)"
        )
        self.most = most


class Tokenizer:
    """Converter of text to piece ids and back.

    Args:
        model: bytes of a sentencepiece model, made by :meth:`train` or read from a checkpoint's tokenizer.model.
        target_model: bytes of a model with the same pieces and the normalization of the target's text, read from
            target.model; None: ``model`` serves both sides.

    Attributes:
        models: the given bytes, one or two.
    """

    def __init__(self, model: bytes, target_model: bytes | None = None):
        self.model = model
        self.models = (model,) if target_model is None else (model, target_model)
        processors = [_processor(each) for each in self.models]
        self._processor, self._target_processor = processors[0], processors[-1]
        if target_model is not None:
            pieces = [processor.id_to_piece(list(range(processor.vocab_size()))) for processor in processors]
            if pieces[0] != pieces[1]:
                raise InputError("the tokenizers of source and target have different pieces: expected two of one run")

    @classmethod
    def train(cls, lines: Iterable[str], vocab_size: int, normalization: str = "nmt_nfkc") -> "Tokenizer":
        """Learn ``vocab_size`` pieces from lines with one normalization; :meth:`of_pairs` lists the rules."""
        return cls(_with_rule(_learned(map(_normalizer(normalization), lines), vocab_size), normalization))

    @classmethod
    def of_pairs(
        cls, pairs: Iterable[tuple[str, str]], vocab_size: int, normalization: str, target_normalization: str
    ) -> "Tokenizer":
        """Learn ``vocab_size`` pieces from both sides of sentence pairs.

        Every character of the normalised text is a piece, except U+0000, which is unknown, and U+2581, sentencepiece's
        spelling of a space. If there are more than ``LEARNED_FROM`` lines, that many are drawn at random, the same ones
        in every process.

        Args:
            normalization, target_normalization: rules of sentencepiece, for sources and targets: "nfkc", "nmt_nfkc" or
                "identity".

        Raises:
            InputError: a rule is another one, or the vocabulary is too small for the text.
            VocabularyTooLarge: it is larger than the text allows.
        """
        rules = normalization, target_normalization
        sides = [_normalizer(rule) for rule in rules]
        lines = (normalized(line) for pair in pairs for normalized, line in zip(sides, pair, strict=True))
        model = _learned(lines, vocab_size)
        source, target = (_with_rule(model, rule) for rule in rules)
        return cls(source, None if source == target else target)

    @classmethod
    def of_words(cls, words: list[str]) -> tuple["Tokenizer", list[str]]:
        """Return a tokenizer whose pieces are the words between spaces, and these words in the order of its ids.

        Raises:
            InputError: a word is empty or has a space.
        """
        model = io.BytesIO()
        require("sentencepiece").SentencePieceTrainer.train(
            sentence_iterator=iter(words), model_writer=model, vocab_size=len(words) + 4, model_type="word",
            character_coverage=1.0, pad_id=PAD_ID, bos_id=BOS_ID, eos_id=EOS_ID, unk_id=UNK_ID, minloglevel=2,
            normalization_rule_name="identity", hard_vocab_limit=False, max_sentence_length=LONGEST_LINE,
        )  # fmt: skip
        tokenizer = cls(model.getvalue())
        pieces = [piece.removeprefix(SPACE) for piece in tokenizer.pieces(list(range(tokenizer.vocab_size)))]
        lost = set(words) ^ set(pieces[4:])
        if lost:
            raise InputError(f"the word {min(lost)!r} cannot be a piece: expected words without spaces")
        return tokenizer, pieces

    @property
    def vocab_size(self) -> int:
        return self._processor.vocab_size()

    @functools.cached_property
    def _has_words(self) -> bool:
        """Whether the pieces are words, made by :meth:`of_words`."""
        pieces = self.pieces(list(range(UNK_ID + 1, self.vocab_size)))
        return all(len(piece) > 1 and piece.startswith(SPACE) for piece in pieces)

    def encode(self, lines: list[str], target: bool = False) -> list[list[int]]:
        """Return the piece ids of each line, without begin and end; ``target`` selects the target's normalization."""
        if self._has_words:  # sentencepiece would merge adjacent unknown words into one piece
            words = ([f"{SPACE}{word}" for word in line.split(" ") if word] for line in lines)
            return [self._processor.piece_to_id(pieces) for pieces in words]
        processor = self._target_processor if target else self._processor
        return processor.encode(lines, num_threads=-1) if lines else []

    def decode(self, ids: list[list[int]]) -> list[str]:
        """Return the text of each list of ids, without begin, end and padding."""
        return self._processor.decode(ids, num_threads=-1) if ids else []

    def join(self, pieces: list[str]) -> str:
        """Return the text of a list of pieces."""
        return self._processor.decode(pieces)

    def pieces(self, ids: list[int]) -> list[str]:
        """Return the spelling of each piece."""
        return self._processor.id_to_piece(ids)


def _processor(model: bytes) -> Any:
    if not model:
        raise InputError("the tokenizer is not a readable sentencepiece model: it is empty")
    try:
        return require("sentencepiece").SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise InputError(f"the tokenizer is not a readable sentencepiece model: {error}") from None


def _normalizer(rule: str) -> Callable[[str], str]:
    """Return the function that normalises a line, except its spaces, which the encoding model handles."""
    if rule not in NORMALIZATIONS:
        raise InputError(f"unknown normalization {rule!r}, expected one of {', '.join(NORMALIZATIONS)}")
    if rule == "identity":
        return str
    spaces = dict.fromkeys(("add_dummy_prefix", "escape_whitespaces", "remove_extra_whitespaces"), False)
    return require("sentencepiece").SentencePieceNormalizer(rule_name=rule, **spaces).normalize


def _with_rule(model: bytes, rule: str) -> bytes:
    """Return a model of identity normalization with another rule.

    In protobuf's encoding, a serialized message that follows another one is merged into it. So the normalizer's message
    is appended, and no package that knows the fields is needed.
    """
    if rule == "identity":
        return model
    spaces = dict.fromkeys(("add_dummy_prefix", "escape_whitespaces", "remove_extra_whitespaces"), True)
    normalizer = require("sentencepiece").SentencePieceNormalizer(rule_name=rule, **spaces)
    return model + normalizer.serialized_model_proto()


def _learned(lines: Iterable[str], vocab_size: int) -> bytes:
    """Train a model of ``vocab_size`` pieces on normalised lines; the model itself normalises nothing."""
    if vocab_size <= UNK_ID:
        raise InputError(
            f"a vocabulary of {vocab_size} is too small: padding, begin, end and unknown alone are 4 pieces"
        )
    kept, characters = _drawn(lines), collections.Counter[str]()
    for line in kept:
        characters.update(line)
    total = characters.total()
    rare = {character for character, number in characters.items() if number * RARE <= total}
    required = "".join(sorted(rare - {" ", "\0", SPACE, RESERVED}))
    model, raised = io.BytesIO(), []

    def given() -> Iterator[str]:
        kept.reverse()
        try:
            while kept:  # one line at a time, so that each is freed
                yield NAME.sub("< ", kept.pop().replace(RESERVED, " "))
        except (Exception, KeyboardInterrupt) as error:  # sentencepiece replaces it by its own error
            raised.append(error)
            raise

    try:
        require("sentencepiece").SentencePieceTrainer.train(
            sentence_iterator=given(), model_writer=model, vocab_size=vocab_size, model_type="bpe",
            character_coverage=1.0, required_chars=required, pad_id=PAD_ID, bos_id=BOS_ID, eos_id=EOS_ID,
            unk_id=UNK_ID, user_defined_symbols=[RESERVED] if RESERVED in characters else [], minloglevel=2,
            normalization_rule_name="identity", max_sentence_length=LONGEST_LINE,
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        if raised:
            raise raised[0] from None
        most = re.search(r"value <= (\d+)", str(error))
        if most:
            raise VocabularyTooLarge(vocab_size, int(most[1])) from None
        least = re.search(r"required_chars\. \d+ vs (\d+)", str(error))
        if least:
            raise InputError(
                f"a vocabulary of {vocab_size} is too small for this text: its characters alone need {least[1]} "
                f"(--vocab-size {least[1]} or more)"
            ) from None
        raise InputError(f"sentencepiece could not learn a vocabulary of {vocab_size}: {error}") from None
    return model.getvalue()


def _drawn(lines: Iterable[str]) -> list[str]:
    """Draw ``LEARNED_FROM`` lines with equal probability, or take all if there are fewer (Vitter 1985, algorithm R)."""
    lines, generator = iter(lines), random.Random(0)
    kept = list(itertools.islice(lines, LEARNED_FROM))
    for seen, line in enumerate(lines, len(kept) + 1):
        place = int(generator.random() * seen)
        if place < len(kept):
            kept[place] = line
    return kept
