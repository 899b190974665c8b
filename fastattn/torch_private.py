"""The private parts of torch that fastattn leans on, all of them. ``tests/test_torch_private.py`` says what torch
changed where one of them breaks."""

from __future__ import annotations

import functools
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._C import DispatchKey
from torch._functorch.utils import enable_single_level_autograd_function
from torch._ops import OperatorBase as OperatorBase
from torch._ops import OpOverload
from torch._ops import _get_dispatch_mode_pre_dispatch as _get_pre_dispatch_mode
from torch.autograd import forward_ad
from torch.nn.attention import _registry
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.utils._expanded_weights.expanded_weights_impl import ExpandedWeight as _ExpandedWeight
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as _dispatch_mode_stack
from torch.utils._pytree import tree_map_only as tree_map_only

_is_compiling = torch.compiler.is_compiling  # a name less to look up
_dispatch_modes = torch._C._len_torch_dispatch_stack
_PROXY = torch._C._TorchDispatchModeKey.PROXY

# torch's fused attention on the CPU, of one mask and no dropout, differentiable once: returns (out, logsumexp).
flash_attention: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
flash_attention_backward: Callable[..., Any] = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
)
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
# The forward of torch's linear modules, which a program may replace.
_LINEAR_FORWARD = nn.Linear.forward
# Whether torch.nn.attention.sdpa_kernel allows flash attention. The public question cannot be compiled.
is_flash_enabled: Callable[[], bool] = torch._C._get_flash_sdp_enabled


def is_forward_mode() -> bool:
    """Inside forward-mode differentiation: ``torch.func.jvp`` and what is built on it, ``forward_ad.dual_level``."""
    return forward_ad._current_level >= 0


# A region in which the functions of torch do not go to a subclass's __torch_function__.
without_torch_function = torch._C.DisableTorchFunctionSubclass


_is_tracing = torch._C._is_tracing


def is_traced() -> bool:
    """Inside torch.jit.trace."""
    return not _is_compiling() and _is_tracing()


def is_proxied() -> bool:
    """Inside ``make_fx``, ``pre_dispatch`` or not, which refuses to read a value."""
    return torch._C._get_dispatch_mode(_PROXY) is not None or _get_pre_dispatch_mode(_PROXY) is not None


def is_observed() -> bool:
    """Whether compilation, a dispatch mode, torch.func, forward-mode differentiation or torch.jit.trace sees calls."""
    return _is_compiling() or _dispatch_modes() > 0 or is_transformed() or is_forward_mode() or _is_tracing()


def refuse_scripting(function: Callable[..., Any], reason: str) -> None:
    """Have torch.jit.script raise RuntimeError with ``reason`` where it would compile this function."""
    setattr(function, "__script_unsupported", reason)


def is_onnx_export() -> bool:
    """Inside ONNX export. The public question first imports the exporter, a tenth of a second."""
    flags = sys.modules.get("torch.onnx._internal.exporter._flags")
    return flags is not None and flags._is_onnx_exporting


# Of the vmap of ``torch.autograd.grad(is_grads_batched=True)``, which is not torch.func's and nothing else tells of.
is_batched_gradient: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor


def is_batched(tensor: Tensor) -> bool:
    """Whether ``tensor`` is different for each call that a vmap stands for, so that it has no values of its own."""
    if _is_compiling():  # which traces this question alone
        return torch._C._functorch.is_batchedtensor(tensor)
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        if torch._C._functorch.is_batchedtensor(tensor):
            return True
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return False


def count_flops(formulas: dict[Any, Callable[..., int]]) -> None:
    """Let the active ``FlopCounterMode``s know these formulas, {op: formula}, unless the user gave them others.

    A counter copies torch's registry when it is made. Torch's module of it imports Triton, so an import of fastattn
    does not register them there.
    """
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None or _is_compiling():
        return
    for mode in _dispatch_mode_stack():
        if isinstance(mode, module._FlopCounterMode):
            registry = mode.counter.flop_registry
            registry.update({op: formula for op, formula in formulas.items() if op not in registry})


def is_expanded_weight(tensor: Any) -> bool:
    """Whether it stands for a parameter in ``call_for_per_sample_grads``, which knows torch's own functions alone."""
    return hasattr(type(tensor), "handled_functions") and isinstance(tensor, _ExpandedWeight)


def is_lazy(tensor: Tensor) -> bool:
    """Whether the tensor's memory is not its values: it is negated when it is read, or has no memory and is zero."""
    return tensor.is_neg() or tensor._is_zerotensor()


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
    """Have torch's encoder layer call its submodules, this one among them: in evaluation it would read their
    parameters instead, unless one has a hook. The hooks' handles count from 0, so no other has the number -1."""
    module._forward_pre_hooks[-1] = _unchanged


def may_be_skipped(module: nn.Module) -> None:
    """The opposite of :func:`never_skipped`."""
    module._forward_pre_hooks.pop(-1, None)


def _unchanged(module: nn.Module, args: tuple[Any, ...]) -> None:
    pass


def is_tracers(kind: type) -> bool:
    """Whether tensors of this subclass are torch's own, of a trace: fake and functional ones."""
    return kind.__module__.startswith("torch._subclasses.")


def composite(op: OpOverload) -> Callable[..., Any]:
    """The implementation of a composite op, whatever else is registered for it. Redispatching would not do: compiled,
    it loses the gradient."""
    return functools.partial(op._op_dk, DispatchKey.CompositeImplicitAutograd)


class Implementations:
    """Python functions in place of torch's kernels, while ``install``ed.

    Args:
        functions: {(name of an op of aten, dispatch key): its implementation}.
        with_keys: the same, of implementations that take the set of dispatch keys first.
    """

    def __init__(
        self,
        functions: dict[tuple[str, str], Callable[..., Any]],
        with_keys: dict[tuple[str, str], Callable[..., Any]],
    ) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        self._names = {name for name, _ in (*functions, *with_keys)}
        with warnings.catch_warnings():  # that there is a kernel already
            warnings.simplefilter("ignore")
            for (name, key), function in (functions | with_keys).items():
                self._library.impl(name, function, key, with_keyset=function in with_keys.values(), allow_override=True)
        self._forget()

    def remove(self) -> None:
        self._library._destroy()
        self._forget()

    def _forget(self) -> None:
        """Tracing keeps which of an op's kernels it found for a dispatch key."""
        for name in self._names:
            getattr(torch.ops.aten, name).default._dispatch_cache.clear()


class CacheKeyTag:
    """Another key of torch.compile's caches, in every thread, until ``remove``d: torch's option of this name holds for
    the thread that sets it alone."""

    _entry = vars(torch.compiler.config)["_config"]["cache_key_tag"]

    def __init__(self, tag: str) -> None:
        self._before = self._entry.env_value_force
        self._entry.env_value_force = torch.compiler.config.cache_key_tag + tag

    def remove(self) -> None:
        self._entry.env_value_force = self._before


def forget_attention_impl(name: str) -> None:
    """Let torch's registry know that this implementation is no longer active."""
    if torch.nn.attention.current_flash_attention_impl() == name:
        _registry._FLASH_ATTENTION_ACTIVE = None


def forget_compiled() -> None:
    """Have torch.compile compile everything anew. Where nothing is compiled, dynamo is not imported for this."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def replace_globals(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """A Python function of torch's that finds these names in place of its module's."""
    if not isinstance(function, types.FunctionType):
        raise TypeError(f"{function} is no function in Python")
    copy = types.FunctionType(function.__code__, {**function.__globals__, **names}, function.__name__)
    copy.__defaults__, copy.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return copy


@functools.cache
def wrap_checkpointed(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have ``torch.utils.checkpoint`` call ``wrap(function)`` for each function that it is given, also when the
    backward pass computes it anew. torch itself carries autocast and the random state that far, but no other mode."""
    module = torch.utils.checkpoint
    newest = max(name for name in vars(module) if name.startswith("_checkpoint_without_reentrant_generator"))

    def wrapped(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return run(wrap(function), *args, **kwargs)

        return call

    setattr(module, newest, wrapped(getattr(module, newest)))
    # Not by assignment, which is an error to mypy: the name is a method's.
    setattr(module.CheckpointFunction, "apply", wrapped(module.CheckpointFunction.apply))  # noqa: B010


def function_modes() -> list[Any]:
    """This thread's modes that see the calls of torch's functions, the innermost last."""
    return torch.overrides._get_current_function_mode_stack()


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of this module, forward or backward, is told to anybody."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or _has_any_global_hook()
    )


def is_observed_module(module: nn.Module) -> bool:
    """Return whether a call of this module does more than its class says: hooks, or another forward.

    The empty hook of :func:`never_skipped` does nothing.
    """
    others = dict(module._forward_pre_hooks)
    others.pop(-1, None)
    hooks = module._forward_hooks or others or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or "forward" in vars(module)


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a call of this module is ``linear`` of its weight and bias, and nothing can tell that it was not made.

    The module is torch's own, without hooks. Neither the module nor the class has another ``forward``.
    """
    kind = type(module)
    return (
        (kind is NonDynamicallyQuantizableLinear or kind is nn.Linear)
        and nn.Linear.forward is _LINEAR_FORWARD
        and "forward" not in vars(module)
        and module._compiled_call_impl is None
        and not has_hooks(module)
    )


def wrapper_tensor(cls: type[Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """A contiguous tensor of the subclass, without memory: code in C++ that asks for it gets an error."""
    tensor = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    return tensor
