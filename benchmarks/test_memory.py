"""Attention needs memory proportional to the length: no (N, N) buffer forward or backward."""

import subprocess
import sys

import pytest

from fastattn.backends import native

LENGTH, HEAD_SIZE = 16384, 64
STEP = f"""
import resource, torch, fastattn
def step(length):
    q, k, v = (torch.randn(1, 1, length, {HEAD_SIZE}, dtype=torch.DTYPE, requires_grad=True) for _ in range(3))
    fastattn.scaled_dot_product_attention(q, k, v, dropout_p=DROPOUT).sum().backward()
step(512)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
step({LENGTH})
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(native.library("cpu") is None, reason=f"no compiled library: {native.reason('cpu')}")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dropout", ["0.0", "0.1"])
def test_memory_is_linear_in_length(dtype, dropout):
    code = STEP.replace("DTYPE", dtype).replace("DROPOUT", dropout)
    grown = 1024 * int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    # q, k, v, out, grad_out and three gradients are 8 tensors of this size; packing and float32 sums may hold as many
    # again twice: 96 MB. One (N, N) buffer is 512 MB in bfloat16.
    tensor = 4 * LENGTH * HEAD_SIZE
    assert grown < 24 * tensor, f"{grown / tensor:.1f} tensors of float32 (N, D), expected at most 24"
