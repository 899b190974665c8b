"""Scaled dot-product attention, out = dropout(softmax(scale * Q K^T + mask)) V (Vaswani et al. 2017, equation 1).

i counts the queries of a sequence and j its keys. A program owns a tile of one side and visits the other side's tiles
that have a visible pair with it. Full tiles come first: every pair is visible and no mask is added. Partial tiles
follow. This file is the host side: it lays out operands, chooses tiles and launches the kernels.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fastattn.backends.common import empty_heads
from fastattn.backends.schema import (
    AttentionArgs,
    AttentionBackwardArgs,
    VarlenAttentionArgs,
    VarlenAttentionBackwardArgs,
)
from fastattn.backends.triton.attention import tiles
from fastattn.backends.triton.attention.backward import (
    MaskGrad,
    Rows,
    Statistics,
    grad_key_value_kernel,
    grad_mask_kernel,
    grad_query_kernel,
)
from fastattn.backends.triton.attention.block_mask import Cover, TileLists, cover_kernel, list_kernel
from fastattn.backends.triton.attention.forward import Result, Splits, forward_kernel, merge_kernel
from fastattn.backends.triton.attention.operands import Heads, Problem, Sequences
from fastattn.backends.triton.attention.scores import SeenKeys
from fastattn.backends.triton.kernel import cdiv, launch
from fastattn.backends.triton.philox import dropout_of
from fastattn.backends.triton.visibility import Window


def attention(args: AttentionArgs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _Call(args).forward(args.keep_residual)


def attention_backward(args: AttentionBackwardArgs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call, attn_mask = _Call(args.forward), args.forward.attn_mask
    grad_heads = call.grad_heads(args.grad_out)
    grads, rows = call.backward(grad_heads, args.grad_lse, args.out, args.stats, args.residual)
    if attn_mask is None or not args.mask_grad:
        return *grads, args.out.new_empty(0)
    return *grads, call.grad_mask(attn_mask, grad_heads, args.stats, rows)


def varlen_attention(args: VarlenAttentionArgs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _Call(args).forward(args.keep_residual)


def varlen_attention_backward(args: VarlenAttentionBackwardArgs) -> tuple[Tensor, Tensor, Tensor]:
    call = _Call(args.forward)
    return call.backward(call.grad_heads(args.grad_out), args.grad_lse, args.out, args.stats, args.residual)[0]


class _Call:
    """One call of attention: the operands, options and layouts that its launches share."""

    def __init__(self, args: AttentionArgs | VarlenAttentionArgs) -> None:
        query, key, value, scale = args.query, args.key, args.value, args.scale
        self.operands = query, key, value
        if isinstance(args, AttentionArgs):
            self.batch, self.is_packed = query.size(0), False
            self.lower_right, attn_mask = args.lower_right, args.attn_mask
            self.seqlen_q, self.seqlen_k = query.size(2), key.size(2)
            sequences = Sequences(self.seqlen_q, self.seqlen_k, None, None, args.key_lengths)
            window = Window(args.window_left, args.window_right)
        else:  # a bound above the number of packed tokens is cut to it
            self.batch, self.is_packed = args.cu_seq_q.size(0) - 1, True
            self.lower_right, attn_mask = True, None
            self.seqlen_q, self.seqlen_k = min(args.max_q, query.size(0)), min(args.max_k, key.size(0))
            sequences = Sequences(self.seqlen_q, self.seqlen_k, args.cu_seq_q, args.cu_seq_k, args.seqused_k)
            window = Window(min(args.window_left, self.seqlen_k), min(args.window_right, self.seqlen_q))
        self.num_heads, self.num_kv_heads = query.size(1), key.size(1)
        self.head_dim, self.value_head_dim = query.size(-1), value.size(-1)
        self.dtype, self.device = query.dtype, query.device
        # A huge scale times log2(e) is infinite, and a float mask is added in natural units: both keep base e.
        is_huge = abs(scale) > torch.finfo(torch.float32).max / 1.5
        self.is_prescaled = is_huge or (attn_mask is not None and attn_mask.dtype != torch.bool)
        if scale <= 0:
            query = query * (-1 if scale < 0 else 0)
        heads = heads_of(query), heads_of(key), heads_of(value)
        row_bytes = (self.head_dim | self.value_head_dim) * self.dtype.itemsize
        self.is_aligned = row_bytes % 16 == 0 and self._are_aligned(*heads)
        self.problem = Problem(
            *heads, *mask_of(attn_mask), dropout_of(args.seed, args.threshold), sequences, window,
            self.num_heads, self.num_heads // max(self.num_kv_heads, 1), self.head_dim, self.value_head_dim,
            scale, abs(scale) or 1.0,
        )  # fmt: skip

    def _are_aligned(self, *operands: Heads) -> bool:
        """Return whether every row begins at a multiple of 16 bytes."""
        bits, size = 0, self.dtype.itemsize
        for tensor, batch, head, row in operands:
            bits |= (batch | head | row) * size | tensor.data_ptr()
        return bits % 16 == 0

    def _tile(self, kernel: str) -> tiles.Tile:
        largest = max(self.head_dim, self.value_head_dim)
        if self.problem.mask is not None:
            kind = "float_masked" if self.problem.mask.pointer.is_floating_point() else "masked"
        elif self.is_packed or self.head_dim != self.value_head_dim or largest & (largest - 1):
            kind = "irregular"
        else:
            rows = self.seqlen_q if kernel == "grad_key_value" else self.seqlen_k
            kind = "regular" if tiles.has_descriptors(rows, self.device) else "pointers"
        return tiles.choose(kernel, self.dtype, largest, kind, self.is_aligned, self.device)

    def _constants(self, tile: tiles.Tile, *others: Heads) -> dict[str, Any]:
        """Return a kernel's constexprs and options.

        Args:
            others: further tensors that the kernel accesses by rows, which count for the alignment.
        """
        is_tf32 = (
            self.dtype == torch.float32
            and torch.backends.cuda.matmul.fp32_precision == "tf32"
            and _padded(max(self.head_dim, self.value_head_dim))
            <= tiles.largest_tf32_head(self.problem.mask is not None, self.device)
        )
        return _constants(
            tile, self.dtype, self.head_dim, self.value_head_dim, self.is_aligned and self._are_aligned(*others),
            self.lower_right, is_tf32,
        )  # fmt: skip

    def lists(self, tile: tiles.Tile, keys_own: bool) -> tuple[TileLists | None, SeenKeys | None]:
        """Return the lists of tiles to visit under the mask, and the keys seen by each tile of queries.

        The lists have size 1 in the dimensions that the mask broadcasts, except batch if ``key_lengths`` is given.
        """
        mask = self.problem.mask
        if mask is None:
            return None, None
        batch, heads, rows = (
            size if stride else min(size, 1) for size, stride in zip(mask.pointer.shape[:3], mask[1:4], strict=True)
        )
        tiles_q, tiles_k = cdiv(rows, tile.block_m), cdiv(self.seqlen_k, tile.block_n)
        cover = mask.pointer.new_empty((batch, heads, tiles_q, tiles_k), dtype=torch.int8)
        seen = mask.pointer.new_empty((batch, heads, tiles_q, self.seqlen_k), dtype=torch.uint8)
        launch(
            cover_kernel, (cover.numel(),), self.device, mask, self.problem.mask_column, cover, seen, tiles_q, tiles_k,
            heads, rows, self.seqlen_k, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        )  # fmt: skip
        batch_stride, head_stride, stride_q, stride_k = (_stride(cover, dim) for dim in range(4))
        own_tiles, count, own, other = cdiv(self.seqlen_q, tile.block_m), tiles_k, tile.block_m, tile.block_n
        if keys_own:
            own_tiles, count, own, other = count, own_tiles, other, own
            stride_q, stride_k = stride_k, stride_q
        batch = batch if self.problem.sequences.lengths is None else self.batch
        lists = mask.pointer.new_empty((batch, heads, own_tiles, 2 + count), dtype=torch.int32)
        launch(
            list_kernel, (batch * heads * own_tiles,), self.device, self.problem.sequences, self.problem.window,
            Cover(cover, batch_stride, head_stride, stride_q, stride_k), lists, heads, own_tiles, count,
            **_list_constants(self.device, own, other, self.lower_right, keys_own),
        )  # fmt: skip
        return (
            TileLists(lists, _stride(lists, 0), _stride(lists, 1), lists.stride(2), count),
            SeenKeys(seen, *(_stride(seen, dim) for dim in range(3))),
        )

    def descriptors(self, operands: tuple[Heads, ...], rows: int, block: int) -> tuple[TensorDescriptor | None, ...]:
        """Return tensor descriptors (TMA) of the operands, or None for each operand if the kernel must use pointers.

        Pointers serve where descriptors do not pay off or where the layout rules them out.

        Args:
            rows: rows per sequence.
            block: rows per tile.
        """
        if not (
            tiles.has_descriptors(rows, self.device)
            # With a mask, larger heads leave no registers for descriptors.
            and (self.problem.mask is None or max(self.head_dim, self.value_head_dim) <= 128)
            and self.is_aligned and self.dtype.itemsize == 2 and not self.is_packed
            and all(tensor.numel() > 0 and all(stride > 0 for stride in strides) for tensor, *strides in operands)
        ):  # fmt: skip
            return (None,) * len(operands)
        return tuple(
            TensorDescriptor(tensor, tensor.shape, tensor.stride(), [1, 1, block, _padded(tensor.size(-1))])
            for tensor, *_ in operands
        )

    def forward(self, keep_residual: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return out and, at the end, residual in query's layout; LSE (B, Hq, Lq), stats (2, B, Hq, Lq) in float32."""
        query, _, value = self.operands
        out, shape = _empty(query, value.size(-1)), tuple(query.shape[:-1])
        residual = _empty(query, value.size(-1)) if keep_residual else query.new_empty(0)
        stats = query.new_empty((2, *shape), dtype=torch.float32)
        lse = query.new_empty(shape, dtype=torch.float32)
        tile = self._tile("forward" if self.seqlen_q > 16 else "forward_few")
        tiles_q, tiles_k = cdiv(self.seqlen_q, tile.block_m), cdiv(self.seqlen_k, tile.block_n)
        programs = tiles_q * self.num_heads * self.batch
        num_splits = tiles.num_splits(programs, tiles_k, self.device)
        residual_heads = heads_of(residual) if keep_residual else None
        result = Result(heads_of(out), residual_heads, lse, stats[0], stats[1], *_dense_rows(lse))
        constants = self._constants(tile, result.out)
        lists = self.lists(tile, keys_own=False)
        if num_splits == 1:
            descriptors = self.descriptors(self.problem[1:3], self.seqlen_k, tile.block_n)
            launch(
                forward_kernel, (programs, 1), self.device, *descriptors, self.problem, *lists, result, Splits(0, 0),
                tiles_q, PRESCALED=self.is_prescaled, **constants,
            )  # fmt: skip
            return out, lse, stats, residual
        split_out = out.new_empty((num_splits, *out.shape), dtype=torch.float32)
        split_stats = stats.new_empty((2, num_splits, *shape))
        split_heads = heads_of(split_out[0])._replace(pointer=split_out)
        split_result = Result(split_heads, None, None, split_stats[0], split_stats[1], *_dense_rows(lse))
        splits = Splits(split_out.stride(0), split_stats.stride(1))
        launch(
            forward_kernel, (programs, num_splits), self.device, None, None, self.problem, *lists, split_result,
            splits, tiles_q, PRESCALED=self.is_prescaled, **constants,
        )  # fmt: skip
        constants = _merge_constants(constants)
        tiles_q = cdiv(self.seqlen_q, constants["BLOCK_M"])
        launch(
            merge_kernel, (tiles_q * self.num_heads * self.batch,), self.device, self.problem, split_result, splits,
            num_splits, result, tiles_q, **constants,
        )  # fmt: skip
        return out, lse, stats, residual

    def grad_heads(self, grad_out: Tensor) -> Heads:
        """Return the output's gradient, copied if it is less aligned than the operands."""
        heads = heads_of(grad_out)
        if self.is_aligned and not self._are_aligned(heads):
            heads = heads_of(grad_out.clone(memory_format=torch.contiguous_format))
        return heads

    def backward(
        self, grad_heads: Heads, grad_lse: Tensor | None, out: Tensor, stats: Tensor, residual: Tensor
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Rows]:
        """Return the gradients of query, key and value, and the row statistics that the mask's gradient needs."""
        grad_query, grad_key, grad_value = (_empty(tensor, tensor.size(-1)) for tensor in self.operands)
        out_heads, residual_heads = heads_of(out), heads_of(residual) if residual.dim() > 1 else None
        query_heads, key_heads, value_heads = heads_of(grad_query), heads_of(grad_key), heads_of(grad_value)
        statistics = Statistics(stats[0], stats[1], *_dense_rows(stats[0]))
        rows = self._rows(stats)
        modes = {"PRESCALED": self.is_prescaled, "FOLD_SUM": not self.is_prescaled and self.dtype != torch.float32}

        tile = self._tile("grad_query")
        tiles_q = cdiv(self.seqlen_q, tile.block_m)
        descriptors = self.descriptors(self.problem[1:3], self.seqlen_k, tile.block_n)
        lse_rows = None if grad_lse is None else Heads(grad_lse, *_row_strides(grad_lse))
        launch(
            grad_query_kernel, (tiles_q * self.num_heads * self.batch,), self.device, *descriptors, self.problem,
            *self.lists(tile, keys_own=False), out_heads, residual_heads, grad_heads, lse_rows, statistics, query_heads,
            rows, tiles_q, **modes,
            **self._constants(tile, out_heads, residual_heads or out_heads, grad_heads, query_heads),
        )  # fmt: skip

        tile = self._tile("grad_key_value")
        tiles_k = cdiv(self.seqlen_k, tile.block_n)
        descriptors = self.descriptors((self.problem.query, grad_heads), self.seqlen_q, tile.block_m)
        lists, _ = self.lists(tile, keys_own=True)
        launch(
            grad_key_value_kernel, (tiles_k * self.num_kv_heads * self.batch,), self.device, *descriptors,
            self.problem, lists, grad_heads, key_heads, value_heads, rows, tiles_k, **modes,
            **self._constants(tile, grad_heads, key_heads, value_heads),
        )  # fmt: skip
        return (grad_query, grad_key, grad_value), rows

    def _rows(self, stats: Tensor) -> Rows:
        """Allocate three float32 values per query, (3, B, Hq, Lq rounded up to 4) or packed (3, Tq, Hq).

        The rounding puts each head's values at a multiple of 16 bytes. Packed values have no such alignment.
        """
        sizes = stats.shape[1:] if self.is_packed else (*stats.shape[1:3], cdiv(self.seqlen_q, 4) * 4)
        made = stats.new_empty((3, *sizes))
        return Rows(made[0], made[1], made[2], *_dense_rows(made[0]))

    def grad_mask(self, attn_mask: Tensor, grad_heads: Heads, stats: Tensor, rows: Rows) -> Tensor:
        grad_mask = attn_mask.new_empty(attn_mask.shape)
        tile = self._tile("grad_mask")
        batch, heads, mask_rows, mask_columns = grad_mask.shape
        tiles_q, tiles_k = cdiv(self.seqlen_q, tile.block_m), cdiv(self.seqlen_k, tile.block_n)
        programs = batch * heads * cdiv(mask_rows, tile.block_m) * cdiv(mask_columns, tile.block_n)
        launch(
            grad_mask_kernel, (programs,), self.device, self.problem, self.batch, grad_heads,
            Statistics(stats[0], stats[1], *_dense_rows(stats[0])),
            MaskGrad(*heads_of(grad_mask), heads, mask_rows, mask_columns), rows, tiles_q, tiles_k,
            ONE_ROW=mask_rows == 1, ONE_COLUMN=mask_columns == 1, ONE_HEAD=heads == 1, ONE_BATCH=batch == 1,
            **self._constants(tile, grad_heads),
        )  # fmt: skip
        return grad_mask


def _constants(
    tile: tiles.Tile, dtype: torch.dtype, head_dim: int, value_head_dim: int, is_aligned: bool, lower_right: bool,
    is_tf32: bool,
) -> dict[str, Any]:  # fmt: skip
    """Return a kernel's constexprs and options."""
    block_d, block_dv = _padded(head_dim), _padded(value_head_dim)
    level = tile.register_usage_level
    return {
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_D": block_d, "BLOCK_DV": block_dv,
        "EVEN": block_d == head_dim and block_dv == value_head_dim,
        "ALIGNMENT": 16 // dtype.itemsize if is_aligned else 1, "LOWER_RIGHT": lower_right,
        "PRECISION": "tf32" if is_tf32 else "ieee",
        "num_warps": tile.num_warps, "num_stages": tile.num_stages, "maxnreg": tile.maxnreg,
        **({} if level is None else {"ptx_options": f"--register-usage-level={level}"}),
    }  # fmt: skip


def _merge_constants(constants: dict[str, Any]) -> dict[str, Any]:
    """Return the constexprs of the kernel that merges splits, from those of the kernel that computes them."""
    return {"BLOCK_M": 16, **{name: constants[name] for name in ("BLOCK_DV", "EVEN", "ALIGNMENT", "LOWER_RIGHT")}}


def _plain_constants(
    kernel: str, modes: tuple[str, ...], device: torch.device, is_bfloat16: int, head_dim: int, value_head_dim: int,
    is_packed: int, is_aligned: int, are_all_aligned: int, lower_right: int, is_masked: int, is_prescaled: int,
) -> dict[str, Any]:  # fmt: skip
    """Return the constexprs and options of a kernel of a call that csrc/launch serves.

    Args:
        modes: further constexprs of the kernel.
        is_aligned: of query, key and value, on which the tile depends; ``are_all_aligned``: of what else is accessed.
        is_prescaled: the mask is a float one.
    """
    dtype, largest = torch.bfloat16 if is_bfloat16 else torch.float16, max(head_dim, value_head_dim)
    is_irregular = is_packed or head_dim != value_head_dim or largest & (largest - 1)
    kind = "irregular" if is_irregular else "pointers"
    if is_masked:
        kind = "float_masked" if is_prescaled else "masked"
    tile = tiles.choose(kernel, dtype, largest, kind, bool(is_aligned), device)
    constants = _constants(
        tile, dtype, head_dim, value_head_dim, bool(are_all_aligned), bool(lower_right), is_tf32=False
    )
    values = {"PRESCALED": bool(is_prescaled), "FOLD_SUM": not is_prescaled}
    return constants | {mode: values[mode] for mode in modes}


def _plain_merge_constants(*settings: Any) -> dict[str, Any]:
    return _merge_constants(_plain_constants("forward", (), *settings))


def _cover_constants(device: torch.device, block_m: int, block_n: int) -> dict[str, Any]:
    return {"BLOCK_M": block_m, "BLOCK_N": block_n}


def _list_constants(device: torch.device, size: int, block: int, lower_right: int, keys_own: int) -> dict[str, Any]:
    return {
        "SIZE": size, "BLOCK": block, "LOWER_RIGHT": bool(lower_right), "KEYS_OWN": bool(keys_own), "CHUNK": 128,
    }  # fmt: skip


_FORWARD, _BACKWARD = ("PRESCALED",), ("PRESCALED", "FOLD_SUM")
RECIPES = {  # what csrc/launch starts
    "attention.forward": (forward_kernel, functools.partial(_plain_constants, "forward", _FORWARD)),
    "attention.forward_few": (forward_kernel, functools.partial(_plain_constants, "forward_few", _FORWARD)),
    "attention.merge": (merge_kernel, _plain_merge_constants),
    "attention.cover": (cover_kernel, _cover_constants),
    "attention.list": (list_kernel, _list_constants),
    "attention.grad_query": (grad_query_kernel, functools.partial(_plain_constants, "grad_query", _BACKWARD)),
    "attention.grad_key_value": (
        grad_key_value_kernel, functools.partial(_plain_constants, "grad_key_value", _BACKWARD),
    ),
}  # fmt: skip


def _stride(tensor: Tensor, dim: int) -> int:
    """Return the stride, or 0 for a dimension of size 1, which may broadcast."""
    return tensor.stride(dim) if tensor.size(dim) > 1 else 0


def mask_of(attn_mask: Tensor | None) -> tuple[Heads | None, int | None]:
    """Return ``Problem``'s mask, and the stride of its columns, None for 1."""
    if attn_mask is None:
        return None, None
    mask = attn_mask.view(torch.uint8) if attn_mask.dtype == torch.bool else attn_mask
    batch, head, row, column = (_stride(mask, dim) for dim in range(4))
    return Heads(mask, batch, head, row), None if column == 1 else column


def heads_of(tensor: Tensor) -> Heads:
    """Return the ``Heads`` of a tensor (B, H, L, D) or packed (T, H, D), copied if its rows lack unit stride."""
    if tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    *strides, _ = tensor.stride()
    return Heads(tensor, *strides) if len(strides) == 3 else Heads(tensor, 0, strides[1], strides[0])


def _row_strides(statistic: Tensor) -> tuple[int, int, int]:
    """Return the (batch, head, row) strides of statistics (B, H, L) or packed (T, H)."""
    *batch, first, second = statistic.stride()
    return (batch[0], first, second) if batch else (0, second, first)


def _dense_rows(statistic: Tensor) -> tuple[int, int, int | None]:
    """Return :func:`_row_strides`, with None for the unit stride of dense rows.

    Workaround (Triton 3.6): a kernel cannot compare a tuple that holds None with None. Optional arguments therefore
    take :func:`_row_strides`.
    """
    batch, head, row = _row_strides(statistic)
    return batch, head, None if row == 1 and statistic.dim() == 3 else row


def _empty(like: Tensor, head_dim: int) -> Tensor:
    """Allocate (B, H, L, head_dim) in the layout of ``like``, or packed (T, H, head_dim)."""
    return empty_heads(like, head_dim) if like.dim() == 4 else like.new_empty((*like.shape[:2], head_dim))


def _padded(head_dim: int) -> int:
    """Return the columns of a tile for this head size: the next power of 2, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())
