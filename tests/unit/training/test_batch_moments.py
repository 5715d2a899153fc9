"""Moments of the rows of all ranks, and what flows back through them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from mpitrain.strategies.weighting import sample_count
from mpitrain.training.batch_moments import moments
from mpitrain.training.step_collectives import StepCollectives
from mpitrain.world.world import World
from tests.unit.job import run

ROWS = [3, 2, 4]


def inputs(rank: int) -> Any:
    return 100.0 + np.random.default_rng(rank).normal(size=(ROWS[rank], 5, 2))


def mask_of(rank: int) -> Any:
    return np.random.default_rng(10 + rank).integers(0, 2, (ROWS[rank], 5)).astype(bool)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_moments_and_their_gradients(masked: bool, ranks: int) -> None:
    weights = [rows / sum(ROWS[:ranks]) * ranks for rows in ROWS]  # so that the mean over ranks is that over rows

    def loss(mean: Any, variance: Any) -> Any:
        return tf.reduce_sum(mean * [2.0, 3.0]) + tf.reduce_sum(tf.square(variance))

    def rank(world: World) -> Any:
        x = tf.constant(inputs(world.rank))
        mask = tf.constant(mask_of(world.rank)) if masked else None
        with tf.GradientTape() as tape, sample_count(x.shape[0]):
            tape.watch(x)
            found = moments(x, mask, (0, 1), StepCollectives(world), weights[world.rank])
            value = loss(*found)
        return [one.numpy() for one in found], tape.gradient(value, x).numpy()

    everything = tf.constant(np.concatenate([inputs(number) for number in range(ranks)]))
    mask = tf.constant(np.concatenate([mask_of(number) for number in range(ranks)])) if masked else None
    with tf.GradientTape() as tape:
        tape.watch(everything)
        expected = keras.layers.BatchNormalization(dtype="float64")
        expected.build(everything.shape)
        truth = expected._moments(everything, mask)
        value = loss(*truth)
    gradient = np.split(tape.gradient(value, everything).numpy(), np.cumsum(ROWS[:ranks])[:-1])
    for number, (found, own) in enumerate(run(ranks, rank)):
        for mine, theirs in zip(found, truth, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-9)
        # What flows back is such that the mean over ranks, weighted as gradients are, is that of the whole batch.
        np.testing.assert_allclose(own * weights[number] / ranks, gradient[number], rtol=1e-6, atol=1e-9)


def test_a_large_mean_loses_no_digits_of_the_variance() -> None:
    """Only sums travel, in double precision, of what each rank has taken its own mean from."""

    def rank(world: World) -> Any:
        x = tf.constant(np.array([[1e4], [1e4 + 1 + world.rank]], np.float32))
        with sample_count(2):
            return [one.numpy() for one in moments(x, None, (0,), StepCollectives(world), 1.0)]

    values = np.array([1e4, 1e4 + 1, 1e4, 1e4 + 2])
    for mean, variance in run(2, rank):
        assert mean == pytest.approx(values.mean(), rel=1e-7)
        assert variance == pytest.approx(values.var(), rel=1e-5)
