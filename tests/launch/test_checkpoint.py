"""Runs that are killed, stopped by signals and resumed: nothing is lost, and the end is that of an undisturbed run."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import time
import zipfile
from pathlib import Path
from typing import Any

import h5py
import pytest

from tests.launch.conftest import Finished, Job, Mpirun

pytestmark = pytest.mark.mpich
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
STEPS_PER_EPOCH = 21


def weights(path: Path) -> dict[str, bytes]:
    """All numbers in a file of Keras: weights, optimizer, random states."""
    found: dict[str, bytes] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            found[name] = item[()].tobytes()

    with zipfile.ZipFile(path) as archive, h5py.File(io.BytesIO(archive.read("model.weights.h5"))) as file:
        file.visititems(visit)
    return found


def position(checkpoint: Path) -> dict[str, int]:
    found: dict[str, int] = json.loads((checkpoint / "manifest.json").read_text())["info"]["position"]
    return found


def newest_in(checkpoints: Path) -> Path:
    return max(checkpoints.glob("checkpoint-*"))


class Runs:
    """The same job again and again, each time until something happens to it."""

    def __init__(self, mpirun: Mpirun, directory: Path) -> None:
        self.mpirun, self.directory = mpirun, directory

    def arguments(self, output: str, *more: str) -> list[str]:
        own = ["--model", "mlp", "--epochs", "12", "--seed", "5", "--output", str(self.directory / output)]
        return ["-m", "mpitrain", *own, *more]

    def checkpointed(self, output: str, *more: str) -> list[str]:
        directory = ["--checkpoint-dir", str(self.directory / "checkpoints")]
        return self.arguments(output, *directory, "--checkpoint-every", "4steps", *more)

    def whole(self, *arguments: str, np: int = 2) -> Finished:
        return self.mpirun(np, list(arguments), timeout=200)

    def until(self, epoch: int, *arguments: str) -> Job:
        """A job that has finished an epoch."""
        job = self.mpirun.start(2, list(arguments))
        assert job.process.stdout is not None
        lines = []
        for line in job.process.stdout:
            lines.append(line)
            if line.startswith(f"epoch {epoch}/"):
                return job
        raise AssertionError(f"the job has ended:\n{''.join(lines)}\n{job.finish(10).output}")


def rank_pid(job: Job, rank: int) -> int:
    """The process of a rank."""
    for pid in job.processes():
        environ = dict(
            item.split("=", 1) for item in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in item
        )
        command = Path(f"/proc/{pid}/cmdline").read_text()
        is_rank = "mpitrain" in command and "mpirun" not in command and "mpiexec" not in command
        if is_rank and str(rank) in (environ.get(name) for name in RANK_VARIABLES):
            return pid
    raise AssertionError(f"no rank {rank}")


def test_killed_stopped_and_resumed_the_end_is_the_same(mpirun: Mpirun, tmp_path: Path) -> None:
    runs = Runs(mpirun, tmp_path)
    checkpoints = tmp_path / "checkpoints"
    undisturbed = runs.whole(*runs.arguments("undisturbed"))
    assert undisturbed.returncode == 0, undisturbed.output

    job = runs.until(2, *runs.checkpointed("killed"))
    os.kill(rank_pid(job, 0), signal.SIGKILL)
    killed = job.finish(60)
    assert killed.returncode not in (0, 124), killed.output
    newest = newest_in(checkpoints)
    (newest / "arrays.bin").write_bytes((newest / "arrays.bin").read_bytes()[:-3])

    job = runs.until(5, *runs.checkpointed("stopped"))
    began = time.monotonic()
    os.kill(rank_pid(job, 1), signal.SIGTERM)
    stopped = job.finish(60)
    assert time.monotonic() - began < 30, stopped.output
    assert stopped.returncode == 85, stopped.output
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
