"""Faults as records: the words for people, and a line of JSON for a supervisor."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mpitrain.errors import RankFinishedError
from mpitrain.faults.activity import Activity
from mpitrain.faults.summary import FaultSummary
from mpitrain.runtime.marks import tell

Kind = Literal["exception", "interrupted", "signal", "exit", "death", "loss", "stall"]


@dataclass(frozen=True)
class Culprit:
    """One rank that a fault is about."""

    rank: int  # its number
    host: str  # its host
    pid: int  # its process there
    updates: int | None = None  # gradient updates it had finished
    phase: str | None = None  # where in the program it was; None if not known
    resident_bytes: int | None = None  # its memory when it was last heard of


@dataclass(frozen=True)
class Fault:
    """What ends a job."""

    kind: Kind  # what happened
    text: str  # for people; for an exception its traceback
    exit_code: int  # of the job
    culprits: tuple[Culprit, ...] = field(default=())  # the ranks that it happened on
    signal: str | None = None  # name of the signal that a process got, if one did
    # the kernel killed it for want of memory; None where it killed some process, perhaps this one
    out_of_memory: bool | None = False
    step: int | None = None  # that were finished; see `Activity.progress`

    @property
    def reason(self) -> str:
        """The same for two faults of the same cause."""
        if self.kind == "death":
            memory = " by the kernel, which had no memory left" * bool(self.out_of_memory)
            return f"was killed by {self.signal}{memory}" if self.signal else f"ended with exit code {self.exit_code}"
        if self.kind == "stall":
            return "did not come to where the others waited"
        if self.kind == "exit":
            return self.text.partition("\n")[0]
        return self.last_line or self.kind

    @property
    def is_about_the_ended(self) -> bool:
        """It tells that other ranks have ended, which is the cause."""
        return self.text.startswith(RankFinishedError.__name__)

    @property
    def last_line(self) -> str:
        """What makes two exceptions the same: the error, not the way there."""
        lines = [line for line in self.text.rstrip().split("\n") if line.strip()[:1] not in ("", "[")]
        return lines[-1] if lines else ""


def places(culprits: Sequence[Culprit]) -> str:
    """Local: such as `rank 1 on hosta`, or `ranks 1, 2 on hosta, hostb`."""
    ranks = sorted({culprit.rank for culprit in culprits})
    hosts = list(dict.fromkeys(culprit.host for culprit in sorted(culprits, key=lambda one: one.rank)))
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} on {', '.join(hosts)}"


def merged(faults: Sequence[Fault]) -> list[Fault]:
    """Local: the same fault on several ranks becomes one, in the order of the first of each."""
    groups: dict[tuple[str, str], list[Fault]] = {}
    for fault in faults:
        groups.setdefault((fault.kind, fault.reason), []).append(fault)
    return [
        dataclasses.replace(group[0], culprits=tuple(culprit for fault in group for culprit in fault.culprits))
        for group in groups.values()
    ]


def message(fault: Fault) -> str:
    """Local: what is printed about it, with a newline at the end."""
    where = places(fault.culprits) if fault.culprits else "a rank"
    if fault.kind in ("exception", "interrupted"):
        return f"mpitrain: {where} failed; the job ends\n{fault.text.rstrip()}\n"
    if fault.kind == "stall":
        return f"{fault.text.rstrip()}\n"
    if fault.kind == "loss":
        return f"mpitrain: {where} {fault.text.rstrip()}; the others go on without it\n"
    what, newline, more = fault.text.rstrip().partition("\n")
    return f"mpitrain: {where} {what}; the job ends with exit code {fault.exit_code}\n{more}{newline}"


def as_json(fault: Fault) -> str:
    """Local: one line, without the newline."""
    record: dict[str, Any] = {"time": time.time(), **dataclasses.asdict(fault)}
    return json.dumps(record)


def record(fault: Fault, path: str | None, activity: Activity) -> None:
    """Local: let `mpitrain run` know of a fault, and add it to a file.

    Args:
        fault: what ends the job.
        path: of the file; None for none.
        activity: of this rank, which stands where the others do, as far as these tell nothing better.
    """
    if fault.step is None:
        fault = dataclasses.replace(fault, step=activity.progress)
    if path:
        write(path, fault)
    place = places(fault.culprits) if fault.culprits else "a rank"
    tell("fault", detail=FaultSummary(fault.kind, fault.step or 0, fault.exit_code, place, fault.reason).detail)


def write(path: str, fault: Fault) -> None:
    """Local: add the fault to a file that only its owner can read; a file that cannot be written is no second fault."""
    try:
        # Appended: several ranks, and several jobs, may add to it.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "a") as file:
            file.write(as_json(fault) + "\n")
    except OSError:
        return


def from_dict(record: dict[str, Any]) -> Fault:
    """Local: what `dataclasses.asdict` made."""
    culprits = tuple(Culprit(**culprit) for culprit in record.get("culprits", ()))
    return Fault(**{**record, "culprits": culprits})
