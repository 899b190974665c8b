"""Pictures of a run: its loss curve, and where a translation attends."""

from pathlib import Path

import torch
from torch import Tensor

from fastattn.translation.errors import require
from fastattn.translation.model import AttentionWeights, Transformer
from fastattn.translation.tokenizer import Tokenizer


def loss_curve(rows: list[dict[str, float]], path: str | Path) -> None:
    """Training and validation loss over updates, from the rows of ``metrics.jsonl``, as a PNG."""
    figure = require("matplotlib.figure").Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    valid = [row for row in rows if "valid_loss" in row]
    axes.plot([row["step"] for row in rows], [row["loss"] for row in rows], label="training, smoothed labels")
    axes.plot([row["step"] for row in valid], [row["valid_loss"] for row in valid], "o-", label="validation")
    axes.set(xlabel="update", ylabel="loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


@torch.no_grad()
def cross_attention(
    model: Transformer, tokenizer: Tokenizer, source: str, target: str
) -> tuple[Tensor, list[str], list[str]]:
    """How a translation attends to its source: (T, S) probabilities, the mean of the last layer's heads, and
    the pieces that its rows predict and its columns read."""
    end, begin = model.config.eos_id, model.config.bos_id
    source_ids, target_ids = tokenizer.encode([source, target])
    weights = AttentionWeights()
    columns, rows = [*source_ids, end], [*target_ids, end]
    model(torch.tensor([columns]), torch.tensor([[begin, *target_ids]]), weights=weights)
    return weights.cross[-1][0].mean(0), tokenizer.pieces(rows), tokenizer.pieces(columns)


def heat_map(weights: Tensor, rows: list[str], columns: list[str], path: str | Path) -> None:
    """Probabilities (rows, columns) as a PNG with a label for each."""
    size = (2 + 0.3 * len(columns), 1.5 + 0.25 * len(rows))
    figure = require("matplotlib.figure").Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(weights.float().cpu().numpy(), cmap="viridis", vmin=0.0, aspect="auto")
    axes.set_xticks(range(len(columns)), columns, rotation=90)
    axes.set_yticks(range(len(rows)), rows)
    axes.set(xlabel="source", ylabel="translation")
    figure.colorbar(image, label="attention probability, mean of the last layer's heads")
    figure.savefig(path, dpi=150)
