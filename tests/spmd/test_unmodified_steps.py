"""`fit` and `evaluate` of a script that knows nothing of ranks: after each epoch all is as in one process."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from mpitrain.errors import AgreedError
from mpitrain.scripts.file_names import Names
from mpitrain.scripts.keras_patches import KerasPatches
from mpitrain.scripts.work_division import WorkDivision
from mpitrain.training import loss_patches
from tests.spmd.truth import FLAT_VALIDATION, WORLD

ROWS, BATCH, EPOCHS = 21, 5, 3  # the last batch has one row, fewer than there are ranks
RNG = np.random.default_rng(5)
X = RNG.normal(size=(ROWS, 3))
Y = X.sum(axis=1, keepdims=True) + RNG.normal(size=(ROWS, 1))
W = RNG.uniform(0.5, 2.0, size=ROWS)
Results = dict[str, Any]
pytestmark = [
    pytest.mark.ranks(2, 3),  # one rank runs a script as it is
    pytest.mark.usefixtures("double_precision"),
]


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Makes Keras data-parallel for the rest of a test."""
    loss_patches.install()  # which is done once: what is put back after a test has it
    for owner, names in (
        (keras.Model, "fit evaluate predict train_on_batch test_on_batch predict_on_batch"),
        (keras.optimizers.Optimizer, "apply"),
        (keras.optimizers.LossScaleOptimizer, "apply"),
        (keras.metrics.Mean, "update_state"),
        (keras.metrics.Sum, "update_state"),
    ):
        for name in names.split():
            monkeypatch.setattr(owner, name, getattr(owner, name))

    def install(batch_is_global: bool = True) -> None:
        KerasPatches(
            WORLD,
            WorkDivision(batch_is_global, loss_is="whole" if batch_is_global else "mean"),
            lambda part, text: None,
            Names(WORLD.communicator),
        ).install()

    return install


class OwnSteps(keras.Model):
    """Steps as scripts write them: trackers of numbers, a number that no metric has, a count of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.mean, self.sum = keras.metrics.Mean(name="mean"), keras.metrics.Sum(name="sum")
        self.auc = keras.metrics.AUC(name="auc", num_thresholds=5)
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype="int64", name="steps")

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    @property
    def metrics(self) -> list[Any]:
        return [self.mean, self.sum, self.auc]

    def _loss(self, data: Any) -> Any:
        x, y, *_ = data
        loss = tf.reduce_mean((self(x) - y) ** 2)
        return loss, keras.ops.cast(y > 0, "float64"), keras.ops.sigmoid(self(x))

    def _logs(self, loss: Any, labels: Any, outputs: Any) -> dict[str, Any]:
        self.mean.update_state(loss)
        self.sum.update_state(loss)
        self.auc.update_state(labels, outputs)
        return {"mean": self.mean.result(), "sum": self.sum.result(), "auc": self.auc.result(), "last": loss}

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss, labels, outputs = self._loss(data)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.steps.assign_add(1)
        return self._logs(loss, labels, outputs)

    def test_step(self, data: Any) -> dict[str, Any]:
        return self._logs(*self._loss(data))


class Seen(keras.callbacks.Callback):
    """What a callback sees; not at batches, which would make it another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        steps = [int(v) for v in self.model.non_trainable_variables if v.dtype == "int64" and not v.shape]
        self.rows.append([int(self.model.optimizer.iterations), *steps, self.params["steps"], random.getstate()[1][-1]])


class Batches(keras.utils.PyDataset):
    """All batches."""

    def __len__(self) -> int:
        return math.ceil(ROWS / BATCH)

    def __getitem__(self, index: int) -> Any:
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return X[rows], Y[rows]


def generated() -> Iterator[Any]:
    while True:
        for index in range(len(Batches())):
            yield Batches()[index]


def pairs() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y))


def shuffled() -> tf.data.Dataset:
    return pairs().shuffle(ROWS, seed=3).batch(BATCH)


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": BATCH},
    "arrays of steps": lambda: {"x": X, "y": Y, "steps_per_epoch": 4, "validation_split": 0.3},
    "arrays, one row a batch": lambda: {"x": X[:7], "y": Y[:7], "batch_size": 1},
    "dataset": lambda: {"x": shuffled(), "validation_data": pairs().batch(4), "validation_steps": 3},
    "dataset of unknown length": lambda: {"x": shuffled().filter(lambda x, y: True)},
    "dataset without end": lambda: {"x": shuffled().repeat(), "steps_per_epoch": 4},
    "PyDataset": lambda: {"x": Batches(), "validation_data": Batches()},
    "PyDataset with workers": lambda: {"x": Batches(workers=2)},
    "generator": lambda: {
        "x": generated(),
        "steps_per_epoch": 4,
        "validation_data": (X, Y),
        "validation_batch_size": 4,
    },
}

SEVERAL = ("arrays", "dataset", "PyDataset", "generator")  # of each way to read one, on three ranks as well


def trained(
    make: Callable[[], dict[str, Any]], model: Any = None, accumulate: int | None = None, **compiled: Any
) -> Results:
    keras.utils.set_random_seed(11)
    model = OwnSteps() if model is None else model()
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)
    model.compile(keras.optimizers.Adam(schedule, gradient_accumulation_steps=accumulate), **compiled)
    seen = Seen()
    history = model.fit(**make(), epochs=EPOCHS, verbose=0, callbacks=[seen]).history
    weights = [weight.numpy().tolist() for weight in model.trainable_weights]
    return {"seen": seen.rows, "history": history, "weights": weights}


def same(found: Any, expected: Any) -> None:
    assert found["seen"] == expected["seen"]
    assert found["history"].keys() == expected["history"].keys()
    for name, values in expected["history"].items():
        np.testing.assert_allclose(found["history"][name], values, rtol=1e-12, err_msg=name)
    for one, other in zip(found["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "kind", [kind if kind in SEVERAL else pytest.param(kind, marks=pytest.mark.ranks(2)) for kind in KINDS]
)
def test_epochs_are_those_of_one_process(divided: Any, kind: str) -> None:
    expected = trained(KINDS[kind])
    divided()
    same(trained(KINDS[kind]), expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["arrays", "dataset of unknown length"])
def test_several_steps_at_once_are_those_of_one_process(divided: Any, kind: str) -> None:
    expected = trained(KINDS[kind], steps_per_execution=2)
    divided()
    same(trained(KINDS[kind], steps_per_execution=2), expected)


def test_batches_of_few_rows_count_in_accumulated_gradients_as_in_one_process(divided: Any) -> None:
    expected = trained(KINDS["arrays"], accumulate=3)
    divided()
    same(trained(KINDS["arrays"], accumulate=3), expected)


def test_numbers_of_batches_that_are_dealt_out_count_once_a_step(divided: Any) -> None:
    """The last step has fewer rows, and not on all ranks some."""
    expected = trained(lambda: {"x": pairs().batch(BATCH * WORLD.size)})
    divided(batch_is_global=False)
    found = trained(lambda: {"x": pairs().batch(BATCH)})
    same(found | {"seen": ()}, expected | {"seen": ()})


class Spread(keras.metrics.Metric):
    """Its result is a dictionary."""

    def __init__(self) -> None:
        super().__init__(name="spread")
        self.total, self.count = (self.add_weight(name=name, initializer="zeros") for name in ("total", "count"))

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(keras.ops.sum(keras.ops.abs(y - p)))
        self.count.assign_add(keras.ops.cast(keras.ops.size(y), "float64"))

    def result(self) -> dict[str, Any]:
        return {"width": self.total / self.count, "count": self.count + 0.0}


class Ratios(keras.Sequential):
    """Makes numbers of metrics."""

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**logs, "root": logs["mae"] ** 0.5, "ratios": {"one": logs["mae"] / (logs["loss"] + 1.0)}}


def with_ratios(size: int, **compiled: Any) -> Results:
    data = {"x": X, "y": Y, "batch_size": size, "validation_data": (X[:8], Y[:8]), "validation_batch_size": 3}
    return trained(
        lambda: data, lambda: Ratios([keras.layers.Dense(1)]), loss="mse", metrics=["mae", Spread()], **compiled
    )


@pytest.mark.skipif(not FLAT_VALIDATION, reason="names of validations")
@pytest.mark.parametrize("batch_is_global", [True, pytest.param(False, marks=pytest.mark.ranks(2))])
def test_numbers_made_of_metrics(divided: Any, batch_is_global: bool, capfd: pytest.CaptureFixture[str]) -> None:
    expected = with_ratios(BATCH if batch_is_global else BATCH * WORLD.size)
    divided(batch_is_global)
    same(with_ratios(BATCH), expected)
    assert "no result of a metric" not in capfd.readouterr().err


@pytest.mark.skipif(not FLAT_VALIDATION, reason="names of validations")
@pytest.mark.ranks(2)
def test_numbers_made_of_metrics_without_a_graph(divided: Any, capfd: pytest.CaptureFixture[str]) -> None:
    expected = with_ratios(BATCH * WORLD.size, run_eagerly=True)
    divided(batch_is_global=False)
    found = with_ratios(BATCH, run_eagerly=True)
    assert capfd.readouterr().err.count("of 'one', 'root' in the logs of a step") == (WORLD.rank == 0)
    for name in ("root", "one", "val_root", "val_one"):
        assert found["history"].pop(name) != expected["history"].pop(name)
    same(found, expected)


def recurrent() -> Any:
    return keras.Sequential([keras.Input(batch_shape=(BATCH, 1, 3)), keras.layers.LSTM(2, stateful=True)])


def test_state_along_the_rows_of_a_batch(divided: Any) -> None:
    data = {"x": X[:20, None], "y": np.repeat(Y[:20], 2, axis=1), "batch_size": BATCH, "shuffle": False}
    expected = trained(lambda: data, recurrent, loss="mse")
    divided()
    same(trained(lambda: data, recurrent, loss="mse"), expected)


def test_batches_that_follow_one_another_are_not_dealt_out(divided: Any) -> None:
    divided(batch_is_global=False)
    with pytest.raises(AgreedError, match=r"stateful: each batch goes on .* Give --batch-size-is global"):
        trained(lambda: {"x": X[:20, None], "y": Y[:20], "batch_size": BATCH}, recurrent, loss="mse")


@pytest.mark.parametrize("batch_is_global", [True, False])
@pytest.mark.parametrize("data", [{"x": X, "y": Y, "batch_size": 4, "steps": 4}, {"x": Batches()}])
def test_evaluations_are_those_of_one_process(divided: Any, data: dict[str, Any], batch_is_global: bool) -> None:
    def tested() -> dict[str, float]:
        keras.utils.set_random_seed(11)
        model = OwnSteps()
        model.compile("sgd")
        found: dict[str, float] = model.evaluate(**data, verbose=0, return_dict=True)
        return found

    expected = tested()
    divided(batch_is_global)
    found = tested()
    assert found.keys() == expected.keys()
    np.testing.assert_allclose([found[name] for name in expected], list(expected.values()), rtol=1e-12)
