"""A machine with GPUs that do not exist. Kernels are compiled for them and pass through Triton's launcher; none runs.

``pretend`` changes a process for good, so only programs of their own call it. These are the ahead-of-time gate and the
tests that follow CUDA tensors from the public functions to the launch. Their operands are torch's fake tensors.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.tools.tensor_descriptor import TensorDescriptor

# Maximum shared memory per program, in bytes (CUDA C++ Programming Guide, compute capabilities). 8.0 has 163 KiB but
# gets the limit of 8.6 and 8.9, because their kernels are the same.
SHARED_MEMORY = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
LARGEST_GRID = (2**31 - 1, 65535, 65535)


class Start(NamedTuple):
    """The launch of a kernel that would run now."""

    kernel: str
    device: int
    stream: int
    grid: tuple[int, int, int]
    descriptors: int  # tensor descriptors among its arguments


class Driver:
    """A driver for Triton, on a machine with one GPU of each of these compute capabilities."""

    def __init__(self, *capabilities: int) -> None:
        self.capabilities = capabilities
        self.streams = [0] * len(capabilities)  # the current stream of each device
        self.device = 0  # the current device
        self.utils = self
        self.started: list[Start] = []

    def get_current_device(self) -> int:
        return self.device

    def exchange_device(self, device: int) -> int:
        previous, self.device = self.device, device
        return previous

    def get_current_stream(self, device: int) -> int:
        return self.streams[device]

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capabilities[self.device], 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 30}  # enough for every kernel; the gate reports kernels that use too much

    def load_binary(self, *args: Any) -> tuple[int, int, int, int, int]:
        return 0, 0, 0, 0, 1024  # module, function, registers, spills, maximum threads

    def unload_module(self, module: int) -> None:
        pass

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        values = [
            path
            for path, value in source.constants.items()
            if value is not None and not source.fn.params[path[0]].is_constexpr
        ]
        if values := values + [path for path, attributes in source.attrs.items() if attributes]:
            raise ValueError(
                f"{metadata.name}: a kernel must be compiled for types alone, not for the values at {values}"
            )

        def launch(x: int, y: int, z: int, stream: int, *args: Any) -> None:
            descriptors = [argument for argument in args if isinstance(argument, TensorDescriptor)]
            start = Start(metadata.name, self.device, stream, (x, y, z), len(descriptors))
            if not all(0 < size <= most for size, most in zip(start.grid, LARGEST_GRID, strict=True)):
                raise ValueError(f"{start.kernel}: a grid must be within {LARGEST_GRID}, got {start.grid}")
            if metadata.target.arch != self.capabilities[self.device]:
                raise ValueError(f"{start.kernel}: compiled for {metadata.target.arch}, started on {self.device}")
            if any(descriptor.base.data_ptr() % 16 for descriptor in descriptors):
                raise ValueError(f"{start.kernel}: what a tensor descriptor describes must begin at 16 bytes")
            self.started.append(start)

        return launch


def build_driver(folder: str) -> str:
    """Compile fake_driver.cpp, a driver for launchers in C and C++, and return its file in the folder.

    It has the driver's name, so a library that is linked with the driver, as Triton's launcher is, finds the loaded
    fake.
    """
    path, source = f"{folder}/libcuda.so.1", Path(__file__).parent / "fake_driver.cpp"
    subprocess.run(["g++", "-O2", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", source, "-o", path], check=True)
    return path


LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_uint64, *[ctypes.c_uint] * 5, ctypes.c_uint64, ctypes.POINTER(ctypes.c_void_p)
)


def load_driver(path: str) -> ctypes.CDLL:
    """Load the driver, and make csrc/launch use it."""
    fake = ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
    fake.fake_set_stream.argtypes = [ctypes.c_int, ctypes.c_uint64]
    fake.fake_context.restype = ctypes.c_uint64
    fake.fake_set_context.argtypes = [ctypes.c_uint64]
    torch.ops.fastattn_triton.set_driver(path)
    return fake


def _address(tensor: FakeTensor) -> int:
    """Return the tensor's offset in bytes as its address, as if CUDA's aligned allocation began at address 0."""
    return int(tensor.storage_offset()) * tensor.element_size()


def _index(tensor: FakeTensor, index: Any) -> Tensor:
    """Return tensor[index] without looking for the device, as torch does for an integer."""
    return tensor.select(0, index) if isinstance(index, int) else Tensor.__getitem__(tensor, index)


def pretend(*capabilities: int) -> Driver:
    """Make this process start kernels as on a machine with GPUs of these compute capabilities. Return the driver."""
    fake = Driver(*capabilities)
    driver.set_active(fake)
    FakeTensor.__getitem__ = _index  # type: ignore[method-assign, assignment]
    FakeTensor.data_ptr = _address  # type: ignore[method-assign, assignment]
    vars(torch.cuda).update(
        current_device=fake.get_current_device,
        _exchange_device=fake.exchange_device,
        _maybe_exchange_device=fake.exchange_device,
        get_device_capability=lambda device: divmod(capabilities[device.index], 10),
        get_device_properties=lambda device: SimpleNamespace(multi_processor_count=132),
    )
    return fake
