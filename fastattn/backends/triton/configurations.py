"""Tile sizes, warps and pipeline stages of every kernel, by dtype and size.

Nothing is tuned at a user's call. Tiles depend on sizes through powers of two with a bound, so that varied lengths
share a few compiled kernels.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch


class Tiles(NamedTuple):
    """Queries and keys of a tile (multiples of 16 and 32: dropout's tiles), and how its program runs."""

    rows: int
    columns: int
    warps: int
    stages: int
    registers: int | None = None  # that a thread may have; None: as ptxas chooses
    is_frugal: bool = False  # ptxas does nothing for speed that takes registers


# Attention's kernels, and the largest head size, padded to a power of 2, that each entry serves. The first table is
# for compute capabilities 9.0 and 10.x, which multiply from shared memory. SMALL is for the others, whose operands take
# registers and some of which have 99 KiB of shared memory; there warps divide the rows of a tile, as dropout's tiles
# want, only if a tile has at least as many as a head has columns. Masks take registers too, and so do irregular
# operands, which are packed sequences and head sizes that are not a power of 2: where a kernel has a line for them,
# they have smaller tiles.
ATTENTION_16_BITS = {
    "forward": {64: Tiles(128, 64, 8, 3), 128: Tiles(128, 64, 8, 3), 256: Tiles(64, 64, 8, 2)},
    "forward_masked": {64: Tiles(128, 64, 8, 2), 128: Tiles(64, 32, 8, 2), 256: Tiles(64, 32, 8, 2)},
    "forward_few": {64: Tiles(16, 64, 4, 2), 128: Tiles(16, 64, 4, 3), 256: Tiles(16, 32, 4, 2, 255)},
    "grad_query": {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 64, 4, 2), 256: Tiles(64, 32, 8, 1)},
    "grad_query_masked": {64: Tiles(64, 64, 4, 2, 255), 128: Tiles(64, 32, 8, 1), 256: Tiles(64, 32, 8, 1)},
    "grad_query_irregular": {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 64, 8, 2), 256: Tiles(64, 32, 8, 1)},
    "grad_key_value": {64: Tiles(32, 128, 8, 2), 128: Tiles(32, 128, 8, 2, is_frugal=True), 256: Tiles(16, 64, 8, 1)},
    "grad_key_value_masked": {64: Tiles(32, 128, 8, 1), 128: Tiles(16, 64, 8, 2), 256: Tiles(16, 64, 8, 1)},
    "grad_key_value_irregular": {64: Tiles(32, 128, 8, 2), 128: Tiles(32, 128, 8, 1), 256: Tiles(16, 32, 8, 2)},
    "grad_mask": {256: Tiles(64, 64, 8, 2)},
}
# What differs on 10.x, where products lie in tensor memory and registers are taken by what is read from there.
ATTENTION_16_BITS_10 = ATTENTION_16_BITS | {
    "forward_masked": {
        64: Tiles(128, 64, 8, 2, is_frugal=True),
        128: Tiles(64, 32, 8, 2, 255),
        256: Tiles(64, 32, 8, 2, is_frugal=True),
    },
    "grad_query": {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 64, 4, 2, 255), 256: Tiles(64, 32, 8, 1, 255)},
    "grad_query_masked": {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 64, 8, 2, 255), 256: Tiles(64, 32, 8, 1, 255)},
    "grad_query_irregular": {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 64, 8, 2, 255), 256: Tiles(64, 32, 8, 1)},
    "grad_key_value": {64: Tiles(32, 128, 8, 1, 255), 128: Tiles(32, 128, 8, 1), 256: Tiles(16, 64, 8, 1)},
    "grad_key_value_masked": {64: Tiles(32, 128, 8, 1, 255), 128: Tiles(32, 128, 8, 1), 256: Tiles(16, 64, 8, 1)},
    "grad_key_value_irregular": {64: Tiles(32, 128, 8, 2, 255), 128: Tiles(32, 128, 8, 1), 256: Tiles(16, 32, 8, 2)},
}
ATTENTION_16_BITS_SMALL = {
    "forward": {64: Tiles(128, 64, 8, 2), 128: Tiles(128, 32, 8, 2), 256: Tiles(64, 32, 8, 1)},
    "forward_masked": {64: Tiles(128, 32, 8, 2), 128: Tiles(64, 32, 8, 2), 256: Tiles(32, 32, 8, 1, 255)},
    "forward_few": {64: Tiles(16, 128, 8, 2, 255), 128: Tiles(16, 64, 4, 2, 255), 256: Tiles(16, 32, 4, 1, 255)},
    "grad_query": {64: Tiles(64, 64, 4, 2), 128: Tiles(128, 32, 8, 2), 256: Tiles(16, 32, 8, 1)},
    "grad_query_masked": {64: Tiles(64, 32, 8, 2), 128: Tiles(32, 32, 4, 1, 255), 256: Tiles(16, 32, 8, 1)},
    "grad_key_value": {64: Tiles(32, 64, 8, 1), 128: Tiles(16, 128, 8, 1), 256: Tiles(16, 32, 8, 1, 255)},
    "grad_key_value_irregular": {
        64: Tiles(32, 64, 8, 1),
        128: Tiles(32, 32, 8, 2),
        256: Tiles(16, 32, 8, 1, is_frugal=True),
    },
    "grad_key_value_masked": {64: Tiles(16, 64, 8, 1), 128: Tiles(32, 32, 8, 1, 255), 256: Tiles(16, 32, 8, 1)},
    "grad_mask": {256: Tiles(64, 32, 8, 2)},
}
# For float32, which without tf32 is multiplied number by number. Tiles are below 64 x 64: from 64 rows of a product on,
# Triton 3.6 may make tf32 of it on 10.x unasked. Where ptxas by itself spills a few numbers so that more programs fit,
# threads are given a number of registers.
ATTENTION_FLOAT32 = {
    "forward": {64: Tiles(16, 32, 8, 1, 128), 128: Tiles(32, 32, 16, 1), 256: Tiles(16, 32, 8, 1)},
    "forward_masked": {64: Tiles(32, 32, 4, 1, 255), 128: Tiles(16, 32, 8, 1), 256: Tiles(16, 32, 16, 1)},
    "forward_few": {64: Tiles(16, 32, 8, 1, 128), 128: Tiles(16, 32, 8, 1), 256: Tiles(16, 32, 8, 1)},
    "grad_query": {64: Tiles(32, 32, 8, 1), 128: Tiles(16, 32, 8, 1), 256: Tiles(16, 32, 16, 1)},
    "grad_query_masked": {64: Tiles(16, 32, 4, 1, 255), 128: Tiles(16, 32, 16, 1), 256: Tiles(16, 32, 8, 1)},
    "grad_key_value": {
        64: Tiles(32, 32, 8, 1, 255),
        128: Tiles(16, 32, 8, 1, 255),
        256: Tiles(16, 32, 8, 1, is_frugal=True),
    },
    "grad_key_value_masked": {
        64: Tiles(16, 32, 8, 1, 255),
        128: Tiles(16, 32, 8, 1, 255),
        256: Tiles(16, 32, 8, 1, is_frugal=True),
    },
    "grad_mask": {256: Tiles(16, 32, 8, 1, 255)},
}
# What differs on 9.x, on 10.x and on 8.x.
ATTENTION_FLOAT32_9 = ATTENTION_FLOAT32 | {
    "grad_query_masked": {64: Tiles(16, 32, 4, 1, 255), 128: Tiles(16, 64, 8, 1), 256: Tiles(16, 32, 16, 1)},
}
ATTENTION_FLOAT32_10 = ATTENTION_FLOAT32 | {
    "forward": {64: Tiles(16, 32, 8, 1, 128), 128: Tiles(32, 32, 16, 1), 256: Tiles(16, 32, 16, 1)},
    "forward_few": {64: Tiles(16, 32, 8, 1, 128), 128: Tiles(16, 32, 8, 1), 256: Tiles(16, 32, 16, 1)},
}
ATTENTION_FLOAT32_8 = ATTENTION_FLOAT32 | {
    "forward": {64: Tiles(16, 32, 8, 1, 128), 128: Tiles(32, 32, 8, 1, 255), 256: Tiles(16, 32, 16, 1, 128)},
    "forward_masked": {64: Tiles(32, 32, 4, 1, 255), 128: Tiles(16, 32, 8, 1, 255), 256: Tiles(16, 32, 16, 1, 128)},
    "forward_few": {64: Tiles(16, 32, 4, 1), 128: Tiles(16, 32, 8, 1), 256: Tiles(16, 32, 8, 1)},
    "grad_query": {64: Tiles(16, 32, 8, 1, 255), 128: Tiles(16, 32, 16, 1), 256: Tiles(16, 32, 16, 1, 128)},
    "grad_query_masked": {64: Tiles(16, 32, 4, 1), 128: Tiles(16, 32, 8, 1, 168), 256: Tiles(16, 32, 8, 1)},
    "grad_key_value_masked": {
        64: Tiles(16, 32, 8, 1, 144),
        128: Tiles(16, 32, 8, 1, 255),
        256: Tiles(16, 32, 16, 1),
    },
}
# For 16-bit rows that do not begin at multiples of 16 bytes, where each number has a pointer of its own.
ATTENTION_UNALIGNED = {
    "forward": {64: Tiles(16, 32, 4, 1, 255), 128: Tiles(32, 32, 8, 1), 256: Tiles(16, 32, 8, 1)},
    "forward_masked": {64: Tiles(32, 32, 4, 1), 128: Tiles(32, 32, 8, 1, 255), 256: Tiles(16, 32, 8, 1, 255)},
    "forward_few": {64: Tiles(16, 32, 4, 2, 255), 128: Tiles(16, 32, 8, 1), 256: Tiles(16, 32, 8, 1)},
    "grad_query": {
        64: Tiles(16, 32, 8, 1, 255),
        128: Tiles(16, 32, 8, 1, 255),
        256: Tiles(16, 32, 16, 1, is_frugal=True),
    },
    "grad_query_masked": {64: Tiles(16, 32, 4, 1, 255), 128: Tiles(16, 32, 8, 1), 256: Tiles(16, 32, 8, 2)},
    "grad_key_value": {
        64: Tiles(32, 32, 8, 1, 255),
        128: Tiles(16, 32, 8, 1, 255),
        256: Tiles(16, 32, 8, 1, is_frugal=True),
    },
    "grad_key_value_masked": {
        64: Tiles(16, 32, 8, 1, 255),
        128: Tiles(16, 32, 8, 1, 255),
        256: Tiles(16, 32, 8, 1, is_frugal=True),
    },
    "grad_mask": {256: Tiles(16, 32, 8, 1)},
}


def attention_table(dtype: torch.dtype, is_aligned: bool, device: torch.device) -> dict[str, dict[int, Tiles]]:
    """The table of attention's kernels for operands of this dtype on this device."""
    major, _ = capability(device)
    if dtype == torch.float32:
        return {8: ATTENTION_FLOAT32_8, 9: ATTENTION_FLOAT32_9, 10: ATTENTION_FLOAT32_10}.get(major, ATTENTION_FLOAT32)
    if is_aligned:
        return {9: ATTENTION_16_BITS, 10: ATTENTION_16_BITS_10}.get(major, ATTENTION_16_BITS_SMALL)
    return ATTENTION_UNALIGNED


def attention(kernel: str, dtype: torch.dtype, size: int, kind: str, is_aligned: bool, device: torch.device) -> Tiles:
    """The tiles of an attention kernel for operands of this dtype and a head size (the larger of the two) up to 256,
    which are of this kind: "regular", "masked" or "irregular"."""
    table = attention_table(dtype, is_aligned, device)
    line = table.get(f"{kernel}_{kind}", table[kernel])
    return next(tiles for largest, tiles in line.items() if size <= largest)


def largest_tf32_head(is_masked: bool, device: torch.device) -> int:
    """The largest head size, padded, that is multiplied in tf32 where torch allows it. Larger ones would spill, or need
    more than the 99 KiB of shared memory that some devices have."""
    return 64 if is_masked and capability(device)[0] >= 10 else 128


# Rows of a sequence from which on its tiles are read through tensor descriptors (TMA). The host makes two a kernel:
# fewer rows are hardly worth that. An estimate, not measured on a GPU.
DESCRIPTOR_ROWS = 1024


def has_descriptors(rows: int, device: torch.device) -> bool:
    """Not on 12.x, which has them too: Triton 3.6 spills there."""
    return rows >= DESCRIPTOR_ROWS and capability(device)[0] in (9, 10)


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """The device's compute capability; an H100's where kernels are interpreted."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def parts(programs: int, key_tiles: int, device: torch.device) -> int:
    """Into how many parts the keys are split so that few queries occupy the device, at least 4 tiles each."""
    return max(1, min(processors(device) // max(programs, 1), key_tiles // 4, 64))


@functools.cache
def processors(device: torch.device) -> int:
    """The device's multiprocessors; an H100's where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


class RowTile(NamedTuple):
    """A program's block of a row operation."""

    rows: int
    columns: int
    warps: int


class RowLimits(NamedTuple):
    held: int  # elements of a block of narrow rows
    widest: int  # columns up to which a row is read once
    beyond: int  # columns of a block of wider rows, which are read twice
    warp: int  # elements that a warp holds


ROWS = {
    "dropout": RowLimits(2048, 1024, 1024, 512),
    "layer_norm": RowLimits(2048, 8192, 4096, 512),
    "layer_norm_backward": RowLimits(1024, 4096, 4096, 256),
    "softmax_dropout": RowLimits(2048, 8192, 4096, 256),
    "softmax_dropout_backward": RowLimits(2048, 8192, 4096, 256),
}
_MOST_WARPS = 16

# Programs among which the rows of a weight gradient are divided, the same on every device: all add in the same order.
ROW_GROUPS = 512


def row_tile(kernel: str, columns: int) -> RowTile:
    """The block of a row kernel for rows of this many columns."""
    limits = ROWS[kernel]
    block = max(32, 1 << (columns - 1).bit_length()) if columns <= limits.widest else limits.beyond
    rows = max(1, limits.held // block) if columns <= limits.widest else 1  # a wider row is all that a program has
    return RowTile(rows, block, max(1, min(_MOST_WARPS, rows * block // limits.warp)))
