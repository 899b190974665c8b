"""What a family of modules is: a class whose ``forward`` takes the place of that of the modules it recognises."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastattn.ops import check
from fastattn.torch_private import has_hooks


class Family(nn.Module):
    """Base of the families.

    A patched module's class is made of its family and its own class, in that order: its parameters, state dict, hooks
    and ``isinstance`` stay, ``super().forward`` is the forward that it came with.
    """

    __prepare_scriptable__ = check.refuse_torchscript

    family: ClassVar[str]
    """The name in a report."""
    original: ClassVar[type[nn.Module]]
    """The class that the module had."""

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        """Whether the module looks like one of this family."""
        raise NotImplementedError

    @classmethod
    def refusal(cls, module: nn.Module, trusted: bool) -> str | None:
        """Return why a module that looks like one of this family must keep its own forward; None if it need not.

        Args:
            trusted: the user vouches for the code of the module's class.
        """
        raise NotImplementedError

    @classmethod
    def clashes(cls, kind: type[nn.Module]) -> list[str]:
        """Return the names that the module's class defines and this family defines too, other than ``forward``."""

        def names(classes: list[type]) -> set[str]:
            return {name for each in classes for name in vars(each) if not name.startswith("__") and name != "forward"}

        own = [each for each in kind.__mro__ if each.__module__.partition(".")[0] not in ("torch", "builtins")]
        ours = [each for each in cls.__mro__ if each.__module__.partition(".")[0] == "fastattn"]
        return sorted(names(own) & names(ours))

    @classmethod
    def attach(cls, module: nn.Module) -> None:
        """What patching does to the module beside its class."""

    @classmethod
    def detach(cls, module: nn.Module) -> None:
        """Undo :meth:`attach`."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class has no name by which pickle and deepcopy could find it.
        reduced: Any = super().__reduce_ex__(protocol)
        arguments = reduced[1][1:] if protocol >= 2 else ()  # of the class's __new__, which older protocols do not call
        return _new, (self.__class__.__bases__[0], self.original, *arguments), *reduced[2:]


_CLASSES: dict[tuple[type, type], Any] = {}


def patched_class(family: type[Family], original: type[nn.Module]) -> Any:
    """``original`` with the family's forward, one class for each pair, under the original's name: code that asks for
    the name finds what it expects."""
    key = family, original
    if key not in _CLASSES:
        attributes = {"__module__": original.__module__, "__qualname__": original.__qualname__, "original": original}
        _CLASSES[key] = type(original.__name__, (family, original), attributes)
    return _CLASSES[key]


def _new(family: Any, original: Any, *arguments: Any) -> nn.Module:
    cls = patched_class(family, original)
    return cls.__new__(cls, *arguments)


def is_torchs(function: Any) -> bool:
    """Return whether a method of a class of torch's comes from torch: another package may have replaced it."""
    namespace = getattr(function, "__globals__", {"__name__": "torch"})  # methods in C have none
    return namespace["__name__"].partition(".")[0] == "torch"


def is_served(*tensors: Tensor) -> bool:
    """Whether the operations take such tensors; a module's own forward takes the others."""
    return all(
        tensor.dtype in check.FLOATS
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not hasattr(type(tensor), "__tensor_flatten__")  # wrappers of other tensors: DTensor and its like
        for tensor in tensors
    )


def is_silent(module: Any, family: type[Family]) -> bool:
    """Whether a call of this module may be left out where its arithmetic is fused: it is patched as one of ``family``
    and nobody listens to it."""
    return isinstance(module, family) and not has_hooks(module) and "forward" not in vars(module)
