# ruff: noqa: RUF001
"""Tests of each side's normalization and of the characters of a vocabulary, against sentencepiece's own models."""

import io
import json
import re
import shutil

import pytest
import sentencepiece
import torch
from conftest import refused
from test_cli import failure, train_arguments

import fastattn_command as cli
from fastattn.errors import InputError
from fastattn.translation import checkpoint, config, plots
from fastattn.translation.data import SIDES, VERSES, Sentences, read_lines
from fastattn.translation.tokenizer import UNK_ID, Tokenizer

# Characters that a rule of normalization changes: full-width forms, ligatures, no-break and full-width spaces, joiners,
# direction marks, decomposed letters, variation selectors, soft hyphens.
TEXT = [
    "起初，神创造天地！（一）“光”；昼：夜？",
    "　全角　空白",
    "Il dit\u00a0: «\u202fVoilà\u202f»…",
    "می\u200cخواهم و نمی\u200cدانم",
    "क्\u200dष और क्\u200cष",
    "\u200fשלום\u200f, a\u200eb",
    "e\u0301te\u0301 d\u0323\u0307",
    "❤\ufe0f and 👩\u200d👩\u200d👧",
    "ﬁne ½ x² ™ Å ｶﾞ",
    "soft\u00adly b\ufefforn",
    "tab\there, ⁇ and �",
]
LINES = read_lines(VERSES / "dev.en")[:200]


def sentencepieces(lines, vocab_size, rule):
    """Return a model that sentencepiece normalises and learns itself."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=vocab_size, model_type="bpe",
        character_coverage=1.0, pad_id=0, bos_id=1, eos_id=2, unk_id=3, minloglevel=2, normalization_rule_name=rule,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def normalized(lines, rule):
    """Return the lines as sentencepiece normalises them."""
    normalizer = sentencepiece.SentencePieceNormalizer(rule_name=rule, add_dummy_prefix=False, escape_whitespaces=False)
    return [normalizer.normalize(line) for line in lines]


@pytest.mark.parametrize("rule", config.NORMALIZATIONS)
def test_a_vocabulary_of_one_rule_is_sentencepieces(rule):
    """Pieces, their order and the ids of text are those of sentencepiece."""
    theirs = sentencepieces(LINES + TEXT, 400, rule)
    ours = Tokenizer.train(LINES + TEXT, 400, rule)
    assert ours.vocab_size == 400
    assert ours.pieces(list(range(400))) == [theirs.id_to_piece(number) for number in range(400)]
    assert ours.encode(LINES + TEXT) == ours.encode(LINES + TEXT, target=True) == theirs.encode(LINES + TEXT)
    assert len(ours.models) == 1


@pytest.mark.parametrize("rule", config.NORMALIZATIONS)
def test_each_side_has_its_rule(rule):
    """The default keeps the target's characters; the source is as sentencepiece normalises it."""
    keeping = config.TrainingConfig().target_normalization
    tokenizer = Tokenizer.of_pairs(zip(TEXT, TEXT, strict=True), 250, rule, keeping)
    targets = tokenizer.encode(TEXT, target=True)
    assert tokenizer.decode(targets) == TEXT
    assert tokenizer.decode(tokenizer.encode(TEXT)) == normalized(TEXT, rule)
    assert (normalized(TEXT, rule) != TEXT) == (rule != "identity")
    assert not any(UNK_ID in ids for ids in (*targets, *tokenizer.encode(TEXT)))
    again = Tokenizer(*tokenizer.models)
    assert (again.encode(TEXT), again.encode(TEXT, target=True)) == (tokenizer.encode(TEXT), targets)
    for target, model in enumerate((tokenizer.models[0], tokenizer.models[-1])):  # as another program reads them
        theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
        assert theirs.encode(TEXT) == tokenizer.encode(TEXT, target=bool(target))


def test_what_cannot_be_a_tokenizer():
    expected = "expected one of nfkc, nmt_nfkc, identity"
    refused(f"unknown normalization 'nfc', {expected}", Tokenizer.train, LINES, 100, "nfc")
    refused(f"target_normalization is 'nfc', {expected}", config.TrainingConfig, target_normalization="nfc")
    first, second = (Tokenizer.train(lines, 100).model for lines in (LINES, LINES[:100]))
    refused("source and target have different pieces", Tokenizer, first, second)
    assert cli.NORMALIZATIONS == config.NORMALIZATIONS


# --- the characters of a vocabulary ---


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["abc", "only ▅ here: ж", "▅▅"], ["only ▅ here: ж", "▅", "a▅▅b ▅"]),  # U+2585, sentencepiece's own
        (["abc", "say </s> or <pad>", "<unk>"], ["say </s> or <pad>", "<unk>", "<s>"]),  # the names of pieces
        (["abc", "a\0ж"], ["aж"]),  # text behind a zero
        (["abc", "a\tb\x07c\x7f\u0085\u2028d\re"], ["a\tb\x07c\x7f\u0085\u2028d\re"]),  # control characters
        (["abc", "\ufeffa\ufdd0\U0010ffff"], ["\ufeffa\ufdd0\U0010ffff"]),  # no characters
    ],
)
def test_every_character_is_a_piece(lines, text):
    """sentencepiece's trainer would leave out a line with U+2585, and text spelt like a piece of its own."""
    tokenizer = smallest(lines)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert not any(UNK_ID in ids for ids in tokenizer.encode(text))


def smallest(lines):
    """Return the tokenizer with the smallest vocabulary possible."""
    with pytest.raises(InputError) as raised:
        Tokenizer.train(lines, 5, "identity")
    needed = re.search(r"its characters alone need (\d+) \(--vocab-size \1 or more\)", str(raised.value))
    return Tokenizer.train(lines, int(needed[1]), "identity")


@pytest.mark.slow
def test_rare_characters_of_a_large_text():
    """A character that occurs once is kept. sentencepiece counts coverage in float32, where one more than 2**25 is not
    seen."""
    lines = ["ab cd " * 6_000_000, "ж"]
    assert UNK_ID not in Tokenizer.train(lines, 14, "identity").encode(["ж"])[0]


# --- a run ---


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return files of pairs whose sides have the same characters."""
    folder = tmp_path_factory.mktemp("text")
    sides = [f"{a} {line}" for a, line in zip("abcdefghijk", TEXT, strict=True)], [f"{line} b" for line in TEXT]
    for name, lines in zip(("source", "target"), sides, strict=True):
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return [folder / "source", folder / "target"]


def arguments(files, out, *more):
    """Return the arguments of a small model's run."""
    return train_arguments(files, out, "--vocab-size", "250", *more)


@pytest.fixture(scope="module")
def run(files, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    assert cli.main(arguments(files, out, "--normalization", "nfkc", "--max-steps", "1")) == 0
    return out


def test_a_run_encodes_each_side_by_its_rule(files, run):
    """The run's folder has each side encoded by its rule, and its checkpoints name the rules."""
    model, tokenizer = checkpoint.load(run)
    wanted = normalized(read_lines(files[0]), "nfkc"), read_lines(files[1])
    for side, lines in zip(SIDES, wanted, strict=True):
        sentences = Sentences.mapped(run / "text" / side)
        padded, _ = sentences.padded(torch.arange(len(sentences)))
        assert tokenizer.decode(padded.tolist()) == lines
    _, training = checkpoint.load_config(checkpoint.find(run))
    assert (training.normalization, training.target_normalization) == ("nfkc", "identity")
    heads = plots.attention_heads(model, tokenizer, "（，", "（，", "cross")
    assert "".join(heads.columns).removesuffix("</s>") == "▁(,"
    assert "".join(heads.rows).removesuffix("</s>") == "▁（，"


def test_copies_of_a_checkpoint_keep_both_rules(run, tmp_path):
    """A checkpoint's average and its int8 copy keep both rules. A damaged pair of tokenizers is refused."""
    _, tokenizer = checkpoint.load(run)
    assert len(tokenizer.models) == 2
    checkpoint.average(run, 1, tmp_path / "mean")
    model, _ = checkpoint.load(run)
    checkpoint.save_int8(model, tokenizer, 1, tmp_path / "int8")
    for path in (tmp_path / "mean", tmp_path / "int8"):
        assert checkpoint.load(path)[1].models == tokenizer.models
    damaged = tmp_path / "mean" / checkpoint.TARGET_TOKENIZER
    damaged.write_bytes(Tokenizer.train(LINES, 250).model)
    message = r"cannot read the checkpoint .*: the tokenizers of source and target have"
    refused(message, checkpoint.load, tmp_path / "mean")


def test_a_run_is_resumed_with_its_rules(files, run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run", symlinks=True)
    more = ["--max-steps", "2", "--resume"]
    message = failure(arguments(files, tmp_path / "run", *more, "--normalization", "identity"), capsys)
    assert "normalization is 'identity' but the run to resume has 'nfkc': leave it out" in message
    assert cli.main(arguments(files, tmp_path / "run", *more)) == 0
    assert checkpoint.load(checkpoint.newest(tmp_path / "run"))[1].models == checkpoint.load(run)[1].models


def test_a_run_of_an_earlier_version_goes_on(files, tmp_path):
    """Checkpoints of an earlier version have one model and name no rule. The run goes on with nmt_nfkc for both
    sides."""
    run = tmp_path / "run"
    assert cli.main(arguments(files, run, "--max-steps", "1", "--target-normalization", "nmt_nfkc")) == 0
    for step in checkpoint.steps(run):
        assert not (step / checkpoint.TARGET_TOKENIZER).exists()
        fields = json.loads((step / checkpoint.CONFIG).read_text())
        for name in ("normalization", "target_normalization"):
            assert fields["training"].pop(name) == "nmt_nfkc"
        (step / checkpoint.CONFIG).write_text(json.dumps(fields))
    about = (run / "text" / checkpoint.ABOUT).read_text()
    assert cli.main(arguments(files, run, "--max-steps", "2", "--resume")) == 0
    newest = checkpoint.newest(run)
    _, training = checkpoint.load_config(newest)
    assert newest.name == "step-00000002"
    assert (training.normalization, training.target_normalization) == ("nmt_nfkc", "nmt_nfkc")
    assert not (newest / checkpoint.TARGET_TOKENIZER).exists()
    assert (run / "text" / checkpoint.ABOUT).read_text() == about
    assert checkpoint.load(run)[1].encode(TEXT, target=True) == checkpoint.load(run)[1].encode(TEXT)


def test_the_bundled_model_has_one_rule():
    """The bundled model has the rule of earlier versions, nmt_nfkc, for both sides."""
    _, tokenizer = checkpoint.load(checkpoint.PRETRAINED)
    assert tokenizer.encode(["ｔｈｅ\u00a0ｋｉｎｇ"], target=True) == tokenizer.encode(["the king"])
