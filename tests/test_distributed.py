"""Updates that processes and parts share, which equal those computed whole, and folders that one run at a time
writes."""

import itertools
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from concurrent import futures
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import refused, this_torch
from launched import Launch
from test_cli import assert_same_run, failure, finish, step_of, train_arguments, until
from test_training import small_model, text, verses  # noqa: F401 (fixtures)
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import fastattn
import fastattn_command as cli
from fastattn.translation import checkpoint
from fastattn.translation.data import ParallelText, Sentences, read_lines
from fastattn.translation.distributed import LAUNCH, REFUSED, START, World, _agreed_start, joined
from fastattn.translation.evaluate import scores
from fastattn.translation.search import Search, translate
from fastattn.translation.tokenizer import PAD_ID
from fastattn.translation.train import Trainer, TrainingConfig, _configured, dropout_seeds, read_metrics, train


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Return a hand-written configuration. Its model is small, so that checkpoints are small."""
    path = tmp_path_factory.mktemp("config") / "small.json"
    sizes = {"d_model": 32, "d_ff": 64, "num_heads": 4, "encoder_layers": 1, "decoder_layers": 1}
    path.write_text(json.dumps({"vocab_size": 1000, **sizes, "training": {"preset": "small", "warmup": 400}}))
    return path


@pytest.fixture
def changed(config, tmp_path):
    """Return a function that writes the configuration with other fields of training."""

    def changed(**fields):
        content = json.loads(config.read_text())
        content["training"] |= fields
        (tmp_path / "changed.json").write_text(json.dumps(content))
        return tmp_path / "changed.json"

    return changed


@pytest.fixture
def trained(pairs):
    """Return a function that trains on the pairs in several processes and returns what they say."""
    return lambda processes, out, *options: finish(launch(processes, train_arguments(pairs, out, *options)))


def launch(processes, arguments, restarts=0):
    """Start `fastattn` in `processes` processes, as `torchrun` would."""
    return Launch(processes, restarts, cli.main, list(map(str, arguments)))


# --- one process ---


def test_an_update_in_parts(text):  # noqa: F811
    """An update in parts has the gradient of the whole update's loss. The test writes that loss out: four batches from
    the text, each with its own dropout, divided by the tokens of all."""
    config = TrainingConfig(batch_tokens=600, micro_batches=4, warmup=1, precision="fp32", seed=3)
    trainer = Trainer(small_model(), text, config)
    start = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    found = trainer.update()

    model, loss, batches = small_model().train(), 0, []
    for number, (_, _, index) in enumerate(itertools.islice(text.epochs(150, seed=3), 4)):
        batch = text.batch(index)
        seeds = dropout_seeds(3, 1, number, model.dropout_sites)
        logits = model.logits(model.packed_features(batch.source, batch.target, seeds=seeds))
        loss += F.cross_entropy(logits, batch.labels, ignore_index=PAD_ID, label_smoothing=0.1, reduction="sum")
        batches.append(batch)
    tokens = sum(batch.tokens for batch in batches)
    assert found[0].item() == pytest.approx(loss.item(), rel=1e-5)
    sides = torch.cat([side for batch in batches for side in (batch.source.tokens, batch.labels)])
    assert found[3:].tolist() == [tokens, (sides != PAD_ID).sum(), len(sides)]
    gradients = torch.autograd.grad(loss / tokens, list(model.parameters()))
    for parameter, before, gradient in zip(trainer.model.parameters(), start, gradients, strict=True):
        # Adam's first moment is a tenth of the first gradient. The padding's row has no gradient in training.
        ours, wanted = trainer.optimizer.state[parameter]["exp_avg"] * 10, gradient
        if parameter is trainer.model.output.weight:
            ours, wanted = ours[PAD_ID + 1 :], wanted[PAD_ID + 1 :]
        assert (ours - wanted).norm() <= 1e-5 * wanted.norm()
        assert not torch.equal(parameter, before)


def test_a_process_reads_its_share_of_an_update(text, monkeypatch):  # noqa: F811
    """Each of two processes reads every second batch of an update, and none of the other's."""
    config = TrainingConfig(batch_tokens=600, micro_batches=4, warmup=1, precision="fp32")
    make, read = type(text).batch, []

    def batch(self, index):
        read[-1].append(index.tolist())
        return make(self, index)

    monkeypatch.setattr(type(text), "batch", batch)
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        read.append([])
        trainer = Trainer(small_model(), text, config)
        trainer.world = World(rank, size, torch.device("cpu"))
        trainer.update()
    whole, *shares = read
    assert len(whole) == 4
    assert shares == [whole[0::2], whole[1::2]]


def test_an_update_goes_on_into_the_next_epoch(text):  # noqa: F811
    """Every epoch has each batch once, whether or not the micro-batches of an update divide their number."""
    config = TrainingConfig(batch_tokens=4000, micro_batches=4, warmup=1000, precision="fp32")
    trainer, seen, updates = Trainer(small_model(), text, config), 0, 12
    for _ in range(updates):
        seen += trainer.update()[3].item()
    *_, (epoch, place, _) = taken = list(itertools.islice(text.epochs(1000, config.seed), 4 * updates))
    assert (trainer.epoch, trainer.place) == (epoch, place + 1)
    assert seen == sum(int(text.targets.lengths_of(index).sum()) for _, _, index in taken)
    first = torch.cat([index for epoch, _, index in taken if epoch == 0])
    assert sorted(first.tolist()) == list(range(300))
    assert sum(epoch == 0 for epoch, _, _ in taken) % 4


def test_the_gradient_is_clipped(text):  # noqa: F811
    moments = []
    for norm in (None, 1e-3):
        config = TrainingConfig(batch_tokens=600, precision="fp32", clip_norm=norm)
        trainer = Trainer(small_model(), text, config)
        trainer.update()
        moments.append(torch.cat([10 * s["exp_avg"].flatten() for s in trainer.optimizer.state.values()]))
    whole, clipped = moments
    assert whole.norm() > 0.1
    assert clipped.norm() == pytest.approx(1e-3, rel=1e-4)
    torch.testing.assert_close(clipped, whole * (1e-3 / whole.norm()), rtol=1e-4, atol=1e-9)


def test_a_configuration_is_given_back_and_resumed(pairs, config, tmp_path, capsys, monkeypatch):
    """The checkpoint holds the whole configuration. A run begun with that file is the same run, and a resumed run keeps
    it."""
    options = ["--config", str(config), "--label-smoothing", "0.2", "--clip-norm", "0.5", "--seed", "5"]
    options += ["--accumulate", "2", "--keep", "1", "--save-every", "1"]
    first, second = tmp_path / "first", tmp_path / "second"
    assert cli.main(train_arguments(pairs, first, *options, "--max-steps", "2")) == 0
    assert [path.name for path in checkpoint.steps(first)] == ["step-00000002"]
    config = tmp_path / "config.json"
    config.write_bytes((first / "best/config.json").read_bytes())
    assert json.loads(config.read_text())["training"] == {
        **{"preset": "small", "batch_tokens": 300, "micro_batches": 2, "warmup": 400, "rate": 1, "precision": "fp32"},
        **{"label_smoothing": 0.2, "clip_norm": 0.5, "seed": 5, "max_steps": 2, "max_minutes": None, "save_every": 1},
        **{"bleu_every": None, "keep": 1, "normalization": "nmt_nfkc", "target_normalization": "identity"},
    }
    train(pairs, pairs, first, resume=True, max_steps=3)
    train(pairs, pairs, second, config=config, max_steps=3)
    assert_same_run(first, second)
    capsys.readouterr()

    # torchrun repeats the command that began the run, on fewer processes if some are lost. The repeated command
    # continues only the run of its own launch.
    begun = train_arguments(pairs, second, *options, "--max-steps", "3", "--accumulate", "1")
    assert "exists already" in failure(begun, capsys)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    for launch, status in (("another", 1), ("this", 0)):
        store = dist.HashStore()
        store.set(LAUNCH, "this")
        monkeypatch.setattr(dist, "rendezvous", lambda *args, store=store, **options: iter([(store, 0, 1)]))
        (second / checkpoint.LOCK).write_text(f"process 1 on a machine\n{launch}")
        assert cli.main(begun) == status
        assert ("exists already" in capsys.readouterr().err) == (status == 1)
    assert_same_run(first, second)
    monkeypatch.undo()

    capsys.readouterr()
    again, new = ["train", "--train", *pairs, "--valid", *pairs, "--out"], tmp_path / "new"
    parts = "3 makes 3 micro-batches of an update (number of processes: 1) but the run"
    for message, *more in (
        ("expected one of them", new, "--config", config, "--preset", "tiny"),
        (f"cannot read {tmp_path / 'none'}: No such file", new, "--config", tmp_path / "none"),
        ("argument --accumulate: 0 is given, expected a positive number", new, "--accumulate", "0"),
        ("one for each of the 4 micro-batches of an update", new, "--batch-tokens", "3", "--accumulate", "4"),
        ("leave --config out", first, "--resume", "--config", config),
        (f"--accumulate {parts}", first, "--resume", "--accumulate", "3"),
        ("clip_norm is 1.0 but the run to resume has 0.5", first, "--resume", "--clip-norm", "1"),
        ("a model is sharded among several processes: start them with torchrun", new, "--shard"),
    ):
        assert message in failure([*again, *more], capsys)
    assert not new.exists()


def test_bleu_while_training(pairs, config, tmp_path, capsys):
    """BLEU of the validation text is computed when it is due and at the end, by the weights of that update."""
    valid = [tmp_path / "en", tmp_path / "es"]
    for path, lines in zip(valid, map(read_lines, pairs), strict=True):
        path.write_text("\n".join(lines[:3]), encoding="utf-8")
    options = {"vocab_size": 200, "batch_tokens": 200, "precision": "fp32", "config": config}
    train(pairs, valid, tmp_path / "run", bleu_every=2, max_steps=3, **options)
    assert "validation BLEU" in capsys.readouterr().err
    rows = read_metrics(tmp_path / "run")
    scored = [(row["step"], "valid_loss" in row, "valid_bleu" in row) for row in rows]
    assert scored == [(2, False, True), (3, True, True)]
    model, tokenizer = checkpoint.load(tmp_path / "run")
    sources, references = map(read_lines, valid)
    assert rows[-1]["valid_bleu"] == scores(translate(model, tokenizer, sources, Search(beam=1)), references).bleu


def test_one_process_writes_a_run(tmp_path, capsys, pairs):
    """A second process is told which process writes the run. The lock ends with its holder, even if that is killed."""
    processes = multiprocessing.get_context("fork")
    is_locked = processes.Event()

    def hold():
        with checkpoint.locked(tmp_path / "run"):
            is_locked.set()
            time.sleep(600)

    holder = processes.Process(target=hold)
    holder.start()
    try:
        assert is_locked.wait(60)
        message = failure(train_arguments(pairs, tmp_path / "run", "--max-steps", "1"), capsys)
        assert f"{tmp_path / 'run'} is being written by process {holder.pid} on " in message
        assert checkpoint.is_new(tmp_path / "run")
    finally:
        holder.kill()
        holder.join()
    with checkpoint.locked(tmp_path / "run"):
        refused(f"by process {os.getpid()} on", checkpoint.locked(tmp_path / "run").__enter__)


# --- several ---


@pytest.mark.slow
@pytest.mark.torch_version
@pytest.mark.parametrize("shard", [*this_torch([]), ["--shard"]], ids=str)
def test_processes_train_as_one(trained, config, tmp_path, shard):
    """Two processes, in two parts each, train as one in four parts: moments and metrics agree, with dropout.

    Gradients are clipped by the norm of all of them. Each continues the other's checkpoint. Every process takes part in
    validation and BLEU, and holds half of a sharded model."""
    options = ["--batch-tokens", "1200", "--clip-norm", "0.5", "--save-every", "1", "--bleu-every", "2", "--max-steps"]
    one, two = tmp_path / "one", tmp_path / "two"
    trained(1, one, *options, "2", "--accumulate", "4", "--config", config)
    said = trained(2, two, *options, "2", *shard, "--accumulate", "2", "--config", config)
    assert ("M parameters (50% of them a process)" in said) == bool(shard)
    assert_same_to_rounding(one, two)
    trained(2, one, *options, "3", *shard, "--resume")
    trained(1, two, *options, "3", "--resume")
    assert_same_to_rounding(one, two)
    assert read_metrics(one)[-1]["epoch"] > 0  # the text ended within an update


def assert_same_to_rounding(one, other):
    """Assert that two runs whose sums over processes differ agree to rounding.

    Compared are the moments of the newest checkpoints, and the metrics."""
    states = [checkpoint.load_training(checkpoint.newest(run))["optimizer"]["state"] for run in (one, other)]
    assert states[0].keys() == states[1].keys()
    for name in ("exp_avg", "exp_avg_sq"):
        a, b = (torch.cat([state[name].flatten() for state in run.values()]) for run in states)
        assert (a - b).norm() < 1e-4 * a.norm()
    for a, b in zip(read_metrics(one), read_metrics(other), strict=True):
        assert (a.keys(), a["epoch"]) == (b.keys(), b["epoch"])
        for metric in {"loss", "accuracy", "padding", "valid_loss", "valid_accuracy", "valid_bleu"} & a.keys():
            assert b[metric] == pytest.approx(a[metric], rel=1e-5, abs=1e-3 if "acc" in metric else 1e-6)


@pytest.mark.slow
def test_resumed_on_three_processes_to_the_same_bits(trained, config, tmp_path):
    """Three processes resume to the same bits, although the order of a sum over processes matters. Afterwards one
    process may resume the run."""
    options = ["--batch-tokens", "900", "--save-every", "2", "--max-steps"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    trained(3, whole, *options, 4, "--config", config)
    trained(3, broken, *options, 2, "--config", config)
    trained(3, broken, *options, 4, "--resume")
    assert_same_run(whole, broken)
    assert checkpoint.load_config(checkpoint.newest(broken))[1].micro_batches == 3
    trained(1, broken, *options, 5, "--resume")
    assert checkpoint.newest(broken).name == "step-00000005"


@pytest.mark.parametrize(("said", "processes", "parts"), [({}, 2, 2), ({"micro_batches": 4}, 2, 4), ({}, 1, 1)])
def test_a_file_may_say_how_an_update_is_divided(changed, said, processes, parts):
    assert _configured(None, changed(precision="fp32", **said), None, {}, processes)[1].micro_batches == parts


def test_the_file_of_a_run_of_one_process_is_not_another_run_on_two(changed):
    """Another number of parts has other batches and other dropout, so it must be requested by --accumulate."""
    given, message = changed(micro_batches=1), r"an update of 1 micro-batches cannot be divided among 2 .* --accumulate"
    refused(message, _configured, None, given, None, {}, 2)
    assert _configured(None, given, 1, {}, 2)[1].micro_batches == 2


@pytest.mark.slow
def test_what_cannot_be_done_is_refused_once(pairs, config, changed, tmp_path):
    """A refusal appears once, although `torchrun` restarts the processes. The run that stood in the way does not
    change."""
    run = tmp_path / "run"
    train(pairs, pairs, run, config=config, max_steps=2)
    newest = checkpoint.newest(run)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    for processes, out, of, message in (
        (2, run, config, "exists already"),
        (1, run, config, "exists already"),
        (2, tmp_path / "new", changed(micro_batches=3), "3 micro-batches cannot be divided among 2 processes"),
    ):
        process = launch(processes, train_arguments(pairs, out, "--max-steps", 9, "--config", of), restarts=1)
        assert finish(process, status=1).count(message) == 1
    assert checkpoint.newest(run) == newest
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert not (tmp_path / "new").exists()


def test_a_process_without_a_gpu_is_refused_once(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda *args, **options: iter([(store, 1, 3)]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2", "TORCHELASTIC_RUN_ID": "launch"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="1"):
        joined().__enter__()
    assert not store.check([REFUSED])
    monkeypatch.setenv("LOCAL_RANK", "1")
    refused("there is no GPU for process 2 here: at most 1 processes", joined().__enter__)
    with pytest.raises(SystemExit):
        joined().__enter__()


@pytest.mark.parametrize("size", ["2", "many"])
def test_processes_that_nobody_started(monkeypatch, size):
    monkeypatch.setenv("WORLD_SIZE", size)
    refused("WORLD_SIZE is set, but no torchrun started this: unset it", joined().__enter__)


def test_processes_agree_on_their_start():
    """Processes agree on their start in any order of arrival and for any number of them. An earlier start may have left
    entries in the store."""
    store, starts = dist.HashStore(), []
    store.set(START, "of a start whose processes never met")
    for size, ranks in ((2, (1, 0)), (2, (0, 1)), (3, (2, 1, 0)), (2, (1, 0))):
        with futures.ThreadPoolExecutor(size) as pool:
            found = []
            for rank in ranks:
                found.append(pool.submit(_agreed_start, store, rank, size))
                time.sleep(0.2)
            starts.append({future.result(timeout=60) for future in found})
    assert all(len(names) == 1 for names in starts)
    assert len(set.union(*starts)) == 4


def sharded_state():
    """Train a sharded model for one update and check the state of its optimiser in this process."""
    sentences = Sentences.of([[5, 6, 7]] * 20)
    with joined() as world:
        config = TrainingConfig(micro_batches=2, precision="fp32")
        trainer = Trainer(small_model(), ParallelText(sentences, sentences), config, world, shard=True)
        trainer.update()
        shapes = [parameter.shape for parameter in trainer.model.parameters()]
        moments = trainer.state()["optimizer"]["state"]
        for number, shape in enumerate(shapes):
            for name in ("exp_avg", "exp_avg_sq"):
                assert moments[number][name].shape == (shape if world.main else (0,))
                assert not isinstance(moments[number][name], DTensor)
                assert moments[number][name].untyped_storage().nbytes() == (4 * shape.numel() if world.main else 0)


@pytest.mark.slow
def test_the_state_of_a_sharded_model_is_gathered_by_the_first_process():
    """The first process gets the state of all parameters. The other one keeps nothing of a tensor when the next is
    gathered."""
    finish(Launch(2, 0, sharded_state))


@pytest.mark.slow
@pytest.mark.torch_version
def test_fewer_validation_sentences_than_processes(pairs, trained, config, tmp_path):
    """A process without validation sentences takes part in validation and BLEU."""
    valid = [tmp_path / "en", tmp_path / "es"]
    for path, lines in zip(valid, map(read_lines, pairs), strict=True):
        path.write_text(f"{lines[5]}\n")
    rows = []
    for processes in (1, 2):
        options = ["--config", config, "--accumulate", 2 // processes, "--max-steps", "2", "--bleu-every", "2"]
        trained(processes, tmp_path / f"{processes}", *options, "--valid", *valid)
        rows.append(read_metrics(tmp_path / f"{processes}")[-1])
    for metric in ("valid_loss", "valid_accuracy", "valid_bleu"):
        assert rows[1][metric] == pytest.approx(rows[0][metric], rel=1e-5)


@pytest.mark.slow
def test_interrupted_processes_save_together(pairs, config, tmp_path):
    """`torchrun` itself passes SIGINT on to processes of the command."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "fastattn"]
    arguments = train_arguments(pairs, tmp_path / "run", "--save-every", "100000", "--config", str(config))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = Path(fastattn.__file__).parent.parent
    process = subprocess.Popen([*launcher, *arguments], stderr=subprocess.PIPE, cwd=root, env=environment, text=True)
    until(process, "update 20: ")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=600)
    step = step_of(tmp_path / "run")
    assert step >= 20
    assert err.count(f"interrupted after update {step}, which is saved") == 1


@pytest.mark.slow
def test_killed_workers_are_started_again(pairs, trained, config, tmp_path):
    """torchrun's agent restarts workers that SIGKILL has ended, and they continue from the newest checkpoint.

    One of two workers is killed four times, at any moment: before the first checkpoint, between two or while one is
    written. The final bits are those of an undisturbed run."""
    whole, broken, moments = tmp_path / "whole", tmp_path / "broken", random.Random(3)
    options = ["--save-every", "2", "--max-steps", "100000"]
    process = launch(2, train_arguments(pairs, broken, *options, "--config", config), restarts=4)
    steps = []
    for kill in range(5):  # it does not recover from the last one
        if kill > 0:
            until(process, "small: ")
        if kill % 3 == 2:
            until(process, "update ")
        time.sleep(moments.uniform(0, 0.5))
        os.kill(moments.choice(workers(process.pid)), signal.SIGKILL)
        steps.append(step_of(broken))
    assert steps == sorted(steps)
    process.communicate(timeout=600)
    assert process.returncode != 0
    step = step_of(broken)
    assert step > 0
    for run, *more in ((broken, "--resume"), (whole, "--config", config)):
        trained(2, run, "--save-every", "2", "--max-steps", step + 2, *more)
    assert_same_run(whole, broken)


def workers(agent):
    """Return the ids of the agent's two workers, as soon as they are there."""
    while len(found := Path(f"/proc/{agent}/task/{agent}/children").read_text().split()) != 2:
        time.sleep(0.05)
    return list(map(int, found))
