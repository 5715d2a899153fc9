"""A run from `compile` to the saved file: on ranks that are threads it is that of one process."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpitrain
from mpitrain.errors import AgreedError, DataError
from mpitrain.trainer import trainer
from mpitrain.trainer.trainer import Summary, Times, Trainer
from mpitrain.world.world import World
from tests.unit.job import run

ONE_AT_A_TIME = threading.Lock()
RANDOM = np.random.default_rng(4)
X, Y = RANDOM.normal(size=(22, 3)).astype("float32"), RANDOM.integers(0, 3, 22)


def made(compiled: bool = True) -> Any:
    with ONE_AT_A_TIME:
        keras.utils.set_random_seed(2)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)], name="model")
        if compiled:
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"], run_eagerly=True)
        return model


def trained(world: World, data: Any, output: Path | None = None, **options: Any) -> tuple[Summary, Any]:
    """With a batch of 4 of all ranks."""
    model = made()
    given = {"optimizer": None, "batch_size": 4 // world.size, "epochs": 2, "progress": False, **options}
    source = mpitrain.load_data(data, validation_split=options.pop("split", 0.0), seed=1, world=world)
    given.pop("split", None)
    return Trainer(model, world=world, **given).fit(source, output), [one.numpy() for one in model.weights]


@pytest.mark.parametrize(
    ("data", "split", "evaluated_on"),
    [
        ((X[:20], Y[:20]), 0.0, "training"),
        ((X[:20], Y[:20]), 0.2, "validation"),
        ({"x_train": X[:16], "y_train": Y[:16], "x_test": X[16:], "y_test": Y[16:]}, 0.0, "test"),
    ],
    ids=["training", "validation", "test"],
)
def test_a_run_is_that_of_one_process(data: Any, split: float, evaluated_on: str) -> None:
    ((expected, truth),) = run(1, lambda world: trained(world, data, split=split))
    for summary, weights in run(2, lambda world: trained(world, data, split=split)):
        assert summary.evaluated_on == expected.evaluated_on == evaluated_on
        assert summary.samples == expected.samples == 2 * (16 if evaluated_on != "training" else 20)
        for name, numbers in expected.history.items():
            np.testing.assert_allclose(summary.history[name], numbers, rtol=1e-5, err_msg=name)
        assert summary.results == pytest.approx(expected.results, rel=1e-5)
        if evaluated_on != "test":
            prefix = "val_" if evaluated_on == "validation" else ""
            assert summary.results["loss"] == summary.history[f"{prefix}loss"][-1]
        assert set(summary.results) == {"loss", "accuracy"}
        for mine, other in zip(weights, truth, strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)
        assert (summary.model_path, summary.servers, summary.losses) == (None, None, ())
        assert summary.times.total >= summary.times.compute > 0


def test_what_is_saved(tmp_path: Path) -> None:
    found = run(2, lambda world: trained(world, (X[:20], Y[:20]), tmp_path, epochs=1))
    (path,) = {summary.model_path for summary, _ in found}
    assert path is not None
    for mine, kept in zip(found[1][1], keras.models.load_model(path).weights, strict=True):
        np.testing.assert_array_equal(mine, kept.numpy())
    numbers = json.loads((tmp_path / "summary.json").read_text())
    assert numbers["ranks"] == 2
    assert numbers["history"] == found[0][0].history == found[1][0].history
    assert (numbers["class_names"], numbers["model_path"]) == (["0", "1", "2"], str(path))


def test_a_model_that_does_not_fit_the_data_is_refused_on_all_ranks() -> None:
    def rank(world: World) -> str:
        labels = np.where(np.arange(22) == 3, 5, Y)
        with pytest.raises(AgreedError, match=r"the model has 3 outputs, but the labels are of 6 classes") as caught:
            Trainer(made(compiled=False), world=world).fit(mpitrain.load_data((X, labels), world=world))
        return str(caught.value)

    assert len(set(run(2, rank))) == 1


def test_what_cannot_be_saved_all_ranks_are_told(tmp_path: Path) -> None:
    def rank(world: World) -> str:
        with pytest.raises(AgreedError) as caught:
            trained(world, (X[:8], Y[:8]), tmp_path / "absent", epochs=1)
        return str(caught.value)

    assert len(set(run(2, rank))) == 1


@pytest.mark.parametrize(
    ("loss", "metrics", "found"),
    [
        (None, None, ("sparse_categorical_crossentropy", ["accuracy"])),
        (None, ["mae"], ("sparse_categorical_crossentropy", ["mae"])),
        ("mse", None, ("mse", ["accuracy"])),
        (None, [], ("sparse_categorical_crossentropy", [])),
        ("mse", ["mae"], ("mse", ["mae"])),
    ],
)
def test_what_is_not_given_is_chosen(loss: Any, metrics: Any, found: Any) -> None:
    def rank(world: World) -> Any:
        model, source = made(compiled=False), mpitrain.load_data((X, Y), world=world)
        made_trainer = Trainer(model, loss=loss, metrics=metrics, optimizer="sgd", world=world)
        assert not made_trainer.keeps_compiled
        made_trainer._compile(source, SimpleNamespace(check=lambda: None))  # type: ignore[arg-type]
        chosen = [getattr(one, "name", one) for one in model._compile_metrics._user_metrics]
        return getattr(model.loss, "name", model.loss), chosen

    assert run(1, rank) == [found]


@given(ranks=st.integers(1, 6), validation=st.integers(0, 6), test=st.integers(0, 6))
def test_each_rank_has_something_to_evaluate(ranks: int, validation: int, test: int) -> None:
    source: Any = SimpleNamespace(validation_count=validation, test_count=test, description="data")
    few = [f"{n} {what}" for n, what in ((validation, "validation"), (test, "test")) if 0 < n < ranks]
    if few:
        with pytest.raises(DataError, match=f"data: {few[0]} samples?, too few for {ranks} ranks"):
            trainer.enough_to_evaluate(source, ranks)
    else:
        trainer.enough_to_evaluate(source, ranks)


def test_times_are_means_over_ranks() -> None:
    def rank(world: World) -> Times:
        return trainer._mean_times((4.0 + 2 * world.rank, 1.0, 0.5 * world.rank), world)

    found = run(3, rank)
    assert found == [Times(6.0, 1.0, 0.5)] * 3
    assert found[0].compute == 4.5
    assert Times(1.0, 0.75, 0.5).compute == 0.0, "what ran beside it counts once"
    assert Summary({}, "test", {}, 60, found[0], None).samples_per_second == 10.0


@pytest.mark.parametrize(("scaling", "ranks", "factor"), [("none", 4, 1.0), ("linear", 4, 4.0), ("sqrt", 4, 2.0)])
def test_learning_rates(scaling: str, ranks: int, factor: float) -> None:
    for rate in (None, 0.25):
        made_optimizer = trainer.make_optimizer("sgd", rate, scaling, ranks)
        assert float(made_optimizer.learning_rate.numpy()) == pytest.approx((rate or 0.01) * factor)
    assert type(made_optimizer) is keras.optimizers.SGD


@given(rate=st.floats(1e-3, 10.0), epochs=st.integers(1, 20))
def test_cosine_decay_falls_from_the_rate_to_nearly_nothing(rate: float, epochs: int) -> None:
    schedule = trainer.cosine_decay(rate, epochs).schedule
    rates = [schedule(epoch) for epoch in range(epochs)]
    assert rates[0] == rate
    assert rates == sorted(rates, reverse=True)
    assert schedule(epochs / 2) == pytest.approx(rate / 2)
    assert rates[-1] <= rate * math.sin(math.pi / 2 / epochs) ** 2 * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize(("jit", "expected"), [("keras", False), ("on", True), ("off", False), ("auto", False)])
def test_whether_steps_are_compiled(jit: Any, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []

    def fit(model: Any, *args: Any, callbacks: Any, **options: Any) -> SimpleNamespace:
        used.extend([model.jit_compile, [type(one).__name__ for one in callbacks.callbacks]])
        return SimpleNamespace(history={"loss": [0.5]})

    monkeypatch.setattr(keras.Model, "fit", fit)
    run(1, lambda world: trained(world, (X[:20], Y[:20]), jit=jit))
    assert used[0] is expected
    assert ("JitChoice" in used[1]) == (jit == "auto")
