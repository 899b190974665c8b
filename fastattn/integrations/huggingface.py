"""Hugging Face transformers: ``attn_implementation="fastattn"`` for every model built on its attention interface."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fastattn.ops import check
from fastattn.ops.attention import attention_weights, scaled_dot_product_attention

__all__ = ["register"]

NAME = "fastattn"
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
_LACKS_SDPA: MutableMapping[type, bool | None] = WeakKeyDictionary()  # by class of configuration


def register() -> None:
    """Add ``attn_implementation="fastattn"`` to transformers, with its mask function.

    Use it when making or loading a model, or by ``model.set_attn_implementation("fastattn")``. The model then agrees
    with "eager" in evaluation and in training, attention dropout included.

    It takes padding, causal masks, sliding windows, caches, grouped heads, position biases and the user's own masks. It
    returns the weights if the model passes ``output_attentions`` on. A query that sees no key, for example padding on
    the left, gives 0. Models with ``_supports_sdpa = False`` get the masks of "eager", under which such a query gives
    the mean, as in "eager".

    Options that change the mathematics and are not supported (soft-capping, attention sinks, sparse indices, paged
    caches) raise ValueError by name in the forward pass. So does a model that is not built on that interface. A model
    whose module has its own table of attention classes, such as Falcon or GIT, raises ValueError when it is made. If
    other parts of it use the interface, the error names ``set_attn_implementation``, which serves those.

    Raises:
        ImportError: transformers is missing, or older than 5.8.
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

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, attention_mask)
    _refuse_own_tables(PreTrainedModel)


def _refuse_own_tables(kind: Any) -> None:
    """Make models whose module has its own table of attention classes refuse "fastattn" when they are made.

    Transformers accepts each registered name; then such a model looks it up in its table, KeyError: 'fastattn'. No hook
    gets the model before: registries know only names, patch mappings only classes. So this wraps the method that
    decides whether a model supports a name.
    """
    genuine = kind.get_correct_attn_implementation
    if genuine.__module__ == __name__:  # registered before
        return

    def get_correct_attn_implementation(self: Any, requested_attention: str | None, is_init_check: bool = False) -> str:
        owner = _with_own_table(type(self), kind) if is_init_check and requested_attention == NAME else None
        if owner is not None:
            remedy = 'use attn_implementation="eager" for this model'
            if owner._can_set_attn_implementation():
                remedy = (
                    'make it with attn_implementation="eager", then model.set_attn_implementation("fastattn") serves '
                    "its other parts"
                )
            raise ValueError(
                f'attn_implementation="fastattn" is not for {type(self).__name__}, whose module has its own table of '
                f"attention classes; {remedy}"
            )
        return genuine(self, requested_attention, is_init_check)

    kind.get_correct_attn_implementation = get_correct_attn_implementation


def _with_own_table(model: type, kind: type) -> Any:
    """Return the first base, a subclass of ``kind``, whose module has a table of attention classes, or None."""

    def is_table(value: Any) -> bool:
        is_without = isinstance(value, dict) and "eager" in value and NAME not in value
        return is_without and all(isinstance(v, type) and issubclass(v, torch.nn.Module) for v in value.values())

    bases = (base for base in model.__mro__ if issubclass(base, kind) and base.__module__ in sys.modules)
    return next((base for base in bases if any(map(is_table, vars(sys.modules[base.__module__]).values()))), None)


def attention_mask(
    *, batch_size: int, q_length: int, kv_length: int, mask_function: Any, attention_mask: Tensor | None = None,
    kv_offset: int = 0, allow_is_bidirectional_skip: bool = False, **settings: Any,
) -> Tensor | None:  # fmt: skip
    """Return the mask of a model's layers, for transformers' mask interface: bool (B, 1, L, S), True = takes part.

    It is None if nothing is hidden, or if the layers' ``is_causal`` has the effect of the causal mask. The padding of a
    layer without another mask is a view of ``attention_mask``, which is neither copied nor read. So the host does not
    wait for the device; the kernels skip the excluded keys.

    A configuration of a model with ``_supports_sdpa = False``, or of no known model, gets the mask of "eager". It is a
    float mask, 0 or the dtype's minimum, and always made for causal layers. Such models may add the mask to scores of
    their own. Transformers never reads their layers' ``is_causal``.

    Raises:
        ValueError: the model uses only the mask interface, computes attention itself, and adds the mask to its scores.
    """
    config = settings.get("config")
    name = _attends_itself(type(config))
    if name:
        raise ValueError(
            f'attn_implementation="fastattn" is not for {name}, which is not built on transformers\' attention '
            f'interface; use attn_implementation="eager" for this model'
        )
    from transformers.masking_utils import bidirectional_mask_function, eager_mask, sdpa_mask

    make: Any = sdpa_mask
    if _lacks_sdpa(type(config)) is not False:
        make = eager_mask
    elif mask_function is bidirectional_mask_function and allow_is_bidirectional_skip:
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
    return make(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, mask_function=mask_function,
        attention_mask=attention_mask, kv_offset=kv_offset, allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        **settings,
    )  # fmt: skip


@torch.compiler.assume_constant_result
def _attends_itself(config: type) -> str:
    """Return the name of a transformers model with this configuration that calls no attention function, or ""."""
    bases = (base for model in _models(config) for base in model.__mro__ if base.__module__.startswith("transformers"))
    for base in bases:
        if getattr(base, "config_class", None) is not None and not base._can_set_attn_implementation():
            return base.__name__
    return ""


@torch.compiler.assume_constant_result
def _lacks_sdpa(config: type, as_its_mask: bool = False) -> bool | None:
    """Return whether a model with this configuration has ``_supports_sdpa = False``, None where no model has it.

    Args:
        config: class of the configuration.
        as_its_mask: return the result by which the last mask was made. A search takes 10 to 40 us, too much per layer.
    """
    if not as_its_mask or config not in _LACKS_SDPA:
        models = _models(config)
        _LACKS_SDPA[config] = not all(model._supports_sdpa for model in models) if models else None
    return _LACKS_SDPA[config]


def _models(config: type) -> list[Any]:
    """Return the imported model classes of this configuration, or of its nearest base that has some."""
    from transformers import PreTrainedModel

    kinds: list[Any] = [PreTrainedModel]
    for kind in kinds:
        kinds += kind.__subclasses__()
    found = ([kind for kind in kinds if kind.config_class is base] for base in config.__mro__)
    return next(filter(None, found), [])


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
            and a single query sees all keys. Without it, a layer of a model with ``_supports_sdpa = False`` sees all
            keys, as in "eager".
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
    if causal and hasattr(module, "config"):
        causal = not _lacks_sdpa(type(module.config), True)  # without a mask, layers of "eager" see all keys
    window = (-1, -1)
    if causal and sliding_window is not None:
        window = (sliding_window - 1, -1)
    if position_bias is not None:
        attention_mask = _add(position_bias, attention_mask)
    dropout = dropout if module.training else 0.0
    seed = check.draw_seed(None, check.threshold("huggingface", dropout, "dropout"), query.device)
    settings: dict[str, Any] = {"scale": scaling, "enable_gqa": True, "window_size": window, "seed": seed}
    out = scaled_dot_product_attention(query, key, value, attention_mask, dropout, causal, **settings)
    weights = attention_weights(query, key, attention_mask, dropout, causal, **settings) if output_attentions else None
    return out.transpose(1, 2).contiguous(), weights


def _add(position_bias: Tensor, mask: Tensor | None) -> Tensor:
    """Return the position bias and the mask as one float mask."""
    if mask is None:
        return position_bias
    if mask.dtype == torch.bool:
        return position_bias.masked_fill(~mask, -torch.inf)
    return position_bias + mask
