"""Variables and objects of one rank on all of them, and ranks that run out of data."""

from __future__ import annotations

import pytest
import tensorflow as tf

from mpitrain.horovod import basics, operations, process_sets, variables
from mpitrain.horovod.process_sets import ProcessSet
from mpitrain.world.world import World
from tests.unit.horovod.job import run


@pytest.mark.parametrize("root", [0, 2])
def test_variables_become_those_of_one_rank(root: int) -> None:
    def rank(world: World) -> None:
        pair = ProcessSet([0, 2])
        process_sets.register([pair])
        kept = [tf.Variable([1.0 + world.rank]), tf.Variable(world.rank, dtype=tf.int64)]
        if world.rank != 1:
            assert variables.broadcast_variables(kept, root, pair) is None
        expected = world.rank if world.rank == 1 else root
        assert [kept[0].numpy().tolist(), int(kept[1])] == [[1.0 + expected], expected]

        @tf.function
        def within() -> None:
            variables.broadcast_variables(kept, 1)

        within()
        assert [kept[0].numpy().tolist(), int(kept[1])] == [[2.0], 1]

    run(3, rank)


def test_objects() -> None:
    def rank(world: World) -> None:
        pair = ProcessSet([0, 2])
        process_sets.register([pair])
        own = {"rank": world.rank, "text": "x" * world.rank}
        assert variables.broadcast_object(own, 2) == {"rank": 2, "text": "xx"}
        assert variables.broadcast_object_fn(1)(own) == {"rank": 1, "text": "x"}
        assert [one["rank"] for one in variables.allgather_object(own)] == [0, 1, 2]
        with pytest.raises(tf.errors.InvalidArgumentError, match="root rank 3 is not one of the ranks"):
            variables.broadcast_object(own, 3)
        if world.rank == 1:
            with pytest.raises(tf.errors.InvalidArgumentError, match="not a member"):
                variables.allgather_object(own, process_set=pair)
        else:
            assert variables.broadcast_object(world.rank, 2, process_set=pair) == 2
            assert variables.allgather_object(world.rank, process_set=pair) == [0, 2]

    run(3, rank)


@pytest.mark.parametrize(
    ("steps", "last"),
    [([3, 1, 2], 0), ([1, 2, 2], 2), ([2, 2, 2], 2), ([0, 3, 0], 1), ([0, 0, 0], 2)],
    ids=str,
)
def test_the_last_rank_that_joined(steps: list[int], last: int) -> None:
    """Of several at once the highest; those that have joined add nothing, and no rows."""

    def rank(world: World) -> tuple[int, list[float], list[int]]:
        sums, rows = [], []
        for _ in range(steps[world.rank]):
            sums.append(float(operations.allreduce(1.0, op=basics.Sum)))
            rows.append(len(operations.allgather([1.0, 2.0])))
        return int(variables.join()), sums, rows

    found = run(3, rank)
    at_work = [sum(own > step for own in steps) for step in range(max(steps))]
    assert [joined for joined, _, _ in found] == [last] * 3
    for own, (_, sums, rows) in zip(steps, found, strict=True):
        assert sums == at_work[:own]
        assert rows == [2 * count for count in at_work[:own]]
