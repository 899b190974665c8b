"""Backend selection: the choice, backend(), explain(), and what is kept from forward to backward."""

import contextlib
import functools
import inspect
import platform
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
from fastattn.backends import TABLE, native
from fastattn.backends.schema import RECORDS, SCHEMAS, STEM_OF, AttentionArgs, SoftmaxDropoutArgs, flatten, unflatten
from fastattn.ops import register

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
    """explain names the backend that would run and says for each other one why it would not."""
    text = str(explain(function, *CALLS[function]))
    assert "reference" in text
    assert "cpu" in text
    if native.library("cpu") is None:
        assert native.reason("cpu") in text
    with backend("reference"):
        forced = str(explain(function, *CALLS[function]))
    assert "reference" in forced
    assert forced != text or native.library("cpu") is None


class Guarded(torch.nn.Module):
    """Module that returns its input if layer_norm raises."""

    def forward(self, x):
        try:
            return layer_norm(x, (8,))
        except Exception:
            return x


def test_a_module_that_handles_exceptions_is_explained():
    assert explain(Guarded(), torch.randn(2, 8)).op == "layer_norm"


@pytest.mark.parametrize("function", CALLS, ids=lambda f: f.__name__)
def test_explain_draws_no_random_numbers(function):
    before = torch.get_rng_state()
    explain(function, *CALLS[function], **({"dropout_p": 0.5} if function is dropout_add_layer_norm else {}))
    assert torch.equal(torch.get_rng_state(), before)


@needs_cpu
@pytest.mark.parametrize("function", [f for f in CALLS if f is not dropout_mask], ids=lambda f: f.__name__)
def test_forced_backend_refuses_what_it_cannot_serve(function):
    arguments = doubled(CALLS[function])
    function(*arguments)  # unforced, the reference serves it
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
    fits, rest = many[..., 1:], (None, None, None, 1.0, 1, 1, False, 0)
    assert TABLE["triton"].refusal("softmax_dropout", SoftmaxDropoutArgs(fits, *rest)) is None
    assert TABLE["triton"].refusal("attention", AttentionArgs(few, fits.mT, fits.mT, *rest)) is None


def test_unknown_backend():
    with pytest.raises(ValueError, match=r"(?s)nonesuch.*reference|reference.*nonesuch"), backend("nonesuch"):
        pass


@pytest.mark.skipif(native.library("cpu") is not None, reason="the cpu backend is here")
def test_missing_backend_says_why():
    with pytest.raises((ValueError, RuntimeError), match="cpu"), backend("cpu"):
        layer_norm(X, (8,))


def used():
    """Return the backend in force, found by a float64 operand, which only the reference serves."""
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
    """The backward pass runs on the forward's backend, although autograd's thread sees no context manager. Double
    backward proves it, because only the reference supports it."""
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
    assert [name for name in names.split() if not callable(getattr(fastattn, name))] == []


# The fast path


def no_choice(*args):
    raise AssertionError("this call left the fast path")


@needs_cpu
@pytest.mark.parametrize("lengths", [(4, 6), (1, 32), (0, 5), (5, 0)], ids=str)
@pytest.mark.parametrize("settings", [{}, {"is_causal": True}, {"scale": -0.3}, {"scale": 1e-40}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_fast_path_is_the_same_operation(dtype, settings, lengths, monkeypatch):
    """The fast path gives the same bits in the same layout. Plain calls take it, with arguments by position and by
    name."""
    queries, keys = lengths
    q = torch.randn(2, queries, 3, 8).to(dtype).transpose(1, 2)
    k, v = torch.randn(2, 3, keys, 8).to(dtype), torch.randn(2, 3, keys, 5).to(dtype)
    with backend("cpu"):
        wanted = scaled_dot_product_attention(q, k, v, **settings)
    monkeypatch.setattr(register, "choose", no_choice)
    for out in (
        scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, **settings),
        scaled_dot_product_attention(q, k, v, None, 0.0, settings.get("is_causal", False), settings.get("scale")),
    ):
        assert torch.equal(out, wanted)
        assert out.stride() == wanted.stride()


@needs_cpu
@pytest.mark.parametrize("shape", [(64,), (1, 64), (2, 3, 64), (0, 64), (3, 0)], ids=str)
@pytest.mark.parametrize("affine", [torch.float32, torch.bfloat16, None], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_fast_path_of_layer_norm(dtype, affine, shape, monkeypatch):
    x, columns = torch.randn(*shape).to(dtype), shape[-1:]
    weight, bias = (None, None) if affine is None else torch.randn(2, *columns).to(affine)
    with backend("cpu"):
        wanted = layer_norm(x, columns, weight, bias, 1e-3)
    monkeypatch.setattr(register, "choose", no_choice)
    assert torch.equal(layer_norm(x, columns, weight, bias, 1e-3), wanted)
    assert torch.equal(layer_norm(x, columns, bias=bias, weight=weight, eps=1e-3), wanted)


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


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "keep_sum"),
    [
        (torch.float32, torch.bfloat16, False),
        (torch.bfloat16, torch.float16, True),
        (torch.bfloat16, torch.float32, True),
    ],
    ids=str,
)
def test_the_library_refuses_an_output_without_room_for_the_sum(dtype, out_dtype, keep_sum):
    """The library checks out_dtype itself. A direct call would otherwise write beyond the output, or bits of another
    dtype."""
    x = torch.randn(4, 8).to(dtype)
    with pytest.raises(RuntimeError, match="out_dtype must be the sum's"):
        torch.ops.fastattn.dropout_add_layer_norm(x, x, None, None, None, 0, 1e-5, keep_sum, out_dtype, "cpu")


OTHERWISE = {
    "a mask": lambda t: scaled_dot_product_attention(t, t, t, torch.ones(5, 5).bool()),
    "dropout": lambda t: scaled_dot_product_attention(t, t, t, dropout_p=0.1),
    "grouped heads": lambda t: scaled_dot_product_attention(t, t[:, :1], t[:, :1], enable_gqa=True),
    "a window": lambda t: scaled_dot_product_attention(t, t, t, window_size=(1, 1)),
    "a gradient": lambda t: scaled_dot_product_attention(t.clone().requires_grad_(), t, t),
    "a gradient of values": lambda t: scaled_dot_product_attention(t, t, t.clone().requires_grad_()),
    "three dimensions": lambda t: scaled_dot_product_attention(t[0], t[0], t[0]),
    "broadcast batches": lambda t: scaled_dot_product_attention(t.expand(3, 2, 5, 8), t, t),
    "rows that are not dense": lambda t: scaled_dot_product_attention(*[t.mT.contiguous().mT] * 3),
    "float64": lambda t: scaled_dot_product_attention(*[t.double()] * 3),
    "autocast": torch.autocast("cpu", torch.bfloat16)(lambda t: scaled_dot_product_attention(t, t, t)),
    "layer_norm over two dimensions": lambda t: layer_norm(t, (5, 8)),
    "a shape that is no tuple": lambda t: layer_norm(t, [8]),
    "the gradient of a weight by name": lambda t: layer_norm(t, (8,), weight=torch.ones(8, requires_grad=True)),
    "a wide head": lambda t: scaled_dot_product_attention(*[t.repeat(1, 1, 1, 33)] * 3),
}


@needs_cpu
@pytest.mark.parametrize("name", OTHERWISE)
def test_what_leaves_the_fast_path(name, monkeypatch):
    """A call that is not plain leaves the fast path, passes all checks and gives the reference's result."""
    out = OTHERWISE[name](X)
    if name != "dropout":
        with backend("reference"):
            torch.testing.assert_close(out, OTHERWISE[name](X), rtol=1e-5, atol=4e-3 if name == "autocast" else 1e-6)
    monkeypatch.setattr(register, "choose", no_choice)
    with pytest.raises(AssertionError, match="left the fast path"):
        OTHERWISE[name](X)


@needs_cpu
@pytest.mark.parametrize(
    ("arguments", "settings", "words"),
    [
        ((X, X, X), {"is_causal": 1}, "is_causal must be True or False, got 1"),
        ((X, X, X), {"is_causal": 2}, "is_causal must be True or False, got 2"),
        ((X, X, X), {"scale": "1"}, "scale must be a real number, got str"),
        ((X, X, X), {"scale": float("nan")}, "scale must be finite in float32, got nan"),
        ((X, X, X), {"scale": 1e39}, "scale must be finite in float32, got 1e\\+39"),
        ((X, X, X), {"dropout_p": -1.0}, r"dropout_p must be in \[0, 1\], got -1.0"),
        ((X, X, None), {}, "value must be a Tensor, got NoneType"),
        ((X, X, X[..., :4, :]), {}, "key and value must have the same length, got 5 and 4"),
        ((X, X, X), {"nonsense": None}, "unexpected keyword argument 'nonsense'"),
        ((X, X, X), {"query": X}, "multiple values for argument 'query'"),
        ((X, X.int(), X), {}, "key must be float32, bfloat16, float16 or float64, got int32"),
    ],
)
def test_errors_are_those_of_the_public_function(arguments, settings, words):
    with pytest.raises((TypeError, ValueError), match=words):
        scaled_dot_product_attention(*arguments, **settings)


class Watch(TorchDispatchMode):
    """Dispatch mode that records the names of the ops it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@needs_cpu
@pytest.mark.parametrize("function", CALLS, ids=lambda f: f.__name__)
def test_whoever_listens_at_the_dispatcher_sees_the_call(function):
    with torch.no_grad(), Watch() as watch:
        function(*CALLS[function])
    seen = [name for name in watch.seen if name.startswith("fastattn")]
    assert len(seen) == 1
    assert seen[0].startswith("fastattn.")  # not of a compiled library


@needs_cpu
@pytest.mark.parametrize("function", [f for f in DIFFERENTIABLE if f is not dropout], ids=lambda f: f.__name__)
def test_double_backward_is_refused_where_the_gradient_is_constant(function):
    """Double backward raises for a linear loss too. The loss's gradient is constant, but the operands' gradient depends
    on the operands."""
    leaf = X.clone().requires_grad_()
    out = function(*(leaf if a is X else a for a in CALLS[function]))
    (grad,) = torch.autograd.grad((out * X).sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match=r'backend\("reference"\)'):
        torch.autograd.grad((grad * leaf).sum(), leaf)  # leaf also enters the graph elsewhere


@needs_cpu
@pytest.mark.parametrize("function", DIFFERENTIABLE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("shape", [(0, 2, 5, 8), (1, 0, 5, 8), (1, 2, 0, 8)], ids=str)
def test_nothing_to_compute(function, shape):
    """Empty operands give empty results and gradients. The gradient of a sum is expanded: its strides are 0, and a copy
    of an empty tensor keeps them."""
    leaf = torch.randn(shape).requires_grad_()
    out = function(*(leaf if a is X else a for a in CALLS[function]))
    (grad,) = torch.autograd.grad(out.sum(), leaf)
    assert out.shape == grad.shape == shape


@pytest.mark.parametrize("function", DIFFERENTIABLE, ids=lambda f: f.__name__)
def test_checkpointed(function):
    """Non-reentrant checkpointing, under which a backward pass may unpack each saved tensor only once, changes no
    result."""
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
    """Kernels run in a thread with a stack of 256 KiB. Servers give their threads less than the usual 8 MB, so scratch
    memory must not need that much."""
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


def arguments_of(schema):
    """Return the names of a schema's arguments."""
    return [argument.split()[1] for argument in schema.split("(", 1)[1].split(") ->")[0].split(", ")]


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
    """The dispatcher's arguments are the record's fields, those of a forward pass's record within it in its place."""
    record = RECORDS[operation]
    names = arguments_of(SCHEMAS[operation])
    args = unflatten(record, names)
    assert flatten(args) == tuple(names)
    assert unflatten(record, flatten(args)) == args
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
    got = normalised(
        monkeypatch,
        "attention",
        lambda: scaled_dot_product_attention(
            torch.randn(1, 2, queries, 8), *torch.randn(2, 1, 2, keys, 8), is_causal=is_causal,
            causal_variant=variant, window_size=window_size, key_lengths=torch.tensor([7], dtype=torch.int32),
        ),
    )  # fmt: skip
    reach = (queries, keys) if variant == "upper_left" else (keys, queries)
    left, right = got["window_left"], got["window_right"]
    assert 0 <= left <= reach[0]
    assert 0 <= right <= reach[1]
    assert got["lower_right"] is (variant == "lower_right")
    assert got["key_lengths"].dtype == torch.int64
    for length in range(keys + 1):
        diagonal = length - queries if variant == "lower_right" else 0
        for i in range(queries):
            for j in range(length):
                distance = j - i - diagonal
                seen = window_size[0] == -1 or distance >= -window_size[0]
                seen &= window_size[1] == -1 or distance <= window_size[1]
                seen &= not is_causal or distance <= 0
                assert (-left <= distance <= right) == seen


@pytest.mark.parametrize("p", [0.0, 1e-7, 0.1, 1.0])
@pytest.mark.parametrize("seed", [None, torch.tensor([[1, 2], [3, 4]])[:, 0]], ids=["drawn", "given"])
def test_a_seed_is_there_where_something_is_dropped(seed, p, monkeypatch):
    got = normalised(monkeypatch, "softmax_dropout", lambda: softmax_dropout(X, p, seed=seed))
    assert got["threshold"] == int(p * 65536 + 0.5)
    assert (got["seed"] is None) == (got["threshold"] == 0)
    if got["seed"] is not None:
        assert got["seed"].is_contiguous()
        assert seed is None or got["seed"].tolist() == [1, 3]


@pytest.mark.parametrize(("given", "got"), [(1e-40, 0.0), (-1e-39, 0.0), (0, 0.0), (-2, -2.0), (2.0**-126, 2.0**-126)])
def test_scales_that_float32_holds(given, got, monkeypatch):
    call = normalised(monkeypatch, "attention", lambda: scaled_dot_product_attention(X, X, X, scale=given))
    assert call["scale"] == got
    assert isinstance(call["scale"], float)


@pytest.mark.parametrize("heads", [(1, 3, 3), (4, 3, 3), (2, 1, 2), (0, 1, 2), (1, 0, 0)], ids=str)
def test_the_bindings_check_numbers_of_heads(heads):
    """The bindings raise for head counts that do not fit together: kernels would read outside the operands."""
    require("cpu")
    args = AttentionArgs(*(torch.zeros(1, n, 5, 8) for n in heads), None, None, None, 1.0, 5, 5, False, 0)
    with pytest.raises(RuntimeError, match="heads of query, key and value"):
        TABLE["cpu"].FUNCTIONS["attention"](args)


@pytest.mark.slow
def test_a_thread_of_little_stack(python):
    """Kernels run in a thread with a stack of 200 KiB, which suffices for torch's own operations."""
    require("cpu")
    program = """
        import threading, torch, fastattn

        def work():
            q, x = torch.randn(2, 8, 300, 64, requires_grad=True), torch.randn(512, 4096, requires_grad=True)
            fastattn.scaled_dot_product_attention(q, q, q, dropout_p=0.1).sum().backward()
            fastattn.dropout_add_layer_norm(x, x, dropout_p=0.1).sum().backward()
            print(q.grad.isfinite().all().item(), x.grad.isfinite().all().item())

        threading.stack_size(200 << 10)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    """
    assert python(program) == "True True\n"


class _Watch(TorchDispatchMode):
    """Dispatch mode that records (op, backend) for each call of a fastattn op."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fastattn":
            self.seen.append((func.__name__.partition(".")[0], args[-1]))
        return func(*args, **(kwargs or {}))


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
    with _Watch() as watch, backend(inside) if inside else contextlib.nullcontext():
        out.sum().backward()
    assert watch.seen == [("layer_norm", "reference"), ("layer_norm_backward", "reference")]


@needs_cpu
def test_a_checkpoint_is_computed_again_for_each_backward_pass():
    leaf = X.clone().requires_grad_()
    with backend("reference"):
        out = CHECKPOINTS["context_fn"]()(lambda t: layer_norm(t, (8,)).relu(), leaf)
    with _Watch() as watch:
        for _ in range(2):
            out.sum().backward(retain_graph=True)
    assert watch.seen == 2 * [("layer_norm", "reference"), ("layer_norm_backward", "reference")]


@needs_cpu
def test_a_checkpoint_outside_of_blocks_chooses_anew():
    leaf = X.clone().requires_grad_()
    out = CHECKPOINTS["context_fn"]()(lambda t: layer_norm(t, (8,)).relu(), leaf)
    with _Watch() as watch, backend("reference"):
        out.sum().backward()
    assert watch.seen == [("layer_norm", "cpu"), ("layer_norm_backward", "cpu")]


@pytest.mark.torch_version
def test_operations_are_counted():
    """FLOPs are counted as for torch's own attention: 2 products forward and 5 backward, masked or not."""
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

    shapes = (3, 4, 7, 8), (3, 4, 9, 8), (3, 4, 9, 5)
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)
    with FlopCounterMode(display=False) as counter:
        scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
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
        scaled_dot_product_attention(q.detach(), k.detach(), v.detach())
    assert counter.get_total_flops() == 1
