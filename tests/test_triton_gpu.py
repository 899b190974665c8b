"""Tests that need a GPU: streams, CUDA graphs, calls that do not wait for the device."""

import functools

import pytest
import torch
from conftest import DEVICE, require

import fastattn

if DEVICE == "cpu":
    pytest.skip("needs a GPU", allow_module_level=True)
require("triton", allow_module_level=True)

LENGTHS = torch.tensor([40, 17])
STARTS = torch.tensor([0, 30, 80])


def operands():
    return [torch.randn(2, 4, 40, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]


def packed():
    return [torch.randn(80, 4, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]


def rows():
    return [torch.randn(2, 40, 512, dtype=torch.bfloat16).requires_grad_()]


attention = functools.partial(fastattn.scaled_dot_product_attention, dropout_p=0.5, is_causal=True)
CALLS = {
    "attention": (operands, attention),
    "key lengths": (operands, functools.partial(attention, key_lengths=LENGTHS)),
    "mask": (operands, functools.partial(attention, attn_mask=torch.randn(40))),
    "packed": (
        packed,
        lambda *t: fastattn.varlen_attn(*t, STARTS, STARTS, 50, 50, dropout_p=0.5),
    ),
    "dropout": (rows, functools.partial(fastattn.dropout, p=0.5)),
    "softmax_dropout": (rows, functools.partial(fastattn.softmax_dropout, dropout_p=0.5)),
    "layer_norm": (rows, lambda x: fastattn.layer_norm(x, (512,))),
    "dropout_add_layer_norm": (rows, lambda x: fastattn.dropout_add_layer_norm(x, x.detach(), dropout_p=0.5)),
}


def passes(tensors, call):
    """Return the output and the gradients of its sum."""
    out = call(*tensors)
    return [out.detach(), *torch.autograd.grad(out.sum(), tensors)]


@pytest.mark.parametrize("name", CALLS)
def test_nothing_waits_for_the_device(name):
    make, call = CALLS[name]
    tensors = make()
    passes(tensors, call)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        passes(tensors, call)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", CALLS)
def test_graphs_replay_with_fresh_masks(name):
    """Each replay of a captured call drops other elements, as the generator says."""
    make, call = CALLS[name]
    tensors = make()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        passes(tensors, call)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = passes(tensors, call)

    def replay(seed=None):
        if seed is not None:
            torch.manual_seed(seed)
        graph.replay()
        return [result.clone() for result in results]

    first, second, again = replay(3), replay(), replay(3)
    assert all(map(torch.equal, first, again))
    assert all(map(torch.equal, first, second)) == (name == "layer_norm")


@pytest.mark.parametrize("name", CALLS)
def test_kernels_run_on_the_current_stream(name):
    """Kernels wait for operands that their stream delivers late."""
    make, call = CALLS[name]
    tensors = make()
    torch.manual_seed(1)
    wanted = call(*tensors)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.no_grad():
        late = [torch.full_like(tensor, torch.nan) for tensor in tensors]
        torch.cuda._sleep(10**8)
        for target, source in zip(late, tensors, strict=True):
            target.copy_(source)
        torch.manual_seed(1)
        got = call(*late)
    side.synchronize()
    assert torch.equal(got, wanted)
