"""Batches of which nobody says how many there are; given `steps`, somebody does."""

import sys
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

keras.config.set_floatx("float64")
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(64, 4))
y = x.sum(axis=1, keepdims=True)


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Four of them."""
    for start in range(0, 64, 16):
        yield x[start : start + 16], y[start : start + 16]


shapes = (tf.TensorSpec((None, 4), tf.float64), tf.TensorSpec((None, 1), tf.float64))
data = tf.data.Dataset.from_generator(batches, output_signature=shapes)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.1), "mse")
if "steps" in sys.argv:
    model.fit(data.repeat(), epochs=2, steps_per_epoch=4, verbose=0)
else:
    model.fit(data, epochs=2, verbose=0)
print(int(model.optimizer.iterations), model.evaluate(x, y, batch_size=64, verbose=0))
