"""Which of several processes ended by itself, asked after all have ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

from mpitrain.faults.processes import exit_status_of
from mpitrain.launch.first_end import End, FirstEnd
from mpitrain.runtime.marks import Mark

# A launcher, of which each line says which of its children is sent which signal; it waits for its end.
LAUNCHER = """
import os, subprocess, sys
children = [subprocess.Popen(["sleep", "60"]) for _ in range(4)]
print(*[child.pid for child in children], flush=True)
for line in sys.stdin:
    child, signum = map(int, line.split())
    children[child].send_signal(signum)
    children[child].wait()
    print(flush=True)
"""
HERE = os.uname().nodename
KILL, TERM = int(signal.SIGKILL), int(signal.SIGTERM)


def keeps_exit_codes() -> bool:
    """Whether the kernel does, of processes that are gone."""
    process = subprocess.Popen(["true"])
    descriptor = os.pidfd_open(process.pid)
    process.wait()
    try:
        return exit_status_of(descriptor) is not None
    finally:
        os.close(descriptor)


class Job:
    """Four ranks and what looks at them."""

    def __init__(self) -> None:
        self.launcher = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.launcher.stdout is not None
        self.pids = self.launcher.stdout.readline().split()
        self.marks = [Mark("begun", rank, HERE, pid) for rank, pid in enumerate(self.pids)]
        self.ends = FirstEnd()

    def end(self, order: Sequence[tuple[int, int]]) -> None:
        """One rank after the other."""
        assert self.launcher.stdin is not None
        assert self.launcher.stdout is not None
        for rank, signum in order:
            self.launcher.stdin.write(f"{rank} {signum}\n")
            self.launcher.stdin.flush()
            self.launcher.stdout.readline()

    def close(self) -> None:
        """At the end."""
        self.ends.close()
        self.end([(rank, KILL) for rank in range(4)])
        self.launcher.communicate()


@pytest.mark.parametrize(
    ("order", "without", "expected"),
    [
        # One that ended by itself, and those that the launcher killed, of which one was gone before it.
        ([(2, KILL), (1, TERM), (0, KILL), (3, KILL)], (), End(1, "was killed by SIGTERM")),
        # All were killed: it may have been any, and the one that was gone first is told.
        ([(2, KILL), (1, KILL), (0, KILL), (3, KILL)], (), End(2, "")),
        ([(2, KILL), (1, KILL), (0, KILL), (3, KILL)], (2, 1), End(0, "")),
        # Two ended by themselves.
        ([(2, TERM), (1, TERM), (0, KILL), (3, KILL)], (), None),
        ([(2, TERM), (1, TERM), (0, KILL), (3, KILL)], (2,), End(1, "was killed by SIGTERM")),
        # All had come to their ends.
        ([(2, TERM), (1, TERM), (0, KILL), (3, KILL)], (0, 1, 2, 3), None),
    ],
)
def test_the_rank_that_ended_by_itself(
    order: list[tuple[int, int]], without: tuple[int, ...], expected: End | None
) -> None:
    job = Job()
    job.ends.watch(job.marks[:1])
    job.ends.watch([*job.marks, Mark("met", 0, HERE, "1"), Mark("begun", 7, "elsewhere", "1"), Mark("begun", 8, HERE)])
    assert job.ends.of(4, ()) is None
    job.end(order)
    if not keeps_exit_codes():
        expected = next((End(rank, "") for rank, _ in order if rank not in without), None)
    assert job.ends.of(4, without) == expected
    assert job.ends.of(5, without) is None  # one is on another host, or has not begun
    job.close()


def test_ranks_that_had_ended_when_they_were_looked_at_have_no_order() -> None:
    """They are not gone yet: their parent has not taken notice."""
    ranks = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    marks = [Mark("begun", rank, HERE, str(process.pid)) for rank, process in enumerate(ranks)]
    for process in reversed(ranks):
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    ends = FirstEnd()
    ends.watch(marks)
    assert ends.of(2, ()) is None
    ends.close()
    assert [process.wait() for process in ranks] == [-KILL, -KILL]


def test_a_process_that_is_gone_is_not_looked_at() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    ends = FirstEnd()
    ends.watch([Mark("begun", 0, HERE, str(gone.pid))])
    assert ends.of(1, ()) is None
    ends.close()
