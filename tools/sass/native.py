"""The CUDA C++ row kernels as a usual call executes them.

They are compiled for no dtype and for few shapes, so that a call takes one of many paths through a kernel. Here a copy
of the sources is compiled with the call's problem as constants in it: what the compiler leaves is that path.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from sass.code import Instruction, parse
from sass.loops import natural_loops, successors

CSRC = Path(__file__).resolve().parent.parent.parent / "csrc"
sys.path.insert(0, str(CSRC))
import native_build  # noqa: E402

# What a call in bfloat16 with float32 weights sets in the kernels' problems.
_ROWS = "p.matrices = 8, p.rows = 4096, p.columns = columns"
_SCORES = (
    "Scores& s = p.scores; s.batch = 2, s.heads = 4, s.rows = 4096, s.columns = columns, s.dtype = Dtype::bfloat16,"
    " s.mask.data = nullptr, s.key_lengths = nullptr, s.window_left = 4096, s.window_right = columns,"
    " s.lower_right = false, s.input.row = columns, p.threshold = THRESHOLD"
)
_NORM = (
    f"{_ROWS}, p.dtype = p.out_dtype = p.input_dtype = p.residual_dtype = Dtype::bfloat16,"
    " p.input_row = p.residual_row = columns,"
    " p.weight_dtype = p.bias_dtype = Dtype::float32"
)
_NORM_BACKWARD = (
    f"{_ROWS}, p.dtype = p.grad_out_dtype = p.input_dtype = Dtype::bfloat16,"
    " p.grad_out_row = p.x_row = p.grad_sum_row = columns,"
    " p.weight_dtype = p.grad_weight_dtype = p.grad_bias_dtype = Dtype::float32"
)
# By operation: its file, and by the type of its kernels' problems what is set there.
CALLS = {
    "layer_norm": (
        "layer_norm.cu",
        {
            "LayerNorm": f"{_NORM}, p.threshold = 0, p.residual = p.sum = nullptr",
            "LayerNormBackward": f"{_NORM_BACKWARD}, p.threshold = 0, p.grad_sum = p.grad_input = nullptr",
        },
    ),
    "dropout_add_layer_norm": (
        "layer_norm.cu",
        {
            "LayerNorm": f"{_NORM}, p.threshold = THRESHOLD",
            "LayerNormBackward": f"{_NORM_BACKWARD}, p.threshold = THRESHOLD",
        },
    ),
    "softmax_dropout": (
        "softmax_dropout.cu",
        {
            "SoftmaxDropout": _SCORES,
            "SoftmaxDropoutBackward": f"{_SCORES}, p.grad_out.row = columns, p.grad_mask = nullptr",
        },
    ),
    "dropout": (
        "dropout.cu",
        {
            "Dropout": "p.outer = 1, p.inner = 8, p.rows = 4096, p.columns = columns, p.dtype = Dtype::bfloat16,"
            " p.input_row = p.out_row = columns, p.threshold = THRESHOLD",
        },
    ),
}
# The widths that are asked for, by who works on a row; the last of them is the constant.
WIDTHS = {"warp": (512,), "block": (1024, 4096), "pieces": (8192,)}
PIECES = 2  # of a row of 8192
HELD = 16  # elements of a row that a thread has at once

_SIGNATURE = re.compile(r"(\w+)\(const (\w+) p, (.*?)(bool|Wide) wide\) \{")
_NAMES = {"normalise": "_forward", "differentiate": "_backward"}
_KERNEL = re.compile(r"(normalise|differentiate|drop_rows)(?:ILNS\d_4SpanE(\d))?")


def specialised(source: str, problems: dict[str, str], threshold: int) -> str:
    """The kernels' source with these problems, and aligned rows, as constants."""
    fixed = "".join(
        f"template <int64_t columns, class Wide> __device__ void fix({problem}& p, Wide& wide) "
        f"{{ wide = Wide{{true}}; {constants.replace('THRESHOLD', str(threshold))}; }}\n"
        for problem, constants in problems.items()
    )
    fixed = f"namespace fastattn::cuda {{ namespace {{\n{fixed}}} }}\n"

    def signature(match: re.Match[str]) -> str:
        name, problem, others, wide = match.groups()
        if problem not in problems or name == "add_rows":
            return match[0]
        warp, block, pieces = (widths[-1] for widths in WIDTHS.values())
        columns = f"kSpan == Span::warp ? {warp} : kSpan == Span::block ? {block} : {pieces}"
        columns = str(block) if name == "drop_rows" else columns
        return f"{name}({problem} p, {others}{wide} wide) {{ fix<({columns})>(p, wide);"

    include = '#include "rows.h"\n'
    return _SIGNATURE.sub(signature, source.replace(include, include + fixed, 1))


def executed(code: Sequence[Instruction], times: Sequence[int]) -> list[Instruction]:
    """What a thread issues where branches fall through: what is in no loop, in one, in two or more, so many times."""
    follow = successors(code)
    loops = natural_loops(follow)
    path: dict[int, None] = {}  # in order
    at: int | None = 0
    while at is not None:
        path[at] = None
        ahead = [place for place in follow[at] if place not in path]
        if not ahead and follow[at]:  # back at the head of a loop: on from where it is left
            body = loops.get(follow[at][-1], set())
            left = (place for one in reversed(path) if one in body for place in follow[one])
            ahead = [place for place in left if place not in body and place not in path]
        at = next(iter(ahead), None)
    depths = [sum(place in body for body in loops.values()) for place in path]
    counts = [times[min(depth, len(times) - 1)] for depth in depths]
    return [code[place] for place, count in zip(path, counts, strict=True) for _ in range(count)]


def row_kernels(
    operation: str, capability: int, threshold: int, tools: Path
) -> Iterator[tuple[str, int, list[Instruction], int]]:
    """(kernel's name in Triton, columns, what a thread executes, for how many elements) of an operation's kernels."""
    name, problems = CALLS[operation]
    with tempfile.TemporaryDirectory() as folder:
        copy, cubin = Path(folder, "csrc"), Path(folder, "kernels.cubin")
        shutil.copytree(CSRC, copy)
        source = copy / "cuda" / name
        source.write_text(specialised(source.read_text(), problems, threshold))
        flags = "-std=c++17", "-O3", f"-arch=sm_{capability}", "-cubin", "-o", cubin
        subprocess.run([native_build.nvcc()[0], *flags, source], check=True, capture_output=True)
        command = tools / "cuobjdump", "--dump-sass", cubin
        disassembly = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for part in disassembly.split("Function : ")[1:]:
        symbol, text = part.split("\n", 1)
        kernel = _KERNEL.search(symbol)
        if kernel is None:
            continue
        if kernel[1] == "drop_rows":
            for columns in sum(WIDTHS.values(), ()):
                yield "_dropout", columns, executed(parse(text), (1,)), HELD
            continue
        widths = list(WIDTHS.values())[int(kernel[2])]
        pieces = PIECES if widths == WIDTHS["pieces"] else 1
        # LayerNorm's backward pass has a loop over pairs of rows, of which an iteration is counted alone.
        is_strided = kernel[1] == "differentiate" and "norm" in operation
        code = executed(parse(text), (0, 1, 2, 2 * pieces) if is_strided else (1, 2, 2 * pieces))
        for columns in widths:
            yield _NAMES[kernel[1]], columns, code, 2 * HELD * pieces
