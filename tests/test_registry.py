"""Tests of fastattn as torch's attention: torch's registry of implementations, and `intercept_sdpa`."""

import contextlib
import functools
import inspect
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import require, slow
from observers import Recorder
from oracle import assert_accurate, gradients
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, current_flash_attention_impl, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import emulation
import fastattn
from fastattn import backends
from fastattn.integrations import registry
from fastattn.integrations.registry import handle
from fastattn.ops import attention
from fastattn.ops.check import ARGUMENT_ERRORS, new_seed

pytestmark = pytest.mark.torch_version


@contextlib.contextmanager
def activated():
    activate_flash_attention_impl("fastattn")
    try:
        yield
    finally:
        handle.remove()


@pytest.fixture
def active():
    with activated():
        yield


@pytest.fixture(params=[activated, fastattn.intercept_sdpa], ids=["registry", "intercept"])
def served(request):
    """Return a function that calls its argument while fastattn serves torch's attention."""

    def served(call):
        with request.param():
            return call()

    served.by = request.param
    return served


OURS, FLASH = "fastattn.attention.default", "aten._scaled_dot_product_flash_attention_for_cpu.default"


def ops(function, *args, **options):
    """Return the names of the ops of attention that the call reaches below autograd."""
    with Recorder() as recorder:
        function(*args, **options)
    return [str(op) for op, *_ in recorder.calls if "attention" in str(op)]


def operands(*sizes, keys=11, size=16, kv_heads=None, value_size=None, dtype=torch.float32):
    *batch, heads, rows = sizes
    kv = (*batch, kv_heads or heads, keys)
    shapes = (*batch, heads, rows, size), (*kv, size), (*kv, value_size or size)
    return tuple(torch.randn(shape, dtype=dtype) for shape in shapes)


def test_registered_and_not_active():
    assert "fastattn" in torch.nn.attention.list_flash_attention_impls()
    assert current_flash_attention_impl() is None
    assert ops(sdpa, *operands(2, 2, 5)) == [FLASH]


# Calls that torch's function takes: (operands, its further arguments)
CALLS = {
    "plain": lambda: (operands(2, 3, 7), {}),
    "causal": lambda: (operands(2, 3, 7), {"is_causal": True}),
    "scale": lambda: (operands(2, 3, 7), {"scale": 0.3}),
    "boolean mask": lambda: ((*operands(2, 3, 7), torch.rand(7, 11) > 0.3), {}),
    "float mask": lambda: ((*operands(2, 3, 7), torch.randn(2, 1, 7, 11)), {}),
    "grouped heads": lambda: (operands(2, 4, 7, kv_heads=2), {"enable_gqa": True}),
    "sizes of heads": lambda: (operands(2, 3, 7, value_size=5), {}),
    "no batch": lambda: (operands(3, 7), {}),
    "batches": lambda: (operands(2, 2, 3, 7), {}),
    "broadcast": lambda: ((operands(2, 3, 7)[0], *operands(1, 1, 7)[1:]), {}),
    "heads inside": lambda: (tuple(t.transpose(1, 2) for t in operands(2, 7, 3, keys=3)), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients(active, name):
    tensors, options = CALLS[name]()
    call = functools.partial(sdpa, **options)
    assert ops(call, *tensors) == [OURS]
    (out,), grads = gradients(call, tensors)
    handle.remove()
    assert OURS not in ops(call, *tensors)
    (peer,), peer_grads = gradients(call, tensors)
    (exact,), exact_grads = gradients(call, [t.double() if t.is_floating_point() else t for t in tensors])
    assert out.stride() == peer.stride()
    for found, wanted, torchs in zip((out, *grads), (exact, *exact_grads), (peer, *peer_grads), strict=True):
        assert_accurate(found, wanted, torchs)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_dropout_is_the_formulas(served, context, compiled):
    """The weights that are kept, which values of the unit matrix show, are those of the seed drawn from torch's
    generator."""
    function = torch.compile(sdpa, backend="aot_eager", fullgraph=True) if compiled else sdpa
    tensors = torch.ones(2, 3, 9, 8), torch.ones(2, 3, 9, 8), torch.eye(9).expand(2, 3, 9, 9)
    torch.manual_seed(5)
    kept = fastattn.dropout_mask((2, 3, 9, 9), 0.4, new_seed(torch.empty(0)))
    torch.manual_seed(5)
    with context():
        assert torch.equal(served(lambda: function(*tensors, dropout_p=0.4)) != 0, kept)


# Torch's machinery


def test_autocast(active):
    q, k, v = operands(2, 3, 7)
    with torch.autocast("cpu", torch.bfloat16):
        assert sdpa(q, k, v).dtype == torch.bfloat16
        assert ops(sdpa, q, k, v, torch.randn(7, 11)) == [OURS]


def test_function_transforms(active):
    """fastattn serves grad; vmap goes torch's own way."""
    q, k, v = operands(2, 3, 7)

    def loss(q):
        return sdpa(q, k, v).square().sum()

    assert ops(torch.func.grad(loss), q) == [OURS, "fastattn.attention_backward.default"]
    assert OURS not in ops(torch.vmap(self_attention), q)
    leaf = q.clone().requires_grad_()
    assert torch.equal(torch.func.grad(loss)(q), torch.autograd.grad(loss(leaf), leaf)[0])


def test_export(active):
    """An exported program calls torch's op, hence fastattn's while that is the active one."""
    module = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x = (torch.randn(2, 7, 16),) * 3
    run = torch.export.export(module, x, {"need_weights": False}).module()
    assert ops(run, *x, need_weights=False) == [OURS]
    handle.remove()
    assert ops(run, *x, need_weights=False) == [FLASH]


# Calls that go on to torch have the same bits as without fastattn


THROUGH = {
    "float64": lambda: (operands(2, 3, 7, dtype=torch.float64), {}),
    "large heads": lambda: (operands(1, 1, 3, size=257), {}),
    "dropout of float64": lambda: (operands(2, 3, 7, dtype=torch.float64), {"dropout_p": 0.5}),
    "nested": lambda: ((torch.nested.nested_tensor([torch.randn(2, n, 8) for n in (3, 5)]),) * 3, {}),
}


@pytest.mark.parametrize("name", THROUGH)
def test_torch_serves(name, served):
    tensors, options = THROUGH[name]()

    def call():
        torch.manual_seed(1)
        out = sdpa(*tensors, **options)
        return out.to_padded_tensor(0.0) if out.is_nested else out

    assert torch.equal(served(call), call())
    assert OURS not in served(lambda: ops(call))


def error(function, tensors, options):
    with pytest.raises((RuntimeError, TypeError)) as raised:
        function(*tensors, **options)
    return str(raised.value)


BAD = {
    "an unknown argument": lambda: (operands(2, 3, 7), {"return_lse": True}),
    "a scale by position": lambda: ((*operands(2, 3, 7), None, 0.0, False, 0.5), {}),
    "a mask of text": lambda: (operands(2, 3, 7), {"attn_mask": "causal"}),
    "dropout as text": lambda: (operands(2, 3, 7), {"dropout_p": "half"}),
    "a half mask of float32": lambda: (operands(2, 3, 7), {"attn_mask": torch.ones(7, 11).half()}),
    "dtypes": lambda: ((operands(2, 3, 7)[0].half(), *operands(2, 3, 7)[1:]), {}),
    "heads": lambda: (operands(2, 4, 7, kv_heads=2), {}),
    "integers": lambda: ((torch.ones(2, 3, 4, dtype=torch.int64),) * 3, {}),
    "no value": lambda: (operands(2, 3, 7)[:2], {}),
    "one dimension": lambda: ((torch.ones(3),) * 3, {}),
    "sparse": lambda: ((torch.eye(3).to_sparse(),) * 3, {}),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_are_torchs(name, served):
    """Errors are torch's also in traced code and multi-head attention. Both call the mode's function itself, whose
    arguments nobody has bound."""
    arguments = BAD[name]()
    wanted = error(sdpa, *arguments)
    assert served(lambda: error(sdpa, *arguments)) == wanted
    assert error(registry._sdpa_of_python, *arguments) == wanted


FAULTS = (TypeError, ValueError, RuntimeError)


def planted(kind):
    def fail(*args, **options):
        raise kind("planted")

    return fail


def test_a_fault_of_fastattns_surfaces(served, monkeypatch):
    """A fault of fastattn's is raised. torch serves only what the checks refuse."""
    for kind in FAULTS:
        monkeypatch.setattr(attention, "dense_args", planted(kind))
        with pytest.raises(kind, match="planted"):
            served(lambda: sdpa(*(t[0] for t in operands(2, 3, 7)), dropout_p=0.5))
    for kind in ARGUMENT_ERRORS:
        monkeypatch.setattr(attention, "dense_args", planted(kind))
        assert FLASH in served(lambda: ops(sdpa, *operands(2, 3, 7)))


def test_a_mask_and_is_causal_are_torchs(served):
    """torch decides on a mask with is_causal, and refuses them together from 2.14 on."""
    tensors, mask = operands(2, 3, 7), torch.randn(7, 11)

    def outcome():
        try:
            return sdpa(*tensors, mask, is_causal=True).tolist()
        except RuntimeError as error:
            return str(error)

    assert served(outcome) == outcome()


def test_a_user_who_asks_for_torchs_other_kernels_gets_them(served):
    """Forward mode needs them."""
    q, k, v = operands(2, 3, 7)

    def jvp():
        return torch.func.jvp(lambda q: sdpa(q, k, v), (q,), (q,))[1]

    with sdpa_kernel(SDPBackend.MATH):
        assert served(lambda: ops(sdpa, q, k, v)) == []
        assert torch.equal(served(jvp), jvp())


def test_a_subclass_gets_torchs_ops(served):
    tensors = [TwoTensor(tensor, tensor) for tensor in operands(2, 3, 7)]
    assert OURS not in served(lambda: ops(sdpa, *tensors))


def test_a_forced_backend_serves(active):
    with fastattn.backend("reference"):
        assert ops(sdpa, *operands(2, 3, 7, dtype=torch.float64)) == [OURS]


# Activation and restoring

NAMES = {"scaled_dot_product_attention", *(function.__name__ for function in registry._PAIRS)}


def test_restored_torch_is_as_it_was():
    names = [f"aten::{name}" for name in NAMES if hasattr(torch.ops.aten, name)]
    calls = [CALLS[name]() for name in CALLS]

    def state():
        tables = [torch._C._dispatch_dump_table(name) for name in names]
        torch.manual_seed(2)
        outs = [sdpa(*tensors, **options, dropout_p=0.2) for tensors, options in calls]
        return tables, outs, torch.compiler.config.cache_key_tag, current_flash_attention_impl()

    tables, outs, *rest = state()
    activate_flash_attention_impl("fastattn")
    changed_tables, changed, tag, current = state()
    getattr(torch.nn.attention, "restore_flash_attention_impl", handle.remove)()
    again_tables, again, *restored = state()
    assert all(one != other for one, other in zip(tables, changed_tables, strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(outs, changed, strict=True))
    assert (tag, current) != tuple(rest)
    assert current == "fastattn"
    assert again_tables == tables
    assert all(torch.equal(one, other) for one, other in zip(outs, again, strict=True))
    assert restored == rest


def test_compiled_functions_compile_anew():
    """fastattn is activated, twice, and removed, and again. A compiled function has a graph for each state."""
    tensors = operands(2, 3, 7)
    compiled, found = graphs(sdpa)
    for _ in range(2):
        for current, op in ((None, FLASH), ("fastattn", OURS)):
            assert current_flash_attention_impl() == current
            assert ops(sdpa, *tensors) == [op]
            compiled(*tensors)
            compiled(*tensors)
            activate_flash_attention_impl("fastattn")
        handle.remove()
    assert found == [[FLASH], [OURS], [FLASH], [OURS]]


def graphs(function):
    """Return the compiled function, and the list of the ops of attention of each graph that it makes."""
    found = []

    def compiler(module, inputs):
        found.append([str(node.target) for node in module.graph.nodes if "attention" in str(node.target)])
        return module

    return torch.compile(function, backend=aot_autograd(fw_compiler=compiler), fullgraph=True), found


def test_the_caches_key(active):
    """The key is that of every thread, and keeps the user's."""
    assert in_a_thread(lambda: torch.compiler.config.cache_key_tag) == torch.compiler.config.cache_key_tag
    assert "fastattn" in torch.compiler.config.cache_key_tag
    handle.remove()
    with torch.compiler.config.patch(cache_key_tag="mine"):
        activate_flash_attention_impl("fastattn")
        assert torch.compiler.config.cache_key_tag.startswith("mine fastattn ")
        handle.remove()
        assert torch.compiler.config.cache_key_tag == "mine"


def in_a_thread(function):
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function).result()


# Processes, one after the other, forked from one that has imported the compiler.
COMPILE = """
    import os, sys
    import torch, torch._inductor.compile_fx
    from torch._dynamo.utils import counters

    def run(ours):
        if ours:
            import fastattn
            torch.nn.attention.activate_flash_attention_impl("fastattn")
        # Attention alone: what is no kernel of torch's or ours would take g++ ten seconds.
        compiled = torch.compile(lambda *x: torch.nn.functional.scaled_dot_product_attention(*x), fullgraph=True)
        torch.manual_seed(0)
        operands = [torch.randn(2, 3, 40, 16, requires_grad=True) for _ in range(3)]
        compiled(*operands).sum().backward()
        with torch.profiler.profile() as profile:
            compiled(*operands)
        names = {{event.key for event in profile.key_averages()}}
        print("fastattn" in sys.modules, any(name.startswith("fastattn") for name in names),
              "aten::_scaled_dot_product_flash_attention_for_cpu" in names,
              counters["aot_autograd"]["autograd_cache_hit"], flush=True)

    for ours in {order}:
        if not (child := os.fork()):
            run(ours)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
def test_two_processes_that_share_inductors_cache(python, tmp_path):
    """Each process gets its own kernels, although Dynamo traces the same program. The next process of its kind gets
    those of the cache."""
    shared = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    order = (True, False) * 2
    printed = python(COMPILE.format(order=order), **shared).splitlines()
    expected = [f"{ours} {ours} {not ours} {hits}" for ours, hits in zip(order, (0, 0, 1, 1), strict=True)]
    assert [line for line in printed if line.startswith(("True ", "False "))] == expected


# intercept_sdpa


def test_intercepts_a_block_and_a_thread():
    query, key, value = tensors = operands(2, 3, 7)
    with fastattn.intercept_sdpa():
        assert ops(sdpa, *tensors) == [OURS]
        assert ops(sdpa, query=query, key=key, value=value) == [OURS]
        assert in_a_thread(lambda: ops(sdpa, *tensors)) == [FLASH]
    assert ops(sdpa, *tensors) == [FLASH]


@pytest.mark.parametrize("training", [True, False])
def test_multi_head_attention(served, training):
    """In evaluation torch's module calls a kernel of its own, which `intercept_sdpa` alone replaces."""
    module = torch.nn.MultiheadAttention(16, 2, batch_first=True).train(training)
    x = torch.randn(2, 7, 16)

    def call():
        return module(x, x, x, need_weights=False)[0]

    with torch.set_grad_enabled(training):
        is_ours = training or served.by is fastattn.intercept_sdpa
        wanted = OURS if is_ours else "aten._native_multi_head_attention.default"
        assert served(lambda: ops(call)) == [wanted]
        torch.testing.assert_close(served(call), call())


def self_attention(x):
    return sdpa(x, x, x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_block_is_torchs():
    """A traced block keeps torch's attention, since fastattn does not support torch.jit."""
    x = torch.randn(2, 3, 5, 8)
    with fastattn.intercept_sdpa():
        traced = torch.jit.trace(self_attention, x, check_trace=False)
    assert torch.equal(traced(x), self_attention(x))


@pytest.mark.parametrize("kind", ["function", *slow("module")])
def test_intercepts_compiled_functions_inside_the_block_alone(kind):
    module = torch.nn.TransformerEncoderLayer(16, 2, dropout=0.0, batch_first=True)
    function, x = (self_attention, torch.randn(2, 2, 7, 16)) if kind == "function" else (module, torch.randn(2, 7, 16))
    compiled, found = graphs(function)
    for _ in range(2):
        compiled(x)
        with fastattn.intercept_sdpa():
            compiled(x)
    assert found == [[FLASH], [OURS]]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_intercepts_what_a_checkpoint_computes_again(use_reentrant):
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.5, batch_first=True)
    x = torch.randn(2, 7, 16)

    def gradients(run):
        torch.manual_seed(3)
        operand = x.clone().requires_grad_()
        with fastattn.intercept_sdpa():
            out = run(operand)
        out.square().sum().backward()  # outside the block
        found = out, operand.grad, *(parameter.grad.clone() for parameter in layer.parameters())
        layer.zero_grad()
        return found

    nested = [lambda y: checkpoint(layer, y, use_reentrant=use_reentrant)]
    nested.append(lambda y: checkpoint(nested[0], y, use_reentrant=use_reentrant))
    for run in nested:
        torch.testing.assert_close(gradients(run), gradients(layer), rtol=0, atol=0)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_outside_the_block_stays_torchs(use_reentrant):
    with fastattn.intercept_sdpa():
        pass
    q = torch.randn(2, 2, 7, 16, requires_grad=True)
    out = checkpoint(self_attention, q, use_reentrant=use_reentrant)
    found = ops(checkpoint, self_attention, q, use_reentrant=use_reentrant) + ops(out.sum().backward)
    assert found[:2] == [FLASH, FLASH]
    assert OURS not in found


def test_intercepts_causal_bias():
    tensors = (*operands(2, 3, 7), causal_lower_right(7, 11))
    wanted = sdpa(*tensors)
    with fastattn.intercept_sdpa():
        torch.testing.assert_close(sdpa(*tensors), wanted)


# The pairs, called on CPU tensors as the dispatcher would call them


def pair_of(kind):
    name = f"_scaled_dot_product_{kind}_attention"
    return getattr(registry, name), getattr(registry, f"{name}_backward")


def flash(query, key, value, dropout_p, is_causal, grad_out):
    forward, backward = pair_of("flash")
    out, lse, *lengths, random, unused, _debug = forward(query, key, value, dropout_p, is_causal)
    grads = backward(grad_out, query, key, value, out, lse, *lengths, dropout_p, is_causal, random, unused)
    return random.view(torch.int64), (out, *grads)


def efficient(query, key, value, dropout_p, is_causal, grad_out):
    forward, backward = pair_of("efficient")
    out, lse, *random = forward(query, key, value, None, True, dropout_p, is_causal)
    assert lse.shape == (*query.shape[:2], 32)
    given, wanted = (query, key, value, None, out, lse, *random), [True] * 3 + [False]
    *grads, _ = backward(grad_out, *given, dropout_p, wanted, is_causal)
    return torch.stack(random), (out, *grads)


def exact(tensors, grad_out, **options):
    leaves = [tensor.double().requires_grad_() for tensor in tensors]
    with fastattn.backend("reference"):
        out = fastattn.scaled_dot_product_attention(*leaves, **options)
    return tuple(t.float() for t in (out, *torch.autograd.grad(out, leaves, grad_out.double())))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("pair", [flash, efficient])
def test_pairs(pair, dropout_p, is_causal):
    """Gradients are right with statistics rebuilt from the LSE, also for rows that see nothing."""
    tensors, grad_out = operands(2, 3, 13), torch.randn(2, 3, 13, 16)
    seed, found = pair(*tensors, dropout_p, is_causal, grad_out)
    variant = "lower_right" if pair is flash else "upper_left"
    options = {"dropout_p": dropout_p, "is_causal": is_causal, "causal_variant": variant, "seed": seed}
    torch.testing.assert_close(found, exact(tensors, grad_out, **options), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pair", [flash, efficient])
@pytest.mark.parametrize("queries", [4, 24])
def test_pairs_of_short_rows_are_as_exact_as_math(pair, queries):
    """A row of at most 32 keys needs no residual, which the pairs cannot pass on: with values of mean 20 delta is exact
    all the same. The factor is that of test_exact_gradients.py."""
    query, key, value = (torch.randn(20, 2, n, 32) for n in (queries, 24, 24))
    tensors = [t.bfloat16() for t in (query, key, value + 20)]
    grad_out = torch.randn(query.shape).bfloat16()
    _, (_, *found) = pair(*tensors, 0.0, False, grad_out)
    leaves = [t.clone().requires_grad_() for t in tensors]
    with sdpa_kernel(SDPBackend.MATH):
        maths = torch.autograd.grad(sdpa(*leaves), leaves, grad_out)
    for ours, theirs, wanted in zip(found, maths, exact(tensors, grad_out)[1:], strict=True):
        assert (ours.float() - wanted).norm() <= 1.75 * (theirs.float() - wanted).norm()


@pytest.mark.parametrize("pair", [flash, efficient])
def test_pairs_of_few_queries_on_cuda_and_triton(pair, monkeypatch):
    """Gradients are right where, as on a GPU, `cuda` serves the forward pass and has no backward pass."""
    require("cuda")
    require("triton")
    from interpreter import strict

    monkeypatch.setattr(backends, "_ORDER", {"cpu": ("cuda", "triton")})
    tensors, grad_out = operands(2, 3, 5), torch.randn(2, 3, 5, 16)
    with emulation.strict(), strict():
        assert fastattn.explain(fastattn.scaled_dot_product_attention, *tensors).backend == "cuda"
        _, found = pair(*tensors, 0.0, False, grad_out)
    torch.testing.assert_close(found, exact(tensors, grad_out))


PAIRS = {function.__name__: function for function in registry._PAIRS if hasattr(torch.ops.aten, function.__name__)}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_take_the_arguments_of_torchs_ops(name):
    arguments = getattr(torch.ops.aten, name).default._schema.arguments
    given = [argument.name for argument in arguments if not argument.kwarg_only]
    inspect.signature(PAIRS[name]).bind(*given, **{a.name: None for a in arguments if a.kwarg_only})


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_leave_to_torch_what_they_refuse_alone(name, monkeypatch):
    """Calls that the pairs refuse go to the kernel that torch has of its own on a GPU. A fault of fastattn's surfaces
    there too."""
    kernel = types.SimpleNamespace(call_boxed=lambda keys, *args, **options: "torch's")
    monkeypatch.setattr(torch.library, "get_kernel", lambda op, key: kernel)
    implementation = registry._or_torchs(PAIRS[name], "CPU")
    arguments = [a for a in getattr(torch.ops.aten, name).default._schema.arguments if not a.kwarg_only]
    call = [torch.randn(2, 3, 7, 16) if "Tensor" in str(a.type) else 0 for a in arguments]
    for kind in (registry._Unserved, *ARGUMENT_ERRORS, *FAULTS):
        monkeypatch.setattr(registry, "_check_served", planted(kind))
        if kind in FAULTS:
            with pytest.raises(kind, match="planted"):
                implementation(None, *call)
        else:
            assert implementation(None, *call) == "torch's"


def test_a_mask_with_a_gradient_is_not_for_the_efficient_pair():
    forward, tensors = pair_of("efficient")[0], (*operands(2, 3, 7), torch.randn(2, 3, 7, 11))
    with pytest.raises(NotImplementedError, match="finfo"):
        forward(*tensors, True)
    out, lse, *_ = forward(*tensors, False)
    assert lse.numel() == 0
    torch.testing.assert_close(out, sdpa(*tensors))


@pytest.mark.parametrize(("kind", "arguments"), [("flash", ()), ("efficient", (None, True))])
def test_results_of_pairs_have_the_strides_of_torchs_fakes(kind, arguments):
    tensors = [torch.randn(7, 3, 2, 16).permute(2, 1, 0, 3) for _ in range(3)]
    forward = pair_of(kind)[0]
    promised = getattr(torch.ops.aten, forward.__name__)(*(t.to("meta") for t in tensors), *arguments)
    assert [t.stride() for t in forward(*tensors, *arguments)[:2]] == [t.stride() for t in promised[:2]]


# torch.nn.attention.varlen

varlen = pytest.importorskip("torch.nn.attention.varlen")


@pytest.mark.parametrize("compiled", [False, True])
def test_varlen(active, compiled):
    """Causal packed attention runs on CPU tensors, where torch itself has no kernel."""
    starts = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    tensors = [torch.randn(9, 2, 8) for _ in range(3)]
    causal = {"is_causal": True} if torch.__version__ < "2.11" else {"window_size": (-1, 0)}

    def torchs(*tensors):
        return varlen.varlen_attn(*tensors, starts, starts, 5, 5, **causal)

    call = torch.compile(torchs, backend="aot_eager", fullgraph=True) if compiled else torchs
    wanted = gradients(lambda *t: fastattn.varlen_attn(*t, starts, starts, 5, 5, is_causal=True), tensors)
    torch.testing.assert_close(gradients(call, tensors), wanted)


def test_what_varlen_lacks_on_the_cpu(active):
    starts = torch.tensor([0, 9], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="neither fastattn nor torch"):
        varlen.varlen_attn(*(torch.randn(9, 2, 8).double() for _ in range(3)), starts, starts, 9, 9)
