"""Builds the kernels' own test program with the flags that the library is built with.

Usage: python csrc/tests/build.py [plain | address | thread]. Prints the program's path; `address` adds the address and
undefined-behaviour sanitizers, `thread` the thread sanitizer.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "csrc"))
import native_build  # noqa: E402

VARIANTS = {
    "plain": native_build.OPTIMIZE,
    "address": "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined",
    "thread": "-O1 -g -fsanitize=thread",
}


def build(variant: str = "plain") -> Path:
    """Compiles what is out of date and returns the program. Raises native_build.BuildError."""
    flags = f"{native_build.CXX_FLAGS} {VARIANTS[variant]}"
    kernels = sorted((ROOT / "csrc/cpu").glob("*.cpp"))
    dispatch = [source for source in kernels if source.stem == "dispatch"]
    objects = [(f"test.{source.stem}.o", source, flags) for source in sorted((ROOT / "csrc/tests").glob("*.cpp"))]
    objects += [(f"{source.stem}.o", source, flags) for source in dispatch]
    objects += native_build.kernel_objects([source for source in kernels if source not in dispatch], flags)
    # The plain program is linked from the library's own objects, which are compiled already.
    directory = ROOT / "build" / ("native/cpu" if variant == "plain" else f"test_kernels/{variant}")
    return native_build.run_ninja(directory, objects, "test_kernels", f"-pthread {VARIANTS[variant]}")


if __name__ == "__main__":
    print(build(*sys.argv[1:]))
