"""Fused attention, softmax-dropout and LayerNorm for PyTorch, and the Transformer built on them."""

from fastattn.backends import backend, explain
from fastattn.nn import (
    Dropout,
    DropoutAddLayerNorm,
    KeyValueCache,
    LayerNorm,
    MultiHeadAttention,
    MultiheadAttention,
    SoftmaxDropout,
)
from fastattn.ops import (
    attention_weights,
    dropout,
    dropout_add_layer_norm,
    dropout_mask,
    layer_norm,
    scaled_dot_product_attention,
    softmax_dropout,
    varlen_attn,
)
from fastattn.translation.config import TransformerConfig
from fastattn.translation.model import Transformer

__version__ = "0.1.0"

__all__ = [
    "Dropout",
    "DropoutAddLayerNorm",
    "KeyValueCache",
    "LayerNorm",
    "MultiHeadAttention",
    "MultiheadAttention",
    "SoftmaxDropout",
    "Transformer",
    "TransformerConfig",
    "attention_weights",
    "backend",
    "dropout",
    "dropout_add_layer_norm",
    "dropout_mask",
    "explain",
    "layer_norm",
    "scaled_dot_product_attention",
    "softmax_dropout",
    "varlen_attn",
]
