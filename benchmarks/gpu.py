"""Times the operations on this GPU beside what a user would pick instead: ``python benchmarks/gpu.py results.json``.

Calls are captured into CUDA graphs and replayed, so that the launches of small cases do not count; "eager" are
milliseconds of the same calls one after the other from Python, where the host bounds small cases. Written are
milliseconds per call, the ratio of each peer's time to ours, and shares of a large copy's and a large product's speed
measured in the same run.
"""

import dataclasses
import functools
import itertools
import json
import math
import time
from operator import itemgetter
from statistics import quantiles

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
        yield "compiled", lambda: training.compiled(case, DEVICE)["torch"]
        yield "fastattn compiled", lambda: training.compiled(case, DEVICE)["ours"]
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

    ours = OPERATIONS[case.operation].call

    def forced(backend, *arguments, **options):
        with fastattn.backend(backend):
            return ours(*arguments, **options)

    yield "fastattn", functools.partial(bind, ours, **seed, **others)
    explanation = fastattn.explain(ours, case, *tensors, **seed, **others)
    for backend in ("triton", "cuda"):  # the other of the two, if it serves the case
        if explanation.reasons.get(backend, "").endswith("is faster"):
            yield f"fastattn {backend}", functools.partial(bind, functools.partial(forced, backend), **seed, **others)
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


def eager(function, repeats):
    """Seconds of one call, the mean over ``repeats`` calls from Python."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def limits():
    """Bytes a second of a large copy, and operations a second of a large product of bfloat16. A kernel copies: a memory
    copy as a node of a graph is slower (2.4 TB/s of 3.0 on H100)."""
    source = torch.ones(LARGE // 4, device=DEVICE)
    target = torch.empty_like(source)
    size = math.isqrt(LARGE // 8)
    matrix = torch.randn(size, size, device=DEVICE, dtype=HALF)
    functions = {"copy": lambda: torch.neg(source, out=target), "product": lambda: matrix @ matrix}
    timing = interleave(functions, measure=replay)
    captured.cache_clear()
    return 2 * source.nbytes / timing.seconds("copy"), 2 * size**3 / timing.seconds("product")


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
    by_hand = interleave(functions, budget=BUDGET / 3, rounds=(3, 30), measure=eager)
    return result | {
        "milliseconds": {name: 1000 * value for name, value in seconds.items()},
        "eager_milliseconds": {name: 1000 * by_hand.seconds(name) for name in functions},
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
        report.write_json(path, results)
    return [f"{result['case']}: {result['error']}" for result in results["cases"] if "error" in result]


def section(found, kernels, tuned, host, trained, tested):
    """The page's part, of the files in benchmarks/results/gpu: what each of the scripts has written."""
    copy, product = found["limits"].values()
    head = (
        f"One {found['device']}; torch {found['torch']}, CUDA {found['cuda']}, Triton {found['triton']}. A large copy "
        f"reaches {copy / 1000:.2f} TB/s, a large product {product:.0f} TFLOP/s. " + found.get("about", "")
    ).strip()
    failures = "".join(f": `{name}`" for name in tested["failures"])
    tests = (
        f"In {tested['seconds']} seconds, by commit {tested['commit'][:7]}, {tested['passed']:,} of the "
        f"{tested['of']:,} tests of the backends for CUDA tensors passed and {tested['failed']} failed{failures}."
    )
    measured = [result for result in found["cases"] if "milliseconds" in result]
    by_case = [("case", "ms", "of the limit", "times as fast as")]
    for result in measured:
        kind = "product" if result["share_of_product"] > result["share_of_copy"] else "copy"
        share = result[f"share_of_{kind}"]
        by_case.append(
            (
                result["case"],
                f"{result['milliseconds']['fastattn']:.3g}",
                f"{share:.0%} of a {kind}" if share < 1 else f"at a {kind}'s",
                ", ".join(
                    f"{name} {value:.2f}"
                    for name, value in sorted(result["times_as_fast_as"].items(), key=itemgetter(1))
                ),
            )
        )
    missing = {case.name for case in cases()} - {result["case"] for result in measured}
    not_reached = f"Not measured for want of time: {', '.join(sorted(missing))}." if missing else "All cases are there."
    asked = [("case", "asked", "found")]
    for case, what, least, value in goals(measured):
        asked.append((case, f"{least:.4g} {what}", f"{value:.2f}" if value >= least else f"**{value:.2f}**"))
    tiles = [("kernel", "tile when it was measured: ms", "quickest of those tried: ms", "times as fast")]
    for name, entries in tuned["tiles"].items():
        timed = [entry for entry in entries if "error" not in entry]
        present = next((entry for entry in timed if entry["present"]), None)
        if present:
            both = (f"{_tile(entry)}: {entry['milliseconds']:.3f}" for entry in (present, timed[0]))
            tiles.append((name, *both, f"{present['milliseconds'] / timed[0]['milliseconds']:.2f}"))
    by_kernel = [("kernel", "measured")]
    by_kernel += [(line["kernel"], f"{line['measured']:.0f} {line['unit']}") for line in kernels["kernels"]]
    launches = [("a call takes the host, µs", "`cuda`", "`triton`", "torch")]
    for name, values in host["microseconds"].items():
        launches.append((name, *(f"{values[by]:.0f}" if by in values else "" for by in ("cuda", "triton", "torch"))))
    updates = [("commit", "target tokens a second, median", "quartiles")]
    for one in trained["runs"]:
        rates = [row["tokens_per_second"] for row in one["metrics"][1:]]  # what comes before compiles
        low, middle, high = quantiles(rates, n=4)
        updates.append((one["commit"][:7], f"{middle:,.0f}", f"{low:,.0f} to {high:,.0f}"))
    parts = [
        (
            head,
            tests,
            "### Compared with torch's backends",
            f"Cases of commit {found['commit'][:7]}, replayed as CUDA graphs; peers' times over ours.",
            by_case,
            not_reached,
        ),
        ("### Beside what is asked", "What design.md, section 7, asks of an H200; missed here in bold.", asked),
        ("### Small calls", "Bound by the host.", host.get("about", ""), launches),
        (
            "### Training",
            f"`fastattn train --preset {trained['preset']}`, batches of {trained['batch_tokens']:,} tokens a side.",
            updates,
        ),
        (
            "### Kernels",
            f"By the kernel's own time, attention of 8x16x4096 in bfloat16 at commit {kernels['commit'][:7]}.",
            by_kernel,
        ),
        ("### Tiles", "The kernel's own time.", tuned.get("about", ""), tiles),
    ]
    texts = (text if isinstance(text, str) else report.markdown(text) for part in parts for text in part)
    return "\n\n".join(filter(None, texts))


def _tile(entry):
    """In words, without what is left to the compiler."""
    if "block_m" in entry:
        words = f"{entry['block_m']}x{entry['block_n']}, {entry['num_warps']} warps, {entry['num_stages']} stages"
        if entry["maxnreg"] is not None:
            words += f", {entry['maxnreg']} registers"
        return words if entry["register_usage_level"] is None else f"{words}, level {entry['register_usage_level']}"
    return f"{entry['elements']} elements, {entry['warp_elements']} a warp"


def goals(measured):
    """(case, what is asked for, the least, what was found), of the GPU lines of docs/design.md, section 7."""
    results = {result["case"]: result for result in measured}
    for case in cases():
        if case.name not in results:
            continue
        found, peers = results[case.name], results[case.name]["times_as_fast_as"]
        if case.operation == "training_step":
            asked = {"times torch.nn.Transformer": (1.5, "torch"), "times the same compiled": (1.2, "compiled")}
            yield from ((case.name, what, least, peers[peer]) for what, (least, peer) in asked.items() if peer in peers)
        elif case.padding and case.backward:
            if found["share_of_copy"] < 0.7:
                best = min(peers[name] for name in (*SDPA, "math") if name in peers)
                yield case.name, "times the best of SDPA, or 70 % of a copy", 3.0, best
            else:
                yield case.name, "of a copy, or 3 times the best of SDPA", 0.7, found["share_of_copy"]
        elif case.operation == "attention" and not case.padding and case.keys is None and "flash" in peers:
            forward = results.get(dataclasses.replace(case, backward=False).name)
            if case.dropout and case.backward:
                yield case.name, "times flash", 1.2, peers["flash"]
            elif not (case.dropout or case.backward):
                yield case.name, "times flash", 1.15, peers["flash"]
            elif not case.dropout and forward:
                ours, flash = (
                    found["milliseconds"][name] - forward["milliseconds"][name] for name in ("fastattn", "flash")
                )
                yield case.name, "times flash, of the backward pass", 1.0, flash / ours
        elif case.operation in ("layer_norm", "softmax_dropout") and case.shape[1] >= 1024:
            yield case.name, "of a copy", 0.8 if case.backward else 0.9, found["share_of_copy"]


def compile_part(part):
    """Calls the contestants of these cases once. Other processes use the device meanwhile: what fails is said."""
    for case in list(cases())[part]:
        try:
            for name, make in contestants(case):
                try:
                    make()()
                except Exception as error:
                    print(f"{case.name}, {name}: {report.brief(error)}")
        except Exception as error:
            print(f"{case.name}: {report.brief(error)}")


if __name__ == "__main__":
    report.on_gpu(__doc__, run, compile_part)
