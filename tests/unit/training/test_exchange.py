"""The mean of gradients by itself: of the samples of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from mpitrain.training.exchange import current_exchange, sample_count
from mpitrain.world.world import World
from tests.unit.job import run


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_mean_is_over_samples(ranks: int) -> None:
    variable = tf.Variable([0.0, 0.0], dtype=tf.float64)

    def rank(world: World) -> Any:
        exchange, own = current_exchange(world), tf.constant([1.0, 10.0], tf.float64) * float(world.rank)
        with sample_count(world.rank + 1):
            mean, absent = exchange.mean([own, None], [variable, variable], "of a test")
        assert absent is None
        return mean.numpy()

    expected = np.array([1.0, 10.0]) * np.average(range(ranks), weights=range(1, ranks + 1))
    for found in run(ranks, rank):
        np.testing.assert_allclose(found, expected, rtol=1e-14)
