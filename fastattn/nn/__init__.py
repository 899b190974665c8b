"""Modules, which combine parameters with the operations. ``MultiHeadAttention`` is the only attention class."""

from fastattn.nn.attention import MultiHeadAttention, MultiheadAttention
from fastattn.nn.cache import KeyValueCache
from fastattn.nn.dropout import Dropout, SoftmaxDropout
from fastattn.nn.norms import DropoutAddLayerNorm, LayerNorm

__all__ = [
    "Dropout",
    "DropoutAddLayerNorm",
    "KeyValueCache",
    "LayerNorm",
    "MultiHeadAttention",
    "MultiheadAttention",
    "SoftmaxDropout",
]
