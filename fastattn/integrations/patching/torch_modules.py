"""Families of torch's own modules.

A class is recognised if it derives from torch's class. It is refused if it overrides a method that the family replaces.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import fastattn.nn
from fastattn._torch_private import may_be_skipped, never_skipped
from fastattn.integrations.patching.family import Family, is_served, is_silent, is_torchs
from fastattn.ops.dropout import dropout
from fastattn.ops.layer_norm import dropout_add_layer_norm, layer_norm


class TorchFamily(Family):
    """Base of these families."""

    base: ClassVar[type[nn.Module]]
    """Class of torch that the family serves."""
    methods: ClassVar[dict[str, Any]]
    """Methods of ``base`` that the family replaces, as they are at import: another package may replace them later."""

    def __init_subclass__(cls, base: type[nn.Module] | None = None, methods: tuple[str, ...] = ("forward",)) -> None:
        if base is not None:
            cls.base, cls.family = base, f"torch.nn.{base.__name__}"
            cls.methods = {name: getattr(base, name) for name in methods}

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        scripted = isinstance(module, torch.jit.ScriptModule) and module.original_name == cls.base.__name__
        return scripted or isinstance(module, cls.base)

    @classmethod
    def refusal(cls, module: nn.Module, trusted: bool) -> str | None:
        kind = type(module)
        if kind.__module__.startswith("fastattn."):
            return "it is fastattn's own"
        own, methods = vars(module), cls.methods.items()
        overridden = [name for name, method in methods if name in own or getattr(kind, name) is not method]
        if overridden:
            return f"{kind.__name__} overrides {' and '.join(overridden)} of {cls.family}"
        replaced = [name for name, method in methods if not is_torchs(method)]
        if replaced:
            return f"{' and '.join(replaced)} of {cls.family} was replaced before fastattn was imported"
        return None


class Dropout(TorchFamily, base=nn.Dropout):
    p: float
    inplace: bool

    def forward(self, input: Tensor) -> Tensor:
        if not is_served(input):
            return super().forward(input)
        return dropout(input, self.p, self.training, self.inplace)


class LayerNorm(TorchFamily, base=nn.LayerNorm):
    normalized_shape: tuple[int, ...]
    weight: Tensor
    bias: Tensor
    eps: float

    def forward(self, input: Tensor) -> Tensor:
        if not is_served(input):
            return super().forward(input)
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


def add_norm(out: Tensor, residual: Tensor, norm: Any, dropout: Any = None, *, prenorm: bool = False) -> Any:
    """Return norm(residual + dropout(out)), and with ``prenorm`` also the sum.

    It is one kernel if the modules can be fused (:func:`is_silent`) and the kernel computes their arithmetic. Otherwise
    the modules are called.
    """
    fused = (
        is_silent(norm, LayerNorm)
        and (dropout is None or is_silent(dropout, Dropout))
        and is_served(out, residual)
        and norm.normalized_shape == out.shape[-1:]
        and out.shape == residual.shape
    )
    if fused:
        p = dropout_p(dropout) if dropout is not None else 0.0
        return dropout_add_layer_norm(out, residual, norm.weight, norm.bias, p, norm.eps, prenorm=prenorm)
    total = residual + (out if dropout is None else dropout(out))
    return (norm(total), total) if prenorm else norm(total)


def dropout_p(dropout: Any) -> float:
    """Return the rate at which an ``nn.Dropout`` drops in its current mode."""
    return dropout.p if dropout.training else 0.0


class MultiheadAttention(
    TorchFamily, fastattn.nn.MultiHeadAttention, base=nn.MultiheadAttention, methods=("forward", "merge_masks")
):
    num_kv_heads = property(lambda self: self.num_heads)
    value_head_dim = property(lambda self: self.head_dim)

    @classmethod
    def attach(cls, module: Any) -> None:
        never_skipped(module)  # keeps an unpatched encoder layer from its fast path, which takes the weights

    @classmethod
    def detach(cls, module: Any) -> None:
        may_be_skipped(module)


class _TransformerLayer(TorchFamily):
    """Base of torch's encoder and decoder layers.

    Their forward calls their attention module, so torch's fast path, which takes the weights, never runs.
    """

    norm_first: bool
    self_attn: Any
    linear1: Any
    linear2: Any
    activation: Any
    dropout: Any

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.dropout(self.activation(self.linear1(x))))

    def _sublayers(self, x: Tensor, *parts: tuple[Any, Any, Any]) -> Tensor:
        """Compute the sub-layers in order; each part is a sub-layer, its dropout and its norm."""
        if not self.norm_first:
            for sublayer, dropout, norm in parts:
                x = add_norm(sublayer(x), x, norm, dropout)
            return x
        normalised = parts[0][2](x)
        for (sublayer, dropout, _), (_, _, norm) in pairwise(parts):
            normalised, x = add_norm(sublayer(normalised), x, norm, dropout, prenorm=True)
        sublayer, dropout, _ = parts[-1]
        return x + dropout(sublayer(normalised))


class TransformerEncoderLayer(
    _TransformerLayer, base=nn.TransformerEncoderLayer, methods=("forward", "_sa_block", "_ff_block")
):
    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        if not isinstance(self.self_attn, fastattn.nn.MultiHeadAttention):  # torch's layer makes float masks for it
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)
        masks: dict[str, Any] = {
            "attn_mask": src_mask,
            "key_padding_mask": src_key_padding_mask,
            "is_causal": is_causal,
        }
        return self._sublayers(
            src,
            (lambda x: self.self_attn(x, x, x, need_weights=False, **masks)[0], self.dropout1, self.norm1),
            (self._feed_forward, self.dropout2, self.norm2),
        )


class TransformerDecoderLayer(
    _TransformerLayer, base=nn.TransformerDecoderLayer, methods=("forward", "_sa_block", "_mha_block", "_ff_block")
):
    multihead_attn: Any

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        own = {"attn_mask": tgt_mask, "key_padding_mask": tgt_key_padding_mask, "is_causal": tgt_is_causal}
        other = {"attn_mask": memory_mask, "key_padding_mask": memory_key_padding_mask, "is_causal": memory_is_causal}
        return self._sublayers(
            tgt,
            (lambda x: self.self_attn(x, x, x, need_weights=False, **own)[0], self.dropout1, self.norm1),
            (
                lambda x: self.multihead_attn(x, memory, memory, need_weights=False, **other)[0],
                self.dropout2,
                self.norm2,
            ),
            (self._feed_forward, self.dropout3, self.norm3),
        )


class TransformerEncoder(TorchFamily, base=nn.TransformerEncoder):
    """The forward of torch's encoder without nested tensors, which torch makes for its layers' fast path."""

    # A property takes precedence over the instance's attribute, which counts again after unpatch.
    use_nested_tensor = property(lambda self: False, lambda self, value: vars(self).update(use_nested_tensor=value))


FAMILIES: tuple[type[Family], ...] = (
    Dropout,
    LayerNorm,
    MultiheadAttention,
    TransformerEncoderLayer,
    TransformerDecoderLayer,
    TransformerEncoder,
)
