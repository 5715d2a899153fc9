"""Every way in which a rank can end: the exit code of the job, who is named, how soon it is over, what is left."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from tests.launch.conftest import REPOSITORY, Finished, Mpirun

pytestmark = pytest.mark.mpich

PROGRAM = str(Path(__file__).with_name("ending_program.py"))
MEANWHILE = "while others went on; the job ends with exit code"


def run(mpirun: Mpirun, np: int, *args: str, **env: str) -> tuple[Finished, float]:
    """The job, and the seconds from the end of a rank to that of the job, of which nothing is left."""
    job = mpirun.start(np, [PROGRAM, *args], env={"PYTHONPATH": str(REPOSITORY), **env})
    finished = job.finish(120)
    ended = time.time()
    deadline = time.monotonic() + 10
    while job.processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert job.processes() == [], finished.output
    moments = re.findall(r"at (\d+\.\d+)", finished.stdout)
    return finished, ended - max(map(float, moments)) if moments else 0.0


def killed(mpirun: Mpirun, way: str) -> set[int]:
    """What mpirun may return instead of a rank's own code.

    MPICH's kills, as soon as a rank has ended without MPI_Finalize, those that are slower, and tells that at times.
    """
    return {9} if way.startswith("os._exit") and not mpirun.is_open_mpi else set()


@pytest.mark.parametrize(
    ("way", "who", "phase", "code", "words"),
    [
        ("raise", "2", "loop", 3, rf"rank 2 on \S+ raised SystemExit\(3\) {MEANWHILE} 3"),
        ("exit", "0", "init", 3, rf"rank 0 on \S+ raised SystemExit\(3\) {MEANWHILE} 3"),
        ("text", "1", "loop", 1, rf"rank 1 on \S+ called sys\.exit\('a text'\) {MEANWHILE} 1"),
        (
            "sys.exit",
            "1",
            "loop",
            1,
            rf"rank 1 on \S+ called sys\.exit\(0\) {MEANWHILE} 1\nRankFinishedError: ranks 0, 2",
        ),
        ("os._exit", "1", "loop", 1, rf"rank 1 on \S+ ended with exit code 0 \(os\._exit\) {MEANWHILE} 1"),
        ("thread", "0", "loop", 3, r"rank 0 on \S+ ended with exit code 3 \(os\._exit\).* ends with exit code 3"),
        ("interrupt", "1", "loop", 130, r"rank 1 on \S+ failed; the job ends\ninterrupted"),
        ("hook", "1", "loop", 1, r"rank 1 on \S+ failed; the job ends\n(.*\n)*ValueError: of this rank"),
        ("raise", "all", "end", 3, None),
        ("os._exit", "all", "end", 0, None),
        ("os._exit 3", "0", "atexit", 3, None),
    ],
)
def test_the_code_is_that_of_the_rank_which_is_named(
    mpirun: Mpirun, way: str, who: str, phase: str, code: int, words: str | None
) -> None:
    finished, seconds = run(mpirun, 3, way, who, phase)
    assert finished.returncode in {code} | killed(mpirun, way), finished.output
    assert seconds < 10, finished.output
    assert finished.stdout.count("END") == (3 if phase in ("end", "atexit") else 0), finished.output
    told = re.findall(r"^mpitrain: (?!warning)", finished.stderr, re.MULTILINE)
    assert len(told) == (words is not None), finished.output
    assert words is None or re.search(f"^mpitrain: {words}", finished.stderr, re.MULTILINE), finished.output


def test_a_rank_that_never_comes_is_told_and_ends_the_job(mpirun: Mpirun) -> None:
    finished, seconds = run(mpirun, 3, "os._exit", "1", "before", MPITRAIN_STALL_WARNING="2", MPITRAIN_STALL_ABORT="4")
    assert finished.returncode in {75} | killed(mpirun, "os._exit"), finished.output
    assert 3 < seconds < 15, finished.output
    told = re.findall(r"^mpitrain: rank [02] on \S+ has waited ([24]) s for the others", finished.stderr, re.MULTILINE)
    assert told in (["2", "4"], ["2", "4", "4"]), (
        finished.output
    )  # whoever spoke may have ended before the other is due


def test_a_rank_that_is_only_late_is_waited_for(mpirun: Mpirun) -> None:
    limits = {"MPITRAIN_STALL_WARNING": "1", "MPITRAIN_STALL_ABORT": "40"}
    finished, _ = run(mpirun, 2, "none", "1", "late", **limits)
    assert (finished.returncode, finished.stdout.count("END")) == (0, 2), finished.output
    assert re.findall(r"^mpitrain: (.*) waited 1 s", finished.stderr, re.MULTILINE), finished.output
    assert "exit code" not in finished.stderr, finished.output


def test_children_that_have_just_been_forked_get_their_signals(mpirun: Mpirun) -> None:
    finished, _ = run(mpirun, 2, "none", "none", "forked")
    assert (finished.returncode, finished.stdout.count("END")) == (0, 2), finished.output
    assert "mpitrain" not in finished.stderr, finished.output


@pytest.mark.parametrize("way", ["kill", "os._exit 3"])
def test_workers_end_with_their_rank(mpirun: Mpirun, way: str) -> None:
    """They would keep the launcher waiting."""
    finished, seconds = run(mpirun, 2, way, "1", "workers")
    code = {"kill": 137 if mpirun.is_open_mpi else 9, "os._exit 3": 3}[way]
    assert finished.returncode in {code} | killed(mpirun, way), finished.output
    assert seconds < 15, finished.output


def test_a_rank_that_leaves_without_a_word_is_no_success(mpirun: Mpirun) -> None:
    """MPICH's mpirun gives 0. No other rank is named; where the kernel keeps no exit codes, none may be."""
    command = [sys.executable, "-m", "mpitrain", "run", "-np", "3", "--oversubscribe", "--allow-run-as-root"]
    job = mpirun.execute([*command, sys.executable, PROGRAM, "C", "1", "init"], {"PYTHONPATH": str(REPOSITORY)})
    finished = job.finish(120)
    assert finished.returncode != 0, finished.output
    named = re.findall(r"rank (\d) on \S+ ended with exit code 0", finished.stderr, re.IGNORECASE)
    unknown = re.findall(
        r"^mpitrain: .*a rank (?:may have )?ended without a word", finished.stderr, re.MULTILINE | re.IGNORECASE
    )
    assert set(named) == {"1"} or (not named and len(unknown) == 1), finished.output
