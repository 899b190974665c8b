"""Compare csrc/launch with Triton's own launcher, on a machine without a GPU: ``python tools/launch_bytes.py``.

Plain calls of every operation, forward and backward, start their kernels through csrc/launch: the usual ones of
launch_cost.py, and others. An argument names the calls, ``usual`` or ``unusual``. Each launch is made again
by Triton's launcher, in C, with the same compiled kernel and the same arguments in Python. The fake driver sees both:
grids, threads, shared memory, streams and the bytes of all parameters must be equal.

It prints as JSON the kernels by the number of their launches, those that differ, and what happens under Triton's hooks.
"""

import collections
import ctypes
import json
import os
import sys
import tempfile
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
from triton.runtime.driver import driver

import fake_gpu
import fastattn
import launch_cost
from fastattn import _triton_private
from fastattn.backends import triton as backend
from fastattn.backends.triton import recipes
from fastattn.ops import register

SIZES = {"i32": 4, "fp32": 4}


class Seen(NamedTuple):
    """A launch as the driver sees it."""

    function: int
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    stream: int
    parameters: tuple[bytes, ...]


class Address:
    """A tensor of which only the address is known."""

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class Both:
    """The launches of csrc/launch and of Triton's launcher."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[recipes.Request, Any]] = {}  # by function
        self.ours: list[tuple[Seen, tuple[Any, ...]]] = []
        self.seen: list[Seen] = []
        self.is_ours = True
        self.launch = fake_gpu.LAUNCH(self._launch)

    def remember(self, recipe: Any, asked: recipes.Request) -> bool:
        """Compile as ``recipes`` does, and keep what the function was made from."""
        served = ordinary(recipe, asked)
        self.known[recipe.function] = asked, recipes._kept[-1]
        return served

    def _launch(self, function, x, y, z, threads, shared_bytes, stream, parameters):
        asked, compiled = self.known[function]
        sizes = [SIZES.get(kind, 8) for kind in (*_triton_private.parameter_types(compiled), "*i8", "*i8")]
        found = tuple(ctypes.string_at(parameters[place], size) for place, size in enumerate(sizes))
        seen = Seen(function, (x, y, z), threads, shared_bytes, stream, found)
        if self.is_ours:
            values = iter(found)
            self.ours.append((seen, asked.arguments(lambda letter: value_of(next(values), letter))))
        else:
            self.seen.append(seen)
        return 0

    def compare(self) -> tuple[dict[str, int], list[str]]:
        """Start everything again by Triton's launcher. Return the kernels' launches, and those that differ."""
        self.is_ours = False
        for seen, arguments in self.ours:
            asked, compiled = self.known[seen.function]
            _triton_private.start(compiled, asked.function, seen.grid, arguments)
        names = [self.known[seen.function][1].name for seen, _ in self.ours]
        pairs = zip(names, (seen for seen, _ in self.ours), self.seen, strict=True)
        differ = [f"{name}: {ours} {theirs}" for name, ours, theirs in pairs if ours != theirs]
        return dict(collections.Counter(names)), differ


def value_of(found: bytes, letter: str) -> Any:
    if letter == "r":
        return ctypes.c_float.from_buffer_copy(found).value
    number = int.from_bytes(found, "little", signed=letter in "ij")
    return number if letter in "ij" else Address(number)


class Machine(fake_gpu.Driver):
    """A machine without GPUs, with Triton's own launcher."""

    def __init__(self) -> None:
        super().__init__(90)
        self.launcher_cls = CudaLauncher  # type: ignore[method-assign]
        self.loaded = 0
        native = CudaUtils()
        # The functions of Triton's C extension, in the versions that have them, among those of the fake driver.
        self.utils = SimpleNamespace(  # type: ignore[assignment]
            load_binary=self.load_binary,
            unload_module=self.unload_module,
            get_device_properties=self.get_device_properties,
            launch=getattr(native, "launch", None),
            build_signature_metadata=getattr(native, "build_signature_metadata", None),
        )

    def load_binary(self, *args: Any) -> tuple[int, int, int, int, int]:
        self.loaded += 1
        return 0, self.loaded, 0, 0, 1024


def usual():
    """Run the calls of launch_cost.py. One of each operation also runs without gradients."""
    for name, (call, shapes) in launch_cost.CALLS.items():
        tensors = launch_cost.operands(*shapes)
        out = call(*tensors)
        torch.autograd.grad(out, tensors, torch.randn(out.shape).to(out.dtype))
        if "," not in name:
            with torch.no_grad():
                call(*tensors)


def unusual():
    """Run plain calls whose operands have other types, sizes and layouts."""
    half = torch.float16
    for shape, keys in (((1, 2, 3, 24), 900), ((2, 4, 100, 40), 77), ((1, 2, 600, 32), 700)):
        query = torch.randn(shape, dtype=half, requires_grad=True)
        key = torch.randn(shape[0], 2, keys, shape[3], dtype=half)
        lengths = torch.full((shape[0],), keys // 2)
        fastattn.scaled_dot_product_attention(
            query, key, key, dropout_p=0.2, key_lengths=lengths, enable_gqa=True, window_size=(9, 0)
        ).sum().backward()
    query = torch.randn(2, 4, 300, 64, dtype=half, requires_grad=True)
    fastattn.scaled_dot_product_attention(query, query, query, torch.randn(2, 1, 300, 300), 0.1, True).sum().backward()
    scores, mask = torch.randn(2, 3, 20, 33, dtype=half).transpose(1, 2), torch.randn(2, 1, 3, 1, requires_grad=True)
    fastattn.softmax_dropout(scores, 0.1, mask, is_causal=True).sum().backward()
    fastattn.dropout(torch.randn(4, 20, 17)[:, ::2], 0.1)
    wide, weight = torch.randn(3, 20000), torch.randn(20000, requires_grad=True)
    fastattn.layer_norm(wide, (20000,), weight).sum().backward()
    fastattn.dropout_add_layer_norm(wide.to(half), wide, None, weight, 0.1).sum().backward()


def under_hooks():
    """Return whether the launcher serves a call before, under and after a hook of Triton, and the hook's launches."""
    served, launches = backend.plain("layer_norm", torch.device("cuda", 0)), []
    answers = [served(())]
    knobs.runtime.launch_enter_hook.add(launches.append)
    answers.append(served(()))
    knobs.runtime.launch_enter_hook.remove(launches.append)
    return [*answers, served(())]


def main(calls):
    fake_gpu.pretend(90)
    both = Both()
    recipes._compile = both.remember
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_LIBCUDA_PATH"] = folder
        path = fake_gpu.build_driver(folder)
        backend.compiled()
        fake = fake_gpu.load_driver(path)
        driver.set_active(Machine())
        fake.fake_set_launch(both.launch)
        for roads, road in register.FAST_PATHS.values():
            roads["cpu"] = road("triton")
        register.Op.on = None  # no call may take the usual path
        for name in calls:
            {"usual": usual, "unusual": unusual}[name]()
        launches, differ = both.compare()
    print(json.dumps({"launches": launches, "differ": differ, "hooks": under_hooks()}))


ordinary = recipes._compile

if __name__ == "__main__":
    main(sys.argv[1:] or ("usual", "unusual"))
