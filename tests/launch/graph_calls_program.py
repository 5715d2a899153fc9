"""The public calls inside a `tf.function`, of which AutoGraph says nothing."""

from __future__ import annotations

from typing import Any

import mpitrain

WORLD = mpitrain.init()

import keras  # noqa: E402 (after init)
import tensorflow as tf  # noqa: E402

import mpitrain.horovod.tensorflow as hvd  # noqa: E402

hvd.init()
VARIABLE = tf.Variable(tf.ones((4, 2)))
OPTIMIZERS = [module.DistributedOptimizer(keras.optimizers.SGD(0.1)) for module in (mpitrain, hvd)]
for optimizer in OPTIMIZERS:
    optimizer.build([VARIABLE])


@tf.function
def calls(x: Any) -> list[Any]:
    rows = tf.concat([x] * WORLD.size, 0)
    results = [mpitrain.all_reduce(x), mpitrain.all_gather(x), mpitrain.broadcast(x), mpitrain.reduce_scatter(x)]
    results += [mpitrain.all_to_all(rows), hvd.allreduce(x), hvd.allgather(x), hvd.broadcast(x, 0), hvd.alltoall(rows)]
    results += [hvd.grouped_allreduce([x, x]), hvd.size_op(), hvd.rank_op(), hvd.size(), WORLD.rank]
    mpitrain.all_gather_obj("while this is traced")
    mpitrain.barrier()
    with tf.init_scope():
        mpitrain.verify_replicas([VARIABLE])
    for module, optimizer in zip((mpitrain, hvd), OPTIMIZERS, strict=True):
        with module.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(VARIABLE * x)
        gradients = tape.gradient(loss, [VARIABLE])
        with mpitrain.sample_count(tf.shape(x)[0]):
            optimizer.apply(gradients, [VARIABLE])
            optimizer.apply_gradients([(gradients[0], VARIABLE)])
    hvd.broadcast_variables([VARIABLE], 0)
    return results


calls(tf.ones((4, 2)))
print(f"rank {WORLD.rank}: {VARIABLE.numpy()[0, 0]:.1f}")
