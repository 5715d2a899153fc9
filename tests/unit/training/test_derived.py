"""Numbers that a step makes of metrics are found in its graph, and computed anew from other states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from mpitrain.training.derived import derived


class Counts:
    """Two metrics of a step, and a variable that is none."""

    def __init__(self) -> None:
        self.hits, self.rows = keras.metrics.Sum(name="hits"), keras.metrics.Sum(name="rows")
        self.other = keras.Variable(2.0)

    def update(self, x: Any) -> None:
        self.hits.update_state(tf.reduce_sum(tf.cast(x > 0.0, tf.float32)))
        self.rows.update_state(tf.cast(tf.size(x), tf.float32))


NUMBERS: dict[str, tuple[Callable[[Counts, Any], Any], Any]] = {
    "a state": (lambda own, x: tf.convert_to_tensor(own.hits.total.value), 8.0),
    "a ratio": (lambda own, x: own.hits.result() / own.rows.result(), 0.4),
    "with constants": (lambda own, x: 1.0 - 2.0 * own.hits.result() / tf.maximum(own.rows.result(), 1.0), 0.2),
    "of integers": (lambda own, x: tf.cast(own.rows.result(), tf.int64) // 3, 6),
    "a vector": (lambda own, x: tf.stack([own.hits.result(), own.rows.result()]), [8.0, 20.0]),
    "of data too": (lambda own, x: own.hits.result() + tf.reduce_sum(x), None),
    "of a variable too": (lambda own, x: own.hits.result() * own.other.value, None),
    "at random": (lambda own, x: own.hits.result() + tf.random.uniform(()), None),
    "of data only": (lambda own, x: tf.reduce_sum(x), None),
    "a constant": (lambda own, x: tf.constant(3.0), None),
    "no tensor": (lambda own, x: 3.0, None),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_what_follows_from_states_alone(name: str) -> None:
    make, expected = NUMBERS[name]
    own = Counts()
    found: dict[str, Any] = {}

    @tf.function
    def step(x: Any) -> Any:
        own.update(x)
        number = make(own, x)
        found.update(derived({"number": number}, [own.hits, own.rows]))
        return number

    result = step(tf.constant([1.0, -1.0, 2.0]))
    assert list(found) == ([] if expected is None else ["number"])
    if expected is None:
        return
    np.testing.assert_allclose(found["number"](), result, rtol=1e-6, err_msg="with the states of this rank")
    own.hits.total.assign(8.0)  # with those of all ranks
    own.rows.total.assign(20.0)
    for _ in range(2):
        np.testing.assert_allclose(found["number"](), expected, rtol=1e-6)
    assert found["number"]().dtype == result.dtype


def test_outside_of_graphs_there_is_nothing_to_find() -> None:
    own = Counts()

    @tf.function
    def other() -> Any:
        return own.hits.result() / own.rows.result()

    concrete = other.get_concrete_function()
    found: dict[str, Any] = {}

    @tf.function
    def step() -> None:
        found.update(derived({"of another graph": concrete.graph.outputs[0]}, [own.hits, own.rows]))

    step()
    assert found == {}
