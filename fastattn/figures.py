"""Figures of matplotlib, and their files."""

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fastattn import files
from fastattn.errors import InputError, require
from fastattn.files import StrPath

FORMATS = ("png", "svg")


def check_path(path: StrPath, read: Iterable[StrPath] = ()) -> None:
    """Raise :class:`InputError` unless a picture can be written to ``path``, which is none of the files ``read``."""
    path = Path(path)
    if path.suffix[1:] not in FORMATS:
        raise InputError(f"cannot draw {path}: expected a name that ends in .{' or .'.join(FORMATS)}")
    files.check_file(path, read)
    require("matplotlib")


def figure(width: float, height: float) -> Any:
    """Return an empty figure; ``width`` and ``height`` are in inches."""
    return require("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")


def save(picture: Any, path: StrPath, dpi: int = 150, source: str | None = None) -> None:
    """Write a figure, whole or not at all. Equal figures give equal bytes.

    The file's metadata holds ``source``, the data that the figure was drawn from.
    """
    path = Path(path)
    content, metadata = io.BytesIO(), {"Date": None, "Source": source}
    with require("matplotlib").rc_context({"svg.hashsalt": "fastattn"}):
        picture.savefig(content, format=path.suffix[1:], dpi=dpi, metadata=metadata)
    files.write_file(path, content.getvalue())
