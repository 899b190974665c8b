"""Tests of exported models with the programs that read them."""

import contextlib
import dataclasses
import random

import pytest
import torch
from conftest import refused, slow
from observers import Lora
from torch import nn

import fastattn_command as cli
from fastattn import Transformer, TransformerConfig
from fastattn.errors import InputError
from fastattn.translation import checkpoint
from fastattn.translation.config import PRESETS, TrainingConfig
from fastattn.translation.data import VERSES, read_lines
from fastattn.translation.export import ctranslate2_lacks, expect_marian, to_ctranslate2, to_huggingface
from fastattn.translation.search import Search, translate
from fastattn.translation.tokenizer import UNK_ID, Tokenizer

SMALL = TransformerConfig(vocab_size=300, d_model=32, d_ff=64, num_heads=4, encoder_layers=2, decoder_layers=2)
VARIANTS = {
    "paper": SMALL,
    "pre-norm": dataclasses.replace(SMALL, norm_first=True, norm_eps=1e-2),
    "free heads": dataclasses.replace(SMALL, head_dim=7, value_head_dim=7),
    "learned": dataclasses.replace(SMALL, positions="learned", attention_bias=True, output_bias=True),
    "untied": dataclasses.replace(SMALL, tying="none", scale_embeddings=False, encoder_layers=3),
    "biases": dataclasses.replace(SMALL, attention_bias=True, output_bias=True, encoder_layers=1),
    "logits scaled": dataclasses.replace(SMALL, tying="output", scale_logits=True),
    "tied, logits scaled": dataclasses.replace(SMALL, scale_logits=True),
}


@pytest.fixture(scope="module")
def ctranslate2():
    return pytest.importorskip("ctranslate2", reason="needs ctranslate2")


@pytest.fixture(scope="module")
def verses():
    sources, targets = (read_lines(VERSES / f"dev.{language}")[:200] for language in ("en", "es"))
    return sources, targets, Tokenizer.train(sources + targets, 300)


def random_model(config):
    """Return a model whose parameters are all random; the padding's embedding is zero, as in every model."""
    torch.manual_seed(1)
    model = Transformer(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
            if "embedding" in name or name == "output.weight":
                parameter[config.pad_id].zero_()
    return model


def doubled(module, args, out):
    return out * 2


ALONE = "an export holds parameters alone"  # it would leave out what a module does beyond its parameters
CHANGES = {
    "adapted": lambda model: setattr(model, "output", Lora(model.output)),
    "hooked": lambda model: model.encoder.layers[1].self_attention.out_proj.register_forward_hook(doubled),
    "hooked elsewhere": lambda model: model.source_embedding.register_forward_hook(doubled),
    "parametrised": lambda model: nn.utils.parametrizations.weight_norm(model.decoder.layers[0].feed_forward.outer),
    "quantised": lambda model: torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, inplace=True),
}
# Models that are refused, as changes of a model or of its configuration.
REFUSED = [
    *((export, change, ALONE) for export in ("ctranslate2", "huggingface") for change in CHANGES),
    ("ctranslate2", {"window_size": (2, 2)}, "window_size; --to int8 holds every model"),
    ("ctranslate2", {"value_head_dim": 5}, "this model has two; --to int8 holds every model"),
    ("huggingface", {"norm_first": True}, "after each sub-layer: .*; --to ctranslate2 holds it, and `fastattn"),
    ("huggingface", {"positions": "learned"}, "has sinusoidal positions: .*; --to ctranslate2 holds it"),
    ("huggingface", {"window_size": (3, 3)}, "no restricted self-attention: .*; --to int8 holds every model"),
    ("huggingface", {"head_dim": 5, "value_head_dim": 5}, "heads of d_model / num_heads .*; --to ctranslate2 holds it"),
    ("huggingface", {"value_head_dim": 5}, "heads of d_model / num_heads features: .*; --to int8 holds every model"),
    ("huggingface", {"norm_eps": 1e-6}, "norm_eps=1e-06"),
]
EXPORTS = {"ctranslate2": to_ctranslate2, "huggingface": to_huggingface}


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.parametrize(("export", "change", "words"), REFUSED, ids=str)
def test_what_an_export_cannot_hold_is_refused(ctranslate2, verses, tmp_path, export, change, words):
    model = random_model(SMALL if words == ALONE else dataclasses.replace(SMALL, **change))
    if words == ALONE:
        CHANGES[change](model)
    refused(words, EXPORTS[export], model, verses[2], tmp_path / "model")
    assert not any(tmp_path.iterdir())


def test_the_help_names_the_presets_that_an_export_lacks(capsys):
    def is_for_marian(config):
        with contextlib.suppress(InputError):
            return expect_marian(config) is None

    configs = {name: TransformerConfig.preset(name, 300) for name in PRESETS}
    no_ctranslate2 = [name for name, config in configs.items() if ctranslate2_lacks(config)]
    no_marian = [name for name, config in configs.items() if not is_for_marian(config)]
    with pytest.raises(SystemExit):
        cli.main(["export", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert f"every preset except {' and '.join(no_ctranslate2)}; huggingface" in text
    others = [name for name in no_marian if name not in no_ctranslate2]
    assert f"every preset except these, {' and '.join(others)}; int8" in text


@pytest.fixture
def translator(ctranslate2, tmp_path):
    """Return a function that exports a model and returns CTranslate2's translator of it."""

    def export(model, tokenizer):
        to_ctranslate2(model, tokenizer, tmp_path / "model")
        return ctranslate2.Translator(str(tmp_path / "model"), compute_type="float32", inter_threads=1)

    return export


@pytest.mark.parametrize("variant", VARIANTS)
def test_ctranslate2_scores_as_we_do(translator, verses, variant):
    """CTranslate2 computes fastattn's log P for every token of real sentences."""
    sources, targets, tokenizer = verses
    model = random_model(VARIANTS[variant])
    source_ids, target_ids = tokenizer.encode(sources[:10]), tokenizer.encode(targets[:10])
    pieces = ([tokenizer.pieces(ids) for ids in side] for side in (source_ids, target_ids))
    results = translator(model, tokenizer).score_batch(*pieces)
    for found, source, target in zip(results, source_ids, target_ids, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*source, 2]]), torch.tensor([[1, *target]]))[0]
        wanted = logits.double().log_softmax(-1).gather(1, torch.tensor([*target, 2])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(found.log_probs).double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
def test_ctranslate2_translates_as_the_bundled_model(translator):
    """Greedy translations of 100 sentences in float32 agree from their beginning to their end. A beam of 4 ranks by
    another length penalty; with the one of docs/translate.md, nearly all agree."""
    model, tokenizer = checkpoint.load(checkpoint.PRETRAINED)
    sources = read_lines(VERSES / "test.en")[:100]
    exported, pieces = translator(model, tokenizer), [tokenizer.pieces(ids) for ids in tokenizer.encode(sources)]

    def theirs(**search):
        results = exported.translate_batch(pieces, max_decoding_length=400, **search)
        return [tokenizer.join(result.hypotheses[0]) for result in results]

    assert translate(model, tokenizer, sources, Search(beam=1)) == theirs(beam_size=1)
    ours = translate(model, tokenizer, sources, Search(beam=4))
    pairs = zip(ours, theirs(beam_size=4, length_penalty=0.5), strict=True)
    assert sum(our == their for our, their in pairs) >= 97


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", reason="needs transformers")


@pytest.mark.parametrize("variant", ["tied, logits scaled", *slow("paper", "logits scaled", "untied", "biases")])
def test_marian_computes_and_translates_as_we_do(transformers, verses, tmp_path, variant):
    """Logits of real sentences, padded, agree, and so do greedy translations of 40."""
    sources, targets, tokenizer = verses
    model = random_model(VARIANTS[variant])
    to_huggingface(model, tokenizer, tmp_path / "model")
    marian, loading = transformers.MarianMTModel.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(loading.values())
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    found = words(sources[:40], return_tensors="pt", padding=True)
    target = torch.tensor([[1, *tokenizer.encode(targets[:1])[0]]]).expand(40, -1)
    with torch.no_grad():
        logits = marian.eval()(**found, decoder_input_ids=target).logits
        torch.testing.assert_close(logits, model(found.input_ids, target), rtol=1e-4, atol=1e-4)
        pieces = marian.generate(**found, num_beams=1, max_new_tokens=30)
    ours = translate(model, tokenizer, sources[:40], Search(beam=1))
    for text, translation in zip(words.batch_decode(pieces, skip_special_tokens=True), ours, strict=True):
        assert translation.startswith(text)


STRANGE = [
    "", " ", "  \n", "a </s> b", "</s>", "</s >", "<pad>x</s>", "<unk>, <s>", "a<unk>b", "\u0436</s>\u0436\u0436",
    ">>es<< the king", ">>es<<", " >>es<< the king", ">>a b<< c<<", ">es<", "a >>es<< b", "x\u2585y", "\u2581",
    "a\u2581\u2581b", " a\nb\r\nc\td ", "\0a\0", "\uff11\uff0c\u00a0\u00bd", "e\u0301\ufeff\u200b", "<0x41>",
    "\ufdfa \ufffd", "\U0001f469\u200d\U0001f467",
]  # fmt: skip
PARTS = [
    *"ab <>/s\n\u2581\u2585\u0436\u0434\u6f22\u0301\uff21\u00df\u3000\U0001f467",
    "</s>", "<pad>", "<s>", "<unk>", "</s >", ">>", "<<", "  ",
]  # fmt: skip


@pytest.mark.parametrize("alphabet", ["latin", "cyrillic"])
def test_transformers_reads_every_text_as_text(transformers, verses, tmp_path, alphabet):
    """Ids agree for the names of pieces, language codes, odd spaces and unknown characters, on both sides, each with
    its normalization. Decoded texts agree too. The Cyrillic vocabulary has no character of "</s>"."""
    pairs = [(text, text) for text in ("\u043c\u0438\u0440", "\u0436\u0434\u0430\u0442\u044c \u043c\u0438\u0440\u0430")]
    if alphabet == "latin":
        pairs = [*zip(verses[0], verses[1], strict=True), ("a </s> b", "</s>pad \u2585")]
    config = dataclasses.replace(SMALL, vocab_size=300 if alphabet == "latin" else 20)
    tokenizer = Tokenizer.of_pairs(pairs, config.vocab_size, "nmt_nfkc", "identity")
    to_huggingface(random_model(config), tokenizer, tmp_path / "model")
    generator = random.Random(0)
    texts = [*STRANGE, *("".join(generator.choices(PARTS, k=1 + n % 12)) for n in range(2000)), *verses[0][:5]]
    for folder, is_target in ((tmp_path / "model", False), (tmp_path / "model" / "target", True)):
        words, wanted = transformers.AutoTokenizer.from_pretrained(folder), tokenizer.encode(texts, is_target)
        for text, found, ids in zip(texts, words(texts).input_ids, wanted, strict=True):
            assert found == [*ids, 2], text
        known = [ids for ids in wanted if UNK_ID not in ids]
        ended = [[1, *ids, 2, 0] for ids in known]
        assert words.batch_decode(ended, skip_special_tokens=True) == tokenizer.decode(known)


FILES = {
    "ctranslate2": ["model.bin", "tokenizer.model", "target.model"],
    "huggingface": ["model.safetensors", "config.json", "sentencepiece.bpe.model", "target/sentencepiece.bpe.model"],
    "int8": ["model.safetensors", "config.json", "tokenizer.model", "target.model"],
}


@pytest.mark.parametrize("program", FILES)
def test_the_command(ctranslate2, verses, tmp_path, capsys, program):
    tokenizer = Tokenizer.of_pairs(zip(*verses[:2], strict=True), 300, "nmt_nfkc", "identity")
    checkpoint.save(tmp_path / "run", 3, random_model(SMALL), tokenizer, {}, TrainingConfig())
    arguments = ["export", str(tmp_path / "run"), "--to", program, str(tmp_path / "out")]
    assert cli.main(arguments) == 0
    for name in FILES[program]:
        assert (tmp_path / "out" / name).is_file()
    assert cli.main(arguments) == 1
    assert "exists already" in capsys.readouterr().err
