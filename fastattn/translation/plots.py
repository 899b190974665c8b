"""Pictures of a run: its loss curve, and the attention of a translation."""

import dataclasses
import math

import torch
from torch import Tensor

from fastattn import figures
from fastattn.errors import InputError
from fastattn.files import StrPath
from fastattn.translation.config import TransformerConfig
from fastattn.translation.model import AttentionWeights, Transformer
from fastattn.translation.tokenizer import Tokenizer

KINDS = [field.name for field in dataclasses.fields(AttentionWeights)]  # encoder, decoder, cross
HEAD = (3.2, 3.2)  # inches per head: four of them are legible on a phone, fill the width of a page
LABELS = (17, 19)  # number of a head's columns and rows that have room for a label


def loss_curve(rows: list[dict[str, float]], path: StrPath) -> None:
    """Draw the cross-entropy of training and validation, without label smoothing, over the updates."""
    picture = figures.figure(7, 4)
    axes = picture.add_subplot()
    valid = [row for row in rows if "valid_loss" in row]
    axes.plot([row["step"] for row in rows], [math.log(row["perplexity"]) for row in rows], label="training")
    axes.plot([row["step"] for row in valid], [row["valid_loss"] for row in valid], "o-", label="validation")
    axes.set(xlabel="update", ylabel="cross-entropy (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figures.save(picture, path)


@dataclasses.dataclass(frozen=True)
class Heads:
    """Attention of each head of a layer: probabilities (H, rows, columns), and the pieces of rows and columns."""

    weights: Tensor
    rows: list[str]
    columns: list[str]


@torch.no_grad()
def attention_heads(
    model: Transformer, tokenizer: Tokenizer, source: str, target: str, kind: str = "cross", layer: int | None = None
) -> Heads:
    """Compute the attention of a layer's heads while ``model`` reads ``source`` and predicts ``target``.

    The rows are the pieces of the source ("encoder"), or the predicted pieces ("decoder", "cross"). The columns are the
    pieces that are attended to: those of the source, or those of the target so far, begin included ("decoder").

    Args:
        kind: "encoder", "decoder" or "cross".
        layer: counted from 1; by default the last.

    Raises:
        InputError: the kind is another one, or the model lacks the layer.
    """
    layer = check_layer(model.config, kind, layer)
    begin, end = model.config.bos_id, model.config.eos_id
    source_ids, target_ids = tokenizer.encode([source])[0], tokenizer.encode([target], target=True)[0]
    read, seen, predicted = [*source_ids, end], [begin, *target_ids], [*target_ids, end]
    weights = AttentionWeights()
    device = model.device
    model(torch.tensor([read], device=device), torch.tensor([seen], device=device), weights=weights)
    rows, columns = {"encoder": (read, read), "decoder": (predicted, seen), "cross": (predicted, read)}[kind]
    of_layer = getattr(weights, kind)[layer - 1][0].float().cpu()
    return Heads(of_layer, tokenizer.pieces(rows), tokenizer.pieces(columns))


def heat_maps(heads: Heads, path: StrPath, title: str) -> None:
    """Draw one map per head, all on one scale, as a PNG or SVG."""
    number = len(heads.weights)
    high = math.isqrt(number)
    wide = math.ceil(number / high)
    picture = figures.figure(HEAD[0] * max(wide, 2), HEAD[1] * high)
    grid = picture.subplots(high, wide, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[number:]:
        axes.set_axis_off()
    image = None
    for head, (axes, weights) in enumerate(zip(grid.flat, heads.weights.numpy(), strict=False), 1):
        image = axes.imshow(weights, cmap="viridis", vmin=0.0, vmax=float(heads.weights.max()), aspect="auto")
        axes.set_title(f"head {head}", fontsize=10)
        axes.tick_params(labelbottom=head + wide > number, labelleft=head % wide == 1 or wide == 1)
        for axis, pieces, most, turn in (
            (axes.xaxis, heads.columns, LABELS[0], 90),
            (axes.yaxis, heads.rows, LABELS[1], 0),
        ):
            every = math.ceil(len(pieces) / most)
            axis.set_ticks(range(0, len(pieces), every), pieces[::every], rotation=turn, fontsize=9, parse_math=False)
    picture.suptitle(title, fontsize=11)
    picture.colorbar(image, ax=grid, label="attention probability", fraction=0.03)
    figures.save(picture, path, dpi=100)


def check_layer(config: TransformerConfig, kind: str, layer: int | None) -> int:
    """Return the layer, counted from 1, by default the last; raise :class:`InputError` if it does not exist."""
    if kind not in KINDS:
        raise InputError(f"unknown kind of attention {kind!r}, expected one of {', '.join(KINDS)}")
    layers = config.encoder_layers if kind == "encoder" else config.decoder_layers
    if layer is not None and not 1 <= layer <= layers:
        raise InputError(f"the layer of the {kind} attention is {layer}, expected 1 to {layers}")
    return layer or layers
