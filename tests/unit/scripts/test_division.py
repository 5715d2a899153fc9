"""The data of an unmodified script, divided among ranks that are threads: the numbers of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from mpitrain.data.portions import Portion
from mpitrain.errors import AgreedError
from mpitrain.scripts.division import DataDivision
from mpitrain.training.callbacks import DataParallel
from mpitrain.training.counting import weigh_scalars
from mpitrain.world.world import World
from tests.unit.job import run

pytestmark = pytest.mark.usefixtures("double_precision")
ONE_AT_A_TIME = threading.Lock()
ROWS = 11  # in batches of 4, 4 and 3
Arguments = dict[str, Any]


def arrays() -> tuple[Any, Any]:
    random = np.random.default_rng(1)
    return random.normal(size=(ROWS, 3)), random.normal(size=(ROWS, 1))


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        x, y = arrays()
        return x[4 * index : 4 * index + 4], y[4 * index : 4 * index + 4]


def generated() -> Any:
    """Keras draws one more than it trains on."""
    for _ in range(3):
        for index in range(3):
            yield Batches()[index]


def given_arrays() -> Arguments:
    x, y = arrays()
    return {"x": x, "y": y, "batch_size": 4}


DATA: dict[str, Callable[[], Arguments]] = {
    "arrays": given_arrays,
    "dataset": lambda: {"x": tf.data.Dataset.from_tensor_slices(arrays()).batch(4)},
    "PyDataset": lambda: {"x": Batches()},
    "generator": lambda: {"x": generated(), "steps_per_epoch": 3},
    "weights": lambda: {**given_arrays(), "sample_weight": np.linspace(0.5, 1.5, ROWS)},
    "validation": lambda: {**given_arrays(), "validation_split": 0.3},
}


def made(stateful: bool = False) -> Any:
    with ONE_AT_A_TIME:
        keras.utils.set_random_seed(2)
        layers: list[Any] = [keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
        if stateful:
            layers = [keras.Input((2, 3), batch_size=4), keras.layers.LSTM(2, stateful=True, name="lstm")]
        model = keras.Sequential(layers, name="model")
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
        return model


def division(world: World, notes: list[str], is_global: bool = True) -> DataDivision:
    return DataDivision(Portion(world.rank, world.size, is_global), lambda part, text: notes.append(f"{part}: {text}"))


@pytest.fixture(scope="module", autouse=True)
def _scalars_weigh() -> Any:
    kinds = keras.metrics.Mean, keras.metrics.Sum
    originals = [kind.update_state for kind in kinds]
    weigh_scalars()
    yield
    for kind, update_state in zip(kinds, originals, strict=True):
        kind.update_state = update_state


# Of the last batch of 3 rows five ranks compute all.
@pytest.mark.parametrize(("kind", "ranks"), [*((kind, 2) for kind in DATA), ("arrays", 5)])
def test_fit_is_that_of_one_process(kind: str, ranks: int) -> None:
    def rank(world: World) -> Any:
        notes: list[str] = []
        model, arguments = made(), {**DATA[kind](), "shuffle": False, "epochs": 2, "verbose": 0}
        division(world, notes).divide_training(model, arguments)
        history = model.fit(**arguments, callbacks=[DataParallel(world=world)]).history
        return history, [one.numpy() for one in model.weights], notes

    reference = made()
    expected = reference.fit(**DATA[kind](), shuffle=False, epochs=2, verbose=0).history
    found = run(ranks, rank)
    for history, weights, _ in found:
        for mine, truth in zip(weights, reference.weights, strict=True):
            np.testing.assert_allclose(mine, truth.numpy(), rtol=1e-11, atol=1e-12)
        assert sorted(history) == sorted(expected)
        for name, numbers in expected.items():
            np.testing.assert_allclose(history[name], numbers, rtol=1e-9, err_msg=name)
    if kind == "arrays":
        assert found[0][2] == ["data: fit: arrays are divided by rows; batch size 4 is of all ranks"]


@pytest.mark.parametrize("kind", ["arrays", "dataset", "PyDataset"])
def test_evaluation_is_that_of_one_process(kind: str) -> None:
    def rank(world: World) -> Any:
        model, arguments = made(), {**DATA[kind](), "verbose": 0}
        division(world, []).divide_evaluation(model, arguments)
        return model.evaluate(**arguments, callbacks=[DataParallel(world=world)])

    expected = made().evaluate(**DATA[kind](), verbose=0)
    assert run(3, rank) == [pytest.approx(expected, rel=1e-12)] * 3


def test_batches_of_each_rank_are_so_many_times_as_much() -> None:
    def rank(world: World) -> Any:
        notes: list[str] = []
        model, arguments = made(), {**given_arrays(), "batch_size": 2, "shuffle": False, "verbose": 0}
        division(world, notes, is_global=False).divide_training(model, arguments)
        model.fit(**arguments, callbacks=[DataParallel(world=world)])
        return [one.numpy() for one in model.weights], notes

    reference = made()
    reference.fit(**given_arrays(), shuffle=False, verbose=0)
    for weights, notes in run(2, rank):
        for mine, truth in zip(weights, reference.weights, strict=True):
            np.testing.assert_allclose(mine, truth.numpy(), rtol=1e-11, atol=1e-12)
        assert notes == ["data: fit: arrays are divided by rows; batch size 2 is per rank, 2 times as much in all"]


def test_what_goes_on_from_batch_to_batch_is_computed_whole(capfd: pytest.CaptureFixture[str]) -> None:
    x = np.random.default_rng(0).normal(size=(8, 2, 3))

    def rank(world: World) -> Any:
        with pytest.raises(AgreedError, match=r"the layer lstm of model is stateful.*--batch-size-is global"):
            division(world, [], is_global=False).divide_training(made(stateful=True), {"x": x, "y": x[:, 0, :2]})
        notes: list[str] = []
        model, arguments = made(stateful=True), {"x": x, "y": x[:, 0, :2], "batch_size": 4, "shuffle": False}
        division(world, notes).divide_training(model, arguments)
        model.fit(**arguments, verbose=0, callbacks=[DataParallel(world=world)])
        return [one.numpy() for one in model.trainable_weights], notes

    reference = made(stateful=True)
    reference.fit(x, x[:, 0, :2], batch_size=4, shuffle=False, verbose=0)
    for weights, notes in run(2, rank):
        assert notes == ["data: fit: every rank computes all of each batch, which rank 0 counts"]
        for mine, truth in zip(weights, reference.trainable_weights, strict=True):
            np.testing.assert_allclose(mine, truth.numpy(), rtol=1e-11, atol=1e-12)
    assert capfd.readouterr().err.count("the layer lstm is stateful, so every rank computes whole batches") == 1


def test_a_single_batch() -> None:
    x, y = arrays()
    portion = Portion(1, 2, True)
    own = DataDivision(portion, lambda part, text: None)
    weights = np.arange(ROWS * 1.0)
    arguments: Arguments = {"x": x, "y": y, "sample_weight": weights}
    assert own.divide_batch(made(), arguments)
    data, total, counted = arguments["x"]
    assert (total, counted, arguments["y"], arguments["sample_weight"]) == (ROWS, (), None, None)
    for mine, whole in zip(data, (x, y, weights), strict=True):
        np.testing.assert_array_equal(mine, whole[1::2])
    by_class: Arguments = {"x": x, "y": np.arange(ROWS) % 2, "class_weight": {0: 1.0, 1: 5.0}}
    assert own.divide_batch(made(), by_class)
    np.testing.assert_array_equal(by_class["x"].data[2], np.full(5, 5.0))
    assert not own.divide_batch(made(), {"x": None, "y": None})
