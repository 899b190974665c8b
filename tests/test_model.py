"""Tests of the Transformer: properties, sizes, options, cached decoding, dropout seeds, agreement of backends."""

import copy
import dataclasses
import math

import pytest
import torch
from observers import Counted, Lora, count_reads
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import fastattn
from fastattn import Transformer, TransformerConfig
from fastattn.errors import InputError
from fastattn.translation.evaluate import loss_of, smoothed_loss
from fastattn.translation.model import ROW_MULTIPLE, AttentionWeights, Packed, SinusoidalPositions
from fastattn.translation.tokenizer import BOS_ID

SMALL = TransformerConfig(vocab_size=40, d_model=32, d_ff=64, num_heads=4, encoder_layers=2, decoder_layers=2)
VARIANTS = {
    "paper": SMALL,
    "pre-norm": dataclasses.replace(SMALL, norm_first=True),
    "free heads": dataclasses.replace(SMALL, head_dim=7, value_head_dim=5),
    "window": dataclasses.replace(SMALL, window_size=(2, 1)),
    "learned": dataclasses.replace(SMALL, positions="learned", max_positions=24, attention_bias=True, output_bias=True),
    "untied": dataclasses.replace(SMALL, tying="none", scale_embeddings=False),
    "logits scaled": dataclasses.replace(SMALL, tying="output", scale_embeddings=False, scale_logits=True),
}
# Tolerance for two orders of summation of the same float32 numbers of order 1, through some 10 products of length 64.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def model(request):
    return Transformer(request.param).eval()


def batch(source_lengths=(9, 4), target_lengths=(7, 5)):
    """Return random source and target ids, each (sentences, longest length), int64, padded on the right."""
    generator = torch.Generator().manual_seed(1)
    tensors = []
    for lengths in (source_lengths, target_lengths):
        tokens = torch.randint(3, SMALL.vocab_size, (len(lengths), max(lengths)), generator=generator)
        tensors.append(tokens.masked_fill(torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None], 0))
    return tensors


@torch.no_grad()
def test_a_target_position_sees_only_earlier_ones(model):
    source, target = batch((9,), (7,))
    before = model(source, target)
    for changed in range(7):
        other = target.clone()
        other[0, changed] = 3 + (other[0, changed] - 2) % (SMALL.vocab_size - 3)
        after = model(source, other)
        assert torch.equal(after[0, :changed], before[0, :changed])
        assert not torch.allclose(after[0, changed], before[0, changed], atol=1e-3)


@torch.no_grad()
def test_every_source_position_matters_unless_a_window_hides_it(model):
    source, target = batch((9,), (7,))
    before = model(source, target)
    for changed in range(9):
        other = source.clone()
        other[0, changed] = 3 + (other[0, changed] - 2) % (SMALL.vocab_size - 3)
        assert not torch.allclose(model(other, target), before, atol=1e-3)


@torch.no_grad()
def test_padding_changes_nothing(model):
    source, target = batch()
    together = model(source, target)
    wider = model(F.pad(source, (0, 5)), F.pad(target, (0, 6)))
    for row, (source_length, target_length) in enumerate(((9, 7), (4, 5))):
        alone = model(source[row : row + 1, :source_length], target[row : row + 1, :target_length])
        torch.testing.assert_close(together[row, :target_length], alone[0], **CLOSE)
        torch.testing.assert_close(wider[row, :target_length], alone[0], **CLOSE)


@pytest.mark.parametrize("lengths", [((9, 4), (7, 5)), ((40, 24, 0), (1, 2, 64)), ((1,), (1,))])
def test_packed_sentences_have_the_features_and_gradients_of_padded_ones(model, lengths):
    """Features and gradients agree, filled up or not, also with an empty side. Rows that fill up have no gradient."""
    if model.config.positions == "learned":
        lengths = [[min(length, 24) for length in side] for side in lengths]
    padded, packed, rows = batch(*lengths), [], 0
    for tokens, of_side in zip(padded, lengths, strict=True):
        rows = sum(of_side)
        rest = -rows % ROW_MULTIPLE
        tokens = torch.cat([tokens[i, :length] for i, length in enumerate(of_side)])
        places = torch.tensor([place for length in of_side for place in range(length)] + [0] * rest)
        offsets = torch.tensor([0, *of_side, rest]).cumsum(0)
        packed.append(Packed(F.pad(tokens, (0, rest)), places, offsets, max(of_side)))
    theirs = model.features(*padded, *map(torch.tensor, lengths))
    theirs = torch.cat([theirs[i, :length] for i, length in enumerate(lengths[1])])
    ours = model.packed_features(*packed)[:rows]
    torch.testing.assert_close(ours, theirs, **CLOSE)
    weights, parameters = torch.linspace(-1, 1, theirs.numel()).view_as(theirs), dict(model.named_parameters())
    found = (
        torch.autograd.grad((features * weights).sum(), list(parameters.values()), allow_unused=True)
        for features in (ours, theirs)
    )
    for name, own, wanted in zip(parameters, *found, strict=True):
        assert (own is None) == (wanted is None), name
        if own is not None:  # float32 sums of some 100 rows, in different orders
            assert (own - wanted).norm() <= 1e-4 * wanted.norm().clamp(min=1), name


@torch.no_grad()
def test_step_by_step_decoding_equals_full_decoding(model):
    source, target = batch((9, 4, 6), (7, 7, 7))
    lengths = model.lengths(source)
    state = model.begin(source)
    parts = [model.step(token, state) for token in target.split(1, dim=1)]
    assert state.position == 7
    torch.testing.assert_close(torch.cat(parts, dim=1), model.features(source, target, lengths), **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("window_size", [(-1, -1), (2, 2), (0, 0)], ids=str)
def test_every_hypothesis_continues_its_own_past(window_size):
    """Hypotheses branch, die out and change places, and sentences leave. Each hypothesis has the features of its own
    tokens decoded separately."""
    model = Transformer(dataclasses.replace(SMALL, window_size=window_size)).eval()
    source, _ = batch((9, 4, 6, 5), (7, 7, 7, 7))
    lengths = model.lengths(source)
    state, sentences = model.begin(source), torch.arange(4)
    tokens = torch.full((4, 1, 1), BOS_ID)
    generator = torch.Generator().manual_seed(3)
    for width, kept in ((1, [0, 1, 2, 3]), (3, [0, 1, 2, 3]), (5, [3, 1, 2]), (2, [2, 1]), (4, [1, 0]), (4, [1])):
        features = model.step(tokens[:, :, -1], state)
        for row, sentence in enumerate(sentences):
            past = tokens[row]
            full = model.features(source[sentence].expand(len(past), -1), past, lengths[sentence].expand(len(past)))
            torch.testing.assert_close(features[row], full[:, -1], **CLOSE)
        index = torch.tensor(kept)
        parents = torch.randint(tokens.shape[1], (len(index), width), generator=generator)
        state.select(index, parents)
        tokens, sentences = tokens[index], sentences[index]
        history = tokens.gather(1, parents[..., None].expand(-1, -1, tokens.shape[2]))
        following = torch.randint(3, SMALL.vocab_size, (len(index), width, 1), generator=generator)
        tokens = torch.cat((history, following), -1)


def test_sinusoids():
    """The table follows the formula and section 3.5's reason for it: PE(pos + k) is the same linear map of PE(pos) at
    every pos."""
    d_model, k = 16, 37
    positions, cpu = SinusoidalPositions(d_model), torch.device("cpu")
    positions(0, 4, cpu)
    table = positions(0, 3000, cpu)
    assert table.dtype == torch.float32
    assert table.shape == (3000, d_model)
    for pos, i in ((0, 0), (1, 0), (2999, 3), (1234, 7)):
        angle = pos / 10000 ** (2 * i / d_model)
        assert table[pos, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-7)
        assert table[pos, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-7)
    assert torch.equal(positions(1000, 5, cpu), table[1000:1005])
    shift = torch.zeros(d_model, d_model, dtype=torch.float64)
    for i in range(0, d_model, 2):
        angle = k / 10000 ** (i / d_model)
        rotation = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
        shift[i : i + 2, i : i + 2] = torch.tensor(rotation, dtype=torch.float64)
    # Numbers below 1 are rounded to float32 twice, once through a rotation.
    torch.testing.assert_close(table[:-k].double() @ shift, table[k:].double(), rtol=0, atol=3 * 2**-24)


def test_positions_grow_in_the_dtype_of_the_model():
    model = Transformer(SMALL).bfloat16().eval()
    source, target = batch((600,), (7,))
    with torch.no_grad():
        assert model(source, target).dtype == torch.bfloat16
    assert Transformer(SMALL, dtype=torch.bfloat16).eval()(source, target).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "spoil", [torch.Tensor.float, lambda t: t[0], torch.Tensor.tolist], ids=["float", "1-D", "list"]
)
def test_bad_tokens_are_refused(spoil):
    source, target = batch()
    with pytest.raises(TypeError, match=r"tokens must be an int64 tensor \(sentences, length\), got"):
        Transformer(SMALL)(spoil(source), target)


def test_a_step_takes_a_token_for_each_hypothesis():
    model = Transformer(SMALL).eval()
    source, _ = batch()
    with torch.no_grad():
        state = model.begin(source)
    for tokens in (torch.ones(len(source), 2, dtype=torch.int64), torch.ones(1, 1, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"expected one for each sentence and hypothesis, \(\d, 1\)"):
            model.step(tokens, state)
    with pytest.raises(TypeError, match="tokens must be an int64 tensor"):
        model.step(source[:, 0], state)
    with torch.no_grad():
        assert model.step(source[:, :1], state).shape == (len(source), 1, SMALL.d_model)


def test_bad_input_is_refused():
    model = Transformer(SMALL)
    source, target = batch()
    with pytest.raises(ValueError, match="source has 1 sentences but target 2"):
        model(source[:1], target)
    with pytest.raises(TypeError, match="config must be a TransformerConfig, got str"):
        Transformer("base")


def test_learned_positions_refuse_longer_input():
    model = Transformer(VARIANTS["learned"])
    source, target = batch((25,), (7,))
    with pytest.raises(InputError, match="25 tokens is longer than max_positions=24"):
        model(source, target)


def test_a_constant_row_normalises_to_zero():
    for norm in (Transformer(SMALL).encoder.layers[0].feed_forward_norm.eval(), fastattn.LayerNorm(32)):
        rows = torch.full((3, 32), 7.25)
        out = norm(rows, torch.full_like(rows, -2.0)) if isinstance(norm, fastattn.DropoutAddLayerNorm) else norm(rows)
        assert torch.equal(out, torch.zeros(3, 32))


def parameters(config):
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Transformer(config).parameters())


def expected_parameters(config):
    """Return the count by hand: projections without bias, the feed-forward network's biases, gain and bias of each
    norm. Normalising first adds a norm to each stack."""
    d, d_ff, v = config.d_model, config.d_ff, config.vocab_size
    attention, feed_forward, norm = 4 * d * d, 2 * d * d_ff + d_ff + d, 2 * d
    encoder = attention + feed_forward + 2 * norm
    decoder = 2 * attention + feed_forward + 3 * norm
    stacks = config.encoder_layers * encoder + config.decoder_layers * decoder
    return v * d + stacks + (2 * norm if config.norm_first else 0)


def test_parameter_counts():
    """Counts are near the paper's 65 M and 213 M, at "about 37000" pieces. The public implementation that counts
    63,047,680 at exactly 37000 has two more LayerNorms of 2 * 512, which it never calls."""
    base, big = (TransformerConfig.preset(name, 37000) for name in ("base", "big"))
    assert parameters(base) == expected_parameters(base) == 63_047_680 - 2 * 2 * 512
    assert parameters(big) == expected_parameters(big) == 214_171_648
    assert parameters(base) / 65e6 == pytest.approx(1, abs=0.04)
    assert parameters(big) / 213e6 == pytest.approx(1, abs=0.01)
    tiny = TransformerConfig.preset("tiny", 8000)
    assert parameters(tiny) == expected_parameters(tiny)
    # Attention biases are h * (2 d_k + d_v) + d_model for each of 18 attentions. The output bias is one number per
    # piece.
    with_biases = dataclasses.replace(base, attention_bias=True, output_bias=True)
    assert parameters(with_biases) - parameters(base) == 18 * 4 * 512 + 37000
    # Table 3 (B): d_k of 16 instead of 64 removes 18 * 2 * 8 * 48 * 512 parameters.
    assert (
        parameters(base) - parameters(dataclasses.replace(base, head_dim=16, value_head_dim=64))
        == 18 * 2 * 8 * 48 * 512
    )
    # Each matrix that is not shared costs another 37000 * 512.
    for tying, matrices in (("output", 1), ("none", 2)):
        assert parameters(dataclasses.replace(base, tying=tying)) - parameters(base) == matrices * 37000 * 512


@pytest.mark.parametrize("through", ["logits", "loss"])
@pytest.mark.parametrize("tying", ["all", "output", "none"])
def test_the_padding_embedding_is_zero_and_frozen(tying, through):
    model = Transformer(dataclasses.replace(SMALL, tying=tying))
    embeddings = {model.source_embedding.weight, model.target_embedding.weight}
    assert len(embeddings) == (1 if tying == "all" else 2)
    assert (model.output.weight in embeddings) == (tying != "none")
    if through == "logits":
        model(*batch()).square().sum().backward()
    else:
        features = model.features(*batch()).flatten(0, 1)
        labels = torch.randint(1, SMALL.vocab_size, (len(features),))
        smoothed_loss(*model.projection(features), labels, 0.1, 0, model.fixed_id)[0].backward()
    for weight in embeddings:
        assert torch.equal(weight[0], torch.zeros(32))
        assert torch.equal(weight.grad[0], torch.zeros(32))
        assert weight.grad.abs().sum() > 0
    assert (model.output.weight.grad[0].abs().sum() == 0) == (tying != "none")


OBSERVED = ["hook", "own forward", "module in its place", "parametrisation"]


def observe(model, kind):
    """Make calls of the last product observable, without effect; return a function that returns their number."""
    output, calls = model.output, []
    if kind == "hook":
        output.register_forward_hook(lambda *_: calls.append(1))
    elif kind == "own forward":
        forward = output.forward
        output.forward = lambda features: calls.append(1) or forward(features)
    elif kind == "module in its place":
        model.output = nn.Sequential(output)
        model.output.append(nn.Identity()).register_forward_hook(lambda *_: calls.append(1))
    else:
        count = Counted()
        parametrize.register_parametrization(output, "weight", count)
        count.calls = 0
        return lambda: count.calls
    return lambda: len(calls)


@pytest.mark.parametrize("kind", OBSERVED)
def test_the_last_product_is_called_as_a_module(model, kind):
    """One observed call computes the logits and gradients of an output that nobody observes. The padding's row is not 0
    here, so that features and bias have gradients through it."""
    with torch.no_grad():
        model.output.weight[0].normal_()
        if model.output.bias is not None:
            model.output.bias.normal_()
    parameters, results = list(model.parameters()), []
    for number in range(2):
        logits = model(*batch())
        results.append((logits, *torch.autograd.grad(logits.square().sum(), parameters)))
        if number == 0:
            calls = observe(model, kind)
    assert calls() == 1
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, **CLOSE)
    shared = model.target_embedding.weight
    if model.config.tying != "none":
        assert any(parameter is shared for parameter in model.output.parameters())
        assert results[1][1 + [parameter is shared for parameter in parameters].index(True)][0].abs().max() == 0
    with torch.no_grad():
        model.logits(model.step(torch.full((2, 1), BOS_ID), model.begin(batch()[0])))
    assert calls() == 2


def test_a_hook_of_the_last_product_changes_the_logits(model):
    logits = model(*batch())
    model.output.register_forward_hook(lambda module, args, out: out - 3)
    assert torch.equal(model(*batch()), logits - 3)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_an_adapter_of_the_last_product_has_its_effect(model, smoothing):
    """Logits, loss and gradients are those of the merged weight."""
    with torch.no_grad():
        model.output.weight[0].normal_()
    bias, factor = model.output.bias, model.config.d_model**-0.5 if model.config.scale_logits else 1.0
    adapter = model.output = Lora(model.output)
    features = model.features(*batch()).detach().flatten(0, 1).requires_grad_()
    labels = torch.arange(len(features)) % 7  # 0 is the padding
    merged = adapter.merged().detach().requires_grad_()
    logits = F.linear(features * factor, merged, bias)
    torch.testing.assert_close(model.logits(features), logits, **CLOSE)
    loss, nll, correct = loss_of(model, features, labels, smoothing)
    wanted = F.cross_entropy(logits, labels, ignore_index=0, label_smoothing=smoothing, reduction="sum")
    torch.testing.assert_close(loss.float(), wanted, **CLOSE)
    plain = F.cross_entropy(logits, labels, ignore_index=0, reduction="sum")
    torch.testing.assert_close(nll.float(), plain.detach(), **CLOSE)
    assert correct == ((logits.argmax(-1) == labels) & (labels != 0)).sum()
    leaves = (features, adapter.base.weight, adapter.down, adapter.up)
    of_features, base, down, up = torch.autograd.grad(loss, leaves)
    wanted_features, of_weight = torch.autograd.grad(wanted, (features, merged))
    torch.testing.assert_close(of_features, wanted_features, **CLOSE)
    torch.testing.assert_close(up, of_weight @ adapter.down.t(), **CLOSE)
    torch.testing.assert_close(down, adapter.up.t() @ of_weight, **CLOSE)
    if model.config.tying != "none":
        of_weight = of_weight.index_fill(0, torch.tensor(0), 0.0)
    torch.testing.assert_close(base, of_weight, **CLOSE)


def test_a_wrapped_last_product(model):
    """A wrapper that hides its name in those of its parameters, as activation checkpointing has it."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model, grads = model.eval(), []
    for wrap in (lambda module: module, checkpoint_wrapper):
        model.output = wrap(model.output)
        logits = model(*batch())
        grads.append(torch.autograd.grad(logits.square().sum(), model.target_embedding.weight)[0])
    torch.testing.assert_close(*grads)


@pytest.mark.filterwarnings("ignore:.*deprecated")
@torch.no_grad()
def test_quantised_linear_modules(model):
    """Each linear module that torch quantises computes, and the last product is as near as its roundings allow."""
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert not isinstance(quantised.output, nn.Linear)
    assert quantised.device == torch.device("cpu")
    assert quantised(*batch()).isfinite().all()
    features = quantised.features(*batch())
    x = features * (model.config.d_model**-0.5 if model.config.scale_logits else 1.0)
    # Features are rounded to steps of a 127th of their range with 0, weights to steps of a 127th of the largest.
    of_x = (x.amax().clamp(min=0) - x.amin().clamp(max=0)) / 127
    of_weight = model.output.weight.abs().max() / 127
    weight = model.output.weight.abs()
    bound = of_x * weight.sum(1) + of_weight * (x.abs() + of_x).sum(-1, keepdim=True)
    assert ((quantised.logits(features) - model.logits(features)).abs() <= bound).all()


def called(model, run):
    """Return the names of the modules that a run calls, once per call."""
    names, handles = [], []
    for name, module in model.named_modules():
        handles.append(module.register_forward_hook(lambda *_, name=name: names.append(name)))
    run()
    for handle in handles:
        handle.remove()
    return names


@torch.no_grad()
def test_every_module_is_called(model):
    """A forward pass calls every module except lists. Decoding calls the parts of the encoder, then of the decoder."""
    source, target = batch()
    modules = {name for name, module in model.named_modules() if not isinstance(module, nn.ModuleList)}
    if model.source_embedding is model.target_embedding:
        modules -= {"source_embedding"}
    assert set(called(model, lambda: model(source, target))) == modules
    decoding = {name for name in modules if name.startswith(("decoder", "target", "embedding_dropout"))}
    state = model.begin(source)
    assert set(called(model, lambda: model.begin(source))) == modules - decoding - {"", "output"} | {
        "embedding_dropout", *({"target_embedding"} if model.source_embedding is model.target_embedding else ())
    }  # fmt: skip
    assert set(called(model, lambda: model.step(target[:, :1], state))) == decoding


@torch.no_grad()
def test_a_parametrised_parameter_is_computed_once_a_call_of_its_module(model):
    source, target = batch()
    counts = count_reads(model)
    model(source, target)
    shared = model.source_embedding is model.target_embedding
    for (module, name), count in counts.items():
        assert count.calls == (2 if shared and module is model.source_embedding else 1), (module, name)


def test_initialisation():
    model = Transformer(TransformerConfig(vocab_size=300, encoder_layers=1, decoder_layers=1))
    weight = model.encoder.layers[0].feed_forward.inner.weight
    bound = math.sqrt(6 / (512 + 2048))
    assert bound * 0.999 < weight.abs().max() <= bound
    assert model.encoder.layers[0].feed_forward.inner.bias.abs().max() == 0
    assert torch.equal(model.encoder.layers[0].feed_forward_norm.weight, torch.ones(512))
    # The deviation of 300 * 512 draws is off by more than 1 % once in 10^7 runs.
    assert model.target_embedding.weight[1:].std().item() == pytest.approx(512**-0.5, rel=0.01)


@pytest.mark.parametrize("scale_logits", [False, True])
def test_logits_begin_with_variance_one(scale_logits):
    model = Transformer(dataclasses.replace(SMALL, vocab_size=500, scale_logits=scale_logits)).eval()
    logits = model(*batch()).detach()
    assert logits[..., 1:].std().item() == pytest.approx(1, rel=0.2)


@pytest.mark.torch_version
@torch.no_grad()
def test_built_without_memory(model):
    """A model built on the meta device gets memory and weights by either of torch's ways, and is the same model."""
    wanted = model(*batch())
    with torch.device("meta"):
        first, second = (Transformer(model.config).eval() for _ in range(2))
    assert first(
        *(tokens.to("meta") for tokens in batch()), *torch.empty(2, 2, dtype=torch.int64, device="meta")
    ).is_meta
    first = first.to_empty(device="cpu")
    first.reset_parameters()
    assert first(*batch()).isfinite().all()
    first.load_state_dict(model.state_dict())
    second.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(first(*batch()), wanted)
    assert torch.equal(second(*batch()), wanted)


@pytest.mark.slow
@pytest.mark.torch_version
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("hook", [False, True], ids=["no hook", "hook"])
def test_compiles_as_one_graph(norm_first, hook):
    """Training with dropout compiles, at two sizes, to the eager numbers and gradients. With a hook the last product is
    called."""
    torch._dynamo.reset()
    config = dataclasses.replace(SMALL, norm_first=norm_first, encoder_layers=1, decoder_layers=1, dropout=0.2)
    model = Transformer(config)
    if hook:
        model.output.register_forward_hook(lambda module, args, out: out * 2)
    seeds = torch.stack((torch.full((model.dropout_sites,), 7), torch.arange(model.dropout_sites)), dim=1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for lengths in (((9, 4), (7, 5)), ((5, 12), (8, 3))):
        results = []
        for run in (compiled, model):
            logits = run(*batch(*lengths), seeds=seeds)
            results.append((logits, *torch.autograd.grad(logits.square().sum(), model.parameters())))
        for got, wanted in zip(*results, strict=True):
            torch.testing.assert_close(got, wanted, **CLOSE)
    torch._dynamo.reset()


def test_dropout_is_a_function_of_the_seeds(monkeypatch):
    model = Transformer(dataclasses.replace(SMALL, dropout=0.2, attention_dropout=0.2, ffn_dropout=0.2))
    source, target = batch()
    seeds = torch.stack((torch.full((model.dropout_sites,), 7), torch.arange(model.dropout_sites)), dim=1)
    first = model(source, target, seeds=seeds)
    assert torch.equal(model(source, target, seeds=seeds), first)
    for site in range(model.dropout_sites):
        other = seeds.clone()
        other[site, 0] = 8
        assert not torch.equal(model(source, target, seeds=other), first), f"site {site} drops nothing"
    with pytest.raises(ValueError, match=r"seeds has shape \(3, 2\), expected a tensor of shape \(22, 2\)"):
        model(source, target, seeds=seeds[:3])

    draws = []
    draw = torch.randint
    monkeypatch.setattr(torch, "randint", lambda *args, **kwargs: draws.append(args) or draw(*args, **kwargs))
    torch.manual_seed(3)
    drawn = model(source, target)
    assert len(draws) == 1
    torch.manual_seed(3)
    assert torch.equal(model(source, target), drawn)
    assert not torch.equal(model(source, target), drawn)
    model.eval()
    assert torch.equal(model(source, target), model(source, target, seeds=seeds))
    assert len(draws) == 3


@torch.no_grad()
def test_attention_weights(model):
    source, target = batch()
    weights = AttentionWeights()
    logits = model(source, target, weights=weights)
    torch.testing.assert_close(logits, model(source, target), **CLOSE)
    assert [len(layers) for layers in (weights.encoder, weights.decoder, weights.cross)] == [2, 2, 2]
    for layer in range(2):
        for probabilities, columns in ((weights.encoder, 9), (weights.decoder, 7), (weights.cross, 9)):
            assert probabilities[layer].shape == (
                2,
                4,
                9 if columns == 9 and probabilities is weights.encoder else 7,
                columns,
            )
        # The second sentence has 4 source and 5 target tokens. No query sees padding behind them, or later targets.
        for probabilities in (weights.encoder[layer][1, :, :4], weights.cross[layer][1, :, :5]):
            torch.testing.assert_close(probabilities.sum(-1), torch.ones(probabilities.shape[:-1]))
            assert probabilities[..., 4:].abs().max() == 0
        assert weights.decoder[layer].triu(1).abs().max() == 0


@torch.no_grad()
def test_a_window_restricts_self_attention():
    weights = AttentionWeights()
    Transformer(VARIANTS["window"]).eval()(*batch((9,), (7,)), weights=weights)
    i, j = torch.arange(9)[:, None], torch.arange(9)
    outside = (j < i - 2) | (j > i + 1)
    assert weights.encoder[0][0, :, outside].abs().max() == 0
    assert weights.encoder[0][0, :, ~outside].abs().min() > 0
    outside = (j < i - 2) | (j > i)
    assert weights.decoder[0][0, :, outside[:7, :7]].abs().max() == 0


def test_autocast_keeps_the_residual_stream_in_float32():
    model = Transformer(SMALL)
    seen = []
    for module in model.modules():
        if isinstance(module, fastattn.DropoutAddLayerNorm):
            module.register_forward_hook(lambda _, args, out: seen.append((args[0].dtype, args[1].dtype, out.dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(*batch())
    assert logits.dtype == torch.bfloat16
    assert set(seen) == {(torch.bfloat16, torch.float32, torch.float32)}
    logits.float().logsumexp(-1).sum().backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}


def test_autocast_casts_what_a_product_reads_once(monkeypatch):
    """With the norm first, the normalised sums are written in bfloat16, except each stack's last one. The logits stay
    the same."""
    model = Transformer(dataclasses.replace(SMALL, norm_first=True)).eval()
    forward, asked = fastattn.DropoutAddLayerNorm.forward, []

    def in_float32(self, *args, out_dtype):
        asked.append(out_dtype)
        return forward(self, *args)

    with torch.autocast("cpu", torch.bfloat16):
        logits, features = model(*batch()), model.features(*batch())
        monkeypatch.setattr(fastattn.DropoutAddLayerNorm, "forward", in_float32)
        assert torch.equal(logits, model(*batch()))
    assert features.dtype == torch.float32
    norms = sum(isinstance(module, fastattn.DropoutAddLayerNorm) for module in model.modules())
    assert asked.count(None) == 2
    assert asked.count(torch.bfloat16) == norms - 2


def test_a_copy_is_independent_and_a_state_dict_restores_it():
    model = Transformer(SMALL).eval()
    other = copy.deepcopy(model)
    assert other.output.weight is other.source_embedding.weight is not model.output.weight
    fresh = Transformer(SMALL).eval()
    fresh.load_state_dict(model.state_dict())
    source, target = batch()
    with torch.no_grad():
        assert torch.equal(fresh(source, target), model(source, target))
        other.output.weight.zero_()
        assert torch.equal(fresh(source, target), model(source, target))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size is 0, expected an integer from 1 to"),
        ({"d_model": 33, "num_heads": 3}, "d_model is 33, expected an even number"),
        ({"num_heads": 5}, "num_heads is 5, expected a divisor of d_model=32"),
        ({"dropout": 1.0}, r"dropout is 1.0, expected a rate in \[0, 1\)"),
        ({"ffn_dropout": "0.1"}, "ffn_dropout is '0.1', expected a rate"),
        ({"norm_eps": 0}, "norm_eps is 0, expected a positive number"),
        ({"norm_eps": math.inf}, "norm_eps is inf, expected a positive number"),
        ({"d_model": 10**30}, "d_model is 10*, expected an integer from 1 to"),
        ({"positions": "rotary"}, "positions is 'rotary', expected one of sinusoidal, learned"),
        ({"tying": "some"}, "tying is 'some', expected one of all, output, none"),
        ({"window_size": (-2, 0)}, r"window_size is \(-2, 0\), expected two integers"),
        ({"head_dim": 0}, "head_dim is 0, expected None or an integer"),
        ({"eos_id": 1}, "a piece of its own"),
        ({"pad_id": 40}, r"pad_id is 40, expected a piece of its own in \[0, 40\)"),
        ({"norm_first": 1}, "norm_first is 1, expected True or False"),
    ],
)
def test_a_bad_configuration_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(SMALL, **changes)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_configuration_survives_json(name):
    assert TransformerConfig.from_json(VARIANTS[name].to_json()) == VARIANTS[name]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[" * 10**5, "not valid JSON"),
        ('{"vocab_size": 40, "training": {"rate": Infinity}}', "rate is inf, expected a positive number"),
        ('{"vocab_size": 40, "training": {"clip_norm": NaN}}', "clip_norm is nan, expected a positive number"),
        ("[1]", "given list"),
        ('{"vocab_size": 8, "rotary": 1}', r"given \['rotary'\]"),
        ("{}", "needs vocab_size"),
    ],
)
def test_bad_json_is_refused(text, message):
    with pytest.raises(InputError, match=message):
        TransformerConfig.from_json(text)


def test_an_unknown_preset_is_refused():
    with pytest.raises(InputError, match="unknown preset 'huge', expected one of tiny, base, big"):
        TransformerConfig.preset("huge", 100)
