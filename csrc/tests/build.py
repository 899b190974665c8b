"""Build the kernels' own test program with the flags of the library, or the emulated CUDA library.

Usage: python csrc/tests/build.py [plain | address | thread | aarch64 | emulated]. It prints the path of the result.
`address` adds the address and undefined-behaviour sanitizers, `thread` the thread sanitizer. `aarch64` is
cross-compiled, for qemu-aarch64. `emulated` is the CUDA library with device code compiled for the host
(csrc/tests/emulation).
"""

import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "csrc"))
import native_build  # noqa: E402

VARIANTS = {
    "plain": native_build.OPTIMIZE,
    "address": "-O0 -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined",
    "thread": "-O1 -g1 -fsanitize=thread",
    "aarch64": f"{native_build.OPTIMIZE} -static",
}


CROSS_COMPILER = "aarch64-linux-gnu-g++"


def build(variant: str = "plain") -> Path:
    """Compile what is out of date and return the program. Raise native_build.BuildError if it does not compile."""
    flags = f"{native_build.CXX_FLAGS} {VARIANTS[variant]}"
    sets = native_build.INSTRUCTION_SETS["aarch64"] if variant == "aarch64" else native_build.instruction_sets()
    if variant in ("address", "thread"):
        # This machine's best set, of which amx_bf16 calls the next one's kernels. Addresses are checked in the generic
        # one too, in the others by the guard pages of the plain program. All sets share the code for threads.
        names = [name for name, flags in sets.items() if native_build.machine_has(flags)]
        names = names[: 2 if "amx_bf16" in names else 1] + ([] if variant == "thread" else names[-1:])
        sets = {name: sets[name] for name in dict.fromkeys(names)}
    # Not the tests' own double-precision code: it takes longest, runs while no other thread does, and the kernels'
    # operands are between guard pages or on the heap.
    of_tests = f"{flags} -O2{' -fno-sanitize=all' if variant in ('address', 'thread') else ''}"
    objects = [(f"test.{source.stem}.o", source, of_tests) for source in sorted((ROOT / "csrc/tests").glob("*.cpp"))]
    objects += native_build.kernel_objects(flags, sets)
    # The plain program reuses the library's objects, which are already compiled.
    directory = ROOT / "build" / ("native/cpu" if variant == "plain" else f"test_kernels/{variant}")
    cxx = [CROSS_COMPILER] if variant == "aarch64" else None
    return native_build.run_ninja(directory, objects, "test_kernels", f"-pthread {VARIANTS[variant]}", cxx=cxx)


def build_emulated(faulty: Path | None = None, directory: Path = ROOT / "build/emulated") -> Path:
    """Compile csrc/cuda and csrc/tests/hopper for the host, with the source `faulty` instead of the one of its name.
    Return the library."""
    torch = native_build.torch_for_building()
    emulation = ROOT / "csrc/tests/emulation"
    headers = f"-I{shlex.quote(str(emulation))}"
    include = f"-isystem {shlex.quote(str(torch / 'include'))}"
    # A wrong access that the compiler's checks find traps. The emulation reports the place. It is told of every access,
    # because its own functions stand in for those of the thread sanitizer (asynchronous.cpp).
    checks = "-fno-strict-aliasing -fsanitize=alignment,bounds,thread -fsanitize-undefined-trap-on-error"
    kernel = f"{native_build.CXX_FLAGS} -O1 {checks} {headers} -Wno-unknown-pragmas -x c++"
    sources = [*sorted((ROOT / "csrc/cuda").glob("*.cu")), *sorted((ROOT / "csrc/tests/hopper").glob("*.cu"))]
    objects = [(f"{source.stem}.o", source, kernel) for source in sources]
    objects += native_build.bindings("cuda", torch, "-O1", hopper=True)
    objects += [
        (f"emulation.{source.stem}.o", source, f"{native_build.CXX_FLAGS} -O3 {include} {headers}")
        for source in sorted(emulation.glob("*.cpp"))
    ]
    link = f"-shared -Wl,--no-undefined -L{shlex.quote(str(torch / 'lib'))} -ltorch_cpu -lc10"
    library = native_build.run_ninja(directory, objects, "_cuda_emulated.so", link)
    if faulty is None:
        return library
    others = [str(directory / name) for name, source, _ in objects if source.name != faulty.name]
    target, fresh = faulty.with_suffix(".so"), faulty.with_suffix(".o")
    compiler = shlex.join(native_build.compiler())
    subprocess.run(shlex.split(f"{compiler} {kernel} -c {faulty} -o {fresh}"), check=True)
    subprocess.run(shlex.split(f"{compiler} {fresh} {shlex.join(others)} -o {target} {link}"), check=True)
    return target


if __name__ == "__main__":
    print(build_emulated() if sys.argv[1:] == ["emulated"] else build(*sys.argv[1:]))
