"""The C code by itself: sanitizers watch it, whatever TensorFlow and MPI answer, and numpy knows its arithmetic."""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
SOURCES = REPOSITORY / "mpitrain" / "native" / "src"
FLAGS = [flag for flag in re.findall(r'"(-[^"]+)"', (REPOSITORY / "setup.py").read_text()) if "visib" not in flag]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g", "-O1"]
WRAPPED = [f"-Wl,--wrap={name}" for name in ("malloc", "calloc", "aligned_alloc", "mpitrain_take_turn")]
FLOAT32, FLOAT64, BFLOAT16, FLOAT16 = 1, 2, 14, 19
CASES = 60  # for each number of ranks
RANDOM = 1 << 20


def compiled(directory: Path, files: Sequence[Path], *flags: str) -> Path:
    """What a C compiler makes of them; skips where there is none that can do it."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    empty, made = directory / "empty.c", directory / "made"
    empty.write_text("int main(void) { return 0; }\n")

    def compile(*files: Path) -> subprocess.CompletedProcess[str]:
        command = [*compiler, *flags, f"-I{SOURCES}", *map(str, files), "-lm", "-lpthread", "-o", str(made)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    try:
        if (tried := compile(empty)).returncode:
            pytest.skip(f"{compiler[0]} cannot compile with {' '.join(flags)}: {tried.stderr[-300:]}")
    except OSError as error:
        pytest.skip(f"there is no C compiler: {error}")
    finished = compile(*files)
    assert not finished.returncode, finished.stderr
    return made


def test_nothing_goes_wrong_whatever_is_answered(tmp_path: Path) -> None:
    """Random plans on 1 to 4 ranks; failures of each call, other tensors and frames, threads, what is not finite."""
    files = [*SOURCES.glob("*.c"), *HERE.glob("*.c")]
    driver = compiled(tmp_path, files, *FLAGS, *SANITIZERS, "-Werror", *WRAPPED)
    finished = subprocess.run([driver, str(CASES)], capture_output=True, text=True, timeout=1200, check=False)
    assert (finished.returncode, finished.stdout) == (0, "all as it should be\n"), finished.stderr


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The machine code as it is installed, but with all its functions in sight."""
    made = compiled(tmp_path_factory.mktemp("code"), [*SOURCES.glob("*.c")], *FLAGS, "-Werror", "-shared", "-fPIC")
    library = ctypes.CDLL(str(made))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.to_wide.argtypes = [pointer, number, pointer, number, number, ctypes.c_double]
    library.from_wide.argtypes = [pointer, number, pointer, number, number]
    library.is_finite.argtypes = [pointer, number, number]
    return library


def singles() -> Any:
    """Any bits, and the values around which halves of each kind round."""
    numbers = np.random.default_rng(0)
    anything = numbers.integers(0, 1 << 32, RANDOM, np.uint32)
    halves = np.arange(1 << 16, dtype=np.uint16)
    near = [(halves.astype(np.uint32) << 16) | 0x8000, halves.view(np.float16).astype(np.float32).view(np.uint32)]
    near.append(near[1] + 0x1000)  # halfway between two of them, but for the smallest
    near.append(np.ldexp(np.arange(4098, dtype=np.float32), -25).view(np.uint32))
    shifts = [bits + np.uint32(shift) for bits in near for shift in (0, 1, 0xFFFFFFFF)]
    return np.concatenate([anything, *shifts]).view(np.float32)


@pytest.mark.parametrize(("kind", "number"), [(np.float16, FLOAT16), (ml_dtypes.bfloat16, BFLOAT16)])
def test_halves_are_those_of_numpy(code: ctypes.CDLL, kind: Any, number: int) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(kind)
    wide = np.empty(halves.size, np.float32)
    code.to_wide(wide.ctypes.data, FLOAT32, halves.ctypes.data, number, wide.size, -1.0)
    same_bits(wide, halves.astype(np.float32))
    values = singles()
    narrow = np.empty(values.size, kind)
    code.from_wide(narrow.ctypes.data, number, values.ctypes.data, FLOAT32, values.size)
    with np.errstate(all="ignore"):
        same_bits(narrow, values.astype(kind))


def same_bits(found: Any, wanted: Any) -> None:
    """Bits of numbers; what is none stays so, and processors keep other bits of it."""
    kind = np.uint32 if found.dtype.itemsize == 4 else np.uint16
    is_none = np.isnan(wanted.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(found.astype(np.float32)), is_none)
    np.testing.assert_array_equal(found.view(kind)[~is_none], wanted.view(kind)[~is_none])


@pytest.mark.parametrize(("kind", "number"), [(np.float32, FLOAT32), (np.float64, FLOAT64)])
def test_one_value_that_is_not_finite_is_found_wherever_it_is(code: ctypes.CDLL, kind: Any, number: int) -> None:
    largest = np.finfo(kind).max
    for size in (0, 1, 2, 7, 8, 33, 100):
        values = np.full(size, -largest, kind)
        assert code.is_finite(values.ctypes.data, number, size)
        for place in range(size):
            for bad in (np.nan, np.inf, -np.inf):
                values[place] = bad
                assert not code.is_finite(values.ctypes.data, number, size)
            values[place] = largest
