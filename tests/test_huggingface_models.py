"""Every architecture of transformers that can be built small: "fastattn" agrees with "eager", or is refused.

An architecture is a configuration class and the first of its models that runs on generic inputs under "eager". Rules on
the names of a configuration's fields make it small. The tests download nothing."""

import collections
import copy
import functools
import importlib
import inspect
import itertools
import pkgutil
import re
from typing import get_args

import pytest
import torch
from conftest import require_package

from fastattn.integrations import huggingface

transformers = require_package("transformers")
PINNED = "5.24.0"
IF_COUNTED = pytest.mark.skipif(transformers.__version__ != PINNED, reason=f"counted with transformers {PINNED}")
pytestmark = [pytest.mark.slow, IF_COUNTED]

LENGTH = 12
RIGHT = torch.arange(LENGTH) < torch.tensor([[LENGTH], [8], [3]])
# Configurations that are left out. With untrained weights the first two predict gigabytes of speech. The third is a
# part of a model that gives it a mask. Without one its layers are causal, unlike those of "eager".
LEFT_OUT = {"FastSpeech2ConformerConfig", "FastSpeech2ConformerWithHifiGanConfig", "BltGlobalTransformerConfig"}
PADDING = {"none": None, "ones": torch.ones_like(RIGHT), "right": RIGHT, "left": RIGHT.flip(1)}
MOST_PARAMETERS = 5_000_000
# Tolerance relative to the largest element. Float32 rounding gives at most 1e-4, a wrong mask gives at least 1e-2. Some
# models round more (a speech encoder on AVX2 1.5e-3). Beyond the tolerance, errors against float64 are compared.
TOLERANCE = 2e-4

# Sizes of hidden states, heads, key and value heads, and one head, tried in turn.
SIZES = [
    {"hidden": 32, "heads": 4, "kv": 2, "head": 8},
    {"hidden": 32, "heads": 4, "kv": 4, "head": 8},
    {"hidden": 128, "heads": 2, "kv": 2, "head": 64},
]
# Least numbers of architectures per shard: agreeing with and without padding, agreeing although they take no padding,
# refused.
COUNTS = [(40, 11, 14), (34, 12, 9), (42, 10, 11), (33, 9, 14), (34, 12, 10), (40, 12, 10), (38, 7, 17), (40, 16, 12)]
VARIANTS = ("plain", "more", "video", "transposed")
RULES = [
    (r"(.*_)?vocab_size(_.*)?|num_embeddings", 100),
    (r"codebook_size", 64),
    (r".*(kv|key_value)_?heads", "kv"),
    (r"(.*_)?(num_|n_)?(attention_)?heads?", "heads"),
    (r".*n_groups?|num_groups|topk_group|.*experts_per_tok|num_selected_experts|.*top_?k", 1),
    (r".*head_dim|d_kv|.*head_size|.*_rope_dim|rotary_dim", "head"),
    (r".*(intermediate|ffn|feedforward|ff|mlp|inner)_?(size|dim)|d_ff|n_inner|.*ffn_dim.*", 64),
    (r".*lora_rank", 16),
    (r"base_channels", 32),
    (r".*channel_multiplier|depths", 1),
    (r"(.*_)?(hidden_size|d_model|n_embd|embedding_size|(embed|embedding|hidden|emb)_dim|dim)", "hidden"),
    (r"(.*_)?(image|input|img)_size", 32),
    (r"(.*_)?patch_size", 8),
    (r"(.*_)?(num|n)_(local_|routed_)?experts|prediction_length", 4),
    (r"(.*_)?(num_.*(layers|blocks|stages)|n_layers?|layers|depth)", 2),
    (r"max_position_embeddings|n_positions|max_(source|target)_positions|n_ctx|seq_length", 64),
    (r"(.*_)?num_(object_)?queries|num_latents|d_latents|num_query_tokens", 8),
    (r"sliding_window", 5),
    (r"attention_window|frames_per_clip", 8),
    (r".*_token_(id|index)", 90),
]


@functools.cache
def rule(names):
    """Return the size of fields with one of these names, a number or its name in SIZES, or None."""
    fits = (size for pattern, size in RULES if any(re.fullmatch(pattern, name) for name in names))
    return next(fits, None)


def small(kind, sizes):
    """Return a configuration of this class whose sizes are at most the rules'."""
    given = kind()
    names = {name for base in kind.__mro__ for name in vars(base).get("__annotations__", {})}
    names |= set(inspect.signature(kind.__init__).parameters)
    aliases = {name: alias for alias, name in kind.attribute_map.items()}
    fields = {}
    for name, value in vars(given).items():
        if isinstance(value, transformers.PreTrainedConfig):
            fields[name] = small(type(value), sizes)
        elif name in names and not isinstance(value, bool):
            size = rule((name, aliases.get(name, name)))
            most = sizes.get(size, size)
            if name == "layer_types" and isinstance(value, list) and sizes != SIZES[0]:
                fields[name] = (list(dict.fromkeys(value)) * 2)[:2]
            elif name == "pad_token_id" and value is None and sizes != SIZES[0]:
                fields[name] = 0
            elif name in ("vocab_size", "prediction_length") and value is None:
                fields[name] = most
            elif isinstance(value, dict) and "rope_type" in value:
                fields[name] = {**value, "mrope_section": [sizes["head"] // 2 - 2, 1, 1]}
            elif most is not None and isinstance(value, int):
                fields[name] = min(value, most)
            elif most is not None and isinstance(value, list | tuple) and all(type(one) is int for one in value):
                fields[name] = type(value)(min(one, most) for one in value)
    return kind(**fields)


def architectures(folder):
    """Return the configuration classes of a folder of transformers' models, each with its models, the plain one
    first."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    package = importlib.import_module(f"transformers.models.{folder}")
    found = {}
    for file in pkgutil.iter_modules(package.__path__):
        if not file.name.startswith("modeling_"):
            continue
        try:
            module = importlib.import_module(f"{package.__name__}.{file.name}")
        except ImportError:  # a package that the model needs is missing
            continue
        for kind in vars(module).values():
            is_model = inspect.isclass(kind) and issubclass(kind, transformers.PreTrainedModel)
            is_whole = is_model and kind.config_class is not None and kind.forward is not torch.nn.Module.forward
            if is_whole and kind.__module__ == module.__name__:
                for config in get_args(kind.config_class) or [kind.config_class]:
                    found.setdefault(config, []).append(kind)
    found = {config: kinds for config, kinds in found.items() if config.__name__ not in LEFT_OUT}
    for config, kinds in found.items():
        plain = MODEL_MAPPING_NAMES.get(config.model_type, ())
        plain = plain if isinstance(plain, tuple) else (plain,)
        kinds.sort(key=lambda kind: (kind.__name__ not in plain, not kind.__name__.endswith("Model")))
    return found


def of(config, *names, default):
    """Return the first of these fields that the configuration or one of its parts has."""
    parts = [getattr(config, part, None) for part in ("vision_config", "audio_config", "text_config")]
    values = (getattr(part, name, None) for part in (config, *parts) for name in names)
    return next((value for value in values if value is not None), default)


def inputs(model, variant):
    """Return inputs for the names of the model's forward. The variants differ in which are given, and in their
    shapes."""
    names, config = inspect.signature(model.forward).parameters, model.config
    generator = torch.Generator().manual_seed(5)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    size = of(config, "image_size", default=32)
    size = size if isinstance(size, list | tuple) else (size, size)
    image = (of(config, "num_channels", "in_channels", default=3), *size)
    frames = of(config, "num_frames", "frames_per_clip", default=4)
    ids = torch.randint(4, 80, (3, LENGTH), generator=generator)
    hidden = of(config, "hidden_size", "d_model", default=32)
    bins = of(config, "num_mel_bins", "feature_size", "input_dim", "input_feat_per_channel", default=80)
    steps = 2 * of(config, "max_source_positions", default=32)
    shapes = {
        "pixel_values": (3, *([frames] if variant == "video" else []), *image),
        "pixel_values_videos": (3, frames, *image),
        "input_features": (3, bins, steps) if variant == "transposed" else (3, steps, bins),
        "input_values": (3, 1, 4000) if variant == "transposed" else (3, 4000),
    }
    found = {"input_ids": ids} if "input_ids" in names else {}
    if not found or variant == "more":
        found |= {name: normal(*shape) for name, shape in shapes.items() if name in names}
    if "grid_thw" in names:
        patch = image[0] * of(config, "temporal_patch_size", default=1) * of(config, "patch_size", default=8) ** 2
        found = {next(iter(names)): normal(16, patch), "grid_thw": torch.tensor([[1, 4, 4]])}
    if "past_values" in names:
        length = config.context_length + max(getattr(config, "lags_sequence", [0]))
        channels = [config.num_input_channels] if hasattr(config, "num_input_channels") else []
        found["past_values"] = normal(3, length, *channels)
        if "future_time_features" in names:
            found |= {
                "past_time_features": normal(3, length, config.num_time_features),
                "past_observed_mask": torch.ones(3, length),
                "future_values": normal(3, config.prediction_length),
                "future_time_features": normal(3, config.prediction_length, config.num_time_features),
            }
    for name in ("inputs_embeds", "hidden_states"):
        if name in names and not found:
            found[name] = normal(3, LENGTH, hidden)
    others = {"decoder_input_ids": ids.flip(1), "bbox": torch.zeros(3, LENGTH, 4, dtype=torch.long), "use_cache": False}
    return found | {name: value for name, value in others.items() if name in names}


def padded(model, given, mask):
    """Return the inputs with this mask (3, LENGTH), stretched to the length of the masked input."""
    names = inspect.signature(model.forward).parameters
    given = dict(given)
    if "attention_mask" in names and "grid_thw" not in names and {*given} != {"pixel_values"}:
        main = next(given[name] for name in ("input_ids", *given) if name in given)
        length = main.size(1)
        given["attention_mask"] = mask.repeat_interleave(-(-length // LENGTH), 1)[:, :length].long()
    if "decoder_attention_mask" in names and "decoder_input_ids" in given:
        given["decoder_attention_mask"] = mask.long()
    return given


def floats(output):
    if isinstance(output, dict):
        output = [value for name, value in output.items() if "attentions" not in name]
    if isinstance(output, list | tuple):
        return [tensor for value in output for tensor in floats(value)]
    return [output] if isinstance(output, torch.Tensor) and output.is_floating_point() else []


def outputs_and_gradients(model, given, mask):
    """Return the outputs, and all gradients of their products with noise, joined.

    For padded inputs the outputs are those at the places that exist."""
    model.zero_grad()
    torch.default_generator.manual_seed(3)
    outputs = floats(model(**given))
    if mask is not None:
        placed = [output[mask] for output in outputs if output.shape[:2] == mask.shape]
        outputs = placed or outputs
    loss = sum((output * torch.randn(output.shape)).sum() for output in outputs)
    loss.backward()
    gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return [*(output.detach() for output in outputs), torch.cat(gradients)]


def in_float64(given):
    floats = {name: value.double() for name, value in given.items() if getattr(value, "dtype", None) == torch.float32}
    return {**given, **floats}


def difference(found, wanted):
    """Return the largest difference, relative to each tensor's largest element."""
    pairs = [pair for pair in zip(found, wanted, strict=True) if pair[1].numel()]
    return max([((got - e).abs().max() / e.abs().max().clamp(min=1e-30)).item() for got, e in pairs], default=0.0)


def built(kind, config, implementation="eager"):
    """Return a model whose weights are such that no attention is uniform and no parameter is 0; ValueError if it is
    large.

    Equal arguments give equal weights, of all implementations."""
    with torch.device("meta"):
        sizes = [parameter.numel() for parameter in kind._from_config(copy.deepcopy(config)).parameters()]
    if sum(sizes) > MOST_PARAMETERS:
        raise ValueError(f"more than {MOST_PARAMETERS} parameters")
    torch.default_generator.manual_seed(1)
    model = kind._from_config(copy.deepcopy(config), attn_implementation=implementation).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
                parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    return model


def runnable(config, kinds):
    """Return the first of the models that runs when it is small as (class, configuration, inputs, the model, its
    outputs and gradients), or why none does."""
    reasons = []
    for sizes, kind in itertools.product(SIZES, kinds[:3]):
        model, tried = None, []
        for variant in VARIANTS:
            try:
                if model is None:
                    settings = small(config, sizes)
                    model = built(kind, settings)
                given = inputs(model, variant)
                shapes = {name: getattr(value, "shape", ()) for name, value in given.items()}
                if shapes not in tried:
                    tried.append(shapes)
                    wanted = outputs_and_gradients(model, given, None)
                    if all(tensor.isfinite().all() for tensor in wanted):
                        return kind, settings, given, model, wanted
                    reasons.append(f"{kind.__name__}: not finite")
            except Exception as error:
                reasons.append(f"{kind.__name__}: {error!r:.200}")
                if model is None:
                    break
    return reasons[0]


def compare(config, kinds, calls):
    """Return (status, the reason or the largest difference under each padding) of one architecture."""
    found = runnable(config, kinds)
    if isinstance(found, str):
        return "not built", found
    kind, settings, given, eager, unpadded = found
    refused = ""
    try:
        ours = built(kind, settings, "fastattn")
    except ValueError as error:  # it, or a part, has a table of attention classes or computes attention itself
        if 'attn_implementation="fastattn" is not for ' not in str(error):
            raise
        refused = f"{kind.__name__}: {error}"
        ours = built(kind, settings)
        ours.set_attn_implementation("fastattn")
    calls.clear()
    differences = {}
    for name, mask in PADDING.items():
        masked = given if mask is None else padded(eager, given, mask)
        takes_none = mask is not None and masked.keys() == given.keys()
        if takes_none or (name == "left" and "input_ids" not in given):  # a sound's mask only gives its length
            continue
        try:
            wanted = unpadded if mask is None else outputs_and_gradients(eager, masked, mask)
        except Exception:  # the model takes another kind of attention_mask
            continue
        if not all(tensor.isfinite().all() for tensor in wanted):
            continue
        try:
            found = outputs_and_gradients(ours, masked, mask)
        except ValueError as error:
            if 'attn_implementation="fastattn"' in str(error):
                return "refused", f"{kind.__name__}: {error}"
            raise
        differences[name] = difference(found, wanted)
        if differences[name] >= TOLERANCE:
            exact = outputs_and_gradients(copy.deepcopy(eager).double(), in_float64(masked), mask)
            differences[name] = difference(found, exact) - 2 * difference(wanted, exact)
    if not all(error < TOLERANCE for error in differences.values()):
        return "disagrees", f"{kind.__name__}: {differences}"
    if not calls:
        return ("refused", refused) if refused else ("does not attend", kind.__name__)
    return ("agrees, padded too" if "right" in differences else "agrees"), f"{kind.__name__}: {differences}"


@pytest.fixture
def calls(monkeypatch):
    """Yield the set of the names of fastattn's functions that transformers has called."""
    made = set()

    def recorded(name, genuine):
        return lambda *arguments, **settings: made.add(name) or genuine(*arguments, **settings)

    for name in ("attention", "attention_mask"):
        monkeypatch.setattr(huggingface, name, recorded(name, getattr(huggingface, name)))
    huggingface.register()
    yield made
    monkeypatch.undo()
    huggingface.register()


@pytest.mark.parametrize("shard", range(len(COUNTS)))
def test_agrees_or_is_refused(shard, calls):
    """Every architecture agrees or is refused.

    A shard is every eighth folder of models. Its counts reveal an architecture that stops running."""
    transformers.logging.set_verbosity_error()
    folders = [module.name for module in pkgutil.iter_modules(transformers.models.__path__) if module.ispkg]
    found = collections.defaultdict(dict)
    for folder in folders[shard :: len(COUNTS)]:
        for config, kinds in architectures(folder).items():
            status, why = compare(config, kinds, calls)
            found[status][config.__name__] = why
    for status, names in found.items():
        print(f"{status}: {len(names)}", *(f"  {name}: {why}" for name, why in names.items()), sep="\n")
    assert not found["disagrees"]
    counts = [len(found[status]) for status in ("agrees, padded too", "agrees", "refused")]
    assert all(count >= least for count, least in zip(counts, COUNTS[shard], strict=True)), counts
