"""Loads the compiled libraries that stand beside this package, or says why one is not there.

`_build.json`, written by the build (csrc/native_build.py), holds what was compiled with which compiler, or why not.
"""

import functools
import json
import re
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).resolve().parent.parent
LIBRARIES = ("cpu", "cuda")
OLDEST_TORCH = (2, 10)
NEEDED = {  # operations by which a library is known to be of this version
    "cpu": (  # what the direct way needs beyond the backend's functions
        "attention_direct",
        "attention_kept",
        "attention_kept_backward",
        "dropout_direct",
        "dropout_add_layer_norm_direct",
        "dropout_add_layer_norm_kept",
        "layer_norm_direct",
        "layer_norm_kept",
        "softmax_dropout_direct",
        "softmax_dropout_kept",
        "softmax_dropout_kept_backward",
    ),
    "cuda": ("dropout", "dropout_mask", "layer_norm", "dropout_add_layer_norm"),
}


def build_record() -> dict[str, dict[str, Any]]:
    """What the build wrote by library: `instruction_sets`, `compiler`, `torch_headers`, or `reason`; or {}."""
    try:
        return json.loads((PACKAGE / "_build.json").read_text())
    except (OSError, ValueError):
        return {}


@functools.cache
def _load(name: str) -> tuple[Any, str]:
    """(namespace of the library's operations or None, why None)."""
    path = PACKAGE / f"_{name}.so"
    if name == "cuda" and torch.version.cuda is None:
        return None, "this torch is built without CUDA"
    if not path.exists():
        unknown = f"{path} is not there (in a checkout: python setup.py build_ext --inplace)"
        return None, build_record().get(name, {}).get("reason", unknown)
    version = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if version and (int(version[1]), int(version[2])) < OLDEST_TORCH:
        return None, "torch {} is installed, the library needs {}.{} or newer".format(torch.__version__, *OLDEST_TORCH)
    try:
        torch.ops.load_library(str(path))
    except (OSError, RuntimeError) as error:
        return None, f"{path.name} does not load: {str(error).splitlines()[0]}"
    library = getattr(torch.ops, f"fastattn_{name}")
    lacking = [operation for operation in NEEDED[name] if not hasattr(library, operation)]
    if lacking:
        return None, f"{path.name} is older than this package: it has no {lacking[0]}; build it anew"
    return library, ""


def library(name: str) -> Any:
    """`torch.ops.fastattn_NAME`: the operations of the compiled library "cpu" or "cuda", or None if it cannot serve."""
    return _load(name)[0]


def reason(name: str) -> str:
    """Why `library(name)` is None; "" where it is loaded."""
    return _load(name)[1]
