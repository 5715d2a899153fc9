"""Sets of ranks: which there are, who is in them, and that all ranks know of the same."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.horovod import basics, operations, process_sets
from mpitrain.horovod.process_sets import ProcessSet, add_process_set, parts_of, remove_process_set
from mpitrain.world import start
from mpitrain.world.world import World
from tests.unit import job
from tests.unit.horovod.job import run

OF_THREAD = threading.local()


@pytest.fixture(autouse=True)
def _dynamic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(process_sets.DYNAMIC_VARIABLE, "1")


@given(st.lists(st.integers(0, 3), min_size=1, max_size=7))
def test_parts_are_those_that_ranks_gave(colours: list[int]) -> None:
    everyone = [[other for other, own in enumerate(colours) if own == colour] for colour in colours]
    parts = parts_of(everyone, "it")
    assert sorted(rank for part in parts for rank in part) == list(range(len(colours)))
    assert parts == sorted(parts)
    assert all(everyone[rank] == part for part in parts for rank in part)


@pytest.mark.parametrize(
    ("everyone", "message"),
    [
        ([[0, 1], [1]], r"it: rank 0 gave the ranks \[0, 1\], which is not what ranks \[1\] gave"),
        ([[0], [0]], r"it: rank 1 gave the ranks \[0\], of which it is no member"),
        ([[0, 2], [1]], r"it: rank 0 gave the ranks \[0, 2\], which is not what ranks \[2\] gave"),
        ([[0], []], r"it: rank 1 gave the ranks \[\], of which it is no member"),
    ],
    ids=str,
)
def test_parts_that_do_not_fit(everyone: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parts_of(everyone, "it")


def test_a_set_before_it_is_registered() -> None:
    given_set = ProcessSet(np.array([2, 0]))
    assert (given_set.ranks, given_set.size(), given_set.rank()) == ([0, 2], None, None)
    assert repr(given_set) == "ProcessSet(process_set_id=None, ranks=[0, 2], mpi_comm=None)"
    with pytest.raises(ValueError, match=r"whole numbers for ranks, not \['a'\]"):
        ProcessSet(["a"])
    with pytest.raises(ValueError, match="ranks or an mpi4py communicator, not 3"):
        ProcessSet(3)
    with pytest.raises(ValueError, match="not been initialized"):
        given_set.included()


def test_numbers_are_used_again_and_members_know_their_place() -> None:
    def rank(world: World) -> Any:
        first, second = add_process_set([0, 2]), add_process_set([2, 1])
        assert (first.process_set_id, second.process_set_id) == (1, 2)
        assert [one.size() for one in (first, second)] == [2, 2]
        assert [one.included() for one in (first, second)] == [world.rank in (0, 2), world.rank in (1, 2)]
        assert remove_process_set(first)
        assert (first.process_set_id, first.included()) == (None, world.rank in (0, 2))
        assert not remove_process_set(first), "it is gone"
        assert not remove_process_set(process_sets.global_process_set)
        third = add_process_set([0, 1])
        assert third.process_set_id == 1, "the number is free"
        assert process_sets.table.ids_and_ranks() == {0: [0, 1, 2], 1: [0, 1], 2: [1, 2]}
        assert [int(basics.size_op(number)) for number in (0, 1, 2)] == [3, 2, 2]
        assert [int(basics.process_set_included_op(number)) for number in (0, 1, 2, 3)] == [
            *(1, world.rank < 2, world.rank > 0, process_sets.ERROR_UNKNOWN_SET)
        ]
        if world.rank == 0:
            with pytest.raises(ValueError, match="rank 0 is not part of ProcessSet"):
                second.rank()
            with pytest.raises(tf.errors.InvalidArgumentError, match="rank 0 is not a member"):
                operations.allreduce(1.0, process_set=second)
            return None
        return second.rank(), float(operations.allreduce(float(world.rank), process_set=second))

    assert run(3, rank) == [None, (0, 1.5), (1, 1.5)]
    assert int(basics.process_set_included_op()) == process_sets.ERROR_INIT


@pytest.mark.parametrize(
    ("ranks", "error", "message"),
    [
        ([0, 1, 2], ValueError, "there is a process set of the same ranks already"),
        ([], ValueError, r"different ranks from 0 to 2, not \[\]"),
        ([1, 1], ValueError, r"different ranks from 0 to 2, not \[1, 1\]"),
        ([1, 3], ValueError, r"different ranks from 0 to 2, not \[1, 3\]"),
        ([-1, 0], ValueError, r"different ranks from 0 to 2, not \[-1, 0\]"),
    ],
    ids=str,
)
@pytest.mark.parametrize("wrong", [0, 2])
def test_what_one_rank_gives_wrong_all_are_told(
    ranks: list[int], error: type[Exception], message: str, wrong: int
) -> None:
    def rank(world: World) -> dict[int, list[int]]:
        with pytest.raises(error, match=message) as caught:
            add_process_set(ranks if world.rank == wrong else [0, 1])
        assert (f"on rank {wrong}" in str(caught.value)) == (world.rank != wrong)
        return process_sets.table.ids_and_ranks()

    assert run(3, rank) == [{0: [0, 1, 2]}] * 3


def test_ranks_that_add_or_remove_different_sets_are_told() -> None:
    def rank(world: World) -> None:
        with pytest.raises(tf.errors.FailedPreconditionError, match="MismatchError"):
            add_process_set([0] if world.rank else [1])
        first, second = add_process_set([0]), add_process_set([1])
        with pytest.raises(tf.errors.FailedPreconditionError, match=r"remove process set . of \[.\]"):
            remove_process_set(first if world.rank else second)

    run(2, rank)


def test_without_the_variable_nothing_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(process_sets.DYNAMIC_VARIABLE, "0")

    def rank(world: World) -> None:
        with pytest.raises(ValueError, match="adding process sets needs HOROVOD_DYNAMIC_PROCESS_SETS=1"):
            add_process_set([0])
        of_start = ProcessSet([1])
        process_sets.register([of_start])
        with pytest.raises(ValueError, match="removing process sets needs"):
            remove_process_set(of_start)
        assert process_sets.table.ids_and_ranks() == {0: [0, 1], 1: [1]}

    run(2, rank)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (lambda rank: [[0, 1]], r"process_sets entry number 0 is a duplicate: there is another of the ranks \[0, 1\]"),
        (lambda rank: [[0], [0]], "process_sets entry number 1 is a duplicate"),
        (lambda rank: [[rank]], r"entry number 0 must be the same on all ranks, but they gave \[\[0\], \[1\]\]"),
        (lambda rank: [[0], [1]][: rank + 1], r"different numbers of process_sets: \[1, 2\]"),
        (lambda rank: [[4]], "different ranks from 0 to 1"),
    ],
    ids=["all ranks", "twice", "others", "numbers", "no rank"],
)
def test_sets_that_init_refuses(sets: Any, message: str) -> None:
    def rank(world: World) -> None:
        with pytest.raises(ValueError, match=message):
            process_sets.register([ProcessSet(ranks) for ranks in sets(world.rank)])

    run(2, rank)


@pytest.fixture
def _job_of_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """`start.init` finds the ranks of this thread's job, which no launcher has started."""
    monkeypatch.setattr(start, "init", lambda **_: OF_THREAD.world)


@pytest.mark.usefixtures("_job_of_the_thread")
def test_init_takes_the_ranks_that_are_one_job() -> None:
    def rank(world: World) -> Any:
        OF_THREAD.world = world
        assert not basics.is_initialized()
        with pytest.raises(ValueError, match="not been initialized"):
            basics.size()
        half = [0, 2] if world.rank % 2 == 0 else [1, 3]
        basics.init(half, process_sets=[ProcessSet([0])])
        found = basics.rank(), basics.size(), operations.allreduce(float(world.rank)).numpy()
        first = process_sets.table.ids_and_ranks()
        basics.init(process_sets=[ProcessSet([1])])
        assert process_sets.table.ids_and_ranks() == {**first, 2: [1]}
        basics.shutdown()
        assert not basics.is_initialized()
        basics.init([])
        assert (basics.rank(), basics.size()) == (world.rank, 4)
        assert process_sets.table.ids_and_ranks() == {0: [0, 1, 2, 3]}
        return found, first

    sets = {0: [0, 1], 1: [0]}
    expected = [((0, 2, 1.0), sets), ((0, 2, 2.0), sets), ((1, 2, 1.0), sets), ((1, 2, 2.0), sets)]
    assert job.run(4, rank) == expected


@pytest.mark.usefixtures("_job_of_the_thread")
@pytest.mark.parametrize(
    ("comm", "sets", "message"),
    [
        (lambda rank: [0, 1] if rank else [0], None, "rank 1 gave the ranks"),
        (lambda rank: None, "static", "must be a list of ProcessSet"),
        (lambda rank: None, [[0]], "must be a list of ProcessSet, not of list"),
    ],
)
def test_init_that_all_ranks_refuse(comm: Any, sets: Any, message: str) -> None:
    def rank(world: World) -> None:
        OF_THREAD.world = world
        with pytest.raises(ValueError, match=message):
            basics.init(comm(world.rank), process_sets=sets)

    job.run(2, rank)
