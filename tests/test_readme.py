"""What README shows does what it says."""

import re
import shlex
import subprocess
from pathlib import Path

import fastattn_command as cli

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_ci_runs_the_test_command():
    """.ci/run takes README's command from README: its extraction finds the whole block under "Run the tests"."""
    extraction = re.search(r"^tests=\$\((.*)\)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)[1]
    found = subprocess.run(["bash", "-c", extraction], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    block = re.search(r"## Run the tests\n.*?```sh\n(.*?)```", README, re.DOTALL)[1]
    assert found == block
    assert ".venv/bin/pytest" in block


def test_python_blocks_run():
    """One after the other in one namespace, as a reader would paste them."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(block, namespace)


def test_commands_are_understood():
    """Every `fastattn` line of README parses, with the options that it shows."""
    block = re.search(r"## Translate\n.*?```sh\n(.*?)```", README, re.DOTALL)[1]
    commands = re.findall(r"^(?:.*\| )?fastattn (.*)$", block, re.MULTILINE)
    parsed = [cli.parser().parse_args(shlex.split(command)).command for command in commands]
    assert list(dict.fromkeys(parsed)) == ["translate", "train", "evaluate", "plot", "average", "export", "info"]
