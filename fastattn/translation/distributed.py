"""The processes of a run, by torch.distributed: one, or those that `torchrun` started.

Every process computes its share of each update; the first writes, prints, and decides what all have to agree upon.
Collectives on CPU tensors go through gloo, which waits for no GPU; gradients through nccl where there are GPUs.
"""

import contextlib
import dataclasses
import datetime
import itertools
import os
import pickle
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fastattn.errors import InputError

TIMEOUT = datetime.timedelta(minutes=10)  # of a collective; a process that dies is noticed at once, by torchrun
PREPARATION = datetime.timedelta(hours=12)  # of a corpus by the first process, while no collective waits
# In the store of a launch: its name; the name of the start whose processes are to meet; whether what it was asked for
# cannot be done.
LAUNCH, START, REFUSED = "fastattn/launch", "fastattn/start", "fastattn/refused"
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class World:
    """One of ``size`` processes: which, and the device that it computes on."""

    rank: int
    size: int
    device: torch.device
    store: dist.Store | None = None  # what torchrun lets the processes share, if there are several
    launch: str = ""  # names the `torchrun` that started them, at all of its starts
    _keys: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    @property
    def main(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0

    def on_main(self, function: Callable[[], T]) -> T:
        """The result of ``function``, which only the first process runs. What it raises there ends the others too."""
        if self.store is None:
            return function()
        key, shared = f"fastattn/{next(self._keys)}", b""
        if not self.main:
            self.store.wait([key], PREPARATION)
            shared = self.store.get(key)
            if not shared:
                raise SystemExit(1)  # the first process says why
            return pickle.loads(shared)
        try:
            result = function()
            shared = pickle.dumps(result)
        finally:
            self.store.set(key, shared)  # type: ignore[arg-type]  # bytes, as torch itself passes
        return result

    def main_first(self, function: Callable[[], T]) -> T:
        """The result of ``function``, which every process runs; what is wrong with it, the first says for all."""
        results: list[T] = []
        self.on_main(lambda: results.append(function()))
        return results[0] if self.main else function()

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag, whether it is set in any process: the same answer in all."""
        if self.size == 1:
            return flags
        found = torch.tensor(flags, dtype=torch.int32, device="cpu")
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return tuple(map(bool, found.tolist()))

    def sum(self, numbers: Tensor) -> Tensor:
        """The sum over all processes of a small tensor, on the CPU."""
        numbers = numbers.cpu()
        if self.size > 1:
            dist.all_reduce(numbers)
        return numbers

    def interleaved(self, share: list[T]) -> list[T]:
        """The list of which process r holds every ``size``-th element, from r on."""
        if self.size == 1:
            return share
        shares: list[Any] = [None] * self.size
        dist.all_gather_object(shares, share)
        whole: list[Any] = [None] * sum(map(len, shares))
        for rank, part in enumerate(shares):
            whole[rank :: self.size] = part
        return whole


@contextlib.contextmanager
def joined() -> Iterator[World]:
    """This process among those of its run, as `torchrun` describes them in the environment; without it, alone.

    After an :class:`InputError` within the block, the processes that `torchrun` starts again end without a word.

    Raises:
        InputError: there are fewer GPUs here than processes, or the environment describes some, and no launch.
    """
    cuda = torch.cuda.is_available()
    if os.environ.get("WORLD_SIZE", "1") == "1" and "TORCHELASTIC_RUN_ID" not in os.environ:
        yield World(0, 1, torch.device("cuda" if cuda else "cpu"))
        return
    try:
        local = int(os.environ.get("LOCAL_RANK", 0))
        whole_launch, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
    except ValueError as error:
        raise InputError(
            f"WORLD_SIZE is set, but no torchrun started this: unset it, or use torchrun ({error})"
        ) from None
    if whole_launch.check([REFUSED]):
        raise SystemExit(1)
    launch = whole_launch.compare_set(LAUNCH, "", uuid.uuid4().hex).decode()
    store: dist.Store | None = None
    try:
        device = _own_gpu(local) if cuda else torch.device("cpu")
        if size > 1:
            # torchrun keeps the store when it starts processes again: they would find the addresses of those that died.
            store = dist.PrefixStore(f"start {_agreed_start(whole_launch, rank, size)}", whole_launch)
            backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        yield World(rank, size, device, store, launch)
    except InputError:
        whole_launch.set(REFUSED, "")
        raise
    if size > 1:
        dist.destroy_process_group()


def _agreed_start(store: dist.Store, rank: int, size: int) -> str:
    """The name of this start of the processes: the first gives it, and all have met when it is returned.

    It cannot be torchrun's count of starts, which is of a machine: one that starts its processes again because another
    machine's failed does not count.
    """
    if rank == 0:
        name = uuid.uuid4().hex
        store.set(START, name)
        store.wait([f"{name}/{other}" for other in range(1, size)], TIMEOUT)
        store.set(START, "")  # who comes later waits for the next start
        store.set(f"{name}/met", "")
        return name
    name = ""
    while not (name and store.check([f"{name}/met"])):  # the processes of an earlier start may have died before
        name = store.get(START).decode() or name
        if name:
            store.set(f"{name}/{rank}", "")
        time.sleep(0.05)
    return name


def _own_gpu(local: int) -> torch.device:
    """The GPU of this machine's process number ``local``, which becomes the current one."""
    count = torch.cuda.device_count()
    if local > count:
        raise SystemExit(1)  # the first process that lacks one says so
    if local == count:
        raise InputError(f"there is no GPU for process {local + 1} here: at most {count} processes")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def sharded(module: nn.Module, layers: list[nn.Module], world: World) -> nn.Module:
    """``module`` with its parameters divided among the processes; those of each of ``layers`` are gathered apart."""
    mesh = dist.init_device_mesh(world.device.type, (world.size,))
    for part in (*layers, module):
        fully_shard(part, mesh=mesh)
    return module


@contextlib.contextmanager
def unsummed(module: nn.Module) -> Iterator[None]:
    """Leaves the gradients of backward passes in this process, to be summed over all by the next one outside."""
    if isinstance(module, DistributedDataParallel):
        with module.no_sync():
            yield
    elif isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(False)
        yield
        module.set_requires_gradient_sync(True)
    else:
        yield


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded: takes all processes if it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def collected(tensor: Tensor, world: World) -> Tensor:
    """All of a tensor that may be sharded: takes all processes if it is, and lies then in the first one's memory, on
    the CPU. The others are left with an empty one."""
    if not isinstance(tensor, DTensor):
        return tensor
    gathered = tensor.full_tensor()
    return gathered.cpu() if world.main else gathered.new_empty(0)


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def share(tensor: Tensor, parameter: Tensor) -> Tensor:
    """This process's share of what :func:`whole` gave, divided as ``parameter`` is."""
    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor
    tensor = tensor.to(parameter.device)
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
