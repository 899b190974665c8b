"""The CUDA C++ backend: ``csrc/cuda``, compiled into ``_cuda.so``. Its attention is for decoding."""

from __future__ import annotations

import math

import torch

from fastattn._torch_private import is_transformed
from fastattn.backends import native
from fastattn.backends.common import capability, common_refusal, device_of, first_tensor, is_recorded
from fastattn.backends.schema import AnyArgs, AttentionArgs, DropoutMaskArgs

DEVICE = "cuda"
MISSING = native.missing("cuda")
FUNCTIONS = {} if MISSING else native.functions("cuda")

CAPABILITIES = native.capabilities()
MAX_QUERIES = 16
MAX_KEYS = 2**29  # the kernels count keys in 32 bits
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


def refusal(op: str, args: AnyArgs) -> str | None:
    """Return why this backend does not serve ``op(args)``, or None."""
    reason = common_refusal(DEVICE, MISSING, args)
    if reason:
        return reason
    device = device_of(args)
    if device.type == "cuda" and not any(first <= capability(device) <= last for first, last in CAPABILITIES):
        return "its library has no code for this GPU's compute capability, {}.{}".format(*capability(device))
    if op not in FUNCTIONS:
        return f"it has no {op}"
    return _beyond_decoding(args) if isinstance(args, AttentionArgs) else None


def _beyond_decoding(args: AttentionArgs) -> str | None:
    batch, heads, queries = args.query.shape[:3]
    if queries > MAX_QUERIES:
        return f"it takes up to {MAX_QUERIES} queries, not {queries}"
    if batch * heads * queries > MAX_ROWS:
        return f"it takes up to 2**31 - 1 rows of queries, not {batch * heads * queries}"
    if args.key.size(2) > MAX_KEYS:
        return f"it takes up to 2**29 keys, not {args.key.size(2)}"
    if args.threshold != 0:
        return "its attention has no dropout"
    if args.keep_residual or is_recorded(args.query, args.key, args.value, args.attn_mask):
        return "its attention has no gradient"
    if is_transformed():  # inside vmap a tensor's requires_grad does not show whether a gradient is needed
        return "its attention is not for functorch's transforms"
    return None
