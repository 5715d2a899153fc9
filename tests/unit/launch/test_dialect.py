"""Which MPI is in use, from what it says of itself."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from mpitrain.errors import LauncherError
from mpitrain.launch import dialect
from mpitrain.launch.dialect import INTEL_MPI, MPICH, OPEN_MPI, Mpi, recognise
from mpitrain.runtime import launcher

OPEN_MPI_5 = "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n"
OPEN_MPI_4 = "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n"
HYDRA = (
    "HYDRA build details:\n    Version:                                 5.0.2\n    Release Date: today\n    CC: cc\n"
)
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 20231005 (id: 74c4a23)\nCopyright\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OPEN_MPI_5, Mpi(OPEN_MPI, (5, 0, 11))),
        (OPEN_MPI_4, Mpi(OPEN_MPI, (4, 1, 4))),
        ("mpirun.openmpi (OpenRTE) 4.1.4\n", Mpi(OPEN_MPI, (4, 1, 4))),
        ("prterun (PRRTE) 3.0.11\n", Mpi(OPEN_MPI)),
        (HYDRA, Mpi(MPICH, (5, 0, 2))),
        ("HYDRA build details:\n    Version:     4.2.3\n", Mpi(MPICH, (4, 2, 3))),
        (INTEL, Mpi(INTEL_MPI, (2021, 11))),
        ("Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11\0", Mpi(OPEN_MPI, (5, 0, 11))),
        ("MPICH Version:      5.0.2\nMPICH Release date: today\nMPICH Device: ch4:ucx\n", Mpi(MPICH, (5, 0, 2))),
        ("Intel(R) MPI Library 2021.11 for Linux* OS\n", Mpi(INTEL_MPI, (2021, 11))),
        ("MVAPICH2 Version      :\t2.3.7\n", Mpi(MPICH)),
        ("slurm 22.05.8", None),
        ("", None),
    ],
)
def test_recognise(text: str, expected: Mpi | None) -> None:
    assert recognise(text) == expected


def test_families() -> None:
    assert Mpi(OPEN_MPI, (5, 0, 11)).has_prrte
    assert Mpi(OPEN_MPI).has_prrte
    assert not Mpi(OPEN_MPI, (4, 1)).has_prrte
    assert not Mpi(MPICH, (5, 0, 2)).has_prrte
    assert [str(mpi) for mpi in (Mpi(OPEN_MPI, (5, 0, 11)), Mpi(MPICH))] == ["Open MPI 5.0.11", "MPICH"]


@pytest.mark.parametrize(
    ("launcher", "library", "words"),
    [
        (Mpi(OPEN_MPI, (4, 1)), Mpi(OPEN_MPI, (5, 0)), ()),
        (Mpi(MPICH), Mpi(INTEL_MPI), ()),
        (Mpi(OPEN_MPI, (5,)), Mpi(MPICH, (5, 0, 2)), ("mpirun is of Open MPI 5", "loads MPICH 5.0.2", "[openmpi]")),
        (Mpi(MPICH, (4,)), Mpi(OPEN_MPI, (5,)), ("mpirun is of MPICH 4", "loads Open MPI 5", "--mpirun", "[mpich]")),
    ],
)
def test_mismatch(launcher: Mpi, library: Mpi, words: tuple[str, ...]) -> None:
    told = dialect.mismatch(launcher, library)
    assert (told is None) == (words == ())
    assert [word for word in words if word not in str(told)] == []


def program(path: Path, lines: str) -> str:
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)
    return str(path)


def test_of_the_mpirun_given(tmp_path: Path) -> None:
    mpirun = program(tmp_path / "mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    assert dialect.find_mpirun({}, mpirun) == mpirun
    assert dialect.launcher_mpi(mpirun, {}) == Mpi(OPEN_MPI, (4, 1, 4))


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [("echo Cray", "says 'Cray'.*not of Open MPI"), ("echo no library >&2; exit 127", "exit code 127: no library")],
)
def test_mpiruns_that_are_none(tmp_path: Path, lines: str, complaint: str) -> None:
    with pytest.raises(LauncherError, match=complaint):
        dialect.launcher_mpi(program(tmp_path / "mpirun", lines), {})


def test_an_mpirun_that_starts_others_by_name(tmp_path: Path) -> None:
    program(tmp_path / "mpiexec.hydra", f"echo '{INTEL.splitlines()[0]}'")
    mpirun = program(tmp_path / "mpirun", 'mpiexec.hydra "$@"')
    assert dialect.launcher_mpi(mpirun, {"PATH": "/usr/bin:/bin"}) == Mpi(INTEL_MPI, (2021, 11))
    assert dialect.path_beside(mpirun, {"PATH": "/bin"})["PATH"] == f"{tmp_path}:/bin"
    assert dialect.path_beside(mpirun, {"PATH": f"/bin:{tmp_path}"})["PATH"] == f"/bin:{tmp_path}"


def test_no_mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LauncherError, match="/nowhere/mpirun is no program: name one with --mpirun"):
        dialect.find_mpirun(os.environ, "/nowhere/mpirun")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(LauncherError, match="no mpirun beside this Python, nor on PATH"):
        dialect.find_mpirun({"PATH": str(tmp_path)})
    on_path = program(tmp_path / "mpirun", "true")
    assert dialect.find_mpirun({"PATH": str(tmp_path)}) == on_path


def test_of_mpi4py(tmp_path: Path) -> None:
    # The extras of this environment bring both, mpirun and library.
    assert dialect.library_mpi(os.environ) == dialect.launcher_mpi(dialect.find_mpirun(os.environ), os.environ)
    with pytest.raises(LauncherError, match="exit code 3: none"):
        dialect.library_mpi({}, program(tmp_path / "python", "echo none >&2; exit 3"))


def test_without_rank() -> None:
    environ = {"OMPI_COMM_WORLD_RANK": "1", "PMI_RANK": "1", "PMIX_RANK": "1", "MPI_LOCALRANKID": "0", "HOME": "/root"}
    assert launcher.without_rank(environ) == {"HOME": "/root"}
