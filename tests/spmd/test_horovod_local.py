"""Variables that are each rank's own, registered when everything else is made already."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpitrain.horovod.keras as hvd_keras
import mpitrain.horovod.tensorflow as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
MEAN = float(np.mean(np.arange(SIZE) + 1.0))
both_ways = pytest.mark.parametrize("way", [lambda f: f, functools.partial(tf.function, autograph=False)])
several = pytest.mark.skipif(SIZE == 1, reason="there is nobody to differ from")


@both_ways
def test_sources_of_a_tape(way: Any) -> None:
    shared, own = tf.Variable([1.0, 1.0]), tf.Variable([10.0 * (RANK + 1)] * 2)

    def gradients() -> Any:
        with tf.GradientTape() as recorder:
            loss = tf.reduce_sum(shared * (RANK + 1.0)) + tf.reduce_sum(own * (RANK + 1.0))
        tape = hvd.DistributedGradientTape(recorder)
        tape.register_local_source(own)
        return tape.gradient(loss, [shared, own])

    found = way(gradients)()
    np.testing.assert_array_equal(own.numpy(), [10.0 * (RANK + 1)] * 2)
    np.testing.assert_allclose(found[0], [MEAN] * 2)
    np.testing.assert_allclose(found[1], [(RANK + 1) / SIZE] * 2)


@both_ways
@pytest.mark.parametrize("scaled", [False, True])
def test_variables_of_an_optimizer_with_their_momentum(way: Any, scaled: bool) -> None:
    shared, own = keras.Variable([1.0]), keras.Variable([10.0 * (RANK + 1)])
    inner = keras.optimizers.SGD(1.0, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(inner, 1.0) if scaled else inner)
    optimizer.build([shared, own])
    for slot in inner.momentums:
        slot.assign([RANK + 1.0])
    optimizer.register_local_var(own)
    way(lambda: optimizer.apply([tf.constant([RANK + 1.0])] * 2, [shared, own]))()
    # Rank 0's momentum of what is shared; what other ranks found at a momentum of their own counts all the same,
    # but where a step runs eagerly, not at the first.
    eager = not hasattr(way, "func")
    np.testing.assert_allclose(shared.numpy(), [1.0 + 0.5 - (1.0 if eager else MEAN)], rtol=1e-6)
    np.testing.assert_allclose(own.numpy(), [10.0 * (RANK + 1) + 0.5 * (RANK + 1) - (RANK + 1) / SIZE], rtol=1e-6)


def test_layers_that_are_built_later() -> None:
    layers = [keras.layers.Dense(1, use_bias=False, kernel_initializer="ones") for _ in range(2)]
    optimizer = hvd_keras.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=layers[0])
    net = keras.Sequential(layers)
    net(np.ones((1, 1), np.float32))
    optimizer.apply([tf.constant([[RANK + 1.0]])] * 2, net.trainable_variables)
    np.testing.assert_allclose(layers[0].kernel.numpy(), [[1.0 - (RANK + 1) / SIZE]])
    np.testing.assert_allclose(layers[1].kernel.numpy(), [[1.0 - MEAN]])


def test_nothing_is_shared() -> None:
    own = keras.Variable(float(RANK))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), scale_local_gradients=False)
    optimizer.register_local_var(own)
    optimizer.apply([tf.constant(RANK + 1.0)], [own])
    assert float(own.numpy()) == -1.0


def test_an_optimizer_that_is_wrapped_twice_has_the_latest_options() -> None:
    shared, own = keras.Variable(0.0), keras.Variable(0.0)
    optimizer = hvd.DistributedOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), op=hvd.Sum)
    optimizer.register_local_var(own)
    optimizer.apply([tf.constant(RANK + 1.0)] * 2, [shared, own])
    assert float(shared.numpy()) == -MEAN * SIZE
    assert float(own.numpy()) == pytest.approx(-(RANK + 1.0) / SIZE)


@pytest.mark.parametrize("given", [False, True])
def test_broadcast_callback(given: bool) -> None:
    layers = [keras.layers.Dense(1, use_bias=False) for _ in range(2)]
    net = keras.Sequential([keras.Input((1,)), *layers])
    inner = keras.optimizers.SGD(0.0, momentum=0.5)
    net.compile(hvd.DistributedOptimizer(inner), "mse", jit_compile=False)
    inner.build(net.trainable_variables)
    for layer, slot in zip(layers, inner.momentums, strict=True):
        layer.kernel.assign([[RANK + 1.0]])
        slot.assign([[RANK + 1.0]])
    own = layers[0].kernel
    callback = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=own if given else None)
    if not given:
        callback.register_local_var(own)
    net.optimizer.register_local_var(own)
    zeros = np.zeros((1, 1))
    net.fit(zeros, zeros, verbose=0, callbacks=[callback])
    start = [RANK + 1.0, 1.0]  # and then half of that momentum
    np.testing.assert_allclose([layer.kernel.numpy()[0, 0] for layer in layers], [1.5 * value for value in start])
    np.testing.assert_allclose([slot.numpy()[0, 0] for slot in inner.momentums], [0.5 * value for value in start])


@several
def test_what_comes_after_the_first_traced_step_is_told() -> None:
    variable = keras.Variable(0.0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    tf.function(lambda: optimizer.apply([tf.constant(1.0)], [variable]))()
    with pytest.warns(UserWarning, match="before the first step"):
        optimizer.register_local_var(variable)


@pytest.mark.skipif(SIZE & (SIZE - 1) != 0, reason="Adasum is for powers of two")
def test_moves_that_adasum_combines() -> None:
    shared, own = tf.Variable(1.0), tf.Variable(float(RANK))
    optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0), op=hvd.Adasum)
    optimizer.register_local_var(own)
    optimizer.apply_gradients([(tf.constant(2.0), shared), (tf.constant(RANK + 1.0), own)])
    assert (float(shared), float(own)) == (-1.0, -1.0)
