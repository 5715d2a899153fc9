"""Callbacks see one run, though it takes several calls of `fit`, and know how far it has come."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from mpitrain.checkpoint.options import Position
from mpitrain.faults.activity import Activity
from mpitrain.trainer.run_callbacks import RunCallbacks

STEPS, START = 3, Position()


class Seen(keras.callbacks.Callback):
    """What is called, in turn; each step counts as an update."""

    def __init__(self, activity: Activity) -> None:
        super().__init__()
        self.activity = activity
        self.calls: list[Any] = []
        self.positions: list[Position] = []
        self.every: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        self.calls.append("begin")

    def on_train_end(self, logs: Any = None) -> None:
        self.calls.append("end")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(("epoch", epoch))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(("done", epoch))
        self.positions.append(self.every.position(4, 10))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.calls.append(batch)
        self.positions.append(self.every.position(4, 10))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.activity.updates += 1
        self.calls.append(("ends", batch))


def model() -> Any:
    keras.utils.set_random_seed(1)
    made = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    made.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"], run_eagerly=True)
    return made


def batches(begin: int = 0) -> Any:
    """Those of an epoch from a step on."""
    x = np.arange(STEPS * 2.0).reshape(-1, 1)
    return tf.data.Dataset.from_tensor_slices((x, x + 1.0)).batch(2).skip(begin)


def callbacks(own: Any, begin: Position = START) -> tuple[RunCallbacks, Seen]:
    activity = Activity()
    activity.updates = 7
    seen = Seen(activity)
    seen.every = RunCallbacks([seen], own, 2, STEPS, activity, begin)
    return seen.every, seen


def test_positions_of_a_run() -> None:
    own = model()
    every, seen = callbacks(own)
    own.fit(batches(), epochs=2, callbacks=every, verbose=0)
    # Of 10 samples, four a step: the third step has two.
    epoch = [(0, 0), (1, 4), (2, 8), (3, 10)]
    expected = [Position(number, step, done, 3 * number + step) for number in range(2) for step, done in epoch]
    assert seen.positions == expected
    assert every.begun == Position(2, 0, 0, 6)
    assert every.ended == 2
    assert every.noted[1] == [0, 1]


def test_the_rest_of_an_epoch_is_no_run_of_its_own() -> None:
    whole = model()
    of_whole = callbacks(whole)[1]
    whole.fit(batches(), epochs=2, callbacks=of_whole.every, verbose=0)

    own = model()
    before, _ = callbacks(own)
    own.fit(batches().take(1), epochs=1, callbacks=before, verbose=0)
    every, seen = callbacks(own, Position(0, 1, 4, 1))
    averaged: list[Any] = []
    own.optimizer.finalize_variable_values = averaged.append
    with every.rest_of_epoch(1):
        own.fit(batches(1), epochs=1, callbacks=every, verbose=0)
    assert averaged == [], "weights are averaged for the end of the run"
    own.optimizer.__dict__.pop("finalize_variable_values", None)
    own.fit(batches(), initial_epoch=1, epochs=2, callbacks=every, verbose=0)
    first = [call for call in of_whole.calls if call not in (0, ("ends", 0))]
    second = of_whole.calls[of_whole.calls.index(("epoch", 1)) :]
    assert seen.calls == [*first[: first.index(("epoch", 1))], *second], "one begin, one end, and no step counted twice"
    assert seen.positions[0] == Position(0, 1, 4, 1)
    assert seen.positions[-1] == Position(1, 3, 10, 6)
    for mine, truth in zip(own.weights, whole.weights, strict=True):
        np.testing.assert_allclose(mine.numpy(), truth.numpy(), rtol=1e-6)
    assert own.history.epoch == [0, 1]


@pytest.mark.parametrize("keeps", [True, False])
def test_metrics_of_an_epoch_go_on_after_a_loss(keeps: bool) -> None:
    """The step under way is lost; the others begin their epoch again where all ranks were."""
    whole = model()
    expected = whole.fit(batches(), epochs=1, callbacks=callbacks(whole)[0], verbose=0).history
    own = model()
    every, seen = callbacks(own)
    every.keeps_metrics = keeps

    class LostError(Exception):
        pass

    def lost() -> None:
        raise LostError

    every.after_step = lost
    with pytest.raises(LostError):
        own.fit(batches(), epochs=1, callbacks=every, verbose=0)
    every.after_step = None
    position = every.position(4, 10)
    assert position == Position(0, 1, 4, 1)
    every.on_shrink(position, 10, {"loss": []}, [])
    with every.rest_of_epoch(position.step):
        history = own.fit(batches(1), epochs=1, callbacks=every, verbose=0).history
    assert seen.positions[-1] == Position(0, 3, 10, 3)
    same = {name: history[name] == pytest.approx(expected[name], rel=1e-6) for name in expected}
    assert same == dict.fromkeys(expected, keeps)


def test_an_epoch_of_which_only_the_end_is_left_has_its_numbers() -> None:
    own = model()
    every, _ = callbacks(own)
    every.keeps_metrics = True
    found: list[Any] = []
    every.callbacks.append(keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: found.append(dict(logs))))
    own.fit(batches(), epochs=1, callbacks=every, verbose=0)
    every, _ = callbacks(own)
    every.keeps_metrics = True
    every.on_epoch_begin(0)
    for batch in range(STEPS):
        own.train_on_batch(*next(iter(batches(batch))))
        every.on_train_batch_end(batch)
    numbers = own.get_metrics_result()
    every.on_shrink(Position(0, STEPS, 10, STEPS), 10, {}, [])
    own.reset_metrics()
    logs: dict[str, Any] = {}
    every.on_epoch_begin(0)
    every.on_epoch_end(0, logs)
    assert {name: float(value) for name, value in logs.items()} == pytest.approx(
        {name: float(value) for name, value in numbers.items()}
    )
    assert every.ended == 1
