"""Families of modules: a family is a class whose ``forward`` replaces that of the modules that it recognises."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastattn._torch_private import has_hooks
from fastattn.ops import check


class Family(nn.Module):
    """Base of the families.

    A patched module's class derives from its family and its original class, in that order. Its parameters, state dict,
    hooks and ``isinstance`` stay. ``super().forward`` is the module's original forward.
    """

    __prepare_scriptable__ = check.refuse_torchscript

    family: ClassVar[str]
    """Name in a report."""
    original: ClassVar[type[nn.Module]]
    """Class of the module before it was patched."""

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        """Return whether the module looks like one of this family."""
        raise NotImplementedError

    @classmethod
    def refusal(cls, module: nn.Module, trusted: bool) -> str | None:
        """Return why a module that looks like one of this family must keep its own forward; None if it can be patched.

        Args:
            trusted: the user vouches for the code of the module's class.
        """
        raise NotImplementedError

    @classmethod
    def clashes(cls, kind: type[nn.Module]) -> list[str]:
        """Return the names, except ``forward``, that both the module's class and this family define."""

        def names(classes: list[type]) -> set[str]:
            return {name for each in classes for name in vars(each) if not name.startswith("__") and name != "forward"}

        own = [each for each in kind.__mro__ if each.__module__.partition(".")[0] not in ("torch", "builtins")]
        ours = [each for each in cls.__mro__ if each.__module__.partition(".")[0] == "fastattn"]
        return sorted(names(own) & names(ours))

    @classmethod
    def attach(cls, module: nn.Module) -> None:
        """Change the module where patching needs more than the new class."""

    @classmethod
    def detach(cls, module: nn.Module) -> None:
        """Undo :meth:`attach`."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickle and deepcopy store the pair of classes, because they cannot find the patched class by its name.
        reduced: Any = super().__reduce_ex__(protocol)
        arguments = reduced[1][1:] if protocol >= 2 else ()  # arguments of __new__, which older protocols do not call
        return _new, (self.__class__.__bases__[0], self.original, *arguments), *reduced[2:]


_CLASSES: dict[tuple[type, type], Any] = {}


def patched_class(family: type[Family], original: type[nn.Module]) -> Any:
    """Return the class of ``original`` with the family's forward, one class per pair.

    It has the original's name, because some code tests the name of a module's class.
    """
    key = family, original
    if key not in _CLASSES:
        attributes = {"__module__": original.__module__, "__qualname__": original.__qualname__, "original": original}
        _CLASSES[key] = type(original.__name__, (family, original), attributes)
    return _CLASSES[key]


def _new(family: Any, original: Any, *arguments: Any) -> nn.Module:
    cls = patched_class(family, original)
    return cls.__new__(cls, *arguments)


def is_torchs(function: Any) -> bool:
    """Return whether a method of a torch class is torch's own: another package may have replaced it."""
    namespace = getattr(function, "__globals__", {"__name__": "torch"})  # methods in C have no __globals__
    return namespace["__name__"].partition(".")[0] == "torch"


def is_served(*tensors: Tensor) -> bool:
    """Return whether fastattn's operations take these tensors; other tensors go to the module's original forward."""
    return all(
        tensor.dtype in check.FLOATS
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not hasattr(type(tensor), "__tensor_flatten__")  # wrappers of other tensors, such as DTensor
        for tensor in tensors
    )


def is_silent(module: Any, family: type[Family]) -> bool:
    """Return whether the module can be fused into its parent, which skips its call.

    The module must be patched by ``family``, have no hooks, and have no ``forward`` replaced on the instance.
    """
    return isinstance(module, family) and not has_hooks(module) and "forward" not in vars(module)
