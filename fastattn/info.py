"""The text of `fastattn info`: versions, device, compiled libraries, and the reasons for missing parts."""

import platform
import re
from importlib.metadata import version
from pathlib import Path

import torch

from fastattn import __version__
from fastattn.backends import TABLE, native


def cpu_name() -> str:
    """Return the processor's name, with family and model, which distinguish processors of one name.

    If the system does not report a name, return the architecture.
    """
    cpu = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        wanted = r"^(model name|cpu family|model|CPU implementer|CPU part)\s*: (.*)$"
        fields = dict(re.findall(wanted, information.read_text(), re.MULTILINE))
        arm = f"{fields.get('CPU implementer', '')} {fields.get('CPU part', '')}"
        cpu = fields.get("model name", arm).strip() or cpu
        if "cpu family" in fields:
            cpu += f" (family {fields['cpu family']}, model {fields['model']})"
    return cpu


def report() -> str:
    """Return the whole text of `fastattn info`."""
    triton = TABLE["triton"]
    rows = [
        ("fastattn", f"{__version__} in {native.PACKAGE}"),
        ("python", f"{platform.python_version()} on {platform.platform()}"),
        ("torch", f"{torch.__version__}, {torch.get_num_threads()} threads"),
        ("cpu", f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()} in torch"),
        ("cuda", _cuda()),
        ("triton", f"not used: {triton.MISSING}" if triton.MISSING else f"{version('triton')}, for CUDA tensors"),
    ]
    rows += [(f"_{name} library", _library(name)) for name in native.LIBRARIES]
    return "\n".join(f"{label:14} {text}" for label, text in rows)


def _cuda() -> str:
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if not torch.cuda.is_available():
        return f"CUDA {torch.version.cuda}, no device"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"CUDA {torch.version.cuda}: {', '.join(names)}"


def _library(name: str) -> str:
    if native.library(name) is None:
        return f"not used: {native.reason(name)}"
    record = native.build_record().get(name, {})
    built = f"built by {record['compiler']} with the headers of torch {record['torch_headers']}" if record else "loaded"
    if name == "cuda":
        return f"{built} for compute capability {', '.join(record.get('architectures', ['unknown']))}"
    if name == "triton":
        return f"{built}; starts Triton's kernels"
    library = native.library(name)
    missing = [isa for isa in library.machine_isas().split(",") if isa not in library.compiled_isas().split(",")]
    left_out = f"; not compiled: {', '.join(missing)} (FASTATTN_CPU_BUILD=all adds them)" if missing else ""
    return f"{built}; {library.isa()} in use of {library.isas()}{left_out}"
