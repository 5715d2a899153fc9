"""The connection of a rank to its hub: rank 0, or the next one where that does not answer."""

from __future__ import annotations

import contextlib
import selectors
import threading
from collections.abc import Callable, Collection, Sequence

from mpitrain.faults import wire
from mpitrain.faults.roster import Roster
from mpitrain.faults.wire import Link, Message

DIAL_SECONDS = 1.5
Found = tuple[int, Link, dict[int, str]]  # which rank, the way to it, and why others before it were left


class HubLink:
    """Keeps a connection to the first rank that answers.

    All methods are called by the one thread of the watchdog.

    Args:
        selector: tells when the hub has said something.
        silence_seconds: after which a hub that does not answer is left for another.
        hear: takes a message of the hub.
        hand_over: given what a thread has found, has it given to `link` by the watchdog's.
        greet: speaks to each new hub first.

    Attributes:
        is_leaving: no other hub is looked for.
    """

    def __init__(
        self,
        roster: Roster,
        selector: selectors.BaseSelector,
        silence_seconds: float,
        clock: Callable[[], float],
        hear: Callable[[Message], None],
        hand_over: Callable[[Found | None], None],
        greet: Callable[[], None],
    ) -> None:
        self._roster, self._selector, self._silence_seconds, self._clock = roster, selector, silence_seconds, clock
        self._hear, self._hand_over, self._greet = hear, hand_over, greet
        self.is_leaving = self._dialing = False
        self._link: Link | None = None
        self._rank = -1
        self._left: dict[int, str] = {}
        self._acknowledged = self._dialed = 0.0
        self._kept: list[Message] = []  # for each hub that this rank has

    @property
    def rank(self) -> int | None:
        """The hub's, None while there is none."""
        return None if self._link is None else self._rank

    def tick(self, lost: Collection[int]) -> None:
        """Local: look for a hub, if there is none, or it is silent, or one before it answers again."""
        now = self._clock()
        if self._link is None:
            if not self.is_leaving:
                self._dial(self._roster.candidates(lost))
        elif now - self._acknowledged > self._silence_seconds:
            self._left[self._rank] = "silent"
            # The hub may only have been stopped: without this word it would take the end of the connection for a death,
            # and end the job.
            self.say(wire.MOVED)
            self._drop()
        elif now - self._dialed > self._silence_seconds:  # for a rank before it that answers now
            before = [r for r in self._roster.candidates(lost) if r < self._rank and self._left.get(r) != "closed"]
            if before:
                self._dial(before)

    def look_again(self) -> None:
        """Local: another rank may be the hub now."""
        self._dialed = float("-inf")

    def say(self, message: Message, keep: bool = False) -> None:
        """Local: say something to the hub.

        With `keep`, to any later hub, too.
        """
        if keep:
            self._kept.append(message)
        if self._link is not None:
            try:
                self._link.send(message)
            except ConnectionError:
                self._receive()  # it may have told why
                self._drop()

    def link(self, found: Found | None) -> None:
        """Local: take what was found as the hub, if anything was."""
        self._dialing = False
        if found is None:
            return
        self.say(wire.MOVED)
        self._drop()
        self._rank, self._link, self._left = found
        self._left.pop(self._rank, None)
        self._acknowledged = self._clock()
        self._selector.register(self._link.socket, selectors.EVENT_READ, self._receive)
        self._greet()
        for message in self._kept:
            self.say(message)

    def _receive(self) -> None:
        link = self._link
        if link is None:
            return
        try:
            messages = link.receive()
        except ConnectionError:
            self._drop()
            return
        for message in messages:
            if message["is"] == "ok":
                self._acknowledged = self._clock()
            self._hear(message)

    def _drop(self) -> None:
        if self._link is not None:
            close(self._link, self._selector)
            self._link = None

    def _dial(self, ranks: Sequence[int]) -> None:
        """Local: look for a hub, on a thread of its own: it may have to wait for those that do not answer."""
        if self._dialing:
            return
        self._dialing, self._dialed = True, self._clock()
        # Those that did not answer a moment ago come last.
        ordered = sorted(ranks, key=lambda rank: (rank in self._left and rank != self._roster.own, rank))
        left = dict(self._left)

        def find() -> None:
            self._hand_over(self._roster.find_hub(ordered, left, DIAL_SECONDS))

        threading.Thread(target=find, name="mpitrain dial", daemon=True).start()


def close(link: Link, selector: selectors.BaseSelector) -> None:
    """Local: close a connection that nobody listens to any more."""
    with contextlib.suppress(KeyError, ValueError):
        selector.unregister(link.socket)
    link.close()
