"""Kernels whose speed on a GPU is published: what the model says of them is held to that.

FlashAttention 2 as compiled for torch 2.14.1, FlashAttention 3 for xformers 0.0.33.post2, bfloat16. ``public.sass.xz``
has one iteration of each one's main loop.
"""

from __future__ import annotations

import lzma
import re
from collections.abc import Iterator
from pathlib import Path

from sass.code import Instruction, parse, written
from sass.cost import Attention, Loop, plain_loop

LOOPS = Path(__file__).with_name("public.sass.xz")

# TFLOP/s, dense, long sequences: the middle of what the papers and the projects' pages report (arXiv 2307.08691,
# 2407.08608; github.com/Dao-AILab/flash-attention).
PUBLISHED = {
    "fa2_fwd_d128_sm80": 220, "fa2_fwd_d64_sm80": 185, "fa2_bwd_d128_sm80": 192, "fa2_bwd_d64_sm80": 170,
    "fa2_fwd_d128_sm90": 375, "fa2_fwd_d64_sm90": 320, "fa2_fwd_d128_drop_sm90": 330, "fa2_bwd_d128_sm90": 315,
    "fa2_bwd_d64_sm90": 285, "fa3_fwd_d128_sm90": 650, "fa3_fwd_d64_sm90": 490, "fa3_bwd_d128_sm90": 550,
    "fa3_bwd_d64_sm90": 430,
}  # fmt: skip


def _fetched(head_dim: int, own: int, backward: bool) -> float:
    """Bytes a score: two operands of the other side, 16 bits a number, for all rows that a program owns; the backward
    pass adds dQ in float32."""
    return 4 * head_dim / own + (8 * head_dim / own if backward else 0)


def _kernels() -> Iterator[tuple[str, Attention]]:
    """By each one's traits: its tiles, and what shared memory they take."""
    shared = {(128, False): 64, (64, False): 48, (128, True): 48, (64, True): 32}  # KiB
    for capability in (80, 90):
        for (head_dim, is_dropping), kibibytes in shared.items():
            name = f"d{head_dim}{'_drop' if is_dropping else ''}_sm{capability}"
            forward = _fetched(head_dim, 128, False)
            yield f"fa2_fwd_{name}", Attention(capability, head_dim, 2, 255, 128, kibibytes << 10, forward)
            backward = _fetched(head_dim, 128, True)
            yield f"fa2_bwd_{name}", Attention(capability, head_dim, 5, 255, 256, 140000, backward)
    # One program an SM. A warpgroup copies and the others multiply; the first of these shares what it copies with
    # another SM.
    yield "fa3_fwd_d128_sm90", Attention(90, 128, 2, 168, 384, 200000, _fetched(128, 128, False) / 2, warps=8)
    yield "fa3_fwd_d64_sm90", Attention(90, 64, 2, 128, 512, 200000, _fetched(64, 192, False), warps=12)
    for head_dim in (64, 128):
        backward = _fetched(head_dim, 128, True)
        yield f"fa3_bwd_d{head_dim}_sm90", Attention(90, head_dim, 5, 168, 384, 200000, backward, warps=8)


KERNELS = dict(_kernels())


def read(path: Path) -> dict[str, list[Instruction]]:
    """A file of main loops, by name."""
    with lzma.open(path, "rt") as file:
        parts = re.split(r"^# (\w+)\n", file.read(), flags=re.M)[1:]
    return {name: plain_loop(parse(disassembly)) for name, disassembly in zip(parts[::2], parts[1::2], strict=True)}


def loops() -> dict[str, Loop]:
    """By name."""
    return {name: Loop(body, KERNELS[name]) for name, body in read(LOOPS).items()}


def condense(folder: Path) -> str:
    """The main loops of a folder's disassemblies NAME.sass.xz, each by ``cuobjdump --dump-sass --function`` of what the
    projects ship."""
    parts = []
    for name in KERNELS:
        with lzma.open(folder / f"{name}.sass.xz", "rt") as file:
            body = plain_loop(parse(file.read()))
        if not body:
            raise ValueError(f"{name}: no loop with matrix products")
        parts.append(f"# {name}\n{written(body)}")
    return "".join(parts)
