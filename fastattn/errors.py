"""The error that a user can mend, which the command line prints as one line, and the import of optional packages."""

import importlib
from types import ModuleType


class InputError(ValueError):
    """An error of input; its message says what was given, what was expected, and what to do."""


def require(module: str, extra: str = "train") -> ModuleType:
    """Import a module of an extra, or raise :class:`InputError` if it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        commands = f'pip install "fastattn[{extra}]", in a clone pip install -e ".[{extra}]"'
        raise InputError(f"{error.name} is not installed; it comes with: {commands}") from None
