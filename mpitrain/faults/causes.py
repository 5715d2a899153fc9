"""What the hub makes of the end of a rank: the fault that is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from mpitrain.faults import processes, report
from mpitrain.faults.members import Member
from mpitrain.faults.report import Fault
from mpitrain.faults.roster import Roster, Seat


def death(seat: Seat, member: Member | None, status: int | None, memory: bool | None) -> Fault:
    """Local: the end of a rank that could not say anything itself.

    `status` is that of its process, as of `os.waitpid`, where it is known; `memory` says that the kernel has ended it
    for want of memory, if that is known.
    """
    said = member.said if member is not None else {}
    how, code, name = "ended without a word (killed, or its host is gone)", 1, None
    if status is not None:
        how, code, name = processes.how_it_ended(status)
    memory = memory if name == "SIGKILL" else False
    if memory is not False:
        how += f"{'' if memory else ', perhaps'} by the kernel, which had no memory left"
        how += "" if memory else " for some process"
    if said.get("updates"):
        how += f" after update {said['updates']}"
    resident = said.get("resident")
    if resident is not None:
        how += f", with {processes.bytes_text(resident)} of memory when last heard of"
    culprit = dataclasses.replace(
        seat.as_culprit(), updates=said.get("updates"), phase=said.get("phase"), resident_bytes=resident
    )
    return Fault("death", how, code or 1, (culprit,), name, memory)


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
