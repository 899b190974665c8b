"""What several backends and the fakes of the ops share: dtypes, memory layouts, dropout's scale, reasons to refuse."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattn.backends.schema import STEM_OF
from fastattn.torch_private import is_autocast_enabled, is_forward_mode, is_transformed

DROP_ALL = 65536  # the threshold that drops everything
MAX_HEAD_DIM = 256
OLDEST_GPU = (8, 0)


def dropout_scale(threshold: int) -> float:
    """What kept elements are multiplied by."""
    return DROP_ALL / (DROP_ALL - threshold) if threshold < DROP_ALL else 0.0


def stat_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32: the dtype of sums and statistics."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_torchs(*tensors: Tensor | None) -> bool:
    """Whether the reference may leave a call to torch's fused kernels: in float64, which no kernel of ours serves, and
    where nobody differentiates what it computes, since those can be differentiated once at most. In other dtypes the
    reference is the oracle, by its formulas."""
    first = tensors[0]
    if first is None or first.dtype != torch.float64 or first.device.type != "cpu":
        return False
    if is_forward_mode() or is_transformed():
        return False
    if any(tensor is not None and tensor.numel() == 0 for tensor in tensors):
        return False
    return not is_recorded(*tensors)


def is_recorded(*tensors: Tensor | None) -> bool:
    """Whether autograd records what is computed with these."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    """A region in which products run in their operands' dtype, whatever autocast is active around it."""
    if not is_autocast_enabled():
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def memory_order(like: Tensor) -> list[int]:
    """The dimensions of (B, H, L, E) as they lie in memory, the outermost first; in their own order where one is
    expanded, which lies nowhere, or where columns are not dense."""
    order, strides = [0, 1, 2, 3], like.stride()
    if (strides[3] == 1 or like.size(3) == 1) and 0 not in strides[:3]:
        order.sort(key=lambda dim: 0 if dim == 3 else strides[dim], reverse=True)  # equal ones stay as they are
    return order


def empty_heads(like: Tensor, size: int) -> Tensor:
    """(B, H, L, size) in ``like``'s memory layout."""
    order = memory_order(like)
    sizes = *like.shape[:3], size
    return like.new_empty([sizes[dim] for dim in order]).permute([order.index(dim) for dim in range(4)])


def dense_strides(input: Tensor) -> tuple[int, ...]:
    """input's own strides where it is dense in some order of its dimensions, else contiguous ones."""
    sizes, strides = input.shape, input.stride()
    expected = 1
    for dim in sorted(range(input.dim()), key=lambda d: (strides[d], sizes[d])):
        if sizes[dim] == 1:
            continue
        if strides[dim] != expected:
            break
        expected *= sizes[dim]
    else:
        return strides
    contiguous = [1] * input.dim()
    for dim in reversed(range(input.dim() - 1)):
        contiguous[dim] = contiguous[dim + 1] * max(sizes[dim + 1], 1)
    return tuple(contiguous)


def empty_dense(like: Tensor) -> Tensor:
    """Of like's sizes, with its ``dense_strides``."""
    return like.new_empty_strided(like.shape, dense_strides(like))


def python_functions(package: str) -> dict[str, Callable[..., Any]]:
    """The backend functions of a backend in Python, which has a module for each stem."""
    return {name: getattr(importlib.import_module(f"{package}.{stem}"), name) for name, stem in STEM_OF.items()}


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """The device's compute capability; an H100's where Triton's kernels are interpreted."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def device_of(args: tuple) -> torch.device:
    """The device of a backend function's operands, of which the first tensor is one."""
    for arg in args:
        if isinstance(arg, Tensor):
            return arg.device
    raise TypeError("a backend function's operands include a tensor")


def attention_operands(op: str, args: tuple) -> tuple[Tensor, Tensor, Tensor]:
    """(query, key, value) of a call of attention or of its backward pass, dense or packed."""
    return args[4:7] if op.endswith("_backward") else args[:3]


def common_refusal(expected: str, missing: str, op: str, args: tuple) -> str | None:
    """Why a backend with kernels for ``expected`` devices does not serve ``op(*args)``, as far as all of them agree."""
    device = device_of(args)
    if device.type != expected:
        return f"it takes {expected} tensors, the operands are on {device.type}"
    if is_forward_mode():
        return 'it has no forward-mode derivatives, backend("reference") has'
    for arg in args:
        if isinstance(arg, Tensor) and arg.dtype is torch.float64:
            return "it takes float32, bfloat16 and float16, not float64"
    if "attention" in op:
        query, _, value = attention_operands(op, args)
        for head_dim in (query.size(-1), value.size(-1)):
            if not 1 <= head_dim <= MAX_HEAD_DIM:
                return f"it takes head sizes from 1 to {MAX_HEAD_DIM}, not {head_dim}"
    if missing:  # after the operands' own reasons: it would serve these if it were there
        return missing
    if device.type == "cuda" and capability(device) < OLDEST_GPU:
        oldest, found = (".".join(map(str, version)) for version in (OLDEST_GPU, capability(device)))
        return f"it takes GPUs of compute capability {oldest} or newer, this one has {found}"
    return None
