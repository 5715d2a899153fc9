"""What the hub makes of what ranks say, and of their ends."""

from __future__ import annotations

import dataclasses
import os
import socket

import pytest

from mpitrain.faults.activity import Activity
from mpitrain.faults.hub import SIGNAL_SECONDS, Hub
from mpitrain.faults.losses import SILENT_SECONDS
from mpitrain.faults.members import Member
from mpitrain.faults.neighbours import Neighbours
from mpitrain.faults.options import FaultOptions
from mpitrain.faults.processes import Process
from mpitrain.faults.report import Culprit, Fault, as_json
from mpitrain.faults.roster import Roster, Seat
from mpitrain.faults.wire import Link

SILENCE_SECONDS = 10.0


def hub_of(told: list[str], ended: list[int], nodes: int, stall_warning: float = 0, stall_abort: float = 0) -> Hub:
    process = Process(os.getpid(), 0)
    seats = tuple(Seat(rank, f"host{min(rank, nodes - 1)}", min(rank, nodes - 1), process, ()) for rank in range(3))
    roster = Roster(0, seats, "token")
    options = FaultOptions(stall_warning=stall_warning, stall_abort=stall_abort)
    return Hub(
        roster,
        options,
        Neighbours(roster),
        told.append,
        lambda code, _: ended.append(code),
        SILENCE_SECONDS,
        Activity(),
    )


@pytest.mark.parametrize("closed", [True, False])
def test_a_signal_is_no_cause_where_a_rank_had_ended_before(closed: bool) -> None:
    told: list[str] = []
    ended: list[int] = []
    hub = hub_of(told, ended, nodes=3)
    one, other = socket.socketpair(), socket.socketpair()
    with one[0], one[1], other[0], other[1]:
        for rank, (here, _) in ((1, one), (2, other)):
            hub.members[rank] = Member(Link(here), 0.0)
        if closed:
            hub.closed(2, hub.members[2].link, 1.0)  # of another host, so that it may come back
        signalled = Fault("signal", "got SIGTERM", 143, (Culprit(1, "host1", 7),), "SIGTERM")
        hub.hear(1, {"is": "fault", "fault": dataclasses.asdict(signalled)}, 1.01)
        hub.tick(1.02)
        assert told == []
        hub.tick(1.02 + SIGNAL_SECONDS)
    lost = (
        "mpitrain: rank 2 on host2 ended without a word (killed, or its host is gone); the job ends with exit code 1\n"
    )
    assert told == [lost if closed else "mpitrain: rank 1 on host1 got SIGTERM; the job ends with exit code 143\n"]
    assert ended == [1 if closed else 143]


@pytest.mark.parametrize(
    ("memory", "words", "told"),
    [
        (True, "was killed by SIGKILL by the kernel, which had no memory left;", "true"),
        (None, "was killed by SIGKILL, perhaps by the kernel, which had no memory left for some process;", "null"),
        (False, "was killed by SIGKILL;", "false"),
    ],
)
def test_want_of_memory_is_named_where_it_is_known(memory: bool | None, words: str, told: str) -> None:
    texts: list[str] = []
    hub = hub_of(texts, [], nodes=1)
    here, there = socket.socketpair()
    with here, there:
        hub.members[1] = Member(Link(here), 0.0)
        hub.members[2] = Member(Link(there), 0.0)
        hub.hear(2, {"is": "ended", "rank": 1, "status": 9, "memory": memory}, 1.0)
        hub.tick(1.1)
    assert [f"rank 1 on host0 {words}" in text for text in texts] == [True], texts
    assert f'"out_of_memory": {told}' in as_json(Fault("death", "", 137, (), "SIGKILL", memory))


def test_a_rank_of_a_silent_host_is_told_of_and_holds_up_nobody() -> None:
    process = Process(os.getpid(), 0)
    seats = tuple(Seat(rank, f"host{rank}", rank, process, ()) for rank in range(3))
    roster, options = Roster(0, seats, "token"), FaultOptions(on_failure="shrink", stall_warning=30, stall_abort=60)
    told: list[str] = []
    ended: list[int] = []
    activity = Activity()
    hub = Hub(roster, options, Neighbours(roster), told.append, lambda code, _: ended.append(code), 10.0, activity)
    here, there = socket.socketpair()
    with here, there:
        for rank in (1, 2):
            hub.members[rank] = Member(Link(here), 0.0)
        # It waited for long, and then its host was gone.
        hub.hear(2, {"is": "beat", "position": 5, "waiting": 59.5, "updates": 7, "resident": 2048}, 0.0)
        hub.shrink.note([2], 1.0)
        for now in (1.0, 1.0 + SILENT_SECONDS, 3.0, 80.0):
            hub.hear(1, {"is": "beat", "position": 9, "waiting": 0.1}, now)
            hub.tick(now)
    assert (set(hub.members), ended) == ({1}, [])
    assert "".join(told) == (
        "mpitrain: rank 2 on host2 ended without a word (killed, or its host is gone) after update 7, with 2.0 KiB of "
        "memory when last heard of; the others go on without it\n"
    )


@pytest.mark.parametrize("code", [75, 3])
def test_the_end_of_a_stall_is_no_cause_for_a_hub_that_was_stopped_meanwhile(code: int) -> None:
    told: list[str] = []
    ended: list[int] = []
    hub = hub_of(told, ended, nodes=1)
    here, there = socket.socketpair()
    with here, there:
        for rank in (1, 2):
            hub.members[rank] = Member(Link(here), 0.0)
        hub._neighbours.ended[1] = (code << 8, False)
        hub.paused(5.0)
        hub.tick(5.1)
    assert ("".join(told).count("rank 1"), ended) == ((0, []) if code == 75 else (1, [code]))


@pytest.mark.parametrize("come_back", [False, True])
def test_a_rank_that_the_others_have_left_for_another_leaves_it_to_that_one_to_tell(come_back: bool) -> None:
    """It was slow, they found another, and that one sees what this one sees, and tells it."""
    told: list[str] = []
    ended: list[int] = []
    hub = hub_of(told, ended, nodes=3, stall_warning=2, stall_abort=5)
    here, there = socket.socketpair()
    with here, there:

        def say(rank: int, now: float, waiting: float) -> None:
            hub.hear(rank, {"is": "beat", "position": 3, "waiting": waiting}, now)
            hub.hear(
                rank,
                {"is": "state", "question": hub.stalls.question, "position": 3, "waiting": waiting, "inside": "it"},
                now,
            )

        for rank in range(3):
            hub.members[rank] = Member(Link(here), 0.0)
            say(rank, 0.0, 0.0)
        for rank in (1, 2):
            hub.hear(rank, {"is": "moved"}, 1.0)
        quiet = 1.0 + 2 * SILENCE_SECONDS
        for now in (1.1, 3.0, 6.0, quiet - 0.1):
            say(0, now, now)
            hub.tick(now)
        assert (told, ended) == ([], [])
        if come_back:
            for rank in (1, 2):
                hub.members[rank] = Member(Link(here), quiet)
        for now in (quiet + 0.1, quiet + 0.2):  # a question, and what follows from the answers
            for rank in hub.members:
                say(rank, now, now)
            hub.tick(now)
    assert ended == [75]
    expected = "all ranks have come to an exchange" if come_back else "1 rank waited 21 s for rank 1 (host1), rank 2"
    assert [expected in text for text in told] == [True], told
