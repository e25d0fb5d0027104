"""The metadata is in setup.cfg. This adds one thing to the build: the native libraries, where there is a compiler.

They know no Python (ctypes loads them), so a wheel with them is `py3-none-<platform>` and one without is
`py3-none-any`. How they are built, and the variables SLURM_FT_NATIVE and GPU_PLATFORM: native/build.py.
"""

import importlib.util
import os
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def native_build():
    """native/build.py, by its path: the source folder is no package and is not on sys.path."""
    name = "slurm_ft_native_build"
    spec = importlib.util.spec_from_file_location(name, ROOT / "native" / "build.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class BuildWithNative(build_py):
    """Builds the libraries beside the Python files: in the build folder, or in the source tree when editable."""

    libraries = ()

    def run(self):
        super().run()
        folder = ROOT if self.editable_mode else Path(self.build_lib)
        type(self).libraries = native_build().build(folder / "slurm_ft" / "native" / "lib", os.environ)

    def get_outputs(self, include_bytecode=True):
        return [*super().get_outputs(include_bytecode), *map(str, self.libraries)]


class AnyPythonWheel(bdist_wheel):
    """Tagged by what was built."""

    def get_tag(self):
        platform = super().get_tag()[2] if BuildWithNative.libraries else "any"
        return "py3", "none", platform


class MaybeNative(Distribution):
    """Only so that the wheel's platform is asked for; there are no extension modules."""

    def has_ext_modules(self):
        return True


setup(cmdclass={"build_py": BuildWithNative, "bdist_wheel": AnyPythonWheel}, distclass=MaybeNative)
