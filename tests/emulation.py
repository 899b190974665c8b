"""The `cuda` backend on CPU tensors: its device code is compiled for the host (csrc/tests/emulation)."""

import contextlib
import ctypes
import functools
import sys
from pathlib import Path
from unittest import mock

import torch

from fastattn import backends
from fastattn.ops import register

ROOT = Path(__file__).resolve().parent.parent


def load(path):
    """Return (the library's functions as a backend, its controls)."""
    torch.ops.load_library(str(path))
    controls = ctypes.CDLL(str(path))
    controls.guard_operands.restype = ctypes.c_char_p
    controls.seed_order.argtypes = [ctypes.c_uint64]
    assert torch.ops.fastattn_cuda.contract() == backends.native.CONTRACT
    return backends.native.functions("cuda"), controls


@functools.cache
def library():
    """Rebuild the emulated library if it is out of date. Return ``load``'s result, or the reason why there is none."""
    if not (ROOT / "csrc/tests/build.py").is_file():
        return "the kernels' source is not here"
    if backends.native.library("cuda") is not None:
        return "the compiled library is loaded: set FASTATTN_TEST_DEVICE=cuda"
    sys.path.insert(0, str(ROOT / "csrc/tests"))
    import build

    try:
        return load(build.build_emulated())
    except build.native_build.BuildError as error:
        return str(error)


@contextlib.contextmanager
def strict(loaded=None):
    """Make backend("cuda") take CPU tensors inside the block, by ``load``'s or ``library``'s result.

    Threads and blocks run in a shuffled order. RuntimeError reports accesses that are misaligned or outside the
    operands, and barriers or shuffles that CUDA leaves undefined."""
    functions, controls = loaded or library()
    controls.guard_operands(1)
    try:
        with mock.patch.multiple(backends.cuda, DEVICE="cpu", MISSING="", FUNCTIONS=functions):
            yield
    finally:
        damage = controls.guard_operands(0).decode()
    assert not damage, damage


@contextlib.contextmanager
def fast_paths(name):
    """Send the plain calls of CPU tensors to this backend's library inside the block."""
    with contextlib.ExitStack() as stack:
        for roads, road in register.FAST_PATHS.values():
            stack.enter_context(mock.patch.dict(roads, cpu=road(name)))
        yield
