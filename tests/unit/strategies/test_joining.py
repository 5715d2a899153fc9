"""A rank without data takes part in what the others do."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from mpitrain.collectives import host
from mpitrain.collectives.host import Reduction
from mpitrain.errors import CollectiveError
from mpitrain.strategies.joining import Joining, Part
from mpitrain.world.calls import Call, Meeting
from mpitrain.world.world import World
from tests.unit.job import run


def update(world: World, name: str) -> None:
    """Collective: an update of the others, of three samples each."""
    world.agreement.call(Meeting(name), samples=3.0, idle_ok=True)


def test_it_makes_their_updates_until_all_have_joined() -> None:
    def rank(world: World) -> Any:
        begun: list[float] = []
        made: list[str] = []
        joining = Joining(world, lambda agreed: begun.append(float(agreed.samples.sum())))
        part = Part(lambda: made.append("a"), lambda: 0.5)
        joining.register(Meeting("a"), part, Part(lambda: made.append("never")))
        assert joining.knows(Meeting("a"))
        assert not joining.knows(Meeting("b"))
        if world.rank:
            for _ in range(2):
                update(world, "a")
        return joining.join(), begun, made

    assert run(2, rank) == [(2, [3.5, 3.5], ["a", "a"]), (0, [], [])]


def test_parts_are_not_kept_and_those_of_the_end_are() -> None:
    def rank(world: World) -> Any:
        made: list[str] = []
        joining = Joining(world)
        part = Part(lambda: made.append("part"))
        joining.register(Meeting("a"), part, Part(lambda: made.append("at the end")))
        del part
        gc.collect()
        assert not joining.knows(Meeting("a"))
        if world.rank:
            update(world, "a")
        return joining.join(finished=True), made

    assert run(2, rank) == [(1, ["at the end"]), (0, [])]


def test_what_it_cannot_take_part_in_is_told() -> None:
    def rank(world: World) -> None:
        if world.rank:
            with pytest.raises(CollectiveError):
                update(world, "unknown")
        else:
            with pytest.raises(CollectiveError, match=r"rank 0 \(host\) has no data left while others go on"):
                Joining(world).join()

    run(2, rank)


@pytest.mark.parametrize("finished", [False, True])
def test_collectives_get_what_changes_nothing(finished: bool) -> None:
    def rank(world: World) -> Any:
        joining = Joining(world)
        if world.rank == 0:
            return joining.join(collectives=True, finished=finished)
        found = host.all_reduce(world, np.array([2.0, -3.0]), Reduction("max"))
        rows = host.all_gather(world, np.array([[1, 2]]))
        joining.join(finished=finished)
        return found.tolist(), rows.tolist()

    assert run(2, rank) == [2, ([2.0, -3.0], [[1, 2]])]


def test_the_innermost_loop_is_asked_first() -> None:
    def rank(world: World) -> Any:
        asked: list[str] = []
        joining = Joining(world)

        def loop(name: str) -> Any:
            def takes_part(call: Call) -> Any:
                asked.append(name)
                return lambda agreed: None

            return takes_part

        joining.takes_part += [loop("training"), loop("evaluation")]
        if world.rank:
            update(world, "a")
        return joining.join(), asked

    assert run(2, rank)[0] == (1, ["evaluation"])
