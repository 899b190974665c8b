"""Run the tests that depend on the versions of torch and Python, on the oldest and newest of both:
``python tools/torch_versions.py [--wheel FILE | --prepare] [VERSION OF TORCH ...]``.

The checkout's sdist, and from it the wheel, is built once, against the torch of this Python, unless a wheel is given.
The wheel is installed into an environment of each version, where the tests marked `torch_version` run on it, except
parameters marked `this_torch`. The environments take some GB each and are kept in ``$FASTATTN_CACHE``, by default
``~/.cache/fastattn``; --prepare makes them and does nothing else. The exit status is 1 if a test fails or a version
cannot be installed. If there is no such Python, this one is used, unless ``FASTATTN_REQUIRE`` has "pythons".
"""

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent import futures
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = {"2.10.0": "3.10", "2.14.1": "3.13"}  # Python by torch
MARKS = "torch_version and not this_torch"
# Names of tests: of the backends reference and cpu, on the best instruction set, and of Triton's compiler.
TESTS = "not (triton or cuda or cpu:) or bindings or ahead_of_time"
SPACE = 12 << 30  # bytes for an environment with a CUDA build of torch, and for pip's copy of its downloads


def cache() -> Path:
    return Path(
        os.environ.get("FASTATTN_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "fastattn")
    ).expanduser()


def run(*command: object, cwd: Path = ROOT, **environment: str) -> None:
    """Run the command. Raise CalledProcessError if it fails."""
    print("+", *command, flush=True)
    subprocess.run([str(word) for word in command], cwd=cwd, env=os.environ | environment, check=True)


def python(version: str) -> str:
    """Return the interpreter of this version, on the PATH or from pyenv, else this one."""
    installed = Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python")
    for found in (f"python{version}", *map(str, installed)):
        try:
            subprocess.run([found, "-m", "venv", "--help"], capture_output=True, check=True)
            return found
        except (OSError, subprocess.CalledProcessError):
            continue
    words = f"there is no Python {version} with its venv module, on the PATH or of pyenv"
    if "pythons" in os.environ.get("FASTATTN_REQUIRE", "").split(","):
        raise OSError(words)
    print(f"{words}: {sys.executable} takes its place", flush=True)
    return sys.executable


def environment(version: str) -> Path:
    """Return the folder of an environment with this torch. Make it if it is missing or incomplete.

    Another process that makes it is waited for.
    """
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / f"torch-{version}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _environment(version)


def _environment(version: str) -> Path:
    folder, interpreter = cache() / f"torch-{version}", python(VERSIONS.get(version, "3.11"))
    if not ((folder / "complete").exists() and (folder / "bin/python").exists()):  # a link, whose Python may be gone
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        free = shutil.disk_usage(folder).free
        if free < SPACE:
            raise OSError(f"torch {version} needs {SPACE / 1e9:.0f} GB in {folder}, of which {free / 1e9:.0f} are free")
        run(interpreter, "-m", "venv", folder)
        run(*pip(folder), f"torch=={version}")
        (folder / "complete").touch()
    return folder


def pip(folder: Path) -> tuple[object, ...]:
    # Not compiled: Python compiles what the tests import.
    return folder / "bin/python", "-m", "pip", "install", "--quiet", "--no-compile"


def installed(version: str, wheel: Path) -> Path:
    """Install the wheel and the packages of its tests into this torch's environment, and return its folder."""
    folder = environment(version)
    (folder / "complete").unlink()
    run(*pip(folder), f"torch=={version}", f"{wheel}[test]")
    run(*pip(folder), "--no-deps", "--force-reinstall", wheel)
    (folder / "complete").touch()
    return folder


def test(folder: Path) -> None:
    """Run the tests of the wheel in this environment. Raise CalledProcessError if one fails."""
    files = sorted(file for file in (ROOT / "tests").glob("test_*.py") if "torch_version" in file.read_text())
    pytest = folder / "bin/python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *files
    tests = "-m", MARKS, "-k", TESTS
    # In that folder `import fastattn` finds the wheel's package. Two tests run at a time, with one thread each. Python
    # keeps what it compiles of torch.
    settings = {"FASTATTN_REQUIRE": "cpu,triton", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    run(*pytest, *tests, "-n", "2", "--dist", "worksteal", cwd=folder, **settings)


def main(versions: list[str], wheel: Path | None, prepare: bool) -> int:
    failed: list[str] = []
    # An environment is made while the wheel is built, or while the tests of the previous one run.
    background = futures.ThreadPoolExecutor(1)
    folders = {version: background.submit(environment, version) for version in versions or VERSIONS}
    with tempfile.TemporaryDirectory() as target:
        try:
            if wheel is None and not prepare:
                build = sys.executable, "-m", "build", "--no-isolation", "--outdir", target, ROOT
                run(*build, FASTATTN_BUILD="1", FASTATTN_CUDA="0")
                (wheel,) = Path(target).glob("*.whl")
            if wheel is not None:
                folders = {version: background.submit(installed, version, wheel) for version in folders}
            for version, folder in folders.items():
                try:
                    made = folder.result()
                    if wheel is not None:
                        test(made)
                except (OSError, subprocess.CalledProcessError) as error:
                    failed.append(f"torch {version}: {error}")
        finally:
            background.shutdown(wait=False, cancel_futures=True)
    print(*failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--wheel", type=Path, help="the wheel to test, instead of one that is built here")
    either.add_argument("--prepare", action="store_true", help="make the environments and do nothing else")
    parser.add_argument("versions", nargs="*", metavar="VERSION")
    args = parser.parse_args()
    sys.exit(main(args.versions, args.wheel and args.wheel.resolve(), args.prepare))
