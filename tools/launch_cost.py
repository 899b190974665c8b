"""Time the host's part of plain calls on CUDA tensors, on a machine without a GPU: ``python tools/launch_cost.py``.

Operands are on the CPU, and kernels pass through csrc/launch to a driver that starts nothing. So the times cover
checks, allocations, autograd and the launcher. They do not cover the driver's launch, and they have the CPU's allocator
instead of CUDA's. The backend functions in Python, which serve other calls, are timed too.

Forward passes are compared with ``F.layer_norm`` of one element, both passes with an ``autograd.Function`` that does
nothing and has as many gradients. All take turns; each time is the least of many samples, in microseconds. It prints
the table of docs/gpu.md, with ratios in brackets.
"""

import argparse
import tempfile
import time

import torch
import triton
from torch.nn import functional as F

import fake_gpu
import fastattn
from fastattn.backends import triton as backend
from fastattn.ops import register

HALF = torch.bfloat16


def operands(*shapes):
    return [torch.randn(shape).to(HALF).requires_grad_() for shape in shapes]


SEED = torch.tensor([3, 5])  # of a call in a model, which draws the seeds of all its calls at once
OFFSETS = torch.tensor([0, 32, 64])
PADDING = torch.arange(32).view(1, 1, 1, 32) < torch.tensor([32, 20]).view(2, 1, 1, 1)
CALLS = {
    "dropout": (lambda x: fastattn.dropout(x, 0.1), [(4, 512)]),
    "layer_norm": (lambda x, w, b: fastattn.layer_norm(x, (512,), w, b), [(4, 512), (512,), (512,)]),
    "dropout_add_layer_norm": (
        lambda x, r, w, b: fastattn.dropout_add_layer_norm(x, r, w, b, 0.1),
        [(4, 512), (4, 512), (512,), (512,)],
    ),
    "dropout_add_layer_norm, prenorm": (
        lambda x, r, w, b: fastattn.dropout_add_layer_norm(x, r, w, b, 0.1, prenorm=True)[0],
        [(4, 512), (4, 512), (512,), (512,)],
    ),
    "softmax_dropout": (lambda x: fastattn.softmax_dropout(x, 0.1), [(1, 1, 4, 512)]),
    "attention": (fastattn.scaled_dot_product_attention, [(2, 8, 32, 64)] * 3),
    "attention, causal, dropout": (
        lambda q, k, v: fastattn.scaled_dot_product_attention(q, k, v, None, 0.1, True),
        [(2, 8, 32, 64)] * 3,
    ),
    "attention, causal, dropout, seed": (
        lambda q, k, v: fastattn.scaled_dot_product_attention(q, k, v, None, 0.1, True, seed=SEED),
        [(2, 8, 32, 64)] * 3,
    ),
    "attention, padding by mask": (
        lambda q, k, v: fastattn.scaled_dot_product_attention(q, k, v, PADDING),
        [(2, 8, 32, 64)] * 3,
    ),
    "varlen_attn, dropout": (
        lambda q, k, v: fastattn.varlen_attn(q, k, v, OFFSETS, OFFSETS, 32, 32, dropout_p=0.1),
        [(64, 8, 64)] * 3,
    ),
    "varlen_attn, dropout, seed": (
        lambda q, k, v: fastattn.varlen_attn(q, k, v, OFFSETS, OFFSETS, 32, 32, dropout_p=0.1, seed=SEED),
        [(64, 8, 64)] * 3,
    ),
}


class Bare(torch.autograd.Function):
    """A node that does nothing."""

    @staticmethod
    def forward(ctx, *inputs):
        ctx.save_for_backward(*inputs)
        return inputs[0].detach()

    @staticmethod
    def backward(ctx, grad):
        return (grad,) * len(ctx.saved_tensors)


def both_passes(call, tensors, grad):
    return lambda: torch.autograd.grad(call(*tensors), tensors, grad)


def least(calls, samples, repeats):
    """Return the least time of each call, in microseconds. The calls take turns."""
    times = dict.fromkeys(calls, float("inf"))
    for _ in range(samples):
        for name, call in calls.items():
            call()
            begin = time.perf_counter()
            for _ in range(repeats):
                call()
            times[name] = min(times[name], 1e6 * (time.perf_counter() - begin) / repeats)
    return times


def measure(samples, repeats):
    """Return the cells of each call's row: forward and both passes."""
    one = torch.randn(1, 1), torch.ones(1), torch.zeros(1)
    forward = {"F.layer_norm": lambda: F.layer_norm(one[0], (1,), *one[1:])}
    both = {}
    for name, (call, shapes) in CALLS.items():
        tensors = operands(*shapes)
        plain = [tensor.detach() for tensor in tensors]
        forward[name] = lambda call=call, plain=plain: call(*plain)
        grad = torch.randn(call(*plain).shape).to(HALF)
        both[name] = both_passes(call, tensors, grad)
        grads = [torch.randn(1, requires_grad=True) for _ in tensors]
        both[f"bare, {len(tensors)}"] = both_passes(Bare.apply, grads, torch.randn(1))
    forward, both = least(forward, samples, repeats), least(both, samples, repeats)
    return {
        name: (
            f"{forward[name]:.1f} ({forward[name] / forward['F.layer_norm']:.1f})",
            f"{both[name]:.0f} ({both[name] / both[f'bare, {len(shapes)}']:.1f})",
        )
        for name, (_, shapes) in CALLS.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=30, help="calls of each sample")
    options = parser.parse_args()
    torch.set_num_threads(1)
    fake_gpu.pretend(90)
    with tempfile.TemporaryDirectory() as folder:
        backend.compiled()
        fake_gpu.load_driver(fake_gpu.build_driver(folder))
        for roads, road in register.FAST_PATHS.values():
            roads["cpu"] = road("triton")
        compiled = measure(options.samples, options.repeats)
        vars(torch.cuda).update(current_device=lambda: None)  # the index of the CPU as a device
        backend.DEVICE = "cpu"
        with fastattn.backend("triton"):
            python = measure(options.samples, options.repeats)
    print(f"torch {torch.__version__}, triton {triton.__version__}\n")
    print("| call, bfloat16 | forward, Python | launcher | both passes, Python | launcher |")
    print("| --- | --- | --- | --- | --- |")
    for name in CALLS:
        print(f"| {name} | {python[name][0]} | {compiled[name][0]} | {python[name][1]} | {compiled[name][1]} |")


if __name__ == "__main__":
    main()
