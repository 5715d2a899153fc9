"""Metrics over the samples of all ranks: what one metric gives that has seen them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from mpitrain.data.portions import Portion
from mpitrain.training import metric_states
from mpitrain.training.counting import Counted
from mpitrain.training.metric_states import observe, over_ranks
from mpitrain.world.world import World
from tests.unit.job import run

ROWS = [4, 1, 0]  # of each rank; the last has none


def data(rank: int) -> tuple[Any, Any, Any]:
    random = np.random.default_rng(rank)
    labels, scores = random.integers(0, 2, ROWS[rank]), random.uniform(size=ROWS[rank])
    return labels.astype("float32"), scores.astype("float32"), random.uniform(0.5, 1.5, ROWS[rank]).astype("float32")


class Own(keras.Metric):
    """What a script defines; `follow` is given distances that no step has seen before."""

    start: Any = "zeros"

    def __init__(self) -> None:
        super().__init__(name="own")
        self.state = self.add_weight(name="state", initializer=self.start)

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.follow(tf.abs(tf.cast(y, tf.float32) - tf.cast(p, tf.float32)))

    def follow(self, errors: Any) -> None:
        raise NotImplementedError

    def result(self) -> Any:
        return self.state.value + 0.0


class Largest(Own):
    def follow(self, errors: Any) -> None:
        self.state.assign(tf.maximum(self.state.value, tf.reduce_max(errors)))


class Smallest(Own):
    start = keras.initializers.Constant(9.0)

    def follow(self, errors: Any) -> None:
        self.state.assign(tf.minimum(tf.reduce_min(errors), self.state.value))


class Total(Own):
    def follow(self, errors: Any) -> None:
        self.state.assign_add(tf.reduce_sum(errors))


class Added(Own):
    def follow(self, errors: Any) -> None:
        self.state.assign(self.state.value + tf.reduce_sum(errors))


class Last(Own):
    """Cannot be combined."""

    def follow(self, errors: Any) -> None:
        self.state.assign(tf.reduce_mean(errors))


class Running(Own):
    """Cannot be combined: what is added depends on the state."""

    def follow(self, errors: Any) -> None:
        self.state.assign_add(0.5 * (tf.reduce_mean(errors) - self.state.value))


def states(metric: Any) -> list[Any]:
    return [variable.numpy().tolist() for variable in metric.variables]


KERAS: dict[str, Callable[[], Any]] = {
    "Mean": lambda: keras.metrics.MeanMetricWrapper(keras.losses.mean_squared_error),
    "BinaryAccuracy": keras.metrics.BinaryAccuracy,
    "AUC": lambda: keras.metrics.AUC(num_thresholds=20),
    "Precision": keras.metrics.Precision,
    "RootMeanSquaredError": keras.metrics.RootMeanSquaredError,
    "F1Score": lambda: keras.metrics.F1Score("micro", threshold=0.5),
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", KERAS)
def test_metrics_of_keras(name: str, ranks: int) -> None:
    make = KERAS[name]

    def update(metric: Any, y: Any, p: Any, weights: Any) -> None:
        shaped = (y[:, None], p[:, None]) if name == "F1Score" else (y, p)
        metric.update_state(*shaped, None if name == "Mean" else weights)

    def rank(world: World) -> Any:
        metric = make()
        update(metric, *data(0))  # some make their variables now
        metric.reset_state()
        if ROWS[world.rank]:
            update(metric, *data(world.rank))
        before = states(metric)
        found = over_ranks([metric], lambda: {"found": metric.result()}, world)["found"]
        assert states(metric) == before, "a rank keeps its own"
        return found

    whole = make()
    for number in range(ranks):
        if ROWS[number]:
            update(whole, *data(number))
    for found in run(ranks, rank):
        np.testing.assert_allclose(found, whole.result(), rtol=1e-6)


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("kind", [Largest, Smallest, Total, Added])
def test_metrics_of_scripts_are_combined_by_what_they_do(kind: Any, in_graph: bool) -> None:
    def rank(world: World) -> float:
        metric = kind()
        observe([metric])
        update = tf.function(metric.update_state) if in_graph else metric.update_state
        if ROWS[world.rank]:
            for _ in range(2):
                update(*data(world.rank)[:2])
        return float(over_ranks([metric], lambda: {"own": metric.result()}, world)["own"])

    whole = kind()
    for number in range(3):
        for _ in range(2 if ROWS[number] else 0):
            whole.update_state(*data(number)[:2])
    assert run(3, rank) == [pytest.approx(float(whole.result()), rel=1e-6)] * 3


@pytest.mark.parametrize("kind", [Last, Running])
def test_what_cannot_be_combined_is_averaged_and_told_once(kind: Any, capfd: pytest.CaptureFixture[str]) -> None:
    metric_states._warn.cache_clear()

    def rank(world: World) -> Any:
        metric = kind()
        observe([metric])
        if ROWS[world.rank]:
            metric.update_state(*data(world.rank)[:2])
        own = float(metric.result())
        return own, [float(over_ranks([metric], lambda: {"own": metric.result()}, world)["own"]) for _ in range(2)]

    found = run(3, rank)
    mean = (found[0][0] + found[1][0]) / 2  # of the ranks that have updated it
    assert [numbers for _, numbers in found] == [[pytest.approx(mean, rel=1e-6)] * 2] * 3
    told = capfd.readouterr().err
    assert (
        told.count("mpitrain: warning: the state of a metric cannot be combined over ranks, 'own': shown is the") == 1
    )


class Scores(Own):
    """The score of each batch, as many scripts add them up."""

    def follow(self, errors: Any) -> None:
        self.state.assign_add(tf.reduce_sum(errors) / tf.reduce_max(errors))


class Steps(Own):
    def follow(self, errors: Any) -> None:
        self.state.assign_add(1.0)


class Rows(Own):
    def follow(self, errors: Any) -> None:
        self.state.assign_add(tf.cast(tf.size(errors), tf.float32) / 2.0)


@pytest.mark.parametrize(("kind", "told"), [(Scores, True), (Steps, True), (Rows, False), (Total, False)])
@pytest.mark.parametrize("is_part", [True, False])
def test_what_is_of_a_batch_is_told_where_a_rank_has_a_part_of_it(
    kind: Any, told: bool, is_part: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    metric_states._tell.cache_clear()  # once in a process
    metric = kind()
    observe([metric])

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def step(labels: Any) -> None:
        batch = Portion(0, 2, True).share((labels,)) if is_part else (labels,)
        counted = Counted.of((batch,) if is_part else batch)
        with counted.keeping(lambda: metric.variables):
            metric.update_state(labels, labels + 1.0)

    for _ in range(2):
        step(tf.ones(4))
    assert capfd.readouterr().err.count("update_state of 'own' adds a mean") == (told and is_part)
