"""Import of models that two public programs trained. :class:`~fastattn.Transformer` computes the same results.

The programs are github.com/jadore801120/attention-is-all-you-need-pytorch and The Annotated Transformer.

Their checkpoints hold no words. The objects that hold them need old packages, so the words are given as text: per
language, one word per line in the order of the ids. The two vocabularies become one. If a side lacks a word, that side
reads it as the unknown word, like the program, and never writes it. Text is in the program's form: words between
spaces.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastattn.errors import InputError
from fastattn.files import StrPath
from fastattn.translation.config import TransformerConfig
from fastattn.translation.data import read_lines
from fastattn.translation.model import Transformer
from fastattn.translation.tokenizer import Tokenizer

# Spellings of padding, begin, end and unknown in the programs, in the order of the tokenizer's ids.
SPECIAL = (("<blank>", "<pad>"), ("<s>",), ("</s>",), ("<unk>",))
ONE, ZERO = torch.ones(1, device="cpu"), torch.zeros(1, device="cpu")
NEVER = -1e9  # logit of a word that the program does not know.
# Names of a module inside the wrappers DataParallel and DistributedDataParallel, torch.compile, FSDP, and activation
# checkpointing. Neither program has a module with such a name.
WRAPPED = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# One weight of each program, whose name identifies the program and the prefix of its weights.
JADORE, ANNOTATED = "encoder.src_word_emb.weight", "src_embed.0.lut.weight"

Weights = dict[str, Tensor]


def import_model(
    path: StrPath, source_words: StrPath, target_words: StrPath, heads: int | None = None
) -> tuple[Transformer, Tokenizer]:
    """Return the model and the tokenizer of a program's checkpoint.

    Args:
        path: the program's file: jadore801120's dictionary of "settings" and "model", or The Annotated Transformer's
            state dict. The weights may be in nested dictionaries, under a prefix. They may have the names that
            DataParallel, DistributedDataParallel, FSDP and torch.compile give them. They may have another dtype than
            float32, which they become.
        source_words, target_words: text, one word per line in the order of the program's ids.
        heads: number of attention heads, which The Annotated Transformer's checkpoint does not hold; by default 8, as
            in the program.

    Raises:
        InputError: the file cannot be read, is of neither program or holds several models. Or the words do not fit, or
            :class:`~fastattn.Transformer` cannot represent the model; the message has the reason.
    """
    path = Path(path)
    saved = _read(path)
    models = list(_models(saved))
    if not models:
        raise InputError(f"{path} is of neither program: expected weights, among them {JADORE} or {ANNOTATED}")
    if len(models) > 1:
        places = ", ".join(place.rstrip(".") or "the top level" for place, *_ in models)
        raise InputError(f"{path} holds {len(models)} models, at {places}: save the one to import alone")
    ((_, kind, weights, settings),) = models
    weights = {name: tensor.float() for name, tensor in weights.items()}
    if kind == JADORE and settings is None:
        raise InputError(
            f"{path} holds the weights of jadore801120's program without its settings: expected the program's "
            'dictionary of "settings" and "model"'
        )
    try:
        if kind == JADORE:
            fields, weights = _jadore(weights, settings if isinstance(settings, dict) else vars(settings))
        else:
            fields, weights = _annotated(weights, heads or 8)
    except (KeyError, IndexError, ValueError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is of neither program, or of a version with other parts: {error}") from None
    lists = [_words(source_words), _words(target_words)]
    tables = ("source_embedding.weight", "target_embedding.weight")
    for name, file, words in zip(tables, (source_words, target_words), lists, strict=True):
        if len(words) != len(weights[name]):
            raise InputError(f"{file} has {len(words)} words but {path} {len(weights[name])}: expected one a line")
    rows = [{word: row for row, word in enumerate(words)} for words in lists]
    known = [{word for word in words if not any(word in names for names in SPECIAL)} for words in lists]
    tokenizer, pieces = Tokenizer.of_words(sorted(known[0] | known[1]))
    source, target = (torch.tensor(_places(side, pieces), device="cpu") for side in rows)
    missing = torch.tensor([piece not in rows[1] for piece in pieces], device="cpu")
    missing[: len(SPECIAL)] = False
    weights["source_embedding.weight"] = weights["source_embedding.weight"][source]
    weights["target_embedding.weight"] = weights["target_embedding.weight"][target]
    weights["output.weight"] = weights["output.weight"][target]
    bias = weights.pop("output.bias", None)
    if bias is not None or missing.any():
        bias = torch.zeros(len(missing), device="cpu") if bias is None else bias[target]
        weights["output.bias"] = bias.masked_fill(missing, NEVER)
    equal = [torch.equal(weights[name], weights["target_embedding.weight"]) for name in (tables[0], "output.weight")]
    tying = "all" if all(equal) else "output" if equal[1] else "none"
    config = TransformerConfig(len(pieces), tying=tying, output_bias="output.bias" in weights, **fields)
    model = Transformer(config, device="cpu")
    model.load_state_dict(weights)
    return model.eval(), tokenizer


def _models(saved: dict[Any, Any], place: str = "", settings: Any = None) -> Iterator[tuple[str, str, Weights, Any]]:
    """Find the models in a dictionary and in the dictionaries within it.

    Yields:
        The prefix of the model's names, preceded by the keys that lead to it; ``JADORE`` or ``ANNOTATED``; the weights
        under the program's names, without scalars, which are counters of a wrapper; the settings from the same
        dictionary or an outer one, or None.
    """
    settings = saved.get("settings", settings)
    weights = {
        name: value
        for name, value in saved.items()
        if isinstance(name, str) and isinstance(value, Tensor) and value.dim()
    }
    for kind in (JADORE, ANNOTATED):
        for name in weights:
            if f".{_unwrapped(name)}".endswith(f".{kind}"):
                prefix = name[: name.rindex(kind.partition(".")[0] + ".")]
                own = {_unwrapped(key[len(prefix) :]): weights[key] for key in weights if key.startswith(prefix)}
                yield place + prefix, kind, own, settings
    for name, value in saved.items():
        if isinstance(value, dict):
            yield from _models(value, f"{place}{name}.", settings)


def _unwrapped(name: str) -> str:
    """Return a weight's name without the parts that wrappers have added."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED)


def _jadore(weights: Weights, settings: dict[str, Any]) -> tuple[dict[str, Any], Weights]:
    """Return the fields of the configuration, and the weights under fastattn's names."""
    weights = dict(weights)
    for side in ("encoder", "decoder"):
        weights.pop(f"{side}.position_enc.pos_table", None)
        norm = [weights.pop(f"{side}.layer_norm.{name}", value) for name, value in (("weight", ONE), ("bias", ZERO))]
        if (norm[0] != 1).any() or (norm[1] != 0).any():
            raise InputError(
                f"the model normalises the embeddings of its {side}, as later versions of the program do: "
                "fastattn.Transformer has no norm there"
            )
    embeddings = {
        "source_embedding.weight": weights.pop("encoder.src_word_emb.weight"),
        "target_embedding.weight": weights.pop("decoder.trg_word_emb.weight"),
        "output.weight": weights.pop("trg_word_prj.weight"),
    }
    found: Weights = {}
    for name, tensor in weights.items():
        side, _, layer, part, *rest = name.split(".")
        ours = {"slf_attn": "self_attention", "enc_attn": "cross_attention", "pos_ffn": "feed_forward"}[part]
        stem = f"{side}.layers.{layer}.{ours}"
        if rest[0] == "layer_norm":
            found[f"{stem}_norm.{rest[1]}"] = tensor
        elif rest[0] == "w_qs":
            others = [weights[name.replace("w_qs", other)] for other in ("w_ks", "w_vs")]
            found[f"{stem}.in_proj_weight"] = torch.cat((tensor, *others))
        elif rest[0] not in ("w_ks", "w_vs"):
            ours = {"fc": "out_proj", "w_1": "inner", "w_2": "outer"}[rest[0]]
            found[f"{stem}.{ours}.{rest[1]}"] = tensor
    heads = settings["n_head"]
    tied = torch.equal(embeddings["output.weight"], embeddings["target_embedding.weight"])
    scaled = settings.get("scale_emb_or_prj", "prj") if tied else "none"
    attention = "encoder.layer_stack.0.slf_attn.{}.weight"
    fields = {
        **_sizes(found, heads),
        "head_dim": len(weights[attention.format("w_qs")]) // heads,
        "value_head_dim": len(weights[attention.format("w_vs")]) // heads,
        "dropout": settings.get("dropout", 0.1),
        "attention_dropout": 0.1,  # fixed in the program, not part of its settings
        "norm_eps": 1e-6,
        "scale_embeddings": scaled == "emb",
        "scale_logits": scaled == "prj",
    }
    return fields, {**embeddings, **found}


def _annotated(weights: Weights, heads: int) -> tuple[dict[str, Any], Weights]:
    """Return the fields of the configuration, and the weights under fastattn's names.

    The program's norm divides by the unbiased deviation plus 1e-6. It equals LayerNorm with a smaller gain, up to a
    millionth.
    """
    found = {
        "source_embedding.weight": weights["src_embed.0.lut.weight"],
        "target_embedding.weight": weights["tgt_embed.0.lut.weight"],
        "output.weight": weights["generator.proj.weight"],
        "output.bias": weights["generator.proj.bias"],
    }
    d_model = found["output.weight"].shape[1]
    gain = ((d_model - 1) / d_model) ** 0.5
    names = {"self_attn": "self_attention", "src_attn": "cross_attention", "feed_forward": "feed_forward"}
    for side, parts in (("encoder", ("self_attn", "feed_forward")), ("decoder", tuple(names))):
        count = len({name.split(".")[2] for name in weights if name.startswith(f"{side}.layers.")})
        # fastattn stores a norm with the sub-layer before it, the program with the sub-layer after it.
        norms, ours = [], [f"{side}.norm"]
        for layer in range(count):
            for place, part in enumerate(parts):
                theirs, stem = f"{side}.layers.{layer}.{part}", f"{side}.layers.{layer}.{names[part]}"
                norms.append(f"{side}.layers.{layer}.sublayer.{place}.norm")
                ours.append(f"{stem}_norm")
                for kind in ("weight", "bias"):
                    if part == "feed_forward":
                        found[f"{stem}.inner.{kind}"] = weights[f"{theirs}.w_1.{kind}"]
                        found[f"{stem}.outer.{kind}"] = weights[f"{theirs}.w_2.{kind}"]
                    else:
                        projections = [weights[f"{theirs}.linears.{n}.{kind}"] for n in range(4)]
                        found[f"{stem}.in_proj_{kind}"] = torch.cat(projections[:3])
                        found[f"{stem}.out_proj.{kind}"] = projections[3]
        for theirs, name in zip((*norms, f"{side}.norm"), ours, strict=True):
            found[f"{name}.weight"] = weights[f"{theirs}.a_2"] * gain
            found[f"{name}.bias"] = weights[f"{theirs}.b_2"]
    fields = {
        **_sizes(found, heads),
        **dict.fromkeys(("dropout", "attention_dropout", "ffn_dropout"), 0.1),
        "norm_first": True,
        "norm_eps": 1e-12,
        "attention_bias": True,
    }
    return fields, found


def _sizes(weights: Weights, heads: int) -> dict[str, int]:
    layers = {
        f"{side}_layers": len({name.split(".")[2] for name in weights if name.startswith(f"{side}.layers.")})
        for side in ("encoder", "decoder")
    }
    d_ff, d_model = weights["encoder.layers.0.feed_forward.inner.weight"].shape
    return {"d_model": d_model, "d_ff": d_ff, "num_heads": heads, **layers}


def _read(path: StrPath) -> dict[str, Any]:
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            saved = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except MemoryError:
        raise
    except Exception:  # the unpickler's exception depends on the bytes: KeyError, struct.error or another
        raise InputError(
            f"cannot read {path}: it is no file of torch.save, or holds more than weights and settings; "
            "save the model's state dict"
        ) from None
    return saved if isinstance(saved, dict) else {}


def _words(path: StrPath) -> list[str]:
    words = read_lines(path)
    twice = len(words) - len(set(words))
    if twice:
        raise InputError(f"{path} has {twice} words more than once: expected each once, in the order of the ids")
    for names in SPECIAL:
        if not any(name in words for name in names):
            raise InputError(f"{path} lacks {' or '.join(names)}: expected all pieces of the program")
    return words


def _places(rows: dict[str, int], pieces: list[str]) -> list[int]:
    """Return for each of fastattn's pieces its row in the program's matrices; if it has none, the unknown word's."""
    special = [next(rows[name] for name in names if name in rows) for names in SPECIAL]
    return special + [rows.get(piece, special[-1]) for piece in pieces[len(SPECIAL) :]]
