"""Where the output of a job's rank 0 ends up: launchers stand between, and hide it in both directions.

Open MPI gives each rank a pseudo-terminal even when its own output goes to a file; MPICH gives pipes even
when its own output is a terminal. So the launcher's own standard output is looked at (Linux only).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

LAUNCHERS = ("mpirun", "mpiexec", "prterun", "prun", "orterun", "mpiexec.hydra", "srun")
DEEPEST = 8  # a rank may be a child of a wrapper, of a daemon, of a shell


@dataclass(frozen=True)
class Terminal:
    """The terminal that output appears on."""

    columns: int  # its width


def launchers_terminal(pid: int | None = None, proc: Path = Path("/proc")) -> Terminal | None:
    """Local: the terminal that the launcher of this process writes to.

    Returns:
        None where there is no such terminal, or the launcher is on another host.
    """
    current = os.getpid() if pid is None else pid
    for _ in range(DEEPEST):
        name, parent = _name_and_parent(proc / str(current))
        if name in LAUNCHERS:
            return _terminal(proc / str(current) / "fd" / "1")
        if parent <= 1:
            return None
        current = parent
    return None


def _name_and_parent(process: Path) -> tuple[str, int]:
    try:
        # "pid (name) state parent ...": the name may hold blanks and brackets.
        head, _, tail = (process / "stat").read_text().rpartition(")")
    except OSError:
        return "", 0
    return head.partition("(")[2], int(tail.split()[1])


def _terminal(output: Path) -> Terminal | None:
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return Terminal(os.get_terminal_size(descriptor).columns or 80)
    except OSError:
        return None
    finally:
        os.close(descriptor)
