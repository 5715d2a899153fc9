"""`mpitrain run` on this host: output, exit codes, signals, and nothing that is left behind."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launch.conftest import REPOSITORY, Job, Mpirun

PROGRAM = str(Path(__file__).with_name("place_program.py"))
EXCHANGING = str(Path(__file__).with_name("exchanging_program.py"))
RUN = (sys.executable, "-m", "mpitrain", "run", "-np", "2", "--oversubscribe", "--allow-run-as-root")
WITHIN_SECONDS = 120
pytestmark = pytest.mark.mpich


def started(mpirun: Mpirun, options: Sequence[str], *words: str) -> Job:
    # Python is named, and so the program runs as it is: as with mpirun, it finds mpitrain where it is told.
    return mpirun.execute([*RUN, *options, sys.executable, PROGRAM, *words], {"PYTHONPATH": str(REPOSITORY)})


def wait_for(path: Path, text: str) -> None:
    deadline = time.monotonic() + WITHIN_SECONDS
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < deadline, f"no {text!r} in {path}"
        time.sleep(0.05)


def left_after(job: Job, seconds: float) -> list[int]:
    """The processes of the job that are still there after that time, or as soon as there are none."""
    deadline = time.monotonic() + seconds
    while job.processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    return job.processes()


def test_output_of_each_rank(mpirun: Mpirun, tmp_path: Path) -> None:
    finished = started(mpirun, ["--output-filename", str(tmp_path)]).finish(WITHIN_SECONDS)
    assert finished.returncode == 0, finished.output
    assert "rank 0 of 2: node 0, local 0" in finished.stdout
    assert "rank 1" not in finished.stdout
    assert "rank 0 of 2" in (tmp_path / "rank.0" / "stdout").read_text()
    assert "rank 1 of 2: node 0, local 1" in (tmp_path / "rank.1" / "stdout").read_text()
    assert "\x1e" not in finished.stderr
    assert (tmp_path / "rank.1" / "stdout").stat().st_mode & 0o077 == 0


NAMES_HOST = """#!/bin/sh
# Stands for ssh: notes the host, and runs the command on this one.
while :; do case $1 in -[opil]) shift 2 ;; -*) shift ;; *) break ;; esac; done
echo "$1" >>{notes}
shift
exec sh -c "$*"
"""


def test_hosts_of_one_domain_are_several_and_two_names_of_one_host_are_one(mpirun: Mpirun, tmp_path: Path) -> None:
    notes, ssh = tmp_path / "notes", tmp_path / "ssh"
    ssh.write_text(NAMES_HOST.format(notes=notes))
    ssh.chmod(0o755)
    names = ["worker.1.example.net", "worker.2.example.net"]
    # Open MPI does not connect ranks of what it takes for two hosts, and is one; nor does it like them to end at once.
    program = ["sh", "-c", "sleep 1"] if mpirun.is_open_mpi else [sys.executable, PROGRAM]
    command = [*RUN, "-H", ",".join(names), *program]
    reached_by = {"PRTE_MCA_plm_ssh_agent": str(ssh), "HYDRA_LAUNCHER_EXEC": str(ssh)}
    finished = mpirun.execute(command, {"PYTHONPATH": str(REPOSITORY), **reached_by}).finish(WITHIN_SECONDS)
    assert finished.returncode == 0, finished.output
    assert sorted(set(notes.read_text().split())) == names, finished.output
    for rank in range(0 if mpirun.is_open_mpi else 2):
        assert f"rank {rank} of 2: node 0, local {rank} on " in finished.stdout, finished.output


def test_exit_code(mpirun: Mpirun) -> None:
    job = started(mpirun, [], "exit", "5")
    finished = job.finish(WITHIN_SECONDS)
    assert finished.returncode == 5, finished.output
    assert left_after(job, 10) == []


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_it_is_ended(mpirun: Mpirun, tmp_path: Path, signum: signal.Signals) -> None:
    job = started(mpirun, ["--output-filename", str(tmp_path)], "wait")
    wait_for(tmp_path / "rank.1" / "stdout", "rank 1 of 2")
    wait_for(tmp_path / "rank.0" / "stdout", "rank 0 of 2")
    sent = time.monotonic()
    job.process.send_signal(signum)
    code = job.process.wait(WITHIN_SECONDS)
    assert code != 0
    assert time.monotonic() - sent < 20  # of a grace of 30 s, which nobody needed
    assert left_after(job, 20) == []


def test_a_signal_stops_training_with_a_checkpoint(mpirun: Mpirun, tmp_path: Path) -> None:
    """Open MPI's mpirun by itself would kill the ranks at once."""
    checkpoints = tmp_path / "checkpoints"
    options = ["--epochs", "1000", "--checkpoint-dir", str(checkpoints), "--checkpoint-every", "20steps"]
    job = mpirun.execute([*RUN, "--start-timeout", "100", *options, "--output", str(tmp_path / "out")])
    deadline = time.monotonic() + WITHIN_SECONDS
    while not any(checkpoints.glob("*/*")):
        assert time.monotonic() < deadline, f"no checkpoint in {checkpoints}"
        time.sleep(0.1)
    job.process.send_signal(signal.SIGTERM)
    finished = job.finish(WITHIN_SECONDS)
    assert finished.returncode == 85, finished.output
    assert "all ranks have stopped at epoch" in finished.stderr
    assert left_after(job, 20) == []


def test_a_rank_that_does_not_come_is_named(mpirun: Mpirun) -> None:
    job = started(mpirun, ["--start-timeout", "20"], "late")
    finished = job.finish(WITHIN_SECONDS)
    assert finished.returncode != 0
    assert "the 2 ranks did not meet within 20 s (--start-timeout): begun have 1" in finished.stderr, finished.output
    assert "but not rank 1" in finished.stderr
    assert left_after(job, 20) == []


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_is_killed_is_named_or_it_is_said_that_it_is_not_known(mpirun: Mpirun, rank: int) -> None:
    command = [*RUN, "-np", "3", sys.executable, EXCHANGING, "SIGKILL", str(rank), "20"]
    finished = mpirun.execute(command, {"PYTHONPATH": str(REPOSITORY)}).finish(WITHIN_SECONDS)
    assert finished.returncode not in (0, 124), finished.output
    named = re.findall(r"^mpitrain: ranks? (\d) on \S+ was killed by SIGKILL", finished.stderr, re.MULTILINE)
    # MPICH kills the others, as the rank was: where none has told before, it may have been any of them.
    unknown = re.findall(r"^mpitrain: a rank ended without a word; the launcher, .*$", finished.stderr, re.MULTILINE)
    assert (named, len(unknown)) in (([str(rank)], 0), ([], not mpirun.is_open_mpi)), finished.output


def test_a_job_that_fails_twice_in_the_same_step_is_given_up(mpirun: Mpirun, tmp_path: Path) -> None:
    command = [
        *RUN,
        "--restarts",
        "5",
        "--output-filename",
        str(tmp_path),
        sys.executable,
        EXCHANGING,
        "raise",
        "1",
        "60",
    ]
    job = mpirun.execute(command, {"PYTHONPATH": str(REPOSITORY)})
    finished = job.finish(WITHIN_SECONDS)
    assert finished.returncode == 1, finished.output
    failed = r"mpitrain: the job failed after step 60 \(rank 1 on \S+: ValueError: cause\)"
    assert re.search(
        rf"^{failed}; restart 1 of 5 in 1 s, with 2 ranks, no checkpoint of mpitrain has been written so far$",
        finished.stderr,
        re.MULTILINE,
    )
    assert re.search(rf"^{failed}, and is not started again: step 61 has failed twice", finished.stderr, re.MULTILINE)
    assert finished.stderr.count("; restart ") == 1, finished.output
    outputs = [tmp_path / "rank.1" / "stdout", tmp_path / "restart.1" / "rank.1" / "stdout"]
    assert all("at " in output.read_text() for output in outputs)
    assert left_after(job, 10) == []


def test_more_ranks_than_slots_are_refused(mpirun: Mpirun) -> None:
    command = [sys.executable, "-m", "mpitrain", "run", "-np", "3", "-H", "localhost:2", "--allow-run-as-root"]
    finished = mpirun.execute(command).finish(WITHIN_SECONDS)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert finished.stderr.startswith("mpitrain: 3 ranks are more than there are slots, 2 (localhost 2): ask for fewer")
