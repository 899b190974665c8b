"""The scripts of benchmarks/ that only record: a run of each, as small as it gets, and the page that it makes."""

import contextlib
import gzip
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from fastattn import Transformer, TransformerConfig
from fastattn.bench import report
from fastattn.translation import data
from fastattn.translation.search import Search, beam_search

ROOT = Path(__file__).resolve().parent.parent


def load(name):
    specification = importlib.util.spec_from_file_location(name, ROOT / f"benchmarks/{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def first_lines(path, count):
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
        return "".join(line for line, _ in zip(file, range(count), strict=False))


@pytest.mark.slow
def test_an_hour_in_seconds(monkeypatch, tmp_path):
    """The number of checkpoints that are averaged is the best one on the validation text."""
    hour, verses, work = load("hour"), tmp_path / "verses", tmp_path / "work"
    verses.mkdir()
    work.mkdir()
    for language in ("en", "es"):
        with gzip.open(verses / f"train.{language}.gz", "wt") as file:
            file.write(first_lines(data.VERSES / f"train.{language}.gz", 300))
        for split in ("dev", "test"):
            (verses / f"{split}.{language}").write_text(first_lines(data.VERSES / f"{split}.{language}", 4))
    monkeypatch.setattr(data, "VERSES", verses)
    found = hour.run(work, 0.2, 300, 0.25, {"rate": 0.5, "batch_tokens": 128, "save_every": 1})
    assert found["model"]["dropout"] == 0.25
    assert (found["training"]["rate"], found["training"]["batch_tokens"]) == (0.5, 128)
    assert len(found["dev_bleu"]) > 1
    assert found["dev_bleu"][found["averaged"]] == max(found["dev_bleu"].values())
    assert 0 <= found["test"]["bleu"] <= 100
    assert [row["step"] for row in found["curve"]][:2] == [1, 2]
    page = hour.section(about() | found)
    assert "dropout 0.25, 300 pieces, batches of 128 tokens, rate 0.5. On the test text" in page
    assert f"by the mean of the last {found['averaged']} checkpoints, 1 updates apart" in page
    assert len(page.splitlines()) == 2 + 2 + 10
    worse = found | {"model": found["model"] | {"dropout": 0.5}, "dev_bleu": {1: -1.0}}
    kept = hour.better(found, worse)
    assert kept == found | {"tried": [hour.summary(found), hour.summary(worse)]}
    assert "; also tried: dropout 0.5, BLEU -1.0." in hour.section(about() | kept)
    assert hour.better(worse, found) == found | {"tried": [hour.summary(worse), hour.summary(found)]}
    assert len(hour.better(kept, worse)["tried"]) == 3
    assert hour.better(found, worse | {"minutes": 60.0}) == worse | {"minutes": 60.0}  # of other minutes: not a rival


def test_what_an_hour_keeps(monkeypatch, tmp_path):
    """The first result, the better one after it, and that one still after a worse, with all that was tried."""
    hour = load("hour")
    monkeypatch.setattr(hour, "ROOT", tmp_path)
    monkeypatch.setattr(hour.contest, "disturbed_by", lambda share: "")
    monkeypatch.setattr(sys, "argv", ["hour.py", "--record"])
    training = {"rate": 0.7, "batch_tokens": 2048, "save_every": 250}
    for dropout, bleu, kept, tried in ((0.1, 30.0, 30.0, None), (0.2, 31.0, 31.0, 2), (0.3, 29.0, 31.0, 3)):
        model = {"vocab_size": 8000, "dropout": dropout}
        result = {"minutes": 60.0, "dev_bleu": {"5": bleu}, "model": model, "training": training, "curve": []}
        monkeypatch.setattr(hour, "run", lambda *arguments, result=result: result)
        hour.main()
        (path,) = (tmp_path / "benchmarks/results").iterdir()
        found = json.loads(path.read_text())
        assert found["dev_bleu"] == {"5": kept}
        assert len(found.get("tried", [])) == (tried or 0)
    assert found["machine"] == report.machine()


@pytest.mark.slow
def test_decoding():
    """Every program has its rate, and the parts of a step are parts of the time."""
    command = [sys.executable, ROOT / "benchmarks/decoding.py", "--rounds", "1", "--tokens", "25", "--seconds", "0.1"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    rates = {name: values for name, *values in cells if re.match("fastattn (fp32|bf16)$", name)}
    assert "fastattn fp32" in rates
    assert all(float(rate) > 0 for values in rates.values() for rate in values)
    shares = [values for name, *values in cells if name in load("decoding").PARTS or name.startswith("the search")]
    assert len(shares) == 6
    for case in zip(*shares, strict=True):
        assert sum(int(share.rstrip("%")) for share in case) == pytest.approx(100, abs=3)  # six of them, rounded
        assert all(0 <= int(share.rstrip("%")) <= 100 for share in case)


@torch.no_grad()
def test_every_function_of_a_decoding_step_is_called():
    """Those whose seconds are counted, in a model of either kind of norm."""
    called = set()

    def counted(function):
        def call(*args, **kwargs):
            called.add(function)
            return function(*args, **kwargs)

        return call

    functions = [place for places in load("decoding").PARTS.values() for place in places]
    wanted = {getattr(owner, name) for owner, name in functions}
    with contextlib.ExitStack() as patches:
        for owner, name in functions:
            patches.enter_context(mock.patch.object(owner, name, counted(getattr(owner, name))))
        for norm_first in (False, True):
            config = TransformerConfig.preset("tiny", 50, norm_first=norm_first, encoder_layers=1, decoder_layers=1)
            beam_search(Transformer(config).eval(), torch.tensor([[5, 6, 7]]), torch.tensor([3]), Search(beam=2))
    assert called == wanted


def test_a_page_without_a_rival():
    """It does not explain figures that are not there."""
    decoding = load("decoding")
    result = {
        "tokens_per_second": dict.fromkeys(decoding.CASES, 7.0),
        "shares": {case: dict.fromkeys(decoding.PARTS, 0.1) for case in decoding.CASES},
    }
    data = about() | {"tokens": 25, "results": {"fastattn fp32": result}}
    assert "CTranslate2" not in decoding.section(data)
    data["results"]["ctranslate2 float32"] = result
    assert "CTranslate2" in decoding.section(data)
    assert "| ctranslate2 float32 | 7, 1.00x | 7, 1.00x |" in decoding.section(data)


def about():
    """What a recorded file says of where it comes from."""
    return {"machine": report.machine(), "versions": {"torch": "2.13.0"}, "date": "2026-11-26"}
