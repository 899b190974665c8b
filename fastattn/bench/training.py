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

from .cases import BASE, Case

PAD = 0


class TorchTransformer(nn.Module):
    """torch.nn.Transformer with what it leaves to its user: tied embeddings, positions, masks, the output layer."""

    positions: Tensor  # (length, d_model), float32
    causal: Tensor  # (length, length), bool

    def __init__(self, config: fastattn.TransformerConfig, length: int = 1024) -> None:
        super().__init__()
        self.config, width = config, config.d_model
        self.embedding = nn.Embedding(config.vocab_size, width, padding_idx=PAD)
        # `forward` expects this deviation. With torch's, 1, most of the softmax would be subnormal, which slows some
        # processors.
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.dropout = nn.Dropout(config.dropout)
        sizes = width, config.num_heads, config.encoder_layers, config.decoder_layers, config.d_ff
        self.transformer = nn.Transformer(*sizes, config.dropout, batch_first=True, norm_first=config.norm_first)
        angle = torch.outer(torch.arange(length), 1e4 ** (-torch.arange(0, width, 2) / width))
        self.register_buffer("positions", torch.stack((angle.sin(), angle.cos()), -1).flatten(1))
        self.register_buffer("causal", nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.bool))

    def embed(self, tokens: Tensor) -> Tensor:
        scaled = self.embedding(tokens) * self.config.d_model**0.5
        return self.dropout(scaled + self.positions[: tokens.shape[1]])

    def features(self, source: Tensor, target: Tensor, **masks: Tensor) -> Tensor:
        """Return the decoder's output, (B, L, d_model), of tokens (B, L) that are padded on the right."""
        length = target.shape[1]
        return self.transformer(
            self.embed(source),
            self.embed(target),
            tgt_mask=self.causal[:length, :length],
            src_key_padding_mask=source == PAD,
            memory_key_padding_mask=source == PAD,
            tgt_is_causal=True,
            **masks,
        )

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return F.linear(self.features(source, target, tgt_key_padding_mask=target == PAD), self.embedding.weight)


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
    """Make both models, ours with dropout where torch.nn.Transformer has it: attention weights, feed-forward."""
    torch.manual_seed(0)
    config = fastattn.TransformerConfig(**BASE, dropout=case.dropout)
    own = replace(config, attention_dropout=case.dropout, ffn_dropout=case.dropout)
    return {"ours": fastattn.Transformer(own), "torch": TorchTransformer(config, case.shape[1])}


def contestants(case: Case, device: str = "cpu", *, compiled: bool = False) -> dict[str, Callable[[], Any]]:
    models = _models(case)
    for model in models.values():
        if compiled:
            model.compile(dynamic=False)
    return {name: _step(case, model, device) for name, model in models.items()}
