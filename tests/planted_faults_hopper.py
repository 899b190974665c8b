"""Run a test kernel of an emulated library that may have a planted fault in several schedules, and say what each found.

Arguments: LIBRARY KERNEL SCHEDULES. This is a program of its own, because a fault may end the process.
"""

import ctypes
import sys

import torch

import hopper

PROBLEMS = {
    "forward": lambda library: hopper.forward(library, 64, 400, [300, 400], dropout_p=0.1, blocks=3),
    "backward": lambda library: hopper.backward(library, 64, 384, [200, 384], dropout_p=0.1),
}


def main():
    library, kernel, schedules = ctypes.CDLL(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    library.seed_order.argtypes = [ctypes.c_uint64]
    torch.set_num_threads(1)
    for seed in range(schedules):
        library.seed_order(seed)
        try:
            PROBLEMS[kernel](library)
        except (AssertionError, RuntimeError) as error:
            print(f"schedule {seed}: {error}".replace("\n", " "))
        else:
            print(f"schedule {seed}: as expected")


if __name__ == "__main__":
    main()
