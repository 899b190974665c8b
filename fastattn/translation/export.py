"""Export of a trained model to the formats of other programs.

CTranslate2 has the paper's Transformer, post-norm and pre-norm, with the positions and scales that the export gives.
Marian's architecture in Hugging Face's transformers is post-norm with sinusoidal positions. A model that they cannot
hold exactly is refused with the reason.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastattn._torch_private import is_observed_module
from fastattn.errors import InputError, require
from fastattn.files import StrPath, written_whole
from fastattn.translation import checkpoint
from fastattn.translation.config import TransformerConfig
from fastattn.translation.model import LearnedPositions, Transformer
from fastattn.translation.tokenizer import UNK_ID, Tokenizer

INT8_HOLDS_IT = "--to int8 holds every model, for fastattn's own commands"
SINUSOIDS = 4096  # number of positions in an exported table of sinusoids


def to_ctranslate2(model: Transformer, tokenizer: Tokenizer, out: StrPath) -> None:
    """Write ``model`` in float32, and its tokenizer, into the new folder ``out``, for ``ctranslate2.Translator``.

    The translator takes and returns pieces of ``tokenizer``. It appends the end of the sentence itself.

    Raises:
        InputError: ``out`` exists, ctranslate2 is not installed, or it cannot represent the model.
    """
    _check_modules(model)
    specs = require("ctranslate2.specs", "export")
    config = model.config
    if lacks := ctranslate2_lacks(config):
        raise InputError(f"CTranslate2 has {lacks}; {INT8_HOLDS_IT}")

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
    with written_whole(out) as partial:
        spec.save(str(partial))
        checkpoint.write_tokenizer(tokenizer, partial)


def ctranslate2_lacks(config: TransformerConfig) -> str:
    """Return why CTranslate2 cannot hold models of this configuration, or ""."""
    if config.window_size != (-1, -1):
        return "no restricted self-attention: this model has a window_size"
    head_dim = config.head_dim or config.d_model // config.num_heads
    if config.value_head_dim not in (None, head_dim):
        return "one size for the queries and the values of a head: this model has two"
    return ""


def to_huggingface(model: Transformer, tokenizer: Tokenizer, out: StrPath) -> None:
    """Write ``model`` in float32, and its tokenizer, into the new folder ``out``: MarianMTModel and AutoTokenizer.

    The tokenizer reads every text as text and gives the ids of ``tokenizer``, except that adjacent unknown words are
    one piece if the pieces are words. It is a Speech2TextTokenizer, which is sentencepiece and an appended end. A
    MarianTokenizer would take ``>>word<<`` at the beginning of a text for a language. If the target's text has another
    normalization, the folder ``target`` in ``out`` has its tokenizer.

    Marian stores all sines of a position before its cosines, while the paper's alternate. So the features are permuted,
    in all matrices alike, which does not change the model's output.

    Raises:
        InputError: ``out`` exists, or Marian's architecture cannot represent the model.
    """
    _check_modules(model)
    config = model.config
    expect_marian(config)
    order = torch.arange(config.d_model, device="cpu").view(-1, 2).t().flatten()  # even features, then odd ones
    tied = config.tying != "none" and not config.scale_logits
    share = config.tying == "all" and tied  # transformers passes a shared matrix only to tied models
    scale = config.d_model**-0.5 if config.scale_logits else 1.0
    bias = torch.zeros(config.vocab_size, device="cpu") if model.output.bias is None else model.output.bias
    weights = {"final_logits_bias": bias[None]}
    if share:
        weights["model.shared.weight"] = model.source_embedding.weight[:, order]
    else:
        weights["model.encoder.embed_tokens.weight"] = model.source_embedding.weight[:, order]
        weights["model.decoder.embed_tokens.weight"] = model.target_embedding.weight[:, order]
    if not tied:
        weights["lm_head.weight"] = model.output.weight[:, order] * scale
    for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        for number, layer in enumerate(stack.layers):
            for name, tensor in _marian_layer(layer, order):
                weights[f"model.{side}.layers.{number}.{name}"] = tensor
    special = {"pad_token_id": config.pad_id, "bos_token_id": config.bos_id, "eos_token_id": config.eos_id}
    special["decoder_start_token_id"] = config.bos_id
    marian = {
        "architectures": ["MarianMTModel"], "model_type": "marian", "activation_function": "relu", "dtype": "float32",
        "vocab_size": config.vocab_size, "d_model": config.d_model, "encoder_layers": config.encoder_layers,
        "decoder_layers": config.decoder_layers, "encoder_ffn_dim": config.d_ff, "decoder_ffn_dim": config.d_ff,
        "encoder_attention_heads": config.num_heads, "decoder_attention_heads": config.num_heads,
        "dropout": config.dropout, "attention_dropout": config.attention_dropout,
        "activation_dropout": config.ffn_dropout, "max_position_embeddings": SINUSOIDS,
        "scale_embedding": config.scale_embeddings, "share_encoder_decoder_embeddings": share,
        "tie_word_embeddings": tied, "forced_eos_token_id": None, **special,
    }  # fmt: skip
    generation = {"max_new_tokens": SINUSOIDS - 1, "bad_words_ids": [[config.pad_id], [config.bos_id]], **special}
    pieces = tokenizer.pieces(list(range(config.vocab_size)))
    named = {"unk_token": pieces[UNK_ID]}
    # Names with a space, which no piece of a text has: sentencepiece spells it U+2581. Under the name "</s>", a run of
    # unknown characters that reads so would end the sentence.
    for name, i in (("pad_token", config.pad_id), ("bos_token", config.bos_id), ("eos_token", config.eos_id)):
        named[name] = pieces[i] = pieces[i].replace(">", " >")
    vocabulary = {
        # split_special_tokens: "</s >" in a text is characters, not the end of the sentence.
        "tokenizer_config.json": {
            "tokenizer_class": "Speech2TextTokenizer",
            "model_max_length": SINUSOIDS,
            "split_special_tokens": True,
            **named,
        },
        "vocab.json": {piece: number for number, piece in enumerate(pieces)},
    }
    with written_whole(out) as partial:
        contiguous = {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in weights.items()}
        checkpoint.write_weights(contiguous, partial / checkpoint.WEIGHTS, {"format": "pt"})
        _write_json(partial, {"config.json": marian, "generation_config.json": generation})
        for folder, tokens in zip((partial, partial / "target"), tokenizer.models, strict=False):
            folder.mkdir(exist_ok=True)
            _write_json(folder, vocabulary)
            (folder / "sentencepiece.bpe.model").write_bytes(tokens)


def expect_marian(config: TransformerConfig) -> None:
    """Raise InputError unless Marian's architecture can represent a model of this configuration."""
    sizes = {config.head_dim, config.value_head_dim}
    for holds, what in (
        (not config.norm_first, "normalises after each sub-layer: this model normalises before (norm_first), as tiny"),
        (config.positions == "sinusoidal", "has sinusoidal positions: this model has learned ones"),
        (config.window_size == (-1, -1), "has no restricted self-attention: this model has a window_size"),
        (sizes <= {None, config.d_model // config.num_heads},
         "has heads of d_model / num_heads features: this model has other head_dim or value_head_dim"),
        (config.norm_eps == 1e-5, f"adds 1e-5 in its norms: this model has norm_eps={config.norm_eps}"),
    ):  # fmt: skip
        if not holds:
            held = INT8_HOLDS_IT if ctranslate2_lacks(config) else "--to ctranslate2 holds it"
            raise InputError(
                f"Marian's architecture {what}; {held}, and `fastattn train --preset base` trains one for transformers"
            )


def _write_json(folder: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _check_modules(model: Transformer) -> None:
    """Raise InputError unless the parameters of each module say all that it does."""
    for name, built in Transformer(model.config, device="meta").named_modules():
        found: Any = model
        for part in name.split(".") if name else ():
            found = getattr(found, part)
        if type(found) is not type(built) or is_observed_module(found):
            raise InputError(
                f"{name or 'the model'} is {type(found).__name__} with hooks, an adapter or a parametrisation, and an "
                "export holds parameters alone; merge the adapter, remove hooks and parametrisations, or export before "
                "quantising"
            )


def _marian_layer(layer: Any, order: Tensor) -> Iterator[tuple[str, Tensor]]:
    attentions = {"self_attn": (layer.self_attention, layer.self_attention_norm)}
    if hasattr(layer, "cross_attention"):
        attentions["encoder_attn"] = (layer.cross_attention, layer.cross_attention_norm)
    for name, (attention, norm) in attentions.items():
        biases = attention.in_proj_bias, attention.out_proj.bias
        in_bias, out_bias = (
            order.new_zeros(w.shape[0], dtype=torch.float32) if b is None else b
            for b, w in zip(biases, (attention.in_proj_weight, attention.out_proj.weight), strict=True)
        )
        for part, weight, bias in zip("qkv", attention.in_proj_weight.chunk(3), in_bias.chunk(3), strict=True):
            yield f"{name}.{part}_proj.weight", weight[:, order]
            yield f"{name}.{part}_proj.bias", bias
        yield f"{name}.out_proj.weight", attention.out_proj.weight[order]
        yield f"{name}.out_proj.bias", out_bias[order]
        yield f"{name}_layer_norm.weight", norm.weight[order]
        yield f"{name}_layer_norm.bias", norm.bias[order]
    inner, outer, norm = layer.feed_forward.inner, layer.feed_forward.outer, layer.feed_forward_norm
    yield from (("fc1.weight", inner.weight[:, order]), ("fc1.bias", inner.bias))
    yield from (("fc2.weight", outer.weight[order]), ("fc2.bias", outer.bias[order]))
    yield from (("final_layer_norm.weight", norm.weight[order]), ("final_layer_norm.bias", norm.bias[order]))


def _stack(spec: Any, stack: Any, config: TransformerConfig) -> None:
    """Fill in a stack's layers.

    In pre-norm, CTranslate2 stores a norm with the sub-layer after it, and fastattn with the sub-layer before it.
    """
    before = stack.norm  # used only in pre-norm
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
    return _numbers(positions.sinusoids(SINUSOIDS, "cpu"))


def _numbers(tensor: Tensor) -> Any:
    return tensor.detach().to("cpu", torch.float32).contiguous().numpy()
