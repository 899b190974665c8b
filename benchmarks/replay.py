"""Search for two replays of a captured call that differ although they begin with one seed: ``python replay.py``.

On an H100, a captured ``dropout_add_layer_norm`` once gave two masks for one seed, while many processes shared the GPU.
Here many processes capture a call that draws its seed inside the graph, and replay it three times: after setting the
generator's seed, once more, and after setting it again. The drawn seed is an output, and all outputs are poisoned
before each replay. So a difference between the first and the third replay is one of

- seed: the drawn seeds differ, by the generator or by torch's handling of it in graphs;
- output: the seeds agree, another output does not, by memory, a missing dependency or the kernel;
- unwritten: an output is still poisoned, because a kernel did not run or ran too early.

Each process has its call (torch alone, or fastattn on each backend) and its way to replay it. It prints a line of JSON
per difference, and its counts. The exit status is 1 if there was a difference.
"""

import argparse
import contextlib
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch

import fastattn

DEVICE = "cuda"
POISON = 0x5A5A5A5A5A5A5A5A
KINDS = ("seed", "output", "unwritten")


@dataclasses.dataclass(frozen=True)
class Mode:
    """How a process replays: rounds per graph, and what differs from the test that once failed."""

    rounds: int = 1
    is_explicit: bool = False  # The seed is an operand; the generator is not used.
    has_own_stream: bool = False
    poisons: bool = True


MODES = {
    "a fresh graph each time": Mode(),
    "one graph, many rounds": Mode(rounds=50),
    "an explicit seed": Mode(is_explicit=True),
    "a stream of its own": Mode(has_own_stream=True),
    "no poison": Mode(poisons=False),
}


def torch_alone(seed: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    """Return outputs that depend on each bit of the seed, by torch's kernels."""
    index = torch.arange(x.numel(), device=DEVICE)
    return [(index * 2654435761 + seed[0]) ^ (index + seed[1])]


def ours(backend: str) -> Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]]:
    def call(seed: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        with fastattn.backend(backend):
            out = fastattn.dropout_add_layer_norm(x, x.detach(), dropout_p=0.5, seed=seed)
        return [out.detach(), *torch.autograd.grad(out.sum(), x)]

    return call


CALLS = {"torch": torch_alone, "cuda": ours("cuda"), "triton": ours("triton")}


def capture(call: Callable[[], list[torch.Tensor]]) -> tuple[Callable[[], None], list[torch.Tensor]]:
    """Capture a call. Return the function that replays it, and its outputs."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()
    return graph.replay, outputs


@contextlib.contextmanager
def own_stream() -> Iterator[None]:
    """Run the block on a stream of its own, between what is before and behind it on the current one."""
    current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


def poison(tensor: torch.Tensor) -> None:
    tensor.fill_(torch.nan if tensor.is_floating_point() else POISON)


def is_poisoned(tensor: torch.Tensor) -> bool:
    return bool((tensor.isnan() if tensor.is_floating_point() else tensor == POISON).any())


def kind_of(runs: list[list[torch.Tensor]]) -> str:
    """Return the kind of difference between the first and the last run, or "". Each run's first output is the seed."""
    if any(is_poisoned(output) for run in runs for output in run):
        return "unwritten"
    if not torch.equal(runs[0][0], runs[-1][0]):
        return "seed"
    return "" if all(map(torch.equal, runs[0], runs[-1])) else "output"


def search(name: str, mode: Mode, seconds: float) -> dict[str, int]:
    """Replay a call for a time. Print each difference; return how many there were of each kind."""
    counts = dict.fromkeys(("graphs", "rounds", *KINDS), 0)
    x = torch.randn(2, 40, 512, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    operand = torch.zeros(2, dtype=torch.int64, device=DEVICE)

    def call() -> list[torch.Tensor]:
        drawn = torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=DEVICE)
        seed = operand + 1 if mode.is_explicit else drawn
        return [seed, *CALLS[name](seed, x)]

    call()  # compiles what the call needs
    deadline = time.time() + seconds
    while time.time() < deadline:
        replay, outputs = capture(call)
        counts["graphs"] += 1

        def once(begin: int | None, replay=replay, outputs=outputs) -> list[torch.Tensor]:
            if begin is not None:
                torch.manual_seed(begin)
            operand.fill_(begin or 0)
            for output in outputs if mode.poisons else ():
                poison(output)
            replay()
            return [output.clone() for output in outputs]

        for _ in range(mode.rounds):
            with own_stream() if mode.has_own_stream else contextlib.nullcontext():
                runs = [once(3), once(None), once(3)]
            counts["rounds"] += 1
            if kind := kind_of(runs):
                counts[kind] += 1
                shares = [(a != b).double().mean().item() for a, b in zip(runs[0], runs[-1], strict=True)]
                seeds = [run[0].tolist() for run in runs]
                print(
                    json.dumps(
                        {"difference": kind, "call": name, "mode": mode.__dict__, "seeds": seeds, "shares": shares}
                    )
                )
    return counts


def work(rank: int, seconds: float) -> None:
    """Search as the process of this number, and print its counts."""
    name = list(CALLS)[rank % len(CALLS)]
    mode = list(MODES)[rank // len(CALLS) % len(MODES)]
    counts = search(name, MODES[mode], seconds)
    print(json.dumps({"process": rank, "call": name, "mode": mode, **counts}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--processes", type=int, default=len(CALLS) * len(MODES))
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        work(options.rank, options.seconds)
        return
    command = [sys.executable, __file__, "--seconds", str(options.seconds)]
    children = [
        subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(options.processes)
    ]
    total, failed = dict.fromkeys(("graphs", "rounds", *KINDS), 0), 0
    for child in children:
        output, _ = child.communicate()
        print(output, end="", flush=True)
        last = output.splitlines()[-1] if child.returncode == 0 and output else "{}"
        counts = json.loads(last)
        failed += not counts.get("rounds")  # it ended early, or replayed nothing
        for name in total:
            total[name] += counts.get(name, 0)
    print(json.dumps({"total": total, "processes that replayed nothing": failed}))
    sys.exit(failed > 0 or any(total[kind] for kind in KINDS))


if __name__ == "__main__":
    main()
