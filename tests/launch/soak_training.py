"""Kills ranks of the real training job, in phases of its own choice, under `mpitrain run --restarts`.

Each run starts 2 to 4 ranks that train a small model with checkpoints, and kills one of them by SIGKILL five times:
during the start, a step, a checkpoint, an evaluation, and the end. Each time the other ranks must be gone in time, the
cause must be told at most once and of the right rank, and the job must go on from its last checkpoint by itself. In
the end it must succeed, its weights must be those of an undisturbed run bit for bit, and nothing may be left.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.launch.conftest import REPOSITORY, Finished, Job, Mpirun
from tests.launch.leftovers import Kill, pids_of_ranks, rank_of, segments_of, soak_directory, wait_until_empty
from tests.launch.model_files import weights

START, END = "start", "end"
BETWEEN = ("compute", "checkpoint", "evaluation")
PATIENCE_SECONDS = 900.0
LOOK_SECONDS = 0.002
LONGEST_DELAY_SECONDS = 0.04
SAMPLES = 60
RUN = ("run", "--oversubscribe", "--allow-run-as-root", "--start-timeout", "300", "--restarts", "5")
OPTIONS = (
    *("--model", "mlp", "--epochs", "10", "--batch-size", "4", "--seed", "5", "--validation-split", "0.2"),
    *("--intra-threads", "1", "--inter-threads", "2", "--checkpoint-every", "2steps"),
)


@dataclass(frozen=True)
class Strike:
    """One kill.

    Attributes:
        stage: the phase in which the victim is killed; of rank 0 for `checkpoint`, which writes it.
        victim: the rank.
        delay: after the phase has begun, as a fraction: of the time up to the first step for `start`, else of
            `LONGEST_DELAY_SECONDS`.
    """

    stage: str
    victim: int
    delay: float

    @property
    def watched(self) -> int:
        """The rank that says when it is time."""
        return 0 if self.stage == "checkpoint" else self.victim


def strikes_of(seed: int) -> tuple[int, list[Strike]]:
    """The number of ranks, and the kills that belong to a seed."""
    choose = random.Random(seed)
    ranks = choose.randint(2, 4)
    stages = [START, *choose.sample(BETWEEN, len(BETWEEN)), END]
    return ranks, [Strike(stage, choose.randrange(ranks), choose.random()) for stage in stages]


@dataclass
class TrainingSoak:
    """All runs of one soak.

    Args:
        mpirun: of the MPI in use.
        limit_seconds: in which the other ranks must be gone.
    """

    mpirun: Mpirun
    limit_seconds: float
    _undisturbed: dict[int, tuple[dict[str, bytes], float]] = field(default_factory=dict)

    def run(self, seed: int) -> list[Kill]:
        """One job with its kills.

        Raises:
            AssertionError: it did not end as promised.
        """
        ranks, strikes = strikes_of(seed)
        expected, start_seconds = self._expected(ranks)
        with soak_directory() as directory:
            job = self._start(ranks, directory)
            victims = _Victims(job, ranks, directory, start_seconds)
            seconds = [victims.strike(strike) for strike in strikes]
            finished = job.finish(PATIENCE_SECONDS)
            kills = _check(strikes, seconds, finished, self.limit_seconds)
            assert weights(directory / "output" / "model.keras") == expected, f"other weights\n{finished.output}"
            wait_until_empty(job, directory / "tmp", victims.segments, finished)
        return kills

    def _expected(self, ranks: int) -> tuple[dict[str, bytes], float]:
        """Weights of an undisturbed job, and the time up to its first step."""
        if ranks not in self._undisturbed:
            with soak_directory() as directory:
                job = self._start(ranks, directory)
                began = _when(lambda: bool(pids_of_ranks(job, 0)), job)
                stepped = _when(lambda: any(phase == "compute" for phase, _ in _places(directory, 0, set())), job)
                finished = job.finish(PATIENCE_SECONDS)
                assert finished.returncode == 0, finished.output
                self._undisturbed[ranks] = weights(directory / "output" / "model.keras"), stepped - began
        return self._undisturbed[ranks]

    def _start(self, ranks: int, directory: Path) -> Job:
        samples = np.random.default_rng(1).random((SAMPLES, 8), np.float32)
        np.savez(directory / "data.npz", x=samples, y=(samples.sum(1) > 4).astype(np.int64))
        program = str(Path(__file__).with_name("soak_program.py"))
        places = ["--data", "data.npz", "--output", "output", "--checkpoint-dir", "checkpoints"]
        places[1::2] = [str(directory / name) for name in places[1::2]]
        words = [*RUN, "-np", str(ranks), sys.executable, program, str(directory), *OPTIONS, *places]
        environment = {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(directory / "tmp")}
        return self.mpirun.execute([sys.executable, "-m", "mpitrain", *words], environment)


@dataclass
class _Victims:
    """Kills the ranks of one job, attempt after attempt.

    Attributes:
        segments: shared memory that they had.
    """

    job: Job
    ranks: int
    directory: Path
    start_seconds: float
    segments: set[Path] = field(default_factory=set)
    _earlier: set[Path] = field(default_factory=set)  # files of attempts before
    _step: int = 0  # of the last kill

    def strike(self, strike: Strike) -> float | None:
        """Kill a rank at its moment: seconds until the others were gone; None if it was gone before."""
        if strike.stage == START:
            _when(lambda: bool(pids_of_ranks(self.job, strike.victim)), self.job)
            time.sleep(strike.delay * self.start_seconds)
        else:
            _when(lambda: self._is_there(strike), self.job)
            time.sleep(strike.delay * LONGEST_DELAY_SECONDS)
        attempt = [pid for rank in range(self.ranks) for pid in pids_of_ranks(self.job, rank)]
        self.segments |= segments_of(attempt)
        for pid in pids_of_ranks(self.job, strike.victim):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                moment = time.monotonic()
                while any(rank_of(other) is not None for other in attempt) and time.monotonic() < moment + 60:
                    time.sleep(0.02)
                self._note(strike.watched)
                return time.monotonic() - moment
        return None

    def _is_there(self, strike: Strike) -> bool:
        """Whether the phase has come, at a later step than that of the kill before: that would be the same failure."""
        places = _places(self.directory, strike.watched, self._earlier)
        least = 0 if strike.stage == END else self._step + 2
        return any(phase == strike.stage and step >= least for phase, step in places)

    def _note(self, rank: int) -> None:
        steps = [step for _, step in _places(self.directory, rank, self._earlier)]
        self._step = max([self._step, *steps])
        self._earlier = set(self.directory.glob("phases-*"))


def _places(directory: Path, rank: int, without: set[Path]) -> list[tuple[str, int]]:
    """Phases that a rank has gone through, with the steps that were finished."""
    texts = [path.read_text() for path in set(directory.glob(f"phases-{rank}-*")) - without]
    lines = [line.split() for text in texts for line in text.splitlines()]
    return [(words[0], int(words[1])) for words in lines if len(words) == 2]


def _check(strikes: list[Strike], seconds: list[float | None], finished: Finished, limit_seconds: float) -> list[Kill]:
    """What came of the kills.

    Raises:
        AssertionError: the job did not go on as promised.
    """
    about = f"{strikes}\n{seconds}\n{finished.output}"
    assert finished.returncode == 0, about
    assert "Traceback" not in finished.stderr, about
    attempts = re.split(r"; restart \d of 5 in ", finished.stderr)
    kills = []
    for number, (strike, needed) in enumerate(zip(strikes, seconds, strict=True)):
        if needed is None:
            assert strike.stage == END, about
            continue
        assert needed < limit_seconds, f"{needed:.1f} s\n{about}"
        told = re.findall(r"^mpitrain: ranks? .*", attempts[number], re.MULTILINE)
        assert len(told) <= 1, about
        assert all(line.startswith(f"mpitrain: rank {strike.victim} on ") for line in told), about
        kills.append(Kill(strike.stage, bool(told), needed, restarted=number + 1 < len(attempts)))
    # At the very end the job may have been done; then the kill came too late to matter.
    assert len(attempts) >= len(strikes), about
    return kills


def _when(happened: Callable[[], bool], job: Job) -> float:
    """The moment at which it has; or at which the job is over."""
    while not happened() and job.process.poll() is None:
        time.sleep(LOOK_SECONDS)
    return time.monotonic()
