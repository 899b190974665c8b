"""The scripts of benchmarks/ measure the code that they name, and the pages show their rows."""

import dataclasses
import importlib
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from conftest import slow

from fastattn import TransformerConfig
from fastattn.bench import report
from fastattn.bench.cases import FLOORED
from fastattn.bench.report import Row
from fastattn.translation.config import TrainingConfig
from fastattn.translation.data import Sentences
from fastattn.translation.evaluate import smoothed_loss
from fastattn.translation.tokenizer import PAD_ID

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
accuracy, decoding, gradients, pages, programs, small_calls, translation = map(
    importlib.import_module,
    ("accuracy", "decoding", "gradients", "pages", "test_programs", "small_calls", "translation"),
)
sys.path.remove(str(ROOT / "benchmarks"))
ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-9, torch.float16: 2**-12}


# --- accuracy ---


@pytest.mark.parametrize("case", accuracy.cases((64,)), ids=lambda case: case.name)
def test_ours_is_at_most_twice_as_far_as_torch(case):
    """Beside a rounding of each result; and none is exact, as it would be if the truth were computed in the dtype."""
    for ours, torchs, *_ in accuracy.measure(case).values():
        assert 0 < ours < 2 * torchs + ROUNDING[case.dtype]


# --- small calls ---


def test_small_calls_are_compared_with_the_same_operation(monkeypatch):
    """Ours, torch's and the bare function have one result and one gradient. Without dropout: each drops others."""
    monkeypatch.setattr(small_calls, "P", 0.0)
    for name, *functions, shapes in small_calls.cases():
        tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
        grad = torch.randn(functions[0](*tensors).shape)
        found = [(call(*tensors), *small_calls.both_passes(call, tensors, grad)()) for call in functions]
        for other in found[1:]:
            torch.testing.assert_close(found[0], other, msg=lambda text, name=name: f"{name}: {text}")


def test_the_table_of_small_calls(monkeypatch, capsys):
    times = {
        "dropout (4, 64)": [50.0, 25.0, 48.0],
        "dropout (1, 1)": [40.0, 80.0, 40.0],
        "layer_norm (1, 64)": [90.0, 59.0, 80.0],
    }
    monkeypatch.setattr(small_calls, "measure", lambda *options: times)
    monkeypatch.setattr(small_calls, "DTYPES", (torch.float32,))
    monkeypatch.setattr(sys, "argv", ["small_calls.py"])
    with pytest.raises(SystemExit, match="layer_norm") as ended:
        small_calls.main()
    assert "dropout" not in str(ended.value)
    rows = capsys.readouterr().out.splitlines()[2:]
    assert rows[0] == "| dropout | 2 | 25 us | 0.50, 1.00 | 0.96, 0.98 |"
    assert rows[2].startswith("| all | 3 | 31 us | 0.50, 0.87 |")


# --- gradients along a training run ---


@pytest.mark.parametrize("setting", ["with biases", *slow("without biases")])
def test_gradients_are_as_exact_as_the_math_backends(setting):
    """All three begin with the same model, and biases are what torch's flash backend loses them to."""
    rows = {name: gradients.train(setting, name, 0, 1) for name in gradients.BACKENDS}
    for flash, exact, ours in zip(*rows.values(), strict=True):
        assert flash["loss"] == exact["loss"] == ours["loss"]
        assert all(0 < ours[f"{part}_error"] < 1.75 * exact[f"{part}_error"] for part in gradients.PARTS)
        assert (flash["query_error"] > 5 * exact["query_error"]) == (setting == "with biases")


@pytest.mark.slow
def test_biases_leave_the_model_as_it_was():
    first, second = (gradients.train(setting, "fastattn", 0, 1)[0]["loss"] for setting in gradients.DEVIATIONS)
    assert first == pytest.approx(second, rel=1e-6)


@pytest.mark.slow
def test_curves_of_training_runs_are_written_and_shown(tmp_path, monkeypatch):
    command = [sys.executable, ROOT / "benchmarks/gradients.py", "--updates", "1", "--every", "1", "--processes", "1"]
    monkeypatch.setattr(pages, "GRADIENTS", tmp_path / "gradients.csv")
    subprocess.run([*command, "--results", pages.GRADIENTS], check=True, cwd=ROOT)
    rows = pages.gradient_rows()
    assert len(rows) == 2 * 3 * 2 * gradients.LAYERS
    assert len(pages.gradients(rows).splitlines()) == 2 + 2 + 2 * 3
    pages.curves(rows)


def test_gradients_are_as_accurate_as_the_math_backends():
    """In every regime. The operands are few, so the factor is larger than for many. If the mean of the keys changes
    along the sequence, 16-bit dQ is only nearer than that of torch's flash kernel."""
    for case, regime, tensors in accuracy.regimes((1, 2, 32, 16)):
        if case.operation == "attention":
            found = accuracy.measure(case, tensors, 0.5)
            is_moving = regime in accuracy.MOVING and case.dtype != torch.float32
            parts = accuracy.GRADIENTS[is_moving:]
            assert all(found[part][0] < 3 * found[part][2] for part in parts), regime
            assert not is_moving or 5 * found["dQ"][0] < found["dQ"][1]


# --- a training step ---


def test_shares_are_of_the_time_that_passes():
    """A floor of docs/design.md is a share of products: time between operations must lower it."""
    a = torch.ones(300, 300)

    def update(pause):
        for _ in range(5):
            a @ a
        time.sleep(pause)

    busy, idle = (programs.shares(lambda pause=pause: update(pause), 3) for pause in (0.0, 0.3))
    for found in (busy, idle):
        assert sum(found.values()) == pytest.approx(1.0)
        assert found["matrix products"] > 0
    assert idle["matrix products"] < 0.2 < idle[programs.REST]


# --- training and translating ---


@pytest.fixture
def model():
    config = TransformerConfig(50, d_model=16, d_ff=32, num_heads=2, encoder_layers=1, decoder_layers=1, dropout=0.0)
    enabled = torch.backends.mha.get_fastpath_enabled()  # the model turns it off in the whole process
    yield translation.TorchTransformer(dataclasses.replace(config, norm_first=True))
    torch.backends.mha.set_fastpath_enabled(enabled)


@pytest.fixture
def text():
    ids = ([[4 + (7 * n + k) % 46 for k in range(n)] for n in range(*lengths)] for lengths in ((3, 63), (70, 10, -1)))
    return translation.OfLikeLengths(*map(Sentences.of, ids))


def test_torchs_loss_is_ours(model, text):
    """Value and gradients, padding and smoothing included: the two are trained towards the same."""
    batch = text.batch(torch.tensor([5, 17, 30]))
    parameters = list(model.parameters())
    features = model.packed_features(batch.source, batch.target)
    ours = smoothed_loss(*model.projection(features), batch.labels, 0.1, PAD_ID)[0]
    torchs = translation.TorchLoss(model, 0.1)(batch, None)[0]
    (value, grads), (wanted, wanted_grads) = (
        (loss.detach(), torch.autograd.grad(loss, parameters)) for loss in (ours, torchs)
    )
    torch.testing.assert_close(value.float(), wanted)
    torch.testing.assert_close(grads, wanted_grads, rtol=1e-4, atol=1e-5)  # float32 sums of 160 tokens, of size 1
    assert len(grads) == len(parameters) > 20


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_batches_of_like_lengths(text, seed):
    """Every pair once; within the budget; less padding than in the order of the text."""
    budget = 600
    found = list(text.batches(budget, seed and torch.Generator().manual_seed(seed)))
    assert sorted(torch.cat(found).tolist()) == list(range(60))

    def padding(batches):
        filled = rows = 0
        for index in batches:
            batch = text.batch(index)
            sides = [translation.padded(side.tokens, side) for side in (batch.source, batch.target)]
            assert max(side.numel() for side in sides) <= budget
            filled, rows = filled + batch.filled, rows + sum(side.numel() for side in sides)
        return 1 - filled / rows

    assert padding(found) < padding(torch.randperm(60, generator=torch.Generator().manual_seed(3)).split(6)) / 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_a_program_trains_and_translates(monkeypatch, kind):
    """On a few sentences for a fraction of a second; its figures are a line of README's table."""
    read = translation.read_parallel

    def first_lines(*paths):
        return tuple(side[: 300 if "train" in paths[0].name else 4] for side in read(*paths))

    monkeypatch.setattr(translation, "read_parallel", first_lines)
    monkeypatch.setattr(translation, "PRESETS", {"tiny": types.SimpleNamespace(vocab_size=300)})
    monkeypatch.setattr(translation.Search, "extra_tokens", 2)
    settings = dataclasses.replace(TrainingConfig.of_preset("tiny"), batch_tokens=256, save_every=1, precision="fp32")
    found = translation.by_turns({kind: translation.run(kind, 0.001, settings)})[kind]
    rows = translation.rows_of({"ours": found, "torch": found}, 0.001, report.here() | {"dtype": "float32"})
    assert 0 <= found["bleu"] <= 100
    assert len(rows) == 3
    rate = f"{1 / found['token']:,.0f}/s"
    assert f"| float32 | {rate} | torch | {rate} | 1.00 |" in pages.listing(rows, ".*target token")


@pytest.mark.slow
def test_decoding(tmp_path, monkeypatch, capsys):
    """Every program has its rate, here of the smallest model."""
    pytest.importorskip("ctranslate2")
    for name, value in {"PRESET": "tiny", "VOCABULARY": 300}.items():
        monkeypatch.setattr(decoding, name, value)
    options = ["--rounds", "1", "--seconds", "0.1", "--results", str(tmp_path / "results.csv")]
    monkeypatch.setattr(sys, "argv", ["decoding.py", *options])
    monkeypatch.setattr(decoding.Neighbours, "noise", lambda self: "")  # a busy machine's rows are recorded too
    decoding.main()
    speeds = [line for line in capsys.readouterr().out.splitlines() if line.startswith("decoding, ")]
    assert len(speeds) >= 2
    assert all("ctranslate2" in line for line in speeds)


# --- pages ---


def rows_of(case, ratio, *, machine="AMD EPYC (family 25, model 17)", isa="avx512_bf16", **columns):
    where = {"date": "2026-11-26", "machine": machine, "isa": isa, "threads": "2", "torch": "2.13.0+cpu"}
    return [Row(**where | {"case": case, "peer": "torch", "seconds": 1.0, "ratio": ratio} | columns)]


def test_every_recorded_row_can_be_shown():
    rows = report.read(pages.RESULTS)
    assert len(rows) == len(report.newest(rows)) > 2000
    assert {row.isa for row in rows} >= {*FLOORED, "avx2", "sm_90"}
    assert not [row for row in rows if row.low and not row.low <= row.ratio <= row.high]


def test_a_regime_has_its_errors_in_a_row():
    peers = ("torch", 2.0), ("torch math", 0.5)
    cells = [(part, *peer) for part in accuracy.GRADIENTS for peer in peers]
    case = "regime of attention on cpu, peaked, {}".format
    rows = [row for part, peer, ratio in cells for row in rows_of(case(part), ratio, peer=peer, value=2e-3)]
    assert f"| attention | cpu | peaked |  |{' 2.0e-03 / 4.0e-03 / 1.0e-03 |' * 3}" in pages.regimes(rows)


def test_what_a_gpu_must_reach_is_compared_with_what_was_measured():
    rows = [
        Row(case=case, peer="flash", seconds=1.0, ratio=ratio, share=share, note="copy")
        for case, ratio, share in (
            ("attention bfloat16 2x16x8192x128 forward", 1.2, 0.1),
            ("attention bfloat16 2x16x8192x128 forward+backward", 0.9, 0.1),
            ("layer_norm bfloat16 16384x1024 forward", 2.0, 0.85),
            ("attention bfloat16 9x8x9x64 padding by uneven lengths dropout 0.1 forward+backward", 2.0, 0.7),
        )
    ]
    found = [line.split(" | ")[-1] for line in pages.by_case(rows).splitlines()[2:]]
    assert [line.startswith("**missed:** ") for line in found] == [False, True, True, False]
