"""The fast path of the `cuda` library: plain calls on CUDA tensors, whose device code is emulated on the CPU."""

import functools

import pytest
import torch
from conftest import DEVICE, require
from oracle import both_passes

import emulation
import fastattn
from fastattn.ops import register

SEED = torch.tensor([3, 5])
PLAIN = {
    "layer_norm": (lambda x, w, b: fastattn.layer_norm(x, (40,), w, b), [(2, 5, 40), (40,), (40,)]),
    "residual": (
        lambda x, r, w: fastattn.dropout_add_layer_norm(x, r, w, None, 0.3, seed=SEED),
        [(2, 9, 40), (2, 9, 40), (40,)],
    ),
    "softmax_dropout": (
        lambda x, m: fastattn.softmax_dropout(x, 0.3, m, is_causal=True, seed=SEED), [(2, 3, 9, 33), (1, 3, 1, 33)],
    ),
    "dropout": (lambda x: fastattn.dropout(x.transpose(0, 1), 0.3, seed=SEED), [(9, 3, 33)]),
}  # fmt: skip


def no_choice(*args):
    raise AssertionError("this call left the fast path")


@pytest.mark.slow
@pytest.mark.skipif(DEVICE != "cpu", reason="for the emulation")
@pytest.mark.parametrize("name", PLAIN)
def test_the_fast_path(name, monkeypatch):
    """A plain call is one call of the library per direction, with the bits of the usual path."""
    require("cuda")
    call, shapes = PLAIN[name]
    operands = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
    with emulation.strict():
        with fastattn.backend("cuda"):
            wanted = both_passes(call, operands)
        monkeypatch.setattr(register, "choose", no_choice)
        monkeypatch.setattr(register.Op, "on", no_choice)
        with emulation.fast_paths("cuda"):
            assert all(map(torch.equal, both_passes(call, operands), wanted))


@pytest.mark.slow
@pytest.mark.skipif(DEVICE != "cpu", reason="for the emulation")
def test_the_fast_path_of_attention(monkeypatch):
    """It serves decoding without lengths. For other calls the library returns nothing, and draws no seed. Among them
    are those that only the kernel for Hopper would take."""
    require("cuda")
    query, key = torch.randn(1, 4, 2, 16).bfloat16(), torch.randn(1, 2, 70, 16).bfloat16()
    attend = functools.partial(fastattn.scaled_dot_product_attention, query, key, key, enable_gqa=True)
    with emulation.strict():
        with fastattn.backend("cuda"):
            wanted = attend(is_causal=True, scale=0.3)
        asked = []
        monkeypatch.setattr(register, "choose", lambda op, args: asked.append(op) or "reference")
        with emulation.fast_paths("cuda"):
            assert torch.equal(attend(is_causal=True, scale=0.3), wanted)
            assert asked == []
            torch.manual_seed(3)
            attend(key_lengths=torch.tensor([5]))
            dropped = attend(dropout_p=0.5)
            assert asked == ["attention"] * 2
            many, offsets = query.repeat(1, 1, 20, 1), torch.tensor([0, 2])
            fastattn.scaled_dot_product_attention(many, key, key, enable_gqa=True)
            fastattn.varlen_attn(*[key[0].transpose(0, 1)[:2]] * 3, offsets, offsets, 2, 2)
            assert asked[2:] == ["attention", "varlen_attention"]
    torch.manual_seed(3)
    with fastattn.backend("reference"):
        assert torch.equal(attend(dropout_p=0.5), dropped)
