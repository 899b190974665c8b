"""Tile sizes, warps and pipeline stages of every kernel, by dtype and size."""

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


# Attention's kernels, and the largest head size, padded to a power of 2, that each entry serves. The first table is
# for processors with 163 KiB of shared memory and more (compute capability 8.0, 9.0, 10.0), the second for 99 KiB.
_ATTENTION_16_BITS = {
    "forward": {64: Tiles(128, 64, 4, 3), 128: Tiles(128, 64, 8, 3), 256: Tiles(128, 64, 8, 2)},
    "forward_few": {64: Tiles(16, 128, 4, 3), 128: Tiles(16, 64, 4, 3), 256: Tiles(16, 32, 4, 3)},
    "grad_query": {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 64, 4, 2), 256: Tiles(64, 32, 8, 1)},
    "grad_key_value": {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 64, 8, 2), 256: Tiles(32, 64, 8, 1)},
    "grad_mask": {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 64, 4, 1), 256: Tiles(64, 32, 4, 1)},
}
_ATTENTION_16_BITS_SMALL = {
    "forward": {64: Tiles(128, 64, 4, 2), 128: Tiles(64, 64, 4, 2), 256: Tiles(64, 32, 8, 1)},
    "forward_few": {64: Tiles(16, 128, 4, 2), 128: Tiles(16, 64, 4, 2), 256: Tiles(16, 32, 4, 2)},
    "grad_query": {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 32, 4, 2), 256: Tiles(32, 32, 4, 1)},
    "grad_key_value": {64: Tiles(64, 64, 4, 2), 128: Tiles(32, 64, 4, 1), 256: Tiles(32, 32, 8, 1)},
    "grad_mask": {64: Tiles(64, 64, 4, 1), 128: Tiles(64, 32, 4, 1), 256: Tiles(32, 32, 4, 1)},
}
_ATTENTION_32_BITS = {
    "forward": {64: Tiles(32, 32, 4, 2), 128: Tiles(32, 32, 4, 1), 256: Tiles(32, 32, 8, 1)},
    "forward_few": {64: Tiles(16, 32, 4, 2), 128: Tiles(16, 32, 4, 1), 256: Tiles(16, 32, 4, 1)},
    "grad_query": {64: Tiles(32, 32, 4, 1), 128: Tiles(32, 32, 4, 1), 256: Tiles(16, 32, 8, 1)},
    "grad_key_value": {64: Tiles(32, 32, 4, 1), 128: Tiles(32, 32, 8, 1), 256: Tiles(16, 32, 8, 1)},
    "grad_mask": {64: Tiles(32, 32, 4, 1), 128: Tiles(32, 32, 4, 1), 256: Tiles(16, 32, 8, 1)},
}


def attention(kernel: str, dtype: torch.dtype, size: int, device: torch.device) -> Tiles:
    """The tiles of an attention kernel for operands of this dtype and a head size (the larger of the two) up to 256."""
    if dtype == torch.float32:
        table = _ATTENTION_32_BITS
    elif capability(device) in ((8, 0), (9, 0), (10, 0), (10, 3)):
        table = _ATTENTION_16_BITS
    else:
        table = _ATTENTION_16_BITS_SMALL
    return next(tiles for largest, tiles in table[kernel].items() if size <= largest)


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
