"""Time small calls that want a gradient, on the CPU: ``python benchmarks/small_calls.py``.

Each call is timed forward and backward beside torch's own call and beside a bare ``autograd.Function`` around torch's
own kernels, which is the least that such a call costs from Python. All take turns in one process; a time is the least
of many samples. It prints the table of docs/performance.md: per operation the most microseconds beyond torch's call,
and the lowest and the mean speed relative to torch and to the bare function. The exit status is 1 if a call takes 30 us
more than torch's, or has less than 0.9 of the bare function's speed.
"""

import argparse
import itertools
import statistics
import sys
import time

import torch
from torch.nn import functional as F

import fastattn

ops = torch.ops.aten
DTYPES = torch.float32, torch.bfloat16
P = 0.1
MOST, LEAST = 30, 0.9  # us beyond torch's call, and speed relative to the bare function


def bare(forward, backward):
    """Return the ``apply`` of a function of autograd. ``forward`` returns the result and what ``backward`` reads."""

    class Bare(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            out, saved = forward(*inputs)
            ctx.save_for_backward(*saved)
            return out

        @staticmethod
        def backward(ctx, grad):
            return backward(grad, *ctx.saved_tensors)

    return Bare.apply


def layer_norm_forward(x, w, b):
    out, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], w, b, 1e-5)
    return out, (x, w, b, mean, rstd)


def layer_norm_backward(grad, x, w, b, mean, rstd):
    return ops.native_layer_norm_backward(grad, x, x.shape[-1:], mean, rstd, w, b, [True] * 3)


def dropout_forward(x):
    out, kept = torch.native_dropout(x, P, True)
    return out, (kept,)


def dropout_backward(grad, kept):
    return ops.native_dropout_backward(grad, kept, 1 / (1 - P))


def add_forward(x, residual, w, b):
    dropped, kept = torch.native_dropout(x, P, True)
    out, saved = layer_norm_forward(dropped + residual, w, b)
    return out, (kept, *saved)


def add_backward(grad, kept, *saved):
    total, *parameters = layer_norm_backward(grad, *saved)
    return dropout_backward(total, kept), total, *parameters


def softmax_forward(x):
    weights = torch._softmax(x, -1, False)
    out, kept = torch.native_dropout(weights, P, True)
    return out, (weights, kept)


def softmax_backward(grad, weights, kept):
    return ops._softmax_backward_data(dropout_backward(grad, kept), weights, -1, weights.dtype)


def attention(causal):
    def forward(q, k, v):
        out, lse = ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return out, (q, k, v, out, lse)

    def backward(grad, *saved):
        return ops._scaled_dot_product_flash_attention_for_cpu_backward(grad, *saved, 0.0, causal)

    return bare(forward, backward)


def dropped_forward(q, k, v):
    q = q * q.shape[-1] ** -0.5
    out, (weights, kept) = softmax_forward(q @ k.mT)
    return out @ v, (q, k, v, weights, kept, out)


def dropped_backward(grad, q, k, v, weights, kept, dropped):
    scores = softmax_backward(grad @ v.mT, weights, kept)
    return scores @ k * q.shape[-1] ** -0.5, scores.mT @ q, dropped.mT @ grad


def cases():
    """Yield (name, ours, torch's, the bare function, shapes) of each call."""
    for shape, causal in itertools.product(
        ((1, 1, 1, 16), (1, 2, 8, 32), (2, 4, 16, 32), (1, 8, 32, 64)), (False, True)
    ):
        call = {"is_causal": causal}
        yield (
            f"attention {shape}{', causal' * causal}",
            lambda q, k, v, call=call: fastattn.scaled_dot_product_attention(q, k, v, **call),
            lambda q, k, v, call=call: F.scaled_dot_product_attention(q, k, v, **call),
            attention(causal),
            [shape] * 3,
        )
    for shape in ((1, 1, 1, 16), (1, 2, 8, 32), (2, 4, 16, 32)):
        yield (
            f"attention {shape}, dropout",
            lambda q, k, v: fastattn.scaled_dot_product_attention(q, k, v, dropout_p=P),
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=P),
            bare(dropped_forward, dropped_backward),
            [shape] * 3,
        )
    for shape in ((1, 64), (4, 64), (16, 256), (64, 512)):
        yield (
            f"layer_norm {shape}",
            lambda x, w, b: fastattn.layer_norm(x, x.shape[-1:], w, b),
            lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b),
            bare(layer_norm_forward, layer_norm_backward),
            [shape, shape[-1:], shape[-1:]],
        )
    for shape in ((4, 64), (16, 256)):
        yield (
            f"dropout {shape}",
            lambda x: fastattn.dropout(x, P),
            lambda x: F.dropout(x, P),
            bare(dropout_forward, dropout_backward),
            [shape],
        )
        yield (
            f"dropout_add_layer_norm {shape}",
            lambda x, r, w, b: fastattn.dropout_add_layer_norm(x, r, w, b, P),
            lambda x, r, w, b: F.layer_norm(F.dropout(x, P) + r, x.shape[-1:], w, b),
            bare(add_forward, add_backward),
            [shape, shape, shape[-1:], shape[-1:]],
        )
        yield (
            f"softmax_dropout {shape}",
            lambda x: fastattn.softmax_dropout(x, P),
            lambda x: F.dropout(F.softmax(x, -1), P),
            bare(softmax_forward, softmax_backward),
            [(1, 1, *shape)],
        )


def both_passes(call, tensors, grad):
    return lambda: torch.autograd.grad(call(*tensors), tensors, grad)


def measure(dtype, samples, repeats):
    """Return the least times of ours, torch's and the bare function by the case's name, in microseconds."""
    calls = {}
    for name, *functions, shapes in cases():
        tensors = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
        grad = torch.randn(functions[0](*tensors).shape).to(dtype)
        calls[name] = [both_passes(call, tensors, grad) for call in functions]
    least = {name: [float("inf")] * 3 for name in calls}
    for _ in range(samples):
        for name, functions in calls.items():
            for i, call in enumerate(functions):
                call()
                begin = time.perf_counter()
                for _ in range(repeats):
                    call()
                least[name][i] = min(least[name][i], 1e6 * (time.perf_counter() - begin) / repeats)
    return least


def speeds(times, number):
    """Return the lowest and the mean speed relative to torch's call (1) or to the bare function (2), as text."""
    found = [least[number] / least[0] for least in times]
    return f"{min(found):.2f}, {statistics.geometric_mean(found):.2f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=20, help="calls of each sample")
    options = parser.parse_args()
    by_operation = {}
    for dtype in DTYPES:
        for name, times in measure(dtype, options.samples, options.repeats).items():
            by_operation.setdefault(name.partition(" (")[0], {})[f"{dtype} {name}"] = times
    print("| operation | calls | beyond torch | of torch's speed: lowest, mean | of the bare function's |")
    print("| --- | --- | --- | --- | --- |")
    everything = {name: times for calls in by_operation.values() for name, times in calls.items()}
    for operation, calls in {**by_operation, "all": everything}.items():
        most = max(ours - torchs for ours, torchs, _ in calls.values())
        of_torch, of_bare = (speeds(calls.values(), number) for number in (1, 2))
        print(f"| {operation} | {len(calls)} | {most:.0f} us | {of_torch} | {of_bare} |")
    slow = [name for name, (ours, torchs, least) in everything.items() if ours - torchs > MOST or least / ours < LEAST]
    sys.exit("\n".join(["", "Too slow:", *slow]) if slow else 0)


if __name__ == "__main__":
    main()
