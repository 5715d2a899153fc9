"""Kills ranks of a training under `mpitrain run --on-failure shrink`, while the others go on.

Each run starts 3 to 6 ranks that train the model of `shrinking_training`, whose weights tell which samples made them,
and all of which but one at most die by SIGKILL: after an update, in a validation, while a checkpoint is written, or
after the last update. The job must succeed, tell of each death once, and leave nothing behind; the weights must be
those of each sample seen once in every epoch, and the same to the bit on all ranks that are left.
"""

from __future__ import annotations

import random
import re
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from tests.launch.conftest import REPOSITORY, Finished, Job, Mpirun
from tests.launch.leftovers import Kill, pids_of_ranks, segments_of, soak_directory, wait_until_empty

UPDATE, TEST, CHECKPOINT, END = STAGES = ("update", "test", "checkpoint", "end")
DOWN_TO_ONE = 0.6  # of all runs: one rank alone is left
TOGETHER = 0.2  # of all deaths: at the same time as another one
LAST_UPDATE, TESTS, CHECKPOINTS = 65, 5, 4  # that there are at least, with 6 ranks
LONGEST_DELAY_MILLISECONDS = 40.0
PATIENCE_SECONDS = 600.0
LOOK_SECONDS = 0.3
RUN = ("run", "--oversubscribe", "--allow-run-as-root", "--on-failure", "shrink", "--start-timeout", "300")
# The second where the ranks that looked at it died at the same moment.
HOW = "was killed by SIGKILL|ended without a word"
DIED = re.compile(rf"^mpitrain: rank (\d) on \S+ (?:{HOW}).*; the others go on without it$", re.MULTILINE)
LOST = re.compile(r"^mpitrain: lost: ranks? (.+) in epoch .* had made the next step ([\d.]+) s later$", re.MULTILINE)
DONE = re.compile(r"^rank (\d) is (\d) of (\d), after \d+ updates, with weights (\w{8})$", re.MULTILINE)


@dataclass(frozen=True)
class Death:
    """Of one rank.

    Attributes:
        rank: that dies.
        stage: one of `STAGES`.
        number: of the update, the validation or the checkpoint.
        milliseconds: after its beginning.
    """

    rank: int
    stage: str
    number: int
    milliseconds: float

    def __str__(self) -> str:
        return f"{self.rank}:{self.stage}:{self.number}:{self.milliseconds:.1f}"


def deaths_of(seed: int) -> tuple[int, list[Death]]:
    """The number of ranks, and the deaths that belong to a seed."""
    choose = random.Random(seed)
    ranks = choose.randint(3, 6)
    deaths = list[Death]()
    count = ranks - 1 if choose.random() < DOWN_TO_ONE else choose.randint(1, ranks - 1)
    for rank in sorted(choose.sample(range(ranks), count)):
        # Checkpoints are written by the first rank of those that are there.
        stages = STAGES if rank == 0 else (UPDATE, UPDATE, TEST, END)
        last = {UPDATE: LAST_UPDATE, TEST: TESTS, CHECKPOINT: CHECKPOINTS, END: 1}
        stage = choose.choice(stages)
        number, delay = choose.randint(1, last[stage]), choose.uniform(0, LONGEST_DELAY_MILLISECONDS)
        if deaths and choose.random() < TOGETHER and deaths[-1].stage != CHECKPOINT:
            stage, number = deaths[-1].stage, deaths[-1].number
        deaths.append(Death(rank, stage, number, delay))
    return ranks, deaths


@dataclass
class ShrinkingSoak:
    """All runs of one soak.

    Args:
        mpirun: of the MPI in use: Open MPI.
        limit_seconds: in which the others must have made the next step.
    """

    mpirun: Mpirun
    limit_seconds: float

    def run(self, seed: int) -> list[Kill]:
        """One job with its deaths.

        Raises:
            AssertionError: it did not go on as promised.
        """
        ranks, deaths = deaths_of(seed)
        with soak_directory() as directory:
            program = str(Path(__file__).with_name("shrinking_training.py"))
            words = [*RUN, "-np", str(ranks), sys.executable, program, str(directory), "all-reduce", *map(str, deaths)]
            environment = {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(directory / "tmp"), "TF_CPP_MIN_LOG_LEVEL": "3"}
            job = self.mpirun.execute([sys.executable, "-m", "mpitrain", *words], environment)
            finished, segments = _finish(job, ranks)
            wait_until_empty(job, directory / "tmp", segments, finished)
        return _check(ranks, deaths, finished, self.limit_seconds)


def _finish(job: Job, ranks: int) -> tuple[Finished, set[Path]]:
    """How it went, and the shared memory that its ranks had."""
    segments, ended = set[Path](), threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_SECONDS):
            segments.update(segments_of(pid for rank in range(ranks) for pid in pids_of_ranks(job, rank)))

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        return job.finish(PATIENCE_SECONDS), segments
    finally:
        ended.set()
        looking.join()


def _check(ranks: int, deaths: list[Death], finished: Finished, limit_seconds: float) -> list[Kill]:
    """What came of the deaths; of those after the last update there is no next step, and perhaps nobody to tell.

    Raises:
        AssertionError: the job did not go on as promised.
    """
    about = f"{ranks} ranks, deaths {', '.join(map(str, deaths))}\n{finished.output}"
    assert finished.returncode == 0, about
    assert "Traceback" not in finished.stderr, about
    died, planned = [int(rank) for rank in DIED.findall(finished.stderr)], {death.rank: death for death in deaths}
    assert len(died) == len(set(died)), about
    assert set(died) <= set(planned), about
    done = {int(rank): weights for rank, _, _, weights in DONE.findall(finished.stdout)}
    assert len(set(done.values())) == 1, about
    assert set(done) >= set(range(ranks)) - set(planned), about
    seconds = {
        int(rank): float(later)
        for names, later in LOST.findall(finished.stderr)
        for rank in re.findall(r"(\d+) \(", names)
    }
    kills = []
    for rank, death in planned.items():
        assert rank in died or death.stage == END or rank in done, about
        assert seconds.get(rank, 0.0) < limit_seconds, about
        if rank in died or rank not in done:
            kills.append(Kill(death.stage, rank in died, seconds.get(rank, 0.0)))
    return kills
