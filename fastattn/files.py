"""Writers of files and folders, whole or not at all."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from fastattn.errors import InputError

StrPath = str | os.PathLike[str]
"""The name of a file or folder, as every function takes it."""
PARTIAL = ".partial-"
"""The prefix of names that are still being written or already being removed."""
LONGEST_NAME = 255
"""The maximum bytes of a name on Linux's file systems."""


def write_file(path: StrPath, content: bytes) -> None:
    """Write a file whole or not at all. A device or a pipe is written to directly.

    Raises:
        InputError: the file cannot be written.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():  # not resolved: a link such as /dev/stdout may lead nowhere
            path.write_bytes(content)
            return
        path = path.resolve()
        partial = path.with_name(f"{PARTIAL}{path.name}")
        try:
            partial.write_bytes(content)
            flush(partial)
            partial.replace(path)
        finally:
            with contextlib.suppress(OSError):  # a second error would hide the first
                partial.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


def check_file(path: StrPath, read: Iterable[StrPath] = ()) -> None:
    """Raise :class:`InputError` unless :func:`write_file` may write to ``path``; call it before the work.

    Args:
        read: files that the same work reads, which it must not replace.
    """
    given = Path(path)
    path = given.absolute()
    if len(os.fsencode(f"{PARTIAL}{path.name}")) > LONGEST_NAME:
        raise InputError(f"cannot write {path}: its name is too long")
    if path.is_file() and any(os.path.isfile(other) and path.samefile(other) for other in read):
        raise InputError(f"cannot write {given}: it is also read: name another file")
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder")
    if not path.parent.is_dir():
        raise InputError(f"cannot write {path}: its folder does not exist")
    if not os.access(path.parent if path.is_file() or not path.exists() else path, os.W_OK):
        raise InputError(f"cannot write {path}: permission denied")


def expect_absent(folder: StrPath) -> None:
    """Raise :class:`InputError` if the folder exists."""
    folder = Path(folder)
    if folder.exists():
        raise InputError(f"{folder} exists already: name another folder")


@contextlib.contextmanager
def written_whole(final: StrPath) -> Iterator[Path]:
    """Yield a folder to write into, which becomes ``final`` when all is written.

    Until then it has a hidden name. It is flushed to the disk before it is renamed. One process at a time writes it.

    Raises:
        InputError: ``final`` exists, or cannot be written, or is being written by another process. This process then
            leaves nothing behind.
    """
    final = Path(final)
    expect_absent(final)
    partial = final.with_name(f"{PARTIAL}{final.name}")
    with contextlib.ExitStack() as stack:
        try:
            partial.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_held(partial))
        except BlockingIOError:
            raise InputError(f"{final} is being written by another process: name another folder") from None
        except OSError as error:
            raise InputError(f"cannot write {final}: {error.strerror or error}") from None
        try:
            expect_absent(final)  # another process may have finished it meanwhile
            for left_behind in partial.iterdir():
                left_behind.unlink()
            yield partial
            for path in (*partial.iterdir(), partial):
                flush(path)
            partial.rename(final)
            flush(final.parent)
        except Exception as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError):
                raise InputError(f"cannot write {final}: {error.strerror or error}") from None
            raise


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Hold the kernel's lock of the folder.

    Raises BlockingIOError if another process has the lock, or had it and has renamed the folder since.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not (folder.exists() and os.path.samestat(os.fstat(descriptor), folder.stat())):
            raise BlockingIOError
        yield
    finally:
        os.close(descriptor)


def remove(path: StrPath) -> None:
    """Remove a link or folder. A folder is renamed first, so that its name never leads to a half-removed one."""
    path = Path(path)
    if path.is_symlink():
        path.unlink()
        return
    if not path.name.startswith(PARTIAL):
        nameless = path.with_name(f"{PARTIAL}old-{path.name}")
        if nameless.exists():  # left by an interrupted removal
            shutil.rmtree(nameless)
        path = path.rename(nameless)
    shutil.rmtree(path)


def flush(path: StrPath) -> None:
    """Flush the file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
