"""The machine code of mpitrain/native, which is optional; everything else is in pyproject.toml.

It needs no header of Python, TensorFlow or MPI, so one file serves all of them. Without a compiler, or where it fails,
mpitrain is installed all the same, and Python does what the machine code would.
"""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("mpitrain/native/src")


class BuildLibrary(build_ext):
    """Builds a library that is loaded by ctypes, and no module of one Python."""

    def get_ext_filename(self, ext_name: str) -> str:
        return "/".join(ext_name.split(".")) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []


class AnyPython(bdist_wheel):
    """A wheel for one kind of machine, and every Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "mpitrain.native.exchange",
            sorted(str(path) for path in SOURCES.glob("*.c")),
            depends=sorted(str(path) for path in SOURCES.glob("*.h")),
            # No contraction of a * b + c, which would change bits; nothing but what is marked is seen from outside.
            extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra"],
            libraries=["m"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": AnyPython},
)
