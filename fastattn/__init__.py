"""Fused attention, softmax-dropout and LayerNorm for PyTorch, and the Transformer built on them.

Each module below lists the public names that it gives, in ``__all__``.
"""

from fastattn.backends import *
from fastattn.integrations.patching import *
from fastattn.integrations.registry import *
from fastattn.nn import *
from fastattn.ops.attention import *
from fastattn.ops.dropout import *
from fastattn.ops.layer_norm import *
from fastattn.ops.register import *
from fastattn.ops.softmax_dropout import *
from fastattn.translation.config import TransformerConfig as TransformerConfig
from fastattn.translation.model import Transformer as Transformer

__version__ = "0.1.0"
