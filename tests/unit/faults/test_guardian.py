"""What a process has started ends with it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

from mpitrain.faults import guardian, processes

LEADER = """
import multiprocessing, subprocess, time
own = [multiprocessing.get_context(way).Process(target=time.sleep, args=(60,)) for way in ("fork", "spawn")]
for process in own: process.start()
print(*[process.pid for process in own], subprocess.Popen(["sleep", "60"]).pid, flush=True)
time.sleep(60)
"""


def test_the_group_of_a_process_ends_with_it() -> None:
    with subprocess.Popen([sys.executable, "-c", LEADER], stdout=subprocess.PIPE, start_new_session=True) as leader:
        assert leader.stdout is not None
        pids = [int(word) for word in leader.stdout.readline().split()]
        assert len(pids) == 3
        guardian.start([leader.pid])
        time.sleep(0.3)
        leader.kill()
        assert leader.wait() == -signal.SIGKILL
        deadline = time.monotonic() + 20
        while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert [pid for pid in pids if alive(pid)] == []


def alive(pid: int) -> bool:
    fields = processes._stat(pid)
    return fields is not None and fields[2] not in "ZX"
