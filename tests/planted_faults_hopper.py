"""Run a test kernel of an emulated library that may have a planted fault in several schedules, and say what each found.

It runs in a process of its own (preloaded.py), because a fault may end the process.
"""

import ctypes

import torch

import hopper

PROBLEMS = {
    "forward": lambda library: hopper.forward(library, 64, 400, [300, 400], dropout_p=0.1, blocks=3),
    "backward": lambda library: hopper.backward(library, 64, 384, [200, 384], dropout_p=0.1),
}


def main(path, kernel, schedules):
    library = ctypes.CDLL(path)
    library.seed_order.argtypes = [ctypes.c_uint64]
    torch.set_num_threads(1)
    for seed in range(int(schedules)):
        library.seed_order(seed)
        try:
            PROBLEMS[kernel](library)
        except (AssertionError, RuntimeError) as error:
            print(f"schedule {seed}: {error}".replace("\n", " "))
        else:
            print(f"schedule {seed}: as expected")
