"""Losses that divide by something else than rows: ranks with rows of one batch are one process with that batch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from mpitrain.strategies.strategy import strategy_of
from mpitrain.strategies.weighting import sample_count
from mpitrain.training.callbacks import DataParallel
from mpitrain.training.gradient_use import told
from mpitrain.training.loss_shares import Shares, Step
from mpitrain.training.loss_terms import (
    MOMENTS_OF_SERVERS,
    OF_SERVERS,
    added_to_the_loss,
    one_number_of_a_sum,
    taken_for_a_mean,
)
from mpitrain.world.world import World
from tests.unit.job import run

pytestmark = pytest.mark.usefixtures("double_precision")
ONE_AT_A_TIME = threading.Lock()
FEATURES, CLASSES = 4, 3
SIZES = (7, 4)  # rows of the batches of all ranks
Batch = tuple[Any, ...]


class Batches(keras.utils.PyDataset):
    """Batches of any sizes."""

    def __init__(self, batches: list[Batch]) -> None:
        super().__init__()
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Batch:
        return self.batches[index]


def data(weighted: bool = False) -> list[Batch]:
    random = np.random.default_rng(2)
    found: list[Batch] = []
    for rows in SIZES:
        weights = (random.uniform(0.0, 2.0, rows),) if weighted else ()
        x, y = random.normal(size=(rows, FEATURES)), random.uniform(0.1, 2.0, (rows, CLASSES))
        found.append((x, y, *weights))
    return found


def dense(loss: Any, **options: Any) -> Any:
    regularizers = {name: options.pop(name, None) for name in ("activity_regularizer", "kernel_regularizer")}
    outputs = keras.layers.Dense(CLASSES, activation="softplus", **regularizers)
    layers = [keras.Input((FEATURES,)), outputs]
    if options.pop("batch_norm", False):
        layers.insert(1, keras.layers.BatchNormalization(momentum=0.5))
    if options.pop("adds", False):
        layers.append(AddsSum())
    model = options.pop("kind", keras.Sequential)(layers)
    model.compile(keras.optimizers.SGD(0.1), loss, run_eagerly=True, **options)
    return model


class AddsSum(keras.layers.Layer):
    """Gives a sum over the rows to `add_loss`."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(tf.reduce_sum(tf.square(inputs)) / 10.0)
        return inputs


class OwnStep(keras.Sequential):
    """A sum of squares, as a script's own step computes it."""

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(self(x, training=True) - y)) / 10.0
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"squares": loss}


class OwnLoss(keras.Model):
    """Keras' loss, and a sum of the script's own."""

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(x, y, y_pred, *args, **kwargs) + 0.1 * tf.reduce_sum(tf.square(y_pred))


class AsksKeras(keras.Sequential):
    """A step as Keras' guide writes it."""

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


class OwnLossInSequence(OwnLoss, keras.Sequential):
    """Of layers one after the other."""


class MoreInTheStep(keras.Model):
    """A step that asks Keras for the loss, adds to it, and clips gradients by itself."""

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(x, y, outputs) + 0.1 * tf.reduce_sum(outputs)
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 0.1)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class SumOfItsOwn(keras.losses.Loss):
    """Not by Keras' `__call__`, which would see what it divides by."""

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return tf.reduce_sum(tf.square(y_true - y_pred)) / 10.0


class WholeOfItsOwn(SumOfItsOwn):
    """Of which only the whole batch makes sense."""

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return tf.sqrt(super().__call__(y_true, y_pred))


class AfterItsOwn(keras.losses.MeanSquaredError):
    """Keras', of something else."""

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return 2.0 * super().__call__(tf.math.log(y_true), y_pred, sample_weight)


def whole_batch(y_true: Any, y_pred: Any) -> Any:
    """One number, of which only the whole batch makes sense."""
    return tf.math.reduce_std(y_pred - y_true)


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any], dict[str, Any]]] = {
    "mean": (lambda: dense(keras.losses.MeanSquaredError()), {}, {}),
    "sum": (lambda: dense(keras.losses.MeanSquaredError(reduction="sum")), {}, {}),
    "unreduced": (lambda: dense(keras.losses.MeanSquaredError(reduction=None)), {}, {}),
    "weights": (lambda: dense(keras.losses.Poisson("mean_with_sample_weight")), {"weighted": True}, {}),
    "rows and weights": (lambda: dense(keras.losses.LogCosh()), {"weighted": True}, {}),
    "whole": (lambda: dense(whole_batch), {}, {"loss_is": "whole"}),
    "whole by a call": (lambda: dense(WholeOfItsOwn()), {}, {"loss_is": "whole"}),
    "sum by a call": (lambda: dense(SumOfItsOwn()), {}, {"loss_is": "sum"}),
    "call of Keras": (lambda: dense(AfterItsOwn("mean_with_sample_weight")), {"weighted": True}, {"loss_is": "sum"}),
    "call of Keras for a mean": (lambda: dense(AfterItsOwn("sum")), {}, {}),
    "asked for": (lambda: dense("mse", kind=AsksKeras), {}, {"loss_is": "sum"}),
    "own sum, and weights": (
        lambda: dense("mse", kind=OwnLossInSequence, kernel_regularizer="l2"),
        {},
        {"loss_is": "sum"},
    ),
    "own sum, and activities": (
        lambda: dense("mse", kind=OwnLossInSequence, activity_regularizer="l2"),
        {},
        {"loss_is": "sum"},
    ),
    "own sum, and sums of a layer": (lambda: dense("mse", kind=OwnLossInSequence, adds=True), {}, {"loss_is": "sum"}),
    "sums of a layer": (lambda: dense("mse", adds=True), {}, {"loss_is": "sum"}),
    "asked for, and sums of a layer": (lambda: dense("mse", kind=AsksKeras, adds=True), {}, {"loss_is": "sum"}),
    "asked for, and activities": (
        lambda: dense("mse", kind=AsksKeras, activity_regularizer="l2"),
        {},
        {"loss_is": "sum"},
    ),
    "own sum": (lambda: dense(None, kind=OwnStep), {}, {"loss_is": "sum"}),
    "moments": (lambda: dense("mse", batch_norm=True), {}, {"sync_batch_norm": True}),
    "activities": (lambda: dense("mse", activity_regularizer="l2"), {}, {}),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_losses(case: str, ranks: int) -> None:
    maker, how, options = CASES[case]
    whole = data(**how)

    def train(batches: list[Batch], callbacks: list[Any]) -> tuple[Any, list[Any]]:
        with ONE_AT_A_TIME:
            keras.utils.set_random_seed(4)
            model = maker()
        history = model.fit(Batches(batches), shuffle=False, verbose=0, callbacks=callbacks).history
        return history, [np.array(one.numpy()) for one in model.weights]

    def rank(world: World) -> Any:
        own = [tuple(part[world.rank :: ranks] for part in batch) for batch in whole]
        return train(own, [DataParallel(world=world, **options)])

    expected, truth = train(whole, [])
    for history, weights in run(ranks, rank):
        for mine, theirs in zip(weights, truth, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-12)
        if not case.startswith("own sum"):  # what a script's own step reports is its own
            assert history["loss"] == pytest.approx(expected["loss"], rel=1e-12)


def test_what_is_assumed_is_told_once_by_rank_0(capfd: pytest.CaptureFixture[str]) -> None:
    def rank(world: World) -> None:
        shares = Shares(keras.Sequential(), strategy_of(world), lambda: True)
        shares.tell_of_assumption("it")  # nobody has asked
        shares.loss_is = "whole"
        for _ in range(2):
            shares.tell_of_assumption("it")
            shares.tell(OF_SERVERS)

    run(3, rank)
    told = capfd.readouterr().err
    assert told == f"mpitrain: {taken_for_a_mean('it')}\nmpitrain: {OF_SERVERS}\n"


@pytest.mark.parametrize(
    ("kind", "sentences"),
    [
        (OwnLoss, [taken_for_a_mean("the loss of it, which computes it itself,")]),
        (MoreInTheStep, [told("the train_step of it"), added_to_the_loss("it")]),
    ],
)
def test_what_a_model_adds_to_the_loss_of_keras_is_told(
    kind: Any, sentences: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    def rank(world: World) -> None:
        with ONE_AT_A_TIME:
            inputs = keras.Input((FEATURES,))
            model = kind(inputs, keras.layers.Dense(CLASSES)(inputs), name="it")
            model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
        own = [tuple(part[world.rank :: 2] for part in batch) for batch in data()]
        model.fit(Batches(own), verbose=0, callbacks=[DataParallel(world=world, loss_is="whole")])

    run(2, rank)
    told_of = capfd.readouterr().err.splitlines()
    assert [line for line in told_of if "in the logs of a step" not in line] == [
        f"mpitrain: {one}" for one in sentences
    ]


def test_a_sum_that_gets_one_number_for_a_batch_is_told_of(capfd: pytest.CaptureFixture[str]) -> None:
    def rank(world: World) -> None:
        shares, total = Shares(keras.Sequential(), strategy_of(world), lambda: False), keras.metrics.Sum(name="total")
        with sample_count(2), shares.step(training=True):
            total.update_state([1.0, 2.0])
            total.update_state(tf.constant(3))
            total.update_state(1.0, sample_weight=2.0)
            keras.metrics.Mean().update_state(1.0)
            before = capfd.readouterr().err if world.is_root else ""
            for _ in range(2):
                total.update_state(1.0)
        assert not before
        assert float(total.result()) == 1.0 + 2.0 + 3.0 + 2.0 + 2.0  # the job has only one rank in this step

    run(2, rank)
    assert capfd.readouterr().err == f"mpitrain: {one_number_of_a_sum('total')}\n"


def test_moments_that_workers_of_servers_do_not_share_are_told(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Shares, "served", True)

    def rank(world: World) -> Any:
        step = Step(Shares(keras.Sequential(), strategy_of(world), lambda: True), True)
        layers = keras.layers.BatchNormalization(), keras.layers.BatchNormalization(synchronized=True)
        return [step.moments(layer, tf.ones((2, 2)), None) for layer in layers]

    assert run(2, rank) == [[None, None]] * 2
    assert capfd.readouterr().err == f"mpitrain: {MOMENTS_OF_SERVERS}\n"
