"""Attention's tiles: by kernel, dtype, head size, kind of operands and device.

Nothing is tuned at a user's call. Tiles depend on head sizes through powers of two, so that a few compiled kernels
serve them all.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from fastattn.backends.common import capability


class Tile(NamedTuple):
    """BLOCK_M queries and BLOCK_N keys, multiples of 16 and 32 (dropout's tiles), and Triton's options."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None  # None: as ptxas chooses
    register_usage_level: int | None = None  # ptxas's; 0: no optimisation that raises register pressure


# By kernel and the largest head size, padded to a power of 2, that an entry serves. Masks raise register pressure, and
# so do irregular operands (packed sequences, head sizes that are not a power of 2) and pointers in the place of tensor
# descriptors: kernels have lines of their own for them. ``tools/tune.py`` measures tiles on a GPU; docs/gpu.md has the
# times of those that were measured.

# Compute capability 9.0: wgmma reads its operands from shared memory. Measured on an H100 in bfloat16 (docs/gpu.md): up
# to a head size of 128 the regular lines and those of pointers, up to 64 those of irregular operands (short packed
# sequences) and of masked ones. Where calls with dropout and without want different tiles, both lose little by these.
HALF = {
    "forward": {
        64: Tile(64, 128, 4, 3),
        128: Tile(64, 64, 4, 3),
        256: Tile(64, 64, 8, 2),
    },
    "forward_pointers": {64: Tile(64, 32, 4, 3), 128: Tile(64, 32, 4, 3), 256: Tile(64, 64, 8, 2)},
    "forward_irregular": {64: Tile(64, 32, 4, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 64, 8, 2)},
    "forward_masked": {
        64: Tile(128, 64, 4, 2),
        128: Tile(128, 64, 8, 2),
        256: Tile(64, 32, 8, 2),
    },
    "forward_few": {64: Tile(16, 64, 4, 2), 128: Tile(16, 64, 4, 3), 256: Tile(16, 32, 4, 2, 255)},
    "grad_query": {
        64: Tile(64, 64, 4, 3),
        128: Tile(128, 64, 8, 3),
        256: Tile(64, 32, 8, 1),
    },
    "grad_query_pointers": {64: Tile(64, 32, 4, 2), 128: Tile(64, 64, 4, 2), 256: Tile(64, 32, 8, 1)},
    "grad_query_masked": {
        64: Tile(64, 128, 4, 2),
        128: Tile(128, 64, 8, 2),
        256: Tile(64, 32, 8, 1),
    },
    "grad_query_irregular": {64: Tile(64, 32, 4, 3), 128: Tile(64, 64, 8, 2), 256: Tile(64, 32, 8, 1)},
    "grad_key_value": {
        64: Tile(64, 64, 4, 3),
        128: Tile(64, 64, 4, 2, 255),
        256: Tile(16, 64, 8, 1),
    },
    "grad_key_value_pointers": {64: Tile(64, 64, 4, 1), 128: Tile(64, 128, 8, 2), 256: Tile(16, 64, 8, 1)},
    "grad_key_value_masked": {
        64: Tile(64, 64, 4, 2),
        128: Tile(32, 128, 8, 2),
        256: Tile(16, 64, 8, 1),
    },
    "grad_key_value_irregular": {64: Tile(64, 64, 4, 1), 128: Tile(32, 128, 8, 1), 256: Tile(16, 32, 8, 2)},
    "grad_mask": {256: Tile(64, 64, 8, 2)},
}
# What differs on 10.x: accumulators are in tensor memory, and what is read from there takes registers.
HALF_10 = HALF | {
    "forward": {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 64, 8, 2)},
    "forward_masked": {
        64: Tile(128, 64, 8, 2, register_usage_level=0),
        128: Tile(64, 32, 8, 2, 255),
        256: Tile(64, 32, 8, 2, register_usage_level=0),
    },
    "grad_query": {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 4, 2, 255), 256: Tile(64, 32, 8, 1, 255)},
    "grad_query_masked": {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 8, 2, 255), 256: Tile(64, 32, 8, 1, 255)},
    "grad_query_irregular": {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 8, 2, 255), 256: Tile(64, 32, 8, 1)},
    "grad_key_value": {64: Tile(32, 128, 8, 1, 255), 128: Tile(32, 128, 8, 1), 256: Tile(16, 64, 8, 1)},
    "grad_key_value_masked": {64: Tile(32, 128, 8, 1, 255), 128: Tile(32, 128, 8, 1), 256: Tile(16, 64, 8, 1)},
    "grad_key_value_irregular": {64: Tile(32, 128, 8, 2, 255), 128: Tile(32, 128, 8, 1), 256: Tile(16, 32, 8, 2)},
}
HALF_10 |= {f"{kernel}_pointers": HALF_10[kernel] for kernel in ("forward", "grad_query", "grad_key_value")}
HALF_10["forward_irregular"] = HALF_10["forward"]
# Elsewhere the operands of mma are in registers, and 8.6, 8.9 and 12.x have 99 KiB of shared memory. Warps divide a
# tile by rows, which dropout needs, only if it has at least as many rows as a head has columns.
HALF_SMALL = {
    "forward": {
        64: Tile(128, 64, 4, 2),
        128: Tile(128, 32, 4, 2),
        256: Tile(64, 32, 8, 1),
    },
    "forward_irregular": {64: Tile(128, 64, 8, 2), 128: Tile(128, 32, 8, 2), 256: Tile(64, 32, 8, 1)},
    "forward_masked": {
        64: Tile(128, 64, 8, 2),
        128: Tile(128, 32, 8, 2),
        256: Tile(32, 32, 8, 1, 255),
    },
    "forward_few": {64: Tile(16, 128, 8, 2, 255), 128: Tile(16, 64, 4, 2, 255), 256: Tile(16, 32, 4, 1, 255)},
    "grad_query": {
        64: Tile(128, 64, 4, 2, register_usage_level=0),
        128: Tile(128, 32, 4, 2),
        256: Tile(16, 32, 8, 1),
    },
    "grad_query_irregular": {64: Tile(64, 64, 4, 2), 128: Tile(128, 32, 8, 2), 256: Tile(16, 32, 8, 1)},
    "grad_query_masked": {
        64: Tile(64, 64, 4, 2),
        128: Tile(64, 32, 4, 2),
        256: Tile(16, 32, 8, 1),
    },
    "grad_key_value": {
        64: Tile(64, 64, 4, 2),
        128: Tile(32, 64, 4, 1),
        256: Tile(16, 32, 8, 1, 255),
    },
    "grad_key_value_irregular": {
        64: Tile(32, 64, 8, 1),
        128: Tile(32, 32, 8, 2),
        256: Tile(16, 32, 8, 1, register_usage_level=0),
    },
    "grad_key_value_masked": {
        64: Tile(32, 64, 4, 2),
        128: Tile(32, 64, 4, 1),
        256: Tile(16, 32, 8, 1),
    },
    "grad_mask": {256: Tile(64, 32, 8, 2)},
}
# float32, without tf32 by scalar FMAs. Tiles are below 64 x 64: from 64 rows of a product on, Triton 3.6 may make tf32
# of it on 10.x unasked. ``maxnreg`` is set where ptxas by itself spills for the sake of occupancy.
FLOAT32 = {
    "forward": {64: Tile(16, 32, 8, 1, 128), 128: Tile(32, 32, 16, 1), 256: Tile(16, 32, 8, 1)},
    "forward_masked": {64: Tile(32, 32, 4, 1, 255), 128: Tile(16, 32, 8, 1), 256: Tile(16, 32, 16, 1)},
    "forward_few": {64: Tile(16, 32, 8, 1, 128), 128: Tile(16, 32, 8, 1), 256: Tile(16, 32, 8, 1)},
    "grad_query": {64: Tile(32, 32, 8, 1), 128: Tile(16, 32, 8, 1), 256: Tile(16, 32, 16, 1)},
    "grad_query_masked": {64: Tile(16, 32, 4, 1, 255), 128: Tile(16, 32, 16, 1), 256: Tile(16, 32, 8, 1)},
    "grad_key_value": {
        64: Tile(32, 32, 8, 1, 255),
        128: Tile(16, 32, 8, 1, 255),
        256: Tile(16, 32, 8, 1, register_usage_level=0),
    },
    "grad_key_value_masked": {
        64: Tile(16, 32, 8, 1, 255),
        128: Tile(16, 32, 8, 1, 255),
        256: Tile(16, 32, 8, 1, register_usage_level=0),
    },
    "grad_mask": {256: Tile(16, 32, 8, 1, 255)},
}
# What differs on 9.x, 10.x and 8.x, to the same end.
FLOAT32_9 = FLOAT32 | {
    "grad_query_masked": {64: Tile(16, 32, 4, 1, 255), 128: Tile(16, 64, 8, 1), 256: Tile(16, 32, 16, 1)},
}
FLOAT32_10 = FLOAT32 | {
    "forward": {64: Tile(16, 32, 8, 1, 128), 128: Tile(32, 32, 16, 1), 256: Tile(16, 32, 16, 1)},
    "forward_few": {64: Tile(16, 32, 8, 1, 128), 128: Tile(16, 32, 8, 1), 256: Tile(16, 32, 16, 1)},
}
FLOAT32_8 = FLOAT32 | {
    "forward": {64: Tile(16, 32, 8, 1, 128), 128: Tile(32, 32, 8, 1, 255), 256: Tile(16, 32, 16, 1, 128)},
    "forward_masked": {64: Tile(32, 32, 4, 1, 255), 128: Tile(16, 32, 8, 1, 255), 256: Tile(16, 32, 16, 1, 128)},
    "forward_few": {64: Tile(16, 32, 4, 1), 128: Tile(16, 32, 8, 1), 256: Tile(16, 32, 8, 1)},
    "grad_query": {64: Tile(16, 32, 8, 1, 255), 128: Tile(16, 32, 16, 1), 256: Tile(16, 32, 16, 1, 128)},
    "grad_query_masked": {64: Tile(16, 32, 4, 1), 128: Tile(16, 32, 8, 1, 168), 256: Tile(16, 32, 8, 1)},
    "grad_key_value_masked": {
        64: Tile(16, 32, 8, 1, 144),
        128: Tile(16, 32, 8, 1, 255),
        256: Tile(16, 32, 16, 1),
    },
}
# 16-bit rows that do not begin at multiples of 16 bytes: each element has a pointer of its own.
UNALIGNED = {
    "forward": {64: Tile(16, 32, 4, 1, 255), 128: Tile(32, 32, 8, 1), 256: Tile(16, 32, 8, 1)},
    "forward_masked": {64: Tile(32, 32, 4, 1), 128: Tile(32, 32, 8, 1, 255), 256: Tile(16, 32, 8, 1, 255)},
    "forward_few": {64: Tile(16, 32, 4, 2, 255), 128: Tile(16, 32, 8, 1), 256: Tile(16, 32, 8, 1)},
    "grad_query": {
        64: Tile(16, 32, 8, 1, 255),
        128: Tile(16, 32, 8, 1, 255),
        256: Tile(16, 32, 16, 1, register_usage_level=0),
    },
    "grad_query_masked": {64: Tile(16, 32, 4, 1, 255), 128: Tile(16, 32, 8, 1), 256: Tile(16, 32, 8, 2)},
    "grad_key_value": {
        64: Tile(32, 32, 8, 1, 255),
        128: Tile(16, 32, 8, 1, 255),
        256: Tile(16, 32, 8, 1, register_usage_level=0),
    },
    "grad_key_value_masked": {
        64: Tile(16, 32, 8, 1, 255),
        128: Tile(16, 32, 8, 1, 255),
        256: Tile(16, 32, 8, 1, register_usage_level=0),
    },
    "grad_mask": {256: Tile(16, 32, 8, 1)},
}


def table(dtype: torch.dtype, is_aligned: bool, device: torch.device) -> dict[str, dict[int, Tile]]:
    """The table for operands of this dtype on this device."""
    major, _ = capability(device)
    if dtype == torch.float32:
        return {8: FLOAT32_8, 9: FLOAT32_9, 10: FLOAT32_10}.get(major, FLOAT32)
    if is_aligned:
        return {9: HALF, 10: HALF_10}.get(major, HALF_SMALL)
    return UNALIGNED


def choose(kernel: str, dtype: torch.dtype, head_dim: int, kind: str, is_aligned: bool, device: torch.device) -> Tile:
    """The tile of a kernel for the larger of the head sizes; ``kind`` is "regular", "pointers", "masked" or
    "irregular"."""
    lines = table(dtype, is_aligned, device)
    line = lines.get(f"{kernel}_{kind}", lines[kernel])
    return next(tile for largest, tile in line.items() if head_dim <= largest)


def largest_tf32_head(is_masked: bool, device: torch.device) -> int:
    """The largest head size, padded, that is multiplied in tf32 where torch allows it. Larger ones would spill, or need
    more than the 99 KiB of shared memory that some devices have."""
    return 64 if is_masked and capability(device)[0] >= 10 else 128


# Rows of a sequence from which on its full tiles are read through tensor descriptors (TMA): one thread issues the copy
# of a tile, pointers take no registers, and columns beyond the head size are filled with zeros. Pointers read partial
# tiles, since rows that nobody sees may hold NaN, and short, packed and expanded operands and split keys. The host
# makes two descriptors a kernel, some 15 us, most of it Triton's own: made on the device, each program would need
# memory and a fence. An estimate, not measured on a GPU.
DESCRIPTOR_ROWS = 1024


def has_descriptors(rows: int, device: torch.device) -> bool:
    """Not on 12.x, which has them too: Triton 3.6 spills there."""
    return rows >= DESCRIPTOR_ROWS and capability(device)[0] in (9, 10)


def num_splits(programs: int, key_tiles: int, device: torch.device) -> int:
    """Into how many splits the keys are divided so that few queries occupy the device, at least 4 tiles each."""
    return max(1, min(multiprocessors(device) // max(programs, 1), key_tiles // 4, 64))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """The device's; an H100's where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
