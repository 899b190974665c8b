"""One training step of the base model, forward and backward without the optimiser, and torch.nn.Transformer's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastattn
from fastattn.bench.cases import BASE, Case

PAD = 0
CHECKED_SENTENCES = 4
RELU_FLIPS = 0.02
"""Allowed beside rounding, relative: a unit whose input is within rounding of zero may fall on either side of it, and
one such unit in the last layer moves the gradients of the four sentences by 0.006 of their size."""


class TorchTransformer(nn.Module):
    """torch.nn.Transformer with what it leaves to its user: tied embeddings, positions, masks, the output layer."""

    def __init__(self, dropout: float, length: int) -> None:
        super().__init__()
        width = BASE["d_model"]
        self.embedding = nn.Embedding(BASE["vocab_size"], width, padding_idx=PAD)
        # Of the deviation that `forward` expects. Of torch's, 1, the softmax would be subnormal for the most part, and
        # slower on some processors.
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.dropout = nn.Dropout(dropout)
        self.transformer = nn.Transformer(
            width,
            BASE["num_heads"],
            BASE["encoder_layers"],
            BASE["decoder_layers"],
            BASE["d_ff"],
            dropout,
            batch_first=True,
        )
        angle = torch.outer(torch.arange(length), 1e4 ** (-torch.arange(0, width, 2) / width))
        self.register_buffer("positions", torch.stack((angle.sin(), angle.cos()), -1).flatten(1))
        self.register_buffer("causal", nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.bool))

    def embed(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.embedding(tokens) * BASE["d_model"] ** 0.5 + self.positions)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        out = self.transformer(
            self.embed(source),
            self.embed(target),
            tgt_mask=self.causal,
            src_key_padding_mask=source == PAD,
            tgt_key_padding_mask=target == PAD,
            memory_key_padding_mask=source == PAD,
            tgt_is_causal=True,
        )
        return F.linear(out, self.embedding.weight)


def _ours(case: Case) -> nn.Module:
    """Dropout where torch.nn.Transformer has it: on the attention weights and inside the feed-forward network too."""
    dropout = case.dropout
    config = fastattn.TransformerConfig(**BASE, dropout=dropout, attention_dropout=dropout, ffn_dropout=dropout)
    return fastattn.Transformer(config)


def _step(case: Case, model: nn.Module, device: str = "cpu") -> Callable[[], tuple[Tensor, tuple[Tensor, ...]]]:
    generator = torch.Generator().manual_seed(1)
    sentences, length = case.shape
    source, target = (
        torch.randint(3, BASE["vocab_size"], (sentences, n), generator=generator).to(device)
        for n in (length, length + 1)
    )
    parameters = list(model.to(device).parameters())

    def precision() -> AbstractContextManager[Any]:
        return torch.autocast(device, torch.bfloat16) if case.dtype == torch.bfloat16 else nullcontext()

    def step() -> tuple[Tensor, tuple[Tensor, ...]]:
        with precision():
            logits = model(source, target[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), label_smoothing=0.1)
        return loss.detach(), torch.autograd.grad(loss, parameters)

    return step


def _models(case: Case) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {"ours": _ours(case), "torch": TorchTransformer(case.dropout, case.shape[1])}


def contestants(case: Case, device: str = "cpu") -> dict[str, Callable[[], Any]]:
    return {name: _step(case, model, device) for name, model in _models(case).items()}


def compiled(case: Case, device: str) -> dict[str, Callable[[], Any]]:
    """The contestants with torch.compile."""
    models = _models(case)
    for model in models.values():
        model.compile(dynamic=False)
    return {name: _step(case, model, device) for name, model in models.items()}


def check(case: Case) -> list[str]:
    """What of the loss and the gradients is further from the float32 reference than twice the reference in the case's
    precision, all with the same seeds; a few sentences, all gradients together."""
    case = replace(case, shape=(CHECKED_SENTENCES, case.shape[1]))

    def results(backend: str | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        step = _step(replace(case, dtype=dtype), _ours(case))
        with nullcontext() if backend is None else fastattn.backend(backend):
            loss, gradients = step()
        return loss, torch.cat([gradient.flatten() for gradient in gradients])

    exact = results("reference", torch.float32)
    plain = exact if case.dtype == torch.float32 else results("reference", case.dtype)
    found = []
    for name, ours, reference, truth in zip(("loss", "gradient"), results(None, case.dtype), plain, exact, strict=True):
        error, own = ((value - truth).norm() / truth.norm() for value in (ours, reference))
        if not error <= 2 * own + RELU_FLIPS:
            found.append(f"{name} is off by {error:.2g} of its size, allowed {2 * own + RELU_FLIPS:.2g}")
    return found
