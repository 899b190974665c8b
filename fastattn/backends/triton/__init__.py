"""CUDA tensors, in Triton (docs/design.md, "Backend functions"). Under TRITON_INTERPRET=1, CPU tensors."""

from fastattn.backends.triton.attention import (
    attention,
    attention_backward,
    varlen_attention,
    varlen_attention_backward,
)
from fastattn.backends.triton.dropout import dropout, dropout_mask
from fastattn.backends.triton.layer_norm import (
    dropout_add_layer_norm,
    dropout_add_layer_norm_backward,
    layer_norm,
    layer_norm_backward,
)
from fastattn.backends.triton.softmax_dropout import softmax_dropout, softmax_dropout_backward

__all__ = [
    "attention",
    "attention_backward",
    "dropout",
    "dropout_add_layer_norm",
    "dropout_add_layer_norm_backward",
    "dropout_mask",
    "layer_norm",
    "layer_norm_backward",
    "softmax_dropout",
    "softmax_dropout_backward",
    "varlen_attention",
    "varlen_attention_backward",
]
