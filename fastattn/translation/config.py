"""Configuration of a run: the shape of its Transformer, its training, and the presets of both.

There are two frozen records with their checks and their JSON form. A preset's other fields are the paper's base model.
"""

import dataclasses
import json
import sys
from typing import Any

from fastattn.errors import InputError

POSITIONS = ("sinusoidal", "learned")
NORMALIZATIONS = ("nfkc", "nmt_nfkc", "identity")  # rules of sentencepiece
SIZE = "an integer from 1 to 2**31 - 1"
TYING = ("all", "output", "none")


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Shape of a :class:`~fastattn.Transformer`. The defaults are the paper's base model.

    Args:
        vocab_size: number of pieces, shared by both languages.
        d_model, d_ff, num_heads, encoder_layers, decoder_layers: the paper's d_model, d_ff, h and N.
        head_dim, value_head_dim: d_k and d_v of one head; by default d_model // num_heads, and ``head_dim``.
        dropout: rate on every sub-layer output and on embeddings plus positions (section 5.4).
        attention_dropout: rate on the attention probabilities.
        ffn_dropout: rate on the hidden layer of the feed-forward network.
        norm_first: normalise the input of each sub-layer instead of the residual sum; adds a final norm to each stack.
        norm_eps: added to the variance in every LayerNorm.
        attention_bias: biases in the four attention projections (the paper has none).
        output_bias: a bias on the logits.
        positions: "sinusoidal" (any length), or "learned" (at most ``max_positions``).
        max_positions: the longest input of learned positions.
        tying: embeddings that share one matrix. "all": source, target and output (section 3.4); "output": target and
            output; "none".
        scale_embeddings: multiply embeddings by sqrt(d_model) (section 3.4).
        scale_logits: multiply logits by d_model**-0.5.
        window_size: (left, right) reach of self-attention in tokens, -1 = unbounded: the restricted self-attention of
            section 4. In the decoder the right reach is 0.
        pad_id, bos_id, eos_id: pieces that pad, begin and end a sentence.

    Raises:
        InputError: a value is out of its range; the message names it and the expected range.

    Examples:
        >>> big = fastattn.TransformerConfig(vocab_size=37000, d_model=1024, d_ff=4096, num_heads=16, dropout=0.3)
        >>> sum(parameter.numel() for parameter in fastattn.Transformer(big, device="meta").parameters())
        214171648
    """

    vocab_size: int
    d_model: int = 512
    d_ff: int = 2048
    num_heads: int = 8
    encoder_layers: int = 6
    decoder_layers: int = 6
    head_dim: int | None = None
    value_head_dim: int | None = None
    dropout: float = 0.1
    attention_dropout: float = 0.0
    ffn_dropout: float = 0.0
    norm_first: bool = False
    norm_eps: float = 1e-5
    attention_bias: bool = False
    output_bias: bool = False
    positions: str = "sinusoidal"
    max_positions: int = 1024
    tying: str = "all"
    scale_embeddings: bool = True
    scale_logits: bool = False
    window_size: tuple[int, int] = (-1, -1)
    pad_id: int = 0
    bos_id: int = 1
    eos_id: int = 2

    def __post_init__(self):
        for name in ("vocab_size", "d_model", "d_ff", "num_heads", "encoder_layers", "decoder_layers", "max_positions"):
            self._expect(name, _is_size(getattr(self, name)), SIZE)
        self._expect("d_model", self.d_model % 2 == 0, "an even number (positions come in pairs of sine and cosine)")
        for name in ("head_dim", "value_head_dim"):
            value = getattr(self, name)
            self._expect(name, value is None or _is_size(value), f"None or {SIZE}")
        if None in (self.head_dim, self.value_head_dim):
            divides = self.d_model % self.num_heads == 0
            self._expect("num_heads", divides, f"a divisor of d_model={self.d_model}, or head_dim and value_head_dim")
        for name in ("dropout", "attention_dropout", "ffn_dropout"):
            value = getattr(self, name)
            self._expect(name, _is_number(value) and 0 <= value < 1, "a rate in [0, 1)")
        self._expect("norm_eps", _is_number(self.norm_eps) and self.norm_eps > 0, "a positive number")
        for name in ("norm_first", "attention_bias", "output_bias", "scale_embeddings", "scale_logits"):
            self._expect(name, isinstance(getattr(self, name), bool), "True or False")
        self._expect("positions", self.positions in POSITIONS, f"one of {', '.join(POSITIONS)}")
        self._expect("tying", self.tying in TYING, f"one of {', '.join(TYING)}")
        window = self.window_size
        is_pair = isinstance(window, (tuple, list)) and len(window) == 2 and all(_is_int(w) and w >= -1 for w in window)
        self._expect("window_size", is_pair, "two integers of at least -1")
        object.__setattr__(self, "window_size", tuple(window))
        special = (self.pad_id, self.bos_id, self.eos_id)
        for name in ("pad_id", "bos_id", "eos_id"):
            value = getattr(self, name)
            in_range = _is_int(value) and 0 <= value < self.vocab_size and special.count(value) == 1
            self._expect(name, in_range, f"a piece of its own in [0, {self.vocab_size})")

    @property
    def most_positions(self) -> int:
        """Length of the longest sequence that has positions, with its padding if it is padded."""
        return self.max_positions if self.positions == "learned" else sys.maxsize

    def _expect(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise InputError(f"TransformerConfig: {name} is {getattr(self, name)!r}, expected {expected}")

    @classmethod
    def preset(cls, name: str, vocab_size: int, **changes) -> "TransformerConfig":
        """Return the configuration ``name`` ("tiny", "base", "big", a row of Table 3), with ``changes`` to fields."""
        return cls(vocab_size=vocab_size, **{**_preset(name).model, **changes})

    def to_json(self, training: "TrainingConfig | None" = None) -> str:
        """Return JSON for :func:`from_json`; ``training`` is the configuration of the model's run."""
        fields = dataclasses.asdict(self)
        if training is not None:
            fields["training"] = dataclasses.asdict(training)
        return json.dumps(fields, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "TransformerConfig":
        """Return the configuration that :meth:`to_json` wrote; raise :class:`InputError` on anything else."""
        return from_json(text)[0]


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Settings of a run, without its model, its text and the number of its processes.

    The defaults are the paper's base model's. The learning rate of update s is
    ``rate * d_model**-0.5 * min(s**-0.5, s * warmup**-1.5)`` (formula 3 at rate 1).

    Args:
        preset: name of the preset that the run began with, for information only.
        batch_tokens: maximum number of tokens per side of an update (section 5.1). Each micro-batch has an equal share
            of it. A sentence longer than a share is a micro-batch by itself.
        micro_batches: number of micro-batches per update, each a packed batch with its own dropout. They are computed
            by several processes, or one after the other. None: one per process; a run's stored configuration has the
            number.
        warmup, rate: parameters of the schedule; warmup in updates.
        label_smoothing: probability spread over all pieces (section 5.4).
        clip_norm: maximum norm of the gradient; a longer one is scaled down. None: no limit, as in the paper.
        precision: "bf16", "fp32", or "auto", which :func:`fastattn.translation.precision.resolve` decides.
        seed: seed of parameters, order and dropout.
        max_steps, max_minutes: number of updates, and minutes of training, after which the run ends; None: no limit.
        save_every: updates between checkpoints, each with a validation; the paper's were ten minutes apart.
        bleu_every: updates between BLEU scores on the validation text; None: never.
        keep: number of newest checkpoints that are kept, in addition to the best; the default is the number that the
            paper averages.
        normalization, target_normalization: rule that normalises the characters of sources and targets before they
            are divided into pieces: "nfkc", "nmt_nfkc" (which also turns invisible characters into spaces) or
            "identity".

    Raises:
        InputError: a value is out of its range; the message names it and the expected range.
    """

    preset: str = "base"
    batch_tokens: int = 25_000
    micro_batches: int | None = None
    warmup: int = 4000
    rate: float = 1.0
    label_smoothing: float = 0.1
    clip_norm: float | None = None
    precision: str = "auto"
    seed: int = 1
    max_steps: int = 100_000
    max_minutes: float | None = None
    save_every: int = 1500
    bleu_every: int | None = None
    keep: int = 5
    normalization: str = "nmt_nfkc"
    target_normalization: str = "identity"

    def __post_init__(self):
        for name in ("batch_tokens", "micro_batches", "warmup", "max_steps", "save_every", "bleu_every", "keep"):
            value = getattr(self, name)
            optional = name in ("micro_batches", "bleu_every") and value is None
            self._expect(name, optional or _is_size(value), SIZE)
        for name in ("rate", "clip_norm", "max_minutes"):
            value = getattr(self, name)
            optional = name != "rate" and value is None
            self._expect(name, optional or (_is_number(value) and value > 0), "a positive number")
        smoothing = self.label_smoothing
        self._expect("label_smoothing", _is_number(smoothing) and 0 <= smoothing < 1, "a number in [0, 1)")
        self._expect("seed", _is_int(self.seed) and -(2**63) <= self.seed < 2**63, "an integer of 64 bits")
        for name in ("preset", "precision"):
            self._expect(name, isinstance(getattr(self, name), str), "a name")
        for name in ("normalization", "target_normalization"):
            self._expect(name, getattr(self, name) in NORMALIZATIONS, f"one of {', '.join(NORMALIZATIONS)}")
        self._expect(
            "batch_tokens",
            self.micro_batches is None or self.batch_tokens >= self.micro_batches,
            f"at least one for each of the {self.micro_batches} micro-batches of an update",
        )

    def _expect(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise InputError(f"{name} is {getattr(self, name)!r}, expected {expected}")

    @classmethod
    def of_preset(cls, name: str) -> "TrainingConfig":
        """Return the training of the preset ``name``."""
        return cls(preset=name, **_preset(name).training)


# Fields that may differ when a run is resumed. They decide when the run ends and what it writes.
CHANGEABLE = ("max_steps", "max_minutes", "save_every", "bleu_every", "keep")


def from_json(text: str) -> tuple[TransformerConfig, TrainingConfig | None]:
    """Return the configurations of a model and of its run from the text of :meth:`TransformerConfig.to_json`.

    Missing fields have their defaults.

    Raises:
        InputError: the text is anything else.
    """
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the model configuration is not valid JSON: {error}") from None
    training = fields.pop("training", None) if isinstance(fields, dict) else None
    model = TransformerConfig(**_known(fields, TransformerConfig, "model", ["vocab_size"]))
    return model, None if training is None else TrainingConfig(**_known(training, TrainingConfig, "training", []))


def _known(fields: Any, record: type, name: str, needed: list[str]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(record)}
    if not isinstance(fields, dict) or not fields.keys() <= names or not fields.keys() >= set(needed):
        given = sorted(fields.keys() - names) if isinstance(fields, dict) else type(fields).__name__
        needs = "".join(f"needs {field} and " for field in needed)
        raise InputError(f"the {name} configuration {needs}knows only {sorted(names)}; given {given}")
    return fields


@dataclasses.dataclass(frozen=True)
class Preset:
    """Changes of a preset to the defaults of :class:`TransformerConfig` and :class:`TrainingConfig`.

    ``paper`` is the number of parameters in the paper, in millions; None if the paper has no number.
    """

    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    training: dict[str, Any] = dataclasses.field(default_factory=dict)
    vocab_size: int = 37_000  # default of the preset; section 5.1
    paper: int | None = None


PRESETS = {
    # Preset for two CPU cores. With norm_first it learns faster.
    "tiny": Preset(
        {"d_model": 256, "d_ff": 1024, "num_heads": 4, "encoder_layers": 3, "decoder_layers": 3, "norm_first": True},
        {"batch_tokens": 2048, "warmup": 400, "rate": 0.7, "max_steps": 10_000, "save_every": 400},
        vocab_size=8000,
    ),
    # "Attention Is All You Need", Table 3: base and big are its first and last row, the letters its other rows.
    "base": Preset(paper=65),
    "big": Preset(
        {"d_model": 1024, "d_ff": 4096, "num_heads": 16, "dropout": 0.3},
        {"max_steps": 300_000, "save_every": 600, "keep": 20},
        paper=213,
    ),
    **{f"A-h{h}": Preset({"num_heads": h}) for h in (1, 4, 16, 32)},
    "B-dk16": Preset({"head_dim": 16, "value_head_dim": 64}, paper=58),
    "B-dk32": Preset({"head_dim": 32, "value_head_dim": 64}, paper=60),
    **{f"C-N{n}": Preset({"encoder_layers": n, "decoder_layers": n}, paper=m) for n, m in ((2, 36), (4, 50), (8, 80))},
    "C-dmodel256": Preset({"d_model": 256}, paper=28),
    "C-dmodel1024": Preset({"d_model": 1024}, paper=168),
    "C-dff1024": Preset({"d_ff": 1024}, paper=53),
    "C-dff4096": Preset({"d_ff": 4096}, paper=90),
    **{f"D-Pdrop{rate}": Preset({"dropout": rate}) for rate in (0.0, 0.2)},
    **{f"D-eps{smoothing}": Preset(training={"label_smoothing": smoothing}) for smoothing in (0.0, 0.2)},
    "E-learned": Preset({"positions": "learned", "max_positions": 512}),
}


def _preset(name: str) -> Preset:
    if name not in PRESETS:
        raise InputError(f"unknown preset {name!r}, expected one of {', '.join(PRESETS)}")
    return PRESETS[name]


def _is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_size(value) -> bool:
    return _is_int(value) and 1 <= value < 2**31


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
