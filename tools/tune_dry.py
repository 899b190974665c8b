"""Predicts what attention's tiles reach from their machine code, with no GPU: ``python tools/tune_dry.py --arch 90``.

The sibling of ``tune.py``, which measures. Candidates are compiled for long sequences in bfloat16, without dropout and
with it, and simulated by ``sass``; printed are lines for ``fastattn/backends/triton/attention/tiles.py``, the best
first, with the stack's share of the main loop, of which the gate allows little. A person takes over what is better.
``--write`` puts beside the table's present lines what they are predicted to reach. Believe differences of 15 % and
more.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import re
import sys
from typing import Any
from unittest import mock

import torch
from triton.runtime.errors import OutOfResources, PTXASError

import machine_code
from fake_gpu import pretend
from fastattn.backends.triton import attention
from fastattn.backends.triton.attention import tiles
from fastattn.files import write_file

PAGE = machine_code.ROOT / "fastattn/backends/triton/attention/tiles.py"
TABLES = {80: "HALF_SMALL", 90: "HALF"}
KERNELS = "forward", "grad_query", "grad_key_value", "forward_masked", "grad_query_masked", "grad_key_value_masked"
SIZES = 64, 128
# Queries, keys, warps, stages, registers (as ptxas chooses) and ptxas's level.
CANDIDATES = [
    tiles.Tile(*tile) for tile in itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3), (None,), (None, 0))
]


def predicted(device: int, capability: int, kernel: str, size: int, tile: tiles.Tile) -> list[dict[str, Any]]:
    """What a kernel with this tile is predicted to reach, without dropout and with it; of a masked one, over the tiles
    that the mask leaves whole."""
    name, is_masked = kernel.removesuffix("_masked"), kernel.endswith("_masked")
    choose, launch, function = tiles.choose, attention.launch, getattr(attention, f"{name}_kernel")

    def chosen(other: str, *arguments: Any) -> tiles.Tile:
        return tile if other == name else choose(other, *arguments)

    def only(started: Any, *arguments: Any, **constants: Any) -> None:
        if started is function:
            launch(started, *arguments, **constants)

    found = []
    with mock.patch.object(tiles, "choose", chosen), mock.patch.object(attention, "launch", only):
        for threshold in (0, machine_code.THRESHOLD):
            call = functools.partial(machine_code.attention, size, threshold, is_masked)
            for _, one in machine_code.compiled(device, call, _seen):
                found.append(machine_code.of_attention(function, one, capability))
    return found


_seen: set[int] = set()  # the compiled kernels


def simulated(found: list[dict[str, Any]]) -> list[float]:
    """TFLOP/s without dropout and with it."""
    return [one["predicted_tflops"]["simulated"] for one in found]


def search(device: int, capability: int, kernel: str, size: int) -> None:
    """Prints the candidates that compile, the best first."""
    present, tried = tiles.table(torch.bfloat16, True, torch.device("cuda", device))[kernel][size], []
    for tile in dict.fromkeys((present, *CANDIDATES)):
        try:
            tried.append((predicted(device, capability, kernel, size, tile), tile))
        except (OutOfResources, PTXASError):
            continue
    tried = [(found, tile) for found, tile in tried if not any("error" in one for one in found)]
    for found, tile in sorted(tried, key=lambda pair: -sum(simulated(pair[0]))):
        plain, dropping = simulated(found)
        share = max(one["local_accesses"] / (one["instructions"] * one["scores"]) for one in found)
        print(
            f"sm_{capability} {kernel} {size}: {tile}{', at present' if tile == present else ''}, predicted "
            f"{plain:.0f} TFLOP/s, with dropout {dropping:.0f}, {share:.1%} of the main loop accesses the stack",
            flush=True,
        )


def beside(text: str, table: str, kernel: str, size: int, comment: str) -> str:
    """The tables' text with this comment beside a tile's line."""
    entry = text.index(f'\n    "{kernel}": {{', text.index(f"\n{table} = {{")) + 1
    line = re.compile(rf"([^\n]*\n(?: {{8}}[^\n]*\n)*? {{8}}{size}: Tile\([^)]*\),)[^\n]*").match(text, entry)
    if line is None:
        raise ValueError(f"{table}, {kernel}, {size}: expected a line of its own for this tile")
    return f"{text[:entry]}{line[1]}  # {comment}{text[line.end() :]}"


def write(capabilities: list[int]) -> None:
    comments = []
    for device, capability in enumerate(capabilities):
        table = tiles.table(torch.bfloat16, True, torch.device("cuda", device))
        for kernel, size in itertools.product(KERNELS, SIZES):
            plain, dropping = simulated(predicted(device, capability, kernel, size, table[kernel][size]))
            comment = f"predicted {plain:.0f} TFLOP/s, with dropout {dropping:.0f}"
            print(f"sm_{capability} {kernel} {size}: {comment}", flush=True)
            comments.append((TABLES[capability], kernel, size, comment))
    text = PAGE.read_text()
    for place in comments:
        text = beside(text, *place)
    write_file(PAGE, text.encode())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--kernel", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--head", type=int, nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--write", action="store_true", help="of the present tiles, beside their lines")
    options = parser.parse_args(arguments)
    pretend(*options.arch)
    if options.write:
        write(options.arch)
        return 0
    for device, capability in enumerate(options.arch):
        for kernel, size in itertools.product(options.kernel, options.head):
            search(device, capability, kernel, size)
    return 0


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("tune_dry: unset TRITON_INTERPRET, under which nothing is compiled")
    sys.exit(main())
