"""The private parts of torch that fastattn leans on, all of them. ``tests/test_torch_private.py`` says what torch
changed where one of them breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

_is_compiling = torch.compiler.is_compiling  # a name less to look up
_dispatch_modes = torch._C._len_torch_dispatch_stack

# Inside grad, vmap and the other transforms of torch.func.
is_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
# On whatever device. The public question asks for one, which a tensor has to be asked for first.
is_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
# autograd.Function without torch.func, which inspects a signature at every call: it differentiates at one level, inside
# a transform only within the region that allows it.
SingleLevelFunction = torch.autograd.function._SingleLevelFunction
single_level_autograd = enable_single_level_autograd_function
# A region in which an op's call goes on to the dispatch keys below autograd.
below_autograd = torch._C._AutoDispatchBelowAutograd


def is_forward_mode() -> bool:
    """Inside forward-mode differentiation: ``torch.func.jvp`` and what is built on it, ``forward_ad.dual_level``."""
    return forward_ad._current_level >= 0


def is_observed() -> bool:
    """Whether compilation, a dispatch mode, torch.func or forward-mode differentiation has to see every call."""
    return _is_compiling() or _dispatch_modes() > 0 or is_transformed() or is_forward_mode()


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is different for each call that a vmap stands for, so that it has no values of its own."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        if torch._C._functorch.is_batchedtensor(tensor):
            return True
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return False


def ragged_dim(tensor: torch.Tensor) -> int:
    """The dimension of a jagged nested tensor that has another size in each sequence."""
    return tensor._ragged_idx  # type: ignore[attr-defined]


def max_length(tensor: torch.Tensor) -> int:
    """The longest sequence of a jagged nested tensor, which remembers it."""
    return tensor._get_max_seqlen()  # type: ignore[attr-defined]


def bind(overload: Any) -> Callable[..., Any]:
    """An op's overload without the Python that torch puts around its call."""
    return overload._op


def bind_apply(function: type[SingleLevelFunction]) -> Callable[..., Any]:
    """``function.apply``, whose backward pass is what autograd calls, without a search for an override (``vjp``)."""
    function._backward_cls.apply = function.backward
    return function.apply  # type: ignore[attr-defined]


def never_skipped(module: nn.Module) -> None:
    """Have torch's encoder layer call its parts, this one among them. In evaluation it would compute with their
    parameters instead, unless one has a hook. No other hook's handle has this number, in whatever process."""
    module._forward_pre_hooks[-1] = _unchanged


def _unchanged(module: nn.Module, args: tuple[Any, ...]) -> None:
    pass
