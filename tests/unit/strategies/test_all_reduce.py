"""An update is planned once, and again where what it depends on has changed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from mpitrain.reduction import graph
from mpitrain.strategies.strategy import Update, strategy_of
from mpitrain.strategies.weighting import added_up
from mpitrain.world.world import World
from tests.unit.job import run


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whose updates were planned, in turn, by all ranks."""
    made: list[str] = []
    plan_of = graph.plan_of

    def counted(gradients: Any, variables: Any, title: str, *rest: Any) -> Any:
        made.append(title)
        return plan_of(gradients, variables, title, *rest)

    monkeypatch.setattr(graph, "plan_of", counted)
    return made


def test_updates_that_are_alike_are_planned_once(plans: list[str]) -> None:
    def rank(world: World) -> None:
        strategy, update = strategy_of(world), Update("a")
        variables = [tf.Variable(tf.zeros(3), name="v"), tf.Variable(0.0, name="unused")]
        for step in range(3):
            (mean, nothing) = strategy.update([tf.fill([3], float(world.rank + step)), None], variables, update)
            np.testing.assert_array_equal(mean, [0.5 + step] * 3)
            assert nothing is None

    run(2, rank)
    assert plans == ["a"] * 2


def test_whatever_differs_is_planned_for_itself(plans: list[str]) -> None:
    def rank(world: World) -> None:
        strategy, update = strategy_of(world), Update("a")
        variables = [tf.Variable(tf.zeros(3), name="v")]
        own = tf.fill([3], float(world.rank))
        rows = tf.IndexedSlices(own[:1], tf.constant([world.rank]), tf.constant([3]))

        def mean(gradient: Any, update: Update = update) -> Any:
            return tf.convert_to_tensor(strategy.update([gradient], variables, update)[0]).numpy().tolist()

        assert mean(own) == [0.5] * 3
        assert mean(tf.cast(own, tf.float64)) == [0.5] * 3
        assert mean(rows) == [0.0, 0.5, 0.0]
        assert mean(own, Update("b")) == [0.5] * 3
        assert mean(own, Update("a", half=True)) == [0.5] * 3
        with added_up(True):
            assert mean(own) == [1.0] * 3
        variables[0] = tf.Variable(tf.zeros([3, 1]), name="v")
        assert mean(own[:, tf.newaxis]) == [[0.5]] * 3
        variables[0] = tf.Variable(tf.zeros([2]), name="v", shape=tf.TensorShape([None]))
        assert mean(own[:2]) == [0.5] * 2  # of a variable that can have other shapes
        assert mean(own) == [0.5] * 3

    run(2, rank)
    assert len(plans) == 2 * 9


def test_plans_keep_no_variables_and_are_not_those_of_others() -> None:
    def rank(world: World) -> None:
        strategy, first = strategy_of(world), None
        for step in range(300):  # more than are kept; new variables are often where others were
            shape = (1 + step % 3,)
            variable = tf.Variable(tf.zeros(shape))
            (mean,) = strategy.update([tf.fill(shape, float(world.rank))], [variable], Update("a"))
            np.testing.assert_array_equal(mean, np.full(shape, 0.5))
            first = first or weakref.ref(variable)
        gc.collect()
        assert first is not None
        assert first() is None

    run(2, rank)
