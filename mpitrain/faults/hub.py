"""The rank that all others report to: it sees who is late or gone, tells it once, and ends the job."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpitrain.faults import report
from mpitrain.faults.activity import Activity
from mpitrain.faults.causes import death, exits
from mpitrain.faults.handshake import sealed
from mpitrain.faults.losses import ShrinkRecord
from mpitrain.faults.members import Member, Members
from mpitrain.faults.neighbours import Neighbours
from mpitrain.faults.options import FaultOptions
from mpitrain.faults.report import Fault
from mpitrain.faults.roster import Roster
from mpitrain.faults.same_data import SameData
from mpitrain.faults.stall_watch import StallWatch
from mpitrain.faults.wire import Link, Message
from mpitrain.runtime.exit_codes import STALLED, TERMINATED

GROUP_SECONDS = 0.4  # in which the same failure of other ranks arrives
REDIAL_SECONDS = 3.0  # in which a rank whose connection broke, but which lives, is back
SIGNAL_SECONDS = 0.15  # the same for signals: launchers kill a quarter of a second after they have sent one
QUIET_SECONDS = 3.0
TERMINATED_STATUS = TERMINATED << 8  # as of `os.waitpid`, of a rank that got SIGTERM
STALLED_STATUS = STALLED << 8  # the same of one that ended since another waited too long
EXIT_SECONDS = 2.0  # in which the other ranks come to their end, too


class Hub:
    """Collects what the ranks say, and decides.

    All methods are called by the one thread of the watchdog.

    Args:
        neighbours: the ranks of this host.
        end_job: ends all ranks: exit code, and those that will not end by themselves.
        silence_seconds: after which a rank is not heard any more.
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
        self.members = Members(roster, silence_seconds)
        self.shrink = ShrinkRecord(options)
        self._faults: list[tuple[float, Fault]] = []
        self._told = False
        self._ending: Message | None = None  # what ranks are told that come when the end is decided
        self._quiet_until = self._left_until = 0.0
        self._now = 0.0
        self.stalls = StallWatch(self.members, roster, options, write, self._tell)
        self._same_data = SameData(len(roster.seats))

    @property
    def is_busy(self) -> bool:
        """Something is to be told in a moment."""
        return bool(self._faults or self.members.broken or self.stalls.is_asking)

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
        self.members.broken.pop(rank, None)
        self.members.gone.pop(rank, None)
        # It has come too late to have heard how the job ends.
        if self._ending is not None:
            link.send(self._ending)
        for other, why in dict(hello.get("left") or {}).items():
            if int(other) not in self.members:
                self.members.gone.setdefault(int(other), (str(why), now))
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
            member.link.send(self.shrink.answer)
        elif kind == "state":
            member.state, member.answered = message, int(message["question"])
        elif kind == "fault":
            self._faults.append((now, report.from_dict(message["fault"])))
        elif kind == "ending":
            member.exit_code, member.how, member.ended = int(message["code"]), str(message["how"]), now
        elif kind == "missed":
            # Nobody waits for the others to come to their end: they need this rank.
            member.ended = float("-inf")
        elif kind == "data":
            self._hear_data(rank, message)
        elif kind == "ended":
            self._neighbours.ended.setdefault(int(message["rank"]), (int(message["status"]), message["memory"]))
        elif kind in ("bye", "moved"):
            self.members.pop(rank, None)
            if kind == "bye":
                self.members.gone[rank] = ("finished", now)
            else:  # it comes back within that time, if it can
                self._left_until = now + 2 * self._silence_seconds

    def closed(self, rank: int, link: Link, now: float) -> None:
        """Local: a connection is gone."""
        self._neighbours.look(rank, ending=True)
        member = self.members.get(rank)
        if member is not None and member.link is link:
            self.members.broken[rank] = (now, self.members.pop(rank))

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
        if not self.members and not self.members.broken:
            return
        self._look_for_deaths(now)
        self._tell_faults(now)
        self._look_for_exits(now)
        if not self._told and not self._is_quiet:
            self.stalls.look(now)

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
        for rank, (since, _) in list(self.members.broken.items()):
            here, over = neighbours.is_here(rank), now - since >= REDIAL_SECONDS
            if neighbours.look(rank) or neighbours.is_gone(rank) or ((over or at_once) and not here):
                ended[rank] = since
            elif over:
                del self.members.broken[rank]  # it lives, but has lost its way to this rank
        for rank, (why, since) in self.members.gone.items():
            if why == "closed" and (neighbours.look(rank) or at_once or now - since >= GROUP_SECONDS):
                ended[rank] = since
        ended.update({rank: now for rank in neighbours.ended if rank in self.members or at_once})
        ended.update(
            self.shrink.untold(self._roster.own, {*self.members, *self.members.broken, *self.members.gone}, now)
        )
        spoken = {culprit.rank for _, fault in self._faults for culprit in fault.culprits}
        if at_once:  # what has ended because of such a signal is no cause of it
            spoken |= {rank for rank, (status, _) in neighbours.ended.items() if status == TERMINATED_STATUS}
        ended = {rank: since for rank, since in ended.items() if rank not in spoken and rank != self._roster.own}
        if ended:
            self._tell_deaths(ended)

    def _tell_deaths(self, ended: dict[int, float]) -> None:
        """Local: tell the first of those that have ended; MPI may have ended the others because of it."""
        last = max(ended.values())
        elsewhere = [rank for rank in self.members.broken if not self._neighbours.is_here(rank)]
        ended.update({rank: self.members.broken[rank][0] for rank in elsewhere if self.members.broken[rank][0] <= last})
        for rank in sorted(ended, key=lambda rank: (ended[rank], rank)):
            _, member = self.members.broken.pop(rank, (0.0, None))
            member = self.members.pop(rank, member)
            if self.members.why_gone(rank) in ("finished", "ended", "lost"):
                continue
            self.members.gone[rank] = ("ended", self._now)
            if self._now < self._quiet_until and self._neighbours.ended.get(rank, (0, False))[0] == STALLED_STATUS:
                self.fall_silent()  # while this process was stopped, another rank told of it, and ended the job
                continue
            fault = death(self._roster.seats[rank], member, *self._neighbours.ended.get(rank, (None, False)))
            if not self._told and self.shrink.is_allowed(rank, self._neighbours.ended.get(rank, (None, False))[0]):
                self.members.gone[rank] = ("lost", self._now)
                self.shrink.tell(fault, self._now, self._write, self.members.send_all)
            else:
                self._tell([fault])

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
        silent = self.members.unheard(self._now)
        if not self._told:
            self._told = True
            for fault in faults:
                self._write(report.message(fault))
                report.record(fault, self._options.failure_report, self._activity)
            self._ending = {"is": "abort", "code": faults[0].exit_code, "silent": silent}
            self.members.send_all(self._ending)
            self._end_job(faults[0].exit_code, silent)
        for fault in faults:
            for culprit in fault.culprits:
                self.members.send(culprit.rank, {"is": "told"})

    def _look_for_exits(self, now: float) -> None:
        """Local: a rank that ends with an exit code ends the job, unless all the others are at their end, too."""
        if any(member.exit_code is None for member in self.members.values()):
            due = [m for m in self.members.values() if m.exit_code and now - m.ended >= EXIT_SECONDS]
            if due:
                self._tell(self._exits())

    def _exits(self, missed: Sequence[Fault] = ()) -> list[Fault]:
        return exits(self.members, self._roster, missed)
