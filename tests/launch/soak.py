"""Kills random ranks at random moments, and looks whether each job ends or goes on as promised: `scripts/soak`.

The same seed gives the same choices. `--program training` is the real training job (see `soak_training`);
`--program shrinking` one whose ranks go on without each other (`soak_shrinking`); `--program exchanging` one without
TensorFlow that starts fast: after SIGKILL of one of 2 to 4 ranks at some moment between its start and its end, the job
is over within 5 s, its exit code is not 0, the cause was told at most once and with the right rank, and no process,
shared memory or temporary file is left.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.launch.conftest import REPOSITORY, Finished, Job, Mpirun
from tests.launch.leftovers import LIMIT_SECONDS, Kill, pids_of_ranks, segments_of, wait_until_empty
from tests.launch.soak_shrinking import ShrinkingSoak
from tests.launch.soak_training import TrainingSoak

PATIENCE_SECONDS = 300.0
PROGRAM = str(Path(__file__).with_name("exchanging_program.py"))


@dataclass(frozen=True)
class Plan:
    """What one run does.

    Attributes:
        ranks: of the job.
        victim: which of them is killed.
        moment: when, as a fraction of the time that an undisturbed job takes.
    """

    ranks: int
    victim: int
    moment: float

    @classmethod
    def of(cls, seed: int) -> Plan:
        """The choices that belong to a seed."""
        choose = random.Random(seed)
        ranks = choose.randint(2, 4)
        return cls(ranks, choose.randrange(ranks), choose.random())


@dataclass
class ExchangingSoak:
    """All runs of one soak.

    Args:
        mpirun: of the MPI in use.
        limit_seconds: in which a job must be over.
    """

    mpirun: Mpirun
    limit_seconds: float = LIMIT_SECONDS
    _whole_seconds: float | None = None

    def run(self, seed: int) -> list[Kill]:
        """One job with one kill.

        Raises:
            AssertionError: the job did not end as promised.
        """
        plan = Plan.of(seed)
        temporary = Path(tempfile.mkdtemp(prefix="soak-"))
        try:
            whole = self._undisturbed_seconds()
            job = self._start(plan.ranks, temporary)
            time.sleep(plan.moment * whole)
            segments = segments_of(job.processes())
            killed, moment = _kill(job, plan.victim), time.monotonic()
            finished = job.finish(PATIENCE_SECONDS)
            seconds = time.monotonic() - moment
            told = _check(plan, finished, killed, seconds, self.limit_seconds)
            wait_until_empty(job, temporary, segments, finished)
            return [Kill("some", told, seconds)] if killed else []
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _undisturbed_seconds(self) -> float:
        """How long a job takes that nobody disturbs; with 3 ranks, but that matters little."""
        if self._whole_seconds is None:
            with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
                finished = self._start(3, Path(temporary)).finish(PATIENCE_SECONDS)
            assert finished.returncode == 0, finished.output
            self._whole_seconds = finished.seconds
        return self._whole_seconds

    def _start(self, ranks: int, temporary: Path) -> Job:
        return self.mpirun.start(ranks, [PROGRAM], env={"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(temporary)})


def _kill(job: Job, rank: int) -> bool:
    """Kills one rank, as soon as it is there; False if the job has ended before."""
    while job.process.poll() is None:
        for pid in pids_of_ranks(job, rank):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                return True
        time.sleep(0.01)
    return False


def _check(plan: Plan, finished: Finished, killed: bool, seconds: float, limit_seconds: float) -> bool:
    """Whether the message named the rank.

    Raises:
        AssertionError: the job did not end as promised.
    """
    about = f"{plan}\n{finished.output}"
    told = re.findall(r"^mpitrain: ranks? .*", finished.stderr, re.MULTILINE)
    if not killed:
        assert (finished.returncode, told) == (0, []), about
        return False
    assert seconds < limit_seconds, f"{seconds:.1f} s\n{about}"
    assert finished.returncode not in (0, 124), about
    assert len(told) <= 1, about
    assert all(line.startswith(f"mpitrain: rank {plan.victim} on ") for line in told), about
    assert "Traceback" not in finished.stderr, about
    return bool(told)


PROGRAMS = {"training": TrainingSoak, "shrinking": ShrinkingSoak, "exchanging": ExchangingSoak}


def main() -> int:
    """Many runs, and what came of them."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=200, help="after which no run is begun any more (200)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="the same after so many minutes")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the next ones follow")
    parser.add_argument("--program", choices=tuple(PROGRAMS), default="training")
    parser.add_argument(
        "--limit-seconds", type=float, default=LIMIT_SECONDS, help="for a job to be over, or to go on (5 s)"
    )
    arguments = parser.parse_args()
    mpirun = Mpirun()
    run = PROGRAMS[arguments.program](mpirun, arguments.limit_seconds).run
    deadline, seed = time.monotonic() + 60 * arguments.minutes, arguments.seed
    kills: list[Kill] = []
    failures = 0
    while len(kills) < arguments.kills and time.monotonic() < deadline:
        found = _one(run, seed, mpirun)
        kills += found or []
        failures += found is None
        seed += 1
        print(f"{len(kills)} of {arguments.kills} kills; {seed - arguments.seed} runs, {failures} failed", flush=True)
    print(*_summary(kills), f"{failures} of {seed - arguments.seed} runs failed", sep="\n")
    return int(failures > 0)


def _one(run: Callable[[int], list[Kill]], seed: int, mpirun: Mpirun) -> list[Kill] | None:
    """One run, told; None if it did not end as promised."""
    began = time.monotonic()
    try:
        kills = run(seed)
        told = ", ".join(f"{kill.stage} {kill.seconds:.1f} s" for kill in kills)
        print(f"seed {seed}: {told or 'nothing killed'}; {time.monotonic() - began:.0f} s in all")
        return kills
    except Exception as error:  # a run that hangs is killed, and the next one comes
        print(f"seed {seed}: FAILED after {time.monotonic() - began:.0f} s: {type(error).__name__}: {error}")
        return None
    finally:
        for job in mpirun.jobs:
            job.kill()
        mpirun.jobs.clear()


def _summary(kills: Sequence[Kill]) -> Iterator[str]:
    """A line for each stage."""
    for stage in dict.fromkeys(kill.stage for kill in kills):
        these = [kill for kill in kills if kill.stage == stage]
        seconds = [kill.seconds for kill in these]
        yield (
            f"{stage}: {len(these)} killed, {sum(kill.told for kill in these)} named by mpitrain, "
            f"{sum(kill.restarted for kill in these)} started again; over, or gone on, after "
            f"{statistics.median(seconds):.1f} s "
            f"(median), {max(seconds):.1f} s (slowest)"
        )


if __name__ == "__main__":
    sys.exit(main())
