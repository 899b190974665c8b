"""Times the operations on this GPU beside what a user would pick instead: ``python benchmarks/gpu.py results.json``.

Calls are captured into CUDA graphs and replayed, so that the launches of small cases do not count. Written are
milliseconds per call, the ratio of each peer's time to ours, and shares of a large copy's and a large product's speed
measured in the same run.
"""

import functools
import itertools
import json
import math
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastattn
from fastattn.bench import report, training
from fastattn.bench.cases import OPERATIONS, Case
from fastattn.bench.peers import PEERS
from fastattn.bench.timer import interleave

DEVICE = "cuda"
LARGE = 2**29  # bytes of the limits' operands
BUDGET = 0.3  # seconds of a case's timing
SCORES = 2**32  # bytes of attention's scores in float32 up to which peers that write them take part
HALF = torch.bfloat16
SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def cases():
    """The GPU lines of docs/design.md, section 7, and decoding: one of each kind first, then the next of each."""
    both = (False, True)
    dense = [
        [Case("attention", (16384 // n, 16, n, 128), HALF, b, dropout=p) for n in (8192, 2048, 16384) for b in both]
        for p in (0.0, 0.1)
    ]
    padded = [
        Case("attention", shape, HALF, b, dropout=0.1, padding="uneven lengths")
        for shape in ((256, 8, 100, 64), (400, 8, 64, 64), (50, 8, 512, 64))
        for b in both
    ]
    decoding = [
        Case("attention", shape, HALF, keys=keys)
        for shape, keys in (((8, 16, 1, 128), 8192), ((1, 16, 1, 128), 65536), ((160, 8, 1, 64), 64))
    ]
    rows = [
        [
            Case(operation, shape, HALF, b, dropout=p)
            for shape in ((16384, 1024), (4096, 512), (16384, 4096))
            for b in both
        ]
        for operation, p in (
            ("layer_norm", 0.0),
            ("dropout_add_layer_norm", 0.1),
            ("softmax_dropout", 0.1),
            ("dropout", 0.1),
        )
    ]
    steps = [Case("training_step", (256, 98), HALF, True, dropout=0.1)]  # 25k tokens a side
    for kinds in itertools.zip_longest(*dense, padded, decoding, *rows, steps):
        yield from filter(None, kinds)


def operands(case):
    """A case's differentiable tensors and its other arguments, on the device."""
    tensors, others = OPERATIONS[case.operation].operands(case)
    if case.operation == "layer_norm":  # torch's kernel wants its parameters in the input's dtype
        tensors = [t.to(case.dtype) for t in tensors]
    tensors = [t.to(DEVICE).requires_grad_(case.backward) for t in tensors]
    return tensors, {name: t.to(DEVICE) for name, t in others.items()}


def contestants(case):
    """Ours and the peers: (name, what makes a function without arguments, and raises where it refuses the case)."""
    if case.operation == "training_step":
        yield "fastattn", lambda: training.contestants(case, DEVICE)["ours"]
        yield "torch", lambda: training.contestants(case, DEVICE)["torch"]
        yield "compiled", lambda: training.compiled(case, DEVICE)
        return
    tensors, others = operands(case)
    seed = {"seed": torch.tensor([1, 2], device=DEVICE)} if case.dropout else {}

    def bind(function, **arguments):
        def forward():
            return function(case, *tensors, **arguments)

        if not case.backward:
            return forward
        grad = torch.randn_like(forward())
        return lambda: torch.autograd.grad(forward(), tensors, grad)

    def bind_scores(function, **arguments):
        size = 4 * math.prod(case.shape[:3]) * (case.keys or case.shape[2])
        if size > SCORES:
            raise MemoryError(f"its scores would take {size / 1e9:.1f} GB in float32")
        return bind(function, **arguments)

    def forced(*arguments, **options):
        with fastattn.backend("triton"):
            return OPERATIONS[case.operation].call(*arguments, **options)

    ours = OPERATIONS[case.operation].call
    yield "fastattn", functools.partial(bind, ours, **seed, **others)
    if fastattn.explain(ours, case, *tensors, **seed, **others).backend != "triton":
        yield "fastattn triton", functools.partial(bind, forced, **seed, **others)
    if case.operation != "attention":
        yield from ((name, functools.partial(bind, peer)) for name, peer in PEERS[case.operation].items())
        return
    if case.padding:
        keys = torch.arange(case.shape[2], device=DEVICE)
        others = {"attn_mask": (keys < others["key_lengths"][:, None])[:, None, None]}

    def attention(case, query, key, value, kind, attn_mask=None):
        with sdpa_kernel(kind):
            return F.scaled_dot_product_attention(query, key, value, attn_mask, case.dropout, case.causal)

    for name, kind in SDPA.items():
        yield name, functools.partial(bind, functools.partial(attention, kind=kind), **others)
    yield "math", functools.partial(bind_scores, functools.partial(attention, kind=SDPBackend.MATH), **others)
    yield "compiled", functools.partial(bind_scores, PEERS["attention"]["compiled"], **others)
    if not (case.dropout or case.padding):
        yield "flex", functools.partial(bind, PEERS["attention"]["flex"])


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
    source = torch.empty(LARGE, dtype=torch.int8, device=DEVICE)
    target = torch.empty_like(source)
    size = math.isqrt(LARGE // 8)
    matrix = torch.randn(size, size, device=DEVICE, dtype=HALF)
    timing = interleave({"copy": lambda: target.copy_(source), "product": lambda: matrix @ matrix}, measure=replay)
    captured.cache_clear()
    return 2 * source.numel() / timing.seconds("copy"), 2 * size**3 / timing.seconds("product")


def measure(case, bytes_a_second, operations_a_second):
    functions, refused = {}, {}
    for name, make in contestants(case):
        try:
            functions[name] = make()
            replay(functions[name], 1)
        except Exception as error:
            functions.pop(name, None)
            refused[name] = report.brief(error)
    result = {"case": case.name, "refused": refused}
    broken = [f"{name}: {why}" for name, why in refused.items() if name.startswith("fastattn")]
    if broken:
        result["error"] = "; ".join(broken)
    if "fastattn" not in functions:
        return result
    timing = interleave(functions, budget=BUDGET, measure=replay)
    seconds = {name: timing.seconds(name) for name in functions}
    ours = seconds["fastattn"]
    return result | {
        "milliseconds": {name: 1000 * value for name, value in seconds.items()},
        "times_as_fast_as": {name: value / ours for name, value in seconds.items() if name != "fastattn"},
        "share_of_copy": case.bytes / ours / bytes_a_second,
        "share_of_product": case.flops / ours / operations_a_second,
    }


def run(path, results, seconds):
    """Measures until the time is up; what there is so far is in the file at any moment. Returns what failed."""
    deadline = time.monotonic() + seconds
    copy, product = limits()
    results |= {"limits": {"copy GB/s": copy / 1e9, "bfloat16 TFLOP/s": product / 1e12}, "cases": []}
    for case in cases():
        if time.monotonic() > deadline:
            print(f"time is up before {case.name}")
            break
        try:
            result = measure(case, copy, product)
        except Exception as error:
            result = {"case": case.name, "error": report.brief(error)}
        captured.cache_clear()
        print(json.dumps(result), flush=True)
        results["cases"].append(result)
        path.write_text(json.dumps(results, indent=1) + "\n")
    return [f"{result['case']}: {result['error']}" for result in results["cases"] if "error" in result]


if __name__ == "__main__":
    report.on_gpu(__doc__, run)
