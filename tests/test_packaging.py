"""Tests of the build, the library's contents, the cases that cannot build, and the package as pip installs it."""

import contextlib
import functools
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import types
import venv
import zipfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import machine_isas, require
from packaging.requirements import Requirement
from test_cuda import compile_gate, require_nvcc

import fastattn
import native_build
import wheels
from fastattn.backends import native

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(fastattn.__file__).resolve().parent


@pytest.fixture(scope="module", params=["cpu", "triton", pytest.param("cuda", marks=pytest.mark.slow)])
def library(request) -> Path:
    """Return the path of a compiled library. Without one, skip, or fail under FASTATTN_REQUIRE=cpu."""
    if request.param == "cuda":
        require_nvcc()
        return compile_gate.library(compile_gate.TESTED)
    require("cpu")
    return PACKAGE / f"_{request.param}.so"


def run(*command, **options) -> str:
    """Return what the command prints, which must succeed."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def undefined(library: Path, kinds: str) -> list[str]:
    """Return the undefined symbols of these kinds, U or the weak v and w, each with its version, if any."""
    return re.findall(rf" [{kinds}] (\S+)$", run("nm", "-D", "--undefined-only", library), re.MULTILINE)


# The library


@pytest.mark.torch_version
def test_undefined_symbols_are_stable(library):
    """The library's undefined symbols are PyTorch's C shims, declared in the headers of the stable ABI, and the C and
    C++ run time. There is no CPython symbol and no C++ symbol of torch."""
    include = Path(torch.__file__).parent / "include/torch/csrc"
    shims = "".join((include / name).read_text() for name in ("stable/c/shim.h", "inductor/aoti_torch/c/shim.h"))
    symbols = undefined(library, "U")
    torch_symbols = {symbol for symbol in symbols if "@" not in symbol}
    assert torch_symbols, "a library that registers operations calls torch"
    assert not [symbol for symbol in torch_symbols if not re.search(rf"\b{symbol}\(", shims)]
    runtime = {symbol.split("@")[1].split("_")[0] for symbol in symbols if "@" in symbol}
    assert runtime <= {"GLIBC", "GLIBCXX", "CXXABI", "GCC", ""}


def test_the_run_time_is_no_newer_than_that_of_torchs_wheels(library):
    """csrc/bindings/runtime.cpp has what is newer than glibc 2.28 and GCC 8, so that wheels load there."""
    newest = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11), "GCC": (8,)}
    symbols = [symbol for symbol in undefined(library, "Uvw") if "@" in symbol]
    found = {re.fullmatch(r".*@(GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)", symbol).groups() for symbol in symbols}
    assert {name for name, _ in found} >= {"GLIBC", "GLIBCXX"}
    assert [(name, of) for name, of in found if tuple(map(int, of.split("."))) > newest[name]] == []


@pytest.mark.slow
@pytest.mark.torch_version
@pytest.mark.parametrize("library", ["cpu", "cuda", "triton"])
def test_bindings_compile_with_this_torchs_headers(library):
    for _, source, flags in native_build.bindings(library, native_build.torch_for_building(), "-fsyntax-only"):
        run(*native_build.compiler(), *shlex.split(flags), source)


def test_library_exports_nothing(library):
    assert run("nm", "-D", "--defined-only", library) == ""


def test_a_library_needs_torch_and_the_run_time_alone(library):
    """No library of CUDA is needed, so that one library serves torch's builds for CUDA 12 and for CUDA 13."""
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-d", library)))
    torch_ = {"libtorch_cpu.so", "libtorch_cuda.so"} if library.name == "_cuda.so" else {"libtorch_cpu.so"}
    assert {name for name in needed if "torch" in name} == torch_
    others = {re.sub(r"(-linux.*)?\.so.*", "", name) for name in needed - torch_}
    assert others <= {"libstdc++", "libgcc_s", "libc", "libm", "libdl", "libpthread", "librt", "ld"}


@pytest.mark.torch_version
def test_the_libraries_that_were_built_load():
    """A library of the build is used, but the CUDA library only beside a torch that is built with CUDA."""
    built = [name for name in native.LIBRARIES if (PACKAGE / f"_{name}.so").exists()]
    reasons = {name: native.reason(name) for name in built if name != "cuda" or torch.version.cuda}
    assert set(reasons.values()) <= {""}, reasons


# The build


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Return a function that builds under the given environment variables, of which None unsets one. It returns why a
    library is left out."""

    def build(library: str, **environment: str | None) -> str:
        for name, value in {"FASTATTN_BUILD": None, **environment}.items():
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
        package = tmp_path / "package"
        assert native_build.build(package, tmp_path / "objects") == [package / "_build.json"]
        assert not (package / "_cpu.so").exists()
        return json.loads((package / "_build.json").read_text())[library]["reason"]

    return build


def test_a_build_that_fails_installs_pure_python(build, tmp_path):
    """FASTATTN_BUILD=1 makes it an error. A stale library is removed."""
    assert "no C++ compiler: no-such-compiler not found" in build("cpu", CXX="no-such-compiler")
    failing = str(script(tmp_path / "cc", "echo 'x.cpp:1: error: the sky is green'; exit 1"))
    assert build("cpu", CXX=failing).endswith("x.cpp:1: error: the sky is green")
    (tmp_path / "package/_cpu.so").touch()
    assert build("cpu", FASTATTN_BUILD="0") == "installed with FASTATTN_BUILD=0"
    with pytest.raises(native_build.BuildError, match="no-such-compiler"):
        build("cpu", FASTATTN_BUILD="1", CXX="no-such-compiler")
    with pytest.raises(native_build.BuildError, match="FASTATTN_BUILD=yes: expected 0"):
        build("cpu", FASTATTN_BUILD="yes")


def test_instruction_sets_of_a_build(monkeypatch):
    """By default a build has this machine's best instruction set and the generic one."""

    def chosen(choice):
        monkeypatch.setenv("FASTATTN_CPU_BUILD", choice)
        return list(native_build.chosen_sets())

    sets = native_build.INSTRUCTION_SETS["x86_64"]
    monkeypatch.setattr(native_build, "instruction_sets", lambda: sets)
    monkeypatch.setattr(native_build, "machine_has", lambda flags: "avx512bf16" not in flags)
    assert chosen("") == chosen("native") == ["avx512", "generic"]
    assert chosen("all") == list(sets)
    assert chosen("generic") == ["generic"]
    assert chosen("avx2,avx512") == ["avx512", "avx2", "generic"]
    assert chosen("amx_bf16") == ["amx_bf16", "avx512_bf16", "generic"]
    with pytest.raises(native_build.BuildError, match="FASTATTN_CPU_BUILD=axv2: expected native"):
        chosen("axv2")


@pytest.mark.parametrize("machine", native_build.INSTRUCTION_SETS)
def test_a_cross_compiler_builds_for_its_platform(monkeypatch, machine):
    monkeypatch.setenv("_PYTHON_HOST_PLATFORM", f"linux-{machine}")
    assert native_build.instruction_sets() is native_build.INSTRUCTION_SETS[machine]
    monkeypatch.setenv("_PYTHON_HOST_PLATFORM", "macosx-11.0-arm64")
    with pytest.raises(native_build.BuildError, match=r"for Linux on x86-64 and aarch64, this is macosx on"):
        native_build.instruction_sets()


def test_the_build_and_the_library_know_the_same_machine():
    """Linux's list of features, which the build reads, names the sets that the library finds by the processor."""
    require("cpu")
    found = [name for name, flags in native_build.instruction_sets().items() if native_build.machine_has(flags)]
    assert found == native.library("cpu").machine_isas().split(",")


@pytest.mark.parametrize(
    ("asked", "compiled", "expected"),
    [
        ("", "avx512,avx2,generic", ""),
        ("", "avx2,generic", "avx512"),
        ("avx2", "avx512,generic", "avx2"),
        ("generic", "avx2,generic", ""),
        ("amx_bf16", "generic", ""),  # this machine lacks it: an error at the first call
    ],
)
def test_a_set_that_is_asked_for_and_not_compiled(monkeypatch, asked, compiled, expected):
    library = types.SimpleNamespace(machine_isas=lambda: "avx512,avx2,generic", compiled_isas=lambda: compiled)
    monkeypatch.setattr(native, "library", lambda name: library)
    monkeypatch.setenv("FASTATTN_CPU_ISA", asked)
    assert native.missing_instruction_set() == expected


def script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


TOUCH = 'for last; do :; done; touch "$last" library'  # a compiler that makes empty files


def test_checkouts_build_from_the_same_lines(tmp_path, monkeypatch):
    """Two checkouts build from the same lines, so that ccache can take an object from one for the other."""
    monkeypatch.setenv("CXX", str(script(tmp_path / "cc", TOUCH)))
    built = []
    for checkout in (tmp_path / "a", tmp_path / "elsewhere/b"):
        checkout.mkdir(parents=True)
        (checkout / "1.c").touch()
        monkeypatch.setattr(native_build, "ROOT", checkout)
        included = native_build.include_options([checkout / "csrc/2.c"])
        native_build.run_ninja(checkout / "build", [("1.o", checkout / "1.c", included)], "library", "")
        built.append((checkout / "build/build.ninja").read_text())
    assert built[0] == built[1]


def test_progress_is_shown_as_it_is_made(tmp_path, monkeypatch):
    """An object's line is shown while the next object is compiled: here the second one waits for it. MAX_JOBS=1 starts
    no compiler before the previous one has ended."""
    first, second = f"sleep 0.3; touch {tmp_path}/ended", f"test -e {tmp_path}/ended || exit 1"
    shown = f"until grep -q 0.o {tmp_path}/log; do sleep 0.05; done"
    waits = f'case "$*" in *0.c*) {first};; *1.c*) {second}; {shown};; esac'
    monkeypatch.setenv("CXX", str(script(tmp_path / "cc", f"{waits}\n{TOUCH}")))
    monkeypatch.setenv("MAX_JOBS", "1")
    objects = [(f"{index}.o", tmp_path / f"{index}.c", "") for index in range(2)]
    for _, source, _ in objects:
        source.touch()
    with (tmp_path / "log").open("w") as log, contextlib.redirect_stdout(log):
        native_build.run_ninja(tmp_path / "objects", objects, "library", "")
    shown = re.findall(r"\[\d/3\] \S+", (tmp_path / "log").read_text())
    assert shown == ["[1/3] 0.o", "[2/3] 1.o", "[3/3] library"]


def test_ninja_compiles_only_what_changed(tmp_path):
    """A header's change reaches the objects that include it, and no others."""
    (tmp_path / "value.h").write_text("#define VALUE 1\n")
    (tmp_path / "a.cpp").write_text('#include "value.h"\nint a() { return VALUE; }\n')
    (tmp_path / "b.cpp").write_text("int b() { return 2; }\n")
    objects = [(f"{stem}.o", tmp_path / f"{stem}.cpp", "-fPIC") for stem in "ab"]

    def build():
        native_build.run_ninja(tmp_path / "objects", objects, "lib.so", "-shared")
        return {name: (tmp_path / "objects" / name).stat().st_mtime_ns for name in ("a.o", "b.o", "lib.so")}

    first = build()
    assert build() == first
    (tmp_path / "value.h").write_text("#define VALUE 3\n")
    second = build()
    assert {name for name in first if first[name] != second[name]} == {"a.o", "lib.so"}


# The CUDA library


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    """Set up a CUDA toolkit of version 13.0 for three architectures and no GPU; return the path of its nvcc."""
    (tmp_path / "bin").mkdir()
    answers = "case $1 in --version) echo 'tools, release 13.0, V13.0.88';; *) echo sm_80 sm_90 sm_200;; esac"
    script(tmp_path / "bin/nvcc", answers)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    for name in ("TORCH_CUDA_ARCH_LIST", "FASTATTN_CUDA", "FASTATTN_BUILD", "NVCC_THREADS", "MAX_JOBS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(native_build, "LIBRARIES", {"cuda": native_build.build_cuda})
    return str(tmp_path / "bin/nvcc")


@pytest.fixture
def ninja(toolkit, monkeypatch):
    """Return the mock of `run_ninja`. Nothing is compiled."""
    for name in ("copy_cuda_runtime", "imitate_library"):
        monkeypatch.setattr(native_build, name, lambda *_: None)
    run_ninja = mock.Mock()
    monkeypatch.setattr(native_build, "run_ninja", run_ninja)
    return run_ninja


def test_cuda_library_is_left_out_with_a_reason(toolkit, tmp_path, monkeypatch, build):
    """The library is left out with a reason even under FASTATTN_BUILD=1, since nothing has failed. FASTATTN_CUDA=1
    makes it an error."""
    torch_ = fake_torch(tmp_path, "2.13.0")
    with (torch_ / "version.py").open("a") as file:
        file.write("cuda: Optional[str] = None\n")
    monkeypatch.setattr(native_build, "torch_for_building", lambda: torch_)
    build = functools.partial(build, "cuda", FASTATTN_BUILD="1")
    assert build() == "torch 2.13.0 is built without CUDA (FASTATTN_CUDA=1 compiles all the same)"
    assert build(FASTATTN_CUDA="0") == "installed with FASTATTN_CUDA=0"
    nowhere = str(tmp_path / "nowhere")
    assert build(FASTATTN_CUDA=None, CUDA_HOME=nowhere) == f"no CUDA compiler: {nowhere}/bin/nvcc not found"
    for value, message in (("1", "no CUDA compiler"), ("yes", "FASTATTN_CUDA=yes: expected 0")):
        with pytest.raises(native_build.BuildError, match=message):
            build(FASTATTN_CUDA=value)


def test_cuda_architectures(toolkit, tmp_path, monkeypatch):
    """The build takes the architectures named, else those of this machine's GPUs, else all that the compiler knows and
    code for later ones."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    script(tmp_path / "bin/nvidia-smi", "exit 9")
    assert native_build.architectures(toolkit) == ["8.0", "9.0+PTX"]
    script(tmp_path / "bin/nvidia-smi", "echo 9.0; echo 8.6; echo 9.0")
    assert native_build.architectures(toolkit) == ["8.6", "9.0"]
    script(tmp_path / "bin/nvidia-smi", "echo 7.5")
    with pytest.raises(native_build.NotBuilt, match=r"for compute capability 8\.0 and newer, not 7\.5"):
        native_build.architectures(toolkit)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5 8.0;9.0a 10.0+PTX")  # containers name older ones too
    assert native_build.architectures(toolkit) == ["8.0", "9.0a", "10.0+PTX"]
    monkeypatch.setenv("NVCC_THREADS", "4")
    flags = native_build.cuda_flags(native_build.architectures(toolkit))
    assert "arch=compute_90a,code=sm_90a" in flags
    assert "arch=compute_100,code=[sm_100,compute_100]" in flags
    assert "--threads 4" in flags
    with pytest.raises(native_build.BuildError, match="Hopper is not an architecture such as"):
        native_build.cuda_flags(["Hopper"])


@pytest.mark.parametrize(
    ("release", "names", "expected"),
    [
        ("13.0", ["8.0", "9.0", "10.0+PTX"], True),
        ("12.9", ["9.0+PTX"], True),
        ("12.9", ["8.0", "9.0a"], True),
        ("13.0", ["8.0+PTX"], False),
        ("12.4", ["8.0", "9.0"], False),
    ],
)
def test_kernels_for_hopper_are_built_for_9_0a_alone(ninja, tmp_path, release, names, expected):
    """They are part of a library for 9.0 whose compiler can compile them, and their file alone is compiled for 9.0a."""
    script(tmp_path / "bin/nvcc", f"echo release {release}")
    native_build.compile_cuda(tmp_path, Path("torch"), names, native_build.wants_hopper(names))
    objects = ninja.call_args.args[1]
    compiled = {name: flags for name, _, flags in objects}
    assert ("attention_hopper.o" in compiled) == expected
    assert ("-DFASTATTN_HOPPER" in compiled["bindings.o"]) == expected
    if expected:
        assert re.findall(r"code=(\S+)", compiled["attention_hopper.o"]) == ["sm_90a"]
    if "9.0a" not in names:
        assert "sm_90a" not in compiled["attention.o"]


def test_what_a_wheel_has(toolkit, monkeypatch):
    """A wheel has every instruction set. For x86-64 it has a CUDA library for all that nvcc knows, on any machine."""
    monkeypatch.setattr(wheels, "THIS", "x86_64")
    chosen = wheels.libraries("x86_64")
    assert chosen["FASTATTN_BUILD"] == chosen["FASTATTN_CUDA"] == "1"
    assert chosen["FASTATTN_CPU_BUILD"] == "all"
    assert chosen["TORCH_CUDA_ARCH_LIST"] == "8.0;9.0+PTX"
    assert wheels.libraries("aarch64")["FASTATTN_CUDA"] == "0"
    monkeypatch.setenv("FASTATTN_CUDA", "0")
    assert wheels.libraries("x86_64")["FASTATTN_CUDA"] == "0"


def test_nvcc_is_told_of_the_cores(toolkit, monkeypatch):
    """nvcc compiles as many architectures of a file at a time as leave no core idle, at most all. NVCC_THREADS
    overrides this number."""

    def threads(cores):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores))
        return [native_build.nvcc_threads(architectures, files=4) for architectures in (1, 6)]

    assert [threads(cores) for cores in (2, 8, 16, 64)] == [[1, 1], [1, 2], [1, 4], [1, 6]]
    monkeypatch.setenv("MAX_JOBS", "8")
    assert threads(64) == [1, 2]
    monkeypatch.setenv("NVCC_THREADS", "3")
    assert threads(64) == [3, 3]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("g++-12", "g++-12"),
        ("ccache /opt/bin/g++", "/opt/bin/g++"),
        ("distcc clang++ -stdlib=libstdc++ -m64", "clang++ -Xcompiler=-stdlib=libstdc++ -Xcompiler=-m64"),
    ],
)
def test_nvcc_is_given_the_compiler_itself(ninja, toolkit, monkeypatch, command, expected):
    """nvcc gets the compiler itself, not the program that starts it, and each flag behind an option."""
    monkeypatch.setattr(native_build.shutil, "which", lambda name: name)
    monkeypatch.setattr(native_build, "nvcc", lambda: (toolkit, "13.0"))
    monkeypatch.setenv("CXX", command)
    assert f" -ccbin {expected} -Xcompiler=-fPIC" in native_build.cuda_flags(["9.0"])
    native_build.compile_cuda(Path(toolkit).parent, Path("torch"), ["9.0"], hopper=True)
    link_flags = ninja.call_args.args[3]
    assert f" -ccbin {expected} -Xlinker" in link_flags


# The source of the headers


def fake_torch(directory: Path, version: str = "2.10.1+cpu") -> Path:
    (directory / "torch/include/torch/csrc/stable").mkdir(parents=True)
    (directory / "torch/version.py").write_text(f"__version__ = '{version}'\n")
    return directory / "torch"


def test_site_directories_name_the_target_environment():
    """In a virtual environment, its own packages come before the user's, and the base interpreter's come last."""
    directories = native_build.site_directories()
    assert directories[0].is_relative_to(sys.prefix)
    assert any(directory.is_relative_to(sys.base_prefix) and directory.exists() for directory in directories)
    assert len(directories) == len(set(directories))


def test_find_torch_takes_the_first(tmp_path):
    own, user, base = (tmp_path / name for name in ("own", "user", "base"))
    assert native_build.find_torch([own, user, base]) is None
    in_base = fake_torch(base)
    assert native_build.find_torch([own, user, base]) == (in_base, (2, 10))
    in_user = fake_torch(user, "2.13.0")
    assert native_build.find_torch([own, user, base]) == (in_user, (2, 13))
    (own / "torch").mkdir(parents=True)  # the remains of an uninstalled torch are no torch
    assert native_build.find_torch([own, user, base]) == (in_user, (2, 13))


WITHOUT_HEADERS = {"2.9.1": "torch 2.9 is older than 2.10", "1.13.0": "torch 1.13 is older than 2.10", None: "no torch"}


@pytest.mark.parametrize("version", WITHOUT_HEADERS)
def test_headers_refused(tmp_path, monkeypatch, version):
    if version:
        fake_torch(tmp_path, version)
    monkeypatch.setattr(native_build.sys, "path", [])
    monkeypatch.setattr(native_build, "site_directories", lambda: [tmp_path])
    with pytest.raises(native_build.BuildError, match=WITHOUT_HEADERS[version]):
        native_build.torch_for_building()


def test_torch_is_a_build_requirement_only_where_none_is(tmp_path, monkeypatch):
    def required(kind="wheel"):
        words = getattr(native_build, f"get_requires_for_build_{kind}")()
        return [word for word in words if word.startswith("torch")]

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["setup.py"])
    monkeypatch.delenv("FASTATTN_BUILD", raising=False)
    monkeypatch.setattr(native_build, "site_directories", lambda: [tmp_path])
    assert required() == required("editable") == ["torch>=2.10"]
    assert required("sdist") == []
    for name, value in (("FASTATTN_BUILD", "0"), ("CXX", "no-such-compiler")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert required() == required("editable") == []
    fake_torch(tmp_path, "2.9.0")  # a torch that pip fetched would not be the one in use
    assert required() == []


# Loading


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Return an empty package folder, from which `native` loads."""
    monkeypatch.setattr(native, "PACKAGE", tmp_path)
    native._load.cache_clear()
    yield tmp_path
    native._load.cache_clear()


def reason() -> str:
    native._load.cache_clear()
    assert native.library("cpu") is None
    return native.reason("cpu")


def test_a_library_that_is_not_loaded_has_a_reason(package, monkeypatch):
    require("cpu")
    file = package / "_cpu.so"
    assert reason().startswith(f"{file} is not there")
    (package / "_build.json").write_text('{"cpu": {"reason": "no C++ compiler"}}')
    assert reason() == "no C++ compiler"
    (package / "_build.json").unlink()
    file.write_bytes(b"not a library")  # of another machine
    assert re.fullmatch("_cpu.so does not load: .*", reason())
    file.unlink()
    file.symlink_to(PACKAGE / "_cpu.so")
    monkeypatch.setattr(native, "CONTRACT", "of tomorrow")
    assert reason() == "_cpu.so is of another version of this package; build it anew"
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    assert reason() == "torch 2.9.1+cu128 is installed, the library needs 2.10 or newer"


# The distributions


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """Return a copy of what a clean checkout has."""
    target = tmp_path_factory.mktemp("checkout") / "fastattn"
    ignore = shutil.ignore_patterns(".*_cache", ".git", ".venv", ".hypothesis", "build", "dist", "*.egg-info", "*.so")
    shutil.copytree(ROOT, target, ignore=ignore)
    (target / "fastattn/_build.json").unlink(missing_ok=True)
    return target


def call_hook(checkout: Path, hook: str, output: Path, **environment: str) -> Path:
    """Run a PEP 517 hook as pip does, without isolation; return the path of what it made."""
    program = f"import native_build; print(native_build.{hook}({str(output)!r}))"
    environment = {**os.environ, "PYTHONPATH": str(checkout / "csrc"), **environment}
    return output / run(sys.executable, "-c", program, cwd=checkout, env=environment).splitlines()[-1]


def in_checkout(checkout: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run Python in the checkout, where it imports from the source tree first."""
    return subprocess.run([sys.executable, *arguments], cwd=checkout, capture_output=True, text=True)


def test_a_checkout_that_is_not_built_warns_once(checkout):
    program = "import fastattn, torch; x = torch.ones(2, 3); fastattn.layer_norm(x, 3); fastattn.dropout(x, 0.5)"
    done = in_checkout(checkout, "-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("fastattn runs its plain PyTorch reference on cpu tensors, slowly: ") == 1
    assert "in a checkout `pip install -e .` compiles it" in done.stderr


@pytest.mark.slow
def test_the_tests_of_a_checkout_without_kernels_do_not_pass(checkout):
    """A run that would skip the kernels' tests is a usage error."""
    done = in_checkout(checkout, "-m", "pytest", "-q", "tests/test_readme.py")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "fastattn's kernels cannot be tested: " in done.stderr
    assert "is not there; in a checkout" in done.stderr


def files_of(checkout: Path, *folders: str, pattern: str = "*") -> set[str]:
    found = (path for folder in folders for path in (checkout / folder).rglob(pattern))
    return {f.relative_to(checkout).as_posix() for f in found if f.is_file() and "__pycache__" not in f.parts}


def test_sdist_has_what_a_build_and_a_test_run_need(checkout, tmp_path):
    with tarfile.open(call_hook(checkout, "build_sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("csrc", "fastattn", "tests", "tools", "benchmarks", "docs", "examples", ".github")
    others = {"LICENSE", "Makefile", "README.md", "pyproject.toml", "setup.py", ".ci/run", "mkdocs.yml"}
    built = {name for name in files_of(checkout, *folders) | names if name.endswith((".so", ".pyc", "_build.json"))}
    assert (files_of(checkout, *folders) | others) - built <= names
    assert not built & names


def test_pure_wheel(checkout, tmp_path):
    """A wheel of FASTATTN_BUILD=0 holds all modules, the corpus, the model and the reason. It holds no library and
    nothing else."""
    wheel = call_hook(checkout, "build_wheel", tmp_path, FASTATTN_BUILD="0")
    assert re.fullmatch(r"fastattn-[^-]+-py3-none-any\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
        reason = json.loads(archive.read("fastattn/_build.json"))["cpu"]["reason"]
    expected = files_of(checkout, "fastattn", pattern="*.py")
    expected |= files_of(checkout, "fastattn/pretrained", "fastattn/verses")
    expected |= {"fastattn/_build.json", "fastattn/py.typed", "fastattn_command.py"}
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert reason == "installed with FASTATTN_BUILD=0"
    # A bound on torch could make pip replace a user's torch, so there is none.
    required = map(Requirement, re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE))
    assert [str(requirement) for requirement in required if requirement.name == "torch"] == ["torch"]


# Installation by pip


def requirements(name: str, found: dict[str, importlib.metadata.Distribution]) -> dict:
    """Return the distribution `name` and all that it requires, by name."""
    if name not in found:
        found[name] = importlib.metadata.distribution(name)
        for requirement in map(Requirement, found[name].requires or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                requirements(requirement.name, found)
    return found


def link_torch(site_packages: Path) -> None:
    """Link this environment's torch, and what it requires, into another environment."""
    site_packages.mkdir(parents=True, exist_ok=True)
    for distribution in requirements("torch", {}).values():
        for top in {Path(file).parts[0] for file in distribution.files or [] if not str(file).startswith("..")}:
            if not (site_packages / top).exists() and top != "__pycache__":
                (site_packages / top).symlink_to(distribution.locate_file(top))


LIBRARIES = Path("lib") / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def new_environment(path: Path, system_site_packages: bool = False) -> Path:
    """Make a virtual environment without pip, which has this one's torch or sees other packages; return its Python."""
    venv.create(path, system_site_packages=system_site_packages, symlinks=True)
    if not system_site_packages:
        link_torch(path / LIBRARIES)
    return path / "bin/python"


def pip(python: Path, *arguments: object, cwd: Path, **environment: str) -> str:
    return run(sys.executable, "-m", "pip", "--python", python, *arguments, cwd=cwd, env={**os.environ, **environment})


COMPUTES = """
import torch, fastattn
from fastattn.info import report
torch.manual_seed(0)
q, found = torch.randn(2, 4, 33, 20, requires_grad=True), []
for backend in ("cpu", "reference"):
    with fastattn.backend(backend):
        x = fastattn.layer_norm(q, (20,))
        out = fastattn.scaled_dot_product_attention(x, x, x, dropout_p=0.1, seed=torch.tensor([1, 2]))
        found.append((out, *torch.autograd.grad(out.square().sum(), q)))
torch.testing.assert_close(*found)
print(report())
"""


REPORT = "from fastattn.info import report; print(report())"


SMALL = {"FASTATTN_BUILD": "1", "FASTATTN_CPU_BUILD": "generic"}  # a build of one instruction set


def describe(python: Path, program: str = REPORT, **environment: str) -> str:
    """Return `fastattn info` of an environment, or the output of ``program``, run outside the checkout."""
    return run(python, "-c", program, cwd=python.parent, env={**os.environ, **environment, "PYTHONPATH": ""})


@pytest.fixture
def clean(checkout, monkeypatch):
    """Return the copied checkout, and unset the variables that change what pip does with it."""
    for name in ("FASTATTN_BUILD", "FASTATTN_CPU_BUILD", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    return checkout


@pytest.mark.slow
def test_pip_install_in_a_plain_environment(clean, tmp_path):
    """The wheel that pip builds from an sdist serves every Python, and holds the libraries. Installed with the extra
    `train`, it has all that README's commands need, such as the one that translates."""
    python, sdist = new_environment(tmp_path / "env"), call_hook(clean, "build_sdist", tmp_path)
    pip(python, "wheel", "--no-deps", sdist, cwd=tmp_path, FASTATTN_BUILD="1")
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(r"fastattn-[^-]+-py3-none-linux_(x86_64|aarch64)\.whl", wheel.name)
    assert wheel.stat().st_size < 16e6  # 9 MB of them are the corpus and the model
    with zipfile.ZipFile(wheel) as archive:
        assert {"fastattn/_cpu.so", "fastattn/_triton.so"} <= set(archive.namelist())
        assert json.loads(archive.read("fastattn/_build.json"))["cpu"]["instruction_sets"]
    assert "Collecting torch" not in pip(python, "install", f"{wheel}[train]", cwd=tmp_path)
    assert "with the headers of torch " in describe(python, COMPUTES)
    translated = run(python.with_name("fastattn"), "translate", input="God is good.\n", cwd=tmp_path)
    assert "Dios" in translated
    assert len(translated.splitlines()) == 1


def test_a_program_beside_an_editable_clone_imports_the_package(clean, tmp_path):
    """The clone is a folder of the package's name, so that a program beside it has that folder on its path."""
    assert clean.name == "fastattn"
    python, wheel = new_environment(tmp_path / "env"), call_hook(clean, "build_editable", tmp_path, FASTATTN_BUILD="0")
    pip(python, "install", "--no-deps", str(wheel), cwd=tmp_path)
    program = "import fastattn; from fastattn import DropoutAddLayerNorm; print(fastattn.__file__)"
    assert Path(run(python, "-c", program, cwd=clean.parent).strip()) == clean / "fastattn/__init__.py"


@pytest.mark.slow
def test_editable_install_without_isolation(clean, tmp_path):
    python = new_environment(tmp_path / "env")
    pip(python, "install", "setuptools>=77", "ninja", cwd=clean)
    pip(python, "install", "--no-build-isolation", "-e", ".", cwd=clean, **SMALL)
    text = describe(python)
    assert "with the headers of torch " in text
    assert str(clean / "fastattn") in text


@pytest.mark.slow
@pytest.mark.skipif(len(machine_isas()) < 2, reason="this machine has one instruction set")
def test_a_build_without_this_machines_instruction_set_warns_once(clean, tmp_path):
    """The warning and `fastattn info` name the set. Results are right all the same."""
    python, best = new_environment(tmp_path / "env"), machine_isas()[0]
    wheel = call_hook(clean, "build_wheel", tmp_path, **SMALL)
    pip(python, "install", "--no-deps", str(wheel), cwd=tmp_path)
    done = subprocess.run([python, "-c", COMPUTES], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"fastattn is built without its kernels for {best}, slower ones run") == 1
    assert f"generic in use of generic; not compiled: {', '.join(machine_isas()[:-1])} (" in done.stdout


@pytest.mark.slow
def test_pip_install_with_system_site_packages(clean, tmp_path):
    """The build finds a torch that is not in the environment itself, but in a place that the environment sees."""
    python, user = new_environment(tmp_path / "env", system_site_packages=True), tmp_path / "user"
    link_torch(user / LIBRARIES)
    output = pip(python, "install", ".", cwd=clean, **SMALL, PYTHONUSERBASE=str(user))
    assert "Collecting torch" not in output
    assert "with the headers of torch " in describe(python, PYTHONUSERBASE=str(user))


@pytest.mark.slow
def test_pip_install_without_a_compiler(clean, tmp_path):
    python = new_environment(tmp_path / "env")
    pip(python, "install", ".", cwd=clean, CXX="no-such-compiler")
    assert "no C++ compiler: no-such-compiler not found" in describe(python)
