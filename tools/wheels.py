"""Build the release into dist/, the sdist and a wheel per architecture: ``python tools/wheels.py [ARCHITECTURE ...]``.

A wheel serves every Python and every torch from 2.10 on. It has the CPU library with the kernels of every instruction
set, and no CUDA library: on CUDA tensors Triton's kernels run. It needs no newer glibc than torch's own wheels:
auditwheel finds the platform by the versions of its symbols. twine checks the metadata. A wheel for another
architecture is cross-compiled by Debian's ``ARCHITECTURE-linux-gnu-g++``.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "csrc"))
import native_build  # noqa: E402

NEWEST_GLIBC = 28  # minor version
LARGEST = 15_000_000  # bytes
THIS = os.uname().machine


def run(*command: object, **environment: str) -> None:
    """Run the command. Raise CalledProcessError if it fails."""
    print("+", *command, flush=True)
    subprocess.run([str(word) for word in command], cwd=ROOT, env=os.environ | environment, check=True)


def imitate_torch(folder: Path, compiler: str) -> None:
    """Make a package ``torch`` to build against: this torch's headers, and a library for another architecture.

    The library has the names of the functions of the stable ABI and no code, which the linker does not need.
    """
    torch = native_build.torch_for_building()
    (folder / "torch/lib").mkdir(parents=True)
    (folder / "torch/include").symlink_to(torch / "include")
    shutil.copy(torch / "version.py", folder / "torch")
    symbols = ["nm", "-D", "--defined-only", "--format=just-symbols", torch / "lib/libtorch_cpu.so"]
    names = subprocess.run(symbols, check=True, capture_output=True, text=True).stdout.split()
    functions = [f"void {name}(void) {{}}" for name in names if re.match(r"(aoti_)?torch_\w+$", name)]
    (folder / "stub.c").write_text("\n".join(functions))
    library = folder / "torch/lib/libtorch_cpu.so"
    run(*compiler.split(), "-x", "c", "-shared", "-Wl,-soname,libtorch_cpu.so", "-o", library, folder / "stub.c")


def build(architecture: str, sdist: Path, folder: Path) -> Path:
    """Build the wheel from the sdist inside an empty folder and return it, its platform checked."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    settings = {"FASTATTN_BUILD": "1", "FASTATTN_CUDA": "0", "FASTATTN_CPU_BUILD": "all"}
    if architecture != THIS:
        compiler = f"{architecture}-linux-gnu-g++"
        imitate_torch(folder / "imitated", compiler)
        settings |= {"CXX": compiler, "PYTHONPATH": str(folder / "imitated")}
        settings["_PYTHON_HOST_PLATFORM"] = f"linux-{architecture}"
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, source, **settings)
    (wheel,) = folder.glob("*.whl")
    options = ["--plat", "auto", "--exclude", "libtorch_cpu.so", "--wheel-dir", folder / "checked"]
    run(sys.executable, "-m", "auditwheel", "repair", *options, wheel)
    (checked,) = (folder / "checked").iterdir()
    glibc = re.search(rf"-py3-none-.*manylinux_2_(\d+)_{architecture}\.", checked.name)
    if glibc is None or int(glibc[1]) > NEWEST_GLIBC:
        raise SystemExit(f"{checked.name} is not for glibc 2.{NEWEST_GLIBC}, the oldest of torch's own wheels")
    if checked.stat().st_size > LARGEST:
        raise SystemExit(
            f"{checked.name} has {checked.stat().st_size / 1e6:.1f} MB, at most {LARGEST / 1e6} are wanted"
        )
    return checked


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
