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
from typing import Any

from mpitrain.faults import processes, stacks, wire
from mpitrain.faults.acceptor import Acceptor
from mpitrain.faults.activity import LOOKED_AT_BATCHES, Activity, describe
from mpitrain.faults.exit_status import end_now
from mpitrain.faults.hub import Hub
from mpitrain.faults.neighbours import Neighbours
from mpitrain.faults.options import FaultOptions
from mpitrain.faults.processes import Process
from mpitrain.faults.report import Fault
from mpitrain.faults.roster import Roster
from mpitrain.faults.wire import Link, Message
from mpitrain.runtime.marks import tell
from mpitrain.runtime.signals import SignalSocket

BEAT_SECONDS = 0.5
RANKS_PER_BEAT = 200  # of a larger job each rank speaks less often, so that the hub has no more to do
SILENCE_SECONDS = 10.0
SOON_SECONDS = 0.05  # between looks while the hub waits a moment for what else is said
DIAL_SECONDS = 1.5
ENDED_SECONDS = 2.5  # in which MPI ends the job; then this rank ends itself
PAUSE_SECONDS = 2.0  # a longer step of the clock means that this process was stopped


class Watchdog:
    """The thread of this rank, and what the program tells it.

    Args:
        activity: what this rank is doing.
        roster: all ranks.
        listeners: where this rank listens.
        options: what is watched.
        abort: ends all ranks with an exit code; may block.
        write: prints a text.
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
        self.roster, self.activity, self._abort = roster, activity, abort
        limits = [s for s in (options.stall_warning, options.stall_abort) if s > 0]
        self._silence_seconds = max(2.0, min(SILENCE_SECONDS, min(limits, default=SILENCE_SECONDS) / 3))
        self._beat_seconds = max(BEAT_SECONDS, len(roster.seats) / RANKS_PER_BEAT)
        self._neighbours = Neighbours(roster)
        self._hub = Hub(roster, options, self._neighbours, write, self._end_job, self._silence_seconds, activity)
        self._posts: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.waker = SignalSocket()
        self.waker.reading.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(listeners, roster.token, len(roster.seats), self._selector, self._admit)
        self._selector.register(self.waker.reading, selectors.EVENT_READ, self._take_posts)
        for rank, descriptor in self._neighbours.descriptors.items():
            self._selector.register(descriptor, selectors.EVENT_READ, functools.partial(self._look, rank))
        self._link: Link | None = None
        self._linked_to = -1
        self._dialing = self._stopping = self._leaving = False
        self._left: dict[int, str] = {}
        self._progress = 0
        self._now = self._clock = self._acknowledged = self._dialed = self._beaten = 0.0
        self._mark: tuple[int, int, bool] = (-1, 0, False)
        self._since = 0.0
        self._sums = 0
        self._to_tell: list[Message] = []  # to each hub that this rank has
        self._told = threading.Event()
        self.on_signal: Callable[[int], None] = lambda number: None
        self._thread = threading.Thread(target=self._run, name="mpitrain watchdog", daemon=True)

    # Called by the program, on other threads.

    def start(self) -> None:
        """Local: start watching."""
        os.register_at_fork(after_in_child=self._close_all)
        self._clock = time.monotonic()
        self._thread.start()

    def post(self, what: str, content: Any = None) -> None:
        """Local: hand something to the thread."""
        self._posts.put((what, content))
        self.waker.send(b"\0")

    def report(self, fault: Fault, timeout_seconds: float = 3.0) -> bool:
        """Local: let the hub tell a fault of this rank, once for all ranks that have it.

        Returns:
            Whether it was told.
        """
        self._told.clear()
        self.post("say", {"is": "fault", "fault": dataclasses.asdict(fault)})
        return self.is_alive and self._told.wait(timeout_seconds)

    @property
    def is_alive(self) -> bool:
        """Somebody is missed if this rank ends now."""
        return self._thread.is_alive()

    def ending(self, code: int, how: str) -> None:
        """Local: this rank has come to the end of its program, with that exit code."""
        self.post("say", {"is": "ending", "code": code, "how": how})

    def missed(self) -> None:
        """Local: this rank has ended with an exit code, but others need it. They do not go on while they hear so."""
        self.post("say", {"is": "missed"})
        time.sleep(ENDED_SECONDS)

    def note_shrink(self, ranks: Sequence[int]) -> None:
        """Local: these ranks were lost, and the others have gone on."""
        self.post("lost", ranks)

    def stop(self) -> None:
        """Local: all ranks are at their end: nobody is missed from now on."""
        self.post("stop")
        self._thread.join(2.0)

    def leaving(self) -> None:
        """Local, on the watchdog's thread: this process is being ended from outside."""
        self._hub.leaving(self._now)

    # The thread.

    def _run(self) -> None:
        while not self._stopping:
            self._tick()
            ready = self._selector.select(SOON_SECONDS if self._hub.is_busy else self._beat_seconds)
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
        lost = self._hub.shrink.lost
        if self._link is None:
            if not self._leaving:
                self._dial(self.roster.candidates(lost))
        elif self._now - self._acknowledged > self._silence_seconds:
            self._left[self._linked_to] = "silent"
            self._say(wire.MOVED)
            self._drop()
        elif self._now - self._dialed > self._silence_seconds:  # for a rank before it that answers now
            before = [r for r in self.roster.candidates(lost) if r < self._linked_to and self._left.get(r) != "closed"]
            if before:
                self._dial(before)
        if self._now - self._beaten >= self._beat_seconds * 0.9:
            self._beaten = self._now
            self._beat()
        self._acceptor.tick()
        self._hub.tick(self._now)

    def _look(self, rank: int) -> None:
        """Local: the process of a neighbour has ended."""
        self._selector.unregister(self._neighbours.descriptors[rank])
        self._neighbours.look(rank, ending=True)
        self._say_ended()

    def _say_ended(self) -> None:
        for rank, (status, memory) in list(self._neighbours.ended.items()):
            self._say({"is": "ended", "rank": rank, "status": status, "memory": memory})

    def _beat(self) -> None:
        activity = self.activity
        self._say(
            {
                "is": "beat",
                "position": activity.position,
                "waiting": self._waiting(),
                "updates": activity.updates,
                "phase": activity.phase,
                "resident": processes.resident_bytes(),
            }
        )
        sums = len(activity.batches) + len(activity.gradients)
        if sums > self._sums and max(len(activity.batches), len(activity.gradients)) >= LOOKED_AT_BATCHES:
            self._sums = sums
            self._say({"is": "data", "batches": activity.batches[:], "gradients": activity.gradients[:]})
        if self.roster.own == 0 and activity.progress != self._progress:
            self._progress = activity.progress
            tell("step", 0, self._progress)

    def _waiting(self) -> float:
        """Seconds since this rank entered the collective it is in; never less than they are."""
        activity = self.activity
        mark = (activity.position, activity.moved, activity.inside is not None)
        if mark != self._mark:
            self._mark, self._since = mark, self._now - self._beat_seconds
        return round(self._now - self._since, 2) if mark[2] else 0.0

    def _state(self, question: int, look: Sequence[Sequence[int]]) -> Message:
        activity = self.activity
        inside, waiting = activity.inside, self._waiting()
        found = stacks.python_stacks(skip=[threading.get_ident()])
        phase = "exchange" if inside is not None and activity.phase != "end" else stacks.phase_of(activity.phase, found)
        return {
            "is": "state",
            "question": question,
            "position": activity.position,
            "waiting": waiting,
            "inside": None if inside is None else describe(inside),
            "phase": phase,
            "updates": activity.updates,
            "resident": processes.resident_bytes(),
            "stacks": [(stack.thread, stacks.shortened(stack)) for stack in found],
            "neighbours": {rank: Process(pid, started).state() for rank, pid, started in look},
        }

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
            self._close(link)
            return
        self._hear_messages(rank, link, messages)

    def _hear_messages(self, rank: int, link: Link, messages: Sequence[Message]) -> None:
        for message in messages:
            member = self._hub.members.get(rank)
            if member is None or member.link is not link:
                break
            with contextlib.suppress(ConnectionError, KeyError, ValueError, TypeError):
                self._hub.hear(rank, message, self._now)

    def _hear_hub(self) -> None:
        link = self._link
        if link is None:
            return
        try:
            messages = link.receive()
        except ConnectionError:
            self._drop()
            return
        for message in messages:
            kind = message["is"]
            if kind == "ok":
                self._acknowledged = self._now
                self._hub.shrink.hear(message)
            elif kind == "ask":
                self._say(self._state(message["question"], message["look"]))
            elif kind == "told":
                self._told.set()
            elif kind == "abort":
                self._hub.fall_silent()
                self._end_soon(int(message["code"]), [int(rank) for rank in message["silent"]])
            elif kind == "bye":
                self._leaving = True

    def _say(self, message: Message) -> None:
        if self._link is not None:
            try:
                self._link.send(message)
            except ConnectionError:
                self._hear_hub()  # it may have told why
                self._drop()

    def _drop(self) -> None:
        if self._link is not None:
            self._close(self._link)
            self._link = None

    def _close(self, link: Link) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link.socket)
        link.close()

    def _dial(self, ranks: Sequence[int]) -> None:
        """Local: look for a hub, on a thread of its own: it may have to wait for those that do not answer."""
        if self._dialing:
            return
        self._dialing, self._dialed = True, self._now
        # Those that did not answer a moment ago come last.
        ordered = sorted(ranks, key=lambda rank: (rank in self._left and rank != self.roster.own, rank))
        left = dict(self._left)

        def find() -> None:
            self.post("linked", self.roster.find_hub(ordered, left, DIAL_SECONDS))

        threading.Thread(target=find, name="mpitrain dial", daemon=True).start()

    def _linked(self, found: tuple[int, Link, dict[int, str]] | None) -> None:
        self._dialing = False
        if found is None:
            return
        self._say(wire.MOVED)
        self._drop()
        self._linked_to, self._link, self._left = found
        self._left.pop(self._linked_to, None)
        self._acknowledged = self._now
        self._selector.register(self._link.socket, selectors.EVENT_READ, self._hear_hub)
        self._sums = 0
        self._beat()
        self._say_ended()
        for message in self._to_tell:
            self._say(message)

    # What the program, and the operating system, say.

    def _take_posts(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in self.waker.receive() or b"":
                if number:
                    self.on_signal(number)
        while not self._posts.empty():
            what, content = self._posts.get()
            if what == "say":
                self._to_tell.append(content)
                self._say(content)
            elif what == "linked":
                self._linked(content)
            elif what == "lost":
                self._hub.shrink.note(content, self._now)
                self._dialed = float("-inf")  # another rank may be the hub now
            elif what == "need":
                self._hub.shrink.require(content)
            elif what == "stop":
                self._hub.shrink.at_end = True
                self._hub.tick(self._now)
                self._say({"is": "bye"})
                self._hub.members.send_all({"is": "bye"})
                self._stopping = True

    # The end.

    def _end_job(self, code: int, silent: Sequence[int]) -> None:
        """Local: as the hub: end all ranks."""
        self._end_soon(code, silent)
        threading.Thread(target=self._abort, args=(code,), name="mpitrain abort", daemon=True).start()

    def _end_soon(self, code: int, silent: Sequence[int]) -> None:
        """Local: end this process if MPI does not, and those of this host that cannot end by themselves."""
        timer = threading.Timer(ENDED_SECONDS, functools.partial(self._end_now, code, silent))
        timer.daemon = True
        timer.start()

    def _end_now(self, code: int, silent: Sequence[int]) -> None:
        for seat in self.roster.neighbours(silent, self.roster.own):
            if seat.rank != self.roster.own:
                seat.process.kill()
        end_now(code)

    def _close_all(self) -> None:
        """Local: also in a forked child, where open connections would hide that their rank has ended."""
        for key in list(self._selector.get_map().values() if self._selector.get_map() else []):
            if not isinstance(key.fileobj, int):
                with contextlib.suppress(OSError):
                    key.fileobj.close()  # type: ignore[attr-defined]
        self._neighbours.close()
        self.waker.writing.close()
        self._selector.close()
