"""One thread a rank that talks to the other ranks beside MPI, while the main thread computes or waits inside MPI.

Each rank keeps a connection to one rank, the hub: rank 0, or the next one where that does not answer. It sends
a heartbeat, what the hub asks for, and its last words. The hub decides (see `hub`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence

from mpitrain.faults.acceptor import Acceptor
from mpitrain.faults.activity import Activity
from mpitrain.faults.heartbeat import Heartbeat
from mpitrain.faults.hub import Hub
from mpitrain.faults.hub_link import HubLink, close
from mpitrain.faults.job_end import ENDED_SECONDS, JobEnd
from mpitrain.faults.neighbours import Neighbours
from mpitrain.faults.options import FaultOptions
from mpitrain.faults.report import Fault
from mpitrain.faults.roster import Roster
from mpitrain.faults.wire import Link, Message
from mpitrain.runtime.marks import tell
from mpitrain.runtime.signals import SignalSocket

BEAT_SECONDS = 0.5
RANKS_PER_BEAT = 200  # of a larger job each rank speaks less often, so that the hub has no more to do
SILENCE_SECONDS = 10.0
SOON_SECONDS = 0.05  # between looks while the hub waits a moment for what else is said
LEFT_SECONDS = 0.4  # in which the hub tells why ranks are being ended; Open MPI kills a second after SIGTERM
PAUSE_SECONDS = 2.0  # a longer step of the clock means that this process was stopped


class Watchdog:
    """The thread of this rank, and what the program tells it.

    Args:
        listeners: where this rank listens.
        abort: ends all ranks with an exit code; may block.
    """

    def __init__(
        self,
        activity: Activity,
        roster: Roster,
        listeners: Sequence[socket.socket],
        options: FaultOptions,
        abort: Callable[[int], None],
        write: Callable[[str], None],
    ) -> None:
        self.roster, self.activity = roster, activity
        limits = [s for s in (options.stall_warning, options.stall_abort) if s > 0]
        # Well within the limits: who is silent is known before a stall is told of.
        silence_seconds = max(2.0, min(SILENCE_SECONDS, min(limits, default=SILENCE_SECONDS) / 3))
        self._beat_seconds = max(BEAT_SECONDS, len(roster.seats) / RANKS_PER_BEAT)
        self._neighbours = Neighbours(roster)
        self._heartbeat, self._end = Heartbeat(activity, self._beat_seconds), JobEnd(roster, abort)
        self._hub = Hub(roster, options, self._neighbours, write, self._end.end_job, silence_seconds, activity)
        self._posts: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # what the thread is to do
        self.waker = SignalSocket()
        self.waker.reading.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(listeners, roster.token, len(roster.seats), self._selector, self._admit)
        self._selector.register(self.waker.reading, selectors.EVENT_READ, self._take_posts)
        for rank, descriptor in self._neighbours.descriptors.items():
            self._selector.register(descriptor, selectors.EVENT_READ, functools.partial(self._look, rank))
        self._link = HubLink(
            roster,
            self._selector,
            silence_seconds,
            lambda: self._now,
            self._hear_hub,
            lambda found: self._post(lambda: self._link.link(found)),
            self._greet,
        )
        self._stopping = False
        self._left: float | None = None  # since when it is left to another rank to tell why this one is being ended
        self._progress = 0
        self._now = self._clock = self._beaten = 0.0
        self._told = threading.Event()
        self.on_signal: Callable[[int], None] = lambda number: None
        self._thread = threading.Thread(target=self._run, name="mpitrain watchdog", daemon=True)

    # Called by the program, on other threads.

    def start(self) -> None:
        """Local: start watching."""
        os.register_at_fork(after_in_child=self._close_all)
        self._clock = time.monotonic()
        self._thread.start()

    def _post(self, act: Callable[[], None]) -> None:
        """Local: have the thread do something."""
        self._posts.put(act)
        self.waker.send(b"\0")

    def _say(self, message: Message) -> None:
        """Local: have it said to the hub, and to any later one."""
        self._post(lambda: self._link.say(message, keep=True))

    def report(self, fault: Fault, timeout_seconds: float = 3.0) -> bool:
        """Local: let the hub tell a fault of this rank, once for all ranks that have it.

        Returns:
            Whether it was told.
        """
        self._told.clear()
        self._say({"is": "fault", "fault": dataclasses.asdict(fault)})
        return self.is_alive and self._told.wait(timeout_seconds)

    @property
    def is_alive(self) -> bool:
        """Somebody is missed if this rank ends now."""
        return self._thread.is_alive()

    def ending(self, code: int, how: str) -> None:
        """Local: this rank has come to the end of its program, with that exit code."""
        self._say({"is": "ending", "code": code, "how": how})

    def missed(self) -> None:
        """Local: this rank has ended with an exit code, but others need it. They do not go on while they hear so."""
        self._say({"is": "missed"})
        time.sleep(ENDED_SECONDS)

    def note_shrink(self, ranks: Sequence[int]) -> None:
        """Local: these ranks were lost, and the others have gone on."""

        def note() -> None:
            self._hub.shrink.note(ranks, self._now)
            self._link.look_again()

        self._post(note)

    def require(self, ranks: Sequence[int]) -> None:
        """Local: the job cannot go on without one of these ranks."""
        self._post(lambda: self._hub.shrink.require(ranks))

    def stop(self) -> None:
        """Local: all ranks are at their end: nobody is missed from now on."""
        self._post(self._say_goodbye)
        self._thread.join(2.0)

    def leaving(self) -> None:
        """Local, on the watchdog's thread: this process is being ended from outside.

        All ranks are, and each knows of a neighbour that ended before: one of them tells it.
        """
        for seat in self.roster.seats:
            self._neighbours.look(seat.rank)
        self._say_ended()
        self._left = self._now
        self._tell_why_ended()

    def _tell_why_ended(self) -> None:
        if self._left is not None and not (self._others_tell() and self._now - self._left < LEFT_SECONDS):
            self._left = None
            self._hub.leaving(self._now)

    def _others_tell(self) -> bool:
        """Local: the hub lives, or where none is found yet a rank of this host that comes before this one."""
        here = self.roster.neighbours(self.roster.candidates(self._hub.shrink.lost), self.roster.own)
        ranks = [seat.rank for seat in here] if self._link.rank is None else [self._link.rank]
        others = [rank for rank in ranks if rank != self.roster.own]
        return any(not (self._neighbours.look(rank) or self._neighbours.is_gone(rank)) for rank in others)

    # The thread.

    def _run(self) -> None:
        while not self._stopping:
            self._tick()
            is_soon = self._hub.is_busy or self._left is not None
            ready = self._selector.select(SOON_SECONDS if is_soon else self._beat_seconds)
            self._advance()
            for key, _ in ready:
                key.data()
        self._close_all()

    def _advance(self) -> None:
        """Local: move the clock. Time in which this process was stopped is nobody's delay."""
        moment = time.monotonic()
        step, longest = moment - self._clock, max(PAUSE_SECONDS, 2 * self._beat_seconds)
        self._clock = moment
        self._now += min(step, longest)
        if step > longest:
            self._hub.paused(self._now)

    def _tick(self) -> None:
        self._link.tick(self._hub.shrink.lost)
        if self._now - self._beaten >= self._beat_seconds * 0.9:
            self._beaten = self._now
            self._beat()
        self._acceptor.tick()
        self._tell_why_ended()
        self._hub.tick(self._now)

    def _look(self, rank: int) -> None:
        """Local: the process of a neighbour has ended."""
        self._selector.unregister(self._neighbours.descriptors[rank])
        self._neighbours.look(rank, ending=True)
        self._say_ended()

    def _say_ended(self) -> None:
        for rank, (status, memory) in list(self._neighbours.ended.items()):
            self._link.say({"is": "ended", "rank": rank, "status": status, "memory": memory})

    def _beat(self) -> None:
        for message in self._heartbeat.beat(self._now):
            self._link.say(message)
        if self.roster.own == 0 and self.activity.progress != self._progress:
            self._progress = self.activity.progress
            tell("step", 0, self._progress)

    # Connections.

    def _admit(self, link: Link, hello: Message) -> None:
        """Local: a rank that calls this one its hub.

        Raises:
            ConnectionError: it wants another.
        """
        rank = self._hub.welcome(link, hello, self._now)
        self._selector.register(link.socket, selectors.EVENT_READ, lambda: self._hear_member(rank, link))
        self._hear_member(rank, link)

    def _hear_member(self, rank: int, link: Link) -> None:
        try:
            messages = link.receive()
        except ConnectionError:
            self._hub.closed(rank, link, self._now)
            close(link, self._selector)
            return
        self._hear_messages(rank, link, messages)

    def _hear_messages(self, rank: int, link: Link, messages: Sequence[Message]) -> None:
        for message in messages:
            member = self._hub.members.get(rank)
            # A message before may have been its last, or another connection of it has taken the place of this.
            if member is None or member.link is not link:
                break
            # What makes no sense is passed over: it must not end the thread that watches.
            with contextlib.suppress(ConnectionError, KeyError, ValueError, TypeError):
                self._hub.hear(rank, message, self._now)

    def _hear_hub(self, message: Message) -> None:
        kind = message["is"]
        if kind == "ok":
            self._hub.shrink.hear(message)
        elif kind == "ask":
            self._link.say(self._heartbeat.state(message["question"], message["look"], self._now))
        elif kind == "told":
            self._told.set()
        elif kind == "abort":
            self._left = None
            self._hub.fall_silent()
            self._end.end_soon(int(message["code"]), [int(rank) for rank in message["silent"]])
        elif kind == "bye":
            self._link.is_leaving = True

    def _greet(self) -> None:
        self._heartbeat.restart()
        self._beat()
        self._say_ended()

    # What the program, and the operating system, say.

    def _take_posts(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in self.waker.receive() or b"":
                if number:
                    self.on_signal(number)
        while not self._posts.empty():
            self._posts.get()()

    def _say_goodbye(self) -> None:
        self._hub.shrink.at_end = True
        self._hub.tick(self._now)
        self._link.say({"is": "bye"})
        self._hub.members.send_all({"is": "bye"})
        self._stopping = True

    def _close_all(self) -> None:
        """Local: also in a forked child, where open connections would hide that their rank has ended."""
        for key in list(self._selector.get_map().values() if self._selector.get_map() else []):
            if not isinstance(key.fileobj, int):
                with contextlib.suppress(OSError):
                    key.fileobj.close()  # type: ignore[attr-defined]
        self._neighbours.close()
        self.waker.writing.close()
        self._selector.close()
