"""Write the table of presets of docs/training.md: the fields that each changes, its parameters and the paper's."""

from pathlib import Path
from typing import Any

import torch

from fastattn import Transformer, TransformerConfig
from fastattn.bench import report
from fastattn.translation.config import PRESETS

PAGE = Path(__file__).resolve().parent.parent / "docs/training.md"
VOCABULARIES = (37_000, 41_200)


def table() -> str:
    """Return the table in Markdown, with one row per preset."""
    sizes = [f"at {size:,} pieces" for size in VOCABULARIES]
    rows = [["preset", "instead of `base`'s", *sizes, "the paper's"]]
    for name, preset in PRESETS.items():
        changes: dict[str, Any] = {**preset.model, **preset.training}
        words = ", ".join(f"`{field}` {value}" for field, value in changes.items())
        counts = [f"{parameters(name, size) / 1e6:.1f} M" for size in VOCABULARIES]
        rows.append([f"`{name}`", words, *counts, f"{preset.paper} M" if preset.paper else ""])
    return report.markdown(rows)


def parameters(name: str, vocab_size: int) -> int:
    with torch.device("meta"):
        model = Transformer(TransformerConfig.preset(name, vocab_size))
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    report.insert(PAGE, "presets", table())
