"""Training as in section 5 of the paper: Adam, warm-up and inverse square root, label smoothing.

A run is a function of its configuration and its text. Parameters depend on the seed, an epoch's order on (seed, epoch),
a dropout mask on (seed, update, micro-batch, site). So a killed and resumed run has, bit for bit, the weights of an
uninterrupted one. The number of processes that share an update's micro-batches changes only the rounding of their sum.
"""

import contextlib
import dataclasses
import hashlib
import itertools
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
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fastattn.errors import InputError, require
from fastattn.files import StrPath, write_file
from fastattn.translation import checkpoint, distributed, memory
from fastattn.translation import precision as precisions
from fastattn.translation.bleu import choose
from fastattn.translation.config import CHANGEABLE, PRESETS, TrainingConfig, TransformerConfig
from fastattn.translation.data import (
    Batch,
    Files,
    ParallelText,
    Sentences,
    digest,
    encode,
    pairs_of,
    read_parallel,
    sent,
)
from fastattn.translation.distributed import World
from fastattn.translation.evaluate import held_out, loss_of, perplexity, scores
from fastattn.translation.model import Transformer
from fastattn.translation.sanity import training_warnings
from fastattn.translation.search import Search, translate
from fastattn.translation.tokenizer import BOS_ID, EOS_ID, PAD_ID, Tokenizer, VocabularyTooLarge

METRICS = "metrics.jsonl"
ANOTHER_FOLDER = "name another folder, or continue its run with --resume"
REPORT_EVERY = 20  # updates
NOTHING = torch.zeros((), device="cpu")  # begins a sum, on any device


class Trainer:
    """Model, optimizer, and place in the data.

    Args:
        model: the model, which is trained in place.
        text: the training text.
        config: the run's configuration.
        world: the processes that share each update. Each has a trainer with an equal model and the same text.
        shard: divide parameters, gradients and the optimizer's state among the processes (``fully_shard``); each layer
            is whole only while it computes.

    Attributes:
        loss: module that takes a batch and its dropout seeds, and returns the values of
            :func:`~fastattn.translation.evaluate.loss_of`.
    """

    def __init__(
        self,
        model: Transformer,
        text: ParallelText,
        config: TrainingConfig,
        world: World | None = None,
        shard: bool = False,
    ):
        self.model = model.train()
        self.text = text
        self.config = config
        self.world = world or World(0, 1, model.device)
        self.device = self.world.device
        self.micro_batches = config.micro_batches or self.world.size
        self.shard = shard
        self.step, self.epoch, self.place = 0, 0, 0  # number of updates done; epoch and position of the next batch
        self._batches: Iterator[tuple[int, int, Tensor]] | None = None
        self.loss: nn.Module = _Loss(model, config.label_smoothing)
        if shard:
            self.loss = distributed.sharded(self.loss, [*model.encoder.layers, *model.decoder.layers], self.world)
        elif self.world.size > 1:
            self.loss = DistributedDataParallel(self.loss, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.9, 0.98), eps=1e-9, fused=True)
        if self.world.size > 1:
            # DistributedDataParallel orders its gradient buckets after the first pass, and a sum's bits depend on the
            # order. A first pass without effect gives a resumed run the same sums as the run that it continues.
            self._backward(self.text.batch(torch.tensor([0], device="cpu")), 0, 1)
            self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict:
        """Return the state, in addition to the weights, that the next updates depend on; all processes must call it.

        If the model is sharded, only the first process gets the optimizer's state, on the CPU. It is twice the size of
        the parameters, and its tensors are gathered one at a time.
        """
        optimizer = self.optimizer.state_dict()
        moments = {
            number: {name: distributed.collected(tensor, self.world) for name, tensor in tensors.items()}
            for number, tensors in optimizer["state"].items()
        }
        place = {"step": self.step, "epoch": self.epoch, "batch": self.place}
        return {"optimizer": {**optimizer, "state": moments}, **place}

    def load_state(self, state: dict) -> None:
        """Continue from the result of :meth:`state`, whether that run was sharded or not."""
        optimizer, parameters = state["optimizer"], list(self.model.parameters())
        moments = {
            number: {name: distributed.share(tensor, parameters[number]) for name, tensor in tensors.items()}
            for number, tensors in optimizer["state"].items()
        }
        self.optimizer.load_state_dict({**optimizer, "state": moments})
        self.step, self.epoch, self.place = state["step"], state["epoch"], state["batch"]
        self._batches = None

    def whole_model(self) -> Transformer:
        """Return the model with all parameters: itself, or a copy if it is sharded, which all processes must call."""
        if not self.shard:
            return self.model
        model = Transformer(self.model.config, device=self.device)
        with torch.no_grad():
            for copy, parameter in zip(model.parameters(), self.model.parameters(), strict=True):
                copy.copy_(distributed.whole(parameter))
        return model

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of update ``step``, counted from 1 (formula 3)."""
        config = self.config
        return config.rate * self.model.config.d_model**-0.5 * min(step**-0.5, step * config.warmup**-1.5)

    def autocast(self) -> contextlib.AbstractContextManager:
        """Return the context to compute in: bfloat16 products, or float32 throughout."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16")

    def update(self) -> Tensor:
        """Compute one update on the next ``micro_batches`` batches.

        The micro-batches, their dropout and the number of tokens that divides the loss do not depend on the number of
        processes.

        Returns:
            Sums over this process's share, on its device, float64 (6,): loss, NLL, correct guesses, target tokens, and
            tokens of both sides, without and with padding.
        """
        config, world = self.config, self.world
        if self._batches is None:
            budget = config.batch_tokens // self.micro_batches
            self._batches = self.text.epochs(budget, config.seed, self.epoch, self.place)
        batches = list(itertools.islice(self._batches, self.micro_batches))
        self.epoch, self.place, _ = batches[-1]
        self.step, self.place = self.step + 1, self.place + 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(self.step)
        tokens = sum(int(self.text.targets.lengths_of(index).sum()) for _, _, index in batches)
        *first, last = range(world.rank, self.micro_batches, world.size)
        sums = torch.zeros(6, dtype=torch.float64, device=self.device)
        for number in first:
            with distributed.unsummed(self.loss):
                sums += self._backward(self.text.batch(batches[number][2]), number, tokens)
        sums += self._backward(self.text.batch(batches[last][2]), last, tokens)
        if config.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return sums

    def _backward(self, batch: Batch, micro_batch: int, tokens: int) -> Tensor:
        """Add the gradient of a micro-batch's loss, divided by the update's ``tokens``; return its part of the sums."""
        seeds = dropout_seeds(self.config.seed, self.step, micro_batch, self.model.dropout_sites)
        with self.autocast():
            loss, nll, correct = self.loss(batch.to(self.device), sent(seeds, self.device))
        (loss * self.world.size / tokens).backward()  # the sum over processes divides by their number
        counts = torch.tensor((batch.tokens, batch.filled, batch.rows), dtype=torch.float64, device="cpu")
        return torch.cat((torch.stack([t.detach().double() for t in (loss, nll, correct)]), sent(counts, self.device)))


class _Loss(nn.Module):
    """Module of :func:`~fastattn.translation.evaluate.loss_of`, for DistributedDataParallel."""

    def __init__(self, model: Transformer, smoothing: float):
        super().__init__()
        self.model, self.smoothing = model, smoothing

    def forward(self, batch: Batch, seeds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self.model.packed_features(batch.source, batch.target, seeds=seeds)
        return loss_of(self.model, features, batch.labels, self.smoothing)


def dropout_seeds(seed: int, update: int, micro_batch: int, sites: int) -> Tensor:
    """Return the dropout seeds of one forward pass: int64 (sites, 2).

    The key is a hash of (seed, update, micro_batch), with micro-batches counted over all processes. The offset is the
    site.
    """
    digest = hashlib.blake2b(struct.pack("<3q", seed, update, micro_batch), digest_size=8).digest()
    (key,) = struct.unpack("<q", digest)
    return torch.stack((torch.full((sites,), key, device="cpu"), torch.arange(sites, device="cpu")), dim=1)


def train(
    train_files: Files,
    valid_files: Files,
    out: StrPath,
    *,
    preset: str | None = None,
    config: StrPath | None = None,
    accumulate: int | None = None,
    shard: bool = False,
    resume: bool = False,
    **changes: Any,
) -> Path:
    """Train a translator from (source, target) text files into the folder ``out``; return its best checkpoint.

    Training ends after ``max_steps`` updates or ``max_minutes`` minutes, whichever is first, resumed time included.
    Every ``save_every`` updates, and at the end, it scores the ``valid_files`` and writes a checkpoint. It also
    writes one, unscored, before the first update. ``out/metrics.jsonl`` receives a line every few updates. Ctrl-C ends
    the run after the current update, with a checkpoint; a second Ctrl-C ends it at once, without one.

    Under ``torchrun`` the processes share each update. If it restarts them because one has failed, they continue from
    the newest checkpoint that they wrote, if there is one.

    Args:
        preset: a key of :data:`~fastattn.translation.config.PRESETS`; "tiny" if neither it nor ``config`` is given.
        config: a checkpoint's config.json, or a file like it, instead of a preset.
        accumulate: micro-batches per process and update (gradient accumulation).
        shard: divide a model that does not fit a device among the processes. Validation and checkpoints still need all
            parameters, without gradients and optimizer state, on each device. A checkpoint also needs the optimizer's
            state in the main memory of the first process.
        resume: continue the run in ``out`` from its newest checkpoint, with that checkpoint's configuration.
        changes: ``vocab_size`` and fields of :class:`~fastattn.translation.config.TrainingConfig`, which replace those
            of the preset or file. In a resumed run only ``CHANGEABLE`` may change.

    Raises:
        InputError: unusable text or options, or an ``out`` that is not empty (without ``resume``), holds no checkpoint
            (with it), or is being written by another process. Nothing is overwritten.
        KeyboardInterrupt: Ctrl-C; the message says from where the run can be resumed.
    """
    out = Path(out)
    for package in ("safetensors.torch", "sentencepiece", "tqdm"):
        require(package)
    with distributed.joined() as world, contextlib.ExitStack() as stack:
        newest, model_config, training = world.on_main(
            lambda: _begin(world, stack, out, preset, config, accumulate, shard, resume, changes)
        )
        if training.bleu_every is not None:
            require("sacrebleu")
        valid_digest = world.on_main(lambda: digest(*valid_files))
        valid_pairs = world.main_first(lambda: read_parallel(*valid_files))
        text_digest = world.on_main(lambda: digest(*train_files))
        state = {}
        if newest is not None:
            state = world.main_first(lambda: _saved_state(newest, text_digest, valid_digest))
            model, tokenizer = world.main_first(lambda: checkpoint.load(newest))
        else:

            def learn_pieces() -> tuple[bytes, ...]:
                is_default = config is None and "vocab_size" not in changes
                pieces = _learned(train_files, model_config.vocab_size, is_default, training).models
                stack.enter_context(checkpoint.locked(out, world.launch))
                checkpoint.expect_new(out, ANOTHER_FOLDER)
                return pieces

            tokenizer = Tokenizer(*world.on_main(learn_pieces))
            model_config = dataclasses.replace(model_config, vocab_size=tokenizer.vocab_size)
            model = world.main_first(lambda: _new_model(model_config, training.seed))
        valid = world.main_first(lambda: ParallelText.encoded(tokenizer, *valid_pairs, "validation"))
        world.on_main(lambda: encode(tokenizer, train_files, text_digest, out / checkpoint.TEXT))
        text = world.main_first(lambda: ParallelText.mapped(out / checkpoint.TEXT))
        to_translate = Sentences.of(tokenizer.encode(valid_pairs[0]) if training.bleu_every else [])
        world.main_first(lambda: _expect_positions(model_config, text, valid, to_translate))

        if newest is None:  # on a large text warnings take longer than the timeout of a collective
            world.on_main(lambda: _warn(train_files, valid_pairs, text, valid, tokenizer, training))
        if not shard:  # a sharded model is moved one layer at a time
            model = model.to(world.device)
        trainer = Trainer(model, text, training, world, shard)
        run = _Run(out, trainer, tokenizer, valid, valid_pairs, text_digest, valid_digest)
        if newest is not None:
            run.load_state(newest, state)
        del state  # every process holds the whole state, even of a sharded model
        if world.device.type == "cpu":
            memory.keep_freed()  # set now, so that the memory of learning the vocabulary is not kept
        run.train()
        return world.on_main(lambda: checkpoint.find(out))


def _begin(
    world: distributed.World,
    stack: contextlib.ExitStack,
    out: Path,
    preset: str | None,
    config: StrPath | None,
    accumulate: int | None,
    shard: bool,
    resume: bool,
    changes: dict[str, Any],
) -> tuple[Path | None, TransformerConfig, TrainingConfig]:
    """Return the checkpoint to resume, whose folder ``stack`` then locks, and the configuration of the run."""
    if shard and world.size == 1:
        raise InputError("a model is sharded among several processes: start them with torchrun")
    if resume and config is not None:
        raise InputError("a run is resumed with its own configuration: leave --config out")
    again = bool(world.launch and checkpoint.steps(out)) and checkpoint.locked_by(out) == world.launch
    if resume or again:
        newest = checkpoint.newest(out)
        stack.enter_context(checkpoint.locked(out, world.launch))
        # After a restart the number of processes may differ, and with it the meaning of --accumulate.
        return newest, *_resumed(newest, preset, None if again else accumulate, changes, world.size)
    checkpoint.expect_new(out, ANOTHER_FOLDER)
    return None, *_configured(preset, config, accumulate, changes, world.size)


def _learned(files: Files, vocab_size: int, is_default: bool, training: TrainingConfig) -> Tokenizer:
    """Learn a vocabulary from the text; a preset's ``vocab_size`` is lowered to what a small text allows."""
    rules = training.normalization, training.target_normalization
    print(f"learning a vocabulary of {vocab_size} pieces", file=sys.stderr, flush=True)
    try:
        return Tokenizer.of_pairs(pairs_of(*files), vocab_size, *rules)
    except VocabularyTooLarge as error:
        if not is_default:
            raise
        most = error.most
    print(
        f"this text allows a vocabulary of {most} pieces at most, which are learned instead; --vocab-size sets fewer",
        file=sys.stderr,
        flush=True,
    )
    return Tokenizer.of_pairs(pairs_of(*files), most, *rules)


def _warn(
    train_files: Files,
    valid_pairs: tuple[list[str], list[str]],
    text: ParallelText,
    valid: ParallelText,
    tokenizer: Tokenizer,
    training: TrainingConfig,
) -> None:
    """Print what is unusual about the text of a run."""
    tokenize, warnings = choose(valid_pairs[1]) if training.bleu_every else ("", [])
    if tokenize:
        print(f"validation BLEU is of sacrebleu's tokenizer {tokenize}", file=sys.stderr, flush=True)
    warnings += training_warnings(pairs_of(*train_files), valid_pairs, text, valid, tokenizer)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr, flush=True)


def _new_model(config: TransformerConfig, seed: int) -> Transformer:
    torch.manual_seed(seed)
    try:
        return Transformer(config, device="cpu")
    except RuntimeError as error:  # error of the allocator
        size = f"d_model {config.d_model}, d_ff {config.d_ff}, vocab_size {config.vocab_size}"
        raise InputError(f"there is no memory for a model of {size}: {str(error).splitlines()[0]}") from None


def _expect_positions(
    config: TransformerConfig, text: ParallelText, valid: ParallelText, to_translate: Sentences
) -> None:
    """Check that learned positions suffice for every sentence; a longer one would end the run at its batch."""
    for name, sides in (
        ("training", (text.sources, text.targets)), ("validation", (valid.sources, valid.targets, to_translate))
    ):  # fmt: skip
        length = max(int(side.lengths.max()) for side in sides if len(side))
        if length > config.most_positions:
            raise InputError(
                f"the {name} text has a sentence of {length} pieces, its end included, and there are "
                f"max_positions={config.most_positions}: raise it, shorten the sentence, or use sinusoidal positions"
            )


def _configured(
    preset: str | None, path: StrPath | None, accumulate: int | None, changes: dict[str, Any], processes: int
) -> tuple[TransformerConfig, TrainingConfig]:
    """Return the configuration of a new run, with every default resolved."""
    changes = dict(changes)
    vocab_size = changes.pop("vocab_size", None)
    if path is not None and preset is not None:
        raise InputError("a preset and a configuration file are given: expected one of them")
    if path is not None:
        model, training = checkpoint.read_config(path)
        training = training or TrainingConfig()
        if vocab_size is not None:
            model = dataclasses.replace(model, vocab_size=vocab_size)
    else:
        preset = preset or "tiny"
        training = TrainingConfig.of_preset(preset)
        model = TransformerConfig.preset(preset, PRESETS[preset].vocab_size if vocab_size is None else vocab_size)
    if accumulate is not None:
        changes["micro_batches"] = _at_least_one(accumulate) * processes
    elif training.micro_batches is None:
        changes["micro_batches"] = processes
    training = dataclasses.replace(training, **changes)
    training = dataclasses.replace(training, precision=precisions.resolve(training.precision))
    if (model.pad_id, model.bos_id, model.eos_id) != (PAD_ID, BOS_ID, EOS_ID):
        raise InputError(f"pad_id, bos_id and eos_id are not {PAD_ID}, {BOS_ID} and {EOS_ID}, the tokenizer's")
    return model, _divided(training, processes)


def _resumed(
    newest: Path, preset: str | None, accumulate: int | None, changes: dict[str, Any], processes: int
) -> tuple[TransformerConfig, TrainingConfig]:
    """Return the configuration of the run that wrote ``newest``; raise if the given options disagree with it."""
    model, saved = checkpoint.load_config(newest)
    if saved is None:
        raise _not_ours(newest)
    given = changes if preset is None else {"preset": preset, **changes}
    if accumulate is not None and (asked := _at_least_one(accumulate) * processes) != saved.micro_batches:
        raise InputError(
            f"--accumulate {accumulate} makes {asked} micro-batches of an update (number of processes: {processes}) "
            f"but the run to resume has {saved.micro_batches}: leave it out"
        )
    for name, value in given.items():
        has = model.vocab_size if name == "vocab_size" else getattr(saved, name)
        if name not in CHANGEABLE and value != has and (name, value) != ("precision", "auto"):
            raise InputError(f"{name} is {value!r} but the run to resume has {has!r}: leave it out")
    changed = {name: value for name, value in given.items() if name in CHANGEABLE}
    return model, _divided(dataclasses.replace(saved, **changed), processes)


def _at_least_one(accumulate: int) -> int:
    if accumulate < 1:
        raise InputError(f"accumulate is {accumulate}, expected at least 1")
    return accumulate


def _divided(training: TrainingConfig, processes: int) -> TrainingConfig:
    micro_batches = training.micro_batches or processes
    if micro_batches % processes:
        raise InputError(
            f"an update of {micro_batches} micro-batches cannot be divided among {processes} processes: expected a "
            f"number of processes that divides {micro_batches}, or for a new run --accumulate"
        )
    return training


def _saved_state(newest: Path, text_digest: str, valid_digest: str) -> dict:
    """Return the state of the run that wrote ``newest``; raise if its training or validation text was another."""
    state = checkpoint.load_training(newest)
    needed = {"optimizer", "step", "epoch", "batch", "text", "valid_text", "best_loss", "best_step", "seconds"}
    if not needed <= state.keys():
        raise _not_ours(newest)
    if state["text"] != text_digest:
        raise InputError(f"the training text is not the one that {newest} was trained on")
    if state["valid_text"] != valid_digest:
        raise InputError(
            f"the validation text is not the one that {newest} was scored on: expected the same, since the best "
            "checkpoint is the one of lowest loss on it"
        )
    return state


def _not_ours(path: Path) -> InputError:
    return InputError(f"cannot resume {path}: it was not written by this version of `fastattn train`")


class _Run:
    """Trainer, validation text, and the folder that the first process writes to."""

    def __init__(
        self,
        out: Path,
        trainer: Trainer,
        tokenizer: Tokenizer,
        valid: ParallelText,
        valid_pairs: tuple[list[str], list[str]],
        text_digest: str,
        valid_digest: str,
    ):
        self.out, self.trainer, self.tokenizer = out, trainer, tokenizer
        self.text_digest, self.valid_digest = text_digest, valid_digest
        self.config, self.world = trainer.config, trainer.world
        self.valid_pairs = valid_pairs
        batches = valid.batches(self.config.batch_tokens // trainer.micro_batches)
        share = itertools.islice(batches, self.world.rank, None, self.world.size)
        self.valid = [valid.batch(index).to(trainer.device) for index in share]
        self.best_loss, self.best_step = math.inf, 0
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds of training, those before it was resumed included."""
        return time.monotonic() - self._started

    @property
    def done(self) -> float:
        """Share of the run that is done, by the limit that will be reached first."""
        minutes = self.config.max_minutes
        time_share = 0.0 if minutes is None else self.seconds / (60 * minutes)
        return max(self.trainer.step / self.config.max_steps, time_share)

    def load_state(self, newest: Path, state: dict) -> None:
        """Continue from a checkpoint; remove rows of later updates from the metrics."""
        self.trainer.load_state(state)
        self.best_loss, self.best_step = state["best_loss"], state["best_step"]
        self._started -= state["seconds"]
        if not self.world.main:
            return
        if self.best_step == self.trainer.step:
            checkpoint.mark_best(newest)
        rows = [row for row in read_metrics(self.out) if row["step"] <= self.trainer.step]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        write_file(self.out / METRICS, text.encode())

    def train(self) -> None:
        """Update until a limit is reached."""
        trainer, config, world = self.trainer, self.config, self.world
        sums, since = NOTHING, time.monotonic()
        if world.on_main(lambda: not checkpoint.steps(self.out)):
            self._save(trainer.whole_model())
        (over,) = world.any(self.done >= 1)
        with _deferred_interrupt() as interrupt, _Progress(self) as progress:
            while not over:
                sums = sums + trainer.update()
                over, interrupted = world.any(self.done >= 1, interrupt.is_set())
                progress.advance()
                interrupted = interrupted and not over
                scoring = over or trainer.step % config.save_every == 0
                translating = config.bleu_every and (over or trainer.step % config.bleu_every == 0)
                if scoring or translating or interrupted or trainer.step % REPORT_EVERY == 0:
                    row = self._row(world.sum(sums), time.monotonic() - since)
                    model = trainer.whole_model() if scoring or translating or interrupted else trainer.model
                    if scoring:
                        row |= held_out(model, self.valid, trainer.autocast(), world.sum)
                        self._expect_finite(row["valid_loss"])
                    if translating:
                        bleu = self._bleu(model, interrupt)
                        row |= {} if bleu is None else {"valid_bleu": bleu}
                        interrupted = interrupted or bleu is None
                    if world.main:
                        with open(self.out / METRICS, "a", encoding="utf-8") as metrics:
                            metrics.write(json.dumps(row) + "\n")
                        progress.report(row)
                    if scoring or interrupted:
                        self._save(model, row.get("valid_loss", math.inf))
                    sums, since = NOTHING, time.monotonic()
                if interrupted and not world.main:
                    raise SystemExit(130)  # the first process reports the update
                if interrupted:
                    raise KeyboardInterrupt(f"after update {trainer.step}, which is saved: --resume goes on from there")

    def _row(self, sums: Tensor, seconds: float) -> dict[str, float]:
        """Return the row of ``metrics.jsonl`` for the updates since the last row: means over their target tokens."""
        loss, nll, correct, tokens, filled, rows = sums.tolist()
        self._expect_finite(loss)
        return {
            "step": self.trainer.step,
            "epoch": self.trainer.epoch,
            "seconds": round(self.seconds, 2),
            "loss": loss / tokens,
            "perplexity": perplexity(nll / tokens),
            "accuracy": correct / tokens,
            "tokens_per_second": tokens / seconds,
            "padding": 1 - filled / rows,
            "learning_rate": self.trainer.learning_rate(self.trainer.step),
        }

    def _expect_finite(self, loss: float) -> None:
        if math.isfinite(loss):
            return
        if not self.world.main:
            raise SystemExit(1)  # the first process reports the reason
        raise InputError(
            f"the loss is {loss} at update {self.trainer.step}: start again with another seed, a lower rate or fp32"
        )

    def _bleu(self, model: Transformer, interrupt: threading.Event) -> float | None:
        """Return BLEU of the validation text, translated greedily, each process a share; None after Ctrl-C.

        Ctrl-C ends the translation early, because `torchrun` kills processes half a minute after it and the checkpoint
        is still to be written.
        """
        sources, references = self.valid_pairs
        share: list[str] = []

        def go_on(sentences: int) -> None:
            if interrupt.is_set():
                raise _CutShort

        model.eval()
        with self.trainer.autocast(), contextlib.suppress(_CutShort):
            own = sources[self.world.rank :: self.world.size]
            share = translate(model, self.tokenizer, own, Search(beam=1), go_on)
        model.train()
        (interrupted,) = self.world.any(interrupt.is_set())
        if interrupted:
            return None
        return scores(self.world.interleaved(share), references).bleu

    def _save(self, model: Transformer, valid_loss: float = math.inf) -> None:
        """Write a checkpoint of the whole ``model``; all processes must call it, and the first one writes."""
        trainer = self.trainer
        improved = valid_loss < self.best_loss
        if improved:
            self.best_loss, self.best_step = valid_loss, trainer.step
        progress = {"best_loss": self.best_loss, "best_step": self.best_step, "seconds": self.seconds}
        state = {**trainer.state(), **progress, "text": self.text_digest, "valid_text": self.valid_digest}
        if not self.world.main:
            return
        saved = checkpoint.save(self.out, trainer.step, model, self.tokenizer, state, self.config)
        if improved:
            checkpoint.mark_best(saved)
        checkpoint.prune(self.out, self.config.keep)


class _CutShort(Exception):
    """Exception that ends a translation between two batches."""


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C sets; the second one raises KeyboardInterrupt as usual.

    Outside the main thread, or if the program handles SIGINT itself, nothing is changed and the event stays unset.
    """
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
    """Progress of a run on stderr of the first process: a bar on a terminal, otherwise one line per report."""

    def __init__(self, run: _Run):
        self._run, config = run, run.config
        self._bar = None
        if not run.world.main:
            return
        parameters = sum(p.numel() for p in run.trainer.model.parameters())
        until = f"{config.max_steps} updates"
        if config.max_minutes is not None:
            until += f" or {config.max_minutes:g} min"
        parts = f" in {run.trainer.micro_batches} micro-batches" if run.trainer.micro_batches > 1 else ""
        own = ""
        if run.trainer.shard:
            held = sum(distributed.local(p).numel() for p in run.trainer.model.parameters())
            own = f" ({held / parameters:.0%} of them a process)"
        print(
            f"{config.preset}: {parameters / 1e6:.1f}M parameters{own}, {config.precision}, "
            f"batches of {config.batch_tokens} tokens{parts}, {until}",
            file=sys.stderr,
            flush=True,
        )
        if sys.stderr.isatty():
            self._bar = require("tqdm").tqdm(
                total=1.0,
                initial=min(1.0, run.done),
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
        """Show that another update is done."""
        if self._bar is not None:
            self._bar.set_description_str(f"update {self._run.trainer.step}", refresh=False)
            self._bar.update(min(1.0, self._run.done) - self._bar.n)

    def report(self, row: dict[str, float]) -> None:
        """Show a row of the metrics."""
        words = [f"loss {row['loss']:.3f}", f"{row['tokens_per_second']:.0f} tokens/s"]
        names = {"valid_loss": "validation loss {:.3f}", "valid_bleu": "validation BLEU {:.1f}"}
        validation = [words.format(row[name]) for name, words in names.items() if name in row]
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(words))
            if validation:
                self._bar.write(f"update {row['step']}: {', '.join(validation)}", file=sys.stderr)
            return
        words[1:1] = [f"perplexity {row['perplexity']:.1f}", f"accuracy {row['accuracy']:.3f}"]
        words.append(f"{row['padding']:.0%} padding")
        print(f"update {row['step']}: {', '.join(words + validation)}", file=sys.stderr, flush=True)


def read_metrics(out: StrPath) -> list[dict[str, float]]:
    """Return the rows of a run's ``metrics.jsonl``, without an incomplete last line.

    Raises:
        InputError: another line is damaged.
    """
    out = Path(out)
    path, rows = out / METRICS, []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1] if path.exists() else (), 1):
        try:
            row = json.loads(line)
            if row["step"] < 0 or row["perplexity"] <= 0:
                raise ValueError
        except (ValueError, TypeError, KeyError):
            raise InputError(f"line {number} of {path} is damaged: expected a row of numbers; remove it") from None
        rows.append(row)
    return rows
