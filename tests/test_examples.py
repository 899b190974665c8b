"""The programs of examples/ run unchanged, and the translator learns its task."""

import re
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "examples"
SLOW = {"translator", "export_model"}  # one trains, the other traces
NAMES = [
    pytest.param(path.stem, marks=pytest.mark.slow) if path.stem in SLOW else path.stem
    for path in sorted(FOLDER.glob("*.py"))
]


@pytest.mark.parametrize("name", NAMES)
def test_example_runs(name, capsys):
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed
    if name == "translator":
        assert int(re.search(r"(\d+) of 100 new numbers", printed)[1]) >= 90


def test_there_are_five():
    """docs/examples.md shows them all."""
    page = (FOLDER.parent / "docs/examples.md").read_text()
    shown = re.findall(r"^--8<--\nexamples/(\w+)\.py\n--8<--$", page, re.MULTILINE)
    assert sorted(shown) == sorted(path.stem for path in FOLDER.glob("*.py"))
    assert len(shown) == 5
