"""Time the host's part of calls on CUDA tensors, on a machine without a GPU: ``python tools/launch_cost.py``.

Operands are on the CPU, and kernels pass through Triton's launcher to a driver that starts nothing. So the times, in
microseconds, cover checks, allocations, autograd and the choice of the compiled kernel. They do not cover the driver's
launch, and they have the CPU's allocator instead of CUDA's.
"""

import argparse
import json

import torch
import triton

import fake_gpu
import fastattn
from fastattn.backends import triton as kernels
from fastattn.bench import contest
from fastattn.bench.cases import Case
from fastattn.bench.timer import wall_clock

CASES = [
    Case(operation, shape, torch.bfloat16, backward, **options)
    for backward in (False, True)
    for operation, shape, options in (
        ("dropout", (4, 512), {"dropout": 0.1}),
        ("layer_norm", (4, 512), {}),
        ("dropout_add_layer_norm", (4, 512), {"dropout": 0.1}),
        ("softmax_dropout", (4, 512), {"dropout": 0.1}),
        ("attention", (2, 8, 32, 64), {"dropout": 0.1, "causal": True}),
        ("attention", (2, 8, 32, 64), {"padding": "mask"}),
    )
]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=300, help="calls of each of the 7 samples, of which the least")
    options = parser.parse_args()
    torch.set_num_threads(1)
    fake_gpu.pretend(90)
    vars(torch.cuda).update(current_device=lambda: None)  # the index of the CPU as a device
    kernels.DEVICE = "cpu"
    microseconds = {}
    with fastattn.backend("triton"):
        for case in CASES:
            call = contest.ours(case)
            wall_clock(call, 20)
            microseconds[case.name] = round(1e6 * min(wall_clock(call, options.repeats) for _ in range(7)), 1)
    print(json.dumps({"triton": triton.__version__, "microseconds": microseconds}, indent=1))


if __name__ == "__main__":
    main()
