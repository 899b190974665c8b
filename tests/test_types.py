"""Tests of the types of the public names: `typed_program.py` uses each name, and `mypy --strict` accepts the
program."""

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typed_program
from conftest import require_package

import fastattn

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = Path(typed_program.__file__)
PUBLIC = sorted(
    {name for module in list(sys.modules.values()) if module.__name__.startswith("fastattn.")
     for name in getattr(module, "__all__", ()) if hasattr(fastattn, name)}
    | {"Transformer", "TransformerConfig"}
)  # fmt: skip


def test_the_program_uses_every_public_name():
    used = set(re.findall(r"fastattn\.(\w+)", PROGRAM.read_text()))
    assert [name for name in PUBLIC if name not in used] == []


def test_the_program_runs():
    typed_program.main()


@pytest.mark.parametrize("name", [name for name in PUBLIC if inspect.isfunction(getattr(fastattn, name))])
def test_no_public_function_returns_any(name):
    assert get_type_hints(inspect.unwrap(getattr(fastattn, name)))["return"] is not Any


@pytest.mark.slow  # mypy reads all of torch
def test_mypy_accepts_the_program(tmp_path):
    """mypy takes no options of this repository and, as for an installed package, reports no errors within fastattn."""
    require_package("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent"]
    command += [f"--cache-dir={tmp_path}", str(PROGRAM)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
