"""Functions of fastattn.translation that take paths take their names as text too."""

import importlib
import inspect
import itertools
import json
import pkgutil
import re
from pathlib import Path

import pytest
import test_importing
from conftest import require_package

from fastattn import figures, files, translation
from fastattn.translation import checkpoint, data, plots, prepare
from fastattn.translation.export import to_ctranslate2, to_huggingface
from fastattn.translation.importing import import_model
from fastattn.translation.train import read_metrics, train

MODULES = [
    files,
    figures,
    *(
        importlib.import_module(f"fastattn.translation.{name}")
        for _, name, _ in pkgutil.iter_modules(translation.__path__)
    ),
]


def functions():
    """Yield the public functions of the modules, and the public methods of their classes."""
    for module in MODULES:
        own = [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]
        classes = [vars(value).values() for value in own if inspect.isclass(value)]
        for value in itertools.chain(own, *classes):
            function = inspect.unwrap(getattr(value, "__func__", value))
            if inspect.isfunction(function) and not re.search(r"\b_", function.__qualname__):
                yield function


def test_no_annotation_asks_for_a_path():
    parameters = [
        (f"{function.__qualname__}({parameter.name})", str(parameter.annotation))
        for function in functions()
        for parameter in inspect.signature(function).parameters.values()
    ]
    assert len([name for name, annotation in parameters if str(files.StrPath) in annotation]) > 30
    assert [name for name, annotation in parameters if "pathlib" in annotation] == []


@pytest.fixture
def run(pairs, tmp_path, monkeypatch):
    """Train a small model in a new current folder, with names only, and return the name of its run."""
    monkeypatch.chdir(tmp_path)
    shape = {"vocab_size": 200, "d_model": 32, "d_ff": 64, "encoder_layers": 1, "decoder_layers": 1}
    Path("small.json").write_text(json.dumps({**shape, "training": {"precision": "fp32", "batch_tokens": 1000}}))
    text = tuple(map(str, pairs))
    assert train(text, text, "run", config="small.json", max_steps=1) == Path("run/best")
    return "run"


def test_a_run_is_read_and_written_by_name(run, pairs):
    assert train(*[tuple(map(str, pairs))] * 2, run, resume=True, max_steps=2) == Path("run/best")
    assert [row["step"] for row in read_metrics(run)] == [1, 2]
    model, tokenizer = checkpoint.load(run)
    assert checkpoint.updates(run) == 2
    checkpoint.average(run, 1, "mean")
    checkpoint.save_model(model, tokenizer, "copy")
    checkpoint.save_int8(model, tokenizer, 2, "int8")
    for name in ("mean", "copy", "int8"):
        assert checkpoint.load(name)[0].config == model.config
    assert len(data.training_sources(run, tokenizer)) == 60
    to_huggingface(model, tokenizer, "marian")
    assert Path("marian/model.safetensors").exists()
    plots.loss_curve(read_metrics(run), "loss.png")
    plots.heat_maps(plots.attention_heads(model, tokenizer, "day", "día"), "heads.svg", "heads")
    assert Path("loss.png").exists()
    assert Path("heads.svg").exists()


def test_ctranslate2_is_written_by_name(run):
    require_package("ctranslate2")
    to_ctranslate2(*checkpoint.load(run), "ct2")
    assert Path("ct2/model.bin").exists()


def test_a_checkpoint_is_imported_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    test_importing.program("jadore", tmp_path / "trained.chkpt")
    words = [path.name for path in test_importing.word_files("jadore", tmp_path)]
    model, _ = import_model("trained.chkpt", *words)
    assert model.config.d_model == 24


def test_archives_are_looked_for_by_name(tmp_path, monkeypatch):
    """A file in the place of an archive is found under the folder's name, and refused for its size."""
    monkeypatch.chdir(tmp_path)
    Path("archives").mkdir()
    Path("archives", "training-parallel-europarl-v7.tgz").write_text("none")
    with pytest.raises(ValueError, match=r"archives/training-parallel-europarl-v7\.tgz has 4 bytes, expected"):
        prepare.prepare("wmt14-en-de", "archives", "out")
