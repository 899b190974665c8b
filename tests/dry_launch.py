"""The public functions on fake CUDA tensors, forward and backward, down to a driver that launches nothing.

A program of its own, since Triton must not interpret here: prints, as JSON, the kernels that each call started with
their grids, and how many were compiled for many lengths. Reading a value back from the device would raise.
"""

import ctypes
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.driver import driver

import fastattn
from fastattn.backends import TABLE
from fastattn.backends.triton import aot

HALF = torch.bfloat16


class Dry(FakeTensorMode):
    """Fake tensors, but an operation of fastattn runs its backend's function, as on a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "fastattn":
            return super().__torch_dispatch__(func, types, args, kwargs)
        with self:
            return getattr(TABLE[args[-1]], func._schema.name.removeprefix("fastattn::"))(*args[:-1])


def guard_nothing():
    """Load device_guard.cpp, where torch has no CUDA of its own."""
    if torch.version.cuda is not None:
        return
    root, source = Path(torch.__file__).parent, Path(__file__).parent / "device_guard.cpp"
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/device_guard.so"
        options = ["-std=c++20", "-shared", "-fPIC", f"-I{root}/include", f"-L{root}/lib", "-lc10"]
        subprocess.run(["g++", source, "-o", library, *options], check=True)
        ctypes.CDLL(library)


def backward(out):
    """The backward pass of the operation that made ``out``, whose node is called by hand: autograd's engine would ask
    for a device. Each output that may have a gradient has one."""
    nodes = [out.grad_fn]
    for node in nodes:
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            grads = [torch.empty(m.shape, dtype=m.dtype, device="cuda:0") for m in node._input_metadata]
            return node.apply(*grads)
        nodes += [following for following, _ in node.next_functions if following is not None]
    raise AssertionError("no operation of fastattn in the graph")


def empty(*shape, dtype=HALF, requires_grad=True):
    return torch.empty(shape, dtype=dtype, device="cuda:0", requires_grad=requires_grad and dtype.is_floating_point)


def layer_norm(length):
    x = empty(3, length, 512)
    return fastattn.layer_norm(x, (512,), empty(512, dtype=torch.float32), empty(512, dtype=torch.float32))


def dropout_add_layer_norm(length):
    with torch.autocast("cuda", HALF):
        residual, weight = empty(3, length, 512, dtype=torch.float32), empty(512, dtype=torch.float32)
        out, total = fastattn.dropout_add_layer_norm(empty(3, length, 512), residual, weight, weight, 0.1, prenorm=True)
        assert total.dtype == torch.float32
    return out + total


def softmax_dropout(length):
    scores = empty(3, 2, length, length)
    mask = empty(3, 1, 1, length, dtype=torch.float32)
    return fastattn.softmax_dropout(scores, 0.1, mask, is_causal=True)


def dropout(length):
    return fastattn.dropout(empty(3, length, 512).transpose(0, 1), 0.1)


def attention(length):
    query = empty(3, length, 8, 64).transpose(1, 2)
    key = empty(3, length, 2, 64).transpose(1, 2)
    lengths = empty(3, dtype=torch.int64)
    return fastattn.scaled_dot_product_attention(
        query, key, key, is_causal=True, key_lengths=lengths, dropout_p=0.1, enable_gqa=True
    )


CALLS = [layer_norm, dropout_add_layer_norm, softmax_dropout, dropout]
if hasattr(TABLE["triton"], "attention"):
    CALLS.append(attention)


def main(lengths):
    guard_nothing()
    fake = aot.pretend(90)
    driver.set_active(fake)
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda *args, **options: True
    started = {}
    with Dry():
        for call in CALLS:
            fake.grids.clear()
            for length in lengths:
                backward(call(length))
            started[call.__name__] = {name: list(grids) for name, grids in fake.grids.items()}
    print(json.dumps({"started": started, "specialisations": len(list(aot.specialisations(90)))}))


if __name__ == "__main__":
    main([int(length) for length in sys.argv[1:]])
