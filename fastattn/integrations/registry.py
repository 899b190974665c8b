"""fastattn in torch's registry of attention implementations, and ``intercept_sdpa`` for one block.

``torch.nn.attention.activate_flash_attention_impl("fastattn")`` replaces torch's kernels by the functions below:

- ``scaled_dot_product_attention``, with masks, dropout and gradients, on the CPU and on CUDA. Torch chooses its backend
  below that op and sends dropout to its slowest one, so the op itself is replaced. It is replaced at the Autograd keys,
  where fastattn's op brings its own autograd, and at the backend keys, to which inference mode dispatches directly.
- The flash pair and the memory-efficient pair of ops, which torch and other packages call directly. The flash pair
  includes packed sequences (``torch.nn.attention.varlen``). These pairs pass only the LSE to the backward pass.

Calls that fastattn does not serve go on to torch's own kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import register_flash_attention_impl
from torch.overrides import TorchFunctionMode

from fastattn._torch_private import (
    CacheKeyTag,
    Implementations,
    composite,
    forget_attention_impl,
    forget_compiled,
    function_modes,
    is_batched,
    is_flash_enabled,
    is_traced,
    is_tracers,
    replace_globals,
    wrap_checkpointed,
)
from fastattn.backends import TABLE, has_kernels, thread
from fastattn.backends.common import without_autocast
from fastattn.backends.schema import CONTRACT, AttentionBackwardArgs, VarlenAttentionBackwardArgs
from fastattn.ops import attention, check
from fastattn.ops.register import PLAIN

__all__ = ["intercept_sdpa"]

NAME = "fastattn"


# scaled_dot_product_attention

_torchs_sdpa = composite(torch.ops.aten.scaled_dot_product_attention.default)


def _is_ours(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False,
) -> bool:  # fmt: skip
    """Decide whether fastattn should try a call of torch's function.

    It should if torch would not refuse the call, a fastattn kernel is faster, and ``torch.nn.attention.sdpa_kernel``
    does not exclude flash attention.
    """
    if attn_mask is not None and (
        is_causal or not _is_plain(attn_mask) or attn_mask.dtype not in (torch.bool, torch.float32, query.dtype)
    ):
        return False
    return (
        _is_plain(query)
        and _is_plain(key)
        and _is_plain(value)
        and is_flash_enabled()
        and has_kernels(query, key, value)
    )


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the tensor is dense, has at least 2 dimensions, and is no subclass that redefines operations."""
    kind = type(tensor)
    return (kind in PLAIN or is_tracers(kind)) and tensor.layout is torch.strided and tensor.dim() >= 2


def _serve(*args: Any, **options: Any) -> Tensor:
    """Compute the op for arguments that torch's dispatcher has bound to its signature."""
    if _is_ours(*args):
        try:
            return attention.scaled_dot_product_attention(*args, **options)
        except check.ARGUMENT_ERRORS:  # torch may serve these arguments; otherwise it refuses them in its own words
            pass
    return _torchs_sdpa(*args, **options)


def _sdpa(*args: Any, **options: Any) -> Tensor:
    """Compute ``scaled_dot_product_attention``: the kernel that replaces torch's.

    The cheapest tests come first: float64, which torch serves, then the fast path, whose compiled function checks its
    arguments itself. A mask leaves it, because torch refuses some masks that the fast path takes.
    """
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = _bound(*args, **options)
    if query.dtype is torch.float64 and thread.forced is None:
        return _torchs_sdpa(*args, **options)
    if attn_mask is None and is_flash_enabled():
        out = attention.plain_attention(
            query, key, value, None, None, None, dropout_p, is_causal, scale, enable_gqa, -1, -1
        )
        if out is not None:
            return out
    return _serve(*args, **options)


class _Intercept(TorchFunctionMode):
    """Mode that serves calls of torch's function from Python, in this thread only.

    torch.compile traces through the mode and guards on it: a function compiled inside is compiled again outside.
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is functional.scaled_dot_product_attention:
            return _sdpa_of_python(*args, **kwargs)
        if function is functional.multi_head_attention_forward and PLAIN.issuperset(types):
            return _multi_head_attention_forward(*args, **kwargs)
        return function(*args, **kwargs)


def _bound(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0, is_causal: Any = False, *,
    scale: Any = None, enable_gqa: Any = False,
) -> tuple[Any, ...]:  # fmt: skip
    """Return a call's arguments, bound to the signature of torch's function. Only the binding can raise TypeError."""
    return query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa


def _by_position(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return a call's arguments by position, or None if the signature of torch's function does not take them."""
    try:
        bound = _bound(*args, **kwargs)
    except TypeError:
        return None
    return bound if kwargs else args  # leaves defaults out if possible, because the fast path checks each argument


def _sdpa_of_python(*args: Any, **kwargs: Any) -> Tensor:
    """Compute the function for a call from Python, above autograd and autocast, with tensors of any kind."""
    call = _by_position(args, kwargs)
    if call is not None and _is_ours_in_python(call):
        try:
            return attention.scaled_dot_product_attention(*call)
        except check.ARGUMENT_ERRORS:  # as in _serve
            pass
    return functional.scaled_dot_product_attention(*args, **kwargs)  # its error names a missing or unknown argument


def _is_ours_in_python(call: tuple[Any, ...]) -> bool:
    """Decide like ``_is_ours`` for a call that has not passed torch's dispatcher."""
    tensors = [arg for arg in call if isinstance(arg, Tensor)]
    if is_traced() or any(tensor.is_nested or is_batched(tensor) for tensor in tensors):
        return False
    return _is_ours(*call[:6])


# A mode is off while it handles a function. In this copy, the inner calls are bound by name to fastattn's function.
_multi_head_attention_forward = replace_globals(
    functional.multi_head_attention_forward,
    has_torch_function=lambda tensors: False,
    scaled_dot_product_attention=_sdpa_of_python,
)


def _intercepted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for ``torch.utils.checkpoint`` that is intercepted in every computation.

    The second computation may run outside the block or in an autograd thread, and must draw the same dropout.
    """
    if not _is_intercepting():
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if _is_intercepting() else _Intercept():  # the first run is inside the block
            return function(*args, **kwargs)

    return call


def _is_intercepting() -> bool:
    return any(isinstance(mode, _Intercept) for mode in function_modes())


@contextlib.contextmanager
def intercept_sdpa() -> Iterator[None]:
    """Serve this thread's calls of ``F.scaled_dot_product_attention`` inside the block.

    Calls by ``nn.MultiheadAttention`` are included: ``with fastattn.intercept_sdpa(): model(x)``. Calls that no
    fastattn kernel serves go on to torch.

    The backward pass uses the kernel of its forward pass, inside the block or not. This holds even if
    ``torch.utils.checkpoint`` computes the forward pass again, except for checkpoints inside a compiled function. For
    these, and for the whole process, use ``torch.nn.attention.activate_flash_attention_impl("fastattn")``.

    Examples:
        >>> query, key, value = torch.randn(3, 2, 8, 128, 64)
        >>> with fastattn.intercept_sdpa():
        ...     out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    """
    wrap_checkpointed(_intercepted)
    with _Intercept():
        yield


# The flash and the memory-efficient pair, by the names of torch's ops. Their backward pass gets only the LSE.


class _Unserved(NotImplementedError):
    """Error of a call that must go to torch's own kernel."""


_LSE_LACKS = "the LSE alone does not give fastattn's backward pass the weights of a mask's row at finfo.min"


def _random(seed: Tensor | None, like: Tensor) -> Tensor:
    """Return the seed that the op passes to its backward pass, int64 (2,); zeros without dropout."""
    return torch.zeros(2, dtype=torch.int64, device=like.device) if seed is None else seed


def _check_served(query: Tensor, key: Tensor, value: Tensor) -> None:
    if not all(map(_is_plain, (query, key, value))) or not has_kernels(query, key, value):
        raise _Unserved("neither fastattn nor torch has a kernel for these operands on this device")


def _statistics(lse: Tensor) -> Tensor:
    """Return row_max and row_sum, stacked, such that exp(s - row_max) / row_sum are the probabilities of ``lse``."""
    is_empty = lse == -torch.inf
    return torch.stack((lse.masked_fill(is_empty, 0.0), (~is_empty).to(lse.dtype)))


def _as(operand: Tensor, result: Tensor) -> Tensor:
    """Return the result in its operand's memory layout, as torch's flash attention does."""
    if result.stride() == torch.empty_like(operand, device="meta").stride():
        return result
    return torch.empty_like(operand).copy_(result)


def _heads_inside(result: Tensor) -> Tensor:
    """Return (B, H, L, E) in the memory layout of (B, L, H, E), as torch's memory-efficient attention does."""
    return result.transpose(1, 2).contiguous().transpose(1, 2)


def _grads(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, dropout_p: float,
    is_causal: bool, seed: Tensor, scale: float | None, lower_right: bool, window_size: tuple[int, int] = (-1, -1),
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients of query, key and value, (B, H, L, E)."""
    name = "attention_backward"
    variant, batch = "lower_right" if lower_right else "upper_left", (query.size(0),)
    forward = attention.dense_args(
        name, query, key, value, batch, None, dropout_p, is_causal, scale, variant, None, window_size, seed
    )
    args = AttentionBackwardArgs(
        grad_out=grad_out,
        grad_lse=None,
        out=out,
        stats=_statistics(lse),
        residual=out.new_empty(0),
        forward=forward,
        mask_grad=False,
    )
    *grads, _ = attention.attention_backward_op(args)
    return tuple(grads)


def _flash_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, seqused_k: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute attention of (B, L, H, E), or of packed (T, H, E), whose LSE is (H, T). The diagonal is lower-right."""
    _check_served(query, key, value)
    asked = [name for name, other in others.items() if other is not None]
    asked += ["return_debug_mask"] * return_debug_mask
    if cum_seq_q is None or cum_seq_k is None:
        asked += ["keys that are not packed"] * (cum_seq_q is not None) + ["seqused_k"] * (seqused_k is not None)
    if asked and dropout_p > 0.0:  # the backward op lacks these arguments, so it cannot tell whose dropout it repeats
        raise RuntimeError(f"fastattn's flash attention has no {', '.join(asked)} together with dropout")
    if asked:
        raise _Unserved(f"fastattn's flash attention has no {', '.join(asked)}, and torch has none on this device")
    seed = check.draw_seed(None, check.threshold("flash_attention", dropout_p), query)
    window_size = _window(window_size_left, window_size_right)
    options: dict[str, Any] = {
        "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "window_size": window_size, "enable_gqa": True,
        "return_lse": True, "seed": seed,
    }  # fmt: skip
    if cum_seq_q is None or cum_seq_k is None:
        q, k, v = _swapped(query, key, value)
        out, lse = attention.scaled_dot_product_attention(q, k, v, causal_variant="lower_right", **options)
        out = out.transpose(1, 2)
    else:
        out, lse = attention.varlen_attn(
            query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, seqused_k=seqused_k, **options
        )
        lse = lse.T.contiguous()
    random = _random(seed, query)
    unused = torch.zeros((), dtype=torch.uint64, device=query.device)
    return _as(query, out), lse, random.view(torch.uint64), unused, query.new_empty(0)


def _flash_attention_forward_no_dropout_inplace(out: Tensor, *args: Any, **options: Any) -> Tensor:
    result, lse, *_ = _flash_attention_forward(*args, **options)
    out.copy_(result)
    return lse


def _flash_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool, random: Tensor,
    unused: Tensor, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    _check_served(query, key, value)
    window_size, seed = _window(window_size_left, window_size_right), random.view(torch.int64)
    if cum_seq_q is None or cum_seq_k is None:
        grad, q, k, v, o = _swapped(grad_out, query, key, value, out)
        grads = _grads(grad, q, k, v, o, lse, dropout_p, is_causal, seed, scale, True, window_size)
        return tuple(_as(t, grad.transpose(1, 2)) for t, grad in zip((query, key, value), grads, strict=True))
    forward = attention.packed_args(
        "flash_attention_backward", query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, scale,
        window_size, True, None, seed,
    )  # fmt: skip
    stats = _statistics(lse.T.contiguous())
    args = VarlenAttentionBackwardArgs(
        grad_out=grad_out, grad_lse=None, out=out, stats=stats, residual=out.new_empty(0), forward=forward
    )
    grads = attention.varlen_attention_backward_op(args)
    return tuple(_as(t, grad) for t, grad in zip((query, key, value), grads, strict=True))


def _scaled_dot_product_flash_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Compute :func:`_flash_attention_forward` of operands (B, H, L, E)."""
    q, k, v = _swapped(query, key, value)
    max_q, max_k = query.size(2), key.size(2)
    out, lse, *rest = _flash_attention_forward(
        q, k, v, None, None, max_q, max_k, dropout_p, is_causal, return_debug_mask, scale=scale
    )
    return out.transpose(1, 2), lse, None, None, max_q, max_k, *rest


def _scaled_dot_product_flash_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool, random: Tensor,
    unused: Tensor, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    grad, q, k, v, o = _swapped(grad_out, query, key, value, out)
    grads = _flash_attention_backward(
        grad, q, k, v, o, lse, None, None, max_q, max_k, dropout_p, is_causal, random, unused, scale=scale
    )
    return tuple(_swapped(*grads))


def _scaled_dot_product_efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute attention of (B, H, L, E), with an LSE padded to a multiple of 32 rows."""
    _check_served(query, key, value)
    if attn_bias is not None and compute_log_sumexp:
        raise _Unserved(_LSE_LACKS)
    seed = check.draw_seed(None, check.threshold("efficient_attention", dropout_p), query)
    out, lse = attention.scaled_dot_product_attention(
        query, key, value, attn_bias, dropout_p, is_causal, scale, return_lse=True, seed=seed
    )
    padded = lse.new_full((*lse.shape[:2], -(-lse.size(2) // 32) * 32 if compute_log_sumexp else 0), torch.inf)
    if compute_log_sumexp:
        padded[..., : lse.size(2)] = lse
    random = _random(seed, query)
    return _heads_inside(out), padded, *random.unbind()


def _scaled_dot_product_efficient_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, out: Tensor, lse: Tensor,
    philox_seed: Tensor, philox_offset: Tensor, dropout_p: float, grad_input_mask: list[bool],
    is_causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    _check_served(query, key, value)
    if attn_bias is not None:
        raise _Unserved(_LSE_LACKS)
    seed = torch.stack((philox_seed, philox_offset))
    lse = lse[..., : query.size(2)]
    grads = _grads(grad_out, query, key, value, out, lse, dropout_p, is_causal, seed, scale, False)
    return *map(_heads_inside, grads), None


def _swapped(*operands: Tensor) -> list[Tensor]:
    """Return operands (B, H, L, E) as (B, L, H, E), and vice versa."""
    return [operand.transpose(1, 2) for operand in operands]


def _window(left: int | None, right: int | None) -> tuple[int, int]:
    return -1 if left is None else left, -1 if right is None else right


_PAIRS = (
    _flash_attention_forward,
    _flash_attention_forward_no_dropout_inplace,
    _flash_attention_backward,
    _scaled_dot_product_flash_attention,
    _scaled_dot_product_flash_attention_backward,
    _scaled_dot_product_efficient_attention,
    _scaled_dot_product_efficient_attention_backward,
)


def _or_torchs(function: Callable[..., Any], key: str) -> Callable[..., Any]:
    """Return the kernel of an op below autograd: the function, or torch's own if the function refuses the call."""
    try:
        torchs = torch.library.get_kernel(f"aten::{function.__name__}", key).call_boxed
    except RuntimeError:
        torchs = None  # this torch has no kernel for the device

    def implementation(keys: Any, *args: Any, **options: Any) -> Any:
        try:
            with torch.no_grad(), without_autocast(args[0].device):
                return function(*args, **options)
        except (_Unserved, *check.ARGUMENT_ERRORS):
            if torchs is None:
                raise
        return torchs(keys, *args, **options)

    return implementation


# The registry


class Handle:
    """Handle of an implementation in torch's registry.

    torch 2.10 cannot restore its own kernels: call ``remove`` there.

    Examples:
        >>> from fastattn.integrations import registry
        >>> torch.nn.attention.activate_flash_attention_impl("fastattn")
        >>> query, key, value = torch.randn(3, 2, 8, 128, 64)
        >>> out = torch.nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=0.1)
        >>> registry.handle.remove()
    """

    def __init__(self) -> None:
        self._installed: tuple[Implementations, CacheKeyTag] | None = None

    def activate(self) -> Handle:
        """Replace torch's kernels by the functions of this module."""
        if self._installed is None:
            functions: dict[tuple[str, str], Callable[..., Any]] = {}
            for key in ("CPU", "CUDA"):
                functions["scaled_dot_product_attention", key] = _sdpa
                functions["scaled_dot_product_attention", f"Autograd{key}"] = _sdpa
            kernels: dict[tuple[str, str], Callable[..., Any]] = {}
            for function in _PAIRS:
                if hasattr(torch.ops.aten, function.__name__):
                    kernels |= {(function.__name__, key): _or_torchs(function, key) for key in ("CPU", "CUDA")}
            present = ",".join(name for name, backend in TABLE.items() if not backend.MISSING)
            tag = CacheKeyTag(f" fastattn {CONTRACT} {present}")
            self._installed = Implementations(functions, kernels), tag
            forget_compiled()
        return self

    def remove(self) -> None:
        """Restore torch's kernels."""
        if self._installed is not None:
            for installed in self._installed:
                installed.remove()
            self._installed = None
            forget_attention_impl(NAME)
            forget_compiled()


handle = Handle()
register_flash_attention_impl(NAME, register_fn=handle.activate)
