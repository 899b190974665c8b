"""Training steps of models that exist, forward and backward, patched beside the same model as it was."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from public_models import jadore
from torch import nn

import fastattn
from fastattn.bench import contest
from fastattn.bench.cases import PATCHED
from fastattn.bench.timer import interleave

VOCABULARY, PAD = 8000, 0


def jadore_step():
    """The base model on 32 sentences of 48 tokens."""
    source, target = torch.randint(1, VOCABULARY, (32, 48)), torch.randint(1, VOCABULARY, (32, 49))

    def loss(model):
        return F.cross_entropy(model(source, target[:, :-1]).float(), target[:, 1:].flatten())

    return jadore.Transformer(VOCABULARY, VOCABULARY, PAD, PAD), loss


def encoder_step():
    """torch.nn.TransformerEncoder on 16 sequences of length 512."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.1, batch_first=True)
    x = torch.randn(16, 512, 512)
    return nn.TransformerEncoder(layer, 6), lambda model: model(x).float().square().mean()


STEPS = dict(zip(PATCHED, (jadore_step, encoder_step), strict=True))


@pytest.mark.parametrize("name", STEPS)
def test_patched_step(name, judge):
    torch.manual_seed(0)
    original, loss = STEPS[name]()
    patched = copy.deepcopy(original)
    fastattn.patch(patched)

    def step(model):
        def run():
            with torch.autocast("cpu", torch.bfloat16):
                value = loss(model)
            return torch.autograd.grad(value, list(model.parameters()), allow_unused=True)

        return run

    for _ in range(contest.ATTEMPTS):
        timing = interleave({"ours": step(patched), "torch": step(original)}, budget=10.0, rounds=(4, 8))
        result = contest.Result(
            name=name,
            seconds={contestant: timing.seconds(contestant) for contestant in timing.samples},
            ratios={"torch": timing.ratio("torch", "ours")},
            floor=PATCHED[name],
        )
        result = replace(result, disturbed=contest.disturbance(result, timing.others))
        if not result.disturbed:
            break
    judge(result)
