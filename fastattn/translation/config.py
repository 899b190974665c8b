"""The shape of a Transformer: one frozen record, its checks, its presets, and its JSON form."""

import dataclasses
import json
from typing import Any

from fastattn.translation.errors import InputError

PRESETS: dict[str, dict[str, Any]] = {
    # For two CPU cores: 7.6 M parameters at a vocabulary of 8000. Normalising first, it learns faster.
    "tiny": {
        "d_model": 256,
        "d_ff": 1024,
        "num_heads": 4,
        "encoder_layers": 3,
        "decoder_layers": 3,
        "norm_first": True,
    },
    # "Attention Is All You Need", Table 3: base and big.
    "base": {},
    "big": {"d_model": 1024, "d_ff": 4096, "num_heads": 16, "dropout": 0.3},
}
POSITIONS = ("sinusoidal", "learned")
TYING = ("all", "output", "none")


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Every choice that shapes a :class:`~fastattn.Transformer`. The defaults are the paper's base model.

    Args:
        vocab_size: number of pieces, shared by both languages.
        d_model, d_ff, num_heads, encoder_layers, decoder_layers: the paper's d_model, d_ff, h and N.
        head_dim, value_head_dim: d_k and d_v of one head; d_model // num_heads where not given.
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
        InputError: a value out of its range, named with what was expected.
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
            self._expect(name, _is_int(getattr(self, name)) and getattr(self, name) >= 1, "an integer of at least 1")
        self._expect("d_model", self.d_model % 2 == 0, "an even number (positions come in pairs of sine and cosine)")
        for name in ("head_dim", "value_head_dim"):
            value = getattr(self, name)
            self._expect(name, value is None or (_is_int(value) and value >= 1), "None or an integer of at least 1")
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

    def _expect(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise InputError(f"TransformerConfig: {name} is {getattr(self, name)!r}, expected {expected}")

    @classmethod
    def preset(cls, name: str, vocab_size: int, **changes) -> "TransformerConfig":
        """The configuration called ``name`` ("tiny", "base" or "big"), with ``changes`` to single fields."""
        if name not in PRESETS:
            raise InputError(f"unknown preset {name!r}, expected one of {', '.join(PRESETS)}")
        return cls(vocab_size=vocab_size, **{**PRESETS[name], **changes})

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "TransformerConfig":
        """The configuration that :meth:`to_json` wrote; raises :class:`InputError` on anything else."""
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"the model configuration is not valid JSON: {error}") from None
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(fields, dict) or not fields.keys() <= names or "vocab_size" not in fields:
            given = sorted(fields.keys() - names) if isinstance(fields, dict) else type(fields).__name__
            raise InputError(f"the model configuration needs vocab_size and knows only {sorted(names)}; given {given}")
        return cls(**fields)


def _is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
