"""Train a small language model in bfloat16 with three attention kernels, and compare their gradients with float64's.

    python benchmarks/gradients.py

writes benchmarks/gradients.csv; `make tables` shows it. The model predicts the next character of the bundled English
verses, under bfloat16 autocast. It is trained with torch's flash backend, torch's math backend and fastattn, from equal
weights and on equal batches, each run by its own gradients. At every point of the curves, the gradients of one held-out
batch are compared with float64's at the same weights. The machine's load does not matter.

Keys and values have initial biases in one of two settings. They leave the model's function as it is: softmax ignores a
constant added to all keys, and the bias of the output projection takes back what the value biases add.
"""

import argparse
import copy
import csv
import io
import itertools
import math
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastattn
from fastattn.bench import report
from fastattn.files import write_file
from fastattn.translation.data import read_lines, verses

RESULTS = Path(__file__).with_name("gradients.csv")
CHARACTERS = 128  # ASCII; others are mapped to "?"
LAYERS, WIDTH, HEADS, LENGTH, BATCH, RATE = 2, 128, 2, 128, 8, 2e-3
PARTS = ("query", "key", "value")
DEVIATIONS = {"without biases": (0.0, 0.0, 0.0), "with biases": (0.0, 20.0, 4.0)}
"""Standard deviations of the initial biases of PARTS, by setting."""
Attend = Callable[..., Tensor]


def torchs(backend: SDPBackend) -> Attend:
    def attend(*operands: Tensor, **options: Any) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*operands, **options)

    return attend


BACKENDS = {
    "torch, flash": torchs(SDPBackend.FLASH_ATTENTION),
    "torch, math": torchs(SDPBackend.MATH),
    "fastattn": fastattn.scaled_dot_product_attention,
}


class Layer(nn.Module):
    """A pre-norm Transformer layer with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.norm_ff = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.ff = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """Return the result, (B, L, WIDTH), of x of the same shape."""
        q, k, v = self.in_proj(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out_proj(attend(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.ff(self.norm_ff(x))


class Model(nn.Module):
    """A decoder-only language model of characters."""

    def __init__(self, deviations: tuple[float, ...]) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(CHARACTERS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHARACTERS)
        for layer in self.layers:
            for part, deviation in zip(layer.in_proj.bias.data.chunk(3), deviations, strict=True):
                part.normal_().mul_(deviation)
            layer.out_proj.bias.data -= layer.out_proj.weight.data @ layer.in_proj.bias.data[-WIDTH:]

    def loss(self, text: Tensor, attend: Attend) -> Tensor:
        """Return the mean cross-entropy, in nats per character, of text, (B, LENGTH + 1)."""
        x = self.characters(text[:, :-1]) + self.places.weight
        for layer in self.layers:
            x = layer(x, attend)
        return F.cross_entropy(self.logits(self.norm(x)).flatten(0, 1), text[:, 1:].flatten())


def read(split: str) -> Tensor:
    """Return the English verses as character codes, (characters,)."""
    text = "\n".join(read_lines(verses(split)[0]))
    return torch.tensor(list(text.encode("ascii", "replace")))


def batches(text: Tensor, seed: int) -> Iterator[Tensor]:
    """Yield random pieces of a text, (BATCH, LENGTH + 1)."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
        yield text[starts + torch.arange(LENGTH + 1)]


def gradients(model: Model, loss: Tensor) -> list[list[Tensor]]:
    """Return float64 copies of the gradients of each layer's query, key and value projection, (WIDTH, WIDTH)."""
    weights = [layer.in_proj.weight for layer in model.layers]
    return [list(grad.double().chunk(3)) for grad in torch.autograd.grad(loss, weights)]


def compare(model: Model, text: Tensor, attend: Attend) -> list[dict[str, float]]:
    """Return a row per layer: its number, float64's loss, and error and angle of each projection's gradient."""
    exact = copy.deepcopy(model).double()
    loss = exact.loss(text, BACKENDS["torch, math"])
    truth, rows = gradients(exact, loss), []
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model.loss(text, attend)
    found = gradients(model, rounded)  # outside autocast, which would round float32 operands of the math backend
    for number, (ours, theirs) in enumerate(zip(found, truth, strict=True), 1):
        row = {"layer": number, "loss": loss.item()}
        for part, a, b in zip(PARTS, ours, theirs, strict=True):
            row[f"{part}_error"] = ((a - b).norm() / b.norm()).item()
            row[f"{part}_angle"] = math.degrees(math.acos(min(1.0, ((a * b).sum() / a.norm() / b.norm()).item())))
        rows.append(row)
    return rows


def train(setting: str, backend: str, updates: int, every: int) -> list[dict[str, Any]]:
    """Train a model, and compare its gradients before every `every`-th update and after the last."""
    torch.manual_seed(1)
    model, attend, rows = Model(DEVIATIONS[setting]), BACKENDS[backend], []
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    held_out, text = next(batches(read("dev"), 2)), batches(read("train"), 3)
    for update in range(updates + 1):
        if update % every == 0:
            columns = {"setting": setting, "backend": backend, "update": update}
            rows += [columns | row for row in compare(model, held_out, attend)]
            print(setting, backend, update, rows[-1]["loss"], rows[-1]["query_angle"], sep=", ", flush=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.loss(next(text), attend)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=800)
    parser.add_argument("--every", type=int, default=25, help="updates between two points")
    parser.add_argument("--processes", type=int, default=2, help="runs at the same time, one thread each")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    where, runs = report.here(), itertools.product(DEVIATIONS, BACKENDS, [options.updates], [options.every])
    with multiprocessing.get_context("spawn").Pool(options.processes, torch.set_num_threads, (1,)) as pool:
        rows = [where | row for rows in pool.starmap(train, runs, 1) for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    write_file(options.results, text.getvalue().encode())


if __name__ == "__main__":
    main()
