"""transformers' models with ``attn_implementation="fastattn"`` against "eager", with random weights and no
downloads."""

import copy
import functools
import sys
from typing import ClassVar

import pytest
import torch
from conftest import require_package, slow
from torch.nn import functional as F

from fastattn import dropout_mask, scaled_dot_product_attention
from fastattn.integrations import huggingface

transformers = require_package("transformers")
transformers.logging.set_verbosity_error()

SIZES = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SEQ2SEQ = {"decoder_start_token_id": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
SMALL |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37, "vocab_size": 60, **SEQ2SEQ}
SMALL |= {"max_position_embeddings": 64}
P = 0.2


def case(kind, **options):
    """Return a model's class and its configuration."""
    return kind, kind.config_class(**options)


# Models by name, with attention dropout.
MODELS = {
    "bert": case(transformers.BertForMaskedLM, **SIZES, attention_probs_dropout_prob=P, hidden_dropout_prob=0.0),
    "gpt2": case(
        transformers.GPT2LMHeadModel, vocab_size=60, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=P,
        pad_token_id=0, scale_attn_by_inverse_layer_idx=True, bos_token_id=1, eos_token_id=2,
    ),
    "llama": case(transformers.LlamaForCausalLM, **SIZES, num_key_value_heads=2, attention_dropout=P),
    "mistral": case(
        transformers.MistralForCausalLM, **SIZES, num_key_value_heads=2, attention_dropout=P, sliding_window=4
    ),
    "marian": case(transformers.MarianMTModel, **SMALL, attention_dropout=P, forced_eos_token_id=None),
    "t5": case(
        transformers.T5ForConditionalGeneration, vocab_size=60, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4,
        dropout_rate=P, **SEQ2SEQ,
    ),
}  # fmt: skip
LENGTH = 13
IDS = torch.randint(3, 60, (3, LENGTH), generator=torch.Generator().manual_seed(5))
PADDING = {"no mask": None, "nothing padded": IDS > 0, "right": torch.arange(LENGTH) < torch.tensor([[13], [8], [1]])}
PADDING["left"] = PADDING["right"].flip(1)


@pytest.fixture(autouse=True, scope="module")
def registered():
    huggingface.register()


def pair(name):
    """Return the same model with eager attention and with fastattn's.

    The second is switched to fastattn, because transformers cannot make GIT with it."""
    kind, config = {**MODELS, **LACKING_SDPA, **NOT_CAUSAL}[name]
    torch.manual_seed(1)
    eager = kind._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in eager.parameters():
            parameter.normal_(0.0, 0.3)
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("fastattn")
    assert ours.config._attn_implementation == ("fastattn_masked" if name in LACKING_SDPA else "fastattn")
    return eager, ours


def made(kind, config):
    """Return a model with fastattn's attention, made with it."""
    return kind._from_config(copy.deepcopy(config), attn_implementation="fastattn")


def logits_and_gradients(model, padding, **inputs):
    """Return the logits at the places that exist, and all parameters' gradients of a loss of only those places."""
    mask = PADDING[padding]
    decoder = {"decoder_input_ids": IDS.flip(1)} if model.config.is_encoder_decoder else {}
    model.zero_grad()
    logits = model(IDS, attention_mask=mask, **decoder, **inputs).logits
    if mask is not None and not decoder:
        logits = logits[mask]
    logits.square().mean().backward()
    return logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def assert_agree(found, wanted):
    """Assert agreement to float32's rounding, relative to the largest element.

    Some gradients consist only of rounding: a key's bias has none."""
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-4)  # of logits


VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 37}
VISION |= {"image_size": 8, "patch_size": 4}
# Models with _supports_sdpa = False. The first two call the attention function, GIT adds the mask to its own scores.
LACKING_SDPA = {
    "bigbird_pegasus": case(
        transformers.BigBirdPegasusForConditionalGeneration, **SMALL, attention_type="original_full"
    ),
    "nllb_moe": case(
        transformers.NllbMoeForConditionalGeneration, **SMALL, num_experts=2, decoder_layerdrop=0.0,
        encoder_layerdrop=0.0,
    ),
    "git": case(transformers.GitForCausalLM, vision_config=VISION, **SIZES),
}  # fmt: skip


NOT_CAUSAL = {
    "aimv2": case(transformers.Aimv2TextModel, **{**SIZES, "eos_token_id": 59}),
    "gemma": case(
        transformers.GemmaForCausalLM, **SIZES, num_key_value_heads=2, head_dim=8, use_bidirectional_attention=True
    ),
}


@pytest.mark.parametrize("padding", ["no mask", "nothing padded"])
@pytest.mark.parametrize("name", NOT_CAUSAL)
@torch.no_grad()
def test_a_causal_mask_of_layers_that_are_not_causal(name, padding):
    """A causal mask is made if the layers' ``is_causal`` is False, because only a mask can hide the future then."""
    close(*(model(IDS, attention_mask=PADDING[padding])[0] for model in pair(name)))


OPERAND = torch.randn(2, 4, 5, 8)


def attend(mask=None, operand=OPERAND, **options):
    """Return what a layer, which is causal, computes by the registered function."""
    return huggingface.attention(torch.nn.Module(), operand, operand, operand, mask, **options)[0]


class Layer(torch.nn.Module):
    """Attention of a user, which neither is causal nor says so, and has no ``config``."""

    def __init__(self, settings):
        super().__init__()
        self.settings = settings

    def forward(self, query, key, mask):
        query, key = (x.unflatten(-1, (4, -1)).transpose(1, 2) for x in (query, key))
        functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
        function = functions.get_interface(self.settings._attn_implementation, eager_attention)
        return function(self, query, key, key, mask, dropout=0.0, scaling=1.0)[0].flatten(2)


def eager_attention(module, query, key, value, attention_mask, scaling, **others):
    scores = query @ key.mT * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    return (scores.softmax(-1) @ value).transpose(1, 2), None


class TwoConfig(transformers.PreTrainedConfig):
    sub_configs: ClassVar = {"text_config": transformers.BertConfig}

    def __init__(self, **settings):
        self.text_config = transformers.BertConfig(**SIZES)
        super().__init__(**settings)


class WithoutSdpa(transformers.PreTrainedModel):
    """A user's model, whose layers use the configuration of a part that has one."""

    _supports_sdpa = False

    def __init__(self, config):
        super().__init__(config)
        self.layer = Layer(getattr(config, "text_config", config))

    def forward(self, query, key, make):
        return self.layer(query, key, make(self.config, query, key) if make else None)


def bidirectional(config, query, key):
    return transformers.masking_utils.create_bidirectional_mask(config, query, None, encoder_hidden_states=key)


def causal(config, query, key):
    return transformers.masking_utils.create_causal_mask(config, query, None, None)


@pytest.mark.parametrize("is_causal", [None, True, False])
@pytest.mark.parametrize(
    ("make", "length"), [(None, 5), (None, 7), (bidirectional, 5), (bidirectional, 7), (causal, 5)]
)
@pytest.mark.parametrize("config", [transformers.BertConfig, TwoConfig])
def test_only_masks_hide_keys_in_a_user_s_model_without_sdpa(config, make, length, is_causal):
    """The layers have no ``config``, and an ``is_causal`` that may be missing or wrong. One configuration gives them
    the implementation by a part that no model checks."""
    query, key = torch.randn(2, 5, 32), torch.randn(2, length, 32)
    found = []
    for name in ("eager", "fastattn"):
        model = WithoutSdpa._from_config(config(), attn_implementation=name)
        if is_causal is not None:
            model.layer.is_causal = is_causal
        found.append(model(query, key, make))
    close(*found)


def test_a_user_s_class_without_sdpa_is_masked_alone():
    """A class without sdpa leaves other models of its configuration as they are, and may be defined again."""
    kind, config = MODELS["llama"]
    for supports, name in ((False, "fastattn_masked"), (True, "fastattn")) * 2:
        derived = type("Derived", (kind,), {"_supports_sdpa": supports})
        assert made(derived, config).config._attn_implementation == name
        assert made(kind, config).config._attn_implementation == "fastattn"


class Outer(transformers.PreTrainedModel):
    """A user's model with a part without sdpa, which shares its configuration or has a part of that."""

    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.part = WithoutSdpa(getattr(config, "text_config", config))

    def forward(self, x):
        return self.part.layer(x, x, causal(self.config, x, x))


def test_a_configuration_shared_with_a_model_without_sdpa():
    model = made(Outer, transformers.BertConfig())
    assert model.config._attn_implementation == "fastattn_masked"
    model.set_attn_implementation("eager")
    model.set_attn_implementation("fastattn")
    assert model.config._attn_implementation == "fastattn_masked"


def test_a_part_without_sdpa_gets_the_masks_made_for_the_whole():
    x = torch.randn(2, 5, 32)
    close(*(Outer._from_config(TwoConfig(), attn_implementation=name)(x) for name in ("eager", "fastattn")))


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", [*MODELS, *LACKING_SDPA])
def test_agrees_with_eager(name, padding):
    """Models without sdpa agree with left padding too, because eager's own mask gives a query without keys the result
    of "eager"."""
    assert_agree(*(logits_and_gradients(model, padding) for model in pair(name)))


def formula_dropout(input, p=0.5, training=True, inplace=False):
    """Drop as torch's function, but by ``dropout_mask`` for the seed that fastattn would draw."""
    if p == 0.0 or not training:
        return input
    seed = torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64)
    return input * dropout_mask(input.shape, p, seed) / (1 - round(p * 65536) / 65536)


@pytest.mark.parametrize("padding", ["no mask", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_attention_dropout(name, padding, monkeypatch):
    """In training each layer drops by the formula for its seed, and has the gradients of that."""
    monkeypatch.setattr(F, "dropout", formula_dropout)
    eager, ours = pair(name)
    found = []
    for model in (ours, eager):
        torch.manual_seed(2)
        found.append(logits_and_gradients(model.train(), padding))
    assert_agree(*found)
    assert not torch.allclose(found[0][0], logits_and_gradients(ours.eval(), padding)[0], atol=1e-2)


@pytest.mark.parametrize("cache", ["dynamic", "static", *slow(None)])
@pytest.mark.parametrize("padding", [*slow("no mask"), "left"])
@pytest.mark.parametrize("name", [*(name for name in MODELS if name != "bert"), *slow("bigbird_pegasus"), "nllb_moe"])
def test_generates_greedily(name, padding, cache):
    settings = {"use_cache": False} if cache is None else {"cache_implementation": cache}
    found, wanted = (
        model.generate(
            IDS, attention_mask=PADDING[padding], max_new_tokens=5, do_sample=False, output_logits=True,
            return_dict_in_generate=True, disable_compile=True, **settings,
        )
        for model in pair(name)
    )  # fmt: skip
    assert torch.equal(found.sequences, wanted.sequences)
    close(found.logits, wanted.logits)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt2"])  # GPT-2 does not pass it on
@torch.no_grad()
def test_weights_on_request(name):
    eager, ours = pair(name)
    decoder = {"decoder_input_ids": IDS} if eager.config.is_encoder_decoder else {}
    found, wanted = (model(IDS, output_attentions=True, **decoder) for model in (ours, eager))
    kinds = [kind for kind in wanted if kind.endswith("attentions") and wanted[kind]]
    assert kinds
    for kind in kinds:
        torch.testing.assert_close(found[kind], wanted[kind], rtol=1e-5, atol=1e-6)


def test_packed_sequences():
    """Sequences that are packed, so that positions begin again, do not see each other."""
    positions = torch.tensor([*range(5), *range(8)]).expand(3, -1)
    assert_agree(*(logits_and_gradients(model, "no mask", position_ids=positions) for model in pair("llama")))


@pytest.mark.parametrize("kind", ["bool", "float"])
@torch.no_grad()
def test_own_mask(kind):
    mask = torch.rand(3, 1, LENGTH, LENGTH) < 0.7
    mask |= torch.eye(LENGTH, dtype=torch.bool)
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    eager, ours = pair("bert")
    found = ours(IDS, attention_mask=mask if kind == "bool" else additive)
    close(found.logits, eager(IDS, attention_mask=additive).logits)


@pytest.fixture
def calls(monkeypatch):
    """Return the list that gets the mask and the causality of each call of attention."""
    found = []

    def recorded(query, key, value, mask, dropout, causal, **options):
        found.append((mask, causal))
        return scaled_dot_product_attention(query, key, value, mask, dropout, causal, **options)

    monkeypatch.setattr(huggingface, "scaled_dot_product_attention", recorded)
    return found


@pytest.mark.parametrize(("name", "causal"), [("bert", False), ("llama", True)])
def test_no_mask_where_none_is_needed(name, causal, calls):
    pair(name)[1](IDS)
    assert calls == [(None, causal)] * 2


def test_padding_is_not_expanded(calls):
    pair("bert")[1](IDS, attention_mask=PADDING["right"])
    for mask, causal in calls:
        assert mask.shape == (3, 1, LENGTH, LENGTH)
        assert mask.untyped_storage().nbytes() == 3 * LENGTH
        assert not causal


def test_rows_masked_whole_are_0():
    """A query that sees no key has weights 0. "eager" gives it the mean of what it must not see."""
    _, ours = pair("llama")
    weights = ours(IDS, attention_mask=PADDING["left"], output_attentions=True).attentions[0]
    assert weights[2, :, :12].eq(0).all()


@pytest.mark.parametrize("name", ["softcap", "s_aux", "sinks", "head_mask", "cache"])
def test_what_is_lacking_is_refused(name):
    with pytest.raises(ValueError, match=f"does not know {name}, .* of Module"):
        attend(**{name: torch.zeros(4)})
    attend(**{name: None})


def test_packed_sequences_without_a_mask_are_refused():
    with pytest.raises(ValueError, match="2 sequences in cu_seq_lens_q"):
        attend(operand=torch.randn(1, 4, 9, 8), cu_seq_lens_q=torch.tensor([0, 4, 9]))


BLOOM = {"vocab_size": 60, "hidden_size": 32, "n_layer": 2, "n_head": 4}
GEMMA2 = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "attn_logit_softcapping": 50.0}
ATTENDS_ITSELF = 'is not for {}.*, which computes attention itself; make the model with attn_implementation="eager"'
REFUSED = {
    "Bloom": (*case(transformers.BloomForCausalLM, **BLOOM), ATTENDS_ITSELF),
    "MPNet": (*case(transformers.MPNetModel, **SIZES), ATTENDS_ITSELF),
    "Gemma2": (*case(transformers.Gemma2ForCausalLM, **GEMMA2), "does not know softcap"),
}


@pytest.mark.parametrize("compiled", [False, *slow(True)])
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_served_is_refused(name, compiled):
    """A model that attends by itself is refused when it is made, an option when it is used."""
    kind, config, words = REFUSED[name]

    def used():
        model = made(kind, config)
        return (torch.compile(model, backend="eager") if compiled else model)(IDS)

    with pytest.raises(ValueError, match=words.format(name)):
        used()


def test_a_model_with_its_own_table_of_attention_classes_is_refused():
    """A model that looks the implementation up in a table of its module is refused by name when it is made, by every
    way to make it."""
    kind, config = LACKING_SDPA["git"]
    words = '"fastattn" is not for {}, .* own table .*; make the model with attn_implementation="eager"'
    with pytest.raises(ValueError, match=words.format(kind.__name__)):
        made(kind, config)
    named = copy.deepcopy(config)
    named._attn_implementation = "fastattn"
    for cls in (kind, type("Derived", (kind,), {})):
        with pytest.raises(ValueError, match=words.format(cls.__name__)):
            cls(named)


def test_a_table_of_the_user(monkeypatch):
    """A table that makes attention is known by its entry for "eager", a class or a function. Its other values may be
    anything. Another dictionary with that key is no such table."""
    kind, config = MODELS["llama"]
    derived = type("Derived", (kind,), {"__module__": __name__})
    for entry in (Layer, lambda config: Layer(config)):
        monkeypatch.setattr(sys.modules[__name__], "TABLE", {"eager": entry, "sdpa": None}, raising=False)
        with pytest.raises(ValueError, match="own table"):
            made(derived, config)
    for entry in (1.0, made(kind, config)):
        monkeypatch.setattr(sys.modules[__name__], "TABLE", {"eager": entry})
        assert made(derived, config)


def test_registering_again_changes_nothing():
    method = transformers.PreTrainedModel.get_correct_attn_implementation
    huggingface.register()
    assert transformers.PreTrainedModel.get_correct_attn_implementation is method


@pytest.mark.slow
def test_an_accepted_model_compiles_whole():
    kind, config = MODELS["llama"]
    model = made(kind, config).eval()
    for cls in type(model).__mro__:  # an earlier call has cached it from the source
        if "_can_set_attn_implementation_cached_value" in vars(cls):
            del cls._can_set_attn_implementation_cached_value
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(IDS).logits, model(IDS).logits)


def test_a_window_without_a_mask():
    distance = torch.arange(5)[:, None] - torch.arange(5)
    wanted = attend(mask=(distance >= 0) & (distance < 3))
    torch.testing.assert_close(attend(sliding_window=3), wanted)


@pytest.mark.parametrize(
    ("version", "words"), [(None, "pip install transformers"), ("4.57.6", "must be 5.8 or newer, got 4.57.6")]
)
def test_registering_says_what_is_wrong(version, words, monkeypatch):
    if version is None:
        monkeypatch.setitem(sys.modules, "transformers", None)
    else:
        monkeypatch.setattr("transformers.__version__", version)
    with pytest.raises(ImportError, match=words):
        huggingface.register()
