"""What an optimizer of all ranks makes of their gradients; `tests/spmd` has the rest."""

from __future__ import annotations

import threading
from typing import Any

import keras
import pytest
import tensorflow as tf

from mpitrain.strategies.weighting import added_up, sample_count
from mpitrain.training.optimizer import DistributedOptimizer
from mpitrain.world.world import World
from tests.unit.job import run

ONE_AT_A_TIME = threading.Lock()


@pytest.mark.parametrize(("sums", "expected"), [(True, -1.0), (False, 1.0 - 4.0 / 3.0)])
def test_accumulated_gradients_of_no_samples_do_not_count(sums: bool, expected: float) -> None:
    def rank(world: World) -> float:
        with ONE_AT_A_TIME:
            variable = tf.Variable(1.0)
            optimizer: Any = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
            DistributedOptimizer(optimizer, world=world)
            optimizer.build([variable])
        # That of the second rank's first batch, which has no rows, is made of the weights alone.
        for samples, gradient in [[(1, 1.0), (1, 1.0)], [(0, 8.0), (1, 2.0)]][world.rank]:
            with added_up(sums), sample_count(samples):
                optimizer.apply([tf.constant(gradient)], [variable])
        return float(variable.numpy())

    assert run(2, rank) == pytest.approx([expected] * 2)
