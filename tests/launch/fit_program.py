"""A Keras training in which all ranks read the same, the last one evaluates alone, and then reads a NaN."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import mpitrain

world = mpitrain.init(non_finite="stop")  # before TensorFlow, which then loads faster

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

SECONDS = 6.0
last = world.rank == world.size - 1
epoch = [0]
samples = np.random.default_rng(0).random((64, 4), np.float32)


def read() -> Iterator[Any]:
    for number, row in enumerate(samples):
        broken = last and epoch[0] == 1 and number == 40
        yield row * np.nan if broken else row, row[:1]


def read_slowly() -> Iterator[Any]:
    time.sleep(SECONDS)
    yield samples[0], samples[0, :1]


def dataset(generator: Any) -> Any:
    signature = (tf.TensorSpec((4,), "float32"), tf.TensorSpec((1,), "float32"))
    return tf.data.Dataset.from_generator(generator, output_signature=signature).batch(4)


def model() -> Any:
    made = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    )
    made.compile("sgd", "mse")
    return made


class Aside(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.other = model()

    def on_epoch_begin(self, number: int, logs: Any = None) -> None:
        epoch[0] = number

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if last and batch == 5 and epoch[0] == 0:
            began = time.monotonic()
            self.other.evaluate(dataset(read_slowly), verbose=0)
            print(f"evaluated for {time.monotonic() - began:.1f} s", flush=True)


model().fit(dataset(read), epochs=3, verbose=0, callbacks=[mpitrain.callbacks.DataParallel(), Aside()])
