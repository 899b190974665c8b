"""What benchmarks/step.py compares: packed batches hold the mathematics of padded ones."""

import importlib.util
from pathlib import Path

import pytest
import torch

from fastattn import Transformer, TransformerConfig
from fastattn.translation.evaluate import smoothed_loss
from fastattn.translation.tokenizer import PAD_ID

ROOT = Path(__file__).resolve().parent.parent
specification = importlib.util.spec_from_file_location("step", ROOT / "benchmarks/step.py")
step = importlib.util.module_from_spec(specification)
specification.loader.exec_module(step)


@pytest.mark.parametrize("multiple", [1, 16])
@pytest.mark.parametrize("norm_first", [True, False])
def test_packed_batches_have_the_loss_and_gradients_of_padded_ones(norm_first, multiple):
    model = Transformer(TransformerConfig(50, 16, 32, 2, 2, 2, dropout=0.0, norm_first=norm_first))
    text = step.text_of(
        tuple([[4 + (7 * n + k) % 46 for k in range(n)] for n in lengths] for lengths in ((3, 9, 5), (7, 2, 4)))
    )
    index = torch.tensor([2, 0, 1])
    padded, packed = text.batch(index), step.packed_batch(text, index, multiple)
    features = model.features(padded.source, padded.target, padded.source_lengths, padded.target_lengths)
    parameters = list(model.parameters())
    found = []
    for rows, labels in (
        (features.flatten(0, 1), padded.labels.flatten()),
        (step.packed_features(model, packed, None), packed["labels"]),
    ):
        loss = smoothed_loss(*model.projection(rows), labels, 0.1, PAD_ID)[0]
        found.append((loss.detach(), *torch.autograd.grad(loss, parameters)))
    assert len(packed["labels"]) % multiple == 0
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)  # float32 sums of 19 tokens, of size 1
