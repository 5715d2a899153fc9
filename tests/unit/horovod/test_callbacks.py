"""Horovod's Keras callbacks: what they broadcast and average, and the rates that they set."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.errors import MismatchError
from mpitrain.horovod import callbacks
from mpitrain.horovod.callbacks import LearningRateScheduleCallback, LearningRateWarmupCallback
from mpitrain.world.world import World
from tests.unit.horovod.job import run


class Net:
    """What schedules see of a model: an optimizer, whose momentum a step reads."""

    compiled_anew = 0

    def __init__(self, **options: Any) -> None:
        self.optimizer = keras.optimizers.SGD(0.5, **options)

    def make_train_function(self, force: bool) -> None:
        assert force
        self.compiled_anew += 1


def rates(callback: Any, net: Any, epochs: int, steps: int | None) -> list[float]:
    """The rate of each step of a run, as Keras calls a callback."""
    callback.set_params({"steps": steps})
    callback.set_model(net)
    callback.on_train_begin()
    seen = []
    for epoch in range(epochs):
        callback.on_epoch_begin(epoch)
        for batch in range(steps or 2):
            callback.on_train_batch_begin(batch)
            seen.append(float(net.optimizer.learning_rate.numpy()))
            callback.on_train_batch_end(batch)
        logs: dict[str, Any] = {}
        callback.on_epoch_end(epoch, logs)
        assert logs["lr"] == seen[-1]
    return seen


@settings(max_examples=20)
@given(
    start=st.integers(0, 3),
    length=st.one_of(st.none(), st.integers(0, 3)),
    staircase=st.booleans(),
    steps=st.integers(1, 3),
    number=st.sampled_from([0.5, 2.0]),
    by_number=st.booleans(),
)
def test_schedule(start: int, length: int | None, staircase: bool, steps: int, number: float, by_number: bool) -> None:
    end = None if length is None else start + length
    multiplier: Any = number if by_number else (lambda epoch: 1.0 + epoch)
    callback = LearningRateScheduleCallback(4.0, multiplier, start, end, staircase)
    seen = rates(callback, Net(), 5, steps)
    rate = 0.5  # until the first epoch of the schedule
    for position, found in enumerate(seen):
        epoch, batch = divmod(position, steps)
        if epoch >= start and (end is None or epoch < end) and not (staircase and batch):
            when = epoch if staircase else epoch + batch / steps
            rate = 4.0 * (number ** (when - start) if by_number else 1.0 + when)
        assert found == pytest.approx(rate, rel=1e-6), (epoch, batch)


def test_without_a_number_of_steps() -> None:
    with pytest.raises(ValueError, match="give steps_per_epoch"):
        rates(LearningRateScheduleCallback(1.0, 2.0, staircase=False), Net(), 1, None)
    found = rates(LearningRateScheduleCallback(1.0, lambda e: e, staircase=False, steps_per_epoch=2), Net(), 1, None)
    assert found == [0.0, 0.5]
    assert rates(LearningRateScheduleCallback(1.0, 2.0), Net(), 2, None) == [1.0, 1.0, 2.0, 2.0]
    with pytest.raises(ValueError, match="initial_lr is needed"):
        LearningRateScheduleCallback(None, 2.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("correct", [True, False])
def test_momentum_is_scaled_in_the_step_that_changes_the_rate(correct: bool) -> None:
    net = Net(momentum=0.5)
    callback = LearningRateScheduleCallback(0.5, lambda epoch: 4.0**epoch, momentum_correction=correct)
    callback.set_model(net)
    callback.on_train_begin()
    seen = []
    for epoch in range(2):
        callback.on_epoch_begin(epoch)
        for batch in range(2):
            callback.on_train_batch_begin(batch)
            seen.append(float(tf.convert_to_tensor(net.optimizer.momentum)))
            callback.on_train_batch_end(batch)
    assert seen == [0.5, 0.5, 2.0 if correct else 0.5, 0.5]
    assert net.optimizer.momentum == 0.5, "to Keras, which saves it, it is the number"
    assert net.optimizer.get_config()["momentum"] == 0.5
    callback.on_train_begin()
    assert net.compiled_anew == correct, "a second fit traces nothing again"


def test_momentum_within_a_step_is_read_anew() -> None:
    net = Net(momentum=0.25)
    momentum = callbacks.Momentum.of(net)
    step = tf.function(lambda x: x * net.optimizer.momentum)
    double = tf.function(lambda x: x * tf.cast(net.optimizer.momentum, tf.float64))
    single, of_double = tf.constant(8.0), tf.constant(8.0, tf.float64)
    assert [float(step(single)), float(double(of_double))] == [2.0, 2.0]
    momentum.scale(3.0)
    assert [float(step(single)), float(double(of_double))] == [6.0, 6.0]


@pytest.mark.parametrize(("size", "verbose"), [(1, 1), (2, 0), (2, 1), (4, 1)])
def test_warm_up(size: int, verbose: int, capsys: pytest.CaptureFixture[str]) -> None:
    def rank(world: World) -> list[float]:
        return rates(LearningRateWarmupCallback(8.0, warmup_epochs=2, verbose=verbose), Net(), 3, 4)

    found = run(size, rank)
    steps = [8.0 / size * ((step + 1) / 8 * (size - 1) + 1) for step in range(8)]
    assert found == [pytest.approx([*steps, *[8.0] * 4])] * size
    told = "\nEpoch 2: finished gradual learning rate warmup to 8.\n" if verbose else ""
    assert capsys.readouterr().out == told, "by rank 0 alone"


def test_logs_are_averaged_by_name() -> None:
    def rank(world: World) -> dict[str, float]:
        names = ("loss", "accuracy") if world.rank else ("accuracy", "loss")
        logs: Any = {name: world.rank + len(name) for name in names}
        average = callbacks.MetricAverageCallback()
        average.on_epoch_end(0, logs)
        average.on_epoch_end(0, None)
        other = {"loss": 1.0, "of one rank": 2.0} if world.rank else {"loss": 1.0, "mae": 2.0}
        with pytest.raises(MismatchError, match="named 'loss, mae'"):
            average.on_epoch_end(1, other)
        return dict(logs)

    assert run(2, rank) == [{"loss": 4.5, "accuracy": 8.5}] * 2
    alone = {"loss": np.float32(3.0)}
    run(1, lambda world: callbacks.MetricAverageCallback().on_epoch_end(0, alone))
    assert alone == {"loss": 3.0}


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("root", [0, 1])
def test_all_start_from_one_rank(root: int, built: bool) -> None:
    def rank(world: World) -> Any:
        layer = keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(world.rank + 1.0))
        model = keras.Sequential([*([keras.Input((1,))] if built else []), layer])
        model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=True)
        seen: list[float] = []

        class Look(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
                seen.append(float(layer.kernel.numpy()[0, 0]) if layer.built else 0.0)

        broadcast = callbacks.BroadcastGlobalVariablesCallback(root)
        model.fit(np.ones((3, 1)), np.ones((3, 1)), batch_size=1, verbose=0, callbacks=[broadcast, Look()])
        return seen

    expected = [root + 1.0] * 3
    assert run(2, rank) == [expected if built else [0.0, *expected[1:]]] * 2


@pytest.mark.parametrize("single", [True, False])
def test_some_stay_each_rank_s_own(single: bool) -> None:
    def rank(world: World) -> Any:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        kernel, bias = model.layers[0].kernel, model.layers[0].bias
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        model.optimizer.build(model.trainable_variables)
        slots = [v for v in model.optimizer.variables if "momentum" in v.path]
        for variable in (kernel, bias, *slots):
            variable.assign(np.full(variable.shape, world.rank + 1.0))
        broadcast = callbacks.BroadcastGlobalVariablesCallback(1, local_variables=kernel if single else [kernel])
        broadcast.register_local_var(keras.Variable(1.0))
        broadcast.set_model(model)
        broadcast.on_train_begin()
        return [float(variable.numpy().ravel()[0]) for variable in (kernel, bias, *slots)]

    # With what the optimizer keeps of them.
    assert run(2, rank) == [[1.0, 2.0, 1.0, 2.0], [2.0, 2.0, 2.0, 2.0]]


@pytest.mark.parametrize(("weights_only", "suffix"), [(True, "best.weights.h5"), (False, "best.keras")])
def test_the_best_model(weights_only: bool, suffix: str) -> None:
    made = callbacks.BestModelCheckpoint("val_accuracy", save_weights_only=weights_only, mode="max")
    assert (made.filepath, made.save_best_only, made.monitor) == (suffix, True, "val_accuracy")
