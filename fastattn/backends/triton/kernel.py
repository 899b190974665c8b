"""How a kernel is declared and started, and what the row kernels share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.backends.reference.dropout import ALL


def kernel(function: Callable[..., Any]) -> Any:
    """triton.jit, compiled anew for other constexprs and dtypes alone: no value or alignment of an argument is looked
    at, so that a new sequence length compiles nothing. What a kernel may rely on, its constexprs say. Numbers are
    annotated with their type, which would otherwise follow their size."""
    parameters = inspect.signature(function).parameters.values()
    return triton.jit(function, do_not_specialize=[p.name for p in parameters if "constexpr" not in str(p.annotation)])


def launch(function: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **constants: Any) -> None:
    """Start ``function`` on the current stream of ``device``; an empty grid has nothing to do."""
    if 0 in grid:
        return
    constants["enable_fp_fusion"] = True  # Triton's default, which it is about to change
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            function[grid](*args, **constants)
    else:
        function[grid](*args, **constants)


def dropout_scale(threshold: int) -> float:
    """What kept elements are multiplied by."""
    return ALL / (ALL - threshold) if threshold < ALL else 0.0


def as_rows(tensor: Tensor) -> Tensor:
    """(rows, columns) with unit stride in a row: a view where there is one, else a copy."""
    rows = tensor.reshape(-1, tensor.size(-1)) if tensor.numel() > 0 else tensor.new_empty(0, 1)
    return rows if rows.stride(1) == 1 or rows.size(1) == 1 else rows.contiguous()


def are_aligned(columns: int, *operands: Tensor | None) -> bool:
    """Whether every row of these operands, and of a contiguous result, begins at a multiple of 16 bytes."""
    return columns % 16 == 0 and all(
        t is None or (t.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in t.stride()[:-1])) for t in operands
    )


def are_few(rows: int) -> bool:
    """Whether rows can be counted in 32 bits, in which a division takes a tenth of the instructions."""
    return rows < 2**31


@triton.jit
def divide(row, size, FEW: tl.constexpr):
    """(row // size, row % size)"""
    if FEW:
        row, size = row.to(tl.uint32), size.to(tl.uint32)
    return row // size, row % size


@triton.jit
def rows_of(pointer, offset, ALIGNED: tl.constexpr):
    """Pointers (R, 1) to the rows at these offsets (R,)."""
    rows = (pointer + offset)[:, None]
    if ALIGNED:
        rows = tl.multiple_of(rows, (16, 16))
    return rows
