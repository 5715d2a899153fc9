"""A rank keeps a connection to the first rank that answers, and says there what it has said before."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from mpitrain.faults import wire
from mpitrain.faults.hub_link import Found, HubLink
from mpitrain.faults.wire import Link

SILENCE_SECONDS = 10.0


class Ranks:
    """A roster whose hubs are sockets of this test; who is looked for is noted."""

    def __init__(self, own: int, candidates: list[int]) -> None:
        self.own, self._candidates = own, candidates
        self.looked: list[tuple[list[int], dict[int, str]]] = []
        self.answers: list[int] = candidates  # who answers
        self.there: dict[int, Link] = {}  # the other ends

    def candidates(self, lost: Any = ()) -> list[int]:
        return [rank for rank in self._candidates if rank not in lost]

    def find_hub(self, ranks: list[int], left: dict[int, str], timeout: float) -> Found | None:
        self.looked.append((ranks, dict(left)))
        for rank in ranks:
            if rank in self.answers:
                here, there = socket.socketpair()
                self.there[rank] = Link(there)
                return rank, Link(here), left
            left[rank] = "silent"
        return None


class Rank:
    """The watchdog of one rank, as far as its hub goes, with a clock of its own."""

    def __init__(self, own: int = 2, candidates: list[int] | None = None) -> None:
        self.now = 100.0
        self.heard: list[Any] = []
        self.greeted: list[int] = []
        self.ranks: Any = Ranks(own, [0, 1, 2] if candidates is None else candidates)
        self.selector = selectors.DefaultSelector()
        self.found: list[Found | None] = []
        self._has_found = threading.Event()
        self.hub = HubLink(
            cast(Any, self.ranks),
            self.selector,
            SILENCE_SECONDS,
            lambda: self.now,
            self.heard.append,
            self._hand_over,
            lambda: self.hub.say({"is": "hello"}),
        )

    def _hand_over(self, found: Found | None) -> None:
        self.found.append(found)
        self._has_found.set()

    def look(self, lost: Any = ()) -> None:
        """A tick, and what is found by it, if it looks for anything."""
        self._has_found.clear()
        self.hub.tick(lost)
        if self.hub._dialing:
            assert self._has_found.wait(60)
            self.hub.link(self.found[-1])

    def listen(self) -> None:
        for key, _ in self.selector.select(timeout=0):
            key.data()

    def said(self, rank: int) -> list[str]:
        return [message["is"] for message in self.ranks.there[rank].receive()]


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    for link in made.ranks.there.values():
        link.close()
    for found in made.found:
        if found is not None:
            found[1].close()
    made.selector.close()


def test_the_first_that_answers_is_the_hub(rank: Rank) -> None:
    rank.hub.say({"is": "kept"}, keep=True)
    rank.hub.say({"is": "lost"})
    rank.ranks.answers = [1, 2]
    rank.look()
    assert rank.ranks.looked == [([0, 1, 2], {})]
    assert rank.said(1) == ["hello", "kept"]
    rank.hub.say({"is": "beat"})
    assert rank.said(1) == ["beat"]
    rank.ranks.there[1].send({"is": "news"})
    rank.listen()
    assert rank.heard == [{"is": "news"}]


def test_a_silent_hub_is_left_and_comes_last(rank: Rank) -> None:
    rank.look()
    rank.hub.say({"is": "kept"}, keep=True)
    assert rank.said(0) == ["hello", "kept"]
    rank.now += SILENCE_SECONDS
    rank.look()
    assert rank.said(0) == [], "it may still answer"
    rank.now += 0.1
    rank.hub.tick(())
    assert rank.said(0) == ["moved"], "so that it does not take the end of the connection for a death"
    rank.ranks.answers = [1]
    rank.look()
    assert rank.ranks.looked[-1] == ([1, 2, 0], {0: "silent"})
    assert rank.said(1) == ["hello", "kept"]


def test_a_hub_that_answers_stays(rank: Rank) -> None:
    rank.look()
    for _ in range(5):
        rank.now += SILENCE_SECONDS
        rank.ranks.there[0].send({"is": "ok"})
        rank.listen()
        rank.look()
    assert len(rank.ranks.looked) == 1
    assert rank.heard == [{"is": "ok"}] * 5


def test_one_before_it_that_answers_again_takes_over(rank: Rank) -> None:
    rank.ranks.answers = [1]
    rank.look()
    rank.ranks.answers = [0, 1]
    rank.now += SILENCE_SECONDS / 2
    rank.ranks.there[1].send({"is": "ok"})
    rank.listen()
    rank.look()
    assert len(rank.ranks.looked) == 1, "not all the time"
    rank.now += SILENCE_SECONDS / 2 + 0.1
    rank.ranks.there[1].send({"is": "ok"})
    rank.listen()
    rank.look()
    assert rank.ranks.looked[-1] == ([0], {0: "silent"})
    assert rank.said(1)[-1:] == ["moved"]
    assert rank.said(0) == ["hello"]
    assert len(rank.selector.get_map()) == 1, "nobody listens to the other any more"
    rank.hub.look_again()
    rank.look(lost=[0])
    assert len(rank.ranks.looked) == 2, "nobody is before it"


def test_a_connection_that_ends_is_replaced(rank: Rank) -> None:
    rank.look()
    rank.ranks.there[0].send({"is": "end", "why": "told before"})
    rank.ranks.there[0].close()
    while not rank.heard:
        rank.listen()
    rank.listen()
    assert rank.heard == [{"is": "end", "why": "told before"}]
    rank.hub.say({"is": "beat"})
    rank.look()
    assert len(rank.ranks.looked) == 2
    rank.ranks.there[0].close()
    rank.hub.is_leaving = True
    rank.listen()
    rank.look()
    assert len(rank.ranks.looked) == 2, "at the end no other is looked for"


def test_nobody_answers(rank: Rank) -> None:
    rank.ranks.answers = []
    for _ in range(2):
        rank.look(lost=[1])
    assert rank.ranks.looked == [([0, 2], {}), ([0, 2], {})]
    rank.hub.say(wire.MOVED)  # to nobody


def test_a_lost_rank_is_no_hub(rank: Rank) -> None:
    rank.look(lost=[0])
    assert rank.ranks.looked == [([1, 2], {})]
    assert rank.said(1) == ["hello"]
