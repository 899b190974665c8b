"""The launcher of Triton's kernels (csrc/launch)."""

# ruff: noqa: E402 (where Triton is not installed, nothing here can be imported)

import pytest
import torch
from conftest import DEVICE, require

require("triton", allow_module_level=True)
if DEVICE != "cpu":
    pytest.skip("for Triton's interpreter", allow_module_level=True)

from launcher import interpreted

import fastattn
from fastattn import (
    dropout,
    dropout_add_layer_norm,
    layer_norm,
    scaled_dot_product_attention,
    softmax_dropout,
    varlen_attn,
)
from fastattn.backends import native
from fastattn.ops import register

pytestmark = pytest.mark.skipif(native.library("triton") is None, reason=f"no launcher: {native.reason('triton')}")
SEED = torch.tensor([3, 5])


OFFSETS = torch.tensor([0, 4, 4, 9])
# Calls, and the shapes of their operands. The first three have the test's dtype.
CALLS = {
    "attention": (lambda q, k, v: scaled_dot_product_attention(q, k, v), [(2, 3, 40, 16)] * 3),
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
        [(2, 20, 3, 16)] * 3,
    ),
    "lengths": (
        lambda q, k, v: scaled_dot_product_attention(q, k, v, key_lengths=torch.tensor([7, 0])), [(2, 2, 20, 16)] * 3,
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_the_same_bits(name, dtype, monkeypatch):
    """A plain call started by the launcher gives the bits of the backend in Python, and so do its gradients."""
    call, shapes = CALLS[name]
    operands = [
        torch.randn(shape).to(torch.float32 if n > 2 else dtype).requires_grad_() for n, shape in enumerate(shapes)
    ]
    weight = None

    def outcome():
        nonlocal weight
        with torch.no_grad():
            found = [call(*operands)]
        found.append(call(*operands))
        weight = torch.randn(found[1].shape).to(found[1].dtype) if weight is None else weight
        return found + list(torch.autograd.grad(found[1], operands, weight, materialize_grads=True))

    with fastattn.backend("triton"):
        wanted = outcome()

    def no_choice(*args):
        raise AssertionError("this call left the fast path")

    monkeypatch.setattr(register, "choose", no_choice)
    monkeypatch.setattr(register.Op, "on", no_choice)
    with interpreted() as started:
        got = outcome()
    assert started
    for ours, theirs in zip(got, wanted, strict=True):
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
        assert ours.stride() == theirs.stride()
