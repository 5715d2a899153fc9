"""Kills random ranks at random moments, and looks whether each job ends as promised: `scripts/soak`.

A run starts a job of 2 to 4 ranks, sends SIGKILL to one of them at some moment between the start and the end, and
checks that the job is over within 5 s, that its exit code is not 0, that the cause was told at most once and with the
right rank, and that no process, shared memory or temporary file is left. The same seed gives the same choices.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.launch.conftest import REPOSITORY, Finished, Job, Mpirun

LIMIT_SECONDS = 5.0
PATIENCE_SECONDS = 300.0
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK=", "PMI_RANK=")
SHARED_MEMORY = Path("/dev/shm")
EXCHANGING = (str(Path(__file__).with_name("exchanging_program.py")),)
TRAINING = ("-m", "mpitrain", "--epochs", "3", "--output")


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


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes:
        killed: the victim was alive at its moment.
        told: the message named it.
        seconds: from the kill to the end of the job.
    """

    killed: bool
    told: bool
    seconds: float


def run_once(mpirun: Mpirun, plan: Plan, whole_seconds: float, program: Sequence[str] = EXCHANGING) -> Outcome:
    """One job with one kill.

    Args:
        mpirun: starts it.
        plan: what is killed when.
        whole_seconds: that an undisturbed job takes.
        program: what is run; a directory is added to one that ends in `--output`.

    Raises:
        AssertionError: the job did not end as promised.
    """
    before = set(_segments())
    directory = Path(tempfile.mkdtemp(prefix="soak-"))
    temporary = directory / "tmp"
    temporary.mkdir()
    try:
        job = _start(mpirun, plan.ranks, program, directory, temporary)
        time.sleep(plan.moment * whole_seconds)
        killed, moment = _kill(job, plan.victim), time.monotonic()
        finished = job.finish(PATIENCE_SECONDS)
        seconds = time.monotonic() - moment
        _check(plan, finished, killed, seconds)
        _wait_until_empty(job, temporary, before, finished)
        told = re.search(rf"^mpitrain: rank {plan.victim} on ", finished.stderr, re.MULTILINE)
        return Outcome(killed, told is not None, seconds)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def undisturbed_seconds(mpirun: Mpirun, ranks: int, program: Sequence[str] = EXCHANGING) -> float:
    """How long a job takes that nobody disturbs."""
    directory = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        finished = _start(mpirun, ranks, program, directory, directory).finish(PATIENCE_SECONDS)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    assert finished.returncode == 0, finished.output
    return finished.seconds


def _start(mpirun: Mpirun, ranks: int, program: Sequence[str], directory: Path, temporary: Path) -> Job:
    arguments = [*program, *([str(directory / "output")] if program[-1] == "--output" else [])]
    return mpirun.start(ranks, arguments, env={"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(temporary)})


def _kill(job: Job, rank: int) -> bool:
    """Kills one rank, as soon as it is there; False if the job has ended before."""
    while job.process.poll() is None:
        for pid in job.processes():
            if _rank_of(pid) == rank:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    return True
        time.sleep(0.01)
    return False


def _rank_of(pid: int) -> int | None:
    """The rank that a process is; None for launchers, and for processes that have ended."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0"):
            if entry.startswith(RANK_VARIABLES):
                return int(entry.partition("=")[2])
    return None


def _check(plan: Plan, finished: Finished, killed: bool, seconds: float) -> None:
    about = f"{plan}\n{finished.output}"
    told = re.findall(r"^mpitrain: ranks? .*", finished.stderr, re.MULTILINE)
    if not killed:
        assert (finished.returncode, told) == (0, []), about
        return
    assert seconds < LIMIT_SECONDS, f"{seconds:.1f} s\n{about}"
    assert finished.returncode not in (0, 124), about
    assert len(told) <= 1, about
    assert all(line.startswith(f"mpitrain: rank {plan.victim} on ") for line in told), about
    assert "Traceback" not in finished.stderr, about


def _wait_until_empty(job: Job, temporary: Path, before: set[Path], finished: Finished) -> None:
    """Nothing is left of a job, a moment after its end."""
    deadline = time.monotonic() + 10
    while True:
        left = [str(pid) for pid in job.processes()]
        left += [str(path) for path in temporary.rglob("*") if not path.is_dir()]
        left += [str(path) for path in _segments() if path not in before and not _is_mapped(path)]
        if not left:
            return
        assert time.monotonic() < deadline, f"left: {left}\n{finished.output}"
        time.sleep(0.1)


def _segments() -> list[Path]:
    return list(SHARED_MEMORY.iterdir()) if SHARED_MEMORY.is_dir() else []


def _is_mapped(path: Path) -> bool:
    """Whether a process that lives, of another job, uses the segment, or may be about to."""
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime < 2:
            return True
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if str(path) in maps.read_text():
                return True
    return False


def main() -> int:
    """Many runs, and what came of them."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the next ones follow")
    parser.add_argument("--program", choices=("training", "exchanging"), default="training")
    arguments = parser.parse_args()
    program = TRAINING if arguments.program == "training" else EXCHANGING
    mpirun = Mpirun()
    seconds = {ranks: undisturbed_seconds(mpirun, ranks, program) for ranks in (2, 3, 4)}
    failures, outcomes = 0, []
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        plan = Plan.of(seed)
        try:
            outcomes.append(run_once(mpirun, plan, seconds[plan.ranks], program))
            print(f"seed {seed}: {plan}: {outcomes[-1]}", flush=True)
        except AssertionError as error:
            failures += 1
            print(f"seed {seed}: FAILED: {error}", flush=True)
        finally:
            for job in mpirun.jobs:
                job.kill()
            mpirun.jobs.clear()
    killed = [outcome for outcome in outcomes if outcome.killed]
    slowest = max((outcome.seconds for outcome in killed), default=0.0)
    print(
        f"{arguments.runs} runs, {failures} failed; {len(killed)} killed, {sum(o.told for o in killed)} of them named "
        f"by mpitrain; slowest end {slowest:.1f} s after the kill"
    )
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
