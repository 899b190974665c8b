"""The launcher of Triton's kernels (csrc/launch)."""

# ruff: noqa: E402 (where Triton is not installed, nothing here can be imported)

import ctypes
import sys
from unittest import mock

import pytest
import torch
from conftest import DEVICE, require, this_torch

require("triton", allow_module_level=True)
if DEVICE != "cpu":
    pytest.skip("for Triton's interpreter", allow_module_level=True)

from launcher import driver, interpreted
from oracle import both_passes
from pairs import in_turn
from test_triton import TOOLS, last_json, program
from triton import knobs

import fastattn
from fastattn import (
    dropout,
    dropout_add_layer_norm,
    layer_norm,
    scaled_dot_product_attention,
    softmax_dropout,
    varlen_attn,
)
from fastattn.backends import cuda, native
from fastattn.backends import triton as backend
from fastattn.backends.triton import recipes
from fastattn.ops import register

pytestmark = pytest.mark.skipif(native.library("triton") is None, reason=f"no launcher: {native.reason('triton')}")
SEED = torch.tensor([3, 5])


OFFSETS = torch.tensor([0, 4, 4, 9])
# Calls, and the shapes of their operands. The first three have the test's dtype.
CALLS = {
    "attention": (lambda q, k, v: scaled_dot_product_attention(q, k, v), [(2, 2, 40, 16)] * 3),
    "causal, dropout": (
        lambda q, k, v: scaled_dot_product_attention(q, k, v, None, 0.3, True, seed=SEED), [(1, 2, 33, 32)] * 3,
    ),
    "heads of two sizes": (
        lambda q, k, v: scaled_dot_product_attention(q, k, v, enable_gqa=True, window_size=(3, 2)),
        [(1, 4, 20, 24), (1, 2, 20, 24), (1, 2, 20, 40)],
    ),
    "unaligned": (lambda q, k, v: scaled_dot_product_attention(q, k, v, scale=0.2), [(1, 2, 20, 20)] * 3),
    "other layout": (
        lambda q, k, v: scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)),
        [(2, 20, 2, 16)] * 3,
    ),
    "lengths": (
        lambda q, k, v: scaled_dot_product_attention(q, k, v, key_lengths=torch.tensor([7, 0])), [(2, 2, 20, 16)] * 3,
    ),
    "masked": (
        lambda q, k, v: scaled_dot_product_attention(q, k, v, torch.arange(40).view(1, 1, 1, 40) % 7 > 1),
        [(2, 1, 40, 16)] * 3,
    ),
    "mask of a head, causal, dropout, lengths": (
        lambda q, k, v: scaled_dot_product_attention(
            q, k, v, torch.arange(2 * 70 * 40).view(1, 2, 70, 40) // 320 % 3 > 0, 0.3, True,
            key_lengths=torch.tensor([33]), seed=SEED, enable_gqa=True,
        ),
        [(1, 2, 70, 24), (1, 1, 40, 24), (1, 1, 40, 40)],
    ),
    "added mask": (
        lambda q, k, v: scaled_dot_product_attention(q, k, v, -torch.arange(70.0).view(70, 1) * 0.1, scale=0.5),
        [(1, 2, 70, 16)] * 3,
    ),
    "masked, split keys": (
        lambda q, k, v: scaled_dot_product_attention(q, k, v, torch.arange(520).view(1, 520) % 5 > 0),
        [(1, 1, 2, 16), *[(1, 1, 520, 16)] * 2],
    ),
    "split keys": (lambda q, k, v: scaled_dot_product_attention(q, k, v), [(1, 1, 2, 16), *[(1, 1, 520, 16)] * 2]),
    "packed": (
        lambda q, k, v: varlen_attn(q, k, v, OFFSETS, OFFSETS, 5, 5, dropout_p=0.3, window_size=(-1, 0), seed=SEED),
        [(9, 2, 16)] * 3,
    ),
    "packed, used": (
        lambda q, k, v: varlen_attn(q, k, v, OFFSETS, OFFSETS, 9, 5, seqused_k=torch.tensor([2, 0, 3])),
        [(9, 2, 16)] * 3,
    ),
    "layer_norm": (lambda x, w, b: layer_norm(x, (48,), w, b), [(2, 5, 48), (48,), (48,)]),
    "layer_norm without bias": (lambda x, w: layer_norm(x, (50,), w, eps=1e-3), [(5, 50), (50,)]),
    "wide rows": (lambda x: layer_norm(x, (20000,)), [(2, 20000)]),
    "residual": (
        lambda x, r, w, b: dropout_add_layer_norm(x, r, w, b, 0.3, seed=SEED), [(2, 9, 64), (2, 9, 64), (64,), (64,)],
    ),
    "residual and sum": (
        lambda x, r, w, b: sum(dropout_add_layer_norm(x, r, w, b, 0.3, prenorm=True, seed=SEED)),
        [(2, 9, 64), (2, 9, 64), (64,), (64,)],
    ),
    "residual to 16 bits": (
        lambda x, r: dropout_add_layer_norm(x, r.float(), out_dtype=x.dtype, seed=SEED), [(2, 9, 64), (2, 9, 64)],
    ),
    "residual of strided rows": (
        lambda x, r: dropout_add_layer_norm(x[..., :30], r[..., 2:]), [(2, 9, 32), (2, 9, 32)],
    ),
    "softmax_dropout": (
        lambda x: softmax_dropout(x, 0.3, is_causal=True, scale=0.5, seed=SEED), [(2, 3, 20, 32)],
    ),
    "float mask": (lambda x, m: softmax_dropout(x, 0.0, m), [(2, 3, 20, 33), (2, 1, 1, 33)]),
    "transposed scores": (lambda x: softmax_dropout(x.transpose(1, 2), 0.3, seed=SEED), [(2, 20, 3, 32)]),
    "bool mask": (
        lambda x: softmax_dropout(x, 0.0, torch.arange(32).view(1, 1, 1, 32) % 3 > 0), [(2, 3, 20, 32)],
    ),
    "dropout": (lambda x: dropout(x, 0.3, seed=SEED), [(2, 3, 20, 32)]),
    "transposed dropout": (lambda x: dropout(x.transpose(0, 1), 0.3, seed=SEED), [(20, 3, 32)]),
    "strided dropout": (lambda x: dropout(x[:, ::2], 0.3, seed=SEED), [(4, 20, 17)]),
}  # fmt: skip


DTYPES = (torch.bfloat16, torch.float16)


# Calls have the dtypes in turn. The other dtype of each call is a slow test.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *in_turn(CALLS, DTYPES),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in in_turn(CALLS, reversed(DTYPES))),
    ],
    ids=str,
)
def test_the_same_bits(name, dtype, monkeypatch):
    """A plain call started by the launcher gives the bits of the backend in Python, and so do its gradients."""
    call, shapes = CALLS[name]
    operands = [
        torch.randn(shape).to(torch.float32 if n > 2 else dtype).requires_grad_() for n, shape in enumerate(shapes)
    ]
    with fastattn.backend("triton"):
        wanted = both_passes(call, operands)

    def no_choice(*args):
        raise AssertionError("this call left the fast path")

    monkeypatch.setattr(register, "choose", no_choice)
    monkeypatch.setattr(register.Op, "on", no_choice)
    with interpreted() as started:
        got = both_passes(call, operands)
    assert started
    for ours, theirs in zip(got, wanted, strict=True):
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
        assert ours.stride() == theirs.stride()


X, WEIGHT = torch.randn(4, 48).bfloat16(), torch.ones(48)


def test_streams_and_contexts():
    """A kernel starts on torch's current stream. The context of its device is current then, and the thread's own
    afterwards; a thread without one keeps it."""
    fake = driver()
    try:
        for before, after in ((77, 77), (0, 1), (1, 1)):
            fake.fake_set_context(before)
            fake.fake_set_stream(0, 5 + before)
            with interpreted() as started:
                layer_norm(X, (48,), WEIGHT)
            assert [start[:3] for start in started] == [("_forward", 5 + before, 1)]
            assert fake.fake_context() == after
    finally:
        fake.fake_set_stream(0, 0)


def test_strides_beyond_32_bits(tmp_path):
    """A stride of more than 32 bits is passed whole; its kernel is another one."""
    stride = 2**31 + 16
    file = tmp_path / "sparse"
    storage = torch.from_file(str(file), shared=True, size=stride + 2**10, dtype=torch.bfloat16)
    query = storage.as_strided((1, 2, 8, 16), (2 * stride, stride, 16, 1))
    query.copy_(torch.randn(1, 2, 8, 16))
    with interpreted() as started:
        out = scaled_dot_product_attention(query, query, query)
        assert torch.equal(out, scaled_dot_product_attention(*[query.contiguous()] * 3))
    (_, _, _, wide), (_, _, _, narrow) = started
    assert wide.replace("j", "i") == narrow
    assert wide.count("j") == 6  # the strides of batches and heads
    assert "j" not in narrow


def test_what_the_launcher_leaves(monkeypatch):
    """Calls that Triton's own launcher serves leave the fast path before a seed is drawn."""
    asked = []
    monkeypatch.setattr(register, "choose", lambda op, args: asked.append(op) or "reference")
    q, half = torch.randn(1, 2, 20, 16).bfloat16(), {"dropout_p": 0.5}
    calls = [
        lambda: scaled_dot_product_attention(q, q, q, scale=-1.0, **half),
        lambda: scaled_dot_product_attention(q.float(), q.float(), q.float(), **half),
        lambda: scaled_dot_product_attention(*[q.expand(1, 2, -1, -1).repeat(1, 1, 60, 1)] * 3, **half),
    ]
    for call in calls:
        torch.manual_seed(3)
        with interpreted() as started:
            wanted = call()
        assert (started, asked.pop()) == ([], "attention")
        torch.manual_seed(3)
        with fastattn.backend("reference"):
            assert torch.equal(call(), wanted)
        asked.clear()


def test_the_seed_of_the_usual_path():
    torch.manual_seed(3)
    with interpreted() as started:
        plain = dropout(X, 0.5)
    assert started
    torch.manual_seed(3)
    with fastattn.backend("reference"):
        assert torch.equal(dropout(X, 0.5), plain)


def test_a_fault_in_a_recipe_is_reported(monkeypatch):
    """Triton starts the kernel then, and the traceback is shown, even where warnings are errors."""
    reported, found = [], recipes.Recipe()
    monkeypatch.setattr(sys, "unraisablehook", lambda report: reported.append(report.exc_value))
    recipes.COMPILE(recipes.answer)(b"layer_norm.nothing 0 512", ctypes.byref(found))
    assert [type(error) for error in reported] == [KeyError]
    assert not found.is_served


def test_which_library_serves_a_gpu(monkeypatch):
    """The library of a plain call is that of the backend that the usual path chooses. No library serves an old GPU or
    another device."""
    gpu, capability = torch.device("cuda", 0), (9, 0)
    for module in (cuda, backend):
        monkeypatch.setattr(module, "capability", lambda device: capability)
    monkeypatch.setattr(cuda, "_has_code", lambda device, capabilities: capability >= (8, 0))
    monkeypatch.setattr(cuda, "FUNCTIONS", dict.fromkeys(("attention", "layer_norm", "varlen_attention"), print))
    small, large = torch.empty(4, 8), torch.empty(2**22, 8)
    rows, attention = cuda.plain("layer_norm", gpu), cuda.plain("attention", gpu)
    assert rows([small])
    assert not rows([large])
    few, many = torch.empty(1, 2, 4, 8), torch.empty(1, 2, 40, 8)
    assert attention([few, many, many, None, None, None, 0.0])
    assert not attention([few, many, many, None, None, None, 0.1])
    assert not attention([many, many, many, None, None, None, 0.0])
    assert not attention([few.requires_grad_(), many, many, None, None, None])
    assert cuda.plain("varlen_attention", gpu) is None
    assert backend.plain("varlen_attention", gpu)([few])
    assert backend.plain("layer_norm", torch.device("meta")) is None is cuda.plain("layer_norm", torch.device("meta"))
    capability = (7, 5)
    assert backend.plain("layer_norm", gpu) is None is cuda.plain("layer_norm", gpu)


def test_a_refused_backward_pass():
    """If the library does not serve a backward pass, the usual one does: rows of a gradient that do not fold."""
    x = torch.randn(2, 3, 4, 32).bfloat16().requires_grad_()
    weight = torch.randn(2, 3, 9, 32).bfloat16()[:, :, :4]
    with interpreted() as started, mock.patch.object(register.OPS["softmax_dropout_backward"], "on") as usual:
        usual.return_value = torch.ones_like(x), torch.empty(0)
        grad = torch.autograd.grad(softmax_dropout(x), x, weight)[0]
    assert len(started) == 1
    assert torch.equal(grad, torch.ones_like(x))
    assert usual.call_args.args[0] == "triton"


EMPTY = {
    "no rows": (lambda x, w: layer_norm(x, (8,), w), [(0, 8), (8,)]),
    "no keys": (lambda q, k: scaled_dot_product_attention(q, k, k), [(1, 2, 5, 16), (1, 2, 0, 16)]),
    "no queries": (lambda q, k: scaled_dot_product_attention(q, k, k), [(1, 2, 0, 16), (1, 2, 5, 16)]),
    "no scores": (lambda x: softmax_dropout(x, 0.3, seed=SEED), [(2, 0, 3, 4)]),
    "no columns": (lambda x: softmax_dropout(x), [(2, 1, 3, 0)]),
    "no elements": (lambda x: dropout(x, 0.3, seed=SEED), [(0, 4)]),
}


@pytest.mark.filterwarnings("error:fastattn")
@pytest.mark.parametrize("name", EMPTY)
def test_empty_operands(name):
    call, shapes = EMPTY[name]
    operands = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]

    def outcome():
        out = call(*operands)
        return out, *torch.autograd.grad(out, operands, torch.ones_like(out), materialize_grads=True)

    with fastattn.backend("triton"):
        wanted = outcome()
    with interpreted():
        assert all(map(torch.equal, outcome(), wanted))


def test_the_gradient_of_a_mask():
    """The usual backward pass serves a call whose mask needs a gradient."""
    query = torch.randn(2, 2, 40, 16).bfloat16().requires_grad_()
    mask = torch.randn(2, 1, 40, 1).requires_grad_()

    def outcome():
        out = scaled_dot_product_attention(query, query, query, mask)
        return out, *torch.autograd.grad(out, (query, mask), torch.ones_like(out))

    with fastattn.backend("triton"):
        wanted = outcome()
    with interpreted() as started:
        assert all(map(torch.equal, outcome(), wanted))
    assert [start[0] for start in started] == ["cover_kernel", "list_kernel", "forward_kernel"]


def test_a_hook_before_the_backward_pass():
    """Triton's own launcher, which calls hooks, starts the backward pass if a hook came after the forward pass."""
    x = X.clone().requires_grad_()
    with interpreted() as started, mock.patch.object(register.OPS["layer_norm_backward"], "on") as usual:
        usual.return_value = torch.ones_like(x), torch.empty(0), torch.empty(0)
        out = layer_norm(x, (48,))
        knobs.runtime.launch_enter_hook.add(print)
        try:
            out.backward(torch.ones_like(out))
        finally:
            knobs.runtime.launch_enter_hook.remove(print)
    assert [start[0] for start in started] == ["_forward"]
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.slow
@pytest.mark.torch_version
@pytest.mark.parametrize("calls", ["usual", *this_torch("unusual")])
def test_the_bytes_of_a_launch(calls):
    """csrc/launch passes what Triton's own launcher passes: grids, threads, shared memory and every parameter's bytes.
    It leaves launches to Triton's while a hook observes them."""
    status, output = program(str(TOOLS / "launch_bytes.py"), calls)
    assert status == 0, output
    found = last_json(output)
    assert found["differ"] == []
    kernels = {"_dropout", "_forward", "_backward", "_reduce", "forward_kernel", "cover_kernel", "list_kernel"}
    kernels |= {"grad_query_kernel", "grad_key_value_kernel", *(["merge_kernel"] if calls == "unusual" else [])}
    assert set(found["launches"]) == kernels
    assert found["hooks"] == [True, False, True]
