"""The build of the compiled libraries.

`setup.py` calls `build`. pip calls the hooks at the end (PEP 517, named in pyproject.toml). `csrc/tests` takes the
instruction sets and flags from here. A build needs only PyTorch's headers and its libtorch_cpu, no Python headers. The
libraries use PyTorch's stable ABI, so that one build serves every torch from 2.10 on and every Python.
"""

import json
import os
import re
import runpy
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from setuptools import build_meta
from setuptools.errors import BaseError

ROOT = Path(__file__).resolve().parent.parent
OLDEST_TORCH = (2, 10)
OLDEST_GLIBC = (2, 28)  # of torch's own wheels

# Instruction sets, best first. Kernels are compiled once per set and chosen at run time (csrc/cpu/dispatch.cpp).
_AVX2 = "-mavx2 -mfma -mf16c -mbmi -mbmi2 -mpopcnt"
_AVX512 = f"{_AVX2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512cd -mprefer-vector-width=512"
_AVX512_BF16 = f"{_AVX512} -mavx512bf16"
INSTRUCTION_SETS = {
    "x86_64": {
        "amx_bf16": f"{_AVX512_BF16} -mamx-tile -mamx-bf16",
        "avx512_bf16": _AVX512_BF16,
        "avx512": _AVX512,
        "avx2": _AVX2,
        "generic": "",
    },
    "aarch64": {"generic": ""},
}
CXX_FLAGS = "-std=gnu++17 -fPIC -fvisibility=hidden -fno-math-errno -Wall -Wextra -Wno-psabi"
OPTIMIZE = "-O3"
TORCH_TARGET = "-DTORCH_TARGET_VERSION=0x{:02x}{:02x}000000000000".format(*OLDEST_TORCH)


def bindings(library: str, torch: Path, optimize: str, hopper: bool = False) -> list[tuple[str, Path, str]]:
    """Return (object, source, flags) for the operations with kernels in the library.

    The files that include torch are compiled together, because its headers take most of their time.

    Args:
        hopper: Whether the library has the kernels of ``HOPPER_SOURCES``.
    """
    cuda = {path.stem for path in (ROOT / "csrc/cuda").glob("*.cu")} | {"library", "runtime", "varlen_attention"}
    cuda |= {"attention_backward", "varlen_attention_backward"} if hopper else set()
    others = {path.stem for path in (ROOT / "csrc/bindings").glob("*.cpp")} - {"limits", "launcher"}
    stems = {"cpu": others | {"limits"}, "cuda": others & cuda, "triton": others | {"launcher"}}[library]
    folder = ROOT / "csrc/bindings"
    included = include_options(folder / f"{stem}.cpp" for stem in stems - {"library", "runtime"})
    contract = runpy.run_path(str(ROOT / "fastattn/backends/schema.py"))["CONTRACT"]
    flags = (
        f"{CXX_FLAGS} {optimize} {TORCH_TARGET} -isystem {shlex.quote(str(torch / 'include'))}"
        f" -DFASTATTN_CONTRACT='\"{contract}\"' -DFASTATTN_BACKEND='\"{library}.h\"'"
        f"{' -DFASTATTN_HOPPER' if hopper else ''}"
    )
    return [
        ("bindings.o", folder / "library.cpp", f"{flags} {included}"),
        ("bindings.runtime.o", folder / "runtime.cpp", flags),
    ]


def include_options(sources: Iterable[Path]) -> str:
    """Return the options that compile these files together with another one."""
    return " ".join(f"-include {shlex.quote(str(source))}" for source in sorted(sources))


# Architectures of the CUDA library if no GPU is found. The library has PTX of the last one too.
ARCHITECTURES = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
# The kernels with Hopper's asynchronous products are compiled for this architecture alone, if the list names 9.0.
HOPPER = "9.0a"
OLDEST_FOR_HOPPER = (12, 5)  # nvcc. Its --list-gpu-code names no 9.0a, in any version.
HOPPER_SOURCES = [ROOT / "csrc/cuda" / name for name in ("attention_hopper.cu", "attention_hopper_backward.cu")]
LAUNCHERS = ("ccache", "sccache", "distcc", "icecc")  # programs that $CXX may name before the compiler
# The oldest architecture with the matrix instructions used. A list may name older ones, for other packages.
OLDEST_ARCHITECTURE = 80


class BuildError(BaseError):
    """The reason why a library cannot be built, in one line."""


class NotBuilt(BuildError):
    """The reason why a library is not built here, without a failure."""


def instruction_sets() -> dict[str, str]:
    """Return the compiler flags of the instruction sets by name, best first, of the platform that is built for.

    _PYTHON_HOST_PLATFORM, which Python's own cross-compilation reads, names another one than this machine's.
    """
    system, _, machine = sysconfig.get_platform().partition("-")
    if system != "linux" or machine not in INSTRUCTION_SETS:
        raise BuildError(f"the kernels are for Linux on x86-64 and aarch64, this is {system} on {machine}")
    return INSTRUCTION_SETS[machine]


def machine_has(flags: str) -> bool:
    """Return whether this machine's processors have what these compiler flags name, by Linux's list of features."""
    renamed = {"bmi": "bmi1", "avx512bf16": "avx512_bf16"}
    listed = re.search(r"^flags\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    names = [flag.removeprefix("-m") for flag in flags.split() if "=" not in flag]
    return {renamed.get(name, name).replace("-", "_") for name in names} <= set(listed[1].split() if listed else ())


def cpu_choice() -> list[str]:
    """Return the words of FASTATTN_CPU_BUILD, by default "native"."""
    words = (os.environ.get("FASTATTN_CPU_BUILD") or "native").split(",")
    names = {name for sets in INSTRUCTION_SETS.values() for name in sets}
    if words not in (["native"], ["all"]) and not names.issuperset(words):
        raise BuildError(
            f"FASTATTN_CPU_BUILD={','.join(words)}: expected native (this machine's best set), all, or some "
            f"of {', '.join(INSTRUCTION_SETS['x86_64'])}, separated by commas"
        )
    return words


def chosen_sets() -> dict[str, str]:
    """Return those of ``instruction_sets`` that FASTATTN_CPU_BUILD chooses, and the generic one.

    The kernels for amx_bf16 call those for avx512_bf16.
    """
    sets, names = instruction_sets(), cpu_choice()
    if names == ["native"]:
        names = [next(name for name, flags in sets.items() if machine_has(flags))]
    if "amx_bf16" in names:
        names.append("avx512_bf16")
    return {name: flags for name, flags in sets.items() if name in [*names, "generic"] or names == ["all"]}


def compiler() -> list[str]:
    """Return the C++ compiler's command: $CXX, else c++ or g++."""
    command = shlex.split(os.environ.get("CXX", "")) or [shutil.which("c++") or "g++"]
    if shutil.which(command[0]) is None:
        raise BuildError(f"no C++ compiler: {command[0]} not found (install g++, or set CXX)")
    return command


def site_directories() -> list[Path]:
    """Return the folders where the target environment may have torch, in the order of Python's search.

    Under build isolation sys.path is the isolated one, but sysconfig still names the target environment. A virtual
    environment made with --system-site-packages also sees the packages of the user and of the base interpreter.
    """
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    candidates = [sysconfig.get_path(key) for key in ("platlib", "purelib")]
    candidates.append(site.getusersitepackages())
    candidates += [sysconfig.get_path(key, vars=base) for key in ("platlib", "purelib")]
    candidates += site.getsitepackages([sys.base_prefix, sys.base_exec_prefix])  # Debian's dist-packages
    return [Path(path) for path in dict.fromkeys(candidates)]


def find_torch(directories: list[Path]) -> tuple[Path, tuple[int, int]] | None:
    """Return the first torch package in `directories` and its (major, minor), or None."""
    for directory in directories:
        torch = directory / "torch"
        if (torch / "version.py").is_file():
            match = re.search(r"__version__ = '(\d+)\.(\d+)", (torch / "version.py").read_text())
            if match:
                return torch, (int(match[1]), int(match[2]))
    return None


def torch_for_building() -> Path:
    """Return the torch package whose headers are used: one that this Python can import, else the target's."""
    found = find_torch([Path(entry) for entry in sys.path if entry] + site_directories())
    if found is None:
        raise BuildError("no torch in this environment (install torch, then fastattn again)")
    torch, version = found
    if version < OLDEST_TORCH:
        raise BuildError("torch {}.{} is older than {}.{}".format(*version, *OLDEST_TORCH))
    if not (torch / "include/torch/csrc/stable").is_dir():
        raise BuildError(f"{torch} has no headers")
    return torch.resolve()  # environments may share a torch by links; ccache finds the objects of others


def kernel_objects(flags: str, sets: dict[str, str]) -> list[tuple[str, Path, str]]:
    """Return (object, source, flags) of csrc/cpu: the dispatcher, and each kernel file for each instruction set."""
    sources = sorted((ROOT / "csrc/cpu").glob("*.cpp"))
    kernels = [source for source in sources if source.stem != "dispatch"]
    return [("dispatch.o", ROOT / "csrc/cpu/dispatch.cpp", flags)] + [
        (f"{source.stem}.{name}.o", source, f"{flags} {isa_flags} -DFASTATTN_ISA={name}")
        for source in kernels
        for name, isa_flags in sets.items()
    ]


def run_ninja(
    directory: Path,
    objects: list[tuple[str, Path, str]],
    target: str,
    link_flags: str,
    nvcc: str | None = None,
    cxx: list[str] | None = None,
) -> Path:
    """Compile the `objects` that are out of date, link all to `target` inside `directory`, and return the target.

    Args:
        nvcc: The command that compiles the sources ending in .cu and links; None if there are none.
        cxx: The C++ compiler, by default ``compiler()``.
    """
    import fcntl  # not on Windows, where nothing is compiled

    ninja = shutil.which("ninja", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]))
    if ninja is None:
        raise BuildError("ninja not found (pip install ninja)")
    command = shlex.join(cxx or compiler())
    lines = [
        "rule compile",
        f"  command = {command} -MMD -MF $out.d $flags -c $in -o $out",
        "  deps = gcc",
        "  depfile = $out.d",
        "  description = $out",
        "rule compile_cuda",
        f"  command = {nvcc} -MD -MF $out.d $flags -c $in -o $out",
        "  deps = gcc",
        "  depfile = $out.d",
        "  description = $out",
        "rule link",
        f"  command = {nvcc or command} $in -o $out $flags",
        "  description = $out",
    ]
    for name, source, flags in objects:
        rule = "compile_cuda" if nvcc and source.suffix == ".cu" else "compile"
        # Relative paths are equal in every checkout, so that ccache finds the objects.
        place, csrc = os.path.relpath(source, directory), os.path.relpath(ROOT / "csrc", directory)
        lines += [f"build {name}: {rule} {_escape(place)}", f"  flags = {flags.replace(str(ROOT / 'csrc'), csrc)}"]
    lines += [f"build {target}: link {' '.join(name for name, _, _ in objects)}", f"  flags = {link_flags}"]
    jobs = ["-j", os.environ["MAX_JOBS"]] if os.environ.get("MAX_JOBS") else []
    output = ""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second process waits instead of writing the same objects
        (directory / "build.ninja").write_text("\n".join(lines) + "\n")
        process = subprocess.Popen(
            [ninja, "-C", directory, *jobs], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for line in process.stdout:  # `pip install -v` shows the progress
            print(line, end="", flush=True)
            output += line
        process.wait()
    if process.returncode:
        error = re.search(r"^.*(?:error:|undefined reference).*$", output, re.MULTILINE)
        raise BuildError(f"{target} does not compile: {error[0].strip() if error else 'ninja failed'}")
    return directory / target


def _escape(path: str) -> str:
    return re.sub(r"([$ :])", r"$\1", path)


def hide_symbols(directory: Path) -> None:
    """Write the linker's version script, which exports nothing, because static constructors register the operations."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "exports.map").write_text("{ local: *; };\n")


def build_cpu(directory: Path) -> tuple[Path, dict[str, object]]:
    """Compile the library of the `cpu` backend. Return the file and facts about the build."""
    torch, sets = torch_for_building(), chosen_sets()
    objects = bindings("cpu", torch, OPTIMIZE)
    objects += kernel_objects(f"{CXX_FLAGS} {OPTIMIZE}", sets)
    others = ", ".join(name for name in instruction_sets() if name not in sets)
    print(
        f"fastattn: {len(objects)} files for the CPU's {', '.join(sets)}"
        + (f" (FASTATTN_CPU_BUILD=all compiles {others} too)" if others else ""),
        flush=True,
    )
    hide_symbols(directory)
    link = (
        f"-shared -Wl,--version-script=exports.map -Wl,--no-undefined -Wl,--as-needed"
        f" -L{shlex.quote(str(torch / 'lib'))} -ltorch_cpu"
    )
    library = run_ninja(directory, objects, "_cpu.so", link)
    return library, {
        "compiler": compiler_version(),
        "instruction_sets": list(sets),
        "torch_headers": torch_version(torch),
    }


def compiler_version() -> str:
    version = subprocess.run([*compiler(), "--version"], capture_output=True, text=True).stdout.splitlines()
    return version[0] if version else shlex.join(compiler())


def build_triton(directory: Path) -> tuple[Path, dict[str, object]]:
    """Compile the library that starts Triton's kernels. It needs no CUDA: it finds the driver at run time.

    Return the file and facts about the build.
    """
    instruction_sets()  # raises on machines that the library does not support
    torch = torch_for_building()
    objects = bindings("triton", torch, OPTIMIZE)
    launcher = ROOT / "csrc/launch/launcher.cpp"
    included = include_options(set(launcher.parent.glob("*.cpp")) - {launcher})
    objects += [("launcher.o", launcher, f"{CXX_FLAGS} {OPTIMIZE} {included}")]
    hide_symbols(directory)
    link = (
        f"-shared -Wl,--version-script=exports.map -Wl,--no-undefined -Wl,--as-needed"
        f" -L{shlex.quote(str(torch / 'lib'))} -ltorch_cpu -ldl"
    )
    library = run_ninja(directory, objects, "_triton.so", link)
    return library, {"compiler": compiler_version(), "torch_headers": torch_version(torch)}


def torch_version(torch: Path) -> str:
    return re.search(r"__version__ = '([^']+)'", (torch / "version.py").read_text())[1]


def nvcc() -> tuple[str, str]:
    """Return (command, version) of the CUDA compiler: in $CUDA_HOME, on the PATH, or in the toolkit's usual folder."""
    home = os.environ.get("CUDA_HOME")
    candidates = [f"{home}/bin/nvcc"] if home else ["nvcc", "/usr/local/cuda/bin/nvcc"]
    command = next(filter(None, map(shutil.which, candidates)), None)
    if command is None:
        raise NotBuilt(f"no CUDA compiler: {candidates[0]} not found")
    version = re.search(
        r"release (\d+\.\d+)", subprocess.run([command, "--version"], capture_output=True, text=True).stdout
    )
    if version is None:
        raise BuildError(f"{command} --version names no release")
    return command, version[1]


def check_cuda(torch: Path) -> None:
    """Raise if `torch` is built without CUDA, unless FASTATTN_CUDA=1 asks for a library for other installations."""
    has_cuda = re.search(r"^cuda.*= '\d", (torch / "version.py").read_text(), re.MULTILINE)
    if not has_cuda and os.environ.get("FASTATTN_CUDA") != "1":
        raise NotBuilt(f"torch {torch_version(torch)} is built without CUDA (FASTATTN_CUDA=1 compiles all the same)")


def architectures(command: str) -> list[str]:
    """Return the architectures to compile for, in the names of TORCH_CUDA_ARCH_LIST.

    They are that variable's list, else this machine's GPUs, else those of ARCHITECTURES that nvcc knows.
    """
    named = re.split(r"[;, ]+", os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip())
    if named != [""]:
        return _new_enough(named)
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    if shutil.which(query[0]):
        answer = subprocess.run(query, capture_output=True, text=True)
        found = sorted({line.strip() for line in answer.stdout.splitlines() if re.fullmatch(r"\s*\d+\.\d+\s*", line)})
        if answer.returncode == 0 and found:
            return _new_enough(found)
    return usual_architectures(command)


def usual_architectures(command: str) -> list[str]:
    """Return those of ARCHITECTURES that nvcc knows, the last one with PTX."""
    known = subprocess.run([command, "--list-gpu-code"], capture_output=True, text=True).stdout.split()
    usual = [name for name in ARCHITECTURES if "sm_" + name.replace(".", "") in known]
    if not usual:
        raise NotBuilt(f"{command} compiles for none of {', '.join(ARCHITECTURES)}")
    return [*usual[:-1], usual[-1] + "+PTX"]


def _new_enough(names: list[str]) -> list[str]:
    wanted = [name for name in names if (_number(name) or OLDEST_ARCHITECTURE) >= OLDEST_ARCHITECTURE]
    if not wanted:
        raise NotBuilt(f"the kernels are for compute capability 8.0 and newer, not {', '.join(names)}")
    return wanted


def _number(name: str) -> int | None:
    """Return 80 for "8.0", or None for a string of another form."""
    match = re.match(r"(\d+)\.(\d)", name)
    return int(match[1] + match[2]) if match else None


def host_flags() -> str:
    """Return nvcc's flags for the C++ compiler: the program without its launcher, and the flags that $CXX adds."""
    words = compiler()
    while len(words) > 1 and Path(words[0]).name in LAUNCHERS:
        words = words[1:]
    return shlex.join(["-ccbin", words[0], *(f"-Xcompiler={flag}" for flag in words[1:])])


def nvcc_threads(architectures: int, files: int) -> int:
    """Return how many architectures of a file nvcc compiles at a time, so that all files together use all cores."""
    if os.environ.get("NVCC_THREADS"):
        return int(os.environ["NVCC_THREADS"])
    cores = int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))
    return min(architectures, max(1, cores // files))


def cuda_flags(names: list[str], files: int = 1) -> str:
    """Return nvcc's flags for so many files of kernels on these architectures."""
    host = f"{host_flags()} -Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra"
    codes = []
    for name in names:
        number = name.removesuffix("+PTX").replace(".", "")
        if not re.fullmatch(r"\d+[a-z]?", number):
            raise BuildError(f"TORCH_CUDA_ARCH_LIST: {name} is not an architecture such as 9.0 or 9.0+PTX")
        code = f"[sm_{number},compute_{number}]" if name.endswith("+PTX") else f"sm_{number}"
        codes.append(f"-gencode arch=compute_{number},code={code}")
    return " ".join(["-std=c++17 -O3", host, *codes, f"--threads {nvcc_threads(len(names), files)}"])


def wants_hopper(names: list[str]) -> bool:
    """Return whether a library for these architectures can have the kernels of ``HOPPER_SOURCES``."""
    release = tuple(map(int, nvcc()[1].split(".")))
    return any(_number(name) == 90 for name in names) and release >= OLDEST_FOR_HOPPER


def imitate_library(path: Path, functions: list[str], command: list[str] | None = None) -> None:
    """Make a shared library without code, whose functions the linker finds. Its namesake has them at run time.

    Args:
        command: The C++ compiler, by default ``compiler()``.
    """
    options = ["-x", "c", "-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-o", path, "-"]
    source = "".join(f"void {name}(void) {{}}\n" for name in functions)
    done = subprocess.run([*(command or compiler()), *options], input=source, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{path.name} does not compile: {done.stderr.strip()}")


def copy_cuda_runtime(directory: Path) -> None:
    """Copy CUDA's static runtime into the directory, for glibc from ``OLDEST_GLIBC`` on, if it and binutils are found.

    The linker takes the newest version of each function of glibc. Version 2.34 moved the functions for threads and
    loading into libc and gave them new versions, without a change. The copy names their older versions.
    """
    dry_run = subprocess.run([nvcc()[0], "--dryrun", "-shared", "none.o"], capture_output=True, text=True)
    folders = re.findall(r'-L"?([^"\s]+)', dry_run.stderr)
    original = next((path for path in (Path(f, "libcudart_static.a") for f in folders) if path.is_file()), None)
    if original is None or not (shutil.which("nm") and shutil.which("objcopy")):
        return  # nvcc links its own
    libc = subprocess.run([*compiler(), "-print-file-name=libc.so.6"], capture_output=True, text=True).stdout.strip()
    symbols = subprocess.run(["nm", "-D", "--with-symbol-versions", libc], capture_output=True, text=True).stdout
    versions: dict[str, list[tuple[int, ...]]] = {}
    for name, version in re.findall(r"^\w+ [TWi] (\w+)@@?GLIBC_([\d.]+)$", symbols, re.MULTILINE):
        versions.setdefault(name, []).append(tuple(map(int, version.split("."))))
    lines = []
    for name, found in versions.items():
        older = [version for version in found if version <= OLDEST_GLIBC]
        if older and max(found) > OLDEST_GLIBC:
            lines.append(f"{name} {name}@GLIBC_{'.'.join(map(str, max(older)))}\n")
    (directory / "glibc.txt").write_text("".join(lines))
    command = ["objcopy", f"--redefine-syms={directory / 'glibc.txt'}", original, directory / original.name]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"CUDA's runtime is not copied: {done.stderr.strip()}")


def compile_cuda(directory: Path, torch: Path, names: list[str], hopper: bool) -> Path:
    """Compile and link the library of the `cuda` backend for these architectures.

    Args:
        hopper: Whether the library gets the kernels of ``HOPPER_SOURCES``.
    """
    kernels = [path for path in sorted((ROOT / "csrc/cuda").glob("*.cu")) if hopper or path not in HOPPER_SOURCES]
    flags = {path: cuda_flags([HOPPER] if path in HOPPER_SOURCES else names, len(kernels)) for path in kernels}
    objects = [(f"{source.stem}.o", source, flags[source]) for source in kernels]
    objects += bindings("cuda", torch, OPTIMIZE, hopper)
    hide_symbols(directory)
    copy_cuda_runtime(directory)
    if not (torch / "lib/libtorch_cuda.so").exists():
        imitate_library(directory / "libtorch_cuda.so", ["aoti_torch_get_current_cuda_stream"])
    link = (
        f"-shared -cudart static {host_flags()} -Xlinker --version-script=exports.map,--as-needed,--no-undefined"
        f" -L. -L{shlex.quote(str(torch / 'lib'))} -ltorch_cpu -ltorch_cuda"
    )
    return run_ninja(directory, objects, "_cuda.so", link, nvcc()[0])


def build_cuda(directory: Path) -> tuple[Path, dict[str, object]]:
    """Compile the library of the `cuda` backend. Return the file and facts about the build."""
    instruction_sets()  # raises on machines that the library does not support
    command, version = nvcc()
    torch = torch_for_building()
    check_cuda(torch)
    names = architectures(command)
    hopper = wants_hopper(names)
    library = compile_cuda(directory, torch, names, hopper)
    names += [HOPPER] if hopper and HOPPER not in names else []
    return library, {"compiler": f"nvcc {version}", "architectures": names, "torch_headers": torch_version(torch)}


LIBRARIES = {"cpu": build_cpu, "cuda": build_cuda, "triton": build_triton}


def build(package: Path, directory: Path = ROOT / "build/native") -> list[Path]:
    """Build every library into the folder `package` and return the files written.

    One of the files is `_build.json`, which records what was built or why not. Objects stay in `directory`, so that the
    next build compiles only changed sources.

    FASTATTN_BUILD=0 builds no library. FASTATTN_BUILD=1 raises `BuildError` if one cannot be built, except for the CUDA
    library without nvcc or a CUDA torch. FASTATTN_CPU_BUILD chooses the instruction sets of the CPU library (see
    ``chosen_sets``). FASTATTN_CUDA=0 omits the CUDA library; FASTATTN_CUDA=1 raises if it cannot be built.
    """
    wanted = os.environ.get("FASTATTN_BUILD", "")
    if wanted not in ("", "0", "1"):
        raise BuildError(f"FASTATTN_BUILD={wanted}: expected 0 (pure Python), 1 (compile or fail) or nothing")
    cuda = os.environ.get("FASTATTN_CUDA", "")
    if cuda not in ("", "0", "1"):
        raise BuildError(f"FASTATTN_CUDA={cuda}: expected 0 (no CUDA library), 1 (compile it or fail) or nothing")
    cpu_choice()
    package.mkdir(parents=True, exist_ok=True)
    record, written = {}, [package / "_build.json"]
    for name, builder in LIBRARIES.items():
        target = package / f"_{name}.so"
        target.unlink(missing_ok=True)
        try:
            if wanted == "0":
                raise NotBuilt("installed with FASTATTN_BUILD=0")
            if name == "cuda" and cuda == "0":
                raise NotBuilt("installed with FASTATTN_CUDA=0")
            library, record[name] = builder(directory / name)
        except BuildError as error:
            failed = wanted == "1" and not isinstance(error, NotBuilt)
            if failed or (name == "cuda" and cuda == "1" and wanted != "0"):
                raise
            record[name] = {"reason": str(error)}
            print(f"fastattn: no {name} library: {error}", flush=True)
        else:
            shutil.copy2(library, target)
            written.append(target)
    written[0].write_text(json.dumps(record, indent=2) + "\n")
    return written


def _torch_requirement() -> list[str]:
    """Return torch as a requirement if a build is wanted and possible but no torch is installed, else nothing."""
    if os.environ.get("FASTATTN_BUILD") == "0" or find_torch(site_directories()) is not None:
        return []
    try:
        compiler(), instruction_sets()
    except BuildError:
        return []
    return ["torch>={}.{}".format(*OLDEST_TORCH)]


# The hooks that pip calls: those of setuptools, with the requirement above added for builds that compile.
build_sdist = build_meta.build_sdist
get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist
build_wheel = build_meta.build_wheel
build_editable = build_meta.build_editable
prepare_metadata_for_build_wheel = build_meta.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_editable


def get_requires_for_build_wheel(config_settings=None):
    return build_meta.get_requires_for_build_wheel(config_settings) + _torch_requirement()


def get_requires_for_build_editable(config_settings=None):
    return build_meta.get_requires_for_build_editable(config_settings) + _torch_requirement()
