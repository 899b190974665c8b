"""Copies of arguments that the backward pass reads, since their owner may change them before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn._torch_private import is_observed, is_onnx_export

_library = torch.library.Library("fastattn", "FRAGMENT")
_library.define("copy(Tensor given) -> Tensor")
_library.impl("copy", Tensor.clone, "CompositeExplicitAutograd")
copy_op = torch.ops.fastattn.copy.default


def _map(info: Any, in_dims: tuple[int, ...], given: Tensor) -> tuple[Tensor, int]:
    return copy_op(given), in_dims[0]


torch.library.register_fake("fastattn::copy", Tensor.clone, lib=_library)
torch.library.register_vmap("fastattn::copy", _map, lib=_library)
torch.library.register_autograd("fastattn::copy", lambda ctx, grad: grad, lib=_library)


def copied(tensor: Tensor) -> Tensor:
    """Return a copy, in compiled code too.

    A compiler removes torch's clone of a graph's input, or clones again in the backward pass. It does neither with an
    op that it does not know.
    """
    return copy_op(tensor) if is_observed() and not is_onnx_export() else tensor.clone()


def expanded_copy(tensor: Tensor) -> Tensor:
    """Return a copy whose expanded dimensions (stride 0) stay expanded."""
    strides = tensor.stride()
    if 0 not in strides:
        return copied(tensor)
    kept = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)]
    return copied(kept).expand(tensor.shape)


def owned(given: Tensor) -> Tensor:
    """Return integers as contiguous int64, in memory of their own if a backward pass may read them.

    The caller may change lengths, boundaries and seeds between the forward and the backward pass.
    """
    is_ready = given.dtype == torch.int64 and given.is_contiguous()
    converted = given if is_ready else given.to(torch.int64).contiguous()
    if torch.is_grad_enabled() and (converted is given or is_observed()):
        return copied(converted)
    return converted
