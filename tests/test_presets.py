"""Tests of the presets against Table 3 of "Attention Is All You Need" as printed, and of a run's configuration."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from conftest import refused
from test_model import parameters

import fastattn_command as cli
import presets
from fastattn import Transformer, TransformerConfig
from fastattn.translation import checkpoint
from fastattn.translation.config import PRESETS, TrainingConfig, from_json
from fastattn.translation.prepare import CORPORA

# N, d_model, d_ff, h, d_k, d_v, P_drop, eps_ls, thousands of updates, millions of parameters. A line's blanks have the
# values of the table's first line.
BASE = (6, 512, 2048, 8, 64, 64, 0.1, 0.1, 100, 65)
COLUMNS = ("N", "d_model", "d_ff", "h", "d_k", "d_v", "P_drop", "eps_ls", "steps", "params")
TABLE = {
    "base": {},
    "A-h1": {"h": 1, "d_k": 512, "d_v": 512},
    "A-h4": {"h": 4, "d_k": 128, "d_v": 128},
    "A-h16": {"h": 16, "d_k": 32, "d_v": 32},
    "A-h32": {"h": 32, "d_k": 16, "d_v": 16},
    "B-dk16": {"d_k": 16, "params": 58},
    "B-dk32": {"d_k": 32, "params": 60},
    "C-N2": {"N": 2, "params": 36},
    "C-N4": {"N": 4, "params": 50},
    "C-N8": {"N": 8, "params": 80},
    "C-dmodel256": {"d_model": 256, "d_k": 32, "d_v": 32, "params": 28},
    "C-dmodel1024": {"d_model": 1024, "d_k": 128, "d_v": 128, "params": 168},
    "C-dff1024": {"d_ff": 1024, "params": 53},
    "C-dff4096": {"d_ff": 4096, "params": 90},
    "D-Pdrop0.0": {"P_drop": 0.0},
    "D-Pdrop0.2": {"P_drop": 0.2},
    "D-eps0.0": {"eps_ls": 0.0},
    "D-eps0.2": {"eps_ls": 0.2},
    "E-learned": {},
    "big": {"d_model": 1024, "d_ff": 4096, "h": 16, "P_drop": 0.3, "steps": 300, "params": 213},
}


def test_every_row_is_there():
    assert {"tiny", *TABLE} == PRESETS.keys()


@pytest.mark.parametrize("name", TABLE)
def test_the_papers_hyper_parameters(name):
    wanted = {**dict(zip(COLUMNS, BASE, strict=True)), **TABLE[name]}
    model, training = TransformerConfig.preset(name, 37000), TrainingConfig.of_preset(name)
    with torch.device("meta"):
        attention = Transformer(model).decoder.layers[-1].cross_attention
    assert (model.encoder_layers, model.decoder_layers) == (wanted["N"], wanted["N"])
    for field, column in (("d_model", "d_model"), ("d_ff", "d_ff"), ("num_heads", "h"), ("dropout", "P_drop")):
        assert getattr(model, field) == wanted[column]
    assert (attention.head_dim, attention.value_head_dim) == (wanted["d_k"], wanted["d_v"])
    assert model.positions == ("learned" if name == "E-learned" else "sinusoidal")
    assert (training.label_smoothing, training.max_steps) == (wanted["eps_ls"], 1000 * wanted["steps"])
    # Values of sections 3.4, 5.1, 5.3, 5.4 and 6.1 are the same in every row.
    assert (model.tying, model.scale_embeddings, model.norm_first, model.attention_bias) == ("all", True, False, False)
    assert (model.output_bias, model.scale_logits, model.attention_dropout, model.ffn_dropout) == (False, False, 0, 0)
    assert (training.batch_tokens, training.warmup, training.rate, training.clip_norm) == (25000, 4000, 1.0, None)
    assert training.keep == (20 if name == "big" else 5)
    # The paper gives no count in rows that change no matrix, nor in (A), where h * d_k stays.
    vocab_size, margin = (37_000, 2e6) if name == "big" else (41_200, 1e6)
    assert abs(parameters(TransformerConfig.preset(name, vocab_size)) - 1e6 * wanted["params"]) < margin
    assert PRESETS[name].paper == (65 if name == "base" else TABLE[name].get("params"))


def test_the_page_is_current():
    page = (Path(presets.__file__).parent.parent / "docs/training.md").read_text()
    (shown,) = re.findall(r"<!-- presets:begin -->\n(.*)\n<!-- presets:end -->", page, re.DOTALL)
    assert shown == presets.table(), "run `make presets`"


def test_a_configuration_comes_back():
    model = TransformerConfig.preset("B-dk16", 300, window_size=(3, -1))
    training = dataclasses.replace(TrainingConfig.of_preset("D-eps0.2"), clip_norm=1.5, max_minutes=3, bleu_every=7)
    assert from_json(model.to_json(training)) == (model, training)
    assert from_json(model.to_json()) == (model, None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"label_smoothing": 1}, r"label_smoothing is 1, expected a number in \[0, 1\)"),
        ({"clip_norm": 0}, "clip_norm is 0, expected a positive number"),
        ({"rate": "fast"}, "rate is 'fast', expected a positive number"),
        ({"rate": 10**400}, "rate is 10{400}, expected a positive number"),
        ({"warmup": 2.5}, "warmup is 2.5, expected an integer from 1"),
        ({"keep": None}, "keep is None, expected an integer from 1"),
        ({"bleu_every": 0}, "bleu_every is 0, expected an integer from 1"),
        ({"precision": 16}, "precision is 16, expected a name"),
        ({"batch_tokens": 3, "micro_batches": 4}, "batch_tokens is 3, expected at least one for each of the 4 micro"),
        ({"momentum": 0.9}, r"the training configuration knows only .*; given \['momentum'\]"),
        ([], "the training configuration knows only .*; given list"),
    ],
)
def test_bad_training_configurations(tmp_path, fields, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"vocab_size": 200, "training": fields}))
    refused(f"cannot use {path}: {message}", checkpoint.read_config, path)


def test_the_command_knows_every_preset_and_corpus():
    """The command has its own lists of presets and corpora, since the modules that define them load torch."""
    assert tuple(PRESETS) == cli.PRESETS
    assert tuple(CORPORA) == cli.CORPORA
