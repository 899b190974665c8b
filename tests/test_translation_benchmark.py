"""What benchmarks/translation.py trains beside ours: the same mathematics in torch's modules, and its table."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from fastattn import TransformerConfig
from fastattn.translation.data import Batch
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


def test_torchs_loss_is_ours(model):
    """Value and gradients, padding and smoothing included: the two are trained towards the same."""
    ids = torch.randint(4, 50, (3, 9))
    lengths = torch.tensor([9, 4, 7])
    labels = ids.roll(-1, 1).masked_fill(torch.arange(9) >= lengths[:, None], PAD_ID)
    batch = Batch(ids, lengths, ids, lengths, labels, int(lengths.sum()))
    parameters = list(model.parameters())

    def ours():
        features = model.features(ids, ids, lengths, lengths)
        return smoothed_loss(*model.projection(features.flatten(0, 1)), labels.flatten(), 0.1, PAD_ID)[0]

    def torchs():
        return translation.TorchLoss(model, 0.1)(batch, None)[0]

    (value, grads), (wanted, wanted_grads) = (
        (loss.detach(), torch.autograd.grad(loss, parameters)) for loss in (ours(), torchs())
    )
    torch.testing.assert_close(value.float(), wanted)
    torch.testing.assert_close(grads, wanted_grads, rtol=1e-4, atol=1e-5)  # float32 sums of 20 tokens, of size 1
    assert len(grads) == len(parameters) > 20


def test_every_recorded_run_has_a_row():
    paths = sorted((ROOT / "benchmarks/results").glob("translation-*.json"))
    recorded = [json.loads(path.read_text()) for path in paths]
    lines = translation.table(recorded).splitlines()
    assert len(lines) == 2 + sum(len(data["runs"]) for data in recorded)
    assert len({line.count("|") for line in lines}) == 1
    assert "\n".join(lines) in (ROOT / "README.md").read_text()
