"""Tests of the private parts of torch that fastattn uses, one each. A failure here means that torch has changed."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from fastattn import _torch_private

pytestmark = pytest.mark.torch_version
X = torch.ones(3)


def inside_dispatch_mode(ask):
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Mode():
        ask(X)


def inside_forward_ad(ask):
    with forward_ad.dual_level():
        ask(X)


def inside_autocast(device):
    def run(ask):
        torch.set_autocast_enabled(device, True)
        try:
            ask(X)
        finally:
            torch.set_autocast_enabled(device, False)

    return run


def inside_onnx_export(ask):
    """Ask while the exporter's flag is set, which the public function reports too."""
    from torch.onnx._internal.exporter import _flags

    assert _flags.set_onnx_exporting_flag(lambda: (ask(X), torch.onnx.is_in_onnx_export())[1])()


SURROUNDINGS = {
    "a dispatch mode": inside_dispatch_mode,
    "vmap": lambda ask: torch.func.vmap(ask)(X),
    "grad": lambda ask: torch.func.grad(lambda x: ask(x).sum())(X),
    "a dual level": inside_forward_ad,
    "jvp": lambda ask: torch.func.jvp(ask, (X,), (X,)),
    "torch.compile": lambda ask: torch.compile(ask, backend="eager", fullgraph=True)(X),
    "jit.trace": lambda ask: torch.jit.trace(ask, (X,)),
    "make_fx": lambda ask: make_fx(ask)(X),
    "make_fx before dispatch": lambda ask: make_fx(ask, pre_dispatch=True)(X),
    "ONNX export": inside_onnx_export,
    "autocast": inside_autocast("cpu"),
    "autocast on CUDA": inside_autocast("cuda"),
}
NOTICED = {
    "is_observed": ["a dispatch mode", "vmap", "grad", "a dual level", "torch.compile"],
    "is_transformed": ["vmap", "grad"],
    "is_forward_mode": ["a dual level", "jvp"],
    "is_traced": ["jit.trace"],
    "is_proxied": ["make_fx", "make_fx before dispatch"],
    "is_onnx_export": ["ONNX export"],
    "is_autocast_enabled": ["autocast", "autocast on CUDA"],
}
IGNORED = [("is_observed", "autocast"), ("is_forward_mode", "grad")]


def answers(question, run):
    """Return what the question answers about each tensor that `run` passes."""
    found = []

    def ask(x):
        found.append(question(x))
        return x * 2

    torch.compiler.reset()
    run(ask)
    return found


@pytest.mark.parametrize(
    ("name", "around"), [*((name, around) for name in NOTICED for around in NOTICED[name]), *IGNORED]
)
def test_surroundings_are_noticed(name, around):
    question = getattr(_torch_private, name)
    assert not question()
    found = answers(lambda _: question(), SURROUNDINGS[around])
    assert found[0] == ((name, around) not in IGNORED), f"torch no longer says that {around} is active"
    assert not question()


def test_an_autograd_function_is_noticed():
    found = []

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            found.append(_torch_private.is_in_function())
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            found.append(_torch_private.is_in_function())
            return grad * 2

    Function.apply(X.clone().requires_grad_()).sum().backward()
    for context in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        with context:
            found.append(_torch_private.is_in_function())
    assert found == [True, False, False, False, False]


def test_batched_tensors_are_noticed():
    """Batched tensors are noticed also below another transform's wrapping, and several gradients at once."""
    vmap, grad = torch.func.vmap, torch.func.grad
    for run, wanted in {
        lambda ask: vmap(ask)(X): True,
        lambda ask: vmap(grad(lambda x: ask(x).sum()))(X): True,
        lambda ask: grad(lambda x: ask(x).sum())(X): False,
        lambda ask: vmap(lambda x: ask(X) + x)(X): False,
        lambda ask: ask(X): False,
    }.items():
        assert answers(_torch_private.is_batched, run) == [wanted]
    found, x = [], X.clone().requires_grad_()
    (out := x * 2).register_hook(lambda grad: found.append(_torch_private.is_batched_gradient(grad)))
    torch.autograd.grad(out, x, torch.eye(3), is_grads_batched=True, retain_graph=True)
    torch.autograd.grad(out, x, X)
    assert found == [True, False]


def test_a_bound_overload_is_the_op():
    bound = _torch_private.bind(torch.ops.aten.mul.Tensor)
    assert torch.equal(bound(X, X + 1), X * 2)


class Double(_torch_private.SingleLevelFunction):
    @staticmethod
    def forward(x, times):
        return x * times, x.sum()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.times = inputs[1]
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, grad, _):
        assert ctx.needs_input_grad == (True, False)
        return grad * ctx.times, None


def test_a_bound_apply_is_the_functions():
    """The bound apply calls forward, setup_context and backward as Function.apply does."""
    apply, leaf = _torch_private.bind_apply(Double), X.clone().requires_grad_()
    out, total = apply(leaf, 2)
    assert out.grad_fn is not None
    assert not total.requires_grad
    (grad,) = torch.autograd.grad(out.sum(), leaf)
    assert torch.equal(grad, X * 2)
    with torch.no_grad():
        assert not apply(leaf, 2)[0].requires_grad


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_function_at_the_autograd_key_runs_once_and_inside_transforms():
    """The op's autograd is a Function, as ops/register.py registers fastattn's. Below autograd the op is not
    differentiated again."""
    library = torch.library.Library("fastattn_test_private", "DEF")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
    double, calls = torch.ops.fastattn_test_private.double.default, []

    class Function(_torch_private.SingleLevelFunction):
        @staticmethod
        def forward(x):
            calls.append(x)
            with _torch_private.below_autograd():
                return double(x)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    apply = _torch_private.bind_apply(Function)

    def differentiate(x):
        with _torch_private.single_level_autograd():
            return apply(x)

    library.impl("double", differentiate, "Autograd")
    assert torch.equal(double(X.clone().requires_grad_()), X * 2)
    assert len(calls) == 1
    grad, vmap = torch.func.grad, torch.func.vmap
    assert torch.equal(grad(lambda x: double(x).square().sum())(X), X * 8)
    assert torch.equal(vmap(grad(lambda x: double(x).square()))(X), X * 8)
    assert torch.equal(grad(lambda x: vmap(double)(x).square().sum())(X), X * 8)
    library._destroy()


def test_torchs_encoder_layer_calls_what_is_never_skipped(monkeypatch):
    """In evaluation the layer computes with the attention's parameters, unless a part of it has a hook."""
    layer, x = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(2, 3, 8)
    forward, calls = layer.self_attn.forward, []
    monkeypatch.setattr(layer.self_attn, "forward", lambda *a, **k: calls.append(a) or forward(*a, **k))
    with torch.no_grad():
        layer(x)
        assert not calls
        _torch_private.never_skipped(layer.self_attn)
        layer(x)
        assert len(calls) == 1
        _torch_private.may_be_skipped(layer.self_attn)
        layer(x)
    assert len(calls) == 1


def test_fused_attention_of_the_cpu():
    """The forward op returns its log-sum-exp, and the backward op computes the gradients from what it saves."""
    q, k, v = (torch.randn(1, 2, 5, 4, dtype=torch.float64).requires_grad_() for _ in range(3))
    scores = q @ k.mT * 0.5
    wanted = scores.softmax(-1) @ v
    grads = torch.autograd.grad(wanted.sin().sum(), (q, k, v))
    with torch.no_grad():
        out, lse = _torch_private.flash_attention(q, k, v, scale=0.5)
        found = _torch_private.flash_attention_backward(out.cos(), q, k, v, out, lse, 0.0, False, scale=0.5)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(found, grads)


def test_scripting_is_refused():
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    _torch_private.refuse_scripting(double, "say why")
    with pytest.raises(RuntimeError, match="say why"):
        torch.jit.script(double)


def test_jagged_tensors():
    nested = torch.nested.nested_tensor([torch.ones(2, 3, 4), torch.ones(5, 3, 4)], layout=torch.jagged)
    assert _torch_private.ragged_dim(nested) == 1
    assert _torch_private.ragged_dim(nested.transpose(1, 2)) == 2
    assert _torch_private.max_length(nested.transpose(1, 2)) == 5


def test_flash_attention_is_enabled_unless_excluded():
    assert _torch_private.is_flash_enabled()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert not _torch_private.is_flash_enabled()


def test_a_cache_key_tag_holds_in_every_thread():
    tag = _torch_private.CacheKeyTag(" ours")
    with ThreadPoolExecutor(1) as thread:
        for wanted, end in ((" ours", tag.remove), ("", lambda: None)):
            assert thread.submit(lambda: torch.compiler.config.cache_key_tag).result() == wanted
            assert torch.compiler.config.cache_key_tag == wanted
            end()


def test_an_attention_implementation_is_forgotten():
    torch.nn.attention.register_flash_attention_impl("ours", register_fn=lambda: SimpleNamespace(remove=lambda: None))
    torch.nn.attention.activate_flash_attention_impl("ours")
    _torch_private.forget_attention_impl("another")
    assert torch.nn.attention.current_flash_attention_impl() == "ours"
    _torch_private.forget_attention_impl("ours")
    assert torch.nn.attention.current_flash_attention_impl() is None


def test_compiled_code_is_forgotten():
    traced = []
    double = torch.compile(lambda x: traced.append(1) or x * 2, backend="eager")
    for _ in range(2):
        double(X)
        _torch_private.forget_compiled()
    assert len(traced) == 2


def test_tracers_are_recognised():
    kinds = []
    op = _torch_private.Implementations({("relu", "AutogradCPU"): lambda x: kinds.append(type(x)) or x * 2}, {})
    try:
        torch.compile(torch.relu, backend="aot_eager")(X)
    finally:
        op.remove()
        torch.compiler.reset()
    assert kinds
    assert all(_torch_private.is_tracers(kind) for kind in kinds)
    assert not _torch_private.is_tracers(torch.Tensor)


def test_implementations_come_and_go():
    """Implementations are registered and removed, with the set of keys as an argument and without it."""
    double = _torch_private.Implementations(
        {("relu", "AutogradCPU"): lambda x: x * 2}, {("sigmoid", "CPU"): lambda keys, x: x * 3}
    )
    with torch.no_grad():
        assert torch.equal(torch.relu(X), X * 2)
        assert torch.equal(torch.sigmoid(X), X * 3)
        double.remove()
        assert torch.equal(torch.relu(-X), X * 0)
        assert torch.equal(torch.sigmoid(X * 0), X / 2)


def test_a_composite_op_has_an_implementation():
    op = torch.ops.aten.scaled_dot_product_attention.default
    q = torch.randn(1, 1, 3, 4)
    assert torch.equal(_torch_private.composite(op)(q, q, q), op(q, q, q))


def test_globals_are_replaced_in_a_copy():
    plain = _torch_private.replace_globals(torch.nn.functional.softsign, has_torch_function_unary=lambda x: False)
    assert torch.equal(plain(X), torch.nn.functional.softsign(X))
    assert plain is not torch.nn.functional.softsign
    with pytest.raises(TypeError, match="no function in Python"):
        _torch_private.replace_globals(torch.relu)


HOOKS = {
    "forward": lambda module: module.register_forward_hook(lambda *_: None),
    "forward_pre": lambda module: module.register_forward_pre_hook(lambda *_: None),
    "full_backward": lambda module: module.register_full_backward_hook(lambda *_: None),
    "full_backward_pre": lambda module: module.register_full_backward_pre_hook(lambda *_: None),
    "global forward": lambda module: torch.nn.modules.module.register_module_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("kind", [torch.nn.Linear, torch.nn.modules.linear.NonDynamicallyQuantizableLinear])
def test_a_plain_linear_module_is_known(kind, monkeypatch):
    """Hooks, another forward, compilation or another class make a call of it worth making."""
    for hook in HOOKS.values():
        module = kind(2, 2)
        for hooked in (False, True, False):
            handle = hook(module) if hooked else None
            assert _torch_private.has_hooks(module) == hooked
            assert _torch_private.is_plain_linear(module) != hooked
            if handle:
                handle.remove()
    forward = torch.nn.Linear.forward
    for change in (
        lambda module: setattr(module, "forward", module.forward),
        lambda module: module.compile(backend="eager"),
        torch.nn.utils.parametrizations.weight_norm,
        lambda _: monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: forward(self, x)),
    ):
        change(module := kind(2, 2))
        assert not _torch_private.is_plain_linear(module)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_functions_are_wrapped(use_reentrant, monkeypatch):
    module = torch.utils.checkpoint
    for name in [name for name in vars(module) if name.startswith("_checkpoint_without_reentrant_generator")]:
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(module.CheckpointFunction, "apply", module.CheckpointFunction.apply)
    calls = []
    _torch_private.wrap_checkpointed.__wrapped__(lambda run: lambda *args: calls.append("wrapped") or run(*args))
    x = X.clone().requires_grad_()
    out = module.checkpoint(lambda t: t.sin().sin(), x, use_reentrant=use_reentrant)
    calls.clear()
    out.sum().backward()
    assert calls == ["wrapped"], "torch no longer calls by these names what a checkpoint computes again"
    torch.testing.assert_close(x.grad, X.sin().cos() * X.cos())
