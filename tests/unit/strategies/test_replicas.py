"""Variables that are the same on all ranks: made so, and found out where they are not."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from mpitrain.errors import MismatchError, ReplicaError
from mpitrain.strategies import replicas
from mpitrain.world.world import World
from tests.unit.job import run

DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "uint8", "bool", "complex64")


def variables(rank: int) -> list[Any]:
    """Of all dtypes, those at odd places other on each rank."""
    return [
        tf.Variable(tf.cast(tf.fill([2, place % 3], 1 + rank * (place % 2)), dtype), name=f"v{place}")
        for place, dtype in enumerate(DTYPES)
    ]


def numbers(found: list[Any]) -> list[Any]:
    return [np.asarray(tf.cast(one, "complex128")).tolist() for one in found]


@pytest.mark.parametrize("root", [0, 2])
def test_broadcast(root: int) -> None:
    def rank(world: World) -> Any:
        own = variables(world.rank)
        replicas.broadcast_variables(own, root, world=world)
        return numbers(own)

    assert run(3, rank) == [numbers(variables(root))] * 3


def test_only_what_differs_is_found_and_taken() -> None:
    def rank(world: World) -> Any:
        own = variables(world.rank)
        found = replicas.differing(own, world=world)
        assert replicas.synchronize(own, world=world)
        assert not replicas.synchronize(own, world=world)
        replicas.verify_replicas(own, "now", world=world)
        return found, numbers(own)

    # Of those at odd places some hold nothing, or a bool that is true on all ranks.
    differ = [(place, [1, 2]) for place, dtype in enumerate(DTYPES) if place % 2 and place % 3 and dtype != "bool"]
    assert run(3, rank) == [(differ, numbers(variables(0)))] * 3


def test_a_replica_that_differs_is_named() -> None:
    def rank(world: World) -> str:
        with keras.name_scope("layer"):
            own = [keras.Variable([1.0, 2.0], name="kernel"), keras.Variable(float(world.rank == 1), name="bias")]
        with pytest.raises(ReplicaError) as caught:
            replicas.verify_replicas(own, "after epoch 3", world=world)
        return str(caught.value)

    told = run(3, rank)
    assert told == told[:1] * 3
    assert told[0].startswith("after epoch 3, ranks differ in 1 of 2 variables; the first is layer/bias, where rank 1")


def test_ranks_with_other_variables_are_told() -> None:
    def rank(world: World) -> None:
        with pytest.raises(MismatchError, match=r"v:0 float32\[2\]"):
            replicas.broadcast_variables([tf.Variable(tf.zeros(2 + world.rank), name="v")], world=world)

    run(2, rank)


def test_the_values_of_any_rank_are_adopted() -> None:
    def rank(world: World) -> Any:
        own = variables(world.rank)
        replicas.adopt(own, 1, world=world)
        return numbers(own)

    assert run(3, rank) == [numbers(variables(1))] * 3


def test_statistics_are_averaged_and_what_is_equal_keeps_its_bits() -> None:
    odd = np.float32(0.1)

    def rank(world: World) -> Any:
        own = [
            tf.Variable([odd, odd]),
            tf.Variable([float(world.rank), 6.0]),
            tf.Variable(world.rank, dtype=tf.float16),
        ]
        replicas.average_statistics(own, world=world)
        return [one.numpy().tolist() for one in own]

    assert run(3, rank) == [[[float(odd)] * 2, [1.0, 6.0], 1.0]] * 3


def test_random_streams_go_on_apart_and_repeatably() -> None:
    def rank(world: World) -> Any:
        generator, other = keras.random.SeedGenerator(5), keras.Variable([7, 8], dtype="uint32", name="counts")
        replicas.part_streams([generator.state, other], world=world)
        return generator.state.numpy().tolist(), other.numpy().tolist()

    assert run(3, rank) == [([5, rank << 20], [7, 8]) for rank in range(3)]


def test_what_has_no_value_yet() -> None:
    assert replicas.has_value(tf.Variable(1.0))
    seen = []

    @tf.function
    def trace() -> None:
        with tf.init_scope():
            pass
        seen.append(replicas.has_value(tf.constant(1.0)))

    trace()
    assert seen == [False]
