"""Fixtures of every test: which backends this machine has, and operands that are the same in every run."""

import contextlib
import functools
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

import fastattn
from fastattn.backends import MISSING, TABLE, native

# Triton's kernels run in its interpreter, on CPU tensors. It looks at this when they are imported.
os.environ["TRITON_INTERPRET"] = "1"

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

# The kernels of every instruction set of this machine are tested, all but the best one among the slow tests.
ISAS = torch.ops.fastattn_cpu.isas().split(",")[1:] if native.library("cpu") else []
BACKENDS = ("reference", "cpu", "triton", *(pytest.param(f"cpu:{isa}", marks=pytest.mark.slow) for isa in ISAS))
REQUIRED = tuple(name for name in os.environ.get("FASTATTN_REQUIRE", "").split(",") if name)


def require(name, **options):
    """Skip where this machine lacks the backend; fail where FASTATTN_REQUIRE names it."""
    if name not in TABLE:
        (pytest.fail if name in REQUIRED else functools.partial(pytest.skip, **options))(
            f"no {name} backend: {MISSING[name]}"
        )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Triton's interpreter takes milliseconds a program: what is not marked `representative` is slow there."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec and callspec.params.get("backend") == "triton" and not item.get_closest_marker("representative"):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Runs the test once on every backend, forced by name. FASTATTN_REQUIRE=cpu makes a missing one a failure."""
    name, _, isa = request.param.partition(":")
    require(name)
    with fastattn.backend(name), _conditions(name, isa):
        yield name


def _conditions(name, isa):
    if name == "triton":
        from interpreter import strict

        return strict()
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


@pytest.fixture(autouse=True)
def fixed_conditions():
    """The same operands in every run; one thread, since most problems here are small and threads that wait for a busy
    machine spin. What threads may change is tested with threads."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
