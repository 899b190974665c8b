"""Tests of varlen_attn against attention of each sequence by itself, lower-right, in float64."""

import functools
import itertools
import math

import pytest
import torch
from conftest import BACKENDS, KERNELS, require, slow
from hypothesis import given
from hypothesis import strategies as st
from oracle import SizesOfTerms, assert_accurate, assert_same_bits, gradients, largest, varlen_attention
from pairs import in_turn, pairwise

from fastattn import varlen_attn

SEED = torch.tensor([-3, 11])
QUERIES, KEYS = (5, 0, 33, 1, 17), (9, 4, 40, 0, 17)


def packed(lengths, heads, size, dtype=torch.float32):
    return torch.randn(sum(lengths), heads, size, dtype=torch.float64).to(dtype)


def boundaries(lengths, dtype=torch.int32):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


def check(query, key, value, queries, keys, **options):
    sequences, longest = (boundaries(queries), boundaries(keys)), (max(queries), max(keys))
    tensors = query, key, value

    def composed(**more):
        return gradients(lambda *t: varlen_attention(*t, *sequences, **options, **more), tensors)

    ours = gradients(lambda *t: varlen_attn(*t, *sequences, *longest, return_lse=True, **options), tensors)
    wanted, peer, terms = composed(), composed(dtype=query.dtype), composed(softmax=SizesOfTerms.apply)
    peer_lse = varlen_attention(*tensors, *sequences, dtype=torch.float32, **options)[1]
    names = ["out", "lse", "grad_query", "grad_key", "grad_value"]
    for name, a, e, p, t in zip(names, *([*o, *g] for o, g in (ours, wanted, peer, terms)), strict=True):
        assert a.dtype == (torch.float32 if name == "lse" else query.dtype)
        size = largest(t) if name.startswith("grad") else None
        assert_accurate(a, e.double(), peer_lse if name == "lse" else p, f"{name} {options}", magnitude=size)
    return ours


@pytest.mark.parametrize("backend", KERNELS, indirect=True)
@pytest.mark.torch_version
@pairwise(
    options=[
        {},
        {"is_causal": True},
        {"window_size": (-1, 0)},
        {"window_size": (4, 2)},
        {"is_causal": True, "window_size": (6, -1), "scale": -0.3},
        {"is_causal": True, "dropout_p": 0.4},
    ],
    heads=[(2, 2, 16, 16), (4, 2, 59, 24), (3, 1, 64, 64)],
    dtype=[torch.float32, torch.bfloat16, torch.float16],
)
def test_matches_each_sequence_alone(backend, options, heads, dtype):
    hq, hk, e, ev = heads
    tensors = packed(QUERIES, hq, e, dtype), packed(KEYS, hk, e, dtype), packed(KEYS, hk, ev, dtype)
    check(*tensors, QUERIES, KEYS, seed=SEED, enable_gqa=hq != hk, **options)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"window_size": (5, 5), "dropout_p": 0.3}, marks=pytest.mark.representative),
        {"is_causal": True},
        *slow({}),
    ],
    ids=str,
)
def test_seqused_k(backend, options):
    """Only the first seqused_k keys of each sequence take part; the diagonal ends at the last of them."""
    used = torch.tensor([3, 4, 40, 0, 16], dtype=torch.int32)
    query, key, value = packed(QUERIES, 2, 16), packed(KEYS, 1, 16), packed(KEYS, 1, 16)
    starts = boundaries(KEYS)[:-1]
    for start, length, n in zip(starts, KEYS, used, strict=True):
        key[start + n : start + length] = math.nan
        value[start + n : start + length] = math.inf
    check(query, key, value, QUERIES, KEYS, seqused_k=used, seed=SEED, enable_gqa=True, **options)


def test_boundaries_may_be_int64_and_strided(backend):
    call = functools.partial(varlen_attn, packed(QUERIES, 2, 16), packed(KEYS, 2, 16), packed(KEYS, 2, 16))
    narrow = call(boundaries(QUERIES), boundaries(KEYS), 33, 40)
    spread = [boundaries(lengths, torch.int64).repeat_interleave(2)[::2] for lengths in (QUERIES, KEYS)]
    used = torch.tensor(KEYS).repeat_interleave(2)[::2]
    assert torch.equal(narrow, call(*spread, 33, 40))
    assert torch.equal(narrow, call(*spread, 33, 40, seqused_k=used))


WRONG = {
    "max_q": ((0, 12, 24), 8, 12, "max_q must be at least the longest sequence, got 8 and a sequence of 12"),
    "max_k": ((0, 12, 24), 12, 8, "max_k must be at least the longest sequence, got 8 and a sequence of 12"),
    "beyond": ((0, 12, 25), 13, 13, "cu_seq_q must rise from 0 to 24, got from 0 to 25"),
    "falling": ((0, 14, 12, 24), 14, 14, "cu_seq_q must rise, got 12 after 14"),
}


@pytest.mark.parametrize(("wrong", "how"), in_turn(WRONG, ["compiled", "vmap", "a parameter", "exported"]))
def test_a_traced_call_of_wrong_boundaries_is_refused(wrong, how):
    """A call traced with right boundaries refuses wrong ones. Python does not read them there, and the kernels' buffers
    are as large as the bounds say."""
    require("cpu")
    given, max_q, max_k, message = WRONG[wrong]
    starts, right = torch.tensor(given), torch.tensor((0, *(12,) * (len(given) - 2), 24))
    x = torch.randn(24, 2, 16)

    class Attend(torch.nn.Module):
        def forward(self, x, starts):
            return varlen_attn(x, x, x, starts, starts, max_q, max_k)

    calls = {
        "compiled": lambda: torch.compile(Attend(), backend="eager", fullgraph=True)(x, starts),
        "exported": lambda: torch.export.export(Attend(), (x, right)).module()(x, starts),
        "vmap": lambda: torch.vmap(lambda s: Attend()(x, s))(starts[None]),
        "a parameter": lambda: Attend()(x, torch.nn.Parameter(starts, requires_grad=False)),
    }
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=message):
        calls[how]()
    torch._dynamo.reset()


def test_no_sequence(backend):
    none = torch.randn(0, 2, 8)
    assert varlen_attn(none, none, none, boundaries(()), boundaries(()), 0, 0).shape == (0, 2, 8)


@pytest.mark.parametrize(("queries", "keys"), [((0, 0), (0, 3)), ((3,), (0,))], ids=str)
def test_empty_sequences(backend, queries, keys):
    (out, lse), grads = check(packed(queries, 2, 8), packed(keys, 2, 8), packed(keys, 2, 8), queries, keys)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    assert all((g == 0).all() for g in grads)


def test_strides(backend):
    """Slices of one packed projection, transposed heads and a last stride other than 1 are served."""
    projection = torch.randn(sum(QUERIES), 3, 2, 16)
    check(*projection.unbind(1), QUERIES, QUERIES, is_causal=True)
    key = torch.randn(2, sum(KEYS), 16).transpose(0, 1)
    value = torch.randn(sum(KEYS), 2, 32)[..., ::2]
    check(projection[:, 0], key, value, QUERIES, KEYS, dropout_p=0.2, seed=SEED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS[1:], indirect=True)  # torch's products depend on the thread count
def test_same_bits_for_every_thread_count(backend, dtype):
    lengths = (150, 3, 333, 20) if backend.startswith("cpu") else (40, 3, 90, 20)
    sequences = boundaries(lengths)
    settings = {"is_causal": True, "dropout_p": 0.1, "seed": SEED, "return_lse": True}
    assert_same_bits(
        lambda *t: varlen_attn(*t, sequences, sequences, max(lengths), max(lengths), **settings),
        [packed(lengths, 4, 32, dtype) for _ in range(3)],
    )


@given(
    lengths=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 90)), min_size=1, max_size=5),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    sizes=st.tuples(st.integers(1, 80), st.integers(1, 80)),
    window=st.tuples(st.integers(-1, 60), st.integers(-1, 60)),
    causal=st.booleans(),
    p=st.sampled_from([0.0, 0.3]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_problem(backend, lengths, heads, sizes, window, causal, p, dtype):
    torch.manual_seed(0)
    queries, keys = zip(*lengths, strict=True)
    (hk, group), (e, ev) = heads, sizes
    check(
        packed(queries, hk * group, e, dtype), packed(keys, hk, e, dtype), packed(keys, hk, ev, dtype), queries, keys,
        window_size=window, is_causal=causal, dropout_p=p, seed=SEED, enable_gqa=group > 1,
    )  # fmt: skip


@pytest.mark.torch_version
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "dropout_p": 0.2}], ids=["plain", "causal, dropout"])
def test_meta_tensors(options):
    def results(device):
        q, k, v = (torch.ones(7, heads, 8, device=device, requires_grad=True) for heads in (4, 2, 2))
        offsets = torch.tensor([0, 3, 7], device=device)
        out, lse = varlen_attn(q, k, v, offsets, offsets, 4, 4, enable_gqa=True, return_lse=True, **options)
        return out, lse, *torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))

    real, meta = results("cpu"), results("meta")
    assert all(t.is_meta for t in meta)
    assert [(t.shape, t.stride(), t.dtype) for t in meta] == [(t.shape, t.stride(), t.dtype) for t in real]


@pytest.mark.parametrize("longest", [50, 2**31 - 1, 2**31, 2**40, 2**62])
def test_longest_lengths_beyond_the_tokens(backend, longest):
    """Longest lengths bound the sequences' lengths from above. Larger bounds give the same bits."""
    q, k, v = (torch.randn(5, 2, 8, requires_grad=True) for _ in range(3))
    starts = torch.tensor([0, 2, 5])
    found, wanted = (
        varlen_attn(q, k, v, starts, starts, n, n, window_size=(1, 0), dropout_p=0.3, seed=torch.tensor([1, 2]))
        for n in (longest, 3)
    )
    assert torch.equal(found, wanted)
    for one, other in zip(*(torch.autograd.grad(out.sum(), (q, k, v)) for out in (found, wanted)), strict=True):
        assert torch.equal(one, other)
