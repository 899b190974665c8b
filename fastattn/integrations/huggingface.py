"""Hugging Face transformers: ``attn_implementation="fastattn"`` for every model built on its attention interface."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from fastattn.ops import check
from fastattn.ops.attention import attention_weights, scaled_dot_product_attention

__all__ = ["register"]

NAME = "fastattn"
MASKED = "fastattn_masked"  # what a model with _supports_sdpa = False gets for NAME: its masks alone hide keys.
OLDEST = (5, 8)  # the first version whose mask functions get the queries' length and offset.
# Arguments that models pass to every attention function and that change nothing, or nothing beyond the mask.
_WITHOUT_EFFECT = frozenset(
    (
        "cache_position", "cu_seq_lens_k", "deterministic", "hidden_states", "logits_to_keep", "max_length_k",
        "max_length_q", "num_items_in_batch", "output_hidden_states", "output_router_logits", "past_key_values",
        "position_embeddings", "position_ids", "return_dict", "seq_idx", "target_dtype", "token_type_ids", "use_cache",
    )
)  # fmt: skip

# Model types whose layers have is_causal = False although the model makes a causal mask.
_CAUSAL_BY_MASK = frozenset(("aimv2_text_model",))


def register() -> None:
    """Add ``attn_implementation="fastattn"`` to transformers, with its mask function.

    Use it when making or loading a model, or by ``model.set_attn_implementation("fastattn")``. The model then agrees
    with "eager" in evaluation and in training, attention dropout included.

    It takes padding, causal masks, sliding windows, caches, grouped heads, position biases and the user's own masks. It
    returns the weights if the model passes ``output_attentions`` on. A query that sees no key, for example padding on
    the left, gives 0. A model with ``_supports_sdpa = False`` gets the masks of "eager", under which such a query gives
    the mean, as in "eager". Its configuration then says "fastattn_masked".

    Options that change the mathematics and are not supported (soft-capping, attention sinks, sparse indices, paged
    caches) raise ValueError by name in the forward pass. A model that computes attention itself, such as Bloom, or
    whose module has its own table of attention classes, such as GIT, raises ValueError when it is made. If other parts
    of it use the attention interface, ``set_attn_implementation`` serves those.

    Raises:
        ImportError: transformers is missing, or older than 5.8.

    Examples:
        >>> import fastattn.integrations.huggingface
        >>> fastattn.integrations.huggingface.register()
        >>> from transformers import BertConfig, BertModel
        >>> sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
        >>> model = BertModel(BertConfig(**sizes, attn_implementation="fastattn"))
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError("fastattn: transformers is not installed; pip install transformers") from error
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < OLDEST:
        raise ImportError(
            f"fastattn: transformers must be {'.'.join(map(str, OLDEST))} or newer, "
            f"got {transformers.__version__}; pip install --upgrade transformers"
        )
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, attention_mask)
    AttentionInterface.register(MASKED, masked_attention)
    AttentionMaskInterface.register(MASKED, eager_mask)
    _decide_by_model(PreTrainedModel)


def _decide_by_model(kind: Any) -> None:
    """Make a model without sdpa take ``MASKED`` for "fastattn", and one that cannot be served refuse both.

    Only the model's class says what it supports: mask functions get a configuration, attention functions a layer, whose
    model neither names. No hook of transformers gets the model before. So this wraps the method that decides whether a
    model supports a name.
    """
    genuine = kind.get_correct_attn_implementation
    if genuine.__module__ == __name__:  # registered before
        return

    def get_correct_attn_implementation(self: Any, requested_attention: str | None, is_init_check: bool = False) -> str:
        if requested_attention in (NAME, MASKED):
            models = (part for part in self.modules() if isinstance(part, kind) and part.config is self.config)
            if not all(model._supports_sdpa for model in models):
                requested_attention = MASKED
                _mask_parts(self.config)
            reason = _why_not(type(self), kind, requested_attention) if is_init_check else ""
            if reason:
                raise ValueError(
                    f'attn_implementation="{NAME}" is not for {type(self).__name__}, {reason}; make the model with '
                    f'attn_implementation="eager"; model.set_attn_implementation("{NAME}") then serves those of its '
                    f"parts that use transformers' attention interface"
                )
        return genuine(self, requested_attention, is_init_check)

    kind.get_correct_attn_implementation = get_correct_attn_implementation


def _mask_parts(config: Any) -> None:
    """Replace "fastattn" by ``MASKED`` in the configuration's parts, to which their model may give masks of its own."""
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            if part._attn_implementation == NAME:
                part._attn_implementation = {"": MASKED}  # a string would change the parts of the part, too
            _mask_parts(part)


def _why_not(model: type, kind: type, name: str) -> str:
    """Return why a model class, derived from ``kind``, cannot be made with this implementation, or ""."""

    def is_table(value: Any) -> bool:
        if not isinstance(value, dict) or dict.__contains__(value, name):
            return False
        maker = dict.get(value, "eager")  # of attention, a class or a function; a module has been made
        return callable(maker) and not isinstance(maker, torch.nn.Module)

    bases: list[Any] = [base for base in model.__mro__ if issubclass(base, kind) and base is not kind]
    if any(base.__module__.startswith("transformers") and not base._can_set_attn_implementation() for base in bases):
        return "which computes attention itself"
    modules = (sys.modules[base.__module__] for base in bases if base.__module__ in sys.modules)
    if any(is_table(value) for module in modules for value in vars(module).values()):
        return "whose module has its own table of attention classes"
    return ""


def attention_mask(
    *, batch_size: int, q_length: int, kv_length: int, mask_function: Any, attention_mask: Tensor | None = None,
    kv_offset: int = 0, allow_is_bidirectional_skip: bool = False, **settings: Any,
) -> Tensor | None:  # fmt: skip
    """Return the mask of a model's layers, for transformers' mask interface: bool (B, 1, L, S), True = takes part.

    It is None if nothing is hidden, or if the layers' ``is_causal`` has the effect of the causal mask. The padding of a
    layer without another mask is a view of ``attention_mask``, which is neither copied nor read. So the host does not
    wait for the device; the kernels skip the excluded keys.

    A model of which a part has ``MASKED`` may hand its masks to that part, so it gets those of "eager" too.
    """
    from transformers.masking_utils import bidirectional_mask_function, eager_mask, sdpa_mask

    config = settings.get("config")
    if _has_masked_part(config):
        return eager_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, mask_function=mask_function,
            attention_mask=attention_mask, kv_offset=kv_offset,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip, **settings,
        )  # fmt: skip
    if mask_function is bidirectional_mask_function and allow_is_bidirectional_skip:
        if attention_mask is None:
            return None
        padding = attention_mask[:, kv_offset : kv_offset + kv_length]
        if padding.size(1) == kv_length:
            return padding[:, None, None, :].expand(batch_size, 1, q_length, kv_length)
    if (
        getattr(config, "use_bidirectional_attention", None) is True
        or getattr(config, "model_type", None) in _CAUSAL_BY_MASK
    ):
        settings["allow_is_causal_skip"] = False
    return sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, mask_function=mask_function,
        attention_mask=attention_mask, kv_offset=kv_offset, allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        **settings,
    )  # fmt: skip


def _has_masked_part(config: Any) -> bool:
    parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", ()))
    return any(part is not None and (part._attn_implementation == MASKED or _has_masked_part(part)) for part in parts)


def attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
    position_bias: Tensor | None = None, sliding_window: int | None = None, cu_seq_lens_q: Tensor | None = None,
    output_attentions: bool | None = None, **others: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute attention: the function for transformers' attention interface.

    Args:
        module: the layer; its ``is_causal`` counts if the argument is None, as in transformers.
        query: (B, Hq, L, E); key: (B, Hk, S, E); value: (B, Hk, S, Ev), Hk dividing Hq.
        attention_mask: bool (True = takes part) or float, broadcastable to (B, Hq, L, S). If given, it decides by
            itself which keys a query sees. Without it, a causal layer sees the keys up to the query's own position,
            and a single query sees all keys.
        dropout: probability of dropping a weight while ``module`` is in training.
        scaling: 1 / sqrt(E) by default.
        position_bias: float, broadcastable to (B, Hq, L, S), added to the scores; may require grad.
        sliding_window: number of keys that a query of a causal layer without mask sees, its own included.
        cu_seq_lens_q: boundaries of packed sequences; with several sequences, the mask must separate them.
        output_attentions: also return the weights.

    Returns:
        (B, L, Hq, Ev), contiguous; and None or the weights after dropout, (B, Hq, L, S).

    Raises:
        ValueError: an argument that this attention does not support.
    """
    lacking = sorted(name for name, given in others.items() if given is not None and name not in _WITHOUT_EFFECT)
    if lacking:
        raise ValueError(
            f'attn_implementation="fastattn" does not know {", ".join(lacking)}, which may change the result of '
            f'{type(module).__name__}; use attn_implementation="eager" for this model'
        )
    if attention_mask is None and cu_seq_lens_q is not None and cu_seq_lens_q.size(0) != 2:
        raise ValueError(
            f'attn_implementation="fastattn" takes packed sequences with a mask, got {cu_seq_lens_q.size(0) - 1} '
            f"sequences in cu_seq_lens_q and none; pass position_ids that begin again with each sequence"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(query.size(2) > 1 and attention_mask is None and causal)
    window = (-1, -1)
    if causal and sliding_window is not None:
        window = (sliding_window - 1, -1)
    if position_bias is not None:
        attention_mask = _add(position_bias, attention_mask)
    dropout = dropout if module.training else 0.0
    seed = check.draw_seed(None, check.threshold("huggingface", dropout, "dropout"), query)
    settings: dict[str, Any] = {"scale": scaling, "enable_gqa": True, "window_size": window, "seed": seed}
    out = scaled_dot_product_attention(query, key, value, attention_mask, dropout, causal, **settings)
    weights = attention_weights(query, key, attention_mask, dropout, causal, **settings) if output_attentions else None
    return out.transpose(1, 2).contiguous(), weights


def masked_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    is_causal: bool | None = None, **settings: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute attention as ``attention``, but never causal by itself: without a mask each query sees all keys.

    "eager" too ignores ``is_causal``, so models that are tested with it alone may have it wrong.
    """
    return attention(module, query, key, value, attention_mask, is_causal=False, **settings)


def _add(position_bias: Tensor, mask: Tensor | None) -> Tensor:
    """Return the position bias and the mask as one float mask."""
    if mask is None:
        return position_bias
    if mask.dtype == torch.bool:
        return position_bias.masked_fill(~mask, -torch.inf)
    return position_bias + mask
