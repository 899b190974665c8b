"""Fixtures of every test: which backends this machine has, and operands that are the same in every run."""

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

# Triton's kernels run in its interpreter, on CPU tensors, which it looks for when they are imported; or on a GPU.
DEVICE = os.environ.get("FASTATTN_TEST_DEVICE", "cpu")
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
else:
    torch.set_default_device(DEVICE)

# Malloc's default. Where it is set, training leaves the malloc of its process alone, which is that of other tests.
os.environ.setdefault("MALLOC_ARENA_TEST", "8")

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
    """Parameters of the slow tests alone."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


# The kernels of every instruction set of this machine are tested, all but the best one among the slow tests.
ISAS = torch.ops.fastattn_cpu.isas().split(",")[1:] if native.library("cpu") else []
BACKENDS = ("reference", "cpu", "triton", "cuda", *slow(*(f"cpu:{isa}" for isa in ISAS)))
# For tests of very many parameters: on the reference, which is torch's own operations, they are slow ones.
KERNELS = ("cpu", *slow("reference"), *BACKENDS[2:])
CUDA_TESTS = ("test_dropout", "test_large", "test_layer_norm", "test_softmax_dropout")
SHARD = os.environ.get("FASTATTN_TEST_SHARD")  # "2/12": this process runs the second of 12 parts
REQUIRED = tuple(name for name in os.environ.get("FASTATTN_REQUIRE", "").split(",") if name)


def pytest_sessionstart():
    """A checkout that is not built, or whose build does not load, would skip what it is about, and pass."""
    reason = native.reason("cpu")
    if reason and reason != "installed with FASTATTN_BUILD=0":
        raise pytest.UsageError(
            f"fastattn's kernels cannot be tested: {reason}. For tests without them: FASTATTN_BUILD=0 pip install -e ."
        )


def missing(name):
    """Why this machine lacks the backend, or None."""
    if name == "cuda" and DEVICE == "cpu":
        library = emulation.library()
        return library if isinstance(library, str) else None
    return TABLE[name].MISSING or None


def require(name, **options):
    """Skip where this machine lacks the backend; fail where FASTATTN_REQUIRE names it."""
    why = missing(name)
    if why is not None and name in REQUIRED:
        pytest.fail(f"no {name} backend: {why}")
    if why is not None:
        pytest.skip(f"no {name} backend: {why}", **options)


def require_package(name):
    """The package, for tests of a whole module: skipped where it is missing; they fail where FASTATTN_REQUIRE names
    it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if name in REQUIRED:
            raise
        pytest.skip(f"needs {name}: {error}", allow_module_level=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Without the garbage collector, which would walk the tens of thousands of tests again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Triton's interpreter takes milliseconds a program, and so does the emulation of CUDA: only what is marked
    `representative` runs there by default. The cuda backend has the row operations' tests alone."""

    def backend_of(item):
        return item.callspec.params.get("backend") if hasattr(item, "callspec") else None

    items[:] = [item for item in items if backend_of(item) != "cuda" or item.module.__name__ in CUDA_TESTS]
    for item in items:
        name = backend_of(item)
        if DEVICE == "cpu" and name in ("triton", "cuda") and not item.get_closest_marker("representative"):
            item.add_marker(pytest.mark.triton if name == "triton" else pytest.mark.slow)
    if SHARD:  # the representative ones first, each process another part of them
        items.sort(key=lambda item: item.get_closest_marker("representative") is None)
        number, count = map(int, SHARD.split("/"))
        items[:] = items[number - 1 :: count]


def interpreted(backend):
    """Whether its kernels are interpreted or emulated here: a problem is then no larger than its point needs."""
    return DEVICE == "cpu" and backend in ("triton", "cuda")


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Runs the test once on every backend, forced by name. FASTATTN_REQUIRE=cpu makes a missing one a failure."""
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
    """Runs the cpu kernels compiled for `isa`."""
    best = torch.ops.fastattn_cpu.isa()
    torch.ops.fastattn_cpu.set_isa(isa)
    try:
        yield
    finally:
        torch.ops.fastattn_cpu.set_isa(best)


@pytest.fixture
def python():
    """Runs a program in a process of its own and returns what it printed. A process imports from the folder where it
    starts first, and a checkout's fastattn has no compiled kernels when the tested one is installed elsewhere."""

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
    """The same operands in every run; one thread, since most problems here are small and threads that wait for a busy
    machine spin. What threads may change is tested with threads."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
