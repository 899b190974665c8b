"""Precision in which a model computes: bf16, fp32, or auto."""

from pathlib import Path

import torch

from fastattn.errors import InputError

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
BFLOAT16_INSTRUCTIONS = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}  # as the kernel names them, on x86 and on Arm


def resolve(precision: str) -> str:
    """Return "bf16" or "fp32"; for "auto", bf16 if this machine multiplies bfloat16 matrices in hardware.

    Raises:
        InputError: the precision has another name.
    """
    if precision in DTYPES:
        return precision
    if precision != "auto":
        raise InputError(f"unknown precision {precision!r}, expected one of auto, {', '.join(DTYPES)}")
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    information = Path("/proc/cpuinfo")
    words = information.read_text().split() if information.is_file() else ()
    return "fp32" if BFLOAT16_INSTRUCTIONS.isdisjoint(words) else "bf16"
