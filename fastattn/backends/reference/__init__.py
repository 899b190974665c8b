"""Plain PyTorch: the oracle of every other backend and the fallback on any device.

Low-precision operands are computed in float32, float64 in float64. The backward functions recompute everything
from the operands by differentiable torch operations, so that double backward works here.
"""

from fastattn.backends.reference.attention import (
    attention,
    attention_backward,
    varlen_attention,
    varlen_attention_backward,
)
from fastattn.backends.reference.dropout import dropout, dropout_mask
from fastattn.backends.reference.layer_norm import (
    dropout_add_layer_norm,
    dropout_add_layer_norm_backward,
    layer_norm,
    layer_norm_backward,
)
from fastattn.backends.reference.softmax_dropout import softmax_dropout, softmax_dropout_backward

DEVICE = "cpu"  # and any other
MISSING = ""
FUNCTIONS = {
    "attention": attention,
    "attention_backward": attention_backward,
    "varlen_attention": varlen_attention,
    "varlen_attention_backward": varlen_attention_backward,
    "softmax_dropout": softmax_dropout,
    "softmax_dropout_backward": softmax_dropout_backward,
    "layer_norm": layer_norm,
    "layer_norm_backward": layer_norm_backward,
    "dropout_add_layer_norm": dropout_add_layer_norm,
    "dropout_add_layer_norm_backward": dropout_add_layer_norm_backward,
    "dropout": dropout,
    "dropout_mask": dropout_mask,
}


def refusal(op: str, args: tuple) -> None:
    """None: it serves every call."""
