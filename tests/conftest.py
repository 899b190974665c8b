"""Fixtures of every test: which backends this machine has, and operands that are the same in every run."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

import fastattn
from fastattn.backends import native

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

BACKENDS = ("reference", "cpu")
REQUIRED = tuple(name for name in os.environ.get("FASTATTN_REQUIRE", "").split(",") if name)


def missing(name):
    """Why this machine lacks the backend, or None."""
    return None if name == "reference" or native.library(name) is not None else native.reason(name)


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Runs the test once on every backend, forced by name. FASTATTN_REQUIRE=cpu makes a missing one a failure."""
    why = missing(request.param)
    if why is not None:
        (pytest.fail if request.param in REQUIRED else pytest.skip)(f"no {request.param} backend: {why}")
    with fastattn.backend(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)
