"""What launchers' variables say, and when MPI contradicts them."""

from __future__ import annotations

import pytest

from mpitrain.errors import LauncherError
from mpitrain.runtime.launcher import Launcher, check, check_library, detect
from mpitrain.runtime.topology import topology

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "9",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
# A batch script, and what it starts without srun: told how many tasks there could be, but one process.
SLURM_BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
MPICH_LIBRARY = "MPICH Version:      5.0.2\nMPICH Release date: today\n\x00"
OPEN_MPI_LIBRARY = "Open MPI v5.0.11, package: Open MPI somebody Distribution, ident: 5.0.11\x00"


@pytest.mark.parametrize(
    ("environ", "name", "numbers"),
    [
        (OPEN_MPI, "Open MPI", (3, 4, 1, 2)),
        (HYDRA, "Hydra", (3, 4, 1, 2)),
        (SLURM, "Slurm", (3, 4, 1, 2)),
        ({**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4"}, "Slurm", (3, 4, 1, 2)),
        ({**SLURM, "PMIX_RANK": "3"}, "Slurm", (3, 4, 1, 2)),
        ({**SLURM_BATCH, **OPEN_MPI}, "Open MPI", (3, 4, 1, 2)),
        ({**SLURM, **HYDRA, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, "Hydra", (3, 4, 1, 2)),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, "PMI ", (3, 4, None, None)),
        ({"PMIX_RANK": "3"}, "PMIx", (3, None, None, None)),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "x"}, "Open MPI", (None, 4, None, None)),
    ],
)
def test_detect(environ: dict[str, str], name: str, numbers: tuple[int | None, ...]) -> None:
    found = detect(environ)
    assert found is not None
    assert name in found.name
    assert (found.rank, found.size, found.local_rank, found.local_size) == numbers


@pytest.mark.parametrize("environ", [{}, SLURM_BATCH, {"PMI_SIZE": "many"}, {"OMPI_COMM_WORLD_SIZE": ""}])
def test_started_without_a_launcher(environ: dict[str, str]) -> None:
    assert detect(environ) is None


@pytest.mark.parametrize(
    ("tasks", "node", "expected"),
    [
        ("2(x2),1", "0", 2),
        ("2(x2),1", "2", 1),
        ("3,1(x2)", "1", 1),
        ("2(x2)", "2", None),
        ("2(y", "0", None),
        ("", "0", None),
    ],
)
def test_slurm_tasks_per_node(tasks: str, node: str, expected: int | None) -> None:
    found = detect({**SLURM, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node})
    assert found is not None
    assert found.local_size == expected


@pytest.mark.parametrize(
    ("environ", "rank", "size"),
    [
        ({}, 0, 1),
        ({}, 2, 4),
        (SLURM_BATCH, 0, 1),
        (OPEN_MPI, 3, 4),
        (HYDRA, 3, 4),
        (SLURM, 3, 4),
        ({"PMIX_RANK": "1"}, 1, 2),
    ],
)
def test_agreement(environ: dict[str, str], rank: int, size: int) -> None:
    check(detect(environ), topology(rank, [0] * size, ["alpha"] * size), MPICH_LIBRARY)


@pytest.mark.parametrize(
    ("environ", "library", "words"),
    [
        (OPEN_MPI, MPICH_LIBRARY, ("Open MPI's mpirun started 4", "MPICH Version: 5.0.2, sees 1 (on alpha)")),
        (HYDRA, OPEN_MPI_LIBRARY, ("MPICH's mpirun (Hydra) started 4", "Open MPI v5.0.11, sees 1")),
        (SLURM, OPEN_MPI_LIBRARY, ("Slurm's srun started 4", "Open MPI v5.0.11", "srun --mpi=list")),
        ({"PMIX_RANK": "1"}, MPICH_LIBRARY, ("PMIx launcher started this process as rank 1", "rank 0 of 1")),
    ],
)
def test_two_mpis_are_both_named(environ: dict[str, str], library: str, words: tuple[str, ...]) -> None:
    with pytest.raises(LauncherError) as raised:
        check(detect(environ), topology(0, [0], ["alpha"]), library)
    assert [word for word in (*words, "Two MPIs are mixed") if word not in str(raised.value)] == []
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("rank", "size", "message"),
    [(3, 5, "started 4 processes.* sees 5"), (2, 4, "as rank 3, .* sees rank 2 of 4")],
)
def test_other_disagreements(rank: int, size: int, message: str) -> None:
    with pytest.raises(LauncherError, match=message):
        check(Launcher("L", 3, 4, 0, 1), topology(rank, [0] * size, ["a"] * size), OPEN_MPI_LIBRARY)


def test_local_places_are_left_to_mpi() -> None:
    check(Launcher("L", 3, 4, 7, 8), topology(3, [0, 0, 1, 2], ["a"] * 4), OPEN_MPI_LIBRARY)


def test_mpich_under_open_mpi_is_seen_before_it_aborts() -> None:
    message = r"Open MPI's mpirun started 4 processes, but the MPI in use is MPICH Version: 5\.0\.2\. Two MPIs"
    with pytest.raises(LauncherError, match=message):
        check_library(detect(OPEN_MPI), MPICH_LIBRARY)


@pytest.mark.parametrize(
    ("environ", "library"),
    [
        (OPEN_MPI, OPEN_MPI_LIBRARY),
        (HYDRA, MPICH_LIBRARY),
        # runs, each process for itself: `check` tells, unless there is one only
        (HYDRA, OPEN_MPI_LIBRARY),
        (SLURM, MPICH_LIBRARY),
        ({}, MPICH_LIBRARY),
    ],
)
def test_libraries_that_can_be_started(environ: dict[str, str], library: str) -> None:
    check_library(detect(environ), library)
