"""The job that is asked about, and what launcher and hosts say to its size. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mpitrain.doctor.facts import Facts
from mpitrain.doctor.finding import Finding
from mpitrain.launch.allocation import Allocation
from mpitrain.launch.commands import shares
from mpitrain.launch.dialect import Mpi
from mpitrain.runtime.counted import counted
from mpitrain.runtime.hostfile import Host

ROOT_VARIABLES = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")


@dataclass(frozen=True)
class PlannedJob:
    """What is to be started."""

    hosts: Sequence[Host]  # with their slots
    ranks: int  # how many
    environ: Mapping[str, str] = field(default_factory=dict)  # variables of the launcher
    allocation: Allocation | None = None  # of a batch system, if that gave the hosts

    @property
    def may_crowd(self) -> bool:
        """Whether Open MPI (5, or 4) is told to start more ranks than there are slots."""
        policy = self.environ.get("PRTE_MCA_rmaps_default_mapping_policy", "")
        old = self.environ.get("OMPI_MCA_rmaps_base_oversubscribe", "")
        return "oversubscribe" in policy.lower() or old.lower() in ("1", "true", "yes")

    @property
    def slots(self) -> int:
        """Of all hosts."""
        return sum(host.slots for host in self.hosts)

    @property
    def ranks_on(self) -> dict[str, int]:
        """How many ranks each host gets."""
        filled = {host.name: count for host, count in shares(self.ranks, self.hosts)}
        return {host.name: filled.get(host.name, 0) for host in self.hosts}


def check(job: PlannedJob, mpi: Mpi | None, facts: Mapping[str, Facts], srun: bool = False) -> Iterator[Finding]:
    """Root, slots, cores and GPUs."""
    open_mpi = mpi is not None and mpi.is_open_mpi
    yield from _root(job, open_mpi and not srun, facts)
    yield from _slots(job, open_mpi)
    for name, host in facts.items():
        ranks = job.ranks_on.get(name, 0)
        if ranks:
            yield _cores(name, ranks, host.cores)
            if host.graphics.usable:
                yield _gpus(name, ranks, host.graphics.usable)


def _root(job: PlannedJob, open_mpi: bool, facts: Mapping[str, Facts]) -> Iterator[Finding]:
    names = tuple(name for name, host in facts.items() if host.root)
    lacking = [name for name in ROOT_VARIABLES if not job.environ.get(name)]
    if not names:
        yield Finding("user", tuple(facts), "green", "ranks do not run as root")
    elif open_mpi and lacking:
        sentence = "you are root, and Open MPI's mpirun refuses to start anything as root"
        words = f"mpitrain run --allow-run-as-root; by hand: export {' '.join(f'{name}=1' for name in lacking)}"
        yield Finding("user", names, "red", sentence, words)
    else:
        how = "Open MPI is told to allow it" if open_mpi else "this launcher does not mind"
        yield Finding("user", names, "green", f"ranks run as root: {how}")


def _slots(job: PlannedJob, open_mpi: bool) -> Iterator[Finding]:
    names = tuple(host.name for host in job.hosts)
    limits = [host for host in job.hosts if host.max_slots is not None and job.ranks_on[host.name] > host.max_slots]
    if limits:
        host = limits[0]
        sentence = f"{job.ranks_on[host.name]} ranks for {host.name}, which has max_slots={host.max_slots}"
        yield Finding("slots", (host.name,), "red", sentence, f"-np {job.slots}, or a higher max_slots")
        return
    if job.ranks <= job.slots:
        yield Finding("slots", names, "green", f"{counted(job.ranks, 'rank')}, {counted(job.slots, 'slot')}")
        return
    sentence = f"{counted(job.ranks, 'rank')}, but only {counted(job.slots, 'slot')}"
    remedy = (
        f"-np {job.slots}, or more slots in the list of hosts; to share cores on purpose: mpitrain run --oversubscribe"
    )
    if open_mpi and job.may_crowd:
        yield Finding("slots", names, "yellow", f"{sentence}: ranks share cores, as Open MPI is told", remedy)
        return
    remedy += ", by hand: mpirun --map-by :OVERSUBSCRIBE" if open_mpi else ""
    yield Finding("slots", names, "red", f"{sentence}: the job would not be started", remedy)


def _cores(name: str, ranks: int, cores: int) -> Finding:
    if ranks <= cores:
        return Finding("cores", (name,), "green", f"{counted(ranks, 'rank')}, {counted(cores, 'core')}")
    sentence = f"{ranks} ranks share {counted(cores, 'core')}: each waits for the others to get one"
    return Finding("cores", (name,), "yellow", sentence, f"at most {counted(cores, 'rank')} on {name}")


def _gpus(name: str, ranks: int, gpus: int) -> Finding:
    if ranks <= gpus:
        return Finding("ranks and GPUs", (name,), "green", f"{counted(ranks, 'rank')}, {gpus} usable")
    sentence = f"{ranks} ranks, but only {counted(gpus, 'usable GPU')}"
    return Finding("ranks and GPUs", (name,), "red", sentence, f"one rank per GPU ({name}:{gpus}), or --share-gpus")
