"""The processes of a run, by torch.distributed: one, or those that `torchrun` started.

Every process computes its share of each update; the first writes, prints, and decides what all have to agree upon.
Collectives on CPU tensors go through gloo, which waits for no GPU; gradients through nccl where there are GPUs.
"""

import contextlib
import dataclasses
import datetime
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fastattn.translation.errors import InputError

PATIENCE = datetime.timedelta(hours=2)  # with a process that prepares a corpus; one that has died is noticed at once
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class World:
    """One of ``size`` processes: which, and the device that it computes on."""

    rank: int
    size: int
    device: torch.device

    @property
    def main(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0

    def on_main(self, function: Callable[[], T]) -> T:
        """The result of ``function``, which only the first process runs. What it raises there ends the others too."""
        if self.size == 1:
            return function()
        shared: list[Any] = [None, False]
        try:
            if self.main:
                shared = [function(), True]
        finally:
            dist.broadcast_object_list(shared)
        if not shared[1]:
            raise SystemExit(1)  # the first process says why
        return shared[0]

    def main_first(self, function: Callable[[], T]) -> T:
        """The result of ``function``, which every process runs; what is wrong with it, the first says for all."""
        results: list[T] = []
        self.on_main(lambda: results.append(function()))
        return results[0] if self.main else function()

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag, whether it is set in any process: the same answer in all."""
        if self.size == 1:
            return flags
        found = torch.tensor(flags, dtype=torch.int32)
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


def restarted() -> bool:
    """Whether `torchrun` started this process again, after one had failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


@contextlib.contextmanager
def joined() -> Iterator[World]:
    """This process among those of its run, as `torchrun` describes them in the environment; without it, alone.

    Raises:
        InputError: there are fewer GPUs here than processes.
    """
    cuda = torch.cuda.is_available()
    rank, size, local = (
        int(os.environ.get(name, n)) for name, n in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    if size == 1:
        yield World(0, 1, torch.device("cuda" if cuda else "cpu"))
        return
    if cuda and local >= torch.cuda.device_count():
        raise InputError(f"there is no GPU for process {local + 1} here: at most {torch.cuda.device_count()} processes")
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=PATIENCE)
    yield World(rank, size, device)
    dist.destroy_process_group()
