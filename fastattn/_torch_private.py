"""All private parts of torch that fastattn uses. The tests marked ``torch_version`` show whether a version of torch has
changed one."""

from __future__ import annotations

import functools
import sys
import types
import warnings
from collections.abc import Callable
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

_is_compiling = torch.compiler.is_compiling  # saves name lookups per call
_dispatch_modes = torch._C._len_torch_dispatch_stack
_PROXY, _FAKE = torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE

# torch's fused attention on the CPU, with one mask and without dropout, differentiable once: returns (out, logsumexp).
flash_attention: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
flash_attention_backward: Callable[..., Any] = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
)
# True inside grad, vmap and the other transforms of torch.func.
is_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
# True if autocast is on for at least one device. The public function requires a device, which costs a lookup.
is_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
# autograd.Function without torch.func's part, which inspects a signature at every call. It differentiates at one level.
# Inside a transform it works only within ``single_level_autograd``.
SingleLevelFunction = torch.autograd.function._SingleLevelFunction
single_level_autograd = enable_single_level_autograd_function
# Context in which an op's call goes on to the dispatch keys below autograd.
below_autograd = torch._C._AutoDispatchBelowAutograd
# The forward of torch's linear modules, which a program may replace.
_LINEAR_FORWARD = nn.Linear.forward
# True if torch.nn.attention.sdpa_kernel allows flash attention. The public function cannot be compiled.
is_flash_enabled: Callable[[], bool] = torch._C._get_flash_sdp_enabled


def is_forward_mode() -> bool:
    """Return whether this is inside forward-mode differentiation: ``torch.func.jvp`` or ``forward_ad.dual_level``."""
    return forward_ad._current_level >= 0


_is_tracing = torch._C._is_tracing
_is_forward_grad_enabled = torch._C._is_fwd_grad_enabled


def is_traced() -> bool:
    """Return whether this is inside torch.jit.trace."""
    return not _is_compiling() and _is_tracing()


def is_proxied() -> bool:
    """Return whether this is inside ``make_fx``, with or without ``pre_dispatch``, which refuses to read a value."""
    return torch._C._get_dispatch_mode(_PROXY) is not None or _get_pre_dispatch_mode(_PROXY) is not None


def is_observed() -> bool:
    """Return whether compilation, a dispatch mode, torch.func, forward mode or torch.jit.trace observes calls."""
    return (
        _is_compiling()
        or _dispatch_modes() > 0
        or is_transformed()
        or forward_ad._current_level >= 0  # is_forward_mode, without a call
        or _is_tracing()
    )


def is_within_transform() -> bool:
    """Return whether this is inside a transform of torch.func, as ``is_transformed``, which dynamo cannot trace."""
    functorch = torch._C._functorch
    return isinstance(functorch.peek_interpreter_stack(), functorch.CInterpreter)  # to dynamo None is not None


def is_in_function() -> bool:
    """Return whether this is inside the forward of an ``autograd.Function``, which disables both modes of gradients."""
    disabled = not torch.is_grad_enabled() and not _is_forward_grad_enabled()
    return disabled and not torch.is_inference_mode_enabled()


def refuse_scripting(function: Callable[..., Any], reason: str) -> None:
    """Make torch.jit.script raise RuntimeError with ``reason`` instead of compiling this function."""
    setattr(function, "__script_unsupported", reason)


def is_onnx_export() -> bool:
    """Return whether this is inside ONNX export. The public function first imports the exporter, in 0.1 s."""
    flags = sys.modules.get("torch.onnx._internal.exporter._flags")
    return flags is not None and flags._is_onnx_exporting


# True if batched by the legacy vmap of ``torch.autograd.grad(is_grads_batched=True)``; torch.func's checks miss it.
is_batched_gradient: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor


def is_batched(tensor: Tensor) -> bool:
    """Return whether a vmap batches ``tensor``, at one of its levels, so that it has no values of its own."""
    if _is_compiling():  # dynamo traces only this function
        return torch._C._functorch.is_batchedtensor(tensor)
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        if torch._C._functorch.is_batchedtensor(tensor):
            return True
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return False


def count_flops(formulas: dict[Any, Callable[..., int]]) -> None:
    """Add the formulas {op: formula} to the active ``FlopCounterMode``s, except where the user gave others.

    A counter copies torch's registry when it is made. The registry's module imports Triton, so importing fastattn does
    not register the formulas there.
    """
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None or _is_compiling():
        return
    for mode in _dispatch_mode_stack():
        if isinstance(mode, module._FlopCounterMode):
            registry = mode.counter.flop_registry
            registry.update({op: formula for op, formula in formulas.items() if op not in registry})


def is_expanded_weight(tensor: Any) -> bool:
    """Return whether it replaces a parameter in ``call_for_per_sample_grads``, which supports only torch functions."""
    return isinstance(tensor, _ExpandedWeight)


def is_lazy(tensor: Tensor) -> bool:
    """Return whether the tensor's memory does not hold its values: lazily negated, or a zero without memory."""
    return tensor.is_neg() or tensor._is_zerotensor()


def ragged_dim(tensor: torch.Tensor) -> int:
    """Return the dimension of a jagged nested tensor whose size varies between sequences."""
    return tensor._ragged_idx  # type: ignore[attr-defined]


def max_length(tensor: torch.Tensor) -> int:
    """Return the length of the longest sequence of a jagged nested tensor, which caches it."""
    return tensor._get_max_seqlen()  # type: ignore[attr-defined]


def bind(overload: Any) -> Callable[..., Any]:
    """Return an op's overload without torch's Python wrapper."""
    return overload._op


def bind_apply(function: type[SingleLevelFunction]) -> Callable[..., Any]:
    """Return ``function.apply``, and let autograd call ``function.backward`` directly.

    torch would first search for an override (``vjp``) at every call.
    """
    function._backward_cls.apply = function.backward
    return function.apply  # type: ignore[attr-defined]


def never_skipped(module: nn.Module) -> None:
    """Make torch's encoder layer call its submodules, this one among them.

    In evaluation the layer reads the submodules' parameters instead, unless one of them has a hook. The module gets an
    empty hook. Handles of hooks count from 0, so no other hook has the number -1.
    """
    module._forward_pre_hooks[-1] = _unchanged


def may_be_skipped(module: nn.Module) -> None:
    """Undo :func:`never_skipped`."""
    module._forward_pre_hooks.pop(-1, None)


def _unchanged(module: nn.Module, args: tuple[Any, ...]) -> None:
    pass


def is_tracers(kind: type) -> bool:
    """Return whether torch itself makes tensors of this subclass while it traces: fake and functional ones."""
    return kind.__module__.startswith("torch._subclasses.")


def is_fake_outside_its_mode(tensor: Tensor) -> bool:
    """Return whether the tensor is fake, and only calls on it enter its mode: others make ordinary tensors."""
    return not _is_compiling() and is_tracers(type(tensor)) and torch._C._get_dispatch_mode(_FAKE) is None


def composite(op: OpOverload) -> Callable[..., Any]:
    """Return a composite op's own implementation, even if another one is registered for the op.

    Redispatching is no alternative: in compiled code it loses the gradient.
    """
    return functools.partial(op._op_dk, DispatchKey.CompositeImplicitAutograd)


class Implementations:
    """Python functions that replace torch's kernels, from construction until ``remove``.

    Args:
        functions: {(name of an op of aten, dispatch key): its implementation}.
        with_keys: the same mapping, for implementations whose first argument is the set of dispatch keys.
    """

    def __init__(
        self,
        functions: dict[tuple[str, str], Callable[..., Any]],
        with_keys: dict[tuple[str, str], Callable[..., Any]],
    ) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        self._names = {name for name, _ in (*functions, *with_keys)}
        with warnings.catch_warnings():  # torch warns that a kernel is registered already
            warnings.simplefilter("ignore")
            for (name, key), function in (functions | with_keys).items():
                self._library.impl(name, function, key, with_keyset=function in with_keys.values(), allow_override=True)
        self._forget()

    def remove(self) -> None:
        self._library._destroy()
        self._forget()

    def _forget(self) -> None:
        """Clear the ops' dispatch caches, in which tracing stores the kernel found for a dispatch key."""
        for name in self._names:
            getattr(torch.ops.aten, name).default._dispatch_cache.clear()


class CacheKeyTag:
    """A change of the key of torch.compile's caches in every thread, until ``remove``.

    torch's option of this name changes the key only in the thread that sets it.
    """

    _entry = vars(torch.compiler.config)["_config"]["cache_key_tag"]

    def __init__(self, tag: str) -> None:
        self._before = self._entry.env_value_force
        self._entry.env_value_force = torch.compiler.config.cache_key_tag + tag

    def remove(self) -> None:
        self._entry.env_value_force = self._before


def forget_attention_impl(name: str) -> None:
    """Tell torch's registry that this implementation is no longer active."""
    if torch.nn.attention.current_flash_attention_impl() == name:
        _registry._FLASH_ATTENTION_ACTIVE = None


def forget_compiled() -> None:
    """Make torch.compile compile everything again. Without an imported dynamo there is nothing to reset."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def replace_globals(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """Return a copy of a Python function in whose globals these names are replaced."""
    if not isinstance(function, types.FunctionType):
        raise TypeError(f"{function} is no function in Python")
    copy = types.FunctionType(function.__code__, {**function.__globals__, **names}, function.__name__)
    copy.__defaults__, copy.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return copy


@functools.cache
def wrap_checkpointed(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Make ``torch.utils.checkpoint`` call ``wrap(function)`` for each function that it is given.

    This holds for the recomputation in the backward pass too. torch itself carries only autocast and the random state
    into it, and no other mode.
    """
    module = torch.utils.checkpoint
    newest = max(name for name in vars(module) if name.startswith("_checkpoint_without_reentrant_generator"))

    def wrapped(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return run(wrap(function), *args, **kwargs)

        return call

    setattr(module, newest, wrapped(getattr(module, newest)))
    # setattr, because mypy rejects an assignment to a method's name.
    setattr(module.CheckpointFunction, "apply", wrapped(module.CheckpointFunction.apply))  # noqa: B010


def function_modes() -> list[Any]:
    """Return this thread's modes that intercept torch's functions, the innermost last."""
    return torch.overrides._get_current_function_mode_stack()


def has_hooks(module: nn.Module) -> bool:
    """Return whether a forward or backward hook observes calls of this module, a global hook included."""
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
    """Return whether ``linear`` of the module's weight and bias can replace its call without a visible difference.

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
