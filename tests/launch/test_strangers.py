"""Bytes and connections from those who do not know the job's token, sent to ranks that run."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import time
from pathlib import Path

import pytest

from tests.launch.conftest import REPOSITORY, Job, Mpirun

PROGRAM = Path(__file__).with_name("strangers_program.py")
LISTENS = re.compile(r"rank (\d) listens on ([\d.]+):(\d+)")
DESCRIPTORS = 256  # of each process of the job
IDLE = 400
WITHIN_SECONDS = 120
pytestmark = pytest.mark.mpich


def places(job: Job, count: int) -> list[tuple[str, int]]:
    """Where the ranks listen, as they say themselves."""
    assert job.process.stdout is not None
    found: list[tuple[str, int]] = []
    while len(found) < count:
        line = job.process.stdout.readline()
        assert line, job.finish(WITHIN_SECONDS).output
        found += [(match[2], int(match[3])) for match in LISTENS.finditer(line)]
    return found


def attack(place: tuple[str, int]) -> None:
    """Whatever comes to a stranger's mind."""
    for content in (b"[" * 200_000, b"{}\n" * 100_000, os.urandom(5000), b'{"is":"abort","code":1,"silent":[]}'):
        with socket.create_connection(place, 10) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(content + b"\n")
            while connection.recv(100):
                pass


def test_a_job_goes_on_whatever_strangers_do(mpirun: Mpirun, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, hard))
    try:
        job = mpirun.start(2, [str(PROGRAM), str(tmp_path / "end")], env={"PYTHONPATH": str(REPOSITORY)})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with contextlib.ExitStack() as stack:
        for place in places(job, 2):
            assert place[0] == "127.0.0.1"
            attack(place)
            for _ in range(IDLE):
                with contextlib.suppress(TimeoutError):  # the kernel has no place for more
                    stack.enter_context(socket.create_connection(place, 2))
        time.sleep(2)
        (tmp_path / "end").touch()
        finished = job.finish(WITHIN_SECONDS)
    assert finished.returncode == 0, finished.output
    assert sorted(re.findall(r"rank \d done after True", finished.stdout)) == [
        f"rank {rank} done after True" for rank in range(2)
    ]
    assert finished.complaints == [], finished.output
