"""Training as in section 5 of the paper: Adam, warm-up and inverse square root, label smoothing.

A run is a function of its options and its text: parameters come from the seed, an epoch's order from (seed, epoch), a
dropout mask from (seed, update, micro-batch, site). So a run that was killed and resumed has, bit for bit, the weights
of one that was not.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import shutil
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from fastattn.translation import checkpoint
from fastattn.translation import precision as precisions
from fastattn.translation.config import TransformerConfig
from fastattn.translation.data import Batch, ParallelText, read_parallel
from fastattn.translation.errors import InputError, require
from fastattn.translation.evaluate import held_out, perplexity, smoothed_loss
from fastattn.translation.model import Transformer
from fastattn.translation.sanity import training_warnings
from fastattn.translation.tokenizer import Tokenizer

METRICS = "metrics.jsonl"
KEPT_CHECKPOINTS = 5  # as many as the paper averages
REPORT_EVERY = 20  # updates


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a preset trains with where the user says nothing.

    The learning rate of update s is ``rate * d_model**-0.5 * min(s**-0.5, s * warmup**-1.5)``: the paper's at rate 1.
    """

    batch_tokens: int
    warmup: int
    max_steps: int
    save_every: int
    rate: float = 1.0


RECIPES = {
    "tiny": Recipe(batch_tokens=2048, warmup=400, max_steps=10_000, save_every=400, rate=0.7),
    "base": Recipe(batch_tokens=25_000, warmup=4000, max_steps=100_000, save_every=1000),
    "big": Recipe(batch_tokens=25_000, warmup=4000, max_steps=300_000, save_every=1000),
}


@dataclasses.dataclass(frozen=True)
class TrainingOptions:
    """What makes one run different from another, beside its text. Resuming takes them from the checkpoint."""

    preset: str
    vocab_size: int
    batch_tokens: int
    warmup: int
    rate: float
    precision: str
    seed: int
    label_smoothing: float = 0.1


class Trainer:
    """A model, its optimizer, and its place in the data.

    Args:
        model: to train, in place.
        text: to train it on.
        options: of the run.
    """

    def __init__(self, model: Transformer, text: ParallelText, options: TrainingOptions):
        self.model = model.train()
        self.text = text
        self.options = options
        self.device = model.output.weight.device
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.9, 0.98), eps=1e-9, fused=True)
        self.step, self.epoch, self.place = 0, 0, 0  # updates done; where the next batch is
        self._batches: Iterator[tuple[int, int, Batch]] | None = None

    def state(self) -> dict:
        """All that, beside the weights, the next updates depend on."""
        place = {"step": self.step, "epoch": self.epoch, "place": self.place}
        return {"optimizer": self.optimizer.state_dict(), "options": dataclasses.asdict(self.options), **place}

    def load_state(self, state: dict) -> None:
        """Continue from what :meth:`state` returned."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.epoch, self.place = state["step"], state["epoch"], state["place"]
        self._batches = None

    def learning_rate(self, step: int) -> float:
        """Of update ``step``, counted from 1 (formula 3)."""
        options = self.options
        return options.rate * self.model.config.d_model**-0.5 * min(step**-0.5, step * options.warmup**-1.5)

    def autocast(self) -> contextlib.AbstractContextManager:
        """The context to compute in: bfloat16 products, or float32 throughout."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.precision == "bf16")

    def update(self) -> Tensor:
        """One update on the next batch: loss, NLL, correct guesses, target tokens, all summed: float64 (4,)."""
        if self._batches is None:
            self._batches = self.text.epochs(self.options.batch_tokens, self.options.seed, self.epoch, self.place)
        self.epoch, self.place, batch = next(self._batches)
        self.step, self.place = self.step + 1, self.place + 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(self.step)
        model, batch = self.model, batch.to(self.device)
        seeds = dropout_seeds(self.options.seed, self.step, 0, model.dropout_sites).to(self.device)
        labels = batch.labels.flatten()
        with self.autocast():
            lengths = batch.source_lengths, batch.target_lengths
            features = model.features(batch.source, batch.target, *lengths, seeds=seeds)
            projection = model.projection(features.flatten(0, 1))
            loss, nll, correct = smoothed_loss(*projection, labels, self.options.label_smoothing, model.config.pad_id)
        (loss / batch.tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack([t.detach().double() for t in (loss, nll, correct, batch.target_lengths.sum())])


def dropout_seeds(seed: int, update: int, micro_batch: int, sites: int) -> Tensor:
    """The dropout seeds of one forward pass: int64 (sites, 2).

    The key is a hash of (seed, update, micro_batch), micro-batches counted over all processes; the offset is the site.
    """
    digest = hashlib.blake2b(struct.pack("<3q", seed, update, micro_batch), digest_size=8).digest()
    (key,) = struct.unpack("<q", digest)
    return torch.stack((torch.full((sites,), key), torch.arange(sites)), dim=1)


def train(
    train_files: tuple[str | Path, str | Path],
    valid_files: tuple[str | Path, str | Path],
    out: str | Path,
    *,
    preset: str | None = None,
    vocab_size: int | None = None,
    batch_tokens: int | None = None,
    precision: str | None = None,
    seed: int | None = None,
    max_steps: int | None = None,
    max_minutes: float | None = None,
    save_every: int | None = None,
    resume: bool = False,
) -> Path:
    """Train a translator from (source, target) text files into the folder ``out``; returns its best checkpoint.

    Training ends after ``max_steps`` updates or ``max_minutes`` minutes, whichever is first, resumed time included.
    Every ``save_every`` updates, and at the end, it scores the ``valid_files`` and writes a checkpoint. What is None
    comes from the preset's recipe, or with ``resume`` from the checkpoint. ``out/metrics.jsonl`` receives a line every
    few updates. Ctrl-C ends the run after the update at hand, with a checkpoint; a second one at once, without.

    Raises:
        InputError: unusable text or options, or an ``out`` that is not empty (without ``resume``) or holds no
            checkpoint (with it). Nothing is overwritten.
        KeyboardInterrupt: Ctrl-C; its words say from where the run can be resumed.
    """
    out = Path(out)
    for package in ("safetensors.torch", "sentencepiece", "tqdm"):
        require(package)
    given = {
        "preset": preset,
        "vocab_size": vocab_size,
        "batch_tokens": batch_tokens,
        "precision": precision,
        "seed": seed,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if resume:
        newest = checkpoint.newest(out)
        state = checkpoint.load_training(newest)
        options = _same_options(_saved_options(newest, state), given)
    else:
        if out.exists() and not (
            out.is_dir() and all(path.name.startswith(checkpoint.PARTIAL) for path in out.iterdir())
        ):
            raise InputError(f"{out} exists already: name another folder, or continue its run with --resume")
        options = _new_options(**given)
    recipe = RECIPES[options.preset]
    limits = _Limits(
        max_steps=recipe.max_steps if max_steps is None else max_steps,
        max_minutes=max_minutes,
        save_every=recipe.save_every if save_every is None else save_every,
    )

    sources, targets = read_parallel(*train_files)
    valid_pairs = read_parallel(*valid_files)
    text_digest = hashlib.sha256("\n".join((*sources, *targets)).encode()).hexdigest()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if resume:
        if state["text"] != text_digest:
            raise InputError(f"the training text is not the one that {newest} was trained on")
        model, tokenizer = checkpoint.load(newest, device)
    else:
        tokenizer = Tokenizer.train(sources + targets, options.vocab_size)
        torch.manual_seed(options.seed)
        model = Transformer(TransformerConfig.preset(options.preset, tokenizer.vocab_size)).to(device)
    text = ParallelText(tokenizer, sources, targets)
    if not resume:
        for warning in training_warnings((sources, targets), valid_pairs, text, tokenizer):
            print(f"warning: {warning}", file=sys.stderr, flush=True)
    trainer = Trainer(model, text, options)
    run = _Run(out, trainer, tokenizer, ParallelText(tokenizer, *valid_pairs), text_digest)
    if resume:
        run.load_state(newest, state)
    return run.train(limits)


@dataclasses.dataclass(frozen=True)
class _Limits:
    """When to stop, and how often to save."""

    max_steps: int
    max_minutes: float | None
    save_every: int

    def __post_init__(self):
        _expect_positive(max_steps=self.max_steps, save_every=self.save_every)
        if self.max_minutes is not None and not self.max_minutes > 0:
            raise InputError(f"max_minutes is {self.max_minutes}, expected a positive number")


def _expect_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise InputError(f"{name} is {value}, expected at least 1")


def _new_options(preset="tiny", vocab_size=8000, batch_tokens=None, precision="auto", seed=1) -> TrainingOptions:
    if preset not in RECIPES:
        raise InputError(f"unknown preset {preset!r}, expected one of {', '.join(RECIPES)}")
    recipe = RECIPES[preset]
    batch_tokens = recipe.batch_tokens if batch_tokens is None else batch_tokens
    _expect_positive(vocab_size=vocab_size, batch_tokens=batch_tokens)
    if not -(2**63) <= seed < 2**63:
        raise InputError(f"seed is {seed}, expected an integer of 64 bits")
    return TrainingOptions(
        preset=preset,
        vocab_size=vocab_size,
        batch_tokens=batch_tokens,
        warmup=recipe.warmup,
        rate=recipe.rate,
        precision=precisions.resolve(precision),
        seed=seed,
    )


def _saved_options(path: Path, state: dict) -> TrainingOptions:
    """Those of the run that wrote ``state``, which has all that resuming it takes."""
    needed = {"optimizer", "step", "epoch", "place", "text", "best_loss", "best_step", "seconds"}
    try:
        if needed <= state.keys():
            return TrainingOptions(**state["options"])
    except (KeyError, TypeError):
        pass
    raise InputError(f"cannot resume {path}: it was not written by this version of `fastattn train`")


def _same_options(saved: TrainingOptions, given: dict) -> TrainingOptions:
    """The checkpoint's options, where those given agree with them."""
    for name, value in given.items():
        if value != getattr(saved, name) and (name, value) != ("precision", "auto"):
            raise InputError(f"{name} is {value!r} but the run to resume has {getattr(saved, name)!r}: leave it out")
    return saved


class _Run:
    """A trainer, its validation text, and the folder that it writes to."""

    def __init__(self, out: Path, trainer: Trainer, tokenizer: Tokenizer, valid: ParallelText, text_digest: str):
        self.out, self.trainer, self.tokenizer, self.text_digest = out, trainer, tokenizer, text_digest
        self.valid = [valid.batch(i).to(trainer.device) for i in valid.buckets(trainer.options.batch_tokens)]
        self.best_loss, self.best_step = math.inf, 0
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Spent on training, before and since it was resumed."""
        return time.monotonic() - self._started

    def load_state(self, newest: Path, state: dict) -> None:
        """Continue from a checkpoint: what the folder says of later updates goes."""
        self.trainer.load_state(state)
        self.best_loss, self.best_step = state["best_loss"], state["best_step"]
        self._started -= state["seconds"]
        if self.best_step == self.trainer.step:
            checkpoint.mark_best(newest)
        rows = [row for row in read_metrics(self.out) if row["step"] <= self.trainer.step]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        checkpoint.write_text(self.out / METRICS, text)

    def train(self, limits: _Limits) -> Path:
        """Update until a limit is reached; returns the best checkpoint."""
        trainer = self.trainer
        sums, since = torch.zeros(4, dtype=torch.float64), time.monotonic()
        if not checkpoint.steps(self.out):
            self._save()
        with _deferred_interrupt() as interrupted, _Progress(self, limits) as progress:
            while not self._finished(limits):
                sums += trainer.update().cpu()
                scoring = self._finished(limits) or trainer.step % limits.save_every == 0
                if scoring or interrupted.is_set() or trainer.step % REPORT_EVERY == 0:
                    row = self._row(sums, time.monotonic() - since)
                    if scoring:
                        row |= held_out(trainer.model, self.valid, trainer.autocast())
                    with open(self.out / METRICS, "a", encoding="utf-8") as metrics:
                        metrics.write(json.dumps(row) + "\n")
                    progress.report(row)
                    if scoring or interrupted.is_set():
                        self._save(row.get("valid_loss", math.inf))
                    sums, since = torch.zeros(4, dtype=torch.float64), time.monotonic()
                progress.advance()
                if interrupted.is_set() and not self._finished(limits):
                    raise KeyboardInterrupt(f"after update {trainer.step}, which is saved: --resume goes on from there")
        return checkpoint.find(self.out)

    def _finished(self, limits: _Limits) -> bool:
        return self.done(limits) >= 1

    def done(self, limits: _Limits) -> float:
        """The share of the run that is done, by the limit that will be reached first."""
        time_share = 0.0 if limits.max_minutes is None else self.seconds / (60 * limits.max_minutes)
        return max(self.trainer.step / limits.max_steps, time_share)

    def _row(self, sums: Tensor, seconds: float) -> dict[str, float]:
        """What ``metrics.jsonl`` says of the updates since the last row: means over their target tokens."""
        loss, nll, correct, tokens = sums.tolist()
        if not math.isfinite(loss):
            raise InputError(f"the loss is {loss} at update {self.trainer.step}: start again with another seed or fp32")
        return {
            "step": self.trainer.step,
            "epoch": self.trainer.epoch,
            "seconds": round(self.seconds, 2),
            "loss": loss / tokens,
            "perplexity": perplexity(nll / tokens),
            "accuracy": correct / tokens,
            "tokens_per_second": tokens / seconds,
            "learning_rate": self.trainer.learning_rate(self.trainer.step),
        }

    def _save(self, valid_loss: float = math.inf) -> None:
        trainer = self.trainer
        improved = valid_loss < self.best_loss
        if improved:
            self.best_loss, self.best_step = valid_loss, trainer.step
        progress = {"best_loss": self.best_loss, "best_step": self.best_step, "seconds": self.seconds}
        state = {**trainer.state(), **progress, "text": self.text_digest}
        saved = checkpoint.save(self.out, trainer.step, trainer.model, self.tokenizer, state)
        if improved:
            checkpoint.mark_best(saved)
        checkpoint.prune(self.out, KEPT_CHECKPOINTS)


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[threading.Event]:
    """Ctrl-C sets the event; a second one raises KeyboardInterrupt as ever. Only the main thread hears of either."""
    interrupted = threading.Event()
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or previous is not signal.default_int_handler:
        yield interrupted
        return

    def interrupt(*_) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)


class _Progress:
    """What is left of a run: a bar on a terminal, a line a report elsewhere; both on stderr."""

    def __init__(self, run: _Run, limits: _Limits):
        self._run, self._limits = run, limits
        options, parameters = run.trainer.options, sum(p.numel() for p in run.trainer.model.parameters())
        until = f"{limits.max_steps} updates"
        if limits.max_minutes is not None:
            until += f" or {limits.max_minutes:g} min"
        print(
            f"{options.preset}: {parameters / 1e6:.1f}M parameters, {options.precision}, "
            f"batches of {options.batch_tokens} tokens, {until}",
            file=sys.stderr,
            flush=True,
        )
        self._bar = None
        if sys.stderr.isatty():
            self._bar = require("tqdm").tqdm(
                total=1.0,
                initial=min(1.0, run.done(limits)),
                ncols=min(80, shutil.get_terminal_size().columns),
                bar_format="{percentage:3.0f}%|{bar}| {desc}{postfix} [{elapsed}<{remaining}]",
                desc=f"update {run.trainer.step}",
            )

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *error) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self) -> None:
        """Another update is done."""
        if self._bar is not None:
            self._bar.set_description_str(f"update {self._run.trainer.step}", refresh=False)
            self._bar.update(min(1.0, self._run.done(self._limits)) - self._bar.n)

    def report(self, row: dict[str, float]) -> None:
        """Say what a row of the metrics holds."""
        words = [f"loss {row['loss']:.3f}", f"{row['tokens_per_second']:.0f} tokens/s"]
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(words), refresh=False)
            if "valid_loss" in row:
                self._bar.write(f"update {row['step']}: validation loss {row['valid_loss']:.3f}", file=sys.stderr)
            return
        words[1:1] = [f"perplexity {row['perplexity']:.1f}", f"accuracy {row['accuracy']:.3f}"]
        if "valid_loss" in row:
            words.append(f"validation loss {row['valid_loss']:.3f}")
        print(f"update {row['step']}: {', '.join(words)}", file=sys.stderr, flush=True)


def read_metrics(out: str | Path) -> list[dict[str, float]]:
    """The rows of a run's ``metrics.jsonl``; a last line cut short by an interruption is left out."""
    path = Path(out) / METRICS
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]
