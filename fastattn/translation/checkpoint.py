"""Checkpoints: one folder each, written whole or not at all.

A run's folder holds ``step-00000400/`` folders, each complete in itself. Its link ``best`` leads to the checkpoint of
lowest validation loss::

    model.safetensors   the weights (tied matrices once) and the number of updates that they have had;
    config.json         the model's TransformerConfig, and under "training" the run's TrainingConfig;
    tokenizer.model     the sentencepiece model;
    target.model        the same pieces with the target's normalization, if it differs from the source's;
    training.pt         optimizer and place in the data, which only resuming needs.

The run's folder also holds ``text/``, the encoded training text (:func:`fastattn.translation.data.encode`). If it is
missing, the text is encoded again. A checkpoint is written under a hidden name, flushed to disk, and renamed. So a
checkpoint with its final name is complete. Checkpoints of :func:`save_int8` and :func:`save_model` have no training.pt.
"""

import contextlib
import dataclasses
import fcntl
import itertools
import os
import re
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from fastattn.errors import InputError, require
from fastattn.files import PARTIAL, StrPath, expect_absent, flush, remove, written_whole
from fastattn.translation.config import TrainingConfig, TransformerConfig, from_json
from fastattn.translation.model import Transformer
from fastattn.translation.tokenizer import Tokenizer

WEIGHTS, CONFIG, TRAINING = "model.safetensors", "config.json", "training.pt"
TOKENIZER, TARGET_TOKENIZER = "tokenizer.model", "target.model"
PRETRAINED = Path(__file__).parent.parent / "pretrained"  # the bundled English-Spanish model
LOCK, TEXT = ".lock", "text"
ABOUT = "text.json"  # file in the folder TEXT that identifies its text and tokenizer


def save(
    run: StrPath, step: int, model: Transformer, tokenizer: Tokenizer, state: dict, config: TrainingConfig
) -> Path:
    """Write ``run/step-NNNNNNNN`` and return its path. ``state`` holds only tensors, numbers and strings."""
    run = Path(run)
    final = run / f"step-{step:08d}"
    with written_whole(final) as partial:
        _write(partial, model, tokenizer, _parameters(model), step, config)
        with _writable(partial / TRAINING):
            torch.save(state, partial / TRAINING)
    return final


def save_int8(model: Transformer, tokenizer: Tokenizer, updates: int | None, out: StrPath) -> None:
    """Write a checkpoint for translating, a quarter of the usual size, to the new folder ``out``.

    Each row of a matrix is int8 times a float32 ``scale``, its largest absolute value / 127.

    Raises:
        InputError: ``out`` exists.
    """
    weights = {}
    for name, parameter in _parameters(model).items():
        if parameter.dim() == 1:
            weights[name] = parameter
            continue
        scale = parameter.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
        weights[name], weights[f"{name}.scale"] = (parameter / scale).round().to(torch.int8), scale
    with written_whole(out) as partial:
        _write(partial, model, tokenizer, weights, updates)


def save_model(model: Transformer, tokenizer: Tokenizer, out: StrPath, number: int | None = None) -> None:
    """Write a checkpoint for translating to the new folder ``out``.

    Args:
        number: the number of updates that the model has had, if it is known.

    Raises:
        InputError: ``out`` exists.
    """
    with written_whole(out) as partial:
        _write(partial, model, tokenizer, _parameters(model), number)


def average(run: StrPath, last: int, out: StrPath) -> None:
    """Write the mean of the weights of a run's ``last`` checkpoints (section 6.1) to the new folder ``out``.

    The checkpoint before the first update does not count. Neither does an older one that was kept as the best while
    later ones were removed.

    Raises:
        InputError: ``out`` exists, or the run has fewer checkpoints, or they are not of one run.
    """
    run = Path(run)
    expect_absent(out)
    trained = [path for path in steps(run) if updates(path) != 0]
    if not trained:
        raise lacking(run, "trained checkpoint")
    gaps = [i for i, pair in enumerate(itertools.pairwise(trained), 1) if _removed_between(*pair)]
    found = trained[max(gaps, default=0) :]
    if not 1 <= last <= len(found):
        raise InputError(
            f"last is {last}, expected 1 to {len(found)}: as many trained checkpoints in a row as {run} holds"
        )
    found = found[-last:]
    model, tokenizer = load(found[-1])
    sums = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in model.parameters()]
    for path in found:
        other, others_tokenizer = load(path)
        if (other.config, others_tokenizer.models) != (model.config, tokenizer.models):
            raise InputError(f"{path} is of another run than {found[-1].name}: it has another shape or vocabulary")
        for total, parameter in zip(sums, other.parameters(), strict=True):
            total += parameter.detach()
    with torch.no_grad():
        for total, parameter in zip(sums, model.parameters(), strict=True):
            parameter.copy_(total / last)
    save_model(model, tokenizer, out, updates(found[-1]))


def _removed_between(earlier: Path, later: Path) -> bool:
    """Return whether the run has had checkpoints between these two."""
    _, training = load_config(later)
    return training is not None and _step(later) - _step(earlier) > training.save_every


def _parameters(model: Transformer) -> dict[str, Tensor]:
    """Return the model's parameters on the CPU, tied ones once."""
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def _write(
    folder: Path,
    model: Transformer,
    tokenizer: Tokenizer,
    weights: dict[str, Tensor],
    updates: int | None,
    config: TrainingConfig | None = None,
) -> None:
    write_weights(weights, folder / WEIGHTS, {} if updates is None else {"updates": str(updates)})
    (folder / CONFIG).write_text(model.config.to_json(config), encoding="utf-8")
    write_tokenizer(tokenizer, folder)


def write_tokenizer(tokenizer: Tokenizer, folder: StrPath) -> None:
    """Write the file of the tokenizer, or its two files."""
    folder = Path(folder)
    for name, model in zip((TOKENIZER, TARGET_TOKENIZER), tokenizer.models, strict=False):
        (folder / name).write_bytes(model)


def _tokenizer(folder: Path) -> Tokenizer:
    names = (TOKENIZER, TARGET_TOKENIZER) if (folder / TARGET_TOKENIZER).exists() else (TOKENIZER,)
    return Tokenizer(*((folder / name).read_bytes() for name in names))


def write_weights(weights: dict[str, Tensor], path: StrPath, metadata: dict[str, str]) -> None:
    """Write a safetensors file; raise :class:`InputError` if the disk refuses it."""
    with _writable(path):
        require("safetensors.torch").save_file(weights, path, metadata)


@contextlib.contextmanager
def _writable(path: StrPath) -> Iterator[None]:
    """Turn a library's error into an :class:`InputError` that names the file; on a full disk each raises its own."""
    try:
        yield
    except (RuntimeError, require("safetensors").SafetensorError) as error:
        raise InputError(f"cannot write {path}: {_first_line(error)}") from None


@contextlib.contextmanager
def locked(run: StrPath, launch: str = "") -> Iterator[None]:
    """Make this process the only one that writes the run's folder, and create the folder if it is missing.

    The kernel holds the lock (``flock``) and releases it when the process ends, in any way. :func:`locked_by` returns
    its ``launch``, even afterwards.

    Raises:
        InputError: another process holds the lock.
    """
    run = Path(run)
    run.mkdir(parents=True, exist_ok=True)
    with open(run / LOCK, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.readline().rstrip("\n") or "another process"
            raise InputError(f"{run} is being written by {owner}: wait for its end, or name another folder") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n{launch}")
        file.flush()
        yield


def locked_by(run: StrPath) -> str:
    """Return the launch of the process that last locked the run's folder; "" if there was none."""
    run = Path(run)
    lock = run / LOCK
    return lock.read_text(encoding="utf-8").partition("\n")[2] if lock.exists() else ""


def is_new(run: StrPath) -> bool:
    """Return whether the folder is missing or holds only what an interrupted start left."""
    run = Path(run)
    if not run.exists():
        return True
    return run.is_dir() and all(
        path.name == LOCK or path.name.startswith(PARTIAL) or (path.name == TEXT and (path / ABOUT).is_file())
        for path in run.iterdir()
    )


def expect_new(run: StrPath, mend: str = "name another folder") -> None:
    """Raise :class:`InputError` unless a run may begin in this folder; checked before the work begins.

    Args:
        mend: what to do if the folder exists already.
    """
    run = Path(run)
    if not is_new(run):
        raise InputError(f"{run} exists already: {mend}")
    existing = next(path for path in (run.absolute(), *run.absolute().parents) if path.exists())
    try:
        tempfile.TemporaryDirectory(prefix=PARTIAL, dir=existing).cleanup()
    except OSError as error:
        raise InputError(f"cannot write {run}: {(error.strerror or str(error)).lower()}") from None


def mark_best(checkpoint: StrPath) -> None:
    """Set the run's link ``best`` to ``checkpoint``."""
    checkpoint = Path(checkpoint)
    link = checkpoint.parent / f"{PARTIAL}best"
    link.unlink(missing_ok=True)
    link.symlink_to(checkpoint.name)
    best = checkpoint.parent / "best"
    if best.is_dir() and not best.is_symlink():  # the run's folder is a copy that followed links
        remove(best)
    os.replace(link, best)
    flush(checkpoint.parent)


def prune(run: StrPath, keep: int) -> None:
    """Remove all checkpoints except the newest ``keep`` and the best, and the remains of interrupted writes."""
    run = Path(run)
    best = (run / "best").resolve()
    for checkpoint in steps(run)[:-keep]:
        if checkpoint.resolve() != best:
            remove(checkpoint)
    for left_behind in run.glob(f"{PARTIAL}*"):  # hidden files with other names stay
        if re.fullmatch(r"(old-)?(step-\d{8,}|text|best)", left_behind.name.removeprefix(PARTIAL)):
            remove(left_behind)


def steps(run: StrPath) -> list[Path]:
    """Return the complete checkpoints of a run's folder, oldest first. A copy with another name does not count."""
    run = Path(run)
    found = (path for path in run.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name) and path.is_dir())
    return sorted(found, key=_step)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def find(path: StrPath) -> Path:
    """Return the checkpoint that ``path`` means: itself, the best of a run's folder, or its newest."""
    path = Path(path)
    if (path / WEIGHTS).is_file():
        return path
    if (path / "best" / WEIGHTS).is_file():
        return path / "best"
    if steps(path):
        return steps(path)[-1]
    raise lacking(path, "checkpoint")


def newest(run: StrPath) -> Path:
    """Return the checkpoint to resume a run from."""
    if not steps(run):
        raise lacking(run, "checkpoint to resume from")
    return steps(run)[-1]


def lacking(run: StrPath, what: str) -> InputError:
    """Return the error of a path that is not the folder of a run, or of a folder that has no ``what``."""
    run = Path(run)
    problem = f"holds no {what}" if run.is_dir() else "is a file" if run.exists() else "does not exist"
    return InputError(f"{run} {problem}: expected the folder of a run of `fastattn train`")


def load(path: StrPath, device: str | torch.device = "cpu") -> tuple[Transformer, Tokenizer]:
    """Load the model, in evaluation mode, and the tokenizer of a checkpoint or a run's folder (see :func:`find`)."""
    checkpoint = find(path)
    for package in ("safetensors.torch", "sentencepiece"):  # a missing package must not read as a damaged checkpoint
        require(package)
    with _readable(checkpoint):
        tokenizer = _tokenizer(checkpoint)
        config = TransformerConfig.from_json((checkpoint / CONFIG).read_text(encoding="utf-8"))
        model = _with_weights(config, checkpoint / WEIGHTS)
    if tokenizer.vocab_size != model.config.vocab_size:
        raise InputError(
            f"{checkpoint}: the tokenizer has {tokenizer.vocab_size} pieces but the model {model.config.vocab_size}"
        )
    return model.to(device).eval(), tokenizer


def updates(path: StrPath) -> int | None:
    """Return the number of updates that the weights of :func:`load`'s checkpoint have had; None if it is not stored."""
    checkpoint = find(path)
    with _readable(checkpoint), _undamaged(checkpoint / WEIGHTS):
        with require("safetensors").safe_open(checkpoint / WEIGHTS, framework="pt") as weights:
            number = (weights.metadata() or {}).get("updates")
        return int(number) if number and number.isdecimal() else None


def load_config(checkpoint: StrPath) -> tuple[TransformerConfig, TrainingConfig | None]:
    """Return the configuration of a checkpoint's model, and that of its run, or None if it is not stored."""
    checkpoint = Path(checkpoint)
    with _readable(checkpoint):
        model, training = from_json((checkpoint / CONFIG).read_text(encoding="utf-8"))
    if training is not None and not (checkpoint / TARGET_TOKENIZER).exists():
        # A single tokenizer normalises both sides alike. Earlier versions store no rule: they used today's default.
        training = dataclasses.replace(training, target_normalization=training.normalization)
    return model, training


def read_config(path: StrPath) -> tuple[TransformerConfig, TrainingConfig | None]:
    """Return the configurations in a file, like :func:`load_config` of a checkpoint."""
    path = Path(path)
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except InputError as error:
        raise InputError(f"cannot use {path}: {error}") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"cannot read {path}: it is not UTF-8") from None


def load_training(checkpoint: StrPath) -> dict:
    """Load the ``state`` that :func:`save` wrote."""
    checkpoint = Path(checkpoint)
    with _readable(checkpoint):
        try:
            state = torch.load(checkpoint / TRAINING, map_location="cpu", weights_only=True)
        except (OSError, MemoryError):
            raise
        except Exception:  # the unpickler's exception depends on the bytes: KeyError, struct.error or another
            raise InputError(f"{TRAINING} is damaged") from None
        if not isinstance(state, dict):
            raise InputError(f"{TRAINING} is not one that `fastattn train` wrote")
        return state


def _with_weights(config: TransformerConfig, path: Path) -> Transformer:
    with _undamaged(path):
        weights = require("safetensors.torch").load_file(path)
    for name in [name for name, tensor in weights.items() if f"{name}.scale" in weights]:
        weights[name] = weights[name] * weights.pop(f"{name}.scale")
    with torch.device("meta"):  # allocates nothing, because the shapes of a damaged configuration may be huge
        shapes = dict(Transformer(config).named_parameters())
    found, expected = ({name: tensor.shape for name, tensor in t.items()} for t in (weights, shapes))
    if found != expected:
        differing = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        raise InputError(f"{path.name} does not fit {CONFIG}: they differ in {', '.join(differing[:3])}")
    model = Transformer(config, device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model


@contextlib.contextmanager
def _undamaged(path: Path) -> Iterator[None]:
    """Turn safetensors' error into an :class:`InputError` that names the damaged file."""
    try:
        yield
    except require("safetensors").SafetensorError as error:
        raise InputError(f"{path.name} is damaged: {_first_line(error)}") from None


@contextlib.contextmanager
def _readable(checkpoint: Path):
    """Turn an error while a checkpoint is read into an :class:`InputError` that names the checkpoint."""
    try:
        yield
    except InputError as error:
        raise InputError(f"cannot read the checkpoint {checkpoint}: {error}") from None
    except OSError as error:
        raise InputError(f"cannot read the checkpoint {checkpoint}: {error.filename}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"cannot read the checkpoint {checkpoint}: {CONFIG} is not UTF-8") from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
