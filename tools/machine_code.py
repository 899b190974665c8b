"""What the GPU kernels cost, predicted from their machine code, with no GPU: ``python tools/machine_code.py``.

Triton's kernels are compiled for A100, H100 and B200, for attention and rows as they mostly are, in bfloat16, and the
CUDA C++ ones for rows. Printed are, for a score of attention or an element of a row, a thread's instructions and the
clocks that an SM's pipes need; what bounds that leaves; what the in-order simulation of the main loop reaches; and what
of the loop holds it up. ``sass`` says how. All of it is a prediction: believe differences of 15 % and more, and what is
counted.

``--write`` replaces the results in ``benchmarks/results`` and the tables of ``docs/machine-code.md``, whole or not at
all. ``--public FOLDER`` takes the public kernels' loops, to which the model is held, from disassemblies.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import lzma
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import aot_gate
from fake_gpu import pretend
from fastattn.backends.triton import FUNCTIONS
from fastattn.bench import report
from fastattn.files import write_file
from sass import code, native, public
from sass.cost import Attention, Loop, Rows, issue_share, order, plain_loop, row_path, widths
from sass.rates import MACHINES

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/machine-code.json"
PAGE = ROOT / "docs/machine-code.md"

DTYPE = torch.bfloat16
THRESHOLD = 6554  # of dropout, a rate of 0.1
PROBLEM = 8, 16, 4096  # batch, heads and length of attention
ELEMENTS = 2**26  # of rows: more than fit in the L2 of any GPU
# Products of a pair of rows in a kernel's loop, and of those what FlashAttention counts for a whole pass.
PRODUCTS = {"forward_kernel": 2, "grad_query_kernel": 3, "grad_key_value_kernel": 4}
BACKWARD_PRODUCTS = 5


def attention(size: int, threshold: int, is_masked: bool = False) -> None:
    query, key, value = (aot_gate.empty(*PROBLEM, size, dtype=DTYPE) for _ in range(3))
    batch, _, length = PROBLEM
    mask = aot_gate.empty(batch, 1, length, length, dtype=torch.bool) if is_masked else None
    seed = aot_gate.empty(2, dtype=torch.int64) if threshold else None
    arguments = query, key, value, mask, None, seed, size**-0.5, length, length, False, threshold
    out, _, stats = FUNCTIONS["attention"](*arguments)
    FUNCTIONS["attention_backward"](out, None, out, stats, *arguments, False)


def _rows(columns: int) -> Tensor:
    return aot_gate.empty(8, ELEMENTS // columns // 8, columns, dtype=DTYPE)


def layer_norm(columns: int) -> None:
    input, grad, parameter = _rows(columns).flatten(0, 1), _rows(columns).flatten(0, 1), aot_gate.empty(columns)
    _, mean, rstd = FUNCTIONS["layer_norm"](input, parameter, parameter, 1e-5)
    FUNCTIONS["layer_norm_backward"](grad, input, mean, rstd, parameter, torch.float32, torch.float32)


def dropout_add_layer_norm(columns: int) -> None:
    input, residual, grad = (_rows(columns) for _ in range(3))
    parameter, seed = aot_gate.empty(columns), aot_gate.empty(2, dtype=torch.int64)
    arguments = input, residual, parameter, parameter, seed, THRESHOLD, 1e-5, True, DTYPE
    out, total, mean, rstd = FUNCTIONS["dropout_add_layer_norm"](*arguments)
    FUNCTIONS["dropout_add_layer_norm_backward"](
        out, grad, total, mean, rstd, parameter, seed, THRESHOLD, DTYPE, torch.float32, torch.float32
    )


def softmax_dropout(columns: int) -> None:
    input, seed = _rows(columns).unflatten(0, (2, 4)), aot_gate.empty(2, dtype=torch.int64)
    arguments = input, None, None, seed, 0.125, input.size(2), columns, False, THRESHOLD
    out, stats = FUNCTIONS["softmax_dropout"](*arguments)
    FUNCTIONS["softmax_dropout_backward"](out, stats, *arguments, False)


def dropout(columns: int) -> None:
    FUNCTIONS["dropout"](_rows(columns).flatten(0, 1), aot_gate.empty(2, dtype=torch.int64), THRESHOLD)


WIDTHS = 512, 1024, 4096, 8192
# By operation: what starts its kernels, and the bytes of an element that each of them must read and write.
ROW_OPERATIONS: dict[str, tuple[Callable[[int], None], dict[str, int]]] = {
    "layer_norm": (layer_norm, {"_forward": 4, "_backward": 6}),
    "dropout_add_layer_norm": (dropout_add_layer_norm, {"_forward": 8, "_backward": 10}),
    "softmax_dropout": (softmax_dropout, {"_forward": 4, "_backward": 6}),
    "dropout": (dropout, {"_dropout": 4}),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A call, and the kernels of it that a prediction is made for."""

    call: Callable[[], None]
    names: dict[str, str]  # by kernel, such as "forward d128 dropout sm_90"
    # By kernel: floating-point operations of attention, bytes of a row operation.
    work: dict[str, float]
    bytes: dict[str, int]  # of an element of a row operation


def cases(capability: int) -> Iterator[Case]:
    batch, heads, length = PROBLEM
    for is_masked, size, threshold in itertools.product((False, True), (64, 128), (0, THRESHOLD)):
        case = f"d{size}{' mask' if is_masked else ''}{' dropout' if threshold else ''} sm_{capability}"
        names = {kernel: f"{kernel.removesuffix('_kernel')} {case}" for kernel in PRODUCTS}
        product = 2.0 * batch * heads * length**2 * size
        work = {kernel: count * product for kernel, count in PRODUCTS.items()}
        yield Case(functools.partial(attention, size, threshold, is_masked), names, work, {})
    for operation, (call, bytes) in ROW_OPERATIONS.items():
        for columns in WIDTHS:
            names = {kernel: f"{operation}{_direction(kernel)} {columns} sm_{capability}" for kernel in bytes}
            work = {kernel: float(count * ELEMENTS) for kernel, count in bytes.items()}
            yield Case(functools.partial(call, columns), names, work, bytes)


def compiled(device: int, call: Callable[[], None], seen: set[int]) -> Iterator[tuple[Any, Any]]:
    """(jit function, compiled kernel) of what this call compiles and no call before has."""
    with torch.cuda.device(device), FakeTensorMode():
        call()
    for function, kernel in aot_gate.specialisations(device):
        if id(kernel) not in seen:
            seen.add(id(kernel))
            yield function, kernel


def predictions(device: int, capability: int, wanted: re.Pattern[str]) -> Iterator[dict[str, Any]]:
    """Every kernel of the cases whose name this pattern finds."""
    seen: set[int] = set()
    for case in cases(capability):
        if not any(map(wanted.search, case.names.values())):
            continue
        for function, kernel in compiled(device, case.call, seen):
            name = case.names.get(function.__name__, "")
            if name and wanted.search(name):
                if case.bytes:
                    yield {"name": name} | of_rows(function, kernel, capability, case.bytes[function.__name__])
                else:
                    yield {"name": name} | of_attention(function, kernel, capability)


def native_predictions(capability: int, wanted: re.Pattern[str]) -> Iterator[dict[str, Any]]:
    """The same of the CUDA C++ kernels, which are for rows."""
    for operation, (_, bytes) in ROW_OPERATIONS.items():
        names = {
            (kernel, columns): f"{operation}{_direction(kernel)} {columns} sm_{capability} CUDA C++"
            for kernel in bytes
            for columns in WIDTHS
        }
        if not any(map(wanted.search, names.values())):
            continue
        for kernel, columns, path, elements in native.row_kernels(operation, capability, THRESHOLD, aot_gate.TOOLS):
            if wanted.search(names[kernel, columns]):
                rows = Rows(capability, elements, bytes[kernel])
                yield {"name": names[kernel, columns]} | of_path(path, rows)


def _direction(kernel: str) -> str:
    return kernel.replace("_", " ") if kernel in ("_forward", "_backward") else ""


def _constants(function: Any, kernel: Any) -> dict[str, Any]:
    return {function.arg_names[path[0]]: value for path, value in kernel.src.constants.items() if len(path) == 1}


def of_attention(function: Any, kernel: Any, capability: int) -> dict[str, Any]:
    constants, binary = _constants(function, kernel), code.disassemble(kernel.asm["cubin"], aot_gate.TOOLS)
    keys_own = function.__name__ == "grad_key_value_kernel"
    size, own = constants["BLOCK_D"], constants["BLOCK_N" if keys_own else "BLOCK_M"]
    known = Attention(
        capability, size, PRODUCTS[function.__name__], binary.registers, 32 * kernel.metadata.num_warps,
        kernel.metadata.shared, (4 * size + (12 if keys_own else 0)) / own,
    )  # fmt: skip
    body = plain_loop(binary.instructions)
    tile = [constants["BLOCK_M"], constants["BLOCK_N"], kernel.metadata.num_warps, kernel.metadata.num_stages]
    about = {"tile": tile, "registers": binary.registers, "stack": binary.stack, "shared": kernel.metadata.shared}
    return about | (of_loop(Loop(body, known)) if body else {"error": "no loop with matrix products"})


def of_loop(loop: Loop) -> dict[str, Any]:
    low, high = loop.overlap
    return {
        "programs": loop.programs,
        "scores": loop.scores,
        "instructions": len(loop.body) / loop.scores,
        "instructions_by_pipe": loop.per_score,
        "clocks": loop.clocks,
        "predicted_tflops": {"no_overlap": low, "simulated": loop.simulated(), "full_overlap": high},
        "local_accesses": loop.local,
        "barriers": loop.barriers,
        "drains": loop.drains,
        "widths": widths(loop.body),
        "order": order(loop.body),
    }


def of_rows(function: Any, kernel: Any, capability: int, bytes: int) -> dict[str, Any]:
    constants, binary = _constants(function, kernel), code.disassemble(kernel.asm["cubin"], aot_gate.TOOLS)
    threads = 32 * kernel.metadata.num_warps
    rows = Rows(capability, constants["BLOCK_M"] * constants["BLOCK_N"] / threads, bytes)
    tile = [constants["BLOCK_M"], constants["BLOCK_N"], kernel.metadata.num_warps]
    about = {"tile": tile, "registers": binary.registers, "stack": binary.stack}
    return about | of_path(row_path(binary.instructions), rows)


def of_path(path: list[code.Instruction], rows: Rows) -> dict[str, Any]:
    return {
        "instructions": len(path) / rows.elements,
        "predicted_issue_share": issue_share(path, rows),
        "widths": widths(path),
    }


# ---- what is printed ----


def line(found: dict[str, Any]) -> str:
    head = f"{found['name']:50}"
    if "tile" in found:
        head += f" {'x'.join(map(str, found['tile'])):14} {found['registers']:3} registers"
    if "error" in found:
        return f"{head}  {found['error']}"
    if "predicted_issue_share" in found:
        accesses = {name: count for name, count in found["widths"].items() if name in ("LDG", "STG")}
        return (
            f"{head}  predicted {found['predicted_issue_share']:4.0%} of the issue slots at the memory's speed, "
            f"{found['instructions']:.1f} instructions an element, {accesses}"
        )
    rates, clocks = found["predicted_tflops"], found["clocks"]
    return (
        f"{head}  predicted {rates['simulated']:4.0f} TFLOP/s "
        f"({rates['no_overlap']:.0f} to {rates['full_overlap']:.0f}), "
        f"{found['instructions']:.1f} instructions a score, "
        f"clocks: {' '.join(f'{pipe} {needed:.1f}' for pipe, needed in clocks.items() if needed)}, "
        f"{found['programs']} programs, local {found['local_accesses']}, barriers {found['barriers']}, "
        f"drains {found['drains']}"
    )


def tables(results: dict[str, Any]) -> str:
    """The page's."""
    ours = {found["name"]: found for found in results["kernels"]}
    lines = [
        f"Predicted from the machine code that Triton {results['versions']['triton']} makes of commit "
        f"{results['commit'][:7]}; nothing here was measured.\n",
        "| attention, bfloat16, TFLOP/s | predicted | FlashAttention 2, predicted (published) | FlashAttention 3 |",
        "| --- | --- | --- | --- |",
    ]
    for capability, machine in MACHINES.items():
        for direction in ("forward", "backward"):
            for case in ("d64", "d128", "d64 dropout", "d128 dropout"):
                rate = _rate(ours, direction, f"{case} sm_{capability}")
                if rate is None:
                    continue
                kind = {"forward": "fwd", "backward": "bwd"}[direction]
                peers = [_peer(results["public"], f"{peer}_{kind}", case, capability) for peer in ("fa2", "fa3")]
                size = case.replace("d", "D=", 1).replace(" dropout", ", dropout 0.1")
                lines.append(f"| {machine.name} {direction} {size} | predicted {rate:.0f} | {' | '.join(peers)} |")
    lines += [
        "",
        "| backward pass, bfloat16, TFLOP/s | predicted of two kernels | of one, dQ's traffic behind it or beside |",
        "| --- | --- | --- |",
    ]
    for capability in (80, 90):
        for head_dim in (64, 128):
            for name in (f"d{head_dim}", f"d{head_dim} dropout"):
                two = _rate(ours, "backward", f"{name} sm_{capability}")
                after, beside = one_pass(ours, head_dim, name, capability)
                lines.append(
                    f"| {MACHINES[capability].name} {name.replace('d', 'D=', 1).replace(' dropout', ', dropout 0.1')} "
                    f"| predicted {two:.0f} | predicted {after:.0f} to {beside:.0f} |"
                )
    lines += [
        "",
        "| main loop | tile, warps, stages | predicted, TFLOP/s, from no overlap to full | instructions a score "
        "| clocks of tensor cores, shared memory, issue | stack accesses, barriers, drains |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in ours.items():
        if "predicted_tflops" in found:
            rate, clocks = found["predicted_tflops"], found["clocks"]
            drains = found["drains"] if name.endswith("sm_90") else "-"
            lines.append(
                f"| {name} | {'x'.join(map(str, found['tile'][:2]))}, {found['tile'][2]}, {found['tile'][3]} "
                f"| predicted {rate['simulated']:.0f}, {rate['no_overlap']:.0f} to {rate['full_overlap']:.0f} "
                f"| {found['instructions']:.1f} "
                f"| {clocks['tensor']:.1f}, {clocks['shared']:.1f}, {clocks['issue']:.1f} "
                f"| {found['local_accesses']}, {found['barriers']}, {drains} |"
            )
    lines += [
        "",
        "Above 100 %: the issue slots, not the memory, bound the kernel.",
        "",
        "| rows, bfloat16 | predicted share of the issue slots at the memory's speed | instructions an element "
        "| bits of global loads; stores | CUDA C++: predicted share, instructions |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, found in ours.items():
        if "predicted_issue_share" in found and "tile" in found:
            peer = ours[f"{name} CUDA C++"]
            loads, stores = (
                ", ".join(f"{count} of {bits}" for bits, count in found["widths"].get(kind, {}).items())
                for kind in ("LDG", "STG")
            )
            lines.append(
                f"| {name} | predicted {found['predicted_issue_share']:.0%} | {found['instructions']:.1f} "
                f"| {loads}; {stores} | predicted {peer['predicted_issue_share']:.0%}, {peer['instructions']:.1f} |"
            )
    return "\n".join(lines)


def _rate(ours: dict[str, Any], direction: str, case: str) -> float | None:
    """TFLOP/s; of our backward pass, of two kernels, by the products that FlashAttention counts."""
    kernels = ("forward",) if direction == "forward" else ("grad_query", "grad_key_value")
    found = [ours.get(f"{kernel} {case}", {}).get("predicted_tflops", {}).get("simulated") for kernel in kernels]
    if not all(found):
        return None
    if direction == "forward":
        return float(found[0])
    return BACKWARD_PRODUCTS / sum(
        PRODUCTS[f"{kernel}_kernel"] / rate for kernel, rate in zip(kernels, found, strict=True)
    )


def one_pass(ours: dict[str, Any], size: int, case: str, capability: int) -> tuple[float, float]:
    """TFLOP/s of five products that one backward kernel is estimated to reach: the loop of dK and dV and dQ's product
    after it, with dQ, which is read and written in float32, after that or beside it."""
    machine, found = MACHINES[capability], ours[f"grad_key_value {case} sm_{capability}"]
    of_product = 2 * size * 32 * machine.multiprocessors * machine.clock / 1e3  # TFLOP/s at a clock for 32 scores
    loop = of_product * PRODUCTS["grad_key_value_kernel"] / found["predicted_tflops"]["simulated"]
    loop += size * 32 / (machine.matrix or machine.mma)
    traffic = 32 * 8 * size / found["tile"][1] / machine.l2
    beside = max(loop, found["clocks"]["l2"] + traffic)
    return BACKWARD_PRODUCTS * of_product / (loop + traffic), BACKWARD_PRODUCTS * of_product / beside


def _peer(peers: dict[str, Any], kind: str, case: str, capability: int) -> str:
    found = peers.get(f"{kind}_{case.replace(' dropout', '_drop')}_sm{capability}")
    if found is None:
        return ""
    published = f" ({found['published']})" if found["published"] else ""
    return f"predicted {found['predicted_tflops']['simulated']:.0f}{published}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", choices=MACHINES, default=list(MACHINES))
    parser.add_argument("--only", type=re.compile, default="", help="a regular expression of names that are printed")
    parser.add_argument("--write", action="store_true", help="results and tables of all, beside what is printed")
    parser.add_argument("--public", type=Path, metavar="FOLDER", help="of NAME.sass.xz")
    options = parser.parse_args(arguments)
    if options.public:
        try:
            loops = public.condense(options.public)
        except (OSError, ValueError) as error:
            parser.error(f"--public: {error}")
        write_file(public.LOOPS, lzma.compress(loops.encode(), preset=9 | lzma.PRESET_EXTREME))
        return 0
    wanted = re.compile(options.only)
    if options.write and (wanted.pattern or options.arch != list(MACHINES)):
        parser.error("--write is of all kernels: leave out --only and --arch")
    pretend(*options.arch)
    kernels, commit = [], report.commit()
    for device, capability in enumerate(options.arch):
        of_both = predictions(device, capability, wanted), native_predictions(capability, wanted)
        for found in itertools.chain(*of_both):
            kernels.append(found)
            print(line(found), flush=True)
    if not kernels:
        parser.error(f"no kernel's name has {wanted.pattern!r}: they are such as 'forward d128 dropout sm_90'")
    if options.write:
        peers = {
            name: of_loop(loop) | {"published": public.PUBLISHED.get(name)} for name, loop in public.loops().items()
        }
        versions = {"triton": triton.__version__, "torch": torch.__version__}
        about = "predicted from machine code, not measured"
        results = {"about": about, "versions": versions, "commit": commit, "kernels": kernels, "public": peers}
        report.write_json(RESULTS, results)
        report.insert(PAGE, "machine-code", tables(results))
    return 0


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("machine_code: unset TRITON_INTERPRET, under which nothing is compiled")
    sys.exit(main())
