"""Helpers for jagged nested tensors: sequences of different lengths, packed one after the other in ``values()``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattn._torch_private import max_length, ragged_dim
from fastattn.ops.check import is_readable
from fastattn.ops.copies import owned


def is_jagged(tensor: object) -> bool:
    return isinstance(tensor, Tensor) and tensor.layout == torch.jagged


def with_values(like: Any, values: Tensor, offsets: Tensor | None = None) -> Tensor:
    """Return the nested tensor of these values with ``like``'s offsets, so that the two add, or with others."""
    return torch.nested.nested_tensor_from_jagged(
        values, like.offsets() if offsets is None else offsets, like.lengths(), jagged_dim=ragged_dim(like),
        max_seqlen=max_length(like),
    )  # fmt: skip


def to_padded(tensor: Any) -> Tensor:
    """Return the sequences of a jagged tensor without holes, padded with zeros: (batch, longest sequence, ...).

    torch's function saves the offsets for its backward pass. It gets a copy, because their owner may refill them.
    """
    return with_values(tensor, tensor.values(), owned(tensor.offsets())).to_padded_tensor(0.0)


def on_values(function: Callable[[Tensor], Tensor], tensor: Any) -> Tensor:
    """Apply a function that treats each position independently to the values of a jagged tensor."""
    return with_values(tensor, function(tensor.values()))


def same_lengths(first: Any, second: Any) -> bool:
    """Return whether two jagged tensors are known to have sequences of the same lengths."""
    a, b = first.offsets(), second.offsets()
    return a is b or (is_readable(a) and torch.equal(a, b))
