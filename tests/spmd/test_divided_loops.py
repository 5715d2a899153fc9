"""A script's own loop over `tf.data`, divided: the steps are those of one rank with the global batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpitrain
from mpitrain.data.portions import Portion
from mpitrain.errors import DataError
from mpitrain.scripts.data_comparison import DataComparison
from mpitrain.scripts.loops import DividedLoops
from mpitrain.strategies.weighting import keep_added_up, keep_sample_count
from mpitrain.training.loss_patches import keep_batch_norm_synchronized, keep_share
from tests.spmd.test_custom_loops import check, loss_of, reference, weights
from tests.spmd.truth import FEATURES, WORLD, batches, dataset, merged

RATE = 0.1
SIZES = (8, 8, 7, 5, 8, 4, 1)  # the last has fewer rows than there are ranks


@pytest.fixture
def divide(monkeypatch: pytest.MonkeyPatch, double_precision: None) -> Iterator[Any]:
    """Installs the division for one test."""
    monkeypatch.setattr(tf.data.Dataset, "__iter__", tf.data.Dataset.__iter__)
    monkeypatch.setattr(keras.Metric, "__init__", keras.Metric.__init__)

    def install(batch_is_global: bool, training: bool = False, loss_is: Any = "mean", sync: bool = False) -> None:
        portion = Portion(WORLD.rank, WORLD.size, batch_is_global)

        def note(part: str, text: str) -> None:
            """What is told does not matter here."""

        DividedLoops(WORLD, portion, note, lambda: training, DataComparison(WORLD, note), loss_is, sync).install()

    yield install
    keep_sample_count(1.0)
    keep_added_up(False)
    keep_batch_norm_synchronized(None)
    keep_share(None)


def steps_of_one_rank(pairs: list[Any], batch_is_global: bool) -> list[Any]:
    if batch_is_global:
        return pairs
    whole = len(pairs) // WORLD.size * WORLD.size
    rounds = [pairs[start : start + WORLD.size] for start in range(0, whole, WORLD.size)]
    return [merged([[pair] for pair in one])[0] for one in rounds] + pairs[whole:]


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("batch_is_global", [False, True])
def test_steps_and_metrics_are_those_of_one_rank(divide: Any, batch_is_global: bool, in_graph: bool) -> None:
    pairs = batches(0, SIZES)
    whole = dataset(pairs)
    divide(batch_is_global)
    optimizer = mpitrain.DistributedOptimizer(keras.optimizers.SGD(RATE))
    mean, variables, rows = keras.metrics.Mean(dtype="float64"), weights(), []

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(variables, x, y)
        optimizer.apply(tape.gradient(loss, variables), variables)
        mean.update_state(x[:, 0])

    step = tf.function(step, reduce_retracing=True) if in_graph else step
    for x, y in whole:
        step(x, y)
        rows.append(len(x))
    expected = steps_of_one_rank(pairs, batch_is_global)
    check(variables, reference(RATE, expected))
    assert len(rows) == len(expected)
    everyone = np.array(mpitrain.all_gather_obj(rows))
    for counts, (x, _) in zip(everyone.T, expected, strict=True):
        assert counts.sum() == len(x) or (len(x) < WORLD.size and (counts == len(x)).all())
    # The batch with fewer rows than ranks counts on every rank.
    seen = np.concatenate([np.tile(x[:, 0], WORLD.size if len(x) < WORLD.size else 1) for x, _ in expected])
    np.testing.assert_allclose(float(mean.result()), seen.mean(), rtol=1e-12)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("normalized", [False, True])
def test_sums_over_the_rows_of_a_batch(divide: Any, normalized: bool) -> None:
    pairs = batches(0, SIZES[:-1] if normalized else SIZES)  # also a batch that every rank takes whole
    divide(True, loss_is="sum", sync=normalized)

    def trained(everyone: Any, optimizer: Any) -> list[Any]:
        first = tf.Variable(np.random.default_rng(3).normal(size=(FEATURES, FEATURES)))
        variables, layer = [first, *weights()], keras.layers.BatchNormalization(dtype="float64")
        for x, y in everyone:
            with tf.GradientTape() as tape:
                hidden = tf.tanh(x @ first)
                hidden = layer(hidden, training=True) if normalized else hidden
                loss = loss_of(variables[1:], hidden, y) * float(len(x)) / 8.0
            optimizer.apply(tape.gradient(loss, variables), variables)
        return [*variables, *(layer.weights if normalized else [])]

    found = trained(dataset(pairs), mpitrain.DistributedOptimizer(keras.optimizers.SGD(RATE)))
    keep_batch_norm_synchronized(None)
    for own, expected in zip(found, trained(pairs, keras.optimizers.SGD(RATE)), strict=True):
        np.testing.assert_allclose(own.numpy(), expected.numpy(), rtol=1e-12, atol=1e-14)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("batch_is_global", [False, True])
def test_regularizers_count_once_where_losses_are_sums(divide: Any, batch_is_global: bool, in_graph: bool) -> None:
    pairs = batches(0, SIZES)  # also a batch that every rank takes whole
    divide(batch_is_global, loss_is="sum")

    def trained(everyone: Any, optimizer: Any) -> list[Any]:
        inputs = keras.Input((FEATURES,), dtype="float64")
        layer = keras.layers.Dense(
            1, "tanh", kernel_initializer="ones", kernel_regularizer="l2", activity_regularizer="l2", dtype="float64"
        )
        model = keras.Model(inputs, layer(inputs))

        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((model(x)[:, 0] - tf.cast(y, x.dtype)) ** 2) / 8.0 + sum(model.losses)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        step = tf.function(step, reduce_retracing=True) if in_graph else step
        for x, y in everyone:
            step(tf.convert_to_tensor(x), tf.convert_to_tensor(y))
        # What is not of `tf.data` every rank takes whole: it counts once.
        step(tf.convert_to_tensor(pairs[0][0]), tf.convert_to_tensor(pairs[0][1]))
        return [weight.numpy() for weight in model.weights]

    found = trained(dataset(pairs), mpitrain.DistributedOptimizer(keras.optimizers.SGD(RATE)))
    keep_share(None)
    expected = trained(steps_of_one_rank(pairs, batch_is_global), keras.optimizers.SGD(RATE))
    for own, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, right, rtol=1e-12, atol=1e-14)


def test_what_keras_reads_stays_whole(divide: Any) -> None:
    divide(True)
    x = np.arange(20.0).reshape(10, 2)
    layer = keras.layers.Normalization(dtype="float64")
    layer.adapt(tf.data.Dataset.from_tensor_slices(x).batch(5))
    np.testing.assert_allclose(layer.mean.numpy().reshape(-1), x.mean(0), rtol=1e-12)


def test_what_callbacks_of_a_fit_read_stays_whole(divide: Any) -> None:
    divide(True, training=True)
    mean = keras.metrics.Mean(dtype="float64")
    for batch in tf.data.Dataset.range(8).batch(4):
        assert len(batch) == 4
    mean.update_state(float(WORLD.rank))
    assert float(mean.result()) == WORLD.rank, "nothing is exchanged"


def test_an_iterator_that_a_graph_reads_from_is_refused(divide: Any) -> None:
    divide(True)
    iterator = iter(tf.data.Dataset.range(10).batch(5))

    @tf.function
    def first() -> Any:
        return next(iterator)

    with pytest.raises(DataError, match="--divide-loops"):
        first()
