"""The watchdog between real processes, without MPI: no launcher ends them, only they themselves do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpitrain.faults.activity import Activity
from mpitrain.faults.job_end import JobEnd
from mpitrain.faults.options import FaultOptions
from mpitrain.faults.processes import Process
from mpitrain.faults.roster import Roster, Seat
from mpitrain.faults.watchdog import Watchdog

PROGRAM = Path(__file__).with_name("watchdog_rank.py")
REPOSITORY = PROGRAM.parents[3]
PATIENCE_SECONDS = 60.0  # of a loaded machine


class Ranks:
    """Processes of `watchdog_rank.py`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.processes: list[subprocess.Popen[str]] = []
        self.report = directory / "report"

    def start(self, size: int, what: str) -> None:
        """Returns once all watch."""
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "MPITRAIN_FAILURE_REPORT": str(self.report)}
        for rank in range(size):
            command = [sys.executable, str(PROGRAM), str(rank), str(size), str(self.directory), what]
            output = (self.directory / f"{rank}.out").open("w")
            self.processes.append(subprocess.Popen(command, env=env, stdout=output, stderr=output, text=True))
        self.wait_for(lambda: len(list(self.directory.glob("*.ready"))) == size)

    def wait_for(self, condition: object) -> None:
        """Until `condition()` holds."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():  # type: ignore[operator]
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.02)

    def output(self) -> str:
        return "".join((self.directory / f"{rank}.out").read_text() for rank in range(len(self.processes)))

    def codes(self) -> list[int]:
        """Exit codes, once all have ended."""
        self.wait_for(lambda: all(process.poll() is not None for process in self.processes))
        return [process.returncode for process in self.processes]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    started = Ranks(tmp_path)
    yield started
    for process in started.processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize("stopped", [2, 0], ids=["a rank", "the hub"])
def test_a_stopped_rank_is_named_and_ends(ranks: Ranks, stopped: int) -> None:
    ranks.start(3, "late")
    # The late rank is stopped; where that is not the last one, the last one answers, but has not come either.
    began = time.monotonic()
    time.sleep(1.0)
    ranks.processes[stopped].send_signal(signal.SIGSTOP)
    codes = ranks.codes()
    assert 3 < time.monotonic() - began < 30, ranks.output()
    assert codes == [-signal.SIGKILL if rank == stopped else 75 for rank in range(3)], ranks.output()
    output = ranks.output()
    # Until another rank has taken over from the hub, it may be time for the end already; and one that takes over from a
    # hub that was only slow warns, too.
    assert output.count("The job ends with exit code 75") == 1, output
    assert output.count("If this lasts") >= (stopped != 0), output
    assert f"not there  rank {stopped} (here): " in output
    assert f"process {ranks.processes[stopped].pid} is stopped by a signal" in output
    (record,) = [json.loads(line) for line in ranks.report.read_text().splitlines()]
    assert (record["kind"], record["exit_code"]) == ("stall", 75)
    assert stopped in [culprit["rank"] for culprit in record["culprits"]]
    assert ranks.report.stat().st_mode & 0o077 == 0


def test_a_long_evaluation_is_no_stall(ranks: Ranks) -> None:
    ranks.start(2, "late in evaluation")
    time.sleep(8)  # the job would end after 5
    assert [process.poll() for process in ranks.processes] == [None, None], ranks.output()
    output = ranks.output()
    assert "stall" not in output
    assert "rank 0 (here) waited" in output
    assert "rank 1 (here) is in phase 'evaluation'" in output


@pytest.mark.parametrize("killed", [2, 0], ids=["a rank", "the hub"])
@pytest.mark.parametrize("what", ["sleeps", "forks"])
def test_a_killed_rank_is_named_and_the_others_end(ranks: Ranks, killed: int, what: str) -> None:
    if what == "forks" and killed == 0:
        pytest.skip("the last rank forks")
    ranks.start(3, what)
    time.sleep(2)  # all are connected, and have said how much memory they use
    began = time.monotonic()
    ranks.processes[killed].kill()
    codes = ranks.codes()
    assert time.monotonic() - began < 15, ranks.output()
    assert codes == [-signal.SIGKILL if rank == killed else 137 for rank in range(3)], ranks.output()
    output = ranks.output()
    assert output.count("mpitrain: ") == 1, output
    assert f"mpitrain: rank {killed} on here was killed by SIGKILL" in output
    if killed:  # the memory of the hub was known to the hub
        assert "after update 7, with " in output
        assert " MiB of memory when last heard of" in output


@pytest.mark.parametrize("stopped", [False, True], ids=["busy at the start", "stopped"])
def test_a_hub_that_is_not_there_for_a_while_takes_nobody_for_dead(ranks: Ranks, stopped: bool) -> None:
    ranks.start(3, "apart" if stopped else "apart, and the hub is busy")
    if stopped:
        time.sleep(1.0)
        ranks.processes[0].send_signal(signal.SIGSTOP)
        time.sleep(6.0)
        ranks.processes[0].send_signal(signal.SIGCONT)
    time.sleep(8.0)
    assert [process.poll() for process in ranks.processes] == [None] * 3, ranks.output()
    assert ranks.output() == ""


def test_the_same_exception_is_told_once(ranks: Ranks) -> None:
    ranks.start(3, "fails alike")
    assert set(ranks.codes()) == {1}, ranks.output()
    output = ranks.output()
    assert output.count("ValueError: alike") == 1, output
    assert "mpitrain: ranks 0, 1, 2 on here failed; the job ends" in output


def test_the_end_of_a_good_job_is_silent(ranks: Ranks) -> None:
    ranks.start(3, "ends well")
    assert ranks.codes() == [0, 0, 0], ranks.output()
    assert ranks.output() == ""
    assert not ranks.report.exists()


def test_one_rank_tells_why_all_are_being_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher ends ranks 0 and 2 since rank 1 was killed: both know why, and rank 0 tells it."""
    told: list[str] = []
    ended: list[int] = []
    monkeypatch.setattr(JobEnd, "end_job", lambda job, code, silent: ended.append(code))  # else of this process, too
    processes = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    pids = [processes[0].pid, processes[1].pid, os.getpid()]
    started = [int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]) for pid in pids]
    seats = tuple(Seat(rank, "here", 0, Process(pids[rank], started[rank]), ()) for rank in range(3))
    options = FaultOptions.of({})
    try:
        watchdog = Watchdog(Activity(), Roster(2, seats, "secret"), [], options, lambda code: None, told.append)
        watchdog.leaving()
        assert told == []
        processes[1].kill()
        watchdog.leaving()
        assert told == [], "it is left to rank 0"
        processes[0].kill()
        watchdog.leaving()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert len(told) == len(ended) == 1
