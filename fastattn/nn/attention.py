"""Multi-head attention: parameters, projections and calls of ``scaled_dot_product_attention``."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fastattn._torch_private import is_plain_linear, never_skipped
from fastattn.backends.visibility import visibility
from fastattn.nn.cache import KeyValueCache
from fastattn.ops import check
from fastattn.ops.attention import attention_weights, dense_args, scaled_dot_product_attention, varlen_attn
from fastattn.ops.copies import expanded_copy
from fastattn.ops.jagged import is_jagged, to_padded, with_values

_NAME = "MultiHeadAttention"


class _Parameters(NamedTuple):
    """The parameters of the input projection and of the appended key and value, read once per call.

    Each read of a parametrised parameter computes it again.
    """

    weights: Sequence[Tensor]  # in_proj_weight, or the weights of query, key and value
    bias: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None


class MultiHeadAttention(nn.MultiheadAttention):
    """Multi-head attention with torch's constructor, forward, state dict and initialisation, on fastattn's kernels.

    Source: Vaswani et al. 2017, section 3.2.2: Concat(head_1, ..., head_h) W^O, head_i = Attention(Q W_i^Q, K W_i^K,
    V W_i^V). Beyond ``torch.nn.MultiheadAttention`` it has free head sizes (the paper's d_k and d_v) and fewer heads of
    keys and values than of queries. It has ``is_causal`` without a mask and together with padding, key lengths,
    windows, a key-value cache and 4-D masks. Fully masked rows give output 0, not NaN. All of these combine. torch's
    encoder and decoder layers call it in training and in evaluation.

    A call reads each parameter once. So a parametrised ``in_proj_weight`` is computed once, and queries, keys and
    values are projected with the same weights. ``out_proj`` is called as a module: its hooks run, and a module that
    replaces it computes the output. torch's module reads its weight and bias instead.

    Args:
        embed_dim: size of query and output.
        num_heads: number of heads h.
        dropout: probability of dropping an attention weight in training.
        bias: biases of the input and output projections.
        add_bias_kv: append a learned key and a learned value, which every query sees.
        add_zero_attn: append a key and a value of zeros, which every query sees.
        kdim, vdim: sizes of key and value; embed_dim by default.
        batch_first: operands are (N, L, E) instead of (L, N, E).
        device, dtype: device and dtype of the parameters.
        head_dim: d_k, size of a head's queries and keys; embed_dim // num_heads by default.
        value_head_dim: d_v, size of a head's values; head_dim by default.
        num_kv_heads: heads of keys and values, a divisor of num_heads, each shared by neighbouring query heads;
            num_heads by default.

    Raises:
        TypeError: a size is not an integer.
        ValueError: a size is not positive; embed_dim is not a multiple of num_heads and head_dim is not given (also an
            AssertionError, torch's type); num_heads is not a multiple of num_kv_heads; dropout is outside [0, 1].

    Examples:
        >>> attention = fastattn.MultiHeadAttention(512, 8, dropout=0.1, batch_first=True)
        >>> x, key_lengths = torch.randn(2, 128, 512), torch.tensor([128, 70])
        >>> out, _ = attention(x, x, x, need_weights=False, is_causal=True, key_lengths=key_lengths)
        >>> out.shape
        torch.Size([2, 128, 512])
    """

    __prepare_scriptable__ = check.refuse_torchscript

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        num_kv_heads: int | None = None,
    ) -> None:
        nn.Module.__init__(self)
        _check_sizes(
            embed_dim=embed_dim, num_heads=num_heads, kdim=kdim, vdim=vdim, head_dim=head_dim,
            value_head_dim=value_head_dim, num_kv_heads=num_kv_heads,
        )  # fmt: skip
        _check_heads(embed_dim, num_heads, dropout, bias, head_dim)
        check.threshold(_NAME, dropout, "dropout")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.dropout = dropout
        self.batch_first = batch_first
        self.add_zero_attn = add_zero_attn
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.value_head_dim = self.head_dim if value_head_dim is None else value_head_dim
        if num_heads % self.num_kv_heads:
            raise ValueError(f"{_NAME}: num_kv_heads must divide num_heads, got {num_kv_heads} and {num_heads}")
        self._qkv_same_embed_dim = self.kdim == embed_dim and self.vdim == embed_dim
        self._make_parameters(bias, add_bias_kv, {"device": device, "dtype": dtype})
        self._reset_parameters()
        never_skipped(self)

    def _make_parameters(self, bias: bool, add_bias_kv: bool, factory: dict[str, Any]) -> None:
        """Make uninitialised parameters. ``factory`` holds their device and dtype."""
        sizes = self._projection_sizes
        if self._qkv_same_embed_dim:
            self.in_proj_weight = nn.Parameter(torch.empty(sum(sizes), self.embed_dim, **factory))
            for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
                self.register_parameter(name, None)
        else:
            self.q_proj_weight = nn.Parameter(torch.empty(sizes[0], self.embed_dim, **factory))
            self.k_proj_weight = nn.Parameter(torch.empty(sizes[1], self.kdim, **factory))
            self.v_proj_weight = nn.Parameter(torch.empty(sizes[2], self.vdim, **factory))
            self.register_parameter("in_proj_weight", None)
        if bias:
            self.in_proj_bias = nn.Parameter(torch.empty(sum(sizes), **factory))
        else:
            self.register_parameter("in_proj_bias", None)
        self.out_proj = NonDynamicallyQuantizableLinear(
            self.num_heads * self.value_head_dim, self.embed_dim, bias=bias, **factory
        )
        if add_bias_kv:
            self.bias_k = nn.Parameter(torch.empty(1, 1, sizes[1], **factory))
            self.bias_v = nn.Parameter(torch.empty(1, 1, sizes[2], **factory))
        else:
            self.bias_k = self.bias_v = None

    @property
    def _projection_sizes(self) -> tuple[int, int, int]:
        return (
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
            self.num_kv_heads * self.value_head_dim,
        )

    @overload
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: Literal[True] = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False, *, key_lengths: Tensor | None = None, window_size: tuple[int, int] = (-1, -1),
        cache: KeyValueCache | None = None, seed: Tensor | None = None, cu_seq_q: Tensor | None = None,
        cu_seq_k: Tensor | None = None, max_q: int | None = None, max_k: int | None = None,
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip
    @overload
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = ..., attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False, *, key_lengths: Tensor | None = None, window_size: tuple[int, int] = (-1, -1),
        cache: KeyValueCache | None = None, seed: Tensor | None = None, cu_seq_q: Tensor | None = None,
        cu_seq_k: Tensor | None = None, max_q: int | None = None, max_k: int | None = None,
    ) -> tuple[Tensor, Tensor | None]: ...  # fmt: skip
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        key_lengths: Tensor | None = None,
        window_size: tuple[int, int] = (-1, -1),
        cache: KeyValueCache | None = None,
        seed: Tensor | None = None,
        cu_seq_q: Tensor | None = None,
        cu_seq_k: Tensor | None = None,
        max_q: int | None = None,
        max_k: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from query to key and value.

        Args:
            query: (N, L, E) with ``batch_first``, else (L, N, E); or (L, E). With ``batch_first`` also a nested tensor
                of N sequences, strided or jagged; then key and value are nested too, and there is no mask. With
                ``cu_seq_q`` the sequences are packed: (tokens, E).
            key, value: as query, with length S and sizes kdim, vdim. One tensor passed as query, key and value (or as
                key and value) is projected once.
            key_padding_mask: (N, S) or (S,), bool (True = BLOCKED, as in torch) or float (added to the scores).
            need_weights: also return the weights, which take O(L S) memory: pass False for speed.
            attn_mask: (L, S), (N * num_heads, L, S) or (N, 1 or num_heads, L, S), bool (True = BLOCKED) or float.
            average_attn_weights: return the mean of the weights over the heads.
            is_causal: causal attention. It replaces ``attn_mask``; in torch this flag is a hint about ``attn_mask``.
            key_lengths: (N,) integers: only the leading ``key_lengths[n]`` keys exist.
            window_size: (left, right), how far a query sees, -1 = unbounded.
            cache: keys and values of earlier calls, to which the new ones are appended. Query i is then at position
                ``cache.length`` - L + i, so ``is_causal`` and windows count from the end. With ``key_lengths`` they
                count from ``key_lengths[n]``, the end of sequence n.
            seed: int64 (2,), (key, offset), of the dropout; drawn from torch's default generator when not given.
            cu_seq_q, cu_seq_k, max_q, max_k: offsets and maximum lengths of packed sequences, as in
                :func:`fastattn.varlen_attn`. ``is_causal`` and windows then count from the lower-right diagonal. Packed
                sequences require ``need_weights=False`` and exclude masks, ``key_lengths``, cache and appended keys.

        Returns:
            The output, of query's shape, contiguous; and None or the weights after dropout: (N, L, S), unaveraged
            (N, h, L, S). S includes the keys that add_bias_kv and add_zero_attn append.

        Raises:
            TypeError, ValueError: an argument has the wrong type, dtype, shape or value; the message names it. They
                are RuntimeErrors and AssertionErrors too where torch's module raises these.
        """
        parameters = self._read_parameters()
        self._check_operands(query, key, value, cache, parameters.weights[0].dtype)
        packed = {"cu_seq_q": cu_seq_q, "cu_seq_k": cu_seq_k, "max_q": max_q, "max_k": max_k}
        if any(argument is not None for argument in packed.values()):
            return self._packed(
                parameters, query, key, value, packed, need_weights, is_causal, window_size, seed,
                key_lengths=key_lengths, key_padding_mask=key_padding_mask,
                attn_mask=None if is_causal else attn_mask, cache=cache,
            )  # fmt: skip
        if query.is_nested or key.is_nested or value.is_nested:
            return self._nested(
                parameters, query, key, value, key_padding_mask, attn_mask, key_lengths, cache,
                need_weights=need_weights, average_attn_weights=average_attn_weights, is_causal=is_causal,
                window_size=window_size, seed=seed,
            )  # fmt: skip
        return self._attend(
            parameters, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal,
            key_lengths, window_size, cache, seed,
        )  # fmt: skip

    if TYPE_CHECKING:  # torch types the call of a module as Any
        __call__ = forward

    def _attend(
        self, parameters: _Parameters, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None,
        need_weights: bool, attn_mask: Tensor | None, average_attn_weights: bool, is_causal: bool,
        key_lengths: Tensor | None, window_size: tuple[int, int], cache: KeyValueCache | None, seed: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Compute :meth:`forward` for checked operands that are neither packed nor nested."""
        batched = query.dim() == 3
        q, k, v = self._project(query, key, value, cache, parameters, self._split_heads)
        if cache is not None:
            k, v = cache._stored(k, v)
        length = k.size(2)
        if k.size(0) != q.size(0):
            raise check.BadValue(f"{_NAME}: query and key must have one batch size, got {q.size(0)} and {k.size(0)}")
        mask = self._mask(q, k, key_padding_mask, None if is_causal else attn_mask, need_weights)
        causal_variant = "lower_right" if cache is not None and not cache.static else "upper_left"
        if parameters.bias_k is not None or self.add_zero_attn:
            mask = self._visible(q, k, mask, is_causal, causal_variant, key_lengths, window_size)
            is_causal, key_lengths, window_size = False, None, (-1, -1)
            appended = -k.size(2)
            k, v = self._append_key(k, parameters.bias_k), self._append_key(v, parameters.bias_v)
            appended += k.size(2)
            mask = mask if mask is None else F.pad(mask, (0, appended), value=mask.dtype == torch.bool)
        dropout_p = self.dropout if self.training else 0.0
        if need_weights and seed is None:  # the weights are computed with the output's seed
            seed = check.draw_seed(None, check.threshold(_NAME, dropout_p), q)
        masks: dict[str, Any] = {
            "is_causal": is_causal, "enable_gqa": self.num_kv_heads != self.num_heads,
            "causal_variant": causal_variant, "key_lengths": key_lengths, "window_size": window_size, "seed": seed,
        }  # fmt: skip
        out = scaled_dot_product_attention(q, k, v, mask, dropout_p, **masks)
        if cache is not None:
            cache.length = length  # set last, so that a refused call adds nothing
        out = out.transpose(1, 2) if self.batch_first or not batched else out.permute(2, 0, 1, 3)  # query's layout
        out = self._project_out(out.flatten(2))
        if not batched:
            out = out.squeeze(0)
        if not need_weights:
            return out, None
        weights = attention_weights(q, k, mask, dropout_p, **masks)
        if average_attn_weights:
            weights = weights.mean(1)
        return out, weights if batched else weights.squeeze(0)

    def _read_parameters(self) -> _Parameters:
        if self._qkv_same_embed_dim:
            weights: Sequence[Tensor] = (self.in_proj_weight,)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        return _Parameters(weights, self.in_proj_bias, self.bias_k, self.bias_v)

    def _check_operands(
        self, query: Tensor, key: Tensor, value: Tensor, cache: KeyValueCache | None, dtype: torch.dtype
    ) -> None:
        for label, tensor, size in (
            ("query", query, self.embed_dim),
            ("key", key, self.kdim),
            ("value", value, self.vdim),
        ):
            check.float_tensor(_NAME, label, tensor)
            if tensor.dim() not in (2, 3) or tensor.dim() != query.dim():
                raise check.BadValue(
                    f"{_NAME}: query, key and value must all be 3-D, or all 2-D (no batch), got {label} of "
                    f"{tensor.dim()} dimensions{_shape(tensor)} beside query of {query.dim()}{_shape(query)}"
                )
            if _last_size(tensor) != size:
                raise check.BadValue(
                    f"{_NAME}: {label} must have size {size} in its last dimension, got {_last_size(tensor)}"
                )
            if tensor.dtype != dtype and check.autocast_dtype(query) is None:
                raise check.BadType(
                    f"{_NAME}: {label} must have the parameters' dtype {check.dtype_name(dtype)}, "
                    f"got {check.dtype_name(tensor.dtype)}"
                )
        if key is not value and not key.is_nested and key.shape[:-1] != value.shape[:-1]:
            raise check.BadValue(
                f"{_NAME}: key and value must have one length and one batch size, got shapes {tuple(key.shape)} "
                f"and {tuple(value.shape)}"
            )
        if cache is not None and not isinstance(cache, KeyValueCache):
            raise TypeError(f"{_NAME}: cache must be a KeyValueCache, got {type(cache).__name__}")

    def _packed(
        self, parameters: _Parameters, query: Tensor, key: Tensor, value: Tensor, packed: dict[str, Any],
        need_weights: bool, is_causal: bool, window_size: tuple[int, int], seed: Tensor | None, **others: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Attend within packed sequences; ``others`` are arguments that packed sequences exclude."""
        missing = [name for name, argument in packed.items() if argument is None]
        if missing:
            raise TypeError(f"{_NAME}: packed sequences need {', '.join(packed)}; got no {', '.join(missing)}")
        if query.dim() != 2 or query.is_nested:
            raise check.BadValue(
                f"{_NAME}: packed sequences are (tokens, {self.embed_dim}), got query of {query.dim()} dimensions"
                f"{_shape(query)}"
            )
        others |= {"add_bias_kv": parameters.bias_k, "add_zero_attn": self.add_zero_attn or None}
        given = [name for name, argument in others.items() if argument is not None]
        if given:
            raise check.BadValue(f"{_NAME}: packed sequences do not go with {given[0]}: leave it out, or pad them")
        if need_weights:
            raise check.BadValue(f"{_NAME}: packed sequences have no weights: pass need_weights=False, or pad them")
        q, k, v = self._project(query, key, value, None, parameters, _heads)
        out = varlen_attn(
            q, k, v, **packed, dropout_p=self.dropout if self.training else 0.0, is_causal=is_causal,
            window_size=window_size, enable_gqa=self.num_kv_heads != self.num_heads, seed=seed,
        )  # fmt: skip
        return self._project_out(out.flatten(1)), None

    def _nested(
        self, parameters: _Parameters, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None,
        attn_mask: Tensor | None, key_lengths: Tensor | None, cache: KeyValueCache | None, **options: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Attend with nested operands, padded for the products and the kernels. Weights are padded with zeros."""
        if not self.batch_first:
            raise check.BadValue(f"{_NAME}: nested tensors are (N, L, E): construct it with batch_first=True")
        if not (query.is_nested and key.is_nested and value.is_nested):
            raise check.BadType(f"{_NAME}: query, key and value must all be nested tensors, or none of them")
        given = {"key_padding_mask": key_padding_mask, "key_lengths": key_lengths, "cache": cache}
        given["attn_mask"] = None if options["is_causal"] else attn_mask
        for name, argument in given.items():
            if argument is not None:
                raise check.BadValue(
                    f"{_NAME}: {name} cannot be given beside nested tensors; pad them with to_padded_tensor()"
                )
        whole, lengths_q, padded_q = of_query = _padded(query)
        _, lengths_k, padded_k = of_key = of_query if key is query else _padded(key)  # shared operands stay shared
        _, lengths_v, padded_v = of_key if value is key else of_query if value is query else _padded(value)
        if lengths_k != lengths_v:
            raise check.BadValue(f"{_NAME}: key and value must have the same lengths, got {lengths_k} and {lengths_v}")
        key_lengths = torch.tensor(lengths_k, device=key.device)
        out, weights = self._attend(
            parameters, padded_q, padded_k, padded_v, key_padding_mask=None, attn_mask=None, key_lengths=key_lengths,
            cache=None, **options,
        )  # fmt: skip
        if weights is not None:
            device = weights.device
            absent = torch.arange(out.size(1), device=device) >= torch.tensor(lengths_q, device=device)[:, None]
            absent = absent[:, :, None] if weights.dim() == 3 else absent[:, None, :, None]
            weights = weights.masked_fill(absent, 0.0)
        rows = [padded_rows[:length] for padded_rows, length in zip(out, lengths_q, strict=True)]
        if whole.layout == torch.jagged:
            return with_values(whole, torch.cat(rows)), weights
        return torch.nested.as_nested_tensor(rows), weights

    def _project(
        self, query: Tensor, key: Tensor, value: Tensor, cache: KeyValueCache | None, parameters: _Parameters,
        split: Callable[[Tensor, int], Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the ``split`` queries, keys and values, by as few products as shared operands allow."""
        sizes, weights, bias = self._projection_sizes, parameters.weights, parameters.bias
        is_joint = len(weights) == 1
        if is_joint and query is key is value:
            q, k, v = _linear(query, weights[0], bias).split(sizes, -1)
            q = split(q, self.num_heads)
            return q, split(k, self.num_kv_heads), split(v, self.num_kv_heads)
        rows = (sizes[0], sizes[1] + sizes[2]) if is_joint and key is value else sizes
        if is_joint:
            weights = weights[0].split(rows)
        biases: Sequence[Tensor | None] = [None] * len(rows) if bias is None else bias.split(rows)
        q = split(_linear(query, weights[0], biases[0]), self.num_heads)
        if cache is not None and cache.static and cache.length:
            return q, *cache.contents()
        if len(rows) == 2:
            k, v = _linear(key, weights[1], biases[1]).split(sizes[1:], -1)
        else:
            k, v = _linear(key, weights[1], biases[1]), _linear(value, weights[2], biases[2])
        return q, split(k, self.num_kv_heads), split(v, self.num_kv_heads)

    def _project_out(self, heads: Tensor) -> Tensor:
        """Return ``out_proj`` of the heads' outputs, (..., num_heads * value_head_dim)."""
        if is_plain_linear(self.out_proj):  # a module call costs 4 us more, and fails if the bias has another dtype
            return _linear(heads, self.out_proj.weight, self.out_proj.bias)
        return self.out_proj(heads)

    def _split_heads(self, projected: Tensor, heads: int) -> Tensor:
        """Return (N, heads, length, head size)."""
        if projected.dim() == 2:
            projected = projected.unsqueeze(0)
        elif not self.batch_first:
            projected = projected.transpose(0, 1)
        return _heads(projected, heads).transpose(1, 2)

    def _mask(
        self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, need_weights: bool
    ) -> Tensor | None:
        """Return torch's two masks (bool True = blocked) as one of attention's (bool True = takes part).

        torch's module copies the padding, and with ``need_weights`` the mask too: their owner may refill them before
        the backward pass.
        """
        batch, heads, rows, columns = q.size(0), q.size(1), q.size(2), k.size(2)
        mask = None
        if attn_mask is not None:
            _check_mask("attn_mask", attn_mask)
            if attn_mask.shape == (rows, columns):
                mask = attn_mask
            elif attn_mask.shape == (batch * heads, rows, columns):
                mask = attn_mask.unflatten(0, (batch, heads))
            elif attn_mask.shape in ((batch, 1, rows, columns), (batch, heads, rows, columns)):
                mask = attn_mask
            else:
                raise check.BadValue(
                    f"{_NAME}: attn_mask must have shape {(rows, columns)}, {(batch * heads, rows, columns)} or "
                    f"({batch}, 1 or {heads}, {rows}, {columns}), got {tuple(attn_mask.shape)}"
                )
            mask = ~mask if mask.dtype == torch.bool else _owned(mask) if need_weights else mask
        if key_padding_mask is not None:
            _check_mask("key_padding_mask", key_padding_mask)
            padding = key_padding_mask.unsqueeze(0) if key_padding_mask.dim() == 1 else key_padding_mask
            if padding.shape != (batch, columns):
                raise check.BadValue(
                    f"{_NAME}: key_padding_mask must have shape {(batch, columns)}, got {tuple(key_padding_mask.shape)}"
                )
            padding = padding[:, None, None, :]
            padding = ~padding if padding.dtype == torch.bool else _owned(padding)
            mask = padding if mask is None else _both(mask, padding)
        return mask

    def _visible(
        self, q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, causal_variant: str,
        key_lengths: Tensor | None, window_size: tuple[int, int],
    ) -> Tensor | None:  # fmt: skip
        """Merge causality, key lengths and window into ``mask``. They do not hide the keys that are appended later."""
        args = dense_args(
            _NAME, q, k, k, (q.size(0),), None, 0.0, is_causal, None, causal_variant, key_lengths, window_size, None
        )
        visible = visibility(args)
        return mask if visible is None else visible if mask is None else _both(mask, visible)

    def _append_key(self, heads: Tensor, learned: Tensor | None) -> Tensor:
        """Append the learned row and the zero row, as configured, to keys or values (N, h, S, size)."""
        if learned is not None:
            row = learned.view(1, heads.size(1), 1, -1).expand(heads.size(0), -1, -1, -1)
            heads = torch.cat((heads, row.to(heads.dtype)), 2)
        return F.pad(heads, (0, 0, 0, 1)) if self.add_zero_attn else heads


def _check_heads(embed_dim: int, num_heads: int, dropout: float, bias: bool, head_dim: int | None) -> None:
    """Raise BadValue or ValueError for heads that do not divide the features, and for misplaced head sizes."""
    # Some other implementations take the head sizes d_k and d_v as third and fourth arguments.
    named = f", head_dim={dropout}" if isinstance(dropout, int) and dropout > 1 else ""
    if named and bias not in (0, 1, dropout):
        named += f", value_head_dim={bias}"
    if head_dim is None and embed_dim % num_heads:
        mend = "or give head_dim"
        if num_heads % embed_dim == 0 or (named and num_heads > embed_dim):
            mend = f"embed_dim comes first: {_NAME}({num_heads}, {embed_dim}{named})"
        raise check.BadValue(
            f"{_NAME}: embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}; {mend}"
        )
    if named:
        raise ValueError(
            f"{_NAME}: dropout, the third argument, must be in [0, 1], got {dropout}; head sizes are named: "
            f"{_NAME}({embed_dim}, {num_heads}{named})"
        )


def _check_sizes(**sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is None:
            continue
        if not isinstance(size, numbers.Integral | torch.SymInt):
            raise TypeError(f"{_NAME}: {name} must be an integer, got {size!r}")
        if size <= 0:
            raise ValueError(f"{_NAME}: {name} must be positive, got {size}")


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Call ``F.linear`` with the bias in the weight's dtype. It accepts another dtype only for some shapes."""
    return F.linear(input, weight, bias if bias is None else bias.to(weight.dtype))


def _heads(projected: Tensor, heads: int) -> Tensor:
    """Return (..., heads, head size)."""
    return projected.view(*projected.shape[:-1], heads, projected.size(-1) // heads)


def _padded(nested: Tensor) -> tuple[Tensor, list[int], Tensor]:
    """Return the nested tensor without holes, its sequences' lengths, and the sequences padded with zeros."""
    nested = nested.contiguous()
    padded = to_padded(nested) if is_jagged(nested) else nested.to_padded_tensor(0.0)
    return nested, [rows.size(0) for rows in nested.unbind()], padded


def _shape(tensor: Tensor) -> str:
    return "" if tensor.is_nested else f" and shape {tuple(tensor.shape)}"


def _last_size(tensor: Tensor) -> Any:
    """Return the size of the last dimension, or a list of sizes if the sequences of a nested tensor differ in it."""
    if tensor.is_nested and tensor.layout == torch.strided:
        sizes = [rows.size(-1) for rows in tensor.unbind()]
        return sizes[0] if len(set(sizes)) == 1 else sizes
    return tensor.size(-1)


def _check_mask(label: str, mask: Tensor) -> None:
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.dtype.is_floating_point):
        kind = check.dtype_name(mask.dtype) if isinstance(mask, Tensor) else type(mask).__name__
        raise check.BadType(f"{_NAME}: {label} must be a bool (True = blocked) or float Tensor, got {kind}")
    check.dense(_NAME, label, mask)


def _owned(mask: Tensor) -> Tensor:
    return expanded_copy(mask) if torch.is_grad_enabled() else mask


def _both(first: Tensor, second: Tensor) -> Tensor:
    """Merge two masks of attention: bool if both are bool, otherwise the sum of float masks."""
    if first.dtype == torch.bool and second.dtype == torch.bool:
        return first & second
    return _additive(first, second) + _additive(second, first)


def _additive(mask: Tensor, other: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=other.dtype).masked_fill(~mask, -torch.inf)


MultiheadAttention = MultiHeadAttention
