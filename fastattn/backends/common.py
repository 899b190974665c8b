"""Shared parts of the backends and of the ops' fakes: dtypes, memory layouts, dropout's scale, reasons to refuse."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattn._torch_private import is_autocast_enabled, is_forward_mode, is_transformed
from fastattn.backends.schema import STEM_OF, AnyArgs, AttentionArgs, VarlenAttentionArgs, flatten

DROP_ALL = 65536  # the threshold that drops everything
MAX_HEAD_DIM = 256
OLDEST_GPU = (8, 0)


def dropout_scale(threshold: int) -> float:
    """Return the factor of kept elements."""
    return DROP_ALL / (DROP_ALL - threshold) if threshold < DROP_ALL else 0.0


def stat_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and statistics: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_torchs(*tensors: Tensor | None) -> bool:
    """Return whether the reference may leave a call to torch's fused kernels: on the CPU, in float64, non-empty.

    fastattn has no kernels for float64. In other dtypes the reference is the oracle and computes by its formulas.
    Neither autograd, forward mode nor a torch.func transform may see the call, because torch's kernels can be
    differentiated at most once.
    """
    first = tensors[0]
    if first is None or first.dtype != torch.float64 or first.device.type != "cpu":
        return False
    if is_forward_mode() or is_transformed():
        return False
    if any(tensor is not None and tensor.numel() == 0 for tensor in tensors):
        return False
    return not is_recorded(*tensors)


def is_recorded(*tensors: Tensor | None) -> bool:
    """Return whether autograd records a computation with these tensors."""
    if torch.is_grad_enabled():
        for tensor in tensors:  # a loop, because a generator for any() would cost as much again
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    """Return a context in which products run in their operands' dtype, even within an autocast region."""
    if not is_autocast_enabled():
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def memory_order(like: Tensor) -> list[int]:
    """Return the dimensions of (B, H, L, E) by their order in memory, the outermost first.

    The order is 0, 1, 2, 3 if a dimension is expanded (stride 0) or columns are not dense.
    """
    order, strides = [0, 1, 2, 3], like.stride()
    if (strides[3] == 1 or like.size(3) == 1) and 0 not in strides[:3]:
        order.sort(key=lambda dim: 0 if dim == 3 else strides[dim], reverse=True)  # equal strides keep their order
    return order


def empty_heads(like: Tensor, size: int) -> Tensor:
    """Allocate (B, H, L, size) in ``like``'s memory layout."""
    order = memory_order(like)
    sizes = *like.shape[:3], size
    return like.new_empty([sizes[dim] for dim in order]).permute([order.index(dim) for dim in range(4)])


def dense_strides(input: Tensor) -> tuple[int, ...]:
    """Return the input's strides if it is dense in some order of its dimensions, otherwise contiguous strides."""
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
    """Allocate a tensor of ``like``'s sizes and ``dense_strides``."""
    return like.new_empty_strided(like.shape, dense_strides(like))


def python_functions(package: str) -> dict[str, Callable[..., Any]]:
    """Return the functions of a backend in Python, which has a module for each stem."""
    return {name: getattr(importlib.import_module(f"{package}.{stem}"), name) for name, stem in STEM_OF.items()}


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the device's compute capability, or an H100's if Triton's kernels are interpreted."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def first_tensor(args: AnyArgs) -> Tensor:
    """Return a record's first tensor: the input or the gradient of the output; for ``DropoutMaskArgs`` the seed."""
    for arg in args:  # not a generator, which compilers may not trace
        if isinstance(arg, Tensor):
            return arg
    raise TypeError("a record holds a tensor")


def device_of(args: AnyArgs) -> torch.device:
    """Return the device of a record's tensors."""
    return first_tensor(args).device


def forward_of(args: AnyArgs) -> AnyArgs:
    """Return the record of the forward pass within a backward pass's, or the record itself."""
    return getattr(args, "forward", args)


def common_refusal(expected: str, missing: str, args: AnyArgs) -> str | None:
    """Return why no backend with kernels for ``expected`` devices serves this record, or None.

    A backend may have further reasons of its own.
    """
    device = device_of(args)
    if device.type != expected:
        return f"it takes {expected} tensors, the operands are on {device.type}"
    if is_forward_mode():
        return 'it has no forward-mode derivatives, backend("reference") has'
    for arg in flatten(args):
        if isinstance(arg, Tensor) and arg.dtype is torch.float64:
            return "it takes float32, bfloat16 and float16, not float64"
    forward = forward_of(args)
    if isinstance(forward, AttentionArgs | VarlenAttentionArgs):
        for head_dim in (forward.query.size(-1), forward.value.size(-1)):
            if not 1 <= head_dim <= MAX_HEAD_DIM:
                return f"it takes head sizes from 1 to {MAX_HEAD_DIM}, not {head_dim}"
    if missing:  # after the reasons of the operands: an installed backend would serve them
        return missing
    if device.type == "cuda" and capability(device) < OLDEST_GPU:
        oldest, found = (".".join(map(str, version)) for version in (OLDEST_GPU, capability(device)))
        return f"it takes GPUs of compute capability {oldest} or newer, this one has {found}"
    return None
