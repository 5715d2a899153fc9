"""Which of several processes ended first, asked after all have ended."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mpitrain.launch.first_end import FirstEnd
from mpitrain.runtime.marks import Mark

# As a launcher does it: when one of its children has ended, it kills the others, and waits for them.
LAUNCHER = """
import os, subprocess, sys
children = [subprocess.Popen(["sleep", "60"]) for _ in range(4)]
print(*[child.pid for child in children], flush=True)
input()
children[int(sys.argv[1])].kill()
os.waitpid(-1, 0)
for child in children: child.kill()
"""
HERE = os.uname().nodename


@pytest.mark.parametrize("first", range(4))
def test_the_first_of_those_that_are_killed(first: int) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(first)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    pids = launcher.stdout.readline().split()
    ends = FirstEnd()
    marks = [Mark("begun", rank, HERE, pid) for rank, pid in enumerate(pids)]
    ends.watch(marks[:1])
    ends.watch([*marks, Mark("met", 0, HERE, "1"), Mark("begun", 7, "elsewhere", pids[0]), Mark("begun", 8, HERE)])
    assert ends.rank(without=()) is None
    launcher.communicate("\n")
    assert ends.rank(without=()) == first
    assert ends.rank(without={first}) not in (first, None)
    assert ends.rank(without=range(4)) is None
    ends.close()


def test_a_process_that_is_gone_is_not_looked_at() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    ends = FirstEnd()
    ends.watch([Mark("begun", 0, HERE, str(gone.pid))])
    assert ends.rank(without=()) is None
    ends.close()
