"""A process beside the ranks of a host: what a rank has started ends with it, however that ends.

    python -I -S guardian.py PID ...

Workers of a data loader outlive a rank that is killed, hold its output open, and keep the launcher waiting for ever
(seen: mpirun of Open MPI and of MPICH). They are in its process group, of which the launcher has made it the leader.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable

AGAIN_SECONDS = 0.05
ATTEMPTS = 20
NEEDED = ("PATH", "LD_LIBRARY_PATH")


def start(pids: Iterable[int]) -> None:
    """Local: begin to watch processes of this host, those that lead a group."""
    leaders = [str(pid) for pid in pids if _group_of(pid) == pid]
    # Not by their numbers alone: one could by then be that of another process.
    if not leaders or not hasattr(os, "pidfd_open"):
        return
    # By a shell, which ends at once: a program that waits for all of its children must not find this one.
    words = ["/bin/sh", "-c", '"$@" &', "sh", sys.executable, "-I", "-S", __file__, *leaders]
    environ = {name: value for name, value in os.environ.items() if name in NEEDED}  # not those of a rank
    none = subprocess.DEVNULL
    with contextlib.suppress(OSError):
        subprocess.run(words, env=environ, stdin=none, stdout=none, stderr=none, start_new_session=True, check=False)


def main(pids: Iterable[int]) -> None:
    """Local: until all of these processes have ended, and their groups."""
    with select.epoll() as waiting:
        watched: dict[int, int] = {}
        for pid in pids:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                end_group(pid)
                continue
            watched[descriptor] = pid
            waiting.register(descriptor, select.EPOLLIN)
        while watched:
            for descriptor, _ in waiting.poll():
                waiting.unregister(descriptor)
                end_group(watched.pop(descriptor))


def end_group(pid: int) -> None:
    """Local: end the processes of a group. Once none is left, it cannot be found."""
    for _ in range(ATTEMPTS):
        try:
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return
        time.sleep(AGAIN_SECONDS)


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:
        return None


if __name__ == "__main__":
    main(map(int, sys.argv[1:]))
