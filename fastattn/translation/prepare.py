"""WMT14's parallel text, from its archives to the plain text that training and evaluation read.

Training text is the task's whole training text. Validation is newstest2013, on which the paper chose its models. Test
is the whole of newstest2014, as in ``sacrebleu -t wmt14/full``. Each line is one sentence of the archives, changed only
to single spaces. Pairs with an empty side are left out. The text is not tokenised, because the vocabulary is learned
from raw text.
"""

import contextlib
import dataclasses
import hashlib
import http.client
import itertools
import json
import re
import shutil
import sys
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from gzip import GzipFile
from pathlib import Path
from typing import IO, cast

from fastattn.errors import InputError, require
from fastattn.files import StrPath, written_whole
from fastattn.translation import checkpoint

MANIFEST = "manifest.json"
BLOCK = 2**20
PATIENCE = 60  # timeout in seconds without a byte
SEGMENT = re.compile(rb"<seg .*?>(.*)</seg>")


@dataclasses.dataclass(frozen=True)
class Archive:
    """Tar file at its publisher. Sizes and checksums are those that TensorFlow Datasets has published."""

    url: str
    size: int
    sha256: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


ARCHIVES = [
    Archive(
        "https://www.statmt.org/wmt13/training-parallel-europarl-v7.tgz",
        657_632_379,
        "0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7",
    ),
    Archive(
        "https://www.statmt.org/wmt13/training-parallel-commoncrawl.tgz",
        918_311_367,
        "c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5",
    ),
    Archive(
        "https://www.statmt.org/wmt13/training-parallel-un.tgz",
        2_365_634_246,
        "29141b5c1eba149a94f7a59d3b1a834b2e47fe0f8758d68dcd77a3d3f497ee47",
    ),
    Archive(
        "https://www.statmt.org/wmt14/training-parallel-nc-v9.tgz",
        80_418_416,
        "cb8953f292298e6877ae433c98912b927cb0766b303f4540512ddd286c748485",
    ),
    Archive(
        "https://www.statmt.org/wmt10/training-giga-fren.tar",
        2_595_102_720,
        "3ff8319f6919393520559bfbc7ad6a747ec81b3abc7be9993b338d4b017b4d9a",
    ),
    Archive(
        "https://data.statmt.org/wmt19/translation-task/dev.tgz",
        38_654_961,
        "7a7deccf82ebb05ba508dba5eb21356492224e8f630ec4f992132b029b4b25e7",
    ),
]


@dataclasses.dataclass(frozen=True)
class Part:
    """Parallel text in an archive: a pattern of the names of its two files, in which ``{}`` stands for the language."""

    split: str
    archive: str
    file: str


def _parts(language: str, *more: Part) -> tuple[Part, ...]:
    """Return the task's parallel text of English and ``language``."""
    return (
        Part("train", "training-parallel-europarl-v7.tgz", rf"europarl-v7\.{language}-en\.{{}}"),
        Part("train", "training-parallel-commoncrawl.tgz", rf"commoncrawl\.{language}-en\.{{}}"),
        Part("train", "training-parallel-nc-v9.tgz", rf"news-commentary-v9\.{language}-en\.{{}}"),
        *more,
        Part("dev", "dev.tgz", r"newstest2013\.{}"),
        # Each side is the source of one direction and the reference of the other, with the same sentences.
        Part("test", "dev.tgz", rf"newstest2014-{language}en-(src|ref)\.{{}}\.sgm"),
    )


CORPORA = {
    "wmt14-en-de": ("en", "de", _parts("de")),
    "wmt14-en-fr": (
        "en",
        "fr",
        _parts(
            "fr",
            Part("train", "training-parallel-un.tgz", r"undoc\.2000\.fr-en\.{}"),
            Part("train", "training-giga-fren.tar", r"giga-fren\.release2\.fixed\.{}\.gz"),
        ),
    ),
}


def prepare(corpus: str, archives: StrPath, out: StrPath) -> dict[str, int]:
    """Write the new folder ``out``: ``train``, ``dev`` and ``test``, each with one file ``.LANGUAGE`` per language.

    Line n of one file translates line n of the other. ``out/manifest.json`` holds the checksums of the archives, the
    number of pairs of each part, and the checksums of the files.

    Args:
        corpus: a key of :data:`CORPORA`.
        archives: the folder of the archives. Missing archives are fetched, and an interrupted download is continued.

    Returns:
        The number of pairs of each split.

    Raises:
        InputError: ``out`` exists, an archive differs from the expected one or cannot be fetched, or its text does not
            pair up. After an error there is no new ``out``.
    """
    archives = Path(archives)
    if corpus not in CORPORA:
        raise InputError(f"unknown corpus {corpus!r}, expected one of {', '.join(CORPORA)}")
    *languages, parts = CORPORA[corpus]
    archives.mkdir(parents=True, exist_ok=True)
    with written_whole(out) as folder:
        used = [archive for archive in ARCHIVES if any(part.archive == archive.name for part in parts)]
        for archive in used:
            fetch(archive, archives)
        pairs: dict[str, dict[str, int]] = {part.split: {} for part in parts}
        for archive in used:
            print(f"reading {archive.name}", file=sys.stderr, flush=True)
            own = [part for part in parts if part.archive == archive.name]
            for part, sides in _extract(archives / archive.name, own, languages, folder).items():
                texts = [folder / f"{part.split}.{language}" for language in languages]
                pairs[part.split][part.file] = _append(part, sides, texts)
        manifest = {
            "corpus": corpus,
            "archives": {archive.url: archive.sha256 for archive in used},
            "pairs": pairs,
            "files": {path.name: _sha256(path) for path in sorted(folder.iterdir())},
        }
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return {split: sum(numbers.values()) for split, numbers in pairs.items()}


def fetch(archive: Archive, folder: StrPath) -> None:
    """Fetch the archive into ``folder`` unless it is there, and check its size and checksum.

    A download goes into a separate file, NAME.part. The next download continues at its end. Only one process at a time
    downloads into a folder.

    Raises:
        InputError: the archive cannot be fetched, the file differs from it, or another process downloads into the
            folder.
    """
    folder = Path(folder)
    path = folder / archive.name
    with contextlib.ExitStack() as stack:
        if not path.exists():
            stack.enter_context(checkpoint.locked(folder))
        if path.exists():  # tested under the lock, because its last holder may have fetched the file
            if difference := _difference(archive, path):
                raise InputError(f"{path} {difference}: it is not {archive.url}; remove it to fetch that")
            return
        part = path.with_name(f"{path.name}.part")
        _download(archive, part)
        if difference := _difference(archive, part):
            part.unlink()  # continuing would not correct it
            raise InputError(f"{archive.url} {difference}; run this again, or put the file into {folder}")
        part.rename(path)


def _download(archive: Archive, part: Path) -> None:
    """Continue ``part`` to the archive's size; a broken connection is opened again if it has brought any bytes.

    If the answer has neither the size of the rest nor that of the whole, such as a proxy's page, ``part`` is unchanged.
    """
    bar = require("tqdm").tqdm(
        total=archive.size, unit="B", unit_scale=True, desc=archive.name, ncols=80, disable=not sys.stderr.isatty()
    )
    with bar:
        while (have := _size(part)) < archive.size:
            bar.update(have - bar.n)
            problem: object = f"the connection ended at {have} of {archive.size} bytes"
            request = urllib.request.Request(archive.url, headers={"Range": f"bytes={have}-"})
            try:
                with contextlib.ExitStack() as stack:
                    response = stack.enter_context(urllib.request.urlopen(request, timeout=PATIENCE))
                    mode, header, wanted = "wb", "Content-Length", str(archive.size)
                    if response.status == 206:
                        mode, header, wanted = "ab", "Content-Range", f"bytes {have}-{archive.size - 1}/{archive.size}"
                    if (given := response.headers.get(header, "none")) == wanted:
                        file = stack.enter_context(open(part, mode))
                        while block := response.read(BLOCK):
                            file.write(block)
                            bar.update(len(block))
                    else:
                        problem = f"the answer is something else, of {header} {given}, expected {wanted}"
            except urllib.error.URLError as error:
                problem = error.reason
            except (OSError, http.client.HTTPException) as error:
                problem = error
            if _size(part) <= have:
                mend = f"run this again to go on, or put the file into {part.parent}"
                raise InputError(f"cannot fetch {archive.url}: {problem}; {mend}")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _difference(archive: Archive, path: Path) -> str:
    """Return how a file differs from the expected archive, or ""."""
    if (size := path.stat().st_size) != archive.size:
        return f"has {size} bytes, expected {archive.size} bytes"
    digest = _sha256(path)
    return "" if digest == archive.sha256 else f"has sha256 {digest}, expected sha256 {archive.sha256}"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _extract(archive: Path, parts: list[Part], languages: list[str], folder: Path) -> dict[Part, list[Path]]:
    """Extract the two files of each part into ``folder``, in one pass over the archive; return their paths."""
    files = [(part, language, re.compile(part.file.format(language))) for part in parts for language in languages]
    found: dict[tuple[Part, str], Path] = {}
    try:
        with tarfile.open(archive, "r|*") as tar:
            for member in tar:
                name = member.name.rpartition("/")[2]
                for part, language, pattern in files:
                    if (part, language) in found or not member.isfile() or not pattern.fullmatch(name):
                        continue
                    packed = cast(IO[bytes], tar.extractfile(member))
                    path = found[part, language] = folder / f"part-{len(found)}"
                    with open(path, "wb") as copy:
                        shutil.copyfileobj(GzipFile(fileobj=packed) if name.endswith(".gz") else packed, copy, BLOCK)
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise InputError(f"cannot unpack {archive}: {error}") from None
    missing = [pattern.pattern for part, language, pattern in files if (part, language) not in found]
    if missing:
        raise InputError(f"{archive} has no file that is called {missing[0]}")
    return {part: [found[part, language] for language in languages] for part in parts}


def _append(part: Part, sides: list[Path], files: list[Path]) -> int:
    """Append the pairs of two extracted files to two ``files`` of text; return their number.

    The extracted files are removed.
    """
    number = kept = 0
    with contextlib.ExitStack() as stack:
        sources, targets = (stack.enter_context(open(path, "rb")) for path in sides)
        outputs = [stack.enter_context(open(path, "ab")) for path in files]
        lines = _segments if part.file.endswith("sgm") else iter
        for number, pair in enumerate(itertools.zip_longest(lines(sources), lines(targets)), 1):
            if None in pair:
                raise InputError(f"the two sides of {part.file} differ in length: one ends before line {number}")
            try:
                texts = [" ".join(line.decode().split()) for line in pair]
            except UnicodeDecodeError as error:
                raise InputError(f"{part.file} is not UTF-8 in line {number}: {error}") from None
            if all(texts):
                kept += 1
                for text, output in zip(texts, outputs, strict=True):
                    output.write(f"{text}\n".encode())
    for path in sides:
        path.unlink()
    return kept


def _segments(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the sentences of the task's SGML, one per line, with entities unchanged; no parser reads its SGML."""
    return (match[1] for line in file if (match := SEGMENT.match(line)))
