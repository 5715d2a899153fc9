"""Jobs with parameter servers: the library, the command, and a server that dies."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.launch.conftest import Mpirun

SERVED = ("-m", "mpitrain", "--strategy", "ps", "--model", "mlp")
LONG = 400


@pytest.mark.mpich
def test_fit_by_a_server_is_fit_by_one_process(mpirun: Mpirun) -> None:
    finished = mpirun(3, ["-m", "tests.launch.served_program"], timeout=LONG)
    assert finished.returncode == 0, finished.output
    assert finished.stdout == "the updates are those of one process\n", finished.output


def test_command_and_resumption(mpirun: Mpirun, tmp_path: Path) -> None:
    paths = ["--output", str(tmp_path / "out"), "--checkpoint-dir", str(tmp_path / "checkpoints")]
    asynchronous = [*SERVED, "--mode", "async", "--max-staleness", "4", *paths]
    finished = mpirun(3, [*asynchronous, "--epochs", "1", "--show-plan"], timeout=LONG)
    assert finished.returncode == 0, finished.output
    assert re.search(r"^server rank 0: [\d.]+ MiB in \d+ shards: ", finished.stdout, re.MULTILINE), finished.output
    assert "servers    rank 0, async; 2 workers" in finished.stdout
    assert re.search(r"^servers    [\d,]+ updates, staleness 0: \d+%", finished.stdout, re.MULTILINE), finished.output
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert sum(summary["servers"]["staleness"].values()) == summary["servers"]["updates"]
    finished = mpirun(3, [*SERVED, *paths, "--epochs", "3"], timeout=LONG)  # synchronous from now on
    assert finished.returncode == 0, finished.output
    assert "goes on from" in finished.stderr
    assert [line.split("  ")[0] for line in finished.stdout.splitlines() if line.startswith("epoch")] == [
        "epoch 2/3",
        "epoch 3/3",
    ]


def test_no_worker_is_an_error_that_all_leave_with(mpirun: Mpirun) -> None:
    finished = mpirun(2, [*SERVED, "--ps", "2"])
    assert finished.returncode == 2, finished.output
    assert "--ps 2 leaves no worker" in finished.stderr


def test_a_server_that_dies_ends_the_job(mpirun: Mpirun, tmp_path: Path) -> None:
    job = mpirun.start(3, [*SERVED, "--epochs", "100000", "--output", str(tmp_path)])
    server = None
    end = time.monotonic() + LONG
    assert job.process.stdout is not None
    while time.monotonic() < end and not job.process.stdout.readline().startswith("epoch 1/"):
        pass
    for pid in job.processes():
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if {b"OMPI_COMM_WORLD_RANK=0", b"PMI_RANK=0"} & set(environment):
            server = pid
    assert server is not None
    os.kill(server, signal.SIGKILL)
    finished = job.finish(60)
    assert finished.returncode != 0
    assert "rank 0" in finished.stderr, finished.output
