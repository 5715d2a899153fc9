"""Horovod's collectives are what NumPy makes of all ranks' tensors, and so are their gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from mpitrain.horovod import basics, operations, process_sets, values
from mpitrain.horovod.basics import Adasum, Average, Max, Min, Product, Sum
from mpitrain.horovod.compression import Compression
from mpitrain.horovod.process_sets import ProcessSet
from mpitrain.world.world import World
from tests.unit.horovod.job import run

both_ways = pytest.mark.parametrize(
    "way", [lambda f: f, functools.partial(tf.function, autograph=False)], ids=["eager", "graph"]
)
INVALID = tf.errors.InvalidArgumentError


def own(rank: int, rows: int = 4, dtype: str = "float64") -> Any:
    return (np.arange(rows * 2).reshape(rows, 2) + 3 * rank + 1).astype(dtype)


def gradient(way: Callable[..., Any], function: Callable[[Any], Any], x: Any, upstream: Any) -> Any:
    """Of the sum of what `function` gives times `upstream`."""

    def of(value: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(value)
            target = tf.reduce_sum(function(value) * upstream)
        return tape.gradient(target, value)

    return way(of)(tf.constant(x)).numpy()


@both_ways
@pytest.mark.parametrize(
    ("op", "truth"),
    [
        (Average, lambda all_own: np.mean(all_own, 0)),
        (Sum, lambda all_own: np.sum(all_own, 0)),
        (Min, lambda all_own: np.min(all_own, 0)),
        (Max, lambda all_own: np.max(all_own, 0)),
        (Product, lambda all_own: np.prod(all_own, 0)),
    ],
)
def test_allreduce(way: Any, op: int, truth: Any) -> None:
    def rank(world: World) -> None:
        reduce = way(functools.partial(operations.allreduce, op=op, prescale_factor=0.5, postscale_factor=3.0))
        all_own = np.stack([own(number) * 0.5 for number in range(3)])
        np.testing.assert_allclose(reduce(own(world.rank)), truth(all_own) * 3.0, rtol=1e-14)

    run(3, rank)


@pytest.mark.parametrize(
    ("op", "average", "expected"),
    [(None, None, Average), (None, True, Average), (None, False, Sum), (Max, None, Max), (Average, None, Average)],
)
def test_the_operation_asked_for(op: int | None, average: bool | None, expected: int) -> None:
    assert basics.operation(op, average) == expected


def test_operations_that_there_are_not() -> None:
    with pytest.raises(ValueError, match="give op or average, not both"):
        basics.operation(Sum, False)
    with pytest.raises(ValueError, match="no reduction 9: give"):
        basics.operation(9, None)


@both_ways
def test_compressed_tensors_are_rounded_and_come_back(way: Any) -> None:
    def rank(world: World) -> None:
        reduce = way(functools.partial(operations.allreduce, compression=Compression.fp16))
        found = reduce(np.array([0.1, 2049.0], np.float32) * (world.rank + 1))
        assert found.dtype == tf.float32
        halves = [(np.array([0.1, 2049.0], np.float32) * (number + 1)).astype(np.float16) for number in range(2)]
        np.testing.assert_allclose(found, np.sum(halves, 0, np.float16).astype(np.float32) / 2, rtol=1e-3)
        assert float(found[1]) != 2049.0 * 1.5

    run(2, rank)


@pytest.mark.parametrize("op", [Average, Sum])
def test_rows_are_gathered(op: int) -> None:
    def rank(world: World) -> None:
        rows = world.rank + 1
        slices = tf.IndexedSlices(tf.constant(own(world.rank, rows)), tf.range(rows), tf.constant([5, 2]))
        found = operations.allreduce(slices, op=op)
        assert found.indices.numpy().tolist() == [0, 0, 1, 0, 1, 2]
        truth = np.concatenate([own(number, number + 1) for number in range(3)]) / (3 if op == Average else 1)
        np.testing.assert_allclose(found.values, truth, rtol=1e-14)
        assert found.dense_shape.numpy().tolist() == [5, 2]
        for wrong in ({"op": Max}, {"prescale_factor": 2.0}, {"postscale_factor": 2.0}):
            with pytest.raises(NotImplementedError, match="IndexedSlices can be summed and averaged only"):
                operations.allreduce(slices, **wrong)

    run(3, rank)


@pytest.mark.parametrize(
    ("size", "process_set", "message"),
    [(3, [0, 1, 2], "a power of two, not 3"), (2, [0], "for all ranks only")],
)
def test_adasum_that_is_not_possible(size: int, process_set: list[int], message: str) -> None:
    def rank(world: World) -> None:
        chosen = process_sets.global_process_set
        if len(process_set) < size:
            chosen = ProcessSet(process_set)
            process_sets.register([chosen])
        if world.rank in process_set:
            with pytest.raises(NotImplementedError, match=message):
                operations.allreduce(1.0, op=Adasum, process_set=chosen)
        with pytest.raises(NotImplementedError, match="Adasum is for allreduce only"):
            operations.reducescatter([1.0], op=Adasum)

    run(size, rank)


def test_groups_are_looked_at_before_they_begin() -> None:
    """No rank is left waiting in the first of two because the second cannot be."""

    def rank(world: World) -> int:
        text = tf.constant("text")
        for call in (operations.grouped_allreduce, operations.grouped_allgather, operations.grouped_reducescatter):
            with pytest.raises(INVALID):
                call([tf.ones([2]), text])
        with pytest.raises(INVALID, match="scalar"):
            operations.grouped_reducescatter([tf.ones([2]), tf.constant(1.0)])
        return world.agreement.number(world.rank)

    assert run(2, lambda world: (rank(world), float(operations.allreduce(1.0)))) == [(0, 1.0), (1, 1.0)]


def test_grouped_ones_are_each_by_itself() -> None:
    def rank(world: World) -> None:
        tensors = [tf.fill([2], float(world.rank)), tf.constant([[world.rank + 1, 0]])]
        found = operations.grouped_allreduce(tensors, op=Sum, name="group")
        assert [one.numpy().tolist() for one in found] == [[1.0, 1.0], [[3, 0]]]
        found = operations.grouped_allgather(tensors, name="group")
        assert [one.numpy().tolist() for one in found] == [[0.0, 0.0, 1.0, 1.0], [[1, 0], [2, 0]]]
        found = operations.grouped_reducescatter([tensors[0], tensors[0] * 2.0], op=Sum)
        assert [one.numpy().tolist() for one in found] == [[1.0], [2.0]]
        with pytest.raises(tf.errors.FailedPreconditionError, match=r"named 'b\.0'"):
            operations.grouped_allgather([1.0, 2.0], name="ab"[world.rank])

    run(2, rank)


@both_ways
@pytest.mark.parametrize("op", [Average, Sum])
def test_gradients_of_reductions(way: Any, op: int) -> None:
    """They are the same reduction of the gradients."""

    def rank(world: World) -> None:
        all_up = [own(number) * 0.25 for number in range(3)]
        factors: dict[str, Any] = {"prescale_factor": 0.5, "postscale_factor": 4.0}
        total = np.sum(all_up, 0) * 2.0 / (3 if op == Average else 1)
        reduce = functools.partial(operations.allreduce, op=op, **factors)
        np.testing.assert_allclose(gradient(way, reduce, own(world.rank), all_up[world.rank]), total, rtol=1e-14)
        scatter = functools.partial(operations.reducescatter, op=op, **factors)
        rows = [2, 1, 1][world.rank]  # of four, the earlier ranks get more
        up = own(world.rank, rows)
        gathered = np.concatenate([own(number, count) for number, count in enumerate([2, 1, 1])])
        expected = gathered * 2.0 * (3 if op == Sum else 1)
        np.testing.assert_allclose(gradient(way, scatter, own(world.rank), up), expected, rtol=1e-14)

    run(3, rank)


@both_ways
def test_gradients_of_gathered_and_of_sent_rows(way: Any) -> None:
    """Averaged over ranks, not added up."""

    def rank(world: World) -> None:
        counts = [1, 2, 3]
        start = sum(counts[: world.rank])
        all_up = [own(number, 6) for number in range(3)]
        found = gradient(way, operations.allgather, own(world.rank, counts[world.rank]), all_up[world.rank])
        np.testing.assert_allclose(found, np.mean(all_up, 0)[start : start + counts[world.rank]], rtol=1e-14)
        scalars = gradient(way, operations.allgather, np.float64(world.rank), np.arange(3.0) * (world.rank + 1))
        np.testing.assert_allclose(scalars, world.rank * 2.0)
        sent = gradient(way, lambda x: operations.broadcast(x, 1), own(world.rank, 6), all_up[world.rank])
        np.testing.assert_allclose(sent, np.mean(all_up, 0) if world.rank == 1 else np.zeros((6, 2)), rtol=1e-14)

    run(3, rank)


@both_ways
def test_rows_for_each_rank_and_their_gradients(way: Any) -> None:
    splits = [[1, 0, 3], [2, 2, 0], [0, 1, 3]]  # by the rank that sends

    def sent(rank: int, to: int, rows: Any) -> Any:
        start = sum(splits[rank][:to])
        return rows[start : start + splits[rank][to]]

    def rank(world: World) -> None:
        here = world.rank
        exchange = way(lambda x: operations.alltoall(x, splits[here]))
        found, received = exchange(own(here))
        assert received.numpy().tolist() == [splits[number][here] for number in range(3)]
        truth = np.concatenate([sent(number, here, own(number)) for number in range(3)])
        np.testing.assert_array_equal(found, truth)
        back = gradient(way, lambda x: operations.alltoall(x, splits[here])[0], own(here), truth)
        np.testing.assert_array_equal(back, own(here))
        with pytest.raises(ValueError, match="splits must be whole numbers, not float32"):
            operations.alltoall(own(here), [4.0, 0.0, 0.0])

    run(3, rank)


def test_ranks_of_a_set_are_named_by_their_global_numbers() -> None:
    def rank(world: World) -> Any:
        pair = ProcessSet([0, 2])
        process_sets.register([pair])
        if world.rank == 1:
            return None
        value = tf.constant([float(world.rank)])
        with pytest.raises(INVALID, match=r"root rank 1 is not one of the ranks \[0, 2\]"):
            operations.broadcast(value, 1, process_set=pair)
        found = gradient(lambda f: f, lambda x: operations.broadcast(x, 2, process_set=pair), value, 1.0 + world.rank)
        variable = tf.Variable(value)
        (sent,) = operations.broadcast_([variable], 2, process_set=pair)
        assert sent.numpy().tolist() == variable.numpy().tolist() == [2.0]
        return found.tolist()

    assert run(3, rank) == [[0.0], None, [2.0]]


def test_only_variables_are_assigned() -> None:
    def rank(world: World) -> None:
        with pytest.raises(ValueError, match="broadcast_ takes variables"):
            operations.broadcast_([tf.Variable(1.0), tf.constant(1.0)], 0)
        with pytest.raises(ValueError, match="is not registered"):
            operations.allreduce(1.0, process_set=ProcessSet([0]))

    run(1, rank)


def test_as_the_keras_modules_have_them() -> None:
    def rank(world: World) -> None:
        assert float(values.allreduce(world.rank + 1.0)) == 1.5
        assert float(values.allreduce(world.rank + 1.0, average=False, prescale_factor=2.0)) == 6.0
        assert values.allgather([world.rank]).numpy().tolist() == [0, 1]
        assert float(values.broadcast(float(world.rank), 1)) == 1.0
        assert values.reducescatter([1.0, 2.0], op=Sum).numpy().tolist() == [2.0 * (world.rank + 1)]

    run(2, rank)
