"""Tests of WMT14 on archives like its own, but small: fetching, checks, files written, and docs/reproduce.md run
whole."""

import contextlib
import dataclasses
import errno
import functools
import gzip
import hashlib
import http.server
import io
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tarfile
import threading
from pathlib import Path
from unittest import mock

import launched
import pytest
from conftest import refused
from sacrebleu.dataset.fake_sgml import FakeSGMLDataset
from test_cli import failure, snapshot

import fastattn
import fastattn_command as cli
from fastattn import files
from fastattn.translation import checkpoint, config, prepare
from fastattn.translation.data import VERSES, read_lines, read_parallel
from fastattn.translation.train import read_metrics

ROOT = Path(fastattn.__file__).parent.parent
PAGE = Path(__file__).resolve().parent.parent / "docs/reproduce.md"
PER_PART = 40


def sentences(part, language):
    """Return forty lines of a part, in English or in Spanish, which stands for every other language."""
    lines = read_lines(VERSES / f"dev.{'en' if language == 'en' else 'es'}")
    return lines[PER_PART * part :][:PER_PART]


def sgml(part, language, kind="src"):
    """Return a document in the form of the task's test sets, which is no well-formed XML: the outer element does not
    end."""
    lines = [f'<seg id="{number}"> {line}  &amp; </seg>' for number, line in enumerate(sentences(part, language), 1)]
    opening = f'<{kind}set setid="newstest2014" srclang="any">\n<doc docid="a">\n<p>'
    return "\n".join([opening, *lines, "</p>\n</doc>"])


def plain(part, language):
    """Return lines with the faults of the archives: an empty line, extra spaces, a carriage return, a line
    separator."""
    lines = sentences(part, language)
    lines[3] = "" if language == "en" else lines[3]
    lines[4] = f" {lines[4]}\t  x\r" if language == "en" else f"{lines[4]}\u2028x"
    return "".join(f"{line}\n" for line in lines)


def both(template, part, text=plain):
    """Return the files of a part in German and English, and in French and English."""
    return {template.format(o, side): text(part, side) for o in ("de", "fr") for side in (o, "en")}


FILES = {
    "training-parallel-europarl-v7.tgz": {
        **both("training/europarl-v7.{}-en.{}", 0),
        "training/europarl-v7.cs-en.cs": plain(0, "cs"),
    },
    "training-parallel-commoncrawl.tgz": {**both("commoncrawl.{}-en.{}", 1), "commoncrawl.de-en.annotation": "no text"},
    "training-parallel-un.tgz": {f"un/undoc.2000.fr-en.{side}": plain(2, side) for side in ("fr", "en")},
    "training-parallel-nc-v9.tgz": both("training/news-commentary-v9.{}-en.{}", 3),
    "training-giga-fren.tar": {f"giga-fren.release2.fixed.{side}.gz": plain(4, side) for side in ("fr", "en")},
    "dev.tgz": {
        **{f"dev/newstest2013.{side}": plain(5, side) for side in ("de", "en", "fr")},
        **{f"dev/newstest2013-src.{side}.sgm": sgml(5, side) for side in ("de", "en", "fr")},
        **both("dev/newstest2014-{}en-src.{}.sgm", 6, sgml),
        **both("dev/newstest2014-{}en-ref.{}.sgm", 6, functools.partial(sgml, kind="ref")),
    },
}


def pack(path, files, url):
    """Write an archive of the files' texts or bytes; return its entry for :data:`prepare.ARCHIVES`."""
    with tarfile.open(path, "w:gz" if path.suffix == ".tgz" else "w") as tar:
        for name, data in files.items():
            data = data.encode() if isinstance(data, str) else data
            data = gzip.compress(data) if name.endswith(".gz") else data
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return entry(url, path.read_bytes())


def entry(url, data):
    return prepare.Archive(url, len(data), hashlib.sha256(data).hexdigest())


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """Return the folder of the small archives, and their entries for :data:`prepare.ARCHIVES`."""
    folder = tmp_path_factory.mktemp("archives")
    assert {archive.name for archive in prepare.ARCHIVES} == FILES.keys()
    return folder, [pack(folder / archive.name, FILES[archive.name], archive.url) for archive in prepare.ARCHIVES]


@pytest.fixture
def known(archives, monkeypatch):
    """Return the folder of the small archives, which are made the expected ones."""
    folder, known = archives
    monkeypatch.setattr(prepare, "ARCHIVES", known)
    return folder


@pytest.mark.parametrize(("other", "parts"), [("de", (0, 1, 3)), ("fr", (0, 1, 2, 3, 4))])
def test_the_text_of_a_corpus(known, tmp_path, capsys, other, parts):
    """The test set is what sacrebleu's own reader gives for the same file."""
    out = tmp_path / "text"
    assert cli.main(["prepare", f"wmt14-en-{other}", str(out), "--archives", str(known)]) == 0
    number = len(parts) * (PER_PART - 1)
    assert capsys.readouterr().out == (
        f"{out} holds {number} pairs for train, {PER_PART - 1} pairs for dev, {PER_PART} pairs for test\n"
    )
    for split, wanted in (("train", parts), ("dev", (5,))):
        found = read_parallel(out / f"{split}.en", out / f"{split}.{other}")
        for side, language in zip(found, ("en", other), strict=True):
            lines = [line for part in wanted for i, line in enumerate(plain(part, language).split("\n")[:-1]) if i != 3]
            assert side == [" ".join(line.split()) for line in lines]
    for language in ("en", other):
        (tmp_path / "sgm").write_text(FILES["dev.tgz"][f"dev/newstest2014-{other}en-src.{language}.sgm"])
        FakeSGMLDataset("wmt14/full")._convert_format(str(tmp_path / "sgm"), str(tmp_path / "plain"))
        assert (out / f"test.{language}").read_bytes() == (tmp_path / "plain").read_bytes()
    manifest = json.loads((out / "manifest.json").read_text())
    names = {f"{split}.{side}" for split in ("train", "dev", "test") for side in ("en", other)}
    assert manifest["files"] == {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in names}
    assert sum(manifest["pairs"]["train"].values()) == number
    assert {path.name for path in out.iterdir()} == {*names, "manifest.json"}


def test_every_archive_has_a_published_checksum():
    for archive in prepare.ARCHIVES:
        assert re.fullmatch("[0-9a-f]{64}", archive.sha256)
        assert archive.url.startswith("https://")
    names = [archive.name for archive in prepare.ARCHIVES]
    assert {part.archive for *_, parts in prepare.CORPORA.values() for part in parts} == set(names)


# --- what can go wrong ---


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], r"has \d+ bytes, expected \d+ bytes: it is not https://.*; remove it to fetch that"),
        (lambda data: data[:-1] + b"x", r"has sha256 [0-9a-f]{64}, expected sha256 [0-9a-f]{64}"),
    ],
)
def test_another_archive_is_refused(known, tmp_path, capsys, damage, message):
    folder, text = tmp_path / "archives", tmp_path / "text"
    shutil.copytree(known, folder)
    bad = folder / "training-parallel-commoncrawl.tgz"
    bad.write_bytes(damage(bad.read_bytes()))
    before = snapshot(folder)
    assert re.search(message, failure(["prepare", "wmt14-en-de", text, "--archives", folder], capsys))
    assert not text.exists()
    assert snapshot(folder) == before


@pytest.mark.parametrize(
    ("german", "message"),
    [
        (b"eins\n", r"the two sides of news-commentary.* differ in length: one ends before line 2"),
        (b"eins\nzw\xf6lf\n", r"news-commentary.* is not UTF-8 in line 2"),
        (None, r"nc-v9.tgz has no file that is called news-commentary-v9.*de"),
    ],
)
def test_archives_of_other_content(tmp_path, monkeypatch, german, message):
    """Archives of other content are refused, and no text is written from half of a corpus."""
    files = {"news-commentary-v9.de-en.en": b"one\ntwelve\n", "news-commentary-v9.de-en.de": german}
    name = "training-parallel-nc-v9.tgz"
    files = {name: data for name, data in files.items() if data is not None}
    monkeypatch.setattr(prepare, "ARCHIVES", [pack(tmp_path / name, files, f"https://x/{name}")])
    refused(message, prepare.prepare, "wmt14-en-de", tmp_path, tmp_path / "text")
    assert not (tmp_path / "text").exists()


def test_a_disk_that_is_full(known, tmp_path):
    """A full disk is reported as such, not as an unreadable archive."""
    message = r"cannot unpack .*europarl-v7.tgz: .*No space left on device"
    with mock.patch("shutil.copyfileobj", side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))):
        refused(message, prepare.prepare, "wmt14-en-de", known, tmp_path / "text")
    assert not list(tmp_path.iterdir())


# --- fetching ---


DATA = os.urandom(2500)


class Server(http.server.BaseHTTPRequestHandler):
    """Server of DATA, ``piece`` bytes per connection. It records the offsets requested, and sends ``page`` instead if
    there is one."""

    piece, ranges, page, shift = 10**9, True, None, 0

    def do_GET(self):
        first = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-")) if self.ranges else 0
        self.asked.append(first)
        content = DATA[first:] if self.page is None else self.page
        self.send_response(206 if self.ranges else 200)
        self.send_header("Content-Length", str(len(content)))
        if self.ranges:
            self.send_header("Content-Range", f"bytes {first + self.shift}-{len(DATA) - 1}/{len(DATA)}")
        self.end_headers()
        self.wfile.write(content[: self.piece])

    def log_message(self, *_):
        pass


@pytest.fixture
def serve():
    """Return a function that starts a server of DATA and returns its archive and the list of the offsets requested."""
    with contextlib.ExitStack() as stack:

        def start(**behaviour):
            handler = type("Handler", (Server,), {"asked": [], **behaviour})
            server = stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            stack.callback(server.shutdown)
            return entry(f"http://127.0.0.1:{server.server_port}/folder/dev.tgz", DATA), handler.asked

        yield start


@pytest.fixture
def part(tmp_path):
    """Return the file with the first 300 bytes that an interrupted download has left."""
    (tmp_path / "dev.tgz.part").write_bytes(DATA[:300])
    return tmp_path / "dev.tgz.part"


def test_an_archive_is_fetched_once(serve, tmp_path):
    archive, asked = serve()
    for _ in range(2):
        prepare.fetch(archive, tmp_path)
    assert asked == [0]
    assert {path.name for path in tmp_path.iterdir()} == {"dev.tgz", checkpoint.LOCK}


@pytest.mark.parametrize(
    ("behaviour", "offsets"), [({"piece": 1000}, [300, 1300, 2300]), ({"ranges": False}, [0])], ids=["pieces", "whole"]
)
def test_an_interrupted_download_goes_on(serve, tmp_path, part, behaviour, offsets):
    """A download continues from what an earlier run has left, and from where the connection breaks. A server that knows
    no ranges sends it whole."""
    archive, asked = serve(**behaviour)
    prepare.fetch(archive, tmp_path)
    assert asked == offsets
    assert (tmp_path / "dev.tgz").read_bytes() == DATA


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ({"ranges": False, "page": b"<html>Log in</html>"}, "Content-Length 19, expected 2500"),
        ({"shift": 7}, "Content-Range bytes 307-2499/2500, expected bytes 300-2499/2500"),
    ],
    ids=["page", "range"],
)
def test_an_answer_of_something_else_leaves_what_there_is(serve, tmp_path, part, behaviour, message):
    """The part is kept if a network's gate sends a page instead of the file, or if a range begins elsewhere."""
    archive, asked = serve(**behaviour)
    message = f"cannot fetch http.*: the answer is something else, of {message}; r"
    refused(message, prepare.fetch, archive, tmp_path)
    assert len(asked) == 1
    assert part.read_bytes() == DATA[:300]


def test_two_do_not_download_into_one_folder(serve, tmp_path):
    """A second process is refused while the folder is locked, but may use an archive that is there."""
    archive, asked = serve()
    with checkpoint.locked(tmp_path):
        message = f"{tmp_path} is being written by process {os.getpid()} on .*: w"
        refused(message, prepare.fetch, archive, tmp_path)
        (tmp_path / "dev.tgz").write_bytes(DATA)
        prepare.fetch(archive, tmp_path)
    assert asked == []


def test_what_another_process_has_just_fetched_is_not_fetched_again(serve, tmp_path, monkeypatch):
    """An archive that was missing before the lock was free, and is there afterwards, is not fetched."""
    archive, asked = serve()
    at_once = contextlib.nullcontext
    monkeypatch.setattr(checkpoint, "locked", lambda folder: at_once((folder / "dev.tgz").write_bytes(DATA)))
    prepare.fetch(archive, tmp_path)
    assert asked == []


def test_two_do_not_write_one_folder(tmp_path):
    """The second writer is refused and does not touch what the first one writes. Files that a killed one left are
    removed."""
    out, partial = tmp_path / "out", tmp_path / ".partial-out"
    partial.mkdir()
    (partial / "of a killed one").touch()
    with files.written_whole(out) as folder:
        (folder / "train.en").touch()
        message = f"{out} is being written by another process: name another f"
        refused(message, files.written_whole(out).__enter__)
    assert list(tmp_path.rglob("*")) == [out, out / "train.en"]


@pytest.mark.parametrize("step", ["pathlib.Path.mkdir", "fcntl.flock"])
def test_the_other_finishes_while_the_second_begins(tmp_path, step):
    """The second writer is refused if the first one finishes before the second makes its hidden folder, or just after
    it has opened the first one's."""
    out, partial, original = tmp_path / "out", tmp_path / ".partial-out", pkgutil.resolve_name(step)

    def with_another(*args, **options):
        patch.stop()
        partial.mkdir(exist_ok=True)
        (partial / "train.en").touch()
        partial.rename(out)
        return original(*args, **options)

    patch = mock.patch(step, with_another)
    patch.start()
    refused(r"exists already|is being written", files.written_whole(out).__enter__)
    assert list(tmp_path.rglob("*")) == [out, out / "train.en"]


def test_what_cannot_be_fetched(serve, tmp_path):
    archive, asked = serve(piece=0)
    message = r"cannot fetch http.*: the connection ended at 0 of 2500 bytes; run this"
    refused(message, prepare.fetch, archive, tmp_path)
    assert asked == [0]
    archive = prepare.Archive("http://127.0.0.1:1/dev.tgz", 5, "")  # where nobody answers
    message = f"cannot fetch {archive.url}: .*refused.*; run this again to go on, or put the file into"
    refused(message, prepare.fetch, archive, tmp_path)


def test_a_download_of_something_else_is_removed(serve, tmp_path):
    archive = dataclasses.replace(serve()[0], sha256="0" * 64)
    message = f"^{archive.url} has sha256 .* expected sha256 0000.*; run this again, or put the file into {tmp_path}$"
    refused(message, prepare.fetch, archive, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.LOCK]


# --- docs/reproduce.md ---

SMALL = {"--nproc-per-node 8": "--nproc-per-node 2"} | dict.fromkeys(
    ("--preset base --vocab-size 32000", "--preset base", "--preset big", "--config big-fr.json"),
    "--config small.json",
)


@pytest.mark.slow
def test_the_road_of_the_page(archives, tmp_path):
    """Every command of the page runs, in order, on the small archives, with a small model on two processes."""
    folder, known = archives
    small = {"vocab_size": 400, "d_model": 32, "d_ff": 64, "num_heads": 4, "encoder_layers": 1, "decoder_layers": 1}
    training = {"batch_tokens": 1000, "max_steps": 20, "save_every": 1, "keep": 20, "precision": "fp32"}
    (tmp_path / "small.json").write_text(json.dumps({**small, "training": training}))
    program = tmp_path / "bin/fastattn"
    program.parent.mkdir()
    (tmp_path / "archives").symlink_to(folder)
    path = f"{program.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "SACREBLEU": str(tmp_path / "sacrebleu")}
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    commands = "".join(blocks).replace("\\\n", " ")  # a line that ends in a backslash continues
    of_archives = [dataclasses.astuple(archive) for archive in known]
    first = (
        "from fastattn.translation import prepare\n"
        f"prepare.ARCHIVES = [prepare.Archive(*archive) for archive in {of_archives!r}]\n"
    )
    with launched.command(program, functools.partial(exec, first, {})):
        for command in filter(str.strip, commands.splitlines()):
            for given, smaller in SMALL.items():
                command = command.replace(given, smaller)
            done = subprocess.run(
                command, shell=True, cwd=tmp_path, env=os.environ | own, capture_output=True, text=True
            )
            assert done.returncode == 0, f"{command}\n{done.stderr}"
            if "fastattn evaluate" in command:
                assert "the kind that the paper reports" in done.stdout
    for run in ("base", "big", "base-fr", "big-fr"):
        assert read_metrics(tmp_path / run)[-1]["step"] == 20
        assert checkpoint.updates(tmp_path / f"{run}-average") == 20


def test_the_file_of_the_page_is_the_papers_big_model_of_french():
    """The big model of French has, by section 6.1 and the note on Table 2, a dropout of 0.1 instead of 0.3."""
    (block,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    model, training = config.from_json(block)
    assert model == config.TransformerConfig.preset("big", 32_000, dropout=0.1)
    assert training == config.TrainingConfig.of_preset("big")
