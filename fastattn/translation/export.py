"""A trained model as other programs read it.

CTranslate2 has the paper's Transformer, post-norm and pre-norm, with the positions and scales that it is given; a model
that it cannot hold exactly is refused with the reason.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastattn.translation import checkpoint
from fastattn.translation.config import TransformerConfig
from fastattn.translation.errors import InputError, require
from fastattn.translation.model import LearnedPositions, Transformer
from fastattn.translation.tokenizer import Tokenizer

SINUSOIDS = 4096  # positions that an exported table of sinusoids has


def to_ctranslate2(model: Transformer, tokenizer: Tokenizer, out: str | Path) -> None:
    """Write ``model`` in float32, and its tokenizer, into the new folder ``out``, for ``ctranslate2.Translator``.

    It translates the pieces of ``tokenizer``; it appends the end of the sentence itself.

    Raises:
        InputError: ``out`` exists, ctranslate2 is not installed, or it has no place for what the model does.
    """
    specs = require("ctranslate2.specs", "export")
    config = model.config
    if config.window_size != (-1, -1):
        raise InputError("CTranslate2 has no restricted self-attention: it cannot hold this model's window_size")
    if config.value_head_dim not in (None, _head_dim(config)):
        raise InputError("CTranslate2 has one size for the queries and the values of a head: this model has two")

    shape = {"num_heads": config.num_heads, "pre_norm": config.norm_first}
    if config.head_dim is not None:
        shape["head_dim"] = config.head_dim
    encoder = specs.transformer_spec.TransformerEncoderSpec(config.encoder_layers, **shape)
    decoder = specs.transformer_spec.TransformerDecoderSpec(config.decoder_layers, **shape)
    spec = specs.TransformerSpec(encoder, decoder)

    encoder.scale_embeddings = decoder.scale_embeddings = config.scale_embeddings
    encoder.embeddings[0].weight = _numbers(model.source_embedding.weight)
    decoder.embeddings.weight = _numbers(model.target_embedding.weight)
    encoder.position_encodings.encodings = _positions(model.source_positions)
    decoder.position_encodings.encodings = _positions(model.target_positions)
    scale = config.d_model**-0.5 if config.scale_logits else 1.0
    decoder.projection.weight = _numbers(model.output.weight * scale)
    if model.output.bias is not None:
        decoder.projection.bias = _numbers(model.output.bias)
    _stack(encoder, model.encoder, config)
    _stack(decoder, model.decoder, config)

    pieces = tokenizer.pieces(list(range(config.vocab_size)))
    spec.register_source_vocabulary(pieces)
    spec.register_target_vocabulary(pieces)
    spec.config.add_source_eos = True
    spec.config.bos_token = spec.config.decoder_start_token = pieces[config.bos_id]
    spec.config.eos_token = pieces[config.eos_id]
    spec.config.layer_norm_epsilon = config.norm_eps
    spec.validate()
    spec.optimize()
    with checkpoint.written_whole(Path(out)) as partial:
        spec.save(str(partial))
        (partial / checkpoint.TOKENIZER).write_bytes(tokenizer.model)


def _stack(spec: Any, stack: Any, config: TransformerConfig) -> None:
    """A stack's layers. Before a sub-layer CTranslate2 has the norm that we have after the one before it."""
    before = stack.norm  # of pre-norm
    for target, layer in zip(spec.layer, stack.layers, strict=True):
        sub_layers = [(target.self_attention, layer.self_attention_norm)]
        _self_attention(target.self_attention, layer.self_attention)
        if hasattr(layer, "cross_attention"):
            sub_layers.append((target.attention, layer.cross_attention_norm))
            _cross_attention(target.attention, layer.cross_attention)
        sub_layers.append((target.ffn, layer.feed_forward_norm))
        _linear(target.ffn.linear_0, layer.feed_forward.inner.weight, layer.feed_forward.inner.bias)
        _linear(target.ffn.linear_1, layer.feed_forward.outer.weight, layer.feed_forward.outer.bias)
        for sub_layer, after in sub_layers:
            _norm(sub_layer.layer_norm, before if config.norm_first else after)
            before = after
    if config.norm_first:
        _norm(spec.layer_norm, before)


def _self_attention(spec: Any, attention: Any) -> None:
    _linear(spec.linear[0], attention.in_proj_weight, attention.in_proj_bias)
    _linear(spec.linear[1], attention.out_proj.weight, attention.out_proj.bias)


def _cross_attention(spec: Any, attention: Any) -> None:
    queries = attention.num_heads * attention.head_dim
    weight, bias = attention.in_proj_weight, attention.in_proj_bias
    _linear(spec.linear[0], weight[:queries], None if bias is None else bias[:queries])
    _linear(spec.linear[1], weight[queries:], None if bias is None else bias[queries:])
    _linear(spec.linear[2], attention.out_proj.weight, attention.out_proj.bias)


def _linear(spec: Any, weight: Tensor, bias: Tensor | None) -> None:
    spec.weight = _numbers(weight)
    if bias is not None:
        spec.bias = _numbers(bias)


def _norm(spec: Any, norm: Any) -> None:
    spec.gamma, spec.beta = _numbers(norm.weight), _numbers(norm.bias)


def _positions(positions: Any) -> Any:
    if isinstance(positions, LearnedPositions):
        return _numbers(positions.weight)
    return _numbers(positions.sinusoids(SINUSOIDS))


def _head_dim(config: TransformerConfig) -> int:
    return config.d_model // config.num_heads if config.head_dim is None else config.head_dim


def _numbers(tensor: Tensor) -> Any:
    return tensor.detach().to("cpu", torch.float32).contiguous().numpy()
