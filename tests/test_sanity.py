"""Tests of warnings about a corpus: each fault is found in the real corpus with that fault planted, and none
without."""

import random
import re
import time
from pathlib import Path

import pytest

from fastattn.translation import checkpoint, data, sanity
from fastattn.translation.data import ParallelText, read_lines, verses
from fastattn.translation.sanity import evaluation_warnings, overlap_warnings, training_warnings, translation_warnings
from fastattn.translation.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def corpus():
    """Return (training, validation), each (sources, targets)."""
    train, valid = (tuple(map(read_lines, verses(split))) for split in ("test", "dev"))
    return train, valid


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return Tokenizer.train(corpus[0][0] + corpus[0][1], 3000)


def warned(train, valid, tokenizer):
    texts = ParallelText.encoded(tokenizer, *train, "training"), ParallelText.encoded(tokenizer, *valid, "validation")
    return training_warnings(zip(*train, strict=True), valid, *texts, tokenizer)


def evaluated(sources, translations, references, tokenizer):
    text = ParallelText.encoded(tokenizer, sources, references, "test")
    return evaluation_warnings(sources, translations, references, text)


def test_the_bundled_corpus_is_sane(corpus, tokenizer):
    assert warned(*corpus, tokenizer) == []
    (sources, targets), _ = corpus
    assert evaluated(sources, targets[1:] + targets[:1], targets, tokenizer) == []


def some(lines, change):
    """Change lines 8 to 50."""
    return [change(line) if 7 <= n < 50 else line for n, line in enumerate(lines)]


def mojibake(line, encoding="latin-1"):
    return line.replace("'", "\u2019").encode().decode(encoding, "replace")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda a, b, c, d: (a, b, [*c, *map(str.upper, a[5:45])], d + b[5:45]), "621 validation sources also stand"),
        (lambda a, b, c, d: (a, b, d, c), "the languages are swapped"),
        (lambda a, b, c, d: (some(a, lambda x: " "), b, c, d), "43 of 622 training pairs .* line 8: a side is empty"),
        (lambda a, b, c, d: (a, some(b, lambda x: x * 20), c, d), "43 of 622 training pairs are left out.* line 8: "),
        (lambda a, b, c, d: (a, b, c, some(d, lambda x: x * 20)), "42 of 581 validation pairs are left out.* line 8: "),
        (lambda a, b, c, d: (a[:7] + b[7:50] + a[50:], b, c, d), r"4\d of 622 training pairs have two .* line 8: "),
        (lambda a, b, c, d: (a, b[1:] + b[:1], c, d), r"training lines .* hardly go together .*-?0\.\d\d\)"),
        (lambda a, b, c, d: (a, [*b[:30], *map(mojibake, b[30:])], c, d), "training target .* encoding.* line 31: 'Ã"),
        (lambda a, b, c, d: (a, b, [mojibake(x, "cp1252") for x in c], d), r"validation source .* line \d+: 'â€'"),
        # UTF-16 read as UTF-8 is the only text with U+0000, which no vocabulary has.
        (lambda a, b, c, d: (a, some(b, "\0".join), c, d), r"43 training target .* encoding.* line 8: '\\x00'"),
    ],
)
def test_a_fault_is_found(corpus, tokenizer, fault, message):
    """A fault changes the sides of the training and the validation text."""
    sides = fault(*corpus[0], *corpus[1])
    (warning,) = warned(sides[:2], sides[2:], tokenizer)
    assert re.search(message, warning), warning


def test_overlap_is_looked_for_in_all_of_the_text(corpus, tokenizer, monkeypatch):
    train, valid = corpus
    later = train[0] + valid[0][100:140], train[1] + valid[1][100:140]
    monkeypatch.setattr(sanity, "EXAMINED", 200)
    (warning,) = warned(later, valid, tokenizer)
    assert warning.startswith("42 of 581 validation sources also stand in the training text, the first in line 50: ")


def test_a_test_text_that_was_trained_on(corpus, tokenizer, monkeypatch):
    (sources, targets), (others, _) = corpus
    monkeypatch.setattr(data, "CHUNK", 100)
    training = ParallelText.encoded(tokenizer, sources, targets, "training").sources
    assert training.hold(tokenizer.encode([sources[99], "Never said.", sources[100], ""])) == [True, False, True, False]
    assert overlap_warnings(others, tokenizer, training) == []
    (warning,) = overlap_warnings([*others, *sources[300:340]], tokenizer, training)
    assert re.match(r"4\d of \d+ test sources also stand in the training text, the first in line \d+: ", warning)


def test_the_text_beside_a_checkpoint(corpus, tokenizer, tmp_path, monkeypatch):
    """The text is what the run encoded with the checkpoint's tokenizer; another folder of that name is ignored."""
    files = verses("test")
    step, text = tmp_path / "step", tmp_path / checkpoint.TEXT
    step.mkdir()
    (step / checkpoint.WEIGHTS).touch()
    assert data.training_sources(step, tokenizer) is None
    text.mkdir()
    assert data.training_sources(step, tokenizer) is None
    for about in ("no JSON", "[]", "{}"):
        (text / checkpoint.ABOUT).write_text(about)
        assert data.training_sources(step, tokenizer) is None
    data.encode(tokenizer, files, data.digest(*files), text)
    (sources, targets), _ = corpus
    assert data.training_sources(step, tokenizer).hold(tokenizer.encode(sources[:3])) == [True] * 3
    assert data.training_sources(step, Tokenizer.train(targets, 300)) is None
    monkeypatch.chdir(step)
    assert data.training_sources(Path("."), tokenizer) is not None


def test_a_vocabulary_that_splits_every_word(corpus):
    (sources, targets), valid = corpus
    letters = Tokenizer.train(sources + targets, 110)
    found = warned((sources, targets), valid, letters)
    assert [line.partition(" of the vocabulary")[0][-18:] for line in found] == ["side are one piece"] * 2


def test_text_without_spaces_has_no_words_to_split():
    lines = ["".join(random.Random(n).choices("一二三四五六七八九十百千", k=30)) for n in range(50)]
    tokenizer = Tokenizer.train(lines, 30)
    assert warned((lines, lines[::-1]), (lines[:1], lines[-1:]), tokenizer) == [
        "1 of 1 validation sources also stand in the training text, the first in line 1: scores on them say nothing of "
        "new text"
    ]


def test_a_line_longer_than_training_has_them(tokenizer):
    long = ["The king went out.", "And he said to them, " * 60, "", "The king went out. " * 100]
    (warning,) = translation_warnings(long, 11, tokenizer)
    pieces = len(tokenizer.encode(long[1:2])[0])
    assert warning.startswith(f"line 12 has {pieces} pieces, more than the 256 of a training sentence")
    assert translation_warnings([*long[:1], "x" * 200], 1, tokenizer) == []


def test_translations_in_the_language_of_their_sources(corpus, tokenizer):
    (english, spanish), _ = corpus
    (copying,) = evaluated(english, english[1:] + english[:1], spanish, tokenizer)
    assert copying.startswith("the translations have more words of the sources than of the references")


def test_pairs_that_the_perplexity_leaves_out(corpus, tokenizer):
    (english, spanish), _ = corpus
    references = [*spanish[:2], "", spanish[3] * 100, *spanish[4:]]
    (warning,) = evaluated(english, spanish, references, tokenizer)
    assert f"leave out 2 of {len(english)} test pairs, the first in line 3: a side is empty or longer than" in warning


def test_the_cost_is_linear_in_the_lines(corpus, tokenizer):
    train, valid = corpus
    many = tuple(side * 20 for side in train)
    text, valid_text = (ParallelText.encoded(tokenizer, *pairs, "some") for pairs in (many, valid))
    start = time.perf_counter()
    training_warnings(zip(*many, strict=True), valid, text, valid_text, tokenizer)
    assert time.perf_counter() - start < 10  # a median computed again for every line takes longer
