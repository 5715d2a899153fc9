"""The ranks that are connected to the hub, and what it knows of them and of those that no longer are."""

from __future__ import annotations

from dataclasses import dataclass, field

from mpitrain.faults.roster import Roster
from mpitrain.faults.wire import Link, Message


@dataclass
class Member:
    """What is known of a rank that is connected."""

    link: Link  # to it
    heard: float  # when it last spoke
    said: Message = field(default_factory=dict)  # its last heartbeat
    state: Message = field(default_factory=dict)  # its last answer to `ask`
    answered: int = 0  # number of that question
    exit_code: int | None = None  # what it ends with; None while it is not at its end
    how: str = ""  # it came to its end, in words
    ended: float = 0.0  # when it said so


class Members(dict[int, Member]):
    """The ranks that are connected to the hub, by their numbers.

    Args:
        silence_seconds: after which a rank is not heard any more.
    """

    def __init__(self, roster: Roster, silence_seconds: float) -> None:
        super().__init__()
        self._roster, self._silence_seconds = roster, silence_seconds
        # of connections that have ended a moment ago: when, and whose
        self.broken: dict[int, tuple[float, Member]] = {}
        # why ranks are not connected, and since when; also by what ranks say that had another hub
        self.gone: dict[int, tuple[str, float]] = {}

    def why_gone(self, rank: int) -> str:
        """Local: why a rank is not connected; empty where that is not known."""
        return self.gone.get(rank, ("", 0.0))[0]

    def hears(self, rank: int, now: float) -> bool:
        """Local: whether a rank has spoken lately."""
        member = self.get(rank)
        return member is not None and now - member.heard <= self._silence_seconds

    def unheard(self, now: float) -> list[int]:
        """Local: all ranks that have not spoken lately."""
        return [seat.rank for seat in self._roster.seats if not self.hears(seat.rank, now)]

    def send(self, rank: int, message: Message) -> None:
        """Local: say something to a rank, if it is connected."""
        member = self.get(rank)
        if member is not None:
            try:
                member.link.send(message)
            except ConnectionError:
                return  # its end is noticed where it is read

    def send_all(self, message: Message) -> None:
        """Local: say something to every rank."""
        for rank in list(self):
            self.send(rank, message)
