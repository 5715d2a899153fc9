"""Variables and operations on devices of one's own choice, of two that the CPU is divided into."""

from __future__ import annotations

import pytest

from tests.unit.fresh import printed

CODE = """
import keras
import tensorflow as tf
from mpitrain.placement import variables_on

[cpu] = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
calls = []

def start():
    calls.append(1)
    return tf.zeros([10], tf.float64)

def places(by):
    with variables_on(["/CPU:0", "/CPU:1"], by=by):
        layer = keras.layers.Dense(4)
        made = [tf.Variable(start), tf.Variable([1.0, 2.0]), tf.Variable(tf.zeros([3]), shape=[None], dtype=tf.float32)]
        layer.build((None, 25))
    return "".join(variable.device[-1] for variable in [*made, *(weight.value for weight in layer.weights)])

print(places("round_robin"), places("bytes"), len(calls))
"""


# What runs as another kind, or as a part of another, where oneDNN is on or grappler fuses.
LOG = """
import tensorflow as tf
from mpitrain.placement import log

[cpu] = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)

@tf.function
def layer(x, w):
    with tf.device("/CPU:1"):
        product = tf.nn.bias_add(tf.matmul(x, w, name="product"), w[0], name="bias") + w[1]
    return tf.nn.conv2d(tf.reshape(product, [1, 8, 8, 1]), tf.ones([3, 3, 1, 2]), 1, "SAME", name="picture")

with log() as table:
    layer(tf.ones([8, 8]), tf.ones([8, 8]))
    with tf.device("/CPU:1"):
        tf.matmul(tf.ones([2, 2]), tf.ones([2, 2]))
with tf.compat.v1.Session(graph=tf.Graph()) as session, session.graph.as_default():
    fed = tf.compat.v1.placeholder(tf.float32, [4, 4])
    run = tf.matmul(fed, fed, name="run")
    with log() as sessions:
        session.run(run, {fed: [[1.0] * 4] * 4})
rows = [(row.operation, row.kind, row.actual[-1]) for row in [*table, *sessions]]
print(sorted(row for row in rows if row[1] in ("MatMul", "Conv2D", "BiasAdd") or "Mkl" in row[1] or "Arg" in row[1]))
"""


def test_variables_are_spread() -> None:
    """By bytes: 80 to the first; 8, 12 and then 400 to the second, which held less; 16 to the first."""
    assert printed(CODE) == "01010 01110 2\n"


@pytest.mark.parametrize("one_dnn", ["0", "1"])
def test_the_log_has_each_operation_by_its_kind(one_dnn: str) -> None:
    named = [("bias", "BiasAdd", "1"), ("picture", "Conv2D", "0"), ("product", "MatMul", "1"), ("run", "MatMul", "0")]
    assert printed(LOG, {"TF_ENABLE_ONEDNN_OPTS": one_dnn}) == f"{[('MatMul', 'MatMul', '1'), *named]}\n"
