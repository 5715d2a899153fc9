"""What ran where, as TensorFlow tells; tests of operations that are fused or renamed are beside `test_setters`."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.eager import context

from mpitrain.placement import Row, log


def test_eager_operations_and_functions_are_seen_once_and_only_within() -> None:
    @tf.function
    def function(x: tf.Tensor) -> tf.Tensor:
        with tf.device("/CPU:0"):
            return tf.math.cos(x, name="inside")

    tf.math.exp(tf.constant(1.0))
    with log() as table:
        with tf.device("/CPU:0"):
            for _ in range(2):
                tf.math.sin(tf.constant(1.0))
        function(tf.constant(1.0))
    tf.math.tan(tf.constant(1.0))
    kinds = [row.kind for row in table]
    assert kinds.count("Sin") == kinds.count("Cos") == 1
    assert not {"Exp", "Tan"} & set(kinds)
    assert table.actual("inside") == table.actual("Sin") == ["/CPU:0"]
    (sine,) = [row for row in table if row.kind == "Sin"]
    assert sine == Row("Sin", "Sin", sine.requested, sine.actual)
    assert "CPU:0" in sine.requested


def test_runs_of_sessions_are_seen_and_sessions_are_as_before() -> None:
    v1 = tf.compat.v1
    base = next(one for one in v1.Session.__mro__ if "run" in vars(one))
    before = base.run
    with v1.Session(graph=tf.Graph()) as session, session.graph.as_default():
        fed = v1.placeholder(tf.float32, [], name="fed")
        metadata = v1.RunMetadata()
        with log() as table:
            assert session.run(tf.math.cos(fed, name="run"), {fed: 0.0}, run_metadata=metadata) == 1.0
        assert base.run is before
        assert table.actual("run") == ["/CPU:0"]
        assert len(metadata.partition_graphs) > 0  # that of the script is filled as well


def test_an_error_within_leaves_nothing_behind() -> None:
    base = next(one for one in tf.compat.v1.Session.__mro__ if "run" in vars(one))
    before, callbacks = base.run, list(context.context().op_callbacks)
    try:
        with log():
            raise KeyError
    except KeyError:
        pass
    assert base.run is before
    assert list(context.context().op_callbacks) == callbacks
