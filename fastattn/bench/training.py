"""One training step of the base model, forward and backward without the optimiser, beside torch.nn.Transformer's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastattn
from fastattn.bench.cases import BASE, Case

PAD = 0
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Allowed difference of the loss and of all gradients together, relative, between ours and the reference with the same
seeds. Rounding differs in some 30 sub-layers one after the other, each by a few units in the last place."""


class TorchTransformer(nn.Module):
    """torch.nn.Transformer with what it leaves to its user: tied embeddings, positions, masks, the output layer."""

    def __init__(self, dropout: float, length: int) -> None:
        super().__init__()
        width = BASE["d_model"]
        self.embedding = nn.Embedding(BASE["vocab_size"], width, padding_idx=PAD)
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


def _step(case: Case, model: nn.Module) -> Callable[[], tuple[Tensor, tuple[Tensor, ...]]]:
    generator = torch.Generator().manual_seed(1)
    sentences, length = case.shape
    source, target = (
        torch.randint(3, BASE["vocab_size"], (sentences, n), generator=generator) for n in (length, length + 1)
    )
    parameters = list(model.parameters())

    def precision() -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if case.dtype == torch.bfloat16 else nullcontext()

    def step() -> tuple[Tensor, tuple[Tensor, ...]]:
        with precision():
            logits = model(source, target[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), label_smoothing=0.1)
        return loss.detach(), torch.autograd.grad(loss, parameters)

    return step


def contestants(case: Case) -> dict[str, Callable[[], Any]]:
    torch.manual_seed(0)
    return {"ours": _step(case, _ours(case)), "torch": _step(case, TorchTransformer(case.dropout, case.shape[1]))}


def check(case: Case) -> list[str]:
    """What of the loss and the gradients differs between ours and the reference by more than `TOLERANCE`."""
    torch.manual_seed(0)
    step = _step(case, _ours(case))
    torch.manual_seed(1)
    loss, gradients = step()
    torch.manual_seed(1)
    with fastattn.backend("reference"):
        expected_loss, expected = step()
    gap = _norm([a - b for a, b in zip(gradients, expected, strict=True)])
    differences = {"loss": (loss - expected_loss).abs() / expected_loss, "gradient": gap / _norm(expected)}
    return [
        f"{name} is off by {difference:.2g} of its size, allowed {TOLERANCE[case.dtype]:.2g}"
        for name, difference in differences.items()
        if not difference <= TOLERANCE[case.dtype]
    ]


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([tensor.norm() for tensor in tensors]).norm()
