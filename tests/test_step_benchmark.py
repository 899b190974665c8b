"""What benchmarks/step.py trains beside packed batches: the same mathematics on padded ones."""

import importlib.util
from pathlib import Path

import torch

from fastattn import Transformer, TransformerConfig
from fastattn.translation.data import ParallelText, Sentences
from fastattn.translation.evaluate import smoothed_loss
from fastattn.translation.tokenizer import PAD_ID

ROOT = Path(__file__).resolve().parent.parent


def test_padded_batches_have_the_loss_of_packed_ones(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # it imports the other's batches
    specification = importlib.util.spec_from_file_location("step", ROOT / "benchmarks/step.py")
    step = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(step)
    model = Transformer(TransformerConfig(50, 16, 32, 2, 2, 2, dropout=0.0))
    lengths = (3, 9, 5), (7, 2, 4)
    text = ParallelText(*(Sentences([[4 + (7 * n + k) % 46 for k in range(n)] for n in side]) for side in lengths))
    batch = text.batch(torch.tensor([2, 0, 1]))
    packed = smoothed_loss(
        *model.projection(model.packed_features(batch.source, batch.target)), batch.labels, 0.1, PAD_ID
    )
    found = []
    for loss, nll, correct in (packed, step.PaddedLoss(model, 0.1)(batch, None)):
        found.append((loss.detach(), nll, correct, *torch.autograd.grad(loss, list(model.parameters()))))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)  # float32 sums of 16 tokens, of size 1
