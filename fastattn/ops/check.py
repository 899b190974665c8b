"""Checks and conversions that the public functions share."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.fx import Proxy

from fastattn._torch_private import is_batched, is_fake_outside_its_mode, is_proxied, is_traced, refuse_scripting
from fastattn.ops.copies import owned

TORCHSCRIPT = (
    "fastattn does not support torch.jit (TorchScript), which PyTorch has deprecated: use torch.compile to make a "
    "model faster, torch.export to save its program, torch.onnx.export(dynamo=True) for ONNX"
)

SYMBOLIC = (
    "torch.fx.symbolic_trace does not trace fastattn: use torch.export to save a model's program, or a Tracer whose "
    "is_leaf_module knows fastattn's modules"
)

LARGEST = 3.4028234663852886e38  # float32's largest number; the kernels hold a scale in float32
LEAST = 2.0**-126  # float32's least normal number; a GPU may flush smaller ones to 0, and -inf * 0 is NaN
_NUMBERS = (float, int)  # a tuple, because a union would be built again at each call
_AUTOCAST_DEVICES = frozenset(
    device for device in ("cpu", "cuda", "mps", "xpu", "mtia", "hpu", "xla") if torch.amp.is_autocast_available(device)
)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HALVES = (torch.bfloat16, torch.float16)


class BadValue(ValueError, RuntimeError, AssertionError):
    """A wrong value, shape or device of an argument.

    torch raises one of the three base types for it, depending on which check fails.
    """


class BadType(TypeError, RuntimeError, AssertionError):
    """A wrong type or dtype of an argument.

    torch raises one of the three base types for it, depending on which check fails.
    """


ARGUMENT_ERRORS = (BadValue, BadType)  # the errors of the checks; other errors are faults of fastattn


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def float_tensor(function: str, name: str, value: object) -> None:
    """Raise TypeError unless ``value`` is a tensor of a floating-point dtype that the operations take."""
    if isinstance(value, Proxy):
        raise BadType(f"{function}: {name} is a Proxy; {SYMBOLIC}")
    if not isinstance(value, Tensor):
        raise BadType(f"{function}: {name} must be a Tensor, got {type(value).__name__}")
    if value.dtype not in FLOATS:
        raise BadType(
            f"{function}: {name} must be float32, bfloat16, float16 or float64, got {dtype_name(value.dtype)}"
        )


Function = TypeVar("Function", bound=Callable[..., Any])


def unscriptable(function: Function) -> Function:
    """Decorate a public function so that torch.jit.script raises and names the replacements."""
    refuse_scripting(function, TORCHSCRIPT)
    return function


def refuse_torchscript(self: Any) -> NoReturn:
    """Raise as a module's ``__prepare_scriptable__``, which torch.jit.script calls first, for submodules too."""
    raise RuntimeError(TORCHSCRIPT)


def operand(function: str, name: str, value: Tensor) -> None:
    """Raise TypeError unless ``value`` is a dense ``float_tensor``, and RuntimeError inside torch.jit.trace."""
    if is_traced():
        raise RuntimeError(TORCHSCRIPT)
    float_tensor(function, name, value)
    dense(function, name, value, ", or, where nested tensors are taken, make all operands jagged, layout=torch.jagged")


def dense(function: str, name: str, tensor: Tensor, otherwise: str = "") -> None:
    if tensor.is_nested:
        raise BadType(
            f"{function}: {name} is a nested tensor of layout {tensor.layout}; pad it, to_padded_tensor(0.0){otherwise}"
        )
    if tensor.layout != torch.strided:
        raise BadType(f"{function}: {name} must be a dense tensor, got {tensor.layout}; make it one by to_dense()")


def same_device(function: str, name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise BadValue(f"{function}: {name} must be on {device} as the other operands are, got {tensor.device}")


def real(function: str, name: str, value: object) -> float:
    """Return ``value``, a number or a scalar tensor that requires no gradient, as a float."""
    if isinstance(value, Tensor) and value.dim() == 0 and not value.requires_grad and not value.is_meta:
        value = value.item()
    if not isinstance(value, numbers.Real | torch.SymFloat | torch.SymInt):  # accepts a bool, as torch does
        raise BadType(f"{function}: {name} must be a real number, got {type(value).__name__} {value!r:.80}")
    try:
        return float(value)
    except OverflowError:  # an integer beyond float64
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]


def threshold(function: str, dropout_p: float, name: str = "dropout_p") -> int:
    """Return floor(p * 65536 + 0.5). An element is kept iff its 16-bit value is at least this threshold."""
    if not isinstance(dropout_p, _NUMBERS):
        dropout_p = real(function, name, dropout_p)
    if not 0.0 <= dropout_p <= 1.0:
        raise BadValue(f"{function}: {name} must be in [0, 1], got {dropout_p}")
    return int(dropout_p * 65536 + 0.5)


def scale(function: str, value: float) -> float:
    """Return the scale, or 0 if its magnitude is less than float32's least normal number."""
    if type(value) is float and LEAST <= abs(value) <= LARGEST:  # skips the slow check of numbers.Real
        return value
    value = real(function, "scale", value)
    if not -LARGEST <= value <= LARGEST:
        raise BadValue(f"{function}: scale must be finite in float32, got {value}")
    return value if abs(value) >= LEAST else 0.0


def flag(function: str, name: str, value: bool) -> None:
    if value is not True and value is not False:
        raise BadType(f"{function}: {name} must be True or False, got {value!r}")


def seed(function: str, seed: Tensor | None, device: torch.device) -> None:
    if seed is None:
        return
    if not isinstance(seed, Tensor):
        raise BadType(
            f"{function}: seed must be an int64 Tensor of shape (2,), (key, offset), got {type(seed).__name__}"
        )
    dense(function, "seed", seed)
    if seed.dtype != torch.int64 or seed.shape != (2,):
        raise BadValue(
            f"{function}: seed must be an int64 Tensor of shape (2,), (key, offset), "
            f"got {dtype_name(seed.dtype)} of shape {tuple(seed.shape)}"
        )
    same_device(function, "seed", seed, device)


def draw_seed(seed: Tensor | None, threshold: int, operand: Tensor) -> Tensor | None:
    """Return the seed for this threshold: the caller's, one from torch's default generator, or None for threshold 0."""
    if threshold == 0:
        return None
    return new_seed(operand) if seed is None else owned(seed)


def new_seed(operand: Tensor) -> Tensor:
    """Draw an int64 seed (2,) from torch's default generator of an operand's device, by one ordinary random op.

    Outside its mode a fake operand gets a fake seed.
    """
    if is_fake_outside_its_mode(operand):
        return torch.randint_like(operand.new_empty(2, dtype=torch.int64), -(2**63), 2**63 - 1)
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=operand.device)


def window(
    function: str, window_size: tuple[int, int], is_causal: bool, lower_right: bool, queries: int, keys: int
) -> tuple[int, int]:
    """Return (left, right), finite; with ``is_causal`` right is 0.

    A side that bounds nothing reaches exactly to the last position (``backends/schema.py``).
    """
    flag(function, "is_causal", is_causal)
    reach = (keys, queries) if lower_right else (queries, keys)
    given = sides(function, window_size)
    left, right = (most if side == -1 else min(side, most) for side, most in zip(given, reach, strict=True))
    return left, 0 if is_causal else right


def sides(function: str, window_size: tuple[int, int]) -> tuple[int, int]:
    """Return (left, right) as given, each -1 or more."""
    if type(window_size) is tuple and window_size == (-1, -1):  # skips the slower checks
        return window_size
    if not (isinstance(window_size, tuple | list) and len(window_size) == 2):
        raise BadType(f"{function}: window_size must be (left, right), got {window_size!r}")
    if not all(isinstance(side, numbers.Integral) and not isinstance(side, bool) for side in window_size):
        raise BadType(f"{function}: window_size must be two integers, got {window_size!r}")
    if min(window_size) < -1:
        raise BadValue(f"{function}: window_size must be -1 (unbounded) or more on each side, got {window_size!r}")
    left, right = window_size
    return int(left), int(right)


def is_readable(tensor: Tensor) -> bool:
    """Return whether a check may read the values: they exist, and reading them does not synchronise with a device."""
    return (
        tensor.device.type == "cpu"
        and type(tensor) is Tensor
        and not torch.compiler.is_compiling()
        and not is_proxied()
        and not is_batched(tensor)
    )


def key_lengths(
    function: str, lengths: Tensor, batch: int, keys: int, device: torch.device, name: str = "key_lengths"
) -> Tensor:
    """Return ``lengths`` as dense int64 (batch,) within [0, keys].

    Readable values are checked; others are clamped, because a check would synchronise.
    """
    if not isinstance(lengths, Tensor):
        raise BadType(f"{function}: {name} must be an integer Tensor of shape ({batch},), got {type(lengths).__name__}")
    if lengths.dtype not in INTEGERS:
        raise BadType(f"{function}: {name} must hold integers, got {dtype_name(lengths.dtype)}")
    dense(function, name, lengths)
    if lengths.shape != (batch,):
        raise BadValue(f"{function}: {name} must have shape ({batch},), got {tuple(lengths.shape)}")
    same_device(function, name, lengths, device)
    lengths = owned(lengths)
    if is_readable(lengths) and batch > 0:
        low, high = (int(extreme) for extreme in lengths.aminmax())
        if low < 0 or high > keys:
            raise BadValue(f"{function}: {name} must be within [0, {keys}], got values from {low} to {high}")
        return lengths
    return lengths.clamp(0, keys)


def mask(function: str, attn_mask: Tensor | None, sizes: torch.Size, dtype: torch.dtype, device: torch.device
         ) -> Tensor | None:  # fmt: skip
    """Return ``attn_mask``, broadcastable to ``sizes`` (..., H, rows, columns), in 4-D with sizes 1 or full."""
    if attn_mask is None:
        return None
    if not isinstance(attn_mask, Tensor):
        raise BadType(f"{function}: attn_mask must be a bool or float Tensor, got {type(attn_mask).__name__}")
    if attn_mask.dtype not in (torch.bool, *FLOATS) or (attn_mask.dtype == torch.float64 != dtype):
        raise BadType(
            f"{function}: attn_mask must be bool (True = takes part) or float (added to the scores), for operands of "
            f"{dtype_name(dtype)} one of bool, float32, bfloat16, float16, got {dtype_name(attn_mask.dtype)}"
        )
    dense(function, "attn_mask", attn_mask)
    same_device(function, "attn_mask", attn_mask, device)
    given = attn_mask.shape
    fits = len(given) <= len(sizes) and all(
        m == 1 or m == s for m, s in zip(reversed(given), reversed(sizes), strict=False)
    )
    if not fits:
        raise BadValue(f"{function}: attn_mask must be broadcastable to {tuple(sizes)}, got shape {tuple(given)}")
    batch = attn_mask.shape[:-3]
    if len(sizes) > 4 and any(size != 1 for size in batch):
        return attn_mask.expand(*sizes[:-3], *attn_mask.shape[-3:]).flatten(0, -4)
    if len(batch) > 1:
        return attn_mask.flatten(0, -4)
    return attn_mask[(None,) * (4 - attn_mask.dim())]


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return the low-precision dtype of an active autocast on this tensor's device, otherwise None."""
    device = tensor.device.type
    if device not in _AUTOCAST_DEVICES or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def autocast_low(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast operands as autocast does for a matrix product: to its low-precision dtype, except float64."""
    low = autocast_dtype(tensors[0])
    if low is None:
        return tensors
    return tuple(t if t.dtype == torch.float64 else t.to(low) for t in tensors)


def autocast_float32(tensor: Tensor) -> Tensor:
    """Cast a row operation's operand as autocast does: on CUDA softmax and layer_norm run in float32.

    CPU autocast does not cast them.
    """
    if tensor.is_cuda and autocast_dtype(tensor) is not None and tensor.dtype != torch.float64:
        return tensor.float()
    return tensor
