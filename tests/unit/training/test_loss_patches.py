"""What Keras computes while a step is under way goes through that step, and nothing else does."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mpitrain.training.loss_patches import install, keep_batch_norm_synchronized, stepping
from mpitrain.world.world import World
from tests.unit.job import run

Y, P = np.array([[1.0], [3.0]], np.float32), np.array([[0.0], [0.0]], np.float32)


class Step:
    """Notes what it is asked, and doubles losses."""

    computed_by_keras = False

    def __init__(self) -> None:
        self.seen: list[str] = []

    def loss(self, original: Any, loss: Any, *args: Any) -> Any:
        self.seen.append(type(loss).__name__)
        return 2.0 * original(loss, *args)

    overridden = loss

    def term(self, value: Any, values: Any, *args: Any) -> Any:
        self.seen.append("reduced")
        return value

    def weight(self, metric: Any, values: Any, sample_weight: Any) -> Any:
        self.seen.append(type(metric).__name__)
        return [0.0, 1.0]

    def of_whole_batch(self, function: Any) -> Any:
        return function

    def note_added(self, layer: Any, loss: Any, by_keras: bool) -> None:
        self.seen.append("by Keras" if by_keras else "by the script")


class OwnLoss(keras.losses.Loss):
    """Of a script, with a call of its own."""

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return keras.ops.sum(y_true - y_pred)


def numbers() -> tuple[float, float, float]:
    """A loss of Keras, one of the script's own, and a metric."""
    metric = keras.metrics.MeanSquaredError()
    metric.update_state(Y, P)
    return float(keras.losses.MeanSquaredError()(Y, P)), float(OwnLoss()(Y, P)), float(metric.result())


def test_losses_and_metrics_ask_the_step_under_way() -> None:
    install()
    assert numbers() == (5.0, 4.0, 5.0)
    step = Step()
    with stepping(step):
        assert numbers() == (10.0, 8.0, 9.0)
    assert sorted(step.seen) == ["MeanSquaredError", "MeanSquaredError", "OwnLoss", "reduced"]
    assert numbers() == (5.0, 4.0, 5.0)


def test_losses_that_layers_add_ask_the_step() -> None:
    class Adding(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(keras.ops.sum(x))
            return x

    install()
    step, x = Step(), np.ones((2, 1), np.float32)
    layer = Adding(activity_regularizer=keras.regularizers.L2(1.0))
    with stepping(step):
        layer(x)
    assert sorted(step.seen) == ["by Keras", "by the script"]
    assert len(layer.losses) == 2
    layer(x)  # without a step nobody is asked
    assert len(step.seen) == 2


def test_moments_of_all_ranks_are_kept_in_steps_of_the_script() -> None:
    def rank(world: World) -> tuple[float, float]:
        x = tf.constant([[1.0], [3.0]]) + 4.0 * world.rank
        layer = keras.layers.BatchNormalization(momentum=0.0)
        layer.build((None, 1))
        keep_batch_norm_synchronized(world)
        layer(x, training=True)
        together = float(layer.moving_mean[0])
        keep_batch_norm_synchronized(None)
        layer(x, training=True)
        return together, float(layer.moving_mean[0])

    assert run(2, rank) == [(4.0, 2.0), (4.0, 6.0)]
