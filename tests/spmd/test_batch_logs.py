"""Callbacks that look at batches see and do, on each of N ranks, what they would on one rank with all batches."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpitrain
from mpitrain.errors import AgreedError
from mpitrain.scripts.batch_callbacks import looks_at, synchronize_callbacks
from mpitrain.strategies.strategy import strategy_of
from mpitrain.training.callbacks import DataParallel
from mpitrain.training.logs import leaves_of
from tests.spmd.truth import (
    FLAT_VALIDATION,
    WORLD,
    batches,
    check_history,
    check_same,
    dataset,
    fit,
    merged,
    mlp,
)

RANKS = range(WORLD.size)
pytestmark = pytest.mark.usefixtures("double_precision")
RAGGED = [[4, 4, 2, 3], [2, 5], [3, 1, 4]]


class Recorder(keras.callbacks.Callback):
    """Notes all that it is called with, and sets the learning rate of each batch."""

    def __init__(self, falls: int = 0) -> None:
        super().__init__()
        self.seen: list[tuple[str, int, dict[str, float]]] = []
        self._falls, self._loss, self._steps = falls, np.inf, 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._steps += 1
        self.model.optimizer.learning_rate.assign(0.3 / self._steps)
        self.seen.append(("train begin", batch, {}))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(("train end", batch, dict(logs)))
        self._falls -= logs["loss"] < self._loss
        self._loss = logs["loss"]
        if self._falls == 0:
            self.model.stop_training = True

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(("test end", batch, dict(logs)))


def compare(own: Recorder, expected: Recorder) -> None:
    """The calls are those of one rank, and the numbers the same bits on all."""
    assert [(name, batch) for name, batch, _ in own.seen] == [(name, batch) for name, batch, _ in expected.seen]
    for (name, batch, logs), (_, _, numbers) in zip(own.seen, expected.seen, strict=True):
        assert sorted(logs) == sorted(numbers)
        for key, number in numbers.items():
            np.testing.assert_allclose(logs[key], number, rtol=1e-9, err_msg=f"{name} {batch} {key}")
    assert mpitrain.all_gather_obj(own.seen) == [own.seen] * WORLD.size


class Composed(keras.Model):
    """Returns numbers by names of its own: a metric's result, the batch's loss, and a constant."""

    def __init__(self) -> None:
        super().__init__(dtype="float64")
        self.layer = keras.layers.Dense(3, dtype="float64")
        self.tracker = keras.metrics.Mean(name="tracker", dtype="float64")

    def call(self, inputs: Any) -> Any:
        return self.layer(inputs)

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def losses_of(self, data: Any) -> Any:
        x, y = data
        return keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True)

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            losses = self.losses_of(data)
            loss = tf.reduce_mean(losses)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.tracker.update_state(losses)
        return {"loss": self.tracker.result(), "latest": loss, "constant": tf.constant(0.1, "float64")}

    def test_step(self, data: Any) -> dict[str, Any]:
        self.tracker.update_state(self.losses_of(data))
        return {"mean": self.tracker.result()}


class Nested(Composed):
    """Returns what Keras takes besides numbers: dictionaries, tuples, arrays, texts, None."""

    def logs(self, loss: Any) -> dict[str, Any]:
        return {
            "all": {metric.name: metric.result() for metric in self.metrics},
            "deep": {"more": {"most": loss * 2}},
            "pair": (loss, (loss * 3, {"inner": self.tracker.result()})),
            "vector": tf.stack([loss, 4 * loss]),
            "half": tf.cast(loss, tf.bfloat16),
            "text": tf.constant("text"),
            "nothing": None,
            "constant": np.arange(3.0),
        }

    def train_step(self, data: Any) -> dict[str, Any]:
        return self.logs(super().train_step(data)["latest"])

    def test_step(self, data: Any) -> dict[str, Any]:
        super().test_step(data)
        return self.logs(tf.reduce_mean(self.losses_of(data)))


def made(kind: type[Composed]) -> Any:
    keras.utils.set_random_seed(4)
    model = kind()
    model(np.zeros((1, 5)))
    model.compile(keras.optimizers.SGD(0.1), jit_compile=False)
    return model


def check_logs(logs: Any, expected: Any) -> None:
    """The same values in the same places, and the same on all ranks."""
    own = leaves_of(logs)
    assert repr(mpitrain.broadcast_obj(own)) == repr(own)
    assert own.keys() == leaves_of(expected).keys()
    for path, leaf in leaves_of(expected).items():
        if isinstance(leaf, float | np.ndarray):
            np.testing.assert_allclose(own[path], leaf, rtol=1e-2 if "half" in path else 1e-9, err_msg=str(path))
        else:
            assert own[path] == leaf


@pytest.mark.skipif(not FLAT_VALIDATION, reason="names of validations")
@pytest.mark.ranks(1, 2)
def test_logs_that_are_not_flat() -> None:
    everyone = [batches(rank, RAGGED[rank % len(RAGGED)]) for rank in RANKS]
    # Without the last rank's: it has no logs of its own to return.
    validation = [batches(rank, [3, 2] if rank % 2 else [2, 2, 4], seed=99) for rank in RANKS]
    empty = dataset(validation[0]).take(0)
    tested = [one if rank in (0, WORLD.size - 2) else [] for rank, one in zip(RANKS, validation, strict=True)]
    own = dataset(tested[WORLD.rank]) if tested[WORLD.rank] else empty
    model, reference = made(Nested), made(Nested)
    seen: list[Any] = []
    wanted: list[Any] = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(dict(logs)))
    expect = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: wanted.append(dict(logs)))
    whole = dataset(merged([one for one in tested if one]))
    history = fit(model, everyone[WORLD.rank], True, synchronize_callbacks(WORLD, [note]), validation_data=own)
    check_logs(history, fit(reference, merged(everyone), False, [expect], validation_data=whole))
    assert len(seen) == len(wanted)
    for logs, numbers in zip(seen, wanted, strict=True):
        check_logs(logs, numbers)
    found = model.evaluate(own, verbose=0, return_dict=True, callbacks=[DataParallel()])
    check_logs(found, reference.evaluate(whole, verbose=0, return_dict=True))


@pytest.mark.ranks(1, 2)
def test_logs_of_single_samples_are_refused() -> None:
    class Rows(Composed):
        def test_step(self, data: Any) -> dict[str, Any]:
            return {"rows": self.losses_of(data)}

    if WORLD.size == 1:
        pytest.skip("no division, nothing to refuse")
    data = dataset(batches(WORLD.rank, [3 + WORLD.rank % 2]))
    with pytest.raises(AgreedError, match=r"an array 'rows' of shape \(3,\)"):
        made(Rows).evaluate(data, verbose=0, callbacks=[DataParallel()])


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: mlp(keras.optimizers.SGD(0.1)), id="plain"),
        pytest.param(lambda: made(Composed), id="composed", marks=pytest.mark.ranks(1, 2)),
    ],
)
@pytest.mark.parametrize("falls", [-1, 3], ids=["to the end", "stopped when the loss has fallen often enough"])
def test_batches_of_ranks_with_different_numbers_of_them(make: Any, falls: int) -> None:
    everyone = [batches(rank, RAGGED[rank % len(RAGGED)]) for rank in RANKS]
    validation = [batches(rank, [3, 2] if rank % 2 else [2, 2, 4], seed=99) for rank in RANKS]
    recorder, expected = Recorder(falls), Recorder(falls)
    model, reference = make(), make()
    own = dataset(validation[WORLD.rank])
    history = fit(
        model,
        everyone[WORLD.rank],
        True,
        synchronize_callbacks(WORLD, [recorder]),
        epochs=3,
        validation_data=own,
        validation_freq=2,
    )
    whole = dataset(merged(validation))
    numbers = fit(reference, merged(everyone), False, [expected], epochs=3, validation_data=whole, validation_freq=2)
    compare(recorder, expected)
    check_same(model, reference)
    check_history(history, numbers, 1e-9)
    assert strategy_of(WORLD).joining.takes_part == []
    assert (sum(name == "train end" for name, _, _ in recorder.seen) < 3 * 4) == (falls > 0)


def test_what_one_rank_alone_decides_holds_for_all() -> None:
    class Limit(keras.callbacks.Callback):
        batches = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.batches += 1
            if batch == 2 and WORLD.rank == WORLD.size - 1:
                self.model.stop_training = True

    limit = Limit()
    fit(
        mlp(keras.optimizers.SGD(0.1)),
        batches(WORLD.rank, [2] * 6),
        True,
        synchronize_callbacks(WORLD, [limit]),
        epochs=4,
    )
    assert limit.batches == 3


@pytest.mark.ranks(1, 2)
def test_metrics_asked_for_within_a_batch() -> None:
    class Asking(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.found: list[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch % 2:
                self.found.append(self.model.get_metrics_result()["loss"])

    everyone = [batches(rank, RAGGED[rank % len(RAGGED)]) for rank in RANKS]
    asking, expected = Asking(), Asking()
    fit(mlp(keras.optimizers.SGD(0.1)), everyone[WORLD.rank], True, synchronize_callbacks(WORLD, [asking]))
    fit(mlp(keras.optimizers.SGD(0.1)), merged(everyone), False, [expected])
    np.testing.assert_allclose(asking.found, expected.found, rtol=1e-9)


@pytest.mark.ranks(1, 2)
def test_not_a_number_on_one_rank_ends_all() -> None:
    pairs = batches(WORLD.rank, [2] * 4)
    if WORLD.rank == WORLD.size - 1:
        pairs[1][0][:] = np.nan
    callback = keras.callbacks.TerminateOnNaN()
    model = mlp(keras.optimizers.SGD(0.1))
    ends: list[int] = []
    counter = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(batch))
    fit(model, pairs, True, synchronize_callbacks(WORLD, [callback, counter]), epochs=3)
    assert ends == [0, 1]


@pytest.mark.ranks(2)
def test_which_callbacks_look_at_batches(tmp_path: Any) -> None:
    kinds: dict[Any, str] = {
        keras.callbacks.EarlyStopping(): "",
        keras.callbacks.CSVLogger(str(tmp_path / "log.csv")): "",
        keras.callbacks.ModelCheckpoint(str(tmp_path / "a.keras")): "",
        keras.callbacks.ModelCheckpoint(str(tmp_path / "a.keras"), save_freq=3): "train",
        keras.callbacks.BackupAndRestore(str(tmp_path / "backup")): "",
        keras.callbacks.BackupAndRestore(str(tmp_path / "backup"), save_freq=3): "train",
        keras.callbacks.TensorBoard(str(tmp_path)): "",
        keras.callbacks.TensorBoard(str(tmp_path), update_freq="batch"): "train test",
        keras.callbacks.ProgbarLogger(): "",
        keras.callbacks.TerminateOnNaN(): "train test",
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None): "",
        keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: None): "train",
        Recorder(): "train test",
    }
    for callback, expected in kinds.items():
        assert " ".join(kind for kind in ("train", "test") if looks_at(callback, kind)) == expected, callback
    assert synchronize_callbacks(WORLD, [*kinds][:2]) == [*kinds][:2]
