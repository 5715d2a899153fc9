"""What is told of a rank that has ended, by what is known of it."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from mpitrain.faults import causes
from mpitrain.faults.members import Member
from mpitrain.faults.processes import Process
from mpitrain.faults.report import Culprit, Fault
from mpitrain.faults.roster import Roster, Seat
from mpitrain.faults.wire import Link

SEATS = tuple(Seat(rank, f"host{rank // 2}", rank // 2, Process(100 + rank, 1), ()) for rank in range(4))


def member(said: dict[str, Any], exit_code: int | None = None, how: str = "") -> Member:
    here, there = socket.socketpair()
    there.close()
    made = Member(Link(here), 0.0, said=said, exit_code=exit_code, how=how)
    made.link.close()
    return made


@pytest.mark.parametrize(
    ("status", "memory", "text", "code", "signal"),
    [
        (None, None, "ended without a word (killed, or its host is gone)", 1, None),
        (3 << 8, None, "ended with exit code 3", 3, None),
        (11, None, "was killed by SIGSEGV", 139, "SIGSEGV"),
        (9, False, "was killed by SIGKILL", 137, "SIGKILL"),
        (9, True, "was killed by SIGKILL by the kernel, which had no memory left", 137, "SIGKILL"),
        (
            9,
            None,
            "was killed by SIGKILL, perhaps by the kernel, which had no memory left for some process",
            *(137, "SIGKILL"),
        ),
        (11, True, "was killed by SIGSEGV", 139, "SIGSEGV"),
        (0, None, "ended with exit code 0", 1, None),
    ],
)
@pytest.mark.parametrize("heard", [True, False])
def test_a_death(
    status: int | None, memory: bool | None, text: str, code: int, signal: str | None, heard: bool
) -> None:
    said = {"updates": 7, "resident": 3 << 20, "phase": "compute"} if heard else {}
    found = causes.death(SEATS[2], member(said) if heard else None, status, memory)
    expected = f"{text} after update 7, with 3.0 MiB of memory when last heard of" if heard else text
    assert found.text == expected
    assert (found.kind, found.exit_code, found.signal) == ("death", code, signal)
    (culprit,) = found.culprits
    assert (culprit.rank, culprit.host, culprit.pid) == (2, "host1", 102)
    assert (culprit.updates, culprit.phase) == ((7, "compute") if heard else (None, None))
    assert found.out_of_memory == (memory if signal == "SIGKILL" else False)


def test_only_ends_that_others_suffer_from_are_faults() -> None:
    roster = Roster(0, SEATS, "token")
    missed = Fault("exception", "rank 1 waits for all", 1, (Culprit(1, "host0", 101),))
    members = {
        0: member({}),
        1: member({}, 0, "came to its end"),
        2: member({"updates": 5}, 3, "called sys.exit(3)"),
        3: member({}, 3, "called sys.exit(3)"),
    }
    (fault,) = causes.exits(members, roster)
    assert (fault.kind, fault.text, fault.exit_code) == ("exit", "called sys.exit(3) while others went on", 3)
    assert [culprit.rank for culprit in fault.culprits] == [2, 3]
    assert [culprit.updates for culprit in fault.culprits] == [5, None]
    both = causes.exits(members, roster, [missed])
    assert [(one.exit_code, [culprit.rank for culprit in one.culprits]) for one in both] == [(1, [1]), (3, [2, 3])]
    assert both[0].text == "came to its end while others went on\nrank 1 waits for all"
    assert causes.exits({0: members[0], 1: members[1]}, roster) == []
