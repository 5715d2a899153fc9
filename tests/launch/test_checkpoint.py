"""Runs that are killed, stopped by signals and resumed: nothing is lost, and the end is that of an undisturbed run."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.launch.conftest import Finished, Job, Mpirun
from tests.launch.leftovers import pids_of_ranks
from tests.launch.model_files import weights

pytestmark = pytest.mark.mpich
STEPS_PER_EPOCH = 21


def position(checkpoint: Path) -> dict[str, int]:
    found: dict[str, int] = json.loads((checkpoint / "manifest.json").read_text())["info"]["position"]
    return found


def newest_in(checkpoints: Path) -> Path:
    return max(checkpoints.glob("checkpoint-*"))


class Runs:
    """The same job again and again, each time until something happens to it."""

    def __init__(self, mpirun: Mpirun, directory: Path) -> None:
        self.mpirun, self.directory = mpirun, directory
        self.shown: list[str] = []

    def arguments(self, output: str, *more: str) -> list[str]:
        own = ["--model", "mlp", "--epochs", "12", "--seed", "5", "--output", str(self.directory / output)]
        return ["-m", "mpitrain", *own, *more]

    def checkpointed(self, output: str, *more: str) -> list[str]:
        directory = ["--checkpoint-dir", str(self.directory / "checkpoints")]
        return self.arguments(output, *directory, "--checkpoint-every", "4steps", *more)

    def whole(self, *arguments: str, np: int = 2) -> Finished:
        return self.mpirun(np, list(arguments), timeout=200)

    def supervised(self, *arguments: str) -> Job:
        """A job that is started again once when it fails."""
        run = ["run", "-np", "2", "--oversubscribe", "--allow-run-as-root", "--start-timeout", "120", "--restarts", "1"]
        return self.mpirun.execute([sys.executable, "-m", "mpitrain", *run, *arguments])

    def until(self, job: Job, epoch: int) -> None:
        """Wait until the job has finished an epoch."""
        assert job.process.stdout is not None
        for line in iter(job.process.stdout.readline, ""):
            self.shown.append(line)
            if line.startswith(f"epoch {epoch}/"):
                return
        raise AssertionError(f"the job has ended:\n{''.join(self.shown)}\n{job.finish(10).output}")


def rank_pid(job: Job, rank: int) -> int:
    """The process of a rank."""
    (pid,) = pids_of_ranks(job, rank)
    return pid


def test_killed_stopped_and_resumed_the_end_is_the_same(mpirun: Mpirun, tmp_path: Path) -> None:
    runs = Runs(mpirun, tmp_path)
    checkpoints = tmp_path / "checkpoints"
    undisturbed = runs.whole(*runs.arguments("undisturbed"))
    assert undisturbed.returncode == 0, undisturbed.output

    job = runs.supervised(*runs.checkpointed("stopped")[2:])
    runs.until(job, 2)
    os.kill(rank_pid(job, 0), signal.SIGKILL)
    while pids_of_ranks(job, 0):
        time.sleep(0.01)
    newest = newest_in(checkpoints)  # the next attempt has not yet read it
    (newest / "arrays.bin").write_bytes((newest / "arrays.bin").read_bytes()[:-3])

    runs.until(job, 5)
    began = time.monotonic()
    os.kill(rank_pid(job, 1), signal.SIGTERM)
    stopped = job.finish(60)
    assert time.monotonic() - began < 30, stopped.output
    assert stopped.returncode == 85, stopped.output
    assert re.search(r"; restart 1 of 1 in 1 s, with 2 ranks, from the checkpoint of step \d+", stopped.stderr)
    assert "not started again: it was stopped by a signal" in stopped.stderr, stopped.output
    assert f"{newest.name} is damaged and left out" in stopped.stderr, stopped.output
    assert re.search(r"goes on from \S+checkpoint-\d+: epoch [1-5]", stopped.stderr), stopped.output
    assert re.search(r"SIGTERM came to rank 1 \(\S+\); all ranks have stopped at epoch", stopped.stderr), stopped.output

    at = position(newest_in(checkpoints))
    assert at["steps"] == at["epoch"] * STEPS_PER_EPOCH + at["step"]
    resumed = runs.whole(*runs.checkpointed("resumed"))
    assert resumed.returncode == 0, resumed.output
    assert weights(tmp_path / "resumed" / "model.keras") == weights(tmp_path / "undisturbed" / "model.keras")
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("undisturbed", "resumed")]
    assert summaries[0]["history"] == summaries[1]["history"]
    assert summaries[0]["results"] == summaries[1]["results"]
    last = newest_in(checkpoints)
    assert weights(last / "model.keras") == weights(tmp_path / "undisturbed" / "model.keras")
    assert not list(checkpoints.glob(".part-*"))
