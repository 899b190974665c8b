"""Times the operations on this GPU beside what a user would pick instead: ``python benchmarks/gpu.py results.json``.

Calls are captured into CUDA graphs and replayed, so that the launches of small cases do not count. Written are
milliseconds per call, the ratio of each peer's time to ours, and shares of a large copy's and a large product's speed
measured in the same run.
"""

import argparse
import contextlib
import functools
import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastattn
from fastattn.bench import report
from fastattn.bench.cases import OPERATIONS, Case
from fastattn.bench.peers import PEERS
from fastattn.bench.timer import interleave

HALF = torch.bfloat16
SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def cases():
    """The GPU lines of docs/design.md, section 7, one of each kind first."""
    rows = (16384, 1024), (16384, 4096), (4096, 512)
    for dropout in (0.0, 0.1):
        for length in (2048, 8192, 16384):
            for backward in (False, True):
                yield Case("attention", (16384 // length, 16, length, 128), HALF, backward, dropout=dropout)
    for shape in ((256, 8, 100, 64), (400, 8, 64, 64), (50, 8, 512, 64)):
        for backward in (False, True):
            yield Case("attention", shape, HALF, backward, dropout=0.1, padding="lengths")
    for shape, keys in (((128, 8, 1, 64), 128), ((16, 32, 1, 128), 4096), ((1, 8, 16, 128), 65536)):
        for dtype in (HALF, torch.float32):
            yield Case("attention", shape, dtype, keys=keys)  # decoding
    for operation, p in (
        ("layer_norm", 0.0),
        ("dropout_add_layer_norm", 0.1),
        ("softmax_dropout", 0.1),
        ("dropout", 0.1),
    ):
        for shape in rows:
            for backward in (False, True):
                yield Case(operation, shape, HALF, backward, dropout=p)


def contestants(case):
    """Ours and the peers, by name: functions without arguments on CUDA tensors."""
    tensors, others = OPERATIONS[case.operation].operands(case)
    tensors = [t.cuda().requires_grad_(case.backward) for t in tensors]
    others = {name: t.cuda() for name, t in others.items()}
    seed = {"seed": torch.tensor([1, 2], device="cuda")} if case.dropout else {}

    def bind(function, **arguments):
        def forward():
            return function(case, *tensors, **arguments)

        if not case.backward:
            return forward
        grad = torch.randn_like(forward())
        return lambda: torch.autograd.grad(forward(), tensors, grad)

    ours = OPERATIONS[case.operation].call
    yield "fastattn", bind(ours, **seed, **others)
    if fastattn.explain(ours, case, *tensors, **seed, **others).backend == "cuda":

        def ours_in_triton(*args, **arguments):
            with fastattn.backend("triton"):
                return ours(*args, **arguments)

        yield "fastattn's triton", bind(ours_in_triton, **seed, **others)
    if case.operation != "attention":
        yield from ((name, bind(peer)) for name, peer in PEERS[case.operation].items())
        return
    if case.padding:
        keys = torch.arange(case.shape[2], device="cuda")
        others = {"attn_mask": (keys < others["key_lengths"][:, None])[:, None, None]}

    def attention(case, query, key, value, kind, attn_mask=None):
        with sdpa_kernel(kind):
            return F.scaled_dot_product_attention(query, key, value, attn_mask, case.dropout, case.causal)

    for name, kind in SDPA.items():
        with contextlib.suppress(RuntimeError):  # this kind of SDPA refuses the case
            yield name, bind(functools.partial(attention, kind=kind), **others)


@functools.cache
def captured(function, repeats):
    """``repeats`` calls as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            function()
    return graph


def replay(function, repeats):
    """Seconds of one call, the mean over ``repeats`` captured ones."""
    graph = captured(function, repeats)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / repeats


def limits():
    """Bytes a second of a large copy, and operations a second of a large product of bfloat16."""
    source = torch.empty(2**29, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    matrix = torch.randn(8192, 8192, device="cuda", dtype=HALF)
    timing = interleave({"copy": lambda: target.copy_(source), "product": lambda: matrix @ matrix}, measure=replay)
    captured.cache_clear()
    return 2 * source.numel() / timing.seconds("copy"), 2 * 8192**3 / timing.seconds("product")


def measure(case, bytes_a_second, operations_a_second, budget):
    functions, refused = {}, {}
    for name, function in contestants(case):
        try:
            replay(function, 1)
            functions[name] = function
        except RuntimeError as error:
            refused[name] = str(error).splitlines()[0]
    timing = interleave(functions, budget=budget, measure=replay)
    seconds = {name: timing.seconds(name) for name in functions}
    ours = seconds["fastattn"]
    captured.cache_clear()
    return {
        "case": case.name,
        "milliseconds": {name: 1000 * value for name, value in seconds.items()},
        "times_as_fast_as": {name: value / ours for name, value in seconds.items() if name != "fastattn"},
        "refused": refused,
        "share_of_copy": case.bytes / ours / bytes_a_second,
        "share_of_product": case.flops / ours / operations_a_second,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--seconds", type=float, default=120, help="begin no further case after so long")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device")
    deadline = time.monotonic() + options.seconds
    copy, product = limits()
    results = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": __import__("triton").__version__,
        "commit": report.commit(),
        "limits": {"copy GB/s": copy / 1e9, "bfloat16 TFLOP/s": product / 1e12},
        "cases": [],
    }
    for case in cases():
        if time.monotonic() > deadline:
            print(f"time is up before {case.name}")
            break
        try:
            result = measure(case, copy, product, budget=0.3)
        except Exception as error:
            result = {"case": case.name, "error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        print(json.dumps(result), flush=True)
        results["cases"].append(result)
    options.results.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
