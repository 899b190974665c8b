"""The `fastattn` command: its results, its messages for bad input, and resuming a killed run to the same bits."""

import ast
import errno
import functools
import gzip
import io
import json
import os
import pkgutil
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import safetensors
import torch
import tqdm
from conftest import slow

import fastattn
import fastattn_command as cli
from fastattn import demo, files
from fastattn.bench import report
from fastattn.cli import COMMANDS
from fastattn.translation import checkpoint
from fastattn.translation.data import read_lines, verses
from fastattn.translation.train import read_metrics


def train_arguments(files, out, *more):
    sizes = ["--vocab-size", "200", "--batch-tokens", "300", "--precision", "fp32"]
    files = list(map(str, files))
    return ["train", "--train", *files, "--valid", *files, "--out", str(out), *sizes, *more]


@pytest.fixture(scope="module")
def run(pairs, tmp_path_factory):
    """Train a small model for two updates and return the folder of the run."""
    folder = tmp_path_factory.mktemp("runs")
    sizes = {"d_model": 32, "d_ff": 64, "num_heads": 4, "encoder_layers": 2, "decoder_layers": 2}
    (folder / "small.json").write_text(json.dumps({"vocab_size": 200, **sizes, "training": {"preset": "tiny"}}))
    out = folder / "run"
    run_command(*train_arguments(pairs, out, "--config", str(folder / "small.json"), "--max-steps", "2"))
    return out


@pytest.fixture
def day(tmp_path):
    """Return a file with the line "day"."""
    (tmp_path / "day").write_text("day\n")
    return tmp_path / "day"


def run_command(*arguments):
    """Run a command, which must succeed."""
    assert cli.main([str(argument) for argument in arguments]) == 0


def standard_input(monkeypatch, text):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    return sys.stdin


def failure(arguments, capsys):
    """Return the error of a command that fails: one line, the last on stderr."""
    try:
        status = cli.main([str(argument) for argument in arguments])
    except SystemExit as exit_:
        status = exit_.code
    out, err = capsys.readouterr()
    assert status not in (0, None)
    assert out == ""
    *said, error = err.splitlines()
    assert all(line.startswith("learning a vocabulary of ") for line in said), err
    return error


def assert_failures(capsys, *cases):
    for message, *arguments in cases:
        assert message in failure(arguments, capsys)


def snapshot(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_translate(run, pairs, tmp_path, capsysbinary, monkeypatch):
    text = "\n".join(read_lines(pairs[0])[:3])
    packed, plain = tmp_path / "in.gz", tmp_path / "o"
    packed.write_bytes(gzip.compress(text.encode()))
    search = ["--beam", "2", "--length-penalty", "1", "--batch-size", "2"]
    run_command("translate", run, "--input", packed, *search)
    printed = capsysbinary.readouterr().out
    assert printed.count(b"\n") == 3
    for output in (plain, tmp_path / "o.gz"):
        run_command("translate", run, "--input", packed, "--output", output, *search)
    assert plain.read_bytes() == gzip.decompress((tmp_path / "o.gz").read_bytes()) == printed
    standard_input(monkeypatch, text)
    capsysbinary.readouterr()
    run_command("translate", checkpoint.newest(run), *search)
    assert capsysbinary.readouterr().out == printed


def test_the_bundled_model_translates(monkeypatch, capsys):
    """Without a folder the bundled model translates. A note on stderr, outside the translations, names its domain."""
    standard_input(monkeypatch, "And God said to Moses,\n\nThe king went out.\n")
    run_command("translate")
    out, err = capsys.readouterr()
    moses, blank, king = out.splitlines()
    assert {"Dios", "Moisés"} <= set(re.findall(r"\w+", moses))
    assert blank == ""
    assert "rey" in king
    assert err == "fastattn translate: the bundled English-Spanish model, trained on Bible text\n"


@pytest.mark.slow
def test_how_good_the_bundled_model_is(capsys):
    folder = checkpoint.PRETRAINED
    run_command("evaluate", folder, "--test", *verses("test"), "--beam", "1", "--json")
    bleu = json.loads(capsys.readouterr().out)["bleu"]
    assert bleu >= 32
    assert bleu >= json.loads((folder / "scores-float32.json").read_text())["bleu"] - 0.5
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 8e6


def test_n_best(run, tmp_path, capsys):
    (tmp_path / "in").write_text("day\n\nnight\n")
    run_command("translate", run, "--input", tmp_path / "in", "--n-best", "3")
    numbers, _, scores = zip(*(line.split(" ||| ") for line in capsys.readouterr().out.splitlines()), strict=True)
    assert numbers == ("1", "1", "1", "3", "3", "3")
    assert list(map(float, scores[:3])) == sorted(map(float, scores[:3]), reverse=True)


def test_sampling(run, day, capsys):
    printed = []
    for seed in ("1", "1", "2"):
        run_command("translate", run, "--input", day, "--temperature", "1", "--top-k", "50", "--seed", seed)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != printed[2]


@pytest.mark.parametrize("ending", ["input", *slow("end", "reader", "interrupt")])
def test_a_pipe_is_answered_line_by_line(run, ending):
    """Each line is answered before the next one is sent. The command ends with its input, or while a thread waits for
    more: by a line that is not UTF-8, a closed reader (`| head -1`), or Ctrl-C.
    No traceback reaches the user."""
    with start(["translate", str(run), "--beam", "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        for line in (b"day\n", b"night\n"):
            process.stdin.buffer.write(line)
            process.stdin.flush()
            assert process.stdout.readline().endswith("\n")
        if ending == "reader":
            process.stdout.close()
        if ending == "interrupt":
            process.send_signal(signal.SIGINT)
        elif ending == "end":
            process.stdin.close()
        else:
            process.stdin.buffer.write(b"\xff\n" if ending == "input" else b"night\n")
            process.stdin.flush()
        status = process.wait(timeout=120)
        said = process.stderr.read()
    assert (status, said) == {
        "input": (1, "fastattn translate: error: standard input is not UTF-8: byte 0xff in line 3\n"),
        "end": (0, ""),
        "reader": (128 + signal.SIGPIPE, ""),
        "interrupt": (128 + signal.SIGINT, "fastattn translate: interrupted\n"),
    }[ending]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: 8 bytes"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
)
def test_too_little_memory_is_no_traceback(monkeypatch, capsys, error):
    monkeypatch.setitem(COMMANDS, "translate", mock.Mock(side_effect=error))
    assert failure(["translate"], capsys) == (
        "fastattn translate: error: there is not enough memory: a lower --beam, --n-best or --batch-size needs less"
    )
    error.args = ("another",)
    if isinstance(error, RuntimeError):
        with pytest.raises(type(error), match="another"):
            cli.main(["translate"])


def test_a_name_that_is_no_text_is_printed(monkeypatch, capfdbinary):
    monkeypatch.setitem(COMMANDS, "info", lambda options: print("m\udce9"))
    with io.TextIOWrapper(os.fdopen(os.dup(1), "wb"), "utf-8") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert cli.main(["info"]) == 0
    assert capfdbinary.readouterr().out == b"m\\udce9\n"


def test_evaluate_checks_everything_before_it_translates(run, pairs, day, tmp_path, monkeypatch, capsys):
    """sacrebleu and the references are checked before anything is translated, and texts are read before a model."""
    monkeypatch.setattr("fastattn.translation.search.translate", None)
    monkeypatch.setattr("fastattn.translation.evaluate.held_out", None)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "sacrebleu", None)
        assert "sacrebleu" in failure(["evaluate", run, "--test", *pairs], capsys)
    references = tmp_path / "references"
    references.write_text("God " * 300 + "\n")
    message = failure(["evaluate", run, "--test", day, references], capsys)
    assert "no sentence pair of the test text has two sides of 1 to 256 pieces" in message
    monkeypatch.setattr(checkpoint, "load", None)
    missing = tmp_path / "none"
    for arguments in (["evaluate", run, "--test", missing, missing], ["translate", run, "--input", missing]):
        assert "cannot read" in failure(arguments, capsys)


def test_evaluate(run, pairs, tmp_path, capsys):
    output = tmp_path / "hypotheses"
    arguments = ["evaluate", run, "--test", *pairs, "--beam", "1", "--output", output]
    run_command(*arguments)
    out, err = capsys.readouterr()
    assert "60 of 60 test sources also stand in the training text" in err
    assert len(read_lines(output)) == 60
    run_command(*arguments, "--json")
    numbers = json.loads(capsys.readouterr().out)
    bleu, signature, chrf, _, perplexity, compounds = out.splitlines()
    assert bleu == f"BLEU {numbers['bleu']:.2f} on 60 sentences"
    assert numbers["sentences"] == 60
    assert "|tok:13a|" in signature
    assert chrf.startswith("chrF ")
    assert perplexity.startswith(f"perplexity {numbers['perplexity']:.2f}, accuracy {numbers['accuracy']:.3f} ")
    assert "compound-split BLEU" in compounds


def test_pictures(run, pairs, tmp_path, capsys):
    heads, curve = tmp_path / "heads.svg", tmp_path / "curve.png"
    arguments = ["translate", run, "--input", pairs[0], "--beam", "1", "--attention"]
    run_command(*arguments, heads, "--attention-kind", "encoder", "--attention-layer", "2")
    assert "encoder attention, layer 2" in heads.read_text(encoding="utf-8")
    run_command("plot", run, "--output", curve)
    assert curve.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    layer = ["--attention-layer", "4"]
    assert_failures(
        capsys,
        ("cannot draw heads.jpeg: expected a name that ends in .png or .svg", *arguments, "heads.jpeg"),
        ("its folder does not exist", *arguments, "no/heads.png"),
        ("the layer of the cross attention is 4, expected 1 to", *arguments, tmp_path / "heads.png", *layer),
        (f"{tmp_path} holds no metrics.jsonl yet", "plot", tmp_path),
    )


def test_info(capsys):
    run_command("info")
    out = capsys.readouterr().out
    assert "_cpu library" in out
    assert report.cpu_name() in out  # as the benchmarks' results name it


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--vocab-size", "100000"], r"100000 is larger than this text allows: it has \d+ pieces at most \(--vocab-"),
        (["--vocab-size", str(10**12)], f"vocab_size is {10**12}, expected an integer from 1 to"),
        (["--vocab-size", "3"], "a vocabulary of 3 is too small: padding, begin, end and unknown alone are 4 pieces"),
        (["--vocab-size", "-1"], "argument --vocab-size: -1 is given, expected a positive number"),
        (["--precision", "fp8"], "argument --precision: invalid choice: 'fp8'"),
        (["--max-steps", "0"], "argument --max-steps: 0 is given, expected a positive number"),
        (["--max-minutes", "nan"], "argument --max-minutes: nan is given, expected a positive number"),
        (["--seed", "x"], "invalid int value: 'x'"),
        (["--seed", str(2**63)], "seed is 9223372036854775808, expected an integer of 64 bits"),
    ],
)
def test_bad_training_options(pairs, tmp_path, capsys, options, message):
    assert re.search(message, failure(train_arguments(pairs, tmp_path / "out", *options), capsys))
    assert not (tmp_path / "out").exists()


def test_three_lines_are_enough_to_train(tmp_path, capsys):
    """The preset's vocabulary is lowered to what the text allows, with a notice that names the option. What an
    interrupted start left is no run."""
    (tmp_path / "run/.partial-step-00000000").mkdir(parents=True)
    files = [tmp_path / side for side in ("en", "es")]
    for path, text in zip(files, ("the king\nGod is good\nthe day\n", "el rey\nDios es bueno\nel día\n"), strict=True):
        path.write_text(text)
    run_command("train", "--train", *files, "--valid", *files, "--out", tmp_path / "run", "--max-steps", "1")
    config, _ = checkpoint.load_config(tmp_path / "run/best")
    _, notice, *_ = capsys.readouterr().err.splitlines()
    assert config.vocab_size < 200
    assert f"allows a vocabulary of {config.vocab_size} pieces at most" in notice
    assert "--vocab-size" in notice


def test_an_existing_folder_is_left_alone(run, pairs, tmp_path, capsys):
    """A run is resumed only with its own text and options."""
    before = snapshot(run)
    (tmp_path / "file").write_text("mine")
    resume = train_arguments(pairs, run, "--resume")
    assert_failures(
        capsys,
        ("exists already: name another folder", *train_arguments(pairs, run)),
        ("exists already", *train_arguments(pairs, tmp_path / "file")),
        ("the training text is not the one", *train_arguments(pairs[::-1], run, "--resume")),
        ("vocab_size is 300 but the run to resume has 200: leave it out", *resume, "--vocab-size", "300"),
        ("preset is 'base' but the run to resume has 'tiny'", *resume, "--preset", "base"),
        ("seed is 2 but the run to resume has 1", *resume, "--seed", "2"),
    )
    assert snapshot(run) == before
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("lost", ["step", "training", "best_loss", "valid_text"])
def test_a_checkpoint_of_another_version_is_not_resumed(run, pairs, tmp_path, capsys, lost):
    copy = tmp_path / "run"
    shutil.copytree(run, copy, symlinks=True)
    newest = checkpoint.newest(copy)
    if lost == "training":
        config, _ = checkpoint.load_config(newest)
        (newest / "config.json").write_text(config.to_json())
    else:
        state = torch.load(newest / "training.pt")
        del state[lost]
        torch.save(state, newest / "training.pt")
    before = snapshot(copy)
    assert "was not written by this version" in failure(train_arguments(pairs, copy, "--resume"), capsys)
    assert snapshot(copy) == before


def test_bad_models_and_search_options(run, pairs, tmp_path, capsys):
    broken, output = tmp_path / "broken", tmp_path / "output"
    shutil.copytree(checkpoint.newest(run), broken)
    os.truncate(broken / "model.safetensors", 1000)
    output.write_text("mine")
    evaluate, translate = ["evaluate", run, "--test", *pairs], ["translate", run, "--input", pairs[0]]
    assert_failures(
        capsys,
        (f"{tmp_path} holds no checkpoint", "evaluate", tmp_path, "--test", *pairs),
        (f"cannot read the checkpoint {broken}: model.safetensors", "evaluate", broken, "--test", *pairs),
        ("top_p is 2", *evaluate, "--top-p", "2", "--output", output),
        ("length_penalty is nan", *translate, "--length-penalty", "nan"),
        ("invalid choice: 'fp8'", *translate, "--precision", "fp8"),
        ("n_best is 5, expected at most the beam, 4", *translate, "--n-best", "5"),
    )
    assert output.read_text() == "mine"


@pytest.mark.parametrize(
    "command",
    [
        "translate {} --input {text}",
        "evaluate {} --test {text} {text}",
        "plot {}",
        "average {} out",
        "export {} --to int8 out",
        "train --train {text} {text} --valid {text} {text} --out {} --resume",
    ],
)
def test_a_folder_that_is_none_is_said_to_be(command, day, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, problem in (("missing", "missing does not exist"), ("day", "day is a file")):
        message = failure(shlex.split(command.format(name, text=day)), capsys)
        assert f"error: {problem}: expected the folder of a run of `fastattn train`" in message


def test_no_file_is_written_over_what_is_read(run, pairs, tmp_path, capsys, monkeypatch):
    """A link to a file is that file. Nothing is translated before the refusal."""
    monkeypatch.setattr(checkpoint, "load", None)
    files = [shutil.copy(path, tmp_path / f"{path.name}.png") for path in pairs]
    before, link = snapshot(tmp_path), tmp_path / "link.png"
    link.symlink_to(files[0])
    translate, evaluate = ["translate", run, "--input", files[0]], ["evaluate", run, "--test", *files]
    said = "it is also read: name another file"
    assert_failures(
        capsys,
        (f"cannot write {files[0]}: {said}", *translate, "--output", files[0]),
        (f"cannot write {link}: {said}", *translate, "--output", link),
        (f"cannot write {files[0]}: {said}", *translate, "--attention", files[0]),
        (f"cannot write {files[1]}: {said}", *evaluate, "--output", files[1]),
        ("the translations go there too", *translate, "--output", "new.png", "--attention", "new.png"),
    )
    link.unlink()
    assert snapshot(tmp_path) == before


def test_output_goes_where_it_is_sent(run, day, tmp_path, capsys):
    """A link is followed and a pipe is written to. A place that cannot be written is refused before translating."""
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    translate = ["translate", run, "--input", day, "--beam", "1", "--output"]
    run_command(*translate, link)
    assert link.is_symlink()
    assert len(read_lines(target)) == 1
    reading, writing = os.pipe()
    with open(reading) as stream:
        run_command(*translate, f"/dev/fd/{writing}")
        os.close(writing)
        assert stream.read() == target.read_text()
    assert "its folder does not exist" in failure([*translate, tmp_path / "none/file"], capsys)
    assert "it is a folder" in failure([*translate, tmp_path], capsys)


@pytest.mark.slow
def test_a_full_disk(run, pairs, capsys):
    arguments = ["translate", run, "--input", pairs[0], "--beam", "1", "--output", "/dev/full"]
    assert "cannot write /dev/full: No space left on device" in failure(arguments, capsys)
    with open("/dev/full", "wb") as full:
        assert finish(start(["info"], stdout=full), 1) == "fastattn info: error: No space left on device\n"


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        ("safetensors.torch.save_file", safetensors.SafetensorError("no space"), "model.safetensors: no space"),
        ("torch.save", RuntimeError("unexpected pos 704 vs 598\nframe #0"), "training.pt: unexpected pos 704 vs 598"),
        ("pathlib.Path.mkdir", OSError(errno.EDQUOT, "Disk quota exceeded"), "step-00000001: Disk quota exceeded"),
    ],
)
def test_a_disk_that_fills_up_in_a_run(started, pairs, capsys, monkeypatch, target, error, message):
    """A checkpoint that does not fit leaves nothing behind, and the earlier checkpoints stay."""
    function = pkgutil.resolve_name(target)

    def full(*args, **kwargs):
        if target == "pathlib.Path.mkdir" and "step-" not in args[0].name:
            return function(*args, **kwargs)
        raise error

    monkeypatch.setattr(target, full)
    assert cli.main(train_arguments(pairs, started, "--max-steps", "1", "--resume")) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(f"fastattn train: error: cannot write .*{re.escape(message)}", said)
    assert [path.name for path in checkpoint.steps(started)] == ["step-00000000"]
    assert not list(started.glob(f"{files.PARTIAL}*"))


@pytest.fixture
def started(run, tmp_path):
    """Return the folder of a run that was stopped before its first update."""
    shutil.copytree(run / "step-00000000", tmp_path / "started/step-00000000")
    return tmp_path / "started"


def test_a_folder_that_may_not_be_written(run, pairs, tmp_path, capsys, monkeypatch):
    """A folder without write permission is reported before any work."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(checkpoint, "load", None)
    for option in ("--output", "--attention"):
        arguments = ["translate", run, "--input", pairs[0], option, tmp_path / "file.png"]
        assert f"cannot write {tmp_path / 'file.png'}: permission denied" in failure(arguments, capsys)


@pytest.mark.parametrize(("stream", "lines"), [("stdout", (0, 1, 1)), ("stderr", (1, 0, 0))])
def test_closed_outputs(run, day, capfd, monkeypatch, stream, lines):
    """If a stream is closed (`>&-`), its text is lost and does not appear on the other one. The text on stderr says
    that the model was never trained."""
    monkeypatch.setattr(sys, stream, None)
    run_command("translate", run / "step-00000000", "--input", day, "--beam", "1")
    out, err = capfd.readouterr()
    assert (out.count("\n"), err.count("has not been trained yet"), err.count("\n")) == lines


def test_closed_input(run, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert "standard input is empty" in failure(["translate", run], capsys)


def test_who_types_is_told_how(run, capsys, monkeypatch):
    typed = standard_input(monkeypatch, "day\n")
    monkeypatch.setattr(typed, "isatty", lambda: True, raising=False)
    run_command("translate", run, "--beam", "1")
    assert capsys.readouterr().err == "fastattn translate: type a sentence a line; Ctrl-D ends\n"


def test_blank_lines_have_no_attention(run, tmp_path, capsys, monkeypatch):
    standard_input(monkeypatch, " \n\n")
    picture = tmp_path / "heads.png"
    assert cli.main(["translate", str(run), "--attention", str(picture)]) == 1
    assert capsys.readouterr() == ("\n\n", f"fastattn translate: error: {picture} is not drawn: every line is blank\n")


def test_a_mean_without_a_name(run, tmp_path, capsys, monkeypatch):
    shutil.copytree(run, tmp_path / "run", symlinks=True)
    run_command("average", f"{tmp_path / 'run'}/", "--last", "1")
    assert capsys.readouterr().out == f"{tmp_path / 'run-mean'} holds the mean of 1 checkpoints\n"
    assert (tmp_path / "run-mean/model.safetensors").exists()
    monkeypatch.chdir(tmp_path / "run")
    assert f"{tmp_path / 'run-mean'} exists already" in failure(["average", ".", "--last", "1"], capsys)


@pytest.mark.slow
def test_demo(monkeypatch, tmp_path, capsys):
    """The whole demo runs, with fewer updates and sentences."""
    monkeypatch.setattr(demo, "UPDATES", 5)
    monkeypatch.setattr(demo, "SCORED", 20)
    monkeypatch.setattr(demo, "SHOWN", (3, 4))
    run_command("demo", "--out", tmp_path / "out")
    printed = capsys.readouterr().out
    assert printed.count("\nright ") == len(demo.CASES)
    assert "WRONG" not in printed
    assert re.search(
        r"^layer_norm float32 4096x512 forward\+backward: [\d.]+ ms, [\d.]+x as fast", printed, re.MULTILINE
    )
    assert "It has had 5 updates." in printed
    bundled, own = (float(bleu) for bleu in re.findall(r"BLEU ([\d.]+) on 20 sentences of the test text", printed))
    assert own < 5 < 20 < bundled
    for name in ("loss.png", "attention.png", "best/model.safetensors"):
        assert (tmp_path / "out" / name).stat().st_size > 1000


@pytest.mark.parametrize(("budget", "least", "most"), [(demo.BUDGET, 60, 145), (0.0, demo.LEAST, demo.LEAST)])
def test_the_demo_keeps_its_budget_and_says_where_ctrl_c_left_it(monkeypatch, tmp_path, capsys, budget, least, most):
    """Training has the seconds that are left. After Ctrl-C nothing advises an option that the demo lacks."""
    given = {}

    def train(sources, valid, folder, **options):
        given.update(options)
        shutil.copytree(checkpoint.PRETRAINED, folder / "step-00000003")
        raise KeyboardInterrupt("after update 3, which is saved: --resume goes on from there")

    for name, value in {"BUDGET": budget, "CASES": [], "SCORED": 5, "SHOWN": (3, 4), "train": train}.items():
        monkeypatch.setattr(demo, name, value)
    out = tmp_path / "out"
    assert cli.main(["demo", "--out", str(out)]) == 130
    assert least <= 60 * given["max_minutes"] <= most
    said = capsys.readouterr().err
    assert said == f"fastattn demo: interrupted in its training; {out / 'step-00000003'} holds the model so far\n"
    assert failure(["demo", "--out", out], capsys) == f"fastattn demo: error: {out} exists already: name another folder"


def test_a_run_stopped_before_its_first_update_resumes(run, pairs, started):
    run_command(*train_arguments(pairs, started, "--max-steps", "2", "--resume"))
    found, wanted = (folder / "step-00000002/model.safetensors" for folder in (started, run))
    assert found.read_bytes() == wanted.read_bytes()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_bar_on_a_terminal(pairs, tmp_path, monkeypatch):
    """The bar shows the run's settings before the first update, moves with each, ends at 100 % and fits into 80
    columns."""
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    monkeypatch.setattr(tqdm.tqdm, "__init__", functools.partialmethod(tqdm.tqdm.__init__, mininterval=0))
    run_command(*train_arguments(pairs, tmp_path / "run", "--max-steps", "3", "--max-minutes", "600"))
    shown = screen.getvalue().replace("\r", "\n")
    begun, warning, first, *bar = filter(None, shown.split("\n"))
    assert re.fullmatch(r"learning a vocabulary of \d+ pieces", begun)
    assert warning.startswith("warning: 60 of 60 validation sources also stand in the training text")
    assert re.fullmatch("tiny: .*fp32, batches of 300 tokens, 3 updates or 600 min", first)
    assert max(map(len, (first, *bar))) <= 80
    seen = re.findall(r"(\d+)%\|.*\| update (\d+)", shown)
    assert list(dict.fromkeys(seen)) == [("0", "0"), ("33", "1"), ("67", "2"), ("100", "3")]
    assert "100%|" in shown[: shown.index("update 3: validation loss")]  # before the scoring, which takes long
    assert "update 3, loss " in shown


@pytest.mark.slow
def test_the_bar_knows_the_limit_in_time(pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    run_command(*train_arguments(pairs, tmp_path / "run", "--max-steps", "1000000", "--max-minutes", "0.01"))
    assert "100%|" in screen.getvalue()


@pytest.mark.parametrize(
    ("arguments", "status", "answer"),
    [
        ("--version", 0, f"fastattn {fastattn.__version__}\n"),
        ("--help", 0, "usage: fastattn [-h] [--version] COMMAND"),
        ("bench --help", 0, "usage: fastattn bench"),
        ("", 2, "fastattn: error: the following arguments are required: COMMAND"),
        ("train", 2, "fastattn train: error: the following arguments are required: --train, --valid, --out"),
        ("trian", 2, "fastattn: error: argument COMMAND: invalid choice: 'trian': did you mean train? (see"),
        ("xyz", 2, "fastattn: error: argument COMMAND: invalid choice: 'xyz' (choose from"),
        ("--verison", 2, "fastattn: error: unrecognized arguments: --verison: did you mean --version? (see fastattn"),
        ("-verison info", 2, "fastattn: error: unrecognized arguments: -verison: did you mean --version?"),
        ("train --trian a b", 2, "fastattn train: error: unrecognized arguments: --trian: did you mean --train?"),
        ("translate --beem=3", 2, "fastattn translate: error: unrecognized arguments: --beem: did you mean --beam?"),
        ("info --colour", 2, "fastattn info: error: unrecognized arguments: --colour (see fastattn info --help)"),
        (
            "train --preset D-eps02",
            2,
            "fastattn train: error: argument --preset: invalid choice: 'D-eps02': did you mean D-eps0.2?",
        ),
        ("prepare wmt15 out --archives .", 2, "fastattn prepare: error: argument CORPUS: invalid choice"),
        ("translate --beam 0", 2, "fastattn translate: error: argument --beam: 0 is given, expected a positive"),
        ("translate --attention-layer 1", 2, "fastattn translate: error: argument --attention-layer: says what --att"),
    ],
)
def test_answers_that_need_no_torch(arguments, status, answer, python):
    """The command answers where nothing of the package can be imported, in 0.3 s of a processor."""
    program = f"""
        import contextlib, io, sys, time
        sys.modules["torch"] = sys.modules["fastattn"] = None
        import fastattn_command
        try:
            with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
                fastattn_command.main({arguments.split()})
        except SystemExit as exit_:
            print([exit_.code, time.process_time(), said.getvalue()])
    """
    returned, seconds, said = ast.literal_eval(python(program))
    assert (returned, said[: len(answer)]) == (status, answer)
    assert seconds < 0.3


def test_every_command_has_options():
    (commands,) = (action for action in cli.parser()._actions if action.dest == "command")
    assert tuple(commands.choices) == tuple(COMMANDS)


def test_interrupted_while_torch_is_imported(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "fastattn.cli")
    monkeypatch.delattr(fastattn, "cli")
    finder = mock.Mock(find_spec=mock.Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    assert cli.main(["info"]) == 130
    assert capsys.readouterr().err == "fastattn info: interrupted\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_describes_and_shows_examples_that_parse(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    usage, description, *_, examples = capsys.readouterr().out.split("\n\n")
    assert usage.startswith(f"usage: fastattn {command} ")
    assert re.fullmatch(r"[A-Z][^.]+\..*", description, re.DOTALL)
    title, *lines = examples.splitlines()
    assert title == "example:"
    for line in lines:
        assert cli.parser().parse_args(shlex.split(line.rpartition("| ")[2])[1:]).command == command


UNWRITABLE = (".", "something/run", "/proc/run")


@pytest.mark.parametrize(
    "arguments",
    [
        "translate missing --input missing --top-p 0",
        "evaluate missing --test missing missing --top-p 0",
        "evaluate missing --test missing missing --output missing/out",
        "plot missing --output loss.jpeg",
        "prepare wmt14-en-de . --archives missing",
        "average missing .",
        "import missing . --words missing missing",
        "export missing --to int8 .",
        "train --train missing missing --valid missing missing --out new --label-smoothing 2",
        *(f"train --train missing missing --valid missing missing --out {out}" for out in UNWRITABLE),
        *(f"demo --out {out}" for out in UNWRITABLE),
        "bench --output .",
    ],
)
def test_arguments_are_checked_before_files_are_read(arguments, capsys, tmp_path, monkeypatch):
    (tmp_path / "something").touch()
    monkeypatch.chdir(tmp_path)
    message = failure(arguments.split(), capsys)
    assert re.search(r"top_p is 0|cannot (write|draw)|exists already|label_smoothing is 2", message), message


def test_without_the_train_extra(pairs, day, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    for arguments in (train_arguments(pairs, tmp_path / "out"), ["translate", "--input", day]):
        assert failure(arguments, capsys).endswith(
            'sentencepiece is not installed; it comes with: pip install "fastattn[train]", '
            'in a clone pip install -e ".[train]"'
        )
    assert not (tmp_path / "out").exists()


def start(arguments, **pipes):
    command = [sys.executable, "-m", "fastattn", *map(str, arguments)]
    # The bits of torch's own matrix products depend on the number of threads, so the process gets as many as this one.
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    root = Path(fastattn.__file__).parent.parent  # the process imports the tested package from where it starts
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs start with SIGINT ignored
    return subprocess.Popen(command, stderr=subprocess.PIPE, cwd=root, env=environment, text=True, **pipes)


def finish(process, status=0):
    """Return what the process says on stderr until it ends with the status."""
    _, err = process.communicate(timeout=1200)
    assert process.returncode == status, err
    return err


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}])
def test_the_command_bounds_spinning_unless_the_user_has(given, python, monkeypatch):
    """The command sets these variables before torch's OpenMP runtime is loaded, which reads them then."""
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    printed = python(
        "import os, sys, fastattn_command; assert 'torch' not in sys.modules; fastattn_command.main(['info']);"
        f"print({{name: os.environ[name] for name in {names} if name in os.environ}})",
        **given,
    )
    assert printed.splitlines()[-1] == str(given or {"GOMP_SPINCOUNT": "1000"})


@pytest.mark.slow
@pytest.mark.torch_version
def test_trained_and_translated_by_the_command(pairs, day, tmp_path, capsys):
    """Training and translation run in the precision that is fastest on this machine."""
    options = ["--vocab-size", "200", "--batch-tokens", "300", "--max-steps", "3"]
    run_command("train", "--train", *pairs, "--valid", *pairs, "--out", tmp_path / "run", *options)
    assert "update 3: loss " in capsys.readouterr().err
    finish(start(["translate", tmp_path / "run", "--input", day, "--output", tmp_path / "translation"]))
    assert len(read_lines(tmp_path / "translation")) == 1


def until(process, beginning):
    """Read the process's stderr up to a line that starts with `beginning`."""
    while not (line := process.stderr.readline()).startswith(beginning):
        assert line, process.wait()


def step_of(run):
    """Return the number of the newest checkpoint, or -1."""
    return max((int(path.name.removeprefix("step-")) for path in checkpoint.steps(run)), default=-1)


@pytest.mark.slow
def test_interrupted_and_resumed_is_as_never_interrupted(pairs, run, tmp_path):
    """SIGINT saves after the current update. The resumed run has the same bits as one that was never interrupted."""
    whole, broken, config = tmp_path / "whole", tmp_path / "broken", ("--config", run.parent / "small.json")
    process = start(train_arguments(pairs, broken, *config, "--save-every", "1000", "--max-steps", "100000"))
    until(process, "update 20: ")
    process.send_signal(signal.SIGINT)
    said, step = finish(process, 130).splitlines()[-1], step_of(broken)
    assert said == f"fastattn train: interrupted after update {step}, which is saved: --resume goes on from there"
    for arguments in ((broken, "--resume"), (whole, *config)):
        run_command(*train_arguments(pairs, *arguments, "--max-steps", str(step + 2)))
    first, second = (checkpoint.newest(run) / "model.safetensors" for run in (whole, broken))
    assert first.parent.name == second.parent.name
    assert first.read_bytes() == second.read_bytes()


def assert_same_run(whole, broken):
    """Assert that two runs have equal bits in everything except timings."""
    names = [path.name for path in checkpoint.steps(whole)]
    assert names == [path.name for path in checkpoint.steps(broken)]
    newest = [run / names[-1] for run in (whole, broken)]
    for file in ("model.safetensors", "tokenizer.model", "config.json"):
        first, second = ((folder / file).read_bytes() for folder in newest)
        assert first == second
    states = (checkpoint.load_training(folder)["optimizer"]["state"] for folder in newest)
    torch.testing.assert_close(*states, rtol=0, atol=0)

    def rows(run):
        timings = ("seconds", "tokens_per_second")
        return [{k: v for k, v in row.items() if k not in timings} for row in read_metrics(run)]

    assert rows(whole) == rows(broken)
