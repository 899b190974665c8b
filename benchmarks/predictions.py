"""Times on this GPU the kernels whose cost is predicted from their machine code, and sets each measurement beside its
prediction: ``python benchmarks/predictions.py results.json``.

Predictions are those of ``benchmarks/results/machine-code.json``, for A100, H100 and B200. Attention's are of its
products' operations a second. A row operation's is the memory's speed, or what the issue slots leave of it. Times are
the kernels' own on the device, as torch's profiler has them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fastattn.bench import report
from fastattn.bench.timer import kernel_seconds

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import aot_gate
import machine_code
from sass.rates import MACHINES

DEVICE = "cuda"


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(shape, device=DEVICE)
    return values.to(dtype)


def predicted(line: dict[str, Any], capability: int) -> tuple[float, str]:
    """What a kernel is predicted to reach, and the unit."""
    if "predicted_tflops" in line:
        return line["predicted_tflops"]["simulated"], "TFLOP/s"
    return 1000 * MACHINES[capability].memory / max(1.0, line["predicted_issue_share"]), "GB/s"


def compared(case: machine_code.Case, lines: dict[str, Any], capability: int) -> Iterator[dict[str, Any]]:
    """For each kernel of a case: measurement beside prediction."""
    with mock.patch.object(aot_gate, "empty", random):
        seconds = kernel_seconds(case.call)
    for kernel, name in case.names.items():
        if name not in lines:
            continue
        if kernel not in seconds:
            raise RuntimeError(f"{name}: the profiler has no kernel {kernel!r} among {sorted(seconds)}")
        prediction, unit = predicted(lines[name], capability)
        measurement = case.work[kernel] / seconds[kernel] / (1e12 if unit == "TFLOP/s" else 1e9)
        yield {
            "kernel": name, "unit": unit, "predicted": prediction, "measured": measurement,
            "measured_of_predicted": measurement / prediction,
        }  # fmt: skip


def run(path: Path, results: dict[str, Any], seconds: float) -> list[str]:
    """Measures until the time is up; what there is so far is in the file at any moment. Returns what failed."""
    deadline, failures = time.monotonic() + seconds, []
    major, minor = torch.cuda.get_device_capability()
    capability = 10 * major + minor
    known = json.loads(machine_code.RESULTS.read_text())
    lines = {line["name"]: line for line in known["kernels"]}
    device = torch.cuda.get_device_name()
    results |= {"predicted_from": {"commit": known["commit"], "versions": known["versions"]}, "kernels": []}
    of = f"predictions are of {', '.join(f'{m.name} (sm_{n})' for n, m in MACHINES.items())}, SXM boards"
    results["about"] = f"{of}; this GPU is {device} (sm_{capability})"
    print(results["about"])
    for case in machine_code.cases(capability) if capability in MACHINES else ():
        if time.monotonic() > deadline:
            print(f"time is up before {next(iter(case.names.values()))}")
            break
        try:
            for line in compared(case, lines, capability):
                results["kernels"].append(line)
                print(
                    f"{line['kernel']:45} predicted {line['predicted']:5.0f}, measured {line['measured']:5.0f} "
                    f"{line['unit']}: {line['measured_of_predicted']:.2f}",
                    flush=True,
                )
        except Exception as error:
            failures.append(f"{next(iter(case.names.values()))}: {report.brief(error)}")
        report.write_json(path, results)
    report.write_json(path, results)
    return failures


def compile_part(part: slice) -> None:
    """Calls these cases once."""
    major, minor = torch.cuda.get_device_capability()
    with mock.patch.object(aot_gate, "empty", random):
        for case in list(machine_code.cases(10 * major + minor))[part]:
            try:
                case.call()
            except Exception as error:
                print(f"{next(iter(case.names.values()))}: {report.brief(error)}")


if __name__ == "__main__":
    report.on_gpu(__doc__, run, compile_part)
