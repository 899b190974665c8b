"""The division of calls with DTensor operands: each process computes its own shard, independent of the others."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn.ops import check
from fastattn.ops.register import PLAIN

KEY_STEP = 0x9E3779B97F4A7C15 - 2**64  # odd, so multiples of it give each shard's dropout another key


def is_sharded(operand: Any) -> bool:
    """Return whether the operand is a DTensor, without importing ``torch.distributed.tensor``."""
    return type(operand) not in PLAIN and _is_dtensor(operand)


def _is_dtensor(tensor: Any) -> bool:
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


class Shards:
    """The division of a call among processes, given by the placements of its first operand.

    Args:
        function, label: names of the function and of the operand, for messages.
        operand: the DTensor.
        dims: the dimensions of ``operand`` that may be divided.

    Raises:
        ValueError: a placement is partial or divides another dimension.
    """

    def __init__(self, function: str, label: str, operand: Any, dims: Sequence[int]) -> None:
        self.function, self.label, self.operand = function, label, operand
        self.mesh, self.placements = operand.device_mesh, tuple(operand.placements)
        self.own: Tensor = operand.to_local()
        for placement in self.placements:
            if not placement.is_replicate() and not (placement.is_shard() and placement.dim in dims):
                allowed = ", ".join(["Replicate()", *(f"Shard({dim})" for dim in dims)])
                raise check.BadValue(
                    f"{function}: as a DTensor {label} must be placed by {allowed}, got {placement}; redistribute() it"
                )

    def local(self, label: str, tensor: Any) -> Tensor:
        """Return this process's shard of an operand that must be divided as the first one is."""
        if not _is_dtensor(tensor):
            raise check.BadType(
                f"{self.function}: {label} must be a DTensor as {self.label} is, got {type(tensor).__name__}"
            )
        if tensor.device_mesh != self.mesh or tuple(tensor.placements) != self.placements:
            raise check.BadValue(
                f"{self.function}: {label} must be placed by {self.placements} as {self.label} is, got "
                f"{tuple(tensor.placements)}; redistribute() it"
            )
        return tensor.to_local()

    def part(self, label: str, tensor: Any, dims: Mapping[int, int]) -> Any:
        """Return the part that this process reads of a tensor, which is replicated or divided as the first operand is.

        Args:
            tensor: a DTensor, or a tensor without a gradient that all processes hold; None is returned as it is.
            dims: {dimension of the first operand: corresponding dimension of ``tensor``}. Shards along other dimensions
                read the same elements, so their gradients are added up.
        """
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        if not isinstance(tensor, Tensor):
            return tensor
        wanted = tuple(Shard(dims[p.dim]) if p.is_shard() and p.dim in dims else Replicate() for p in self.placements)
        if not _is_dtensor(tensor):
            if tensor.requires_grad:
                raise check.BadType(
                    f"{self.function}: {label} requires a gradient, so it must be a DTensor as {self.label} is; make "
                    "it one by torch.distributed.tensor.distribute_tensor"
                )
            tensor = DTensor.from_local(tensor, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        if not all(p.is_replicate() or p == want for p, want in zip(tensor.placements, wanted, strict=True)):
            raise check.BadValue(
                f"{self.function}: {label} must be replicated or placed by {wanted}, since {self.label} is placed by "
                f"{self.placements}, got {tuple(tensor.placements)}; redistribute() it"
            )
        both = zip(self.placements, wanted, strict=True)
        grads = [Partial() if p.is_shard() and want.is_replicate() else want for p, want in both]
        return tensor.redistribute(self.mesh, wanted).to_local(grad_placements=grads)

    def mask(self, mask: Any) -> Any:
        """Return this process's part of a mask that is broadcastable to the first operand's leading dimensions."""
        if not isinstance(mask, Tensor):
            return mask
        added = self.operand.dim() - mask.dim()
        along = {dim: dim - added for dim in range(max(added, 0), self.operand.dim()) if mask.size(dim - added) != 1}
        return self.part("attn_mask", mask, along)

    def seed(self, seed: Any, dropout_p: float) -> Tensor | None:
        """Return the seed of this process's dropout: the call's, its key raised by the shard's number * KEY_STEP."""
        seed = self.part("seed", seed, {})
        check.seed(self.function, seed, self.operand.device)
        seed = check.draw_seed(seed, check.threshold(self.function, dropout_p), self.own)
        if seed is None:
            return None
        number = 0
        for size, place, placement in zip(self.mesh.shape, self.mesh.get_coordinate(), self.placements, strict=True):
            if placement.is_shard():
                number = number * size + place
        return seed + seed.new_tensor((number * KEY_STEP % 2**63, 0))

    def whole(self, local: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the result of this global shape as a DTensor, divided as the first operand is."""
        from torch.distributed.tensor import DTensor

        strides, step = [0] * local.dim(), 1
        for dim in sorted(range(local.dim()), key=lambda dim: (local.stride(dim), -dim)):  # innermost first
            strides[dim], step = step, step * max(shape[dim], 1)
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=torch.Size(shape), stride=tuple(strides)
        )

    def divides(self, dim: int, size: int) -> bool:
        """Return whether the processes along this dimension of the first operand divide ``size`` into equal shards."""
        sizes = zip(self.mesh.shape, self.placements, strict=True)
        return size % math.prod(count for count, placement in sizes if placement.is_shard(dim)) == 0


def attend(function: Callable[..., Any], query: Any, keys: dict[str, Any], last: int, **options: Any) -> Any:
    """Call an attention function on DTensors (..., Hq, Lq, E), divided along batch dimensions and heads.

    Args:
        function: ``scaled_dot_product_attention`` or ``attention_weights``.
        keys: the function's operands after ``query``, by name.
        last: size of the result's last dimension.
        options: the function's other arguments.
    """
    name, rank = function.__name__, query.dim()
    shards = Shards(name, "query", query, range(rank - 2))
    for label, tensor in keys.items():
        options[label] = shards.local(label, tensor)
        fits = tensor.dim() == rank and tensor.shape[: rank - 3] == query.shape[: rank - 3]
        if rank > 2 and fits and tensor.size(-3) != query.size(-3):
            fits = all(shards.divides(rank - 3, of.size(-3)) for of in (query, tensor))
        if not fits:
            raise check.BadValue(
                f"{name}: as DTensors query and {label} must have the same batch dimensions, and heads that the "
                f"processes divide evenly, got {tuple(query.shape)} and {tuple(tensor.shape)}"
            )
    lengths, options["attn_mask"] = options["key_lengths"], shards.mask(options["attn_mask"])
    if isinstance(lengths, Tensor):
        if rank != 4:
            raise check.BadValue(f"{name}: key_lengths beside DTensors need (B, H, L, E), got {rank} dimensions")
        options["key_lengths"] = shards.part("key_lengths", lengths, {0: 0})
    options["seed"] = shards.seed(options["seed"], options["dropout_p"])
    result = function(shards.own, **options)
    shape = *query.shape[:-1], last
    if isinstance(result, tuple):
        return tuple(shards.whole(local, shape[: local.dim()]) for local in result)
    return shards.whole(result, shape)
