"""Who waits for whom. Pure: what the ranks said goes in, a verdict and its words come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mpitrain.faults.activity import PATIENT_PHASES
from mpitrain.faults.processes import STATES, bytes_text
from mpitrain.faults.report import Culprit
from mpitrain.runtime.counted import counted
from mpitrain.runtime.exit_codes import STALLED

Kind = Literal["going on", "patient", "stall", "network"]
FEW = 4  # ranks of one kind that are told one by one


@dataclass(frozen=True)
class RankState:
    """What is known of one rank."""

    rank: int  # its number
    host: str  # its host
    pid: int  # its process there
    heard: bool = False  # it answers. Else what it said last stands here, or nothing
    silence: str = ""  # why it does not answer, in words
    position: int = 0  # collectives entered
    waiting_seconds: float = 0.0  # for how long it has been inside one, without anything happening; 0 outside
    inside: str | None = None  # the collective it is in
    phase: str | None = None  # where in the program it is
    updates: int | None = None  # gradient updates finished
    resident_bytes: int | None = None  # its memory
    stacks: tuple[tuple[str, tuple[str, ...]], ...] = ()  # of its Python threads, as lines
    process_state: str | None = None  # letter of the operating system

    @property
    def place(self) -> str:
        """Such as `rank 2 (hosta)`."""
        return f"rank {self.rank} ({self.host})"

    def as_culprit(self) -> Culprit:
        """For the record of the fault."""
        return Culprit(self.rank, self.host, self.pid, self.updates, self.phase, self.resident_bytes)


@dataclass(frozen=True)
class Verdict:
    """Why ranks wait."""

    # `going on`: nobody waits for that long. `patient`: for ranks in a phase that may be long. `stall`: for ranks that
    # should have come. `network`: all have come, and nothing happens
    kind: Kind
    waiting: tuple[RankState, ...] = ()  # those that wait
    late: tuple[RankState, ...] = ()  # those that have not come
    seconds: float = 0.0  # the longest wait


def judge(states: Sequence[RankState], patience_seconds: float) -> Verdict:
    """Local: who has not come, if anybody waits longer than `patience_seconds`."""
    waiting = tuple(s for s in states if s.heard and s.inside is not None and s.waiting_seconds > 0)
    seconds = max((s.waiting_seconds for s in waiting), default=0.0)
    if seconds < patience_seconds:
        return Verdict("going on")
    here = max(s.position for s in waiting)
    # All ranks enter the same collectives in the same order: fewer means not yet here.
    late = tuple(s for s in states if not s.heard or s.position < here)
    waiting = tuple(s for s in waiting if s not in late)
    if not late:
        return Verdict("network", waiting, (), seconds)
    # Who has come to the end of its program waits as long as the others work.
    at_end = all(s.phase == "end" for s in waiting)
    patient = all(s.heard and s.inside is None and (at_end or s.phase in PATIENT_PHASES) for s in late)
    return Verdict("patient" if patient else "stall", waiting, late, seconds)


def report(verdict: Verdict, remaining_seconds: float | None) -> str:
    """Local: who waits where, and who has not come.

    `remaining_seconds`: until the job ends; None if it will not, 0 if it does now.
    """
    lines = [_headline(verdict)]
    for what, ranks in _by(verdict.waiting).items():
        lines.append(f"  waiting    {_names(ranks)} in {what}")
    for state in verdict.late:
        lines += _late(state)
    if remaining_seconds is None:
        end = "The job goes on waiting."
    elif remaining_seconds > 0:
        end = f"If this lasts, the job ends in {remaining_seconds:.0f} s."
    else:
        end = f"The job ends with exit code {STALLED} (to wait longer: --stall-abort SECONDS, or MPITRAIN_STALL_ABORT)."
    return "\n".join([*lines, f"  {end}", ""])


def note(verdict: Verdict) -> str:
    """Local: one line about ranks that are waited for with good reason."""
    late = ", ".join(f"{state.place} is in phase '{state.phase}'" for state in verdict.late[:FEW])
    more = f" and {len(verdict.late) - FEW} more" if len(verdict.late) > FEW else ""
    return f"mpitrain: {_names(verdict.waiting)} waited {verdict.seconds:.0f} s: {late}{more}, which may take long\n"


def _headline(verdict: Verdict) -> str:
    count = counted(len(verdict.waiting), "rank")
    if verdict.kind == "network":
        return (
            f"mpitrain: stall: all ranks have come to an exchange, which has not ended for {verdict.seconds:.0f} s: "
            "the network between them, or the MPI library, does not deliver"
        )
    return f"mpitrain: stall: {count} waited {verdict.seconds:.0f} s for {_names(verdict.late)}"


def _by(waiting: Sequence[RankState]) -> dict[str, list[RankState]]:
    groups: dict[str, list[RankState]] = {}
    for state in waiting:
        step = f", after update {state.updates}" if state.updates is not None else ""
        groups.setdefault(f"{state.inside}{step}", []).append(state)
    return groups


def _names(ranks: Sequence[RankState]) -> str:
    shown = ", ".join(state.place for state in ranks[:FEW])
    return shown if len(ranks) <= FEW else f"{shown} and {len(ranks) - FEW} more"


def _late(state: RankState) -> list[str]:
    facts = []
    if not state.heard:
        facts.append(state.silence)
        if state.process_state:
            facts.append(f"process {state.pid} is {STATES.get(state.process_state, state.process_state)}")
    if state.inside is not None:
        facts.append(f"still in {state.inside}")
    if state.phase is not None:
        facts.append(f"{'' if state.heard else 'when last heard of: '}phase {state.phase}")
    if state.updates is not None:
        facts.append(f"last update finished {state.updates}")
    if state.resident_bytes is not None:
        facts.append(f"memory {bytes_text(state.resident_bytes)}")
    lines = [f"  not there  {state.place}: {', '.join(facts)}"]
    for thread, frames in state.stacks:
        lines += [f"    {thread}:", *(f"      {frame}" for frame in frames)]
    return lines
