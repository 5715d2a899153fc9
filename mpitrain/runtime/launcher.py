"""What the launcher (mpirun, srun) says about this process, held against what MPI says.

MPI is trusted for everything. The launcher's variables serve to notice that the two do not belong
together: started by the mpirun of one MPI and loaded with the library of another, every process
believes that it is alone, and N of them train the same model side by side without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpitrain.errors import LauncherError
from mpitrain.runtime.counted import counted
from mpitrain.runtime.topology import Topology

# Set for the ranks of a job; one started with them would take itself for a part of that job.
RANK_PREFIXES = ("OMPI_COMM_WORLD_", "PMIX_", "PMI_", "MPI_LOCAL", "PRTE_LAUNCHED", "MPITRAIN_NODE")
MOST_DIGITS = 6  # of a number of nodes, or of tasks on one; more would fill the memory


@dataclass(frozen=True)
class Launcher:
    """What a launcher's variables say; None for what it does not tell."""

    name: str  # who started this process
    rank: int | None  # position in the job
    size: int | None  # number of processes in the job
    local_rank: int | None  # position on this host, until MPI is there, which counts itself
    local_size: int | None  # number of processes on this host


@dataclass(frozen=True)
class _Dialect:
    """The variables of a launcher, and the one by which it is recognised."""

    name: str
    mark: str
    rank: str
    size: str
    local_rank: str
    local_size: str


# The first whose mark is set. mpirun inside a Slurm allocation hands the SLURM_* variables on, so it
# comes first. Slurm's own PMI sets PMI_RANK too, but never MPI_LOCALRANKID. A batch script has
# SLURM_PROCID=0 and SLURM_NTASKS=N although it was not started as one of N: only SLURM_STEP_* tells.
_DIALECTS = (
    _Dialect(
        "Open MPI's mpirun",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Dialect("MPICH's mpirun (Hydra)", "MPI_LOCALRANKID", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Dialect("Slurm's srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
    _Dialect("a PMI launcher", "PMI_SIZE", "PMI_RANK", "PMI_SIZE", "", ""),
    _Dialect("a PMIx launcher", "PMIX_RANK", "PMIX_RANK", "", "", ""),
)


def detect(environ: Mapping[str, str]) -> Launcher | None:
    """Which launcher started this process, or None when it was started without one."""
    for dialect in _DIALECTS:
        if _number(environ, dialect.mark) is not None:
            return Launcher(
                dialect.name,
                _number(environ, dialect.rank),
                _number(environ, dialect.size),
                _number(environ, dialect.local_rank),
                _number(environ, dialect.local_size) if dialect.local_size else _tasks_on_node(environ),
            )
    return None


def own_rank(environ: Mapping[str, str]) -> int:
    """Local: the rank of this process according to its launcher, or -1."""
    found = detect(environ)
    return -1 if found is None or found.rank is None else found.rank


def without_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables, without those that a launcher has set for its ranks."""
    return {name: value for name, value in environ.items() if not name.startswith(RANK_PREFIXES)}


def check_library(launcher: Launcher | None, mpi_library: str) -> None:
    """Hold the launcher against the library, before MPI is initialised.

    Started by Open MPI's mpirun, MPICH ends the process within MPI_Init with a word about PMI versions (seen: MPICH
    5.0), so that `check` would never be reached. `MPI_Get_library_version` may be called before.

    Raises:
        LauncherError: the library cannot be started by this launcher.
    """
    library = _short(mpi_library)
    if launcher is not None and launcher.name.startswith("Open MPI") and library.startswith("MPICH"):
        raise LauncherError(
            f"{launcher.name} started {counted(launcher.size or 1, 'process')}, but the MPI in use is {library}. "
            f"{_remedy(launcher, library)}."
        )


def check(launcher: Launcher | None, topology: Topology, mpi_library: str) -> None:
    """Hold what the launcher says against what MPI says.

    Local ranks are not compared: containers and MPI settings may split a host, and MPI knows.

    Raises:
        LauncherError: they disagree about the number of ranks or about this one's.
    """
    if launcher is None:
        return
    library = _short(mpi_library)
    size_differs = launcher.size is not None and launcher.size != topology.size
    rank_differs = launcher.rank is not None and launcher.rank != topology.rank
    if not size_differs and not rank_differs:
        return
    if size_differs:
        said, seen = counted(launcher.size or 1, "process"), f"{topology.size}"
    else:
        said, seen = f"this process as rank {launcher.rank}", f"rank {topology.rank} of {topology.size}"
    raise LauncherError(
        f"{launcher.name} started {said}, but the MPI in use, {library}, sees {seen} (on {topology.host}). "
        f"{_remedy(launcher, library)}."
    )


def _short(mpi_library: str) -> str:
    return " ".join(mpi_library.strip(" \n\x00").split("\n")[0].split(", package")[0].split())


def _remedy(launcher: Launcher, library: str) -> str:
    remedy = (
        f"Two MPIs are mixed: start with the mpirun that belongs to {library}, or use an mpi4py that "
        "loads the MPI of the launcher"
    )
    if launcher.name.startswith("Slurm"):
        remedy += "; with srun, choose the PMI that the library speaks (srun --mpi=list shows them)"
    return remedy


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    return int(text) if text.isdecimal() else None


def _tasks_on_node(environ: Mapping[str, str]) -> int | None:
    """Of SLURM_STEP_TASKS_PER_NODE the entry of this node."""
    node = _number(environ, "SLURM_NODEID")
    counts = slurm_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", "")) or ()
    return counts[node] if node is not None and node < len(counts) else None


def slurm_counts(text: str) -> tuple[int, ...] | None:
    """Slurm's numbers for each node, such as `2(x3),1` for 2, 2, 2, 1; None if it is no such list."""
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.strip().removesuffix(")").partition("(x")
        if not count.isdecimal() or not (times or "1").isdecimal():
            return None
        if len(times) > MOST_DIGITS or len(count) > MOST_DIGITS:
            return None
        counts += [int(count)] * int(times or "1")
    return tuple(counts)
