"""The kernels' own test program (csrc/tests), and the symbols of their objects. The tests require the source and a
compiler."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REQUIRED, machine_isas

ROOT = Path(__file__).resolve().parent.parent
if not (ROOT / "csrc/tests/build.py").is_file():
    pytest.skip("the kernels' source is not here", allow_module_level=True)
sys.path.insert(0, str(ROOT / "csrc"))
sys.path.insert(0, str(ROOT / "csrc/tests"))
import build  # noqa: E402
import native_build  # noqa: E402


def program(variant: str) -> Path:
    try:
        native_build.instruction_sets(), native_build.compiler()
    except native_build.BuildError as reason:
        pytest.skip(str(reason))
    return build.build(variant)


def run(*command: object, **environment: str) -> str:
    """Return the output of a command that must exit with 0. Otherwise the failure shows what it printed."""
    done = subprocess.run(
        [str(word) for word in command],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def passing(output: str) -> list[str]:
    """Return the instruction sets whose line reports no failures."""
    return [line.split(":")[0] for line in output.splitlines() if line.endswith(" 0 failures")]


@pytest.mark.slow
def test_every_instruction_set_of_this_machine():
    names = passing(run(program("plain"), 60))
    assert names[-1] == "generic"
    from fastattn.backends import native

    if native.library("cpu") is not None:
        assert names == machine_isas()


DISPATCHED = """
#include "kernels.h"
#include <stdio.h>
namespace fastattn {
extern const Limits limits_generic, limits_avx2;
const Limits limits_generic = {}, limits_avx2 = {};
}
using namespace fastattn;
int main() {
  for (int i = 0; i < kInstructionSetCount; ++i) if (has_instruction_set(i)) puts(kInstructionSets[i]);
  puts(instruction_set() < 0 ? "none" : kInstructionSets[instruction_set()]);
}
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the sets of x86-64")
@pytest.mark.skipif("avx2" not in machine_isas(), reason="the program needs AVX2")
def test_a_set_that_is_not_compiled_is_replaced_by_the_next_one(tmp_path):
    """A library with two sets offers these alone. FASTATTN_CPU_ISA selects one, or the next one below it."""
    (tmp_path / "main.cpp").write_text(DISPATCHED)
    sources = tmp_path / "main.cpp", ROOT / "csrc/cpu/dispatch.cpp"
    run(*native_build.compiler(), "-std=gnu++17", f"-I{ROOT / 'csrc/cpu'}", *sources, "-o", tmp_path / "main")
    machine = machine_isas()
    expected = {"": "avx2", "avx2": "avx2", "generic": "generic", "sse9": "none"}
    for isa in ("amx_bf16", "avx512_bf16", "avx512"):
        expected[isa] = "avx2" if isa in machine else "none"
    for isa, used in expected.items():
        assert run(tmp_path / "main", FASTATTN_CPU_ISA=isa).split() == ["avx2", "generic", used], isa


@pytest.mark.slow
@pytest.mark.parametrize(("cpu", "best"), [("Haswell", "avx2"), ("Nehalem", "generic")])
def test_older_machines(cpu, best):
    """The program runs on older machines, emulated so that any instruction that they lack raises SIGILL."""
    if platform.machine() != "x86_64" or shutil.which("qemu-x86_64") is None:
        pytest.skip("needs qemu-x86_64 on x86-64")
    names = passing(run("qemu-x86_64", "-cpu", cpu, program("plain"), 12))
    assert names == list(dict.fromkeys([best, "generic"]))


@pytest.mark.slow
def test_aarch64():
    """NEON's code passes, cross-compiled and run on an emulated machine."""
    missing = [command for command in (build.CROSS_COMPILER, "qemu-aarch64") if shutil.which(command) is None]
    if missing:
        (pytest.fail if "aarch64" in REQUIRED else pytest.skip)(f"needs {' and '.join(missing)}")
    assert passing(run("qemu-aarch64", build.build("aarch64"), 25)) == ["generic"]


@pytest.mark.slow
def test_kernel_objects_share_no_code():
    """Kernel objects share no function that the linker may take from any of them (weak, COMDAT). It could take one that
    is compiled for a wide instruction set."""
    directory = program("plain").parent
    checked = 0
    for source in sorted((ROOT / "csrc/cpu").glob("*.cpp")):
        for isa in native_build.instruction_sets():
            target = directory / f"{source.stem}.{isa}.o"
            if source.stem == "dispatch":
                continue
            lines = run("nm", "--extern-only", "--defined-only", "--demangle", target).splitlines()
            symbols = [line.split(maxsplit=2) for line in lines]
            passes = "", "_backward"
            assert {name for _, _, name in symbols} <= {f"fastattn::{source.stem}{p}_{isa}" for p in passes}, (
                target.name
            )
            assert symbols
            assert all(kind in "RD" for _, kind, _ in symbols), target.name
            checked += 1
    assert checked >= 4 * len(native_build.instruction_sets())


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "cases"), [("address", 60), ("thread", 51)])
def test_sanitizers(variant, cases):
    output = run(program(variant), cases, UBSAN_OPTIONS="print_stacktrace=1")
    assert passing(output)[-1] == ("generic" if variant == "address" else machine_isas()[0])
    assert "runtime error" not in output
    assert "WARNING: ThreadSanitizer" not in output
