"""The contract of the backend functions: names, arguments and results, each written once.

A backend function takes one record, whose fields are its arguments. The ops, the schemas at torch's dispatcher and the
compiled libraries' registrations follow from the records. The build reads this file too, without torch.

A backend function has no autograd and no checks. It relies on what ``ops`` has normalised, which the records state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class AttentionArgs(NamedTuple):
    """Attention over a dense batch.

    Query i sees key j iff j < length, -window_left <= j - i - diagonal <= window_right and the mask allows it. length
    is key_lengths[b] or Lk. diagonal is length - Lq if lower_right, else 0.
    """

    query: Tensor  # (B, Hq, Lq, E), any strides; all three have one dtype
    key: Tensor  # (B, Hk, Lk, E)
    value: Tensor  # (B, Hk, Lk, Ev)
    attn_mask: Tensor | None  # 4-D with sizes 1 or full, bool (True = takes part) or float (added to scaled scores)
    key_lengths: Tensor | None  # (B,), contiguous int64, within [0, Lk]
    seed: Tensor | None  # (2,), contiguous int64, (key, offset); None iff threshold is 0
    scale: float  # finite, and 0 or at least float32's least normal number
    # Both sides are at least 0, and is_causal is window_right = 0. A side that bounds nothing reaches exactly to the
    # last position: left Lq and right Lk for the upper-left diagonal, left Lk and right Lq for the lower-right one.
    window_left: int
    window_right: int
    lower_right: bool
    threshold: int  # 0 to 65536; a weight is kept iff its 16-bit value is at least the threshold
    # False unless the operands have 16 bits and a gradient may be wanted whose backward pass reads the residual
    keep_residual: bool = False


class AttentionBackwardArgs(NamedTuple):
    """The backward pass of attention over a dense batch."""

    grad_out: Tensor
    grad_lse: Tensor | None
    out: Tensor
    stats: Tensor
    residual: Tensor
    forward: AttentionArgs
    mask_grad: bool  # whether the gradient of attn_mask is needed


class VarlenAttentionArgs(NamedTuple):
    """Attention over packed sequences. The diagonal is the lower-right one; otherwise as ``AttentionArgs``."""

    query: Tensor  # (Tq, Hq, E)
    key: Tensor  # (Tk, Hk, E)
    value: Tensor  # (Tk, Hk, Ev)
    cu_seq_q: Tensor  # (N + 1,), contiguous int64, rising from 0 to Tq
    cu_seq_k: Tensor
    seqused_k: Tensor | None  # (N,), contiguous int64, the keys of each sequence that exist
    seed: Tensor | None
    max_q: int  # bounds of the sequences' lengths
    max_k: int
    scale: float
    window_left: int
    window_right: int
    threshold: int
    keep_residual: bool = False


class VarlenAttentionBackwardArgs(NamedTuple):
    """The backward pass of attention over packed sequences."""

    grad_out: Tensor
    grad_lse: Tensor | None
    out: Tensor
    stats: Tensor
    residual: Tensor
    forward: VarlenAttentionArgs


class SoftmaxDropoutArgs(NamedTuple):
    """Softmax and dropout of scores; the names mean what they mean in ``AttentionArgs``."""

    input: Tensor  # (B, H, Lq, Lk), any strides
    attn_mask: Tensor | None
    key_lengths: Tensor | None
    seed: Tensor | None
    scale: float
    window_left: int
    window_right: int
    lower_right: bool
    threshold: int


class SoftmaxDropoutBackwardArgs(NamedTuple):
    """The backward pass of softmax and dropout."""

    grad_out: Tensor
    stats: Tensor
    forward: SoftmaxDropoutArgs
    mask_grad: bool


class LayerNormArgs(NamedTuple):
    """Layer normalisation over the last dimension."""

    input: Tensor  # (..., D)
    weight: Tensor | None  # (D,), of a dtype of its own
    bias: Tensor | None
    eps: float


class LayerNormBackwardArgs(NamedTuple):
    """The backward pass of layer normalisation."""

    grad_out: Tensor
    input: Tensor
    mean: Tensor
    rstd: Tensor
    weight: Tensor | None
    weight_grad_dtype: torch.dtype | None  # None: this gradient is not needed
    bias_grad_dtype: torch.dtype | None


class DropoutAddLayerNormArgs(NamedTuple):
    """Layer normalisation of sum = residual + dropout(input)."""

    input: Tensor  # (..., D)
    residual: Tensor  # (..., D); the sum has the promoted dtype of both
    weight: Tensor | None
    bias: Tensor | None
    seed: Tensor | None
    threshold: int
    eps: float
    keep_sum: bool
    out_dtype: torch.dtype | None  # None: the sum's dtype; or a 16-bit one if the sum is float32 and kept


class DropoutAddLayerNormBackwardArgs(NamedTuple):
    """The backward pass of ``DropoutAddLayerNormArgs``."""

    grad_out: Tensor  # of out_dtype or the sum's
    grad_sum: Tensor | None
    sum: Tensor
    mean: Tensor
    rstd: Tensor
    weight: Tensor | None
    seed: Tensor | None
    threshold: int
    input_dtype: torch.dtype
    weight_grad_dtype: torch.dtype | None
    bias_grad_dtype: torch.dtype | None


class DropoutArgs(NamedTuple):
    """Dropout, which is its own backward pass."""

    input: Tensor
    seed: Tensor
    threshold: int


class DropoutMaskArgs(NamedTuple):
    """The mask of dropout, bool, True = kept."""

    shape: Sequence[int]
    seed: Tensor
    threshold: int


AnyArgs = (
    AttentionArgs
    | AttentionBackwardArgs
    | VarlenAttentionArgs
    | VarlenAttentionBackwardArgs
    | SoftmaxDropoutArgs
    | SoftmaxDropoutBackwardArgs
    | LayerNormArgs
    | LayerNormBackwardArgs
    | DropoutAddLayerNormArgs
    | DropoutAddLayerNormBackwardArgs
    | DropoutArgs
    | DropoutMaskArgs
)

# stem: {backend function: its record, the names of its results}. An operation's files have the stem's name in every
# folder. All results are tensors:
#
# - out has query's layout in memory and a gradient its operand's: dense, with B, H and L in the operand's order of
#   strides and columns innermost. It is contiguous if a stride is 0 (expanded) or columns are not dense. dropout's
#   result keeps the strides of a dense input. Every other result is contiguous.
# - lse (B, Hq, Lq), mean, rstd and stats are float32, or float64 for float64 operands. lse is a natural logarithm.
# - stats (2, B, Hq, Lq) holds each row's finite row_max and row_sum = sum(exp(s - row_max)), so that
#   P = exp(s - row_max) / row_sum. Both are 0 for a fully masked row. lse does not suffice: in a row all at finfo.min,
#   rounding loses the log of the sum. torch's kernels, to which the reference leaves float64, return only lse. Without
#   such a row stats is then lse and 1, which gives the same P.
# - residual has out's dtype and layout: the result before it was rounded to 16 bits, minus out; 0 where out is not
#   finite. The backward pass needs it for the row sums of dO * O, except for short rows on `cpu`. Without keep_residual
#   it is an empty tensor (0,), which the backward pass reads as 0.
# - sum is an empty tensor of shape (0,) without keep_sum: it is not read, and writing it takes a third of the time.
# - Gradients have their operand's dtype. A gradient that is not needed is an empty tensor of shape (0,).
_STEMS: dict[str, dict[str, tuple[Any, str]]] = {
    "attention": {
        "attention": (AttentionArgs, "out lse stats residual"),
        "attention_backward": (AttentionBackwardArgs, "grad_query grad_key grad_value grad_attn_mask"),
        "varlen_attention": (VarlenAttentionArgs, "out lse stats residual"),
        "varlen_attention_backward": (VarlenAttentionBackwardArgs, "grad_query grad_key grad_value"),
    },
    "softmax_dropout": {
        "softmax_dropout": (SoftmaxDropoutArgs, "out stats"),
        "softmax_dropout_backward": (SoftmaxDropoutBackwardArgs, "grad_input grad_attn_mask"),
    },
    "layer_norm": {
        "layer_norm": (LayerNormArgs, "out mean rstd"),
        "layer_norm_backward": (LayerNormBackwardArgs, "grad_input grad_weight grad_bias"),
        "dropout_add_layer_norm": (DropoutAddLayerNormArgs, "out sum mean rstd"),
        "dropout_add_layer_norm_backward": (
            DropoutAddLayerNormBackwardArgs,
            "grad_input grad_residual grad_weight grad_bias",
        ),
    },
    "dropout": {"dropout": (DropoutArgs, "out"), "dropout_mask": (DropoutMaskArgs, "mask")},
}
# Compiled fast paths (ops/register.py), by operation: the settings of the public function, which follow the record's
# tensors. `NAME_fast` returns the results that the public function can return (RETURNED, else the first one),
# `attention_fast_usual` that of a call whose other arguments are the defaults: each argument takes 0.1 to 0.2 us, a
# small call 3. `NAME_fast_saving` returns them, then what its backward function reads of the call (`read_by_backward`).
# What the caller may change meanwhile (bool masks, lengths, offsets, the seed) is a copy.
_FAST_PATHS = {
    "attention": (
        "float dropout_p=0.0, bool is_causal=False, float? scale=None, bool enable_gqa=False, int window_left=-1, "
        "int window_right=-1"
    ),
    "varlen_attention": (
        "int max_q, int max_k, float dropout_p=0.0, bool is_causal=False, float? scale=None, bool enable_gqa=False, "
        "int window_left=-1, int window_right=-1"
    ),
    "softmax_dropout": "float dropout_p=0.0, bool is_causal=False, float scale=1.0",
    "layer_norm": "int columns, float eps=1e-05",
    "dropout_add_layer_norm": "float dropout_p=0.0, float eps=1e-05, bool prenorm=False, ScalarType? out_dtype=None",
    "dropout": "float dropout_p",
}
RETURNED = {"dropout_add_layer_norm": 2}  # out and sum, which is None without prenorm
_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "float": "float",
    "int": "SymInt",
    "Sequence[int]": "SymInt[]",
    "bool": "bool",
    "torch.dtype": "ScalarType",
    "torch.dtype | None": "ScalarType?",
}

STEM_OF = {name: stem for stem, functions in _STEMS.items() for name in functions}
RECORDS = {name: record for functions in _STEMS.values() for name, (record, _) in functions.items()}


def _annotations(record: Any) -> dict[str, str]:
    return {name: getattr(kind, "__forward_arg__", kind) for name, kind in record.__annotations__.items()}


# The place of the forward pass's record within a backward pass's, and its class.
_WITHIN = {
    record: (record._fields.index("forward"), globals()[_annotations(record)["forward"]])
    for record in RECORDS.values()
    if "forward" in record._fields
}


def flatten(args: Any) -> tuple[Any, ...]:
    """Return a record's arguments as torch's dispatcher takes them: a record within it is replaced by its fields."""
    within = _WITHIN.get(type(args))
    if within is None:
        return args
    place, _ = within
    return *args[:place], *args[place], *args[place + 1 :]


def unflatten(record: Any, flat: Sequence[Any]) -> Any:
    """Return the record whose ``flatten`` is ``flat``."""
    if record not in _WITHIN:
        return record(*flat)
    place, forward = _WITHIN[record]
    end = place + len(forward._fields)
    return record(*flat[:place], forward(*flat[place:end]), *flat[end:])


def arguments(record: Any) -> list[tuple[str, str]]:
    """Return the names of a record's arguments, flattened, and their types in a schema."""
    listed: list[tuple[str, str]] = []
    for name, kind in _annotations(record).items():
        listed += arguments(globals()[kind]) if name == "forward" else [(name, _TYPES[kind])]
    return listed


# The number of a record's tensors, which are its first arguments.
TENSORS = {record: sum(kind.startswith("Tensor") for _, kind in arguments(record)) for record in RECORDS.values()}


def _schema(record: Any, results: str) -> str:
    given = ", ".join(f"{kind} {name}" for name, kind in arguments(record))
    return f"({given}) -> ({', '.join(f'Tensor {name}' for name in results.split())})"


def read_by_backward(name: str, backward: str) -> list[tuple[str, str]]:
    """Return names and types of what a backward function reads of a call's record and results, in its own order.

    Its first arguments are gradients, its last ones say which gradients are needed.
    """
    there = {label for label, _ in arguments(RECORDS[name])} | set(RESULTS[name])
    given = arguments(RECORDS[backward])
    if backward == name:  # dropout, which is its own backward function, takes the gradient as its input
        return given[1:]
    return [(label, kind) for label, kind in given if label in there]


def _fast_schemas(name: str, settings: str) -> dict[str, str]:
    record = RECORDS[name]
    listed = [(kind.replace("SymInt", "int"), label) for label, kind in arguments(record)]
    tensors = [f"{'Tensor?' if label == 'seed' else kind} {label}" for kind, label in listed[: TENSORS[record]]]
    if all("=" in setting for setting in settings.split(", ")):  # a default must not precede what has none
        tensors = [f"{tensor}=None" if tensor.startswith("Tensor?") else tensor for tensor in tensors]
    backward = f"{name}_backward" if f"{name}_backward" in RECORDS else name
    read = [f"{kind.replace('SymInt', 'int')} {label}" for label, kind in read_by_backward(name, backward)]
    given = f"({', '.join(tensors)}, {settings})"
    results = [f"Tensor returned_{label}" for label in RESULTS[name][: RETURNED.get(name, 1)]]
    return {
        f"{name}_fast": f"{name}_fast{given} -> ({', '.join(results)})",
        f"{name}_fast_saving": f"{name}_fast_saving{given} -> ({', '.join([*results, *read])})",
    }


RESULTS = {name: results.split() for functions in _STEMS.values() for name, (_, results) in functions.items()}
SCHEMAS = {name: name + _schema(*signature) for functions in _STEMS.values() for name, signature in functions.items()}
for _name, _settings in _FAST_PATHS.items():
    SCHEMAS |= _fast_schemas(_name, _settings)
SCHEMAS["attention_fast_usual"] = (
    "attention_fast_usual(Tensor query, Tensor key, Tensor value, bool is_causal=False) -> Tensor"
)
# Operations that the libraries define themselves (csrc/bindings: library.cpp, limits.cpp, launcher.cpp).
OWN = (
    *("contract", "operations", "isa", "isas", "machine_isas", "compiled_isas", "set_isa", "multiply_add"),
    *("set_compile", "set_driver"),
)
CONTRACT = hashlib.sha256(repr((SCHEMAS, OWN)).encode()).hexdigest()[:12]  # compiled into the libraries
