"""Existing models on fastattn's kernels: ``patch(model)`` replaces the forward of the modules that it recognises."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from fastattn.integrations.patching import programs, torch_modules
from fastattn.integrations.patching.family import Family, is_torchs, patched_class

__all__ = ["PatchReport", "patch", "unpatch"]

FAMILIES = (*torch_modules.FAMILIES, *programs.FAMILIES)
CALL = ("__call__", "_wrapped_call_impl", "_call_impl", "_slow_forward", "__getattribute__", "__getattr__")
METHODS = {name: getattr(nn.Module, name) for name in CALL}
"""Methods that run between a module's call and its forward."""


@dataclass(frozen=True)
class PatchReport:
    """Result of ``patch`` or ``unpatch``, by the modules' names within the model (the model's own name is empty).

    Attributes:
        changed: the family as which each changed module was recognised.
        left: the reason why each other recognised module is unchanged.

    Examples:
        >>> print(fastattn.patch(torch.nn.Sequential(torch.nn.LayerNorm(64))))
        changed: 1 modules
          torch.nn.LayerNorm: 0
        left: 0 modules
    """

    changed: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = []
        for title, found in (("changed", self.changed), ("left", self.left)):
            lines.append(f"{title}: {len(found)} modules")
            for text in dict.fromkeys(found.values()):
                names = [name or "(the model)" for name in found if found[name] == text]
                lines.append(f"  {text}: {', '.join(names)}")
        return "\n".join(lines)


def patch(model: nn.Module, *, trust: Iterable[type[nn.Module]] = ()) -> PatchReport:
    """Patch the modules of ``model`` that fastattn recognises to run on its kernels, in place.

    It recognises torch's MultiheadAttention, LayerNorm, Dropout, TransformerEncoderLayer, TransformerDecoderLayer and
    TransformerEncoder. It also recognises the attention, feed-forward, residual and norm modules of three public
    programs. Their compiled code identifies them, wherever they are imported from (docs/migrate.md).

    A patched module's class becomes a subclass of its former class. Parameters, state dict, hooks, training mode,
    ``isinstance`` and results stay, with two exceptions. Fully masked rows, which torch's modules return as NaN, are 0.
    Dropout draws fastattn's mask.

    Args:
        model: the model. Modules shared within it stay shared.
        trust: classes, not their subclasses, whose modules are patched although their code differs from the program's.
            A trial on a small stand-in must still find no difference. You vouch for everything that a trial does not
            show, for example a bound that only large scores reach.

    Returns:
        The changed modules, and the recognised but unchanged ones with the reason. ``print`` shows both.

    Raises:
        TypeError: model is not a module, or trust is not a collection of module classes.
        ValueError: the model has no module of a class in trust.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
        >>> fastattn.patch(model).changed
        {'1': 'torch.nn.LayerNorm'}
    """
    _check("patch", model)
    trusted = _trusted(model, trust)
    changed, left = {}, {}
    for name, module in model.named_modules():
        if isinstance(module, Family):
            left[name] = "it is patched already"
            continue
        family = next((family for family in FAMILIES if family.recognises(module)), None)
        if family is None:
            if type(module) in trusted:
                left[name] = "it is trusted, but its parts are not those of a module that fastattn knows"
            continue
        reason = _refusal(module, family) or family.refusal(module, type(module) in trusted)
        if reason:
            left[name] = reason
        else:
            module.__class__ = patched_class(family, type(module))
            family.attach(module)
            changed[name] = family.family
    return PatchReport(changed, left)


def unpatch(model: nn.Module) -> PatchReport:
    """Restore the classes that the modules of ``model`` had before ``patch``.

    Raises:
        TypeError: model is not a module.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
        >>> report = fastattn.patch(model)
        >>> report = fastattn.unpatch(model)
        >>> type(model[1])
        <class 'torch.nn.modules.normalization.LayerNorm'>
    """
    _check("unpatch", model)
    changed, left = {}, {}
    for name, module in model.named_modules():
        if not isinstance(module, Family):
            continue
        kind: Any = type(module)
        if "original" in vars(kind):
            kind.detach(module)
            module.__class__ = kind.original
            changed[name] = kind.family
        else:
            left[name] = "a parametrization or a wrapper has changed its class since; undo that first"
    return PatchReport(changed, left)


def _check(function: str, model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}: model must be a torch.nn.Module, got {type(model).__name__}")


def _trusted(model: nn.Module, trust: Iterable[type[nn.Module]]) -> set[type]:
    """Return the set of the classes in ``trust``; raise if one is not a class of a module of the model."""
    classes = set(trust) if isinstance(trust, Iterable) else {None}
    if not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in classes):
        raise TypeError(f"patch: trust must be a tuple of classes of modules, as (MyAttention,), got {trust!r}")
    present = {module.original if isinstance(module, Family) else type(module) for module in model.modules()}
    if missing := sorted(kind.__name__ for kind in classes - present):
        raise ValueError(f"patch: trust names {', '.join(missing)}, but the model has no module of that class")
    return classes


def _refusal(module: nn.Module, family: type[Family]) -> str | None:
    """Return the reason, common to all families, why the module cannot be patched; None if there is none."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a ScriptModule; patch the model that torch.jit made it of, and use torch.compile in its place"
    if parametrize.is_parametrized(module):
        return "it is parametrized, which swaps its class too; patch first, parametrize afterwards"
    kind = type(module)
    if (kind.__reduce__, kind.__reduce_ex__) != (object.__reduce__, object.__reduce_ex__) or hasattr(
        kind, "__getnewargs_ex__"
    ):
        return "its class says itself how it is pickled, which a patched class has to"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    overridden = [name for name, method in METHODS.items() if getattr(kind, name) is not method]
    if overridden:
        return f"its class overrides {', '.join(overridden)} of torch.nn.Module"
    if replaced := [name for name, method in METHODS.items() if not is_torchs(method)]:
        return f"{', '.join(replaced)} of torch.nn.Module was replaced before fastattn was imported"
    if clashes := family.clashes(kind):
        return f"its class defines {', '.join(clashes)}, and fastattn's forward has methods of these names"
    return None
