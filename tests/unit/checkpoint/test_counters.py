"""What callbacks count goes on in another run, and so does the learning rate."""

from __future__ import annotations

import json
from typing import Any

import keras
import numpy as np
import pytest

from mpitrain.checkpoint.counters import counters_of, learning_rate_of, scale_learning_rate, set_counters


def test_early_stopping_goes_on_waiting() -> None:
    losses = [1.0, 0.5, np.float32(0.7), 0.6, 0.9, 0.1]

    def trained(callback: Any, begin: int, end: int) -> list[int]:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.stop_training = False
        callback.set_model(model)
        callback.on_train_begin()
        if begin:
            set_counters(callback, json.loads(json.dumps(told)))
        stops = []
        for epoch in range(begin, end):
            callback.on_epoch_end(epoch, {"val_loss": losses[epoch]})
            stops += [epoch] if model.stop_training else []
        return stops

    def fresh() -> Any:
        return keras.callbacks.EarlyStopping(patience=3)

    first = fresh()
    assert trained(first, 0, 3) == []
    told = counters_of(first)
    assert (told["callback"], told["wait"], told["best_epoch"], told["best"]) == ("EarlyStopping", 1, 1, 0.5)
    assert trained(fresh(), 3, 5) == [4]  # the third epoch without a better one
    told = {"callback": "ReduceLROnPlateau", "wait": 1}
    assert trained(fresh(), 3, 5) == []  # those of another kind are none of its own


def test_of_other_callbacks_nothing_is_kept() -> None:
    callback = keras.callbacks.TerminateOnNaN()
    assert counters_of(callback) == {"callback": "TerminateOnNaN"}
    before = dict(vars(callback))
    set_counters(callback, {"callback": "TerminateOnNaN", "model": 3})
    assert vars(callback) == before


@pytest.mark.parametrize(
    ("here", "there", "expected"), [(0.4, 0.1, 0.8), (0.1, 0.1, 0.2), (None, 0.1, 0.2), (0.1, None, 0.2)]
)
def test_the_ratio_of_learning_rates_is_kept(here: float | None, there: float | None, expected: float) -> None:
    optimizer = keras.optimizers.SGD(0.2)  # that of the checkpoint, which a callback had changed
    scale_learning_rate(optimizer, here, there)
    assert learning_rate_of(optimizer) == pytest.approx(expected)


def test_a_schedule_has_no_rate_of_its_own() -> None:
    assert learning_rate_of(keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5))) is None
