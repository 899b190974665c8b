"""Backend selection: the choice, backend(), explain(), and what is kept from forward to backward."""

import contextlib
import functools
import inspect
import platform
import re
import threading

import pytest
import torch
from conftest import require
from observers import Recorder
from oracle import both_passes, visible
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import fastattn
from fastattn import backend, dropout, dropout_add_layer_norm, explain, layer_norm, softmax_dropout, varlen_attn
from fastattn import scaled_dot_product_attention as attention
from fastattn.backends import TABLE, native, schema
from fastattn.backends.schema import RECORDS, SCHEMAS, STEM_OF, AttentionArgs, SoftmaxDropoutArgs
from fastattn.ops import register

X = torch.randn(1, 2, 5, 8)
ROWS, SEQUENCES = X[0].transpose(0, 1), torch.tensor([0, 5], dtype=torch.int32)
CALLS = {
    attention: (X, X, X),
    fastattn.attention_weights: (X, X),
    varlen_attn: (ROWS, ROWS, ROWS, SEQUENCES, SEQUENCES, 5, 5),
    softmax_dropout: (X,),
    layer_norm: (X, (8,)),
    dropout_add_layer_norm: (X, X),
    dropout: (X, 0.5),
    fastattn.dropout_mask: ((4, 5), 0.5, torch.tensor([0, 0])),
}
DIFFERENTIABLE = [function for function in CALLS if function is not fastattn.dropout_mask]
REFUSALS = ValueError, TypeError, RuntimeError, NotImplementedError
needs_cpu = pytest.mark.skipif(native.library("cpu") is None, reason=f"no cpu backend: {native.reason('cpu')}")


def seen(recorder):
    """Return (op, backend) of each recorded call of fastattn's ops."""
    return [(op.name(), args[-1]) for op, args, _ in recorder.calls if op.namespace.startswith("fastattn")]


def called(function, operand):
    """Call the function with `operand` in X's place."""
    return function(*(operand if a is X else operand[0].transpose(0, 1) if a is ROWS else a for a in CALLS[function]))


@pytest.mark.parametrize("function", CALLS, ids=lambda f: f.__name__)
def test_explain(function):
    """explain names the backend that would run and says for each other one why it would not. It draws no random
    numbers."""
    before = torch.get_rng_state()
    options = {"dropout_p": 0.5} if function is dropout_add_layer_norm else {}
    explained = explain(function, *CALLS[function], **options)
    assert torch.equal(torch.get_rng_state(), before)
    assert explained.backend == ("cpu" if native.library("cpu") else "reference")
    assert "cpu" in str(explained)
    assert native.library("cpu") or native.reason("cpu") in str(explained)
    with backend("reference"):
        assert explain(function, *CALLS[function]).backend == "reference"


class Guarded(torch.nn.Module):
    """Module that returns its input if layer_norm raises."""

    def forward(self, x):
        try:
            return layer_norm(x, (8,))
        except Exception:
            return x


def test_a_module_that_handles_exceptions_is_explained():
    assert explain(Guarded(), torch.randn(2, 8)).op == "layer_norm"


UNSERVED = [*((f, X.double(), "float64") for f in DIFFERENTIABLE), (attention, torch.ones(1, 1, 3, 257), "257")]


@needs_cpu
@pytest.mark.parametrize(("function", "operand", "words"), UNSERVED)
def test_forced_backend_refuses_what_it_cannot_serve(function, operand, words):
    called(function, operand)  # unforced, the reference serves it
    with backend("cpu"), pytest.raises(REFUSALS, match=rf"(?s)cpu.*{words}|{words}.*cpu"):
        called(function, operand)


def test_triton_refuses_positions_that_32_bits_do_not_count():
    require("triton")
    few, many = X[..., :1, :1], torch.empty(1).expand(1, 2, 1, 2**31 - 2**16)
    keys = many.mT
    for call, *given in (softmax_dropout, many), (fastattn.attention_weights, few, keys), (attention, few, keys, keys):
        with backend("triton"), pytest.raises(RuntimeError, match=r"2\*\*31 - 2\*\*16 queries and keys .* 2147418113"):
            call(*given)
    fits, rest = many[..., 1:], (None, None, None, 1.0, 1, 1, False, 0)
    assert TABLE["triton"].refusal("softmax_dropout", SoftmaxDropoutArgs(fits, *rest)) is None
    assert TABLE["triton"].refusal("attention", AttentionArgs(few, fits.mT, fits.mT, *rest)) is None


def used():
    return explain(layer_norm, X, (8,)).backend


@needs_cpu
def test_nesting_and_exceptions_restore_the_choice():
    assert used() == "cpu"
    with backend("reference"):
        assert used() == "reference"
        with backend("cpu"):
            assert used() == "cpu"
        assert used() == "reference"
        with pytest.raises(KeyError), backend("cpu"):
            raise KeyError
        assert used() == "reference"
    assert used() == "cpu"


@needs_cpu
def test_choice_is_the_threads():
    seen = []
    with backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(used()))
        thread.start()
        thread.join()
    assert seen == ["cpu"]


@needs_cpu
@pytest.mark.parametrize(("forward", "backward"), [("reference", None), ("cpu", "reference")])
def test_backward_uses_the_forwards_backend(forward, backward):
    """The backward pass runs on the forward's backend, outside the block and inside another, with the same result."""
    leaf = X.clone().requires_grad_()
    with backend(forward):
        out = attention(leaf, leaf, leaf)
        (wanted,) = torch.autograd.grad(out.square().sum(), leaf, retain_graph=True)
    with Recorder() as recorder, backend(backward) if backward else contextlib.nullcontext():
        (grad,) = torch.autograd.grad(out.square().sum(), leaf)
    assert seen(recorder) == [("fastattn::attention_backward", forward)]
    assert torch.equal(grad, wanted)


# The fast path


def no_choice(*args):
    raise AssertionError("this call left the fast path")


def assert_plain(monkeypatch, outcome):
    """Assert that the calls of ``outcome`` take the fast path, with the bits and the layout of the usual path."""
    with backend("cpu"):
        wanted = outcome()
    monkeypatch.setattr(register, "choose", no_choice)
    for got, expected in zip(outcome(), wanted, strict=True):
        assert torch.equal(got, expected)
        assert got.stride() == expected.stride()


SEED, HALF = torch.tensor([3, 5]), torch.float16
PLAIN = {
    "attention": lambda q, k, v: attention(q, k, v, attn_mask=None, dropout_p=0.0),
    "by position": lambda q, k, v: attention(q, k, v, None, 0.0, True, -0.3),
    "a scale of 0 in float32": lambda q, k, v: attention(q, k, v, scale=1e-40),
    "a window": lambda q, k, v: attention(q, k, v, is_causal=True, window_size=(2, 3)),
    "a wide window": lambda q, k, v: attention(q, k, v, window_size=(999, -1)),
    "dropout": lambda q, k, v: attention(q, k, v, None, 0.3, seed=SEED),
    "all dropped": lambda q, k, v: attention(q, k, v, None, 1.0, seed=SEED),
    "a seed without dropout": lambda q, k, v: attention(q, k, v, seed=SEED),
    "a bool mask": lambda q, k, v: attention(q, k, v, torch.arange(k.size(2)).view(1, 1, 1, -1) != 1),
    "a float mask": lambda q, k, v: attention(q, k, v, torch.arange(k.size(2)).view(1, 1, 1, -1) / 7),
    "a mask of two dimensions": lambda q, k, v: attention(q, k, v, q.new_ones(q.size(2), 1) * k.sum()),
    "lengths": lambda q, k, v: attention(q, k, v, key_lengths=torch.tensor([k.size(2), 0])),
    "grouped heads": lambda q, k, v: attention(q, k[:, :1], v[:, :1], enable_gqa=True),
    "columns that are not dense": lambda q, k, v: attention(q.mT.contiguous().mT, k, v),
    "softmax_dropout": lambda q, k, v: softmax_dropout(q, 0.3, q > -1, True, -0.5, seed=SEED),
    "a size": lambda q, k, v: layer_norm(q, q.shape[-1:]),
    "layer_norm": lambda q, k, v: layer_norm(q, q.size(3), k[0, 0, 0] if k.size(2) else None, eps=1e-3),
    "dropout_add_layer_norm": lambda q, k, v: dropout_add_layer_norm(
        k, k * 2, k.new_ones(k.size(3)), None, 0.3, seed=SEED
    ),
    "two dtypes": lambda q, k, v: dropout_add_layer_norm(k, k.float() * 2),
    "out_dtype": lambda q, k, v: dropout_add_layer_norm(k, k.float() * 2, out_dtype=torch.bfloat16),
    "prenorm": lambda q, k, v: sum(dropout_add_layer_norm(k, k * 2, k[0, 0, 0] if k.size(2) else None, prenorm=True)),
    "prenorm, the sum alone": lambda q, k, v: dropout_add_layer_norm(k, k.float(), prenorm=True, out_dtype=HALF)[1],
    "prenorm, not the sum": lambda q, k, v: dropout_add_layer_norm(k, k, None, None, 0.3, prenorm=True, seed=SEED)[0],
    "dropout by itself": lambda q, k, v: dropout(v, 0.3, seed=SEED),
}


@needs_cpu
@pytest.mark.parametrize("lengths", [(4, 6), (1, 32), (0, 5), (5, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PLAIN)
def test_the_fast_path_is_the_same_operation(name, dtype, lengths, monkeypatch):
    """A plain call takes the fast path, with the same bits in the same layout, and so do its gradients."""
    queries, keys = lengths
    q = torch.randn(2, queries, 3, 8).to(dtype).transpose(1, 2)
    k, v = torch.randn(2, 3, keys, 8).to(dtype), torch.randn(2, 3, keys, 5).to(dtype)
    assert_plain(monkeypatch, lambda: both_passes(PLAIN[name], [t.requires_grad_() for t in (q, k, v)]))


@needs_cpu
@pytest.mark.parametrize("used", [None, torch.tensor([2, 0, 3])], ids=["", "used"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_fast_path_of_packed_sequences(dtype, used, monkeypatch):
    operands = [torch.randn(9, 2, 8).to(dtype).requires_grad_() for _ in range(3)]
    offsets, weight = torch.tensor([0, 4, 4, 9]), torch.randn(9, 2, 8).to(dtype)
    options = {"dropout_p": 0.3, "window_size": (3, 0), "seed": SEED}

    def outcome():
        lengths = None if used is None else used.clone()
        out = varlen_attn(*operands, offsets, offsets, 7, 5, seqused_k=lengths, **options)
        if used is not None:
            lengths.fill_(1)
        return out, *torch.autograd.grad(out, operands, weight)

    assert_plain(monkeypatch, outcome)


@needs_cpu
def test_offsets_of_queries_and_keys_that_are_one_tensor_are_copied_once():
    operands = [torch.randn(9, 2, 8, requires_grad=True) for _ in range(3)]
    offsets = torch.tensor([0, 4, 9])

    def kept(*given):
        saved = varlen_attn(*operands, *given, 5, 5).grad_fn.saved_tensors
        return [t.data_ptr() for t in saved if t is not None and t.dtype == torch.int64]

    of_queries, of_keys = kept(offsets, offsets)
    assert of_queries == of_keys != offsets.data_ptr()
    of_queries, of_keys = kept(offsets, offsets.clone())
    assert of_queries != of_keys


@pytest.mark.parametrize("name", register.FAST_PATHS)
def test_what_a_backward_function_reads_stands_between_gradients_and_what_is_wanted(name):
    """A fast path returns it in one piece, in the backward function's order."""
    function = register.OPS[name].function
    given = schema.arguments(RECORDS[function.derivative])[function.count :]
    read = schema.read_by_backward(name, function.derivative)
    assert given[: len(read)] == read
    wanted = {label for label, _ in given[len(read) :]}
    assert wanted <= {"mask_grad", "input_dtype", "weight_grad_dtype", "bias_grad_dtype"}


@needs_cpu
@pytest.mark.parametrize("name", PLAIN)
def test_lazy_operands_of_the_fast_path(name):
    """An operand may be lazily negated, or a zero without memory: its memory does not hold its values."""
    for lazy in (torch._neg_view, lambda t: torch._efficientzerotensor(t.shape)):
        operands = [lazy(torch.randn(2, 3, 5, 8)) for _ in range(3)]
        found = both_passes(PLAIN[name], [t.detach().requires_grad_() for t in operands])
        assert all(map(torch.equal, found, both_passes(PLAIN[name], [t.clone().requires_grad_() for t in operands])))


@needs_cpu
def test_a_lazily_negated_mask():
    mask = torch.randn(5, 5, dtype=torch.complex64).conj().imag
    for call in (lambda mask: attention(X, X, X, mask), lambda mask: softmax_dropout(X[..., :5], attn_mask=mask)):
        assert torch.equal(call(mask), call(mask.clone()))


UNUSUAL = {"scale": 0.5}, {"window_size": (2, -1)}, {"attn_mask": torch.arange(5) < 3}, {"enable_gqa": True}


@pytest.mark.parametrize("causal", [{}, {"is_causal": False}, {"is_causal": True}], ids=str)
@pytest.mark.parametrize("others", [{}, *UNUSUAL], ids=str)
def test_usual_calls_pass_few_arguments(others, causal, monkeypatch):
    """Calls without a gradient that give is_causal alone take the short signature, with the reference's result."""
    require("cpu")
    passed, options = [], causal | others

    def observed(compiled, is_usual):
        def call(*values):
            passed.append(is_usual)
            return compiled(*values)

        return call

    roads, _ = register.FAST_PATHS["attention"]
    compiled, for_usual, differentiated = roads["cpu"]
    monkeypatch.setitem(roads, "cpu", (observed(compiled, False), observed(for_usual, True), differentiated))
    query, key, value = torch.randn(3, 1, 2, 5, 8)
    found = attention(query, key, value, **options)
    assert passed == [not others]
    with fastattn.backend("reference"):
        torch.testing.assert_close(found, attention(query, key, value, **options))


@needs_cpu
def test_inference_tensors_leave_the_fast_path_before_a_seed_is_drawn():
    with torch.inference_mode():
        key = torch.randn(1, 2, 5, 8)
    query = torch.randn(1, 2, 5, 8).requires_grad_()

    def outcome():
        torch.manual_seed(7)
        return attention(query, key, key, None, 0.3), torch.rand(1)

    with backend("cpu"):
        wanted = outcome()
    assert all(map(torch.equal, outcome(), wanted))


@needs_cpu
def test_a_hook_that_fails_is_heard():
    def fail(tensor):
        raise RuntimeError("no space left")

    with torch.autograd.graph.saved_tensors_hooks(fail, fail), pytest.raises(RuntimeError, match="no space left"):
        layer_norm(X.clone().requires_grad_(), (8,))


@needs_cpu
def test_nodes_have_the_operations_name():
    leaf = X.clone().requires_grad_()
    assert type(layer_norm(leaf, (8,)).grad_fn).__name__ == "fastattn_layer_normBackward"
    with backend("cpu"):
        assert type(layer_norm(leaf, (8,)).grad_fn).__name__ == "fastattn_layer_normBackward"


@needs_cpu
def test_the_fast_path_draws_the_seed_of_the_usual_path(monkeypatch):
    """Both draw one seed per call that drops something, from torch's default generator."""

    def outcome():
        torch.manual_seed(1)
        calls = [dropout(X, 0.5), attention(X, X, X, None, 0.5), dropout_add_layer_norm(X, X)]
        return [*calls, dropout(X.clone().requires_grad_(), 0.5), torch.rand(1)]

    assert_plain(monkeypatch, outcome)


@pytest.mark.parametrize("prenorm", [False, True])
@pytest.mark.parametrize("wanted", ["nothing", "no grad", "input", "residual", "weight", "bias"])
def test_the_sum_is_written_where_somebody_reads_it(wanted, prenorm, monkeypatch):
    tensors = {"input": X, "residual": X, "weight": torch.ones(8), "bias": torch.ones(8)}
    for name in ("input", "bias") if wanted == "no grad" else (wanted,):
        if name in tensors:
            tensors[name] = tensors[name].clone().requires_grad_()
    with torch.set_grad_enabled(wanted != "no grad"):
        call = functools.partial(dropout_add_layer_norm, **tensors, prenorm=prenorm)
        assert normalised(monkeypatch, "dropout_add_layer_norm", call)["keep_sum"] is (prenorm or wanted in tensors)
        low = functools.partial(call, out_dtype=torch.bfloat16)  # the sum is float32 and does not fit into out
        assert normalised(monkeypatch, "dropout_add_layer_norm", low)["keep_sum"]


def test_the_library_refuses_an_output_without_room_for_the_sum():
    """The library checks out_dtype itself. A direct call would otherwise write beyond the output, or bits of another
    dtype."""
    single, half = torch.randn(4, 8), torch.randn(4, 8).bfloat16()
    wrong = (single, False, torch.bfloat16), (half, True, torch.float16), (half, True, torch.float32)
    for x, keep_sum, out_dtype in wrong:
        with pytest.raises(RuntimeError, match="out_dtype must be the sum's"):
            torch.ops.fastattn.dropout_add_layer_norm(x, x, None, None, None, 0, 1e-5, keep_sum, out_dtype, "cpu")


OTHERWISE = {
    "the other diagonal": lambda t: attention(t, t, t, is_causal=True, causal_variant="lower_right"),
    "lengths in int32": lambda t: attention(t, t, t, key_lengths=torch.tensor([3]).int()),
    "a window of a list": lambda t: attention(t, t, t, window_size=[1, 1]),
    "the log-sum-exp": lambda t: attention(t, t, t, return_lse=True)[1],
    "three dimensions": lambda t: attention(t[0], t[0], t[0]),
    "broadcast batches": lambda t: attention(t.expand(3, 2, 5, 8), t, t),
    "float64": lambda t: attention(*[t.double()] * 3),
    "autocast": torch.autocast("cpu", torch.bfloat16)(lambda t: attention(t, t, t)),
    "offsets in int32": lambda t: called(varlen_attn, t),
    "scores of three dimensions": lambda t: softmax_dropout(t[0]),
    "layer_norm over two dimensions": lambda t: layer_norm(t, (5, 8)),
    "a shape that is no tuple": lambda t: layer_norm(t, [8]),
    "a residual in float64": lambda t: dropout_add_layer_norm(t, t.double(), prenorm=True)[1],
    "a wide head": lambda t: attention(*[t.repeat(1, 1, 1, 33)] * 3),
}


@needs_cpu
@pytest.mark.parametrize("name", OTHERWISE)
def test_what_leaves_the_fast_path(name, monkeypatch):
    """A call that is not plain leaves the fast path, passes all checks and gives the reference's result."""
    out = OTHERWISE[name](X)
    with backend("reference"):
        torch.testing.assert_close(out, OTHERWISE[name](X), rtol=1e-5, atol=4e-3 if name == "autocast" else 1e-6)
    monkeypatch.setattr(register, "choose", no_choice)
    with pytest.raises(AssertionError, match="left the fast path"):
        OTHERWISE[name](X)


def test_errors_are_those_of_the_public_function():
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        attention(X, X, X, nonsense=None)
    with pytest.raises(TypeError, match="multiple values for argument 'query'"):
        attention(X, X, X, query=X)


@needs_cpu
@pytest.mark.parametrize("function", CALLS, ids=lambda f: f.__name__)
def test_whoever_listens_at_the_dispatcher_sees_the_call(function):
    with torch.no_grad(), Recorder() as recorder:
        function(*CALLS[function])
    ((op, _),) = seen(recorder)
    assert op.startswith("fastattn::")  # not a compiled library's


@pytest.mark.torch_version
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("function", [f for f in DIFFERENTIABLE if f is not dropout], ids=lambda f: f.__name__)
def test_the_reference_alone_differentiates_twice(backend, function, linear):
    """Other backends raise, for a linear loss too: its gradient is constant, but the operands' gradient depends on the
    operands."""
    if backend == "reference":
        leaf = X.double().requires_grad_()
        assert torch.autograd.gradgradcheck(functools.partial(called, function), leaf, fast_mode=True)
        return
    leaf = X.clone().requires_grad_()
    out = called(function, leaf)
    loss = out * torch.randn_like(out) if linear else out.pow(3)
    (grad,) = torch.autograd.grad(loss.sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match=r'backend\("reference"\)'):
        torch.autograd.grad((grad * leaf if linear else grad.square()).sum(), leaf)


@needs_cpu
@pytest.mark.parametrize("function", [f for f in DIFFERENTIABLE if f is not varlen_attn], ids=lambda f: f.__name__)
@pytest.mark.parametrize("shape", [(0, 2, 5, 8), (1, 0, 5, 8), (1, 2, 0, 8)], ids=str)
def test_nothing_to_compute(function, shape):
    """Empty operands give empty results and gradients. The gradient of a sum is expanded: its strides are 0, and a copy
    of an empty tensor keeps them."""
    leaf = torch.randn(shape).requires_grad_()
    (grad,) = torch.autograd.grad(called(function, leaf).sum(), leaf)
    assert grad.shape == shape


@pytest.mark.parametrize("function", DIFFERENTIABLE, ids=lambda f: f.__name__)
def test_checkpointed(function):
    """Non-reentrant checkpointing, under which a backward pass may unpack each saved tensor only once, changes no
    result."""
    leaf = X.clone().requires_grad_()
    results = []
    for run in (called, functools.partial(checkpoint, called, use_reentrant=False)):
        torch.manual_seed(0)
        out = run(function, leaf)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaf)))
    assert all(map(torch.equal, *results))


@pytest.mark.slow
@needs_cpu
@pytest.mark.skipif(platform.machine() != "x86_64", reason="asks Linux on x86-64")
@pytest.mark.parametrize("held_to", ["", "generic"])
def test_the_registers_of_matrix_instructions_are_asked_for_where_they_may_be_used(python, held_to):
    """Permission for AMX registers is requested only if the process may use AMX. Afterwards its signal stacks must hold
    these registers. A process that is held to another instruction set does not request it."""
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


# The contract (fastattn/backends/schema.py)


@pytest.mark.parametrize("name", ["reference", "triton"])
@pytest.mark.parametrize("operation", STEM_OF)
def test_signatures_are_the_records(name, operation):
    """Every Python backend function takes the operation's record. Its further parameters have defaults."""
    require(name)
    args, *others = inspect.signature(TABLE[name].FUNCTIONS[operation]).parameters.values()
    assert args.annotation == RECORDS[operation].__name__
    assert all(p.default is not p.empty for p in others)


@pytest.mark.parametrize("operation", RECORDS)
def test_a_record_flattened_and_back(operation):
    """The dispatcher's arguments are the record's fields, a record within it replaced by its fields."""
    record = RECORDS[operation]
    names = re.findall(r"(\w+)[,)]", SCHEMAS[operation].partition(" ->")[0])
    args = schema.unflatten(record, names)
    assert schema.flatten(args) == tuple(names)
    assert schema.unflatten(record, schema.flatten(args)) == args
    for name, arg in args._asdict().items():
        assert arg == (arg._fields if name == "forward" else name)


@needs_cpu
def test_the_library_has_every_operation():
    assert set(TABLE["cpu"].FUNCTIONS) == set(SCHEMAS)


def normalised(monkeypatch, operation, call):
    """Return the arguments, by name, that a public call passes to the backend's function."""
    found, original = {}, TABLE["reference"].FUNCTIONS[operation]

    def record(args):
        found.update(args._asdict())
        return original(args)

    monkeypatch.setitem(TABLE["reference"].FUNCTIONS, operation, record)
    with backend("reference"):
        call()
    return found


@pytest.mark.parametrize("is_causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("window_size", [(-1, -1), (0, 0), (3, -1), (-1, 2), (5, 9), (2**62, 2**70), [1, 1]], ids=str)
@pytest.mark.parametrize("variant", ["upper_left", "lower_right"])
def test_windows_are_finite(variant, window_size, is_causal, monkeypatch):
    """Windows reach the backend finite: each side is at least 0 and within the last position, with causal folded in.
    Visibility does not change."""
    queries, keys = 5, 9
    masks = {"is_causal": is_causal, "causal_variant": variant}
    operands, lengths = (torch.randn(1, 2, queries, 8), *torch.randn(2, 1, 2, keys, 8)), torch.tensor([7]).int()
    call = functools.partial(attention, *operands, window_size=window_size, key_lengths=lengths, **masks)
    got = normalised(monkeypatch, "attention", call)
    reach = (queries, keys) if variant == "upper_left" else (keys, queries)
    finite = got["window_left"], got["window_right"]
    assert all(0 <= side <= most for side, most in zip(finite, reach, strict=True))
    assert got["lower_right"] is (variant == "lower_right")
    assert got["key_lengths"].dtype == torch.int64
    for length in range(keys + 1):
        pairs = functools.partial(visible, (1, 1, queries, keys), key_lengths=[length], causal_variant=variant)
        wanted = pairs(is_causal=is_causal, window_size=[min(side, 99) for side in window_size])
        assert torch.equal(pairs(window_size=finite), wanted)


@pytest.mark.parametrize("p", [0.0, 1e-7, 0.1, 1.0])
@pytest.mark.parametrize("seed", [None, torch.tensor([[1, 2], [3, 4]])[:, 0]], ids=["drawn", "given"])
def test_a_seed_is_there_where_something_is_dropped(seed, p, monkeypatch):
    got = normalised(monkeypatch, "softmax_dropout", lambda: softmax_dropout(X, p, seed=seed))
    assert got["threshold"] == int(p * 65536 + 0.5)
    assert (got["seed"] is None) == (got["threshold"] == 0)
    if got["seed"] is not None:
        assert got["seed"].is_contiguous()
        assert seed is None or got["seed"].tolist() == [1, 3]


@pytest.mark.parametrize("heads", [(1, 3, 3), (4, 3, 3), (2, 1, 2), (0, 1, 2), (1, 0, 0)], ids=str)
def test_the_bindings_check_numbers_of_heads(heads):
    """The bindings raise for head counts that do not fit together: kernels would read outside the operands."""
    require("cpu")
    args = AttentionArgs(*(torch.zeros(1, n, 5, 8) for n in heads), None, None, None, 1.0, 5, 5, False, 0)
    with pytest.raises(RuntimeError, match="heads of query, key and value"):
        TABLE["cpu"].FUNCTIONS["attention"](args)


@pytest.mark.slow
def test_a_thread_of_little_stack(python):
    """Kernels run in a thread with a stack of 200 KiB, which suffices for torch's own operations. Servers give their
    threads less than the usual 8 MB."""
    require("cpu")
    program = """
        import threading, torch, fastattn

        def work():
            for dtype in (torch.float32, torch.bfloat16):
                q, x = (torch.randn(n, dtype=dtype, requires_grad=True) for n in ((2, 8, 300, 64), (512, 4096)))
                weight = torch.ones(4096, dtype=dtype, requires_grad=True)
                fastattn.scaled_dot_product_attention(q, q, q, dropout_p=0.1).sum().backward()
                fastattn.softmax_dropout(q, 0.1).sum().backward()
                fastattn.layer_norm(x, (4096,), weight, weight).sum().backward()
                fastattn.dropout_add_layer_norm(x, x, weight, weight, 0.1).sum().backward()
                print(*(t.grad.isfinite().all().item() for t in (q, x, weight)))

        threading.stack_size(200 << 10)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    """
    assert python(program) == "True True True\n" * 2


CHECKPOINTS = {
    "context_fn": lambda: functools.partial(checkpoint, use_reentrant=False, context_fn=fastattn.checkpoint_contexts),
    "reentrant": lambda: lambda function, x: checkpoint(backend("reference")(function), x, use_reentrant=True),
}


@needs_cpu
@pytest.mark.torch_version
@pytest.mark.parametrize("inside", [None, "cpu", "reference"])
@pytest.mark.parametrize("run", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_a_checkpoint_computes_again_on_the_backend_of_its_forward_pass(run, inside):
    """The recomputation runs on the forward's backend, wherever the backward pass is called: outside the block, or in
    another."""
    leaf = X.clone().requires_grad_()
    with backend("reference"):
        out = run()(lambda t: layer_norm(t, (8,)).relu(), leaf)
    with Recorder() as recorder, backend(inside) if inside else contextlib.nullcontext():
        for _ in range(2):
            out.sum().backward(retain_graph=True)
    assert seen(recorder) == 2 * [(f"fastattn::{name}", "reference") for name in ("layer_norm", "layer_norm_backward")]


@needs_cpu
def test_a_checkpoint_outside_of_blocks_chooses_anew():
    leaf = X.clone().requires_grad_()
    out = CHECKPOINTS["context_fn"]()(lambda t: layer_norm(t, (8,)).relu(), leaf)
    with Recorder() as recorder, backend("reference"):
        out.sum().backward()
    assert seen(recorder) == [(f"fastattn::{name}", "cpu") for name in ("layer_norm", "layer_norm_backward")]


@pytest.mark.torch_version
def test_operations_are_counted():
    """FLOPs are counted as for torch's own attention: 2 products forward and 5 backward, masked or not."""
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

    shapes = (3, 4, 7, 8), (3, 4, 9, 8), (3, 4, 9, 5)
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)
    with FlopCounterMode(display=False) as counter:
        attention(q, k, v, is_causal=True).sum().backward()
    grad_out = 3, 4, 7, 5
    assert counter.get_total_flops() == sdpa_flop_count(*shapes) + sdpa_backward_flop_count(grad_out, *shapes)

    packed = [torch.randn(8, 4, 8, requires_grad=True) for _ in range(3)]
    offsets = torch.tensor([0, 3, 8])
    with FlopCounterMode(display=False) as counter:
        varlen_attn(*packed, offsets, offsets, 5, 5).sum().backward()
    shapes = [[(1, 4, length, 8)] * 3 for length in (3, 5)]
    wanted = sum(sdpa_flop_count(*of) + sdpa_backward_flop_count(of[0], *of) for of in shapes)
    assert counter.get_total_flops() == wanted

    mapping = {torch.ops.fastattn.attention: lambda *shapes, **_: 1}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        attention(q.detach(), k.detach(), v.detach())
    assert counter.get_total_flops() == 1


@pytest.mark.torch_version
@pytest.mark.parametrize("function", DIFFERENTIABLE, ids=lambda f: f.__name__)
def test_fake_tensors_outside_of_their_mode(function):
    """As with torch's operations, the call enters the mode, also below another one. A drawn seed is fake too."""
    from torch.utils.flop_counter import FlopCounterMode

    mode, (first, *others), before = FakeTensorMode(), CALLS[function], torch.get_rng_state()
    given = [mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in (first.clone(), *others)]
    dropped = {"dropout_p": 0.5} if "dropout_p" in inspect.signature(function).parameters else {}
    call = functools.partial(function, given[0].requires_grad_(), *given[1:], **dropped)
    with torch.no_grad():
        assert type(call()) is FakeTensor
    with FlopCounterMode(display=False):
        call().sum().backward()
    assert type(given[0].grad) is FakeTensor
    assert given[0].grad.shape == first.shape
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.torch_version
def test_a_traced_fake_draws_its_seed_in_the_program():
    """make_fx of real tensors takes fake ones too. The program draws, from the generator, as the call does."""
    x = torch.randn(4, 8)
    program = make_fx(lambda x: dropout(x, 0.5))(FakeTensorMode().from_tensor(x))
    torch.manual_seed(3)
    found = program(x)
    torch.manual_seed(3)
    assert torch.equal(found, dropout(x, 0.5))
