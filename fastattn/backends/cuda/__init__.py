"""The CUDA C++ backend: ``csrc/cuda``, compiled into ``_cuda.so``. It has attention for decoding, on every GPU, and
attention with its backward pass for Hopper."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastattn._torch_private import is_observed, is_transformed
from fastattn.backends import native
from fastattn.backends.common import capability, common_refusal, device_of, first_tensor, forward_of, is_recorded
from fastattn.backends.schema import (
    TENSORS,
    AnyArgs,
    AttentionArgs,
    DropoutMaskArgs,
    VarlenAttentionArgs,
)

DEVICE = "cuda"
MISSING = native.missing("cuda")
FUNCTIONS = {} if MISSING else native.functions("cuda")

CAPABILITIES = native.capabilities()
HOPPER = (9, 0)  # The compute capability that 9.0a is for.
MAX_QUERIES = 16  # of decoding
MAX_KEYS = 2**29  # the kernels count keys and queries in 32 bits
MAX_ROWS = 2**31 - 1  # rows of queries, B * Hq * Lq, counted in 32 bits

# Maximum bytes of a small call: of a row operation's operand, and of attention's keys and values. Below them the
# library's kernel takes an H100 less time than a launch through Triton takes the host. Triton has the faster kernels,
# this library the faster launches (docs/gpu.md).
SMALL_ROWS = 2**25
SMALL_CACHE = 2**27


def is_bound_by_host(args: AnyArgs) -> bool:
    """Return whether a call is so small that its launch takes longer than its kernel; False in compiled code."""
    if torch.compiler.is_compiling():
        return False
    if isinstance(args, AttentionArgs):
        return args.key.nbytes + args.value.nbytes < SMALL_CACHE
    if isinstance(args, DropoutMaskArgs):  # one byte per element
        return math.prod(args.shape) < SMALL_ROWS
    return first_tensor(args).nbytes < SMALL_ROWS


def compiled() -> dict[str, Callable[..., Any]]:
    """Return the library's operations by name."""
    return FUNCTIONS


def plain(op: str, device: torch.device) -> Callable[[Sequence[Any]], bool] | None:
    """Return a predicate of the arguments of ``op``'s fast path: whether it asks this library. None: it never does.

    It asks for the calls for which ``choose`` takes this backend: none of packed sequences, which ``withheld`` keeps.
    """
    if device.type != DEVICE or op not in FUNCTIONS or op == "varlen_attention" or not _has_code(device, CAPABILITIES):
        return None
    return _is_decoding if op == "attention" else lambda values: values[0].nbytes < SMALL_ROWS


def _is_decoding(values: Sequence[Any]) -> bool:
    """Return whether this library serves plain attention with these arguments of the fast path."""
    tensors = TENSORS[AttentionArgs]
    query, key, value, *_ = values
    is_small = query.dim() == 4 and query.size(2) <= MAX_QUERIES and key.nbytes + value.nbytes < SMALL_CACHE
    drops = len(values) > tensors and values[tensors] > 0
    return is_small and not drops and not is_recorded(*values[:tensors])


@functools.cache
def _has_code(device: torch.device, capabilities: tuple[tuple[tuple[int, int], tuple[int, int]], ...]) -> bool:
    return any(first <= capability(device) <= last for first, last in capabilities)


def refusal(op: str, args: AnyArgs) -> str | None:
    """Return why this backend does not serve ``op(args)``, or None."""
    reason = common_refusal(DEVICE, MISSING, args)
    if reason:
        return reason
    device = device_of(args)
    if device.type == "cuda" and not _has_code(device, CAPABILITIES):
        return "its library has no code for this GPU's compute capability, {}.{}".format(*capability(device))
    if op not in FUNCTIONS:
        return f"it has no {op}"
    forward = _attention_of(args)
    return None if forward is None else _attention_refusal(args, forward)


def withheld(args: AnyArgs) -> str | None:
    """Return why only ``backend("cuda")`` gets a call that this backend serves, or None."""
    forward = _attention_of(args)
    if forward is not None and _beyond_decoding(args, forward):
        return 'its kernels for Hopper have run on no GPU yet, so only backend("cuda") takes them'
    return None


def _attention_of(args: AnyArgs) -> AttentionArgs | VarlenAttentionArgs | None:
    """Return the forward pass's record of attention or of its backward pass, None of other operations."""
    forward = forward_of(args)
    return forward if isinstance(forward, AttentionArgs | VarlenAttentionArgs) else None


def _attention_refusal(args: AnyArgs, forward: AttentionArgs | VarlenAttentionArgs) -> str | None:
    length = -2 if isinstance(forward, AttentionArgs) else 0
    rows = math.prod(forward.query.shape[:-1])
    if rows > MAX_ROWS:
        return f"it takes up to 2**31 - 1 rows of queries, not {rows}"
    for name, count in (("queries", forward.query.size(length)), ("keys", forward.key.size(length))):
        if count > MAX_KEYS:
            return f"it takes up to 2**29 {name}, not {count}"
    if is_transformed():  # inside vmap a tensor's requires_grad does not show whether a gradient is needed
        return "its attention is not for functorch's transforms"
    beyond = _beyond_decoding(args, forward)
    reason = beyond and _beyond_hopper(args, forward)
    return f"its kernel for decoding takes {beyond}, that for Hopper {reason}" if reason else None


def _beyond_decoding(args: AnyArgs, forward: AttentionArgs | VarlenAttentionArgs) -> str | None:
    """Return what the kernel for decoding takes, if this call is something else."""
    if not isinstance(forward, AttentionArgs):
        return "no packed sequences"
    if forward.query.size(2) > MAX_QUERIES:
        return f"up to {MAX_QUERIES} queries, not {forward.query.size(2)}"
    is_backward = args is not forward
    if (
        is_backward
        or forward.keep_residual
        or is_recorded(forward.query, forward.key, forward.value, forward.attn_mask)
    ):
        return "no gradients"
    return "no dropout" if forward.threshold != 0 else None


def _beyond_hopper(args: AnyArgs, forward: AttentionArgs | VarlenAttentionArgs) -> str | None:
    """Return what the kernels for Hopper take, if this call is something else. TMA has the limits of addresses."""
    device, dtype = forward.query.device, forward.query.dtype
    if device.type == "cuda" and capability(device) != HOPPER:
        return "GPUs of compute capability {}.{}, this one has {}.{}".format(*HOPPER, *capability(device))
    if (HOPPER, HOPPER) not in CAPABILITIES and device.type == "cuda":
        return "is not in the library, which is built without 9.0a"
    if dtype == torch.float32:
        return "bfloat16 and float16, not float32"
    if getattr(args, "mask_grad", False) or is_recorded(getattr(forward, "attn_mask", None)):
        return "no mask whose gradient is needed"
    for head_dim in (forward.query.size(-1), forward.value.size(-1)):
        if head_dim % 8:
            return f"head sizes that are multiples of 8, not {head_dim}"
    for tensor in (forward.query, forward.key, forward.value):
        if tensor.stride(-1) != 1:  # It is copied.
            continue
        strides = [stride for size, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False) if size > 1]
        if 0 in strides:
            return "no expanded operands"
        address = 0 if is_observed() else tensor.data_ptr()  # Traced tensors have none; the library checks theirs.
        if address % 16 or any(stride % 8 for stride in strides):
            return "rows that begin at multiples of 16 bytes"
    return None
