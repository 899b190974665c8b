"""The `fastattn` command: its results, its messages for bad input, and resuming a killed run to the same bits."""

import errno
import functools
import gzip
import io
import json
import os
import pkgutil
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

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


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Return two files with 60 short sentence pairs."""
    folder = tmp_path_factory.mktemp("text")
    pairs = zip(*map(read_lines, verses("dev")), strict=True)
    short = sorted(pairs, key=lambda pair: len(pair[0]) + len(pair[1]))[:60]
    for name, lines in zip(("en", "es"), zip(*short, strict=True), strict=True):
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return [folder / "en", folder / "es"]


def train_arguments(files, out, *more):
    sizes = ["--vocab-size", "200", "--batch-tokens", "300", "--precision", "fp32"]
    files = list(map(str, files))
    return ["train", "--train", *files, "--valid", *files, "--out", str(out), *sizes, *more]


@pytest.fixture(scope="module")
def run(small, tmp_path_factory):
    """Train a small model for two updates and return the folder of the run."""
    folder = tmp_path_factory.mktemp("runs")
    sizes = {"d_model": 32, "d_ff": 64, "num_heads": 4, "encoder_layers": 2, "decoder_layers": 2}
    (folder / "small.json").write_text(json.dumps({"vocab_size": 200, **sizes, "training": {"preset": "tiny"}}))
    out = folder / "run"
    assert cli.main(train_arguments(small, out, "--config", str(folder / "small.json"), "--max-steps", "2")) == 0
    return out


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


def snapshot(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_translate(run, small, tmp_path, capsysbinary, monkeypatch):
    sources = read_lines(small[0])[:3]
    (tmp_path / "in.gz").write_bytes(gzip.compress("\n".join(sources).encode()))
    search = ["--beam", "2", "--length-penalty", "1", "--batch-size", "2"]
    assert cli.main(["translate", str(run), "--input", str(tmp_path / "in.gz"), *search]) == 0
    printed = capsysbinary.readouterr().out
    assert printed.count(b"\n") == 3
    assert (
        cli.main(["translate", str(run), "--input", str(tmp_path / "in.gz"), "--output", str(tmp_path / "o"), *search])
        == 0
    )
    assert (tmp_path / "o").read_bytes() == printed

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(sources).encode())))
    capsysbinary.readouterr()
    assert cli.main(["translate", str(checkpoint.newest(run)), *search]) == 0
    assert capsysbinary.readouterr().out == printed


def test_the_bundled_model_translates(monkeypatch, capsysbinary):
    """Without a folder the bundled model translates. A note on stderr, outside the translations, names its domain."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"And God said to Moses,\n\nThe king went out.\n")))
    assert cli.main(["translate"]) == 0
    out, err = capsysbinary.readouterr()
    moses, blank, king = out.decode().splitlines()
    assert {"Dios", "Moisés"} <= set(re.findall(r"\w+", moses))
    assert blank == ""
    assert "rey" in king
    assert err.decode() == "fastattn translate: the bundled English-Spanish model, trained on Bible text\n"


@pytest.mark.slow
def test_how_good_the_bundled_model_is(capsys):
    folder = Path(fastattn.__file__).parent
    test = map(str, verses("test"))
    assert cli.main(["evaluate", str(folder / "pretrained"), "--test", *test, "--beam", "1", "--json"]) == 0
    bleu = json.loads(capsys.readouterr().out)["bleu"]
    assert bleu >= 32
    assert bleu >= json.loads((folder / "pretrained/scores-float32.json").read_text())["bleu"] - 0.5
    assert sum(path.stat().st_size for path in (folder / "pretrained").iterdir()) <= 8e6


def test_n_best(run, small, tmp_path, capsys):
    (tmp_path / "in").write_text("day\n\nnight\n")
    assert cli.main(["translate", str(run), "--input", str(tmp_path / "in"), "--n-best", "3"]) == 0
    rows = [line.split(" ||| ") for line in capsys.readouterr().out.splitlines()]
    assert [int(number) for number, _, _ in rows] == [1, 1, 1, 3, 3, 3]
    scores = [float(score) for _, _, score in rows]
    assert scores[:3] == sorted(scores[:3], reverse=True)


def test_sampling(run, small, tmp_path, capsys):
    (tmp_path / "in").write_text("day\nnight\n")
    arguments = [
        "translate",
        str(run),
        "--input",
        str(tmp_path / "in"),
        "--temperature",
        "1",
        "--top-k",
        "50",
        "--seed",
    ]
    printed = []
    for seed in ("1", "1", "2"):
        assert cli.main([*arguments, seed]) == 0
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
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: 8 bytes"
        ),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_too_little_memory_is_no_traceback(monkeypatch, capsys, error):
    def raises(options):
        raise error

    monkeypatch.setitem(COMMANDS, "translate", raises)
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


def test_evaluate_asks_for_sacrebleu_before_it_translates(run, small, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    monkeypatch.setattr("fastattn.translation.search.translate", lambda *args: pytest.fail("translated"))
    monkeypatch.setattr("fastattn.translation.evaluate.held_out", lambda *args: pytest.fail("computed a perplexity"))
    assert "sacrebleu" in failure(["evaluate", run, "--test", *small], capsys)


def test_evaluate(run, small, tmp_path, capsys):
    output = tmp_path / "hypotheses"
    arguments = ["evaluate", str(run), "--test", *map(str, small), "--beam", "1", "--output", str(output)]
    assert cli.main(arguments) == 0
    out, err = capsys.readouterr()
    assert "60 of 60 test sources also stand in the training text" in err
    bleu, signature, chrf, _, perplexity, compounds = out.splitlines()
    assert bleu.startswith("BLEU ")
    assert bleu.endswith(" on 60 sentences")
    assert "|tok:13a|" in signature
    assert chrf.startswith("chrF ")
    assert perplexity.startswith("perplexity ")
    assert "compound-split BLEU" in compounds
    assert len(output.read_text(encoding="utf-8").splitlines()) == 60
    assert cli.main([*arguments, "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert bleu == f"BLEU {numbers['bleu']:.2f} on {numbers['sentences']} sentences"
    assert perplexity.startswith(f"perplexity {numbers['perplexity']:.2f}, accuracy {numbers['accuracy']:.3f} ")


def test_pictures(run, small, tmp_path, capsys):
    heads, curve = tmp_path / "heads.svg", tmp_path / "curve.png"
    arguments = ["translate", str(run), "--input", str(small[0]), "--beam", "1"]
    drawn = ["--attention", str(heads), "--attention-kind", "encoder", "--attention-layer", "2"]
    assert cli.main([*arguments, *drawn]) == 0
    assert "encoder attention, layer 2" in heads.read_text(encoding="utf-8")
    assert cli.main(["plot", str(run), "--output", str(curve)]) == 0
    assert curve.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--attention", "heads.jpeg"], "cannot draw heads.jpeg: expected a name that ends in .png or .svg"),
        (["--attention", "no/heads.png"], "its folder does not exist"),
        (
            ["--attention", "heads.png", "--attention-layer", "4"],
            "the layer of the cross attention is 4, expected 1 to",
        ),
    ],
)
def test_bad_pictures(run, small, capsys, options, message):
    assert message in failure(["translate", run, "--input", small[0], "--beam", "1", *options], capsys)


@pytest.mark.parametrize("folder", [".", "missing"])
def test_a_picture_of_no_run(tmp_path, capsys, folder):
    assert f"{tmp_path / folder} holds no metrics.jsonl yet" in failure(["plot", tmp_path / folder], capsys)


def test_info(capsys):
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert "_cpu library" in out
    assert report.cpu_name() in out  # as the benchmarks' results name it


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing", None, "cannot read"),
        ("empty", b"", "is empty"),
        ("short", b"one line\n", "has 60 lines but"),
        ("latin1", "señor\n".encode("latin-1") * 60, "is not UTF-8"),
        ("cut.gz", gzip.compress(b"text\n" * 60, mtime=0)[:-4], "is not a complete gzip file"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_training_text(small, tmp_path, capsys, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    files, out = [small[0], tmp_path / name], tmp_path / "out"
    assert message in failure(train_arguments(files, out), capsys)
    assert message in failure(["train", "--train", *small, "--valid", *files, "--out", out], capsys)
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--vocab-size", "100000"], "a vocabulary of 100000 is larger than this text allows"),
        (["--vocab-size", str(10**12)], f"vocab_size is {10**12}, expected an integer from 1 to"),
        (["--vocab-size", "5"], "a vocabulary of 5"),
        (["--vocab-size", "3"], "a vocabulary of 3 is too small: padding, begin, end and unknown alone are 4 pieces"),
        (["--vocab-size", "-1"], "argument --vocab-size: -1 is given, expected a positive number"),
        (["--vocab-size", "many"], "argument --vocab-size: invalid int value: 'many'"),
        (["--preset", "huge"], "argument --preset: invalid choice: 'huge' (choose from "),
        (["--precision", "fp8"], "argument --precision: invalid choice: 'fp8'"),
        (["--max-steps", "0"], "argument --max-steps: 0 is given, expected a positive number"),
        (["--max-minutes", "-2"], "argument --max-minutes: -2 is given, expected a positive number"),
        (["--max-minutes", "nan"], "argument --max-minutes: nan is given, expected a positive number"),
        (["--batch-tokens", "0"], "argument --batch-tokens: 0 is given, expected a positive number"),
        (["--save-every", "0"], "argument --save-every: 0 is given, expected a positive number"),
        (["--seed", "x"], "invalid int value: 'x'"),
        (["--seed", str(2**63)], "seed is 9223372036854775808, expected an integer of 64 bits"),
        (["--resume"], "holds no checkpoint to resume from"),
    ],
)
def test_bad_training_options(small, tmp_path, capsys, options, message):
    assert message in failure(train_arguments(small, tmp_path / "out", *options), capsys)
    assert not (tmp_path / "out").exists()


def test_an_existing_folder_is_left_alone(run, small, tmp_path, capsys):
    before = snapshot(run)
    assert "exists already: name another folder" in failure(train_arguments(small, run), capsys)
    (tmp_path / "file").write_text("mine")
    assert "exists already" in failure(train_arguments(small, tmp_path / "file"), capsys)
    assert "the training text is not the one" in failure(train_arguments(small[::-1], run, "--resume"), capsys)
    assert snapshot(run) == before
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--vocab-size", "300"], "vocab_size is 300 but the run to resume has 200: leave it out"),
        (["--preset", "base"], "preset is 'base' but the run to resume has 'tiny'"),
        (["--seed", "2"], "seed is 2 but the run to resume has 1"),
    ],
)
def test_a_run_is_not_resumed_with_other_options(run, small, capsys, options, message):
    before = snapshot(run)
    assert message in failure(train_arguments(small, run, "--resume", *options), capsys)
    assert snapshot(run) == before


@pytest.mark.parametrize("lost", ["step", "training", "best_loss", "valid_text"])
def test_a_checkpoint_of_another_version_is_not_resumed(run, small, tmp_path, capsys, lost):
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
    assert "was not written by this version" in failure(train_arguments(small, copy, "--resume"), capsys)
    assert snapshot(copy) == before


def test_bad_models_and_search_options(run, small, tmp_path, capsys):
    evaluate = ["--test", *small]
    assert "holds no checkpoint" in failure(["evaluate", tmp_path, *evaluate], capsys)
    assert "holds no checkpoint" in failure(["translate", tmp_path / "missing", "--input", small[0]], capsys)
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in checkpoint.newest(run).iterdir():
        (broken / path.name).write_bytes(path.read_bytes()[: 1000 if path.suffix == ".safetensors" else None])
    message = failure(["evaluate", broken, *evaluate], capsys)
    assert f"cannot read the checkpoint {broken}: model.safetensors" in message
    output = tmp_path / "output"
    output.write_text("mine")
    assert "top_p is 2" in failure(["evaluate", run, *evaluate, "--top-p", "2", "--output", output], capsys)
    assert "cannot read" in failure(["translate", run, "--input", tmp_path / "none", "--output", output], capsys)
    assert "length_penalty is nan" in failure(
        ["translate", run, "--input", small[0], "--length-penalty", "nan"], capsys
    )
    assert "invalid choice: 'fp8'" in failure(["translate", run, "--input", small[0], "--precision", "fp8"], capsys)
    assert "n_best is 9" in failure(["translate", run, "--input", small[0], "--n-best", "9"], capsys)
    assert output.read_text() == "mine"


def test_output_goes_where_it_is_sent(run, small, tmp_path, capsys):
    """A link is followed and a pipe is written to. A place that cannot be written is refused before translating."""
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "in").write_text("".join(f"{line}\n" for line in read_lines(small[0])[:3]), encoding="utf-8")
    translate = ["translate", str(run), "--input", str(tmp_path / "in"), "--beam", "1", "--output"]
    assert cli.main([*translate, str(tmp_path / "link")]) == 0
    assert (tmp_path / "link").is_symlink()
    assert cli.main([*translate, "/dev/null"]) == 0
    assert Path("/dev/null").is_char_device()
    assert len((tmp_path / "target").read_text(encoding="utf-8").splitlines()) == 3
    assert "its folder does not exist" in failure([*translate, tmp_path / "none/file"], capsys)
    assert "it is a folder" in failure([*translate, tmp_path], capsys)


@pytest.mark.slow
def test_a_full_disk(run, small, tmp_path, capsys):
    arguments = ["translate", run, "--input", small[0], "--beam", "1", "--output", "/dev/full"]
    assert "cannot write /dev/full: No space left on device" in failure(arguments, capsys)
    with open("/dev/full", "wb") as full:
        process = start(["info"], stdout=full)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (1, "fastattn info: error: No space left on device\n")


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        ("safetensors.torch.save_file", safetensors.SafetensorError("no space"), "model.safetensors: no space"),
        ("torch.save", RuntimeError("unexpected pos 704 vs 598\nframe #0"), "training.pt: unexpected pos 704 vs 598"),
        ("pathlib.Path.mkdir", OSError(errno.EDQUOT, "Disk quota exceeded"), "step-00000001: Disk quota exceeded"),
    ],
    ids=["weights", "training", "folder"],
)
def test_a_disk_that_fills_up_in_a_run(run, small, tmp_path, capsys, monkeypatch, target, error, message):
    """A checkpoint that does not fit leaves nothing behind, and the earlier checkpoints stay."""

    function = pkgutil.resolve_name(target)

    def full(*args, **kwargs):
        if target == "pathlib.Path.mkdir" and "step-" not in args[0].name:
            return function(*args, **kwargs)
        raise error

    started = tmp_path / "started"
    shutil.copytree(run / "step-00000000", started / "step-00000000")
    monkeypatch.setattr(target, full)
    arguments = train_arguments(small, started, "--max-steps", "1", "--resume")
    assert cli.main(arguments) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("fastattn train: error: cannot write ")
    assert said.endswith(message)
    assert [path.name for path in checkpoint.steps(started)] == ["step-00000000"]
    assert not list(started.glob(f"{files.PARTIAL}*"))


def test_a_folder_that_may_not_be_written(run, small, tmp_path, capsys, monkeypatch):
    """A folder without write permission is reported before any work."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(checkpoint, "load", None)
    for option in ("--output", "--attention"):
        arguments = ["translate", run, "--input", small[0], option, tmp_path / "file.png"]
        assert f"cannot write {tmp_path / 'file.png'}: permission denied" in failure(arguments, capsys)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_closed_outputs(run, tmp_path, capfd, monkeypatch, stream):
    """If a stream is closed (`>&-`), its text is lost and does not appear on the other one."""
    (tmp_path / "line").write_text("day\n")
    monkeypatch.setattr(sys, stream, None)
    untrained = str(run / "step-00000000")
    assert cli.main(["translate", untrained, "--input", str(tmp_path / "line"), "--beam", "1"]) == 0
    out, err = capfd.readouterr()
    assert (out.count("\n"), err.count("\n")) == ((0, 1) if stream == "stdout" else (1, 0))


def test_closed_input(run, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert "standard input is empty" in failure(["translate", run], capsys)


def test_who_types_is_told_how(run, capsys, monkeypatch):
    typed = io.TextIOWrapper(io.BytesIO(b"day\n"))
    monkeypatch.setattr(typed, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdin", typed)
    assert cli.main(["translate", str(run), "--beam", "1"]) == 0
    assert capsys.readouterr().err == "fastattn translate: type a sentence a line; Ctrl-D ends\n"


def test_blank_lines_have_no_attention(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b" \n\n")))
    picture = tmp_path / "heads.png"
    assert cli.main(["translate", str(run), "--attention", str(picture)]) == 1
    assert capsys.readouterr() == ("\n\n", f"fastattn translate: error: {picture} is not drawn: every line is blank\n")


def test_a_mean_without_a_name(run, tmp_path, capsys, monkeypatch):
    shutil.copytree(run, tmp_path / "run", symlinks=True)
    assert cli.main(["average", f"{tmp_path / 'run'}/", "--last", "1"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'run-mean'} holds the mean of 1 checkpoints\n"
    assert (tmp_path / "run-mean/model.safetensors").exists()
    monkeypatch.chdir(tmp_path / "run")
    assert cli.main(["average", ".", "--last", "1"]) == 1
    assert f"{tmp_path / 'run-mean'} exists already" in capsys.readouterr().err


def test_output_is_gzipped_by_its_name(run, tmp_path, capsys):
    (tmp_path / "lines").write_text("God\n")
    for name in ("plain", "packed.gz"):
        command = ["translate", str(run), "--input", str(tmp_path / "lines"), "--output", str(tmp_path / name)]
        assert cli.main(command) == 0
    assert gzip.decompress((tmp_path / "packed.gz").read_bytes()) == (tmp_path / "plain").read_bytes()


@pytest.mark.parametrize("command", ["train", "demo"])
def test_where_nothing_can_be_written(small, tmp_path, capsys, command):
    """An output that cannot be written is reported before any work."""
    arguments = train_arguments(small, "OUT") if command == "train" else ["demo", "--out", "OUT"]
    (tmp_path / "file").touch()
    for out, message in (("file/run", "not a directory"), ("file", "exists already")):
        assert message in failure([str(tmp_path / out) if a == "OUT" else a for a in arguments], capsys)
    assert "cannot write /proc/run" in failure(["/proc/run" if a == "OUT" else a for a in arguments], capsys)


@pytest.mark.slow
def test_demo(monkeypatch, tmp_path, capsys):
    """The whole demo runs, with fewer updates and sentences."""
    monkeypatch.setattr(demo, "UPDATES", 5)
    monkeypatch.setattr(demo, "SCORED", 20)
    assert cli.main(["demo", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\nright ") == len(demo.CHECKS)
    assert "WRONG" not in printed
    assert re.search(r"^\| layer_norm float32 4096x512 forward\+backward \| [\d.]+ ", printed, re.MULTILINE)
    bundled, own = (float(bleu) for bleu in re.findall(r"BLEU ([\d.]+) on 20 sentences of the test text", printed))
    assert own < 5 < 20 < bundled
    for name in ("loss.png", "attention.png", "best/model.safetensors"):
        assert (tmp_path / "out" / name).stat().st_size > 1000


def test_what_an_interrupted_start_left_is_no_run(small, tmp_path, capsys):
    (tmp_path / "out/.partial-step-00000000").mkdir(parents=True)
    assert cli.main(train_arguments(small, tmp_path / "out", "--max-steps", "1")) == 0


def test_search_options_are_read_before_the_model(tmp_path, capsys):
    arguments = ["translate", tmp_path / "missing", "--n-best", "5"]
    assert "n_best is 5, expected at most the beam, 4" in failure(arguments, capsys)


def test_a_model_that_was_never_trained_says_so(run, small, tmp_path, capsys):
    (tmp_path / "line").write_text("day\n")
    for step, warned in ((0, True), (2, False)):
        arguments = ["translate", str(run / f"step-{step:08d}"), "--input", str(tmp_path / "line")]
        assert cli.main([*arguments, "--beam", "1", "--output", str(tmp_path / "out")]) == 0
        assert ("has not been trained yet" in capsys.readouterr().err) is warned


def test_a_run_stopped_before_its_first_update_resumes(run, small, tmp_path):
    started = tmp_path / "started"
    shutil.copytree(run / "step-00000000", started / "step-00000000")
    assert cli.main(train_arguments(small, started, "--max-steps", "2", "--resume")) == 0
    assert (started / "step-00000002/model.safetensors").read_bytes() == (
        run / "step-00000002/model.safetensors"
    ).read_bytes()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_bar_on_a_terminal(small, tmp_path, monkeypatch):
    """The bar shows the run's settings before the first update, moves with each, ends at 100 % and fits into 80
    columns."""
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    monkeypatch.setattr(tqdm.tqdm, "__init__", functools.partialmethod(tqdm.tqdm.__init__, mininterval=0))
    assert cli.main(train_arguments(small, tmp_path / "run", "--max-steps", "3", "--max-minutes", "600")) == 0
    lines = [line for line in screen.getvalue().replace("\r", "\n").split("\n") if line]
    begun, warning, first, *bar = lines
    assert re.fullmatch(r"learning a vocabulary of \d+ pieces", begun)
    assert warning.startswith("warning: 60 of 60 validation sources also stand in the training text")
    assert first.startswith("tiny: ")
    assert first.endswith("fp32, batches of 300 tokens, 3 updates or 600 min")
    assert max(map(len, (first, *bar))) <= 80
    seen = re.findall(r"(\d+)%\|.*\| update (\d+)", screen.getvalue().replace("\r", "\n"))
    assert list(dict.fromkeys(seen)) == [("0", "0"), ("33", "1"), ("67", "2"), ("100", "3")]
    scored = screen.getvalue().index("update 3: validation loss")
    assert "100%|" in screen.getvalue()[:scored]  # the update is shown before the scoring, which takes long
    assert "update 3, loss " in screen.getvalue()


@pytest.mark.slow
def test_the_bar_knows_the_limit_in_time(small, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    limits = ["--max-steps", "1000000", "--max-minutes", "0.01"]
    assert cli.main(train_arguments(small, tmp_path / "run", *limits)) == 0
    assert "100%|" in screen.getvalue()


def without_the_package(*arguments):
    """Run the command where nothing of the package can be imported.

    Return (exit status, stdout, stderr, seconds of processor time)."""
    program = """
        import os, sys, time
        sys.modules["torch"] = sys.modules["fastattn"] = None
        import fastattn_command
        try:
            fastattn_command.main(sys.argv[1:])
        finally:
            print(time.process_time(), file=sys.stderr)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    root = Path(fastattn.__file__).parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    err, seconds = re.fullmatch(r"(?s)(.*?)([\d.]+)\n", done.stderr).groups()
    return done.returncode, done.stdout, err, float(seconds)


TRAIN = ["--train", "a", "b", "--valid", "a", "b", "--out", "new"]


@pytest.mark.parametrize(
    ("arguments", "status", "answer"),
    [
        (["--version"], 0, f"fastattn {fastattn.__version__}\n"),
        (["--help"], 0, "usage: fastattn [-h] [--version] COMMAND"),
        (["bench", "--help"], 0, "usage: fastattn bench"),
        ([], 2, "fastattn: error: the following arguments are required: COMMAND"),
        (["trian"], 2, "fastattn: error: argument COMMAND: invalid choice: 'trian'"),
        (["info", "--colour"], 2, "fastattn info: error: unrecognized arguments: --colour (see fastattn info --help)"),
        (
            ["train", *TRAIN, "--preset", "tinny"],
            2,
            "fastattn train: error: argument --preset: invalid choice: 'tinny'",
        ),
        (["prepare", "wmt15", "out", "--archives", "."], 2, "fastattn prepare: error: argument CORPUS: invalid choice"),
        (
            ["translate", "--beam", "0"],
            2,
            "fastattn translate: error: argument --beam: 0 is given, expected a positive",
        ),
        (
            ["translate", "--attention-layer", "1"],
            2,
            "fastattn translate: error: argument --attention-layer: says what --attention draws, which is not given",
        ),
        (["translate", "--attention-kind", "self"], 2, "fastattn translate: error: argument --attention-kind: invalid"),
        (["bench", "--threads", "0"], 2, "fastattn bench: error: argument --threads: 0 is given, expected a positive"),
        (["bench", "--threads", "x"], 2, "fastattn bench: error: argument --threads: invalid int value: 'x'"),
    ],
)
def test_answers_that_need_no_torch(arguments, status, answer):
    returned, out, err, seconds = without_the_package(*arguments)
    assert (returned, (out + err)[: len(answer)]) == (status, answer)
    assert seconds < 0.3


def test_every_command_has_options():
    (commands,) = (action for action in cli.parser()._actions if action.dest == "command")
    assert tuple(commands.choices) == tuple(COMMANDS)


def test_interrupted_while_torch_is_imported(monkeypatch, capsys):
    class Finder:
        def find_spec(name, path, target=None):
            if name == "fastattn.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "fastattn.cli")
    monkeypatch.delattr(fastattn, "cli")
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
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


@pytest.mark.parametrize(
    "arguments",
    [
        ["translate", "missing", "--input", "missing", "--top-p", "0"],
        ["evaluate", "missing", "--test", "missing", "missing", "--top-p", "0"],
        ["evaluate", "missing", "--test", "missing", "missing", "--output", "missing/out"],
        ["plot", "missing", "--output", "loss.jpeg"],
        ["average", "missing", "."],
        ["import", "missing", ".", "--words", "missing", "missing"],
        ["export", "missing", "--to", "int8", "."],
        [
            "train",
            "--train",
            "missing",
            "missing",
            "--valid",
            "missing",
            "missing",
            "--out",
            "new",
            "--label-smoothing",
            "2",
        ],
        ["train", "--train", "missing", "missing", "--valid", "missing", "missing", "--out", "."],
        ["bench", "--output", "."],
    ],
    ids=lambda arguments: f"{arguments[0]} {' '.join(arguments[-2:])}",
)
def test_arguments_are_checked_before_files_are_read(arguments, capsys, tmp_path, monkeypatch):
    (tmp_path / "something").touch()
    monkeypatch.chdir(tmp_path)
    message = failure(arguments, capsys)
    assert re.search(r"top_p is 0|cannot (write|draw)|exists already|label_smoothing is 2", message), message


def test_references_are_checked_before_anything_is_translated(run, small, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fastattn.translation.search.translate", None)
    references = tmp_path / "references"
    references.write_text("God " * 300 + "\n")
    (tmp_path / "one").write_text("God\n")
    message = failure(["evaluate", run, "--test", tmp_path / "one", references], capsys)
    assert "no sentence pair of the test text has two sides of 1 to 256 pieces" in message


def test_texts_are_read_before_a_model(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(checkpoint, "load", None)
    assert "cannot read" in failure(["evaluate", run, "--test", tmp_path / "none", tmp_path / "none"], capsys)
    assert "cannot read" in failure(["translate", run, "--input", tmp_path / "none"], capsys)


def test_bad_commands(capsys):
    assert "invalid choice: 'fly'" in failure(["fly"], capsys)
    assert "arguments are required: --train, --valid, --out" in failure(["train"], capsys)


def test_without_the_train_extra(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (tmp_path / "text").write_text("The king went out.\n")
    for arguments in (train_arguments(small, tmp_path / "out"), ["translate", "--input", tmp_path / "text"]):
        message = failure(arguments, capsys)
        assert message.endswith(
            'sentencepiece is not installed; in a clone of fastattn it comes with: pip install -e ".[train]"'
        )
    assert not (tmp_path / "out").exists()


def start(arguments, **pipes):
    command = [sys.executable, "-m", "fastattn", *arguments]
    # The bits of torch's own matrix products depend on the number of threads, so the process gets as many as this one.
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    root = Path(fastattn.__file__).parent.parent  # the process imports the tested package from where it starts
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs start with SIGINT ignored
    return subprocess.Popen(command, stderr=subprocess.PIPE, cwd=root, env=environment, text=True, **pipes)


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}])
def test_the_command_bounds_spinning_unless_the_user_has(given):
    """The command sets these variables before torch's OpenMP runtime is loaded, which reads them then."""
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {name: value for name, value in os.environ.items() if name not in names} | given
    program = (
        "import os, sys, fastattn_command; assert 'torch' not in sys.modules; sys.argv = ['fastattn', 'info'];"
        f"fastattn_command.main(); print({{name: os.environ[name] for name in {names} if name in os.environ}})"
    )
    root = Path(fastattn.__file__).parent.parent
    process = subprocess.run([sys.executable, "-c", program], env=environment, cwd=root, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1] == str(given or {"GOMP_SPINCOUNT": "1000"})


@pytest.mark.slow
@pytest.mark.torch_version
def test_trained_and_translated_by_the_command(small, tmp_path):
    """Training and translation run in the precision that is fastest on this machine."""
    options = ["--vocab-size", "200", "--batch-tokens", "300", "--max-steps", "3"]
    process = start(["train", "--train", *small, "--valid", *small, "--out", str(tmp_path / "run"), *options])
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "update 3: loss " in err
    (tmp_path / "line").write_text(f"{read_lines(small[0])[0]}\n", encoding="utf-8")
    files = ["--input", str(tmp_path / "line"), "--output", str(tmp_path / "translation")]
    process = start(["translate", str(tmp_path / "run"), *files])
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert len(read_lines(tmp_path / "translation")) == 1


def until(process, beginning):
    """Read the process's stderr up to a line that starts with `beginning`."""
    while not (line := process.stderr.readline()).startswith(beginning):
        assert line, process.wait()


@pytest.mark.slow
def test_interrupted_and_resumed_is_as_never_interrupted(small, tmp_path):
    """SIGINT saves after the current update. The resumed run has the same bits as one that was never interrupted."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    process = start(train_arguments(small, broken, "--save-every", "1000", "--max-steps", "100000"))
    until(process, "update 20: ")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    step = int(checkpoint.newest(broken).name.removeprefix("step-"))
    said = err.splitlines()[-1]
    assert said == f"fastattn train: interrupted after update {step}, which is saved: --resume goes on from there"
    for arguments in ((broken, "--resume"), (whole,)):
        process = start(train_arguments(small, *arguments, "--max-steps", str(step + 2)))
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    first, second = (checkpoint.newest(run) / "model.safetensors" for run in (whole, broken))
    assert first.parent.name == second.parent.name
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.slow
def test_killed_at_random_moments(small, tmp_path):
    """A run that SIGKILL ends 9 times reaches the same bits. It is killed before the first checkpoint, between two and
    while one is written."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    moments, resume = random.Random(3), []
    for kill in range(9):
        process = start(train_arguments(small, broken, "--max-steps", "100000", "--save-every", "2", *resume))
        until(process, "tiny: " if kill > 0 else "learning a vocabulary ")
        if kill % 3 == 2:  # make progress on a slow machine too
            until(process, "update ")
        time.sleep(moments.uniform(0, 0.5) if kill > 0 else 0)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=120)
        assert process.returncode == -signal.SIGKILL
        assert checkpoint.steps(broken) or kill == 0
        resume = ["--resume"] if checkpoint.steps(broken) else []
    step = int(checkpoint.newest(broken).name.removeprefix("step-"))
    assert step > 0
    for arguments in ((broken, "--resume"), (whole,)):
        process = start(train_arguments(small, *arguments, "--max-steps", str(step + 2), "--save-every", "2"))
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    assert_same_run(whole, broken)


def assert_same_run(whole, broken):
    """Assert that two runs have equal bits in everything except timings."""
    names = [path.name for path in checkpoint.steps(whole)]
    assert names == [path.name for path in checkpoint.steps(broken)]
    for file in ("model.safetensors", "tokenizer.model", "config.json"):
        assert (whole / names[-1] / file).read_bytes() == (broken / names[-1] / file).read_bytes()
    first, second = (checkpoint.load_training(run / names[-1]) for run in (whole, broken))
    for index, moments in first["optimizer"]["state"].items():
        for name, tensor in moments.items():
            assert (tensor == second["optimizer"]["state"][index][name]).all()

    def rows(run):
        timings = ("seconds", "tokens_per_second")
        return [{k: v for k, v in row.items() if k not in timings} for row in read_metrics(run)]

    assert rows(whole) == rows(broken)
