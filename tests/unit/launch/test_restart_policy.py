"""Whether a failed job is started again, where, with how many ranks, from where; and when it is given up."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace

import pytest

from mpitrain.errors import UsageError
from mpitrain.faults.summary import FaultSummary
from mpitrain.launch.first_end import End
from mpitrain.launch.listener import Listener
from mpitrain.launch.request import Request
from mpitrain.launch.restart import run_with_restarts
from mpitrain.launch.restart_policy import Failure, NextAttempt, Policy, Restarts, policy, promise, remove_hosts
from mpitrain.launch.supervisor import Outcome
from mpitrain.runtime.hostfile import parse
from mpitrain.runtime.marks import Mark

REQUEST = Request(("true",), 4, parse("a:2,b:1,c:1", "test"))
KILLED = FaultSummary("death", 510, 137, "rank 1 on b", "was killed by SIGKILL")
RAISED = FaultSummary("exception", 510, 1, "ranks 0, 1 on a", "ValueError: loss is nan")


def outcome(code: int, *marks: tuple[str, object], **more: object) -> Outcome:
    told = [Mark("begun", 0, "a"), Mark("met", 0, "a"), *(Mark(event, 0, "a", str(text)) for event, text in marks)]
    return Outcome(code, Listener("s", told), **more)  # type: ignore[arg-type]


def failed(fault: FaultSummary = KILLED, *marks: tuple[str, object]) -> Outcome:
    return outcome(fault.exit_code, *marks, ("fault", fault.detail))


LOST_C = {"ssh_codes": {"c": 255}, "lost": {"c"}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((None, None, None), Policy(0, 1)),
        ((None, 2, None), Policy(2, 1)),
        ((None, 2, 3), Policy(2, 3)),
        (("restart", None, None), Policy(3, 1)),
        (("restart", 1, 4), Policy(1, 4)),
        (("abort", None, None), Policy(0, 1)),
        (("abort", 0, None), Policy(0, 1)),
        ((None, -1, None), "--restarts is -1"),
        ((None, 1, 0), "--min-np is 0"),
        ((None, 1, 5), "no more than the job has, 4"),
        ((None, None, 2), "add --restarts N"),
        (("shrink", None, 2), Policy(0, 2)),
        (("shrink", 2, None), Policy(2, 1)),
        (("abort", 2, None), "exclude each other"),
        (("restart", 0, None), "exclude each other"),
    ],
)
def test_what_is_asked_for(given: tuple[str | None, int | None, int | None], expected: Policy | str) -> None:
    if isinstance(expected, Policy):
        assert policy(*given, ranks=4) == expected
    else:
        with pytest.raises(UsageError, match=expected):
            policy(*given, ranks=4)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (failed(), Failure(510, "rank 1 on b", "was killed by SIGKILL", (), True)),
        (failed(RAISED), Failure(510, "ranks 0, 1 on a", "ValueError: loss is nan")),
        (
            outcome(9, ("step", 10), ("step", 14), ("step", 17)),
            Failure(17, "", "the launcher ended with exit code 9", is_rough=True),
        ),
        (
            outcome(9, ("resumed", 7), ("step", 8), ("step", 9)),
            Failure(9, "", "the launcher ended with exit code 9", is_rough=True),
        ),
        (outcome(9, ("saved", 2)), Failure(2, "", "the launcher ended with exit code 9", is_rough=True)),
        (outcome(9), Failure(0, "", "the launcher ended with exit code 9")),
        (
            outcome(9, silent=True, first=End(2, "")),
            Failure(0, "rank 2, which was gone first", "the launcher ended with exit code 9", is_death=True),
        ),
        (outcome(9, ("resumed", 7)), Failure(7, "", "the launcher ended with exit code 9")),
        (outcome(143, timed_out=True), Failure(0, "", "the ranks did not meet")),
        (replace(failed(), **LOST_C), Failure(510, "", "the connection to c was lost", ("c",))),  # type: ignore[arg-type]
    ],
)
def test_failures(given: Outcome, expected: Failure) -> None:
    assert Failure.of(given, given.code) == expected


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (Failure(5, "rank 1", "x"), Failure(5, "rank 2", "x"), True),
        (Failure(5, "", "x"), Failure(6, "", "x"), False),
        (Failure(5, "", "x"), Failure(5, "", "y"), False),
        (Failure(5, "rank 1", "x", (), True), Failure(5, "rank 1", "x", (), True), True),
        (Failure(5, "rank 1", "x", (), True), Failure(5, "rank 2", "x", (), True), False),
        (Failure(5, "", "x", is_rough=True), Failure(5, "", "x"), False),
        (Failure(5, "", "x", is_rough=True), Failure(5, "", "x", is_rough=True), False),
    ],
)
def test_failures_that_are_alike(one: Failure, other: Failure, alike: bool) -> None:
    assert one.is_like(other) == other.is_like(one) == alike


@pytest.mark.parametrize(
    ("lost", "ranks", "hosts", "left"),
    [
        ([], 4, "a:2,b:1,c:1", 4),
        (["c"], 4, "a:2,b:1,c:1", 3),
        (["c.example.org"], 4, "a:2,b:1,c:1", 3),
        (["b", "c"], 3, "a:2,b:1,c:1", 2),
        (["c"], 2, "a:2,b:1,c:1", 2),  # there are slots to spare
        (["a", "b", "c"], 4, "a:2,b:1,c:1", 0),
        (["c"], 8, "a:2,b:1,c:1", 6),  # twice as many ranks as slots, before and after
        (["nobody"], 4, "a:2,b:1,c:1", 4),
    ],
)
def test_hosts_that_are_lost(lost: list[str], ranks: int, hosts: str, left: int) -> None:
    request = remove_hosts(Request(("true",), ranks, parse(hosts, "test")), lost)
    assert request.ranks == left
    assert not {name.partition(".")[0] for name in lost} & {host.name for host in request.hosts}


def test_a_job_on_one_host_loses_none() -> None:
    assert remove_hosts(Request(("true",), 2), ["a"]) == Request(("true",), 2)


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        (outcome(0, ("finished", 0)), 0, ""),
        (outcome(3, ("finished", 3)), 3, "it came to its end by itself, with exit code 3"),
        (outcome(137, ("finished", "")), 137, "it came to its end by itself, with exit code 137"),
        (outcome(85, ("finished", "")), 85, "stopped by a signal"),
        (outcome(85), 85, "stopped by a signal"),
        (outcome(143), 143, "stopped by a signal"),
        (outcome(138), 138, "stopped by a signal"),  # SIGUSR1, and no checkpoint could be written
        (outcome(138, ("finished", "")), 138, "stopped by a signal"),
        (failed(replace(KILLED, kind="signal", exit_code=138)), 138, "stopped by a signal"),
        (outcome(2), 2, "is at fault"),
        (failed(replace(RAISED, exit_code=2)), 2, "is at fault"),
        (failed(replace(KILLED, kind="signal", exit_code=143)), 143, "stopped by a signal"),
        (failed(replace(KILLED, kind="interrupted", exit_code=130)), 130, "stopped by a signal"),
        (outcome(137, signals=[signal.SIGTERM]), 137, "stopped by a signal"),
    ],
)
def test_what_is_not_started_again(given: Outcome, code: int, words: str) -> None:
    again, said = Restarts(Policy(3)).after(given, code, REQUEST)
    assert again is None
    assert (words in said) if words else (said == "")
    assert Restarts(Policy(0)).after(given, code, REQUEST) == (None, "")


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (failed(), 137),
        (failed(), 2),  # the launcher's own code, where ranks have told another
        (failed(replace(KILLED, exit_code=143)), 143),  # killed by SIGTERM without a handler
        (failed(replace(KILLED, kind="stall", exit_code=75)), 75),
        (failed(replace(KILLED, kind="exit", exit_code=3)), 3),
        (outcome(1, signals=[signal.SIGUSR2]), 1),
        (outcome(9), 9),
        (outcome(143, timed_out=True), 1),
    ],
)
def test_what_is_started_again(given: Outcome, code: int) -> None:
    again, said = Restarts(Policy(1)).after(given, code, REQUEST)
    assert again is not None
    assert "restart 1 of 1 in 1 s, with 4 ranks, no checkpoint of mpitrain has been written so far" in said


def test_the_same_step_and_reason_twice_is_the_end() -> None:
    restarts = Restarts(Policy(5))
    assert restarts.after(failed(RAISED), 1, REQUEST)[0]
    assert restarts.after(failed(KILLED), 137, REQUEST)[0]
    assert restarts.after(failed(replace(RAISED, step=511)), 1, REQUEST)[0]
    again, said = restarts.after(failed(RAISED, ("saved", 500)), 1, REQUEST)
    assert again is None
    assert said == (
        "the job failed after step 510 (ranks 0, 1 on a: ValueError: loss is nan), and is not started again: step 511 "
        "has failed twice for the same reason. The newest checkpoint is of step 500"
    )


def test_hosts_are_left_out_down_to_the_least_number_of_ranks() -> None:
    restarts = Restarts(Policy(5, 3))
    again, said = restarts.after(outcome(1, ("saved", 20), ("step", 25), **LOST_C), 1, REQUEST)
    assert again is not None
    assert (again.request.ranks, [host.name for host in again.request.hosts]) == (3, ["a", "b"])
    assert again.resumes
    assert said == (
        "the job failed after step 25 (the connection to c was lost); restart 1 of 5 in 1 s, with 3 ranks, without c, "
        "from the checkpoint of step 20"
    )
    again, said = restarts.after(outcome(1, ssh_codes={"b": 255}, lost={"b"}), 1, again.request)
    assert again is None
    assert "2 ranks of 3 (--min-np) would be left. The newest checkpoint is of step 20" in said


def test_restarts_are_counted_and_wait_longer_while_nothing_is_saved() -> None:
    restarts, delays = Restarts(Policy(9)), []
    for number in range(9):
        saved = [("saved", number)] if number == 3 else []
        again, said = restarts.after(failed(replace(KILLED, step=number), *saved), 137, REQUEST)
        assert again is not None
        assert f"restart {number + 1} of 9" in said
        delays.append(again.delay_seconds)
    assert delays == [1, 2, 4, 1, 1, 2, 4, 8, 16]
    again, said = restarts.after(failed(replace(KILLED, step=9)), 137, REQUEST)
    assert again is None
    assert "it has been 9 times (--restarts)" in said


def test_attempts_follow_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = [failed(KILLED, ("saved", 500)), outcome(137, ("finished", 0))]
    seen = []

    def attempt(again: NextAttempt, number: int, pending: list[int]) -> Outcome:
        seen.append((again.request.ranks, number, again.resumes))
        return outcomes[number]

    assert run_with_restarts(attempt, REQUEST, Restarts(Policy(1)), 30) == 0
    assert seen == [(4, 0, False), (4, 1, True)]
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("mpitrain: the job failed after step 510 (rank 1 on b: was killed by SIGKILL); restart 1")
    assert said[1:] == ["mpitrain: the job is done; its launcher ended with exit code 137 because of what came after"]


def test_a_signal_ends_the_waiting() -> None:
    def attempt(again: NextAttempt, number: int, pending: list[int]) -> Outcome:
        assert number < 6
        return failed(replace(KILLED, step=number))

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    timer = threading.Timer(1.5, interrupt)
    timer.start()
    began = time.monotonic()
    assert run_with_restarts(attempt, REQUEST, Restarts(Policy(6)), 30) == 128 + signal.SIGTERM
    assert time.monotonic() - began < 3.5
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_IGN


def test_what_a_job_survives() -> None:
    assert promise(Policy(2, 3), REQUEST, "from D") == (
        "survives the loss of ranks, and of hosts other than this one, by at most 2 restarts, down to 3 ranks: from D"
    )
    assert (
        promise(Policy(2), Request(("true",), 4), "anew") == "survives the loss of ranks, by at most 2 restarts: anew"
    )
