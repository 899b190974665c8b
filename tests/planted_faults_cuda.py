"""Compare one operation of an emulated CUDA library with the reference, several times, in different orders of threads.

Arguments: LIBRARY OPERATION. This is a program of its own, because a process can hold only one such library. It ends
with an error if the results differ or the emulation finds a fault.
"""

import sys

import torch

from emulation import load
from fastattn.backends import reference
from fastattn.backends.schema import (
    AttentionArgs,
    DropoutAddLayerNormArgs,
    DropoutAddLayerNormBackwardArgs,
    DropoutArgs,
    SoftmaxDropoutArgs,
    SoftmaxDropoutBackwardArgs,
)

SEED, THRESHOLD = torch.tensor([4, 5]), 20000


def dropout(functions):
    input = torch.randn(3, 36, 41)  # a multiple of 16 bytes in all
    return [(f["dropout"](DropoutArgs(input, SEED, THRESHOLD)),) for f in (functions, reference.FUNCTIONS)]


def layer_norm(functions):
    """Run dropout_add_layer_norm and its backward pass on rows of a warp (41 columns) and of a block (600, a multiple
    of 8)."""
    results = [], []
    for columns in (41, 600):
        input, residual, grad = torch.randn(3, 10, columns)
        weight, bias = torch.randn(2, columns)
        for f, result in zip((functions, reference.FUNCTIONS), results, strict=True):
            args = DropoutAddLayerNormArgs(input, residual, weight, bias, SEED, THRESHOLD, 1e-5, True, torch.float32)
            out, total, mean, rstd = f["dropout_add_layer_norm"](args)
            backward = DropoutAddLayerNormBackwardArgs(
                grad, None, total, mean, rstd, weight, SEED, THRESHOLD, *[torch.float32] * 3
            )
            grads = f["dropout_add_layer_norm_backward"](backward)
            result.extend([out, total, mean, rstd, *grads])
    return results


def softmax_dropout(functions):
    results = [], []
    for columns in (44, 600):
        input, grad = torch.randn(2, 1, 2, 10, columns)
        mask = torch.rand(1, 1, 10, columns) > 0.3
        args = SoftmaxDropoutArgs(input, mask, None, SEED, 0.5, columns, 0, True, THRESHOLD)
        for f, result in zip((functions, reference.FUNCTIONS), results, strict=True):
            out, stats = f["softmax_dropout"](args)
            result.extend([out, *f["softmax_dropout_backward"](SoftmaxDropoutBackwardArgs(grad, stats, args, False))])
    return results


def attention(functions):
    """Run attention with split keys, some of which hold NaN, in float32 and float16, on aligned and unaligned rows."""
    results = [], []
    lengths = torch.tensor([300, 37])
    for dtype, size in ((torch.float32, 20), (torch.float16, 40), (torch.float16, 13)):
        query, key, value = (torch.randn(2, h, n, size).to(dtype) for h, n in ((4, 3), (2, 300), (2, 300)))
        for tensor in (key, value):
            tensor[1, :, 37:] = torch.nan
        mask = torch.rand(1, 1, 1, 300) < 0.7
        for rest in ((None, lengths, None, 0.3, 3, 300, False, 0), (mask, lengths, None, 0.3, 250, 0, True, 0)):
            for f, result in zip((functions, reference.FUNCTIONS), results, strict=True):
                result.extend(f["attention"](AttentionArgs(query, key, value, *rest))[:2])
    return results


def main():
    path, operation = sys.argv[1:]
    functions, controls = load(path)
    torch.set_num_threads(1)
    for order in range(3):
        torch.manual_seed(order)
        controls.seed_order(order)
        controls.guard_operands(1)
        ours, wanted = globals()[operation](functions)
        for a, e in zip(ours, wanted, strict=True):
            # Float32 sums in another order differ by some 1e-6; a fault changes whole elements.
            torch.testing.assert_close(a, e, rtol=1e-3, atol=1e-3)
        damage = controls.guard_operands(0).decode()
        assert not damage, damage


if __name__ == "__main__":
    main()
