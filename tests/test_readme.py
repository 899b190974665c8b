"""README's examples do what it says."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastattn
from fastattn.bench import report

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_ci_runs_the_test_command():
    """.ci/run takes README's command from README: its extraction finds the whole block under "Run the tests"."""
    extraction = re.search(r"^tests=\$\((.*)\)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)[1]
    found = subprocess.run(["bash", "-c", extraction], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    block = re.search(r"## Run the tests\n.*?```sh\n(.*?)```", README, re.DOTALL)[1]
    assert found == block
    assert ".venv/bin/pytest" in block


def test_the_range_of_speeds_is_the_tables():
    """The range is that of all machines in docs/performance.md, in the dtypes that have kernels."""
    page = (ROOT / "docs/performance.md").read_text()
    table = page.partition("<!-- machines:begin -->")[2].partition("<!-- machines:end -->")[0]
    rows = "\n".join(row for row in table.splitlines() if "float64" not in row)
    ratios = [float(ratio) for ratio in re.findall(r"([\d.]+)x[ ,]", rows)]
    low, high = re.search(r"run ([\d.]+) to (\d+) times as fast as torch", README).groups()
    assert (float(low), int(high)) == (min(ratios), int(max(ratios)))
    assert f"| speed on a CPU | {low} to {high} times torch's" in README
    slowest = re.findall(r"\(([\d.]+)\)", "".join(re.findall(r"^- .*The slowest: (.*?)\. ", page, re.MULTILINE)))
    (worst,) = re.findall(r"small calls: most that need a gradient \(at worst ([\d.]+) of its speed\)", README)
    assert float(worst) == min(map(float, slowest))


def test_what_is_said_of_the_gpu_is_what_was_measured():
    """Ahead of flash attention, behind cuDNN's where it is dense, without dropout or with a backward pass; rows."""
    rows = [row for row in report.read(ROOT / "benchmarks/results.csv") if row.isa == "sm_90"]
    attention = [row for row in rows if row.case.startswith("attention bfloat16") and "from Python" not in row.case]
    assert min(row.ratio for row in attention if row.peer == "flash") > 1
    ours_is_behind = [
        row.ratio for row in attention
        if row.peer == "cudnn" and "padding" not in row.case and ("dropout" not in row.case or "backward" in row.case)
    ]  # fmt: skip
    assert len(ours_is_behind) > 5
    assert max(ours_is_behind) < 1
    large = {row.case: row.share for row in rows if " 16384x" in row.case}
    assert len(large) >= 10
    assert min(large.values()) >= 0.7 - 5e-4  # seven tenths, rounded
    tests = {row.case: row.value for row in rows if row.case.startswith("tests on a GPU: ")}
    passed, failed, every = (tests[f"tests on a GPU: {name}"] for name in ("passed", "failed", "all"))
    assert (round(passed / every, 1), failed) == (0.1, 1)


def test_what_is_said_of_torch_holds():
    """The rows of the first table that this machine's torch can show."""
    query, visible = torch.randn(1, 2, 4, 8), torch.ones(4, 4, dtype=torch.bool).tril()
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(RuntimeError, match="attn_mask should not be set when is_causal"):
        F.scaled_dot_product_attention(query, query, query, visible, is_causal=True)
    F.scaled_dot_product_attention(query, query, query, visible, is_causal=True)  # the CPU's flash attention has both
    visible[:, 3], query[:, :, 3] = False, torch.nan
    assert F.scaled_dot_product_attention(query[:, :, :3], query, query, visible[:3]).isnan().all()
    assert not fastattn.scaled_dot_product_attention(query[:, :, :3], query, query, visible[:3]).isnan().any()


def test_python_blocks_run():
    """One after the other in one namespace, as a reader would paste them."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(block, namespace)
