"""What the operating system tells of the processes of ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpitrain.faults import processes
from mpitrain.faults.processes import Process


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import os; os._exit(3)", ("ended with exit code 3", 3, None)),
        ("import os; os.kill(os.getpid(), 9)", ("was killed by SIGKILL", 137, "SIGKILL")),
    ],
)
def test_how_a_process_ended(code: str, expected: tuple[str, int, str | None]) -> None:
    child = subprocess.Popen([sys.executable, "-c", f"input()\n{code}"], stdin=subprocess.PIPE)
    fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    process = Process(child.pid, int(fields[19]))
    assert process.state() in ("R", "S", "D")
    assert process.exit_status() is None
    assert Process(child.pid, 1).state() is None, "an earlier process of the same number"
    assert child.stdin
    child.stdin.write(b"\n")
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    status = process.exit_status()
    assert status is not None
    assert processes.how_it_ended(status) == expected
    child.wait()
    assert process.exit_status() is None


def test_kills_for_want_of_memory_are_counted(tmp_path: Path) -> None:
    assert processes.out_of_memory_kills(tmp_path) == 0
    for name, text in {
        "proc/vmstat": "nr_free_pages 5\noom_kill 3\n",
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/memory.events": "low 0\noom 1\noom_kill 2\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert processes.out_of_memory_kills(tmp_path) == 5
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/old\n0::/\n")
    (tmp_path / "sys/fs/cgroup/memory/old").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory/old/memory.oom_control").write_text("oom_kill_disable 0\noom_kill 7\n")
    assert processes.out_of_memory_kills(tmp_path) == 10


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
