"""Measure candidate tiles on this GPU: ``python tools/tune.py results.csv``.

It times every kernel with its present tile first, then with other tiles. It prints lines for
``fastattn/backends/triton/attention/tiles.py`` and ``rows.py`` and changes nothing: a person adopts the better tiles.
Times are the kernel's own, from torch's profiler.
"""

import functools
import itertools
import random
import time
from collections import defaultdict
from statistics import median

import torch

from fastattn.backends.schema import (
    RECORDS,
    DropoutArgs,
    LayerNormArgs,
    LayerNormBackwardArgs,
    SoftmaxDropoutArgs,
    SoftmaxDropoutBackwardArgs,
)
from fastattn.backends.triton import FUNCTIONS
from fastattn.backends.triton.attention import tiles
from fastattn.backends.triton.rows import LIMITS, row_tile
from fastattn.bench import report

DEVICE = "cuda"
THRESHOLD = 6554
KERNELS = "forward", "grad_query", "grad_key_value"
LONG = (2, 16, 4096)  # Batch, heads and length of operands read by descriptors, and of those with a mask.
SHORT = (64, 8, 512)  # Batch, heads and length of operands read by pointers.
PACKED = (256, 8, 100)  # Sequences, heads and mean length of packed operands.
HEAD_DIMS = (64, 128)
COLUMNS = (512, 1024, 4096)  # Lengths of the rows that are timed.
ELEMENTS = 2**25  # Elements of these rows together.
# Queries, keys and warps per tile, each with 1 to 3 stages. Two more have all 255 registers, if ptxas would take fewer.
BLOCKS = ((32, 64, 4), (64, 32, 4), (64, 64, 4), (64, 128, 4), (64, 128, 8), (128, 64, 4), (128, 64, 8), (128, 128, 8))
TILES = [tiles.Tile(*block, stages) for block, stages in itertools.product(BLOCKS, (3, 2, 1))]
TILES += [tiles.Tile(*block, 2, 255) for block in ((64, 64, 4), (128, 64, 8))]
BLOCK_ELEMENTS = (1024, 2048, 4096, 8192)
WARP_ELEMENTS = (512, 1024, 2048)


def attention(kind, size, threshold):
    """Return a forward and a backward call that use the tiles for this kind of operands."""
    batch, heads, length = SHORT if kind == "pointers" else LONG
    seed = torch.tensor([1, 2], device=DEVICE) if threshold else None
    if kind == "irregular":
        sequences, heads, length = PACKED
        lengths = torch.tensor(random.Random(1).choices(range(length // 2, 3 * length // 2), k=sequences))
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).to(DEVICE)
        shape, name = (int(lengths.sum()), heads, size), "varlen_attention"
        longest = int(lengths.max())
        rest = starts, starts, None, seed, longest, longest, size**-0.5, longest, longest, threshold, True
    else:
        shape, name = (batch, heads, length, size), "attention"
        dtypes = {"masked": torch.bool, "float_masked": torch.float32}
        mask = torch.ones(batch, 1, 1, length, device=DEVICE, dtype=dtypes[kind]) if kind in dtypes else None
        rest = mask, None, seed, size**-0.5, length, length, False, threshold, True
    *operands, out, grad = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(5))
    stats = torch.ones(2, *shape[:-1], device=DEVICE)  # arbitrary, because times do not depend on values
    args = RECORDS[name](*operands, *rest)
    mask_grad = {} if kind == "irregular" else {"mask_grad": False}
    backward_args = RECORDS[f"{name}_backward"](grad, None, out, stats, torch.zeros_like(out), args, **mask_grad)

    def forward():
        FUNCTIONS[name](args)

    def backward():
        FUNCTIONS[f"{name}_backward"](backward_args)

    return forward, backward


def rows(columns):
    """Return calls of the row kernels, by name."""
    input, grad = (torch.randn(ELEMENTS // columns, columns, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    scores, grad_weights = input[None, None], grad[None, None]
    weight, seed = torch.ones(columns, device=DEVICE), torch.tensor([1, 2], device=DEVICE)
    args = SoftmaxDropoutArgs(scores, None, None, seed, 1.0, *scores.shape[2:], False, THRESHOLD)
    stats = torch.ones(2, *scores.shape[:-1], device=DEVICE)
    mean, rstd = stats[:, 0, 0]
    records = {
        "dropout": DropoutArgs(input, seed, THRESHOLD),
        "layer_norm": LayerNormArgs(input, weight, weight, 1e-5),
        "layer_norm_backward": LayerNormBackwardArgs(grad, input, mean, rstd, weight, *[weight.dtype] * 2),
        "softmax_dropout": args,
        "softmax_dropout_backward": SoftmaxDropoutBackwardArgs(grad_weights, stats, args, False),
    }
    return {name: functools.partial(FUNCTIONS[name], record) for name, record in records.items()}


def candidates():
    """Yield (name, table, key, values to try, call to time, kernel of the call to time, or None for all kernels)."""
    table = tiles.table(torch.bfloat16, is_aligned=True, device=torch.device(DEVICE))
    kinds = "regular", "irregular", "pointers", "masked", "float_masked"
    for kind, size, threshold in itertools.product(kinds, HEAD_DIMS, (0, THRESHOLD)):
        forward, backward = attention(kind, size, threshold)
        for kernel in KERNELS:
            line = f"{kernel}_{kind}" if f"{kernel}_{kind}" in table else kernel
            name = f"attention {kernel} {kind} bfloat16 {size}{' dropout' if threshold else ''}"
            call = forward if kernel == "forward" else backward
            yield name, table[line], size, TILES, call, f"{kernel}_kernel"
    for columns in COLUMNS:
        for kernel, call in rows(columns).items():
            yield f"{kernel} {columns} columns", LIMITS, kernel, row_limits(kernel, columns), call, None


def row_limits(kernel, columns):
    """Return limits of a row kernel that lead to different tiles, the present limits first."""
    present = LIMITS[kernel]
    by_tile = {}
    try:
        for elements, warp_elements in ((None, None), *itertools.product(BLOCK_ELEMENTS, WARP_ELEMENTS)):
            values = present
            if elements:
                values = present._replace(elements=elements, warp_elements=warp_elements)
            LIMITS[kernel] = values
            by_tile.setdefault(row_tile(kernel, columns, is_aligned=True), values)
    finally:
        LIMITS[kernel] = present
    return list(by_tile.values())


def best(table, key, values, measure, deadline):
    """Return [(milliseconds, value)] sorted, the present value among them, and {value: why it does not run}."""
    timed, failed = [], {}
    for value in dict.fromkeys((table[key], *values)):
        if timed and time.monotonic() > deadline:
            break
        try:
            timed.append((1000 * trial(table, key, value, measure), value))
        except Exception as error:  # mostly too little shared memory or too few registers
            failed[value] = report.brief(error)
            print(f"  {value}: {failed[value]}")
    return sorted(timed, key=lambda pair: pair[0]), failed


def trial(table, key, value, call):
    """Return the result of a call with this value in the table."""
    present, table[key] = table[key], value
    try:
        return call()
    finally:
        table[key] = present


def kernel_seconds(call, repeats=10):
    """Return the GPU's seconds of each CUDA kernel that a call starts, by name: the median over `repeats` calls."""
    call()  # compiles
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    found = defaultdict(list)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:  # other events are the host's
            found[event.name].append(event.time_range.elapsed_us() / 1e6)
    return {name: median(times) for name, times in found.items()}


def seconds_of(call, kernel):
    found = kernel_seconds(call)
    return sum(found.values()) if kernel is None else found[kernel]


def words(value):
    """Return a tile in words, without what is left to the compiler."""
    if not hasattr(value, "block_m"):
        return f"{value.elements} elements, {value.warp_elements} a warp"
    text = f"{value.block_m}x{value.block_n}, {value.num_warps} warps, {value.num_stages} stages"
    registers = "" if value.maxnreg is None else f", {value.maxnreg} registers"
    return text + registers + ("" if value.register_usage_level is None else f", level {value.register_usage_level}")


def run(path, where, seconds):
    """Time the present choice of every kernel, then all candidates until the time is up. The file holds the results so
    far at any moment. Returns the present choices that do not run."""
    deadline, broken = time.monotonic() + seconds, []
    for is_first in (True, False):
        for name, table, key, values, call, kernel in candidates():
            if time.monotonic() > deadline:
                print(f"time is up before {name}")
                return broken
            present, tried = table[key], () if is_first else values
            timed, failed = best(table, key, tried, functools.partial(seconds_of, call, kernel), deadline)
            if is_first and present in failed:
                broken.append(f"{name}: {present}, the present choice: {failed[present]}")
            now = next((milliseconds for milliseconds, value in timed if value == present), None)
            if now is None:
                continue
            milliseconds, quickest = timed[0]
            print(f"{name}: {quickest} {milliseconds:.4f} ms, now {present} {now} ms", flush=True)
            columns = {"case": f"tile: {name}", "dtype": "bfloat16", "peer": "quickest tried"}
            columns |= {"note": f"{words(present)}; {words(quickest)}"}
            report.append(path, [report.Row(**where, **columns, seconds=now / 1000, ratio=milliseconds / now)])
    return broken


def calls():
    """Yield every candidate and its call."""
    for _, table, key, values, call, _ in candidates():
        for value in dict.fromkeys((table[key], *values)):
            yield str(value), functools.partial(trial, table, key, value, call)


if __name__ == "__main__":
    report.on_gpu(__doc__, run, calls)
