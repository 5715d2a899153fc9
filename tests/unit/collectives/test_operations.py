"""Collectives on tensors, on ranks that are threads; what engines make of all dtypes is in test_engine.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from mpitrain.collectives import operations
from mpitrain.errors import MismatchError
from mpitrain.world.world import World
from tests.unit.job import run


def _way(function: Callable[..., Any], in_graph: bool) -> Callable[..., Any]:
    return tf.function(function, autograph=False) if in_graph else function


def test_factors_are_applied_before_and_after() -> None:
    def rank(world: World) -> list[Any]:
        own = tf.constant([1.0, -2.0]) * (world.rank + 1)
        whole = tf.constant([3, -5]) * (world.rank + 1)
        factors: dict[str, Any] = {"before": 0.5, "after": 3.0, "world": world}
        return [
            operations.all_reduce(own, "sum", **factors).numpy().tolist(),
            operations.all_reduce(own, "mean", **factors).numpy().tolist(),
            operations.all_reduce(own, "max", **factors).numpy().tolist(),
            operations.all_reduce(whole, "sum", **factors).numpy().tolist(),
            operations.all_reduce(whole, "mean", after=0.5, world=world).numpy().tolist(),
        ]

    # Integers are cut after each factor: 1 + 3 = 4, -2 - 5 = -7; 9 * 0.5 / 2 = 2.25, -15 * 0.5 / 2 = -3.75.
    assert run(2, rank) == [[[4.5, -9.0], [2.25, -4.5], [3.0, -3.0], [12, -21], [2, -3]]] * 2


def test_means_of_integers_are_cut_towards_zero_and_do_not_overflow() -> None:
    def rank(world: World) -> list[Any]:
        small = operations.all_reduce(tf.constant([200, 3], tf.uint8), world=world)
        negative = operations.all_reduce(tf.constant([-3, 3, -1]) * world.rank, world=world)
        return [small.numpy().tolist(), negative.numpy().tolist()]

    assert run(2, rank) == [[[200, 3], [-1, 1, 0]]] * 2


@pytest.mark.parametrize(("ranks", "in_graph"), [(1, False), (2, True), (3, False)])
def test_the_others(ranks: int, in_graph: bool) -> None:
    def rank(world: World) -> list[Any]:
        def call() -> list[tf.Tensor]:
            own, size = world.rank, world.size
            splits = tf.range(size)  # r rows to rank r
            sent = tf.repeat(tf.range(size), splits) * 100 + own
            return [
                operations.all_gather(tf.fill([own, 2], float(own)), world=world),
                operations.all_gather(tf.constant(own), world=world),
                operations.broadcast(tf.constant([own, 7]), size - 1, world=world),
                operations.reduce_scatter(tf.range(2 * size + 1.0), "sum", world=world),
                *operations.all_to_all(sent, splits, world=world),
            ]

        return [one.numpy().tolist() for one in _way(call, in_graph)()]

    found = run(ranks, rank)
    parts = np.split(np.arange(2 * ranks + 1.0) * ranks, np.cumsum([3] + [2] * (ranks - 1))[:-1])
    for own, (rows, numbers, sent, part, got, counts) in enumerate(found):
        assert rows == [[float(r)] * 2 for r in range(ranks) for _ in range(r)]
        assert numbers == list(range(ranks))
        assert sent == [ranks - 1, 7]
        assert part == parts[own].tolist()
        assert got == [own * 100 + r for r in range(ranks) for _ in range(own)]
        assert counts == [own] * ranks


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        ((tf.zeros(2), "sum", None), (tf.zeros(3), "sum", None), r"all_reduce\(sum\) of float32\[3\]"),
        ((tf.zeros(2), "sum", None), (tf.zeros(2), "mean", None), r"all_reduce\(mean\) of float32\[2\]"),
        ((tf.zeros(2), "sum", None), (tf.zeros(2, tf.int32), "sum", None), r"all_reduce\(sum\) of int32\[2\]"),
        ((tf.zeros(2), "sum", "a"), (tf.zeros(2), "sum", "b"), r"named 'b'"),
    ],
    ids=["shape", "operation", "dtype", "name"],
)
def test_ranks_that_differ_are_told_on_all(mine: Any, theirs: Any, words: str) -> None:
    def rank(world: World) -> str:
        tensor, op, name = theirs if world.rank == 1 else mine
        with pytest.raises(MismatchError, match=words) as caught:
            operations.all_reduce(tensor, op, name=name, world=world)
        assert operations.all_reduce(tf.constant(1.0), "sum", world=world).numpy() == world.size, "and all go on"
        return str(caught.value)

    told = run(3, rank)
    assert told == told[:1] * 3
    assert "  ranks 0, 2 (host): all_reduce" in told[0] or "  rank 1 (host): all_reduce" in told[0], told[0]


def test_in_a_graph_the_mismatch_is_an_error_of_tensorflow() -> None:
    def rank(world: World) -> str:
        @tf.function
        def reduce() -> tf.Tensor:
            return operations.all_reduce(tf.zeros(2 + world.rank), world=world)

        with pytest.raises(tf.errors.FailedPreconditionError) as caught:
            reduce()
        return str(caught.value)

    assert all("MismatchError: ranks call different collectives" in text for text in run(2, rank))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda world: operations.all_reduce(tf.zeros(1), "median", world=world), "median"),
        (
            lambda world: operations.all_reduce(tf.zeros(1, tf.complex64), "max", world=world),
            "complex numbers have no max",
        ),
        (lambda world: operations.all_reduce(tf.constant(["a"]), world=world), "string"),
        (lambda world: operations.broadcast(tf.zeros(1), 2, world=world), "root must be a rank from 0 to 1, not 2"),
        (lambda world: operations.reduce_scatter(tf.zeros(()), world=world), "scalar|axis|dimension"),
        (lambda world: operations.all_to_all(tf.zeros(3), tf.constant([1, 1]), world=world), "add up to all rows"),
    ],
)
def test_what_cannot_be_is_refused_on_all_ranks(call: Callable[[World], Any], words: str) -> None:
    def rank(world: World) -> None:
        with pytest.raises((ValueError, TypeError), match=words):
            call(world)

    run(2, rank)
