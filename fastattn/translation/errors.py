"""The error that a user can mend, which the command line prints as one line; and the packages that training needs."""

import importlib
from types import ModuleType


class InputError(ValueError):
    """What was given, what was expected, and what to do."""


def require(module: str) -> ModuleType:
    """Import a module of the ``train`` extra; raises :class:`InputError` where it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise InputError(f"{error.name} is not installed; it comes with: pip install fastattn[train]") from None
