"""One run in two calls of `fit`, as callbacks see it."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from mpitrain.trainer.split_fit import SplitFitCallbacks


class Noting(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.seen.append("begin")

    def on_train_end(self, logs: Any = None) -> None:
        self.seen.append("end")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.seen.append(batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(-batch)


def test_callbacks_see_one_run_and_weights_are_averaged_at_its_end() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.0, use_ema=True), "mse", run_eagerly=True)
    noting, finalized = Noting(), []
    x, y = np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)
    callbacks = SplitFitCallbacks([noting], model, epochs=2, steps=2)
    finalize = model.optimizer.finalize_variable_values

    def patched(variables: Any) -> None:
        finalized.append(len(noting.seen))
        finalize(variables)

    object.__setattr__(model.optimizer, "finalize_variable_values", patched)  # as with parameter servers
    with callbacks.rest_of_epoch(1):
        model.fit(x[:2], y[:2], batch_size=2, epochs=1, callbacks=callbacks, verbose=0)
    assert finalized == []
    model.fit(x, y, batch_size=2, initial_epoch=1, epochs=2, callbacks=callbacks, verbose=0)
    assert noting.seen == ["begin", 1, -1, 0, 0, 1, -1, "end"]
    assert len(finalized) == 1


def test_an_optimizer_that_nobody_patched_is_as_it_was() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    callbacks = SplitFitCallbacks([], model, epochs=2, steps=2)
    with callbacks.rest_of_epoch(1):
        assert "finalize_variable_values" in vars(model.optimizer)
    assert "finalize_variable_values" not in vars(model.optimizer)
