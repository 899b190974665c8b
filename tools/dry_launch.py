"""Call the public functions on fake CUDA tensors, forward and backward, down to a driver that launches nothing.

This is a program of its own, because Triton must not interpret here. Its arguments are lengths. The kernels of the
first one are compiled, except those of calls through torch's registry, which are the same with other flags. It prints
as JSON:
the kernels that each call started;
the faults that the ahead-of-time checks find in the compiled kernels;
the number of kernels for the first length, and for all;
how often Triton's own path to a compiled kernel was taken;
the devices and streams on which kernels start.
It raises if the host would wait for a value, because CUDA graphs could not capture such a call.
"""

import ctypes
import json
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.compiler import CompiledKernel

import aot_gate
import fake_gpu
import fastattn
from fastattn.backends import TABLE
from fastattn.backends.schema import RECORDS, unflatten
from fastattn.integrations import registry

HALF, FLOAT, LONG = torch.bfloat16, torch.float32, torch.int64
COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}


class Dry(FakeTensorMode):
    """Fake tensors on which an operation of fastattn runs its backend's function, as on a device.

    Reading a value from the device raises, as does a copy between host and device.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("fastattn::")
        if name in RECORDS:
            with self:
                return TABLE[args[-1]].FUNCTIONS[name](unflatten(RECORDS[name], args[:-1]))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func in COPIES and len({t.device for t in (out, *args) if isinstance(t, torch.Tensor)}) > 1:
            raise RuntimeError(f"a copy between devices: {func}")
        return out


class Uncompiled(CompiledKernel):
    """A kernel that passes through the launcher, but has no code."""

    def __init__(self, source, target, options):
        self.src, self.name, self.hash, self.kernel, self.packed_metadata = source, source.name, "", b"", ()
        self.metadata_group, self.module, self.function, self._run = {}, None, None, None
        self.metadata = SimpleNamespace(**options | {"name": source.name, "target": target, "shared": 0})


def compile_no_more():
    """Let Triton start new kernels without compiling them."""
    # Triton's functions take the compiler from this module at their first call on each device.
    triton.compiler.compile = Uncompiled
    for function, _ in aot_gate.specialisations(0):
        function.compile = Uncompiled


def guard_nothing():
    """Compile and load device_guard.cpp if torch is built without CUDA."""
    if torch.version.cuda is not None:
        return
    root, source = Path(torch.__file__).parent, Path(__file__).parent / "device_guard.cpp"
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/device_guard.so"
        options = ["-std=c++20", "-shared", "-fPIC", f"-I{root}/include", f"-L{root}/lib", "-lc10"]
        subprocess.run(["g++", source, "-o", library, *options], check=True)
        ctypes.CDLL(library)


def backward(out):
    """Run the backward pass of the operation that made ``out``, with a gradient for each output that can have one.

    It calls the operation's node directly, because autograd's engine requires a device.
    """
    nodes = [out.grad_fn]
    for node in nodes:
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            grads = [torch.empty(m.shape, dtype=m.dtype, device=m.device) for m in node._input_metadata]
            return node.apply(*grads)
        nodes += [following for following, _ in node.next_functions if following is not None]
    raise AssertionError("no operation of fastattn in the graph")


def empty(*shape, dtype=HALF, device="cuda:0"):
    return torch.empty(shape, dtype=dtype, device=device, requires_grad=dtype.is_floating_point)


# Calls by length


def layer_norm(length, dtype=HALF, device="cuda:0"):
    x, weight = empty(3, length, 512, dtype=dtype, device=device), empty(512, dtype=FLOAT, device=device)
    return fastattn.layer_norm(x, (512,), weight, weight)


def dropout_add_layer_norm(length):
    with torch.autocast("cuda", HALF):
        residual, weight = empty(3, length, 512, dtype=FLOAT), empty(512, dtype=FLOAT)
        out, total = fastattn.dropout_add_layer_norm(empty(3, length, 512), residual, weight, weight, 0.1, prenorm=True)
        assert total.dtype == FLOAT
    return out + total


def softmax_dropout(length):
    scores, mask = empty(3, 2, length, length), empty(3, 1, 1, length, dtype=FLOAT)
    return fastattn.softmax_dropout(scores, 0.1, mask, is_causal=True)


def dropout(length):
    return fastattn.dropout(empty(3, length, 512).transpose(0, 1), 0.1)


def dropout_mask(length):
    return fastattn.dropout_mask((3, length, 512), 0.1, empty(2, dtype=LONG))


def attention(length):
    query, key = (empty(3, length, heads, 64).transpose(1, 2) for heads in (8, 2))
    return fastattn.scaled_dot_product_attention(
        query, key, key, is_causal=True, key_lengths=empty(3, dtype=LONG), dropout_p=0.1, enable_gqa=True
    )


def long_attention(length, device="cuda:0"):
    """Call with enough rows that tiles are read through tensor descriptors, on a GPU that has them."""
    query, key = (empty(3, 2048 + n, 4, 64, device=device).transpose(1, 2) for n in (length, 2 * length))
    return fastattn.scaled_dot_product_attention(query, key, key, dropout_p=0.1)


def masked_attention(length):
    query, mask = empty(3, 2, length, 64), empty(2, length, 1, dtype=FLOAT)
    return fastattn.scaled_dot_product_attention(query, query, query, mask)


def decoding(length):
    """Call with few queries and a long cache, whose keys are split."""
    query, cache = torch.empty(1, 2, 1, 64, device="cuda:0"), torch.empty(1, 2, 4096 + length, 64, device="cuda:0")
    return fastattn.scaled_dot_product_attention(query, cache, cache, key_lengths=empty(1, dtype=LONG))


def attention_weights(length):
    query = empty(3, 2, length, 64)
    mask = empty(3, 1, 1, length, dtype=torch.bool)
    return fastattn.attention_weights(query, query, mask, 0.1, key_lengths=empty(3, dtype=LONG))


def varlen_attn(length):
    query, starts = empty(2 * length, 2, 64), empty(4, dtype=torch.int32)
    return fastattn.varlen_attn(
        query, query, query, starts, starts, length, length, dropout_p=0.1, seqused_k=empty(3, dtype=LONG)
    )


# Calls of torch's own function while fastattn is active in torch's registry, and of the pairs of functions below it, as
# the dispatcher calls them.


def torchs_attention(length):
    query, mask = empty(3, 2, length, 64), empty(2, length, length, dtype=FLOAT)
    return torch.nn.functional.scaled_dot_product_attention(query, query, query, mask, dropout_p=0.1)


def flash_pair(length):
    query = torch.empty(3, 4, length, 64, dtype=HALF, device="cuda:0")
    out, lse, *lengths, random, unused, _ = registry._scaled_dot_product_flash_attention(query, query, query, 0.1, True)
    registry._scaled_dot_product_flash_attention_backward(
        query, query, query, query, out, lse, *lengths, 0.1, True, random, unused
    )
    return out


def efficient_pair(length):
    query = torch.empty(3, 4, length, 64, dtype=HALF, device="cuda:0")
    out, lse, *random = registry._scaled_dot_product_efficient_attention(query, query, query, None, True, 0.1, True)
    registry._scaled_dot_product_efficient_attention_backward(
        query, query, query, query, None, out, lse, *random, 0.1, [True] * 3 + [False], True
    )
    return out


def packed_pair(length):
    query, starts = torch.empty(2 * length, 2, 64, dtype=HALF, device="cuda:0"), empty(4, dtype=torch.int32)
    window = {"window_size_left": 9, "window_size_right": 0}
    out, lse, random, unused, _ = registry._flash_attention_forward(
        query, query, query, starts, starts, length, length, 0.1, True, False, **window
    )
    registry._flash_attention_backward(
        query, query, query, query, out, lse, starts, starts, length, length, 0.1, True, random, unused, **window
    )
    return out


OPERATIONS = [layer_norm, dropout_add_layer_norm, softmax_dropout, dropout, dropout_mask]
ATTENTION = [attention, long_attention, masked_attention, decoding, attention_weights, varlen_attn]
REGISTRY = [torchs_attention, flash_pair, efficient_pair, packed_pair]


def multihead(length):
    module = fastattn.MultiHeadAttention(128, 2, dropout=0.1, batch_first=True, device="cuda:0", dtype=HALF)
    x, padding = empty(3, length, 128), empty(3, length, dtype=torch.bool)
    return module(x, x, x, key_padding_mask=padding, need_weights=False)[0]


def run(call, *arguments, **options):
    out = call(*arguments, **options)
    if out.requires_grad:
        backward(out)


def extremes():
    """Call with so many batches, heads or rows that a grid with one dimension for each would be too large."""
    with torch.no_grad():
        for shape in ((70000, 2, 64, 8), (2, 70000, 64, 8), (1, 1, 2**24, 8)):
            query, mask = empty(*shape), empty(*shape[:3], 1, dtype=torch.bool)
            fastattn.scaled_dot_product_attention(query, query, query, mask if shape[2] == 64 else None)
            fastattn.dropout(query, 0.1)
        fastattn.layer_norm(empty(2**28, 8), (8,))
        fastattn.softmax_dropout(empty(70000, 70000, 1, 8))
        starts = empty(70001, dtype=LONG)
        packed = empty(2**20, 2, 8)
        fastattn.varlen_attn(packed, packed, packed, starts, starts, 64, 64)


def lookups():
    """Return how often each of these calls takes Triton's own path from a kernel's arguments to the compiled kernel."""
    ordinary, counts = triton.JITFunction.run, {}

    def count(function, *args, **options):
        counts[name] += 1
        return ordinary(function, *args, **options)

    triton.JITFunction.run = count
    for name, call in (
        ("first", lambda: layer_norm(9, torch.float16)),
        ("again", lambda: layer_norm(9, torch.float16)),
        ("another length", lambda: layer_norm(444, torch.float16)),
        ("another dtype", lambda: layer_norm(9, FLOAT)),
        ("another constexpr", lambda: fastattn.layer_norm(empty(9, 96), (96,))),
        ("another device", lambda: layer_norm(9, torch.float16, "cuda:1")),
        ("again there", lambda: layer_norm(9, torch.float16, "cuda:1")),
    ):
        counts[name] = 0
        call()
    triton.JITFunction.run = ordinary
    return counts


def main(lengths):
    guard_nothing()
    fake = fake_gpu.pretend(90, 80)
    fake.streams = [5, 7]
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda *args, **options: True
    found = {"started": {}}
    torch.nn.attention.activate_flash_attention_impl("fastattn")
    calls = *OPERATIONS, *ATTENTION, *REGISTRY
    with Dry():
        for call in calls:
            if call is REGISTRY[0]:
                compiled = list(aot_gate.specialisations(0))
                found["faults"] = [fault for one in compiled for fault in aot_gate.examine(*one, 90).faults()]
                compile_no_more()
            fake.started.clear()
            run(call, lengths[0])
            found["started"][call.__name__] = sorted({start.kernel for start in fake.started})
        found["specialisations"] = [len(list(aot_gate.specialisations(0)))]
        for call, length in product(calls, lengths[1:]):
            run(call, length)
        found["specialisations"].append(len(list(aot_gate.specialisations(0))))
        run(multihead, 40)
        extremes()
        found["descriptors"] = {}
        for device, capability in enumerate(fake.capabilities):
            fake.started.clear()
            run(long_attention, 40, f"cuda:{device}")
            found["descriptors"][capability] = sorted({start.descriptors for start in fake.started})
        fake.started.clear()
        found["lookups"] = lookups()
        found["places"] = sorted({(start.device, start.stream) for start in fake.started})
        found["device afterwards"] = fake.device
    print(json.dumps(found))


if __name__ == "__main__":
    main([int(length) for length in sys.argv[1:]])
