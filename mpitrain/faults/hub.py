"""The rank that all others report to: it sees who is late or gone, tells it once, and ends the job."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from mpitrain.faults import processes, report, stalls
from mpitrain.faults.activity import Activity
from mpitrain.faults.handshake import sealed
from mpitrain.faults.losses import Losses
from mpitrain.faults.members import Member, exits
from mpitrain.faults.neighbours import Neighbours
from mpitrain.faults.options import STALL_EXIT_CODE, FaultOptions
from mpitrain.faults.report import Fault
from mpitrain.faults.roster import Roster
from mpitrain.faults.same_data import SameData
from mpitrain.faults.stalls import RankState
from mpitrain.faults.wire import Link, Message

GROUP_SECONDS = 0.4  # in which the same failure of other ranks arrives
REDIAL_SECONDS = 3.0  # in which a rank whose connection broke, but which lives, is back
SIGNAL_SECONDS = 0.15  # the same for signals: launchers kill a quarter of a second after they have sent one
QUIET_SECONDS = 3.0
ANSWER_SECONDS = 1.5
TERMINATED_STATUS = 143 << 8  # as of `os.waitpid`, of a rank that got SIGTERM
EXIT_SECONDS = 2.0  # in which the other ranks come to their end, too


class Hub:
    """Collects what the ranks say, and decides.

    All methods are called by the one thread of the watchdog.

    Args:
        roster: all ranks.
        options: what is watched.
        neighbours: the ranks of this host.
        write: prints a text.
        end_job: ends all ranks: exit code, and those that will not end by themselves.
        silence_seconds: after which a rank is not heard any more.
        activity: of this rank.
    """

    def __init__(
        self,
        roster: Roster,
        options: FaultOptions,
        neighbours: Neighbours,
        write: Callable[[str], None],
        end_job: Callable[[int, Sequence[int]], None],
        silence_seconds: float,
        activity: Activity,
    ) -> None:
        self._roster, self._options, self._write, self._end_job = roster, options, write, end_job
        self._neighbours = neighbours
        self._silence_seconds, self._activity = silence_seconds, activity
        self.members: dict[int, Member] = {}
        self.losses = Losses(options)
        self._gone: dict[int, tuple[str, float]] = {}  # why, since; also by what ranks say that had another hub
        self._broken: dict[int, tuple[float, Member]] = {}
        self._faults: list[tuple[float, Fault]] = []
        self._told = False
        self._ending: Message | None = None  # what ranks are told that come when the end is decided
        self._quiet_until = self._left_until = 0.0
        self._now = 0.0
        self._question, self._asked, self._ask_again = 0, -1.0, 0.0
        self._warned: float | None = None
        self._excused = self._noted = float("-inf")
        self._same_data = SameData(len(roster.seats))

    @property
    def is_busy(self) -> bool:
        """Something is to be told in a moment."""
        return bool(self._faults or self._broken or self._asked >= 0)

    # What ranks say.

    def welcome(self, link: Link, hello: Message, now: float) -> int:
        """Local: let a rank in, which knows the job's token.

        Returns:
            Its number.

        Raises:
            ConnectionError: it is none of this job.
        """
        rank, own = hello.get("rank"), self._roster.own
        if not isinstance(rank, int) or not 0 <= rank < len(self._roster.seats) or hello.get("to") != own:
            raise ConnectionError("for another rank")
        link.send_line(sealed({"is": "welcome", "rank": own}, self._roster.token, str(hello.get("nonce")).encode()))
        self.members[rank] = Member(link, now)
        self._broken.pop(rank, None)
        self._gone.pop(rank, None)
        if self._ending is not None:
            link.send(self._ending)
        for other, why in dict(hello.get("left") or {}).items():
            if int(other) not in self.members:
                self._gone.setdefault(int(other), (str(why), now))
        return rank

    def hear(self, rank: int, message: Message, now: float) -> None:
        """Local: one message of a rank.

        Raises:
            ConnectionError: it cannot be answered.
        """
        member, kind = self.members[rank], message["is"]
        member.heard = now
        if kind == "beat":
            member.said = message
            member.link.send(self.losses.answer)
        elif kind == "state":
            member.state, member.answered = message, int(message["question"])
        elif kind == "fault":
            self._faults.append((now, report.from_dict(message["fault"])))
        elif kind == "ending":
            member.exit_code, member.how, member.ended = int(message["code"]), str(message["how"]), now
        elif kind == "missed":
            member.ended = float("-inf")
        elif kind == "data":
            self._hear_data(rank, message)
        elif kind == "ended":
            self._neighbours.ended.setdefault(int(message["rank"]), (int(message["status"]), message["memory"]))
        elif kind in ("bye", "moved"):
            self.members.pop(rank, None)
            if kind == "bye":
                self._gone[rank] = ("finished", now)
            else:  # it comes back within that time, if it can
                self._left_until = now + 2 * self._silence_seconds

    def closed(self, rank: int, link: Link, now: float) -> None:
        """Local: a connection is gone."""
        self._neighbours.look(rank, ending=True)
        member = self.members.get(rank)
        if member is not None and member.link is link:
            self._broken[rank] = (now, self.members.pop(rank))

    def leaving(self, now: float) -> None:
        """Local: this rank is being ended; if another one ended before, that is why.

        The launcher may know of it before the connection is closed.
        """
        self._now = now
        if now >= self._quiet_until and not self._is_quiet:
            self._look_for_causes()

    def paused(self, now: float) -> None:
        """Local: this process was stopped; meanwhile another rank may have told what happened, and ended the job."""
        self._quiet_until = now + QUIET_SECONDS

    def fall_silent(self) -> None:
        """Local: another rank has told why the job ends; what follows is the consequence."""
        self._told = True

    # What is decided.

    def tick(self, now: float) -> None:
        """Local: called about twice a second, and after each message."""
        self._now = now
        if not self.members and not self._broken:
            return
        self._look_for_deaths(now)
        self._tell_faults(now)
        self._look_for_exits(now)
        self._look_for_stalls(now)

    def _hear_data(self, rank: int, message: Message) -> None:
        self._same_data.add(rank, message["batches"], message["gradients"])
        text = self._same_data.verdict()
        if text and self._options.same_data == "warn":
            self._write(text)

    @property
    def _is_quiet(self) -> bool:
        """The others have gone to another rank, since this one was stopped or slow: that one tells what happens."""
        until = max(self._quiet_until, self._left_until)
        return self._now < until and not self.members.keys() - {self._roster.own}

    def _look_for_causes(self) -> None:
        """Local: if this process or another was sent a signal, that is since a rank has ended, where one has."""
        for seat in self._roster.seats:
            self._neighbours.look(seat.rank)
        self._look_for_deaths(self._now, at_once=True)

    def _look_for_deaths(self, now: float, at_once: bool = False) -> None:
        if self._is_quiet:
            return
        neighbours = self._neighbours
        ended: dict[int, float] = {}  # since when
        for rank, (since, _) in list(self._broken.items()):
            here, over = neighbours.is_here(rank), now - since >= REDIAL_SECONDS
            if neighbours.look(rank) or neighbours.is_gone(rank) or ((over or at_once) and not here):
                ended[rank] = since
            elif over:
                del self._broken[rank]  # it lives, but has lost its way to this rank
        for rank, (why, since) in self._gone.items():
            if why == "closed" and (neighbours.look(rank) or at_once or now - since >= GROUP_SECONDS):
                ended[rank] = since
        ended.update({rank: now for rank in neighbours.ended if rank in self.members or at_once})
        ended.update(self.losses.untold(self._roster.own, {*self.members, *self._broken, *self._gone}, now))
        spoken = {culprit.rank for _, fault in self._faults for culprit in fault.culprits}
        if at_once:  # what has ended because of such a signal is no cause of it
            spoken |= {rank for rank, (status, _) in neighbours.ended.items() if status == TERMINATED_STATUS}
        ended = {rank: since for rank, since in ended.items() if rank not in spoken and rank != self._roster.own}
        if ended:
            self._tell_deaths(ended)

    def _tell_deaths(self, ended: dict[int, float]) -> None:
        """Local: tell the first of those that have ended; MPI may have ended the others because of it."""
        last = max(ended.values())
        elsewhere = [rank for rank in self._broken if not self._neighbours.is_here(rank)]
        ended.update({rank: self._broken[rank][0] for rank in elsewhere if self._broken[rank][0] <= last})
        for rank in sorted(ended, key=lambda rank: (ended[rank], rank)):
            _, member = self._broken.pop(rank, (0.0, None))
            member = self.members.pop(rank, member)
            if self._gone.get(rank, ("", 0.0))[0] in ("finished", "ended", "lost"):
                continue
            self._gone[rank] = ("ended", self._now)
            fault = self._death(rank, member)
            if not self._told and self.losses.survives(rank, self._neighbours.ended.get(rank, (None, False))[0]):
                self._gone[rank] = ("lost", self._now)
                self.losses.tell(fault, self._now, self._write, self.tell_all)
            else:
                self._tell([fault])

    def _death(self, rank: int, member: Member | None) -> Fault:
        status, memory = self._neighbours.ended.get(rank, (None, False))
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
            self._roster.seats[rank].as_culprit(),
            updates=said.get("updates"),
            phase=said.get("phase"),
            resident_bytes=resident,
        )
        return Fault("death", how, code or 1, (culprit,), name, memory)

    def _tell_faults(self, now: float) -> None:
        if not self._faults:
            return
        found = [fault for _, fault in self._faults]
        missed = [fault for fault in found if fault.is_about_the_ended]
        causes = self._exits(missed)
        patience = SIGNAL_SECONDS if all(fault.kind == "signal" for fault in found) else GROUP_SECONDS
        if len(missed) == len(found) and not causes:
            patience = EXIT_SECONDS  # in which those that have ended say so here, too
        if now - self._faults[0][0] < patience:
            return
        if patience == SIGNAL_SECONDS:
            self._look_for_causes()
        self._faults = []
        if patience > SIGNAL_SECONDS or not self._is_quiet:
            self._tell([*causes, *report.merged([fault for fault in found if not (causes and fault in missed)])])

    def _tell(self, faults: Sequence[Fault]) -> None:
        """Local: tell the first cause, or several of the same moment; what comes after is their consequence."""
        silent = [seat.rank for seat in self._roster.seats if not self._hears(seat.rank)]
        if not self._told:
            self._told = True
            for fault in faults:
                self._write(report.message(fault))
                report.record(fault, self._options.failure_report, self._activity)
            self._ending = {"is": "abort", "code": faults[0].exit_code, "silent": silent}
            self.tell_all(self._ending)
            self._end_job(faults[0].exit_code, silent)
        for fault in faults:
            for culprit in fault.culprits:
                self._send(culprit.rank, {"is": "told"})

    def _look_for_exits(self, now: float) -> None:
        """Local: a rank that ends with an exit code ends the job, unless all the others are at their end, too."""
        if any(member.exit_code is None for member in self.members.values()):
            due = [m for m in self.members.values() if m.exit_code and now - m.ended >= EXIT_SECONDS]
            if due:
                self._tell(self._exits())

    def _exits(self, missed: Sequence[Fault] = ()) -> list[Fault]:
        return exits(self.members, self._roster, missed)

    # Stalls.

    def _look_for_stalls(self, now: float) -> None:
        limits = [seconds for seconds in (self._options.stall_warning, self._options.stall_abort) if seconds > 0]
        if not limits or self._told or self._is_quiet:
            return
        longest = max((float(member.said.get("waiting", 0.0)) for member in self.members.values()), default=0.0)
        if self._asked >= 0:
            complete = all(m.answered == self._question for r, m in self.members.items() if self._hears(r))
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
        self._question += 1
        unheard = [seat.rank for seat in self._roster.seats if not self._hears(seat.rank)]
        for rank in list(self.members):
            look = [
                (seat.rank, seat.process.pid, seat.process.started) for seat in self._roster.neighbours(unheard, rank)
            ]
            self._send(rank, {"is": "ask", "question": self._question, "look": look})

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
            self._tell([Fault("stall", text, STALL_EXIT_CODE, tuple(s.as_culprit() for s in verdict.late))])
        elif self._warned is None and options.stall_warning and waited >= options.stall_warning * 0.8:
            self._warned = now
            self._write(stalls.report(verdict, max(0.1, options.stall_abort - waited) if options.stall_abort else None))

    def _states(self, now: float) -> list[RankState]:
        """Local: what is known of each rank, from the last answers."""
        seen = {int(r): s for m in self.members.values() for r, s in dict(m.state.get("neighbours") or {}).items()}
        return [
            self._state(seat.rank, seen.get(seat.rank), now) for seat in self._roster.seats if self._counts(seat.rank)
        ]

    def _counts(self, rank: int) -> bool:
        return self._gone.get(rank, ("", 0.0))[0] not in ("finished", "lost")

    def _state(self, rank: int, process_state: str | None, now: float) -> RankState:
        seat, member = self._roster.seats[rank], self.members.get(rank)
        base = RankState(rank, seat.host, seat.process.pid, process_state=process_state)
        if member is None:
            reasons = {"silent": "does not answer", "unreachable": "cannot be reached (a firewall between the hosts?)"}
            return dataclasses.replace(
                base, silence=reasons.get(self._gone.get(rank, ("", 0.0))[0], "has not been heard of")
            )
        fresh = member.answered == self._question
        said: dict[str, Any] = member.state if fresh else member.said
        return dataclasses.replace(
            base,
            heard=self._hears(rank) and (fresh or not process_state or process_state not in "TZ"),
            silence=f"has not answered for {now - member.heard:.0f} s",
            position=int(said.get("position", 0)),
            waiting_seconds=float(said.get("waiting", 0.0)),
            inside=said.get("inside"),
            phase=said.get("phase"),
            updates=said.get("updates"),
            resident_bytes=said.get("resident"),
            stacks=tuple((name, tuple(frames)) for name, frames in said.get("stacks") or ()),
        )

    def _hears(self, rank: int) -> bool:
        member = self.members.get(rank)
        return member is not None and self._now - member.heard <= self._silence_seconds

    def _send(self, rank: int, message: Message) -> None:
        member = self.members.get(rank)
        if member is not None:
            try:
                member.link.send(message)
            except ConnectionError:
                return  # its end is noticed where it is read

    def tell_all(self, message: Message) -> None:
        """Local: say something to every rank."""
        for rank in list(self.members):
            self._send(rank, message)
