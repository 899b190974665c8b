"""Samples with which torch tests its own modules and functions, and a function that runs all of them."""

import contextlib
import os
from unittest import mock

import pytest
import torch
from hypothesis import settings


@contextlib.contextmanager
def _undone():
    """Undo the effects of importing torch's test utilities: a hypothesis profile, frozen flags, an environment
    variable."""
    profile = settings.get_current_profile_name()
    try:
        with mock.patch.dict(os.environ), mock.patch.object(torch.backends, "disable_global_flags"):
            yield
    finally:
        settings.load_profile(profile)


def databases():
    """Return torch's databases: ModuleInfo by module class, OpInfo by function name."""
    names = (f"torch.testing._internal.common_{what}" for what in ("modules", "methods_invocations"))
    with _undone():
        modules, functions = (pytest.importorskip(name, reason="torch's samples need expecttest") for name in names)
    return {info.module_cls: info for info in modules.module_db}, {info.name: info for info in functions.op_db}


def run_all(samples, check):
    """Run the check on each sample; the failure names every sample that failed."""
    failed = []
    for number, sample in enumerate(samples):
        try:
            check(sample)
        except Exception as error:
            failed.append(f"sample {number}, {sample}"[:300] + f": {type(error).__name__}: {error}")
    assert samples, "torch has no samples"
    assert not failed, "\n".join([f"{len(failed)} of {len(samples)} failed", *failed])
