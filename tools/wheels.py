"""Build the release into dist/, the sdist and a wheel per architecture: ``python tools/wheels.py [ARCHITECTURE ...]``.

A wheel serves every Python and every torch from 2.10 on. It has the CPU library with the kernels of every instruction
set, and the launcher of Triton's kernels. For x86-64 it has the CUDA library too, for the drivers of nvcc's major
version of CUDA and later ones, unless ``FASTATTN_CUDA=0``. It needs no newer glibc than torch's own wheels: auditwheel
finds the platform by the versions of its symbols. twine checks the metadata. A wheel for another architecture is
cross-compiled by Debian's ``ARCHITECTURE-linux-gnu-g++``.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "csrc"))
import native_build  # noqa: E402

LARGEST = 15_000_000  # bytes, without the CUDA library
LARGEST_CUDA = 10_000_000  # bytes of that library, compressed
THIS = os.uname().machine


def run(*command: object, **environment: str) -> None:
    """Run the command. Raise CalledProcessError if it fails."""
    print("+", *command, flush=True)
    subprocess.run([str(word) for word in command], cwd=ROOT, env=os.environ | environment, check=True)


def imitate_torch(folder: Path, compiler: str) -> None:
    """Make a package ``torch`` to build against: this torch's headers, and a library for another architecture."""
    torch = native_build.torch_for_building()
    (folder / "torch/lib").mkdir(parents=True)
    (folder / "torch/include").symlink_to(torch / "include")
    shutil.copy(torch / "version.py", folder / "torch")
    symbols = ["nm", "-D", "--defined-only", "--format=just-symbols", torch / "lib/libtorch_cpu.so"]
    names = subprocess.run(symbols, check=True, capture_output=True, text=True).stdout.split()
    stable = [name for name in names if re.match(r"(aoti_)?torch_\w+$", name)]  # functions of the stable ABI
    native_build.imitate_library(folder / "torch/lib/libtorch_cpu.so", stable, [compiler])


def libraries(architecture: str) -> dict[str, str]:
    """Return the variables that choose what the wheel's libraries have."""
    has_cuda = architecture == THIS == "x86_64" and os.environ.get("FASTATTN_CUDA") != "0"
    settings = {"FASTATTN_BUILD": "1", "FASTATTN_CPU_BUILD": "all", "FASTATTN_CUDA": "1" if has_cuda else "0"}
    if has_cuda and not os.environ.get("TORCH_CUDA_ARCH_LIST"):  # else the architectures of this machine's GPUs
        settings["TORCH_CUDA_ARCH_LIST"] = ";".join(native_build.usual_architectures(native_build.nvcc()[0]))
    return settings


def build(architecture: str, sdist: Path, folder: Path) -> Path:
    """Build the wheel from the sdist inside an empty folder and return it, its platform checked."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    settings = libraries(architecture)
    if architecture != THIS:
        compiler = f"{architecture}-linux-gnu-g++"
        imitate_torch(folder / "imitated", compiler)
        settings |= {"CXX": compiler, "PYTHONPATH": str(folder / "imitated")}
        settings["_PYTHON_HOST_PLATFORM"] = f"linux-{architecture}"
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, source, **settings)
    (wheel,) = folder.glob("*.whl")
    torch = ["--exclude", "libtorch_cpu.so", "--exclude", "libtorch_cuda.so"]
    options = ["--plat", "auto", *torch, "--wheel-dir", folder / "checked"]
    run(sys.executable, "-m", "auditwheel", "repair", *options, wheel)
    (checked,) = (folder / "checked").iterdir()
    glibc = re.search(rf"-py3-none-.*manylinux_2_(\d+)_{architecture}\.", checked.name)
    if glibc is None or (2, int(glibc[1])) > native_build.OLDEST_GLIBC:
        raise SystemExit("{} is not for glibc {}.{}".format(checked.name, *native_build.OLDEST_GLIBC))
    check_size(checked)
    return checked


def check_size(wheel: Path) -> None:
    """Exit if the wheel is larger than wanted."""
    with zipfile.ZipFile(wheel) as archive:
        cuda = sum(part.compress_size for part in archive.infolist() if part.filename == "fastattn/_cuda.so")
    for name, size, largest in (
        ("the CUDA library", cuda, LARGEST_CUDA),
        ("the rest", wheel.stat().st_size - cuda, LARGEST),
    ):
        if size > largest:
            raise SystemExit(f"{wheel.name}: {name} has {size / 1e6:.1f} MB, at most {largest / 1e6} are wanted")


def main(architectures: list[str]) -> None:
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", dist)
    (sdist,) = dist.iterdir()
    for architecture in architectures or native_build.INSTRUCTION_SETS:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(build(architecture, sdist, Path(folder)), dist)
    files = sorted(dist.iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    for file in files:
        print(f"{file.stat().st_size / 1e6:5.1f} MB  {file.relative_to(ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1:])
