"""The entry point of the command `fastattn`: sets what has to be set before torch's OpenMP runtime is loaded.

GNU's OpenMP lets a thread that waits for others spin for milliseconds before it sleeps. Beside other busy processes a
spinning thread keeps its processor from the very thread that it waits for; without any spinning, each parallel region
pays for waking a thread. A short spin, longer than the gaps between a model's operations, serves both.
"""

import os

SPIN = "3000"  # iterations, some hundredths of a millisecond


def main() -> int:
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPIN
    from fastattn.cli import main as run

    return run()
