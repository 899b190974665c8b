"""Tracing and transforms: opcheck of every registered op, torch.compile, torch.func, and compiled dropout seeds."""

import functools

import pytest
import torch
from conftest import BACKENDS, interpreted, slow, this_torch
from observers import Recorder
from oracle import gradients
from pairs import pairwise
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import fastattn
from fastattn import dropout, dropout_mask, layer_norm, softmax_dropout, varlen_attn
from fastattn import scaled_dot_product_attention as attention

pytestmark = pytest.mark.torch_version
SEED, SEQUENCES = torch.tensor([3, 4]), torch.tensor([0, 8, 24], dtype=torch.int32)


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def qkv(n):
    return torch.randn(2, n, 4, 16).transpose(1, 2), torch.randn(2, 2, n + 3, 16), torch.randn(2, 2, n + 3, 8)


# Calls by name: (function of tensors, function that makes the tensors at size n).
CALLS = {
    "attention": (lambda *t: attention(*t, is_causal=True, enable_gqa=True, return_lse=True), qkv),
    "attention, masks and dropout": (
        lambda *t: attention(*t, 0.2, enable_gqa=True, key_lengths=torch.tensor([3, 7]), window_size=(9, 9), seed=SEED),
        lambda n: (*qkv(n), torch.randn(n, n + 3)),
    ),
    "weights": (
        lambda q, k: fastattn.attention_weights(q, k, None, 0.2, True, enable_gqa=True, seed=SEED),
        lambda n: qkv(n)[:2],
    ),
    "varlen": (
        lambda *t: varlen_attn(*t, SEQUENCES, SEQUENCES, 24, 24, dropout_p=0.2, is_causal=True, seed=SEED),
        lambda n: tuple(torch.randn(24, 2, n) for _ in range(3)),
    ),
    "softmax_dropout": (
        lambda x, m: softmax_dropout(x, 0.2, m, True, 0.5, seed=SEED),
        lambda n: (torch.randn(2, 3, n, n + 3), torch.randn(n, 1)),
    ),
    "layer_norm": (
        lambda x, w, b: layer_norm(x, (16,), w, b), lambda n: (torch.randn(2, n, 16), *torch.randn(2, 16).unbind())
    ),
    "dropout_add_layer_norm": (
        lambda x, *rwb: fastattn.dropout_add_layer_norm(x, *rwb, 0.2, prenorm=True, seed=SEED, out_dtype=x.dtype),
        lambda n: (torch.randn(2, n, 16).bfloat16(), torch.randn(2, n, 16), *torch.randn(2, 16).unbind()),
    ),
    "dropout": (lambda x: dropout(x, 0.2, seed=SEED), lambda n: (torch.randn(n, 3, 4).transpose(0, 1),)),
    "dropout_mask": (lambda x: dropout_mask(x.shape, 0.3, SEED) * x, lambda n: (torch.randn(3, n),)),
}  # fmt: skip


def recorded(name):
    """Return the calls of fastattn's ops that reach a backend."""
    function, tensors = CALLS[name]
    with Recorder() as recorder:
        gradients(function, tensors(13))
    return [call for call in recorder.calls if call[0].namespace == "fastattn"]


def patched(module):
    fastattn.patch(module)
    return module


# Backends of the tests of compilation. They include only the best cpu kernels: the compiled graph does not depend on
# the instruction set.
COMPILED = pytest.mark.parametrize("backend", [*this_torch("reference"), *BACKENDS[1:4]], indirect=True)


@COMPILED
@pytest.mark.parametrize("name", [*this_torch("attention"), *(name for name in CALLS if name != "attention")])
def test_opcheck(backend, name):
    """Every op passes opcheck on the arguments that the public functions pass: schema, autograd registration, fakes,
    AOT path."""
    calls = recorded(name)
    assert calls
    for op, args, kwargs in calls:
        leaves = tuple(t.detach().clone() if isinstance(t, torch.Tensor) else t for t in args)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                leaf.requires_grad_(not op._schema.name.endswith("_backward"))
        torch.library.opcheck(op, leaves, kwargs)


def test_opcheck_covers_every_op():
    with fastattn.backend("reference"):
        seen = {op._schema.name for name in CALLS for op, *_ in recorded(name)}
    registered = {name for name in map(str, torch._C._dispatch_get_all_op_names()) if name.startswith("fastattn::")}
    assert {name.split(".")[0] for name in registered} == seen


# The first compiles most of what the others do. Static sizes are slow tests: the compiler sees the same for every
# backend, and fixed sizes are simpler than symbols.
USUAL = ("attention, masks and dropout", "dropout")


@pairwise(
    backend=[*BACKENDS[1:3], *this_torch("reference")],
    name=[*USUAL, *slow(*(name for name in CALLS if name not in (*USUAL, "weights"))), *this_torch("weights")],
    dynamic=[True, *this_torch(False)],
)
def test_compiles_whole(backend, name, dynamic):
    """Every function compiles with fullgraph and gives the eager results and gradients at two sizes."""
    function, tensors = CALLS[name]
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n in (13, 21):
        inputs = tensors(n)
        found, wanted = gradients(compiled, inputs), gradients(function, inputs)
        assert [o.stride() for o in found[0]] == [o.stride() for o in wanted[0]]
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
        with torch.no_grad():
            outputs = torch.utils._pytree.tree_leaves(compiled(*inputs))
        torch.testing.assert_close(tuple(outputs), wanted[0], rtol=1e-6, atol=1e-6)


@COMPILED
@pytest.mark.parametrize("dynamic", [*slow(False), True], ids=["static", "dynamic"])
def test_seeds_drawn_inside_a_compiled_function(backend, dynamic):
    """Without a seed, each call draws a new one from torch's generator."""

    @torch.compile(fullgraph=True, dynamic=dynamic, backend="aot_eager")
    def compiled(x):
        return dropout(x, 0.5) + softmax_dropout(x, 0.5)

    x = torch.randn(9, 40)
    torch.manual_seed(0)
    first, second = compiled(x), compiled(x)
    torch.manual_seed(0)
    assert torch.equal(compiled(x), first)
    assert not torch.equal(first, second)


@pytest.mark.slow
def test_inductor(backend):
    """One module, compiled by Inductor, trains with dropout and is close to eager for the same seeds."""
    module = fastattn.MultiHeadAttention(16, 2, batch_first=True)
    norm = fastattn.DropoutAddLayerNorm(16, 0.1)

    def block(x):
        return norm(module(x, x, x, is_causal=True, need_weights=False)[0], x, seed=SEED)

    x = torch.randn(2, 9, 16)
    found = gradients(torch.compile(block, fullgraph=True), (x,))
    torch.testing.assert_close(found, gradients(block, (x,)), rtol=1e-5, atol=1e-5)


TRANSFORMED = {
    "attention": lambda t: attention(t, t, t, dropout_p=0.2, is_causal=True, seed=SEED),
    "softmax_dropout": lambda t: softmax_dropout(t, 0.2, seed=SEED),
    "layer_norm": lambda t: layer_norm(t, (8,)) * t,
    "dropout_add_layer_norm": lambda t: fastattn.dropout_add_layer_norm(t, t, dropout_p=0.2, seed=SEED) * t,
    "dropout": lambda t: dropout(t, 0.2, seed=SEED),
}


@pytest.mark.filterwarnings("error:There is a performance drop")  # torch's warning if an op has no vmap rule
@pytest.mark.parametrize("name", TRANSFORMED)
def test_function_transforms(backend, name):
    """grad and vmap of torch.func, each and combined, give autograd's numbers. Compiled kernels refuse forward mode."""

    def loss(t):
        return TRANSFORMED[name](t).square().sum()

    x = torch.randn(3, 2, 5, 8)
    leaf = x.clone().requires_grad_()
    losses = torch.stack([loss(t) for t in leaf])
    (wanted,) = torch.autograd.grad(losses.sum(), leaf)
    assert torch.equal(torch.func.grad(loss)(x[0]), wanted[0])
    assert torch.equal(torch.vmap(loss)(x), losses)
    assert torch.equal(torch.vmap(torch.func.grad(loss))(x), wanted)
    if backend != "reference":
        with pytest.raises(RuntimeError, match=r'no forward-mode derivatives, backend\("reference"\) has'):
            torch.func.jvp(loss, (x[0],), (x[0],))


@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(mode, pre_dispatch):
    """A traced program is right for other lengths and boundaries, because tracing does not read them."""

    def attend(x, lengths, starts):
        dense = attention(x, x, x, key_lengths=lengths)
        return dense, varlen_attn(x[0], x[0], x[0], starts, starts, 3, 3)

    x, traced, others = torch.randn(2, 5, 4, 8), ([1, 3], [0, 3, 5]), ([4, 2], [0, 2, 5])
    trace = make_fx(attend, tracing_mode=mode, pre_dispatch=pre_dispatch)
    program = trace(x, *map(torch.tensor, traced))
    assert all(map(torch.equal, program(x, *map(torch.tensor, others)), attend(x, *map(torch.tensor, others))))


def assert_maps(function, *batches):
    """Assert that vmap gives the results of a call for each element of the batches, to the bit."""
    wanted = torch.stack([function(*one) for one in zip(*batches, strict=True)])
    assert torch.equal(torch.vmap(function)(*batches), wanted)


def test_vmap_over_lengths():
    """vmap maps over every argument, also over integers that the checks usually read, and over grad."""

    def attend(t, length):
        return attention(t, t, t, key_lengths=length).square().sum()

    for function in (attend, torch.func.grad(attend)):
        assert_maps(function, torch.randn(3, 2, 4, 5, 8), torch.tensor([[5, 2], [3, 1], [0, 4]]))
    offsets = torch.tensor([[0, 2, 5], [0, 1, 5], [0, 4, 5]])
    assert_maps(lambda t, cu: varlen_attn(t, t, t, cu, cu, 5, 5), torch.randn(3, 5, 2, 8), offsets)


def test_vmap_of_dropout_has_a_seed_a_call():
    """Under vmap each call has its own seed: a given one, or one drawn as vmap's `randomness` says."""
    x, seeds = torch.ones(3, 8, 64), torch.tensor([[1, 0], [2, 0], [3, 0]])
    assert_maps(lambda t, seed: dropout(t, 0.5, seed=seed), x, seeds)
    assert_maps(lambda seed: dropout_mask((3, 40), 0.3, seed), seeds)
    for randomness in ("same", "different"):
        first, second, _ = torch.vmap(lambda t: dropout(t, 0.5), randomness=randomness)(x)
        assert torch.equal(first, second) == (randomness == "same")


OFFSETS = torch.tensor([0, 3, 3, 9])
PACKED = {"enable_gqa": True, "seqused_k": torch.tensor([2, 0, 6]), "dropout_p": 0.1, "seed": SEED}
# Functions with the shape of their operands. They have grouped heads, more scores than the reference keeps at once
# ("parts"), or packed rows.
BATCHED = {
    "grouped": (lambda q, k, v: attention(q, k[:, :2], v[:, :2], enable_gqa=True), (2, 4, 5, 3)),
    "parts": (lambda q, k, v: attention(q, k, v, dropout_p=0.1, seed=SEED), (1, 2, 520, 2)),
    "packed": (lambda q, k, v: varlen_attn(q, k[:, :1], v[:, :1], OFFSETS, OFFSETS, 6, 6, **PACKED), (9, 2, 3)),
}


@pytest.mark.parametrize("name", BATCHED)
def test_several_gradients_at_once(backend, name):
    """Batched gradients equal single ones.

    ``torch.autograd.functional.jacobian(vectorize=True)`` computes them this way, by another vmap than torch.func's."""
    function, shape = BATCHED[name]
    if interpreted(backend) and name == "parts":
        shape = (1, 2, 20, 2)
    dtype = torch.float64 if backend == "reference" else torch.float32
    tensors = [torch.randn(shape, dtype=dtype).requires_grad_() for _ in range(3)]
    out = function(*tensors)
    grads = torch.randn(3, *out.shape, dtype=dtype)
    found = torch.autograd.grad(out, tensors, grads, retain_graph=True, is_grads_batched=True)
    single = [torch.autograd.grad(out, tensors, grad, retain_graph=True) for grad in grads]
    torch.testing.assert_close(found, tuple(map(torch.stack, zip(*single, strict=True))))


@pytest.mark.parametrize("dims", [(0, None), (None, 1), (2, 0)])
def test_vmap_over_any_dimension(dims):
    """Over an empty dimension vmap makes no call and still returns the right shape."""
    tensors = [torch.randn((5, 5) if dim is None else (5, 5, 5)) for dim in dims]
    got = torch.vmap(fastattn.dropout_add_layer_norm, dims, out_dims=1)(*tensors)
    sliced = [[t] * 5 if dim is None else t.unbind(dim) for t, dim in zip(tensors, dims, strict=True)]
    assert torch.equal(got, torch.stack(list(map(fastattn.dropout_add_layer_norm, *sliced)), 1))
    assert torch.vmap(softmax_dropout)(torch.randn(0, 2, 5)).shape == (0, 2, 5)


TORCHSCRIPT = r"does not support torch.jit.*torch\.compile.*torch\.export"
SCRIPTED = [
    *(dropout, fastattn.dropout_add_layer_norm, dropout_mask, layer_norm, softmax_dropout),
    *(fastattn.attention_weights, attention, varlen_attn),
    *(fastattn.MultiHeadAttention(8, 2), fastattn.LayerNorm(8), fastattn.DropoutAddLayerNorm(8)),
    *(fastattn.SoftmaxDropout(), fastattn.Dropout(), torch.nn.Sequential(torch.nn.Linear(8, 8), fastattn.Dropout())),
    patched(torch.nn.TransformerEncoderLayer(8, 2)),
]


@pytest.mark.parametrize("scripted", SCRIPTED, ids=lambda s: getattr(s, "__name__", type(s).__name__))
def test_torchscript_is_refused(scripted):
    with pytest.raises(RuntimeError, match=TORCHSCRIPT):
        torch.jit.script(scripted)


@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", TRANSFORMED)
def test_torchscript_does_not_trace(name):
    """torch.jit.trace raises the error without an earlier TracerWarning from fastattn's code."""
    with pytest.raises(RuntimeError, match=TORCHSCRIPT):
        torch.jit.trace(TRANSFORMED[name], (torch.randn(2, 5, 8),))


def double(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


# Differentiable functions by name: (function, float64 operands).
HEADS = double(1, 2, 5, 4), double(1, 2, 7, 4), double(1, 2, 7, 3)
ROW_MASKED_WHOLE = double(5, 7).detach().index_fill(0, torch.tensor([0]), -torch.inf).requires_grad_()
DIFFERENTIABLE = {
    "attention": (
        lambda q, k, v: attention(q.mT, k, v, None, 0.2, True, return_lse=True, seed=SEED),
        (double(1, 2, 4, 5), *HEADS[1:]),
    ),
    "attention, row masked whole": (attention, (*HEADS, ROW_MASKED_WHOLE)),
    "weights": (lambda q, k: fastattn.attention_weights(q, k, None, 0.2, True, seed=SEED), HEADS[:2]),
    "varlen": (
        lambda q, k, v: varlen_attn(q, k, v, *[torch.tensor([0, 2, 5])] * 2, 3, 3, is_causal=True, return_lse=True),
        (double(5, 2, 4), double(5, 2, 4), double(5, 2, 3)),
    ),
    "softmax_dropout": (CALLS["softmax_dropout"][0], (double(2, 3, 5, 7), double(5, 1))),
    "layer_norm": (lambda x, w, b: layer_norm(x, (6,), w, b), (double(3, 6), double(6), double(6))),
    "dropout_add_layer_norm": (CALLS["dropout_add_layer_norm"][0], (double(3, 6), double(3, 6), double(6), double(6))),
    "dropout": (CALLS["dropout"][0], (double(4, 3, 2),)),
}


def loss_of(function, others):
    """Return a function of the first operand that sums the squares of ``function``'s results, with -inf counted as
    0."""

    def loss(first):
        outputs = torch.utils._pytree.tree_leaves(function(first, *others))
        return sum(o.nan_to_num(neginf=0.0).square().sum() for o in outputs)

    return loss


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_forward_mode_and_nested_transforms(name):
    """Forward-mode derivatives agree with finite differences, for plain dual tensors and inside vmap. Second
    derivatives by two transforms, one of which may be forward, agree with double backward."""
    function, tensors = DIFFERENTIABLE[name]
    torch.autograd.gradcheck(function, tensors, check_forward_ad=True, check_batched_forward_grad=True, fast_mode=True)
    first, *others = (t.detach() for t in tensors)
    loss = loss_of(function, others)
    found = torch.func.hessian(loss)(first)
    with fastattn.backend("reference"):
        wanted = torch.autograd.functional.hessian(loss, first)
        for inner in (torch.func.grad, torch.func.jacrev):
            torch.testing.assert_close(torch.func.jacrev(inner(loss))(first), wanted)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if name != "dropout"])  # dropout is linear
def test_nested_transforms_of_a_compiled_kernel_are_refused(name):
    """A nested gradient raises as double backward does, because a derivative would be left out."""
    function, tensors = DIFFERENTIABLE[name]
    first, *others = (t.detach().float() for t in tensors)
    inner = torch.func.grad(loss_of(function, others))
    with pytest.raises(RuntimeError, match=r'double backward.*backend\("reference"\)'):
        torch.func.grad(lambda t: inner(t).square().sum())(first)


def test_no_grad_within_a_transform():
    def loss(t):
        with torch.no_grad():
            constant = attention(t, t, t)
        return (constant * t).sum()

    x = torch.randn(1, 1, 3, 2)
    torch.testing.assert_close(torch.func.grad(loss)(x), attention(x, x, x))
    torch.testing.assert_close(torch.func.grad(lambda t: torch.func.grad(loss)(t).sum())(x), torch.zeros_like(x))


def test_forward_mode_beside_float32():
    """Forward mode of float32 operands runs on the reference, although compiled kernels serve that dtype."""
    x = torch.randn(2, 3, 5, 8)
    out, tangent = torch.func.jvp(lambda t: attention(t, x, x), (x,), (x,))
    with fastattn.backend("reference"):
        assert torch.equal(out, attention(x, x, x))
    wanted = torch.func.jvp(lambda t: torch.softmax(t @ x.mT / 8**0.5, -1) @ x, (x,), (x,))[1]
    torch.testing.assert_close(tangent, wanted)


def test_meta_tensors():
    """Meta tensors give the right shapes also off the fast path, and refuse CPU tensors as other operands."""
    meta = functools.partial(torch.empty, device="meta")
    out = attention(meta(4, 7, 8), meta(2, 9, 8), meta(2, 9, 3), enable_gqa=True)
    assert (out.shape, out.device.type) == ((4, 7, 3), "meta")
    with pytest.raises(ValueError, match="must be on one device, got meta, cpu and cpu"):
        attention(meta(1, 2, 5, 8), *torch.randn(2, 1, 2, 5, 8))


@COMPILED
def test_checkpointed_and_compiled_training_step(backend):
    """A checkpoint under the compiler draws the same seed in both forward passes."""

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x):
        return checkpoint(functools.partial(dropout, p=0.5), x, use_reentrant=False)

    x = torch.randn(4, 40, requires_grad=True)
    out = run(x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad != 0, out != 0)


class SelfAttention(fastattn.MultiHeadAttention):
    def forward(self, x):
        return super().forward(x, x, x, is_causal=True, need_weights=False)[0]


# Modules of one operand (2, 5, 16) by name, as functions of the dropout rate.
MODULES = {
    "MultiHeadAttention": lambda p: SelfAttention(16, 4, p, batch_first=True),
    "a patched encoder layer": lambda p: patched(torch.nn.TransformerEncoderLayer(16, 4, 32, p, batch_first=True)),
}


@pytest.mark.parametrize("name", MODULES)
def test_per_sample_gradients_of_modules(name):
    """vmap of grad of functional_call gives each sample's own gradients."""
    module, x = MODULES[name](0.0), torch.randn(3, 2, 5, 16)

    def loss(parameters, x):
        return torch.func.functional_call(module, parameters, (x,)).square().sum()

    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    grads = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    alone = [torch.autograd.grad(module(sample).square().sum(), list(module.parameters())) for sample in x]
    wanted = [torch.stack(samples) for samples in zip(*alone, strict=True)]
    torch.testing.assert_close(list(grads.values()), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_checkpointed_modules_drop_the_same(name, use_reentrant):
    module, x = MODULES[name](0.4), torch.randn(2, 5, 16, requires_grad=True)
    results = []
    for call in (module, functools.partial(checkpoint, module, use_reentrant=use_reentrant)):
        torch.manual_seed(0)
        module.zero_grad()
        out = call(x)
        out.square().sum().backward()
        results.append([out, *(parameter.grad for parameter in module.parameters())])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("of", ["batch", "length"])
def test_sizes_that_depend_on_data(of):
    """Sizes that the compiler does not know, because a mask indexes the operand, compile whole."""
    x, chosen = torch.randn(6, 2, 6, 8), torch.tensor([True, False, True, True, False, True])

    def attend(x, chosen):
        some = x[chosen] if of == "batch" else x[:, :, chosen]
        return attention(some, some, some)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = torch.compile(attend, fullgraph=True, backend="aot_eager")(x, chosen)
    torch.testing.assert_close(found, attend(x, chosen))
