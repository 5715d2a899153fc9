"""The order of host calls of a graph, and what becomes of their errors."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import tensorflow as tf

from mpitrain.collectives import ordering
from mpitrain.comm.communicator import Communicator
from mpitrain.errors import CollectiveError


def test_calls_in_branches_and_nested_functions_run_as_they_were_traced() -> None:
    order: list[int] = []
    communicator = cast(Communicator, object())

    def call(number: int) -> tf.Tensor:
        def host(value: Any) -> Any:
            order.append(number)
            return value

        def traced() -> list[Any]:
            return ordering.host_call(host, [tf.constant(float(number))], [tf.float32])

        return ordering.in_turn(communicator, traced)[0]

    @tf.function
    def nested(number: Any) -> Any:
        return call(1) if number else call(3)

    @tf.function
    def step(flag: Any) -> Any:
        parts = [call(0), nested(True), tf.cond(flag, lambda: call(2), lambda: call(9)), nested(False), call(4)]
        return tf.add_n(parts)

    for _ in range(3):
        order.clear()
        assert float(step(tf.constant(True))) == 10.0
        assert order == [0, 1, 2, 3, 4]


def test_what_xla_compiles_hands_its_turn_on() -> None:
    communicator, seen = cast(Communicator, object()), []

    def call(number: tf.Tensor) -> tf.Tensor:
        seen.append(int(number))
        return number + 1

    for _ in range(3):
        ordering.with_turn(communicator, call)
    ordering.with_turn(cast(Communicator, object()), call)  # which has a turn of its own
    assert seen == [0, 1, 2, 0]


def test_an_error_of_ranks_is_the_same_in_a_graph() -> None:
    def host(value: Any) -> list[Any]:
        if value > 1:
            raise CollectiveError("ranks 0 and 1 differ, ä")
        return [np.int32(value + 1), np.float64(0.5)]

    @tf.function
    def graph(value: Any) -> Any:
        return ordering.checked_call(host, [value], [tf.int32, tf.float64])

    assert [float(one) for one in graph(tf.constant(1))] == [2.0, 0.5]
    with pytest.raises(tf.errors.FailedPreconditionError, match="CollectiveError: ranks 0 and 1 differ"):
        graph(tf.constant(2))
    with pytest.raises(tf.errors.FailedPreconditionError):
        tf.function(lambda value: [graph(value), tf.constant(0)][1])(tf.constant(2))  # though nobody uses the result
