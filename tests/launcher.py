"""The launcher of Triton's kernels (csrc/launch) on CPU tensors, with a driver in C++ that hands launches to Python."""

import contextlib
import ctypes
import functools
import tempfile
from unittest import mock

import torch

import fake_gpu
from emulation import fast_paths
from fastattn.backends import native
from fastattn.backends import triton as backend


@functools.cache
def driver():
    """Compile and load tools/fake_driver.cpp, and let the launcher take it. It stays loaded."""
    backend.compiled()
    return fake_gpu.load_driver(fake_gpu.build_driver(tempfile.mkdtemp()))


def value_at(address, letter):
    """Return a parameter of this letter from its bytes."""
    from fastattn.backends.triton import recipes

    if letter == "r":
        return ctypes.cast(address, ctypes.POINTER(ctypes.c_float))[0]
    bits = ctypes.cast(address, ctypes.POINTER(ctypes.c_int64))[0]
    if letter in "ij":
        return bits
    return torch.frombuffer((ctypes.c_char * 8).from_address(bits), dtype=recipes._POINTERS[letter], count=1)


_asked = []  # what functions stand for; the launcher keeps its recipes


@contextlib.contextmanager
def interpreted():
    """Run plain calls of CPU tensors through the launcher, whose kernels Triton interprets.

    Yield the launches: a list of (kernel, stream, context, letters of its parameters)."""
    from fastattn.backends.triton import recipes

    fake, started, errors = driver(), [], []

    def answer(text, recipe):
        try:
            request = recipes.Request(text.decode())
            found = recipe.contents
            found.block_m, found.block_n = request.constants.get("BLOCK_M", 0), request.constants.get("BLOCK_N", 0)
            found.multiprocessors, found.function, found.threads, found.is_served = 132, len(_asked), 32, True
            _asked.append(request)
        except BaseException as error:
            errors.append(error)

    def launch(function, x, y, z, threads, shared_bytes, stream, parameters):
        try:
            request, places = _asked[function], iter(range(96))
            started.append((request.function.fn.__name__, stream, fake.fake_context(), "".join(request.letters())))
            arguments = request.arguments(lambda letter: value_at(parameters[next(places)], letter))
            request.function[(x, y, z)](*arguments, **request.constants)
        except BaseException as error:
            errors.append(error)
            return 1
        return 0

    functions = recipes.COMPILE(answer), fake_gpu.LAUNCH(launch)
    native.library("triton").set_compile(ctypes.cast(functions[0], ctypes.c_void_p).value)
    fake.fake_set_launch(functions[1])
    try:
        with fast_paths("triton"), mock.patch.object(recipes, "device_at", return_value=torch.device("cpu")):
            yield started
    finally:
        fake.fake_set_launch(None)
        native.library("triton").set_compile(0)
    if errors:
        raise errors[0]
