"""What a checkpoint holds of a model, and how it gets into other ranks: threads here, as many or others than before."""

from __future__ import annotations

import threading
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from mpitrain.checkpoint import state
from mpitrain.checkpoint.model_file import save_keras
from mpitrain.errors import UsageError
from mpitrain.training.callbacks import DataParallel
from mpitrain.world.world import World
from tests.problem import batches, dataset
from tests.unit.job import run

ONE_AT_A_TIME = threading.Lock()


def made(width: int = 4, optimizer: str = "adam") -> Any:
    with ONE_AT_A_TIME:
        keras.utils.set_random_seed(3)
        layers = [
            keras.Input((5,)),
            keras.layers.Dense(width),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(3),
        ]
        model = keras.Sequential(layers, name="model")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"], run_eagerly=True)
        return model


def trained(world: World, steps: int = 2) -> Any:
    """One whose moments are each rank's own: the epoch is not over."""
    model = made()
    own = batches(world.rank, [4] * steps, dtype="float32")

    class InMidEpoch(keras.callbacks.Callback):
        captured: Any = None

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == steps - 1:
                self.captured = state.capture(model, world), values_of(model)

    parallel, middle = DataParallel(world=world), InMidEpoch()
    model.fit(dataset(own), verbose=0, callbacks=[parallel, middle])
    return middle.captured


def values_of(model: Any) -> dict[str, Any]:
    return {item.key: np.array(item.variable.numpy()) for item in state.items_of(model)}


def built(width: int = 4, optimizer: str = "adam") -> Any:
    model = made(width, optimizer)
    model.optimizer.build(model.trainable_variables)
    return model


@pytest.fixture(scope="module")
def captured() -> list[Any]:
    """Of each of three ranks: what it captured, and what it had."""
    return run(3, trained)


def test_rank_0_gets_everything_and_the_others_nothing(captured: list[Any]) -> None:
    arrays, own = captured[0]
    assert [found for found, _ in captured[1:]] == [{}, {}]
    assert {key for key in arrays if not key.startswith(("random/", "metric/", "rank "))} == set(own)
    moments = [item.key for item in state.items_of(built()) if item.rule == "mean"]
    assert len(moments) == 2
    for rank, (_, theirs) in enumerate(captured):
        for key, value in theirs.items():
            kept = arrays[f"rank {rank}/{key}"] if rank and key in moments else arrays[key]
            np.testing.assert_array_equal(kept, value, err_msg=f"rank {rank}: {key}")
    assert sum(key.startswith("random/") for key in arrays) == 7


def test_as_many_ranks_have_what_each_had(captured: list[Any]) -> None:
    arrays = captured[0][0]

    def rank(world: World) -> Any:
        model = built()
        state.check_fits(model, arrays, state.labels_of(model), "it")
        with ONE_AT_A_TIME:  # the generators of Python and NumPy are those of all threads
            state.restore(model, arrays, 3, world)
        return values_of(model)

    for rank_number, values in enumerate(run(3, rank)):
        for key, value in values.items():
            np.testing.assert_array_equal(value, captured[rank_number][1][key], err_msg=key)


@pytest.mark.parametrize("ranks", [1, 2])
def test_other_ranks_have_the_mean_of_moments(captured: list[Any], ranks: int) -> None:
    arrays = captured[0][0]

    def rank(world: World) -> Any:
        model = built()
        state.restore(model, arrays, 3, world)
        return values_of(model), {item.key for item in state.items_of(model) if item.rule == "mean"}

    for values, means in run(ranks, rank):
        for key, value in values.items():
            everyone = np.array([own[key] for _, own in captured], np.float64)
            expected = everyone.mean(0).astype(value.dtype) if key in means else captured[0][1][key]
            np.testing.assert_array_equal(value, expected, err_msg=key)


@pytest.mark.parametrize("ranks", [3, 2])
def test_metrics_go_on_counting(captured: list[Any], ranks: int) -> None:
    arrays = captured[0][0]

    def rank(world: World) -> list[Any]:
        model = made()
        x, y = batches(world.rank, [4], dtype="float32")[0]
        model.train_on_batch(x, y)
        before = [v.numpy() for v in state.metrics_of(model)]
        state.add_metrics(model, arrays, 3, world)
        return [v.numpy() - then for v, then in zip(state.metrics_of(model), before, strict=True)]

    added = run(ranks, rank)
    per_rank = [
        [np.asarray(state._of_rank(arrays, f"metric/{place}", number)) for place in range(len(added[0]))]
        for number in range(3)
    ]
    if ranks == 3:
        for own, theirs in zip(added, per_rank, strict=True):
            np.testing.assert_allclose(own, theirs, rtol=1e-5)
    else:  # all of it on rank 0
        np.testing.assert_allclose(added[0], np.sum(per_rank, 0), rtol=1e-5)
        assert not np.any(added[1])


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            {"width": 5},
            r"it holds .*kernel of shape \(5, 4\) and type float32 where this run has .*kernel of shape \(5, 5\)",
        ),
        ({"optimizer": "sgd"}, "it holds .*, which this run has not: give the model and optimizer of that run"),
        ({"optimizer": "adamax"}, None),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(captured: list[Any], model: dict[str, Any], words: str | None) -> None:
    arrays, labels = captured[0][0], state.labels_of(built())
    other = built(**model)
    if words is None:  # whose state has the same shapes, and other names
        state.check_fits(other, arrays, labels, "it")
        return
    with pytest.raises(UsageError, match=words):
        state.check_fits(other, arrays, labels, "it")


def test_random_streams_go_on(captured: list[Any]) -> None:
    import random

    before = state._random_states()
    expected = random.random(), np.random.random(), tf.random.get_global_generator().normal([2]).numpy().tolist()  # noqa: NPY002
    state._set_random_states(before)
    again = random.random(), np.random.random(), tf.random.get_global_generator().normal([2]).numpy().tolist()  # noqa: NPY002
    assert again == expected


def test_memory_of_an_earlier_snapshot_is_used_again() -> None:
    def rank(world: World) -> bool:
        model = built()
        first = state.capture(model, world)
        key = next(item.key for item in state.items_of(model) if item.rule is None and item.variable.shape)
        variable = next(item.variable for item in state.items_of(model) if item.key == key)
        variable.assign(variable + 1.0)
        second = state.capture(model, world, first)
        np.testing.assert_array_equal(second[key], variable.numpy())
        return second[key] is first[key]

    assert run(1, rank) == [True]


def test_a_model_file_has_the_values_of_the_snapshot(tmp_path: Any, capfd: pytest.CaptureFixture[str]) -> None:
    model = built()
    snapshot = [(item.variable, np.array(item.variable.numpy())) for item in state.items_of(model)]
    truth = model.layers[0].kernel.numpy()
    model.layers[0].kernel.assign(truth * 0.0)  # training has gone on
    save_keras(model, snapshot, tmp_path / "model.keras")
    np.testing.assert_array_equal(keras.models.load_model(tmp_path / "model.keras").layers[0].kernel.numpy(), truth)

    class Unsaved(keras.Model):
        def get_config(self) -> Any:
            raise NotImplementedError("no configuration")

    save_keras(Unsaved(), [], tmp_path / "unsaved.keras")
    assert not (tmp_path / "unsaved.keras").exists()
    assert "has no unsaved.keras: Keras cannot save this model (NotImplementedError: no configuration)" in (
        capfd.readouterr().err
    )
