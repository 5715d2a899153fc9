"""When the ranks are asked where they are, and what is told of it."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from mpitrain.faults.members import Member, Members
from mpitrain.faults.options import FaultOptions
from mpitrain.faults.processes import Process
from mpitrain.faults.report import Fault
from mpitrain.faults.roster import Roster, Seat
from mpitrain.faults.stall_watch import ANSWER_SECONDS, StallWatch
from mpitrain.faults.wire import Link

SILENCE_SECONDS = 10.0


class Job:
    """Three ranks of two hosts, of which rank 1 waits for rank 2 from time 0 on."""

    def __init__(self, warning: float = 30.0, abort: float = 300.0) -> None:
        seats = tuple(Seat(rank, f"host{rank // 2}", rank // 2, Process(100 + rank, 1), ()) for rank in range(3))
        self.roster = Roster(0, seats, "token")
        self.members = Members(self.roster, SILENCE_SECONDS)
        self.there: dict[int, Link] = {}
        for rank in range(3):
            here, there = socket.socketpair()
            self.members[rank], self.there[rank] = Member(Link(here), 0.0), Link(there)
        self.told: list[str] = []
        self.faults: list[Fault] = []
        options = FaultOptions(stall_warning=warning, stall_abort=abort)
        self.watch = StallWatch(self.members, self.roster, options, self.told.append, self.faults.extend)

    def beat(self, now: float, waiting: dict[int, float]) -> None:
        for rank, member in self.members.items():
            member.heard, member.said = now, {"waiting": waiting.get(rank, 0.0), "position": 5, "updates": 4}

    def answer(self, phases: dict[int, str], waiting: float, silent: Any = ()) -> None:
        for rank, member in self.members.items():
            inside = "a bucket" if phases[rank] == "exchange" else None
            state = {"position": 5 if inside else 4, "inside": inside, "phase": phases[rank], "updates": 4}
            if rank not in silent:
                member.answered = self.watch.question
                member.state = {**state, "waiting": waiting if inside else 0.0}

    def run(self, phases: dict[int, str], until: float, since: float = 0.0, silent: Any = ()) -> list[float]:
        """Beats and answers twice a second; when the ranks were asked."""
        asked, now = [], since
        while now <= until:
            waiting = now - since
            self.beat(now, {rank: waiting for rank, phase in phases.items() if phase == "exchange"})
            before = self.watch.question
            self.watch.look(now)
            if self.watch.question > before:
                asked.append(now)
            self.answer(phases, waiting, silent)
            now += 0.5
        return asked


LATE = {0: "exchange", 1: "exchange", 2: "compute"}
SAVING = {**LATE, 2: "checkpoint"}


@pytest.mark.parametrize(
    ("warning", "abort", "first", "warned", "ended"),
    [
        (30.0, 300.0, 29.0, True, True),
        (0.0, 60.0, 59.0, False, True),
        (30.0, 0.0, 29.0, True, False),
        (2.0, 0.0, 2.0, True, False),
        (0.0, 0.0, None, False, False),
    ],
)
def test_a_stall_is_told_and_ends_the_job(
    warning: float, abort: float, first: float | None, warned: bool, ended: bool
) -> None:
    job = Job(warning, abort)
    asked = job.run(LATE, 310.0)
    assert asked[:1] == ([] if first is None else [first])
    assert len(job.told) == warned, "once"
    if warned:
        assert job.told[0].startswith(f"mpitrain: stall: 2 ranks waited {first:.0f} s for rank 2 (host1)")
        assert ("If this lasts, the job ends in" in job.told[0]) == ended
        assert ("The job goes on waiting." in job.told[0]) == (not ended)
    assert [(fault.kind, fault.exit_code) for fault in job.faults[:1]] == ([("stall", 75)] if ended else [])
    if ended:
        assert [culprit.rank for culprit in job.faults[0].culprits] == [2]


def test_a_stall_that_is_over_is_told_and_another_is_told_again() -> None:
    job = Job()
    job.run(LATE, 35.0)
    job.run({0: "compute", 1: "compute", 2: "compute"}, 45.0, since=40.0)
    assert [text.partition(",")[0] for text in job.told[1:]] == ["mpitrain: the stall is over"]
    job.run(LATE, 85.0, since=50.0)
    assert len(job.told) == 3
    assert job.faults == []


def test_ranks_that_have_reason_are_waited_for_and_named_now_and_then() -> None:
    job = Job(30.0, 60.0)
    job.run(SAVING, 200.0)
    note = "mpitrain: rank 0 (host0), rank 1 (host0) waited {} s: rank 2 (host1) is in phase 'checkpoint', which may"
    assert job.faults == []
    assert len(job.told) in (2, 3), "not at each look"
    assert all(text.startswith(note.format(text.split(" waited ")[1].split(" ")[0])) for text in job.told)
    job.run(LATE, 255.0, since=0.0)  # it went on, and now there is no reason any more
    assert [fault.kind for fault in job.faults[:1]] == ["stall"]


@pytest.mark.parametrize("silent", [True, False])
def test_who_does_not_answer_is_not_waited_for_long(silent: bool) -> None:
    job = Job()
    job.beat(29.0, {0: 29.0, 1: 29.0})
    if silent:
        job.members[2].heard = 29.0 - SILENCE_SECONDS - 1
    job.watch.look(29.0)
    assert job.watch.is_asking
    (question,) = job.there[0].receive()
    assert question == {"is": "ask", "question": 1, "look": []}
    (other,) = job.there[2].receive()
    assert other["look"] == ([[2, 102, 1]] if silent else []), "whoever is on its host looks at its process"
    job.answer(LATE, 29.0, silent=[2])
    job.watch.look(29.5)
    assert job.watch.is_asking != silent, "one that is heard may still answer"
    job.watch.look(29.0 + ANSWER_SECONDS)
    assert not job.watch.is_asking
    assert ("has not answered for" in "".join(job.told)) == silent


@pytest.mark.parametrize(
    ("why", "text"),
    [
        ("silent", "does not answer"),
        ("unreachable", "cannot be reached (a firewall between the hosts?)"),
        ("other", "has not been heard of"),
        ("finished", None),
        ("lost", None),
    ],
)
def test_ranks_that_are_not_connected(why: str, text: str | None) -> None:
    job = Job()
    del job.members[2]
    job.members.gone[2] = (why, 0.0)
    states = {state.rank: state for state in job.watch._states(1.0)}
    assert (2 in states) == (text is not None)
    if text is not None:
        assert (states[2].silence, states[2].heard, states[2].process_state) == (text, False, None)
    job.members[0].state = {"neighbours": {"2": "T"}}
    assert [state.process_state for state in job.watch._states(1.0)][2:] == (["T"] if text else [])
