"""Translation while torch's default device differs from the model's: every result stays where it belongs."""

import contextlib

import pytest
import torch
from test_importing import program, word_files

from fastattn import Transformer, TransformerConfig
from fastattn.translation import checkpoint, plots
from fastattn.translation.data import VERSES, ParallelText, digest, encode, read_lines
from fastattn.translation.evaluate import held_out
from fastattn.translation.export import to_huggingface
from fastattn.translation.importing import import_model
from fastattn.translation.sanity import training_warnings
from fastattn.translation.search import Search, candidates, translate
from fastattn.translation.tokenizer import Tokenizer
from fastattn.translation.train import dropout_seeds

LINES = ["And God said to Moses,", "", "The king went out.", "In the beginning God created the heavens."]


@contextlib.contextmanager
def elsewhere():
    """Tensors that are made without naming a device have no data."""
    with torch.device("meta"):
        yield


@pytest.fixture(scope="module")
def small():
    """Return a random model and its tokenizer, on the CPU."""
    lines = read_lines(VERSES / "dev.en")[:200]
    tokenizer = Tokenizer.train(lines, 200)
    torch.manual_seed(3)
    config = TransformerConfig(200, d_model=32, d_ff=64, num_heads=4, encoder_layers=2, decoder_layers=2)
    return Transformer(config, device="cpu").eval(), tokenizer


@pytest.mark.parametrize("search", [Search(extra_tokens=4), Search(temperature=0.7, n_best=2, extra_tokens=4)])
def test_translate(small, search):
    wanted = candidates(*small, LINES, search)
    with elsewhere():
        assert candidates(*small, LINES, search) == wanted


def test_attention_heads(small):
    wanted = plots.attention_heads(*small, LINES[0], LINES[2])
    with elsewhere():
        assert torch.equal(plots.attention_heads(*small, LINES[0], LINES[2]).weights, wanted.weights)


def test_checkpoints(small, tmp_path):
    """Checkpoints are written, exported and read."""
    model, tokenizer = small
    search = Search(beam=1, extra_tokens=4)
    wanted = translate(model, tokenizer, LINES, search)
    with elsewhere():
        checkpoint.save_model(model, tokenizer, tmp_path / "whole")
        checkpoint.save_int8(model, tokenizer, 3, tmp_path / "int8")
        assert translate(*checkpoint.load(tmp_path / "whole"), LINES, search) == wanted
        eight = translate(*checkpoint.load(tmp_path / "int8"), LINES, search)
        to_huggingface(model, tokenizer, tmp_path / "marian")
    assert translate(*checkpoint.load(tmp_path / "int8"), LINES, search) == eight
    to_huggingface(model, tokenizer, tmp_path / "again")
    for path in (tmp_path / "again").iterdir():
        assert (tmp_path / "marian" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", ["jadore", "annotated"])
def test_imported_models(tmp_path, name):
    program(name, tmp_path / "model")
    files = word_files(name, tmp_path)
    wanted, _ = import_model(tmp_path / "model", *files, heads=4)
    with elsewhere():
        found, _ = import_model(tmp_path / "model", *files, heads=4)
    for parameter, other in zip(found.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(parameter, other)


def test_text_and_its_batches(small, tmp_path):
    """Text in memory, mapped text and the seeds of an update's dropout are the same under another default device."""
    tokenizer = small[1]
    sides = [read_lines(VERSES / f"dev.{language}")[:120] for language in ("en", "es")]
    files = tmp_path / "en", tmp_path / "es"
    for path, lines in zip(files, sides, strict=True):
        path.write_text("\n".join(lines))
    of_text = digest(*files)

    def found(folder):
        text = ParallelText.encoded(tokenizer, *sides, "training")
        encode(tokenizer, files, of_text, folder)
        mapped = ParallelText.mapped(folder)
        drawn = [next(kind.epochs(400, 1))[2] for kind in (text, mapped)]
        batches = [kind.batch(index) for kind, index in zip((text, mapped), drawn, strict=True)]
        tensors = [(batch.source.tokens, batch.target.tokens, batch.labels) for batch in batches]
        warnings = training_warnings(zip(*sides, strict=True), sides, text, mapped, tokenizer)
        return [*drawn, *tensors[0], *tensors[1], dropout_seeds(1, 2, 3, 4)], warnings

    wanted, said = found(tmp_path / "wanted")
    with elsewhere():
        tensors, warnings = found(tmp_path / "found")
    assert warnings == said
    for tensor, other in zip(tensors, wanted, strict=True):
        assert torch.equal(tensor, other)


def test_validation(small):
    model, tokenizer = small
    sides = [read_lines(VERSES / f"dev.{language}")[:40] for language in ("en", "es")]
    text = ParallelText.encoded(tokenizer, *sides, "validation")
    indices = next(text.epochs(400, 1))[2]

    def found():
        return held_out(model, [text.batch(indices)], contextlib.nullcontext())

    wanted = found()
    with elsewhere():
        assert found() == wanted
