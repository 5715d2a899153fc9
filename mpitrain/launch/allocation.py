"""The hosts that a batch system has given to the job this process belongs to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mpitrain.errors import LauncherError
from mpitrain.runtime.hostfile import Host, parse
from mpitrain.runtime.launcher import slurm_counts

# Of the MPI operator of Kubernetes, which writes the list of its pods: for Open MPI 4 and 5, MPICH, Intel MPI.
HOSTFILE_VARIABLES = (
    "PRTE_MCA_prte_default_hostfile",
    "OMPI_MCA_orte_default_hostfile",
    "HYDRA_HOST_FILE",
    "I_MPI_HYDRA_HOST_FILE",
)


@dataclass(frozen=True)
class Allocation:
    """What was given."""

    system: str  # by which batch system
    hosts: tuple[Host, ...]  # where, and for how many ranks
    ranks: int | None = None  # how many ranks the batch job asked for, if it said so

    @property
    def is_slurm(self) -> bool:
        """Whether srun starts programs in it."""
        return self.system == "Slurm"


def find(environ: Mapping[str, str]) -> Allocation | None:
    """Local: the allocation that this process runs in, or None.

    Raises:
        LauncherError: there is one, but its hosts cannot be told.
    """
    return next((found for look in (_slurm, _pbs, _lsf, _grid_engine, _operator) if (found := look(environ))), None)


def _slurm(environ: Mapping[str, str]) -> Allocation | None:
    nodes = environ.get("SLURM_JOB_NODELIST", "")
    if not environ.get("SLURM_JOB_ID") or not nodes:
        return None
    hosts = parse(nodes, "SLURM_JOB_NODELIST")
    # Tasks where the job has asked for tasks, else processors.
    text = environ.get("SLURM_TASKS_PER_NODE") or environ.get("SLURM_JOB_CPUS_PER_NODE") or ""
    counts = slurm_counts(text)
    if counts is None or len(counts) != len(hosts):
        raise LauncherError(
            f"Slurm gave {len(hosts)} nodes ({nodes}), but {text!r} tasks on them: give the hosts with -H, "
            "or ask for tasks with sbatch --ntasks"
        )
    sized = tuple(dataclasses.replace(host, slots=count) for host, count in zip(hosts, counts, strict=True))
    tasks = environ.get("SLURM_NTASKS", "")
    return Allocation("Slurm", sized, int(tasks) if tasks.isdecimal() else None)


def _pbs(environ: Mapping[str, str]) -> Allocation | None:
    """PBS, Torque: a file with a line for each slot."""
    return _from_file("PBS", environ.get("PBS_NODEFILE", "") if environ.get("PBS_JOBID") else "", lambda text: text)


def _lsf(environ: Mapping[str, str]) -> Allocation | None:
    """LSF: `host slots host slots ...`; the host of the batch script may be the first, with one slot."""
    words = environ.get("LSB_MCPU_HOSTS", "").split() if environ.get("LSB_JOBID") else []
    if not words:
        return None
    lines = [f"{name}:{slots}" for name, slots in zip(words[::2], words[1::2], strict=False)]
    return Allocation("LSF", parse("\n".join(lines), "LSB_MCPU_HOSTS"))


def _grid_engine(environ: Mapping[str, str]) -> Allocation | None:
    """Grid Engine: a file with lines `host slots queue processors`."""
    return _from_file(
        "Grid Engine",
        environ.get("PE_HOSTFILE", ""),
        lambda text: "\n".join(":".join(line.split()[:2]) for line in text.splitlines()),
    )


def _operator(environ: Mapping[str, str]) -> Allocation | None:
    name = next((environ[variable] for variable in HOSTFILE_VARIABLES if environ.get(variable)), "")
    return _from_file("hostfile", name, lambda text: text)


def _from_file(system: str, name: str, convert: Callable[[str], str]) -> Allocation | None:
    if not name:
        return None
    try:
        text = Path(name).read_text()
    except (OSError, ValueError) as error:
        raise LauncherError(
            f"the list of hosts {name} ({system}) cannot be read ({error}): give -H or --hostfile"
        ) from error
    return Allocation(system, parse(convert(text), name))
