"""Print the digests of a program's code, one line per function, as ``integrations/patching/known.py`` lists them.

``python tools/known_code.py PROGRAM FILE ...``, with the program's name of that list and files of its source. Run it
under each version of Python, which needs no packages. List a version of a function only after reading it: it must
compute what the family in ``fastattn/integrations/patching/programs.py`` computes.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

KNOWN = Path(__file__).resolve().parent.parent / "fastattn" / "integrations" / "patching" / "known.py"


def load(path: Path) -> Any:
    """Load a module that imports nothing of fastattn, since importing fastattn imports torch."""
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def functions(path: Path) -> Iterator[tuple[str, FunctionType]]:
    """Yield the functions of the file and the ``forward`` of its classes, made without its packages.

    An imported name becomes an empty module of that name, and classes get no bases: only code is read.
    """
    namespace: dict[str, Any] = {}
    body: list[ast.stmt] = []
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            above = f"{statement.module}." if isinstance(statement, ast.ImportFrom) else ""
            for alias in statement.names:
                name = above + alias.name if above or alias.asname else alias.name.partition(".")[0]
                module = sys.modules.setdefault(name, ModuleType(name))
                namespace[alias.asname or alias.name.partition(".")[0]] = module
        elif isinstance(statement, ast.ClassDef):
            statement.bases, statement.keywords, statement.decorator_list = [], [], []
            statement.body = [part for part in statement.body if isinstance(part, ast.FunctionDef)]
            body.append(statement)
        elif isinstance(statement, ast.FunctionDef):
            body.append(statement)
    exec(compile(ast.Module(body, []), str(path), "exec"), namespace)
    for statement in body:
        name = statement.name  # type: ignore[attr-defined]
        function = getattr(namespace[name], "forward", namespace[name])
        if isinstance(function, FunctionType):
            yield name, function


def main(program: str, *paths: str) -> None:
    known = load(KNOWN)
    found: dict[str, list[str]] = {}
    for path in paths:
        for name, function in functions(Path(path)):
            digests = found.setdefault(f"{name} of {program}", [])
            if (digest := known.digest(function)) not in digests:
                digests.append(digest)
    for name, digests in found.items():
        print(f'"{name}": {{"{known.PYTHON}": "{" ".join(digests)}"}},')


if __name__ == "__main__":
    main(*sys.argv[1:])
