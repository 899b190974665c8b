"""Tensors of more than 2**31 elements, and sums of very many terms.

Offsets must have 64 bits. The tensors' memory exists only where it was written. One chain of float32 additions over all
terms would lose some."""

import math
import mmap

import numpy as np
import pytest
import torch
from conftest import instruction_set, machine_isas, require
from oracle import dropout_values, gradients, threshold

from fastattn import (
    dropout,
    dropout_add_layer_norm,
    dropout_mask,
    layer_norm,
    scaled_dot_product_attention,
    softmax_dropout,
)

require("cpu", allow_module_level=True)
pytestmark = pytest.mark.slow
FAR = 2**31 + 40
MAP_NORESERVE = 0x4000  # Linux's value; older versions of mmap lack the name
SEED = torch.tensor([11, 13])


def sparse(elements, dtype):
    """Return zeros that take only address space: all pages that were never written are one."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize, flags=flags), dtype=dtype)


def spread(tensor, dim):
    """Return a copy with such a large stride along `dim` that the last element lies beyond 2**31 elements."""
    strides = list(tensor.contiguous().stride())
    strides[dim] = math.ceil(FAR / (tensor.size(dim) - 1))
    memory = sparse(sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True)) + 1, tensor.dtype)
    return memory.as_strided(tensor.shape, strides).copy_(tensor)


def assert_same(function, tensors, dims):
    """Assert that output and gradients have the same bits if the operands are spread over more than 2**31 elements."""
    far = [tensor if dim is None else spread(tensor, dim) for tensor, dim in zip(tensors, dims, strict=True)]
    with torch.no_grad():
        assert torch.equal(function(*far), function(*tensors))
    (near_out, near_grads), (far_out, far_grads) = gradients(function, tensors), gradients(function, far)
    for near, other in zip([*near_out, *near_grads], [*far_out, *far_grads], strict=True):
        assert torch.equal(near, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "heads", "rows"])
@pytest.mark.parametrize("rows", [2, 70])
@pytest.mark.parametrize("backend", ["cpu", "triton"], indirect=True)
def test_attention(backend, dtype, dim, rows):
    query, key, value = (torch.randn(2, 2, n, 24).to(dtype) for n in (rows, 70, 70))
    assert_same(scaled_dot_product_attention, (query, key, value), (dim, dim, dim))
    mask = torch.randn(2, 2, rows, 70).to(dtype)
    assert_same(scaled_dot_product_attention, (query, key, value, mask), (None, None, None, dim))


@pytest.mark.parametrize("backend", ["cpu", "triton", "cuda"], indirect=True)
def test_rows(backend):
    x, residual, weight = torch.randn(2, 2, 17, 100), torch.randn(2, 2, 17, 100), torch.randn(100)
    for dim in range(2):
        assert_same(lambda t, m: softmax_dropout(t, 0.3, m, seed=SEED), (x, residual), (dim, dim))
        assert_same(lambda t: dropout(t, 0.3, seed=SEED), (x,), (dim,))
    rows = x[0, 0], residual[0, 0]
    assert_same(lambda t, w: layer_norm(t, (100,), w), (rows[0], weight), (0, None))
    assert_same(lambda t, r, w: dropout_add_layer_norm(t, r, w, None, 0.3, seed=SEED), (*rows, weight), (0, 0, None))


@pytest.mark.parametrize("queries", [1, 9])
def test_a_window_beyond_2_31_keys(queries):
    """A window beyond 2**31 keys sees the right number of keys, which the sum of exponentials shows. All keys are one
    row, so any mean of them is that row."""
    key = torch.randn(8).expand(1, 1, 2**31 + 2**20, 8)
    query = torch.randn(1, 1, queries, 8)
    out, lse = scaled_dot_product_attention(
        query, key, key, window_size=(3, -1), causal_variant="lower_right", return_lse=True
    )
    # Up to queries + 3 weights are 1. Their sum takes as many roundings, its reciprocal and the product one each.
    torch.testing.assert_close(out, key[:, :, :queries], rtol=(queries + 5) * 2.0**-24, atol=0)
    products = query.double() * key[0, 0, 0].double() / math.sqrt(8)
    seen = 4 + torch.arange(queries - 1, -1, -1)  # from the third before the diagonal to the last key
    wanted = products.sum(-1) + seen.log()
    # A score takes eight sums, the scale and its product. A logarithm and a sum follow.
    bound = 2.0**-24 * (10 * products.abs().sum(-1) + 2 * seen.log() + wanted.abs())
    assert ((lse.double() - wanted).abs() <= bound).all()


def test_more_than_2_31_keys_and_values():
    """One query over 2**25 + 1 keys of 64 elements gets the last key's known share of its value. All other keys are
    zero."""
    keys, score = 2**25 + 1, 20.0
    query = torch.ones(1, 1, 1, 64, dtype=torch.bfloat16)
    key, value = (sparse(keys * 64, torch.bfloat16).view(1, 1, keys, 64) for _ in range(2))
    key[..., -1, :] = score / 8
    value[..., -1, :] = torch.arange(64)
    out, lse = scaled_dot_product_attention(query, key, value, return_lse=True)
    share = math.exp(score) / (math.exp(score) + keys - 1)
    # The probability and the result are rounded to bfloat16, each by 2**-9.
    torch.testing.assert_close(out.flatten().float(), share * torch.arange(64.0), rtol=2**-8, atol=0)
    torch.testing.assert_close(lse.flatten(), torch.tensor([math.log(math.exp(score) + keys - 1)]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("isa", machine_isas())
@pytest.mark.parametrize("queries", [1, 9], ids=["few queries", "a panel"])
@pytest.mark.parametrize("equal", [True, False], ids=["equal terms", "random terms"])
def test_attention_sums_a_million_keys(isa, queries, equal):
    """Errors do not grow with the number of terms, not even if all terms round alike."""
    keys, eps = 2**20, torch.finfo(torch.float32).eps
    query = torch.randn(1, 1, queries, 4, requires_grad=True)
    key, value = torch.randn(1, 1, keys, 4), torch.rand(1, 1, keys, 2) + 0.1
    if equal:
        key, value = torch.full_like(key, 0.3), torch.full_like(value, 0.7)
    with instruction_set(isa):
        out, lse = scaled_dot_product_attention(query, key, value, return_lse=True)
        (grad,) = torch.autograd.grad(out[..., 0].sum(), query)

    q, k, v = (t.detach().double() for t in (query, key, value))
    scores = q @ k.mT / 2
    p = scores.softmax(-1)
    grad_probability, delta = v[..., :1].mT, p @ v[..., :1]
    # The 32 blocks of a stretch lose at most half an eps each, 16 in all. The sum of the stretches may lose as much
    # again. One chain over all blocks loses thousands if they round alike. An LSE of 14 has a unit in the last place of
    # 8 eps.
    torch.testing.assert_close(out.double(), p @ v, rtol=32 * eps, atol=0)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=32 * eps)
    error = (grad - p * (grad_probability - delta) @ k / 2).abs()
    assert (error <= 32 * eps * (p * (grad_probability + delta) @ k.abs() / 2)).all()


@pytest.mark.parametrize("isa", machine_isas())
@pytest.mark.parametrize("equal", [True, False], ids=["equal terms", "random terms"])
def test_rows_of_a_million_columns(isa, equal):
    """Errors do not grow with the number of terms, not even if all terms round alike."""
    columns, eps = 2**20 + 5, torch.finfo(torch.float32).eps
    x, grad = torch.randn(1, columns), torch.rand(1, columns) + 0.1
    if equal:  # all except one: equally far from LayerNorm's mean, two distances from softmax's maximum
        x, grad = (torch.arange(columns) % 2 * 0.7)[None], torch.full_like(x, 0.3)
        x[0, 0] = 0.9
    results = {}
    for name, function in (("softmax", softmax_dropout), ("layer_norm", lambda t: layer_norm(t, (columns,)))):
        leaf = x.clone().requires_grad_()
        with instruction_set(isa):
            out = function(leaf)
            results[name] = out.detach(), *torch.autograd.grad(out, leaf, grad)

    # The sums are of one sign, so their errors show in full: 16 eps of the terms' sizes, the exponentials' errors
    # included.
    x, grad = x.double(), grad.double()
    p = x.softmax(-1)
    delta = (p * grad).sum()
    out, grad_x = results["softmax"]
    torch.testing.assert_close(out.double(), p, rtol=16 * eps, atol=0)
    assert ((grad_x - p * (grad - delta)).abs() <= 16 * eps * p * (grad + delta)).all()

    rstd = (x.var(correction=0) + 1e-5).rsqrt()
    y = (x - x.mean()) * rstd
    out, grad_x = results["layer_norm"]
    torch.testing.assert_close(out.double(), y, rtol=4 * eps, atol=4 * eps)
    terms = grad + grad.mean() + y.abs() * (grad * y.abs()).mean()
    assert ((grad_x - (grad - grad.mean() - y * (grad * y).mean()) * rstd).abs() <= 16 * eps * terms * rstd).all()


@pytest.mark.parametrize("isa", machine_isas())
def test_gradients_of_keys_sum_a_million_queries(isa):
    """Gradients of keys and values stay accurate for a million queries, whose terms are equal and round alike."""
    queries, eps = 2**20, torch.finfo(torch.float32).eps
    query, grad_out = torch.full((1, 1, queries, 4), 0.3), torch.full((1, 1, queries, 2), 0.7)
    key, value = torch.randn(1, 1, 3, 4, requires_grad=True), torch.randn(1, 1, 3, 2, requires_grad=True)
    with instruction_set(isa):
        out = scaled_dot_product_attention(query, key, value)
        grad_key, grad_value = torch.autograd.grad(out, (key, value), grad_out)

    q, k, v, g = (t.detach()[0, 0].double() for t in (query[:, :, :1], key, value, grad_out[:, :, :1]))
    p = (q @ k.T / 2).softmax(-1)
    dp = g @ v.T
    ds = p * (dp - (p * dp).sum())
    torch.testing.assert_close(grad_value[0, 0].double(), queries * p.T @ g, rtol=64 * eps, atol=0)
    terms = queries * (p * (dp.abs() + (p * dp).sum().abs())).T @ q.abs() / 2
    assert ((grad_key[0, 0] - queries * ds.T @ q / 2).abs() <= 64 * eps * terms).all()


def test_a_mask_of_more_than_2_31_elements():
    rows, columns = 2**16 + 3, 2**15
    kept = dropout_mask((rows, columns), 0.3, SEED)
    last = np.arange(rows - 20, rows)[:, None]
    wanted = dropout_values(0, last, np.arange(columns), SEED) >= threshold(0.3)
    assert torch.equal(kept[-20:], torch.from_numpy(wanted))
