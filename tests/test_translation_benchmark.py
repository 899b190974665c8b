"""What benchmarks/translation.py trains beside ours: the same mathematics in torch's modules, and its table."""

import dataclasses
import importlib.util
import itertools
import json
import types
from pathlib import Path

import pytest
import torch

from fastattn import TransformerConfig
from fastattn.translation.data import Sentences
from fastattn.translation.evaluate import smoothed_loss
from fastattn.translation.tokenizer import PAD_ID

ROOT = Path(__file__).resolve().parent.parent
specification = importlib.util.spec_from_file_location("translation", ROOT / "benchmarks/translation.py")
translation = importlib.util.module_from_spec(specification)
specification.loader.exec_module(translation)


@pytest.fixture
def model():
    config = TransformerConfig(50, d_model=16, d_ff=32, num_heads=2, encoder_layers=1, decoder_layers=1, dropout=0.0)
    enabled = torch.backends.mha.get_fastpath_enabled()  # which it turns off in the whole process
    yield translation.TorchTransformer(dataclasses.replace(config, norm_first=True))
    torch.backends.mha.set_fastpath_enabled(enabled)


@pytest.fixture
def text():
    ids = ([[4 + (7 * n + k) % 46 for k in range(n)] for n in range(*lengths)] for lengths in ((3, 63), (70, 10, -1)))
    return translation.OfLikeLengths(*map(Sentences.of, ids))


def test_torchs_loss_is_ours(model, text):
    """Value and gradients, padding and smoothing included: the two are trained towards the same."""
    batch = text.batch(torch.tensor([5, 17, 30]))
    parameters = list(model.parameters())

    def ours():
        features = model.packed_features(batch.source, batch.target)
        return smoothed_loss(*model.projection(features), batch.labels, 0.1, PAD_ID)[0]

    def torchs():
        return translation.TorchLoss(model, 0.1)(batch, None)[0]

    (value, grads), (wanted, wanted_grads) = (
        (loss.detach(), torch.autograd.grad(loss, parameters)) for loss in (ours(), torchs())
    )
    torch.testing.assert_close(value.float(), wanted)
    torch.testing.assert_close(grads, wanted_grads, rtol=1e-4, atol=1e-5)  # float32 sums of 160 tokens, of size 1
    assert len(grads) == len(parameters) > 20


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_batches_of_like_lengths(text, seed):
    """Every pair once; within the budget; less padding than in the order of the text."""
    budget = 600
    found = list(text.batches(budget, seed and torch.Generator().manual_seed(seed)))
    assert sorted(torch.cat(found).tolist()) == list(range(60))

    def padding(batches):
        filled = rows = 0
        for index in batches:
            batch = text.batch(index)
            sides = [translation.padded(side.tokens, side) for side in (batch.source, batch.target)]
            assert max(side.numel() for side in sides) <= budget
            filled, rows = filled + batch.filled, rows + sum(side.numel() for side in sides)
        return 1 - filled / rows

    assert padding(found) < padding(torch.randperm(60, generator=torch.Generator().manual_seed(3)).split(6)) / 2


def test_every_recorded_run_has_a_row():
    paths = sorted((ROOT / "benchmarks/results").glob("translation-*.json"))
    recorded = [json.loads(path.read_text()) for path in paths]
    lines = translation.table(recorded).splitlines()
    assert len(lines) == 2 + sum(len(data["runs"]) for data in recorded)
    assert len({line.count("|") for line in lines}) == 1
    assert "\n".join(lines) in (ROOT / "README.md").read_text()


def test_programs_train_by_turns(monkeypatch):
    clock, seen = itertools.count(), []
    monkeypatch.setattr(translation, "TURN", 3)
    monkeypatch.setattr(translation, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))

    def program(name, updates):
        for _ in range(updates):
            seen.append(name)
            yield
        return {"updates": updates}

    found = translation.by_turns({"a": program("a", 5), "b": program("b", 2)})
    assert list(found.items()) == [("a", {"updates": 5}), ("b", {"updates": 2})]
    assert "".join(seen) == "aabbaaa"
