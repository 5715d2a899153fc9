"""All that starts one job: the request, the MPI, and who starts it."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpitrain.errors import LauncherError, UsageError
from mpitrain.launch.allocation import Allocation
from mpitrain.launch.commands import Command, build, build_srun
from mpitrain.launch.daemonless.request import daemonless_request
from mpitrain.launch.dialect import INTEL_MPI, Mpi
from mpitrain.launch.request import Request
from mpitrain.launch.supervisor import HYDRA, OPEN_MPI, SRUN
from mpitrain.runtime import process_tree

# Of mpitrain's commands those that are for ranks.
RANK_COMMANDS = ("train", "bench", "serve")
OURS = (sys.executable, "-m", "mpitrain")
# By which of Slurm's plugins the ranks of an MPI find each other, the best first.
PLUGINS = {"Open MPI": ("pmix",), "MPICH": ("pmi2", "pmix"), "Intel MPI": ("pmi2",)}
INTEL_BOOTSTRAP = "I_MPI_HYDRA_BOOTSTRAP"
LIST_TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class Srun:
    """Slurm's own launcher."""

    path: str  # of srun
    plugin: str  # its `--mpi`


@dataclass(frozen=True)
class LaunchJob:
    """What is to be run, and by what."""

    request: Request  # the ranks
    mpi: Mpi  # theirs
    mpirun: str  # its path
    allocation: Allocation | None = None  # of a batch system, if there is one
    srun: Srun | None = None  # if it starts the ranks in place of mpirun
    # ranks are started without daemons on their hosts, where there are several (see the folder of this name)
    daemonless: bool = False

    @property
    def launcher(self) -> str:
        """Who starts the ranks: `Open MPI`, `Hydra` or `srun`."""
        return SRUN if self.srun else OPEN_MPI if self.mpi.is_open_mpi else HYDRA

    @property
    def is_ours(self) -> bool:
        """The ranks run mpitrain, and not a program of another kind."""
        return self.request.command[: len(OURS)] == OURS

    def uses_ssh(self, environ: Mapping[str, str]) -> bool:
        """Whether mpirun reaches other hosts by ssh, given the variables here."""
        itself = bool(self.request.hosts) and self.srun is None and not self.shrinks_by_hosts
        return itself and reached_by_ssh(self.mpi, self.allocation, environ)

    @property
    def shrinks_by_hosts(self) -> bool:
        """Whether ranks can go on when a host is lost."""
        return self.daemonless and len(self.request.hosts) > 1

    def command(self, environ: Mapping[str, str], agent: str | None, ssh: str = "ssh") -> Command:
        """The command line, and its variables.

        `agent` is the program that stands for ssh, if it is used; `ssh` itself has its options, quoted for a shell.
        """
        if self.shrinks_by_hosts:
            return build(daemonless_request(self.request, ssh), self.mpi, self.mpirun)
        if self.srun is None:
            return build(self.request, self.mpi, self.mpirun, agent)
        # The hosts of the whole allocation need not be named.
        whole = self.allocation is not None and self.request.hosts == self.allocation.hosts
        request = dataclasses.replace(self.request, hosts=()) if whole else self.request
        return build_srun(request, self.mpi, self.srun.plugin, environ, self.srun.path)


def rank_command(words: Sequence[str]) -> tuple[str, ...]:
    """Local: what each rank executes: mpitrain with these arguments, or another program.

    Raises:
        UsageError: it is none of these.
    """
    if not words or words[0].startswith("-") or words[0].endswith(".py") or words[0] in RANK_COMMANDS:
        return (*OURS, *words)
    if shutil.which(words[0]) is None:
        raise UsageError(
            f"{words[0]!r} is no script (they end with .py), no program, and no command of mpitrain for ranks "
            f"({', '.join(RANK_COMMANDS)}): what is to be run?"
        )
    return tuple(words)


def choose_srun(wanted: str, allocation: Allocation | None, mpi: Mpi, environ: Mapping[str, str]) -> Srun | None:
    """Local: whether srun is to start the ranks, and with which plugin.

    Args:
        wanted: `auto`, `mpirun` or `srun`; auto takes srun in an allocation of Slurm, where it can start this MPI.
        allocation: of a batch system, if there is one.
        mpi: of the ranks.
        environ: the variables here.

    Raises:
        LauncherError: srun is wanted, and cannot.
    """
    is_slurm = allocation is not None and allocation.is_slurm
    # Intel MPI needs to be told a library of Slurm's for this, whose place nobody knows; its own mpirun needs nothing.
    if wanted == "mpirun" or (wanted == "auto" and (not is_slurm or mpi.kind == INTEL_MPI)):
        return None
    path = shutil.which("srun", path=environ.get("PATH"))
    known = _plugins(path, environ) if path else []
    plugin = next((name for name in PLUGINS[mpi.kind] if name in known), None)
    if path and plugin and is_slurm:
        return Srun(path, plugin)
    if wanted == "auto":
        return None
    reason = "there is no srun on PATH" if path is None else "there is no allocation (salloc or sbatch makes one)"
    if path and is_slurm:
        reason = f"{mpi} needs one of the plugins {', '.join(PLUGINS[mpi.kind])}, and srun --mpi=list shows "
        reason += ", ".join(known) or "none"
    raise LauncherError(f"srun cannot start the ranks: {reason}. Leave --launcher srun out, and mpirun does")


def _plugins(srun: str, environ: Mapping[str, str]) -> list[str]:
    try:
        finished = process_tree.ask([srun, "--mpi=list"], environ, LIST_TIMEOUT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return (finished.stdout + finished.stderr).replace(",", " ").split()


def reached_by_ssh(mpi: Mpi, allocation: Allocation | None, environ: Mapping[str, str]) -> bool:
    """Whether mpirun comes to other hosts by ssh, or by the ways of a batch system.

    Open MPI prefers the latter by itself, where it has been built with them. Hydra does too, but not if it is told a
    program: which the user may have done (then it is for ssh), or else this launcher does.
    """
    batch = allocation.system if allocation else ""
    told = "HYDRA_LAUNCHER_EXEC" in environ or "ssh" in (environ.get("HYDRA_LAUNCHER"), environ.get(INTEL_BOOTSTRAP))
    return mpi.is_open_mpi or told or batch in ("", "PBS", "hostfile")


def check_root(mpi: Mpi, allowed: bool, srun: Srun | None) -> bool:
    """Local: whether Open MPI must be told that root may run jobs.

    Raises:
        UsageError: it must, and nobody has allowed it.
    """
    if os.geteuid() != 0 or not mpi.is_open_mpi or srun is not None:
        return False
    if not allowed and os.environ.get("OMPI_ALLOW_RUN_AS_ROOT") != "1":
        raise UsageError(
            "Open MPI does not start ranks as root unless it is told to: in a container, where nothing can be "
            "damaged, add --allow-run-as-root; elsewhere run as another user"
        )
    return True
