"""Processes below one another: found, and ended with the one that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from mpitrain.runtime.process_tree import descendants

WITHIN_SECONDS = 60
# It has a child that ignores SIGTERM, and one whose own parent has ended.
ENDS = """
import os, subprocess, sys, time
from mpitrain.runtime import process_tree
process_tree.adopt_orphans()
script = "trap '' TERM; echo ready; while :; do sleep 0.05; done"
stubborn = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE)
assert stubborn.stdout.readline() == b"ready\\n"
print(stubborn.pid, flush=True)
subprocess.run(["sh", "-c", "sleep 600 & echo $!"])
began = time.monotonic()
print(process_tree.end_descendants(0.2), time.monotonic() - began >= 0.2, process_tree.descendants(os.getpid()))
print(process_tree.end_descendants(0.2), flush=True)
"""
DIES = """
import os, subprocess, sys, time
from mpitrain.runtime import process_tree
me = os.getpid()
child = subprocess.Popen(["sleep", "600"], preexec_fn=lambda: process_tree.die_with_parent(9, me))
print(child.pid, flush=True)
time.sleep(600)
"""


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_all_below_are_ended_the_stubborn_ones_and_orphans_too() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60, check=True)
    stubborn, orphan, first, second = ended.stdout.splitlines()
    assert (first, second) == ("True True []", "False")
    assert is_gone(int(stubborn))
    assert is_gone(int(orphan))


def test_a_child_dies_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", DIES], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert descendants(parent.pid) == [child]
        assert child in descendants(os.getpid())
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    deadline = time.monotonic() + WITHIN_SECONDS
    while not is_gone(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)
