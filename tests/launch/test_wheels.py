"""What is given to others: wheels with machine code, and sources that install without a compiler as well."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.launch.conftest import REPOSITORY, SHARED, Mpirun

PROGRAM = """
import mpitrain
import tensorflow as tf
from mpitrain.collectives.registry import chosen
world = mpitrain.init()
total = float(mpitrain.all_reduce(tf.constant(world.rank + 1.0), "sum"))
if world.is_root:
    print(mpitrain.__file__, total, *chosen(world), sep="|")
"""


@pytest.fixture(scope="module", params=[SHARED])
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with what `scripts/wheels` makes."""
    path = tmp_path_factory.mktemp("dist")
    environ = {**os.environ, "PYTHON": sys.executable}
    command = [str(REPOSITORY / "scripts" / "wheels"), str(path)]
    finished = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    if "No matching distribution found for setuptools" in finished.stderr:
        pytest.skip("no package index is reached, of which setuptools would come")
    assert not finished.returncode, finished.stderr
    return path


def test_wheels_carry_machine_code_for_every_python(made: Path) -> None:
    wheels = sorted(made.glob("*.whl"))
    assert wheels, "no wheel was made"
    for wheel in wheels:
        machine = wheel.stem.split("manylinux_2_17_")[1]
        assert wheel.name.endswith(f"-py3-none-manylinux_2_17_{machine}.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            code = archive.read("mpitrain/native/exchange.so")
        assert code[:4] == b"\x7fELF"
        assert code[18] == {"x86_64": 62, "aarch64": 183}[machine]
        assert not [name for name in names if name.endswith((".c", ".h"))]


def test_sources_are_complete_and_install_without_a_compiler(made: Path, tmp_path: Path, mpirun: Mpirun) -> None:
    (sources,) = made.glob("*.tar.gz")
    with tarfile.open(sources) as archive:
        packed = {Path(*Path(name).parts[1:]).as_posix() for name in archive.getnames()}
    own = {path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "mpitrain/native/src").glob("*.[ch]")}
    assert own <= packed
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path), str(sources)]
    subprocess.run(install, env={**os.environ, "CC": "/bin/false"}, check=True, timeout=300)
    assert (tmp_path / "mpitrain/native/library.py").exists()
    assert not (tmp_path / "mpitrain/native/exchange.so").exists()
    (tmp_path / "program.py").write_text(PROGRAM)
    finished = mpirun(2, ["program.py"], env={"PYTHONPATH": str(tmp_path), "MPITRAIN_ENGINE": "auto"}, cwd=tmp_path)
    file, total, engine, reason = finished.stdout.strip().split("|")
    assert Path(file).is_relative_to(tmp_path), finished.output
    assert (total, engine) == ("3.0", "host")
    assert reason.startswith("it was not built")
