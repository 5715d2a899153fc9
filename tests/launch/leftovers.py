"""The ranks of a job as processes, and what a job may not leave behind."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.launch.conftest import Finished, Job

LIMIT_SECONDS = 5.0  # in which a job is over after the loss of a rank
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK=", "PMI_RANK=")
SHARED_MEMORY = Path("/dev/shm")
# TensorFlow removes these by itself at the end of a process, unless that is killed.
# MPICH takes the name of its shared memory away once all ranks have attached to it; a kill before that leaves the file.
MPICHS = "mpich_shm_"
TENSORFLOWS = "__autograph_generated_file"


@dataclass(frozen=True)
class Kill:
    """What came of one kill.

    Attributes:
        stage: in which the rank was.
        told: the message named it.
        seconds: until the others were gone.
        restarted: the job was started again.
    """

    stage: str
    told: bool
    seconds: float
    restarted: bool = False


def pids_of_ranks(job: Job, rank: int) -> list[int]:
    """The process of a rank; none before it has begun and after it has ended."""
    return [pid for pid in job.processes() if rank_of(pid) == rank]


def rank_of(pid: int) -> int | None:
    """The rank that a process is; None for launchers, and for processes that have ended."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0"):
            if entry.startswith(RANK_VARIABLES):
                return int(entry.partition("=")[2])
    return None


def wait_until_empty(job: Job, temporary: Path, segments: set[Path], finished: Finished) -> None:
    """Nothing is left of a job, a moment after its end.

    Args:
        job: that has ended.
        temporary: directory for its temporary files.
        segments: shared memory that its ranks had.
        finished: what it printed.

    Raises:
        AssertionError: processes, files or shared memory are left.
    """
    deadline = time.monotonic() + 10
    while True:
        left = [str(pid) for pid in job.processes()]
        left += [str(path) for path in temporary.rglob("*") if not (path.is_dir() or path.name.startswith(TENSORFLOWS))]
        left += [str(path) for path in segments if path.exists() and not path.name.startswith(MPICHS)]
        if not left:
            return
        assert time.monotonic() < deadline, f"left: {left}\n{finished.output}"
        time.sleep(0.1)


def segments_of(pids: Iterable[int]) -> set[Path]:
    """The shared memory that has a name and that processes use."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                words = line.split(None, 5)
                if len(words) == 6 and words[5].startswith(f"{SHARED_MEMORY}/") and not words[5].endswith("(deleted)"):
                    found.add(Path(words[5]))
    return found


@contextlib.contextmanager
def soak_directory() -> Iterator[Path]:
    """For one job of a soak, with `tmp` for its temporary files."""
    directory = Path(tempfile.mkdtemp(prefix="soak-"))
    (directory / "tmp").mkdir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
