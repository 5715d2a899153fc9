"""Keras `fit` on ranks that are threads is Keras `fit` on one process with the batches of all."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest

from mpitrain.errors import ReplicaError
from mpitrain.training.callbacks import DataParallel
from mpitrain.training.model_hook import train_on_rows
from mpitrain.world.world import World
from tests.problem import batches, dataset, merged, mlp
from tests.unit.job import run

pytestmark = pytest.mark.usefixtures("double_precision")
ONE_AT_A_TIME = threading.Lock()  # Keras has one seed for all threads


def model(**options: Any) -> Any:
    with ONE_AT_A_TIME:
        return mlp(keras.optimizers.SGD(0.1, momentum=0.9), **options)


def fit(own: Any, pairs: Any, callbacks: Sequence[Any] = (), **options: Any) -> Any:
    return own.fit(dataset(pairs), verbose=0, callbacks=[*callbacks], **{"epochs": 2, **options}).history


def weights(own: Any) -> list[Any]:
    return [np.array(variable.numpy()) for variable in own.weights]


@pytest.mark.parametrize(
    ("sizes", "way"),
    [
        ([[4, 4], [4, 4]], {}),
        ([[4, 4, 2], [2, 5, 1], [1]], {}),  # other sizes, and a rank that is out of data
        ([[3, 3, 2], [2]], {"steps_per_execution": 2}),
        ([[3], [2, 4, 1]], {"run_eagerly": True}),
    ],
    ids=["same", "out of data", "steps_per_execution", "eager"],
)
def test_fit(sizes: list[list[int]], way: dict[str, Any]) -> None:
    everyone = [batches(rank, own) for rank, own in enumerate(sizes)]

    def rank(world: World) -> Any:
        own = model(**way)
        history = fit(own, everyone[world.rank], [DataParallel(world=world)])
        return history, weights(own), int(own.optimizer.iterations.numpy())

    found = run(len(sizes), rank)
    reference = model(**way)
    expected = fit(reference, merged(everyone))
    for history, own, steps in found:
        assert history == found[0][0]
        assert steps == int(reference.optimizer.iterations.numpy())
        for mine, first, truth in zip(own, found[0][1], weights(reference), strict=True):
            assert (mine == first).all(), "replicas are identical"
            np.testing.assert_allclose(mine, truth, rtol=1e-12, atol=1e-12)
    assert sorted(found[0][0]) == sorted(expected)
    for name, numbers in expected.items():
        np.testing.assert_allclose(found[0][0][name], numbers, rtol=1e-9, err_msg=name)


def test_one_rank_that_stops_stops_all() -> None:
    everyone = [batches(rank, [4, 4]) for rank in range(3)]

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = epoch == 1

    def rank(world: World) -> int:
        stop = [Stop()] if world.rank == 1 else []
        own = model(run_eagerly=True)
        return len(fit(own, everyone[world.rank], [*stop, DataParallel(world=world)], epochs=5)["loss"])

    assert run(3, rank) == [2, 2, 2]


@pytest.mark.parametrize("changed", [0, 2])
def test_replicas_that_differ_are_told_on_all_ranks(changed: int) -> None:
    everyone = [batches(rank, [4, 4]) for rank in range(3)]

    def rank(world: World) -> str:
        own = model(run_eagerly=True)

        class Change(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                if world.rank == changed and batch == 1:
                    own.weights[1].assign_add(own.weights[1] + 1.0)

        with pytest.raises(ReplicaError) as caught:
            fit(own, everyone[world.rank], [DataParallel(world=world), Change()])
        return str(caught.value)

    told = run(3, rank)
    assert told == told[:1] * 3
    others = r"1 \(host\), 2 \(host\)" if changed == 0 else r"2 \(host\)"
    first = r"after epoch 1, ranks differ in 1 of \d+ variables; the first is sequential/dense/bias"
    assert re.match(f"{first}, where rank {others} differs from rank 0", told[0]), told[0]


def test_evaluate() -> None:
    everyone = [batches(rank, sizes) for rank, sizes in enumerate([[4, 3], [5], [1, 1, 1]])]

    def rank(world: World) -> Any:
        own = model(run_eagerly=True)
        parallel = [DataParallel(world=world)]
        return own.evaluate(dataset(everyone[world.rank]), verbose=0, return_dict=True, callbacks=parallel)

    found = run(3, rank)
    expected = model(run_eagerly=True).evaluate(dataset(merged(everyone)), verbose=0, return_dict=True)
    assert found == found[:1] * 3
    assert found[0] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("return_dict", [True, False])
def test_train_on_rows(return_dict: bool) -> None:
    everyone = [batches(rank, sizes) for rank, sizes in enumerate([[4, 3], [5, 2]])]

    def rank(world: World) -> Any:
        own = model(run_eagerly=True)
        told = []
        for x, y in everyone[world.rank]:
            given = {"x": x, "y": y, "return_dict": return_dict}
            told.append(train_on_rows(own, keras.Model.train_on_batch, given, world))
        return told, weights(own)

    found = run(2, rank)
    reference = model(run_eagerly=True)
    expected = [reference.train_on_batch(x, y, return_dict=return_dict) for x, y in merged(everyone)]
    for told, own in found:
        for numbers, truth in zip(told, expected, strict=True):
            mine, theirs = (keras.tree.map_structure(float, logs) for logs in (numbers, truth))  # or NumPy's numbers
            assert mine == pytest.approx(theirs, rel=1e-9)
        for mine, truth in zip(own, weights(reference), strict=True):
            np.testing.assert_allclose(mine, truth, rtol=1e-12, atol=1e-12)
