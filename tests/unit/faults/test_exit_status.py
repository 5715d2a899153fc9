"""What is known of the end of a process: its status, its signals, what it has started."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpitrain.faults import guardian, processes
from mpitrain.faults.activity import Activity
from mpitrain.faults.hub import SIGNAL_SECONDS, Hub
from mpitrain.faults.members import Member
from mpitrain.faults.neighbours import Neighbours
from mpitrain.faults.options import FaultOptions
from mpitrain.faults.processes import Process
from mpitrain.faults.report import Culprit, Fault, as_json
from mpitrain.faults.roster import Roster, Seat
from mpitrain.faults.wire import Link
from mpitrain.runtime.signals import SignalSocket

STATUS = """
from sys import exit as leave_early
import atexit, sys
from mpitrain.faults.exit_status import ExitStatus
status = ExitStatus()
status.watch()
atexit.register(lambda: print(status.code, status.text, flush=True))
try: sys.exit(9)
except SystemExit as caught: assert caught.code == 9
class Stopped(SystemExit): pass
"""


@pytest.mark.parametrize(
    ("end", "code", "text"),
    [
        ("pass", 0, "came to its end"),
        ("sys.exit()", 0, "called sys.exit()"),
        ("sys.exit(3)", 3, "called sys.exit(3)"),
        ("leave_early(4)", 4, "called sys.exit(4)"),
        ("sys.exit('text')", 1, "called sys.exit('text')"),
        ("exit(3)", 3, "raised SystemExit(3)"),
        ("quit()", 0, "raised SystemExit()"),
        ("raise SystemExit", 0, "raised SystemExit()"),
        ("raise SystemExit(300)", 44, "raised SystemExit(300)"),
        ("raise Stopped(85)", 85, "raised SystemExit(85)"),
        ("import threading; threading.Thread(target=sys.exit, args=(3,)).start()", 0, "came to its end"),
    ],
)
def test_the_status_is_known_before_the_end(end: str, code: int, text: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{STATUS}{end}\n")
    ways: list[list[str]] = [[str(script)], ["-c", f"{STATUS}{end}"]]
    for way in ways if end == "raise SystemExit(300)" else ways[:1]:
        ended = subprocess.run([sys.executable, *way], capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stdout) == (code, f"{code} {text}\n"), ended.stderr


def test_only_this_process_wakes_itself() -> None:
    woken = SignalSocket()
    with woken.reading, woken.writing:
        child = os.fork()
        if child == 0:
            woken.send(bytes([signal.SIGTERM]))
            os._exit(0)
        os.waitpid(child, 0)
        woken.send(bytes([signal.SIGINT]))
        assert woken.receive() == b""
        assert woken.receive() == bytes([signal.SIGINT])


FORKS = """
import multiprocessing, os, time
from mpitrain.runtime.signals import StopSignals
os.register_at_fork(after_in_child=lambda: time.sleep(0.1))  # the child gets the signal before its first line
signals = StopSignals(60, lambda number: print("request", flush=True), print)
signals.install()
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
child.start()
child.terminate()
child.join(10)
print(child.exitcode)
"""


def test_a_child_forked_during_a_training_that_can_be_stopped_gets_its_own_signals() -> None:
    ended = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "-15\n"), ended.stderr


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


def hub_of(told: list[str], ended: list[int], nodes: int) -> Hub:
    process = Process(os.getpid(), 0)
    seats = tuple(Seat(rank, f"host{min(rank, nodes - 1)}", min(rank, nodes - 1), process, ()) for rank in range(3))
    roster = Roster(0, seats, "token")
    options = FaultOptions(stall_warning=0, stall_abort=0)
    return Hub(roster, options, Neighbours(roster), told.append, lambda code, _: ended.append(code), 10.0, Activity())


@pytest.mark.parametrize("closed", [True, False])
def test_a_signal_is_no_cause_where_a_rank_had_ended_before(closed: bool) -> None:
    told: list[str] = []
    ended: list[int] = []
    hub = hub_of(told, ended, nodes=3)
    one, other = socket.socketpair(), socket.socketpair()
    with one[0], one[1], other[0], other[1]:
        for rank, (here, _) in ((1, one), (2, other)):
            hub.members[rank] = Member(Link(here), 0.0)
        if closed:
            hub.closed(2, hub.members[2].link, 1.0)  # of another host, so that it may come back
        signalled = Fault("signal", "got SIGTERM", 143, (Culprit(1, "host1", 7),), "SIGTERM")
        hub.hear(1, {"is": "fault", "fault": dataclasses.asdict(signalled)}, 1.01)
        hub.tick(1.02)
        assert told == []
        hub.tick(1.02 + SIGNAL_SECONDS)
    lost = (
        "mpitrain: rank 2 on host2 ended without a word (killed, or its host is gone); the job ends with exit code 1\n"
    )
    assert told == [lost if closed else "mpitrain: rank 1 on host1 got SIGTERM; the job ends with exit code 143\n"]
    assert ended == [1 if closed else 143]


@pytest.mark.parametrize(
    ("memory", "words", "told"),
    [
        (True, "was killed by SIGKILL by the kernel, which had no memory left;", "true"),
        (None, "was killed by SIGKILL, perhaps by the kernel, which had no memory left for some process;", "null"),
        (False, "was killed by SIGKILL;", "false"),
    ],
)
def test_want_of_memory_is_named_where_it_is_known(memory: bool | None, words: str, told: str) -> None:
    texts: list[str] = []
    hub = hub_of(texts, [], nodes=1)
    here, there = socket.socketpair()
    with here, there:
        hub.members[1] = Member(Link(here), 0.0)
        hub.members[2] = Member(Link(there), 0.0)
        hub.hear(2, {"is": "ended", "rank": 1, "status": 9, "memory": memory}, 1.0)
        hub.tick(1.1)
    assert [f"rank 1 on host0 {words}" in text for text in texts] == [True], texts
    assert f'"out_of_memory": {told}' in as_json(Fault("death", "", 137, (), "SIGKILL", memory))


def test_the_log_of_the_kernel_tells_whom_it_has_killed(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_bytes(
        b"3,1,5000000,-;Out of memory: Killed process 12 (python) total-vm:1kB\n"
        b"3,2,90000000,-;Memory cgroup out of memory: Killed process 13 (python) total-vm:1kB\n"
        b"6,3,91000000,-;Killed processes are none 14\n"
    )
    ticks = os.sysconf("SC_CLK_TCK")
    found = {pid: processes.killed_for_memory(Process(pid, 60 * ticks), log) for pid in (12, 13, 14)}
    # Of another process with this number, before; of a process of a container nothing is known.
    assert found in ({12: False, 13: True, 14: False}, dict.fromkeys((12, 13, 14)))
    assert processes.killed_for_memory(Process(13, 0), tmp_path / "absent") is None
