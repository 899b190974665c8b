"""Processes of a run, with torch.distributed: a single process, or the processes that `torchrun` started.

Every process computes its share of each update. The first one writes, prints, and makes the common decisions.
Collectives on CPU tensors use gloo, which waits for no GPU. Gradients use nccl if there are GPUs.
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

TIMEOUT = datetime.timedelta(minutes=10)  # limit of a collective; torchrun notices a dead process at once.
PREPARATION = datetime.timedelta(hours=12)  # limit of the first process's work on a corpus; no collective waits for it.
# Keys in the store of a launch: its name, the name of the start whose processes must meet, and a flag that its options
# were refused.
LAUNCH, START, REFUSED = "fastattn/launch", "fastattn/start", "fastattn/refused"
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class World:
    """This process among ``size`` processes: its rank and its device."""

    rank: int
    size: int
    device: torch.device
    store: dist.Store | None = None  # torchrun's store, shared by the processes; None for a single process
    launch: str = ""  # name of the `torchrun` that started them, the same after a restart
    _keys: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    @property
    def main(self) -> bool:
        """True for the process that writes and prints."""
        return self.rank == 0

    def on_main(self, function: Callable[[], T]) -> T:
        """Return the result of ``function``, which only the first process runs. Its exception ends the others too."""
        if self.store is None:
            return function()
        key, shared = f"fastattn/{next(self._keys)}", b""
        if not self.main:
            self.store.wait([key], PREPARATION)
            shared = self.store.get(key)
            if not shared:
                raise SystemExit(1)  # the first process reports the reason
            return pickle.loads(shared)
        try:
            result = function()
            shared = pickle.dumps(result)
        finally:
            self.store.set(key, shared)  # type: ignore[arg-type]  # bytes, as torch itself passes
        return result

    def main_first(self, function: Callable[[], T]) -> T:
        """Return the result of ``function``, which every process runs, the first one before the others.

        If it raises in the first process, the others end without running it.
        """
        results: list[T] = []
        self.on_main(lambda: results.append(function()))
        return results[0] if self.main else function()

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Return for each flag whether it is set in any process; all processes get the same result."""
        if self.size == 1:
            return flags
        found = torch.tensor(flags, dtype=torch.int32, device="cpu")
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return tuple(map(bool, found.tolist()))

    def sum(self, numbers: Tensor) -> Tensor:
        """Return the sum of a small tensor over all processes, on the CPU."""
        numbers = numbers.cpu()
        if self.size > 1:
            dist.all_reduce(numbers)
        return numbers

    def interleaved(self, share: list[T]) -> list[T]:
        """Return the list of which process r holds every ``size``-th element, starting at r."""
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
    """Join the processes that `torchrun` describes in the environment; without torchrun there is only this process.

    After an :class:`InputError` within the block, processes that `torchrun` restarts end silently.

    Raises:
        InputError: this machine has fewer GPUs than processes, or WORLD_SIZE is set without a launch by torchrun.
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
            # torchrun keeps the store when it restarts processes, so they would find the addresses of dead processes.
            # Each start therefore has its own prefix.
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
    """Return the name of this start of the processes, chosen by the first; all have met when it is returned.

    torchrun's count of restarts cannot serve as the name, because it is per machine. A machine that restarts its
    processes because another machine's failed does not count that.
    """
    if rank == 0:
        name = uuid.uuid4().hex
        store.set(START, name)
        store.wait([f"{name}/{other}" for other in range(1, size)], TIMEOUT)
        store.set(START, "")  # a process that comes later waits for the next start
        store.set(f"{name}/met", "")
        return name
    name = ""
    while not (name and store.check([f"{name}/met"])):  # the name may be that of a start that died before it met
        name = store.get(START).decode() or name
        if name:
            store.set(f"{name}/{rank}", "")
        time.sleep(0.05)
    return name


def _own_gpu(local: int) -> torch.device:
    """Return the GPU of this machine's process number ``local``, and make it the current one."""
    count = torch.cuda.device_count()
    if local > count:
        raise SystemExit(1)  # the first process without a GPU reports it
    if local == count:
        raise InputError(f"there is no GPU for process {local + 1} here: at most {count} processes")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def sharded(module: nn.Module, layers: list[nn.Module], world: World) -> nn.Module:
    """Divide the parameters of ``module`` among the processes; those of each of ``layers`` are gathered separately."""
    mesh = dist.init_device_mesh(world.device.type, (world.size,))
    for part in (*layers, module):
        fully_shard(part, mesh=mesh)
    return module


@contextlib.contextmanager
def unsummed(module: nn.Module) -> Iterator[None]:
    """Keep the gradients of backward passes in this process; the next one outside the block sums them over all."""
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
    """Return the whole of a tensor that may be sharded; if it is, all processes must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def collected(tensor: Tensor, world: World) -> Tensor:
    """Return the whole of a tensor that may be sharded; if it is, all processes must call it.

    In that case the first process gets it on the CPU, and the others get an empty tensor.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    gathered = tensor.full_tensor()
    return gathered.cpu() if world.main else gathered.new_empty(0)


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def share(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return this process's share of a whole tensor, divided like ``parameter``."""
    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor
    tensor = tensor.to(parameter.device)
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
