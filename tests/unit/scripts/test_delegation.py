"""What ranks do to files together: once for each name, with the same result, or the same error, on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mpitrain.runtime.devices import DevicePlan
from mpitrain.runtime.threads import ThreadPlan
from mpitrain.runtime.topology import topology
from mpitrain.scripts.delegation import delegate, is_delegate
from mpitrain.scripts.file_names import Names
from mpitrain.world.world import World, world_of
from tests import simulated
from tests.simulated import SimulatedCommunicator


def on_ranks(size: int, action: Callable[[World], Any], per_host: int = 2) -> list[Any]:
    def body(communicator: SimulatedCommunicator) -> Any:
        hosts = [f"host{rank // per_host}" for rank in range(size)]
        return action(world_of(communicator, topology(communicator.rank, hosts, hosts), DevicePlan(), ThreadPlan(1, 1)))

    return simulated.run(size, body)


@pytest.mark.parametrize("each_host", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_one_rank_acts_for_all(size: int, each_host: bool) -> None:
    acted: list[int] = []

    def action(world: World) -> Any:
        def act() -> int:
            acted.append(world.rank)
            return world.rank

        return delegate(world, "tell", act, each_host=each_host)

    found = on_ranks(size, action)
    firsts = [rank - rank % 2 if each_host else 0 for rank in range(size)]
    assert found == firsts
    assert sorted(acted) == sorted(set(firsts))


def test_each_name_is_done_by_the_first_that_gives_it() -> None:
    acted: list[int] = []

    def action(world: World) -> Any:
        name = ("a", "b", "b", "a")[world.rank]

        def act() -> str:
            acted.append(world.rank)
            return name

        return delegate(world, "tell", act, name)

    assert on_ranks(4, action) == ["a", "b", "b", "a"]
    assert sorted(acted) == [0, 1]


class UnfitError(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (FileNotFoundError(2, "No such file", "a"), FileNotFoundError, "No such file"),
        (EOFError("the end"), EOFError, "the end"),
        (UnfitError(1, 2), RuntimeError, "1 and 2"),
    ],
)
def test_an_error_is_the_same_on_all_ranks(error: Exception, kind: type[Exception], words: str) -> None:
    def action(world: World) -> Any:
        def fail() -> None:
            raise error

        try:
            delegate(world, "fail", fail)
        except Exception as raised:
            return raised

    own, *others = on_ranks(3, action)
    assert own is error
    assert [type(one) for one in others] == [kind] * 2
    assert all(words in str(one) for one in others)


def test_what_is_done_within_is_not_waited_for() -> None:
    def action(world: World) -> Any:
        return delegate(
            world, "outer", lambda: (is_delegate(), delegate(world, "inner", lambda: world.rank))
        ), is_delegate()

    assert on_ranks(3, action) == [((True, 0), False)] * 3


@pytest.mark.parametrize(
    ("named", "path", "written"),
    [
        ("runs/{}/best.keras", "runs/{}/best.keras", True),
        ("runs/{}/best.keras", "runs/{}/log.csv", True),
        ("runs/{}/best.keras", "runs/best.keras", False),
        ("runs/{}/{{epoch:02d}}.keras", "runs/{}/07.keras", True),
        ("runs/{{epoch:02d}}-{}.keras", "runs/07-{}.keras", True),
        ("runs/{{epoch:02d}}-{}.keras", "runs/07-other.keras", False),
        ("runs/best.keras", "runs/best.keras", False),
    ],
)
def test_names_that_differ_are_written_by_their_first_rank(named: str, path: str, written: bool) -> None:
    def action(world: World) -> tuple[bool, bool]:
        names, number = Names(world.communicator), world.rank // 2  # ranks 2 and 3 give the same name
        differ = names.compare([("auto", named.format(number)), ("min",)])
        return differ, names.written_here((path.format(number),))

    found = on_ranks(4, action)
    assert [differ for differ, _ in found] == ["{}" in named] * 4
    assert [here for _, here in found] == [True, False, written, False]


def test_callbacks_of_other_lengths_are_not_mixed_up() -> None:
    def action(world: World) -> bool:
        names = Names(world.communicator)
        names.compare([("a",)] * (1 + world.rank))
        return names.written_here(("a",))

    assert on_ranks(2, action) == [True, False]
