"""Collectives of sessions, which come in any order: what waits on all ranks is done, in one order."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from mpitrain.collectives import negotiation
from mpitrain.collectives.negotiation import negotiation_of
from mpitrain.errors import MismatchError
from mpitrain.world.world import World
from tests.unit.job import run

ORDERS = ["abc", "cab", "bca"]


def test_calls_in_any_order() -> None:
    def rank(world: World) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def call(name: str) -> None:
            found[name] = negotiation_of(world).call(
                name, lambda: world.communicator.all_gather_obj((name, world.rank))
            )

        threads = [threading.Thread(target=call, args=(name,)) for name in ORDERS[world.rank]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    expected = {name: [(name, rank) for rank in range(3)] for name in "abc"}
    assert run(3, rank) == [expected] * 3


def test_an_error_of_one_call_is_raised_where_it_was_called() -> None:
    def rank(world: World) -> Any:
        with pytest.raises(ZeroDivisionError):
            negotiation_of(world).call("a", lambda: 1 / 0)
        return negotiation_of(world).call("a", lambda: world.rank)

    assert run(2, rank) == [0, 1]


def test_what_never_waits_on_all_ranks_is_told_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(negotiation, "STALL_SECONDS", 0.2)

    def rank(world: World) -> str:
        with pytest.raises(MismatchError) as caught:
            negotiation_of(world).call("ab"[world.rank], lambda: None)
        return str(caught.value)

    told = run(2, rank)
    assert told == told[:1] * 2
    assert "  rank 0 (host): a\n  rank 1 (host): b\n" in told[0]
