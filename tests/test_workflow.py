"""The public host's workflow does what .ci/run does, divided into jobs."""

import re
from pathlib import Path

import fastattn
import torch_versions

ROOT = Path(__file__).resolve().parent.parent
RUN = (ROOT / ".ci/run").read_text()
WORKFLOW = (ROOT / ".github/workflows/ci.yml").read_text()
JOBS = dict(re.findall(r"^  (\w+):\n((?:    .*\n|\n)+)", WORKFLOW.partition("\njobs:\n")[2], re.MULTILINE))


RELEASE = (ROOT / ".github/workflows/release.yml").read_text()


def test_the_release_is_built_tested_and_published_from_its_tag():
    """Only the job that publishes may ask for a token, only for a tag, and only after the tests."""
    assert re.findall(r"^  (\w+):$", RELEASE.partition("\njobs:\n")[2], re.MULTILINE) == ["build", "test", "publish"]
    before, publish = RELEASE.split("\n  publish:\n")
    assert "id-token" not in before
    assert "needs: test\n    if: github.ref_type == 'tag'" in publish
    assert "make wheels" in before
    assert {*re.findall(r'torch: "(.*?)"', before)} >= set(torch_versions.VERSIONS)
    assert f'-m "{torch_versions.MARKS}"\n          -k "{torch_versions.TESTS}"' in before
    assert {*re.findall(r'python: "(.*?)"', before)} == {"3.10", "3.11", "3.12", "3.13"}
    assert "cuda-nvcc-12-" in before, "a library of CUDA 13 needs a driver of CUDA 13"


def test_the_version_is_in_one_place():
    """The package states it, and the changelog has its newest section for it, with a date."""
    newest = re.findall(r"^## (\S+) - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert newest[0] == fastattn.__version__
    assert 'version = { attr = "fastattn.__version__" }' in (ROOT / "pyproject.toml").read_text()
    assert fastattn.__version__ not in (ROOT / "pyproject.toml").read_text() + (ROOT / "CITATION.cff").read_text()


def test_jobs():
    assert list(JOBS) == ["lint", "tests", "versions", "kernels", "docs"]


def test_every_target_of_make_ci_has_a_job():
    targets = re.search(r"^\tfor target in (.*?); do", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    run = set(re.findall(r"run: make (\S+)", WORKFLOW))
    assert run == set(targets) - {"torch-versions"}
    assert "tools/torch_versions.py ${{ matrix.torch }}" in JOBS["versions"]


def test_the_versions_are_those_of_the_program():
    assert dict(re.findall(r'python: "(.*?)", torch: "(.*?)"', JOBS["versions"])) == {
        python: torch for torch, python in torch_versions.VERSIONS.items()
    }


def test_what_is_required():
    """The kernels' job has all that .ci/run requires, except the Pythons of the job of versions."""
    wanted = re.search(r"FASTATTN_REQUIRE=(\S+)", RUN)[1].split(",")
    found = re.search(r'FASTATTN_REQUIRE: "(.*?)"', JOBS["kernels"])[1].split(",")
    assert found == [name for name in wanted if name != "pythons"]
    assert "FASTATTN_REQUIRE: pythons" in JOBS["versions"]


def test_the_torch_is_readmes():
    wanted = re.search(r"torch==[\d.]+", (ROOT / "README.md").read_text())[0]
    assert set(re.findall(r"torch==[\d.]+", WORKFLOW + RELEASE)) == {wanted}
