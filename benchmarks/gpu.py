"""Compare the operations on this GPU with what a user would pick instead: ``python benchmarks/gpu.py results.csv``.

Calls are captured into CUDA graphs and replayed, so launches do not count. Small calls are also timed from Python,
where the host bounds them. Shares are those of a large copy's and a large product's speed, measured in the same run.
"""

import dataclasses
import functools
import itertools
import math
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastattn
from fastattn.bench import contest, report, training
from fastattn.bench.cases import OPERATIONS, Case
from fastattn.bench.peers import PEERS
from fastattn.bench.timer import Ratio, interleave

DEVICE = "cuda"
LARGE = 2**29  # bytes of the limits' operands
BUDGET = 0.3  # seconds of a case's timing
SCORES = 2**32  # maximum bytes of attention's scores in float32, for peers that write them
HALF = torch.bfloat16
SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
ROWS = (("layer_norm", 0.0), ("dropout_add_layer_norm", 0.1), ("softmax_dropout", 0.1), ("dropout", 0.1))


def cases():
    """Yield the GPU lines of docs/design.md, section 7, and decoding: one of each kind, then the next of each. The
    first ones are those that were measured with other tiles than today's."""
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
    shapes = (16384, 1024), (4096, 512), (16384, 4096)
    rows = [[Case(name, shape, HALF, b, dropout=p) for shape in shapes for b in both] for name, p in ROWS]
    steps = [Case("training_step", (256, 98), HALF, True, dropout=0.1)]  # 25k tokens per side
    for group in ((padded, *rows), (*dense, decoding, steps)):
        for kinds in itertools.zip_longest(*group):
            yield from filter(None, kinds)


def small_cases():
    """Yield calls that the host bounds."""
    for backward in (False, True):
        yield Case("attention", (4, 8, 64, 64), HALF, backward)
        yield Case("attention", (4, 8, 64, 64), HALF, backward, dropout=0.1)
        yield from (Case(name, (64, 512), HALF, backward, dropout=p) for name, p in ROWS)
    yield Case("attention", (4, 8, 1, 64), HALF, keys=64)


def operands(case):
    """Return a case's differentiable tensors and its other arguments, on the device."""
    tensors, others = OPERATIONS[case.operation].operands(case)
    if case.operation == "layer_norm":  # torch's kernel requires its parameters in the input's dtype
        tensors = [t.to(case.dtype) for t in tensors]
    return [t.to(DEVICE) for t in tensors], {name: t.to(DEVICE) for name, t in others.items()}


def contestants(case):
    """Yield fastattn and the peers: (name, a function that makes the call, and raises if the peer refuses the case)."""
    if case.operation == "training_step":
        for name in ("ours", "torch"):
            yield name, lambda name=name: training.contestants(case, DEVICE)[name]
        yield "compiled", lambda: training.contestants(case, DEVICE, compiled=True)["torch"]
        yield "fastattn compiled", lambda: training.contestants(case, DEVICE, compiled=True)["ours"]
        return
    tensors, others = operands(case)
    seed = {"seed": torch.tensor([1, 2], device=DEVICE)} if case.dropout else {}

    def bind(function, **arguments):
        return contest.step(case, functools.partial(function, case, **arguments), tensors)

    ours = OPERATIONS[case.operation].call

    def forced(backend, *arguments, **options):
        with fastattn.backend(backend):
            return ours(*arguments, **options)

    yield "ours", functools.partial(bind, ours, **seed, **others)
    explanation = fastattn.explain(ours, case, *tensors, **seed, **others)
    for backend in ("triton", "cuda"):  # the other of the two, if it serves the case
        if explanation.reasons.get(backend, "").endswith("is faster"):
            yield f"fastattn {backend}", functools.partial(bind, functools.partial(forced, backend), **seed, **others)
    peers = PEERS[case.operation] if case.operation != "attention" else attention_peers(case, others)
    yield from ((name, functools.partial(bind, peer)) for name, peer in peers.items())


def attention_peers(case, others):
    """Return SDPA's backends and the compiled peers, as far as they can do the case."""
    mask = None
    if case.padding:
        keys = torch.arange(case.shape[2], device=DEVICE)
        mask = (keys < others["key_lengths"][:, None])[:, None, None]

    def attention(case, query, key, value, kind):
        with sdpa_kernel(kind):
            return F.scaled_dot_product_attention(query, key, value, mask, case.dropout, case.causal)

    peers = {name: functools.partial(attention, kind=kind) for name, kind in SDPA.items()}
    if 4 * math.prod(case.shape[:3]) * (case.keys or case.shape[2]) <= SCORES:
        peers["math"] = functools.partial(attention, kind=SDPBackend.MATH)
        peers["compiled"] = functools.partial(
            PEERS["attention"]["compiled"], **({"attn_mask": mask} if case.padding else {})
        )
    if not (case.dropout or case.padding):
        peers["flex"] = PEERS["attention"]["flex"]
    return peers


@functools.cache
def captured(function, repeats):
    """Capture ``repeats`` calls into a CUDA graph."""
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
    """Return the seconds of one call, the mean over ``repeats`` captured ones."""
    graph = captured(function, repeats)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / repeats


def eager(function, repeats):
    """Return the seconds of one call, the mean over ``repeats`` calls from Python."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def limits():
    """Return the bytes/s of a large copy and the FLOP/s of a large product of bfloat16.

    A kernel copies: a memory copy as a node of a graph is slower (2.4 TB/s of 3.0 on H100).
    """
    source = torch.ones(LARGE // 4, device=DEVICE)
    target = torch.empty_like(source)
    size = math.isqrt(LARGE // 8)
    matrix = torch.randn(size, size, device=DEVICE, dtype=HALF)
    functions = {"copy": lambda: torch.neg(source, out=target), "product": lambda: matrix @ matrix}
    timing = interleave(functions, measure=replay)
    captured.cache_clear()
    return {"copy": 2 * source.nbytes / timing.seconds("copy"), "product": 2 * size**3 / timing.seconds("product")}


def measure(case, where, rates=None):
    """Return a row per peer, and fastattn's failures. A peer that refuses the case is left out.

    Args:
        rates: the limits, for replayed calls. Without them calls are timed from Python.
    """
    functions, failures, time_call = {}, [], replay if rates else eager
    for name, make in contestants(case):
        try:
            functions[name] = make()
            time_call(functions[name], 1)
        except Exception as error:
            functions.pop(name, None)
            print(f"{case.name}, {name}: {report.brief(error)}")
            failures += [f"{case.name}, {name}: {report.brief(error)}"] * name.startswith(("ours", "fastattn"))
    if "ours" not in functions:
        return [], failures
    timing = interleave(functions, budget=BUDGET, measure=time_call)
    ratios = {name: timing.ratio(name, "ours") for name in functions if name != "ours"}
    result = contest.Result(f"{case.name}, from Python", {"ours": timing.seconds("ours")}, ratios)
    if rates:
        amounts = {"copy": case.bytes, "product": case.flops}
        shares = {name: amounts[name] / result.seconds["ours"] / rates[name] for name in amounts}
        limit = max(shares, key=shares.get)
        result = dataclasses.replace(result, name=case.name, share=Ratio.of([shares[limit]]), limit=limit)
    return report.rows_of(result, "bfloat16", where), failures


def run(path, where, seconds):
    """Measure until the time is up. The file has what there is so far at any moment. Return what failed."""
    deadline, failures, rates = time.monotonic() + seconds, [], limits()
    report.append(path, report.limit_rows(where, rates))
    for case, limit in [*((c, (rates,)) for c in cases()), *((c, ()) for c in small_cases())]:
        if time.monotonic() > deadline:
            print(f"time is up before {case.name}")
            break
        try:
            rows, failed = measure(case, where, *limit)
        except Exception as error:
            rows, failed = [], [f"{case.name}: {report.brief(error)}"]
        captured.cache_clear()
        failures += failed
        print(*rows, sep="\n", flush=True)
        report.append(path, rows)
    return failures


def call_once(case):
    """Call each contestant of a case. A failure of one does not stop the next."""
    for name, make in contestants(case):
        try:
            make()()
        except Exception as error:
            print(f"{case.name}, {name}: {report.brief(error)}")


if __name__ == "__main__":
    report.on_gpu(__doc__, run, lambda: ((case.name, functools.partial(call_once, case)) for case in cases()))
