"""One order for all host calls of a graph, however deep in branches and nested functions they stand.

TensorFlow keeps stateful operations in program order where they stand side by side. A branch or a nested function that
uses variables is ordered by those variables alone, so two of them that share none may run at once: ranks could then
enter their collectives in different orders. Every host call therefore reads one common variable before, and writes it
after. It is made of its operations: a `tf.function` lets no `tf.Variable` be made in any trace but its first.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mpitrain.collectives.conversion import refuse_compiled
from mpitrain.comm.communicator import Communicator
from mpitrain.errors import CollectiveError

_numbers = itertools.count()


@functools.cache
def _turn(communicator: Any) -> tf.Tensor:
    """Local: the handle of the variable that orders the host calls on one communicator."""
    with tf.init_scope(), tf.device("CPU:0"):
        # TensorFlow finds the memory by this name: a turn for each communicator, and none that an earlier one has left.
        name = f"mpitrain_turn_{next(_numbers)}"
        turn = tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[], shared_name=name)
        tf.raw_ops.AssignVariableOp(resource=turn, value=tf.constant(0))
    return turn


def in_turn(communicator: Communicator, calls: Callable[[], Sequence[tf.Tensor]]) -> list[tf.Tensor]:
    """Local: trace `calls` after all that were traced in turn before, and before all that come later.

    Args:
        communicator: on which the host calls communicate.
        calls: makes the graph's host calls, and returns tensors of which the last depends on all of them.
    """
    turn = _turn(communicator)  # type: ignore[arg-type]
    with tf.control_dependencies([tf.raw_ops.ReadVariableOp(resource=turn, dtype=tf.int32)]):
        outputs = list(calls())
    with tf.control_dependencies(outputs[-1:]):
        tf.raw_ops.AssignAddVariableOp(resource=turn, value=tf.constant(1))
    return outputs


def with_turn(communicator: Communicator, call: Callable[[tf.Tensor], tf.Tensor]) -> None:
    """Local: `in_turn` for what XLA compiles, which knows no order but that of data.

    Args:
        communicator: on which the call communicates.
        call: gets a scalar int32, and returns one that depends on the call.
    """
    turn = _turn(communicator)  # type: ignore[arg-type]
    following = call(tf.raw_ops.ReadVariableOp(resource=turn, dtype=tf.int32))
    tf.raw_ops.AssignVariableOp(resource=turn, value=following)


def host_call(function: Callable[..., Any], inputs: Sequence[tf.Tensor], dtypes: Sequence[Any]) -> list[Any]:
    """Local: one stateful host call of the graph being traced, on the CPU.

    Raises:
        AgreedError: XLA is to compile it.
    """
    refuse_compiled()
    with tf.device("CPU:0"):
        outputs = tf.numpy_function(function, list(inputs), list(dtypes))  # which never converts the function
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def checked_call(function: Callable[..., Any], inputs: Sequence[tf.Tensor], dtypes: Sequence[Any]) -> list[tf.Tensor]:
    """Local: a host call whose CollectiveError becomes `tf.errors.FailedPreconditionError` when the graph runs.

    TensorFlow makes an exception of a host call an UnknownError, and has no operation that fails as asked. Reading a
    file "in" a device fails so, and tells the path: here the message. The device itself is an empty file.
    """

    def call(*arrays: Any) -> list[Any]:
        try:
            return [*function(*arrays), np.array(b"", object)]
        except CollectiveError as error:
            nothing = [np.zeros((), tf.as_dtype(dtype).as_numpy_dtype) for dtype in dtypes]
            text = f"/{type(error).__name__}: {error}".encode(errors="backslashreplace")
            return [*nothing, np.array(text[:4000], object)]

    *outputs, message = host_call(call, inputs, [*dtypes, tf.string])
    message.set_shape([])
    with tf.device("CPU:0"):
        contents = tf.io.read_file("/dev/null" + message)
        # The optimizer of graphs takes out what only reads, so something that has an effect must depend on it.
        check = tf.raw_ops.Assert(condition=tf.equal(tf.strings.length(contents), 0), data=[contents])
        with tf.control_dependencies([check]):
            return [tf.identity(output) for output in outputs]
