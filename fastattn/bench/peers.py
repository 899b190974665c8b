"""Alternatives that a user could call instead, per operation: `PEERS[operation][name](case, *tensors, **others)`.

"torch" is the plain functional call, to which floors refer. The others take part on request, because they compile first
or are slower. `available` leaves out peers that cannot do a case.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from .cases import Case
from .limits import instruction_set

Peer = Callable[..., Tensor]

MOST_SCORES = 1 << 27
"""Maximum scores of peers that hold all of them: half a GB in float32, several times that in all."""

# If FASTATTN_CPU_ISA limits our kernels to a smaller instruction set, torch, MKL and oneDNN are limited to it too: the
# ratios are then those of a machine that has no more. torch reads its limit when its first kernel runs. MKL reads the
# first of its two variables on Intel's processors only, and uses AVX2 at most on others.
_HELD_TO = {
    "avx512_bf16": {"MKL_ENABLE_INSTRUCTIONS": "AVX512_E3", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "avx512": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
    },
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "generic": {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "MKL_CBWR": "COMPATIBLE",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
    },
}
if os.environ.get("FASTATTN_CPU_ISA"):
    os.environ.update(_HELD_TO.get(instruction_set(), {}))


def _attention(case: Case, query: Tensor, key: Tensor, value: Tensor, **mask: Tensor) -> Tensor:
    attn_mask, is_causal = _attn_mask(key, **mask), case.causal
    if attn_mask is not None and is_causal:  # torch's function refuses both
        attn_mask = attn_mask & ~_future(query, key)
        is_causal = False
    return F.scaled_dot_product_attention(query, key, value, attn_mask, case.dropout, is_causal)


def _attn_mask(key: Tensor, attn_mask: Tensor | None = None, key_lengths: Tensor | None = None) -> Tensor | None:
    if key_lengths is None:
        return attn_mask
    return (torch.arange(key.size(-2), device=key.device) < key_lengths[:, None])[:, None, None]


def _future(query: Tensor, key: Tensor) -> Tensor:
    """Return bool (Lq, Lk), True where a key comes after its query."""
    return torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=key.device).triu(1)


def _attention_formula(case: Case, query: Tensor, key: Tensor, value: Tensor, **mask: Tensor) -> Tensor:
    """Compute the textbook formula, for torch.compile. The scores exist."""
    scores = query @ key.mT * query.size(-1) ** -0.5
    attn_mask = _attn_mask(key, **mask)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    if case.causal:
        scores = scores.masked_fill(_future(query, key), -torch.inf)
    return F.dropout(F.softmax(scores, -1), case.dropout) @ value


def _attention_math(case: Case, *tensors: Tensor, **others: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return _attention(case, *tensors, **others)


def _attention_flex(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    block_mask = _causal_block_mask(query.size(-2), key.size(-2)) if case.causal else None
    return _compiled(flex_attention)(query, key, value, block_mask=block_mask)


@cache
def _causal_block_mask(length: int, keys: int) -> Any:
    return create_block_mask(lambda b, h, i, j: i >= j, None, None, length, keys, device="cpu")


def _softmax_dropout(case: Case, x: Tensor) -> Tensor:
    return F.dropout(F.softmax(x, -1), case.dropout)


def _layer_norm(case: Case, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, case.shape[1:], weight, bias)


def _dropout_add_layer_norm(case: Case, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(residual + F.dropout(x, case.dropout), case.shape[1:], weight, bias)


def _dropout(case: Case, x: Tensor) -> Tensor:
    return F.dropout(x, case.dropout)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch.compiler.config.recompile_limit = 1000  # a version for each case; beyond the limit it raises
    return torch.compile(function, fullgraph=True, dynamic=False)


def _compile(function: Peer) -> Peer:
    return lambda case, *tensors, **others: _compiled(function)(case, *tensors, **others)


PEERS: dict[str, dict[str, Peer]] = {
    "attention": {
        "torch": _attention,
        "torch math": _attention_math,
        "flex": _attention_flex,
        "compiled": _compile(_attention_formula),
    },
    "softmax_dropout": {"torch": _softmax_dropout, "compiled": _compile(_softmax_dropout)},
    "layer_norm": {"torch": _layer_norm, "compiled": _compile(_layer_norm)},
    "dropout_add_layer_norm": {"torch": _dropout_add_layer_norm, "compiled": _compile(_dropout_add_layer_norm)},
    "dropout": {"torch": _dropout, "compiled": _compile(_dropout)},
}


def available(case: Case, *, everyone: bool = False) -> dict[str, Peer]:
    """Return the peers that can do `case`: only "torch", or `everyone`."""
    peers: dict[str, Peer] = {name: partial(peer, case) for name, peer in PEERS[case.operation].items()}
    if not everyone:
        return {"torch": peers["torch"]}
    if case.operation != "attention":
        return peers
    batch, heads, length, _ = case.shape
    if batch * heads * length * (case.keys or length) > MOST_SCORES:
        del peers["torch math"], peers["compiled"]
    if case.dropout:
        peers.pop("torch math", None)  # torch's own choice with dropout on the CPU
    if case.backward or case.dropout or case.padding:
        del peers["flex"]  # on the CPU: forward only, no dropout; its masks are functions, not tensors
    return peers
