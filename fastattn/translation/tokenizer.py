"""Byte-pair encoding shared by both languages, by sentencepiece."""

import functools
import io
import itertools
import random
import re
from collections.abc import Iterable, Iterator

from fastattn.errors import InputError, require

PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)
LEARNED_FROM = 10_000_000  # lines
SPACE = "\u2581"  # begins a word, as sentencepiece spells it
LONGEST_LINE = 2**30  # bytes; sentencepiece leaves out what is longer


class Tokenizer:
    """Text to piece ids and back.

    Args:
        model: the bytes of a sentencepiece model, as :meth:`train` makes them and a checkpoint's tokenizer.model holds.
    """

    def __init__(self, model: bytes):
        self.model = model
        if not model:
            raise InputError("the tokenizer is not a readable sentencepiece model: it is empty")
        try:
            self._processor = require("sentencepiece").SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise InputError(f"the tokenizer is not a readable sentencepiece model: {error}") from None

    @classmethod
    def train(cls, lines: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learn ``vocab_size`` pieces from ``lines``, every character of them included; of more than ``LEARNED_FROM``
        lines, from as many drawn at random, the same ones in every process."""
        if vocab_size <= UNK_ID:
            raise InputError(
                f"a vocabulary of {vocab_size} is too small: padding, begin, end and unknown alone are 4 pieces"
            )
        model, raised = io.BytesIO(), []

        def drawn() -> Iterator[str]:
            try:
                yield from _drawn(lines)
            except (Exception, KeyboardInterrupt) as error:  # which sentencepiece would put into words of its own
                raised.append(error)
                raise

        trainer = require("sentencepiece").SentencePieceTrainer
        try:
            trainer.train(
                sentence_iterator=drawn(), model_writer=model, vocab_size=vocab_size, model_type="bpe",
                character_coverage=1.0, pad_id=PAD_ID, bos_id=BOS_ID, eos_id=EOS_ID, unk_id=UNK_ID, minloglevel=2,
                max_sentence_length=LONGEST_LINE,
            )  # fmt: skip
        except (RuntimeError, ValueError) as error:
            if raised:
                raise raised[0] from None
            most = re.search(r"value <= (\d+)", str(error))
            if most:
                raise InputError(
                    f"a vocabulary of {vocab_size} is larger than this text allows: it has {most[1]} pieces at most"
                ) from None
            least = re.search(r"required_chars\. \d+ vs (\d+)", str(error))
            if least:
                raise InputError(
                    f"a vocabulary of {vocab_size} is too small for this text: its characters alone need {least[1]}"
                ) from None
            raise InputError(f"sentencepiece could not learn a vocabulary of {vocab_size}: {error}") from None
        return cls(model.getvalue())

    @classmethod
    def of_words(cls, words: list[str]) -> tuple["Tokenizer", list[str]]:
        """A tokenizer whose pieces are the words between spaces, and these in the order of its ids.

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
        """Whether the pieces are words, as :meth:`of_words` makes them."""
        pieces = self.pieces(list(range(UNK_ID + 1, self.vocab_size)))
        return all(len(piece) > 1 and piece.startswith(SPACE) for piece in pieces)

    def encode(self, lines: list[str]) -> list[list[int]]:
        """Piece ids of each line, without begin and end."""
        if self._has_words:  # sentencepiece makes one piece of unknown words side by side
            words = ([f"{SPACE}{word}" for word in line.split(" ") if word] for line in lines)
            return [self._processor.piece_to_id(pieces) for pieces in words]
        return self._processor.encode(lines, num_threads=-1) if lines else []

    def decode(self, ids: list[list[int]]) -> list[str]:
        """Text of each list of ids; begin, end and padding vanish."""
        return self._processor.decode(ids, num_threads=-1) if ids else []

    def join(self, pieces: list[str]) -> str:
        """Text of a list of pieces."""
        return self._processor.decode(pieces)

    def pieces(self, ids: list[int]) -> list[str]:
        """The spelling of each piece."""
        return self._processor.id_to_piece(ids)


def _drawn(lines: Iterable[str]) -> Iterator[str]:
    """``LEARNED_FROM`` of the lines, each as likely as any other, or all (Vitter 1985, algorithm R)."""
    lines, generator = iter(lines), random.Random(0)
    kept = list(itertools.islice(lines, LEARNED_FROM))
    for seen, line in enumerate(lines, len(kept) + 1):
        place = int(generator.random() * seen)
        if place < len(kept):
            kept[place] = line
    kept.reverse()
    while kept:  # one by one, which frees them
        yield kept.pop()
