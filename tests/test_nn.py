"""Tests of MultiHeadAttention against torch.nn.MultiheadAttention, of KeyValueCache, and of the other modules."""

import contextlib
import copy
import functools
import math
import pickle
from unittest import mock

import pytest
import torch
from conftest import DEVICE, KERNELS, slow
from observers import Lora, count_reads
from oracle import assert_accurate, dropout_mask, largest

import fastattn
from fastattn import Dropout, DropoutAddLayerNorm, KeyValueCache, LayerNorm, MultiHeadAttention, SoftmaxDropout

pytestmark = pytest.mark.torch_version  # the modules are drop-ins for torch's
close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=2e-6)  # sums of float32 in any order
SEED = torch.tensor([17, 0])
WEIGHTS = pytest.mark.parametrize("weights", [False, True], ids=["no weights", "weights"])


def pair(*args, **kwargs):
    """Return fastattn's module and torch's, with the same parameters."""
    theirs = torch.nn.MultiheadAttention(*args, **kwargs)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ours = MultiHeadAttention(*args, **kwargs)
    assert ours.load_state_dict(theirs.state_dict()).missing_keys == []
    return ours, theirs


def made(**options):
    return MultiHeadAttention(16, 4, batch_first=True, **options)


def patched(**options):
    module = torch.nn.MultiheadAttention(16, 4, batch_first=True, **options)
    assert fastattn.patch(module).changed
    return module


def compare(ours, theirs, inputs, masks, weights):
    """Compare outputs, weights and gradients of inputs and parameters by the tolerance rule, torch's module as the
    peer."""
    results = []
    for module in (ours, copy.deepcopy(theirs).double(), theirs):
        module.zero_grad()
        dtype = module.out_proj.weight.dtype
        leaves = [t.to(dtype).clone().requires_grad_() for t in inputs]
        of_dtype = {name: mask if mask.dtype == torch.bool else mask.to(dtype) for name, mask in masks.items()}
        outs = [out for out in module(*leaves, **of_dtype, **weights) if out is not None]
        sum((out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum() for out in outs).backward()
        results.append([*outs, *(t.grad for t in leaves), *(p.grad for _, p in sorted(module.named_parameters()))])
    assert results[0][0].is_contiguous() >= results[2][0].is_contiguous()  # Callers may take a view of it.
    # A score s is rounded by eps |s|, which is a relative error eps |s| of P. It enters once in the forward and once in
    # the backward pass, and their sums differ in order. This adds 2 eps |s| to the 8 eps of the rule.
    with torch.no_grad():
        q, k, _ = ours._project(*inputs, None, ours._read_parameters(), ours._split_heads)
        largest_score = largest(q @ k.mT) / math.sqrt(ours.head_dim)
    # Saturated or cancelling scores have gradients far below those of values.
    of_gradients = max(map(largest, results[1][len(outs) :])) * (1 + largest_score / 4)
    for n, (a, e, p) in enumerate(zip(*results, strict=True)):
        assert_accurate(a, e, p, f"{weights} {masks}", magnitude=1.0 if n < len(outs) else of_gradients)


CONSTRUCTIONS = [
    {},
    {"bias": False},
    {"kdim": 12, "vdim": 10},
    {"kdim": 12},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"add_bias_kv": True, "add_zero_attn": True, "vdim": 10},
    {"batch_first": True},
]


@pytest.mark.parametrize("options", CONSTRUCTIONS, ids=str)
def test_constructed_like_torchs(options):
    """State dicts load both ways; the initialisation under a seed and the attributes are torch's."""
    torch.manual_seed(3)
    theirs = torch.nn.MultiheadAttention(16, 4, **options)
    torch.manual_seed(3)
    ours = fastattn.MultiheadAttention(16, 4, **options)  # the alias of torch's spelling
    assert type(ours) is MultiHeadAttention
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    torch.nn.MultiheadAttention(16, 4, **options).load_state_dict(ours.state_dict())
    for name in ("embed_dim", "num_heads", "head_dim", "kdim", "vdim", "dropout", "batch_first", "add_zero_attn"):
        assert getattr(ours, name) == getattr(theirs, name), name
    meta = MultiHeadAttention(16, 4, device="meta", dtype=torch.bfloat16, **options)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in meta.parameters())
    operands = [torch.empty(2, 2, size, device="meta") for size in (16, ours.kdim, ours.vdim)]
    for found, wanted in zip(meta.float()(*operands), theirs.to("meta")(*operands), strict=True):
        assert found.is_meta
        assert found.shape == wanted.shape


@pytest.mark.parametrize("backend", KERNELS, indirect=True)
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
@pytest.mark.parametrize("options", CONSTRUCTIONS, ids=str)
@pytest.mark.parametrize("weights", [{"need_weights": False}, {}, *slow({"average_attn_weights": False})], ids=str)
def test_matches_torchs_module(backend, weights, options):
    ours, theirs = pair(16, 4, **options)
    first = options.get("batch_first", False)
    sizes = list(zip((5, 9, 9), (16, options.get("kdim", 16), options.get("vdim", 16)), strict=True))
    inputs = [torch.randn((2, n, e) if first else (n, 2, e)) for n, e in sizes]
    unbatched = [torch.randn(size) for size in sizes]
    padding = torch.arange(9) >= torch.tensor([9, 6])[:, None]
    blocked = torch.rand(5, 9) < 0.3
    blocked[:, 0] = False
    for operands, masks in (
        (inputs, {}),
        (unbatched, {}),
        (inputs, {"key_padding_mask": padding}),
        (inputs, {"attn_mask": blocked}),
        (inputs, {"attn_mask": torch.randn(5, 9)}),
        (inputs, {"attn_mask": blocked, "key_padding_mask": padding}),
        (inputs, {"attn_mask": torch.randn(8, 5, 9), "key_padding_mask": torch.randn(2, 9)}),
        (inputs, {"attn_mask": blocked.expand(8, 5, 9)}),
        (unbatched, {"attn_mask": torch.randn(4, 5, 9), "key_padding_mask": padding[1]}),
    ):
        compare(ours, theirs, operands, masks, weights)
    with torch.no_grad():
        close(ours.eval()(*inputs)[0], theirs.eval()(*inputs)[0])


def test_self_attention_and_one_tensor_for_key_and_value(backend):
    ours, theirs = pair(16, 4, batch_first=True)
    x, memory = torch.randn(2, 7, 16), torch.randn(2, 9, 16)
    close(ours(x, memory, memory), theirs(x, memory, memory))
    for masks in ({}, {"attn_mask": DISTANCE > 0, "is_causal": True}):
        close(ours(x, x, x, **masks), theirs(x, x, x, **masks))


DISTANCE, LENGTHS = torch.arange(7) - torch.arange(7)[:, None], torch.tensor([7, 4])
PAST_LENGTHS = torch.arange(7) >= LENGTHS[:, None]
OWN = {"is_causal": True, "window_size": (2, -1), "key_lengths": LENGTHS}
BLOCKED = (DISTANCE > 0) | (DISTANCE < -2) | PAST_LENGTHS[:, None]  # what OWN hides, (2, 7, 7)
OF_HEADS = {"attn_mask": BLOCKED.repeat_interleave(4, 0)}
FLOATS = torch.randn(2, 4, 7, 7)
# Masks that say the same, by name: (options of the module, masks of the first call, masks of the second).
SAME_MASKS = {
    "lengths": ({}, {"key_lengths": LENGTHS}, {"key_padding_mask": PAST_LENGTHS}),
    "causal": ({}, {"is_causal": True}, {"attn_mask": DISTANCE > 0}),
    "causal by both": ({}, {"is_causal": True, "attn_mask": DISTANCE > 0}, {"attn_mask": DISTANCE > 0}),
    "window": ({}, {"window_size": (2, 1)}, {"attn_mask": (DISTANCE < -2) | (DISTANCE > 1)}),
    "combined": ({}, OWN, OF_HEADS),
    # Every query sees the appended keys, whatever the masks hide.
    "appended biases": ({"add_bias_kv": True}, OWN, OF_HEADS),
    "appended zeros": ({"add_zero_attn": True}, OWN, OF_HEADS),
    # A mask (N, 1 or num_heads, L, S) is the mask (N * num_heads, L, S).
    "four dimensions": ({}, {"attn_mask": BLOCKED[:, None]}, OF_HEADS),
    "floats": ({}, {"attn_mask": FLOATS}, {"attn_mask": FLOATS.flatten(0, 1)}),
}


@WEIGHTS
@pytest.mark.parametrize("case", SAME_MASKS)
def test_masks_that_say_the_same(backend, weights, case):
    options, *masks = SAME_MASKS[case]
    module, x = MultiHeadAttention(16, 4, batch_first=True, **options), torch.randn(2, 7, 16)
    close(*(module(x, x, x, need_weights=weights, **of_call) for of_call in masks))


@WEIGHTS
@pytest.mark.parametrize("floats", [False, True], ids=["bools", "floats of torch's encoder layer"])
def test_rows_masked_whole_are_the_bias(backend, weights, floats):
    """A row that sees nothing, NaN in torch, is the output projection's bias, and its gradient is 0."""
    ours, _ = pair(16, 4, batch_first=True)
    x = torch.randn(2, 5, 16, requires_grad=True)
    padding = torch.tensor([[False] * 5, [True] * 5])
    padding = torch.zeros(2, 5).masked_fill(padding, -math.inf) if floats else padding
    out, shown = ours(x, x, x, key_padding_mask=padding, need_weights=weights)
    torch.testing.assert_close(out[1], ours.out_proj.bias.expand(5, 16))
    assert shown is None or (shown[1] == 0).all()
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert grad.isfinite().all()
    assert (grad[1] == 0).all()


@pytest.mark.parametrize(("head_dim", "value_head_dim"), [(5, None), (85, 85), (None, 7), (16, 3)])
def test_free_head_sizes(backend, head_dim, value_head_dim):
    """Free d_k and d_v, as in rows (A) and (B) of the paper's table 3, agree with the formula, head by head."""
    sizes = {"head_dim": head_dim, "value_head_dim": value_head_dim}
    module, again = (MultiHeadAttention(12, 3, batch_first=True, **sizes) for _ in range(2))
    dk, dv = head_dim or 4, value_head_dim or head_dim
    x, memory = torch.randn(2, 5, 12), torch.randn(2, 9, 12)
    out, weights = module(x, memory, memory, average_attn_weights=False)
    assert (out.shape, weights.shape) == ((2, 5, 12), (2, 3, 5, 9))
    assert module.out_proj.weight.shape == (12, 3 * dv)
    assert sum(p.numel() for p in module.parameters()) == (12 + 1) * 3 * (2 * dk + dv) + (3 * dv + 1) * 12
    again.load_state_dict(module.state_dict())
    close(again(x, memory, memory, need_weights=False)[0], out)
    out.sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_dropout_in_training_only(backend):
    module = MultiHeadAttention(16, 4, dropout=0.4, batch_first=True)
    x = torch.randn(2, 40, 16)
    call = functools.partial(module, x, x, x)
    torch.manual_seed(0)
    first, second = (call(need_weights=False)[0] for _ in range(2))
    torch.manual_seed(0)
    assert torch.equal(call(need_weights=False)[0], first)
    assert not torch.equal(first, second)
    shown, weights = call(average_attn_weights=False, seed=SEED)
    close(call(need_weights=False, seed=SEED)[0], shown)  # both paths drop the same elements
    assert torch.equal(weights != 0, dropout_mask((2, 4, 40, 40), 0.4, SEED))
    module.eval()
    assert torch.equal(call()[0], call()[0])


@pytest.mark.parametrize("chunks", [[1] * 11, [4, 1, 5, 1], [11], [2, 9]], ids=str)
@pytest.mark.parametrize("size", [(), (16,), (11,)], ids=["growing", "larger", "exact"])
def test_cache_equals_the_whole(backend, size, chunks):
    """Decoding token by token, or by uneven chunks, gives the outputs of the causal whole. A cache has no gradients."""
    module = MultiHeadAttention(16, 4, batch_first=True).eval()
    x, cache = torch.randn(3, 11, 16), KeyValueCache(*size)
    with pytest.raises(ValueError, match="holds no gradients"):
        module(x, x, x, is_causal=True, cache=cache)
    with torch.no_grad():
        whole = module(x, x, x, is_causal=True, need_weights=False)[0]
        parts = [module(c, c, c, is_causal=True, cache=cache, need_weights=False)[0] for c in x.split(chunks, 1)]
        close(torch.cat(parts, 1), whole)
        assert cache.length == 11
        cache.reset()
        assert cache.length == 0
        close(module(x, x, x, is_causal=True, cache=cache)[0], whole)


@torch.no_grad()
def test_static_cache_is_cross_attention(backend):
    module = MultiHeadAttention(16, 4, batch_first=True).eval()
    memory, lengths = torch.randn(2, 9, 16), torch.tensor([9, 5])
    cache = KeyValueCache(static=True)
    for x in torch.randn(3, 2, 1, 16):
        out = module(x, memory, memory, cache=cache, key_lengths=lengths)[0]
        close(out, module(x, memory, memory, key_lengths=lengths)[0])
        assert cache.length == 9


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("size", [(), (10,), (6,)], ids=["growing", "larger", "exact"])
def test_a_cache_keeps_what_it_is_told(size, dtype):
    for index in ([0, 1, 2], [2, 1, 0], [1], [0, 2], [2, 2, 0, 1, 1], [1, 1, 1], []):
        cache, index = KeyValueCache(*size), torch.tensor(index, dtype=dtype)
        before = torch.randn(3, 2, 5, 4), torch.randn(3, 2, 5, 6)
        more = torch.randn(len(index), 2, 1, 4), torch.randn(len(index), 2, 1, 6)
        cache.append(*before)
        cache.reorder(index)
        for kept, old, new in zip(cache.append(*more), before, more, strict=True):
            assert torch.equal(kept, torch.cat((old[index.long()], new), 2)), index
        if size == (6,):
            with pytest.raises(ValueError, match=r"(?s)6.*7|7.*6"):
                cache.append(*more)


@pytest.mark.parametrize(
    "options", [{"attn_mask": torch.zeros(3, 5)}, {"window_size": 4}, {"key_lengths": torch.tensor([1, 99])}], ids=str
)
@torch.no_grad()
def test_a_refused_call_adds_nothing_to_a_cache(options):
    module, cache = MultiHeadAttention(8, 2, batch_first=True).eval(), KeyValueCache()
    x = torch.randn(2, 6, 8)
    first, more = ((rows,) * 3 for rows in x.split(3, 1))
    module(*first, is_causal=True, cache=cache)
    with pytest.raises((ValueError, TypeError)):
        module(*more, cache=cache, **options)
    fastattn.explain(module, *more, cache=cache)
    assert cache.length == 3
    close(module(*more, is_causal=True, cache=cache)[0], module(x, x, x, is_causal=True)[0][:, 3:])


@pytest.mark.parametrize("static", [False, True])
@torch.no_grad()
def test_a_refused_or_explained_first_call_binds_no_cache(static):
    module, cache = MultiHeadAttention(8, 2, batch_first=True).eval(), KeyValueCache(static=static)
    two, three = torch.randn(2, 4, 8), torch.randn(3, 4, 8)
    with pytest.raises(ValueError, match="batch size, got 2 and 3"):
        module(two, three, three, cache=cache)
    with torch.autocast("cpu", torch.bfloat16):
        fastattn.explain(module, three, three, three, cache=cache)
    with pytest.raises(ValueError, match="empty"):
        cache.contents()
    close(module(two, two, two, cache=cache)[0], module(two, two, two)[0])
    assert cache.length == 4


@pytest.mark.slow
@torch.no_grad()
def test_a_cache_in_compiled_decoding():
    module, cache = MultiHeadAttention(8, 2, batch_first=True).eval(), KeyValueCache(8)
    x = torch.randn(2, 5, 8)

    @torch.compile(fullgraph=True, backend="eager", dynamic=True)
    def step(token):
        return module(token, token, token, is_causal=True, need_weights=False, cache=cache)[0]

    found = torch.cat([step(token) for token in x.split(1, 1)], 1)
    close(found, module(x, x, x, is_causal=True, need_weights=False)[0])


@pytest.mark.parametrize("order", [None, [1, 0]], ids=["as it is", "reordered"])
@torch.no_grad()
def test_a_cache_of_inference_mode_goes_on_without_it(order):
    keys, cache = torch.randn(2, 3, 4, 8), KeyValueCache()
    with torch.inference_mode():
        cache.append(keys, keys)
    if order:
        cache.reorder(torch.tensor(order))
    wanted = torch.cat((keys[order or [0, 1]], keys), 2)
    assert all(torch.equal(kept, wanted) for kept in cache.append(keys, keys))


@WEIGHTS
def test_autocast(backend, weights):
    ours, theirs = pair(16, 4, batch_first=True)
    x = torch.randn(2, 7, 16)
    with torch.autocast(DEVICE, torch.bfloat16):
        a, e = ours(x, x, x, need_weights=weights)[0], theirs(x, x, x, need_weights=weights)[0]
        assert cross(ours, x[0], x[0], need_weights=False, **packed((5, 2))).dtype == torch.bfloat16
    assert a.dtype == e.dtype == torch.bfloat16
    torch.testing.assert_close(a, e, rtol=0.05, atol=0.05)


def encoder(layers=None):
    """Return torch's encoder layer, or a stack of them, first with fastattn's attention, then with torch's, of the same
    parameters."""
    theirs = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    theirs = torch.nn.TransformerEncoder(theirs, layers) if layers else theirs
    ours = copy.deepcopy(theirs)
    for layer in ours.layers if layers else [ours]:
        layer.self_attn = MultiHeadAttention(16, 4, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.fixture
def calls(monkeypatch):
    """Return the list of the calls of attention that fastattn.nn makes."""
    counted = mock.Mock(side_effect=fastattn.scaled_dot_product_attention)
    monkeypatch.setattr("fastattn.nn.attention.scaled_dot_product_attention", counted)
    return counted.call_args_list


X7 = torch.randn(3, 7, 16)
PADDING = torch.arange(7) >= torch.tensor([7, 4, 6])[:, None]
CAUSAL = torch.nn.Transformer.generate_square_subsequent_mask(7, device=DEVICE)
LAYER_MASKS = {
    "no mask": {},
    "padding": {"src_key_padding_mask": PADDING},
    "causal": {"src_mask": CAUSAL, "is_causal": True},
    "both": {"src_mask": CAUSAL.isinf(), "src_key_padding_mask": PADDING},
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("masks", LAYER_MASKS)
def test_torchs_encoder_layer_calls_our_attention(backend, calls, masks, training):
    """The layer calls fastattn's attention even in evaluation without gradients, where torch reads the parts'
    parameters itself. Copies call it too."""
    ours, theirs = encoder()
    with torch.set_grad_enabled(training):
        wanted = theirs.train(training)(X7, **LAYER_MASKS[masks])
        for layer in (ours.train(training), copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            close(layer(X7, **LAYER_MASKS[masks]), wanted)
    assert len(calls) == 3


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@torch.no_grad()
def test_torchs_encoder_calls_our_attention(backend, calls):
    """In evaluation a stack packs sequences into a nested tensor and leaves padding 0; one sequence may be all
    padding."""
    padding = torch.arange(7) >= torch.tensor([7, 4, 0])[:, None]
    out, expected = (model.eval()(X7, src_key_padding_mask=padding) for model in encoder(2))
    close(out, expected)
    assert (out[padding] == 0).all()
    assert len(calls) == 2


@pytest.mark.parametrize("make", [made, patched])
@pytest.mark.parametrize("replace", [Lora, torch.nn.Sequential])
def test_what_replaces_an_output_projection_in_torchs_encoder_layer(replace, make):
    """It takes effect in evaluation too, where torch's layer would read its weight, or find none."""
    layer, _ = encoder()
    layer.self_attn = make()
    layer.self_attn.out_proj = replace(layer.self_attn.out_proj)
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(X7), layer.train()(X7))


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_free_head_sizes_in_torchs_layers(backend, calls, training):
    """Free head sizes work in torch's layers, which in evaluation read sizes of parameters that fastattn's module may
    lack."""
    own = functools.partial(MultiHeadAttention, 16, 4, batch_first=True, head_dim=8, value_head_dim=5, num_kv_heads=2)
    layer, decoder = encoder()[0], torch.nn.TransformerDecoderLayer(16, 4, 32, batch_first=True)
    layer.self_attn, decoder.self_attn, decoder.multihead_attn = own(), own(), own()
    with torch.set_grad_enabled(training):
        memory = layer.train(training)(X7, src_key_padding_mask=PADDING)
        out = decoder.train(training)(X7, memory, tgt_mask=CAUSAL, memory_key_padding_mask=PADDING)
    assert out.isfinite().all()
    assert len(calls) == 3


@torch.no_grad()
def test_torchs_encoder_layer_compiles():
    torch._dynamo.reset()
    layer, masks = encoder()[0].eval(), LAYER_MASKS["both"]
    close(torch.compile(layer, fullgraph=True, backend="eager")(X7, **masks), layer(X7, **masks))
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("average", [True, False], ids=["averaged", "all"])
def test_nested_operands(backend, layout, average):
    """Each sequence gives the results of its own call; weights are padded with zeros."""
    module = MultiHeadAttention(16, 4, batch_first=True)
    rows = [torch.randn(n, 16) for n in (5, 2, 7)]
    x = torch.nested.nested_tensor(rows, layout=layout, requires_grad=True)
    out, weights = module(x, x, x, average_attn_weights=average)
    rows = [row.requires_grad_() for row in rows]
    expected = [module(row, row, row, average_attn_weights=average) for row in rows]
    for row, got, shown, wanted in zip(rows, out.unbind(), weights, expected, strict=True):
        close((got, shown[..., : len(row), : len(row)]), wanted)
        assert shown.count_nonzero() == wanted[1].count_nonzero()
    (x + out).to_padded_tensor(0.0).square().sum().backward()  # the residual connection
    sum((row + out).square().sum() for row, (out, _) in zip(rows, expected, strict=True)).backward()
    torch.testing.assert_close(x.grad.unbind(), tuple(row.grad for row in rows), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("queries", "keys"), [((5, 3), (2, 9)), ((5, 0), (2, 9)), ((5, 3), (0, 0))], ids=str)
def test_nested_queries_beside_nested_keys(queries, keys):
    module, query, key = MultiHeadAttention(16, 4, batch_first=True), jagged(*queries), jagged(*keys)
    out, weights = module(query, key, key, need_weights=False, is_causal=True)
    assert weights is None
    for got, rows, columns in zip(out.unbind(), query.unbind(), key.unbind(), strict=True):
        close(got, module(rows, columns, columns, is_causal=True)[0])
    wanted = module(query, key, key)[1]
    with torch.device("meta"):  # another default device
        assert torch.equal(module(query, key, key)[1], wanted)


def jagged(*lengths):
    return torch.nested.nested_tensor([torch.randn(n, 16) for n in lengths], layout=torch.jagged)


def joined(module, x):
    return (x + module(x, x, x, need_weights=False)[0]).values()


def decoded(module, x):
    return module(x, x, x, need_weights=False, is_causal=True, **packed((5, 2)))[0]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["jagged", "packed"])
def test_compiles_whole(form):
    """Jagged operands compile in one graph at several lengths, with the residual connection. Gradients are eager's."""
    torch._dynamo.reset()
    module = MultiHeadAttention(16, 4, batch_first=True)
    call = functools.partial(joined if form == "jagged" else decoded, module)
    compiled = torch.compile(call, fullgraph=True, backend="eager", dynamic=True)
    for lengths in ((3, 5), (2, 6), (1, 4, 2)) if form == "jagged" else [(5, 2)]:
        x = jagged(*lengths) if form == "jagged" else torch.randn(sum(lengths), 16)
        x.requires_grad_()
        found, wanted = compiled(x), call(x)
        close(found, wanted)
        grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in (found, wanted)]
        close(*(grad.values() if grad.is_nested else grad for grad in grads))
    torch._dynamo.reset()


REFUSED_NESTED = {
    "key_padding_mask": lambda m, x: m(x, x, x, key_padding_mask=torch.zeros(2, 5, dtype=torch.bool)),
    "attn_mask": lambda m, x: m(x, x, x, attn_mask=torch.zeros(5, 5)),
    "key_lengths": lambda m, x: m(x, x, x, key_lengths=torch.tensor([3, 3])),
    "cache": lambda m, x: m(x, x, x, cache=KeyValueCache()),
    "all be nested": lambda m, x: m(torch.randn(2, 5, 16), x, x),
    "same lengths": lambda m, x: m(x, x, jagged(4, 3)),
    "batch_first=True": lambda m, x: MultiHeadAttention(16, 4)(x, x, x),
}


@pytest.mark.parametrize("words", REFUSED_NESTED)
def test_refused_beside_nested_operands(words):
    """The errors are AssertionErrors too, as in torch's module."""
    module = MultiHeadAttention(16, 4, batch_first=True)
    with pytest.raises((ValueError, TypeError), match=words) as refused:
        REFUSED_NESTED[words](module, jagged(5, 3))
    assert isinstance(refused.value, AssertionError)


PACKED = {
    "self-attention": ((5, 2, 7), None, {}, {}),
    "causal": ((5, 2, 7), None, {"is_causal": True}, {}),
    "window": ((5, 0, 70), None, {"window_size": (3, 1)}, {}),
    "causal, other keys": ((3, 5, 1), (7, 4, 9), {"is_causal": True}, {}),
    "window, other keys": ((3, 5, 1), (7, 4, 9), {"window_size": (1, 2)}, {}),
    "cross-attention": ((5, 2, 0, 4), (3, 9, 2, 0), {}, {"kdim": 12, "vdim": 10}),
    "grouped heads": ((5, 7), (5, 7), {}, {"num_kv_heads": 2, "head_dim": 7, "value_head_dim": 5, "bias": False}),
}


def packed(queries, keys=None):
    """Return the arguments that describe packed sequences of these lengths."""
    keys = queries if keys is None else keys
    offsets = (torch.tensor([0, *lengths]).cumsum(0) for lengths in (queries, keys))
    return dict(zip(("cu_seq_q", "cu_seq_k", "max_q", "max_k"), (*offsets, max(queries), max(keys)), strict=True))


def hidden(queries, keys, is_causal=False, window_size=(-1, -1)):
    """Return a sequence's mask (queries, keys), True = hidden. The last query stands at the last key."""
    left, right = (math.inf if side < 0 else side for side in window_size)
    distance = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
    return (distance > (0 if is_causal else right)) | (distance < -left)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("case", PACKED)
def test_packed_operands(backend, case, batch_first):
    """Each sequence gives the results and gradients of its own call, with its mask written out."""
    queries, keys, masks, sizes = PACKED[case]
    module = MultiHeadAttention(16, 4, batch_first=batch_first, **sizes)
    query = torch.randn(sum(queries), 16, requires_grad=True)
    others = [torch.randn(sum(keys), size, requires_grad=True) for size in (module.kdim, module.vdim)] if keys else []
    key, value = others or (query, query)
    out, weights = module(query, key, value, need_weights=False, **packed(queries, keys), **masks)
    assert weights is None
    assert out.is_contiguous()
    alone = zip(query.split(queries), *(t.split(keys or queries) for t in (key, value)), strict=True)
    expected = torch.cat([module(*rows, attn_mask=hidden(*map(len, rows[:2]), **masks))[0] for rows in alone])
    close(out, expected)
    leaves = [query, *others, *module.parameters()]
    gradients = (torch.autograd.grad(result.square().sum(), leaves) for result in (out, expected))
    for own, wanted in zip(*gradients, strict=True):  # float32 sums of some 80 rows in another order
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-5 * wanted.abs().max().item())


def test_packed_operands_drop_what_padded_ones_do(backend):
    module, lengths = MultiHeadAttention(16, 4, dropout=0.4, batch_first=True), (5, 2, 7)
    padded = torch.randn(3, 7, 16)
    real = torch.arange(7) < torch.tensor(lengths)[:, None]
    theirs, _ = module(padded, padded, padded, need_weights=False, key_lengths=torch.tensor(lengths), seed=SEED)
    call = functools.partial(module, *(padded[real],) * 3, need_weights=False, **packed(lengths))
    ours = call(seed=SEED)[0]
    close(ours, theirs[real])
    module.eval()
    assert not torch.allclose(ours, call()[0])


REFUSED_PACKED = {
    "key_padding_mask": {"key_padding_mask": torch.zeros(5, dtype=torch.bool)},
    "attn_mask": {"attn_mask": torch.zeros(5, 5)},
    "key_lengths": {"key_lengths": torch.tensor([5])},
    "cache": {"cache": KeyValueCache()},
    "no weights": {"need_weights": True},
    "got no max_q, max_k": {"max_q": None, "max_k": None},
    "must rise from 0 to 5": {"cu_seq_q": torch.tensor([0, 4])},
    "max_k must be at least": {"max_k": 4},
    "add_bias_kv": {"add_bias_kv": True},  # of the module
    "add_zero_attn": {"add_zero_attn": True},
    r"\(tokens, 16\), got query of 3 dimensions and shape \(2, 5, 16\)": {"query": torch.randn(2, 5, 16)},
}


@pytest.mark.parametrize("words", REFUSED_PACKED)
def test_refused_beside_packed_operands(words):
    options = {"query": torch.randn(5, 16), "need_weights": False, **packed((5,)), **REFUSED_PACKED[words]}
    module = MultiHeadAttention(16, 4, **{name: options.pop(name) for name in list(options) if name.startswith("add_")})
    with pytest.raises((ValueError, TypeError), match=words):
        module(key=options["query"], value=options["query"], **options)


@WEIGHTS
@pytest.mark.parametrize("batch_first", [False, True], ids=["(L, N, E)", "(N, L, E)"])
@pytest.mark.parametrize("sizes", [(0, 5, 9), (2, 0, 9), (2, 5, 0), (2, 0, 0)], ids=str)
def test_no_sequences_no_queries_no_keys(backend, sizes, batch_first, weights):
    batch, *lengths = sizes
    query, key = (torch.randn((batch, n, 16) if batch_first else (n, batch, 16)) for n in lengths)
    close(*(module(query, key, key, need_weights=weights) for module in pair(16, 4, batch_first=batch_first)))


def test_float64():
    """The reference serves float64, with gradients."""
    inputs, results = [torch.randn(n, 2, 16, dtype=torch.float64, requires_grad=True) for n in (5, 9, 9)], []
    for module in pair(16, 4, dtype=torch.float64, add_bias_kv=True):
        out, weights = module(*inputs)
        results.append((out, weights, *torch.autograd.grad(out.square().sum() + weights.square().sum(), inputs)))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", [(5, 16), (2, 5, 16)], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_half_precision_biases(backend, training, shape):
    ours, theirs = (module.train(training) for module in pair(16, 4, batch_first=True))
    x = torch.randn(shape)
    ours.in_proj_bias = torch.nn.Parameter(ours.in_proj_bias.half())
    ours.out_proj.bias = torch.nn.Parameter(ours.out_proj.bias.half())
    theirs.load_state_dict(ours.state_dict())
    close(ours(x, x, x)[0], theirs(x, x, x)[0])


@WEIGHTS
@pytest.mark.parametrize("options", [{}, {"head_dim": 5, "value_head_dim": 3}, {"kdim": 12}, {"add_bias_kv": True}])
@pytest.mark.parametrize("masked", [False, True])
def test_fewer_heads_of_keys_and_values(backend, weights, options, masked):
    """Results equal those of a module with the heads repeated."""
    ours = MultiHeadAttention(16, 4, num_kv_heads=2, batch_first=True, **options)
    torch.nn.init.normal_(ours.in_proj_bias)
    whole = MultiHeadAttention(16, 4, batch_first=True, **options)

    def repeated(tensor, dim=0):
        return tensor.unflatten(dim, (2, -1)).repeat_interleave(2, dim).flatten(dim, dim + 1)

    state = ours.state_dict()
    for name, tensor in state.items():
        if name.startswith("in_proj"):
            query, *others = tensor.split(ours._projection_sizes)
            state[name] = torch.cat((query, *map(repeated, others)))
        elif name.startswith(("k_proj", "v_proj", "bias_")):
            state[name] = repeated(tensor, 2 if name.startswith("bias_") else 0)
    whole.load_state_dict(state)
    x, memory = torch.randn(2, 5, 16), torch.randn(2, 9, options.get("kdim", 16))
    value = torch.randn(2, 9, 16) if "kdim" in options else memory
    masks = {"is_causal": True, "key_lengths": torch.tensor([9, 4]), "window_size": (3, -1)} if masked else {}
    close(*(module(x, memory, value, need_weights=weights, **masks) for module in (ours, whole)))


@torch.no_grad()
def test_every_extension_with_a_cache(backend):
    """All extensions at once, token by token, give the outputs of the whole: fewer key heads, free head sizes, appended
    keys, window and padding."""
    sizes = {"num_kv_heads": 2, "head_dim": 6, "value_head_dim": 3, "add_bias_kv": True, "add_zero_attn": True}
    module = MultiHeadAttention(16, 4, batch_first=True, **sizes).eval()
    options = {"is_causal": True, "window_size": (4, -1), "average_attn_weights": False}
    x, cache = torch.randn(2, 9, 16), KeyValueCache()
    padding = torch.arange(9) < torch.tensor([0, 2])[:, None]
    whole, shown = module(x, x, x, padding, **options)
    for n in range(9):
        step = x[:, n : n + 1]
        out, weights = module(step, step, step, padding[:, : n + 1], cache=cache, **options)
        close(out, whole[:, n : n + 1])
        seen = [*range(n + 1), 9, 10]  # the appended keys follow the others
        close(weights, shown[:, :, n : n + 1, seen])


def other(**changes):
    """Return a call that torch's module refuses."""
    operands = {name: torch.randn(5, 2, 16) for name in ("query", "key", "value")}
    return lambda module: module(**(operands | changes))


REFUSED = {
    "key's size": other(key=torch.randn(5, 2, 12), value=torch.randn(5, 2, 12)),
    "four dimensions": other(query=torch.randn(1, 5, 2, 16)),
    "a batch beside none": other(query=torch.randn(5, 16)),
    "key longer than value": other(key=torch.randn(6, 2, 16)),
    "dtypes": other(key=torch.randn(5, 2, 16).double()),
    "another dtype than the parameters'": lambda module: module(*[torch.randn(5, 2, 16).double()] * 3),
    "integers": lambda module: module(*[torch.ones(5, 2, 16, dtype=torch.int64)] * 3),
    "padding of three dimensions": other(key_padding_mask=torch.zeros(2, 1, 5)),
    "mask of too few heads": other(attn_mask=torch.zeros(4, 5, 5)),
    "mask of one dimension": other(attn_mask=torch.zeros(5)),
    "mask of integers": other(attn_mask=torch.zeros(5, 5).int()),
}


@pytest.mark.parametrize("case", REFUSED)
def test_errors_are_torchs_too(case):
    """A call that torch's module refuses raises an error of torch's type, which names the mistake."""
    ours, theirs = pair(16, 4)
    with pytest.raises(Exception) as expected:  # noqa: PT011
        REFUSED[case](theirs)
    with pytest.raises((ValueError, TypeError), match=r"MultiHeadAttention: (query|key|value|attn_mask)") as got:
        REFUSED[case](ours)
    assert isinstance(got.value, expected.type)


@pytest.mark.parametrize("shape", [64, (64,), (3, 64)], ids=str)
@pytest.mark.parametrize("options", [{}, {"eps": 1e-3}, {"elementwise_affine": False}, {"bias": False}], ids=str)
def test_layer_norm_module(backend, shape, options):
    ours, theirs = LayerNorm(shape, **options), torch.nn.LayerNorm(shape, **options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 64)
    close(ours(x), theirs(x))


@pytest.mark.parametrize("options", [{}, {"elementwise_affine": False}, {"bias": False}], ids=str)
@pytest.mark.parametrize("prenorm", [False, True], ids=["output", "output and sum"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_dropout_add_layer_norm_module(backend, training, prenorm, options):
    x, residual = torch.randn(2, 9, 64), torch.randn(2, 9, 64)
    module = DropoutAddLayerNorm(64, p=0.3, prenorm=prenorm, **options).train(training)
    norm = torch.nn.LayerNorm(64, **options)
    assert list(module.state_dict()) == list(norm.state_dict())
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    norm.load_state_dict(module.state_dict())
    total = residual + fastattn.dropout(x, 0.3, training, seed=SEED)
    got, low = (module(x, residual, seed=SEED, out_dtype=dtype) for dtype in (None, torch.bfloat16))
    close(got, (norm(total), total) if prenorm else norm(total))
    assert torch.equal(low[0] if prenorm else low, (got[0] if prenorm else got).bfloat16())


@pytest.mark.parametrize("kind", [Dropout, SoftmaxDropout])
def test_dropout_modules(backend, kind):
    function = fastattn.dropout if kind is Dropout else fastattn.softmax_dropout
    module, x = kind(0.3), torch.randn(2, 9, 40)
    assert torch.equal(module(x, seed=SEED), function(x, 0.3, seed=SEED))
    torch.manual_seed(0)
    first, second = module(x), module(x)
    assert not torch.equal(first, second)
    assert torch.equal(module.eval()(x), function(x, 0.0))


MODULES = {
    "MultiHeadAttention": functools.partial(MultiHeadAttention, 16, 4, dropout=0.1, add_bias_kv=True),
    "LayerNorm": functools.partial(LayerNorm, 16),
    "DropoutAddLayerNorm": functools.partial(DropoutAddLayerNorm, 16, 0.2, prenorm=True),
    "SoftmaxDropout": functools.partial(SoftmaxDropout, 0.1),
    "Dropout": functools.partial(Dropout, 0.25),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_travel(name):
    """Modules survive deepcopy and pickle, with their mode, repr and results."""
    module = MODULES[name]().eval()
    inputs = {"MultiHeadAttention": 3, "DropoutAddLayerNorm": 2}.get(name, 1)
    x = [torch.randn(5, 2, 16)] * inputs
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert not twin.training
        assert repr(twin) == repr(module)
        a, e = twin(*x), module(*x)
        assert all(map(torch.equal, a, e)) if isinstance(a, tuple) else torch.equal(a, e)
    assert name in repr(module)


def cross(module, x, y, **options):
    return module(x, y, y, **options)[0]


def decode(module, x, y, static):
    """Make a first call, and a second one that uses the first one's keys and values too; return the number of calls."""
    cache = KeyValueCache(static=static)
    with torch.no_grad():
        for rows in (x[:, :3], x[:, 3:]):
            keys = y if static else rows
            module(rows, keys, keys, cache=cache)
    return 2


READS = {
    "self-attention": ({}, lambda m, x, y: cross(m, x, x)),
    "weights": ({}, lambda m, x, y: cross(m, x, x, average_attn_weights=False)),
    "key is value": ({}, cross),
    "query is key": ({}, lambda m, x, y: m(y, y, y + 1)),
    "three operands": ({}, lambda m, x, y: m(x, y, y + 1)),
    "sizes of their own": ({"kdim": 12, "vdim": 10}, lambda m, x, y: m(x, y[..., :12], y[..., :10])),
    "no biases": ({"bias": False}, cross),
    "appended keys": ({"add_bias_kv": True, "add_zero_attn": True}, lambda m, x, y: cross(m, x, y, is_causal=True)),
    "grouped heads": ({"num_kv_heads": 2, "head_dim": 5, "value_head_dim": 3}, cross),
    "packed": ({}, lambda m, x, y: cross(m, x[0], y[0], need_weights=False, **packed((2, 3), (4, 5)))),
    "packed self-attention": ({}, lambda m, x, y: cross(m, x[0], x[0], need_weights=False, **packed((2, 3)))),
    "nested": ({}, lambda m, x, y: cross(m, jagged(2, 4), jagged(3, 5))),
    "nested self-attention": ({"add_bias_kv": True}, lambda m, x, y: m(*[jagged(2, 4)] * 3)),
    "cache": ({}, lambda m, x, y: decode(m, x, y, static=False)),
    "static cache": ({}, lambda m, x, y: decode(m, x, y, static=True)),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("case", "make"), [*((case, made) for case in READS), ("sizes of their own", patched)])
def test_a_parametrised_parameter_is_computed_once_a_call(case, make):
    options, call = READS[case]
    module = make(**options)
    counts = count_reads(module)
    calls = call(module, torch.randn(2, 5, 16), torch.randn(2, 9, 16))
    assert {count.calls for count in counts.values()} == {calls if isinstance(calls, int) else 1}


def test_norms_compute_a_parametrised_parameter_once():
    for norm, operands in ((LayerNorm(16), 1), (DropoutAddLayerNorm(16), 2)):
        counts = count_reads(norm)
        norm(*[torch.randn(5, 16)] * operands)
        assert {count.calls for count in counts.values()} == {1}


FORMS = {
    "padded": cross,
    "self-attention": lambda module, x, y: cross(module, x, x, need_weights=False),
    "packed": READS["packed"][1],
    "nested": READS["nested"][1],
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("make", [made, patched])
@pytest.mark.parametrize("form", FORMS)
def test_hooks_of_the_output_projection_are_called(make, form):
    """A hook is called once per call, with input and output. If it returns a value, that is the output."""
    attention, operands, seen = make(), (torch.randn(2, 5, 16), torch.randn(2, 9, 16)), []
    expected = FORMS[form](attention, *operands)
    attention.out_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    attention.out_proj.register_forward_hook(lambda *args: seen.append(args[2]))
    attention.out_proj.register_forward_hook(lambda *args: args[2] * 2)
    doubled = FORMS[form](attention, *operands)
    found, out = seen
    torch.testing.assert_close(torch.nn.functional.linear(found, *attention.out_proj.parameters()), out)
    if form != "nested":  # nested rows are padded inside, and each call draws other operands
        assert torch.equal(out, expected)
        assert torch.equal(doubled, expected * 2)


HOOKS = [f"register_{kind}_hook" for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre")]


@pytest.mark.parametrize("kind", [*HOOKS, "a hook of all modules", "forward", "class's forward", "_compiled_call_impl"])
def test_whoever_observes_the_output_projection_sees_its_call(kind, monkeypatch):
    module, x, seen = MultiHeadAttention(16, 4), torch.randn(5, 2, 16), []
    projection, forward = module.out_proj, torch.nn.Linear.forward

    def see(module, *_):
        if module is projection:
            seen.append(module)

    def seen_forward(self, x):
        see(self)
        return forward(self, x)

    if kind == "class's forward":
        monkeypatch.setattr(torch.nn.Linear, "forward", seen_forward)
    elif kind in ("forward", "_compiled_call_impl"):  # projection.compile() sets the latter
        setattr(projection, kind, functools.partial(seen_forward, projection))
    elif kind in HOOKS:
        getattr(projection, kind)(see)
    with contextlib.ExitStack() as stack:
        if kind == "a hook of all modules":
            stack.callback(torch.nn.modules.module.register_module_forward_hook(see).remove)
        module(x, x, x)[0].sum().backward()
    assert seen == [projection]


def test_an_adapter_of_the_output_projection_has_its_effect():
    """The output equals that of torch's module with the merged weight."""
    ours, theirs = pair(16, 4)
    adapter = ours.out_proj = Lora(ours.out_proj)
    theirs.out_proj.weight.data = adapter.merged().detach()
    x = torch.randn(5, 2, 16)
    out = cross(ours, x, x)
    torch.testing.assert_close(out, cross(theirs, x, x), rtol=1e-4, atol=1e-5)
    assert all(gradient.abs().max() > 0 for gradient in torch.autograd.grad(out.sum(), (adapter.down, adapter.up)))
