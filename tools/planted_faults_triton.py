"""Run the ahead-of-time checks on kernels with one planted fault each, and print the faults found, as JSON.

This is a program of its own, because Triton must not interpret here.
"""

import dataclasses
import functools
import json

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import aot_gate


@triton.jit
def sound(a, out, size: tl.int64, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr):
    i = tl.arange(0, BLOCK_M)
    tile = i[:, None] * BLOCK_M + i[None, :]
    sums = tl.zeros([BLOCK_M, BLOCK_M], tl.float32)
    for k in range(size):
        x = tl.load(a + k * BLOCK_M * BLOCK_M + tile)
        sums = tl.dot(x, x, sums, input_precision=PRECISION)
    tl.store(out + tile, sums)


@triton.jit
def spill(a, out, size: tl.int64):
    """Hold two accumulators of 256 elements per thread, which spill."""
    i = tl.arange(0, 8192)
    first, second = tl.load(a + i), tl.load(a + 8192 + i)
    for k in range(size):
        x = tl.load(a + k + i)
        first, second = first * x + second, second * x - first
    tl.store(out + i, first + second)


@triton.jit
def narrow(a, out, row: tl.int32, stride: tl.int32):
    i = tl.arange(0, 64)
    tl.store(out + i, tl.load(a + row * stride + i))


@triton.jit
def tf32(a, out, size: tl.int64):
    i = tl.arange(0, 64)
    tile = i[:, None] * 64 + i[None, :]
    sums = tl.zeros([64, 64], tl.float32)
    for k in range(size):
        x = tl.load(a + k * 4096 + tile)
        sums = tl.dot(x, x, sums, input_precision="tf32")
    tl.store(out + tile, sums)


@triton.jit
def described(a, out, size: tl.int64):
    """Read through a descriptor only once, before the loop."""
    i = tl.arange(0, 64)
    x, sums = a.load([0, 0]), tl.zeros([64, 64], tl.float32)
    for _ in range(size):
        sums = tl.dot(x, x, sums)
    tl.store(out + (i[:, None] * 64 + i[None, :]), sums)


@triton.jit
def converted(a, out, size: tl.int64):
    """Use each product, transposed, as the next product's sums, so that they change threads in every iteration."""
    i = tl.arange(0, 64)
    tile = i[:, None] * 64 + i[None, :]
    sums = tl.zeros([64, 64], tl.float32)
    for k in range(size):
        x = tl.load(a + k * 4096 + tile)
        sums = tl.dot(x, x, sums).trans()
    tl.store(out + tile, sums)


def report(function, types, constants, capability=90, warps=4):
    source = ASTSource(function, types | dict.fromkeys(constants, "constexpr"), constexprs=constants)
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    return aot_gate.examine(function, kernel, capability)


def faults(*arguments, **options):
    return report(*arguments, **options).faults()


@functools.cache
def few_instructions():
    """Return the report of a kernel, to be changed."""
    return report(narrow, {"a": "*fp32", "out": "*fp32", "row": "i32", "stride": "i32"}, {})


@functools.cache
def of_products():
    """Return the report of a kernel with products of 16 bits, to be changed."""
    return report(sound, {"a": "*fp16", "out": "*fp32", "size": "i64"}, {"BLOCK_M": 64, "PRECISION": "ieee"})


def compared(conversions):
    """Return the faults of a kernel with so many layout conversions, compared with one without dropout and without
    conversions."""
    plain = of_products()
    plain = dataclasses.replace(plain, variant=(*plain.variant, ("dropout", "None")))
    variant = *plain.variant[:-1], ("dropout.seed", "*i64")
    dropping = dataclasses.replace(plain, variant=variant, conversions=conversions)
    return aot_gate.faults([plain, dropping])[dropping]


def aligned_rows(narrow_accesses, wide_accesses=0.5):
    """Return the report of a kernel with aligned rows and these numbers of narrow and shares of 128-bit accesses."""
    plain = few_instructions()
    variant = ("ALIGNED", "True"), ("BLOCK_M", "2")
    found = {"narrow_accesses": narrow_accesses, "wide_accesses": wide_accesses, "narrow_offsets": ()}
    return dataclasses.replace(plain, variant=variant, **found)


def usual_loop(capability=90, kernel="forward_kernel", **found):
    """Return the faults of a loop of attention's usual calls whose report has the values ``found``."""
    sound = few_instructions()
    sizes = {"BLOCK_D": 128, "BLOCK_DV": 128, "BLOCK_M": 128, "BLOCK_N": 64, "ALIGNMENT": 8, "EVEN": True}
    variant = *((name, str(value)) for name, value in sizes.items()), ("problem.mask", "None")
    kept = {"variant": (*variant, ("problem.sequences.cu_seq_q", "None")), "matrix_instructions": ("HGMMA",)}
    kept |= {"narrow_offsets": (), "stages": 2, "shared_clocks": 1.0, "wide_loads": 1.0}
    return dataclasses.replace(sound, name=f"forward.{kernel}", capability=capability, **(kept | found)).faults()


def main():
    halves, singles = {"a": "*fp16", "out": "*fp32"}, {"a": "*fp32", "out": "*fp32"}
    whole = of_products()
    found = {
        "sound": [
            faults(sound, halves | {"size": "i64"}, {"BLOCK_M": 64, "PRECISION": "ieee"}, arch)
            for arch in aot_gate.SHARED_MEMORY
        ],
        "no products": dataclasses.replace(whole, products=0).faults(),
        "no matrix instructions": dataclasses.replace(whole, matrix_instructions=()).faults(),
        "mma": report(sound, halves | {"size": "i64"}, {"BLOCK_M": 64, "PRECISION": "ieee"}, warps=2).faults(),
        "nothing beside it": aot_gate.faults([whole])[whole],
        "too large": dataclasses.replace(whole, shared=(227 << 10) + 1).faults(),
        "large stack": dataclasses.replace(whole, stack=392).faults(),
        "spill in the loop": dataclasses.replace(whole, stack=8, local=8, instructions=199).faults(),
        "spill beside the loop": dataclasses.replace(whole, stack=8, local=8, instructions=200).faults(),
        "narrow rows": aligned_rows(narrow_accesses=1).faults(),
        "wide rows": aligned_rows(narrow_accesses=0).faults(),
        "rows by 64 bits": aligned_rows(narrow_accesses=0, wide_accesses=0.4).faults(),
        "a sound loop": usual_loop(barriers=6, drains=1, shared_clocks=1.15, wide_loads=0.5),
        "barriers": usual_loop(80, barriers=3),
        "a loop of one stage": usual_loop(barriers=9, drains=4, wide_loads=0.4, stages=1),
        "shared memory of one stage": usual_loop(shared_clocks=1.2, bulk_loads=("UTMALDG",), stages=1),
        "drains": usual_loop(drains=2),
        "shared memory": usual_loop(shared_clocks=1.2, bulk_loads=("UTMALDG",)),
        "known shared memory": usual_loop(80, "grad_key_value_kernel", shared_clocks=1.8),
        "narrow loads": usual_loop(wide_loads=0.4),
        "converted": compared(report(converted, halves | {"size": "i64"}, {}).conversions),
        "not converted": compared(whole.conversions),
        "spill": faults(spill, singles | {"size": "i64"}, {}, warps=1),
        "tf32": faults(tf32, singles | {"size": "i64"}, {}),
        "tf32 asked for": faults(sound, singles | {"size": "i64"}, {"BLOCK_M": 64, "PRECISION": "tf32"}),
        "described": faults(described, {"a": "tensordesc<fp16[64, 64]>", "out": "*fp32", "size": "i64"}, {}),
        "narrow": faults(narrow, singles | {"row": "i32", "stride": "i32"}, {}),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
