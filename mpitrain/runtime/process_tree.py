"""Local: processes that end with the one that started them, and nothing that outlives it (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def ask(
    command: Sequence[str], environ: Mapping[str, str] | None = None, seconds: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Local: run a program that is given nothing to read, and take what it prints.

    Raises:
        OSError: it cannot be run.
        subprocess.TimeoutExpired: it took longer than that.
    """
    none = subprocess.DEVNULL
    return subprocess.run(
        command, env=environ, stdin=none, capture_output=True, text=True, errors="replace", timeout=seconds, check=False
    )


def die_with_parent(signum: int, parent: int | None = None) -> None:
    """Local: have the kernel send this process a signal when its parent ends, however that ends.

    The parent may have ended before this call.
    """
    _prctl(PR_SET_PDEATHSIG, signum)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signum)


def adopt_orphans() -> None:
    """Local: become the parent of descendants whose own parent ends, so that none escapes `end_descendants`."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """Local: the processes below one, children before their children; without those that have ended."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # "pid (name) state parent ...": the name may hold blanks and brackets.
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                parents.setdefault(int(parent), []).append(int(path.parent.name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found[1:]


def end_descendants(grace_seconds: float, kill_seconds: float = 5.0) -> bool:
    """Local: end all processes below this one: SIGTERM, and after the grace SIGKILL.

    Args:
        grace_seconds: between the two.
        kill_seconds: how long to look for what SIGKILL did not end (a process may hang in the kernel).

    Returns:
        Whether there were any.
    """
    before = descendants(os.getpid())
    if not before:
        return False
    signal_all(before, signal.SIGTERM)
    if not _all_gone(grace_seconds):
        deadline = time.monotonic() + kill_seconds
        while (left := descendants(os.getpid())) and time.monotonic() < deadline:
            signal_all(left, signal.SIGKILL)
            _reap()
            time.sleep(0.02)
    _reap()
    return True


def signal_all(pids: Iterable[int], signum: int) -> None:
    """Local: send a signal to each process that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


def _all_gone(seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while descendants(os.getpid()):
        if time.monotonic() >= deadline:
            return False
        _reap()
        time.sleep(0.02)
    return True


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
