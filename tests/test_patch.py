"""Tests of patch(model): existing models run on fastattn's kernels and keep their results, state and structure."""

import ast
import contextlib
import copy
import functools
import inspect
import io
import math
import operator
import pickle
import re
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import require_package, slow, this_torch
from oracle import dropout_factor
from public_models import KNOWN, annotated, jadore, notebook
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import fastattn
import known_code
from fastattn.integrations import patching
from fastattn.integrations.patching import known, programs, torch_modules
from fastattn.integrations.patching.weights import LazyWeights
from fastattn.ops import check

pytestmark = pytest.mark.torch_version

VOCABULARY, PAD = 40, 0
ScaledDot, Heads, Norm = jadore.ScaledDotProductAttention, annotated.MultiHeadedAttention, annotated.LayerNorm


def tokens(batch, length, *ends):
    """Return random tokens, (batch, length), int64; sentence n ends after ``ends[n]`` of them."""
    found = torch.randint(1, VOCABULARY, (batch, length))
    for n, end in enumerate(ends):
        found[n, end:] = PAD
    return found


# Models, each with the arguments of a call. Head sizes are odd. The first target of jadore's begins with padding, so
# some rows are masked whole.


def jadore_model():
    model = jadore.Transformer(
        VOCABULARY, VOCABULARY, PAD, PAD, d_word_vec=24, d_model=24, d_inner=40, n_layers=2, n_head=3, d_k=7, d_v=5
    )
    target = tokens(3, 6, 6, 4)
    target[0, :2] = PAD
    return model, (tokens(3, 8, 8, 5, 0), target)


def notebook_model():
    model = notebook.Transformer(VOCABULARY, VOCABULARY, d_word_vec=27, d_model=27, N=2, h=3, n_positions=27)
    return model, (tokens(2, 6), tokens(2, 6))


def annotated_model():
    source, target = tokens(3, 8, 8, 5, 0), tokens(3, 6, 6, 4)
    target[0, :2] = PAD
    masks = jadore.get_pad_mask(source, PAD), jadore.get_pad_mask(target, PAD) & jadore.get_subsequent_mask(target)
    model = annotated.make_model(VOCABULARY, VOCABULARY, N=2, d_model=22, d_ff=40, h=2)
    return model, (source, target, *masks)


def torch_model(**options):
    model = nn.Transformer(28, 4, 2, 2, 36, batch_first=True, **options)
    causal, padding = torch.ones(6, 6, dtype=torch.bool).triu(1), torch.arange(8) >= torch.tensor([[8], [5]])
    return model, (torch.randn(2, 8, 28), torch.randn(2, 6, 28), None, causal, None, padding, None, padding)


MODELS = {
    "jadore": jadore_model,
    "notebook": notebook_model,
    "annotated": annotated_model,
    "torch": torch_model,
    "torch, norm first": lambda: torch_model(norm_first=True, activation="gelu"),
}


def patched_copy(model):
    """Return a copy of the model, which must have something to patch, patched."""
    other = copy.deepcopy(model)
    assert fastattn.patch(other).changed
    return other


@pytest.mark.parametrize("name", ["jadore", "annotated"])
def test_the_default_dtype_is_no_reason_against_a_program(name):
    """A class is recognised under every default dtype. Its trial is made once per process, so the result must not
    depend on the default of that moment."""
    model, _ = MODELS[name]()
    wanted = fastattn.patch(copy.deepcopy(model))
    programs._usual_trial.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = fastattn.patch(copy.deepcopy(model))
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
        programs._usual_trial.cache_clear()
    assert str(found) == str(wanted)


@pytest.fixture(params=MODELS)
def pair(request):
    """Return the model, a patched copy, and the arguments of a call."""
    model, args = MODELS[request.param]()
    patched = copy.deepcopy(model)
    before = list(map(id, patched.parameters()))
    report = fastattn.patch(patched)
    assert list(map(id, patched.parameters())) == before
    assert report.changed
    assert all("nothing is left to fuse" in reason for reason in report.left.values())
    return model, patched, args


def set_dropout(model, p):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = p
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = p


def outcome(model, args, dtype=torch.float32):
    """Return the output and the gradients of the parameters; a parameter that does not take part has None."""
    model = model.to(dtype)
    out = model(*(arg.to(dtype) if torch.is_tensor(arg) and arg.is_floating_point() else arg for arg in args))
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    grads = torch.autograd.grad((out * weight).sum(), list(model.parameters()), allow_unused=True)
    return [out, *grads]


def assert_near(ours, own, exact):
    """Check that each value is as near to float64 as the original's: twice its error, plus 16 eps of the largest value
    or of 1."""
    for found, peer, truth in zip(ours, own, exact, strict=True):
        if truth is None:
            assert found is None
            continue
        error, allowed = ((value.double() - truth).abs().max().item() for value in (found, peer))
        assert error <= 2 * allowed + 16 * torch.finfo(torch.float32).eps * max(truth.abs().max().item(), 1.0)


def assert_same(model, patched, args):
    exact = outcome(copy.deepcopy(model), args, torch.float64)
    assert_near(outcome(patched, args), outcome(model, args), exact)


@pytest.mark.parametrize("training", [False, True])
def test_results_without_dropout(pair, training):
    model, patched, args = pair
    for m in (model, patched):
        set_dropout(m.train(training), 0.0 if training else 0.5)
    assert_same(model, patched, args)


def use_dropout_mask(model):
    """Replace the original's dropout by ``dropout_mask``: one seed per call, shared by heads in modules of their
    own."""

    def forward_of(module, head=0, heads=1):
        def forward(x):
            if head == 0:
                forward_of.seed = check.new_seed(x)
            factor = dropout_factor((x.size(0), heads, *x.shape[1:]), module.p, forward_of.seed)
            return x * factor[:, head].to(x.dtype)

        return forward

    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.forward = forward_of(module)
    for module in model.modules():
        if isinstance(module, notebook.MultiHeadAttention):
            for n, head in enumerate(module.heads):
                head.dropout.forward = forward_of(head.dropout, n, len(module.heads))


@pytest.mark.parametrize("name", ["jadore", "notebook", "annotated"])
def test_results_with_dropout(name):
    model, args = MODELS[name]()
    patched = patched_copy(model)
    use_dropout_mask(model)

    def run(m, dtype):
        torch.manual_seed(3)
        return outcome(m.train(), args, dtype)

    assert_near(run(patched, torch.float32), run(model, torch.float32), run(model, torch.float64))


# Properties that patching keeps


def test_state_and_structure_stay(pair):
    model, patched, _ = pair
    assert list(patched.state_dict()) == list(model.state_dict())
    assert not any(patched.load_state_dict(model.state_dict()))
    assert [type(module).__name__ for module in patched.modules()] == [type(m).__name__ for m in model.modules()]
    assert all(isinstance(ours, type(own)) for ours, own in zip(patched.modules(), model.modules(), strict=True))
    assert fastattn.unpatch(patched).changed
    assert [type(module) for module in patched.modules()] == [type(module) for module in model.modules()]
    assert not fastattn.unpatch(patched).changed


def test_copies_of_a_subclass_whose_new_takes_arguments():
    norm = patched_copy(WithArguments(3))
    for other in (copy.deepcopy(norm), *(pickle.loads(pickle.dumps(norm, protocol)) for protocol in (2, 4, 5))):
        assert type(other) is type(norm)
        assert torch.equal(other.weight, norm.weight)


def saved(value, **options):
    """Return the value after torch.save and torch.load."""
    torch.save(value, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, **options)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": functools.partial(saved, weights_only=False),
}


@pytest.mark.parametrize("copied", COPIES)
def test_copies_are_patched(pair, copied):
    _, patched, args = pair
    other = COPIES[copied](patched.eval())
    assert [type(module) for module in other.modules()] == [type(module) for module in patched.modules()]
    assert torch.equal(other(*args), patched(*args))


JADORES, LAYER = jadore.MultiHeadAttention(2, 8, 3, 5), nn.TransformerEncoderLayer(8, 2, 16)
HOOKED = [
    *((JADORES, part) for part in ("dropout", "layer_norm", "attention", "fc", "attention.dropout")),
    *((LAYER, part) for part in ("norm1", "dropout2", "self_attn", "linear1")),
    (notebook.MultiHeadAttention(2, 8, 3, 5), "heads.1"),
    (nn.LayerNorm(8), ""),
]


@pytest.mark.parametrize("first", ["hooked", "patched"])
@pytest.mark.parametrize(("module", "part"), HOOKED)
def test_hooks_are_called(module, part, first):
    module, x, calls = copy.deepcopy(module).eval(), torch.randn(2, 4, 8), []
    operands = (x,) * (3 if "MultiHead" in type(module).__name__ else 1)
    own = module(*operands)
    steps = [fastattn.patch, lambda m: m.get_submodule(part).register_forward_hook(lambda *_: calls.append(1))]
    for step in steps if first == "patched" else reversed(steps):
        step(module)
    torch.testing.assert_close(programs._tensors(module(*operands)), programs._tensors(own))
    assert calls == [1]


def test_attention_patched_alone_is_not_skipped_by_torchs_layer(monkeypatch):
    """In evaluation, torch's encoder layer calls the patched attention. After unpatch it computes with the parameters
    itself again."""
    layer, x = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(), torch.randn(2, 5, 16)
    calls = []
    forward = fastattn.MultiHeadAttention.forward
    monkeypatch.setattr(fastattn.MultiHeadAttention, "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))
    with torch.no_grad():
        wanted = layer(x)
        fastattn.patch(layer.self_attn)
        torch.testing.assert_close(layer(x), wanted)
        assert layer(x, src_key_padding_mask=torch.tensor([[False] * 5, [True] * 5])).isfinite().all()
        assert len(calls) == 2
        fastattn.unpatch(layer)
        layer(x)
    assert len(calls) == 2
    assert not layer.self_attn._forward_pre_hooks


class AddsItsMasks(nn.MultiheadAttention):
    def forward(self, query, key, value, key_padding_mask, attn_mask, **options):
        return (query @ key.mT + attn_mask + key_padding_mask[:, None]).softmax(-1) @ value, None


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_an_attention_that_is_left_gets_the_masks_that_torchs_layer_gives_it(training):
    own = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    own.self_attn = AddsItsMasks(8, 2, batch_first=True)
    patched = copy.deepcopy(own.train(training))
    assert fastattn.patch(patched).left.keys() == {"self_attn"}
    masks = torch.ones(5, 5, dtype=torch.bool).triu(1), torch.arange(5) >= torch.tensor([[5], [3]])
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(patched(x, *masks), own(x, *masks))


def test_frozen_parameters_get_no_gradient():
    own = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    for name, parameter in own.named_parameters():
        parameter.requires_grad_("norm" not in name and "in_proj" not in name)
    layer, x = patched_copy(own), torch.randn(2, 4, 8)
    for module in (own, layer):
        module(x).square().sum().backward()
    for (name, got), wanted in zip(layer.named_parameters(), own.parameters(), strict=True):
        assert (got.grad is None) == (wanted.grad is None), name
        assert got.grad is None or torch.allclose(got.grad, wanted.grad, 1e-4, 1e-4), name


def test_a_model_without_memory_yet():
    with torch.device("meta"):
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    assert fastattn.patch(model).changed
    assert model(torch.empty(3, 5, 8, device="meta")).is_meta


def test_a_compiled_model_is_compiled_anew():
    """A compiled model is compiled again after patch, and after unpatch."""
    torch.compiler.reset()
    model, graphs = nn.Sequential(nn.LayerNorm(4)), []

    def backend(graph, inputs):
        graphs.append({str(node.target) for node in graph.graph.nodes if node.op == "call_function"})
        return graph

    compiled, x = torch.compile(model, backend=backend), torch.randn(2, 4)
    compiled(x)
    for change in (fastattn.patch, fastattn.unpatch):
        change(compiled)
        if torch.__version__ < "2.11":  # torch 2.10 does not guard on a module's class
            torch.compiler.reset()
        assert torch.equal(compiled(x), model(x))
    assert ["fastattn.layer_norm.default" in graph for graph in graphs][:2] == [False, True]
    torch.compiler.reset()


# Results of the modules


def test_torchs_fast_path_does_not_go_around(monkeypatch):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    fastattn.patch(model)
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", None)
    monkeypatch.setattr(torch, "_native_multi_head_attention", None)
    padding = torch.tensor([[False, False, False], [False, False, True]])
    with torch.no_grad():
        assert model(torch.randn(2, 3, 8), src_key_padding_mask=padding).isfinite().all()


def test_a_choice_of_nested_tensors_is_kept_for_later():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 1)
    fastattn.patch(model)
    model.use_nested_tensor = False
    fastattn.unpatch(model)
    assert model.use_nested_tensor is False


def norm_results(norm, x, grad):
    """Return a norm's result and the gradients of operand, weight and bias, in float64."""
    operand = x.to(norm.a_2.dtype, copy=True).requires_grad_()
    out = norm(operand)
    grads = torch.autograd.grad(out, (operand, norm.a_2, norm.b_2), grad.to(out.dtype))
    return [tensor.detach().double() for tensor in (out, *grads)]


def norms(size, eps=1e-6, dtype=torch.float32):
    """Return a patched norm, the program's own, and that in float64."""
    own = annotated.LayerNorm(size, eps)
    nn.init.normal_(own.a_2)
    return patched_copy(own.to(dtype)), own, copy.deepcopy(own).double()


@pytest.mark.parametrize("eps", [1e-6, 0.1, 1e-20])
@pytest.mark.parametrize("shape", [(2, 3, 12), (1, 1, 12), (3, 12)])
def test_unbiased_layer_norm_where_the_deviation_is_small(shape, eps):
    patched, _, wide = norms(12, eps)
    for magnitude in (2.0**-50, 2.0**-36, 2.0**-26, 2.0**-20, 1.0):
        grad = torch.randn(shape)
        for x in (torch.randn(shape) * magnitude, torch.full(shape, 3 * magnitude)):  # constant rows have an exact mean
            for ours, exact in zip(*(norm_results(norm, x, grad) for norm in (patched, wide)), strict=True):
                largest = exact.abs().max().item()  # of the rounded sums of 12 terms, or of 6
                torch.testing.assert_close(ours, exact, rtol=0, atol=12 * torch.finfo(torch.float32).eps * largest)


@pytest.mark.parametrize("deviation", [300.0, 1.0, 0.02, 2e-4, 1e-5, 0.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_unbiased_layer_norm_in_half_precision(dtype, deviation):
    x = (torch.randn(3, 64) * deviation).to(dtype)
    grad = (torch.randn(3, 64) * max(min(deviation, 1.0), 1e-3)).to(dtype)  # small: float16 must hold x's gradient
    found = (norm_results(norm, x, grad)[:2] for norm in norms(64, dtype=dtype))
    for ours, theirs, true in zip(*found, strict=True):
        if not theirs.isfinite().all():  # the program's gradient divides by the squared deviation, 4e-8 and less
            assert (dtype, deviation <= 2e-4) == (torch.float16, True)
            continue
        # The bound is twice the program's own error and four roundings: the normalised row, its length, their product,
        # the sum.
        error, size = (ours - true).abs().max(), true.abs().max()
        assert error <= 2 * (theirs - true).abs().max() + 4 * torch.finfo(dtype).eps * size


@pytest.mark.parametrize("magnitude", [1e18, 1e19, 1e20, 1e30])
def test_unbiased_layer_norm_of_huge_values(magnitude):
    """Values whose squares overflow are right as in the program, in one call with ordinary rows too."""
    x = torch.randn(4, 12) * torch.tensor([[magnitude], [1.0], [magnitude], [1e-3]])
    grad = torch.randn(4, 12)
    for ours, theirs in zip(*(norm_results(norm, x, grad) for norm in norms(12)[:2]), strict=True):
        assert theirs.isfinite().all()
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_unbiased_layer_norm_of_other_widths():
    own = annotated.LayerNorm(1)
    norm = patched_copy(own)
    assert_same(own, norm, (torch.randn(2, 3, 12),))
    assert norm(torch.randn(2, 1)).isnan().all()  # the deviation of one number is NaN


@pytest.mark.parametrize("own", [JADORES, Heads(2, 8)])
def test_precision_of_autocast_is_the_original_s(own):
    x, dtypes = torch.randn(2, 4, 8), []
    with torch.autocast("cpu", torch.bfloat16):
        for model in (copy.deepcopy(own), patched_copy(own)):
            results = programs._tensors(model(x, x, x), vars(model).get("attn"))
            dtypes.append([tensor.dtype for tensor in results])
    assert dtypes[0] == dtypes[1]


def test_other_tensors_take_the_original_s_forward():
    dropout = nn.Dropout(0.5).eval()
    fastattn.patch(dropout)
    assert dropout(torch.arange(3)).tolist() == [0, 1, 2]


COMPILED = {
    "jadore's layer": lambda: (jadore.EncoderLayer(8, 16, 2, 3, 5), (torch.randn(2, 4, 8), torch.ones(2, 1, 4))),
    "torch's layer": lambda: (copy.deepcopy(LAYER), (torch.randn(2, 4, 8),)),
    **{name: MODELS[name] for name in ("jadore", "notebook", "annotated")},  # torch's decoder reads a mask's values
}


@pytest.mark.parametrize("name", [*list(COMPILED)[:2], *this_torch("jadore", "notebook", "annotated")])
def test_compiles_whole(name):
    model, args = COMPILED[name]()
    fastattn.patch(model.eval())
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(programs._tensors(compiled(*args)), programs._tensors(model(*args)))


@pytest.mark.parametrize("name", [*slow("notebook"), *this_torch("jadore", "annotated")])
@torch.no_grad()
def test_onnx_of_patched_programs(name):
    require_package("onnxscript")
    require_package("onnxruntime")
    model, args = MODELS[name]()
    expected = model.eval()(*args)
    fastattn.patch(model)
    program = torch.onnx.export(model, args, dynamo=True, verbose=False)
    # Logits are of size 1. Each comes through some 20 products, which sum at most 40 float32 numbers in another order.
    torch.testing.assert_close(program(*args)[0], expected, rtol=1e-4, atol=1e-4)


# Calls that fastattn's attention does not compute are left to the program's own.


def notebook_head(temperature):
    head = notebook.AttentionHead(8, 4, 4)
    head.temperature = temperature
    return head


UNUSUAL = [
    (ScaledDot(2.0), (1, 3, 5, 4), torch.ones(1, 1, 1, 5, 5).tril()),  # a mask of more dimensions
    (ScaledDot(2.0), (1, 3, 5, 4), torch.ones(2, 1, 5, 5).tril()),  # a mask of more sequences
    (Heads(2, 8), (1, 5, 8), torch.ones(3, 5, 5).tril()),  # the same
    (ScaledDot(1e-42), (1, 3, 5, 4), None),
    *((notebook_head(temperature), (2, 5, 8), torch.ones(1, 5, 5).tril()) for temperature in (-4.0, 1e9, math.inf)),
]


@pytest.mark.parametrize(("own", "shape", "mask"), UNUSUAL)
def test_unusual_operands_of_programs(own, shape, mask):
    own = own.eval()
    patched, x = patched_copy(own), torch.randn(shape)
    torch.testing.assert_close(patched(x, x, x, mask), own(x, x, x, mask), equal_nan=True)


# Weights that are computed when they are read


@pytest.fixture
def attention():
    """Return a function that calls jadore's patched attention and returns its weights, the expected weights, and (q,
    k)."""
    own = jadore.ScaledDotProductAttention(1.5, attn_dropout=0.5)
    module = patched_copy(own)
    q, k, v = (torch.randn(2, 3, length, 5, requires_grad=True) for length in (4, 6, 6))

    def weights():
        torch.manual_seed(7)
        return module(q, k, v)[1]

    torch.manual_seed(7)
    mask = fastattn.dropout_mask((2, 3, 4, 6), 0.5, check.new_seed(q))
    plain = own.eval()(q, k, v)[1] * mask * 2
    return weights, plain, (q, k)


def test_unread_weights_are_not_computed(attention, monkeypatch):
    weights, _, _ = attention
    monkeypatch.setattr("fastattn.integrations.patching.weights.attention_weights", None)
    assert type(weights()) is LazyWeights
    model, args = annotated_model()
    fastattn.patch(model)
    model(*args)


def changed(change):
    """Return ``change``, which changes its tensor, as a function that returns the tensor's new values."""

    def values(tensor):
        change(tensor)
        return tensor.detach(), tensor.grad_fn is None

    return values


READ = {
    "text": lambda t: (repr(t), str(t), f"{t} {t[0, 0, 0, 0]:.3f}"),
    "dir": dir,
    "attributes": lambda t: (t.shape, t.dtype, t.device, t.layout, t.ndim, t.requires_grad, t.is_leaf, t.grad),
    "size": lambda t: (len(t), t.size(), t.size(-1), t.dim(), t.numel(), t.stride(), t.is_contiguous()),
    "a missing attribute": lambda t: t.missing,
    "items": lambda t: (t[0, 1:], list(t), list(reversed(t)), 3.0 in t),
    "bool": bool,
    "one element": lambda t: (float(t[0, 0, 0, 0]), int(t.sum()), t.sum().item()),
    "arithmetic": lambda t: (t + 1, 1 - t, t * t, t / 2, 2 / t, 2**t, t**2, -t, abs(t), t // 1, t % 1, t @ t.mT),
    "a tensor's arithmetic": lambda t: (torch.ones(6) + t, torch.ones(6) - t, t[0] * t, torch.ones(4) @ t),
    "comparison": lambda t: (t > 0, t == t, t != 0, t <= torch.ones(6), torch.ones(6) >= t),
    "a number of numpy": lambda t: (t * np.float32(2), np.float32(2) * t),
    "an array's arithmetic": lambda t: np.ones(6) * t,
    "methods": lambda t: (t.mean(1), t.view(-1), t.transpose(1, 2), t.split(1)[1], t.to(torch.float64), t.tolist()),
    "functions": lambda t: (torch.stack([t, t]), torch.einsum("bhij->bij", t), torch.where(t > 0, t, 0), t.softmax(-1)),
    "an op": lambda t: torch.ops.aten.add.Tensor(t, t),
    "data": lambda t: (t.data, t.detach(), t.clone(), copy.copy(t), saved(t), t.data.numpy()),
    "another tensor's data": lambda t: setattr(torch.zeros(3), "data", t.clone()),  # the form of docs/migrate.md
    "numpy with a gradient": lambda t: t.numpy(),
    "asarray": np.asarray,
    "array": lambda t: np.array(t, copy=True, subok=True),  # as imshow of matplotlib calls it
    "dlpack": torch.from_dlpack,
    "memory": lambda t: (bytes(t.untyped_storage()), t.data_ptr() == t.detach().data_ptr() != 0),
    "share_memory_": lambda t: t.share_memory_(),
    "deepcopy": copy.deepcopy,
    "vmap over another tensor": lambda t: torch.vmap(lambda x: x * t)(torch.ones(3)),
    "torch.func.grad": lambda t: torch.func.grad(lambda x: (x * t).sum())(torch.ones(6)),
    "compiled": lambda t: torch.compile(lambda x: x * 2, backend="eager")(t),
    "of another tensor": lambda t: (torch.zeros(2, 3, 4, 6).copy_(t), torch.zeros(3).resize_as_(t).shape),
    "setattr": lambda t: (setattr(t, "note", "kept"), t.note, delattr(t, "note"), hasattr(t, "note")),
    "requires_grad": changed(lambda t: setattr(t, "requires_grad", True)),
    "data changed": changed(lambda t: setattr(t, "data", torch.ones(3))),
    "setitem": changed(lambda t: operator.setitem(t, 0, 0)),
    "mul_": changed(lambda t: t.mul_(2)),
    "iadd": lambda t: operator.iadd(t, 1),
    "resize_": changed(lambda t: t.resize_(2, 3)),
    "numpy writes": changed(lambda t: t.numpy().fill(3)),
}


def result(function, tensor):
    """Return what the function returns, or the type and text of the error that it raises."""
    try:
        return function(tensor)
    except Exception as error:  # must be the plain tensor's error
        return type(error), str(error).replace("LazyWeights", "Tensor")


def as_plain(value):
    """Return the value, with each tensor or array replaced by its type, whether it requires a gradient, and a list."""
    if isinstance(value, torch.Tensor):
        return type(value), value.requires_grad, value.tolist()
    if isinstance(value, np.ndarray):
        return np.ndarray, value.tolist()
    return [as_plain(each) for each in value] if isinstance(value, list | tuple) else value


@pytest.mark.filterwarnings("ignore")  # torch's warnings, the plain tensor's too
@pytest.mark.parametrize("mode", ["gradients", "no gradients", "inference mode"])
def test_unread_weights_act_as_the_tensor(attention, mode):
    """Each use of weights that are not computed yet gives the tensor's result, or its error."""
    weights, _, _ = attention
    with torch.set_grad_enabled(mode == "gradients"), torch.inference_mode(mode == "inference mode"):
        made = {name: (weights(), weights().read()) for name in READ}
    for name, (unread, tensor) in made.items():
        assert as_plain(result(READ[name], unread)) == as_plain(result(READ[name], tensor)), name
        assert unread.is_inference() == tensor.is_inference(), name


def test_uses_that_only_a_tensor_has_are_refused(python):
    """Code that needs a tensor gets an error that names what it was given. The uses run in a process of their own,
    which an access to missing memory would end."""
    python(
        """
        import re, torch, fastattn
        from torch import nn
        from torch.utils.checkpoint import checkpoint
        from fastattn.integrations.patching.weights import weights_when_read

        USES = {
            "another tensor's data": lambda x, t: setattr(x, "data", t),
            "a parameter's data": lambda x, t: setattr(nn.Parameter(x), "data", t),
            "set_": lambda x, t: x.set_(t),
            "Parameter": lambda x, t: nn.Parameter(t),
            "an unbound method": lambda x, t: torch.Tensor.tolist(t),
            "C++ only": lambda x, t: torch.utils.dlpack.to_dlpack(t),
            "from_numpy": lambda x, t: torch.from_numpy(t),
            "vmap": lambda x, t: torch.vmap(torch.sin)(t),
            "torch.func.grad": lambda x, t: torch.func.grad(torch.sum)(t),
            "fastattn": lambda x, t: fastattn.layer_norm(t, 4),
            "a reentrant checkpoint": lambda x, t: checkpoint(torch.sin, t, use_reentrant=True),
        }
        for name, use in USES.items():
            x, query = torch.zeros(3), torch.ones(1, 1, 4, 8, requires_grad=True)
            try:
                use(x, weights_when_read(query, query, None, 0.0, 1.0, None))
            except (TypeError, ValueError, RuntimeError) as error:
                assert re.search("LazyWeights|pass weights.clone", str(error)), (name, error)
            else:
                raise AssertionError(f"{name}: {x.sum()}")
        """
    )


USED = {
    "arithmetic": lambda t: t * 2,
    "in place": lambda t: t.mul_(2).unsqueeze_(0),
    "a checkpoint": lambda t: checkpoint(torch.sin, t, use_reentrant=False),
    "compiled": lambda t: torch.compile(lambda x: x * 2, backend="aot_eager")(t),
}


@pytest.mark.parametrize("name", USED)
def test_read_weights_have_gradients(attention, name):
    weights, plain, operands = attention
    ours, own = (torch.autograd.grad(USED[name](t).square().sum(), operands) for t in (weights(), plain))
    torch.testing.assert_close(ours, own)


FIRST_READERS = {
    "inference mode": torch.inference_mode()(lambda weights: weights + 0),
    "a transform": lambda weights: torch.func.grad(lambda x: (x * weights).sum())(torch.ones(2, 3, 4, 6)),
}


@pytest.mark.parametrize("reader", FIRST_READERS)
def test_weights_whose_first_reader_has_no_gradients_keep_them(attention, reader):
    """A transform's tensor, which is not valid after it has ended, is not kept."""
    weights, plain, operands = attention
    found = weights()
    torch.testing.assert_close(FIRST_READERS[reader](found), plain)
    assert found.data_ptr() == found.detach().data_ptr() != 0
    expected = torch.autograd.grad(plain.square().sum(), operands)
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), operands), expected)


def test_gradients_and_hooks_of_weights(attention):
    """Weights are the same tensor at each use: gradients with respect to them, hooks and attributes act on all uses."""
    weights, plain, operands = attention
    found = weights()
    used = found * 3
    torch.testing.assert_close(torch.autograd.grad(used.square().sum(), found)[0], 18 * plain)
    seen = []
    found.register_hook(lambda grad: seen.append(grad) or 2 * grad)
    found.retain_grad()
    torch.autograd.backward([found.square()], [torch.ones_like(found)])
    torch.testing.assert_close(seen, [2 * plain])
    torch.testing.assert_close(found.grad, 4 * plain)
    expected = torch.autograd.grad(2 * plain.square().sum(), operands)
    torch.testing.assert_close(tuple(operand.grad for operand in operands), expected)


def test_weights_that_a_checkpoint_returns():
    """Weights that a checkpoint returns have the program's values and gradients. A reentrant checkpoint tracks only
    tensors, so the weights that it returns can be read only without gradients."""
    own = ScaledDot(1.5).eval()
    module, found = patched_copy(own), []
    for attention in (own, module):
        q, k, v = (t.clone().requires_grad_() for t in torch.arange(72.0).sin().view(3, 1, 2, 3, 4))
        out, attn = checkpoint(attention, q, k, v, use_reentrant=False)
        (out.sum() + attn.square().sum()).backward()
        found.append((attn.detach(), q.grad, k.grad, v.grad))
    torch.testing.assert_close(*found)
    out, attn = checkpoint(module, q, k, v, use_reentrant=True)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="lose their gradient"):
        attn.square()
    with torch.no_grad():
        torch.testing.assert_close(attn + 0, found[0][0])


def test_weights_on_meta():
    x = torch.randn(2, 5, 8, device="meta")
    for own in (JADORES, Heads(2, 8)):
        model = patched_copy(copy.deepcopy(own).to("meta"))
        out = model(x, x, x)
        weights = out[1] if isinstance(out, tuple) else model.attn
        assert weights[0].shape == (2, 5, 5)
        assert (weights + 0).device.type == "meta"


def test_weights_read_by_several_threads(attention):
    """Weights are computed once for all threads, so that no thread's change is lost. Each adds to its own row, since
    torch's additions are not atomic."""
    weights, plain, _ = attention
    for _ in range(20):
        with torch.no_grad():
            found = weights()
        threads = [threading.Thread(target=lambda row=row, all=found: all[:, :, row].add_(1)) for row in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.testing.assert_close(found + 0, plain + 1)


def test_operands_changed_before_the_weights_are_read(attention):
    weights, _, (q, k) = attention
    for operand in (q, k):
        found = weights()
        with torch.no_grad():
            operand.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an in-place operation before they were read"):
            found.sum()


def test_backward_hooks_of_a_module_that_returns_weights():
    """A module's backward hook sees its whole gradients of q, k and v, and no gradient of unread weights."""
    own, found = ScaledDot(1.5).eval(), []
    for attention in (own, patched_copy(own)):
        q, k, v = (t.clone().requires_grad_() for t in torch.arange(72.0).sin().view(3, 1, 2, 3, 4))
        attention.register_full_backward_hook(lambda _, given, grads: found.extend((*given, grads[1])))
        out, attn = attention(q, k, v)
        (out.sum() + attn.square().sum()).backward()
        found.extend([out, attn + 0, q.grad, k.grad])
    assert len(found) == 16
    assert found.pop(11) is None
    torch.testing.assert_close(found[:3] + found[4:8], found[8:])


def test_weights_do_not_see_a_mask_that_changes_later():
    module = patched_copy(ScaledDot(1.0).eval())
    q, k = torch.randn(2, 1, 1, 3, 4)
    mask = torch.tensor([True, True, False]).view(1, 1, 1, 3)
    weights = module(q, k, k, mask)[1]
    mask.fill_(True)
    assert weights[..., 2].abs().sum() == 0


KEPT = {
    "read": lambda model: model.attn,
    "read by compiled code": lambda model: torch.compile(lambda: model.attn + 0, backend="eager")(),
    "deepcopy": lambda model: copy.deepcopy(model).attn,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)).attn,
    "unpatch": lambda model: fastattn.unpatch(model) and model.attn + 0,
}


@pytest.mark.parametrize("name", KEPT)
def test_kept_weights_of_the_annotated_transformer(name):
    """The attribute is the program's tensor, however it is read."""
    own, x = Heads(2, 8).eval(), torch.randn(3, 2, 5, 8)
    model = patched_copy(own)
    assert model.attn is None
    for _ in range(2):
        with torch.no_grad():
            model(*x), own(*x)
        found = KEPT[name](model)
        assert type(found) is torch.Tensor
        torch.testing.assert_close(found, own.attn)
    model.attn = None
    assert model.attn is None
    del model.attn
    with torch.no_grad():
        model(*x)
    torch.testing.assert_close(model.attn, own.attn)


# Modules that are left, and the reasons


def derived(name, base, forward=None, **members):
    """Return a class of this name, with these members, that derives from the base."""
    return type(name, (base,), members if forward is None else {"forward": forward, **members})


def with_globals(function, **others):
    """Return the function with other globals."""
    made = types.FunctionType(function.__code__, {**function.__globals__, **others}, function.__name__)
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return made


def heads_with(name, attention=annotated.attention, **others):
    """Return a class with the code of the Annotated Transformer's attention, in which these globals are replaced."""
    attention = with_globals(attention, **others)
    forward = with_globals(annotated.MultiHeadedAttention.forward, attention=attention, **others)
    return derived(name, annotated.MultiHeadedAttention, forward)


def clamped(query, key, value, mask=None, dropout=None):
    return annotated.attention(query.clamp(-50, 50), key, value, mask, dropout)


LoudNorm = derived("LoudNorm", nn.LayerNorm, lambda self, x: 2 * nn.LayerNorm.forward(self, x))
LoudCall = derived("LoudCall", nn.LayerNorm, __call__=lambda self, x: 2 * nn.LayerNorm.__call__(self, x))
NormFirst = derived(
    "NormFirst", jadore.PositionwiseFeedForward,
    lambda self, x: x + self.dropout(self.w_2(F.relu(self.w_1(self.layer_norm(x))))),
)  # fmt: skip
Biased = derived(
    "Biased", Heads, lambda self, query, key, value, mask=None, bias=None: Heads.forward(self, query, key, value, mask)
)
# A trial takes these for the program: a bound that only large scores or large heads reach.
ClampsInAHelper = heads_with("ClampsInAHelper", clamped)
OtherModule = heads_with("OtherModule", math=types.SimpleNamespace(sqrt=lambda size: math.sqrt(min(size, 4096))))
OtherBuiltin = heads_with("OtherBuiltin", zip=lambda *iterables, strict: zip(*iterables, strict=strict))
# Classes that a trial refuses.
Remembers = derived("Remembers", Norm, lambda self, x: setattr(self, "last", Norm.forward(self, x)) or self.last)
NeedsMore = derived("NeedsMore", Norm, lambda self, x: Norm.forward(self, x) * self.gain)
TakesItsSize = derived("TakesItsSize", Norm, __new__=lambda cls, size: object.__new__(cls))
# A class that differs from the program in nothing, except if an instance has another ``doubled``.
Renamed = derived(
    "Renamed", Heads, doubled=0,
    forward=lambda self, query, key, value, mask=None: Heads.forward(self, query, key, value, mask) * 2**self.doubled,
)  # fmt: skip
WithArguments = derived(
    "WithArguments", nn.LayerNorm, __new__=lambda cls, size: object.__new__(cls), __getnewargs__=lambda self: (3,)
)


class NoDropout(jadore.ScaledDotProductAttention):
    def forward(self, q, k, v, mask=None):
        scores = q / self.temperature @ k.transpose(2, 3)
        attn = (scores if mask is None else scores.masked_fill(mask == 0, -1e9)).softmax(-1)
        return attn @ v, attn


UNKNOWN = r"its code is not that of .*, pass patch\(..., trust=\({},\)\)"
# Modules that are left by name: (a function that makes the module, the reason).
LEFT = {
    "fastattn's": (lambda: fastattn.LayerNorm(4), "fastattn's own"),
    "patched before": (lambda: patched_copy(nn.LayerNorm(4)), "patched already"),
    "parametrized": (lambda: parametrizations.weight_norm(nn.LayerNorm(4), dim=0), "patch first, parametrize after"),
    "quantised": (
        lambda: torch.ao.nn.quantized.LayerNorm(4, *map(nn.Parameter, torch.ones(2, 4)), 1.0, 0),
        "overrides",
    ),
    "a ScriptModule": (lambda: torch.jit.script(nn.LayerNorm(4)), "patch the model that torch.jit made it of"),
    "other arguments": (lambda: Biased(2, 8), r"takes \(query, key, value, mask=None, bias=None\)"),
    "a sub-layer of which the parts are patched": (lambda: annotated.SublayerConnection(8), "nothing is left"),
    "other code": (lambda: NormFirst(8, 16), UNKNOWN.format("NormFirst")),
    "a function that it calls": (lambda: ClampsInAHelper(2, 8), UNKNOWN.format("ClampsInAHelper")),
    "another math": (lambda: OtherModule(2, 8), UNKNOWN.format("OtherModule")),
    "another zip": (lambda: OtherBuiltin(2, 8), UNKNOWN.format("OtherBuiltin")),
}
# Modules of trusted classes.
TRIED = {
    "another order": (lambda: NormFirst(8, 16), "computes something else .* in evaluation"),
    "no dropout": (lambda: NoDropout(1.0), "computes something else .* in training"),
    "an attribute set": (lambda: Remembers(4), "sets last"),
    "other parts": (lambda: NeedsMore(4), "no attribute 'gain'"),
    "a new of its own": (lambda: TakesItsSize(4), "no stand-in of it can be made"),
}


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@pytest.mark.parametrize("name", [*LEFT, *TRIED])
def test_left_with_a_reason(name):
    make, reason = {**LEFT, **TRIED}[name]
    model = make()
    kind = type(model)
    assert re.search(reason, fastattn.patch(model, trust=(kind,) if name in TRIED else ()).left[""])
    assert type(model) is kind


# Subclasses that define one name more: (their base, its arguments, the name, the reason).
DEFINED = [
    (nn.LayerNorm, (4,), "forward", "Own overrides forward of torch.nn.LayerNorm"),
    (nn.TransformerEncoderLayer, (8, 2, 8), "_ff_block", "Own overrides _ff_block of torch.nn.TransformerEncoderLayer"),
    (nn.MultiheadAttention, (8, 2), "merge_masks", "Own overrides merge_masks of torch.nn.MultiheadAttention"),
    (nn.MultiheadAttention, (8, 2), "_packed", "its class defines _packed, and fastattn's forward"),
    (nn.LayerNorm, (4,), "__call__", "its class overrides __call__ of torch.nn.Module"),
    (nn.Dropout, (), "_call_impl", "its class overrides _call_impl of torch.nn.Module"),
    (nn.LayerNorm, (4,), "__getattribute__", "its class overrides __getattribute__ of torch.nn.Module"),
    (nn.LayerNorm, (4,), "__reduce__", "its class says itself how it is pickled"),
    (nn.LayerNorm, (4,), "__getnewargs_ex__", "its class says itself how it is pickled"),
    (ScaledDot, (2.0,), "temperature", "its class defines temperature, which each instance"),
    (ScaledDot, (2.0,), "dropout", "its class defines dropout, which each instance"),
]


@pytest.mark.parametrize(("base", "arguments", "name", "reason"), DEFINED)
def test_modules_whose_class_defines_a_name_are_left(base, arguments, name, reason):
    own = derived("Own", base, **{name: lambda self, *rest: getattr(base, name)(self, *rest)})
    module = base(*arguments)
    module.__class__ = own
    assert reason in fastattn.patch(module).left[""]
    assert type(module) is own


# The code of a class


SOFTMAX = "calls softmax of torch, which another package has replaced"  # the code is known, and computes something else
BEFORE = "was replaced before fastattn was imported"  # fastattn took it for torch's
# Functions of torch that another package has replaced: (their owners, the name, a module, the reason).
REPLACED = [
    ([F], "softmax", ScaledDot(1.0), SOFTMAX),
    ([F], "softmax", notebook.AttentionHead(8, 4, 4), SOFTMAX),
    ([torch.Tensor], "softmax", Heads(2, 8), SOFTMAX),
    ([nn.LayerNorm], "forward", nn.LayerNorm(4), "LayerNorm overrides forward of torch.nn.LayerNorm"),
    ([nn.LayerNorm, torch_modules.LayerNorm.methods], "forward", nn.LayerNorm(4), f"LayerNorm {BEFORE}"),
    ([nn.Module, patching.METHODS], "__call__", nn.Dropout(), f"__call__ of torch.nn.Module {BEFORE}"),
]


@pytest.mark.parametrize(("owners", "name", "module", "reason"), REPLACED)
def test_modules_whose_functions_of_torch_were_replaced_are_left(monkeypatch, owners, name, module, reason):
    def replacement(self, *args, **options):
        return self

    for owner in owners:
        (monkeypatch.setitem if isinstance(owner, dict) else monkeypatch.setattr)(owner, name, replacement)
    assert reason in fastattn.patch(module).left[""]


def code_of(text, **names):
    """Return the digest of the function ``f`` of this text. It is made as a notebook's cell makes it: without a file,
    among the notebook's names."""
    cell = {**vars(annotated), **names}
    exec(compile(text, "<cell>", "exec", dont_inherit=True), cell)
    return known.digest(cell["f"])


WRITTEN = """
def f(self, query, mask=None, *rest, scale=1.0, **others):
    if mask is not None:
        query = query.masked_fill(mask == 0, -1e9)
    count = query.size(0)
    parts = [linear(x).view(count, -1, self.h) for linear, x in zip(self.linears, (query, query), strict=False)]
    total = torch.matmul(F.softmax(parts[0], dim=-1), parts[1]) / math.sqrt(count)
    return total, query
"""
SAME = {
    "a docstring": ("mask=None, *rest, scale=1.0, **others):", "mask=None, *rest, scale=1.0, **others):\n    'Text.'"),
    "annotations": ("query, mask=None", "query: torch.Tensor, mask: torch.Tensor | None = None"),
    "an annotated local": ("count = ", "count: int = "),
    "names of locals": ("count", "total_of_the_batch"),
    "names of captured locals": ("count", "zzz"),
    "names of the comprehension's": ("linear(x)", "l(x)", "for linear,", "for l,"),
    "line breaks": ("(", "(\n", ", ", ",\n", "return total,\n", "return total, ", "for linear,\n", "for linear, "),
    "comments": ("count = ", "# of the batch\n\n    count = "),
    "one line": ("if mask is not None:\n        ", "if mask is not None: "),
    "imports in the same file": ("\ndef f", "\nimport math\nimport torch\nfrom torch.nn import functional as F\ndef f"),
    "another name of a module": ("\ndef f", "\nimport math as m\ndef f", "math.sqrt", "m.sqrt"),
    "annotations of the future": ("\ndef f", "from __future__ import annotations\ndef f"),
}  # fmt: skip
OTHER = {
    "a constant": ("-1e9", "-1e4"),
    "a constant's type": ("dim=-1", "dim=-1.0"),
    "an operator": ("mask == 0", "mask != 0"),
    "another test": ("is not None", "is None"),
    "a method": (".view(", ".reshape("),
    "a keyword": ("dim=-1", "axis=-1"),
    "another local": ("parts[0], dim", "parts[1], dim"),
    "a captured local": ("(count, -1", "(query, -1"),
    "within a comprehension": ("linear(x).view", "linear(x).clamp(-50, 50).view"),
    "the order of arguments": ("query, mask=None", "mask, query=None"),
    "an argument's name": ("mask", "attn_mask"),
    "a default": ("mask=None", "mask=0"),
    "a named default": ("scale=1.0", "scale=2.0"),
    "a generator": ("return total", "yield total"),
    "a coroutine": ("def f", "async def f"),
    "another module": ("\ndef f", "\nimport cmath as math\ndef f"),
    "another builtin": ("\ndef f", "\ndef zip(*x, strict): return x\ndef f"),
    "another class in a module's place": ("\ndef f", "\nclass F: softmax = None\ndef f"),
    "caught errors": ("    count = query.size(0)", "    try: count = query.size(0)\n    except Exception: count = 1"),
}


def rewritten(text, *changes):
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize("change", [*SAME, *OTHER])
def test_what_matters_to_a_digest(change):
    """A digest covers the code that runs, without layout and names of locals."""
    assert (code_of(rewritten(WRITTEN, *{**SAME, **OTHER}[change])) == code_of(WRITTEN)) == (change in SAME)


def test_code_that_runs_and_is_watched_keeps_its_digest():
    """The digest stays the same, although Python specialises instructions that run often and monitoring replaces them
    in place."""
    model, x = Heads(2, 8), torch.randn(1, 2, 8)
    before = known.digest(Heads.forward)

    def run():
        for _ in range(100):
            model(x, x, x)
        assert known.digest(Heads.forward) == before

    run()
    with contextlib.ExitStack() as stack:
        stack.callback(sys.settrace, sys.gettrace())
        sys.settrace(lambda *event: None)
        run()
    if sys.version_info >= (3, 12):
        tool, events = sys.monitoring.PROFILER_ID, sys.monitoring.events
        sys.monitoring.use_tool_id(tool, "a test")
        with contextlib.ExitStack() as stack:
            stack.callback(sys.monitoring.free_tool_id, tool)
            stack.callback(sys.monitoring.set_events, tool, 0)
            sys.monitoring.set_events(tool, events.LINE | events.INSTRUCTION | events.CALL)
            run()


def test_programs_without_source_files_are_recognised():
    """Classes and functions from a notebook's cells are recognised, and so is a program that is shipped compiled."""
    cell = {"__name__": "__main__"}
    exec(compile(Path(annotated.__file__).read_text(), "<cell>", "exec", dont_inherit=True), cell)
    model = cell["make_model"](8, 8, N=1, d_model=8, d_ff=8, h=2)
    families = {"MultiHeadedAttention of the Annotated Transformer", "LayerNorm of the Annotated Transformer"}
    assert families <= set(fastattn.patch(model).changed.values())


def test_every_family_has_digests_for_every_python():
    forwards = [family.family for family in programs.FAMILIES if family is not programs.SublayerConnection]
    helpers = ["attention of the Annotated Transformer", "scaled_dot_product_attention of the notebook"]
    assert known.DIGESTS.keys() == {*forwards, *helpers}
    for digests in known.DIGESTS.values():
        assert digests.keys() >= {"3.10", "3.11", "3.12", "3.13", "3.14"}


def test_another_python_s_code_is_unknown(monkeypatch):
    monkeypatch.setattr(known, "PYTHON", "3.99")
    model = annotated.MultiHeadedAttention(2, 8)
    reason = fastattn.patch(model).left[""]
    assert "does not know MultiHeadedAttention of the Annotated Transformer as Python 3.99 compiles it" in reason
    assert "trust=(MultiHeadedAttention,)" in reason
    assert "" in fastattn.patch(model, trust=(annotated.MultiHeadedAttention,)).changed


@pytest.mark.parametrize("written", KNOWN.values(), ids=KNOWN)
def test_the_tool_prints_the_digests_of_imported_code(written, capsys):
    known_code.main("a program", sys.modules[written[0].__module__].__file__)
    printed = ast.literal_eval("{" + capsys.readouterr().out + "}")
    for made in written:
        assert printed[f"{made.__name__} of a program"] == {known.PYTHON: known.digest(getattr(made, "forward", made))}


# Classes that the user trusts


def test_trusted_classes_alone_are_patched():
    model = nn.Sequential(Renamed(2, 8), ClampsInAHelper(2, 8))
    own, x = copy.deepcopy(model).eval(), torch.randn(3, 2, 5, 8)
    report = fastattn.patch(model, trust=[Renamed])
    assert report.changed["0"] == programs.MultiHeadedAttention.family
    assert "its code is not that of attention of the Annotated Transformer" in report.left["1"]
    torch.testing.assert_close(model.eval()[0](*x), own[0](*x))
    assert fastattn.patch(model, trust=(Renamed,)).left["0"] == "it is patched already"


def test_a_trusted_class_of_no_family_is_reported():
    assert "its parts are not those of a module" in fastattn.patch(nn.Linear(2, 2), trust=(nn.Linear,)).left[""]


@pytest.mark.parametrize("trust", [Renamed, (Renamed(2, 8),), ("Renamed",), (int,), None, 1])
def test_trust_takes_classes_of_modules(trust):
    model = nn.LayerNorm(4)
    with pytest.raises(TypeError, match=r"trust must be a tuple of classes of modules, as \(MyAttention,\), got"):
        fastattn.patch(model, trust=trust)
    assert type(model) is nn.LayerNorm


def test_a_trusted_class_that_the_model_lacks():
    model = nn.LayerNorm(4)
    with pytest.raises(ValueError, match="trust names Renamed, but the model has no module of that class"):
        fastattn.patch(model, trust=(Renamed,))
    assert type(model) is nn.LayerNorm


# torch's modules whose classes change a call elsewhere


def test_a_norm_that_changes_its_call_is_called_by_a_fused_parent():
    own = jadore.PositionwiseFeedForward(8, 16).eval()
    own.layer_norm = LoudCall(8)
    patched, x = copy.deepcopy(own), torch.randn(2, 3, 8)
    assert "" in fastattn.patch(patched).changed
    torch.testing.assert_close(patched(x), own(x))


def test_methods_replaced_on_an_instance_are_kept():
    layer, norm = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.LayerNorm(4)
    layer._ff_block, norm.forward = lambda x: x, abs
    report = fastattn.patch(nn.ModuleList([layer, norm]))
    assert report.left["0"] == "TransformerEncoderLayer overrides _ff_block of torch.nn.TransformerEncoderLayer"
    assert report.left["1"] == "its forward was replaced on the instance"
    assert "0.self_attn" in report.changed


def test_what_an_instance_alone_holds_is_tried_too():
    modules = nn.ModuleList(Renamed(2, 8) for _ in range(5))
    modules[0].note, modules[1].doubled, modules[2].lock = "of no effect", True, threading.Lock()
    modules[3].register_parameter("gate", nn.Parameter(torch.ones(8)))
    modules[4].register_buffer("gate", torch.ones(8))
    report = fastattn.patch(modules, trust=(Renamed,))
    assert "0" in report.changed
    assert "computes something else" in report.left["1"]
    assert "lock cannot be copied for a trial" in report.left["2"]
    for number in "34":
        assert report.left[number] == f"it holds gate, which {programs.MultiHeadedAttention.family} does not know"


def test_compiled_modules_are_recognised():
    module = annotated.LayerNorm(16)
    module.compile(backend="eager")
    assert "" in fastattn.patch(module).changed


def test_parts_of_the_same_names_are_not_enough_for_a_sub_layer():
    head = nn.Module()
    head.norm, head.dropout = nn.LayerNorm(4), nn.Dropout()
    assert not fastattn.patch(head).left


def test_parametrized_after_patching():
    model = patched_copy(nn.LayerNorm(4))
    parametrize.register_parametrization(model, "weight", nn.Identity())
    assert fastattn.patch(model).left == {"": "it is patched already"}
    assert "parametrization or a wrapper" in fastattn.unpatch(model).left[""]
    parametrize.remove_parametrizations(model, "weight")
    fastattn.unpatch(model)
    assert type(model) is nn.LayerNorm


def test_replaced_parts_are_called():
    own = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    patched, x = patched_copy(own), torch.randn(2, 3, 8)
    own.norm1 = patched.norm1 = nn.Identity()
    torch.testing.assert_close(patched(x), own(x))


def test_report():
    """A report names a shared module once, and it stays shared."""
    shared = nn.Dropout()
    model = nn.Sequential(nn.LayerNorm(4), LoudNorm(4), shared, nn.LayerNorm(4), shared)
    report = fastattn.patch(model)
    assert list(report.changed) == ["0", "2", "3"]
    assert model[2] is model[4]
    assert str(report) == (
        "changed: 3 modules\n  torch.nn.LayerNorm: 0, 3\n  torch.nn.Dropout: 2\n"
        "left: 1 modules\n  LoudNorm overrides forward of torch.nn.LayerNorm: 1"
    )


@pytest.mark.parametrize("function", [fastattn.patch, fastattn.unpatch])
def test_takes_a_module(function):
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got Tensor"):
        function(torch.ones(1))


@pytest.mark.parametrize(
    "family",
    [family for family in vars(torch_modules).values() if isinstance(family, type) and "forward" in vars(family)],
    ids=lambda family: family.__name__,
)
def test_torchs_modules_keep_their_arguments(family):
    """Names, order and defaults of a forward's arguments are those of torch's."""
    ours, torchs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(kind.forward).parameters.values()]
        for kind in (family, getattr(nn, family.__name__))
    )
    assert ours == torchs
