"""Losses with a number for each row that depends on other rows too (contrastive ones, triplets): found by trying."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mpitrain.collectives.conversion import compiled_function
from mpitrain.collectives.ordering import host_call

LOOKS = 2


class RowLosses:
    """Looks at the first batches of one model. To be made outside of graphs."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        with tf.device("CPU:0"):
            # A variable: a step is traced once, and counts each time that it runs.
            self._left = tf.Variable(LOOKS, trainable=False, name="looks_at_losses")

    def look(self, loss: Any, y_true: Any, y_pred: Any) -> None:
        """Local: whether every second row, alone, has the same loss as among the others; in a graph, when it runs."""
        if compiled_function() is not None:
            return

        def compare(left: Any, again: Any, alone: Any, among: Any) -> np.int32:
            limit = np.sqrt(np.finfo(among.dtype).eps) * np.abs(among).max(initial=0.0)
            differs = [bool((np.abs(one - among) > limit).any()) for one in (again, alone)]
            if differs == [False, True]:  # what differs by itself draws random numbers
                self._tell(_found(loss))
            return np.int32(left - 1)

        def look() -> tf.Tensor:
            given = keras.tree.map_structure(
                lambda leaf: keras.ops.convert_to_tensor(leaf, dtype=loss.dtype), (y_true, y_pred)
            )
            some = keras.tree.map_structure(lambda leaf: leaf[1::2], given)
            numbers = [loss.call(*given)[1::2], loss.call(*some), loss.call(*given)[1::2]]
            numbers = [tf.cast(one, tf.float32) if one.dtype.size < 4 else one for one in numbers]
            if tf.executing_eagerly():
                left = compare(self._left.numpy(), *[one.numpy() for one in numbers])
            else:
                left = host_call(compare, [self._left.read_value(), *numbers], [tf.int32])[0]
            self._left.assign(tf.reshape(left, ()))
            return tf.constant(0)

        with contextlib.suppress(ValueError, TypeError, tf.errors.OpError):  # of rows that cannot be taken apart
            if not _is_pure(loss, y_true, y_pred):
                return
            tf.cond(self._left > 0, look, lambda: tf.constant(0))


def _is_pure(loss: Any, y_true: Any, y_pred: Any) -> bool:
    """Local: whether a loss may be computed once more: it counts nothing, prints nothing and draws no random number."""
    specs = keras.tree.map_structure(
        lambda leaf: tf.TensorSpec.from_tensor(keras.ops.convert_to_tensor(leaf, dtype=loss.dtype)), (y_true, y_pred)
    )
    graph = tf.function(loss.call, autograph=False).get_concrete_function(*specs).graph
    return all(one.type == "ReadVariableOp" or not one.op_def.is_stateful for one in graph.get_operations())


def _found(loss: Any) -> str:
    return (
        f"the loss {loss.name} gives a number for each row that depends on the other rows, and rows meet only those of "
        "their rank: it is not that of the whole batch. Let it return one number, as their mean, and give "
        '--batch-size-is global or --loss-is whole (loss_is="whole")'
    )
