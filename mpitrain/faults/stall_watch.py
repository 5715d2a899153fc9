"""When the hub asks the ranks where they are, and what it tells of a stall (see `stalls`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from mpitrain.faults import stalls
from mpitrain.faults.members import Members
from mpitrain.faults.options import FaultOptions
from mpitrain.faults.report import Fault
from mpitrain.faults.roster import Roster
from mpitrain.faults.stalls import RankState
from mpitrain.runtime.exit_codes import STALLED

ANSWER_SECONDS = 1.5


class StallWatch:
    """Notices that ranks wait for long, and for whom.

    Args:
        members: the ranks that are connected.
        options: how long is long.
        tell: tells faults, and ends the job.

    Attributes:
        question: the number of the latest one.
    """

    def __init__(
        self,
        members: Members,
        roster: Roster,
        options: FaultOptions,
        write: Callable[[str], None],
        tell: Callable[[Sequence[Fault]], None],
    ) -> None:
        self._members, self._roster, self._options, self._write, self._tell = members, roster, options, write, tell
        self.question, self._asked, self._ask_again = 0, -1.0, 0.0
        self._warned: float | None = None
        self._excused = self._noted = float("-inf")

    @property
    def is_asking(self) -> bool:
        """Answers are about to come."""
        return self._asked >= 0

    def look(self, now: float) -> None:
        """Local: ask the ranks where they are, when one has waited for long, and tell what they say."""
        limits = [seconds for seconds in (self._options.stall_warning, self._options.stall_abort) if seconds > 0]
        if not limits:
            return
        longest = max((float(member.said.get("waiting", 0.0)) for member in self._members.values()), default=0.0)
        if self._asked >= 0:
            complete = all(m.answered == self.question for r, m in self._members.items() if self._members.hears(r, now))
            if complete or now - self._asked >= ANSWER_SECONDS:
                self._asked = -1.0
                self._judge(now, longest)
        elif self._warned is not None and longest < min(limits) / 2:
            self._write(f"mpitrain: the stall is over, after {now - self._warned:.0f} s more\n")
            self._warned = None
        elif self._due(now, longest) and now >= self._ask_again:
            self._ask(now)

    def _due(self, now: float, longest: float) -> bool:
        limit = self._options.stall_warning if self._warned is None else self._options.stall_abort
        limit = limit or self._options.stall_abort or self._options.stall_warning
        # A question and its answers take a moment: ask a little before.
        return longest >= max(limit - 1.0, limit * 0.8)

    def _ask(self, now: float) -> None:
        self._asked = now
        self.question += 1
        unheard = self._members.unheard(now)
        for rank in list(self._members):
            look = [
                (seat.rank, seat.process.pid, seat.process.started) for seat in self._roster.neighbours(unheard, rank)
            ]
            self._members.send(rank, {"is": "ask", "question": self.question, "look": look})

    def _judge(self, now: float, longest: float) -> None:
        options = self._options
        states = self._states(now)
        verdict = stalls.judge(states, min(s for s in (options.stall_warning, options.stall_abort) if s > 0) * 0.8)
        self._ask_again = now + max(0.5, min(5.0, verdict.seconds / 10))
        if verdict.kind == "going on":
            return
        if verdict.kind == "patient":
            self._excused = now
            patience = options.stall_abort or options.stall_warning
            if verdict.seconds >= patience and now - self._noted >= patience:
                self._noted = now
                self._write(stalls.note(verdict))
            return
        waited = min(longest, now - self._excused)
        if options.stall_abort and waited >= options.stall_abort - 1.0:
            text = stalls.report(verdict, 0)
            self._tell([Fault("stall", text, STALLED, tuple(s.as_culprit() for s in verdict.late))])
        elif self._warned is None and options.stall_warning and waited >= options.stall_warning * 0.8:
            self._warned = now
            self._write(stalls.report(verdict, max(0.1, options.stall_abort - waited) if options.stall_abort else None))

    def _states(self, now: float) -> list[RankState]:
        """Local: what is known of each rank, from the last answers."""
        seen = {int(r): s for m in self._members.values() for r, s in dict(m.state.get("neighbours") or {}).items()}
        return [
            self._state(seat.rank, seen.get(seat.rank), now) for seat in self._roster.seats if self._counts(seat.rank)
        ]

    def _counts(self, rank: int) -> bool:
        return self._members.why_gone(rank) not in ("finished", "lost")

    def _state(self, rank: int, process_state: str | None, now: float) -> RankState:
        seat, member = self._roster.seats[rank], self._members.get(rank)
        base = RankState(rank, seat.host, seat.process.pid, process_state=process_state)
        if member is None:
            reasons = {"silent": "does not answer", "unreachable": "cannot be reached (a firewall between the hosts?)"}
            return dataclasses.replace(base, silence=reasons.get(self._members.why_gone(rank), "has not been heard of"))
        fresh = member.answered == self.question
        said: dict[str, Any] = member.state if fresh else member.said
        return dataclasses.replace(
            base,
            # One that did not answer this question is heard only while its process runs: T is stopped, Z has ended.
            heard=self._members.hears(rank, now) and (fresh or not process_state or process_state not in "TZ"),
            silence=f"has not answered for {now - member.heard:.0f} s",
            position=int(said.get("position", 0)),
            waiting_seconds=float(said.get("waiting", 0.0)),
            inside=said.get("inside"),
            phase=said.get("phase"),
            updates=said.get("updates"),
            resident_bytes=said.get("resident"),
            stacks=tuple((name, tuple(frames)) for name, frames in said.get("stacks") or ()),
        )
