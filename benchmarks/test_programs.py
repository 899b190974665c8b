"""Training steps of existing models, forward and backward.

A patched model is compared with the same model before patching, and our base model with jadore801120's.
"""

import copy
import dataclasses
import functools
import time
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from public_models import jadore
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fastattn
from fastattn.bench import contest, report
from fastattn.bench.cases import PROGRAMS
from fastattn.bench.timer import Ratio

VOCABULARY, PAD = 8000, 0


def token_loss(model, smoothing=0.0):
    """Return the loss of a model on 32 sentences of 48 tokens."""
    generator = torch.Generator().manual_seed(1)
    source, target = (torch.randint(4, VOCABULARY, (32, length), generator=generator) for length in (48, 49))
    logits = model(source, target[:, :-1]).flatten(0, -2)
    return F.cross_entropy(logits.float(), target[:, 1:].flatten(), label_smoothing=smoothing)


def patched(model):
    original = copy.deepcopy(model)
    fastattn.patch(model)
    return {"ours": model, "torch": original}


def patched_jadore():
    return patched(jadore.Transformer(VOCABULARY, VOCABULARY, PAD, PAD)), token_loss


def patched_encoder():
    """torch.nn.TransformerEncoder on 16 sequences of length 512."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.1, batch_first=True)
    x = torch.randn(16, 512, 512)
    return patched(nn.TransformerEncoder(layer, 6)), lambda model: model(x).float().square().mean()


def beside_jadore():
    config = fastattn.TransformerConfig.preset("base", VOCABULARY, attention_dropout=0.1)
    models = {"ours": fastattn.Transformer(config), "torch": jadore.Transformer(VOCABULARY, VOCABULARY, PAD, PAD)}
    return models, functools.partial(token_loss, smoothing=0.1)


STEPS = dict(zip(PROGRAMS, (patched_jadore, patched_encoder, beside_jadore, beside_jadore), strict=True))


# Beginnings of the names of torch's operations. All others are the rest.
PARTS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm"),
    "attention": ("fastattn_cpu::attention", "fastattn_cpu::varlen_attention"),
    "softmax and sums of the loss": ("fastattn_cpu::softmax_dropout",),
    "dropout, residual, LayerNorm": ("fastattn_cpu::",),
    "copies, most of them casts of autocast's": ("aten::copy_", "aten::cat"),
    "embeddings": ("aten::embedding", "aten::index_select"),
}
REST = "other elementwise operations, Python"


def shares(call, repeats):
    """Return the share of each of PARTS in the time of some calls. An operation counts without those that it calls."""
    call()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        total = 1e6 * (time.perf_counter() - started)
    spent = Counter()
    for event in found.key_averages():
        part = next((part for part, names in PARTS.items() if event.key.startswith(names)), REST)
        spent[part] += event.self_cpu_time_total
    spent[REST] = total - sum(spent[part] for part in PARTS)  # the time between operations too
    return {part: spent[part] / total for part in (*PARTS, REST)}


@pytest.mark.parametrize("name", STEPS)
def test_step(name, judge):
    torch.manual_seed(0)
    models, loss = STEPS[name]()
    dtype = "bfloat16" if "bfloat16" in name else "float32"

    def step(model):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            value = loss(model)
        return torch.autograd.grad(value, list(model.parameters()), allow_unused=True)

    functions = {contestant: functools.partial(step, model) for contestant, model in models.items()}
    result = contest.measured(name, functions, budget=10.0, rounds=(4, 8))
    rows = []
    if STEPS[name] is beside_jadore:  # matrix products are torch's in both: they are the limit
        spent = shares(functions["ours"], 2)
        products = spent["matrix products"]
        result = dataclasses.replace(result, share=Ratio(products, products, products), limit="matrix products")
        rows = [report.Row(case=f"{name}: {part}", share=share) for part, share in spent.items()]
    judge(result, PROGRAMS[name], dtype, rows)
