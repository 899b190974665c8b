"""What benchmarks/step.py trains beside packed batches, the same mathematics on padded ones; and its shares of time."""

import importlib.util
import time
from pathlib import Path

import pytest
import torch

from fastattn import Transformer, TransformerConfig
from fastattn.translation.data import ParallelText, Sentences
from fastattn.translation.evaluate import smoothed_loss
from fastattn.translation.tokenizer import PAD_ID

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def step(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # it imports the other's batches
    specification = importlib.util.spec_from_file_location("step", ROOT / "benchmarks/step.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_shares_are_of_the_time_that_passes(step):
    """A floor of docs/design.md is a share of products: time between operations must lower it."""
    a = torch.ones(300, 300)

    def update(pause):
        for _ in range(5):
            a @ a
        time.sleep(pause)

    busy, idle = (step.shares(lambda pause=pause: update(pause), 3) for pause in (0.0, 0.3))
    for found in (busy, idle):
        assert sum(found.values()) == pytest.approx(1.0)
        assert found["matrix products"] > 0
    assert busy["matrix products"] > 0.2
    assert idle["matrix products"] < 0.2 < idle[step.REST]


def test_padded_batches_have_the_loss_of_packed_ones(step):
    model = Transformer(TransformerConfig(50, 16, 32, 2, 2, 2, dropout=0.0))
    lengths = (3, 9, 5), (7, 2, 4)
    text = ParallelText(*(Sentences.of([[4 + (7 * n + k) % 46 for k in range(n)] for n in side]) for side in lengths))
    batch = text.batch(torch.tensor([2, 0, 1]))
    packed = smoothed_loss(
        *model.projection(model.packed_features(batch.source, batch.target)), batch.labels, 0.1, PAD_ID, model.fixed_id
    )
    found = []
    for loss, nll, correct in (packed, step.PaddedLoss(model, 0.1)(batch, None)):
        found.append((loss.detach(), nll, correct, *torch.autograd.grad(loss, list(model.parameters()))))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)  # float32 sums of 16 tokens, of size 1


@pytest.mark.parametrize(
    ("ratio", "products", "words"),
    [
        (1.5, None, ""),
        (1.4, 0.5, "; 50% of ours are matrix products"),
        (1.2, 0.8, "; 80% of ours are matrix products, so the floor of 1.4 is met by the share of products"),
        (1.2, 0.79, "; 79% of ours are matrix products; misses the floor of 1.4"),
        (1.2, None, "; misses the floor of 1.4"),
    ],
)
def test_a_floor_that_is_missed_is_named(step, ratio, products, words):
    assert step.judged("bf16", ratio, products) == words
