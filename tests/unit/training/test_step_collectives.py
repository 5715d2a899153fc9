"""What ranks tell each other in the middle of a step, and what flows back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from mpitrain.errors import AgreedError
from mpitrain.training.step_collectives import StepCollectives
from mpitrain.world.world import World
from tests.unit.job import run


@pytest.mark.parametrize("in_graph", [False, True])
def test_totals_and_rows(in_graph: bool) -> None:
    rows = [3, 1]  # those that ranks 0 and 1 of 2 have of a batch of 4, and one more

    def rank(world: World) -> Any:
        collectives = StepCollectives(world)
        own = tf.constant([[float(10 * world.rank + row)] for row in range(rows[world.rank])])

        def step(x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                (found, twice), places = collectives.rows([x, 2.0 * x], lambda: tf.constant(0.5))
                value = tf.reduce_sum(found * tf.reshape([1.0, 2.0, 3.0, 4.0], (4, 1))) + tf.reduce_sum(twice)
            total = collectives.total(tf.shape(x)[0])
            return found, places, tape.gradient(value, x), total

        step = tf.function(step) if in_graph else step
        return [one.numpy().tolist() for one in step(own)]

    first, second = run(2, rank)
    assert first[0] == second[0] == [[0.0], [10.0], [1.0], [2.0]]
    assert (first[1], second[1]) == ([0, 2, 3], [1])
    assert (first[2], second[2]) == ([[1.5], [2.5], [3.0]], [[2.0]])
    assert first[3] == second[3] == 4


def test_the_mean_of_gradients_is_that_of_the_mean_loss() -> None:
    weights, factors = [0.5, 1.5], [3.0, 7.0]

    def rank(world: World) -> Any:
        x = tf.constant(2.0, tf.float64)
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = StepCollectives(world).weighted_total(x, tf.constant(weights[world.rank], tf.float64))
            loss = factors[world.rank] * total
        return float(total), float(tape.gradient(loss, x))

    found = run(2, rank)
    # The loss of all is the weighted mean of theirs, (0.5 * 3 + 1.5 * 7) / 2 times the total: 6 for each rank's x.
    assert [total for total, _ in found] == [4.0, 4.0]
    assert [gradient * weight / 2 for (_, gradient), weight in zip(found, weights, strict=True)] == [6.0, 6.0]


def test_where_one_rank_runs_a_step_alone_nothing_is_exchanged() -> None:
    def rank(world: World) -> Any:
        if world.rank:
            return None
        alone = StepCollectives(world, active=lambda: False)
        (rows,), places = alone.rows([tf.constant([1.0, 2.0])], lambda: tf.constant(1.0))
        return [float(alone.total(tf.constant(5.0))), rows.numpy().tolist(), np.asarray(places).tolist()]

    assert run(2, rank)[0] == [5.0, [1.0, 2.0], [0, 1]]


def test_xla_is_told_that_it_cannot() -> None:
    def rank(world: World) -> None:
        total = tf.function(StepCollectives(world).total, jit_compile=True)
        with pytest.raises(AgreedError, match="has jit_compile=True, and XLA cannot compile"):
            total(tf.constant(1.0))

    run(1, rank)
