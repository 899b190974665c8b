"""Fixtures of all tests: the backends of this machine, and operands that are the same in every run."""

import contextlib
import gc
import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

import emulation
import fastattn
from fastattn.backends import TABLE, native
from fastattn.errors import InputError
from fastattn.translation.data import read_lines, verses

# Device of the tested tensors. On "cpu" Triton's kernels run in its interpreter, which is chosen when they are
# imported.
DEVICE = os.environ.get("FASTATTN_TEST_DEVICE", "cpu")
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
else:
    torch.set_default_device(DEVICE)

# 8 is malloc's own default. If the variable is set, training does not tune malloc, which other tests in this process
# share.
os.environ.setdefault("MALLOC_ARENA_TEST", "8")

# Inductor's pool of processes takes longer to start than it saves, and so does g++, with which it tries each of the
# processor's instruction sets.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

settings.register_profile(
    "fixed",
    deadline=None,
    derandomize=True,
    max_examples=25,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.register_profile("explore", parent=settings.get_profile("fixed"), derandomize=False, max_examples=1000)
settings.load_profile("fixed")


def slow(*values):
    """Return the values as parameters of slow tests."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def this_torch(*values):
    """Return the values as parameters of slow tests that `make torch-versions` leaves out. What depends on torch's
    version shows with the other values too."""
    return [pytest.param(value, marks=[pytest.mark.slow, pytest.mark.this_torch]) for value in values]


def machine_isas():
    """Return this machine's instruction sets, best first, without AMX where Linux refuses its registers."""
    library = native.library("cpu")
    if library is None:
        return []
    usable, compiled = library.isas().split(","), library.compiled_isas().split(",")
    return [isa for isa in library.machine_isas().split(",") if isa in usable or isa not in compiled]


# Every instruction set of this machine is tested; "cpu" runs the best one.
ISAS = machine_isas()[1:]
BACKENDS = ("reference", "cpu", "triton", "cuda", *(f"cpu:{isa}" for isa in ISAS))
# Backends for tests with very many parameters. There the reference, which is torch's own operations, is a slow test.
KERNELS = ("cpu", *this_torch("reference"), *BACKENDS[2:])
CUDA_TESTS = (
    *("test_dropout", "test_hopper_attention", "test_hopper_backward", "test_large", "test_layer_norm"),
    "test_softmax_dropout",
)
KERNEL_TESTS = (*CUDA_TESTS, "test_attention", "test_exact_gradients", "test_varlen")
SHARD = os.environ.get("FASTATTN_TEST_SHARD")  # "2/12": this process runs the second of 12 parts
PASSED = os.environ.get("FASTATTN_TEST_PASSED")  # a folder: tests listed in its file `all` are left out
REQUIRED = tuple(name for name in os.environ.get("FASTATTN_REQUIRE", "").split(",") if name)


def pytest_sessionstart():
    """Refuse to start if the build is missing or does not load: the tests of the kernels would be skipped, and pass."""
    reason = native.reason("cpu")
    if reason and reason != "installed with FASTATTN_BUILD=0":
        raise pytest.UsageError(
            f"fastattn's kernels cannot be tested: {reason}. For tests without them: FASTATTN_BUILD=0 pip install -e ."
        )


def missing(name):
    """Return why this machine lacks the backend, or None."""
    if name == "cuda" and DEVICE == "cpu":
        library = emulation.library()
        return library if isinstance(library, str) else None
    return TABLE[name].MISSING or None


def require(name, **options):
    """Skip if this machine lacks the backend; fail if FASTATTN_REQUIRE names it."""
    why = missing(name)
    if why is not None and name in REQUIRED:
        pytest.fail(f"no {name} backend: {why}")
    if why is not None:
        pytest.skip(f"no {name} backend: {why}", **options)


def require_instruction_set(isa):
    """Skip if this build left out the instruction set's kernels; fail if FASTATTN_REQUIRE names `isas`."""
    if isa not in torch.ops.fastattn_cpu.compiled_isas().split(","):
        why = f"built without the kernels for {isa} (FASTATTN_CPU_BUILD=all compiles them)"
        (pytest.fail if "isas" in REQUIRED else pytest.skip)(why)


def require_package(name):
    """Import a package for the tests of a whole module. Without it they are skipped, or fail if FASTATTN_REQUIRE names
    it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if name in REQUIRED:
            raise
        pytest.skip(f"needs {name}: {error}", allow_module_level=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect without the garbage collector, which would walk the tens of thousands of tests repeatedly."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark what is slow. Triton's interpreter and the emulation of CUDA take milliseconds per program, so by default
    only tests marked `representative` run on them, and on instruction sets other than the best one. The cuda backend
    runs only the tests of the row operations and of attention for Hopper, and these instruction sets run only the tests
    of kernels."""

    def backend_of(item):
        return item.callspec.params.get("backend", "") if hasattr(item, "callspec") else ""

    def serves(item):
        of_some = {"cuda": CUDA_TESTS, "cpu:": KERNEL_TESTS}.get(backend_of(item)[:4])
        return of_some is None or item.module.__name__ in of_some

    items[:] = [item for item in items if serves(item)]
    for item in items:
        name = backend_of(item).partition(":")
        is_sampled = interpreted(name[0]) or name[1]
        if is_sampled and not item.get_closest_marker("representative"):
            item.add_marker(pytest.mark.triton if name[0] == "triton" else pytest.mark.slow)
    if PASSED:
        passed = set(Path(PASSED, "all").read_text().splitlines())
        items[:] = [item for item in items if item.nodeid not in passed]
    if SHARD:  # representative tests come first, divided among the processes
        items.sort(key=lambda item: item.get_closest_marker("representative") is None)
        number, count = map(int, SHARD.split("/"))
        items[:] = items[number - 1 :: count]


def pytest_runtest_logreport(report):
    """List each passed test at once, because the process may be stopped."""
    if PASSED and report.when == "call" and report.passed:
        with Path(PASSED, f"shard-{(SHARD or '1').partition('/')[0]}").open("a") as file:
            file.write(f"{report.nodeid}\n")


def interpreted(backend):
    """Return whether the backend's kernels are interpreted or emulated here. If so, tests keep their problems small."""
    return DEVICE == "cpu" and backend in ("triton", "cuda")


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Run the test once on every backend, forced by name. FASTATTN_REQUIRE=cpu makes a missing cpu backend a
    failure."""
    name, _, isa = request.param.partition(":")
    require(name)
    with _conditions(name, isa), fastattn.backend(name):
        yield name


def _conditions(name, isa):
    if name == "triton" and DEVICE == "cpu":
        from interpreter import strict

        return strict()
    if name == "cuda" and DEVICE == "cpu":
        return emulation.strict()
    return instruction_set(isa) if isa else contextlib.nullcontext()


@contextlib.contextmanager
def instruction_set(isa):
    """Run the cpu kernels that are compiled for `isa`."""
    require_instruction_set(isa)
    best = torch.ops.fastattn_cpu.isa()
    torch.ops.fastattn_cpu.set_isa(isa)
    try:
        yield
    finally:
        torch.ops.fastattn_cpu.set_isa(best)


def refused(message, call, *arguments, **options):
    """Assert that the call raises an InputError that matches the message."""
    with pytest.raises(InputError, match=message):
        call(*arguments, **options)


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """Return two files with the 60 shortest sentence pairs of the verses' validation text: an epoch of few updates."""
    files = [tmp_path_factory.mktemp("text") / language for language in ("en", "es")]
    short = sorted(zip(*map(read_lines, verses("dev")), strict=True), key=lambda pair: len(pair[0]) + len(pair[1]))[:60]
    for path, lines in zip(files, zip(*short, strict=True), strict=True):
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return files


@pytest.fixture
def python():
    """Return a function that runs a program in its own process and returns what it printed.

    The process starts in the folder of the tested package, because Python imports from there first. A checkout's
    fastattn has no compiled kernels if the tested one is installed elsewhere."""

    def run(program, **environment):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            cwd=Path(fastattn.__file__).parent.parent,
            env=os.environ | environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(autouse=True)
def fixed_conditions():
    """Fix the seed and use one thread. Most problems here are small, and waiting threads spin on a busy machine. Tests
    of threading set their own number."""
    # torch.manual_seed also saves a stack trace for each GPU library that is not initialised.
    (torch.default_generator if DEVICE == "cpu" else torch).manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
