"""Gradients of attention in 16 bits are nearly as exact as those of torch's math backend, which rounds results only.

Means of keys and values and peaked rows make a kernel's own roundings, of P, O and dS, multiply large numbers that
cancel in exact arithmetic. Errors are pooled: the root of the summed squares over 20 draws of the operands."""

import contextlib
import functools
import itertools
import math

import pytest
import torch
from conftest import KERNELS, interpreted, slow
from oracle import EPSILON, dropout_mask, largest, score_rounding, visible
from oracle import attention as exact
from pairs import pairwise
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fastattn
from fastattn import scaled_dot_product_attention, varlen_attn
from fastattn.backends import TABLE

HALVES = [torch.bfloat16, torch.float16]
SEED = torch.tensor([0x1234567890ABCDEF, 7])
DRAWS = 20
# A kernel rounds P and dS once more than math does. Three equal roundings make sqrt(3) = 1.73 times the error of
# one.
FACTOR = 1.75


def plus(of_keys, of_values):
    return lambda query, key, value: (query, key + of_keys, value + of_values)


def columns(query, key, value):
    """Give every column of the keys and of the values a mean of its own."""
    return query, key + 20 * torch.randn(key.shape[-1]), value + 20 * torch.randn(value.shape[-1])


def peaked(of_values, query, key, value):
    """Spread scores so that one or two keys have all of a row's weight."""
    query, key = (18 * torch.rand(t.shape, dtype=t.dtype) - 9 for t in (query, key))
    return query, key, value + of_values


def negative(query, key, value):
    """Make all scores of every fourth row deeply negative."""
    direction = F.normalize(torch.randn(query.shape[-1], dtype=query.dtype), dim=0)
    lowered = query - 60 * direction * (torch.arange(query.shape[-2]) % 4 == 0)[:, None]
    return lowered, key + 10 * direction, value


REGIMES = {
    "normal": plus(0, 0),
    "keys + 20": plus(20, 0),
    "values + 20": plus(0, 20),
    "both + 2": plus(2, 2),
    "both + 5": plus(5, 5),
    "both + 20": plus(20, 20),
    "columns": columns,
    "peaked": functools.partial(peaked, 0),
    "peaked, values + 20": functools.partial(peaked, 20),
    "negative": negative,
}
LOWER = {"is_causal": True, "causal_variant": "lower_right"}


def lengths(batch, keys):
    return {"key_lengths": torch.randint(1, keys + 1, (batch,))}


def masks(kind, shape, dtype):
    """Return a mask for (B, Hq, Lq, Lk): `kind` is bool, padding, float or bias (of one row)."""
    if kind == "bool":
        return torch.rand(shape) < 0.6
    if kind == "padding":
        return torch.arange(shape[-1]) < torch.randint(1, shape[-1] + 1, (shape[0], 1, 1, 1))
    if kind == "float":
        return torch.randn(shape[1:]).to(dtype).masked_fill(torch.rand(shape[1:]) < 0.3, -math.inf)
    return None if kind is None else torch.randn(shape[-1]).to(dtype)


# A call: the shape (B, Hq, Hk, Lq, Lk, E, Ev) and its options, of which `padded` and `mask` name operands. The draws
# are the batch, or as many calls. Keys are split among tasks if they are many and the heads few.
DENSE = (DRAWS, 2, 2, 48, 64, 64, 64)
CALLS = {
    "causal": ((DRAWS, 2, 1, 50, 50, 40, 40), {"is_causal": True}),
    "padded": ((DRAWS, 2, 2, 33, 70, 32, 24), {"padded": True}),
    "window": ((DRAWS, 1, 1, 70, 130, 16, 16), {"window_size": (9, 4)}),
    "float mask": ((DRAWS, 2, 2, 37, 75, 32, 32), {"mask": "float"}),
    "dropout": ((DRAWS, 2, 1, 48, 64, 32, 32), {"dropout_p": 0.25}),
    "lse": ((DRAWS, 2, 2, 40, 60, 32, 32), {"return_lse": True}),
    "few queries": ((DRAWS, 2, 1, 4, 75, 32, 32), {"mask": "padding"}),
}
LONGER_CALLS = {
    "dense": (DENSE, {}),
    "short": ((DRAWS, 2, 2, 7, 7, 8, 8), {"is_causal": True}),
    "short, lse": ((DRAWS, 2, 1, 24, 32, 32, 24), {"padded": True, "return_lse": True}),
    "short, float mask": ((DRAWS, 2, 2, 20, 31, 16, 16), {"mask": "float"}),
    "short, dropout": ((DRAWS, 2, 1, 30, 24, 32, 32), {"dropout_p": 0.25, "is_causal": True}),
    "short, few queries": ((DRAWS, 4, 2, 3, 20, 64, 64), {"mask": "padding", "return_lse": True}),
    "wide heads": ((DRAWS, 4, 1, 20, 150, 256, 200), {"mask": "bias"}),
    "bool mask": ((DRAWS, 2, 2, 37, 75, 64, 64), {"mask": "bool"}),
    "padding mask": ((DRAWS, 2, 2, 37, 75, 64, 64), {"mask": "padding", "return_lse": True}),
    "narrow window": ((DRAWS, 2, 1, 100, 130, 16, 16), {"window_size": (1, 0)}),
    "lower right": ((DRAWS, 4, 2, 40, 90, 128, 128), {"padded": True, **LOWER}),
    "causal, dropout, lse": (DENSE, {"is_causal": True, "dropout_p": 0.25, "return_lse": True}),
    "one query": ((1, 4, 2, 1, 2000, 64, 64), {}),
    "eight queries": ((1, 2, 2, 8, 1000, 128, 128), {}),
    "few queries, padded": ((2, 4, 2, 3, 1500, 64, 64), {"padded": True}),
    "few queries, lse": ((1, 4, 4, 5, 3500, 32, 32), {"mask": "float", "return_lse": True}),
    "few queries, dropout": ((1, 4, 2, 4, 1000, 64, 64), {"dropout_p": 0.25}),
    "splits": ((1, 1, 1, 64, 2000, 64, 64), {}),
    "splits, padded": ((1, 2, 1, 64, 1600, 64, 64), {"padded": True}),
    "splits, lse": ((1, 1, 1, 40, 2000, 64, 64), {"return_lse": True}),
    "splits, dropout": ((1, 2, 1, 64, 1600, 64, 64), {"dropout_p": 0.25, **LOWER}),
    # With fewer columns the keys of a peaked row are more alike: they cancel in dQ and leave the roundings of dS.
    "long": ((1, 1, 1, 4096, 4096, 32, 32), {"is_causal": True}),
}


def math_gradients(operands, grads, seen, bias, dropped, p, dtype):
    """Return the gradients by torch's math backend in a dtype. With a gradient of the LSE it computes in float32 and
    rounds, as the backend does with operands of 16 bits, since torch has no LSE to differentiate."""
    has_lse = len(grads) > 1
    wide = torch.float32 if has_lse and dtype.itemsize == 2 else dtype
    query, key, value = leaves = [t.to(wide, copy=True).requires_grad_() for t in operands]
    mask = torch.where(seen, torch.zeros(1, dtype=wide) if bias is None else bias.to(wide), -math.inf)
    outputs = [
        torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, mask, p, False, dropped, enable_gqa=query.size(1) != key.size(1)
        )[0]
    ]
    if has_lse:
        keys = key.repeat_interleave(query.size(1) // key.size(1), 1)
        outputs.append(((query @ keys.mT) * query.size(-1) ** -0.5 + mask).logsumexp(-1))
    found = torch.autograd.grad(outputs, leaves, [g.to(wide) for g in grads])
    return [t.to(dtype) for t in found]


def draw(regime, shape, dtype, padded=False, mask=None, dropout_p=0.0, return_lse=False, **options):
    """Return (our gradients, those by the math backend in float64, and in `dtype`) of random operands. Keys and values
    that no query sees hold NaN."""
    b, hq, hk, lq, lk, e, ev = shape
    operands = [torch.randn(size, dtype=torch.float64) for size in ((b, hq, lq, e), (b, hk, lk, e), (b, hk, lk, ev))]
    query, key, value = (t.to(dtype) for t in REGIMES[regime](*operands))
    grads = [(torch.randn(b, hq, lq, ev) + 0.5).to(dtype), torch.randn(b, hq, lq)][: 1 + return_lse]
    attn_mask = masks(mask, (b, hq, lq, lk), dtype)
    options |= lengths(b, lk) if padded else {}
    seen = visible((b, hq, lq, lk), attn_mask, **options)
    unused = ~seen.any(2).unflatten(1, (hk, -1)).any(2)[..., None]
    leaves = [query, key.masked_fill(unused, math.nan), value.masked_fill(unused, math.nan)]
    leaves = [t.requires_grad_() for t in leaves]
    call = functools.partial(scaled_dot_product_attention, dropout_p=dropout_p, seed=SEED if dropout_p else None)
    results = call(*leaves, attn_mask, enable_gqa=hq != hk, return_lse=return_lse, **options)
    ours = torch.autograd.grad(results, leaves, grads if return_lse else grads[0])
    clean = [t.detach().nan_to_num(0.0) for t in leaves]
    bias = attn_mask if attn_mask is not None and attn_mask.dtype != torch.bool else None
    dropped = dropout_mask((b, hq, lq, lk), dropout_p, SEED) if dropout_p else None
    by_math = [math_gradients(clean, grads, seen, bias, dropped, dropout_p, d) for d in (torch.float64, dtype)]
    return ours, *by_math


def squares(actual, expected):
    return (actual.double() - expected).square().sum().item()


def assert_pooled(draws, factor=FACTOR):
    """Assert that the errors of the gradients, pooled over draws of (ours, exact, math's), are at most `factor` times
    math's."""
    sums = [[0.0, 0.0] for _ in range(3)]
    for ours, wanted, peer in draws:
        for pair, a, e, p in zip(sums, ours, wanted, peer, strict=True):
            pair[0] += squares(a, e)
            pair[1] += squares(p, e)
    ratios = [math.sqrt(own / peers) for own, peers in sums]
    assert max(ratios) <= factor, f"errors of dQ, dK, dV as multiples of math's: {ratios}"


def assert_as_exact_as_maths(backend, call, regime, dtype):
    shape, options = (CALLS | LONGER_CALLS)[call]
    count = 1 if shape[3] > 1000 else DRAWS
    if interpreted(backend):
        heads = [1, 1] if shape[1] == shape[2] else [2, 1]
        if shape[3] > 8:  # a quarter of the draws; errors of a few peaked rows differ too much
            shape, count = (math.ceil(shape[0] / 4), *heads, *shape[3:]), math.ceil(count / 4)
        elif shape[4] >= 1000:  # half of the keys, which still are two splits or more
            shape = (shape[0], *heads, shape[3], shape[4] // 2, *shape[5:])
    assert_pooled(draw(regime, shape, dtype, **options) for _ in range(math.ceil(count / shape[0])))


# The reference does not round P. The instruction sets of cpu, which share their code, meet each call and regime.
OF_CPU = ["cpu", *(isa for isa in KERNELS if "cpu:" in str(isa))]


@pairwise(regime=REGIMES, call=[*CALLS, *slow(*LONGER_CALLS)], backend=OF_CPU, dtype=HALVES)
def test_gradients_are_as_exact_as_maths(backend, call, regime, dtype):
    assert_as_exact_as_maths(backend, call, regime, dtype)


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
@pairwise(regime=REGIMES, call=[*CALLS, *slow(*LONGER_CALLS)], dtype=HALVES)
def test_gradients_of_triton_are_as_exact_as_maths(backend, call, regime, dtype):
    assert_as_exact_as_maths(backend, call, regime, dtype)


@pytest.mark.representative
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("regime", ["both + 20", *slow(*list(REGIMES)[:5], "columns")])
def test_a_small_batch(backend, regime, dtype):
    """A few rows suffice if they are not peaked: errors of peaked rows differ more."""
    assert_pooled([draw(regime, (4, 1, 1, 24, 40, 16, 16), dtype, padded=True)])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_single_small_calls(backend, dtype):
    """Every call of few elements is within 3 times math's error, which is by chance small itself in some. On
    Triton, whose kernels round dS to 16 bits for few queries too, a row of one large weight may cost 4 times.

    In peaked and deeply negative rows, a key has the weight of a few large queries. If their dS cancel by chance, the
    roundings remain: within 12 times. Rows of 7 keys are saturated, and their gradient is only rounding."""
    most = 4 if interpreted(backend) else 3
    for regime, (queries, keys) in itertools.product(REGIMES, ((7, 7), (12, 64))):
        is_large = regime.startswith(("peaked", "negative"))
        for _ in range(2 if interpreted(backend) else DRAWS):
            if keys == 64 or not is_large:
                found = draw(regime, (1, 1, 1, queries, keys, 16, 16), dtype)
                assert_pooled([found], factor=12 if is_large else most)


def mask_gradients(operands, grad, dtype):
    """Return the gradients of query, key, value and a float mask by the formula, computed in a dtype."""
    query, key, value, mask = leaves = [t.to(dtype, copy=True).requires_grad_() for t in operands]
    out = (query @ key.mT * query.size(-1) ** -0.5 + mask).softmax(-1) @ value
    return torch.autograd.grad(out, leaves, grad.to(dtype))


@pytest.mark.parametrize("backend", [*KERNELS[:1], *KERNELS[2:]], indirect=True)
def test_gradients_of_a_float_mask(backend):
    """The errors of all gradients, pooled over draws, are compared with those of the formula in float32.

    In float32 both passes sum the scores in the same order, also those of few queries. Values of mean 20 with peaked
    rows cost up to twice the formula's error."""
    regimes = {"normal": (1, 0, 0), "both + 20": (1, 20, 20), "peaked": (6, 0, 0), "peaked, values + 20": (6, 0, 20)}
    batch = 4 if interpreted(backend) else DRAWS
    for dtype, (queries, keys), (regime, (size, of_keys, of_values)) in itertools.product(
        (torch.float32, *HALVES), ((4, 64), (24, 64), (4, 30), (24, 30)), regimes.items()
    ):
        if interpreted(backend) and keys < 64:
            continue
        errors = torch.zeros(4, 2, dtype=torch.float64)
        for shape in (1, 1, queries, keys), (keys,):
            operands = torch.randn(batch, 2, queries, 32) * size, *torch.randn(2, batch, 2, keys, 32).unbind()
            operands = operands[0], operands[1] + of_keys, operands[2] + of_values, torch.randn(shape)
            operands = [t.to(dtype) for t in operands]
            grad = (torch.randn(batch, 2, queries, 32) + 0.5).to(dtype)

            wanted, peer = (mask_gradients(operands, grad, wide) for wide in (torch.float64, torch.float32))
            leaves = [t.requires_grad_() for t in operands]
            ours = torch.autograd.grad(scaled_dot_product_attention(*leaves), leaves, grad)
            for pair, one, exactly, torchs in zip(errors, ours, wanted, peer, strict=True):
                pair += torch.tensor([squares(one, exactly), squares(torchs.to(dtype), exactly)])
        ratios = (errors[:, 0] / errors[:, 1]).sqrt()
        most = FACTOR if dtype != torch.float32 else 2 if regime == "peaked, values + 20" else 1.5
        assert ratios.max() <= most, f"{dtype}, {queries} queries, {keys} keys, {regime}: dQ, dK, dV, dM {ratios}"


def draw_packed(regime, dtype, queries, keys, dropout_p=0.0, **options):
    """Return the gradients as `draw` does. Math computes one call whose mask keeps the sequences apart."""
    tokens, tokens_k, heads = sum(queries), sum(keys), 2
    operands = REGIMES[regime](*(torch.randn(1, h, n, 32) for h, n in ((heads, tokens), (1, tokens_k), (1, tokens_k))))
    operands = [t.to(dtype) for t in operands]
    grad = (torch.randn(1, heads, tokens, 32) + 0.5).to(dtype)
    seen, kept = (torch.zeros(1, heads, tokens, tokens_k, dtype=torch.bool) for _ in range(2))
    ends = [list(itertools.accumulate(n, initial=0)) for n in (queries, keys)]
    for n, (lq, lk) in enumerate(zip(queries, keys, strict=True)):
        block = (slice(None), slice(None), slice(ends[0][n], ends[0][n + 1]), slice(ends[1][n], ends[1][n + 1]))
        seen[block] = visible((1, heads, lq, lk), causal_variant="lower_right", **options)
        if dropout_p:
            kept[block] = dropout_mask((len(queries), heads, lq, lk), dropout_p, SEED)[n]
    leaves = [t.clone().requires_grad_() for t in operands]
    packed = [t[0].transpose(0, 1) for t in leaves]
    options |= {"dropout_p": dropout_p, "seed": SEED if dropout_p else None, "enable_gqa": True}
    out = varlen_attn(*packed, *(torch.tensor(e, dtype=torch.int32) for e in ends), max(queries), max(keys), **options)
    ours = torch.autograd.grad(out, leaves, grad[0].transpose(0, 1))
    dropped = kept if dropout_p else None
    by_math = [math_gradients(operands, [grad], seen, None, dropped, dropout_p, d) for d in (torch.float64, dtype)]
    return ours, *by_math


PACKED = [{"is_causal": True}, *slow({}, {"window_size": (4, 2)}, {"is_causal": True, "dropout_p": 0.25})]


@pairwise(regime=REGIMES, options=PACKED, backend=OF_CPU, dtype=HALVES)
def test_packed_sequences(backend, regime, options, dtype):
    queries, keys = 3 * (5, 0, 33, 1, 17, 40), 3 * (9, 4, 40, 0, 17, 70)
    assert_pooled(draw_packed(regime, dtype, queries, keys, **options) for _ in range(DRAWS // 4))


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
@pairwise(regime=REGIMES, options=PACKED, dtype=HALVES)
def test_packed_sequences_of_triton(backend, regime, options, dtype):
    queries, keys = (5, 0, 33, 1, 17, 40), (9, 4, 40, 0, 17, 70)
    assert_pooled(draw_packed(regime, dtype, queries, keys, **options) for _ in range(DRAWS // 4))


def representative(*values):
    return [pytest.param(value, marks=pytest.mark.representative) for value in values]


ONE_KEY = {
    "the only key": ((1, 1, 1, 257, 1, 64, 64), {}),
    "few queries": ((2, 4, 2, 3, 1, 64, 64), {}),
    "a padded key": ((2, 2, 2, 40, 30, 64, 64), {"key_lengths": torch.tensor([1, 1])}),
    "a window": ((1, 2, 1, 70, 70, 64, 64), {"window_size": (0, 0)}),
    "a mask": ((1, 2, 2, 70, 70, 64, 64), {"attn_mask": torch.eye(70, dtype=torch.bool).flip(0)}),
    "dropout": ((1, 2, 2, 70, 70, 64, 64), {"window_size": (0, 0), "dropout_p": 0.25, "seed": SEED}),
}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("call", [*list(ONE_KEY)[1:], *representative("the only key")])
def test_queries_that_see_one_key(backend, call, dtype):
    """Their dS is 0, and so are dQ and their part of dK, up to what float32 and the residual's own rounding leave."""
    (b, hq, hk, lq, lk, e, ev), options = ONE_KEY[call]
    for size, mean in ((4, 0), (1, 20)):
        operands = (torch.randn(s) * size + mean for s in ((b, hq, lq, e), (b, hk, lk, e), (b, hk, lk, ev)))
        query, key, value = leaves = [t.to(dtype).requires_grad_() for t in operands]
        grad = torch.randn(b, hq, lq, ev).to(dtype)
        out = scaled_dot_product_attention(*leaves, enable_gqa=hq != hk, **options)
        grad_query, grad_key, _ = torch.autograd.grad(out, leaves, grad)
        norms = [t.detach().float().norm(dim=-1).amax().item() for t in (grad, value, key, query)]
        bound = 2**-12 * norms[0] * norms[1] * e**-0.5
        assert largest(grad_query.float().norm(dim=-1)) <= bound * norms[2]
        queries_per_key = hq // hk * (lq if lk == 1 or "key_lengths" in options else 1)
        assert largest(grad_key.float().norm(dim=-1)) <= bound * norms[3] * queries_per_key


@pytest.mark.parametrize("dtype", [torch.float16, *representative(torch.bfloat16)], ids=str)
def test_the_first_query_of_a_causal_call(backend, dtype):
    """It sees one key, so its dQ is 0 among large ones."""
    operands = (torch.randn(2, 2, 20, 32) + mean for mean in (0, 20, 20))
    query, key, value = leaves = [t.to(dtype).requires_grad_() for t in operands]
    grad = torch.randn(2, 2, 20, 32).to(dtype)
    (found,) = torch.autograd.grad(scaled_dot_product_attention(*leaves, is_causal=True), query, grad)
    norms = [t[:, :, 0].detach().float().norm(dim=-1).amax().item() for t in (grad, value, key)]
    assert largest(found[:, :, 0].float().norm(dim=-1)) <= 2**-12 * math.prod(norms) * 32**-0.5


def residual_of(call, *leaves):
    """Return (results, residual). The residual is the third tensor that the call saves, after out and stats."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        results = call(*leaves)
    return results, saved[2]


RESIDUALS = {
    "causal": ((2, 2, 1, 40, 40, 32, 24), {"is_causal": True}),
    "few queries": ((2, 4, 2, 3, 70, 32, 24), {"key_lengths": torch.tensor([70, 0])}),
    "dropout": ((2, 2, 2, 20, 70, 32, 24), {"dropout_p": 0.25, "seed": SEED}),
    "splits": ((1, 1, 1, 20, 900, 32, 24), {}),
}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("call", [*list(RESIDUALS)[:2], *representative("dropout", "splits")])
def test_residual(backend, call, dtype):
    """out + residual is the result before its rounding, and LSE is exact although weights are rounded.

    Rounding the weights by u at most, and dividing by the sum of the rounded ones, moves a mean of values by at most u
    times the mean distance of the values from it. The residual is rounded itself, and scores are rounded in float32."""
    (b, hq, hk, lq, lk, e, ev), options = RESIDUALS[call]
    query, key, value = (torch.randn(s) for s in ((b, hq, lq, e), (b, hk, lk, e), (b, hk, lk, ev)))
    query, key, value = (t.to(dtype) for t in (query, key, value + 100))
    call = functools.partial(scaled_dot_product_attention, enable_gqa=hq != hk, return_lse=True, **options)
    (out, lse), residual = residual_of(call, query.requires_grad_(), key, value)
    assert residual.dtype == dtype
    assert residual.stride() == out.stride()
    wanted, wanted_lse, weights = exact(query.detach(), key, value, enable_gqa=hq != hk, **options)
    values = value.double().repeat_interleave(hq // hk, 1)
    total = weights.sum(-1, keepdim=True)
    distance = (values[:, :, None] - (wanted / total.clamp_min(1e-300))[:, :, :, None]).abs()
    unit = torch.finfo(dtype).eps / 2
    of_weights = (weights[..., None] * distance).sum(3) * unit
    of_scores = EPSILON[torch.float32] * score_rounding(query, key) * (weights @ values.abs())
    error = (out.detach().double() + residual.double() - wanted).abs()
    assert (error <= of_weights + unit**2 * wanted.abs() + of_scores).all()
    blind = wanted_lse == -math.inf
    assert (residual.abs().amax(-1)[~blind] > 0).any()
    assert (residual[blind] == 0).all()
    torch.testing.assert_close(
        lse.double(), wanted_lse, rtol=0, atol=EPSILON[torch.float32] * score_rounding(query, key)
    )


@pytest.mark.representative
@pytest.mark.parametrize("queries", [3, 20])
def test_residual_is_0_where_the_result_is_not_finite(backend, queries):
    query, key, value = (torch.randn(1, 1, n, 16).half() for n in (queries, 40, 40))
    value[..., 3, 1], value[..., 5, 2], value[..., 3] = math.inf, math.nan, 65504
    options = {"dropout_p": 0.25, "seed": SEED} if queries > 3 else {}  # its factor makes the last column overflow
    call = functools.partial(scaled_dot_product_attention, **options)
    out, residual = residual_of(call, query.requires_grad_(), key, value)
    assert not out[..., 1].isfinite().all()
    assert not out[..., 2].isfinite().all()
    assert queries == 3 or (out[..., 3] == math.inf).any()
    assert (residual[~out.isfinite()] == 0).all()
    assert residual.isfinite().all()
    assert (residual[..., 4:] != 0).any()


@pytest.mark.parametrize("backend", ["cpu"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_value_that_is_no_number_reaches_only_its_rows(backend, dtype):
    """Few queries of few keys have delta from P and dP, and a hidden pair's dP may be NaN."""
    query, key, value = (torch.randn(1, 2, n, 16).to(dtype).requires_grad_() for n in (5, 30, 30))
    with torch.no_grad():
        value[:, :, 1] = math.nan
    out = scaled_dot_product_attention(query, key, value, window_size=(1, 0))
    grad_query, grad_key = torch.autograd.grad(out, (query, key), torch.randn(1, 2, 5, 16).to(dtype))
    assert grad_query[:, :, 1:3].isnan().all()
    assert grad_query[:, :, 3:].isfinite().all()
    assert grad_key[:, :, 3:].isfinite().all()
    assert grad_key[:, :, 3:5].any(-1).all()


@pytest.mark.parametrize("backend", ["cpu", *KERNELS[4:]], indirect=True)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_an_infinite_key_reaches_only_queries_that_see_it(backend, dtype):
    """It is among the first keys, whose mean centres the keys of queries that do not see it."""
    query, key, value = (torch.randn(1, 2, 400, 16).to(dtype) for _ in range(3))
    key[:, :, 0] = math.inf
    query.requires_grad_()
    out = scaled_dot_product_attention(query, key, value, window_size=(50, 0))[:, :, 300:]
    grad = torch.autograd.grad(out.sum(), query)[0][:, :, 300:]
    assert grad.isfinite().all()
    assert grad.any()


@pytest.mark.parametrize("keys", [1, 32, 33])
@pytest.mark.parametrize("way", ["fast", "record", "packed", "packed record"])
def test_residual_is_kept_for_more_than_32_keys(way, keys):
    """The fast path and the record of a call decide alike. A gradient of LSE has no fast path."""
    query, key, value = (torch.randn(n, 2, 8, dtype=torch.bfloat16) for n in (5, keys, keys))
    ends = [torch.tensor([0, n]) for n in (5, keys)]

    def call(*leaves):
        if "packed" in way:
            return varlen_attn(*leaves, *ends, 5, keys, return_lse="record" in way)
        return scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in leaves), return_lse="record" in way)

    _, residual = residual_of(call, query.requires_grad_(), key, value)
    assert (residual.numel() > 0) == (keys > 32)


def kept_residuals(monkeypatch, call):
    """Return whether each attention that the cpu backend computes during the call keeps the residual."""
    kept, functions = [], TABLE["cpu"].FUNCTIONS
    for name in ("attention", "varlen_attention"):

        def observed(args, function=functions[name]):
            results = function(args)
            kept.append(results[3].numel() > 0)
            assert results[3].shape in (results[0].shape, (0,))
            return results

        monkeypatch.setitem(functions, name, torch.compiler.disable(observed))
    call()
    return kept


NO_GRADIENT = {
    "no leaf": (False, True),
    "no grad": (True, False),
    "wanted": (True, True),
}


@pytest.mark.parametrize(
    ("case", "way"), [*itertools.product(NO_GRADIENT, ["eager", "packed"]), ("no leaf", "compiled")]
)
def test_residual_is_kept_only_for_a_gradient(case, way, monkeypatch):
    is_leaf, grad_enabled = NO_GRADIENT[case]
    tensors = [torch.randn(1, 2, 40, 8, dtype=torch.bfloat16).requires_grad_(is_leaf) for _ in range(3)]
    ends = torch.tensor([0, 40], dtype=torch.int32)

    def call():
        if way == "packed":
            return varlen_attn(*(t[0].transpose(0, 1) for t in tensors), ends, ends, 40, 40)
        return scaled_dot_product_attention(*tensors, is_causal=True)

    function = torch.compile(call, backend="aot_eager", fullgraph=True) if way == "compiled" else call
    with fastattn.backend("cpu"), torch.set_grad_enabled(grad_enabled):
        assert kept_residuals(monkeypatch, function) == [case == "wanted"]


DETERMINISTIC = {
    "dropout": ((2, 4, 2, 70, 130, 40, 40), {"dropout_p": 0.25, "seed": SEED, "is_causal": True}),
    "few queries": ((1, 4, 2, 5, 900, 32, 32), {}),
    "splits": ((1, 2, 1, 40, 1700, 32, 32), {"dropout_p": 0.25, "seed": SEED}),
    "mask": ((2, 2, 2, 70, 130, 40, 40), {"attn_mask": torch.arange(130).remainder(3) > 0}),
    "short": ((2, 2, 2, 70, 30, 40, 40), {"dropout_p": 0.25, "seed": SEED}),
}


@pytest.mark.parametrize("backend", ["cpu", *KERNELS[4:]], indirect=True)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("call", DETERMINISTIC)
def test_equal_bits_for_any_number_of_threads(backend, call, dtype):
    """Results, residual and gradients have the same bits on every run and for every number of threads."""
    (b, hq, hk, lq, lk, e, ev), options = DETERMINISTIC[call]
    operands = REGIMES["both + 5"](*(torch.randn(s) for s in ((b, hq, lq, e), (b, hk, lk, e), (b, hk, lk, ev))))
    grads = torch.randn(b, hq, lq, ev).to(dtype), torch.randn(b, hq, lq)
    function = functools.partial(scaled_dot_product_attention, enable_gqa=hq != hk, return_lse=True, **options)
    runs = []
    for threads in (1, 2, 3, 1):
        torch.set_num_threads(threads)
        leaves = [t.to(dtype).requires_grad_() for t in operands]
        results, residual = residual_of(function, *leaves)
        runs.append([*results, residual, *torch.autograd.grad(results, leaves, grads)])
    for other in runs[1:]:
        assert all(map(torch.equal, runs[0], other))


@pytest.mark.parametrize("keys", [16, 33])
@pytest.mark.parametrize("side", ["forward", "backward"])
@pytest.mark.parametrize("call", ["dense", "packed"])
@pytest.mark.parametrize("around", ["mode", "reference", "cpu"])
def test_a_checkpoint_keeps_the_same_tensors_in_both_passes(keys, side, call, around):
    """A mode or a backend around one pass alone does not change what is saved, on the fast path and beside it. A packed
    call's maximum may exceed all keys."""
    query, key, value = (torch.randn(keys, 2, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    ends = torch.tensor([0, keys])  # int64, which the fast path takes

    def attend(*tensors):
        if call == "packed":
            return varlen_attn(*tensors, ends, ends, 40, 40)
        return scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in tensors))

    def conditions(place):
        if place != side:
            return contextlib.nullcontext()
        return FlopCounterMode(display=False) if around == "mode" else fastattn.backend(around)

    with conditions("forward"):
        out = checkpoint(attend, query, key, value, use_reentrant=False)
    with conditions("backward"):
        out.float().sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in (query, key, value))
