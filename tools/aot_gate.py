"""Compile Triton's kernels ahead of time and examine them without a GPU: ``python tools/aot_gate.py``.

The gate calls the backend's functions on fake CUDA tensors. Kernels start through Triton's own launcher on GPUs that do
not exist (``fake_gpu``), so Triton compiles exactly the kernels that a GPU would run. Per kernel the gate prints
registers, bytes of stack (spills) and shared memory. For a main loop with matrix products it also prints instructions
per score, stack accesses, barriers and waits for all products. It adds the clocks of shared memory over those of the
tensor cores, layout conversions and the matrix instructions. The exit status is 1 on a fault.

``--counts`` adds what ``sass`` counts in the main loop: instructions per score by pipe, clocks of the tensor cores,
shared memory and issue slots, access widths, the order of products and waits. Compare it before and after a change of a
kernel, for instance with ``--arch 90 --operation attention --sample usual``.

Faults of any kernel:
- spills that cost time;
- aligned rows accessed by 16 bits at a time, or less than half of them by 128 bits;
- more shared memory than the architecture has (on sm_80 the 99 KiB of 8.6 and 8.9);
- no matrix instructions in the main loop; no wgmma on sm_90 if a tile has the 64 rows that it requires;
- tensor descriptors, but no bulk loads;
- tf32 that the caller has not allowed;
- offsets of 32 bits;
- layout conversions that the same kernel without dropout does not have.

Faults of the loops where attention's usual calls spend their time:
- a tile's rows loaded by fewer than 128 bits at a time;
- more barriers or waits than overlap allows;
- shared memory that takes longer than the tensor cores.

One process per processor compiles. Triton's cache keeps the kernels and the reports on them, so a second
run repeats only what a change affects.

Dropout adds no layout conversion if one thread's part of a product fits dropout's tiles. The part always fits with
wgmma. With mma it fits if a tile has at least as many rows as a head has columns. Regular operands have 16 bits, no
mask and aligned rows of a power of 2, and are not packed. All of their tiles up to head size 64 have so many rows,
except those of few queries. Other tiles may have fewer rows for lack of registers or shared memory. float32 without
tf32 and the tensor memory of sm_100 have other layouts.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import multiprocessing
import os
import pickle
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.cache import get_cache_manager

from fake_gpu import SHARED_MEMORY, pretend
from fastattn.backends.schema import RECORDS
from fastattn.backends.triton import FUNCTIONS
from fastattn.backends.triton.attention import scores, tiles
from sass.code import disassemble
from sass.counts import Loop, plain_loop, wide_share
from sass.loops import inside

# Most bytes of stack per kernel, and the largest share of the plain loop's instructions (in row operations: of all
# instructions) that may access it. Values that stay on the stack during the loop cost nothing. A larger tile may be
# worth a few accesses: FlashAttention 2 has up to 376 bytes and 1 access in 46 instructions.
MOST_STACK = 384
MOST_LOCAL = 1 / 25
# Exceptions by kernel, architecture and padded head size. Measurement on an H100 chose the tiles of sm_90, except those
# with a mask at head size 128; tiles of other architectures were not measured.
LOCAL = {
    # Short sequences, 1 in 17.
    ("grad_key_value_kernel", 90, 128): 1 / 16,
    # With dropout and key lengths 1 in 21, with a mask and split keys 1 in 20. With dropout 1 in 15 under Triton 3.8,
    # whose ptxas takes two instructions for an XOR of three words.
    ("forward_kernel", 90, 128): 1 / 14,
    # Regular operands, 1 in 22: 19.1 instructions per score, 20.1 with eight warps, which do not spill.
    ("forward_kernel", 80, 128): 1 / 21,
    # Heads of 80 with dropout and a float mask, 1 in 21; on sm_120 heads of 128, 1 in 23.
    ("grad_query_kernel", 80, 128): 1 / 20,
    ("grad_query_kernel", 120, 128): 1 / 20,
    # Short sequences with dropout under Triton 3.6, 1 in 17.
    ("grad_query_kernel", 90, 64): 1 / 17,
}

# Bounds of the plain loop in attention's usual calls: 16-bit regular operands, head sizes up to 128, at least 64 rows
# per program. They hold on the architectures where the loop is designed to overlap.
# Clocks of shared memory over clocks of the tensor cores. FlashAttention's backward passes have 1.06 (2, on A100) and
# 1.12 (3).
MOST_SHARED = 1.15
# dK and dV of 64 keys fill the registers of four warps. On sm_80 a fragment from shared memory serves only 16 keys; on
# sm_90 Triton 3.6 copies the rows' statistics by 32 bits per thread.
SHARED = {
    ("grad_key_value_kernel", 80, 64): 1.9,
    ("grad_key_value_kernel", 80, 128): 1.9,
    ("grad_key_value_kernel", 90, 64): 1.3,
}
# Barriers. A loop that copies ahead has one before it reads the copies and one after. On sm_90 it has two around each
# of two bulk loads, and two for operands that threads write.
MOST_BARRIERS = {80: 2, 90: 6}
# Waits for all of wgmma's products. The last product needs none, because it overlaps with the next tile's first.
MOST_DRAINS = {"forward_kernel": 1, "grad_query_kernel": 2, "grad_key_value_kernel": 2}

# Matrix products per loop iteration along the head size of queries and keys, and along that of values; with operands of
# 16 bits also products with ones, which have few columns.
PRODUCTS = {"forward_kernel": (1, 1, 1), "grad_query_kernel": (2, 1, 1), "grad_key_value_kernel": (2, 2, 0)}

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

# ---- The kernels to compile ----


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=f"cuda:{torch.cuda.current_device()}")


def call(name: str, *arguments: Any) -> Any:
    """Call a backend function with the fields of its record, in their order."""
    return FUNCTIONS[name](RECORDS[name](*arguments))


def _seed(threshold: int = 1) -> Tensor | None:
    return empty(2, dtype=torch.int64) if threshold else None


def _dropout(dtype: torch.dtype, rows: int, columns: int) -> None:
    for input in empty(2, rows, columns, dtype=dtype), empty(columns, rows, 2, dtype=dtype).permute(2, 1, 0):
        call("dropout", input, _seed(), 6554)
    call("dropout_mask", (2, rows, columns), _seed(), 6554)


def _layer_norm(dtype: torch.dtype, columns: int) -> None:
    input, parameter = empty(64, columns, dtype=dtype), empty(columns)
    _, mean, rstd = call("layer_norm", input, parameter, parameter, 1e-5)
    call("layer_norm_backward", input, input, mean, rstd, parameter, torch.float32, torch.float32)


def _dropout_add_layer_norm(dtype: torch.dtype, columns: int, threshold: int) -> None:
    input, parameter, residual = empty(8, 64, columns, dtype=dtype), empty(columns), empty(8, 64, columns)
    rest = parameter, parameter, _seed(), threshold, 1e-5, True
    for out_dtype in dict.fromkeys((dtype, residual.dtype)):  # in this order
        out, total, mean, rstd = call("dropout_add_layer_norm", input, residual, *rest, out_dtype)
        dtypes = dtype, torch.float32, torch.float32
        given = out, total, total, mean, rstd, parameter, _seed(), threshold
        call("dropout_add_layer_norm_backward", *given, *dtypes)


def _softmax_dropout(dtype: torch.dtype, columns: int, mask: torch.dtype | None, threshold: int) -> None:
    input = empty(2, 4, 64, columns, dtype=dtype)
    attn_mask = None if mask is None else empty(2, 1, 1, columns, dtype=mask)
    for right in (0, columns):  # causal; every row sees every column
        fields = input, attn_mask, None, _seed(), 0.125, 64, right, False, threshold
        out, stats = call("softmax_dropout", *fields)
        mask_grad = mask is not None and mask != torch.bool
        call("softmax_dropout_backward", out, stats, RECORDS["softmax_dropout"](*fields), mask_grad)


def _attention(
    dtype: torch.dtype, size: int, mask: torch.dtype | None, threshold: int, value_size: int | None = None,
    tf32: bool = False, queries: int = 256, keys: int = 512, mask_columns: int | None = None, plain: bool = False,
) -> None:  # fmt: skip
    """Call with enough sequences and heads to occupy any device, and with every option unless ``plain``."""
    query, key = empty(32, 8, queries, size, dtype=dtype), empty(32, 2, keys, size, dtype=dtype)
    value = empty(32, 2, keys, value_size or size, dtype=dtype)
    attn_mask = None if mask is None else empty(32, 1, queries, mask_columns or keys, dtype=mask)
    lengths, left = (None, queries) if plain else (empty(32, dtype=torch.int64), keys)
    half = dtype.itemsize == 2
    fields = query, key, value, attn_mask, lengths, _seed(threshold), 0.125, left, 0, not plain, threshold, half
    is_float = mask is not None and mask != torch.bool
    torch.backends.cuda.matmul.allow_tf32 = tf32
    out, lse, stats, residual = call("attention", *fields)
    record = RECORDS["attention"](*fields)
    call("attention_backward", out, None if plain else lse, out, stats, residual, record, is_float)
    torch.backends.cuda.matmul.allow_tf32 = False


def _plain_attention(dtype: torch.dtype, size: int, mask: torch.dtype | None, threshold: int) -> None:
    """Call with the most usual options: no key lengths, upper left, no gradient of the LSE."""
    _attention(dtype, size, mask, threshold, plain=True)


def _attention_of_columns(dtype: torch.dtype, size: int, threshold: int) -> None:
    """Call with a mask whose columns are not dense: they broadcast."""
    _attention(dtype, size, torch.float32, threshold, mask_columns=1)


def _long_attention(dtype: torch.dtype, size: int, mask: torch.dtype | None, threshold: int) -> None:
    """Call with enough rows for tensor descriptors, on devices that have them."""
    rows = tiles.DESCRIPTOR_ROWS
    _attention(dtype, size, mask, threshold, queries=rows, keys=rows)


def _few_queries(
    dtype: torch.dtype, size: int, mask: torch.dtype | None, threshold: int = 0, batch: int = 32, queries: int = 1,
    keys: int = 1024,
) -> None:  # fmt: skip
    """Call with a cache, whose keys are split unless the batch is large enough to occupy any device."""
    query, key = empty(batch, 8, queries, size, dtype=dtype), empty(batch, 2, keys, size, dtype=dtype)
    attn_mask = None if mask is None else empty(batch, 1, 1, keys, dtype=mask)
    lengths = empty(batch, dtype=torch.int64)
    call("attention", query, key, key, attn_mask, lengths, _seed(threshold), 0.125, keys, 0, True, threshold, False)


def _varlen_attention(dtype: torch.dtype, size: int, threshold: int, longest: int = 128) -> None:
    query, key = empty(512, 4, size, dtype=dtype), empty(512, 2, size, dtype=dtype)
    starts = empty(9, dtype=torch.int64)
    half = dtype.itemsize == 2
    fields = query, key, key, starts, starts, None, _seed(threshold), longest, 128, 0.125, 128, 0, threshold, half
    out, lse, stats, residual = call("varlen_attention", *fields)
    call("varlen_attention_backward", out, lse, out, stats, residual, RECORDS["varlen_attention"](*fields))


HALF, SINGLE = torch.bfloat16, torch.float32
SIZES, MASKS, THRESHOLDS = (64, 128, 256), (None, torch.bool, torch.float32), (0, 6554)
USUAL = [*product((HALF, SINGLE), SIZES)]
OPERANDS: list[tuple[Any, ...]] = [
    *product((HALF,), SIZES),
    # Head sizes that are not powers of 2; then also rows that do not begin at multiples of 16 bytes.
    *((HALF, 80), (HALF, 192, 128)),
    *product((torch.float16,), (59, 100, 250)),
    *product((SINGLE,), (*SIZES, 59, 100, 250)),
    *((SINGLE, size, size, True) for size in (64, 128)),
]
LONG = (*product((64, 128), MASKS), (256, None), (80, None))
FEW = ((None,), (torch.bool,), (torch.float32,), (None, 6554), (None, 0, 1, 1, 8192))
CASES: dict[str, list[tuple[Any, ...]]] = {
    "attention": [
        *((_attention, *o[:2], mask, p, *o[2:]) for o, mask, p in product(OPERANDS, MASKS, THRESHOLDS)),
        *((_plain_attention, *o, mask, p) for o, mask, p in product(USUAL, MASKS, THRESHOLDS)),
        *((_attention, torch.float16, size, None, p) for size, p in product((64, 128), THRESHOLDS)),
        *((_attention_of_columns, *o, p) for o, p in product(USUAL[:4], THRESHOLDS)),
        *((_long_attention, HALF, *o, p) for o, p in product(LONG, THRESHOLDS)),
        *((_few_queries, *o, *few) for o, few in product((*USUAL, *product((torch.float16,), (59, 100, 250))), FEW)),
        (_few_queries, HALF, 128, torch.bool, 0, 1, 64, 8192),
        *(
            (_varlen_attention, *o, *others)
            for o, others in product((*USUAL, *product((torch.float16,), (59, 80, 250))), ((0,), (6554,), (0, 1)))
        ),
    ],
    "dropout": [
        (_dropout, HALF, 64, 512),
        (_dropout, torch.float32, 64, 4096),
        (_dropout, torch.float32, 7, 33),
        (_dropout, HALF, 64, 16),
    ],
    "layer_norm": [
        *((_layer_norm, HALF, columns) for columns in (16, 77, 512, 8192, 16384, 32768)),
        *((_layer_norm, torch.float32, columns) for columns in (1024, 16384)),
        *((_dropout_add_layer_norm, HALF, columns, 6554) for columns in (16, 77, 512, 8192, 16384, 32768)),
        (_dropout_add_layer_norm, HALF, 512, 0),
    ],
    "softmax_dropout": [
        *((_softmax_dropout, HALF, columns, None, 6554) for columns in (16, 77, 512, 8192, 16384, 32768)),
        (_softmax_dropout, HALF, 512, torch.bool, 0),
        (_softmax_dropout, HALF, 16384, torch.float32, 6554),
        *((_softmax_dropout, torch.float32, columns, torch.float32, 6554) for columns in (512, 1024)),
    ],
}


# Some cases of each operation, for every change: those of usual calls, and those of the tiles that are hardest for
# dropout.
SAMPLES: dict[str, dict[str, list[tuple[Any, ...]]]] = {
    "usual": {
        "attention": [(_long_attention, HALF, 64, None, p) for p in THRESHOLDS],
        "dropout": CASES["dropout"][:1],
        "layer_norm": [(_layer_norm, HALF, 512), (_dropout_add_layer_norm, HALF, 512, 6554)],
        "softmax_dropout": [(_softmax_dropout, HALF, 512, None, 6554)],
    },
    "hard": {
        "attention": [
            *((_long_attention, HALF, 128, None, p) for p in THRESHOLDS),
            *((_plain_attention, HALF, 64, torch.bool, p) for p in THRESHOLDS),
            *((_varlen_attention, HALF, 128, p) for p in THRESHOLDS),
            (_few_queries, HALF, 64, None),
        ],
        "softmax_dropout": [(_softmax_dropout, HALF, 512, torch.bool, 0)],
    },
}


def run(device: int, function: Any, *arguments: Any) -> list[tiles.Tile]:
    """Start every kernel of a case on this device. Return the tiles that attention's tables gave."""
    choose, chosen = tiles.choose, []

    def record(*arguments: Any) -> tiles.Tile:
        chosen.append(choose(*arguments))
        return chosen[-1]

    with torch.cuda.device(device), FakeTensorMode(), mock.patch.object(tiles, "choose", record):
        function(*arguments)
    return chosen


def lines(device: int) -> dict[str, tiles.Tile]:
    """Return the tiles in attention's tables for this device, by dtype, kernel and head size."""
    operands = (torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)
    return {
        f"{dtype}{'' if is_aligned else ', not aligned'}: {kernel}, head {size}": tile
        for dtype, is_aligned in operands
        for kernel, line in tiles.table(dtype, is_aligned, torch.device("cuda", device)).items()
        for size, tile in line.items()
    }


def specialisations(device: int) -> Iterator[tuple[Any, Any]]:
    """Yield (jit function, compiled kernel) for every kernel that was started on this device."""
    for name, module in list(sys.modules.items()):
        for function in vars(module).values() if name.startswith("fastattn.backends.triton.") else ():
            is_own = isinstance(function, triton.JITFunction) and function.__module__ == name
            if is_own and device in function.device_caches:
                yield from ((function, kernel) for kernel in function.device_caches[device][0].values())


# ---- The report on a kernel ----


@dataclasses.dataclass(frozen=True)
class Report:
    """Facts of one compiled kernel, which has not run."""

    name: str
    capability: int
    variant: tuple[tuple[str, str], ...]  # constants and types of the arguments
    registers: int
    stack: int  # bytes
    # The plain loop; the whole kernel if no loop has matrix instructions.
    local: int  # accesses to the stack
    instructions: int
    per_score: float | None  # instructions per thread and score, in attention
    counts: str  # the lines of ``--counts``
    barriers: int
    drains: int  # Waits for all products of a warpgroup.
    shared_clocks: float | None  # Clocks of shared memory over clocks of the tensor cores.
    wide_loads: float  # Share of bytes loaded from global memory by 128 bits at a time, without bulk loads.
    # The whole kernel.
    wide_accesses: float  # Share of bytes loaded and stored by 128 bits at a time.
    narrow_accesses: int  # Accesses to global memory of at most 16 bits.
    stages: int  # Tiles copied ahead, plus the present one.
    shared: int  # Bytes of shared memory.
    conversions: int  # Layout conversions in loops with matrix products.
    products: int  # Matrix products in loops, in Triton's IR.
    matrix_instructions: tuple[str, ...]  # Opcodes in loops, in the machine code.
    bulk_loads: tuple[str, ...]  # Opcodes of loads by tensor descriptors, in loops.
    tf32: bool
    narrow_offsets: tuple[str, ...]  # products of run-time sizes in 32 bits that reach an address

    def __str__(self) -> str:
        score, clocks = ("-" if one is None else f"{one:.2f}" for one in (self.per_score, self.shared_clocks))
        instructions = ", ".join(self.matrix_instructions + self.bulk_loads) or "-"
        return (
            f"sm_{self.capability:<4} {self.name:36} {self.operands:45} {self.registers:8} {self.stack:6} "
            f"{score:>10} {self.local:6} {self.barriers:9} {self.drains:7} {clocks:>14} {self.shared:7} "
            f"{self.conversions:12}  {instructions}"
        )

    @functools.cached_property
    def known(self) -> dict[str, str]:
        return dict(self.variant)

    @property
    def kernel(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def head(self) -> int:
        """The padded head size, 0 in row operations."""
        return int(self.known.get("BLOCK_D", 0))

    @property
    def place(self) -> tuple[str, int, int]:
        """The key of exceptions from the bounds."""
        return self.kernel, self.capability, self.head

    @property
    def constants(self) -> list[str]:
        return [f"{name}={value}" for name, value in self.variant if name.isupper() or value == "None"]

    @property
    def operands(self) -> str:
        """The dtype, padded head size and tile of this kernel, and the options that take registers."""
        names = "problem.query.pointer", "input.pointer", "input", "mask.pointer"
        dtype = [self.known[name].removeprefix("*") for name in names if "*" in self.known.get(name, "")][:1]
        head = [f"head {self.head}"] if self.head else []
        tile = [f"{self.known['BLOCK_M']}x{self.known['BLOCK_N']}"] if "BLOCK_N" in self.known else []
        dropout = ["dropout"] if any("dropout" in name for name in self.known) and self.is_dropping else []
        mask = ["mask"] if "problem.mask.pointer" in self.known and head else []
        described = ["descriptors"] if self.has_descriptors else []
        return " ".join(dtype + head + tile + dropout + mask + described)

    @property
    def keeps_layout(self) -> bool:
        """Whether a thread's part of a product must fit dropout's tiles, as it always does with wgmma.

        mma divides a tile's columns among warps if the tile has fewer rows than a head has columns. Regular operands of
        up to 64 columns must not have such tiles, because registers suffice, except for few queries. Products of a
        fifth-generation tensor core are read from memory by rows."""
        kinds = {instruction.partition(".")[0] for instruction in self.matrix_instructions}
        if "HMMA" not in kinds:
            return "HGMMA" in kinds
        least = 64 if self.is_regular and self.rows > 16 else 0
        return self.head <= max(self.rows, least)

    @property
    def rows(self) -> int:
        """Rows per program: of keys in dK and dV, else of queries."""
        return int(self.known.get("BLOCK_N" if "key_value" in self.name else "BLOCK_M", 0))

    @property
    def is_regular(self) -> bool:
        """Whether operands have 16 bits, no mask, aligned rows of a power of 2, and are not packed."""
        wanted = {"ALIGNMENT": "8", "EVEN": "True", "BLOCK_DV": self.known.get("BLOCK_D", "")}
        wanted |= {"problem.mask": "None", "problem.sequences.cu_seq_q": "None"}
        return wanted.items() <= self.known.items()

    @property
    def is_wide(self) -> bool:
        """Whether the rows of a row operation are aligned for accesses of 128 bits."""
        return self.known.get("ALIGNED") == "True" and not {"mask.pointer", "attn_mask.pointer"} & self.known.keys()

    @property
    def is_tf32_allowed(self) -> bool:
        return any("tf32" in value.lower() for _, value in self.variant)

    @property
    def has_descriptors(self) -> bool:
        return any(value.startswith("tensordesc") for _, value in self.variant)

    @property
    def is_dropping(self) -> bool:
        return not {("dropout", "None"), ("problem.dropout", "None")} & {*self.variant}

    @property
    def without_dropout(self) -> tuple[Any, ...]:
        """The identity that this kernel shares with its variants with and without dropout."""
        rest = tuple(item for item in self.variant if "dropout" not in item[0].split("."))
        return self.name, self.capability, rest

    def faults(self) -> list[str]:
        """Return the faults of this kernel by itself."""
        found = []
        if self.stack > MOST_STACK:
            found.append(f"spills: {self.stack} bytes of stack, at most {MOST_STACK} are harmless")
        elif self.local > LOCAL.get(self.place, MOST_LOCAL) * self.instructions:
            found.append(f"spills: {self.local} of {self.instructions} instructions access the stack")
        if self.is_wide and self.narrow_accesses:
            found.append(f"{self.narrow_accesses} accesses to global memory of 16 bits and fewer")
        if self.is_wide and self.wide_accesses < 1 / 2:
            found.append(f"{self.wide_accesses:.0%} of what is loaded and stored is accessed by 128 bits")
        found += self._loop_faults()
        if self.shared > SHARED_MEMORY[self.capability]:
            found.append(f"{self.shared} bytes of shared memory of {SHARED_MEMORY[self.capability]}")
        halves = any(re.search(r"\*b?fp?16", value) for _, value in self.variant)
        if self.products == 0 and "PRECISION" in self.known:
            found.append("no matrix products found in Triton's IR")
        if self.products > 0 and (halves or self.is_tf32_allowed) and not self.matrix_instructions:
            found.append("no matrix instructions in the main loop")
        if (
            self.capability == 90
            and halves
            and self.products
            and self.rows >= 64
            and "HGMMA" not in " ".join(self.matrix_instructions)
        ):
            found.append("no wgmma in the main loop")
        if self.has_descriptors and not self.bulk_loads:
            found.append("no bulk loads by tensor descriptors in the main loop")
        if self.tf32 and not self.is_tf32_allowed:
            found.append("tf32 that was not asked for")
        found += [f"offset in 32 bits: {line}" for line in self.narrow_offsets]
        return found

    def _loop_faults(self) -> list[str]:
        """Return the faults that keep the plain loop of a usual call from overlapping."""
        is_usual = self.is_regular and self.head <= 128 and self.rows >= 64 and self.matrix_instructions
        if not (is_usual and self.capability in MOST_BARRIERS):
            return []
        found = []
        most = SHARED.get(self.place, MOST_SHARED)
        is_copied = self.capability == 80 or self.bulk_loads  # on sm_90 threads load short sequences themselves
        if is_copied and self.shared_clocks is not None and self.shared_clocks > most:
            found.append(f"shared memory takes {self.shared_clocks:.2f} times as long as products, at most {most}")
        if self.stages == 1:  # nothing is loaded ahead; other programs hide the waits of a loop over few tiles
            return found
        if self.barriers > MOST_BARRIERS[self.capability]:
            found.append(f"{self.barriers} barriers in the main loop, at most {MOST_BARRIERS[self.capability]}")
        if self.drains > MOST_DRAINS.get(self.kernel, self.drains):
            found.append(f"{self.drains} waits for all products in the main loop, at most {MOST_DRAINS[self.kernel]}")
        if not self.bulk_loads and self.wide_loads < 1 / 2:
            found.append(f"{self.wide_loads:.0%} of what the main loop loads is loaded by 128 bits")
        return found


def faults(reports: list[Report]) -> dict[Report, list[str]]:
    """Return the faults of each report, including those that only comparison with another shows."""
    plain = {report.without_dropout: report.conversions for report in reports if not report.is_dropping}
    found = {}
    for report in reports:
        found[report] = report.faults()
        if not (report.is_dropping and report.keeps_layout):
            continue
        without = plain.get(report.without_dropout)
        if without is None:
            found[report].append("no case without dropout to compare with")
        elif report.conversions > without:
            found[report].append(f"{report.conversions} layout conversions in the main loop, {without} without dropout")
    return found


def examine(function: Any, kernel: Any, capability: int) -> Report:
    variant = [*_variant("", tuple(kernel.src.signature.values()), function.arg_names, (), kernel.src.constants)]
    binary = disassemble(kernel.asm["cubin"], TOOLS)
    plain = plain_loop(binary.instructions) or binary.instructions
    loop = Loop(plain, capability, _depth(function.__name__, dict(variant)))
    looped = sorted({i.opcode for i in inside(binary.instructions)})
    products, conversions = _loops(kernel.asm["ttgir"])
    return Report(
        name=f"{function.__module__.rpartition('.')[2]}.{function.__name__}",
        capability=capability,
        variant=tuple(sorted(variant)),
        registers=binary.registers,
        stack=binary.stack,
        local=loop.local,
        instructions=len(plain),
        per_score=len(plain) / loop.scores if loop.scores else None,
        counts=str(loop),
        barriers=loop.barriers,
        drains=loop.drains,
        shared_clocks=loop.shared_share,
        wide_loads=wide_share(plain, ("LDG", "LDGSTS")),
        wide_accesses=wide_share(binary.instructions, ("LDG", "LDGSTS", "STG")),
        narrow_accesses=sum(i.base in ("LDG", "STG", "LDGSTS") and i.bits <= 16 for i in binary.instructions),
        stages=kernel.metadata.num_stages,
        shared=kernel.metadata.shared,
        conversions=conversions,
        products=products,
        matrix_instructions=tuple(
            opcode for opcode in looped if re.match(r"(HGMMA|HMMA|UTC\w*MMA|QGMMA|IGMMA)", opcode)
        ),
        bulk_loads=tuple(opcode for opcode in looped if opcode.startswith("UTMALDG")),
        tf32=bool(re.search(r"\bmma\S*\.tf32|kind::tf32", kernel.asm["ptx"])),
        narrow_offsets=narrow_offsets(kernel.asm["ttir"]),
    )


def _depth(kernel: str, variant: dict[str, str]) -> int:
    """Return the multiply-adds per score of attention's kernels, 0 of other kernels."""
    if kernel not in PRODUCTS:
        return 0
    of_keys, of_values, of_ones = PRODUCTS[kernel]
    ones = 0 if variant["problem.query.pointer"] == "*fp32" else of_ones * scores.SUMS.value
    return of_keys * int(variant["BLOCK_D"]) + of_values * int(variant["BLOCK_DV"]) + ones


def _variant(
    prefix: str, types: tuple[Any, ...], names: Sequence[str], path: tuple[int, ...], constants: dict[Any, Any]
) -> Iterator[tuple[str, str]]:
    """Yield (name, type or constant) for every argument; members of tuples have dotted names."""
    for place, (name, type) in enumerate(zip(names, types, strict=True)):
        here = (*path, place)
        if isinstance(type, tuple):
            yield from _variant(f"{prefix}{name}.", type, type._fields, here, constants)  # type: ignore[attr-defined]
        else:
            value = constants.get(here, type)
            yield f"{prefix}{name}", getattr(value, "__name__", str(value))


_PRODUCT = re.compile(r"= (tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma)\b|ttng\.tc_gen5_mma\b")


def _loops(ir: str) -> tuple[int, int]:
    """Return the matrix products in loops of Triton's GPU IR, and the layout conversions in loops with products."""
    lines = ir.splitlines()
    products = conversions = 0
    for start, line in enumerate(lines):
        if "scf.for" not in line and "scf.while" not in line:
            continue
        indent = len(line) - len(line.lstrip())
        end = next(n for n in range(start + 1, len(lines)) if re.match(rf" {{{indent}}}}}(?! do)", lines[n]))
        body = lines[start + 1 : end]
        if any("scf.for" in inner or "scf.while" in inner for inner in body):
            continue
        here = sum(bool(_PRODUCT.search(inner)) for inner in body)
        products += here
        conversions += sum("ttg.convert_layout" in inner for inner in body) if here else 0
    return products, conversions


def narrow_offsets(ir: str) -> tuple[str, ...]:
    """Return the 32-bit products of two run-time values that an address depends on; they wrap at 2**31 elements."""
    definitions = {}
    for line in ir.splitlines():
        if match := re.match(r"\s*(%[\w#]+)(?::\d+)? = (\S+) (.*)", line):
            definitions[match[1]] = match[2].strip('"'), re.findall(r"%[\w#]+", match[3]), line.strip()
    found = set()

    def is_constant(value: str) -> bool:
        name, operands, _ = definitions.get(value, ("argument", [], ""))
        return name == "arith.constant" or (name in ("tt.splat", "tt.broadcast") and is_constant(operands[0]))

    def follow(value: str, seen: set[str]) -> None:
        if value in seen or value not in definitions:
            return
        seen.add(value)
        name, operands, line = definitions[value]
        if name == "arith.muli" and re.search(r"i32>?( loc.*)?$", line) and not any(map(is_constant, operands)):
            found.add(re.sub(r" loc\(.*", "", line))
        if name == "arith.muli" and re.search(r"i64>?( loc.*)?$", line):
            return  # from here on offsets have 64 bits
        if name.startswith(("arith.", "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.addptr")):
            for operand in operands:
                follow(operand, seen)

    seen: set[str] = set()
    for value, (name, _, _) in definitions.items():
        if name == "tt.addptr":
            follow(value, seen)
    return tuple(sorted(found))


# Hash of the gate's sources, so that a cached report is used only by the version that wrote it.
_FOLDER = Path(__file__).parent
_SOURCES = hashlib.sha256(b"".join(path.read_bytes() for path in (Path(__file__), *sorted(_FOLDER.glob("sass/*.py")))))


def examined(function: Any, kernel: Any, capability: int) -> Report:
    """Return the report of ``examine``, cached in Triton's cache."""
    kept = get_cache_manager(hashlib.sha256(f"{kernel.hash} {_SOURCES.hexdigest()}".encode()).hexdigest())
    if path := kept.get_file("report.pickle"):
        found: Report = pickle.loads(Path(path).read_bytes())
        return found
    found = examine(function, kernel, capability)
    kept.put(pickle.dumps(found), "report.pickle")
    return found


_seen: set[int] = set()  # ids of the compiled kernels that this process has examined


def of_case(device: int, capability: int, operation: str, place: int) -> tuple[list[Report], list[str]]:
    """Return the reports on a case's kernels that are new to this process, and the lines of attention's tables that the
    case reads."""
    function, *arguments = CASES[operation][place]
    chosen = run(device, function, *arguments)
    read = [line for line, tile in lines(device).items() if any(tile is one for one in chosen)]
    fresh = [pair for pair in specialisations(device) if id(pair[1]) not in _seen]
    _seen.update(id(kernel) for _, kernel in fresh)
    return [examined(*pair, capability) for pair in fresh], read


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", choices=SHARED_MEMORY, default=list(SHARED_MEMORY))
    parser.add_argument("--operation", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--sample", choices=SAMPLES, help="a few cases of each operation")
    parser.add_argument("--counts", action="store_true", help="print what is counted in each main loop")
    options = parser.parse_args(arguments)
    pretend(*options.arch)
    print(
        f"triton {triton.__version__}\n{'':90} registers  stack  per score  local  barriers  drains  "
        "shared clocks  shared  conversions  instructions"
    )
    wanted = SAMPLES[options.sample] if options.sample else CASES
    operations = [operation for operation in options.operation if operation in wanted]
    cases = [(operation, CASES[operation].index(case)) for operation in operations for case in wanted[operation]]
    spawn, processes = multiprocessing.get_context("spawn"), len(os.sched_getaffinity(0))
    count = total = 0
    with ProcessPoolExecutor(processes, spawn, initializer=pretend, initargs=options.arch) as pool:
        for device, capability in enumerate(options.arch):
            found = list(pool.map(functools.partial(of_case, device, capability), *zip(*cases, strict=True)))
            reports = list(dict.fromkeys(report for some, _ in found for report in some))
            read = {line for _, some in found for line in some}
            count += len(reports)
            for report, wrong in faults(reports).items():
                print(report)
                if options.counts and report.per_score:
                    print(textwrap.indent(report.counts, "  "))
                for fault in wrong:
                    total += 1
                    print(f"  FAULT {fault}, with {', '.join(report.constants)}", flush=True)
            for line in lines(device) if wanted is CASES and "attention" in options.operation else ():
                if line not in read:
                    total += 1
                    print(f"sm_{capability}\n  FAULT no case for {line}", flush=True)
    print(f"{count} kernels, {total} faults")
    return 1 if total or not count else 0


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("aot_gate: unset TRITON_INTERPRET, under which nothing is compiled")
    sys.exit(main())
