"""What the hub knows of the ranks that are connected to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mpitrain.faults import report
from mpitrain.faults.report import Fault
from mpitrain.faults.roster import Roster
from mpitrain.faults.wire import Link, Message


@dataclass
class Member:
    """What is known of a rank that is connected.

    Attributes:
        link: to it.
        heard: when it last spoke.
        said: its last heartbeat.
        state: its last answer to `ask`.
        answered: number of that question.
        exit_code: what it ends with; None while it is not at its end.
        how: it came to its end, in words.
        ended: when it said so.
    """

    link: Link
    heard: float
    said: Message = field(default_factory=dict)
    state: Message = field(default_factory=dict)
    answered: int = 0
    exit_code: int | None = None
    how: str = ""
    ended: float = 0.0


def exits(members: Mapping[int, Member], roster: Roster, missed: Sequence[Fault] = ()) -> list[Fault]:
    """Local: what ranks have done to the others by ending: with an exit code, or where these needed all ranks.

    Args:
        members: by rank.
        roster: all ranks.
        missed: what those say that needed all.
    """
    found = []
    for rank, member in members.items():
        if member.exit_code or (missed and member.exit_code is not None):
            culprit = dataclasses.replace(roster.seats[rank].as_culprit(), updates=member.said.get("updates"))
            text = "\n".join([f"{member.how} while others went on", *(fault.text for fault in missed[:1])])
            found.append(Fault("exit", text, member.exit_code or 1, (culprit,)))
    return report.merged(found)
