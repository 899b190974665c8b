"""Attention's tiles by kernel, dtype, head size, kind of operands and device.

The tables are fixed: no call is tuned at run time. A tile depends on the head size rounded up to a power of 2, so a few
compiled kernels serve all head sizes.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from fastattn.backends.common import capability


class Tile(NamedTuple):
    """A tile and Triton's options. Queries and keys are multiples of 16 and 32, the size of dropout's tiles."""

    block_m: int  # queries
    block_n: int  # keys
    num_warps: int
    num_stages: int
    maxnreg: int | None = None  # registers per thread; None: ptxas chooses
    register_usage_level: int | None = None  # option of ptxas; 0: no optimisation that raises register pressure


# The tables map {kernel: {largest head size, padded to a power of 2: tile}}. Masks, irregular operands and pointers
# raise register pressure, so they have lines of their own. Irregular operands are packed sequences and head sizes that
# are not a power of 2. Pointers replace tensor descriptors. ``tools/tune.py`` measures tiles on a GPU; docs/gpu.md has
# the measured times.

# Compute capability 9.0: wgmma reads its operands from shared memory. Tiles measured on an H100 in bfloat16
# (docs/gpu.md): regular lines and those of pointers up to a head size of 128, masked and irregular lines (short packed
# sequences) up to 64. If calls with and without dropout have different best tiles, both lose little by these.
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
# Differences on 10.x: accumulators are in tensor memory, and reading them takes registers.
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
# A float mask takes a register per score. Its tiles have eight warps, because with four they spill, on 9.0 up to 750
# bytes with dropout (as compiled, not measured on a GPU).
HALF["forward_float_masked"] = HALF["forward_masked"] | {64: Tile(128, 64, 8, 2)}
HALF["grad_query_float_masked"] = HALF["grad_query_masked"] | {64: Tile(128, 64, 8, 2)}
# Other devices: mma reads its operands from registers, and 8.6, 8.9 and 12.x have 99 KiB of shared memory. Dropout
# requires that warps divide a tile by rows. They do so only if the tile has at least as many rows as the head columns.
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
HALF_SMALL["grad_query_float_masked"] = HALF_SMALL["grad_query_masked"] | {
    64: Tile(128, 32, 8, 2),
    128: Tile(64, 32, 8, 2),
}
# float32: without tf32, scalar FMAs compute the products. Workaround (Triton 3.6): on 10.x it may compute a product of
# 64 or more rows in tf32 without permission, so tiles are below 64 x 64. Workaround (ptxas): ``maxnreg`` is set for
# kernels in which it would otherwise spill a few bytes to raise occupancy.
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
# Differences on 9.x, 10.x and 8.x, for the same reasons.
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
# 16-bit rows that do not begin at multiples of 16 bytes: each element has its own pointer.
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
    """Return the table for operands of this dtype on this device."""
    major, _ = capability(device)
    if dtype == torch.float32:
        return {8: FLOAT32_8, 9: FLOAT32_9, 10: FLOAT32_10}.get(major, FLOAT32)
    if is_aligned:
        return {9: HALF, 10: HALF_10}.get(major, HALF_SMALL)
    return UNALIGNED


def choose(kernel: str, dtype: torch.dtype, head_dim: int, kind: str, is_aligned: bool, device: torch.device) -> Tile:
    """Return the tile of a kernel.

    Args:
        head_dim: the larger of the two head sizes.
        kind: "regular", "pointers", "masked", "float_masked" or "irregular".
    """
    lines = table(dtype, is_aligned, device)
    names = f"{kernel}_{kind}", f"{kernel}_{kind.removeprefix('float_')}", kernel
    line = next(lines[name] for name in names if name in lines)
    return next(tile for largest, tile in line.items() if head_dim <= largest)


def largest_tf32_head(is_masked: bool, device: torch.device) -> int:
    """Return the largest padded head size that is multiplied in tf32, if torch allows tf32.

    Larger heads would spill, or exceed the 99 KiB of shared memory of some devices.
    """
    return 64 if is_masked and capability(device)[0] >= 10 else 128


# Minimum rows per sequence for reading full tiles through tensor descriptors (TMA). One thread issues the copy of a
# tile, no pointers occupy registers, and columns beyond the head size are filled with zeros. Pointers read partial
# tiles, because unseen rows may hold NaN. They also read short, packed and expanded operands and split keys. The host
# makes two descriptors per kernel in about 15 us, most of it spent in Triton. Descriptors made on the device would need
# memory and a fence per program. The threshold is an estimate, not measured on a GPU.
DESCRIPTOR_ROWS = 1024


def has_descriptors(rows: int, device: torch.device) -> bool:
    """Return whether kernels read sequences of this many rows through tensor descriptors.

    Workaround (Triton 3.6): 12.x has descriptors too, but kernels with them spill there.
    """
    return rows >= DESCRIPTOR_ROWS and capability(device)[0] in (9, 10)


def num_splits(programs: int, key_tiles: int, device: torch.device) -> int:
    """Return the number of splits of the keys, at least 4 tiles each, with which few queries occupy the device."""
    return max(1, min(multiprocessors(device) // max(programs, 1), key_tiles // 4, 64))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the device's number of multiprocessors, or an H100's if kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
