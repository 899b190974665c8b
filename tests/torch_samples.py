"""The samples that torch tests its own modules and functions with, and what runs all of them."""

import contextlib
import os

import pytest
import torch
from hypothesis import settings


@contextlib.contextmanager
def _undone():
    """Importing torch's test utilities loads a hypothesis profile, freezes torch's flags and sets a variable."""
    profile, environment = settings.get_current_profile_name(), dict(os.environ)
    frozen = torch.backends.flags_frozen()
    yield
    settings.load_profile(profile)
    os.environ.clear()
    os.environ.update(environment)
    torch.backends.__allow_nonbracketed_mutation_flag = not frozen


def module_samples(kind, training):
    """ModuleInfo's samples of a module class, float32."""
    pytest.importorskip("expecttest", reason="torch's samples need expecttest")
    with _undone():
        from torch.testing._internal.common_modules import module_db
    (info,) = (info for info in module_db if info.module_cls is kind)
    return info.module_inputs_func(
        info, torch.get_default_device().type, torch.float32, requires_grad=False, training=training
    )


def function_samples(name):
    """OpInfo's samples of a function, float32."""
    pytest.importorskip("expecttest", reason="torch's samples need expecttest")
    with _undone():
        from torch.testing._internal.common_methods_invocations import op_db
    (info,) = (info for info in op_db if info.name == name)
    return list(info.sample_inputs(torch.get_default_device().type, torch.float32))


def run_all(samples, check):
    """Run the check on each sample; the failure names every one that failed."""
    failed = []
    for number, sample in enumerate(samples):
        try:
            check(sample)
        except Exception as error:
            failed.append(f"sample {number}, {sample}"[:300] + f": {type(error).__name__}: {error}")
    assert samples, "torch has no samples"
    assert not failed, "\n".join([f"{len(failed)} of {len(samples)} failed", *failed])
