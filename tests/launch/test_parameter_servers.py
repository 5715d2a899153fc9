"""Jobs with parameter servers: the library, the command, and servers and workers that die."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.launch.conftest import Job, Mpirun

SERVED = ("-m", "mpitrain", "--strategy", "ps", "--model", "mlp")
SURVIVING = ("--mode", "async", "--on-failure", "shrink")
FAULT_TOLERANT = ("--with-ft", "ulfm")
LONG = 400


@pytest.mark.mpich
def test_fit_by_a_server_is_fit_by_one_process(mpirun: Mpirun) -> None:
    finished = mpirun(3, ["-m", "tests.launch.served_program"], timeout=LONG)
    assert finished.returncode == 0, finished.output
    assert finished.stdout == "the updates are those of one process\n", finished.output


@pytest.mark.parametrize("length", ["unknown", "steps"])
def test_a_script_whose_rank_0_serves_is_that_of_one_process(mpirun: Mpirun, length: str) -> None:
    """Where data do not tell their length, one process counts steps without data, which servers do not."""
    script = [str(Path(__file__).with_name("unknown_length_program.py")), length]
    served = ["-m", "mpitrain", "--strategy", "ps", "--ps", "colocated", "--batch-size-is", "global"]
    finished = mpirun(2, [*served, *script], timeout=LONG)
    assert finished.returncode == 0, finished.output
    iterations, loss = finished.stdout.split()
    assert int(iterations) == 8, finished.output
    assert ("mpitrain: these data do not tell how many batches they have: " in finished.stderr) == (length == "unknown")
    if length == "steps":
        alone = mpirun(1, script)
        assert alone.returncode == 0, alone.output
        assert [float(number) for number in alone.stdout.split()] == pytest.approx([8, float(loss)], rel=1e-10)


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


def kill(job: Job, rank: int, after: str) -> None:
    """Kill a rank once the job has shown a line that begins so."""
    end = time.monotonic() + LONG
    assert job.process.stdout is not None
    while time.monotonic() < end and not job.process.stdout.readline().startswith(after):
        pass
    found = None
    for pid in job.processes():
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if {b"OMPI_COMM_WORLD_RANK=%d" % rank, b"PMI_RANK=%d" % rank} & set(environment):
            found = pid
    assert found is not None
    os.kill(found, signal.SIGKILL)


def is_over(job: Job) -> bool:
    """Whether no process is left, a moment after the launcher's end."""
    end = time.monotonic() + 10
    while job.processes() and time.monotonic() < end:
        time.sleep(0.1)
    return job.processes() == []


@pytest.mark.parametrize("policy", ["abort", "shrink"])
def test_a_server_that_dies_ends_the_job(mpirun: Mpirun, tmp_path: Path, policy: str) -> None:
    if policy == "shrink" and not mpirun.is_open_mpi:
        pytest.skip("MPICH cannot")
    options, ranks = (SURVIVING, FAULT_TOLERANT) if policy == "shrink" else ([], ())
    words = [*SERVED, *options, "--epochs", "100000", "--output", str(tmp_path)]
    job = mpirun.start(3, words, options=ranks)
    kill(job, 0, "epoch 1/")
    finished = job.finish(60)
    assert finished.returncode != 0
    assert "rank 0" in finished.stderr, finished.output
    assert "go on without it" not in finished.stderr, finished.output
    assert is_over(job), finished.output


def test_a_worker_that_dies_is_dropped(mpirun: Mpirun, tmp_path: Path) -> None:
    if not mpirun.is_open_mpi:
        pytest.skip("MPICH cannot")
    paths = ["--output", str(tmp_path / "out"), "--checkpoint-dir", str(tmp_path / "checkpoints")]
    words = [*SERVED, *SURVIVING, "--epochs", "8", "--learning-rate", "0.005", *paths]
    job = mpirun.start(4, words, options=FAULT_TOLERANT)
    kill(job, 1, "epoch 2/")  # the first worker, which shows progress, saves, and gave the servers the parameters
    finished = job.finish(LONG)
    assert finished.returncode == 0, finished.output
    told = r"^mpitrain: rank 1 on \S+ was killed by SIGKILL.*; the others go on without it$"
    assert len(re.findall(told, finished.stderr, re.MULTILINE)) == 1, finished.output
    assert re.search(r"^lost +rank 1 \(\S+\) in epoch \d after update \d+; 2 ranks", finished.stdout, re.MULTILINE)
    (accuracy,) = re.findall(r"^result +accuracy ([\d.]+)", finished.stdout, re.MULTILINE)
    assert float(accuracy) > 0.9, finished.output
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [loss["ranks"] for loss in summary["losses"]] == [[1]]
    assert (summary["ranks"], len(summary["history"]["loss"])) == (2, 8)
    assert sum(summary["servers"]["staleness"].values()) == summary["servers"]["updates"]
    manifest = json.loads((max((tmp_path / "checkpoints").glob("checkpoint-*")) / "manifest.json").read_text())["info"]
    assert (manifest["position"]["epoch"], manifest["ranks"]) == (8, 2), "the next worker writes what the first did"
    assert is_over(job), finished.output
