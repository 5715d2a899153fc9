"""A training step of which XLA compiles what it can."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mpitrain.training.compiled_step import compiled_train_step
from mpitrain.training.optimizer import DistributedOptimizer, hook_of
from mpitrain.world.world import World
from tests.unit.job import run

RATE = 0.5


def test_a_step_that_xla_cannot_take_whole_is_cut_at_the_exchange() -> None:
    def rank(world: World) -> Any:
        with keras.name_scope("model"):
            weight = keras.Variable(np.array([1.0, 2.0]), dtype="float64", name="w")
        optimizer = DistributedOptimizer(keras.optimizers.SGD(RATE), world=world)
        optimizer.build([weight])
        hook = hook_of(optimizer)
        assert hook is not None
        seen: list[str] = []

        def train_step(data: Any) -> Any:
            outer = tf.compat.v1.get_default_graph()
            seen.append("graph" if outer.building_function else "eager")
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight * data)
            optimizer.apply(tape.gradient(loss, [weight.value]), [weight])
            return {"loss": loss}

        step = compiled_train_step(train_step, hook, lambda: [weight])
        run_step = tf.function(step, autograph=False)
        data = tf.constant([1.0, 3.0], tf.float64) * (world.rank + 1.0)
        logs = [float(run_step(data)["loss"]) for _ in range(2)]
        # Ranks that are threads exchange in Python, which XLA cannot call: the second way.
        assert hook.compiled is not None
        assert hook.captured is None
        return logs, weight.numpy().tolist(), set(seen)

    mean = np.array([1.5, 4.5])
    values = [np.array([1.0, 2.0]) - RATE * mean * steps for steps in range(3)]
    for number, (logs, weight, seen) in enumerate(run(2, rank)):
        own = np.array([1.0, 3.0]) * (number + 1)
        assert logs == [float(values[0] @ own), float(values[1] @ own)]
        assert weight == values[2].tolist()
        assert seen == {"graph"}
