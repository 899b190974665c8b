"""Commands that compile the libraries (csrc/native_build.py) and tag the wheel; pyproject.toml has everything else."""

import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "csrc"))
import native_build  # noqa: E402


class BuildPython(build_py):
    def run(self):
        # setuptools never removes files from its build folder that were deleted from the source.
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / "fastattn", ignore_errors=True)
        super().run()


class BuildLibraries(build_ext):
    def run(self):
        in_place = self.inplace or self.editable_mode
        self.written = native_build.build((ROOT if in_place else Path(self.build_lib)) / "fastattn")

    def get_outputs(self):
        return [str(path) for path in getattr(self, "written", [])]

    def get_output_mapping(self):
        return {}


class PlatformWheel(bdist_wheel):
    def get_tag(self):
        """Return py3-none-PLATFORM, because the libraries use no CPython symbols; py3-none-any if none was built."""
        built = any(name.endswith(".so") for name in self.get_finalized_command("build_ext").get_outputs())
        return ("py3", "none", super().get_tag()[2] if built else "any")


setup(
    ext_modules=[Extension(f"fastattn._{name}", sources=[]) for name in native_build.LIBRARIES],
    cmdclass={"build_py": BuildPython, "build_ext": BuildLibraries, "bdist_wheel": PlatformWheel},
)
