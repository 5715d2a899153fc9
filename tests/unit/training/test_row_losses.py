"""Losses with a number for each row that depends on other rows are told of; others are left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from mpitrain.training.row_losses import LOOKS, RowLosses

X = np.random.default_rng(2).normal(size=(6, 3)).astype("float32")


class OfRows(keras.losses.Loss):
    """A loss by a function of two tensors."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        super().__init__(name="own")
        self.function = function

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self.function(y_true, y_pred)


def squares(y: Any, p: Any) -> Any:
    return tf.reduce_mean((y - p) ** 2, axis=-1)


COUNTED = tf.Variable(0.0)
LOSSES: dict[str, tuple[Callable[[Any, Any], Any], bool]] = {
    "of its row": (squares, False),
    "among the others": (lambda y, p: squares(y, p) / tf.reduce_sum(squares(y, p)), True),
    "against the mean": (lambda y, p: squares(y, p - tf.reduce_mean(p, axis=0)), True),
    "one number": (lambda y, p: tf.reduce_mean(squares(y, p)), False),
    "hardly": (lambda y, p: squares(y, p) * (1.0 + 1e-9 * tf.reduce_sum(p)), False),
    "at random": (lambda y, p: squares(y, p) + tf.random.uniform((tf.shape(p)[0],)), False),
    "counted": (lambda y, p: squares(y, p) / tf.reduce_sum(p) + 0.0 * COUNTED.assign_add(1.0), False),
    "of six rows": (lambda y, p: squares(tf.reshape(y, (6, 3)), p) / tf.reduce_sum(p), False),
    "all zero": (lambda y, p: squares(y, p) * 0.0, False),
}


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_which_are_told_of(name: str, graph: bool) -> None:
    function, is_told = LOSSES[name]
    told: list[str] = []
    losses, loss = RowLosses(told.append), OfRows(function)
    before = float(COUNTED)

    def step(y: Any, p: Any) -> None:
        losses.look(loss, y, p)

    run = tf.function(step) if graph else step
    for _ in range(LOOKS + 2):
        run(tf.constant(X), tf.constant(X[::-1] * 2.0))
    assert len(told) == (LOOKS if is_told else 0), "the first batches alone"
    assert all(text.startswith("the loss own gives a number for each row that depends on the other") for text in told)
    assert float(COUNTED) == before, "a loss that counts is not computed once more"


def test_several_outputs_and_compiled_steps() -> None:
    told: list[str] = []
    losses = RowLosses(told.append)
    loss = OfRows(lambda y, p: squares(y["a"], p["a"]) / tf.reduce_sum(squares(y["a"], p["a"])))

    @tf.function(jit_compile=True, autograph=False)
    def compiled() -> None:
        losses.look(loss, {"a": X}, {"a": X[::-1] * 2.0})

    compiled()
    assert told == []
    losses.look(loss, {"a": X}, {"a": X[::-1] * 2.0})
    assert len(told) == 1
