"""Metrics over the samples of all ranks: those of Keras, all of them, and those that a script defines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import metrics as km

import mpitrain
from mpitrain.training.callbacks import DataParallel
from mpitrain.training.logs import global_metrics
from mpitrain.training.metric_states import observe
from tests.spmd.truth import WORLD, batches, dataset, merged, mlp

RANKS = range(WORLD.size)
pytestmark = pytest.mark.ranks(2, 3)
Data = tuple[Any, Any, Any]

MAKERS: dict[str, Callable[[], Any]] = {
    "AUC": lambda: km.AUC(multi_label=True, num_labels=3, curve="PR"),
    "BinaryIoU": lambda: km.BinaryIoU([0, 1]),
    "F1Score": lambda: km.F1Score("macro"),
    "FBetaScore": lambda: km.FBetaScore(None, beta=2.0),
    "IoU": lambda: km.IoU(2, [0, 1]),
    "MeanIoU": lambda: km.MeanIoU(2),
    "MeanMetricWrapper": lambda: km.MeanMetricWrapper(keras.losses.mean_squared_error),
    "OneHotIoU": lambda: km.OneHotIoU(3, [0, 2]),
    "OneHotMeanIoU": lambda: km.OneHotMeanIoU(3),
    "PrecisionAtRecall": lambda: km.PrecisionAtRecall(0.5),
    "RecallAtPrecision": lambda: km.RecallAtPrecision(0.5),
    "SensitivityAtSpecificity": lambda: km.SensitivityAtSpecificity(0.5),
    "SpecificityAtSensitivity": lambda: km.SpecificityAtSensitivity(0.5),
}
NAMES = sorted(name for name in dir(km) if isinstance(getattr(km, name), type) and name != "Metric")


def data(rank: int) -> Iterator[Data]:
    """Batches of one rank; the last of three ranks or more has none."""
    random = np.random.default_rng(11 + rank)
    for rows in [] if rank and rank == WORLD.size - 1 > 1 else [5, 2 + rank, 4]:
        shares = random.uniform(0.05, 1.0, (rows, 3)).astype("float32")
        kinds = np.eye(3, dtype="float32")[random.integers(0, 3, rows)]
        yield kinds, shares / shares.sum(1, keepdims=True), random.uniform(0.5, 1.5, rows).astype("float32")


def update(metric: Any, y: Any, p: Any, weights: Any) -> None:
    if isinstance(metric, km.Sum) or type(metric) is km.Mean:
        metric.update_state(p, weights[:, None] * np.ones((1, 3), "float32"))
    elif "Sparse" in type(metric).__name__:
        metric.update_state(y.argmax(1), p, weights)
    elif type(metric) in (km.IoU, km.MeanIoU):
        metric.update_state(y, p > 0.4, weights[:, None] * np.ones((1, 3), "float32"))
    elif isinstance(metric, km.BinaryIoU):
        metric.update_state(y, p, weights[:, None] * np.ones((1, 3), "float32"))
    else:
        metric.update_state(y, p, weights)


@pytest.mark.parametrize("name", NAMES)
def test_every_metric_of_keras(name: str) -> None:
    """A new one is in `NAMES`; where its defaults do not do, it needs a maker."""
    make = MAKERS.get(name) or getattr(km, name)
    metric, whole = make(), make()
    for rank in RANKS:
        for batch in data(rank):
            update(whole, *batch)
    for batch in data(0):  # it makes some variables at its first update
        update(metric, *batch)
    metric.reset_state()
    for batch in data(WORLD.rank):
        update(metric, *batch)
    before = [variable.numpy() for variable in metric.variables]
    found = global_metrics([metric], lambda: {"found": metric.result()}, WORLD)["found"]
    np.testing.assert_allclose(found, whole.result(), rtol=1e-5)
    assert np.isfinite(found).all()
    assert all((now.numpy() == then).all() for now, then in zip(metric.variables, before, strict=True))


class Own(km.Metric):
    """What a script defines; of the errors of each batch."""

    start: Any = "zeros"
    dtype_of_state: Any = None

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=name or f"{type(self).__name__.lower()}_{WORLD.size}")
        self.state = self.add_weight(name="state", shape=(), initializer=self.start, dtype=self.dtype_of_state)

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        errors = tf.abs(tf.cast(y, tf.float32) - tf.cast(p, tf.float32))
        self.follow(errors)

    def follow(self, errors: Any) -> None:
        raise NotImplementedError

    def result(self) -> Any:
        return keras.ops.cast(self.state, "float32") + 0.0


class Largest(Own):
    def follow(self, errors: Any) -> None:
        self.state.assign(tf.maximum(tf.reduce_max(errors), self.state))


class LargestOfKeras(Own):
    def follow(self, errors: Any) -> None:
        self.state.assign(keras.ops.maximum(self.state, keras.ops.max(errors)))


class Smallest(Own):
    start = keras.initializers.Constant(9.0)

    def follow(self, errors: Any) -> None:
        self.state.assign(keras.ops.minimum(self.state, keras.ops.min(errors)))

    def reset_state(self) -> None:
        self.state.assign(9.0)


class Count(Own):
    dtype_of_state = "int32"

    def follow(self, errors: Any) -> None:
        self.state.assign_add(tf.shape(errors)[0])


class Total(Own):
    def follow(self, errors: Any) -> None:
        self.state.assign(tf.reduce_sum(errors) + (self.state - tf.constant(1.0)))


class Errors(km.Mean):
    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        super().update_state(tf.abs(tf.cast(y, tf.float32) - tf.cast(p, tf.float32)), sample_weight=None)


class Holder(km.Metric):
    """Holds another metric, and the number of classes, which nothing changes."""

    def __init__(self) -> None:
        super().__init__(name="holder")
        self.inner = Largest("inner")
        self.classes = self.add_weight(name="classes", initializer=keras.initializers.Constant(3.0))

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.inner.update_state(y, p)

    def result(self) -> Any:
        return self.inner.result() * self.classes

    def reset_state(self) -> None:
        self.inner.reset_state()


class Last(Own):
    def follow(self, errors: Any) -> None:
        self.state.assign(tf.reduce_mean(errors))


class Running(Own):
    def follow(self, errors: Any) -> None:
        self.state.assign_add(0.1 * (tf.reduce_mean(errors) - self.state))


class Doubling(Own):
    def follow(self, errors: Any) -> None:
        self.state.assign(self.state + tf.reduce_sum(errors) + self.state)


class FromOne(Own):
    start = "ones"

    def follow(self, errors: Any) -> None:
        self.state.assign_add(tf.reduce_sum(errors))


class OnCondition(Own):
    def follow(self, errors: Any) -> None:
        most = tf.reduce_max(errors)
        tf.cond(most > self.state, lambda: self.state.assign(most), lambda: self.state.assign(self.state))


class OnPythonCondition(Own):
    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        most = tf.reduce_max(tf.abs(y - p))
        if most > self.state.value:  # AutoGraph makes a graph of it
            self.state.assign(most)


class InPython(Own):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = tf.Variable(0.0)

    def follow(self, errors: Any) -> None:
        self.hidden.assign(tf.reduce_max(errors))

    def result(self) -> Any:
        return tf.identity(self.hidden)


EXACT: list[Any] = [Largest, LargestOfKeras, Smallest, Count, Total, Errors, Holder]
INEXACT: list[Any] = [Last, Running, Doubling, FromOne, OnCondition, OnPythonCondition, InPython]


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("kind", [*EXACT, *INEXACT])
def test_metrics_of_a_script(kind: Any, graph: bool, capfd: pytest.CaptureFixture[str]) -> None:
    metric, whole = kind(), kind()
    everyone = [kind() for _ in RANKS]
    for rank in RANKS:
        for batch in data(rank):
            everyone[rank].update_state(*batch)
            whole.update_state(*batch)
    observe([metric])
    step = tf.function(metric.update_state) if graph else metric.update_state
    for batch in data(WORLD.rank):
        step(*map(tf.constant, batch))
    name = f"{kind.__name__} {graph}"
    capfd.readouterr()
    found = global_metrics([metric], lambda: {name: metric.result()}, WORLD)[name]
    assert mpitrain.all_gather_obj(float(found)) == [float(found)] * WORLD.size
    again = global_metrics([metric], lambda: {name: metric.result()}, WORLD)[name]
    assert float(again) == float(found)
    said = capfd.readouterr().err
    if kind in EXACT or WORLD.size == 1:
        np.testing.assert_allclose(found, whole.result(), rtol=1e-6)
        assert said == ""
    else:
        results = [own.result() for own, rank in zip(everyone, RANKS, strict=True) if [*data(rank)]]
        np.testing.assert_allclose(found, np.mean(results), rtol=1e-6)
        assert said.count("warning") == said.count(name) == (WORLD.rank == 0)


@pytest.mark.usefixtures("double_precision")
def test_metrics_of_a_script_in_fit() -> None:
    """One rank has no batch to validate with."""
    own = [batches(rank, [4, 2 + rank]) for rank in RANKS]
    tested = [batches(rank, [3, 5], seed=5) if rank == 0 or rank < WORLD.size - 1 else [] for rank in RANKS]
    models = [mlp(keras.optimizers.SGD(0.1), metrics=[Loudest(), Counted()]) for _ in range(2)]
    nothing = dataset(tested[0]).take(0)
    mine = dataset(tested[WORLD.rank]) if tested[WORLD.rank] else nothing
    whole = dataset(merged([one for one in tested if one]))
    found, expected = (
        model.fit(dataset(pairs), validation_data=held_out, epochs=2, verbose=0, callbacks=callbacks).history
        for model, pairs, held_out, callbacks in (
            (models[0], own[WORLD.rank], mine, [DataParallel()]),
            (models[1], merged(own), whole, []),
        )
    )
    assert found.keys() == expected.keys()
    for name, numbers in expected.items():
        np.testing.assert_allclose(found[name], numbers, rtol=1e-9, err_msg=name)


class Loudest(Own):
    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.state.assign(keras.ops.maximum(self.state, keras.ops.max(keras.ops.abs(p))))


class Counted(Own):
    dtype_of_state = "int64"

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.state.assign_add(keras.ops.shape(p)[0])
