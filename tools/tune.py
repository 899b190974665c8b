"""Measures candidate tiles on this GPU and prints them as lines for ``fastattn/backends/triton/attention/tiles.py``
and ``rows.py``: ``python tools/tune.py results.json``. Nothing is changed; a person takes over what is better.
"""

import itertools
import json
import time

import torch
from triton.testing import do_bench

from fastattn.backends.triton import FUNCTIONS
from fastattn.backends.triton.attention import tiles
from fastattn.backends.triton.rows import LIMITS
from fastattn.bench import report

DEVICE = "cuda"
THRESHOLD = 6554
PROBLEM = (2, 16, 4096)  # batch, heads and length of the attention that is timed
ELEMENTS = 2**25  # of the rows that are timed
TILES = [tiles.Tile(*tile) for tile in itertools.product((64, 128), (32, 64, 128), (4, 8), (1, 2, 3))]
BLOCK_ELEMENTS = (1024, 2048, 4096, 8192)


def attention(dtype, size):
    """Calls of the attention kernels by name, for the head size."""
    query, key, value, grad = (torch.randn(*PROBLEM, size, device=DEVICE, dtype=dtype) for _ in range(4))
    seed = torch.tensor([1, 2], device=DEVICE)
    arguments = query, key, value, None, None, seed, size**-0.5, PROBLEM[2], 0, False, THRESHOLD
    out, _, stats = FUNCTIONS["attention"](*arguments)

    def forward():
        FUNCTIONS["attention"](*arguments)

    def backward():
        FUNCTIONS["attention_backward"](grad, None, out, stats, *arguments, False)

    return {"forward": forward, "grad_query": backward, "grad_key_value": backward}


def rows(columns):
    """Calls of the row kernels by name."""
    input, grad = (torch.randn(ELEMENTS // columns, columns, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    scores, grad_weights = input[None, None], grad[None, None]
    weight, seed = torch.ones(columns, device=DEVICE), torch.tensor([1, 2], device=DEVICE)
    _, mean, rstd = FUNCTIONS["layer_norm"](input, weight, weight, 1e-5)
    arguments = scores, None, None, seed, 1.0, *scores.shape[2:], False, THRESHOLD
    _, stats = FUNCTIONS["softmax_dropout"](*arguments)
    return {
        "dropout": lambda: FUNCTIONS["dropout"](input, seed, THRESHOLD),
        "layer_norm": lambda: FUNCTIONS["layer_norm"](input, weight, weight, 1e-5),
        "layer_norm_backward": lambda: FUNCTIONS["layer_norm_backward"](
            grad, input, mean, rstd, weight, *[weight.dtype] * 2
        ),
        "softmax_dropout": lambda: FUNCTIONS["softmax_dropout"](*arguments),
        "softmax_dropout_backward": lambda: FUNCTIONS["softmax_dropout_backward"](
            grad_weights, stats, *arguments, False
        ),
    }


def candidates():
    """(name, table, its key, the values to try, the call to time), the narrowest choice first."""
    table = tiles.table(torch.bfloat16, is_aligned=True, device=torch.device(DEVICE))
    for size in (64, 128):
        for kernel, call in attention(torch.bfloat16, size).items():
            yield f"attention {kernel} bfloat16 {size}", table[kernel], size, TILES, call
    for columns in (512, 4096):
        for kernel, call in rows(columns).items():
            now = LIMITS[kernel]
            values = [now._replace(elements=elements) for elements in BLOCK_ELEMENTS]
            yield f"{kernel} {columns} columns", LIMITS, kernel, values, call


def best(table, key, values, call, deadline):
    """[(milliseconds, value)] in order, the present value among them, and {value: why it does not run}."""
    present, timed, failed = table[key], [], {}
    for value in dict.fromkeys((present, *values)):
        if timed and time.monotonic() > deadline:
            break
        table[key] = value
        try:
            timed.append((do_bench(call, warmup=5, rep=20), value))
        except Exception as error:  # not enough shared memory or registers, most of all
            failed[value] = report.brief(error)
            print(f"  {value}: {failed[value]}")
    table[key] = present
    return sorted(timed, key=lambda pair: pair[0]), failed


def run(path, results, seconds):
    """Tries candidates until the time is up; what there is so far is in the file at any moment. Returns which present
    choices do not run."""
    deadline = time.monotonic() + seconds
    results["tiles"], broken = {}, []
    for name, table, key, values, call in candidates():
        if time.monotonic() > deadline:
            print(f"time is up before {name}")
            break
        present = table[key]
        timed, failed = best(table, key, values, call, deadline)
        now = next((milliseconds for milliseconds, value in timed if value == present), None)
        if present in failed:
            broken.append(f"{name}: {present}, the present choice: {failed[present]}")
        if timed:
            print(f"{name}: {timed[0][1]} {timed[0][0]:.4f} ms, now {present} {now} ms", flush=True)
        results["tiles"][name] = [
            *({"milliseconds": milliseconds, **value._asdict()} for milliseconds, value in timed),
            *({"error": why, **value._asdict()} for value, why in failed.items()),
        ]
        path.write_text(json.dumps(results, indent=1) + "\n")
    return broken


if __name__ == "__main__":
    report.on_gpu(__doc__, run)
