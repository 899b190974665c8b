"""Exported models against the programs that read them."""

import dataclasses

import pytest
import torch

from fastattn import Transformer, TransformerConfig, cli
from fastattn.demo import VERSES
from fastattn.translation import checkpoint
from fastattn.translation.data import read_lines
from fastattn.translation.errors import InputError
from fastattn.translation.export import to_ctranslate2
from fastattn.translation.search import Search, candidates
from fastattn.translation.tokenizer import Tokenizer

SMALL = TransformerConfig(vocab_size=300, d_model=32, d_ff=64, num_heads=4, encoder_layers=2, decoder_layers=2)
VARIANTS = {
    "paper": SMALL,
    "pre-norm": dataclasses.replace(SMALL, norm_first=True, norm_eps=1e-2),
    "free heads": dataclasses.replace(SMALL, head_dim=7, value_head_dim=7),
    "learned": dataclasses.replace(SMALL, positions="learned", attention_bias=True, output_bias=True),
    "untied": dataclasses.replace(SMALL, tying="none", scale_embeddings=False, encoder_layers=3),
    "logits scaled": dataclasses.replace(SMALL, tying="output", scale_logits=True),
}


@pytest.fixture(scope="module")
def ctranslate2():
    return pytest.importorskip("ctranslate2", reason="needs ctranslate2")


@pytest.fixture(scope="module")
def verses():
    sources, targets = (read_lines(VERSES / f"dev.{language}")[:200] for language in ("en", "es"))
    return sources, targets, Tokenizer.train(sources + targets, 300)


def random_model(config):
    """Every parameter random, the padding's embedding zero as in every model."""
    torch.manual_seed(1)
    model = Transformer(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
            if "embedding" in name or name == "output.weight":
                parameter[config.pad_id].zero_()
    return model


@pytest.mark.parametrize("variant", VARIANTS)
def test_ctranslate2_scores_as_we_do(ctranslate2, verses, tmp_path, variant):
    """log P of every token of real sentences."""
    sources, targets, tokenizer = verses
    model = random_model(VARIANTS[variant])
    to_ctranslate2(model, tokenizer, tmp_path / "model")
    translator = ctranslate2.Translator(str(tmp_path / "model"), compute_type="float32", inter_threads=1)
    source_ids, target_ids = tokenizer.encode(sources[:10]), tokenizer.encode(targets[:10])
    pieces = ([tokenizer.pieces(ids) for ids in side] for side in (source_ids, target_ids))
    for found, source, target in zip(translator.score_batch(*pieces), source_ids, target_ids, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*source, 2]]), torch.tensor([[1, *target]]))[0]
        wanted = logits.double().log_softmax(-1).gather(1, torch.tensor([*target, 2])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(found.log_probs).double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("variant", ["paper", "pre-norm"])
def test_ctranslate2_translates_as_we_do(ctranslate2, verses, tmp_path, variant):
    """Greedily, 200 sentences. Sentences end at once or never here: compared are as many pieces as ours have."""
    sources, _, tokenizer = verses
    model = random_model(VARIANTS[variant])
    to_ctranslate2(model, tokenizer, tmp_path / "model")
    translator = ctranslate2.Translator(str(tmp_path / "model"), compute_type="float32", inter_threads=1)
    pieces = [tokenizer.pieces(ids) for ids in tokenizer.encode(sources)]
    results = translator.translate_batch(pieces, beam_size=1, max_decoding_length=40)
    ours = candidates(model, tokenizer, sources, Search(beam=1))
    agree = sum(
        translations[0].text.startswith(tokenizer.join(result.hypotheses[0]))
        for translations, result in zip(ours, results, strict=True)
    )
    assert agree == len(sources)


@pytest.mark.parametrize(
    ("change", "words"), [({"window_size": (2, 2)}, "window_size"), ({"value_head_dim": 5}, "this model has two")]
)
def test_what_ctranslate2_cannot_hold_is_refused(ctranslate2, verses, tmp_path, change, words):
    model = Transformer(dataclasses.replace(SMALL, **change))
    with pytest.raises(InputError, match=words):
        to_ctranslate2(model, verses[2], tmp_path / "model")
    assert not any(tmp_path.iterdir())


def test_the_command(ctranslate2, verses, tmp_path, capsys):
    model = random_model(SMALL)
    checkpoint.save(tmp_path / "run", 3, model, verses[2], {})
    arguments = ["export", str(tmp_path / "run"), "--to", "ctranslate2", str(tmp_path / "out")]
    assert cli.main(arguments) == 0
    assert (tmp_path / "out/model.bin").is_file()
    assert (tmp_path / "out/tokenizer.model").read_bytes() == verses[2].model
    assert cli.main(arguments) == 1
    assert "exists already" in capsys.readouterr().err
