"""The operations: one a file, each read from top to bottom: docstring, checks, schema, fake, autograd."""

from fastattn.ops.attention import attention_weights, scaled_dot_product_attention, varlen_attn
from fastattn.ops.dropout import dropout, dropout_mask
from fastattn.ops.layer_norm import dropout_add_layer_norm, layer_norm
from fastattn.ops.softmax_dropout import softmax_dropout

__all__ = [
    "attention_weights",
    "dropout",
    "dropout_add_layer_norm",
    "dropout_mask",
    "layer_norm",
    "scaled_dot_product_attention",
    "softmax_dropout",
    "varlen_attn",
]
