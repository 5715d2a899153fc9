"""How a job is started that goes on without lost ranks."""

from __future__ import annotations

import dataclasses

import pytest

from mpitrain.errors import UsageError
from mpitrain.launch.dialect import INTEL_MPI, MPICH, OPEN_MPI, Mpi
from mpitrain.launch.job import LaunchJob, Srun
from mpitrain.launch.request import Request
from mpitrain.launch.shrinkable_job import RANKS, allow_shrink, promise
from mpitrain.runtime.hostfile import parse

REQUEST = Request(("program",), 4, parse("a:2,b:2", "test"), environment={"A": "b"}, extra=("--mca", "x", "1"))


def job(kind: str, version: tuple[int, ...], srun: Srun | None = None) -> LaunchJob:
    return LaunchJob(REQUEST, Mpi(kind, version), "/bin/mpirun", srun=srun)


def test_the_command_of_a_job_that_survives() -> None:
    command = allow_shrink(job(OPEN_MPI, (5, 0, 11)), 2, RANKS).command({}, "ssh")
    words = " ".join(command.argv)
    assert "--with-ft ulfm --mca ompi_async_mpi_finalize 1 --mca x 1 program" in words
    assert "-x MPITRAIN_MIN_NP -x MPITRAIN_ON_FAILURE" in words
    given = command.environ({})
    assert (given["A"], given["MPITRAIN_ON_FAILURE"], given["MPITRAIN_MIN_NP"]) == ("b", "shrink", "2")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (job(OPEN_MPI, (4, 1)), "needs Open MPI 5, and Open MPI 4.1 ends a job.*--on-failure restart"),
        (job(MPICH, (5, 0)), "needs Open MPI 5, and MPICH 5.0 ends a job.*--on-failure restart"),
        (job(INTEL_MPI, (2021, 18)), "needs Open MPI 5, and Intel MPI 2021.18"),
        (job(OPEN_MPI, (5,), Srun("/bin/srun", "pmix")), "--launcher mpirun; --on-failure restart"),
    ],
)
def test_what_cannot_survive_is_refused(asked: LaunchJob, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        allow_shrink(asked, 1)


def test_what_is_survived_is_told() -> None:
    several = job(OPEN_MPI, (5,))
    assert "down to 2 ranks" in promise(several, 2)
    here = dataclasses.replace(several, request=dataclasses.replace(REQUEST, hosts=()))
    assert "down to 1 rank:" in promise(here, 1)
    assert "host" not in promise(here, 1)
