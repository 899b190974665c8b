"""Tracing and transforms: opcheck of every registered op, torch.compile, torch.func, and compiled dropout seeds."""

import functools

import pytest
import torch
from conftest import BACKENDS, interpreted, slow
from oracle import gradients
from pairs import pairwise
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import fastattn
from fastattn import (
    attention_weights,
    dropout,
    dropout_add_layer_norm,
    dropout_mask,
    layer_norm,
    scaled_dot_product_attention,
    softmax_dropout,
    varlen_attn,
)

pytestmark = pytest.mark.torch_version
SEED = torch.tensor([3, 4])


def sequences(n):
    return torch.tensor([0, n // 3, n], dtype=torch.int32)


def attention(n):
    return torch.randn(2, n, 4, 16).transpose(1, 2), torch.randn(2, 2, n + 3, 16), torch.randn(2, 2, n + 3, 8)


# Calls by name: (function of tensors, function that makes the tensors at size n).
CALLS = {
    "attention": (
        lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, return_lse=True),
        attention,
    ),
    "attention, masks and dropout": (
        lambda q, k, v, m: scaled_dot_product_attention(
            q, k, v, m, 0.2, enable_gqa=True, key_lengths=torch.tensor([3, 7]), window_size=(9, 9), seed=SEED
        ),
        lambda n: (*attention(n), torch.randn(n, n + 3)),
    ),
    "weights": (
        lambda q, k: attention_weights(q, k, None, 0.2, True, enable_gqa=True, seed=SEED),
        lambda n: attention(n)[:2],
    ),
    "varlen": (
        lambda q, k, v: varlen_attn(
            q, k, v, sequences(24), sequences(24), 24, 24, dropout_p=0.2, is_causal=True, seed=SEED
        ),
        lambda n: tuple(torch.randn(24, 2, n) for _ in range(3)),
    ),
    "softmax_dropout": (
        lambda x, m: softmax_dropout(x, 0.2, m, True, 0.5, seed=SEED),
        lambda n: (torch.randn(2, 3, n, n + 3), torch.randn(n, 1)),
    ),
    "layer_norm": (
        lambda x, w, b: layer_norm(x, (16,), w, b),
        lambda n: (torch.randn(2, n, 16), torch.randn(16), torch.randn(16)),
    ),
    "dropout_add_layer_norm": (
        lambda x, r, w, b: dropout_add_layer_norm(x, r, w, b, 0.2, prenorm=True, seed=SEED, out_dtype=x.dtype),
        lambda n: (torch.randn(2, n, 16).bfloat16(), torch.randn(2, n, 16), torch.randn(16), torch.randn(16)),
    ),
    "dropout": (lambda x: dropout(x, 0.2, seed=SEED), lambda n: (torch.randn(n, 3, 4).transpose(0, 1),)),
    "dropout_mask": (lambda x: dropout_mask(x.shape, 0.3, SEED) * x, lambda n: (torch.randn(3, n),)),
}


class Recorder(TorchDispatchMode):
    """Dispatch mode that records every call of a fastattn op that reaches a backend."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "fastattn":
            self.calls.append((function, args, kwargs or {}))
        return function(*args, **(kwargs or {}))


def recorded(name):
    function, tensors = CALLS[name]
    with Recorder() as recorder:
        gradients(function, tensors(13))
    return recorder.calls


# Backends of the tests of compilation. They include only the best cpu kernels: the compiled graph does not depend on
# the instruction set.
COMPILED = pytest.mark.parametrize("backend", [*slow("reference"), *BACKENDS[1:4]], indirect=True)


@COMPILED
@pytest.mark.parametrize("name", [*slow("attention"), *(name for name in CALLS if name != "attention")])
def test_opcheck(backend, name):
    """Every op passes opcheck on the arguments that the public functions pass: schema, autograd registration, fakes,
    AOT path."""
    calls = recorded(name)
    assert calls
    for op, args, kwargs in calls:
        differentiable = not op._schema.name.endswith("_backward")
        args = tuple(
            a.detach()
            .clone(memory_format=torch.preserve_format)
            .requires_grad_(differentiable and a.is_floating_point())
            if isinstance(a, torch.Tensor)
            else a
            for a in args
        )
        torch.library.opcheck(op, args, kwargs)


def test_opcheck_covers_every_op():
    with fastattn.backend("reference"):
        seen = {op._schema.name for name in CALLS for op, *_ in recorded(name)}
    registered = {name for name in map(str, torch._C._dispatch_get_all_op_names()) if name.startswith("fastattn::")}
    assert {name.split(".")[0] for name in registered} == seen


# Static sizes are slow tests: the compiler sees the same for every backend, and fixed sizes are simpler than symbols.
DYNAMIC = pytest.mark.parametrize("dynamic", [*slow(False), True], ids=["static", "dynamic"])


# The first compiles most of what the others do.
USUAL = ("attention, masks and dropout", "dropout")


@pairwise(
    backend=[*BACKENDS[1:3], *slow("reference")],
    name=[*USUAL, *slow(*(name for name in CALLS if name not in USUAL))],
    dynamic=[True, *slow(False)],
)
def test_compiles_whole(backend, name, dynamic):
    """Every function compiles with fullgraph and gives the eager results and gradients at two sizes."""
    function, tensors = CALLS[name]
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n in (13, 21):
        inputs = tensors(n)
        (outputs, grads), (wanted, wanted_grads) = gradients(compiled, inputs), gradients(function, inputs)
        assert [o.stride() for o in outputs] == [o.stride() for o in wanted]
        for a, e in zip((*outputs, *grads), (*wanted, *wanted_grads), strict=True):
            torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-6)
        with torch.no_grad():
            for a, e in zip(torch.utils._pytree.tree_leaves(compiled(*inputs)), wanted, strict=True):
                torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-6)
    torch._dynamo.reset()


@COMPILED
@DYNAMIC
def test_seeds_drawn_inside_a_compiled_function(backend, dynamic):
    """Without a seed, each call draws a new one from torch's generator."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: dropout(x, 0.5) + softmax_dropout(x, 0.5), fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    x = torch.randn(9, 40)
    torch.manual_seed(0)
    first, second = compiled(x), compiled(x)
    torch.manual_seed(0)
    assert torch.equal(compiled(x), first)
    assert not torch.equal(first, second)
    torch._dynamo.reset()


@pytest.mark.slow
def test_inductor(backend):
    """One module, compiled by Inductor, trains with dropout and is close to eager for the same seeds."""
    torch._dynamo.reset()
    module = fastattn.MultiHeadAttention(16, 2, batch_first=True)
    norm = fastattn.DropoutAddLayerNorm(16, 0.1)

    def block(x, seed):
        return norm(module(x, x, x, is_causal=True, need_weights=False)[0], x, seed=seed)

    x = torch.randn(2, 9, 16)
    wanted, wanted_grads = gradients(lambda t: block(t, SEED), (x,))
    got, grads = gradients(torch.compile(lambda t: block(t, SEED), fullgraph=True), (x,))
    for a, e in zip((*got, *grads), (*wanted, *wanted_grads), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()


TRANSFORMED = {
    "attention": lambda t: scaled_dot_product_attention(t, t, t, dropout_p=0.2, is_causal=True, seed=SEED),
    "softmax_dropout": lambda t: softmax_dropout(t, 0.2, seed=SEED),
    "layer_norm": lambda t: layer_norm(t, (8,)) * t,
    "dropout_add_layer_norm": lambda t: dropout_add_layer_norm(t, t, dropout_p=0.2, seed=SEED) * t,
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
        dense = scaled_dot_product_attention(x, x, x, key_lengths=lengths)
        return dense, varlen_attn(x[0], x[0], x[0], starts, starts, 3, 3)

    x, others = torch.randn(2, 5, 4, 8), (torch.tensor([4, 2]), torch.tensor([0, 2, 5]))
    program = make_fx(attend, tracing_mode=mode, pre_dispatch=pre_dispatch)(
        x, torch.tensor([1, 3]), torch.tensor([0, 3, 5])
    )
    for got, wanted in zip(program(x, *others), attend(x, *others), strict=True):
        assert torch.equal(got, wanted)


def test_vmap_over_lengths():
    """vmap maps over every argument, also over integers that the checks usually read, and over grad."""
    x = torch.randn(3, 2, 4, 5, 8)
    lengths = torch.tensor([[5, 2], [3, 1], [0, 4]])

    def attend(t, length):
        return scaled_dot_product_attention(t, t, t, key_lengths=length).square().sum()

    wanted = torch.stack([attend(t, length) for t, length in zip(x, lengths, strict=True)])
    assert torch.equal(torch.vmap(attend)(x, lengths), wanted)
    grads = torch.stack([torch.func.grad(attend)(t, length) for t, length in zip(x, lengths, strict=True)])
    assert torch.equal(torch.vmap(torch.func.grad(attend))(x, lengths), grads)

    tokens, offsets = torch.randn(3, 5, 2, 8), torch.tensor([[0, 2, 5], [0, 1, 5], [0, 4, 5]])
    packed = torch.vmap(lambda t, cu: varlen_attn(t, t, t, cu, cu, 5, 5))(tokens, offsets)
    for got, t, cu in zip(packed, tokens, offsets, strict=True):
        assert torch.equal(got, varlen_attn(t, t, t, cu, cu, 5, 5))


def test_vmap_of_dropout_has_a_seed_a_call():
    """Under vmap each call has its own seed: a given one, or one drawn as vmap's `randomness` says."""
    x, seeds = torch.ones(3, 8, 64), torch.tensor([[1, 0], [2, 0], [3, 0]])
    wanted = torch.stack([dropout(t, 0.5, seed=seed) for t, seed in zip(x, seeds, strict=True)])
    assert torch.equal(torch.vmap(lambda t, seed: dropout(t, 0.5, seed=seed))(x, seeds), wanted)
    same = torch.vmap(lambda t: dropout(t, 0.5), randomness="same")(x)
    different = torch.vmap(lambda t: dropout(t, 0.5), randomness="different")(x)
    assert torch.equal(same[0], same[1])
    assert not torch.equal(different[0], different[1])
    wanted = torch.stack([dropout_mask((3, 40), 0.3, seed) for seed in seeds])
    assert torch.equal(torch.vmap(lambda seed: dropout_mask((3, 40), 0.3, seed))(seeds), wanted)


PACKED_ROWS, USED = torch.tensor([0, 3, 3, 9]), torch.tensor([2, 0, 6])
# Functions with the shape of their operands. They have grouped heads, more scores than the reference keeps at once
# ("parts"), or packed rows.
BATCHED = {
    "grouped": (lambda q, k, v: scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True), (2, 4, 5, 3)),
    "parts": (lambda q, k, v: scaled_dot_product_attention(q, k, v, dropout_p=0.1, seed=SEED), (1, 2, 520, 2)),
    "packed": (
        lambda q, k, v: varlen_attn(
            q, k[:, :1], v[:, :1], *[PACKED_ROWS] * 2, 6, 6, enable_gqa=True, seqused_k=USED, dropout_p=0.1, seed=SEED
        ),
        (9, 2, 3),
    ),
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
    for n in range(3):
        wanted = torch.autograd.grad(out, tensors, grads[n], retain_graph=True)
        for got, one in zip(found, wanted, strict=True):
            torch.testing.assert_close(got[n], one)


@pytest.mark.parametrize("dims", [(0, None), (None, 1), (2, 0)])
def test_vmap_over_any_dimension(dims):
    x, residual = (torch.randn((5, 5) if dim is None else (5, 5, 5)) for dim in dims)
    got = torch.vmap(dropout_add_layer_norm, dims, out_dims=1)(x, residual)
    sliced = [
        [t if dim is None else t.select(dim, i) for t, dim in zip((x, residual), dims, strict=True)] for i in range(5)
    ]
    assert torch.equal(got, torch.stack([dropout_add_layer_norm(*pair) for pair in sliced], 1))


def test_vmap_over_nothing():
    """vmap over an empty dimension makes no call and still returns the right shape."""
    assert torch.vmap(softmax_dropout)(torch.randn(0, 2, 5)).shape == (0, 2, 5)


TORCHSCRIPT = r"does not support torch.jit.*torch\.compile.*torch\.export"


@pytest.mark.parametrize(
    "scripted",
    [
        scaled_dot_product_attention,
        attention_weights,
        varlen_attn,
        softmax_dropout,
        layer_norm,
        dropout_add_layer_norm,
        dropout,
        dropout_mask,
        fastattn.MultiHeadAttention(8, 2),
        fastattn.LayerNorm(8),
        fastattn.DropoutAddLayerNorm(8),
        fastattn.SoftmaxDropout(),
        fastattn.Dropout(),
        torch.nn.Sequential(torch.nn.Linear(8, 8), fastattn.Dropout()),
    ],
    ids=lambda scripted: getattr(scripted, "__name__", type(scripted).__name__),
)
def test_torchscript_is_refused(scripted):
    with pytest.raises(RuntimeError, match=TORCHSCRIPT):
        torch.jit.script(scripted)


def test_torchscript_of_a_patched_module_is_refused():
    layer = torch.nn.TransformerEncoderLayer(8, 2)
    fastattn.patch(layer)
    with pytest.raises(RuntimeError, match=TORCHSCRIPT):
        torch.jit.script(layer)


@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", TRANSFORMED)
def test_torchscript_does_not_trace(name):
    """torch.jit.trace raises the error without an earlier TracerWarning from fastattn's code."""
    with pytest.raises(RuntimeError, match=TORCHSCRIPT):
        torch.jit.trace(TRANSFORMED[name], (torch.randn(2, 5, 8),))


def double(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def with_row_masked_whole(*shape):
    mask = torch.randn(shape, dtype=torch.float64)
    mask[0] = -torch.inf
    return mask.requires_grad_()


# Differentiable functions by name: (function, float64 operands).
DIFFERENTIABLE = {
    "attention": (
        lambda q, k, v: scaled_dot_product_attention(
            q.transpose(1, 2), k, v, None, 0.2, True, return_lse=True, seed=SEED
        ),
        (double(1, 5, 2, 4), double(1, 2, 7, 4), double(1, 2, 7, 3)),
    ),
    "attention, row masked whole": (
        lambda q, k, v, m: scaled_dot_product_attention(q, k, v, m),
        (double(1, 2, 5, 4), double(1, 2, 7, 4), double(1, 2, 7, 3), with_row_masked_whole(5, 7)),
    ),
    "weights": (
        lambda q, k: attention_weights(q, k, None, 0.2, True, seed=SEED),
        (double(1, 2, 5, 4), double(1, 2, 7, 4)),
    ),
    "varlen": (
        lambda q, k, v: varlen_attn(q, k, v, *[torch.tensor([0, 2, 5])] * 2, 3, 3, is_causal=True, return_lse=True),
        (double(5, 2, 4), double(5, 2, 4), double(5, 2, 3)),
    ),
    "softmax_dropout": (
        lambda x, m: softmax_dropout(x, 0.2, m, True, 0.5, seed=SEED),
        (double(2, 3, 5, 7), double(5, 1)),
    ),
    "layer_norm": (lambda x, w, b: layer_norm(x, (6,), w, b), (double(3, 6), double(6), double(6))),
    "dropout_add_layer_norm": (
        lambda *t: dropout_add_layer_norm(*t, 0.2, prenorm=True, seed=SEED),
        (double(3, 6), double(3, 6), double(6), double(6)),
    ),
    "dropout": (lambda x: dropout(x, 0.2, seed=SEED), (double(4, 3, 2),)),
}


def loss_of(function, others):
    """Return a function of the first operand that sums the squares of ``function``'s results, with -inf counted as
    0."""

    def loss(first):
        outputs = torch.utils._pytree.tree_leaves(function(first, *others))
        return sum(o.nan_to_num(neginf=0.0).square().sum() for o in outputs)

    return loss


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_forward_mode(name):
    """Forward-mode derivatives agree with finite differences, for plain dual tensors and inside vmap.
    torch.func.hessian, which builds on them, agrees with double backward."""
    function, tensors = DIFFERENTIABLE[name]
    torch.autograd.gradcheck(function, tensors, check_forward_ad=True, check_batched_forward_grad=True, fast_mode=True)

    loss = loss_of(function, [t.detach() for t in tensors[1:]])
    with fastattn.backend("reference"):
        wanted = torch.autograd.functional.hessian(loss, tensors[0].detach())
    torch.testing.assert_close(torch.func.hessian(loss)(tensors[0].detach()), wanted)


SECOND_DERIVATIVES = {
    "reverse over reverse": lambda f: torch.func.jacrev(torch.func.grad(f)),
    "jacobian of a jacobian": lambda f: torch.func.jacrev(torch.func.jacrev(f)),
}


@pytest.mark.torch_version
@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.parametrize("nested", SECOND_DERIVATIVES)
def test_nested_transforms(name, nested):
    """A transform differentiates the derivatives that another one inside it has taken."""
    function, tensors = DIFFERENTIABLE[name]
    first, *others = (t.detach() for t in tensors)
    loss = loss_of(function, others)
    with fastattn.backend("reference"):
        wanted = torch.autograd.functional.hessian(loss, first)
        torch.testing.assert_close(SECOND_DERIVATIVES[nested](loss)(first), wanted)


@pytest.mark.torch_version
@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if name != "dropout"])  # dropout is linear
def test_nested_transforms_of_a_compiled_kernel_are_refused(name):
    """A nested gradient raises as double backward does, because a derivative would be left out."""
    function, tensors = DIFFERENTIABLE[name]
    first, *others = (t.detach().float() for t in tensors)
    inner = torch.func.grad(loss_of(function, others))
    with pytest.raises(RuntimeError, match=r'double backward.*backend\("reference"\)'):
        torch.func.grad(lambda t: inner(t).square().sum())(first)


def test_no_grad_within_a_transform():
    x = torch.randn(1, 1, 3, 2)

    def loss(t):
        with torch.no_grad():
            constant = scaled_dot_product_attention(t, t, t)
        return (constant * t).sum()

    wanted = scaled_dot_product_attention(x, x, x)
    torch.testing.assert_close(torch.func.grad(loss)(x), wanted)
    torch.testing.assert_close(torch.func.grad(lambda t: torch.func.grad(loss)(t).sum())(x), torch.zeros_like(x))


def test_forward_mode_beside_float32():
    """Forward mode of float32 operands runs on the reference, although compiled kernels serve that dtype."""
    x = torch.randn(2, 3, 5, 8)
    out, tangent = torch.func.jvp(lambda t: scaled_dot_product_attention(t, x, x), (x,), (x,))
    with fastattn.backend("reference"):
        assert torch.equal(out, scaled_dot_product_attention(x, x, x))
    wanted = torch.func.jvp(lambda t: torch.softmax(t @ x.mT / 8**0.5, -1) @ x, (x,), (x,))[1]
    torch.testing.assert_close(tangent, wanted)


def test_meta_tensors():
    """Meta tensors give the right shapes also off the fast path, and refuse CPU tensors as other operands."""
    meta = functools.partial(torch.empty, device="meta")
    out = scaled_dot_product_attention(meta(4, 7, 8), meta(2, 9, 8), meta(2, 9, 3), enable_gqa=True)
    assert (out.shape, out.device.type) == ((4, 7, 3), "meta")
    with pytest.raises(ValueError, match="must be on one device, got meta, cpu and cpu"):
        scaled_dot_product_attention(meta(1, 2, 5, 8), *torch.randn(2, 1, 2, 5, 8))


@pytest.mark.parametrize("name", [name for name in CALLS if name != "dropout_mask"])
def test_meta_and_fake_tensors(name):
    """Fake tensors have the shapes, dtypes and strides of the real results."""
    function, tensors = CALLS[name]
    inputs = tensors(13)
    real = torch.utils._pytree.tree_leaves(function(*inputs))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = torch.utils._pytree.tree_leaves(function(*(mode.from_tensor(t) for t in inputs)))
    for a, e in zip(fake, real, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (e.shape, e.dtype, e.stride())


@COMPILED
def test_checkpointed_and_compiled_training_step(backend):
    """A checkpoint under the compiler draws the same seed in both forward passes."""
    from torch.utils.checkpoint import checkpoint

    torch._dynamo.reset()
    x = torch.randn(4, 40, requires_grad=True)
    run = torch.compile(
        lambda t: checkpoint(functools.partial(dropout, p=0.5), t, use_reentrant=False),
        fullgraph=True,
        backend="aot_eager",
    )
    out = run(x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad != 0, out != 0)
    torch._dynamo.reset()


class SelfAttention(fastattn.MultiHeadAttention):
    def forward(self, x):
        return super().forward(x, x, x, is_causal=True, need_weights=False)[0]


def patched(module):
    fastattn.patch(module)
    return module


# Modules of one operand (2, 5, 16) by name, as functions of the dropout rate.
MODULES = {
    "MultiHeadAttention": lambda p: SelfAttention(16, 4, p, batch_first=True),
    "a patched encoder layer": lambda p: patched(
        torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=p, batch_first=True)
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_per_sample_gradients_of_modules(name):
    """vmap of grad of functional_call gives each sample's own gradients."""
    module, x = MODULES[name](0.0), torch.randn(3, 2, 5, 16)

    def loss(parameters, x):
        return torch.func.functional_call(module, parameters, (x,)).square().sum()

    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    grads = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for n, sample in enumerate(x):
        wanted = torch.autograd.grad(module(sample).square().sum(), list(module.parameters()))
        for got, expected in zip(grads.values(), wanted, strict=True):
            torch.testing.assert_close(got[n], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_checkpointed_modules_drop_the_same(name, use_reentrant):
    from torch.utils.checkpoint import checkpoint

    module, x = MODULES[name](0.4), torch.randn(2, 5, 16, requires_grad=True)
    results = []
    for call in (module, functools.partial(checkpoint, module, use_reentrant=use_reentrant)):
        torch.manual_seed(0)
        module.zero_grad()
        out = call(x)
        out.square().sum().backward()
        results.append([out, *(parameter.grad for parameter in module.parameters())])
    assert all(torch.equal(a, e) for a, e in zip(*results, strict=True))


@pytest.mark.parametrize("of", ["batch", "length"])
def test_sizes_that_depend_on_data(of):
    """Sizes that the compiler does not know, because a mask indexes the operand, compile whole."""
    x, chosen = torch.randn(6, 2, 6, 8), torch.tensor([True, False, True, True, False, True])

    def attend(x, chosen):
        chosen_x = x[chosen] if of == "batch" else x[:, :, chosen]
        return fastattn.scaled_dot_product_attention(chosen_x, chosen_x, chosen_x)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = torch.compile(attend, fullgraph=True, backend="aot_eager")(x, chosen)
    torch.testing.assert_close(found, attend(x, chosen))
