"""What waits for a script to load Keras."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from mpitrain.errors import AgreedError
from mpitrain.scripts import script_keras
from mpitrain.scripts.changes import Changes
from mpitrain.scripts.script_keras import ScriptKeras
from mpitrain.scripts.work_division import WorkDivision
from mpitrain.world import start
from mpitrain.world.world import World
from tests.unit.job import run


def test_until_keras_is_loaded_nothing_is_trained_and_seeds_are_those_of_all() -> None:
    def rank(world: World) -> Any:
        keras_of = ScriptKeras(world, WorkDivision(), Changes())
        states = (keras_of.trained, keras_of.evaluated, keras_of.training, keras_of.ended(KeyboardInterrupt()))
        return states, keras_of._seed

    found = run(3, rank)
    assert [states for states, _ in found] == [(False,) * 4] * 3
    assert len({seed for _, seed in found}) == 1
    assert found[0][1] != run(1, rank)[0][1]  # another in each run


def test_a_script_that_asks_for_its_rank_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def init(**options: Any) -> str:
        asked.append(options)
        return "the job"

    monkeypatch.setattr(start, "init", init)

    def rank(world: World) -> Any:
        keras_of = ScriptKeras(world, WorkDivision(), Changes())
        left: list[int] = []
        monkeypatch.setattr(keras_of.shared_files, "leave_alone", lambda: left.append(1))
        keras_of._notice_ranks()
        assert left == []
        return start.init(device="cpu"), left

    assert run(1, rank) == [("the job", [1])]
    assert asked == [{"device": "cpu"}]


def test_keras_2_trains_nothing() -> None:
    classes = {name: type(name, (), {}) for name in ("Model", "Optimizer", "Legacy")}
    optimizers = SimpleNamespace(Optimizer=classes["Optimizer"], legacy=SimpleNamespace(Optimizer=classes["Legacy"]))
    script_keras._refuse_training(cast(ModuleType, SimpleNamespace(Model=classes["Model"], optimizers=optimizers)))
    calls = [
        ("Model", "fit"),
        ("Model", "train_on_batch"),
        ("Optimizer", "apply_gradients"),
        ("Legacy", "apply_gradients"),
    ]
    for name, method in calls:
        with pytest.raises(AgreedError, match="trains with tf_keras"):
            getattr(classes[name](), method)(1, epochs=2)


def test_tensorflow_alone_brings_keras(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(importlib, "import_module", loaded.append)
    monkeypatch.setitem(sys.modules, "keras", ModuleType("keras"))
    script_keras._begin_keras()
    assert loaded == []
    monkeypatch.delitem(sys.modules, "keras")
    script_keras._begin_keras()
    assert loaded == ["keras"]
