"""The tape whose gradients are the mean over ranks: what one process finds with all samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from mpitrain.errors import UsageError
from mpitrain.strategies.weighting import sample_count
from mpitrain.training.tape import DistributedGradientTape
from mpitrain.world.world import World
from tests.unit.job import run

ROWS = [3, 1, 4]


def rows(rank: int) -> Any:
    return np.random.default_rng(rank).normal(size=(ROWS[rank], 2))


def everyone(ranks: int) -> Any:
    return np.concatenate([rows(rank) for rank in range(ranks)])


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("told", ["samples", "context", "sum", "nothing"])
@pytest.mark.parametrize("in_graph", [False, True])
def test_gradients_are_those_of_all_samples(ranks: int, told: str, in_graph: bool) -> None:
    def rank(world: World) -> Any:
        x = tf.constant(rows(world.rank))
        w = tf.Variable([[1.0 + world.rank], [2.0]], dtype=tf.float64, name="w")  # becomes that of rank 0

        def gradient() -> Any:
            loss_is = "sum" if told == "sum" else "mean"
            with DistributedGradientTape(tf.GradientTape(), world=world, loss_is=loss_is) as tape:
                loss = tf.reduce_sum(tf.square(x @ w)) / (1 if told == "sum" else x.shape[0])
            if told == "context":
                with sample_count(x.shape[0]):
                    return tape.gradient(loss, [w])[0]
            return tape.gradient(loss, w, samples=x.shape[0] if told == "samples" else None)

        step = tf.function(gradient) if in_graph else gradient
        step()  # eagerly, the first of ranks with other values does not count
        return step().numpy(), w.numpy()

    found = run(ranks, rank)
    w = np.array([[1.0], [2.0]])
    each = [2 * rows(rank).T @ (rows(rank) @ w) for rank in range(ranks)]
    expected = {
        "sum": sum(each),
        "nothing": sum(gradient / ROWS[rank] for rank, gradient in enumerate(each)) / ranks,
    }.get(told, sum(each) / sum(ROWS[:ranks]))
    for gradient, variable in found:
        assert (variable == w).all()
        assert (gradient == found[0][0]).all()
        np.testing.assert_allclose(gradient, expected, rtol=1e-13)


def test_rows_of_embeddings_and_what_is_not_connected() -> None:
    def rank(world: World) -> Any:
        table, other = tf.Variable(tf.ones((4, 2), tf.float64)), tf.Variable(1.0)
        with DistributedGradientTape(tf.GradientTape(), world=world) as tape:
            looked_up = tf.gather(table, [world.rank, 3])
            loss = tf.reduce_sum(looked_up * (world.rank + 1.0))
        found = tape.gradient(loss, {"table": table, "other": other})
        assert isinstance(found["table"], tf.IndexedSlices)
        return tf.convert_to_tensor(found["table"]).numpy(), found["other"], tape.watched_variables()[0] is table

    for dense, other, is_own in run(2, rank):
        np.testing.assert_array_equal(dense, [[0.5, 0.5], [1.0, 1.0], [0.0, 0.0], [1.5, 1.5]])
        assert other is None
        assert is_own  # all else is the tape's own


def test_another_kind_of_loss_is_refused() -> None:
    def rank(world: World) -> None:
        with pytest.raises(UsageError, match="loss_is"):
            DistributedGradientTape(tf.GradientTape(), world=world, loss_is="whole")

    run(1, rank)
