"""Which backend runs: the choice, backend(), explain(), and what survives from forward to backward."""

import functools
import platform
import sys
import threading

import pytest
import torch
from conftest import require
from oracle import gradients
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fastattn
from fastattn import (
    attention_weights,
    backend,
    dropout,
    dropout_add_layer_norm,
    dropout_mask,
    explain,
    layer_norm,
    scaled_dot_product_attention,
    softmax_dropout,
    varlen_attn,
)
from fastattn.backends import native, refusal

X = torch.randn(1, 2, 5, 8)
SEQUENCES = torch.tensor([0, 5], dtype=torch.int32)
CALLS = {
    scaled_dot_product_attention: (X, X, X),
    attention_weights: (X, X),
    varlen_attn: (X[0].transpose(0, 1), X[0].transpose(0, 1), X[0].transpose(0, 1), SEQUENCES, SEQUENCES, 5, 5),
    softmax_dropout: (X,),
    layer_norm: (X, (8,)),
    dropout_add_layer_norm: (X, X),
    dropout: (X, 0.5),
    dropout_mask: ((4, 5), 0.5, torch.tensor([0, 0])),
}
DIFFERENTIABLE = [scaled_dot_product_attention, softmax_dropout, layer_norm, dropout_add_layer_norm, dropout]
needs_cpu = pytest.mark.skipif(native.library("cpu") is None, reason=f"no cpu backend: {native.reason('cpu')}")


def doubled(arguments):
    return tuple(a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments)


@pytest.mark.parametrize("function", CALLS, ids=lambda f: f.__name__)
def test_explain(function):
    """explain names the backend that would run and, for each other one, why not."""
    text = str(explain(function, *CALLS[function]))
    assert "reference" in text
    assert "cpu" in text
    if native.library("cpu") is None:
        assert native.reason("cpu") in text
    with backend("reference"):
        forced = str(explain(function, *CALLS[function]))
    assert "reference" in forced
    assert forced != text or native.library("cpu") is None


@needs_cpu
@pytest.mark.parametrize("function", [f for f in CALLS if f is not dropout_mask], ids=lambda f: f.__name__)
def test_forced_backend_refuses_what_it_cannot_serve(function):
    arguments = doubled(CALLS[function])
    function(*arguments)  # by itself the reference takes over
    assert "float64" in str(explain(function, *arguments))
    with (
        backend("cpu"),
        pytest.raises(
            (ValueError, TypeError, RuntimeError, NotImplementedError), match=r"(?s)cpu.*float64|float64.*cpu"
        ),
    ):
        function(*arguments)


@needs_cpu
def test_wide_heads_are_the_references():
    wide = torch.randn(1, 1, 3, 257)
    scaled_dot_product_attention(wide, wide, wide)
    with backend("cpu"), pytest.raises((ValueError, RuntimeError, NotImplementedError), match="257"):
        scaled_dot_product_attention(wide, wide, wide)


@pytest.mark.parametrize(
    "function", [scaled_dot_product_attention, attention_weights, softmax_dropout], ids=lambda f: f.__name__
)
def test_triton_refuses_positions_that_32_bits_do_not_count(function):
    require("triton")
    few, many = X[..., :1, :1], torch.empty(1).expand(1, 2, 1, 2**31 - 2**16)
    operands = {softmax_dropout: (many,), attention_weights: (few, many.mT)}.get(function, (few, many.mT, many.mT))
    with backend("triton"), pytest.raises(RuntimeError, match=r"2\*\*31 - 2\*\*16 queries and keys .* 2147418113"):
        function(*operands)
    assert refusal("triton", "softmax_dropout", (many[..., 1:],)) is None
    assert refusal("triton", "attention", (few,), siblings=(many[..., 1:].mT,)) is None


def test_unknown_backend():
    with pytest.raises(ValueError, match=r"(?s)nonesuch.*reference|reference.*nonesuch"), backend("nonesuch"):
        pass


@pytest.mark.skipif(native.library("cpu") is not None, reason="the cpu backend is here")
def test_missing_backend_says_why():
    with pytest.raises((ValueError, RuntimeError), match="cpu"), backend("cpu"):
        layer_norm(X, (8,))


def used():
    """The backend that a float64 operand tells apart: only the reference serves it."""
    try:
        layer_norm(X.double(), (8,))
    except (ValueError, TypeError, RuntimeError, NotImplementedError):
        return "cpu"
    return "reference or any"


@needs_cpu
def test_nesting_and_exceptions_restore_the_choice():
    assert used() == "reference or any"
    with backend("cpu"):
        assert used() == "cpu"
        with backend("reference"):
            assert used() == "reference or any"
        assert used() == "cpu"
        with pytest.raises(KeyError), backend("reference"):
            raise KeyError
        assert used() == "cpu"
    assert used() == "reference or any"


@needs_cpu
def test_choice_is_the_threads():
    seen = []
    with backend("cpu"):
        thread = threading.Thread(target=lambda: seen.append(used()))
        thread.start()
        thread.join()
        assert used() == "cpu"
    assert seen == ["reference or any"]


def test_backward_uses_the_forwards_backend():
    """Autograd's thread sees no context manager, so the choice is saved: only the reference differentiates twice."""
    query = X.clone().requires_grad_()
    with backend("reference"):
        out = scaled_dot_product_attention(query, query, query)
    (grad,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
    assert torch.autograd.grad(grad.square().sum(), query)[0].abs().sum() > 0


@needs_cpu
def test_forcing_the_backward_changes_nothing():
    query = torch.randn(1, 2, 70, 16)
    with backend("cpu"):
        _, wanted = gradients(scaled_dot_product_attention, (query, query, query))
    leaf = query.clone().requires_grad_()
    with backend("cpu"):
        out = scaled_dot_product_attention(leaf, leaf, leaf)
    with backend("reference"):
        generator = torch.Generator().manual_seed(0)
        grad = torch.randn(out.shape, generator=generator, dtype=torch.float64).bfloat16().float()
        (got,) = torch.autograd.grad(out, leaf, grad)
    torch.testing.assert_close(got, sum(wanted), rtol=1e-6, atol=1e-6)


def test_public_names():
    names = """
        scaled_dot_product_attention attention_weights varlen_attn softmax_dropout layer_norm dropout_add_layer_norm
        dropout dropout_mask MultiHeadAttention MultiheadAttention KeyValueCache LayerNorm DropoutAddLayerNorm
        SoftmaxDropout Dropout backend explain
    """
    assert set(names.split()) <= set(fastattn.__all__)
    assert all(hasattr(fastattn, name) for name in fastattn.__all__)


DIRECT = {
    scaled_dot_product_attention: lambda dtype: [torch.randn(2, 3, n, 8).to(dtype) for n in (4, 6, 6)],
    softmax_dropout: lambda dtype: [torch.randn(2, 3, 4, 8).to(dtype), 0.3],
    layer_norm: lambda dtype: [torch.randn(2, 4, 8).to(dtype), (8,), torch.randn(8), torch.randn(8).to(dtype)],
    dropout_add_layer_norm: lambda dtype: [torch.randn(4, 8).to(dtype), torch.randn(4, 8), torch.randn(8), None, 0.3],
    dropout: lambda dtype: [torch.randn(2, 4, 8).to(dtype), 0.3],
}


@needs_cpu
@pytest.mark.parametrize("grad", [False, True], ids=["no gradient", "gradient"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("function", DIRECT, ids=lambda f: f.__name__)
def test_the_direct_way_is_the_same_operation(function, dtype, grad, monkeypatch):
    """It gives the same bits from the same draw of the seed, and plain calls take it."""
    arguments = DIRECT[function](dtype)
    leaves = [a.requires_grad_(grad) for a in arguments if isinstance(a, torch.Tensor)]

    def results():
        torch.manual_seed(3)
        out = function(*arguments)
        state = torch.random.get_rng_state()
        return [out, state, *(torch.autograd.grad(out.float().square().sum(), leaves) if grad else ())]

    with monkeypatch.context() as patched:
        patched.setattr(fastattn.backends.thread, "direct", False)
        wanted = results()
    with monkeypatch.context() as patched:
        # What every other way goes through. (fastattn.ops.dropout is the function.)
        for module in ("attention", "softmax_dropout", "layer_norm", "dropout"):
            patched.setattr(sys.modules[f"fastattn.ops.{module}"], "choose", None)
        direct = results()
    for one, other in zip(direct, wanted, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


def assert_kept(monkeypatch, function, leaves, count):
    """On the direct way ``function`` keeps so many tensors, and whatever is computed again, the bits are the same."""

    def results(**options):
        out = function(*leaves)
        return len(out.grad_fn.saved_tensors), torch.autograd.grad(out.square().sum(), leaves, **options)

    with monkeypatch.context() as patched:
        patched.setattr(fastattn.backends.thread, "direct", False)
        _, wanted = results()
    for options in {}, {"create_graph": True}:
        kept, grads = results(**options)
        assert kept == count
        assert all(map(torch.equal, grads, wanted))


@needs_cpu
@pytest.mark.parametrize("settings", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
@pytest.mark.parametrize(("length", "count"), [(5, 3), (40, 5)], ids=["small", "large"])
def test_small_attention_keeps_its_operands_alone(length, count, settings, monkeypatch):
    leaves = [torch.randn(1, 2, length, 8).requires_grad_() for _ in range(3)]
    assert_kept(monkeypatch, functools.partial(scaled_dot_product_attention, **settings), leaves, count)


@needs_cpu
@pytest.mark.parametrize("parameters", [(), (torch.float32,), (torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "count"), [(5, 3), (200, 5)], ids=["small", "large"])
def test_small_layer_norm_keeps_its_operands_alone(rows, count, dtype, parameters, monkeypatch):
    leaves = [
        torch.randn(*shape).to(t).requires_grad_()
        for shape, t in zip([(rows, 60), (60,), (60,)], (dtype, *parameters), strict=False)
    ]
    assert_kept(monkeypatch, lambda x, *affine: layer_norm(x, (60,), *affine, eps=1e-3), leaves, count)


@needs_cpu
@pytest.mark.parametrize("function", DIRECT, ids=lambda f: f.__name__)
def test_the_direct_way_keeps_nothing_of_a_call_that_it_leaves(function, monkeypatch):
    """What is kept may be moved elsewhere or computed again by a hook: each tensor once, of float64 operands too."""
    arguments = [a.requires_grad_() if isinstance(a, torch.Tensor) else a for a in DIRECT[function](torch.float64)]

    def kept():
        shapes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(t.shape), lambda packed: packed):
            function(*arguments)
        return shapes

    direct = kept()
    monkeypatch.setattr(fastattn.backends.thread, "direct", False)
    assert direct == kept()


@needs_cpu
@pytest.mark.parametrize("function", DIRECT, ids=lambda f: f.__name__)
def test_the_direct_way_is_left_where_somebody_watches(function):
    arguments = DIRECT[function](torch.float32)
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Watch():
        function(*arguments)
    assert any(name.startswith("fastattn.") for name in seen)
    assert not any("direct" in name for name in seen)
    assert explain(function, *arguments).backend == "cpu"


@needs_cpu
@pytest.mark.parametrize("function", [f for f in DIFFERENTIABLE if f is not dropout], ids=lambda f: f.__name__)
def test_double_backward_is_refused_where_the_gradient_is_constant(function):
    """The gradient of a linear loss wants no gradient itself, that of the operands still depends on them."""
    leaf = X.clone().requires_grad_()
    out = function(*(leaf if a is X else a for a in CALLS[function]))
    (grad,) = torch.autograd.grad((out * X).sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match=r'backend\("reference"\)'):
        torch.autograd.grad((grad * leaf).sum(), leaf)  # leaf is in the graph by other ways too


@needs_cpu
@pytest.mark.parametrize("function", DIFFERENTIABLE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("shape", [(0, 2, 5, 8), (1, 0, 5, 8), (1, 2, 0, 8)], ids=str)
def test_nothing_to_compute(function, shape):
    """The gradient of a sum is expanded: strides 0, which no copy of an empty tensor changes."""
    leaf = torch.randn(shape).requires_grad_()
    out = function(*(leaf if a is X else a for a in CALLS[function]))
    (grad,) = torch.autograd.grad(out.sum(), leaf)
    assert out.shape == grad.shape == shape


@pytest.mark.parametrize("function", DIFFERENTIABLE, ids=lambda f: f.__name__)
def test_checkpointed(function):
    """Non-reentrant checkpointing lets a backward pass take what was saved once."""
    leaf = X.clone().requires_grad_()
    results = []
    for run in (lambda call, t: call(t), functools.partial(checkpoint, use_reentrant=False)):
        torch.manual_seed(0)
        out = run(lambda t: function(*(t if a is X else a for a in CALLS[function])), leaf)
        results.append((out, *torch.autograd.grad((out * X).sum(), leaf)))
    assert all(map(torch.equal, *results))


@needs_cpu
@pytest.mark.slow
def test_a_thread_with_a_small_stack(python):
    """Servers give their threads less than the usual 8 MB; a kernel's scratch memory must not need them."""
    program = """
        import threading, torch, fastattn
        def run():
            for dtype in (torch.float32, torch.bfloat16):
                x, q = torch.ones(64, 512, dtype=dtype).requires_grad_(), torch.ones(2, 4, 64, 64, dtype=dtype)
                weight = torch.ones(512, dtype=dtype, requires_grad=True)
                fastattn.layer_norm(x, (512,), weight, weight).sum().backward()
                fastattn.dropout_add_layer_norm(x, x, weight, weight, 0.1).sum().backward()
                fastattn.softmax_dropout(q.requires_grad_(), 0.1).sum().backward()
                fastattn.scaled_dot_product_attention(q, q, q).sum().backward()
            print("finished")
        threading.stack_size(256 * 1024)
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    """
    assert python(program) == "finished\n"


@needs_cpu
@pytest.mark.skipif(platform.machine() != "x86_64", reason="asks Linux on x86-64")
@pytest.mark.parametrize("held_to", ["", "generic"])
def test_the_registers_of_matrix_instructions_are_asked_for_where_they_may_be_used(python, held_to):
    """From then on a process's signal stacks have to hold them: one that is held to another set does without."""
    program = """
        import ctypes, torch, fastattn
        sets = torch.ops.fastattn_cpu.isas().split(",")
        granted = ctypes.c_uint64()
        ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(granted))  # arch_prctl, ARCH_GET_XCOMP_PERM
        print(torch.ops.fastattn_cpu.isa(), sets[0], "amx_bf16" in sets, bool(granted.value >> 18 & 1))
    """
    used, best, listed, granted = python(program, FASTATTN_CPU_ISA=held_to).split()
    assert listed == granted
    assert used == (held_to or best)
    if held_to:
        assert listed == "False"
